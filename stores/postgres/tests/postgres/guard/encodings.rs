//! A database with another encoding than UTF-8 is refused; the error says how to fix it.

use postbox_core::{ErrorKind, Log as _, LogName, Migrate as _, Subscription};
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_testkit::servers::{Postgres, Version};

use crate::support;

#[tokio::test]
async fn another_encoding_is_refused_by_name() {
    let server = Postgres::shared(Version::V15).await;
    let admin = support::client(&server.url()).await;
    for encoding in ["LATIN1", "WIN1252", "SQL_ASCII"] {
        let name = format!("encoding_{}_{}", encoding.to_lowercase(), std::process::id());
        let make = format!("CREATE DATABASE {name} ENCODING {encoding} LOCALE 'C' TEMPLATE template0");
        admin.batch_execute(&make).await.expect("a database");
        let url = server.url_of(&name);
        let store = PostgresStore::connect(PostgresConfig::new(&url)).await.expect("connected");
        let error = store.up().await.expect_err("refused");
        assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "encoding_unsupported"), "{error}");
        assert!(error.message().contains(encoding) && error.message().contains("createdb -E UTF8 -T template0"));
        assert_eq!(store.validate().await.expect_err("nothing was made").code(), "schema_missing");
        // The printed script refuses too. The store also refuses to use a schema that already
        // exists there.
        let client = support::client(&url).await;
        let script = store.script();
        let refused = client.batch_execute(&script).await.expect_err("refused");
        assert!(refused.as_db_error().is_some_and(|said| said.message().contains("UTF8")), "{refused:?}");
        client.batch_execute("ROLLBACK").await.expect("back");
        let unguarded = script.replace("getdatabaseencoding() <> 'UTF8'", "false");
        client.batch_execute(&unguarded).await.expect("the script is plain ASCII");
        assert_eq!(store.validate().await.expect_err("refused").code(), "encoding_unsupported");
        let subscription =
            Subscription { lanes: Some(1), ..Subscription::new("a".parse().expect("a name"), LogName::outbox()) };
        assert_eq!(store.subscribe(&subscription).await.expect_err("refused").code(), "encoding_unsupported");
        store.down(false).await.expect("it can be removed");
        drop((client, store));
        admin.batch_execute(&format!("DROP DATABASE {name} WITH (FORCE)")).await.expect("dropped");
    }
}
