//! The store executes a call late: after its caller has repeated it, or after another owner took
//! over.

use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use postbox_core::{
    Change, EventId, LogName, Pause, Prune, Received, Replay, ResetTo, Selection, StartAt, State, Subscription,
};

use super::StoreFixture;
use super::dead_letters::{handover, letters, texts};
use super::faults::{Asked, Call, Place, asked, call};
use super::harness::*;
use super::receive::inbound;
use super::world::{Step, World};

/// A grant that is younger than a request by this much cannot be a clock error.
const CLOCK_MISTAKE: Duration = Duration::from_millis(1_100);

/// Executes the call after it was repeated, and after the consequences of the repetition.
async fn repeated(fixture: &dyn StoreFixture, step: Step) {
    let faults = fixture.faults().await;
    for (n, place) in faults.places(step.call()).iter().enumerate() {
        let mut world = World::new(fixture, &format!("{step:?}-{n}").to_lowercase()).await;
        let request = world.prepare(step, true).await;
        let late = faults.delay(step.call(), *place, request.ask(faults.store())).await;
        if step.reads() {
            world.one_more().await;
        }
        late.after(world.asks_again(faults.again(), &request)).await;
        world.uses_the_answer(&request).await;
        world.ends().await;
    }
}

/// Executes the call after another owner has begun, unless the call holds the lane's lock.
async fn overtaken(fixture: &dyn StoreFixture, step: Step) {
    let faults = fixture.faults().await;
    for (n, place) in faults.places(step.call()).iter().filter(|place| **place != Place::End).enumerate() {
        let mut world = World::new(fixture, &format!("{step:?}-overtaken-{n}").to_lowercase()).await;
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

pub async fn a_late_grant_takes_a_lane_from_nobody(fixture: &dyn StoreFixture) {
    repeated(fixture, Step::Acquire).await;
    overtaken(fixture, Step::Acquire).await;
}

pub async fn a_late_renewal_or_release_concerns_no_other_lease(fixture: &dyn StoreFixture) {
    for step in [Step::Renew, Step::Release] {
        repeated(fixture, step).await;
        overtaken(fixture, step).await;
    }
}

/// Either of two reads may be written last. The relay ends before it settles.
pub async fn a_late_window_loses_nothing_of_a_relay_that_ends(fixture: &dyn StoreFixture) {
    repeated(fixture, Step::Next).await;
}

/// The relay goes on with what it was given, or another owner has the lane and its cursor.
pub async fn a_late_window_loses_nothing_of_a_relay_that_goes_on(fixture: &dyn StoreFixture) {
    repeated(fixture, Step::NextSettled).await;
    overtaken(fixture, Step::Next).await;
}

/// A position passes only what it was given for. A rewind starts at a settled position.
pub async fn a_late_position_or_rewind_passes_nothing_else(fixture: &dyn StoreFixture) {
    for step in [Step::Position, Step::Rewind] {
        repeated(fixture, step).await;
        overtaken(fixture, step).await;
    }
}

pub async fn a_late_settlement_and_read_lose_nothing_and_pass_nothing_else(fixture: &dyn StoreFixture) {
    repeated(fixture, Step::SettleAndRead).await;
    overtaken(fixture, Step::SettleAndRead).await;
}

pub async fn a_late_settlement_makes_no_row_again(fixture: &dyn StoreFixture) {
    repeated(fixture, Step::Settle).await;
    overtaken(fixture, Step::Settle).await;
}

pub async fn a_late_settlement_of_due_rows_undoes_no_replay(fixture: &dyn StoreFixture) {
    repeated(fixture, Step::Due).await;
    overtaken(fixture, Step::Due).await;
}

/// A host may vanish before its commit. Its locks must be released within a lease.
pub async fn a_settlement_that_stops_half_way_keeps_no_lock_for_longer_than_a_lease(fixture: &dyn StoreFixture) {
    let faults = fixture.faults().await;
    let mut world = World::new(fixture, "reader").await;
    let request = world.prepare(Step::Settle, false).await;
    let place = faults.places(Call::Settle).last().expect("a place");
    let late = faults.delay(Call::Settle, *place, request.ask(faults.store())).await;
    let renewed = tokio::time::timeout(LEASE, world.renews()).await;
    renewed.expect("the lock is given up").expect("still ours");
    late.after(nothing(faults.again())).await;
}

/// Delays a call at each place, repeats it meanwhile, and lets it go on.
async fn twice(
    fixture: &dyn StoreFixture,
    call: Call,
    ask: impl Fn(Store) -> Asked,
    meanwhile: impl Fn(Store) -> BoxFuture<'static, ()>,
) {
    let faults = fixture.faults().await;
    let [store, again] = faults.stores(call);
    for place in faults.places(call) {
        let late = faults.delay(call, *place, ask(store.clone())).await;
        let (again, meanwhile) = (ask(again.clone()), meanwhile(again.clone()));
        let both = async move {
            let error = again.await;
            let done = ["subscription_changed", "subscription_unknown"];
            assert!(error.as_ref().is_none_or(|error| done.contains(&error.code())), "asked again: {error:?}");
            meanwhile.await;
        };
        late.after(both.boxed()).await;
    }
}

type Store = std::sync::Arc<dyn postbox_core::Store>;

fn nothing(_: Store) -> BoxFuture<'static, ()> {
    async {}.boxed()
}

pub async fn a_late_append_with_own_ids_stores_nothing_twice(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let events = [event("1").id(EventId::now_v7()), event("2").id(EventId::now_v7())];
    let ask = call!(store, [events], store.append(&outbox(), &events));
    twice(fixture, Call::Append, ask, nothing).await;
    assert_eq!(payloads(&lane.drain().await), ["1", "2"]);
}

pub async fn a_late_message_is_a_duplicate(fixture: &dyn StoreFixture) {
    let faults = fixture.faults().await;
    let several = || [inbound("1", "one"), inbound("2", "two")];
    let ask = call!(store, [], store.receive_many(&LogName::inbox(), &several()));
    twice(fixture, Call::Receive, ask, nothing).await;
    let place = faults.places(Call::Receive)[0];
    let store = faults.store();
    let other = asked(async move { store.receive(&LogName::inbox(), inbound("3", "another")).await });
    let late = faults.delay(Call::Receive, place, other).await;
    let again = faults.again();
    let first = async move {
        let received = again.receive(&LogName::inbox(), inbound("3", "three")).await.expect("answered");
        assert!(matches!(received, Received::Accepted(_)), "{received:?}");
    };
    late.after(first.boxed()).await;
    assert_eq!(fixture.conflicts().await, 1);
    let reads = Subscription { lanes: Some(1), ..Subscription::new(named("inbox-reader"), LogName::inbox()) };
    assert_eq!(payloads(&Lane::open_as(fixture, &reads).await.drain().await), ["one", "two", "three"]);
}

pub async fn a_late_replay_sends_nothing_twice(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = lane.past([(event("1"), dead())]).await[0];
    let selection = these(&[id]);
    let ask = call!(store, [selection], store.change(&named("reader"), &Change::Retry, &selection));
    let lease = lane.lease.clone();
    let arrives = |store: Store| {
        let lane = Lane::of(store, lease.clone());
        async move { assert_eq!(payloads(&lane.drain_due().await), ["1"]) }.boxed()
    };
    assert_eq!(fixture.faults().await.places(Call::Retry).len(), 1, "a second place would need another event");
    twice(fixture, Call::Retry, ask, arrives).await;
    assert!(lane.due(10).await.deliveries.is_empty());
    assert_eq!(record(&lane.store, id).await.state, State::Dispatched);
}

pub async fn a_late_discard_takes_back_nothing_delivered(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(keyed("a", "1"), retry(HOUR)), (keyed("a", "2"), Block)]).await;
    let unread = append(&lane.store, [event("3"), event("4")]).await;
    let selection = these(&[ids[0], unread[0]]);
    let ask = call!(store, [selection], store.change(&named("reader"), &Change::Discard, &selection));
    let lease = lane.lease.clone();
    let goes_on = |store: Store| {
        let lane = Lane::of(store, lease.clone());
        async move {
            assert_eq!(payloads(&lane.drain_due().await), ["2"]);
            let batch = lane.next(10).await;
            assert_eq!(batch.discarded.len(), 1);
            lane.settle(&batch, vec![(0, Discarded)]).await;
        }
        .boxed()
    };
    twice(fixture, Call::Discard, ask, goes_on).await;
    let stats = stats(&lane.store).await;
    assert_eq!((stats.discarded, stats.dispatched, stats.pending), (2, 2, 0));
    assert!(lane.due(10).await.deliveries.is_empty());
}

