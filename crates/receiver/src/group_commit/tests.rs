//! Group commit, with a store whose calls wait for a permit.

use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use futures::future::join_all;
use postbox_core::NewEvent;
use postbox_testkit::clock::ManualClock;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use super::*;

/// A store whose calls each wait for a permit, and which refuses some words.
struct Gated {
    leave: Semaphore,
    /// The ids in each call, in order of arrival.
    calls: Mutex<Vec<Vec<String>>>,
    called: tokio::sync::Notify,
    answered: AtomicUsize,
}

#[async_trait]
impl Receive for Gated {
    async fn receive_many(&self, _log: &LogName, inbound: &[Inbound]) -> postbox_core::Result<Vec<Received>> {
        let ids: Vec<String> = inbound.iter().map(|message| message.message_id.clone()).collect();
        self.calls.lock().expect("no panic while held").push(ids.clone());
        self.called.notify_one();
        self.leave.acquire().await.expect("never closed").forget();
        let has = |word: &str| ids.iter().any(|id| id == word);
        assert!(!has("panic"), "on purpose");
        if has("away") || ids == ["gone"] {
            return Err(Error::new(ErrorKind::Unavailable, "receive", "store_unreachable", "it is away"));
        }
        if has("broken") {
            return Err(Error::new(ErrorKind::Internal, "receive", "store_error", "it does not work"));
        }
        if has("orphan") {
            return Err(Error::new(ErrorKind::NotFound, "receive", "reference_missing", "a trigger refused it"));
        }
        if has("bad") {
            return Err(Error::invalid("receive", "text_invalid", "the database does not like it"));
        }
        self.answered.fetch_add(1, Ordering::Relaxed);
        let id = "00000000-0000-7000-8000-000000000000".parse().expect("well-formed");
        Ok(ids.iter().map(|_| Received::Accepted(id)).collect())
    }

    async fn forget(&self, _older_than: Duration) -> postbox_core::Result<u64> {
        Ok(0)
    }
}

impl Gated {
    /// Waits for this many calls.
    async fn calls(&self, count: usize) -> Vec<Vec<String>> {
        loop {
            let calls = self.calls.lock().expect("no panic while held").clone();
            if calls.len() >= count {
                return calls;
            }
            self.called.notified().await;
        }
    }
}

const TIMEOUT: Duration = Duration::from_secs(600);

fn group() -> (Arc<Gated>, Arc<GroupCommit>) {
    group_by(Arc::new(ManualClock::default()), false)
}

fn group_by(clock: Arc<ManualClock>, ordered: bool) -> (Arc<Gated>, Arc<GroupCommit>) {
    let calls = Mutex::default();
    let (called, answered) = (tokio::sync::Notify::new(), AtomicUsize::new(0));
    let store = Arc::new(Gated { leave: Semaphore::new(0), calls, called, answered });
    let group = Arc::new(GroupCommit {
        store: Arc::clone(&store) as _,
        clock,
        log: LogName::inbox(),
        timeout: TIMEOUT,
        ordered,
        queue: Mutex::default(),
    });
    (store, group)
}

fn message(id: &str, bytes: usize) -> Inbound {
    Inbound {
        source: "hooks".parse().expect("well-formed"),
        message_id: id.to_owned(),
        digest: [0; 32],
        event: NewEvent::new("topic", vec![0; bytes], "application/octet-stream"),
    }
}

/// Sends each message. All have arrived when this returns: these tests run on one thread.
async fn send(group: &Arc<GroupCommit>, ids: &[&str], bytes: usize) -> Vec<JoinHandle<Committed>> {
    let mut sent = Vec::new();
    for id in ids {
        let (group, message) = (Arc::clone(group), message(id, bytes));
        sent.push(tokio::spawn(async move { group.commit(vec![message]).await.remove(0) }));
    }
    tokio::task::yield_now().await;
    sent
}

