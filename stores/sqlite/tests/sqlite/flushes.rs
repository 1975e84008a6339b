//! With `Synchronous::Normal` too, what is answered or handed out is flushed. Triggers note the
//! setting that each write commits with.

use postbox_core::{
    Admin as _, Append as _, BatchLimit, Change, Filter, Inbound, Log as _, LogName, Maintain as _, NewEvent,
    Receive as _, Received, Replay, Selection, Settlement, Subscription,
};
use postbox_sqlite::{SqliteConfig, SqliteStore, Synchronous};
use rusqlite::Connection;

use crate::common::{self, fixture};

const NORMAL: i64 = 1;
const FULL: i64 = 2;

/// Writes whose setting is noted.
const WRITES: [&str; 7] = [
    "INSERT ON postbox_receipt",
    "INSERT ON postbox_unrouted",
    "UPDATE OF window_end ON postbox_lane WHEN NEW.window_end > OLD.window_end",
    "UPDATE OF position ON postbox_lane WHEN NEW.position > OLD.position",
    "INSERT ON postbox_lane",
    "INSERT ON postbox_delivery",
    "UPDATE OF state ON postbox_delivery",
];

fn watch(connection: &Connection) {
    connection.execute_batch("CREATE TABLE seen (setting INTEGER NOT NULL)").expect("made");
    for (n, write) in WRITES.iter().enumerate() {
        let note = "INSERT INTO seen SELECT synchronous FROM pragma_synchronous";
        let trigger = format!("CREATE TRIGGER watch_{n} AFTER {write} BEGIN {note}; END");
        connection.execute_batch(&trigger).expect("watched");
    }
}

/// The settings of the writes since the last look, each once if all are the same.
fn seen(connection: &Connection) -> Vec<i64> {
    let mut statement = connection.prepare("DELETE FROM seen RETURNING setting").expect("prepared");
    let settings = statement.query_map([], |row| row.get(0)).expect("read");
    let mut settings: Vec<i64> = settings.collect::<Result<_, _>>().expect("numbers");
    settings.dedup();
    settings
}

#[tokio::test]
async fn what_leaves_the_store_is_on_disk_whatever_the_configuration_says() {
    let fixture = fixture().await;
    let config = SqliteConfig { synchronous: Synchronous::Normal, ..common::config(fixture.path()) };
    let store = SqliteStore::open(config).await.expect("opened");
    let (outbox, inbox, event) = (LogName::outbox(), LogName::inbox(), NewEvent::json("t", "1"));
    let lease = fixture.lane().await;
    let name = &lease.subscription;
    let filter = Filter { topics: vec!["another".parse().expect("a pattern")], ..Filter::default() };
    let other = Subscription { filter, ..Subscription::new("other".parse().expect("a name"), inbox.clone()) };
    store.subscribe(&other).await.expect("subscribed");
    let connection = fixture.connect();
    watch(&connection);

    let source = "s".parse().expect("a name");
    let inbound = Inbound { source, message_id: "m".into(), digest: [0; 32], event: event.clone() };
    assert!(matches!(store.receive(&inbox, inbound).await, Ok(Received::Accepted(_))));
    assert_eq!(seen(&connection), [FULL], "a message is received");
    while store.note_unrouted(&inbox).await.expect("noted").more {}
    assert_eq!(seen(&connection), [FULL], "an event is unrouted");

    store.append(&outbox, &[event]).await.expect("appended");
    let batch = store.next_batch(&lease, BatchLimit::default()).await.expect("read");
    assert_eq!(seen(&connection), [FULL], "a window is opened");
    let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
    store.settle(&lease, settlement).await.expect("settled");
    assert_eq!(seen(&connection), [NORMAL], "a position may be lost");

    assert_eq!(store.replay(name, &Replay::default()).await.expect("replayed").count, 1);
    assert_eq!(seen(&connection), [FULL], "an event is replayed");
    let dead = Change::MarkDead { why: None };
    assert_eq!(store.change(name, &dead, &Selection::default()).await.expect("marked").count, 1);
    assert_eq!(seen(&connection), [FULL], "an event is marked dead");
    store.set_lanes(name, 2).await.expect("set");
    assert_eq!(seen(&connection), [FULL], "events may leave the stream");
}
