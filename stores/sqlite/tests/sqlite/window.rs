//! Events are handed out only after a flushed commit opened their window, and a dropped read has
//! read nothing.

use std::time::Duration;

use futures::FutureExt as _;
use postbox_core::{Append, BatchLimit, Lease, Log, LogName, NewEvent, Settlement};
use postbox_sqlite::{SqliteConfig, SqliteStore, Synchronous};

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

/// A test next to the writing thread checks that this commit is flushed whatever the configuration.
#[tokio::test]
async fn no_batch_is_handed_out_beyond_the_window() {
    for synchronous in [Synchronous::Full, Synchronous::Normal] {
        let fixture = fixture().await;
        let config = SqliteConfig { synchronous, ..common::config(fixture.path()) };
        let store = SqliteStore::open(config).await.expect("opened");
        let lease = fixture.lane().await;
        for round in 0..10 {
            append(&store, 7).await;
            let batch = read(&store, &lease, 3).await;
            let last = batch.deliveries.last().expect("there are more than are read").seq.0;
            let end = window_end(&fixture);
            assert!(last <= end, "{synchronous:?}, round {round}");
            let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
            append(&store, 1).await;
            store.settle(&lease, settlement).await.expect("settled");
            let moved = window_end(&fixture) > end;
            assert_eq!(moved, synchronous == Synchronous::Full, "only a flushed settlement opens the next window");
        }
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
