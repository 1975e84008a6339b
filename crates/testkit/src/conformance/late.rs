//! The store does it late: after its caller has asked again (so it is done twice), or after another owner has taken over.

use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use postbox_core::{Disposition, EventId, LogName, Pause, Received, Selection, StartAt, State, Subscription};

use super::StoreFixture;
use super::faults::{Asked, Call, Place, asked};
use super::harness::*;
use super::lost::message;
use super::world::{Step, World};

/// A grant this much younger than a question is no mistake of a clock.
const CLOCK_MISTAKE: Duration = Duration::from_millis(1_100);

/// The call is done after it was asked for again, and after what came of that.
async fn repeated(fixture: &dyn StoreFixture, step: Step) {
    let faults = fixture.faults().await;
    for (n, place) in faults.places(step.call()).iter().enumerate() {
        let mut world = World::new(fixture, &format!("{step:?}-{n}").to_lowercase()).await;
        let request = world.prepare(step, true).await;
        let late = faults.delay(step.call(), *place, request.ask(faults.store())).await;
        if matches!(step, Step::Next | Step::NextSettled) {
            world.one_more().await;
        }
        late.after(world.asks_again(faults.again(), &request)).await;
        world.uses_the_answer(&request).await;
        world.ends().await;
    }
}

/// The call is done after another owner has begun. Where it holds the lane's lock, nobody can take over before it is done.
async fn overtaken(fixture: &dyn StoreFixture, step: Step) {
    let faults = fixture.faults().await;
    for (n, place) in faults.places(step.call()).iter().filter(|place| **place != Place::End).enumerate() {
        let world = World::new(fixture, &format!("{step:?}-overtaken-{n}").to_lowercase()).await;
        let request = world.prepare(step, false).await;
        let late = faults.delay(step.call(), *place, request.ask(faults.store())).await;
        if step == Step::Acquire {
            fixture.pass(CLOCK_MISTAKE).await;
        }
        let (lane, batch) = world.taken_over().await;
        late.after(async {}.boxed()).await;
        world.goes_on_as(lane, batch).await;
    }
}

/// A question for a lane that is answered late takes it from nobody.
pub async fn a_late_grant_takes_a_lane_from_nobody(fixture: &dyn StoreFixture) {
    repeated(fixture, Step::Acquire).await;
    overtaken(fixture, Step::Acquire).await;
}

/// A renewal holds what is held, and takes nothing back. Who gave his lane back gives back nothing of the next one's.
pub async fn a_late_renewal_or_release_concerns_no_other_lease(fixture: &dyn StoreFixture) {
    for step in [Step::Renew, Step::Release] {
        repeated(fixture, step).await;
        overtaken(fixture, step).await;
    }
}

/// Whichever of two looks for news is written last: no event falls between them. The relay ends before it settles.
pub async fn a_late_window_loses_nothing_of_a_relay_that_ends(fixture: &dyn StoreFixture) {
    repeated(fixture, Step::Next).await;
}

/// The same, and the relay goes on with what it was given; or another owner has the lane, and the cursor is his.
pub async fn a_late_window_loses_nothing_of_a_relay_that_goes_on(fixture: &dyn StoreFixture) {
    repeated(fixture, Step::NextSettled).await;
    overtaken(fixture, Step::Next).await;
}

/// A position passes what it was given for, and nothing that came after. A rewind starts at a place that was settled; nothing is settled backwards.
pub async fn a_late_position_or_rewind_passes_nothing_else(fixture: &dyn StoreFixture) {
    for step in [Step::Position, Step::Rewind] {
        repeated(fixture, step).await;
        overtaken(fixture, step).await;
    }
}

/// What arrived meanwhile is not sent again.
pub async fn a_late_settlement_makes_no_row_again(fixture: &dyn StoreFixture) {
    repeated(fixture, Step::Settle).await;
    overtaken(fixture, Step::Settle).await;
}

/// What a person sent again meanwhile stays so.
pub async fn a_late_settlement_of_due_rows_undoes_no_replay(fixture: &dyn StoreFixture) {
    repeated(fixture, Step::Due).await;
    overtaken(fixture, Step::Due).await;
}

/// A host may vanish when it has written and not committed. What it locked is given up within a lease, so that somebody can take over.
pub async fn a_settlement_that_stops_half_way_keeps_no_lock_for_longer_than_a_lease(fixture: &dyn StoreFixture) {
    let faults = fixture.faults().await;
    let world = World::new(fixture, "reader").await;
    let request = world.prepare(Step::Settle, false).await;
    let place = faults.places(Call::Settle).last().expect("a place");
    let late = faults.delay(Call::Settle, *place, request.ask(faults.store())).await;
    let renewed = tokio::time::timeout(LEASE, world.renews()).await;
    renewed.expect("the lock is given up").expect("still ours");
    late.after(nothing(faults.again())).await;
}

