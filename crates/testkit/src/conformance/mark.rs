//! Events that a person marks dead.

use postbox_core::{Change, Criteria, Disposition, OnDead, Selection, State, Subscription};

use super::StoreFixture;
use super::dead_letters::texts;
use super::harness::*;

impl Lane {
    /// Marks events dead, with a reason. Returns how many.
    pub(super) async fn mark_dead(&self, selection: Selection) -> u64 {
        let change = Change::MarkDead { why: Some("no such customer".into()) };
        self.store.change(&named("reader"), &change, &selection).await.expect("marked").count
    }
}

/// A subscription whose dead events hold their keys.
fn halting() -> Subscription {
    Subscription { on_dead: OnDead::Halt, ..reader() }
}

pub async fn a_marked_event_is_dead_wherever_it_stood(fixture: &dyn StoreFixture) {
    let (lane, mut ids) =
        Lane::settled(fixture, [(keyed("a", "retrying"), retry(HOUR)), (keyed("a", "blocked"), Block)]).await;
    ids.extend(append(&lane.store, [event("pending")]).await);
    // The blocked one first: it is released with the one before it.
    for (id, attempts) in [(ids[1], 0), (ids[0], 1), (ids[2], 0)] {
        assert_eq!(lane.mark_dead(these(&[id])).await, 1);
        assert_eq!(lane.mark_dead(these(&[id])).await, 0, "once is enough");
        let marked = record(&lane.store, id).await;
        let standing = (marked.state, marked.attempts, marked.replays, marked.due_at, marked.code.as_deref());
        assert_eq!(standing, (State::Dead, attempts, 0, None, Some(Disposition::MARKED_DEAD)));
        let before = if attempts > 0 { "; before: it said no" } else { "" };
        assert_eq!(marked.error, Some(format!("marked dead by a person: no such customer{before}")));
    }
    assert_eq!(texts(&lane).await, ["retrying", "blocked", "pending"], "letters like any dead event");
    assert!(lane.due(10).await.deliveries.is_empty());
    let batch = lane.next(10).await;
    assert!(batch.deliveries.iter().all(|delivery| batch.discarded.contains(&delivery.seq)), "passed, and not sent");
    let stats = stats(&lane.store).await;
    assert_eq!((stats.dead, stats.pending, stats.dispatched), (3, 0, 0));
}

pub async fn what_is_decided_or_delivered_is_not_marked(fixture: &dyn StoreFixture) {
    let (lane, mut ids) =
        Lane::settled(fixture, [(event("dead"), dead()), (event("out"), dead()), (event("sent"), Delivered)]).await;
    lane.discard(these(&ids[1..2])).await;
    ids.extend(append(&lane.store, [event("pending")]).await);
    assert_eq!(lane.mark_dead(Selection::default()).await, 0, "what is pending has to be named");
    let which = Criteria { topic: Some(pattern("no.such")), ..Criteria::default() };
    assert_eq!(lane.mark_dead(Selection { which, ..these(&ids) }).await, 0);
    assert_eq!(lane.mark_dead(Selection { dry_run: true, ..these(&ids) }).await, 1);
    assert_eq!(lane.mark_dead(these(&ids[..3])).await, 0);
    assert_eq!(record(&lane.store, ids[0]).await.code.as_deref(), Some("http_422"), "its own death");
    assert_eq!(payloads(&lane.drain().await), ["pending"]);
}

/// A retry would send it before its time.
pub async fn what_waits_for_its_time_is_not_marked(fixture: &dyn StoreFixture) {
    let (lane, mut ids) = Lane::settled(fixture, [(event("scheduled"), scheduled())]).await;
    let at = record(&lane.store, ids[0]).await.event.created_at + HOUR;
    ids.extend(append(&lane.store, [event("unread").deliver_at(at)]).await);
    for selection in [these(&ids), Selection::default(), Selection { dry_run: true, ..these(&ids) }] {
        assert_eq!(lane.mark_dead(selection).await, 0);
    }
    assert_eq!(lane.discard(these(&ids)).await, 2, "it is cancelled");
}

pub async fn the_key_of_a_marked_event_goes_on(fixture: &dyn StoreFixture) {
    let blocked = [(keyed("a", "1"), retry(HOUR)), (keyed("a", "2"), Block), (keyed("a", "3"), Block)];
    let (lane, ids) = Lane::settled(fixture, blocked).await;
    assert_eq!(lane.mark_dead(these(&ids[1..2])).await, 1);
    assert!(lane.due(10).await.deliveries.is_empty(), "the head still waits");
    assert_eq!(lane.mark_dead(these(&ids[..1])).await, 1);
    append(&lane.store, [keyed("a", "4")]).await;
    assert_eq!(payloads(&lane.drain_due().await), ["3"]);
    assert_eq!(payloads(&lane.drain().await), ["4"]);
    assert_eq!(lane.replay(Selection::default()).await, 2);
    assert_eq!(payloads(&lane.drain_due().await), ["1", "2"]);
}

