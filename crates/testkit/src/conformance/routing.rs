//! Which events go to which subscription. Skipped events were not wanted by a subscription when it
//! passed them. Unrouted events are wanted by no subscription.

use std::sync::Arc;
use std::time::Duration;

use postbox_core::{Criteria, ErrorKind, EventId, LogName, NewEvent, Prune, StartAt, State, Store, Subscription};

use super::StoreFixture;
use super::harness::*;

/// Changes the filter of the subscription of this name.
async fn wants(store: &Arc<dyn Store>, name: &str, topic: &str) {
    store.subscribe(&Subscription { name: named(name), ..reader_of(topic) }).await.expect("another filter");
}

fn of_topic(topic: &str, payload: &str) -> NewEvent {
    NewEvent::json(topic, payload.to_owned())
}

pub(super) async fn state(store: &Arc<dyn Store>, name: &str, id: EventId) -> State {
    store.get(&named(name), id).await.expect("asked").expect("in the log").state
}

/// Looks until `expected` events were found. Rows are looked at only once no transaction is open,
/// in any session, that began before them.
pub(super) async fn find(store: &Arc<dyn Store>, expected: u64) {
    let mut found = 0;
    let all = async {
        while found < expected {
            found += note(store).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, all).await.expect("found in time");
    assert_eq!(found, expected);
}

/// Waits until every open transaction, in any session, began after everything appended so far. It
/// is known from another log: an event appended to it later is found.
async fn let_age(fixture: &dyn StoreFixture) {
    let (store, log): (_, LogName) = (fixture.store(), "aging".parse().expect("a name"));
    make_log(fixture, &log).await;
    let reader = Subscription { name: named("aging"), log: log.clone(), ..reader_of("a") };
    store.subscribe(&reader).await.expect("subscribed");
    store.append(&log, &[of_topic("c", "c")]).await.expect("appended");
    let found = async {
        while store.note_unrouted(&log).await.expect("noted").unrouted == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, found).await.expect("found in time");
}

/// Looks until there is no more to look at. Returns how many were found.
pub(super) async fn note(store: &Arc<dyn Store>) -> u64 {
    let mut found = 0;
    for _ in 0..1_000 {
        let routed = store.note_unrouted(&outbox()).await.expect("noted");
        found += routed.unrouted;
        if !routed.more {
            return found;
        }
    }
    panic!("looking never ends");
}

pub(super) async fn unrouted(store: &Arc<dyn Store>) -> Vec<(String, u64)> {
    let unrouted = store.unrouted(&outbox()).await.expect("counted");
    assert_eq!(unrouted.count, unrouted.topics.iter().map(|topic| topic.count).sum::<u64>());
    unrouted.topics.into_iter().map(|topic| (topic.topic, topic.count)).collect()
}

pub async fn what_lies_before_the_beginning_is_skipped(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let before = append(&store, [event("before")]).await[0];
    let lane = Lane::open_as(fixture, &Subscription { start: StartAt::Now, ..reader() }).await;
    let after = append(&store, [event("after")]).await[0];
    assert_eq!(
        (state(&store, "reader", before).await, state(&store, "reader", after).await),
        (State::Skipped, State::Pending)
    );
    assert_eq!(payloads(&lane.drain().await), ["after"]);
    assert_eq!(
        (state(&store, "reader", before).await, state(&store, "reader", after).await),
        (State::Skipped, State::Dispatched)
    );
    assert_eq!(note(&store).await, 0, "nobody's filter left it out");
    assert_eq!(listed(&store, State::Skipped).await, ["before"]);
    assert_eq!(listed(&store, State::Dispatched).await, ["after"]);
    let stats = stats(&store).await;
    assert_eq!((stats.dispatched, stats.total), (1, 1));
}

/// Each event is judged by the filter it was passed with.
pub async fn a_filter_is_that_of_its_time(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    let first = append(&lane.store, [of_topic("a", "a1"), of_topic("b", "b1")]).await;
    assert_eq!(payloads(&lane.drain().await), ["a1"]);
    append(&lane.store, [of_topic("a", "a2")]).await;
    assert_eq!(payloads(&lane.drain().await), ["a2"], "and with it everything before is passed");
    wants(&lane.store, "reader", "b").await;
    let second = append(&lane.store, [of_topic("a", "a3"), of_topic("b", "b3")]).await;
    assert_eq!(payloads(&lane.drain().await), ["b3"]);
    wants(&lane.store, "reader", "c").await;
    lane.drain().await;
    for (id, expected) in [
        (first[0], State::Dispatched),
        (first[1], State::Skipped),
        (second[0], State::Skipped),
        (second[1], State::Dispatched),
    ] {
        assert_eq!(state(&lane.store, "reader", id).await, expected, "{id}");
    }
    assert_eq!(listed(&lane.store, State::Dispatched).await, ["a1", "a2", "b3"]);
    assert_eq!(listed(&lane.store, State::Skipped).await, ["b1", "a3"]);
}

/// Events read by the former filter are settled before anything is read by the next.
pub async fn a_new_filter_waits_for_what_was_given_out(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    append(&lane.store, [of_topic("a", "a1"), of_topic("b", "b1"), of_topic("a", "a2"), of_topic("b", "b2")]).await;
    let first = lane.next(1).await;
    assert_eq!(payloads(&first.deliveries), ["a1"]);
    wants(&lane.store, "reader", "*").await;
    assert!(lane.next(10).await.is_empty(), "a1 is not settled");
    lane.settle(&first, vec![]).await;
    assert_eq!(payloads(&lane.drain().await), ["b1", "a2", "b2"], "beyond what was settled, by the new filter");
    assert_eq!(listed(&lane.store, State::Dispatched).await, ["a1", "b1", "a2", "b2"]);
}

/// Events that are passed because nobody wants them are passed by the filter of that time, and the
/// lane stays with its holder.
pub async fn a_new_filter_is_taken_after_nothing_was_wanted(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    append(&lane.store, [of_topic("a", "a")]).await;
    assert_eq!(payloads(&lane.drain().await), ["a"]);
    for topic in ["b", "c", "b"] {
        let unwanted = append(&lane.store, [of_topic("d", "d")]).await[0];
        assert!(lane.drain().await.is_empty());
        wants(&lane.store, "reader", topic).await;
        append(&lane.store, [of_topic(topic, topic), of_topic("d", "d")]).await;
        assert_eq!(payloads(&lane.drain().await), [topic]);
        assert_eq!(state(&lane.store, "reader", unwanted).await, State::Skipped);
    }
}

pub async fn a_new_filter_holds_for_the_next_holder_of_the_lane(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    append(&lane.store, [of_topic("a", "a1"), of_topic("b", "b1")]).await;
    assert_eq!(payloads(&lane.next(10).await.deliveries), ["a1"]);
    wants(&lane.store, "reader", "b").await;
    let next = lane.taken_over().await;
    assert_eq!(payloads(&next.drain().await), ["b1"], "a1 was not settled, and is not wanted any more");
    assert_eq!(listed(&lane.store, State::Skipped).await, ["a1"]);
}

pub async fn what_nobody_wants_is_unrouted(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    wants(&lane.store, "other", "b").await;
    let ids =
        append(&lane.store, [of_topic("a", "1"), of_topic("b", "2"), of_topic("c", "3"), of_topic("c.d", "4")]).await;
    find(&lane.store, 2).await;
    assert_eq!(note(&lane.store).await, 0, "each is found once");
    assert_eq!(unrouted(&lane.store).await, [("c".to_owned(), 1), ("c.d".to_owned(), 1)]);
    for name in ["reader", "other"] {
        assert_eq!(state(&lane.store, name, ids[2]).await, State::Unrouted);
    }
    assert_eq!(
        (state(&lane.store, "reader", ids[1]).await, state(&lane.store, "other", ids[1]).await),
        (State::Skipped, State::Pending)
    );
    assert_eq!(listed(&lane.store, State::Unrouted).await, ["3", "4"]);
    assert_eq!(payloads(&lane.drain().await), ["1"]);
}

pub async fn nothing_is_unrouted_where_one_wants_everything(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    wants(&lane.store, "other", "b").await;
    append(&lane.store, [of_topic("c", "1")]).await;
    assert_eq!(note(&lane.store).await, 0);
    assert_eq!(payloads(&lane.drain().await), ["1"]);
    assert_eq!((note(&lane.store).await, unrouted(&lane.store).await), (0, vec![]));
}

/// Nobody wanted it when it was passed. It goes to the first subscription that wants it, once.
pub async fn a_widened_filter_gets_what_was_unrouted(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    let passed =
        append(&lane.store, [of_topic("b", "b1").key("k"), of_topic("b", "b2").key("k"), of_topic("c", "c1")]).await;
    append(&lane.store, [of_topic("a", "a1")]).await;
    lane.drain().await;
    append(&lane.store, [of_topic("a", "a2")]).await;
    lane.drain().await;
    append(&lane.store, [of_topic("b", "b3").key("k")]).await;
    find(&lane.store, 4).await;
    wants(&lane.store, "reader", "b").await;
    let unread = payloads(&lane.drain().await);
    note(&lane.store).await;
    let mut got = payloads(&lane.drain_due().await);
    got.extend(unread);
    assert_eq!(got, ["b1", "b2", "b3"], "what was passed by rows, in the order of its key; what was not by the stream");
    assert_eq!(state(&lane.store, "reader", passed[0]).await, State::Dispatched);
    assert_eq!(unrouted(&lane.store).await, [("c".to_owned(), 1)]);
    assert_eq!((note(&lane.store).await, lane.drain_due().await.len()), (0, 0));
}

/// This holds however far the filter in between was used to look for unrouted events.
pub async fn a_filter_that_changes_twice_gets_what_was_unrouted(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    append(&lane.store, [of_topic("b", "b1")]).await;
    append(&lane.store, [of_topic("a", "a1")]).await;
    lane.drain().await;
    find(&lane.store, 1).await;
    append(&lane.store, [of_topic("d", "d1"), of_topic("a", "a2")]).await;
    lane.drain().await;
    wants(&lane.store, "reader", "c").await;
    lane.drain().await;
    find(&lane.store, 1).await;
    wants(&lane.store, "reader", "b").await;
    let mut got = payloads(&lane.drain().await);
    note(&lane.store).await;
    got.extend(payloads(&lane.drain_due().await));
    assert_eq!(got, ["b1"]);
    assert_eq!(unrouted(&lane.store).await, [("d".to_owned(), 1)]);
}

pub async fn a_new_subscription_gets_what_was_unrouted(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    append(&lane.store, [of_topic("b", "b1")]).await;
    find(&lane.store, 1).await;
    let now = Subscription { name: named("now"), start: StartAt::Now, ..reader_of("b") };
    lane.store.subscribe(&now).await.expect("new");
    note(&lane.store).await;
    assert_eq!(unrouted(&lane.store).await, [("b".to_owned(), 1)], "it begins later");
    let late = Lane::open_as(fixture, &Subscription { name: named("late"), ..reader_of("b") }).await;
    note(&lane.store).await;
    assert_eq!(unrouted(&lane.store).await, []);
    assert_eq!(payloads(&late.drain().await), ["b1"]);
    assert!(late.drain_due().await.is_empty(), "once");
}

/// The event was looked at before it was read, and was wanted then.
pub async fn what_a_narrowed_filter_leaves_unread_is_unrouted(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    append(&lane.store, [of_topic("a", "a1")]).await;
    lane.drain().await;
    append(&lane.store, [of_topic("a", "a2")]).await;
    assert_eq!(note(&lane.store).await, 0);
    wants(&lane.store, "reader", "b").await;
    lane.drain().await;
    find(&lane.store, 1).await;
    assert_eq!(listed(&lane.store, State::Unrouted).await, ["a2"]);
    assert_eq!(listed(&lane.store, State::Dispatched).await, ["a1"]);
}

/// The same for a filter that took everything, with which nothing is looked at.
pub async fn what_is_no_longer_everything_is_looked_at(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    append(&lane.store, [of_topic("a", "a1")]).await;
    lane.drain().await;
    append(&lane.store, [of_topic("a", "a2")]).await;
    note(&lane.store).await;
    wants(&lane.store, "reader", "b").await;
    lane.drain().await;
    find(&lane.store, 1).await;
    assert_eq!(listed(&lane.store, State::Unrouted).await, ["a2"]);
    assert_eq!(listed(&lane.store, State::Dispatched).await, ["a1"]);
}

/// Until the held lane reads by the new filter, it is unknown by which filter an event is passed.
pub async fn nothing_is_decided_while_a_lane_has_yet_to_take_its_filter(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    append(&lane.store, [of_topic("a", "a1"), of_topic("b", "b1"), of_topic("a", "a2")]).await;
    let given = lane.next(10).await;
    wants(&lane.store, "reader", "b").await;
    let_age(fixture).await;
    assert_eq!(note(&lane.store).await, 0);
    lane.settle(&given, vec![]).await;
    assert_eq!(note(&lane.store).await, 0, "b1 was passed by the former filter, but that is not known yet");
    lane.drain().await;
    find(&lane.store, 1).await;
    note(&lane.store).await;
    assert_eq!(payloads(&lane.drain_due().await), ["b1"], "nobody wanted it then; now somebody does");
    assert_eq!(unrouted(&lane.store).await, []);
}

/// Sets up a lane without a holder that has passed `b1` by a filter for `a`, before any look.
async fn passed_and_given_back(fixture: &dyn StoreFixture) -> (Arc<dyn Store>, EventId) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    let ids = append(&lane.store, [of_topic("b", "b1"), of_topic("a", "a1")]).await;
    assert_eq!(payloads(&lane.drain().await), ["a1"]);
    (lane.release().await, ids[0])
}