/// Makes a call late, at each place, beside the same call made again; the latter's error, if any.
async fn twice(
    fixture: &dyn StoreFixture,
    call: Call,
    ask: impl Fn(Store) -> Asked,
    meanwhile: impl Fn(Store) -> BoxFuture<'static, ()>,
) {
    let faults = fixture.faults().await;
    for place in faults.places(call) {
        let late = faults.delay(call, *place, ask(faults.store())).await;
        let (again, meanwhile) = (ask(faults.again()), meanwhile(faults.again()));
        let both = async move {
            let error = again.await;
            assert!(error.is_none_or(|error| error.code() == "event_id_taken"), "asked again");
            meanwhile.await;
        };
        late.after(both.boxed()).await;
    }
}

type Store = std::sync::Arc<dyn postbox_core::Store>;

fn nothing(_: Store) -> BoxFuture<'static, ()> {
    async {}.boxed()
}

/// The id says that it is there; nothing of the late call is.
pub async fn a_late_append_with_own_ids_stores_nothing_twice(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let events = [event("1").id(EventId::now_v7()), event("2").id(EventId::now_v7())];
    let ask = |store: Store| {
        let events = events.clone();
        asked(async move { store.append(&outbox(), &events).await })
    };
    twice(fixture, Call::Append, ask, nothing).await;
    assert_eq!(payloads(&lane.drain().await), ["1", "2"]);
}

/// The sender asked again and was answered; the late one is a duplicate, or a conflict.
pub async fn a_late_message_is_a_duplicate(fixture: &dyn StoreFixture) {
    let faults = fixture.faults().await;
    let several = || [message("1", "one"), message("2", "two")];
    let ask = |store: Store| asked(async move { store.receive_many(&LogName::inbox(), &several()).await });
    twice(fixture, Call::Receive, ask, nothing).await;
    let place = faults.places(Call::Receive)[0];
    let store = faults.store();
    let other = asked(async move { store.receive(&LogName::inbox(), message("3", "another")).await });
    let late = faults.delay(Call::Receive, place, other).await;
    let again = faults.again();
    let first = async move {
        let received = again.receive(&LogName::inbox(), message("3", "three")).await.expect("answered");
        assert!(matches!(received, Received::Accepted(_)), "{received:?}");
    };
    late.after(first.boxed()).await;
    assert_eq!(fixture.conflicts().await, 1);
    let reads = Subscription::new(named("inbox-reader"), LogName::inbox());
    assert_eq!(payloads(&Lane::open_as(fixture, &reads).await.drain().await), ["one", "two", "three"]);
}

/// What was sent again and arrived is not sent once more.
pub async fn a_late_replay_sends_nothing_twice(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = lane.past(vec![event("1")], vec![(0, dead())]).await[0];
    let selection = Selection { ids: Some(vec![id]), ..Selection::default() };
    let ask = |store: Store| {
        let selection = selection.clone();
        asked(async move { store.retry(&named("reader"), &selection).await })
    };
    let lease = lane.lease.clone();
    let arrives = |store: Store| {
        let lane = Lane { store, lease: lease.clone(), hold_keys: true };
        async move { assert_eq!(payloads(&lane.drain_due().await), ["1"]) }.boxed()
    };
    let place = fixture.faults().await.places(Call::Retry)[0];
    assert_eq!(fixture.faults().await.places(Call::Retry).len(), 1, "{place:?}: a second one would need another event");
    twice(fixture, Call::Retry, ask, arrives).await;
    assert!(lane.due(10).await.deliveries.is_empty());
    let record = record(&lane.store, id).await;
    assert_eq!(record.state, State::Dispatched);
}

/// What is delivered is delivered, what was taken out stays out.
pub async fn a_late_discard_takes_back_nothing_delivered(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let mut ids =
        lane.past(vec![keyed("a", "1"), keyed("a", "2")], vec![(0, retry(HOUR)), (1, Disposition::Block)]).await;
    ids.truncate(1);
    ids.extend(append(&lane.store, [event("3")]).await);
    append(&lane.store, [event("4")]).await;
    let selection = Selection { ids: Some(ids), ..Selection::default() };
    let ask = |store: Store| {
        let selection = selection.clone();
        asked(async move { store.discard(&named("reader"), &selection).await })
    };
    let lease = lane.lease.clone();
    let goes_on = |store: Store| {
        let lane = Lane { store, lease: lease.clone(), hold_keys: true };
        async move {
            assert_eq!(payloads(&lane.drain_due().await), ["2"]);
            let batch = lane.next(10).await;
            assert_eq!(batch.discarded.len(), 1);
            lane.settle(&batch, vec![(0, Disposition::Discarded)]).await;
        }
        .boxed()
    };
    twice(fixture, Call::Discard, ask, goes_on).await;
    let stats = stats(&lane.store).await;
    assert_eq!((stats.discarded, stats.dispatched, stats.pending), (2, 2, 0));
    assert!(lane.due(10).await.deliveries.is_empty());
}

