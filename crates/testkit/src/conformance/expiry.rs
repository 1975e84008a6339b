//! Events that expire.

use std::time::Duration;

use jiff::Timestamp;
use postbox_core::{Batch, Disposition, Replay, State};

use super::StoreFixture;
use super::harness::*;

const EXPIRED: Disposition = Disposition::Expired { at: Timestamp::constant(1_774_000_000, 0) };

/// Returns the time on the store's clock.
async fn now(lane: &Lane) -> Timestamp {
    append(&lane.store, [event("what time is it")]).await;
    lane.drain().await[0].event.created_at
}

/// The remaining time counts by the store's clock, on every path by which an event reaches a relay.
pub async fn what_has_an_end_comes_with_the_time_it_has_left(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let now = now(&lane).await;
    let events = [event("1").expires_at(now), event("2").expires_at(now + HOUR), event("3")];
    append(&lane.store, events).await;
    let check = |batch: &Batch| {
        let left: Vec<_> = batch.deliveries.iter().map(|delivery| batch.expires.get(&delivery.seq)).collect();
        assert_eq!((left[0], left[2]), (Some(&Duration::ZERO), None));
        assert!(left[1].is_some_and(|left| *left <= HOUR && *left > HOUR / 2), "{left:?}");
    };
    let batch = lane.next(10).await;
    check(&batch);
    lane.settle(&batch, (0..3).map(|place| (place, retry_now())).collect()).await;
    check(&lane.due(10).await);
}

pub async fn an_expired_event_is_dead_without_an_attempt(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(event("1"), EXPIRED), (event("2"), Delivered)]).await;
    let record = record(&lane.store, ids[0]).await;
    assert_eq!((record.state, record.attempts, record.code.as_deref()), (State::Dead, 0, Some("expired")));
    let why = record.error.as_deref().unwrap_or_default();
    assert!(why.contains("2026-03-20T09:46:40Z"), "it says when: {why}");
    let stats = stats(&lane.store).await;
    assert_eq!((stats.dead, stats.dispatched, stats.pending), (1, 1, 0));
    assert!(lane.due(10).await.deliveries.is_empty());
}

/// Its producer said that it may be left out.
pub async fn an_expired_event_holds_nobody_back(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    lane.past([(keyed("a", "1"), EXPIRED)]).await;
    append(&lane.store, [keyed("a", "2"), keyed("a", "3")]).await;
    let batch = lane.next(10).await;
    assert!(batch.held.is_empty());
    lane.settle(&batch, vec![(0, retry_now()), (1, Block)]).await;
    let due = lane.due(1).await;
    assert_eq!(payloads(&due.deliveries), ["2"]);
    lane.settle_due(&due, vec![EXPIRED]).await;
    assert_eq!(payloads(&lane.due(10).await.deliveries), ["3"]);
}

/// If it were sent again, it would become dead by expiry although it was delivered.
pub async fn what_has_ended_is_not_sent_again(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let now = now(&lane).await;
    let ids = append(&lane.store, [event("1").expires_at(now), event("2").expires_at(now + HOUR), event("3")]).await;
    lane.drain().await;
    let mut replay = Replay { ids: Some(ids), dry_run: true, ..Replay::default() };
    for dry_run in [true, false] {
        replay.dry_run = dry_run;
        assert_eq!(lane.store.replay(&named("reader"), &replay).await.expect("replayed").count, 2);
    }
    assert_eq!(payloads(&lane.drain_due().await), ["2", "3"]);
}

pub async fn an_expired_row_keeps_its_attempts(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(event("1"), retry_now())]).await;
    let due = lane.due(10).await;
    lane.settle_due(&due, vec![EXPIRED]).await;
    let record = record(&lane.store, ids[0]).await;
    assert_eq!((record.state, record.attempts, record.code.as_deref()), (State::Dead, 1, Some("expired")));
}
