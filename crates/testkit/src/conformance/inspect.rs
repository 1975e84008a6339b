//! What an operator can see.

use std::time::Duration;

use postbox_core::kit::{LOOK_EVENTS_MAX, LOOK_EVENTS_MIN};
use postbox_core::limits::{LIST_PAYLOAD_BYTES_MAX, PAYLOAD_BYTES_MAX};
use postbox_core::{
    Blocker, Change, Count, Criteria, ErrorKind, Headers, Hold, ListQuery, LogName, NewEvent, Pause, Selection, State,
    Stats, Subscription, header,
};

use super::StoreFixture;
use super::harness::*;

pub async fn an_unknown_subscription_is_not_found_and_the_known_are_named(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader()).await;
    let nobody = named("nobody");
    let everything = Selection::default();
    let errors = [
        store.stats(&nobody).await.map(drop),
        store.list(&ListQuery { subscription: nobody.clone(), ..query(State::Dead) }).await.map(drop),
        store.change(&nobody, &Change::Retry, &everything).await.map(drop),
        store.change(&nobody, &Change::Discard, &everything).await.map(drop),
        store.pause(&nobody, None).await,
    ];
    for error in errors.map(|result| result.expect_err("refused")) {
        assert_eq!((error.kind(), error.code()), (ErrorKind::NotFound, "subscription_unknown"), "{error}");
        assert!(error.message().contains("reader"), "{error}");
    }
}

pub async fn logs_are_made_listed_and_counted(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let [inbox, outbox, third] = ["inbox", "outbox", "third"].map(|name| LogName::new(name).expect("a name"));
    assert_eq!(store.logs().await.expect("listed"), [inbox.clone(), outbox.clone()]);
    refused(store.count(&third).await, ErrorKind::NotFound, "log_unknown");
    for _ in 0..2 {
        make_log(fixture, &third).await;
    }
    store.append(&third, &[event("1"), event("2")]).await.expect("appended");
    assert_eq!(store.logs().await.expect("listed"), [inbox, outbox.clone(), third.clone()]);
    assert_eq!(store.count(&third).await.expect("counted"), Count { events: 2, is_estimate: false });
    assert_eq!(store.count(&outbox).await.expect("counted"), Count::default());
    store.check_receiving().await.expect("nothing is in the way");
    store.check_integrity().await.expect("they fit");
}

pub async fn events_are_dated_by_the_time_of_the_store(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader()).await;
    let before = store.time().await.expect("asked");
    append(&store, [event("1")]).await;
    let after = store.time().await.expect("asked");
    let at = store.list(&query(State::Pending)).await.expect("listed")[0].event.created_at;
    assert!(before <= at && at <= after, "{before} {at} {after}");
}

pub async fn subscriptions_show_lanes_leases_and_pauses(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    assert!(store.subscriptions().await.expect("asked").is_empty());
    store.subscribe(&Subscription { lanes: Some(2), ..reader() }).await.expect("new");
    store.subscribe(&reader_named("another")).await.expect("new");
    let lease = acquire(&store, "reader", "one", LONG).await.lease.expect("free");
    let pause = Pause { until: None, by: "ada".into(), why: "because".into() };
    store.pause(&named("another"), Some(&pause)).await.expect("paused");
    let known = store.subscriptions().await.expect("asked");
    assert_eq!(known.iter().map(|info| info.name.as_str()).collect::<Vec<_>>(), ["another", "reader"]);
    assert_eq!((&known[0].paused, &known[1].paused), (&Some(pause), &None));
    assert_eq!(known[1].log, outbox());
    assert_eq!(known[1].lanes.iter().map(|lane| lane.lane).collect::<Vec<_>>(), [0, 1]);
    let held = &known[1].lanes[usize::from(lease.lane)];
    assert_eq!((held.epoch, held.owner.as_ref()), (lease.epoch, Some(&lease.owner)));
    assert!(held.lease_left.is_some_and(|left| left <= LONG && left > LONG / 2));
    let free = &known[1].lanes[1 - usize::from(lease.lane)];
    assert_eq!(free.lease_left, None);
}

