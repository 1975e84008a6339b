//! Commit order: no uncommitted event is read, and none is lost, however late it commits.

use postbox_core::{StartAt, State, Subscription};

use super::StoreFixture;
use super::harness::*;

pub async fn an_open_transaction_is_invisible_until_it_commits(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let mut open = fixture.begin().await;
    let ids = open.append(&outbox(), &[event("1"), event("2")]).await.expect("appended");
    assert!(lane.drain().await.is_empty());
    assert_eq!(stats(&lane.store).await.total, 0);
    assert_eq!(lane.store.get(&named("reader"), ids[0]).await.expect("asked"), None);
    assert!(listed(&lane.store, State::Pending).await.is_empty());
    open.commit().await;
    assert_eq!(payloads(&lane.drain().await), ["1", "2"], "all of it at once");
}

pub async fn a_rolled_back_transaction_leaves_nothing(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let open = begin_with(fixture, [event("phantom")]).await;
    open.rollback().await;
    let dropped = begin_with(fixture, [event("phantom")]).await;
    drop(dropped);
    append(&lane.store, [event("real")]).await;
    assert_eq!(payloads(&lane.drain().await), ["real"]);
    assert_eq!(stats(&lane.store).await.total, 1);
}

pub async fn a_rolled_back_savepoint_leaves_the_rest(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let mut open = begin_with(fixture, [event("1")]).await;
    open.savepoint().await;
    open.append(&outbox(), &[event("phantom")]).await.expect("appended");
    open.rollback_to_savepoint().await;
    open.append(&outbox(), &[event("2")]).await.expect("appended");
    open.commit().await;
    assert_eq!(payloads(&lane.drain().await), ["1", "2"]);
}

pub async fn a_refused_append_in_a_transaction_writes_nothing(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let mut open = fixture.begin().await;
    open.append(&outbox(), &[event("fine"), event("bad").key("")]).await.expect_err("refused before the round trip");
    open.append(&outbox(), &[event("kept")]).await.expect("the transaction is still usable");
    open.commit().await;
    assert_eq!(payloads(&lane.drain().await), ["kept"]);
}

/// The problem of every cursor on a sequence: `seq` was taken early, and the commit came late.
pub async fn a_late_commit_with_a_low_seq_is_delivered(fixture: &dyn StoreFixture) {
    let Some(mut early) = begin_beside_others(fixture).await else { return };
    let lane = Lane::open(fixture).await;
    early.append(&outbox(), &[event("early")]).await.expect("appended");
    append(&lane.store, [event("late")]).await;
    assert_eq!(payloads(&lane.drain().await), ["late"], "an open transaction delays only its own events");
    early.commit().await;
    append(&lane.store, [event("after")]).await;
    assert_eq!(payloads(&lane.drain().await), ["early", "after"]);
}

pub async fn a_commit_inside_an_open_window_is_not_lost(fixture: &dyn StoreFixture) {
    let Some(mut early) = begin_beside_others(fixture).await else { return };
    let lane = Lane::open(fixture).await;
    early.append(&outbox(), &[event("early")]).await.expect("appended");
    append(&lane.store, numbered(4)).await;
    let first = lane.next(2).await;
    lane.settle(&first, vec![]).await;
    early.commit().await;
    let mut seen = payloads(&first.deliveries);
    seen.extend(payloads(&lane.taken_over().await.drain().await));
    seen.sort();
    assert_eq!(seen, ["1", "2", "3", "4", "early"]);
}

pub async fn a_transaction_open_over_many_windows_delays_only_itself(fixture: &dyn StoreFixture) {
    let Some(mut hours) = begin_beside_others(fixture).await else { return };
    let lane = Lane::open(fixture).await;
    hours.append(&outbox(), &[event("first")]).await.expect("appended");
    for n in 0..5 {
        append(&lane.store, [event(&n.to_string())]).await;
        assert_eq!(payloads(&lane.drain().await), [n.to_string()]);
    }
    hours.append(&outbox(), &[event("last")]).await.expect("appended");
    let other = begin_with(fixture, [event("other")]).await;
    hours.commit().await;
    assert_eq!(payloads(&lane.drain().await), ["first", "last"]);
    other.commit().await;
    assert_eq!(payloads(&lane.drain().await), ["other"]);
}

/// A transaction may begin early and write late.
pub async fn per_key_order_is_commit_order_not_begin_order(fixture: &dyn StoreFixture) {
    let Some(mut early) = begin_beside_others(fixture).await else { return };
    let lane = Lane::open(fixture).await;
    // Both in one window.
    early.append(&outbox(), &[keyed("else", "0")]).await.expect("appended");
    append(&lane.store, [keyed("k", "1")]).await;
    early.append(&outbox(), &[keyed("k", "2")]).await.expect("appended");
    early.commit().await;
    // In a separate window.
    let mut early = begin_with(fixture, [keyed("else", "0")]).await;
    append(&lane.store, [keyed("k", "3")]).await;
    let mut seen = lane.drain().await;
    early.append(&outbox(), &[keyed("k", "4")]).await.expect("appended");
    early.commit().await;
    append(&lane.store, [keyed("k", "5")]).await;
    seen.extend(lane.drain().await);
    seen.retain(|delivery| delivery.event.key.as_ref().is_some_and(|key| key.as_str() == "k"));
    assert_eq!(payloads(&seen), ["1", "2", "3", "4", "5"]);
}

pub async fn starting_now_includes_what_commits_later(fixture: &dyn StoreFixture) {
    let Some(mut open) = begin_beside_others(fixture).await else { return };
    open.append(&outbox(), &[event("open")]).await.expect("appended");
    let store = fixture.store();
    append(&store, [event("old")]).await;
    let lane = Lane::open_as(fixture, &Subscription { start: StartAt::Now, ..reader() }).await;
    assert!(lane.drain().await.is_empty());
    open.commit().await;
    assert_eq!(payloads(&lane.drain().await), ["open"]);
}