/// Makes as many calls as there may be at once (two). Both wait for a permit.
async fn occupy(store: &Gated, group: &Arc<GroupCommit>) -> Vec<JoinHandle<Committed>> {
    let mut sent = send(group, &["1"], 10).await;
    store.calls(1).await;
    sent.extend(send(group, &["2"], 10).await);
    assert_eq!(store.calls(2).await, [["1"], ["2"]], "each left at once, alone");
    sent
}

/// Waits until no call is under way.
async fn idle(group: &GroupCommit) {
    while group.queue().workers > 0 {
        tokio::task::yield_now().await;
    }
}

async fn codes(sent: Vec<JoinHandle<Committed>>) -> Vec<String> {
    let code = |verdict: Committed| verdict.map_or_else(|error| error.code().to_owned(), |_| "accepted".to_owned());
    join_all(sent).await.into_iter().map(|verdict| code(verdict.expect("no panic"))).collect()
}

#[tokio::test]
async fn what_arrives_while_commits_run_goes_together() {
    let (store, group) = group();
    let mut sent = occupy(&store, &group).await;
    sent.extend(send(&group, &["3", "4", "5"], 10).await);
    store.leave.add_permits(3);
    assert_eq!(codes(sent).await, ["accepted"; 5]);
    assert_eq!(store.calls(3).await[2], ["3", "4", "5"]);
    idle(&group).await;
}

#[tokio::test]
async fn what_arrives_at_once_goes_together() {
    let (store, group) = group();
    let sent = send(&group, &["1", "2", "3", "4"], 10).await;
    assert_eq!(store.calls(2).await, [&["1"][..], &["2", "3", "4"]], "the first could not know of the others");
    store.leave.add_permits(2);
    assert_eq!(codes(sent).await, ["accepted"; 4]);
    idle(&group).await;
    let sent = send(&group, &["5", "6", "7"], 10).await;
    assert_eq!(store.calls(3).await[2], ["5", "6", "7"], "this time it could");
    store.leave.add_permits(1);
    assert_eq!(codes(sent).await, ["accepted"; 3]);
}

#[tokio::test]
async fn a_lone_message_is_committed_inline_again() {
    let (store, group) = group();
    let sent = send(&group, &["1", "2", "3"], 10).await;
    store.leave.add_permits(4);
    codes(sent).await;
    for crowded in [true, false] {
        idle(&group).await;
        assert_eq!(group.queue().crowded, crowded);
        codes(send(&group, &["4"], 10).await).await;
    }
}

#[tokio::test]
async fn a_commit_outlives_the_sender_whose_task_it_ran_in() {
    let (store, group) = group();
    let sent = send(&group, &["1"], 10).await;
    store.calls(1).await;
    sent.into_iter().for_each(|sender| sender.abort());
    store.leave.add_permits(1);
    idle(&group).await;
    assert_eq!(store.answered.load(Ordering::Relaxed), 1, "not broken off");
}

#[tokio::test]
async fn a_commit_is_bounded() {
    let (store, group) = group();
    let ids: Vec<String> = (0..MESSAGES_MAX + 12).map(|n| n.to_string()).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let sent = send(&group, &ids, 10).await;
    store.leave.add_permits(100);
    codes(sent).await;
    let sizes: Vec<usize> = store.calls(3).await.iter().map(Vec::len).collect();
    assert_eq!(sizes, [1, MESSAGES_MAX, 11]);
    codes(send(&group, &["a", "b", "c", "d", "e"], COMMIT_BYTES_MAX).await).await;
    assert!(store.calls(8).await[3..].iter().all(|call| call.len() == 1));
}

#[tokio::test]
async fn a_bad_message_fails_alone() {
    let (store, group) = group();
    let sent = send(&group, &["1", "2", "3", "bad", "5"], 10).await;
    store.leave.add_permits(100);
    assert_eq!(codes(sent).await, ["accepted", "accepted", "accepted", "text_invalid", "accepted"]);
    assert_eq!(store.calls(2).await[1].len(), 4, "they went together");
}

