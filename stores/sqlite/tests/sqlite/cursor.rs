//! Calls that run late, twice or on another file. None may take a lane from its holder, or move a
//! position past events that were not handed out.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::{
    Append as _, BatchLimit, Clock, Disposition, Entry, ErrorKind, Filter, Log as _, LogName, Migrate as _, NewEvent,
    OwnerId, Settlement, Store as _, Subscription, SubscriptionName,
};
use postbox_sqlite::SqliteStore;

use crate::common::{LONG, config, fixture};

fn name() -> SubscriptionName {
    SubscriptionName::new("reader").expect("a name")
}

fn owner(name: &str) -> OwnerId {
    OwnerId::new(name).expect("a name")
}

/// A clock that stands still. The first call after `look_back` was set returns a time four seconds
/// ago, as for a call that then waited.
struct WaitedClock {
    now: Timestamp,
    look_back: AtomicBool,
}

#[async_trait]
impl Clock for WaitedClock {
    fn now(&self) -> Timestamp {
        let waited = if self.look_back.swap(false, Ordering::SeqCst) { 4 } else { 0 };
        self.now - jiff::SignedDuration::from_secs(waited)
    }

    fn monotonic(&self) -> Duration {
        Duration::ZERO
    }

    async fn sleep(&self, _: Duration) {
        std::future::pending().await
    }
}

/// An application held the write lock for four seconds. A lease that was renewed right after looks
/// like one "from the future" to an older call, but must not be taken.
#[tokio::test(flavor = "multi_thread")]
async fn a_question_that_waited_takes_no_living_lease() {
    let fixture = fixture().await;
    let clock = Arc::new(WaitedClock { now: Timestamp::now(), look_back: AtomicBool::new(false) });
    let store = SqliteStore::open_with_clock(config(fixture.path()), clock.clone()).await.expect("opened");
    fixture.lane().await;
    let lease = fixture.store.acquire(&name(), &owner("test"), &[], LONG).await.expect("asked").lease.expect("ours");
    clock.look_back.store(true, Ordering::SeqCst);
    let asked = store.acquire(&name(), &owner("late"), &[], LONG).await.expect("asked");
    assert_eq!(asked.lease, None);
    fixture.store.renew(&lease, LONG).await.expect("still ours");
}

/// The clock went back by a day. A relay that was last seen before that and then died is not
/// counted for that day: nobody would drive its share of the lanes.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_seen_in_the_future_is_not_counted() {
    let fixture = fixture().await;
    fixture.lane().await;
    let later = "UPDATE postbox_replica SET seen_at = seen_at + 86400000000";
    fixture.connect().execute_batch(later).expect("seen tomorrow");
    for _ in 0..2 {
        let asked = fixture.store.acquire(&name(), &owner("alive"), &[], LONG).await.expect("asked");
        assert_eq!(asked.replicas, 1);
    }
}

/// The clock went back by a day after a grant. Its holder is dead, and nobody would drive the lane
/// for that day.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_granted_in_the_future_is_void() {
    let fixture = fixture().await;
    let dead = fixture.lane().await;
    let later = "UPDATE postbox_lane SET lease_until = lease_until + 86400000000";
    fixture.connect().execute_batch(later).expect("granted tomorrow");
    let asked = fixture.store.acquire(&name(), &owner("alive"), &[], LONG).await.expect("asked");
    assert!(asked.lease.expect("a free lane").epoch > dead.epoch);
}

/// Another process made the tables anew. The lane's epoch is the same, but its log is another.
#[tokio::test(flavor = "multi_thread")]
async fn a_lane_of_tables_made_anew_is_read_from_its_beginning() {
    let fixture = fixture().await;
    let events = ["1", "2", "3", "4", "5"].map(|payload| NewEvent::json("t", payload));
    fixture.store.append(&LogName::outbox(), &events).await.expect("appended");
    let before = fixture.lane().await;
    assert_eq!(fixture.next(&before).await.deliveries.len(), 5);
    let other = SqliteStore::open(config(fixture.path())).await.expect("opened");
    other.down(true).await.expect("removed");
    other.up().await.expect("made anew");
    let lease = fixture.lane().await;
    assert_eq!(lease, before);
    fixture.store.append(&LogName::outbox(), &events[..1]).await.expect("appended");
    assert_eq!(fixture.next(&lease).await.deliveries.len(), 1);
}