/// Asserts that `b1` is handed over whether the lane takes the filter or not, and is never pruned.
async fn comes_to_the_present_filter(fixture: &dyn StoreFixture, store: &Arc<dyn Store>, b1: EventId) {
    let_age(fixture).await;
    prune_all(store).await;
    note(store).await;
    assert_eq!((state(store, "reader", b1).await, unrouted(store).await), (State::Retrying, vec![]));
    prune_all(store).await;
    let lane = Lane::take(store, "reader", "two").await;
    assert_eq!(payloads(&lane.drain().await).len(), 0);
    assert_eq!(payloads(&lane.drain_due().await), ["b1"]);
    append(store, [of_topic("b", "b2")]).await;
    assert_eq!(payloads(&lane.drain().await), ["b2"]);
    note(store).await;
    assert_eq!(lane.drain_due().await.len(), 0, "once");
    assert_eq!(state(store, "reader", b1).await, State::Dispatched);
}

/// A relay stopped, or its subscription is paused. Nobody takes the new filter, but it is known by
/// which filter the lane passed its events.
pub async fn what_was_passed_comes_before_the_new_filter_is_taken(fixture: &dyn StoreFixture) {
    let (store, b1) = passed_and_given_back(fixture).await;
    wants(&store, "reader", "b").await;
    comes_to_the_present_filter(fixture, &store, b1).await;
}