pub async fn stats_count_every_state(fixture: &dyn StoreFixture) {
    let lane = in_every_state(fixture).await;
    let stats = stats(&lane.store).await;
    assert_eq!((stats.total, stats.pending, stats.dispatched), (8, 5, 1));
    assert_eq!((stats.retrying, stats.blocked, stats.scheduled), (1, 1, 1));
    assert_eq!((stats.dead, stats.discarded), (1, 1));
    assert!(stats.oldest_pending.is_some());
    assert_eq!(stats.topics.iter().map(|topic| topic.pending).sum::<u64>(), 5);
}

pub async fn stats_of_an_empty_log_are_zero(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader()).await;
    assert_eq!(stats(&store).await, Stats { share: LOOK_EVENTS_MAX, ..Stats::default() });
}

pub async fn stats_follow_the_settled_position(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::unread(fixture, numbered(5)).await;
    let first = lane.next(2).await;
    let second = lane.next(2).await;
    assert_eq!(stats(&lane.store).await.pending, 5);
    lane.settle(&first, vec![]).await;
    assert_eq!(stats(&lane.store).await.pending, 3);
    lane.settle(&second, vec![]).await;
    lane.drain().await;
    let stats = stats(&lane.store).await;
    assert_eq!((stats.pending, stats.dispatched, stats.oldest_pending), (0, 5, None));
    assert!(stats.topics.is_empty());
}

pub async fn pending_topics_are_counted_deepest_first_with_their_age(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader()).await;
    append(&store, [NewEvent::json("few", "1")]).await;
    fixture.pass(SHORT).await;
    append(&store, vec![NewEvent::json("many", "1"); 3]).await;
    let stats = stats(&store).await;
    let topics: Vec<_> = stats.topics.iter().map(|topic| (topic.topic.as_str(), topic.pending)).collect();
    assert_eq!(topics, [("many", 3), ("few", 1)]);
    let slack = Duration::from_millis(20);
    assert!(stats.topics[1].oldest_pending.is_some_and(|age| age + slack >= SHORT), "{stats:?}");
    assert!(stats.oldest_pending.is_some_and(|age| age + slack >= SHORT), "{stats:?}");
    assert!(stats.topics[0].oldest_pending <= stats.topics[1].oldest_pending);
}

/// An event that must not be delivered earlier is not late before its time.
pub async fn delayed_events_do_not_age_before_their_time(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let at = jiff::Timestamp::now() + 24 * HOUR;
    append(&lane.store, [event("later").deliver_at(at)]).await;
    fixture.pass(SHORT).await;
    let unread = stats(&lane.store).await;
    assert_eq!((unread.pending, unread.oldest_pending), (1, Some(Duration::ZERO)));
    let batch = lane.next(10).await;
    lane.settle(&batch, vec![(0, Schedule { at })]).await;
    fixture.pass(SHORT).await;
    let waiting = stats(&lane.store).await;
    assert_eq!((waiting.scheduled, waiting.oldest_pending), (1, Some(Duration::ZERO)));
    assert_eq!(waiting.topics[0].oldest_pending, Some(Duration::ZERO));
}

/// From this the doctor knows how many events arrive, and of which keys.
pub async fn the_newest_events_are_known_with_their_age(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    assert!(store.arrivals(&outbox(), 10).await.expect("looked").is_empty());
    append(&store, [NewEvent::json("first", "1").tenant("acme").key("k")]).await;
    fixture.pass(SHORT).await;
    append(&store, [NewEvent::json("second", "1"), NewEvent::json("third", "1").key("k")]).await;
    let all = store.arrivals(&outbox(), 10).await.expect("looked");
    assert_eq!(all.iter().map(|it| it.topic.as_str()).collect::<Vec<_>>(), ["third", "second", "first"]);
    assert_eq!(all.iter().map(|it| it.key.as_deref()).collect::<Vec<_>>(), [Some("k"), None, Some("k")]);
    assert_eq!((all[0].tenant.as_deref(), all[2].tenant.as_deref()), (None, Some("acme")));
    let slack = Duration::from_millis(20);
    assert!(all[2].age + slack >= all[0].age + SHORT, "{all:?}");
    assert_eq!(store.arrivals(&outbox(), 2).await.expect("looked").len(), 2);
    refused(store.arrivals(&nowhere(), 2).await, ErrorKind::NotFound, "log_unknown");
    let is_in_the_way = |it: &Blocker| it.waiting > 0 || matches!(it.hold, Hold::Horizon { .. } | Hold::Wal { .. });
    assert!(store.blockers().await.expect("looked").iter().all(is_in_the_way));
}

