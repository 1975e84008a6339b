//! `/metrics`: what the relays counted, and what the store says of depth and lag.
//!
//! Counters come from memory and are always fresh. Depth and lag are asked of the store, high-water
//! marks of the destinations, and kept for five seconds. Topics are chosen by whoever appends, so
//! only the deepest have a label of their own; the rest is summed up as `other`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use postbox_core::{Clock, HighWaterMark, Result, SourceName, State, Store, SubscriptionName};
use postbox_engine::{BreakerState, MetricsSnapshot, ReceiverSnapshot};
use postbox_ingress::Count;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use tokio::time::{Instant, timeout_at};

use crate::cache::Cached;
use crate::sources::Sources;
use crate::status::{self, MarksJson, StatsJson, TopicJson, UnroutedLog};
use crate::supervised_receiver::SupervisedReceiver;
use crate::supervised_relay::{Relays, SupervisedRelay};
use crate::text::neutralise;

/// How long depth and lag are kept: scrapers ask every 10 to 60 s, and several share one answer.
const STATS_TTL: Duration = Duration::from_secs(5);
/// Most topics with a label of their own per subscription.
const TOPICS_MAX: usize = 30;

/// The format of the page.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The label of everything that has none of its own.
const OTHER: &str = "other";
/// The label of what is of no source.
const NONE: &str = "none";

/// Everything that is measured.
pub(crate) struct Exporter {
    store: Arc<dyn Store>,
    relays: Relays,
    sources: Sources,
    stats: Cached<(Vec<Counted>, Vec<UnroutedLog>)>,
    marks: Cached<Vec<MarksJson>>,
}

impl Exporter {
    pub(crate) fn new(store: Arc<dyn Store>, relays: Relays, sources: Sources, clock: Arc<dyn Clock>) -> Arc<Self> {
        let (stats, marks) = (Cached::new(Arc::clone(&clock), STATS_TTL), Cached::new(clock, STATS_TTL));
        Arc::new(Self { store, relays, sources, stats, marks })
    }

    /// Where messages come from.
    pub(crate) fn sources(&self) -> &Sources {
        &self.sources
    }

    /// Those that ask brokers.
    pub(crate) fn receivers(&self) -> &[Arc<SupervisedReceiver>] {
        self.sources.receivers()
    }

    /// The page. A store that does not answer costs [`status::STATS_WAIT`] and its own figures, no
    /// others; a subscription that cannot be counted costs its own.
    pub(crate) async fn page(self: &Arc<Self>) -> String {
        let (store, relays) = (Arc::clone(&self.store), Arc::clone(&self.relays));
        let counted = async move { count(store.as_ref(), &relays).await.ok() };
        let relays = Arc::clone(&self.relays);
        let marks = self.marks.get(async move { Some(status::marks(&relays, None).await) });
        let (stats, marks) = tokio::join!(self.stats.get(counted), marks);
        let scrape = Scrape { exporter: Arc::clone(self), stats, marks };
        let mut registry = Registry::default();
        registry.register_collector(Box::new(scrape));
        let mut page = String::new();
        // Only a writer fails, and a string does not.
        let _ = text::encode(&mut page, &registry);
        page
    }
}

/// A subscription and its counts, if they could be had.
type Counted = (SubscriptionName, Option<StatsJson>);

/// An error says that the store does not answer; one that says that it cannot look now is an
/// answer.
async fn count(store: &dyn Store, relays: &Relays) -> Result<(Vec<Counted>, Vec<UnroutedLog>)> {
    let deadline = Instant::now() + status::STATS_WAIT;
    let infos = match timeout_at(deadline, store.subscriptions()).await.map_err(|_| status::too_slow())? {
        Err(error) if ["table_locked", "store_contention", "statement_timeout"].contains(&error.code()) => {
            return Ok((relays.iter().map(|relay| (relay.name.clone(), None)).collect(), Vec::new()));
        }
        infos => infos?,
    };
    let counted = status::stats(store, &infos, deadline).await;
    let unrouted = timeout_at(deadline, status::unrouted(store, &infos)).await.ok().and_then(Result::ok);
    let counted = infos.into_iter().map(|info| info.name).zip(counted.into_iter().map(Result::ok)).collect();
    Ok((counted, unrouted.unwrap_or_default()))
}

/// One look at everything.
struct Scrape {
    exporter: Arc<Exporter>,
    /// `None`: the store does not answer.
    stats: Option<Arc<(Vec<Counted>, Vec<UnroutedLog>)>>,
    marks: Option<Arc<Vec<MarksJson>>>,
}