/// The file was set back to an older copy while it was open, as the shell's `.restore` does. The
/// places beyond the copy are given to other events.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_was_set_back_is_read_from_the_position_of_the_copy() {
    for appended in [2, 10] {
        let fixture = fixture().await;
        let events: Vec<NewEvent> = (0..10).map(|n| NewEvent::json("t", n.to_string())).collect();
        fixture.store.append(&LogName::outbox(), &events[..5]).await.expect("appended");
        let lease = fixture.lane().await;
        fixture.settle(&lease, &fixture.next(&lease).await).await;
        fixture.store.append(&LogName::outbox(), &events[..5]).await.expect("appended");
        let before = fixture.next(&lease).await;
        assert_eq!(before.deliveries.len(), 5);
        let back = "DELETE FROM postbox_outbox WHERE seq > 5; UPDATE postbox_lane SET window_end = 5; \
             UPDATE sqlite_sequence SET seq = 5 WHERE name = 'postbox_outbox'";
        fixture.connect().execute_batch(back).expect("set back");
        fixture.store.append(&LogName::outbox(), &events[..appended]).await.expect("appended");
        fixture.settle(&lease, &before).await;
        let error = fixture.store.next_batch(&lease, BatchLimit::default()).await.expect_err("another log");
        assert_eq!((error.kind(), error.code()), (ErrorKind::Stale, "window_undone"));
        let lease = fixture.lane().await;
        assert_eq!(fixture.next(&lease).await.deliveries.len(), appended);
    }
}

/// Unwanted rows are not handed out, so only the position tells that a lane has passed them.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_was_set_back_is_read_again_where_nothing_was_wanted() {
    let fixture = fixture().await;
    let (store, log) = (&fixture.store, LogName::outbox());
    let filter = Filter { topics: vec!["rare".parse().expect("a pattern")], ..Filter::default() };
    let rare = Subscription { lanes: Some(1), filter, ..Subscription::new(name(), log.clone()) };
    store.subscribe(&rare).await.expect("subscribed");
    let acquire = async || store.acquire(&name(), &owner("test"), &[], LONG).await.expect("asked").lease.expect("ours");
    let lease = acquire().await;
    let [unwanted, wanted] = ["t", "rare"].map(|topic| vec![NewEvent::json(topic, "1"); 5]);
    store.append(&log, &unwanted).await.expect("appended");
    // The second read writes the position.
    for _ in 0..2 {
        assert!(fixture.next(&lease).await.is_empty());
    }
    let back = "DELETE FROM postbox_outbox; UPDATE postbox_lane SET position = 0; \
         UPDATE sqlite_sequence SET seq = 0 WHERE name = 'postbox_outbox'";
    fixture.connect().execute_batch(back).expect("set back");
    store.append(&log, &wanted).await.expect("appended");
    let error = store.next_batch(&lease, BatchLimit::default()).await.expect_err("another log");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Stale, "window_undone"));
    assert_eq!(fixture.next(&acquire().await).await.deliveries.len(), 5);
}

/// A position from a read that this store does not know: from a former process, or from before a
/// rewind.
#[tokio::test(flavor = "multi_thread")]
async fn a_position_of_an_unknown_read_is_refused() {
    let fixture = fixture().await;
    let lease = fixture.lane().await;
    fixture.store.append(&LogName::outbox(), &[NewEvent::json("t", "1")]).await.expect("appended");
    let batch = fixture.next(&lease).await;
    let other = SqliteStore::open(config(fixture.path())).await.expect("opened");
    let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
    let error = other.settle(&lease, settlement).await.expect_err("refused");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Stale, "window_undone"));
    assert_eq!(fixture.store.stats(&name()).await.expect("counted").pending, 1);
}

/// A settlement of due rows applies only to rows that have not changed since they were read.
#[tokio::test(flavor = "multi_thread")]
async fn a_due_row_that_changed_is_not_settled_by_an_old_word() {
    let fixture = fixture().await;
    let lease = fixture.lane().await;
    let store = &fixture.store;
    store.append(&LogName::outbox(), &[NewEvent::json("t", "1").key("k")]).await.expect("appended");
    let batch = fixture.next(&lease).await;
    let again = |counted| Disposition::Retry {
        after: Duration::ZERO,
        counted,
        code: "http_500".into(),
        error: String::new(),
        took: None,
    };
    let entry = |disposition| vec![Entry { delivery: &batch.deliveries[0], disposition }];
    let stream = Settlement { position: batch.end, entries: entry(again(true)), hold_keys: true, rewind: false };
    store.settle(&lease, stream).await.expect("settled");
    // The delivery of the first attempt, settled as delivered after the second attempt began.
    let due = Settlement { entries: entry(Disposition::Delivered), hold_keys: true, ..Settlement::default() };
    store.settle(&lease, due).await.expect("nothing to do");
    let due = store.due(&lease, BatchLimit::default()).await.expect("read");
    assert_eq!(due.deliveries.len(), 1, "the row is still there");
    assert_eq!(due.deliveries[0].attempt, 2);
}

