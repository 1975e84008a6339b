//! Exactly-once effect: the handler's effect, the position and the delivery rows commit together.

use std::sync::{Arc, Mutex};

use postbox_core::{
    Apply, Batch, Delivery, Disposition, Entry, Error, NewEvent, Outcome, Result, Settlement, StartAt, State,
    Subscription,
};

use super::ApplyFixture;
use super::faults::{Asked, Call, asked};
use super::harness::*;

pub async fn effects_and_position_commit_together(fixture: &dyn ApplyFixture) {
    let lane = Lane::open(fixture).await;
    let batch = read(&lane, vec![keyed("a", "1"), keyed("b", "2"), event("3")]).await;
    let outcomes = apply(fixture, &lane, &batch).await.expect("applied");
    assert_eq!(outcomes, vec![Some(Outcome::DELIVERED); 3]);
    assert_eq!(fixture.effects().await, ["1", "2", "3"]);
    let stats = stats(&lane.store).await;
    assert_eq!((stats.dispatched, stats.pending), (3, 0));
    assert!(lane.taken_over().await.drain().await.is_empty(), "never again");
}

pub async fn a_failed_handler_undoes_only_its_own_effect(fixture: &dyn ApplyFixture) {
    let lane = Lane::open(fixture).await;
    let batch = read(&lane, vec![keyed("a", "1"), keyed("b", "retry"), keyed("c", "dead"), keyed("d", "4")]).await;
    let outcomes = apply(fixture, &lane, &batch).await.expect("applied");
    let delivered: Vec<bool> = outcomes.iter().flatten().map(Outcome::is_delivered).collect();
    assert_eq!(delivered, [true, false, false, true]);
    assert_eq!(fixture.effects().await, ["1", "4"]);
    assert_eq!(listed(&lane.store, State::Retrying).await, ["retry"]);
    assert_eq!(listed(&lane.store, State::Dead).await, ["dead"]);
    assert_eq!(listed(&lane.store, State::Dispatched).await, ["1", "4"]);
}

pub async fn a_panicking_handler_fails_alone(fixture: &dyn ApplyFixture) {
    let lane = Lane::open(fixture).await;
    let batch = read(&lane, vec![keyed("a", "1"), keyed("b", "panic"), keyed("c", "3")]).await;
    let outcomes = apply(fixture, &lane, &batch).await.expect("applied");
    let said = outcomes[1].as_ref().and_then(|outcome| outcome.failure());
    assert!(said.is_some_and(|(code, said)| code == "panic" && said.contains("as asked")), "{outcomes:?}");
    assert_eq!(fixture.effects().await, ["1", "3"]);
    assert_eq!(listed(&lane.store, State::Retrying).await, ["panic"]);
}

pub async fn later_events_of_a_failed_key_are_blocked_and_not_run(fixture: &dyn ApplyFixture) {
    let lane = Lane::open(fixture).await;
    let batch = read(&lane, vec![keyed("a", "retry"), keyed("b", "2"), keyed("a", "3"), keyed("a", "4")]).await;
    let outcomes = apply(fixture, &lane, &batch).await.expect("applied");
    assert!(outcomes[0].is_some() && outcomes[1].is_some());
    assert_eq!(outcomes[2..], [None, None]);
    assert_eq!(fixture.effects().await, ["2"]);
    assert_eq!(listed(&lane.store, State::Blocked).await, ["3", "4"]);
}

pub async fn without_order_a_failure_blocks_nobody(fixture: &dyn ApplyFixture) {
    let lane = Lane { hold_keys: false, ..Lane::open(fixture).await };
    let batch = read(&lane, vec![keyed("a", "retry"), keyed("a", "2")]).await;
    let outcomes = apply(fixture, &lane, &batch).await.expect("applied");
    assert!(outcomes.iter().all(Option::is_some), "{outcomes:?}");
    assert_eq!(fixture.effects().await, ["2"]);
}

/// Entries the relay had decided without running a handler are written with the rest.
pub async fn entries_of_the_settlement_are_written_as_they_are(fixture: &dyn ApplyFixture) {
    let lane = Lane::open(fixture).await;
    let batch = read(&lane, vec![keyed("a", "1"), keyed("b", "held back"), keyed("c", "3")]).await;
    let run = [&batch.deliveries[0], &batch.deliveries[2]];
    let entries = vec![Entry { delivery: &batch.deliveries[1], disposition: retry(HOUR) }];
    let settlement = Settlement { position: batch.end, entries, rewind: false, hold_keys: true };
    fixture.apply().apply(&lane.lease, &run, settlement, &decide).await.expect("applied");
    assert_eq!(fixture.effects().await, ["1", "3"]);
    assert_eq!(listed(&lane.store, State::Retrying).await, ["held back"]);
    assert_eq!(listed(&lane.store, State::Dispatched).await, ["1", "3"]);
}

