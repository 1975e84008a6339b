//! Appending, and asking once, inside a transaction of `sqlx`.

#![cfg(feature = "sqlx")]

use postbox_core::{EventId, Inspect as _, Log as _, LogName, NewEvent, SourceName, Subscription, SubscriptionName};
use postbox_postgres::sqlx::once_in;
use postbox_testkit::servers::Version;
use sqlx::{Connection as _, PgConnection};

use crate::support;

#[tokio::test]
async fn events_share_the_transactions_fate() {
    let fixture = support::on(Version::V15).await;
    let store = &fixture.store;
    let name = SubscriptionName::new("reader").expect("a name");
    store
        .subscribe(&Subscription { lanes: 1, ..Subscription::new(name.clone(), LogName::outbox()) })
        .await
        .expect("subscribed");
    let mut connection = PgConnection::connect(&fixture.url).await.expect("connected");
    let at = "2026-01-02T03:04:05.000006Z".parse().expect("a time");
    let event = NewEvent::new("order.paid", vec![0, 0xff], "application/octet-stream")
        .key("k")
        .version(7)
        .header("a", "b")
        .occurred_at(at)
        .deliver_at(at);
    let mut tx = connection.begin().await.expect("begun");
    let postbox = store.postbox();
    let lost = postbox.append(&mut tx, &event).await.expect("appended");
    tx.rollback().await.expect("rolled back");
    let mut tx = connection.begin().await.expect("begun");
    let ids = postbox.append(&mut *tx, [event.clone(), NewEvent::json("t", "{}")]).await.expect("appended");
    tx.commit().await.expect("committed");
    assert!(store.get(&name, lost[0]).await.expect("read").is_none());
    let record = store.get(&name, ids[0]).await.expect("read").expect("there");
    assert_eq!(record.event, event.clone().into_event(ids[0], record.event.created_at));

    let mut tx = connection.begin().await.expect("begun");
    let taken: EventId = ids[0];
    let error = postbox.append(&mut tx, event.id(taken)).await.expect_err("taken");
    assert_eq!(error.code(), "event_id_taken");
    tx.rollback().await.expect("rolled back");
    let mut tx = connection.begin().await.expect("begun");
    let nowhere = postbox.log(LogName::new("nowhere").expect("a name"));
    let error = nowhere.append(&mut tx, NewEvent::json("t", "{}")).await.expect_err("no log");
    assert_eq!(error.code(), "log_unknown");
}

#[tokio::test]
async fn once_is_true_once() {
    let fixture = support::on(Version::V15).await;
    let source = SourceName::new("stripe").expect("a name");
    let mut connection = PgConnection::connect(&fixture.url).await.expect("connected");
    let mut answers = Vec::new();
    for commit in [false, true, true] {
        let mut tx = connection.begin().await.expect("begun");
        answers.push(once_in(&mut tx, fixture.store.schema(), &source, "evt_1").await.expect("asked"));
        if commit {
            tx.commit().await.expect("committed");
        }
    }
    assert_eq!(answers, [true, true, false]);
    let mut client = fixture.client().await;
    let tx = client.transaction().await.expect("begun");
    let again = postbox_postgres::once_in(&tx, fixture.store.schema(), &source, "evt_1").await.expect("asked");
    assert!(!again, "both drivers ask one memory");
}