impl fmt::Debug for Scrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scrape")
    }
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Page(encoder);
        let version = labels([("version", env!("CARGO_PKG_VERSION"))]);
        page.family("postbox_build_info", "Which program this is.", [(version, 1_u64)])?;
        let is_up = [(Vec::new(), u64::from(self.stats.is_some()))];
        page.family("postbox_store_up", "Whether the store answered when it was asked last.", is_up)?;
        if let Some((stats, unrouted)) = self.stats.as_deref() {
            depth(&mut page, stats)?;
            unrouted_events(&mut page, unrouted)?;
        }
        relays(&mut page, &self.exporter.relays)?;
        high_water_marks(&mut page, self.marks.as_deref().map(Vec::as_slice).unwrap_or_default())?;
        received(&mut page, &self.exporter)
    }
}

type Labels = Vec<(&'static str, String)>;

/// Who appends chooses topics, and must not be able to hide one in a terminal.
fn labels<const N: usize>(pairs: [(&'static str, &str); N]) -> Labels {
    pairs.map(|(name, value)| (name, neutralise(value, |c| c == '\n'))).into()
}

/// A page of metrics in the making.
struct Page<'a>(DescriptorEncoder<'a>);

impl Page<'_> {
    /// One family: a counter, if its name ends as those of counters do; else a gauge.
    fn family<V: EncodeCounterValue + EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, V)>,
    ) -> fmt::Result {
        let counter = name.strip_suffix("_total");
        let kind = if counter.is_some() { MetricType::Counter } else { MetricType::Gauge };
        let mut family = self.0.encode_descriptor(counter.unwrap_or(name), help, None, kind)?;
        for (labels, value) in samples {
            match counter {
                Some(_) => family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&value, None)?,
                None if labels.is_empty() => family.encode_gauge(&value)?,
                None => family.encode_family(&labels)?.encode_gauge(&value)?,
            }
        }
        Ok(())
    }
}

fn depth(page: &mut Page<'_>, all: &[Counted]) -> fmt::Result {
    let named = || all.iter().filter_map(|(name, stats)| Some((name.as_str(), stats.as_ref()?)));
    let flags = |flag: fn(&StatsJson) -> bool| {
        named().map(move |(name, stats)| (labels([("subscription", name)]), u64::from(flag(stats))))
    };
    let counted =
        all.iter().map(|(name, stats)| (labels([("subscription", name.as_str())]), u64::from(stats.is_some())));
    let help = "Whether the events of the subscription could be counted; if not, what is counted is missing here.";
    page.family("postbox_stats_up", help, counted)?;
    let help = "Whether there was too much to count, so that pending events are estimated.";
    page.family("postbox_stats_estimated", help, flags(|stats| stats.estimated))?;
    let events = named().flat_map(|(name, stats)| {
        let counts = [
            (State::Pending, stats.pending.saturating_sub(stats.retrying + stats.blocked + stats.scheduled)),
            (State::Retrying, stats.retrying),
            (State::Blocked, stats.blocked),
            (State::Scheduled, stats.scheduled),
            (State::Dead, stats.dead),
            (State::Discarded, stats.discarded),
            (State::Dispatched, stats.dispatched),
        ];
        counts.map(|(state, count)| (labels([("subscription", name), ("state", state.as_str())]), count))
    });
    page.family("postbox_events", "Events by state; dispatched: since the subscription began.", events)?;
    // Nothing where something waits and nobody knows since when.
    let oldest = named().filter_map(|(name, stats)| {
        let age = stats.oldest_pending_seconds.or((stats.pending == 0).then_some(0.0))?;
        Some((labels([("subscription", name)]), age))
    });
    page.family("postbox_oldest_pending_seconds", "Age of the oldest event that is not delivered.", oldest)?;
    page.family("postbox_paused", "Whether a person paused the subscription.", flags(|stats| stats.paused))?;
    let depth = named().flat_map(|(name, stats)| {
        let listed: u64 = own_topics(stats).map(|topic| topic.pending).sum();
        let rest = (OTHER, stats.pending.saturating_sub(listed));
        let topics = own_topics(stats).map(|topic| (topic.topic.as_str(), topic.pending)).chain([rest]);
        topics.map(move |(topic, count)| (labels([("subscription", name), ("topic", topic)]), count))
    });
    page.family("postbox_depth", "Events to be delivered, by topic.", depth)?;
    let lag = named().flat_map(|(name, stats)| {
        own_topics(stats).filter_map(move |topic| {
            Some((labels([("subscription", name), ("topic", &topic.topic)]), topic.oldest_pending_seconds?))
        })
    });
    page.family("postbox_lag_seconds", "Age of the oldest event to be delivered, by topic.", lag)
}