pub async fn under_a_lost_lease_nothing_is_committed(fixture: &dyn ApplyFixture) {
    let old = Lane::open(fixture).await;
    let batch = read(&old, vec![keyed("a", "1"), keyed("b", "retry")]).await;
    let new = old.taken_over().await;
    stale(apply(fixture, &old, &batch).await);
    assert!(fixture.effects().await.is_empty());
    assert!(listed(&old.store, State::Retrying).await.is_empty());
    let again = new.next(10).await;
    assert_eq!(again.deliveries, batch.deliveries);
    apply(fixture, &new, &again).await.expect("applied");
    assert_eq!(fixture.effects().await, ["1"], "exactly once");
}

pub async fn due_rows_are_applied_in_one_commit_too(fixture: &dyn ApplyFixture) {
    let (lane, _) = Lane::settled(fixture, [(keyed("a", "1"), retry_now()), (keyed("a", "2"), Block)]).await;
    let due = lane.due(10).await;
    apply(fixture, &lane, &due).await.expect("applied");
    assert_eq!(fixture.effects().await, ["1", "2"]);
    assert_eq!(stats(&lane.store).await.dispatched, 2);
    assert!(lane.due(10).await.deliveries.is_empty());
}

/// A person revives the event before it, or a failover undoes that one's effect.
pub async fn a_due_row_is_not_applied_once_an_earlier_one_of_its_key_is_back(fixture: &dyn ApplyFixture) {
    let (lane, ids) = Lane::settled(fixture, [(keyed("a", "1"), dead()), (keyed("a", "2"), retry_now())]).await;
    let due = lane.due(10).await;
    assert_eq!(payloads(&due.deliveries), ["2"]);
    assert_eq!(lane.replay(these(&ids[..1])).await, 1);
    stale(apply(fixture, &lane, &due).await);
    assert!(fixture.effects().await.is_empty());
    let due = lane.due(10).await;
    apply(fixture, &lane, &due).await.expect("applied");
    assert_eq!(fixture.effects().await, ["1", "2"]);
}

/// A row that is only put behind an earlier one of its key, which failed before, is in nobody's
/// way: the handlers of the others count.
pub async fn a_due_row_that_is_put_behind_its_key_undoes_no_other(fixture: &dyn ApplyFixture) {
    let rows = [(keyed("a", "1"), retry_now()), (keyed("a", "2"), Block), (keyed("b", "3"), retry_now())];
    let (lane, _) = Lane::settled(fixture, rows).await;
    let due = lane.due(10).await;
    assert_eq!(payloads(&due.deliveries), ["1", "2", "3"]);
    let first = Batch { deliveries: vec![due.deliveries[0].clone()], ..Batch::default() };
    lane.settle_due(&first, vec![retry(HOUR)]).await;
    let entries = vec![Entry { delivery: &due.deliveries[1], disposition: Block }];
    let settlement = Settlement { position: None, entries, rewind: false, hold_keys: true };
    fixture.apply().apply(&lane.lease, &[&due.deliveries[2]], settlement, &decide).await.expect("applied");
    assert_eq!(fixture.effects().await, ["3"]);
    assert_eq!(listed(&lane.store, State::Blocked).await, ["2"]);
}

pub async fn a_commit_with_a_lost_answer_is_not_done_again(fixture: &dyn ApplyFixture) {
    let faults = fixture.faults().await;
    for due in [false, true] {
        let (lane, batch) = waiting(fixture, due).await;
        let [first, again] = fixture.harmed().await.map(|apply| request(apply, &lane, &batch));
        faults.lose_answer(Call::Apply, first).await;
        asked_again(fixture, again.await, &lane, due).await;
    }
}

/// The call is executed after it was repeated: once is enough.
pub async fn a_late_commit_is_not_done_beside_the_same(fixture: &dyn ApplyFixture) {
    let faults = fixture.faults().await;
    let place = faults.places(Call::Apply)[0];
    for due in [false, true] {
        let (lane, batch) = waiting(fixture, due).await;
        let [first, again] = fixture.harmed().await.map(|apply| request(apply, &lane, &batch));
        let late = faults.delay(Call::Apply, place, first).await;
        let heard = Arc::new(Mutex::new(None));
        let hears = heard.clone();
        let meanwhile = async move { *hears.lock().expect("no panic while held") = again.await };
        late.after(Box::pin(meanwhile)).await;
        let error = heard.lock().expect("no panic while held").take();
        asked_again(fixture, error, &lane, due).await;
    }
}