pub async fn a_late_mark_takes_back_nothing_delivered(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(keyed("a", "1"), retry(HOUR)), (keyed("a", "2"), Block)]).await;
    let (selection, mark) = (these(&ids), Change::MarkDead { why: None });
    let ask = call!(store, [selection, mark], store.change(&named("reader"), &mark, &selection));
    let lease = lane.lease.clone();
    let revived = |store: Store| {
        let lane = Lane::of(store, lease.clone());
        async move {
            lane.replay(Selection::default()).await;
            assert_eq!(payloads(&lane.drain_due().await), ["1", "2"]);
        }
        .boxed()
    };
    twice(fixture, Call::MarkDead, ask, revived).await;
    let stats = stats(&lane.store).await;
    assert_eq!((stats.dead, stats.dispatched, stats.pending), (0, 2, 0));
}

/// Like a click at that moment: events delivered meanwhile go out once more, with another replay
/// number.
pub async fn a_late_replay_of_the_delivered_is_another_replay(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(event("1"), Delivered)]).await;
    let replay = Replay { ids: Some(ids), ..Replay::default() };
    let ask = call!(store, [replay], store.replay(&named("reader"), &replay));
    twice(fixture, Call::Replay, ask, nothing).await;
    let mut seen = Vec::new();
    loop {
        let due = lane.due(10).await;
        let Some(delivery) = due.deliveries.first() else { break };
        assert!(!seen.contains(&delivery.replay));
        seen.push(delivery.replay);
        lane.settle_due(&due, vec![Delivered]).await;
    }
    assert!((1..=2).contains(&seen.len()), "{seen:?}");
}

