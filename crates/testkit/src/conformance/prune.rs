//! Retention: only events that every subscription is done with are deleted.

use std::sync::Arc;
use std::time::Duration;

use postbox_core::kit::PRUNE_ROWS_MAX;
use postbox_core::{Criteria, ErrorKind, LogName, NewEvent, Prune, Selection, State, Store, Subscription};

use super::StoreFixture;
use super::harness::*;

pub async fn old_dispatched_events_go_and_young_ones_stay(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, numbered(3).into_iter().map(|event| (event, Delivered))).await;
    fixture.pass(2 * SHORT).await;
    assert_eq!(prune(&lane.store, HOUR).await, 0);
    assert_eq!(prune(&lane.store, SHORT).await, 3);
    let stats = stats(&lane.store).await;
    assert_eq!((stats.pending, stats.dispatched), (0, 3), "what was delivered stays counted");
    assert!(listed(&lane.store, State::Dispatched).await.is_empty());
    append(&lane.store, [event("next")]).await;
    assert_eq!(payloads(&lane.drain().await), ["next"], "reading goes on");
}

pub async fn nothing_undelivered_is_ever_pruned(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let soon = Schedule { at: jiff::Timestamp::UNIX_EPOCH };
    let ids = lane
        .past([
            (keyed("a", "retrying"), retry_now()),
            (keyed("a", "blocked"), Block),
            (event("scheduled"), soon),
            (event("dead"), dead()),
            (event("sent"), Delivered),
        ])
        .await;
    append(&lane.store, [event("pending-1"), event("pending-2")]).await;
    let read = lane.next(1).await;
    assert_eq!(payloads(&read.deliveries), ["pending-1"]);
    fixture.pass(SHORT).await;
    assert_eq!(prune(&lane.store, Duration::ZERO).await, 1, "only what was sent");
    assert_eq!((stats(&lane.store).await.pending, stats(&lane.store).await.dead), (5, 1));
    assert_eq!(lane.replay(Selection::default()).await, 1);
    let mut due = payloads(&lane.drain_due().await);
    due.sort();
    assert_eq!(due, ["blocked", "dead", "retrying", "scheduled"]);
    assert_eq!(record(&lane.store, ids[3]).await.state, State::Dispatched);
    assert_eq!(payloads(&lane.taken_over().await.drain().await), ["pending-1", "pending-2"]);
}

pub async fn every_subscription_must_have_passed(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let slow = Lane::open_as(fixture, &reader_named("slow")).await;
    lane.past(numbered(3).into_iter().map(|event| (event, Delivered))).await;
    let first = slow.next(1).await;
    slow.settle(&first, vec![]).await;
    fixture.pass(SHORT).await;
    assert_eq!(prune(&lane.store, Duration::ZERO).await, 1, "what both have passed");
    assert_eq!(payloads(&slow.drain().await), ["2", "3"]);
    assert_eq!(prune(&lane.store, Duration::ZERO).await, 2);
}

/// A subscription without a relay must not keep a log from being pruned.
pub async fn one_that_stands_still_keeps_only_what_it_wants(fixture: &dyn StoreFixture) {
    let _still = Lane::open_as(fixture, &reader_of("wanted")).await;
    let lane = Lane::open_as(fixture, &reader_named("other")).await;
    lane.past([(event("noise"), Delivered), (NewEvent::json("wanted", "1"), Delivered), (event("noise"), Delivered)])
        .await;
    fixture.pass(SHORT).await;
    assert_eq!(prune(&lane.store, Duration::ZERO).await, 2);
    assert_eq!(listed(&lane.store, State::Pending).await, ["1"], "the one that stands still has yet to read it");
}

pub async fn discarded_events_go_once_they_are_passed(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(event("1"), dead())]).await;
    let unread = append(&lane.store, [event("2")]).await;
    assert_eq!(lane.discard(these(&[ids[0], unread[0]])).await, 2);
    fixture.pass(SHORT).await;
    assert_eq!(prune(&lane.store, Duration::ZERO).await, 1, "the other one is not passed yet");
    let batch = lane.next(10).await;
    lane.settle(&batch, vec![(0, Discarded)]).await;
    assert_eq!(prune(&lane.store, Duration::ZERO).await, 1);
    let stats = stats(&lane.store).await;
    assert_eq!((stats.pending, stats.discarded), (0, 0));
}