fn unrouted_events(page: &mut Page<'_>, logs: &[UnroutedLog]) -> fmt::Result {
    let events = logs.iter().flat_map(|log| {
        let own = || log.topics.iter().take(TOPICS_MAX).filter(|topic| topic.topic != OTHER);
        let rest = (OTHER, log.count - own().map(|topic| topic.count).sum::<u64>());
        let topics = own().map(|topic| (topic.topic.as_str(), topic.count)).chain([rest]);
        topics.map(|(topic, count)| (labels([("log", log.log.as_str()), ("topic", topic)]), count))
    });
    page.family("postbox_unrouted_events", "Events that no subscription wants, by topic.", events)
}

/// The topics with a label of their own: the deepest. One that is called `other` is among the
/// others.
fn own_topics(stats: &StatsJson) -> impl Iterator<Item = &TopicJson> {
    stats.topics.iter().take(TOPICS_MAX).filter(|topic| topic.topic != OTHER)
}

fn relays(page: &mut Page<'_>, relays: &[Arc<SupervisedRelay>]) -> fmt::Result {
    type Read = fn(&MetricsSnapshot) -> u64;
    const COUNTERS: [(&str, &str, Read); 13] = [
        ("postbox_fetched_total", "Events read.", |m| m.fetched),
        ("postbox_delivered_total", "Events the destination has, duplicates included.", |m| m.delivered),
        ("postbox_retries_total", "Attempts that failed and will be repeated.", |m| m.retries),
        ("postbox_dead_total", "Events that died.", |m| m.dead),
        ("postbox_dead_letters_total", "Dead events that the dead-letter sink has.", |m| m.dead_letters),
        ("postbox_dead_letters_failed_total", "Dead events that the dead-letter sink did not take.", |m| {
            m.dead_letters_failed
        }),
        ("postbox_unavailable_total", "Deliveries that found the whole destination down.", |m| m.unavailable),
        ("postbox_blocked_total", "Events put behind an earlier one of their key.", |m| m.blocked),
        ("postbox_batches_total", "Batches settled.", |m| m.batches),
        ("postbox_stale_writes_total", "Writes refused because the lane had another owner.", |m| m.stale_writes),
        ("postbox_store_errors_total", "Calls to the store that failed and were repeated.", |m| m.store_errors),
        ("postbox_timeouts_total", "Deliveries that exceeded the time limit.", |m| m.timeouts),
        ("postbox_breaker_opened_total", "Times the breaker opened.", |m| m.breaker_opened),
    ];
    let snapshots: Vec<_> = relays.iter().map(|relay| (relay.name.as_str(), relay.metrics().snapshot())).collect();
    for (name, help, read) in COUNTERS {
        page.family(name, help, snapshots.iter().map(|(name, m)| (labels([("subscription", name)]), read(m))))?;
    }
    let failures = relays.iter().flat_map(|relay| {
        capped(relay.metrics().failures_by_cause()).into_iter().map(move |((topic, code), count)| {
            (labels([("subscription", relay.name.as_str()), ("topic", &topic), ("code", &code)]), count)
        })
    });
    page.family("postbox_failures_total", "Failed deliveries by topic and reason.", failures)?;
    let renewals = snapshots.iter().flat_map(|(name, m)| {
        let results = [("ok", m.renewals_ok), ("failed", m.renewals_failed), ("lost", m.leases_lost)];
        results.map(|(result, count)| (labels([("subscription", name), ("result", result)]), count))
    });
    page.family("postbox_lease_renewals_total", "Lease renewals by result.", renewals)?;
    let lanes = snapshots.iter().map(|(name, m)| (labels([("subscription", name)]), m.lanes_held));
    page.family("postbox_lanes_held", "Lanes this process drives now.", lanes)?;
    let failing = relays.iter().flat_map(|relay| {
        relay.relay.failing_lanes().into_iter().map(move |failing| {
            let lane = failing.lane.to_string();
            let labels = labels([("subscription", relay.name.as_str()), ("lane", &lane), ("code", &failing.code)]);
            (labels, failing.since.as_second().unsigned_abs())
        })
    });
    let help =
        "When a lane began to fail at every read or settlement, in seconds since 1970; not there while it works.";
    page.family("postbox_lane_failing_since_seconds", help, failing)?;
    let breakers = relays.iter().map(|relay| {
        let state = match relay.metrics().breaker_state() {
            BreakerState::Closed => 0_u64,
            BreakerState::HalfOpen => 1,
            BreakerState::Open => 2,
        };
        (labels([("subscription", relay.name.as_str())]), state)
    });
    let help = "How the destination stands: 0 answers, 1 is being asked again, 2 does not answer.";
    page.family("postbox_breaker_state", help, breakers)
}

