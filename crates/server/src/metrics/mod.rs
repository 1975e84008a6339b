//! `/metrics`: the relays' counters, and the store's depth and lag.
//!
//! Counters come from memory and are always current. Depth and lag come from the store, high-water
//! marks from the destinations; both are cached for five seconds. Publishers choose topics, so only
//! the deepest topics have a label of their own; the rest are summed up as `other`.

mod family;
mod page;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use postbox_core::{
    Clock, HighWaterMark, LogName, Result, SourceName, State, Store, StoreName, SubscriptionName, TopicStats,
};
use postbox_engine::{BreakerState, MetricsSnapshot, SupervisedRelay};
use postbox_ingress::Count;
use postbox_receiver::ReceiverSnapshot;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::registry::Registry;
use tokio::time::{Instant, timeout_at};

use self::page::Page;
use crate::cache::Cached;
use crate::served_store::ServedStore;
use crate::status::{self, MarksJson, StatsJson, UnroutedLog};

/// How long high-water marks are cached: scrapers ask every 10 to 60 s, and several share one
/// answer.
const MARKS_TTL: Duration = Duration::from_secs(5);
/// Most topics with their own label per subscription; it bounds the number of series.
const TOPICS_MAX: usize = 30;

/// The content type of the page.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The label for everything without its own label.
const OTHER: &str = "other";
/// The label for events without a source.
const NONE: &str = "none";

/// Collects all metrics.
pub(crate) struct Exporter {
    stores: Vec<Arc<ServedStore>>,
    marks: Cached<Vec<MarksJson>>,
}

impl Exporter {
    pub(crate) fn new(stores: Vec<Arc<ServedStore>>, clock: Arc<dyn Clock>) -> Self {
        Self { stores, marks: Cached::new(clock, MARKS_TTL) }
    }

    /// Renders the page. A store that does not answer costs [`status::STATS_WAIT`] and only its own
    /// figures are missing; the same holds for a subscription that cannot be counted.
    pub(crate) async fn page(&self) -> String {
        let relays = self.relays();
        let marks = self.marks.get(async move { Some(status::marks(&relays, None).await) });
        let (measured, marks) = tokio::join!(join_all(self.stores.iter().map(|store| store.measured())), marks);
        let scrape = Scrape { stores: self.stores.iter().cloned().zip(measured).collect(), marks };
        let mut registry = Registry::default();
        registry.register_collector(Box::new(scrape));
        let mut page = String::new();
        // Only the writer can fail, and a `String` does not.
        let _ = text::encode(&mut page, &registry);
        page
    }

    /// Asks the destinations where their streams end, without the cache.
    pub(crate) async fn ask_marks(&self, stream: Option<&str>) -> Vec<MarksJson> {
        status::marks(&self.relays(), stream).await
    }

    fn relays(&self) -> Vec<Arc<SupervisedRelay>> {
        self.stores.iter().flat_map(|store| store.relays()).cloned().collect()
    }
}

/// What a store reports about its subscriptions and its unrouted events.
pub(crate) struct Measured {
    counted: Vec<Counted>,
    unrouted: Vec<UnroutedLog>,
    /// Logs that no subscription reads, all of whose events nobody wants.
    unread: Vec<(LogName, postbox_core::Count)>,
}

/// A subscription and its counts, if they are known.
type Counted = (SubscriptionName, Option<StatsJson>);

impl Measured {
    /// An error means that the store does not answer. A store that answers that it cannot count
    /// right now (locked, busy, timed out) is not an error. One tenant does not see who reads for
    /// all of them.
    pub(crate) async fn ask(
        store: &dyn Store,
        relays: &[Arc<SupervisedRelay>],
        is_of_one_tenant: bool,
    ) -> Result<Self> {
        let deadline = Instant::now() + status::STATS_WAIT;
        let infos = match timeout_at(deadline, store.subscriptions()).await.map_err(|_| status::too_slow())? {
            Err(error) if ["table_locked", "store_contention", "statement_timeout"].contains(&error.code()) => {
                let counted = relays.iter().map(|relay| (relay.name().clone(), None)).collect();
                return Ok(Self { counted, unrouted: Vec::new(), unread: Vec::new() });
            }
            infos => infos?,
        };
        let counted = status::stats(store, &infos, deadline).await;
        let unrouted = timeout_at(deadline, status::unrouted(store, &infos)).await.ok().and_then(Result::ok);
        let unread =
            async { if is_of_one_tenant { Ok(Vec::new()) } else { status::unread(store, &infos, None).await } };
        let unread = timeout_at(deadline, unread).await.ok().and_then(Result::ok);
        let counted = infos.into_iter().map(|info| info.name).zip(counted.into_iter().map(Result::ok)).collect();
        Ok(Self { counted, unrouted: unrouted.unwrap_or_default(), unread: unread.unwrap_or_default() })
    }
}