/// A subscription that came meanwhile keeps what it has not read.
pub async fn a_late_prune_takes_nothing_that_is_needed(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    lane.past(vec![event("sent"), event("dead")], vec![(1, dead())]).await;
    fixture.pass(Duration::from_millis(1)).await;
    let ask = |store: Store| asked(async move { store.prune(&outbox(), Duration::ZERO).await });
    let comes = |store: Store| async move { drop(append(&store, [event("unread")]).await) }.boxed();
    twice(fixture, Call::Prune, ask, comes).await;
    let stats = stats(&lane.store).await;
    assert_eq!((stats.total, stats.dead, stats.pending), (2, 1, 1));
}

/// Two that pause make one pause.
pub async fn a_late_pause_is_the_same_pause(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let pause = Pause { until: None, by: "me".into(), why: "why".into() };
    let ask = |store: Store| {
        let pause = pause.clone();
        asked(async move { store.pause(&named("reader"), Some(&pause)).await })
    };
    twice(fixture, Call::Pause, ask, nothing).await;
    assert_eq!(lane.store.subscriptions().await.expect("listed")[0].paused, Some(pause));
    lane.store.pause(&named("reader"), None).await.expect("resumed");
    assert_eq!(lane.store.subscriptions().await.expect("listed")[0].paused, None);
}

/// It is there already, and stands where it stood.
pub async fn a_late_subscribe_makes_nothing_again(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let subscription = Subscription { start: StartAt::Now, ..reader() };
    let ask = |store: Store| {
        let subscription = subscription.clone();
        asked(async move { store.subscribe(&subscription).await })
    };
    let goes_on = |store: Store| {
        async move {
            append(&store, [event("1"), event("2")]).await;
            let lane = Lane::take(&store, "reader", "one").await;
            let batch = lane.next(1).await;
            lane.settle(&batch, Vec::new()).await;
            store.release(&lane.lease).await.expect("given back");
        }
        .boxed()
    };
    twice(fixture, Call::Subscribe, ask, goes_on).await;
    assert_eq!(payloads(&Lane::take(&store, "reader", "two").await.drain().await), ["2"]);
}

/// A schema that is there is not made again.
pub async fn a_late_migration_up_changes_nothing(fixture: &dyn StoreFixture) {
    let (_, store) = (fixture.faults().await, fixture.store());
    store.down(true).await.expect("removed");
    let ask = |store: Store| asked(async move { store.up().await });
    let used = |store: Store| async move { drop(append(&store, [event("1")]).await) }.boxed();
    twice(fixture, Call::Up, ask, used).await;
    store.validate().await.expect("there");
    assert_eq!(Lane::open(fixture).await.drain().await.len(), 1);
}

/// Who waits for a lock and is stopped has not removed anything, and removes nothing when the lock comes free.
pub async fn a_migration_down_whose_caller_has_gone_destroys_nothing_later(fixture: &dyn StoreFixture) {
    let (faults, store) = (fixture.faults().await, fixture.store());
    append(&store, [event("1")]).await;
    let mut open = fixture.begin().await;
    open.append(&outbox(), &[event("2")]).await.expect("appended, and not committed");
    let through = faults.store();
    match tokio::time::timeout(SHORT, through.down(true)).await {
        // It did not have to wait, and said so.
        Ok(Ok(_)) => return,
        Ok(Err(refused)) => assert!(!refused.message().is_empty()),
        Err(_gone) => {}
    }
    open.commit().await;
    // Whatever waited for it has its turn before this: it takes the same lock, and stands in the same queue.
    append(&through, [event("3")]).await;
    assert_eq!(payloads(&Lane::open(fixture).await.drain().await), ["1", "2", "3"]);
}

/// The cases of this suite.
#[doc(hidden)]
#[macro_export]
macro_rules! late_cases {
    ($fixture:expr) => {
        $crate::conformance_cases!(
            late,
            $fixture,
            [
                a_late_grant_takes_a_lane_from_nobody,
                a_late_renewal_or_release_concerns_no_other_lease,
                a_late_window_loses_nothing_of_a_relay_that_ends,
                a_late_window_loses_nothing_of_a_relay_that_goes_on,
                a_late_position_or_rewind_passes_nothing_else,
                a_late_settlement_makes_no_row_again,
                a_late_settlement_of_due_rows_undoes_no_replay,
                a_settlement_that_stops_half_way_keeps_no_lock_for_longer_than_a_lease,
                a_late_append_with_own_ids_stores_nothing_twice,
                a_late_message_is_a_duplicate,
                a_late_replay_sends_nothing_twice,
                a_late_discard_takes_back_nothing_delivered,
                a_late_prune_takes_nothing_that_is_needed,
                a_late_pause_is_the_same_pause,
                a_late_subscribe_makes_nothing_again,
                a_late_migration_up_changes_nothing,
                a_migration_down_whose_caller_has_gone_destroys_nothing_later,
            ]
        );
    };
}