/// A host may vanish before its commit. The lane's lock must be released within a lease.
pub async fn a_commit_that_never_comes_keeps_no_lock_for_longer_than_a_lease(fixture: &dyn ApplyFixture) {
    let faults = fixture.faults().await;
    let (lane, batch) = waiting(fixture, false).await;
    let [first, _] = fixture.harmed().await.map(|apply| request(apply, &lane, &batch));
    let late = faults.delay(Call::Apply, *faults.places(Call::Apply).last().expect("a place"), first).await;
    let again = faults.again();
    let renewed = tokio::time::timeout(LEASE, again.renew(&lane.lease, LONG)).await;
    renewed.expect("the lock is given up").expect("still ours");
    late.after(Box::pin(async {})).await;
}

/// Reads a batch of the stream or of due rows, through the store whose calls can be made to fail.
async fn waiting(fixture: &dyn ApplyFixture, due: bool) -> (Lane, Batch) {
    let store = fixture.faults().await.store();
    let name = if due { "due" } else { "stream" };
    let subscription = Subscription { lanes: Some(1), start: StartAt::Now, ..Subscription::new(named(name), outbox()) };
    store.subscribe(&subscription).await.expect("subscribed");
    let lane = Lane::take(&store, name, "one").await;
    append(&fixture.store(), vec![keyed("a", &format!("{name}-1")), keyed("b", &format!("{name}-2"))]).await;
    let batch = lane.next(10).await;
    if !due {
        return (lane, batch);
    }
    lane.settle(&batch, vec![(0, retry_now()), (1, retry_now())]).await;
    let batch = lane.due(10).await;
    (lane, batch)
}

fn request(apply: Arc<dyn Apply>, lane: &Lane, batch: &Batch) -> Asked {
    let (lease, batch) = (lane.lease.clone(), batch.clone());
    asked(async move {
        let run: Vec<&Delivery> = batch.deliveries.iter().collect();
        let settlement = Settlement { position: batch.end, entries: Vec::new(), rewind: false, hold_keys: true };
        apply.apply(&lease, &run, settlement, &decide).await
    })
}

/// The repeated call may find its lease lost, or go to a handle of the store that did not read the
/// batch. The next owner does the rest.
async fn asked_again(fixture: &dyn ApplyFixture, error: Option<Error>, lane: &Lane, due: bool) {
    let is_refused = |error: &Error| error.is_stale() || error.code() == "handlers_of_another_store";
    assert!(error.as_ref().is_none_or(is_refused), "{error:?}");
    let name = lane.lease.subscription.as_str();
    fixture.faults().await.again().release(&lane.lease).await.expect("given back");
    let next = Lane::take(&fixture.store(), name, "next").await;
    let batch = if due { next.due(10).await } else { next.next(10).await };
    if !batch.deliveries.is_empty() {
        apply(fixture, &next, &batch).await.expect("applied");
    }
    let effects = fixture.effects().await;
    let of_this: Vec<String> = effects.into_iter().filter(|effect| effect.starts_with(name)).collect();
    assert_eq!(of_this, [format!("{name}-1"), format!("{name}-2")], "each effect once");
    assert_eq!(fixture.store().stats(&named(name)).await.expect("counted").pending, 0);
}

async fn read(lane: &Lane, events: Vec<NewEvent>) -> Batch {
    append(&lane.store, &events).await;
    lane.next(events.len()).await
}

async fn apply(fixture: &dyn ApplyFixture, lane: &Lane, batch: &Batch) -> Result<Vec<Option<Outcome>>> {
    let run: Vec<&Delivery> = batch.deliveries.iter().collect();
    let settlement = Settlement { position: batch.end, entries: Vec::new(), rewind: false, hold_keys: lane.hold_keys };
    fixture.apply().apply(&lane.lease, &run, settlement, &decide).await
}

/// The engine's part, as small as possible.
fn decide(_: &Delivery, outcome: &Outcome) -> Disposition {
    match outcome {
        Outcome::Delivered { .. } => Delivered,
        Outcome::Dead { .. } => dead(),
        _ => retry(HOUR),
    }
}
