//! A log as it grows, watched without a subscription.

use std::sync::Arc;

use postbox_core::{BatchLimit, Criteria, ErrorKind, NewEvent, Store};

use super::StoreFixture;
use super::harness::*;

/// Watches a log from a place on.
struct Watcher {
    store: Arc<dyn Store>,
    which: Criteria,
    limit: BatchLimit,
    place: String,
}

impl Watcher {
    async fn of(store: &Arc<dyn Store>, which: Criteria) -> Self {
        let limit = BatchLimit { events: 100, payload_bytes: 1024 * 1024 };
        let begun = store.tail(&outbox(), &which, None, limit).await.expect("begun");
        assert!(begun.events.is_empty() && !begun.more, "it begins now: {begun:?}");
        Self { store: store.clone(), which, limit, place: begun.place }
    }

    /// Returns the payloads of everything that came.
    async fn look(&mut self) -> Vec<String> {
        let mut seen = Vec::new();
        for _ in 0..1_000 {
            let tailed = self.store.tail(&outbox(), &self.which, Some(&self.place), self.limit).await.expect("looked");
            assert!(tailed.events.len() <= self.limit.events);
            self.place = tailed.place;
            seen.extend(tailed.events.iter().map(|(_, event)| String::from_utf8_lossy(&event.payload).into_owned()));
            if !tailed.more {
                return seen;
            }
        }
        panic!("it never comes to an end");
    }
}

pub async fn what_is_appended_is_seen_once(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    append(&store, [event("before")]).await;
    let mut watcher = Watcher::of(&store, Criteria::default()).await;
    assert!(watcher.look().await.is_empty());
    append(&store, [keyed("a", "1"), keyed("a", "2")]).await;
    append(&store, [event("3")]).await;
    assert_eq!(watcher.look().await, ["1", "2", "3"]);
    assert!(watcher.look().await.is_empty());
    append(&store, [event("4")]).await;
    assert_eq!(watcher.look().await, ["4"]);
}

/// Seen whatever its position in the log.
pub async fn a_transaction_that_commits_late_is_seen(fixture: &dyn StoreFixture) {
    let Some(mut late) = begin_beside_others(fixture).await else { return };
    let store = fixture.store();
    late.append(&outbox(), &[event("early"), event("early 2")]).await.expect("appended");
    let mut watcher = Watcher::of(&store, Criteria::default()).await;
    watcher.limit.events = 2;
    append(&store, numbered(5)).await;
    assert_eq!(watcher.look().await, ["1", "2", "3", "4", "5"]);
    let mut later = begin_beside_others(fixture).await.expect("as before");
    later.append(&outbox(), &[event("later")]).await.expect("appended");
    append(&store, [event("6")]).await;
    assert_eq!(watcher.look().await, ["6"]);
    late.commit().await;
    append(&store, [event("7")]).await;
    assert_eq!(watcher.look().await, ["early", "early 2", "7"]);
    later.commit().await;
    assert_eq!(watcher.look().await, ["later"]);
    assert!(watcher.look().await.is_empty());
}

pub async fn a_look_is_bounded_and_goes_on(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let mut few = Watcher::of(&store, Criteria::default()).await;
    few.limit.events = 3;
    let mut small = Watcher::of(&store, Criteria::default()).await;
    small.limit.payload_bytes = 10;
    let large = |n: usize| event(&format!("{n} {}", "x".repeat(7)));
    append(&store, (0..10).map(large).collect::<Vec<_>>()).await;
    for watcher in [&mut few, &mut small] {
        let seen = watcher.look().await;
        assert!(seen.len() == 10 && seen.is_sorted(), "{seen:?}");
    }
}

pub async fn only_what_is_meant_is_seen(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let (topic, key, tenant) = (Some(pattern("a.*")), "k".parse().ok(), "acme".parse().ok());
    let which = Criteria { topic, key, tenant, ..Criteria::default() };
    let mut watcher = Watcher::of(&store, which).await;
    watcher.limit.events = 1;
    let of = |topic: &str, key: &str, payload: &str| NewEvent::json(topic, payload.to_owned()).key(key).tenant("acme");
    append(&store, [of("a.x", "k", "1"), of("b.x", "k", "2"), of("a.x", "l", "3"), of("a.y", "k", "4")]).await;
    assert_eq!(watcher.look().await, ["1", "4"]);
    append(&store, [of("b.x", "k", "5"), of("a.x", "k", "6").tenant("other")]).await;
    assert!(watcher.look().await.is_empty());
}

pub async fn a_look_leaves_no_trace_and_knows_its_place(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let mut watcher = Watcher::of(&store, Criteria::default()).await;
    append(&store, [event("1")]).await;
    watcher.look().await;
    assert!(store.subscriptions().await.expect("asked").is_empty());
    let (all, limit) = (Criteria::default(), watcher.limit);
    refused(store.tail(&nowhere(), &all, None, limit).await, ErrorKind::NotFound, "log_unknown");
    for place in ["", "here", "1/2/3", "'; DROP"] {
        refused(store.tail(&outbox(), &all, Some(place), limit).await, ErrorKind::Invalid, "place_invalid");
    }
}