/// The file was replaced or moved while it was open: an error that says how to fix it, never
/// silence.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_was_replaced_is_not_read_on() {
    let fixture = fixture().await;
    let lease = fixture.lane().await;
    let aside = fixture.path().with_extension("aside");
    fs::rename(fixture.path(), &aside).expect("moved");
    let error = fixture.store.renew(&lease, LONG).await.expect_err("gone");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Unavailable, "store_replaced"));
    fs::rename(&aside, fixture.path()).expect("put back");
    fixture.store.renew(&lease, LONG).await.expect("the same file");
    fs::rename(fixture.path(), &aside).expect("moved");
    let refused = SqliteStore::open(config(fixture.path())).await.expect_err("its -wal holds commits");
    assert_eq!((refused.kind(), refused.code()), (ErrorKind::Mismatch, "store_file_missing"));
    fs::remove_file(format!("{}-wal", fixture.path().display())).expect("given up");
    let other = SqliteStore::open(config(fixture.path())).await.expect("opened");
    other.up().await.expect("a new file");
    for error in [
        fixture.store.renew(&lease, LONG).await.expect_err("another file"),
        fixture.store.next_batch(&lease, BatchLimit::default()).await.expect_err("another file"),
        fixture.store.stats(&name()).await.expect_err("another file"),
    ] {
        assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "store_replaced"));
        assert!(error.message().contains("restart postbox"), "{error}");
    }
}

/// Other programs begin another log then, or the file was overwritten with a copy. What the store
/// has open fits neither.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_whose_log_was_removed_is_neither_used_nor_changed() {
    for (endings, overwritten) in [(&["-wal"][..], false), (&["-shm"][..], false), (&["-wal", "-shm"][..], true)] {
        let fixture = fixture().await;
        let (path, copy) = (fixture.path(), fixture.path().with_extension("copy"));
        let lease = fixture.lane().await;
        fixture.connect().execute("VACUUM INTO ?1", [copy.display().to_string()]).expect("copied");
        fixture.store.append(&LogName::outbox(), &[NewEvent::json("t", "1")]).await.expect("appended");
        for ending in endings {
            fs::remove_file(format!("{}{ending}", path.display())).expect("removed");
        }
        if overwritten {
            fs::copy(&copy, &path).expect("overwritten");
        }
        let before = fs::read(&path).expect("read");
        for error in [
            fixture.store.renew(&lease, LONG).await.expect_err("its log is gone"),
            fixture.store.next_batch(&lease, BatchLimit::default()).await.expect_err("its log is gone"),
            fixture.store.stats(&name()).await.expect_err("its log is gone"),
        ] {
            assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "store_replaced"), "{endings:?}");
        }
        drop(fixture.store);
        assert!(fs::read(&path).expect("read") == before, "{endings:?}: the old log was folded into it");
    }
}

/// The next log may get the inodes of the one that was removed, once nobody has that open.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_whose_log_was_removed_uses_no_later_one() {
    let fixture = fixture().await;
    let lease = fixture.lane().await;
    fixture.store.stats(&name()).await.expect("counted");
    // So that the file is whole without its log.
    let busy: i64 =
        fixture.connect().query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0)).expect("asked");
    assert_eq!(busy, 0);
    for ending in ["-wal", "-shm"] {
        fs::remove_file(format!("{}{ending}", fixture.path().display())).expect("removed");
    }
    let mut others = Vec::new();
    for _ in 0..2 {
        for error in [
            fixture.store.renew(&lease, LONG).await.expect_err("its log is gone"),
            fixture.store.stats(&name()).await.expect_err("its log is gone"),
        ] {
            assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "store_replaced"));
        }
        let other = fixture.connect();
        other.execute_batch("CREATE TABLE IF NOT EXISTS other (x)").expect("written");
        others.push(other);
    }
}