/// Dispatched counts each delivered event once, but not unwanted or dead events.
pub async fn dispatched_counts_each_delivered_event_once(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("wanted")).await;
    let wanted = |payload: &str| NewEvent::json("wanted", payload.to_owned());
    let events = [wanted("1"), event("noise"), wanted("2"), wanted("3"), event("noise"), wanted("4"), wanted("5")];
    append(&lane.store, events).await;
    let dispatched = async || stats(&lane.store).await.dispatched;
    let batch = lane.next(5).await;
    let (position, rest) = (Some(batch.deliveries[1].seq), &batch.deliveries[2..]);
    lane.rewind(position).await;
    assert_eq!((dispatched().await, rest.len()), (2, 3), "up to the position");
    let batch = lane.next(5).await;
    assert_eq!(payloads(&batch.deliveries), ["3", "4", "5"], "the others are given again");
    lane.settle(&batch, vec![(0, dead()), (1, retry_now())]).await;
    assert_eq!(dispatched().await, 3);
    assert_eq!(payloads(&lane.drain_due().await), ["4"]);
    assert_eq!(dispatched().await, 4, "a retry that arrived");
    lane.replay(Selection::default()).await;
    assert_eq!(payloads(&lane.drain_due().await), ["3"]);
    let all = stats(&lane.store).await;
    assert_eq!((all.dispatched, all.dead, all.pending, all.total), (5, 0, 0, 5));
    assert!(lane.taken_over().await.drain().await.is_empty());
    assert_eq!(dispatched().await, 5);
}

/// Counts that are too large are estimated and marked as such.
pub async fn a_deep_backlog_is_near_the_truth(fixture: &dyn StoreFixture) {
    const DEPTH: u64 = LOOK_EVENTS_MAX + 5_000;
    let lane = Lane::open(fixture).await;
    let other = Lane::open_as(fixture, &Subscription { name: named("other"), ..reader_of("rare") }).await;
    let event = |n: u64| if n.is_multiple_of(4) { NewEvent::json("rare", "1") } else { event("1") };
    for from in (0..DEPTH).step_by(1_000) {
        append(&lane.store, (from..from + 1_000).map(event).collect::<Vec<_>>()).await;
    }
    let near = |found: u64, truth: u64| found.abs_diff(truth) * 4 <= truth;
    let all = stats(&lane.store).await;
    assert!(near(all.pending, DEPTH) && (all.is_estimate || all.pending == DEPTH), "{all:?}");
    assert!(all.oldest_pending.is_some(), "{all:?}");
    let rare = all.topics.iter().find(|topic| topic.topic == "rare").expect("a topic");
    assert!(near(rare.pending, DEPTH / 4) && rare.oldest_pending.is_some(), "{all:?}");
    let filtered = other.store.stats(&other.lease.subscription).await.expect("counted");
    assert!(near(filtered.pending, DEPTH / 4) && filtered.topics.len() == 1, "{filtered:?}");
    let count = lane.store.count(&outbox()).await.expect("counted");
    assert!(near(count.events, DEPTH), "{count:?}");
    // The rest is few enough to be counted again.
    while stats(&lane.store).await.is_estimate {
        let batch = lane.next(1_000).await;
        lane.settle(&batch, vec![]).await;
    }
    let left = stats(&lane.store).await;
    assert_eq!(left.pending + left.dispatched, DEPTH);
}

