//! The store executed a call and the answer is lost. The caller repeats it, which changes nothing.

use std::sync::Arc;
use std::time::Duration;

use postbox_core::{
    Change, ErrorKind, EventId, LogName, NewEvent, Pause, Prune, Received, Replay, ResetTo, StartAt, State, Store,
    Subscription,
};

use super::StoreFixture;
use super::dead_letters::{handover, letters, texts};
use super::faults::{Asked, Call, call};
use super::harness::*;
use super::receive::inbound;
use super::world::{Step, World};

async fn step(fixture: &dyn StoreFixture, step: Step) {
    let mut world = World::new(fixture, &format!("{step:?}").to_lowercase()).await;
    let request = world.prepare(step, true).await;
    world.faults.lose_answer(step.call(), request.ask(world.faults.store())).await;
    if matches!(step, Step::Next | Step::NextSettled) {
        world.one_more().await;
    }
    world.goes_on(step).await;
    // It is the same caller, so its lease is not lost.
    let error = request.ask(world.faults.store()).await;
    assert!(error.is_none() || step == Step::Next || step == Step::NextSettled, "{step:?} repeated: {error:?}");
    world.uses_the_answer(&request).await;
    world.ends().await;
}

pub async fn a_grant_with_a_lost_answer_locks_its_lane_no_longer_than_the_lease(fixture: &dyn StoreFixture) {
    step(fixture, Step::Acquire).await;
}

pub async fn a_renewal_and_a_release_may_be_repeated(fixture: &dyn StoreFixture) {
    step(fixture, Step::Renew).await;
    step(fixture, Step::Release).await;
}

pub async fn a_window_with_a_lost_answer_is_read_again(fixture: &dyn StoreFixture) {
    step(fixture, Step::Next).await;
    step(fixture, Step::NextSettled).await;
}

pub async fn a_position_and_a_rewind_may_be_repeated(fixture: &dyn StoreFixture) {
    step(fixture, Step::Position).await;
    step(fixture, Step::Rewind).await;
}

pub async fn a_settlement_repeated_makes_no_row_again(fixture: &dyn StoreFixture) {
    step(fixture, Step::Settle).await;
}

/// A row that a person retried in between is a different row.
pub async fn a_settlement_of_due_rows_repeated_undoes_no_replay(fixture: &dyn StoreFixture) {
    step(fixture, Step::Due).await;
}

/// Makes a call whose answer is lost. Returns the store through which its caller goes on.
async fn lost(fixture: &dyn StoreFixture, call: Call, ask: &impl Fn(Arc<dyn Store>) -> Asked) -> Arc<dyn Store> {
    let faults = fixture.faults().await;
    let [store, again] = faults.stores(call);
    faults.lose_answer(call, ask(store)).await;
    again
}

pub async fn an_append_with_own_ids_is_stored_once(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let events = [event("1").id(EventId::now_v7()), event("2").id(EventId::now_v7())];
    let again = lost(fixture, Call::Append, &call!(store, [events], store.append(&outbox(), &events))).await;
    assert_eq!(again.append(&outbox(), &events).await.expect("it says so").known(), 2);
    assert_eq!(payloads(&lane.drain().await), ["1", "2"]);
}

/// Without ids, a repetition cannot be recognised.
pub async fn an_append_without_ids_is_stored_whole_each_time(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let ask = call!(store, [], store.append(&outbox(), &[event("1"), event("2")]));
    let again = lost(fixture, Call::Append, &ask).await;
    assert!(ask(again).await.is_none());
    assert_eq!(payloads(&lane.drain().await), ["1", "2", "1", "2"]);
}

