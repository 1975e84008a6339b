//! NOTIFY as a hint: asked for, sent to sleepers only, and worth nothing more than a poll.

mod support;

use std::time::{Duration, Instant};

use postbox_core::{BatchLimit, Log as _, LogName, OwnerId, Subscription, SubscriptionName};
use postbox_postgres::PostgresConfig;
use postbox_testkit::servers::{Postgres, Version};
use tokio::time::timeout;

const LONG: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_commit_elsewhere_wakes_a_sleeping_relay() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url).notify(true)).await;
    let writer = support::client(&url).await;
    let name = SubscriptionName::new("reader").expect("a name");
    store.subscribe(&Subscription::new(name.clone(), LogName::outbox())).await.expect("subscribed");
    let owner = OwnerId::new("test").expect("a name");
    let lease = store.acquire(&name, &owner, Duration::from_secs(60)).await.expect("acquired").lease.expect("a lane");
    // The listener connects in the background; until it does, a hint may be lost.
    let deadline = Instant::now() + LONG;
    let mut woken = false;
    while !woken && Instant::now() < deadline {
        // The first wait only declares; the second really waits.
        timeout(LONG, store.hint(&lease)).await.expect("a declaration lets the caller read once more");
        let read = store.next_batch(&lease, BatchLimit::default()).await.expect("read");
        store
            .settle(&lease, postbox_core::Settlement { position: read.end, ..Default::default() })
            .await
            .expect("settled");
        let hint = timeout(Duration::from_millis(300), store.hint(&lease));
        let write = writer.batch_execute("INSERT INTO postbox.outbox (topic, payload) VALUES ('t', '{}')");
        let (hint, write) = tokio::join!(hint, write);
        write.expect("written");
        woken = hint.is_ok();
        let read = store.next_batch(&lease, BatchLimit::default()).await.expect("read");
        assert_eq!(read.deliveries.len(), 1, "woken or not, it is there");
        store
            .settle(&lease, postbox_core::Settlement { position: read.end, ..Default::default() })
            .await
            .expect("settled");
    }
    assert!(woken, "never woken");
}

#[tokio::test]
async fn writers_are_silent_while_nobody_sleeps() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let (listener, mut connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.expect("connected");
    let (heard, mut notifications) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
            if let tokio_postgres::AsyncMessage::Notification(one) = message {
                heard.send(one.payload().to_owned()).expect("the test listens");
            }
        }
    });
    let row = listener.query_one("SELECT postbox.notify_enable('outbox')", &[]).await.expect("enabled");
    let channel: String = row.get(0);
    listener.batch_execute(&format!("LISTEN \"{channel}\"")).await.expect("listening");
    let append = "SELECT postbox.enqueue('t', '{}')";
    listener.batch_execute(append).await.expect("appended");
    listener
        .batch_execute("INSERT INTO postbox.sleeper VALUES ('outbox', 'x', clock_timestamp() + interval '1 minute')")
        .await
        .expect("declared");
    listener.batch_execute(append).await.expect("appended");
    listener.batch_execute(&format!("NOTIFY \"{channel}\", 'the end'")).await.expect("sent");
    let mut all = Vec::new();
    while all.last().is_none_or(|last| last != "the end") {
        all.push(timeout(LONG, notifications.recv()).await.expect("in time").expect("open"));
    }
    assert_eq!(all, ["", "the end"], "one for the sleeper, none before");
    listener.batch_execute("SELECT postbox.notify_disable('outbox')").await.expect("disabled");
    drop(store);
}