/// Events that nobody wants are tested in `routing`.
pub async fn events_that_one_does_not_want_go_with_the_others(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("wanted")).await;
    let other = Lane::open_as(fixture, &reader_named("other")).await;
    append(&lane.store, [event("noise")]).await;
    append(&lane.store, [NewEvent::json("wanted", "1"), event("noise")]).await;
    lane.drain().await;
    fixture.pass(SHORT).await;
    assert_eq!(prune(&lane.store, Duration::ZERO).await, 0, "the other has not read them");
    other.drain().await;
    fixture.pass(SHORT).await;
    assert_eq!(prune(&lane.store, Duration::ZERO).await, 3, "the noise went too");
    assert!(lane.drain().await.is_empty());
}

pub async fn a_log_without_subscriptions_is_not_pruned(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    append(&store, numbered(2)).await;
    fixture.pass(SHORT).await;
    assert_eq!(prune(&store, Duration::ZERO).await, 0);
    assert_eq!(Lane::open(fixture).await.drain().await.len(), 2);
}

pub async fn another_logs_subscriptions_have_no_say(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let idle = Subscription { name: named("idle"), log: LogName::inbox(), ..reader() };
    lane.store.subscribe(&idle).await.expect("new");
    lane.past(numbered(2).into_iter().map(|event| (event, Delivered))).await;
    fixture.pass(SHORT).await;
    assert_eq!(lane.store.prune(&LogName::inbox(), &Prune::default()).await.expect("pruned").count, 0);
    assert_eq!(prune(&lane.store, Duration::ZERO).await, 2);
}

pub async fn pruning_an_unknown_log_is_not_found(fixture: &dyn StoreFixture) {
    refused(fixture.store().prune(&nowhere(), &Prune::default()).await, ErrorKind::NotFound, "log_unknown");
}

pub async fn an_open_transaction_survives_pruning(fixture: &dyn StoreFixture) {
    let Some(mut open) = begin_beside_others(fixture).await else { return };
    let lane = Lane::open(fixture).await;
    open.append(&outbox(), &[event("open")]).await.expect("appended");
    lane.past(numbered(2).into_iter().map(|event| (event, Delivered))).await;
    fixture.pass(SHORT).await;
    assert_eq!(prune(&lane.store, Duration::ZERO).await, 2);
    open.commit().await;
    assert_eq!(prune(&lane.store, Duration::ZERO).await, 0, "committed late, old by its stamp, and unread");
    assert_eq!(payloads(&lane.drain().await), ["open"]);
}

pub async fn pruning_goes_on_until_nothing_is_left(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::unread(fixture, numbered(3_000)).await;
    lane.drain().await;
    fixture.pass(SHORT).await;
    assert_eq!(prune(&lane.store, Duration::ZERO).await, 3_000);
}

/// Events that stay are skipped, and the next run finds them again once they may go.
pub async fn what_stays_does_not_keep_what_follows(fixture: &dyn StoreFixture) {
    let count = PRUNE_ROWS_MAX + 5;
    let (lane, _) = Lane::unread(fixture, numbered(count)).await;
    let stay = lane.next(1_000).await;
    lane.settle(&stay, (0..stay.deliveries.len()).map(|at| (at, dead())).collect()).await;
    lane.drain().await;
    append(&lane.store, [event("unread")]).await;
    fixture.pass(SHORT).await;
    let first = lane.store.prune(&outbox(), &Prune::default()).await.expect("pruned");
    assert_eq!(first.count as usize, PRUNE_ROWS_MAX - stay.deliveries.len(), "of a step's events those that may go");
    let rest = lane.store.prune(&outbox(), &Prune { after: first.next, ..Prune::default() }).await.expect("pruned");
    assert_eq!((rest.count, rest.next), (5, None), "the next step begins where this one ended");
    assert_eq!(payloads(&lane.drain().await), ["unread"]);
    lane.discard(Selection::default()).await;
    assert_eq!(prune(&lane.store, Duration::ZERO).await as usize, stay.deliveries.len() + 1);
}