pub async fn a_late_look_for_what_nobody_wants_finds_nothing_twice(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    append(&lane.store, [event("1")]).await;
    let ask = call!(store, [], store.note_unrouted(&outbox()));
    let comes = |store: Store| async move { drop(append(&store, [event("2")]).await) }.boxed();
    twice(fixture, Call::NoteUnrouted, ask, comes).await;
    while listed(&lane.store, State::Unrouted).await.len() < 2 {
        _ = lane.store.note_unrouted(&outbox()).await.expect("noted");
    }
    assert_eq!(listed(&lane.store, State::Unrouted).await, ["1", "2"]);
}

pub async fn a_late_prune_takes_nothing_that_is_needed(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(event("sent"), Delivered), (event("dead"), dead())]).await;
    fixture.pass(Duration::from_millis(1)).await;
    let ask = call!(store, [], store.prune(&outbox(), &Prune::default()));
    let comes = |store: Store| async move { drop(append(&store, [event("unread")]).await) }.boxed();
    twice(fixture, Call::Prune, ask, comes).await;
    let stats = stats(&lane.store).await;
    assert_eq!((stats.dispatched, stats.dead, stats.pending), (1, 1, 1));
}

pub async fn a_late_pause_is_the_same_pause(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let pause = Pause { until: None, by: "me".into(), why: "why".into() };
    let ask = call!(store, [pause], store.pause(&named("reader"), Some(&pause)));
    twice(fixture, Call::Pause, ask, nothing).await;
    assert_eq!(lane.store.subscriptions().await.expect("listed")[0].paused, Some(pause));
    lane.store.pause(&named("reader"), None).await.expect("resumed");
    assert_eq!(lane.store.subscriptions().await.expect("listed")[0].paused, None);
}

/// Like a click at that moment.
pub async fn a_late_pause_or_resume_replaces_what_was_set_since(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let pause = |why: &str| Some(Pause { until: None, by: "me".into(), why: why.into() });
    for (call, late, since) in [(Call::Pause, pause("late"), None), (Call::Resume, None, pause("since"))] {
        let ask = call!(store, [late], store.pause(&named("reader"), late.as_ref()));
        let sets = |store: Store| {
            let since = since.clone();
            async move { store.pause(&named("reader"), since.as_ref()).await.expect("set") }.boxed()
        };
        twice(fixture, call, ask, sets).await;
        // At its end the call keeps the others waiting, so it is not the last one.
        let waits = fixture.faults().await.places(call).contains(&Place::End);
        assert_eq!(info(&lane.store, "reader").await.paused, if waits { since } else { late });
    }
}

