//! Filters by an event's kind, aggregate and headers.

use std::borrow::Cow;

use postbox_core::limits::{HEADERS_MAX, NAME_BYTES_MAX};
use postbox_core::{ErrorKind, Filter, Headers, NewEvent, Replay, ResetTo, Selection, State, Subscription};

use super::StoreFixture;
use super::harness::*;
use super::routing::{find, note, state, unrouted};

fn kinds(names: &[&str]) -> Filter {
    Filter { kinds: names.iter().map(|name| (*name).to_owned()).collect(), ..Filter::default() }
}

fn aggregates(names: &[&str]) -> Filter {
    Filter { aggregates: names.iter().map(|name| (*name).to_owned()).collect(), ..Filter::default() }
}

fn headers(all: &[(&str, &str)]) -> Filter {
    let headers = all.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Filter { headers: headers.collect(), ..Filter::default() }
}

/// A filter that uses every field.
fn narrow() -> Filter {
    let topics = vec![pattern("order.*")];
    let tenant = "acme".parse().ok();
    Filter {
        topics,
        tenant,
        kinds: kinds(&["k"]).kinds,
        aggregates: aggregates(&["a"]).aggregates,
        ..headers(&[("h", "1")])
    }
}

fn with(filter: Filter) -> Subscription {
    Subscription { filter, ..reader() }
}

async fn wants(lane: &Lane, filter: Filter) {
    lane.store.subscribe(&with(filter)).await.expect("another filter");
}

/// Two events that [`narrow`] wants, and between them one that misses each single condition.
fn nearly() -> [NewEvent; 7] {
    let full = |payload: &str| event(payload).tenant("acme").kind("k").aggregate("a").header("h", "1").header("x", "y");
    let elsewhere = NewEvent { topic: "refund.paid".into(), ..full("topic") };
    [
        full("1"),
        elsewhere,
        full("tenant").tenant("other"),
        full("kind").kind("K"),
        full("aggregate").aggregate("A"),
        full("header").header("h", "2"),
        full("2"),
    ]
}

/// Reads all wanted events, two at a time, because later pages of a window are queried differently.
async fn read_by_two(lane: &Lane) -> Vec<String> {
    let mut all = Vec::new();
    loop {
        let batch = lane.next(2).await;
        if batch.is_empty() {
            return all;
        }
        lane.settle(&batch, Vec::new()).await;
        all.extend(payloads(&batch.deliveries));
    }
}

pub async fn only_what_is_wanted_comes_by_its_exact_name(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let odd = "a \"quoted\" \\ value\t%";
    let events = [
        event("plain"),
        event("domain").kind("domain"),
        event("integration").kind("integration"),
        event("Integration").kind("Integration"),
        event("audit").kind("audit"),
        event("order").aggregate("order"),
        event("star").aggregate("o*"),
        event("eu").header("region", "eu"),
        event("EU").header("region", "EU"),
        event("Region").header("Region", "eu"),
        event("both").header("region", "eu").header("tier", "gold"),
        event("odd").header("odd", odd).header("empty", ""),
        event("all").kind("audit").aggregate("order").header("region", "eu"),
    ];
    for _ in 0..2 {
        append(&store, &events).await;
    }
    let plain = ["plain", "domain", "order", "star", "eu", "EU", "Region", "both", "odd"];
    let every =
        Filter { kinds: kinds(&["audit"]).kinds, aggregates: vec!["order".into()], ..headers(&[("region", "eu")]) };
    for (n, (filter, expected)) in [
        (kinds(&["integration", "audit"]), vec!["integration", "audit", "all"]),
        (kinds(&["domain"]), plain.to_vec()),
        (kinds(&["nothing"]), vec![]),
        (aggregates(&["order"]), vec!["order", "all"]),
        (aggregates(&["o*"]), vec!["star"]),
        (headers(&[("region", "eu")]), vec!["eu", "both", "all"]),
        (headers(&[("region", "eu"), ("tier", "gold")]), vec!["both"]),
        (headers(&[("odd", odd)]), vec!["odd"]),
        (headers(&[("empty", "")]), vec!["odd"]),
        (every, vec!["all"]),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("reader-{n}");
        let lane = Lane::open_as(fixture, &Subscription { filter: filter.clone(), ..reader_named(&name) }).await;
        let expected = [expected.clone(), expected].concat();
        let pending = store.stats(&named(&name)).await.expect("counted").pending;
        assert_eq!(pending, expected.len() as u64, "pending by {filter}");
        assert_eq!(read_by_two(&lane).await, expected, "wanted {filter}");
        assert_eq!(info(&store, &name).await.filter, filter, "as it is listed");
    }
}

