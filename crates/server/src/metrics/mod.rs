//! `/metrics`: what the relays counted, and what the store says of depth and lag.
//!
//! Counters come from memory and are always fresh. Depth and lag cost the store a scan and are kept for five seconds. Topics
//! are chosen by whoever appends, so only the deepest have a label of their own; the rest is summed up as `other`.

mod text;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use postbox_core::{Clock, Result, SourceName, State, Stats, Store, SubscriptionInfo, TopicStats};
use postbox_engine::{BreakerState, MetricsSnapshot};
use postbox_ingress::Count;
use tokio::time::timeout;

use self::text::{Kind, Page};
use crate::cache::Cached;
use crate::sources::Sources;
use crate::supervised_relay::Relays;

/// How long depth and lag are kept: scrapers ask every 10 to 60 s, and several of them share one answer.
const STATS_TTL: Duration = Duration::from_secs(5);
/// Longest wait for the store: scrapers give up after 10 s by default.
const STATS_WAIT: Duration = Duration::from_secs(5);
/// Most topics with a label of their own per subscription.
const TOPICS_MAX: usize = 30;

/// The label of everything that has none of its own.
const OTHER: &str = "other";
/// The label of what is of no source.
const NONE: &str = "none";

/// Everything that is measured.
pub(crate) struct Exporter {
    store: Arc<dyn Store>,
    relays: Relays,
    sources: Sources,
    stats: Cached<Vec<(SubscriptionInfo, Stats)>>,
}