/// It takes everything from its lane's position on, but not what lies before.
pub async fn what_was_passed_comes_to_one_that_takes_everything_now(fixture: &dyn StoreFixture) {
    let (store, b1) = passed_and_given_back(fixture).await;
    store.subscribe(&reader()).await.expect("another filter");
    comes_to_the_present_filter(fixture, &store, b1).await;
}

/// The lane took none of the filters in between.
pub async fn what_was_passed_comes_to_the_last_of_several_filters(fixture: &dyn StoreFixture) {
    let (store, b1) = passed_and_given_back(fixture).await;
    for filter in [reader_of("c"), reader(), reader_of("c"), reader_of("b")] {
        store.subscribe(&filter).await.expect("another filter");
        prune_all(&store).await;
    }
    comes_to_the_present_filter(fixture, &store, b1).await;
}

/// Its delivery time still counts.
pub async fn what_was_unrouted_waits_for_its_time(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    let at = "2099-01-01T00:00:00Z".parse().expect("a time");
    let ids = append(&lane.store, [NewEvent { deliver_at: Some(at), ..of_topic("b", "b1") }]).await;
    find(&lane.store, 1).await;
    append(&lane.store, [of_topic("a", "a1")]).await;
    lane.drain().await;
    wants(&lane.store, "reader", "*").await;
    lane.drain().await;
    note(&lane.store).await;
    assert_eq!(state(&lane.store, "reader", ids[0]).await, State::Scheduled);
    assert!(lane.due(10).await.deliveries.is_empty(), "in its year");
}