pub async fn what_commits_late_passes_the_same_filter(fixture: &dyn StoreFixture) {
    let Some(mut open) = begin_beside_others(fixture).await else { return };
    let lane = Lane::open_as(fixture, &with(narrow())).await;
    open.append(&outbox(), &nearly()).await.expect("appended");
    append(&lane.store, [event("early").tenant("acme").kind("k").aggregate("a").header("h", "1")]).await;
    assert_eq!(payloads(&lane.drain().await), ["early"]);
    open.commit().await;
    assert_eq!(read_by_two(&lane).await, ["1", "2"]);
}

/// An event that only the first filter wanted was dispatched; one that only the second wants was
/// not.
pub async fn each_is_judged_by_the_filter_of_its_time(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &with(kinds(&["x"]))).await;
    let events = |of: &str| {
        let (k, a, h) = (format!("k{of}"), format!("a{of}"), format!("h{of}"));
        [event(&k).kind("x"), event(&a).aggregate("x"), event(&h).header("x", "1")]
    };
    let [k, a, h] = events("1");
    append(&lane.store, [a, h, k]).await;
    assert_eq!(payloads(&lane.drain().await), ["k1"]);
    wants(&lane, aggregates(&["x"])).await;
    let [k, a, h] = events("2");
    append(&lane.store, [h, k, a]).await;
    assert_eq!(payloads(&lane.drain().await), ["a2"]);
    wants(&lane, headers(&[("x", "1")])).await;
    let [k, a, h] = events("3");
    append(&lane.store, [k, a, h]).await;
    assert_eq!(payloads(&lane.drain().await), ["h3"]);
    wants(&lane, kinds(&["nothing"])).await;
    lane.drain().await;
    assert_eq!(listed(&lane.store, State::Dispatched).await, ["k1", "a2", "h3"]);
    assert_eq!(listed(&lane.store, State::Skipped).await, ["a1", "h1", "h2", "k2", "k3", "a3"]);
}

/// An unrouted event is handed over by each filter that begins to want it, whichever field it uses.
pub async fn what_nobody_wanted_comes_to_the_filter_that_does(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &with(kinds(&["x"]))).await;
    let events = [
        event("kind").kind("y"),
        event("aggregate").aggregate("y"),
        event("header").header("y", "1"),
        event("nothing"),
    ];
    let ids = append(&lane.store, events).await;
    find(&lane.store, 4).await;
    assert_eq!(unrouted(&lane.store).await, [("order.paid".to_owned(), 4)]);
    assert_eq!(state(&lane.store, "reader", ids[3]).await, State::Unrouted);
    let fillers = [event("x").kind("y"), event("x").aggregate("y"), event("x").header("y", "1")];
    let filters = [kinds(&["y", "z"]), aggregates(&["y"]), headers(&[("y", "1")])];
    for (n, (filter, filler)) in filters.into_iter().zip(fillers).enumerate() {
        wants(&lane, filter.clone()).await;
        append(&lane.store, [filler]).await;
        let mut got = payloads(&lane.drain().await);
        note(&lane.store).await;
        got.extend(payloads(&lane.drain_due().await));
        got.sort();
        assert_eq!(got, [["kind", "aggregate", "header"][n], "x"], "by {filter}");
        assert_eq!(state(&lane.store, "reader", ids[n]).await, State::Dispatched);
    }
    assert_eq!(state(&lane.store, "reader", ids[3]).await, State::Unrouted);
}