/// A series has numbers only: the one that the position begins with.
fn high_water_marks(page: &mut Page<'_>, all: &[MarksJson]) -> fmt::Result {
    let marks = all.iter().flat_map(|MarksJson { subscription, high_water_marks, .. }| {
        high_water_marks.iter().filter_map(|HighWaterMark { stream, position }| {
            let number: u64 = position.split('-').next()?.parse().ok()?;
            Some((labels([("subscription", subscription.as_str()), ("stream", stream)]), number))
        })
    });
    let help = "Where a stream of the destination ends: JetStream's sequence, the milliseconds of Redis' id.";
    page.family("postbox_high_water_mark", help, marks)
}

fn received(page: &mut Page<'_>, exporter: &Exporter) -> fmt::Result {
    let counts = exporter.sources.counts();
    let name = |count: &Count| count.source.as_ref().map_or_else(|| NONE.to_owned(), SourceName::to_string);
    // Every answer that was ever given, and the three that everybody draws.
    let drawn =
        counts.iter().filter(|count| count.count > 0 || ["accepted", "duplicate", "conflict"].contains(&count.code));
    let answers = drawn.map(|count| (labels([("source", &name(count)), ("result", count.code)]), count.count));
    page.family("postbox_received_total", "Messages from outside by source and answer.", answers)?;
    let receivers: Vec<_> = exporter.sources.receivers().iter().map(|it| (it.name.as_str(), it.snapshot())).collect();
    type Read = fn(&ReceiverSnapshot) -> u64;
    const COUNTERS: [(&str, &str, Read); 3] = [
        ("postbox_poison_total", "Messages of brokers that are kept because nobody can decode them.", |m| m.poison),
        ("postbox_source_errors_total", "Calls to a broker's source that failed and were repeated.", |m| {
            m.source_errors
        }),
        ("postbox_receive_errors_total", "Messages of brokers that a call to the store failed to store.", |m| {
            m.store_errors
        }),
    ];
    for (name, help, read) in COUNTERS {
        page.family(name, help, receivers.iter().map(|(name, m)| (labels([("source", name)]), read(m))))?;
    }
    let dropped = exporter.sources.headers_dropped();
    let dropped = dropped.iter().map(|(source, count)| (labels([("source", source.as_str())]), *count));
    let help = "Headers of messages from outside that were not kept: an event has no room for them.";
    page.family("postbox_headers_dropped_total", help, dropped)?;
    let layers = [("timestamp_too_old", "timestamp"), ("duplicate", "inbox")];
    let recognised = layers.into_iter().flat_map(|(code, layer)| {
        let counts = counts.iter().filter(move |count| count.code == code);
        counts.map(move |count| (labels([("layer", layer), ("source", &name(count))]), count.count))
    });
    let at_destinations = exporter.relays.iter().flat_map(|relay| {
        let known = exporter.sources.of_log(&relay.relay.subscription().log).map(SourceName::to_string);
        by_source(relay.metrics().duplicates_by_source(), known).into_iter().map(move |(source, count)| {
            let subscription = relay.name.as_str();
            (labels([("layer", "destination"), ("source", &source), ("subscription", subscription)]), count)
        })
    });
    let help = "Repetitions by the layer that recognised them (timestamp: signed too long ago, inbox: id known, destination: it said so) and by source.";
    page.family("postbox_duplicates_total", help, recognised.chain(at_destinations))
}

/// What a destination had already, by label: with zeros for the sources that may come, so that the
/// first one is seen as a rise. Who appends chooses the source, `none` included: one label, one
/// series.
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

/// The largest causes by name, the rest as `other`: hostile topics must not fill a time series
/// database.
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

    #[derive(Debug)]
    struct Sample;

    impl Collector for Sample {
        fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
            let mut page = Page(encoder);
            let topics =
                ["a\"b\\c\nd", "x\u{202e}y\u{1b}"].map(|topic| (labels([("topic", topic), ("code", "x")]), 3_u64));
            page.family("a_total", "What is counted.", topics)?;
            page.family("b", "How much.", [(Vec::new(), 0.25)])
        }
    }

    #[test]
    fn labels_are_escaped_and_neutralised() {
        let (mut registry, mut page) = (Registry::default(), String::new());
        registry.register_collector(Box::new(Sample));
        text::encode(&mut page, &registry).expect("written");
        let expected = "# HELP a What is counted.\n# TYPE a counter\na_total{topic=\"a\\\"b\\\\c\\nd\",code=\"x\"} 3\n\
             a_total{topic=\"x\\\\u{202e}y\\\\u{1b}\",code=\"x\"} 3\n# HELP b How much.\n# TYPE b gauge\nb 0.25\n# EOF\n";
        assert_eq!(page, expected);
    }
}