pub async fn a_message_that_was_stored_is_a_duplicate(fixture: &dyn StoreFixture) {
    let inbox = LogName::inbox();
    let one = call!(store, [inbox], store.receive(&inbox, inbound("1", "one")));
    lost(fixture, Call::Receive, &one).await;
    let several = [inbound("2", "two"), inbound("3", "three"), inbound("1", "another")];
    let many = call!(store, [inbox, several], store.receive_many(&inbox, &several));
    let again = lost(fixture, Call::Receive, &many).await;
    assert_eq!(again.receive(&inbox, inbound("1", "one")).await.expect("answered"), Received::Duplicate);
    let received = again.receive_many(&inbox, &several).await.expect("answered");
    assert_eq!(received, [Received::Duplicate, Received::Duplicate, Received::Conflict]);
    assert_eq!(fixture.conflicts().await, 1);
    assert_eq!(again.conflicts(10).await.expect("listed")[0].times, 2);
    let reads = Subscription { lanes: Some(1), ..Subscription::new(named("inbox-reader"), inbox) };
    assert_eq!(payloads(&Lane::open_as(fixture, &reads).await.drain().await), ["one", "two", "three"]);
}

pub async fn a_replay_repeated_replays_once(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let id = lane.past([(event("1"), dead())]).await[0];
    let (reader, dead) = (named("reader"), these(&[id]));
    let again =
        lost(fixture, Call::Retry, &call!(store, [reader, dead], store.change(&reader, &Change::Retry, &dead))).await;
    assert_eq!(again.change(&reader, &Change::Retry, &dead).await.expect("asked").count, 0);
    assert_eq!(record(&lane.store, id).await.replays, 1);
    assert_eq!(payloads(&lane.drain_due().await), ["1"]);
    assert_eq!(again.change(&reader, &Change::Retry, &dead).await.expect("asked").count, 0);
    assert_eq!(record(&lane.store, id).await.state, State::Dispatched);
}

pub async fn a_discard_repeated_takes_out_nothing_more(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(keyed("a", "1"), retry(HOUR)), (keyed("a", "2"), Block)]).await;
    let unread = append(&lane.store, [event("3"), event("4")]).await;
    let (reader, both) = (named("reader"), these(&[ids[0], unread[0]]));
    let again =
        lost(fixture, Call::Discard, &call!(store, [reader, both], store.change(&reader, &Change::Discard, &both)))
            .await;
    assert_eq!(again.change(&reader, &Change::Discard, &both).await.expect("asked").count, 0);
    assert_eq!(stats(&lane.store).await.discarded, 2);
    assert_eq!(payloads(&lane.drain_due().await), ["2"]);
    let batch = lane.next(10).await;
    assert_eq!((payloads(&batch.deliveries), batch.discarded.len()), (vec!["3".to_owned(), "4".to_owned()], 1));
}

pub async fn a_mark_repeated_is_one(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(keyed("a", "1"), retry(HOUR)), (keyed("a", "2"), Block)]).await;
    let unread = append(&lane.store, [event("3"), event("4")]).await;
    let (reader, both, mark) = (named("reader"), these(&[ids[0], unread[0]]), Change::MarkDead { why: None });
    let ask = call!(store, [reader, both, mark], store.change(&reader, &mark, &both));
    let again = lost(fixture, Call::MarkDead, &ask).await;
    assert_eq!(again.change(&reader, &mark, &both).await.expect("asked").count, 0);
    assert_eq!(listed(&lane.store, State::Dead).await, ["1", "3"]);
    assert_eq!(record(&lane.store, ids[0]).await.error.expect("it says why").matches("by a person").count(), 1);
    assert_eq!(payloads(&lane.drain_due().await), ["2"]);
}

/// Events that are being sent already are skipped.
pub async fn a_replay_of_the_delivered_repeated_is_one(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(event("1"), Delivered)]).await;
    let (reader, replay) = (named("reader"), Replay { ids: Some(ids), ..Replay::default() });
    let ask = call!(store, [reader, replay], store.replay(&reader, &replay));
    let again = lost(fixture, Call::Replay, &ask).await;
    assert_eq!(again.replay(&reader, &replay).await.expect("asked").count, 0);
    assert_eq!(payloads(&lane.drain_due().await), ["1"]);
}