/// The data of one scrape.
struct Scrape {
    /// Each store with its figures; `None`: it did not answer.
    stores: Vec<(Arc<ServedStore>, Option<Arc<Measured>>)>,
    marks: Option<Arc<Vec<MarksJson>>>,
}

/// Returns the store's label; empty where there is only one.
fn label(store: &ServedStore) -> String {
    store.name.as_ref().map_or_else(String::new, StoreName::to_string)
}

impl fmt::Debug for Scrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scrape")
    }
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Page(encoder);
        page.family(&family::BUILD_INFO, [([env!("CARGO_PKG_VERSION").into()], 1_u64)])?;
        let up = self.stores.iter().map(|(store, measured)| ([label(store)], u64::from(measured.is_some())));
        page.family(&family::STORE_UP, up)?;
        let failing = self.stores.iter().flat_map(|(store, _)| {
            let parts = store.failing_parts().into_iter();
            parts.map(move |(part, it)| ([label(store), part.into(), it.code], it.since.as_second().unsigned_abs()))
        });
        page.family(&family::PART_FAILING, failing)?;
        let measured: Vec<(String, &Measured)> =
            self.stores.iter().filter_map(|(store, measured)| Some((label(store), measured.as_deref()?))).collect();
        if !measured.is_empty() {
            depth(&mut page, &measured)?;
            unrouted_events(&mut page, &measured)?;
        }
        let stores: Vec<&ServedStore> = self.stores.iter().map(|(store, _)| store.as_ref()).collect();
        relays(&mut page, &stores)?;
        high_water_marks(&mut page, self.marks.as_deref().map(Vec::as_slice).unwrap_or_default())?;
        received(&mut page, &stores)
    }
}

fn depth(page: &mut Page<'_>, all: &[(String, &Measured)]) -> fmt::Result {
    let each = || all.iter().flat_map(|(store, of)| of.counted.iter().map(move |(name, stats)| (store, name, stats)));
    let named = || each().filter_map(|(store, name, stats)| Some((store.as_str(), name.as_str(), stats.as_ref()?)));
    let flags = |flag: fn(&StatsJson) -> bool| {
        named().map(move |(store, name, stats)| ([store.into(), name.into()], u64::from(flag(stats))))
    };
    let counted = each().map(|(store, name, stats)| ([store.clone(), name.to_string()], u64::from(stats.is_some())));
    page.family(&family::STATS_UP, counted)?;
    page.family(&family::STATS_ESTIMATED, flags(|stats| stats.is_estimate))?;
    let events = named().flat_map(|(store, name, stats)| {
        let counts = [
            (State::Pending, stats.pending.saturating_sub(stats.retrying + stats.blocked + stats.scheduled)),
            (State::Retrying, stats.retrying),
            (State::Blocked, stats.blocked),
            (State::Scheduled, stats.scheduled),
            (State::Dead, stats.dead),
            (State::Discarded, stats.discarded),
            (State::Dispatched, stats.dispatched),
            (State::Skipped, stats.skipped),
        ];
        counts.map(|(state, count)| ([store.into(), name.into(), state.as_str().into()], count))
    });
    page.family(&family::EVENTS, events)?;
    // No sample where events are pending and the age of the oldest is unknown.
    let oldest = named().filter_map(|(store, name, stats)| {
        let age = stats.oldest_pending.or((stats.pending == 0).then_some(Duration::ZERO))?;
        Some(([store.into(), name.into()], age.as_secs_f64()))
    });
    page.family(&family::OLDEST_PENDING, oldest)?;
    page.family(&family::PAUSED, flags(|stats| stats.paused))?;
    let depth = named().flat_map(|(store, name, stats)| {
        let listed: u64 = own_topics(stats).map(|topic| topic.pending).sum();
        let rest = (OTHER, stats.pending.saturating_sub(listed));
        let topics = own_topics(stats).map(|topic| (topic.topic.as_str(), topic.pending)).chain([rest]);
        topics.map(move |(topic, count)| ([store.into(), name.into(), topic.into()], count))
    });
    page.family(&family::DEPTH, depth)?;
    let lag = named().flat_map(|(store, name, stats)| {
        own_topics(stats).filter_map(move |topic| {
            Some(([store.into(), name.into(), topic.topic.clone()], topic.oldest_pending?.as_secs_f64()))
        })
    });
    page.family(&family::LAG, lag)
}