/// Several subscriptions share what one would have. A missing one does not affect the others.
pub async fn several_share_what_is_looked_at(fixture: &dyn StoreFixture) {
    const DEPTH: u64 = LOOK_EVENTS_MAX * 2 / 5;
    let lane = Lane::open(fixture).await;
    lane.store.subscribe(&Subscription { name: named("other"), ..reader_of("rare") }).await.expect("new");
    let event = |n: u64| if n.is_multiple_of(4) { NewEvent::json("rare", "1") } else { event("1") };
    for from in (0..DEPTH).step_by(1_000) {
        append(&lane.store, (from..from + 1_000).map(event).collect::<Vec<_>>()).await;
    }
    let alone = stats(&lane.store).await;
    assert_eq!((alone.pending, alone.is_estimate, alone.share), (DEPTH, false, LOOK_EVENTS_MAX));
    let names = ["other", "nobody", "reader"].map(named);
    let [other, nobody, reader] =
        <[_; 3]>::try_from(lane.store.stats_of(&names).await).expect("one for each, in their order");
    refused(nobody, ErrorKind::NotFound, "subscription_unknown");
    for (counted, truth) in [(other.expect("counted"), DEPTH / 4), (reader.expect("counted"), DEPTH)] {
        assert_eq!(counted.share, LOOK_EVENTS_MAX / 3);
        assert!(counted.pending.abs_diff(truth) * 4 <= truth, "{counted:?}");
        assert!(counted.is_estimate || counted.pending == truth, "{counted:?}");
    }
    let many = vec![named("reader"); 30];
    assert!(lane.store.stats_of(&many).await.into_iter().all(|it| it.is_ok_and(|it| it.share == LOOK_EVENTS_MIN)));
    assert!(lane.store.stats_of(&[]).await.is_empty());
}

pub async fn every_state_lists_its_own(fixture: &dyn StoreFixture) {
    let lane = in_every_state(fixture).await;
    for (state, expected) in [
        (State::Retrying, vec!["retrying"]),
        (State::Blocked, vec!["blocked"]),
        (State::Scheduled, vec!["scheduled"]),
        (State::Dead, vec!["dead"]),
        (State::Discarded, vec!["discarded"]),
        (State::Dispatched, vec!["dispatched"]),
        (State::Pending, vec!["pending-1", "pending-2"]),
    ] {
        assert_eq!(listed(&lane.store, state).await, expected, "{state}");
        for record in lane.store.list(&query(state)).await.expect("listed") {
            assert_eq!(record.state, state);
            let one = lane.store.get(&named("reader"), record.event.id).await.expect("asked");
            assert_eq!(one.as_ref(), Some(&record), "list and get agree");
        }
    }
}

pub async fn lists_are_paged_in_seq_order(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, numbered(5).into_iter().map(|event| (event, dead()))).await;
    append(&lane.store, numbered(5)).await;
    for state in [State::Dead, State::Pending] {
        let mut after = None;
        let mut seen = Vec::new();
        for expected in [2, 2, 1, 0] {
            let page = lane.store.list(&ListQuery { after, limit: 2, ..query(state) }).await.expect("listed");
            assert_eq!(page.len(), expected);
            after = page.last().map(|record| record.seq).or(after);
            seen.extend(page.into_iter().map(|record| record.seq));
        }
        assert!(seen.windows(2).all(|pair| pair[0] < pair[1]), "{seen:?}");
    }
}

pub async fn without_a_state_the_newest_are_listed_first(fixture: &dyn StoreFixture) {
    let lane = in_every_state(fixture).await;
    append(&lane.store, [event(&"1".repeat(50_000)), event(&"2".repeat(50_000))]).await;
    let newest = ListQuery { state: None, limit: 3, ..query(State::Dead) };
    let (mut after, mut all) = (None, Vec::new());
    loop {
        let page = lane.store.list(&ListQuery { after, ..newest.clone() }).await.expect("listed");
        let Some(last) = page.last() else { break };
        assert!(page.len() <= 3);
        after = Some(last.seq);
        all.extend(page);
    }
    assert!(all.windows(2).all(|pair| pair[0].seq > pair[1].seq), "{all:?}");
    for state in State::ALL {
        let mut of_state: Vec<_> = all.iter().filter(|record| record.state == state).cloned().collect();
        of_state.reverse();
        assert_eq!(of_state, lane.store.list(&query(state)).await.expect("listed"), "{state}");
    }
    let of_code = ListQuery { code: Some("http_422".into()), ..newest.clone() };
    let found = lane.store.list(&of_code).await.expect("listed");
    assert!(!found.is_empty() && found.iter().all(|record| record.code.as_deref() == Some("http_422")), "{found:?}");
    let of_topic = Criteria { topic: Some(pattern("no.such")), ..Criteria::default() };
    assert!(lane.store.list(&ListQuery { which: of_topic, ..newest }).await.expect("listed").is_empty());
}