/// Events that do not match stay. A dry run deletes nothing.
pub async fn a_narrowed_prune_takes_what_is_meant(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let of = |topic: &str, key: &str| NewEvent::json(topic, format!("{topic} {key}")).key(key);
    let early = [of("a.x", "1"), of("a_x", "2"), of("b.x", "1").tenant("acme")];
    lane.past(early.into_iter().map(|event| (event, Delivered))).await;
    fixture.pass(SHORT).await;
    let late = lane.past([(of("a.x", "1"), Delivered), (of("b.x", "2"), dead())]).await[0];
    let at = Some(record(&lane.store, late).await.event.created_at);
    fixture.pass(SHORT).await;
    let key = |key: &str| Some(key.parse().expect("a key"));
    for (which, expected) in [
        (Criteria { topic: Some(pattern("a_x")), ..Criteria::default() }, 1),
        (Criteria { tenant: "acme".parse().ok(), ..Criteria::default() }, 1),
        (Criteria { key: key("1"), until: at, ..Criteria::default() }, 1),
        (Criteria { since: at, key: key("2"), ..Criteria::default() }, 0),
        (Criteria { since: at, ..Criteria::default() }, 1),
    ] {
        let wanted = Prune { which, ..Prune::default() };
        let before = everything(&lane.store).await;
        for _ in 0..2 {
            let counted = all_steps(&lane.store, Prune { dry_run: true, ..wanted.clone() }).await;
            assert_eq!(counted, expected, "{wanted:?}");
        }
        assert_eq!(everything(&lane.store).await, before, "it was only counted");
        assert_eq!(all_steps(&lane.store, wanted.clone()).await, expected, "{wanted:?}");
    }
    assert_eq!(listed(&lane.store, State::Dead).await, ["b.x 2"]);
}

/// Events that must stay do not count towards the limit. A dry run counts the same.
pub async fn a_limited_prune_takes_the_oldest(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let sent = |payload: &str| (event(payload), Delivered);
    lane.past([sent("1"), (event("dead"), dead()), sent("2"), sent("3"), sent("4")]).await;
    fixture.pass(SHORT).await;
    for (limit, left) in [(0, vec!["1", "2", "3", "4"]), (2, vec!["3", "4"]), (1, vec!["4"])] {
        for dry_run in [true, false] {
            let limited = Prune { limit: Some(limit), dry_run, ..Prune::default() };
            let step = lane.store.prune(&outbox(), &limited).await.expect("pruned");
            assert_eq!((step.count as usize, step.next), (limit, None), "{limited:?}");
        }
        assert_eq!(listed(&lane.store, State::Dispatched).await, left);
    }
    let more = Prune { limit: Some(PRUNE_ROWS_MAX + 1), ..Prune::default() };
    assert_eq!(all_steps(&lane.store, more).await, 1);
    assert_eq!(listed(&lane.store, State::Dead).await, ["dead"]);
}

/// It deletes only events that a person has discarded. Dead events stay, and so do events that
/// another subscription has still to deliver.
pub async fn a_prune_by_code_takes_what_was_taken_out_with_it(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let slow = Lane::open_as(fixture, &reader_named("slow")).await;
    let ids = lane
        .past([
            (event("sent"), Delivered),
            (event("dead"), dead_of("x")),
            (event("other"), dead_of("y")),
            (event("out"), dead_of("x")),
            (event("out and unread"), dead_of("x")),
        ])
        .await;
    assert_eq!(lane.discard(these(&ids[2..])).await, 3);
    let read = slow.next(4).await;
    slow.settle(&read, vec![]).await;
    fixture.pass(SHORT).await;
    let of_code = Prune { code: Some("x".into()), ..Prune::default() };
    assert_eq!(all_steps(&lane.store, Prune { dry_run: true, ..of_code.clone() }).await, 1);
    assert_eq!(all_steps(&lane.store, of_code).await, 1);
    assert_eq!(listed(&lane.store, State::Discarded).await, ["other", "out and unread"]);
    assert_eq!(listed(&lane.store, State::Dead).await, ["dead"]);
    assert_eq!(listed(&lane.store, State::Dispatched).await, ["sent"]);
    assert_eq!(payloads(&slow.drain().await), ["out and unread"]);
}

/// Returns the events listed in any state.
async fn everything(store: &Arc<dyn Store>) -> Vec<String> {
    let mut all = Vec::new();
    for state in State::ALL {
        all.extend(listed(store, state).await.into_iter().map(|payload| format!("{payload} {state}")));
    }
    all
}

async fn prune(store: &Arc<dyn Store>, older_than: Duration) -> u64 {
    all_steps(store, Prune { older_than, ..Prune::default() }).await
}

/// Prunes until the store has no next step.
async fn all_steps(store: &Arc<dyn Store>, mut prune: Prune) -> u64 {
    let mut all = 0;
    for _ in 0..1_000 {
        let step = store.prune(&outbox(), &prune).await.expect("pruned");
        all += step.count;
        prune.after = step.next;
        if step.next.is_none() {
            return all;
        }
    }
    panic!("pruning never ends");
}