/// Each event is found once and handed over once.
pub async fn a_look_for_what_nobody_wants_repeated_finds_nothing_twice(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    append(&lane.store, [event("1")]).await;
    append(&lane.store, [NewEvent::json("a", "2")]).await;
    lane.drain().await;
    append(&lane.store, [NewEvent::json("a", "3")]).await;
    lane.drain().await;
    let ask = call!(store, [], store.note_unrouted(&outbox()));
    let again = lost(fixture, Call::NoteUnrouted, &ask).await;
    while listed(&again, State::Unrouted).await.is_empty() {
        _ = again.note_unrouted(&outbox()).await.expect("noted");
    }
    assert_eq!(listed(&again, State::Unrouted).await, ["1"]);
    lane.store.subscribe(&reader()).await.expect("a wider filter");
    lane.drain().await;
    // Even a subscription that takes everything is asked which of them it wants.
    lost(fixture, Call::NoteUnrouted, &ask).await;
    while again.note_unrouted(&outbox()).await.expect("noted").more {}
    assert_eq!(payloads(&lane.drain_due().await), ["1"]);
    assert!(lane.drain_due().await.is_empty());
}

pub async fn a_prune_repeated_takes_nothing_that_is_needed(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(event("sent"), Delivered), (event("dead"), dead())]).await;
    append(&lane.store, [event("unread")]).await;
    fixture.pass(Duration::from_millis(1)).await;
    let again = lost(fixture, Call::Prune, &call!(store, [], store.prune(&outbox(), &Prune::default()))).await;
    assert_eq!(again.prune(&outbox(), &Prune::default()).await.expect("pruned").count, 0);
    let stats = stats(&lane.store).await;
    assert_eq!((stats.dispatched, stats.dead, stats.pending), (1, 1, 1));
}

pub async fn a_pause_repeated_is_one_pause(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let pause = Pause { until: None, by: "me".into(), why: "why".into() };
    for (call, pause) in [(Call::Pause, Some(pause)), (Call::Resume, None)] {
        let ask = call!(store, [pause], store.pause(&named("reader"), pause.as_ref()));
        let again = lost(fixture, call, &ask).await;
        again.pause(&named("reader"), pause.as_ref()).await.expect("set");
        assert_eq!(lane.store.subscriptions().await.expect("listed")[0].paused, pause);
    }
}

pub async fn a_leave_repeated_is_one(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    assert_eq!(acquire(&lane.store, "reader", "two", LONG).await.replicas, 2);
    let again = lost(fixture, Call::Leave, &call!(store, [], store.leave(&named("reader"), &owner("two")))).await;
    again.leave(&named("reader"), &owner("two")).await.expect("it has left");
    assert_eq!(acquire(&lane.store, "reader", "one", LONG).await.replicas, 1);
}

pub async fn a_handover_repeated_is_one(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(event("1"), dead()), (event("2"), dead())]).await;
    let done: Vec<_> = letters(&lane).await.iter().take(1).map(|letter| handover(letter, None)).collect();
    let lease = lane.lease.clone();
    let ask = call!(store, [lease, done], store.hand_over(&lease, &done));
    let again = lost(fixture, Call::HandOver, &ask).await;
    assert_eq!(texts(&lane).await, ["2"]);
    lane.replay(these(&ids[..1])).await;
    let batch = lane.due(1).await;
    lane.settle_due(&batch, vec![dead()]).await;
    again.hand_over(&lane.lease, &done).await.expect("said again");
    assert_eq!(texts(&lane).await, ["1", "2"], "the second death was not handed over");
}

pub async fn a_subscription_is_made_once(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    append(&store, [event("before")]).await;
    let of = Subscription { start: StartAt::Now, lanes: Some(2), ..reader() };
    let again = lost(fixture, Call::Subscribe, &call!(store, [of], store.subscribe(&of))).await;
    append(&store, [event("after")]).await;
    again.subscribe(&of).await.expect("it is there");
    assert_eq!(store.subscriptions().await.expect("listed")[0].lanes.len(), 2);
    let mut arrived = Vec::new();
    for by in ["one", "two"] {
        arrived.extend(payloads(&Lane::take(&store, "reader", by).await.drain().await));
    }
    assert_eq!(arrived, ["after"]);
}