pub async fn an_open_transaction_is_looked_at_once_it_commits(fixture: &dyn StoreFixture) {
    let Some(mut open) = begin_beside_others(fixture).await else { return };
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    open.append(&outbox(), &[of_topic("b", "late")]).await.expect("appended");
    append(&lane.store, [of_topic("b", "early")]).await;
    let early = note(&lane.store).await;
    open.commit().await;
    find(&lane.store, 2 - early).await;
    assert_eq!(unrouted(&lane.store).await, [("b".to_owned(), 2)]);
}

pub async fn what_is_unrouted_is_kept_until_it_is_given_up(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    append(&lane.store, [of_topic("b", "b1"), of_topic("a", "a1")]).await;
    lane.drain().await;
    append(&lane.store, [of_topic("a", "a2")]).await;
    lane.drain().await;
    fixture.pass(SHORT).await;
    prune_all(&lane.store).await;
    assert_eq!(listed(&lane.store, State::Skipped).await.len() + listed(&lane.store, State::Unrouted).await.len(), 1);
    // Events not looked at yet stay, and an open transaction of any session keeps them from being
    // looked at.
    while listed(&lane.store, State::Unrouted).await.is_empty()
        || !listed(&lane.store, State::Dispatched).await.is_empty()
    {
        note(&lane.store).await;
        prune_all(&lane.store).await;
    }
    assert_eq!(unrouted(&lane.store).await, [("b".to_owned(), 1)]);
    let unwanted = |older_than, dry_run| Prune { older_than, unrouted: true, dry_run, ..Prune::default() };
    let pruned = async |prune: Prune| lane.store.prune(&outbox(), &prune).await.expect("pruned").count;
    assert_eq!(pruned(unwanted(HOUR, false)).await, 0, "young");
    assert_eq!(pruned(unwanted(Duration::ZERO, true)).await, 1, "only counted");
    let other = Criteria { topic: Some(pattern("a")), ..Criteria::default() };
    assert_eq!(pruned(Prune { which: other, ..unwanted(Duration::ZERO, false) }).await, 0, "another topic");
    assert_eq!(unrouted(&lane.store).await, [("b".to_owned(), 1)]);
    append(&lane.store, [of_topic("a", "a3"), of_topic("b", "b2")]).await;
    lane.drain().await;
    find(&lane.store, 1).await;
    assert_eq!(pruned(unwanted(Duration::ZERO, true)).await, 2, "only counted");
    assert_eq!(pruned(unwanted(Duration::ZERO, false)).await, 2);
    assert_eq!(listed(&lane.store, State::Dispatched).await, ["a3"], "only what nobody wants");
    assert_eq!((unrouted(&lane.store).await, listed(&lane.store, State::Skipped).await.len()), (vec![], 0));
    assert_eq!(note(&lane.store).await, 0);
}

