//! The store executed a call and the answer is lost. The caller repeats it, which changes nothing.
//!
//! A call has a case here only if its case in [`late`](super::late) does not show the same.

use std::sync::Arc;

use postbox_core::{ErrorKind, LogName, NewEvent, Received, Replay, ResetTo, State, Store, Subscription};

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
    if step.reads() {
        world.one_more().await;
    }
    world.goes_on(step).await;
    // It is the same caller, so its lease is not lost.
    let error = request.ask(world.faults.store()).await;
    assert!(error.is_none() || step.reads(), "{step:?} repeated: {error:?}");
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

pub async fn a_settlement_and_the_read_after_it_may_be_repeated(fixture: &dyn StoreFixture) {
    step(fixture, Step::SettleAndRead).await;
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