impl Exporter {
    pub(crate) fn new(store: Arc<dyn Store>, relays: Relays, sources: Sources, clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self { store, relays, sources, stats: Cached::new(clock, STATS_TTL) })
    }

    /// The page.
    pub(crate) async fn page(&self) -> String {
        let mut page = Page::default();
        page.family("postbox_build_info", Kind::Gauge, "Which program this is.")
            .count(&[("version", env!("CARGO_PKG_VERSION"))], 1);
        let store = Arc::clone(&self.store);
        let stats = self.stats.get(async move { timeout(STATS_WAIT, count(store.as_ref())).await.ok()?.ok() }).await;
        page.family("postbox_store_up", Kind::Gauge, "Whether the store answered when it was asked last.")
            .count(&[], u64::from(stats.is_some()));
        if let Some(stats) = stats.as_deref() {
            depth(&mut page, stats);
        }
        self.relays(&mut page);
        self.received(&mut page);
        page.finish()
    }

    fn relays(&self, page: &mut Page) {
        type Read = fn(&MetricsSnapshot) -> u64;
        const COUNTERS: [(&str, &str, Read); 11] = [
            ("postbox_fetched_total", "Events read.", |m| m.fetched),
            ("postbox_delivered_total", "Events the destination has, duplicates included.", |m| m.delivered),
            ("postbox_retries_total", "Attempts that failed and will be repeated.", |m| m.retries),
            ("postbox_dead_total", "Events that died.", |m| m.dead),
            ("postbox_unavailable_total", "Deliveries that found the whole destination down.", |m| m.unavailable),
            ("postbox_blocked_total", "Events put behind an earlier one of their key.", |m| m.blocked),
            ("postbox_batches_total", "Batches settled.", |m| m.batches),
            ("postbox_stale_writes_total", "Writes refused because the lane had another owner.", |m| m.stale_writes),
            ("postbox_store_errors_total", "Calls to the store that failed and were repeated.", |m| m.store_errors),
            ("postbox_timeouts_total", "Deliveries that exceeded the time limit.", |m| m.timeouts),
            ("postbox_breaker_opened_total", "Times the breaker opened.", |m| m.breaker_opened),
        ];
        let snapshots: Vec<_> =
            self.relays.iter().map(|part| (part.name.as_str(), part.metrics().snapshot())).collect();
        for (name, help, read) in COUNTERS {
            let mut family = page.family(name, Kind::Counter, help);
            for (subscription, snapshot) in &snapshots {
                family.count(&[("subscription", subscription)], read(snapshot));
            }
        }
        let mut family = page.family("postbox_failures_total", Kind::Counter, "Failed deliveries by topic and reason.");
        for part in self.relays.iter() {
            for ((topic, code), count) in capped(part.metrics().failures_by_cause()) {
                family.count(&[("subscription", part.name.as_str()), ("topic", &topic), ("code", &code)], count);
            }
        }
        let mut family = page.family("postbox_lease_renewals_total", Kind::Counter, "Lease renewals by result.");
        for (subscription, m) in &snapshots {
            for (result, count) in [("ok", m.renewals_ok), ("failed", m.renewals_failed), ("lost", m.leases_lost)] {
                family.count(&[("subscription", subscription), ("result", result)], count);
            }
        }
        let mut family = page.family("postbox_lanes_held", Kind::Gauge, "Lanes this process drives now.");
        for (subscription, snapshot) in &snapshots {
            family.count(&[("subscription", subscription)], snapshot.lanes_held);
        }
        let help =
            "When a lane began to fail at every read or settlement, in seconds since 1970; not there while it works.";
        let mut family = page.family("postbox_lane_failing_since_seconds", Kind::Gauge, help);
        for part in self.relays.iter() {
            for failing in part.relay.failing_lanes() {
                let lane = failing.lane.to_string();
                let labels = [("subscription", part.name.as_str()), ("lane", &lane), ("code", &failing.code)];
                family.count(&labels, failing.since.as_second().unsigned_abs());
            }
        }
        let help = "How the destination stands: 0 answers, 1 is being asked again, 2 does not answer.";
        let mut family = page.family("postbox_breaker_state", Kind::Gauge, help);
        for part in self.relays.iter() {
            let state = match part.metrics().breaker_state() {
                BreakerState::Closed => 0,
                BreakerState::HalfOpen => 1,
                BreakerState::Open => 2,
            };
            family.count(&[("subscription", part.name.as_str())], state);
        }
    }

    fn received(&self, page: &mut Page) {
        let counts = self.sources.counts();
        let name = |count: &Count| count.source.as_ref().map_or_else(|| NONE.to_owned(), SourceName::to_string);
        let help = "Messages from outside by source and answer.";
        let mut family = page.family("postbox_received_total", Kind::Counter, help);
        for count in &counts {
            // Every answer that was ever given, and the three that everybody draws.
            if count.count > 0 || ["accepted", "duplicate", "conflict"].contains(&count.code) {
                family.count(&[("source", &name(count)), ("result", count.code)], count.count);
            }
        }
        let help = "Headers of messages from outside that were not kept: an event has no room for them.";
        let mut family = page.family("postbox_headers_dropped_total", Kind::Counter, help);
        for (source, count) in self.sources.headers_dropped() {
            family.count(&[("source", source.as_str())], count);
        }
        let help = "Repetitions by the layer that recognised them (timestamp: signed too long ago, inbox: id known, destination: it said so) and by source.";
        let mut family = page.family("postbox_duplicates_total", Kind::Counter, help);
        for (code, layer) in [("timestamp_too_old", "timestamp"), ("duplicate", "inbox")] {
            for count in counts.iter().filter(|count| count.code == code) {
                family.count(&[("layer", layer), ("source", &name(count))], count.count);
            }
        }
        for part in self.relays.iter() {
            let known = self.sources.of_log(&part.relay.subscription().log).map(SourceName::to_string);
            for (source, count) in by_source(part.metrics().duplicates_by_source(), known) {
                let labels = [("layer", "destination"), ("source", &*source), ("subscription", part.name.as_str())];
                family.count(&labels, count);
            }
        }
    }
}

async fn count(store: &dyn Store) -> Result<Vec<(SubscriptionInfo, Stats)>> {
    let mut counted = Vec::new();
    for info in store.subscriptions().await? {
        let stats = store.stats(&info.name).await?;
        counted.push((info, stats));
    }
    Ok(counted)
}