pub async fn a_rename_repeated_is_one(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(event("1"), Delivered), (event("2"), dead())]).await;
    let store = lane.release().await;
    let generation = info(&store, "reader").await.generation;
    let ask = call!(store, [], store.rename(&named("reader"), generation, &named("writer")));
    let again = lost(fixture, Call::Rename, &ask).await;
    again.rename(&named("reader"), generation, &named("writer")).await.expect("it is done");
    assert_eq!(info(&store, "writer").await.generation, generation);
    assert_eq!(store.stats(&named("writer")).await.expect("counted").dead, 1);
    assert!(Lane::take(&store, "writer", "two").await.drain().await.is_empty());
}

pub async fn a_removal_repeated_removes_nothing_else(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader()).await;
    store.subscribe(&reader_named("other")).await.expect("another");
    let generation = info(&store, "reader").await.generation;
    let ask = call!(store, [], store.remove(&named("reader"), generation));
    let again = lost(fixture, Call::Remove, &ask).await;
    refused(again.remove(&named("reader"), generation).await, ErrorKind::NotFound, "subscription_unknown");
    assert_eq!(info(&store, "other").await.name, named("other"));
    again.subscribe(&reader()).await.expect("made anew");
    refused(again.remove(&named("reader"), generation).await, ErrorKind::Conflict, "subscription_changed");
}

pub async fn a_reset_repeated_is_one(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(event("1"), Delivered), (event("2"), dead())]).await;
    let store = lane.release().await;
    let (reader, to) = (named("reader"), ResetTo::Beginning);
    let stamp = plan(&store, to).await.stamp;
    let ask = call!(store, [reader, stamp], store.reset(&reader, to, Some(&stamp)));
    let again = lost(fixture, Call::Reset, &ask).await;
    refused(again.reset(&reader, to, Some(&stamp)).await, ErrorKind::Conflict, "subscription_changed");
    let lane = Lane::take(&store, "reader", "two").await;
    let sent = lane.drain().await;
    assert_eq!(payloads(&sent), ["1", "2"]);
    lane.release().await;
    refused(again.reset(&reader, to, Some(&stamp)).await, ErrorKind::Conflict, "subscription_changed");
    assert!(Lane::take(&store, "reader", "three").await.drain().await.is_empty());
}

pub async fn a_change_of_lanes_repeated_is_one(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    append(&lane.store, numbered(20)).await;
    let batch = lane.next(5).await;
    lane.settle(&batch, vec![(0, retry_now())]).await;
    let store = lane.release().await;
    let ask = call!(store, [], store.set_lanes(&named("reader"), 3));
    let again = lost(fixture, Call::SetLanes, &ask).await;
    let lanes = Lane::take_all(&store, "reader").await;
    assert_eq!(lanes.len(), 3);
    again.set_lanes(&named("reader"), 3).await.expect("it is done");
    assert_eq!(Lane::run_all(&lanes).await.len(), 16, "their leases hold");
}

pub async fn a_migration_that_was_done_is_done(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let again = lost(fixture, Call::Down, &call!(store, [], store.down(true))).await;
    // A store may refuse to remove everything for a caller that is gone.
    again.down(true).await.expect("removed, now or before");
    refused(store.validate().await, ErrorKind::Mismatch, "schema_missing");
    let again = lost(fixture, Call::Up, &call!(store, [], store.up())).await;
    assert!(again.up().await.expect("nothing to do").is_empty());
    fixture.grant().await;
    store.validate().await.expect("there");
    append(&store, [event("1")]).await;
    assert_eq!(Lane::open(fixture).await.drain().await.len(), 1);
}