/// Payloads that do not fit into one list are in the next.
pub async fn a_list_is_bounded_by_its_payloads(fixture: &dyn StoreFixture) {
    let large = || NewEvent::new("large", vec![b'x'; PAYLOAD_BYTES_MAX], "text/plain");
    let fit = LIST_PAYLOAD_BYTES_MAX / PAYLOAD_BYTES_MAX;
    let (lane, _) = Lane::settled(fixture, [(large(), dead())]).await;
    for _ in 0..=fit {
        append(&lane.store, [large()]).await;
    }
    let sizes = async |after| {
        let list = lane.store.list(&ListQuery { after, limit: 100, ..query(State::Pending) }).await.expect("listed");
        (list.len(), list.last().map(|record| record.seq))
    };
    let (first, last) = sizes(None).await;
    assert_eq!((first, sizes(last).await.0), (fit, 1));
    assert_eq!(lane.store.list(&query(State::Dead)).await.expect("listed").len(), 1);
    let bare = ListQuery { payloads: false, ..query(State::Pending) };
    assert_eq!(lane.store.list(&bare).await.expect("listed").len(), fit + 1, "nothing bounds it");
}

/// Who shows no payload must not wait for large ones.
pub async fn a_list_without_payloads_has_everything_else(fixture: &dyn StoreFixture) {
    let lane = in_every_state(fixture).await;
    let bytes = NewEvent::new("bytes", vec![0xff; 50_000], "application/octet-stream").correlation_id("c");
    append(&lane.store, [event(&"1".repeat(50_000)), bytes]).await;
    for state in State::ALL.into_iter().map(Some).chain([None]) {
        let query = ListQuery { state, ..query(State::Dead) };
        let mut whole = lane.store.list(&query).await.expect("listed");
        whole.iter_mut().for_each(|record| record.event.payload.clear());
        let bare = lane.store.list(&ListQuery { payloads: false, ..query }).await.expect("listed");
        assert_eq!(bare, whole, "{state:?}");
    }
}

