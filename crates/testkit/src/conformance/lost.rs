//! The store did it, and nobody heard: the caller asks again, and that changes nothing.

use std::time::Duration;

use postbox_core::{ErrorKind, EventId, Inbound, LogName, Pause, Received, Selection, SourceName, State};

use super::StoreFixture;
use super::faults::{Call, asked};
use super::harness::*;
use super::world::{Step, World};

async fn step(fixture: &dyn StoreFixture, step: Step) {
    let mut world = World::new(fixture, &format!("{step:?}").to_lowercase()).await;
    let request = world.prepare(step, true).await;
    world.faults.lose_answer(step.call(), request.ask(world.faults.store())).await;
    if matches!(step, Step::Next | Step::NextSettled) {
        world.one_more().await;
    }
    world.goes_on(step).await;
    // The very same caller knows what it gave out: it is not told that its lease is lost.
    let error = request.ask(world.faults.store()).await;
    assert!(error.is_none() || step == Step::Next || step == Step::NextSettled, "{step:?} repeated: {error:?}");
    world.uses_the_answer(&request).await;
    world.ends().await;
}

/// A lane granted to somebody who never heard of it is free again, at the latest when that lease is over.
pub async fn a_grant_nobody_heard_of_locks_its_lane_no_longer_than_the_lease(fixture: &dyn StoreFixture) {
    step(fixture, Step::Acquire).await;
}

/// Renewing twice is renewing once. So is giving back, and nobody is harmed who has taken the lane in between.
pub async fn a_renewal_and_a_release_may_be_repeated(fixture: &dyn StoreFixture) {
    step(fixture, Step::Renew).await;
    step(fixture, Step::Release).await;
}

/// A window was opened and nobody was given its events: they come again, to who asks again and to the next owner.
pub async fn a_window_nobody_heard_of_is_read_again(fixture: &dyn StoreFixture) {
    step(fixture, Step::Next).await;
    step(fixture, Step::NextSettled).await;
}

/// All went well twice; or reading starts again once more at the same place.
pub async fn a_position_and_a_rewind_may_be_repeated(fixture: &dyn StoreFixture) {
    step(fixture, Step::Position).await;
    step(fixture, Step::Rewind).await;
}

/// Rows that were dealt with in between are not made again: what arrived is not sent again.
pub async fn a_settlement_repeated_makes_no_row_again(fixture: &dyn StoreFixture) {
    step(fixture, Step::Settle).await;
}

/// A row that a person sent again in between is another one: the old word on it counts no more.
pub async fn a_settlement_of_due_rows_repeated_undoes_no_replay(fixture: &dyn StoreFixture) {
    step(fixture, Step::Due).await;
}

/// The caller's own ids say that it was done.
pub async fn an_append_with_own_ids_is_stored_once(fixture: &dyn StoreFixture) {
    let (faults, lane) = (fixture.faults().await, Lane::open(fixture).await);
    let events = [event("1").id(EventId::now_v7()), event("2").id(EventId::now_v7())];
    let (store, again) = (faults.store(), events.clone());
    faults.lose_answer(Call::Append, asked(async move { store.append(&outbox(), &again).await })).await;
    refused(faults.again().append(&outbox(), &events).await, ErrorKind::Conflict, "event_id_taken");
    assert_eq!(payloads(&lane.drain().await), ["1", "2"]);
}

/// Without ids nobody can know: both are stored, each whole.
pub async fn an_append_without_ids_is_stored_whole_each_time(fixture: &dyn StoreFixture) {
    let (faults, lane) = (fixture.faults().await, Lane::open(fixture).await);
    let store = faults.store();
    let append_two = move || {
        let store = store.clone();
        asked(async move { store.append(&outbox(), &[event("1"), event("2")]).await })
    };
    faults.lose_answer(Call::Append, append_two()).await;
    assert!(append_two().await.is_none());
    assert_eq!(payloads(&lane.drain().await), ["1", "2", "1", "2"]);
}