/// `on_dead = "halt"`: a marked event holds its key like any dead one, until a person acts again.
pub async fn the_key_of_a_marked_event_waits_where_dead_ones_hold_theirs(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &halting()).await;
    let ids = lane.past([(keyed("a", "1"), retry(HOUR)), (keyed("a", "2"), Block)]).await;
    let later = lane.past([(keyed("b", "later"), retry(HOUR))]).await[0];
    let unread = append(&lane.store, [keyed("c", "unread"), keyed("a", "3"), keyed("b", "4"), keyed("c", "5")]).await;
    assert_eq!(lane.mark_dead(these(&[ids[0], later, unread[0]])).await, 3);
    assert!(lane.due(10).await.deliveries.is_empty());
    let batch = lane.next(10).await;
    assert_eq!(batch.held.len(), 3, "{:?}", batch.held);
    let waits = |index: &usize| !batch.discarded.contains(&batch.deliveries[*index].seq);
    let settled = (0..batch.deliveries.len()).map(|index| (index, if waits(&index) { Block } else { Discarded }));
    lane.settle(&batch, settled.collect()).await;
    assert!(lane.due(10).await.deliveries.is_empty());
    assert_eq!(lane.replay(these(&ids[..1])).await, 1);
    assert_eq!(payloads(&lane.drain_due().await), ["1", "2", "3"]);
    assert_eq!(lane.discard(these(&[later, unread[0]])).await, 2);
    assert_eq!(payloads(&lane.drain_due().await), ["4", "5"]);
    // The latest setting applies.
    lane.store.subscribe(&reader()).await.expect("subscribed");
    let ids = lane.past([(keyed("d", "6"), retry(HOUR)), (keyed("d", "7"), Block)]).await;
    assert_eq!(lane.mark_dead(these(&ids[..1])).await, 1);
    assert_eq!(payloads(&lane.drain_due().await), ["7"]);
}

/// The marked event is neither the first nor the last of its key.
pub async fn a_marked_event_holds_its_key_in_the_middle_of_a_page(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &halting()).await;
    let ids = append(&lane.store, [keyed("a", "1"), keyed("a", "2"), keyed("a", "3")]).await;
    assert_eq!(lane.mark_dead(these(&ids[1..2])).await, 1);
    let batch = lane.next(10).await;
    assert_eq!(batch.held.len(), 1, "{:?}", batch.held);
    let waits = |index: &usize| !batch.discarded.contains(&batch.deliveries[*index].seq);
    let settled = (0..batch.deliveries.len()).map(|index| (index, if waits(&index) { Block } else { Discarded }));
    lane.settle(&batch, settled.collect()).await;
    assert_eq!(payloads(&lane.drain_due().await), ["1"]);
    assert_eq!(lane.replay(these(&ids[1..2])).await, 1);
    assert_eq!(payloads(&lane.drain_due().await), ["2", "3"]);
}

/// Its call was under way. It may arrive, and its outcome then changes nothing.
pub async fn an_event_marked_in_flight_stays_dead(fixture: &dyn StoreFixture) {
    let rows = [(keyed("a", "1"), retry_now()), (keyed("b", "2"), retry_now()), (keyed("c", "3"), retry_now())];
    let (lane, mut ids) = Lane::settled(fixture, rows).await;
    let due = lane.due(10).await;
    assert_eq!(lane.mark_dead(these(&ids)).await, 3);
    lane.settle_due(&due, vec![retry(HOUR), Delivered, dead()]).await;
    ids.extend(append(&lane.store, [keyed("d", "4"), keyed("e", "5")]).await);
    let batch = lane.next(10).await;
    assert_eq!(lane.mark_dead(these(&ids[3..])).await, 2);
    lane.settle(&batch, vec![(0, retry_now())]).await;
    for id in &ids {
        let marked = record(&lane.store, *id).await;
        assert_eq!((marked.state, marked.code.as_deref()), (State::Dead, Some(Disposition::MARKED_DEAD)));
    }
    assert!(lane.due(10).await.deliveries.is_empty());
    assert_eq!(lane.replay(these(&ids)).await, 5);
    assert_eq!(payloads(&lane.drain_due().await), ["1", "2", "3", "4", "5"]);
    assert_eq!(stats(&lane.store).await.dead, 0);
}

/// If it were revived before its lane has passed it, it would go out with its row and in the
/// stream.
pub async fn an_event_marked_before_it_was_read_is_revived_once_it_is_passed(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::unread(fixture, [keyed("a", "1"), keyed("a", "2")]).await;
    assert_eq!(lane.mark_dead(these(&ids[..1])).await, 1);
    for selection in [these(&ids), Selection::default(), Selection { dry_run: true, ..Selection::default() }] {
        assert_eq!(lane.replay(selection).await, 0);
    }
    let batch = lane.next(10).await;
    assert_eq!(lane.replay(these(&ids)).await, 0, "it is read, and not passed");
    let marked = batch.deliveries.iter().enumerate().filter(|(_, delivery)| batch.discarded.contains(&delivery.seq));
    lane.settle(&batch, marked.map(|(index, _)| (index, Discarded)).collect()).await;
    assert_eq!(lane.replay(these(&ids)).await, 1);
    let due = lane.due(10).await;
    assert_eq!((payloads(&due.deliveries), due.deliveries[0].replay), (vec!["1".to_owned()], 1));
    lane.settle_due(&due, vec![Delivered]).await;
    assert!(lane.next(10).await.deliveries.is_empty());
    assert_eq!(stats(&lane.store).await.dispatched, 2);
}
