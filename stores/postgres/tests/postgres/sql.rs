//! What writers in other languages rely on: plain INSERT, `enqueue`, and refusals with stable
//! names.

use postbox_core::limits::{HEADER_BYTES_MAX, HEADERS_MAX, KEY_BYTES_MAX, NAME_BYTES_MAX, TOPIC_BYTES_MAX};
use postbox_core::{
    Append as _, BatchLimit, Delivery, Inspect as _, Lease, Log as _, LogName, Maintain as _, Migrate as _, NewEvent,
    Subscription, SubscriptionName,
};
use postbox_postgres::{PostgresConfig, PostgresStore, Roles, ToolScripts};
use postbox_testkit::servers::{Postgres, Version};

use crate::support;

async fn read(store: &PostgresStore, lease: &Lease) -> Vec<Delivery> {
    store.next_batch(lease, BatchLimit::default()).await.expect("read").deliveries
}

/// JSON with backslashes, typed into psql, arrives as it was typed.
#[tokio::test]
async fn a_plain_insert_keeps_json_byte_for_byte() {
    let fixture = support::on(Version::V15).await;
    let client = fixture.client().await;
    let literals = [r#"{"id":1}"#, r#"{"path":"C:\\dir","line":"a\nb","u":"\u00e9\\u0000"}"#, r"\\server\share", "é漢"];
    for literal in literals {
        let quoted = literal.replace('\'', "''");
        let sql = format!("INSERT INTO postbox.outbox (topic, key, payload) VALUES ('order.paid', '42', '{quoted}')");
        client.batch_execute(&sql).await.expect(literal);
    }
    let reader = support::leased(&fixture.store, "reader").await;
    let read_back = read(&fixture.store, &reader).await;
    let payloads: Vec<&[u8]> = read_back.iter().map(|delivery| delivery.event.payload.as_ref()).collect();
    assert_eq!(payloads, literals.map(str::as_bytes));
    // Bytes in the text column by mistake are refused by name. In their own column they arrive
    // unchanged.
    let error = client
        .batch_execute(r"INSERT INTO postbox.outbox (topic, payload) VALUES ('t', '\x00ff'::bytea)")
        .await
        .expect_err("refused");
    assert_eq!(error.as_db_error().and_then(|error| error.constraint()), Some("payload_is_bytes"));
    client
        .batch_execute(r"INSERT INTO postbox.outbox (topic, payload_bytes) VALUES ('t', '\x00ff')")
        .await
        .expect("bytes in their column");
    let lease = support::leased(&fixture.store, "bytes").await;
    assert_eq!(read(&fixture.store, &lease).await.last().map(|last| last.event.payload.to_vec()), Some(vec![0, 0xff]));
}

#[tokio::test]
async fn enqueue_takes_text_jsonb_bytes_and_untyped_literals_as_text() {
    for version in Version::ALL {
        let fixture = support::on(version).await;
        let client = fixture.client().await;
        for (call, payload, content_type) in [
            (r#"payload => '{"id":1}'"#, &br#"{"id":1}"#[..], "application/json"),
            (r#"payload => '{"a":"\\"}'"#, br#"{"a":"\\"}"#, "application/json"),
            (r"payload => '\x41', content_type => 'text/plain'", br"\x41", "text/plain"),
            (r#"payload => '{"b":1,"a":2}'::jsonb"#, br#"{"a": 2, "b": 1}"#, "application/json"),
            (r"payload => '\x00ff'::bytea", &[0, 0xff], "application/octet-stream"),
            (r"payload => '\x00ff'::bytea, content_type => NULL", &[0, 0xff], "application/octet-stream"),
            (r"payload => '\x7b7d'::bytea, content_type => 'application/json'", b"{}", "application/json"),
        ] {
            let sql = format!(
                "SELECT postbox.enqueue(topic => 'order.paid', {call}, key => '42', headers => '{{\"h\":\"v\"}}')::text"
            );
            let row = client.query_one(&sql, &[]).await.expect(call);
            let id = row.get::<_, String>(0).parse().expect("an id");
            let name = SubscriptionName::new("any").expect("a name");
            fixture
                .store
                .subscribe(&Subscription { lanes: Some(1), ..Subscription::new(name.clone(), LogName::outbox()) })
                .await
                .expect("subscribed");
            let record = fixture.store.get(&name, id).await.expect("read").expect("there");
            assert_eq!(record.event.payload.as_ref(), payload, "{call}");
            assert_eq!(record.event.content_type(), content_type, "{call}");
            assert_eq!(record.event.header("h"), Some("v"));
            assert_eq!(record.event.id.as_uuid().get_version_num(), 7);
        }
        let sql = "SELECT postbox.enqueue('t', '{}', log => 'inbox'), postbox.enqueue('t', '{}'::jsonb, log => 'inbox'), \
                   postbox.enqueue('t', ''::bytea, log => 'inbox')";
        client.batch_execute(sql).await.expect("another log");
        let error =
            client.batch_execute("SELECT postbox.enqueue('t', '{}', log => 'x\"; drop')").await.expect_err("unknown");
        assert_eq!(error.code().map(|state| state.code()), Some("42P01"));
    }
}

/// The CHECK constraints and `NewEvent::validate` refuse the same values, with the same codes.
#[tokio::test]
async fn sql_and_rust_refuse_with_the_same_word() {
    let fixture = support::on(Version::V15).await;
    let client = fixture.client().await;
    let event = || NewEvent::json("t", "{}");
    let noted = |bytes: usize| event().header(postbox_core::header::MESSAGE_ID, "i".repeat(bytes));
    let cases = [
        NewEvent::json("", "{}"),
        NewEvent::json("x".repeat(TOPIC_BYTES_MAX + 1), "{}"),
        NewEvent::json("a b", "{}"),
        NewEvent::json("a\u{2003}b", "{}"),
        NewEvent::json("a\u{85}b", "{}"),
        NewEvent::json("a\u{1}b", "{}"),
        event().key(""),
        event().key("k".repeat(KEY_BYTES_MAX + 1)),
        event().tenant(""),
        event().tenant("t".repeat(NAME_BYTES_MAX + 1)),
        event().tenant("a\nb"),
        event().kind(""),
        event().kind("k".repeat(NAME_BYTES_MAX + 1)),
        event().aggregate("a\u{9f}"),
        event().source("\t"),
        NewEvent::new("t", "{}", "text/plain\r\n"),
        event().header("a\r\nb", "x"),
        event().header("", "x"),
        event().header("é", "x"),
        event().header("a", "x\r\nb: y"),
        event().header("a", "x\u{80}"),
        event().header("a", "x".repeat(HEADER_BYTES_MAX)),
        (0..=HEADERS_MAX).fold(event(), |event, n| event.header(format!("h{n}"), "")),
        (0..HEADERS_MAX).fold(noted(255), |event, n| event.header(format!("h{n:02}"), "v".repeat(253))),
        (0..HEADERS_MAX).fold(noted(256), |event, n| event.header(format!("h{n:02}"), "")),
        noted(255).header("a", "x".repeat(HEADER_BYTES_MAX)),
        event().header("Ok-Name_1~", "tab\tand é are fine"),
        event().key("any thing\n goes"),
        NewEvent::json("ä.ö", "{}"),
    ];
    let sql = "INSERT INTO postbox.outbox (topic, key, aggregate, kind, source, tenant, payload, content_type, headers) \
               VALUES ($1, $2, $3, $4, $5, $6, '{}', $7, $8::text::jsonb)";
    for event in cases {
        let headers = (!event.headers.is_empty()).then(|| serde_json::to_string(&event.headers).expect("JSON"));
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 8] = [
            &event.topic,
            &event.key,
            &event.aggregate,
            &event.kind,
            &event.source,
            &event.tenant,
            &event.content_type,
            &headers,
        ];
        let refused = client.execute(sql, &params).await.err();
        let by_sql = refused.as_ref().map(|error| {
            let constraint = error.as_db_error().and_then(|error| error.constraint());
            constraint.unwrap_or_else(|| panic!("{error:?}")).to_owned()
        });
        let by_rust = event.validate().err().map(|error| error.code().to_owned());
        assert_eq!(by_sql, by_rust, "{event:?}");
    }
    for (sql, code) in [
        ("INSERT INTO postbox.outbox (topic, payload) VALUES ('t', repeat('x', 16777217))", "payload_too_large"),
        ("INSERT INTO postbox.outbox (topic) VALUES ('t')", "payload_missing"),
        ("INSERT INTO postbox.outbox (topic, payload, headers) VALUES ('t', '', '[]')", "headers_invalid"),
        ("INSERT INTO postbox.outbox (topic, payload, headers) VALUES ('t', '', '{\"a\":1}')", "headers_invalid"),
        ("INSERT INTO postbox.outbox (topic, payload, deliver_at) VALUES ('t', '', 'infinity')", "deliver_at_invalid"),
        ("INSERT INTO postbox.outbox (topic, payload, expires_at) VALUES ('t', '', 'infinity')", "expires_at_invalid"),
        ("SELECT postbox.create_log('lane')", "log_name_invalid"),
        ("SELECT postbox.create_log('Bad name')", "log_name_invalid"),
    ] {
        let error = client.batch_execute(sql).await.expect_err(sql);
        assert_eq!(error.as_db_error().and_then(|error| error.constraint()), Some(code), "{sql}");
    }
}

/// A conflict that was seen once has equal first and last times. Two separate calls of the server's
/// clock would differ in about one row of a hundred.
#[tokio::test]
async fn a_conflict_that_came_once_has_one_time() {
    let fixture = support::on(Version::V15).await;
    let client = fixture.client().await;
    let fill = "INSERT INTO postbox.conflict (source, tenant, message_id, digest_stored, digest_refused)
                SELECT 'hooks', '', 'm' || n, 'a', 'b' FROM generate_series(1, 20000) AS n";
    client.batch_execute(fill).await.expect("filled");
    let apart = "SELECT count(*) FROM postbox.conflict WHERE first_at <> last_at";
    assert_eq!(client.query_one(apart, &[]).await.expect("counted").get::<_, i64>(0), 0);
}

/// Hostile schema names: everything works, and nothing outside of the schema is touched.
#[tokio::test]
async fn hostile_schema_names_are_only_names() {
    let server = Postgres::shared(Version::V15).await;
    let url = server.fresh_database().await;
    let client = support::client(&url).await;
    client.batch_execute("CREATE TABLE public.canary (n int)").await.expect("a canary");
    let names = [
        "we\"ird",
        "'; DROP TABLE public.canary; --",
        "a%sb%I",
        "$postbox0$ $postbox1$",
        "{s}{log}{tag}<schema><log>",
        "back\\slash",
        "new\nline",
        "select",
        "MixedCase",
        "é漢",
        "x23456789012345678901234567890123456789012345678901234567890123",
    ];
    for name in names {
        let store = PostgresStore::connect(PostgresConfig { schema: name.into(), ..PostgresConfig::new(&url) })
            .await
            .expect(name);
        store.up().await.expect(name);
        assert!(store.up().await.expect("a second time").is_empty());
        store.append(&LogName::outbox(), &[NewEvent::json("t", "{}").key("k").header("a", "b")]).await.expect(name);
        let quoted = store.schema().quoted().to_owned();
        client
            .batch_execute(&format!(
                "SELECT {quoted}.enqueue('t', '{{}}'), {quoted}.enqueue('t', '{{}}', log => 'inbox')"
            ))
            .await
            .expect(name);
        let lease = support::leased(&store, "reader").await;
        assert_eq!(read(&store, &lease).await.len(), 2, "{name}");
        store.rebase().await.expect_err("the lane is held");
        store.release(&lease).await.expect("released");
        store.rebase().await.expect(name);
        store.down(true).await.expect(name);
        assert_eq!(store.validate().await.expect_err("gone").code(), "schema_missing");
    }
    client.batch_execute("SELECT FROM public.canary").await.expect("the canary lives");
    let too_long = PostgresConfig { schema: "x".repeat(64), ..PostgresConfig::new(&url) };
    assert!(PostgresStore::connect(too_long).await.is_err());
}

/// `down` in a schema that belongs to somebody else removes only the objects of Postbox.
#[tokio::test]
async fn down_leaves_the_owners_tables_alone() {
    let server = Postgres::shared(Version::V15).await;
    let url = server.fresh_database().await;
    let client = support::client(&url).await;
    client.batch_execute("CREATE TABLE public.mine (n int)").await.expect("a table");
    client.batch_execute("CREATE FUNCTION public.enqueue(int) RETURNS int RETURN 1").await.expect("a function");
    let store = support::migrated(PostgresConfig { schema: "public".into(), ..PostgresConfig::new(&url) }).await;
    store.down(true).await.expect("down");
    client.batch_execute("SELECT public.enqueue(n) FROM public.mine").await.expect("still there");
    store.up().await.expect("up again");
}

/// A table `migration` of another program is not taken for ours, and nothing is made beside it.
#[tokio::test]
async fn the_migrations_of_another_program_are_refused() {
    let server = Postgres::shared(Version::V15).await;
    let url = server.fresh_database().await;
    let client = support::client(&url).await;
    let store = PostgresStore::connect(PostgresConfig { schema: "public".into(), ..PostgresConfig::new(&url) });
    let store = store.await.expect("a store");
    for (table, validated) in [
        ("(id int)", "schema_foreign"),
        ("(version int, name text)", "schema_foreign"),
        ("AS SELECT text '1' AS version, 'users' AS name, now() AS applied_at", "schema_foreign"),
        ("AS SELECT 1 AS version, 'users' AS name, now() AS applied_at", "schema_foreign"),
        // Without a row, only what becomes of ours tells it apart.
        ("(version text, name text, applied_at timestamptz)", "schema_missing"),
    ] {
        client.batch_execute(&format!("CREATE TABLE public.migration {table}")).await.expect(table);
        assert_eq!(store.validate().await.expect_err(table).code(), validated, "{table}");
        let error = store.up().await.expect_err(table);
        assert_eq!(error.code(), "schema_foreign", "{table}: {error}");
        assert!(error.message().contains(r#""public".migration"#), "{error}");
        client.batch_execute("DROP TABLE public.migration").await.expect("dropped");
    }
    let made = "SELECT count(*) FROM pg_class WHERE relnamespace = to_regnamespace('public')";
    assert_eq!(client.query_one(made, &[]).await.expect("asked").get::<_, i64>(0), 0);
}

/// The printed script does the same as `up`.
#[tokio::test]
async fn the_script_is_the_migration() {
    let server = Postgres::shared(Version::V18).await;
    let url = server.fresh_database().await;
    let store = PostgresStore::connect(PostgresConfig::new(&url)).await.expect("a store");
    support::client(&url).await.batch_execute(&store.script()).await.expect("the script runs");
    store.validate().await.expect("valid");
    assert!(store.up().await.expect("nothing to do").is_empty());
}

/// The scripts run in a migration tool's transaction, whatever the name of the schema.
#[tokio::test]
async fn the_scripts_for_tools_are_the_migration_and_the_way_back() {
    let server = Postgres::shared(Version::V18).await;
    let url = server.fresh_database().await;
    let client = support::client(&url).await;
    for schema in ["postbox", "it's {s} \\ \"$postbox0$\"\n;"] {
        let store = PostgresStore::connect(PostgresConfig { schema: schema.into(), ..PostgresConfig::new(&url) });
        let store = store.await.expect("a store");
        let ToolScripts { up, down } = store.tool_scripts();
        client.batch_execute(&format!("BEGIN;{up}COMMIT")).await.expect("it is made");
        store.validate().await.expect("valid");
        assert!(store.up().await.expect("nothing to do").is_empty());
        client.batch_execute(&format!("BEGIN;{down}COMMIT")).await.expect("it is removed");
        assert_eq!(store.validate().await.expect_err("nothing is there").code(), "schema_missing");
        let left = client.query_one("SELECT count(*) FROM pg_namespace WHERE nspname = $1", &[&schema]).await;
        assert_eq!(left.expect("counted").get::<_, i64>(0), 0);
    }
}

/// Functions hold the name of their schema, so each would fail. The cure is named, under either
/// name: with the old one, nothing is made beside it. Other schemas in the database are not
/// concerned.
#[tokio::test]
async fn a_schema_that_was_renamed_is_named_with_its_cure() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let client = support::client(&url).await;
    for (old, new) in [("postbox", "events"), ("a\".lane AS l \"b", "b")] {
        let config = |name: &str| PostgresConfig { schema: name.to_owned(), ..PostgresConfig::new(&url) };
        let made = support::migrated(config(old)).await;
        let quoted = format!("\"{}\"", old.replace('"', "\"\""));
        client.batch_execute(&format!("ALTER SCHEMA {quoted} RENAME TO {new}")).await.expect("renamed");
        let store = PostgresStore::connect(config(new)).await.expect("a store");
        for store in [&store, &made] {
            for checked in [store.validate().await.map(drop), store.check_integrity().await, store.up().await.map(drop)]
            {
                let error = checked.expect_err("renamed");
                assert_eq!(error.code(), "schema_renamed", "{error}");
                let cure = format!("run: ALTER SCHEMA \"{new}\" RENAME TO {quoted};");
                assert!(error.message().contains(&cure), "{error}");
            }
        }
        support::migrated(config(&format!("beside {new}"))).await.validate().await.expect("another one");
        client.batch_execute(&format!("ALTER SCHEMA {new} RENAME TO {quoted}")).await.expect("renamed back");
        made.validate().await.expect("it has its name again");
    }
}

/// Everybody may make functions for a session, and some roles may make schemas.
#[tokio::test]
async fn the_function_of_a_stranger_is_not_a_schema_that_was_renamed() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let (stranger, owner) = (format!("stranger_{}", std::process::id()), support::client(&url).await);
    let made = format!("CREATE ROLE {stranger} LOGIN; CREATE SCHEMA trap AUTHORIZATION {stranger}");
    owner.batch_execute(&made).await.expect("a role");
    let client = support::client(&support::url_as(&url, &stranger)).await;
    client.batch_execute("SET check_function_bodies = off").await.expect("set");
    for schema in ["pg_temp", "trap"] {
        let trap = format!(
            "CREATE TABLE {schema}.migration (version int); CREATE FUNCTION {schema}.settle_lane() RETURNS void \
             LANGUAGE sql AS 'UPDATE \"postbox\".lane AS l SET lane = 0'"
        );
        client.batch_execute(&trap).await.expect(schema);
    }
    let store = PostgresStore::connect(PostgresConfig::new(&url)).await.expect("a store");
    assert_eq!(store.validate().await.expect_err("nothing was made").code(), "schema_missing");
    store.up().await.expect("made");
    client.batch_execute("DISCARD TEMP").await.expect("discarded");
    owner.batch_execute(&format!("DROP OWNED BY {stranger}; DROP ROLE {stranger}")).await.expect("cleaned up");
}

/// Whoever may make objects in the schema could plant functions that run with the rights of others.
#[tokio::test]
async fn no_schema_is_made_where_others_may_create() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let (stranger, owner) = (format!("maker_{}", std::process::id()), support::client(&url).await);
    let store = PostgresStore::connect(PostgresConfig::new(&url)).await.expect("a store");
    let refused = async |sql: String| {
        owner.batch_execute(&sql).await.expect("made");
        let error = store.up().await.expect_err("open to others");
        assert_eq!(error.code(), "schema_open");
        error.message().to_owned()
    };
    let message =
        refused(format!("CREATE ROLE {stranger} LOGIN; CREATE SCHEMA postbox AUTHORIZATION {stranger}")).await;
    assert!(message.contains(&stranger), "{message}");
    let message =
        refused("ALTER SCHEMA postbox OWNER TO current_user; GRANT CREATE ON SCHEMA postbox TO PUBLIC".to_owned())
            .await;
    let (_, cure) = message.split_once("REVOKE ").expect("a cure");
    let (cure, _) = cure.split_once(',').expect("the end of it");
    owner.batch_execute(&format!("REVOKE {cure}")).await.expect("executed");
    store.up().await.expect("made");
    // Later, relays go on, and a look names it, whatever the role.
    let relay = PostgresStore::connect(PostgresConfig::new(support::url_as(&url, &stranger))).await.expect("a store");
    let roles = Roles { relays: vec![stranger.clone()], ..Roles::default() };
    owner.batch_execute(&store.grants(&roles).await.expect("printed")).await.expect("granted");
    for store in [&store, &relay] {
        store.check_integrity().await.expect("open to nobody");
        owner.batch_execute("GRANT CREATE ON SCHEMA postbox TO PUBLIC").await.expect("granted");
        store.validate().await.expect("its version is right");
        let error = store.check_integrity().await.expect_err("open to others");
        assert_eq!(error.code(), "schema_open", "{error}");
        let (_, cure) = error.message().split_once("run: ").expect("a cure");
        let (cure, _) = cure.split_once(';').expect("the end of it");
        owner.batch_execute(cure).await.expect("executed");
    }
    owner.batch_execute(&format!("DROP OWNED BY {stranger}; DROP ROLE {stranger}")).await.expect("cleaned up");
}

/// What somebody drops or moves is named, and the named statements bring it back. No relay is
/// stopped meanwhile.
#[tokio::test]
async fn a_part_that_was_dropped_or_moved_is_named_with_its_cure() {
    let server = Postgres::shared(Version::V15).await;
    let url = server.fresh_database().await;
    let client = support::client(&url).await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    store.check_integrity().await.expect("nothing is missing");
    let indexes = "SELECT i.indexrelid::regclass::text FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indrelid
        WHERE c.relnamespace = 'postbox'::regnamespace AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = i.indexrelid)";
    let indexes = client.query(indexes, &[]).await.expect("listed");
    let mut drops: Vec<String> = indexes.iter().map(|row| format!("DROP INDEX {}", row.get::<_, String>(0))).collect();
    assert!(drops.len() > 10, "{drops:?}");
    for (table, constraint) in [("outbox", "event_invalid"), ("outbox", "outbox_pkey"), ("inbox", "inbox_id_key")] {
        drops.push(format!("ALTER TABLE postbox.{table} DROP CONSTRAINT {constraint}"));
    }
    for drop in &drops {
        client.batch_execute(drop).await.expect(drop);
        let error = store.check_integrity().await.expect_err(drop);
        assert_eq!(error.code(), "schema_damaged", "{drop}: {error}");
        store.validate().await.expect("relays go on");
        let (_, cures) = error.message().split_once("run: ").expect("a cure");
        for cure in cures.split("; ") {
            client.batch_execute(cure).await.expect(cure);
        }
        store.check_integrity().await.expect(drop);
    }
    client.batch_execute("CREATE SCHEMA attic; ALTER TABLE postbox.outbox SET SCHEMA attic").await.expect("moved");
    let outbox = LogName::outbox();
    for error in [
        store.check_integrity().await.expect_err("moved"),
        store.create_log(&outbox).await.expect_err("it exists, elsewhere"),
    ] {
        assert_eq!(error.code(), "schema_damaged", "{error}");
        assert!(error.message().contains("ALTER TABLE OTHER.outbox SET SCHEMA \"postbox\""), "{error}");
    }
    client.batch_execute("ALTER TABLE attic.outbox SET SCHEMA \"postbox\"").await.expect("moved back");
    store.check_integrity().await.expect("it is back");
    store.create_log(&outbox).await.expect("idempotent");
}