pub(super) fn message(id: &str, body: &str) -> Inbound {
    Inbound {
        source: SourceName::new("hooks").expect("a name"),
        message_id: id.to_owned(),
        digest: std::array::from_fn(|n| body.as_bytes().get(n).copied().unwrap_or_default()),
        event: event(body),
    }
}

/// Senders repeat themselves until they hear an answer.
pub async fn a_message_that_was_stored_is_a_duplicate(fixture: &dyn StoreFixture) {
    let faults = fixture.faults().await;
    let (store, inbox) = (faults.store(), LogName::inbox());
    let one = asked(async move { store.receive(&LogName::inbox(), message("1", "one")).await });
    faults.lose_answer(Call::Receive, one).await;
    let store = faults.store();
    let several = [message("2", "two"), message("3", "three"), message("1", "another")];
    let many = several.clone();
    let two = asked(async move { store.receive_many(&LogName::inbox(), &many).await });
    faults.lose_answer(Call::Receive, two).await;
    let again = faults.again();
    assert_eq!(again.receive(&inbox, message("1", "one")).await.expect("answered"), Received::Duplicate);
    let received = again.receive_many(&inbox, &several).await.expect("answered");
    assert_eq!(received, [Received::Duplicate, Received::Duplicate, Received::Conflict]);
    assert_eq!(fixture.conflicts().await, 1);
    assert_eq!(again.conflicts(10).await.expect("listed")[0].times, 2);
    let reads = postbox_core::Subscription::new(named("inbox-reader"), inbox);
    assert_eq!(payloads(&Lane::open_as(fixture, &reads).await.drain().await), ["one", "two", "three"]);
}

/// A person sent it again once, however often the command was repeated.
pub async fn a_replay_repeated_replays_once(fixture: &dyn StoreFixture) {
    let (faults, lane) = (fixture.faults().await, Lane::open(fixture).await);
    let id = lane.past(vec![event("1")], vec![(0, dead())]).await[0];
    let selection = Selection { ids: Some(vec![id]), ..Selection::default() };
    let (store, of) = (faults.store(), selection.clone());
    faults.lose_answer(Call::Retry, asked(async move { store.retry(&named("reader"), &of).await })).await;
    assert_eq!(faults.again().retry(&named("reader"), &selection).await.expect("asked").count, 0);
    assert_eq!(record(&lane.store, id).await.replays, 1);
    assert_eq!(payloads(&lane.drain_due().await), ["1"]);
    assert_eq!(faults.again().retry(&named("reader"), &selection).await.expect("asked").count, 0);
    assert_eq!(record(&lane.store, id).await.state, State::Dispatched);
}

/// Taken out once, and its key goes on once.
pub async fn a_discard_repeated_takes_out_nothing_more(fixture: &dyn StoreFixture) {
    let (faults, lane) = (fixture.faults().await, Lane::open(fixture).await);
    let past = vec![(0, retry(HOUR)), (1, postbox_core::Disposition::Block)];
    let mut ids = lane.past(vec![keyed("a", "1"), keyed("a", "2")], past).await;
    ids.truncate(1);
    ids.extend(append(&lane.store, [event("3")]).await);
    append(&lane.store, [event("4")]).await;
    let selection = Selection { ids: Some(ids), ..Selection::default() };
    let (store, of) = (faults.store(), selection.clone());
    faults.lose_answer(Call::Discard, asked(async move { store.discard(&named("reader"), &of).await })).await;
    assert_eq!(faults.again().discard(&named("reader"), &selection).await.expect("asked").count, 0);
    assert_eq!(stats(&lane.store).await.discarded, 2);
    assert_eq!(payloads(&lane.drain_due().await), ["2"]);
    let batch = lane.next(10).await;
    assert_eq!((payloads(&batch.deliveries), batch.discarded.len()), (vec!["3".to_owned(), "4".to_owned()], 1));
}