pub async fn lists_narrow_by_topic_and_code(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let of = |topic: &str| NewEvent::json(topic, topic.to_owned());
    let events = [of("a_b"), of("aXb"), of("order.paid"), of("order.sent")];
    lane.past(events.into_iter().zip(["x", "x", "x", "y_"].map(dead_of))).await;
    let found = async |topic: Option<&str>, code: Option<&str>| {
        let which = Criteria { topic: topic.map(pattern), ..Criteria::default() };
        let query = ListQuery { which, code: code.map(str::to_owned), ..query(State::Dead) };
        let records = lane.store.list(&query).await.expect("listed");
        records.iter().map(|record| record.event.topic.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(found(Some("a_b"), None).await, ["a_b"]);
    assert_eq!(found(Some("order.*"), None).await, ["order.paid", "order.sent"]);
    assert_eq!(found(Some("order.*"), Some("x")).await, ["order.paid"]);
    assert_eq!(found(None, Some("y_")).await, ["order.sent"]);
    assert!(found(None, Some("y%")).await.is_empty());
    assert!(found(None, Some("xx")).await.is_empty());
}

pub async fn lists_narrow_by_key_tenant_and_time(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let acme = |event: NewEvent| event.tenant("acme");
    lane.past([(keyed("a", "1"), dead()), (keyed("b", "2"), Delivered), (acme(event("3")), dead())]).await;
    fixture.pass(SHORT).await;
    let late = lane.past([(keyed("a", "4"), dead()), (acme(keyed("a", "5")), Delivered)]).await[0];
    let at = Some(record(&lane.store, late).await.event.created_at);
    append(&lane.store, [keyed("a", "6"), acme(keyed("b", "7"))]).await;
    let key = Some("a".parse().expect("a key"));
    for (which, dead, dispatched, pending) in [
        (Criteria { key: key.clone(), ..Criteria::default() }, &["1", "4"][..], &["5"][..], &["6"][..]),
        (Criteria { tenant: "acme".parse().ok(), ..Criteria::default() }, &["3"], &["5"], &["7"]),
        (Criteria { since: at, ..Criteria::default() }, &["4"], &["5"], &["6", "7"]),
        (Criteria { until: at, ..Criteria::default() }, &["1", "3"], &["2"], &[]),
        (Criteria { key, until: at, ..Criteria::default() }, &["1"], &[], &[]),
    ] {
        for (state, expected) in [(State::Dead, dead), (State::Dispatched, dispatched), (State::Pending, pending)] {
            let query = ListQuery { which: which.clone(), ..query(state) };
            let found = lane.store.list(&query).await.expect("listed");
            let found: Vec<_> = found.iter().map(|record| String::from_utf8_lossy(&record.event.payload)).collect();
            assert_eq!(found, expected, "{query:?}");
        }
    }
}

pub async fn lists_narrow_by_conversation(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let of = |payload: &str, id: &str, cause: &str| event(payload).correlation_id(id).causation_id(cause);
    // Names are exact, as in a filter.
    let other_case = event("3").header("Correlation-Id", "a'b").header("Causation-Id", "x");
    lane.past([(of("1", "a'b", "x"), dead()), (of("2", "c", "x"), dead()), (other_case, dead())]).await;
    lane.past([(of("4", "a'b", "x"), Delivered), (of("5", "a'b", "y"), Delivered)]).await;
    append(&lane.store, [of("6", "a'b", "x"), of("7", "c", "y")]).await;
    let [of_id, of_cause] = [(header::CORRELATION_ID, "a'b"), (header::CAUSATION_ID, "x")]
        .map(|(name, value)| Headers::from([(name.to_owned(), value.to_owned())]));
    let of_both: Headers = of_id.clone().into_iter().chain(of_cause.clone()).collect();
    for (headers, dead, dispatched, pending, newest) in [
        (of_id, &["1"][..], &["4", "5"][..], &["6"][..], &["6", "5", "4", "1"][..]),
        (of_cause, &["1", "2"], &["4"], &["6"], &["6", "4", "2", "1"]),
        (of_both, &["1"], &["4"], &["6"], &["6", "4", "1"]),
    ] {
        for (state, expected) in [
            (Some(State::Dead), dead),
            (Some(State::Dispatched), dispatched),
            (Some(State::Pending), pending),
            (None, newest),
        ] {
            let query = ListQuery { headers: headers.clone(), state, ..query(State::Dead) };
            let found = lane.store.list(&query).await.expect("listed");
            let found: Vec<_> = found.iter().map(|record| String::from_utf8_lossy(&record.event.payload)).collect();
            assert_eq!(found, expected, "{query:?}");
        }
    }
}

pub async fn an_id_is_found_by_its_beginning(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let id = |number: u128| postbox_core::EventId::from_uuid(uuid::Uuid::from_u128(number));
    let near = 0x0189_0000_0000_7000_8000_0000_0000_0000;
    let (ids, edges) = ([id(near), id(near + 1), id(near + 2)], [id(0x0188_ffff << 96), id(0x0189_0001 << 96)]);
    append(&store, ids.iter().chain(&edges).map(|id| event("1").id(*id)).collect::<Vec<_>>()).await;
    let open = begin_with(fixture, [event("2").id(id(near + 3))]).await;
    let look = async |prefix: &str, limit| {
        let prefix = prefix.parse().expect("a beginning");
        store.ids(&outbox(), &prefix, limit).await.expect("looked")
    };
    assert_eq!(look("01890000", 10).await, ids);
    assert_eq!(look("01890000-0000-7000-8", 2).await, ids[..2]);
    assert_eq!(look("01890001", 2).await, edges[1..]);
    assert_eq!(look(&ids[1].to_string(), 2).await, ids[1..2]);
    assert!(look("abcdef01", 2).await.is_empty());
    open.rollback().await;
    let nowhere = store.ids(&nowhere(), &"01890000".parse().expect("a beginning"), 2).await;
    refused(nowhere, ErrorKind::NotFound, "log_unknown");
}

pub async fn an_unknown_event_is_none(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &reader()).await;
    let id = postbox_core::EventId::from_uuid(uuid::Uuid::from_u128(1));
    assert_eq!(store.get(&named("reader"), id).await.expect("asked"), None);
}

/// Opens a lane with one event in each state, and two pending.
async fn in_every_state(fixture: &dyn StoreFixture) -> Lane {
    let (lane, ids) = Lane::settled(
        fixture,
        [
            (keyed("a", "retrying"), retry(HOUR)),
            (keyed("a", "blocked"), Block),
            (event("scheduled"), scheduled()),
            (event("dead"), dead()),
            (event("discarded"), dead()),
            (event("dispatched"), Delivered),
        ],
    )
    .await;
    assert_eq!(lane.discard(these(&[ids[4]])).await, 1);
    append(&lane.store, [event("pending-1"), keyed("a", "pending-2")]).await;
    lane
}
