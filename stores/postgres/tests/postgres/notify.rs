//! NOTIFY is only a hint: off by default, sent only to sleeping relays, and never needed, because
//! relays also poll.

use std::time::Duration;

use postbox_core::{BatchLimit, Log as _, LogName, Settlement, Subscription, SubscriptionName};
use postbox_postgres::PostgresConfig;
use postbox_testkit::servers::{Postgres, Version};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::timeout;
use tokio_postgres::Client;

use crate::support;

/// Far longer than anything takes.
const LONG: Duration = Duration::from_secs(60);

/// Declares a relay asleep, for longer than the writes of a test take.
const DECLARE: &str = "INSERT INTO postbox.sleeper VALUES ('outbox', 'x', clock_timestamp() + interval '9 seconds')
    ON CONFLICT (log, owner) DO UPDATE SET asleep_until = excluded.asleep_until";

#[tokio::test]
async fn a_commit_elsewhere_wakes_a_sleeping_relay() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig { notify: true, ..PostgresConfig::new(&url) }).await;
    let writer = support::client(&url).await;
    let lease = support::leased(&store, "reader").await;
    support::until_listening(&writer).await;
    // The first wait only declares the sleep: a writer that looked before it sent no notification.
    // Read once more, then really wait.
    timeout(LONG, store.hint(&lease)).await.expect("a declaration lets the caller read once more");
    let nothing = store.next_batch(&lease, BatchLimit::default()).await.expect("read");
    assert!(nothing.deliveries.is_empty(), "nothing was written yet");
    store.settle(&lease, Settlement { position: nothing.end, ..Default::default() }).await.expect("settled");
    let mut hint = store.hint(&lease);
    assert!(futures::poll!(&mut hint).is_pending(), "nothing to wake for");
    // A declaration holds for a second. If the write took longer, no notification would be sent,
    // and the relay's poll would find the event. So it is prolonged in the transaction that writes.
    let declared = "SELECT count(*) FROM postbox.sleeper";
    assert_eq!(writer.query_one(declared, &[]).await.expect("asked").get::<_, i64>(0), 1);
    let write = "UPDATE postbox.sleeper SET asleep_until = clock_timestamp() + interval '9 seconds';
        INSERT INTO postbox.outbox (topic, payload) VALUES ('t', '{}')";
    writer.batch_execute(write).await.expect("written");
    timeout(LONG, hint).await.expect("woken by another connection's commit");
    let read = store.next_batch(&lease, BatchLimit::default()).await.expect("read");
    assert_eq!(read.deliveries.len(), 1, "what was written");
}

/// Each start of a relay declares under a name of its own, and each append reads what is declared.
#[tokio::test]
async fn a_declaration_deletes_those_of_relays_that_are_gone() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig { notify: true, ..PostgresConfig::new(&url) }).await;
    let client = support::client(&url).await;
    let lease = support::leased(&store, "reader").await;
    let old = "INSERT INTO postbox.sleeper (log, owner, asleep_until) VALUES
        ('outbox', 'gone', now() - interval '1 hour'),
        ('outbox', 'before the clock was set back', now() + interval '1 hour'),
        ('inbox', 'gone', now() - interval '1 hour')";
    client.batch_execute(old).await.expect("declared");
    timeout(LONG, store.hint(&lease)).await.expect("a declaration lets the caller read once more");
    let left = client.query("SELECT log, owner FROM postbox.sleeper ORDER BY log", &[]).await.expect("asked");
    let left: Vec<(&str, &str)> = left.iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(left, [("inbox", "gone"), ("outbox", lease.owner.as_str())]);
}

/// Creating the trigger has to wait for open writers, and later writers would wait behind it.
#[tokio::test]
async fn a_writer_that_stays_open_stops_neither_the_subscription_nor_other_writers() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig { notify: true, ..PostgresConfig::new(&url) }).await;
    let (open, other) = (support::client(&url).await, support::client(&url).await);
    const WRITE: &str = "INSERT INTO postbox.outbox (topic, payload) VALUES ('t', '{}')";
    open.batch_execute("BEGIN").await.expect("begun");
    open.batch_execute(WRITE).await.expect("written");
    let name = SubscriptionName::new("reader").expect("a name");
    let reader = Subscription::new(name, LogName::outbox());
    timeout(LONG, store.subscribe(&reader)).await.expect("it goes on").expect("without notifications");
    timeout(LONG, other.batch_execute(WRITE)).await.expect("nobody is waited for").expect("written");
}

#[tokio::test]
async fn writers_are_silent_while_nobody_sleeps() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let (listener, mut heard) = listening(&url).await;
    let append = "SELECT postbox.enqueue('t', '{}')";
    // The second was declared before the clock was set back.
    for (owner, until) in [("gone", "- interval '1 second'"), ("of old", "+ interval '1 hour'")] {
        let declare = format!("INSERT INTO postbox.sleeper VALUES ('outbox', '{owner}', clock_timestamp() {until})");
        listener.batch_execute(&declare).await.expect("declared");
        listener.batch_execute(append).await.expect("appended");
    }
    listener.batch_execute(&format!("{DECLARE}; {append}")).await.expect("declared, and appended");
    assert_eq!(heard_until_the_end(&listener, &mut heard).await, [""], "one for the sleeper, none before");
    listener.batch_execute("SELECT postbox.notify_disable('outbox')").await.expect("disabled");
    drop(store);
}

/// Commits with a notification wait for each other, and one of them may stay open.
#[tokio::test]
async fn of_many_writers_at_once_a_few_notify() {
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    let store = support::migrated(PostgresConfig::new(&url)).await;
    let (listener, mut heard) = listening(&url).await;
    listener.batch_execute(DECLARE).await.expect("declared");
    let mut writers = Vec::new();
    for _ in 0..9 {
        let writer = support::client(&url).await;
        writer.batch_execute("BEGIN; SELECT postbox.enqueue('t', '{}')").await.expect("appended");
        writers.push(writer);
    }
    for writer in &writers {
        writer.batch_execute("COMMIT").await.expect("committed");
    }
    let together = heard_until_the_end(&listener, &mut heard).await;
    assert!((1..=4).contains(&together.len()), "{together:?} of nine that were open at once");
    writers[0].batch_execute(&format!("{DECLARE}; SELECT postbox.enqueue('t', '{{}}')")).await.expect("appended");
    assert_eq!(heard_until_the_end(&listener, &mut heard).await, [""], "one alone");
    drop(store);
}

/// A connection that listens for the outbox's writers, and what it hears.
async fn listening(url: &str) -> (Client, UnboundedReceiver<String>) {
    let (listener, mut connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.expect("connected");
    let (heard, notifications) = tokio::sync::mpsc::unbounded_channel();
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
    (listener, notifications)
}

/// The payloads that came so far, before one that ends them.
async fn heard_until_the_end(listener: &Client, heard: &mut UnboundedReceiver<String>) -> Vec<String> {
    let end = "SELECT pg_notify('postbox_' || 'postbox.outbox'::regclass::oid, 'the end')";
    listener.batch_execute(end).await.expect("sent");
    let mut all = Vec::new();
    loop {
        let one = timeout(LONG, heard.recv()).await.expect("in time").expect("open");
        if one == "the end" {
            return all;
        }
        all.push(one);
    }
}