/// Checks that events are looked at. They would not be if the filter counted as taking everything.
async fn is_not_everything(fixture: &dyn StoreFixture, filter: Filter) {
    let lane = Lane::open_as(fixture, &with(filter)).await;
    append(&lane.store, [event("left")]).await;
    find(&lane.store, 1).await;
    assert_eq!(listed(&lane.store, State::Unrouted).await, ["left"]);
}

pub async fn some_kinds_are_not_everything(fixture: &dyn StoreFixture) {
    is_not_everything(fixture, kinds(&["x"])).await;
}

pub async fn some_aggregates_are_not_everything(fixture: &dyn StoreFixture) {
    is_not_everything(fixture, aggregates(&["x"])).await;
}

pub async fn some_headers_are_not_everything(fixture: &dyn StoreFixture) {
    is_not_everything(fixture, headers(&[("x", "1")])).await;
}

/// Counts, discards, replays and resets apply to the events that the filter wants.
pub async fn operators_mean_what_is_wanted(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &with(narrow())).await;
    let ids = append(&lane.store, nearly()).await;
    assert_eq!(lane.discard(Selection { dry_run: true, ..these(&ids) }).await, 2);
    assert_eq!(plan(&lane.store, ResetTo::Now).await.skipped, 2);
    assert_eq!(read_by_two(&lane).await, ["1", "2"]);
    assert_eq!(plan(&lane.store, ResetTo::Beginning).await.again, 2);
    let replayed = lane.store.replay(&named("reader"), &Replay::default()).await.expect("replayed");
    assert_eq!(replayed.count, 2);
    assert_eq!(payloads(&lane.drain_due().await), ["1", "2"]);
    append(&lane.store, nearly()).await;
    assert_eq!(stats(&lane.store).await.pending, 2);
    let came = lane.store.arrivals(&outbox(), 2).await.expect("asked");
    let wanted: Vec<bool> =
        came.iter().map(|it| narrow().matches(it.traits(), || Cow::Borrowed(&it.headers))).collect();
    assert_eq!(wanted, [true, false], "the newest first");
}

/// An event that one subscription does not want is skipped by it, read or not.
pub async fn what_one_leaves_out_goes_to_another(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &with(narrow())).await;
    let all = Lane::open_as(fixture, &reader_named("all")).await;
    let ids = append(&lane.store, nearly()).await;
    all.drain().await;
    let batch = lane.next(10).await;
    assert_eq!(payloads(&batch.deliveries), ["1", "2"]);
    for id in &ids[1..6] {
        assert_eq!(state(&lane.store, "reader", *id).await, State::Skipped);
        assert_eq!(state(&lane.store, "all", *id).await, State::Dispatched);
    }
    lane.settle(&batch, Vec::new()).await;
    assert_eq!(listed(&lane.store, State::Dispatched).await, ["1", "2"]);
}

pub async fn filters_that_no_event_can_pass_are_refused(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let long = "x".repeat(NAME_BYTES_MAX + 1);
    let many = (0..=HEADERS_MAX).map(|n| (format!("h{n}"), String::new())).collect::<Headers>();
    for (filter, code) in [
        (kinds(&[""]), "kind_invalid"),
        (kinds(&["good", &long]), "kind_invalid"),
        (kinds(&["a\nb"]), "kind_invalid"),
        (aggregates(&[""]), "aggregate_invalid"),
        (aggregates(&[&long]), "aggregate_invalid"),
        (headers(&[("", "x")]), "header_name_invalid"),
        (headers(&[("a b", "x")]), "header_name_invalid"),
        (headers(&[("a", "x\ny")]), "header_value_invalid"),
        (Filter { headers: many, ..Filter::default() }, "headers_too_many"),
    ] {
        refused(store.subscribe(&with(filter)).await, ErrorKind::Invalid, code);
    }
}
