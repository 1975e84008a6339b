//! Events are handed out only after a flushed commit opened their window, and a dropped read has
//! read nothing.

use std::time::Duration;

use futures::FutureExt as _;
use postbox_core::{
    Append, BatchLimit, Criteria, Filter, Headers, Inspect, Lease, ListQuery, Log, LogName, NewEvent, Settlement, Tail,
    TopicPattern,
};
use postbox_sqlite::SqliteStore;

use crate::common::{self, Fixture, fixture};

fn window_end(fixture: &Fixture) -> i64 {
    fixture.connect().query_row("SELECT window_end FROM postbox_lane", [], |row| row.get(0)).expect("a lane")
}

async fn append(store: &SqliteStore, count: usize) {
    let events: Vec<NewEvent> = (0..count).map(|n| NewEvent::json("t", n.to_string())).collect();
    store.append(&LogName::outbox(), &events).await.expect("appended");
}

async fn read(store: &SqliteStore, lease: &Lease, events: usize) -> postbox_core::Batch {
    store.next_batch(lease, BatchLimit { events, ..BatchLimit::default() }).await.expect("read")
}

/// A test next to the writing thread checks that this commit is flushed.
#[tokio::test]
async fn no_batch_is_handed_out_beyond_the_window() {
    let fixture = fixture().await;
    let (store, lease) = (&fixture.store, fixture.lane().await);
    for round in 0..10 {
        append(store, 7).await;
        let batch = read(store, &lease, 3).await;
        let last = batch.deliveries.last().expect("there are more than are read").seq.0;
        let end = window_end(&fixture);
        assert!(last <= end, "round {round}");
        let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
        append(store, 1).await;
        store.settle(&lease, settlement).await.expect("settled");
        assert!(window_end(&fixture) > end, "a settlement opens the next window");
    }
}

#[tokio::test]
async fn a_read_that_was_dropped_has_read_nothing() {
    let fixture = fixture().await;
    let lease = fixture.lane().await;
    append(&fixture.store, 10).await;
    // While another connection holds the write lock, no window opens, so none of these reads can be
    // answered before it is dropped.
    let other = fixture.connect();
    other.execute_batch("BEGIN IMMEDIATE").expect("locked");
    let limit = BatchLimit { events: 4, ..BatchLimit::default() };
    for _ in 0..20 {
        // Polled once: the job is queued.
        assert!(fixture.store.next_batch(&lease, limit).now_or_never().is_none(), "the window cannot be opened");
    }
    // This read has time to look for events, and waits for the lock when it is dropped.
    let waiting = tokio::time::timeout(Duration::from_millis(100), fixture.store.next_batch(&lease, limit));
    waiting.await.expect_err("the window cannot be opened");
    other.execute_batch("ROLLBACK").expect("unlocked");
    assert_eq!(read(&fixture.store, &lease, 100).await.deliveries.len(), 10);
}

/// SQLite would load every page of it, on the one thread that all subscriptions share. What is
/// wanted is whole, however large it is.
#[tokio::test]
async fn a_large_payload_of_a_row_that_is_passed_is_not_read() {
    const LARGE: usize = 100_000;
    let fixture = fixture().await;
    let topic = TopicPattern::new("rare").expect("a valid pattern");
    let lease = fixture.lane_for(Filter { topics: vec![topic.clone()], ..Filter::default() }).await;
    let events = [("big", "1", LARGE), ("rare", "2", 1), ("rare", "2", LARGE), ("big", "1", LARGE)]
        .map(|(topic, digit, count)| NewEvent::json(topic, digit.repeat(count)));
    fixture.store.append(&LogName::outbox(), &events).await.expect("appended");
    let fold = "PRAGMA wal_checkpoint(TRUNCATE)";
    fixture.connect().query_row(fold, [], |_| Ok(())).expect("everything is in the file");
    // From now on, who reads a payload of the topic `big` gets an error: each of its pages names a
    // next one that the file does not have.
    let mut file = std::fs::read(fixture.path()).expect("read");
    for page in file.chunks_mut(4_096).filter(|page| page[4..].iter().all(|byte| *byte == b'1')) {
        page[..4].fill(0xff);
    }
    std::fs::write(fixture.path(), file).expect("damaged");
    let store = SqliteStore::open(common::config(fixture.path())).await.expect("opened");
    let tail = async |which: Criteria| store.tail(&LogName::outbox(), &which, Some("0"), BatchLimit::default()).await;
    tail(Criteria::default()).await.expect_err("damaged");
    let wanted = vec![1, LARGE];
    let batch = read(&store, &lease, 10).await;
    assert_eq!(batch.deliveries.iter().map(|it| it.event.payload.len()).collect::<Vec<_>>(), wanted);
    let which = Criteria { topic: Some(topic), ..Criteria::default() };
    let tailed = tail(which.clone()).await.expect("read");
    assert_eq!(tailed.events.iter().map(|(_, event)| event.payload.len()).collect::<Vec<_>>(), wanted);
    let (subscription, headers) = (lease.subscription, Headers::new());
    let (state, code, after, limit, payloads) = (None, None, None, 10, true);
    let mut query = ListQuery { subscription, state, which, code, headers, after, limit, payloads };
    let listed = store.list(&query).await.expect("listed");
    assert_eq!(listed.iter().rev().map(|record| record.event.payload.len()).collect::<Vec<_>>(), wanted);
    (query.which, query.payloads) = (Criteria::default(), false);
    assert_eq!(store.list(&query).await.expect("listed").len(), 4, "no payload is read");
}