fn unrouted_events(page: &mut Page<'_>, all: &[(String, &Measured)]) -> fmt::Result {
    let logs = all.iter().flat_map(|(store, of)| of.unrouted.iter().map(move |log| (store, log)));
    let events = logs.flat_map(|(store, log)| {
        let own = || log.topics.iter().take(TOPICS_MAX).filter(|topic| topic.topic != OTHER);
        let rest = (OTHER, log.count - own().map(|topic| topic.count).sum::<u64>());
        let topics = own().map(|topic| (topic.topic.as_str(), topic.count)).chain([rest]);
        topics.map(move |(topic, count)| ([store.clone(), log.log.to_string(), topic.into()], count))
    });
    let unread = all.iter().flat_map(|(store, of)| of.unread.iter().map(move |unread| (store, unread)));
    let unread = unread.map(|(store, (log, count))| ([store.clone(), log.to_string(), OTHER.into()], count.events));
    page.family(&family::UNROUTED, events.chain(unread))
}

/// The topics with their own label: the deepest. A topic called `other` counts as part of the rest.
fn own_topics(stats: &StatsJson) -> impl Iterator<Item = &TopicStats> {
    stats.topics.iter().take(TOPICS_MAX).filter(|topic| topic.topic != OTHER)
}

fn relays(page: &mut Page<'_>, stores: &[&ServedStore]) -> fmt::Result {
    let relays = || stores.iter().flat_map(|store| store.relays().iter().map(|relay| (label(store), relay)));
    let named = || relays().map(|(store, relay)| ([store, relay.name().to_string()], relay.relay().metrics()));
    let snapshots: Vec<_> = named().map(|(name, metrics)| (name, metrics.snapshot())).collect();
    let each = |read: fn(&MetricsSnapshot) -> u64| snapshots.iter().map(move |(name, m)| (name.clone(), read(m)));
    page.family(&family::FETCHED, each(|m| m.fetched))?;
    page.family(&family::DELIVERED, each(|m| m.delivered))?;
    page.family(&family::DELIVERED_BYTES, each(|m| m.delivered_bytes))?;
    page.family(&family::DELIVERY_DELAY, named().map(|(name, m)| (name, m.delivery_delays().snapshot())))?;
    page.family(&family::CALL_DURATION, named().map(|(name, m)| (name, m.call_durations().snapshot())))?;
    page.family(&family::IN_FLIGHT, each(|m| m.in_flight))?;
    page.family(&family::RETRIES, each(|m| m.retries))?;
    let over = named().flat_map(|([store, name], metrics)| {
        metrics.attempts_over().map(|(over, count)| ([store.clone(), name.clone(), over.to_string()], count))
    });
    page.family(&family::ATTEMPTS_OVER, over)?;
    page.family(&family::DEAD, each(|m| m.dead))?;
    page.family(&family::DEAD_LETTERS, each(|m| m.dead_letters))?;
    page.family(&family::DEAD_LETTERS_FAILED, each(|m| m.dead_letters_failed))?;
    page.family(&family::UNAVAILABLE, each(|m| m.unavailable))?;
    page.family(&family::BLOCKED, each(|m| m.blocked))?;
    page.family(&family::BATCHES, each(|m| m.batches))?;
    page.family(&family::STALE_WRITES, each(|m| m.stale_writes))?;
    page.family(&family::STORE_ERRORS, each(|m| m.store_errors))?;
    page.family(&family::TIMEOUTS, each(|m| m.timeouts))?;
    page.family(&family::BREAKER_OPENED, each(|m| m.breaker_opened))?;
    let failures = named().flat_map(|([store, name], metrics)| {
        let causes = metrics.failures_by_cause().into_iter();
        causes.map(move |((topic, code), count)| ([store.clone(), name.clone(), topic, code], count))
    });
    page.family(&family::FAILURES, failures)?;
    let renewals = snapshots.iter().flat_map(|([store, name], m)| {
        let results = [("ok", m.renewals_ok), ("failed", m.renewals_failed), ("lost", m.leases_lost)];
        results.map(|(result, count)| ([store.clone(), name.clone(), result.into()], count))
    });
    page.family(&family::LEASE_RENEWALS, renewals)?;
    page.family(&family::LANES_HELD, each(|m| m.lanes_held))?;
    let waits =
        relays().map(|(store, relay)| ([store, relay.name().to_string()], u64::from(relay.waits_by_configuration())));
    page.family(&family::WAITS, waits)?;
    page.family(&family::LANE_TAKEOVERS, each(|m| m.lane_takeovers))?;
    let failing = relays().flat_map(|(store, relay)| {
        relay.relay().failing_lanes().into_iter().map(move |failing| {
            let since = failing.since.as_second().unsigned_abs();
            ([store.clone(), relay.name().to_string(), failing.lane.to_string(), failing.code], since)
        })
    });
    page.family(&family::LANE_FAILING, failing)?;
    let breakers = named().map(|(name, metrics)| {
        let state = match metrics.breaker_state() {
            BreakerState::Closed => 0_u64,
            BreakerState::HalfOpen => 1,
            BreakerState::Open => 2,
        };
        (name, state)
    });
    page.family(&family::BREAKER_STATE, breakers)
}