fn depth(page: &mut Page, counted: &[(SubscriptionInfo, Stats)]) {
    let mut family = page.family("postbox_events", Kind::Gauge, "Events in the log by state.");
    for (info, stats) in counted {
        let unread = stats.pending.saturating_sub(stats.retrying + stats.blocked + stats.scheduled);
        let counts = [
            (State::Pending, unread),
            (State::Retrying, stats.retrying),
            (State::Blocked, stats.blocked),
            (State::Scheduled, stats.scheduled),
            (State::Dead, stats.dead),
            (State::Discarded, stats.discarded),
            (State::Dispatched, stats.dispatched),
        ];
        for (state, count) in counts {
            family.count(&[("subscription", info.name.as_str()), ("state", state.as_str())], count);
        }
    }
    let mut family =
        page.family("postbox_oldest_pending_seconds", Kind::Gauge, "Age of the oldest event that is not delivered.");
    for (info, stats) in counted {
        family.sample(&[("subscription", info.name.as_str())], stats.oldest_pending.unwrap_or_default().as_secs_f64());
    }
    let mut family = page.family("postbox_paused", Kind::Gauge, "Whether a person paused the subscription.");
    for (info, _) in counted {
        family.count(&[("subscription", info.name.as_str())], u64::from(info.paused.is_some()));
    }
    let mut family = page.family("postbox_depth", Kind::Gauge, "Events to be delivered, by topic.");
    for (info, stats) in counted {
        let listed: u64 = own_topics(stats).map(|topic| topic.pending).sum();
        for topic in own_topics(stats) {
            family.count(&[("subscription", info.name.as_str()), ("topic", &topic.topic)], topic.pending);
        }
        family.count(&[("subscription", info.name.as_str()), ("topic", OTHER)], stats.pending.saturating_sub(listed));
    }
    let mut family =
        page.family("postbox_lag_seconds", Kind::Gauge, "Age of the oldest event to be delivered, by topic.");
    for (info, stats) in counted {
        for topic in own_topics(stats) {
            let labels = [("subscription", info.name.as_str()), ("topic", topic.topic.as_str())];
            family.sample(&labels, topic.oldest_pending.as_secs_f64());
        }
    }
}

/// The topics with a label of their own: the deepest. A topic that is really called `other` is among the others.
fn own_topics(stats: &Stats) -> impl Iterator<Item = &TopicStats> {
    stats.topics.iter().take(TOPICS_MAX).filter(|topic| topic.topic != OTHER)
}

/// What a destination had already, by label: with zeros for the sources that may come, so that the first one is seen as a rise. Who appends chooses the
/// source, `none` included: one label, one series.
fn by_source(counted: BTreeMap<Option<String>, u64>, known: impl Iterator<Item = String>) -> BTreeMap<String, u64> {
    let mut labels: BTreeMap<String, u64> = known.map(|source| (source, 0)).collect();
    for (source, count) in counted {
        *labels.entry(source.unwrap_or_else(|| NONE.into())).or_default() += count;
    }
    if labels.is_empty() {
        labels.insert(NONE.into(), 0);
    }
    labels
}

/// The largest causes by name, the rest as `other`: hostile topics must not fill a time series database.
fn capped(causes: BTreeMap<(String, String), u64>) -> Vec<((String, String), u64)> {
    let mut causes: Vec<_> = causes.into_iter().collect();
    causes.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let mut own = Vec::new();
    let mut rest = 0;
    for (cause, count) in causes {
        if own.len() < TOPICS_MAX && cause.0 != OTHER {
            own.push((cause, count));
        } else {
            rest += count;
        }
    }
    if rest > 0 {
        own.push(((OTHER.into(), OTHER.into()), rest));
    }
    own
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_topics_do_not_become_labels() {
        let causes = (0..1_000).map(|n| ((format!("t{n}"), "http_500".to_owned()), 1)).collect();
        let capped = capped(causes);
        assert_eq!(capped.len(), TOPICS_MAX + 1);
        assert_eq!(capped.iter().map(|(_, count)| count).sum::<u64>(), 1_000);
    }

    #[test]
    fn every_source_is_one_series() {
        let counted = BTreeMap::from([(None, 1), (Some("none".to_owned()), 2), (Some("stripe".to_owned()), 4)]);
        let known = || ["github", "stripe"].map(String::from).into_iter();
        let expected = [("github", 0), ("none", 3), ("stripe", 4)].map(|(source, count)| (source.to_owned(), count));
        assert_eq!(by_source(counted, known()), expected.into());
        assert_eq!(by_source(BTreeMap::new(), std::iter::empty()), [("none".to_owned(), 0)].into());
        assert_eq!(by_source(BTreeMap::new(), known()).len(), 2);
    }
}