/// The others may count one relay too few, until it asks or renews again. No lease changes.
pub async fn a_late_leave_ends_with_the_next_heartbeat(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let ask = call!(store, [], store.leave(&named("reader"), &owner("one")));
    let is_back = |store: Store| async move { drop(acquire(&store, "reader", "one", LONG).await) }.boxed();
    twice(fixture, Call::Leave, ask, is_back).await;
    assert_eq!(acquire(&lane.store, "reader", "two", LONG).await.lease, None, "it is held");
    lane.store.renew(&lane.lease, LONG).await.expect("still ours");
    assert_eq!(acquire(&lane.store, "reader", "two", LONG).await.replicas, 2);
}

/// The event is replayed and dies again before the call is executed, or another owner has the lane.
pub async fn a_late_handover_concerns_no_later_death(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(event("1"), dead())]).await;
    for again in [None, Some(HOUR)] {
        let said: Vec<_> = letters(&lane).await.iter().map(|letter| handover(letter, again)).collect();
        assert_eq!(said.len(), 1);
        let lease = lane.lease.clone();
        let ask = call!(store, [lease, said], store.hand_over(&lease, &said));
        let dies_again = |store: Store| {
            let (lane, ids) = (Lane::of(store, lease.clone()), ids.clone());
            async move {
                lane.replay(these(&ids)).await;
                let batch = lane.due(1).await;
                lane.settle_due(&batch, vec![dead()]).await;
            }
            .boxed()
        };
        twice(fixture, Call::HandOver, ask, dies_again).await;
        assert_eq!(texts(&lane).await, ["1"], "{again:?}");
    }
    let faults = fixture.faults().await;
    let (lease, done) = (lane.lease.clone(), vec![handover(&letters(&lane).await[0], None)]);
    let ask = call!(store, [lease, done], store.hand_over(&lease, &done));
    let place = faults.places(Call::HandOver)[0];
    if place == Place::End {
        return; // It holds the lane's lock: nobody takes the lane over before it is done.
    }
    let late = faults.delay(Call::HandOver, place, ask(faults.store())).await;
    let next = lane.taken_over().await;
    late.after(nothing(faults.again())).await;
    assert_eq!(texts(&next).await, ["1"]);
}

/// The former name belongs to another subscription by then.
pub async fn a_late_rename_renames_no_other(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(event("1"), dead())]).await;
    let store = lane.release().await;
    let generation = info(&store, "reader").await.generation;
    let ask = call!(store, [], store.rename(&named("reader"), generation, &named("writer")));
    let made = |store: Store| async move { store.subscribe(&reader()).await.expect("the name is free") }.boxed();
    twice(fixture, Call::Rename, ask, made).await;
    assert_eq!(store.stats(&named("writer")).await.expect("counted").dead, 1);
    assert_eq!((stats(&store).await.dead, stats(&store).await.pending), (0, 1));
}

pub async fn a_late_removal_removes_no_other(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(event("1"), dead())]).await;
    let store = lane.release().await;
    let generation = info(&store, "reader").await.generation;
    let ask = call!(store, [], store.remove(&named("reader"), generation));
    let made = |store: Store| {
        async move {
            store.subscribe(&reader()).await.expect("made anew");
            let lane = Lane::take(&store, "reader", "one").await;
            assert_eq!(payloads(&lane.drain().await), ["1"]);
            lane.release().await;
        }
        .boxed()
    };
    twice(fixture, Call::Remove, ask, made).await;
    assert_eq!(stats(&store).await.dispatched, 1, "the one that was made anew is there");
}