/// A sample is a number: the leading number of the position.
fn high_water_marks(page: &mut Page<'_>, all: &[MarksJson]) -> fmt::Result {
    let marks = all.iter().flat_map(|MarksJson { subscription, high_water_marks, .. }| {
        high_water_marks.iter().filter_map(|HighWaterMark { stream, position }| {
            let number: u64 = position.split('-').next()?.parse().ok()?;
            Some(([subscription.to_string(), stream.clone()], number))
        })
    });
    page.family(&family::HIGH_WATER_MARK, marks)
}

fn received(page: &mut Page<'_>, stores: &[&ServedStore]) -> fmt::Result {
    let counts: Vec<(String, Count)> = stores
        .iter()
        .flat_map(|store| store.sources().counts().into_iter().map(|count| (label(store), count)))
        .collect();
    let name = |count: &Count| count.source.as_ref().map_or_else(|| NONE.to_owned(), SourceName::to_string);
    // Every answer given at least once, and always those that dashboards and alerts read: a series
    // that begins at zero shows its first count as a rise.
    let always = ["accepted", "duplicate", "conflict", "store_unavailable"];
    let is_drawn = |count: &Count| count.count > 0 || always.contains(&count.code);
    let drawn = counts.iter().filter(|(_, count)| is_drawn(count));
    let drawn = drawn.map(|(store, count)| ([store.clone(), name(count), count.code.into()], count.count));
    page.family(&family::RECEIVED, drawn)?;
    let receivers: Vec<_> = stores
        .iter()
        .flat_map(|store| {
            store.sources().receivers().iter().map(|it| ([label(store), it.name.to_string()], it.snapshot()))
        })
        .collect();
    let each = |read: fn(&ReceiverSnapshot) -> u64| receivers.iter().map(move |(name, m)| (name.clone(), read(m)));
    page.family(&family::POISON, each(|m| m.poison))?;
    page.family(&family::SOURCE_ERRORS, each(|m| m.source_errors))?;
    page.family(&family::RECEIVE_ERRORS, each(|m| m.store_errors))?;
    let dropped = stores.iter().flat_map(|store| {
        let dropped = store.sources().headers_dropped().into_iter();
        dropped.map(|(source, count)| ([label(store), source.to_string()], count))
    });
    page.family(&family::HEADERS_DROPPED, dropped)?;
    let layers = [("timestamp_too_old", "timestamp"), ("duplicate", "inbox")];
    let recognised = layers.into_iter().flat_map(|(code, layer)| {
        let counts = counts.iter().filter(move |(_, count)| count.code == code);
        counts.map(move |(store, count)| ([store.clone(), layer.into(), name(count), String::new()], count.count))
    });
    let relays = stores.iter().flat_map(|store| store.relays().iter().map(move |relay| (*store, relay)));
    let at_destinations = relays.flat_map(|(store, relay)| {
        by_source(relay.relay().metrics().duplicates_by_source())
            .into_iter()
            .map(move |(source, count)| ([label(store), "destination".into(), source, relay.name().to_string()], count))
    });
    page.family(&family::DUPLICATES, recognised.chain(at_destinations))
}

/// Duplicates reported by the destination, by label. Sources of the configuration start at zero, so
/// that the first duplicate shows as a rise. One that is called `none` adds to the same series as
/// events without one.
fn by_source(counted: BTreeMap<Option<String>, u64>) -> BTreeMap<String, u64> {
    let mut labels: BTreeMap<String, u64> = BTreeMap::new();
    for (source, count) in counted {
        *labels.entry(source.unwrap_or_else(|| NONE.into())).or_default() += count;
    }
    if labels.is_empty() {
        labels.insert(NONE.into(), 0);
    }
    labels
}