/// Only what is done with goes, however often.
pub async fn a_prune_repeated_takes_nothing_that_is_needed(fixture: &dyn StoreFixture) {
    let (faults, lane) = (fixture.faults().await, Lane::open(fixture).await);
    lane.past(vec![event("sent"), event("dead")], vec![(1, dead())]).await;
    append(&lane.store, [event("unread")]).await;
    fixture.pass(Duration::from_millis(1)).await;
    let store = faults.store();
    faults.lose_answer(Call::Prune, asked(async move { store.prune(&outbox(), Duration::ZERO).await })).await;
    assert_eq!(faults.again().prune(&outbox(), Duration::ZERO).await.expect("pruned"), 0);
    let stats = stats(&lane.store).await;
    assert_eq!((stats.total, stats.dead, stats.pending), (2, 1, 1));
}

/// Paused is paused, until it is resumed.
pub async fn a_pause_repeated_is_one_pause(fixture: &dyn StoreFixture) {
    let (faults, lane) = (fixture.faults().await, Lane::open(fixture).await);
    let pause = Pause { until: None, by: "me".into(), why: "why".into() };
    for pause in [Some(pause), None] {
        let (store, of) = (faults.store(), pause.clone());
        faults.lose_answer(Call::Pause, asked(async move { store.pause(&named("reader"), of.as_ref()).await })).await;
        faults.again().pause(&named("reader"), pause.as_ref()).await.expect("set");
        assert_eq!(lane.store.subscriptions().await.expect("listed")[0].paused, pause);
    }
}

/// A subscription is made once, and begins where it began the first time.
pub async fn a_subscription_is_made_once(fixture: &dyn StoreFixture) {
    let (faults, store) = (fixture.faults().await, fixture.store());
    append(&store, [event("before")]).await;
    let subscription = postbox_core::Subscription { start: postbox_core::StartAt::Now, lanes: 2, ..reader() };
    let (through, of) = (faults.store(), subscription.clone());
    faults.lose_answer(Call::Subscribe, asked(async move { through.subscribe(&of).await })).await;
    append(&store, [event("after")]).await;
    faults.again().subscribe(&subscription).await.expect("it is there");
    assert_eq!(store.subscriptions().await.expect("listed")[0].lanes.len(), 2);
    let mut arrived = Vec::new();
    for by in ["one", "two"] {
        arrived.extend(payloads(&Lane::take(&store, "reader", by).await.drain().await));
    }
    assert_eq!(arrived, ["after"]);
}

/// The schema is there, or it is gone: the second command finds nothing to do.
pub async fn a_migration_that_was_done_is_done(fixture: &dyn StoreFixture) {
    let (faults, store) = (fixture.faults().await, fixture.store());
    let down = faults.store();
    faults.lose_answer(Call::Down, asked(async move { down.down(true).await })).await;
    // A store may want to do nothing so grave for somebody who has gone.
    faults.again().down(true).await.expect("removed, now or before");
    refused(store.validate().await, ErrorKind::Mismatch, "schema_missing");
    let up = faults.store();
    faults.lose_answer(Call::Up, asked(async move { up.up().await })).await;
    assert!(faults.again().up().await.expect("nothing to do").is_empty());
    store.validate().await.expect("there");
    append(&store, [event("1")]).await;
    assert_eq!(Lane::open(fixture).await.drain().await.len(), 1);
}

/// The cases of this suite.
#[doc(hidden)]
#[macro_export]
macro_rules! lost_cases {
    ($fixture:expr) => {
        $crate::conformance_cases!(
            lost,
            $fixture,
            [
                a_grant_nobody_heard_of_locks_its_lane_no_longer_than_the_lease,
                a_renewal_and_a_release_may_be_repeated,
                a_window_nobody_heard_of_is_read_again,
                a_position_and_a_rewind_may_be_repeated,
                a_settlement_repeated_makes_no_row_again,
                a_settlement_of_due_rows_repeated_undoes_no_replay,
                an_append_with_own_ids_is_stored_once,
                an_append_without_ids_is_stored_whole_each_time,
                a_message_that_was_stored_is_a_duplicate,
                a_replay_repeated_replays_once,
                a_discard_repeated_takes_out_nothing_more,
                a_prune_repeated_takes_nothing_that_is_needed,
                a_pause_repeated_is_one_pause,
                a_subscription_is_made_once,
                a_migration_that_was_done_is_done,
            ]
        );
    };
}