#[tokio::test]
async fn a_store_that_is_away_is_asked_once_for_a_whole_commit() {
    let (store, group) = group();
    let sent = send(&group, &["1", "2", "3", "away", "5"], 10).await;
    store.leave.add_permits(100);
    assert_eq!(codes(sent).await[1..], ["store_unreachable"; 4]);
    assert_eq!(store.calls(2).await.len(), 2, "the first, and the others");
}

/// The store refuses one of several messages, and goes away while each is tried alone.
#[tokio::test]
async fn a_store_that_goes_away_midway_is_not_waited_for_by_each() {
    let (store, group) = group();
    store.leave.add_permits(100);
    let many = ["1", "bad", "gone", "4", "5"].map(|id| message(id, 10)).to_vec();
    let committed = group.commit(many).await;
    let codes: Vec<_> =
        committed.iter().map(|it| it.as_ref().map_or_else(|error| error.code(), |_| "accepted")).collect();
    assert_eq!(codes, ["accepted", "text_invalid", "store_unreachable", "store_unreachable", "store_unreachable"]);
    assert_eq!(store.calls(4).await[1..], [["1"], ["bad"], ["gone"]], "nobody else was tried");
}

#[tokio::test]
async fn who_commits_many_waits_no_longer_than_a_commit_may_take() {
    let clock = Arc::new(ManualClock::default());
    let (store, group) = group_by(Arc::clone(&clock), false);
    let many = ["1", "bad", "3"].map(|id| message(id, 10)).to_vec();
    let committing = Arc::clone(&group);
    let sent = tokio::spawn(async move { committing.commit(many).await });
    store.calls(1).await;
    clock.advance(TIMEOUT / 2);
    store.leave.add_permits(2);
    store.calls(3).await;
    clock.advance(TIMEOUT / 2);
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(sent.is_finished(), "the first was stored, and the second hangs");
    let codes: Vec<_> =
        sent.await.expect("no panic").into_iter().map(|it| it.map_err(|it| it.code().to_owned())).collect();
    assert!(matches!(&codes[..], [Ok(_), Err(second), Err(_)] if second == "store_timeout"), "{codes:?}");
}

#[tokio::test]
async fn a_sender_that_hangs_up_holds_up_nobody() {
    let (store, group) = group();
    let mut sent = occupy(&store, &group).await;
    sent.extend(send(&group, &["3", "4"], 10).await);
    for gone in [2, 1, 0] {
        sent.remove(gone).abort();
    }
    store.leave.add_permits(3);
    assert_eq!(codes(sent).await, ["accepted"]);
    assert_eq!(store.calls(3).await[2], ["4"], "the third was not worth a call any more");
}

#[tokio::test]
async fn commits_that_hang_end_and_the_next_are_made() {
    let clock = Arc::new(ManualClock::default());
    let (store, group) = group_by(Arc::clone(&clock), false);
    let mut sent = occupy(&store, &group).await;
    clock.advance(TIMEOUT / 2);
    sent.extend(send(&group, &["3"], 10).await);
    clock.advance(TIMEOUT / 2);
    assert_eq!(store.calls(3).await[2], ["3"]);
    store.leave.add_permits(1);
    assert_eq!(codes(sent).await, ["store_timeout", "store_timeout", "accepted"]);
}

#[tokio::test]
async fn nobody_waits_longer_than_a_commit_may_take() {
    let clock = Arc::new(ManualClock::default());
    let (store, group) = group_by(Arc::clone(&clock), false);
    let mut sent = occupy(&store, &group).await;
    sent.extend(send(&group, &["3"], 10).await);
    clock.advance(TIMEOUT);
    assert_eq!(codes(sent).await, ["store_timeout"; 3]);
    idle(&group).await;
    assert_eq!(store.calls(2).await.len(), 2, "its sender has been answered");
}

