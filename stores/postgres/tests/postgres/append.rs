//! Appends in a transaction of `tokio-postgres`, of its pool, and in a borrowed one.

use std::sync::Arc;

use deadpool_postgres::{Manager, Pool};
use postbox_core::{
    Append as _, Delivery, Inspect as _, Log as _, LogName, NewEvent, Postbox, Subscription, SubscriptionName,
    TypedEvent,
};
use postbox_engine::Relay;
use postbox_postgres::{Postgres, PostgresStore, SchemaName};
use postbox_router::handler_sink;
use postbox_testkit::servers::Version;
use tokio_postgres::NoTls;

use crate::support;

#[derive(serde::Serialize)]
struct Paid {
    order: i64,
}

impl TypedEvent for Paid {
    const TOPIC: &'static str = "order.paid";
    const SCHEMA_VERSION: u32 = 2;

    fn describe(&self, event: NewEvent) -> NewEvent {
        event.key(self.order.to_string())
    }
}

/// Cannot be serialized: JSON has no keys that are lists.
#[derive(serde::Serialize)]
struct Unwritable(std::collections::BTreeMap<Vec<u8>, u8>);

impl TypedEvent for Unwritable {
    const TOPIC: &'static str = "t";
}

#[tokio::test]
async fn every_transaction_of_the_driver_takes_events_of_every_kind() {
    let fixture = support::on(Version::V15).await;
    let (store, postbox) = (&fixture.store, fixture.store.postbox());
    let name = SubscriptionName::new("reader").expect("a name");
    store
        .subscribe(&Subscription { lanes: Some(1), ..Subscription::new(name.clone(), LogName::outbox()) })
        .await
        .expect("subscribed");

    let mut client = fixture.client().await;
    let mut tx = client.transaction().await.expect("begun");
    let mut kept = postbox.append(&mut tx, Paid { order: 1 }).await.expect("appended").to_vec();
    let lent = &tx;
    kept.extend_from_slice(
        &postbox.append(&mut &*lent, [Paid { order: 2 }, Paid { order: 3 }]).await.expect("appended"),
    );
    let mut savepoint = tx.savepoint("s").await.expect("set");
    let back = postbox.append(&mut savepoint, &Paid { order: 4 }).await.expect("appended");
    savepoint.rollback().await.expect("rolled back");
    tx.commit().await.expect("committed");

    let manager = Manager::new(fixture.url.parse().expect("a URL"), NoTls);
    let pool = Pool::builder(manager).max_size(1).build().expect("a pool");
    let mut pooled = pool.get().await.expect("connected");
    let mut tx = pooled.transaction().await.expect("begun");
    kept.extend(postbox.append(&mut tx, NewEvent::json("order.paid", "{}")).await.expect("appended"));
    assert!(postbox.append(&mut tx, None::<Paid>).await.expect("nothing to do").is_empty());
    tx.commit().await.expect("committed");

    for (id, order) in kept.iter().zip([Some("1"), Some("2"), Some("3"), None]) {
        let event = store.get(&name, *id).await.expect("read").expect("there").event;
        assert_eq!(event.key.as_ref().map(|key| key.as_str()), order);
        assert_eq!(event.header("schema-version"), order.map(|_| "2"));
        assert_eq!(event.payload, order.map_or("{}".into(), |order| format!(r#"{{"order":{order}}}"#)));
    }
    assert!(store.get(&name, back[0]).await.expect("read").is_none());
}

#[tokio::test]
async fn a_pool_keeps_the_statement_only_where_that_is_asked_for() {
    let fixture = support::on(Version::V15).await;
    let count = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%outbox\\_append%'";
    for (prepared, kept) in [(false, 0), (true, 2)] {
        let postbox = Postbox::new(Postgres { prepared, ..Postgres::default() });
        let manager = Manager::new(fixture.url.parse().expect("a URL"), NoTls);
        let pool = Pool::builder(manager).max_size(1).build().expect("a pool");
        let mut client = pool.get().await.expect("connected");
        for events in [1, 1, 2, 2] {
            let mut tx = client.transaction().await.expect("begun");
            postbox.append(&mut tx, vec![NewEvent::json("t", "{}"); events]).await.expect("appended");
            tx.commit().await.expect("committed");
        }
        let nowhere = postbox.log(LogName::new("nowhere").expect("a name"));
        let mut tx = client.transaction().await.expect("begun");
        let error = nowhere.append(&mut tx, NewEvent::json("t", "{}")).await.expect_err("refused");
        assert_eq!(error.code(), "log_unknown");
        tx.rollback().await.expect("rolled back");
        let counted: i64 = client.query_one(count, &[]).await.expect("counted").get(0);
        assert_eq!(counted, kept, "prepared: {prepared}");
    }
    let count = "SELECT count(*) FROM postbox.outbox";
    assert_eq!(fixture.client().await.query_one(count, &[]).await.expect("counted").get::<_, i64>(0), 12);
}

/// A pool of one connection, so that the store and the checks use the same.
#[tokio::test]
async fn a_store_on_a_pool_of_yours_leaves_its_connections_as_they_were() {
    let fixture = support::on(Version::V15).await;
    let manager = Manager::new(fixture.front.parse().expect("a URL"), NoTls);
    let pool = Pool::builder(manager).max_size(1).build().expect("a pool");
    let settings = ["search_path", "statement_timeout", "synchronous_commit", "lock_timeout", "transaction_isolation"];
    let settings = settings.map(|name| format!("'{name}=' || current_setting('{name}')")).join(" || ', ' || ");
    let standing = format!("SELECT pg_backend_pid(), {settings}, now()::text");
    let stands = async || {
        let row = pool.get().await.expect("connected").query_one(&standing, &[]).await.expect("answered");
        ((row.get::<_, i32>(0), row.get::<_, String>(1)), row.get::<_, String>(2))
    };
    pool.get()
        .await
        .expect("connected")
        .batch_execute("SET search_path = pg_temp; SET lock_timeout = 777")
        .await
        .expect("set");
    let (before, _) = stands().await;

    let store = PostgresStore::from_pool(pool.clone(), SchemaName::default());
    store.append(&LogName::outbox(), &[NewEvent::json("t", "{}")]).await.expect("appended");
    let subscription =
        Subscription { lanes: Some(1), ..Subscription::new("reader".parse().expect("a name"), LogName::outbox()) };
    let sink = Arc::new(handler_sink(|_: Delivery| std::future::ready(())));
    let relay = Relay::builder(Arc::new(store), subscription).sink(sink).build().expect("built");
    assert_eq!(relay.drain(None).await.expect("drained").delivered, 1);
    let ((after, first), (_, second)) = (stands().await, stands().await);
    assert_eq!(after, before);
    assert_ne!(first, second, "no transaction is open");
}

#[tokio::test]
async fn what_is_refused_before_it_is_sent_leaves_the_transaction_whole() {
    let fixture = support::on(Version::V15).await;
    let postbox = fixture.store.postbox();
    let mut client = fixture.client().await;
    let mut tx = client.transaction().await.expect("begun");
    let unwritable = Unwritable([(vec![1], 1)].into());
    assert_eq!(postbox.append(&mut tx, unwritable).await.expect_err("refused").code(), "payload_not_encoded");
    let blank = NewEvent::json("no topic", "{}");
    assert_eq!(postbox.append(&mut tx, [blank]).await.expect_err("refused").code(), "topic_invalid");
    let kept = postbox.append(&mut tx, Paid { order: 1 }).await.expect("appended");
    tx.commit().await.expect("committed");
    let count = "SELECT count(*) FROM postbox.outbox";
    assert_eq!(client.query_one(count, &[]).await.expect("counted").get::<_, i64>(0), kept.len() as i64);
}