/// A subscription wants it by now, but was not asked yet: the held lane has yet to take its filter,
/// or the look is still to come. Events before the start of the only subscription are deleted.
pub async fn what_is_wanted_now_is_not_given_up(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    let ids = append(&lane.store, [of_topic("b", "b1"), of_topic("c", "c1"), of_topic("a", "a1")]).await;
    lane.drain().await;
    find(&lane.store, 2).await;
    // Then it is before every window, and known to have been looked at.
    for payload in ["a2", "a3"] {
        append(&lane.store, [of_topic("a", payload)]).await;
        lane.drain().await;
    }
    let_age(fixture).await;
    note(&lane.store).await;
    let late = Subscription { name: named("late"), start: StartAt::Now, ..reader_of("c") };
    lane.store.subscribe(&late).await.expect("new");
    wants(&lane.store, "reader", "b").await;
    let give_up = async |topic: &str, dry_run: bool| {
        let which = Criteria { topic: Some(pattern(topic)), ..Criteria::default() };
        let prune = Prune { unrouted: true, dry_run, which, ..Prune::default() };
        lane.store.prune(&outbox(), &prune).await.expect("pruned").count
    };
    assert_eq!((give_up("b", true).await, give_up("b", false).await), (0, 0));
    lane.store.release(&lane.lease).await.expect("given back");
    assert_eq!((give_up("b", true).await, give_up("b", false).await), (0, 0));
    let_age(fixture).await;
    note(&lane.store).await;
    assert_eq!(state(&lane.store, "reader", ids[0]).await, State::Retrying);
    assert_eq!((give_up("*", true).await, give_up("*", false).await), (1, 1));
    assert_eq!(unrouted(&lane.store).await, []);
}

pub async fn an_unknown_log_has_nothing_unrouted(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    refused(store.note_unrouted(&nowhere()).await, ErrorKind::NotFound, "log_unknown");
    refused(store.unrouted(&nowhere()).await, ErrorKind::NotFound, "log_unknown");
    append(&store, [event("1")]).await;
    assert_eq!(note(&store).await, 0, "nobody reads it: nothing is decided");
}

async fn prune_all(store: &Arc<dyn Store>) {
    let mut after = None;
    loop {
        after = store.prune(&outbox(), &Prune { after, ..Prune::default() }).await.expect("pruned").next;
        if after.is_none() {
            break;
        }
    }
}