pub async fn a_late_reset_moves_nothing_that_was_taken_since(fixture: &dyn StoreFixture) {
    for to in [ResetTo::Beginning, ResetTo::Now] {
        let name = format!("reader-{}", u8::from(to == ResetTo::Now));
        let store = fixture.store();
        let of = Subscription { lanes: Some(1), start: StartAt::Now, ..Subscription::new(named(&name), outbox()) };
        store.subscribe(&of).await.expect("new");
        let lane = Lane::take(&store, &name, "one").await;
        append(&store, [event("1")]).await;
        lane.drain().await;
        append(&store, [event("2")]).await;
        lane.release().await;
        let name = named(&name);
        let stamp = store.reset(&name, to, None).await.expect("counted").stamp;
        let ask = call!(store, [name, stamp], store.reset(&name, to, Some(&stamp)));
        let next = |store: Store| {
            let name = name.clone();
            async move {
                let lane = Lane::take(&store, name.as_str(), "two").await;
                lane.drain().await;
                append(&store, [event("3")]).await;
                lane.release().await;
            }
            .boxed()
        };
        twice(fixture, Call::Reset, ask, next).await;
        let left = payloads(&Lane::take(&store, name.as_str(), "three").await.drain().await);
        assert_eq!(left, ["3"], "{to:?}");
        store.remove(&name, info(&store, name.as_str()).await.generation).await.expect("removed");
    }
}

pub async fn a_late_change_of_lanes_loses_nothing(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    append(&lane.store, numbered(20)).await;
    let batch = lane.next(5).await;
    lane.settle(&batch, vec![(0, retry_now())]).await;
    let store = lane.release().await;
    let all = std::sync::Arc::new(std::sync::Mutex::new(payloads(&batch.deliveries[1..])));
    let ask = call!(store, [], store.set_lanes(&named("reader"), 3));
    let goes_on = |store: Store| {
        let all = all.clone();
        async move {
            let lanes = Lane::take_all(&store, "reader").await;
            let batch = lanes[0].next(3).await;
            lanes[0].settle(&batch, Vec::new()).await;
            all.lock().expect("no panic while held").extend(payloads(&batch.deliveries));
            for lane in lanes {
                lane.release().await;
            }
        }
        .boxed()
    };
    twice(fixture, Call::SetLanes, ask, goes_on).await;
    let lanes = Lane::take_all(&store, "reader").await;
    let mut all = all.lock().expect("no panic while held").clone();
    all.extend(payloads(&Lane::run_all(&lanes).await));
    all.sort();
    let mut expected: Vec<String> = (1..=20).map(|n| n.to_string()).collect();
    expected.sort();
    assert_eq!(all, expected);
}

pub async fn a_late_subscribe_makes_nothing_again(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let subscription = Subscription { start: StartAt::Now, ..reader() };
    let ask = call!(store, [subscription], store.subscribe(&subscription));
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

pub async fn a_late_migration_up_changes_nothing(fixture: &dyn StoreFixture) {
    let (_, store) = (fixture.faults().await, fixture.store());
    fixture.owner().down(true).await.expect("removed");
    let ask = call!(store, [], store.up());
    let used = |store: Store| async move { drop(append(&store, [event("1")]).await) }.boxed();
    twice(fixture, Call::Up, ask, used).await;
    fixture.grant().await;
    store.validate().await.expect("there");
    assert_eq!(Lane::open(fixture).await.drain().await.len(), 1);
}

/// A command that was stopped while it waited for a lock does nothing when it gets the lock.
pub async fn a_migration_down_whose_caller_has_gone_destroys_nothing_later(fixture: &dyn StoreFixture) {
    let (faults, store) = (fixture.faults().await, fixture.store());
    append(&store, [event("1")]).await;
    let mut open = fixture.begin().await;
    open.append(&outbox(), &[event("2")]).await.expect("appended, and not committed");
    let [through, _] = faults.stores(Call::Down);
    match tokio::time::timeout(SHORT, through.down(true)).await {
        // It did not have to wait, and reported that.
        Ok(Ok(_)) => return,
        Ok(Err(refused)) => assert!(!refused.message().is_empty()),
        Err(_gone) => {}
    }
    open.commit().await;
    // It queues for the same lock, behind any earlier waiters.
    append(&faults.store(), [event("3")]).await;
    assert_eq!(payloads(&Lane::open(fixture).await.drain().await), ["1", "2", "3"]);
}