#[tokio::test]
async fn a_sender_that_hangs_up_leaves_nothing_behind() {
    let (store, group) = group();
    let sent = occupy(&store, &group).await;
    for (count, bytes) in [(10 * MESSAGES_MAX, 10), (20, COMMIT_BYTES_MAX / 2)] {
        for _ in 0..count {
            send(&group, &["gone"], bytes).await.remove(0).abort();
            tokio::task::yield_now().await;
        }
        let queue = group.queue();
        assert!(queue.messages.len() <= 2 * MESSAGES_MAX, "{}", queue.messages.len());
        let held: usize = queue.messages.iter().map(Queued::bytes).sum();
        assert!(held == queue.bytes && held <= 2 * COMMIT_BYTES_MAX, "{held}, {} counted", queue.bytes);
    }
    store.leave.add_permits(2);
    assert_eq!(codes(sent).await, ["accepted"; 2]);
    idle(&group).await;
    assert_eq!(group.queue().bytes, 0);
}

#[test]
fn workers_of_a_runtime_that_ended_are_replaced() {
    let runtime = || tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let (store, group) = group();
    runtime().block_on(async {
        send(&group, &["1", "2"], 10).await;
    });
    store.leave.add_permits(1);
    runtime().block_on(async {
        assert_eq!(codes(send(&group, &["3"], 10).await).await, ["accepted"]);
        idle(&group).await;
    });
}

#[tokio::test]
async fn a_panic_in_the_store_fails_its_own_commit_only() {
    let (store, group) = group();
    let mut sent = occupy(&store, &group).await;
    sent.extend(send(&group, &["3", "panic"], 10).await);
    store.leave.add_permits(100);
    assert_eq!(codes(sent).await, ["accepted", "accepted", "receive_broken_off", "receive_broken_off"]);
    let later = send(&group, &["5", "6", "7"], 10).await;
    assert_eq!(codes(later).await, ["accepted"; 3]);
    idle(&group).await;
}

#[tokio::test]
async fn in_order_there_is_one_commit_at_a_time_and_none_past_a_failure() {
    let (store, group) = group_by(Arc::new(ManualClock::default()), true);
    let mut sent = send(&group, &["1"], 10).await;
    store.calls(1).await;
    sent.extend(send(&group, &["2"], 10).await);
    assert_eq!(store.calls(1).await.len(), 1, "the second waits for the first");
    store.leave.add_permits(100);
    assert_eq!(codes(sent).await, ["accepted"; 2]);
    let many = ["3", "bad", "4", "broken", "5"].map(|id| message(id, 10)).to_vec();
    let committed = group.commit(many).await;
    let codes: Vec<_> =
        committed.iter().map(|it| it.as_ref().map_or_else(|error| error.code(), |_| "accepted")).collect();
    assert_eq!(codes, ["accepted", "text_invalid", "accepted", "store_error", "held_up"], "an invalid one is passed");
    let calls = store.calls(7).await;
    assert_eq!(calls.last().unwrap(), &["broken"], "the last was not tried");
    // Of one call, but not of one commit.
    for (first, expected) in [
        ("away", ["store_unreachable"; 2]),
        ("broken", ["store_error", "held_up"]),
        ("panic", ["receive_broken_off", "held_up"]),
    ] {
        let large = [message(first, COMMIT_BYTES_MAX), message("6", 10)].to_vec();
        let committed = group.commit(large).await;
        let codes: Vec<_> = committed.iter().map(|it| it.as_ref().expect_err("not stored").code()).collect();
        assert_eq!(codes, expected, "{first}");
    }
    assert_eq!(store.calls(calls.len() + 3).await.len(), calls.len() + 3, "nothing was tried past a failure");
    // A trigger of the application may refuse a single message.
    let committed = group.commit([message("7", 10), message("orphan", 10)].to_vec()).await;
    assert_eq!((committed[0].is_ok(), committed[1].is_ok()), (true, false));
    assert!(committed[1].as_ref().is_err_and(|error| error.is_refused_alone()));
    let large = [message("bad", COMMIT_BYTES_MAX), message("6", 10)].to_vec();
    let committed = group.commit(large).await;
    assert_eq!((committed[0].is_ok(), committed[1].is_ok()), (false, true), "an invalid one is passed");
}
