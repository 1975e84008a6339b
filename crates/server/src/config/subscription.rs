//! `[subscriptions.NAME]`: which log is read, and where its events go.

use std::collections::HashMap;
use std::str::FromStr as _;
use std::time::Duration;

use postbox_config::{
    Kind, Section, duration, duration_text, entries, from_core, integer, list, nested, size, table, text, words,
};
use postbox_core::limits::{BATCH_EVENTS_MAX, LANES_MAX};
use postbox_core::{
    BatchLimit, Filter, Headers, LogName, OnDead, Ordering, Rate, RetryPolicy, StartAt, StoreName, Subscription,
    SubscriptionName, Tenant, TopicPattern,
};
use postbox_engine::{BreakerPolicy, RelaySettings};

use crate::cron::Cron;
use crate::sinks::{SINKS, SinkChoice, sink};

/// Upper limit of `concurrency`. More parallel deliveries make no known endpoint faster, and a
/// process usually has 1,024 sockets.
const CONCURRENCY_MAX: usize = 512;
/// Upper limit of `max_attempts`. With the default waits of up to 3 hours, 10,000 attempts take
/// over two years.
const ATTEMPTS_MAX: u32 = 10_000;
/// Shortest lease. With less, a short pause of the process or the database already loses the lane.
const LEASE_MIN: Duration = Duration::from_secs(1);
/// Longest breaker wait for the operator's own destinations (every sink but `http`). Delivery must
/// resume within a second after the destination is back, and connecting takes part of that second.
const OWN_BREAKER_MAX: Duration = Duration::from_millis(800);
/// Shortest value of all other durations.
const MS: Duration = Duration::from_millis(1);

/// `stores`, of a subscription or a source.
pub(crate) fn store_names() -> Kind<Vec<StoreName>> {
    list(text(from_core::<StoreName>)).not_empty("a store")
}

fn pattern(text: &str) -> Result<TopicPattern, String> {
    TopicPattern::new(text).map_err(|error| error.message().to_owned())
}

fn as_written(text: &str) -> Result<String, String> {
    Ok(text.to_owned())
}

/// A part of the filter, checked by `Filter::validate`.
fn contents<T: Clone + 'static>(kind: Kind<T>, set: fn(T, &mut Filter)) -> Kind<T> {
    kind.check(move |value| {
        let mut filter = Filter::default();
        set(value.clone(), &mut filter);
        filter.validate().map_err(|error| error.message().to_owned())
    })
}

table! {
    /// Who reads which log, and where the events go.
    #[check(check)]
    struct SubscriptionTable {
        /// The log to read: `"outbox"`, `"inbox"`, or one of your own.
        log: LogName = text(from_core::<LogName>), default("outbox");
        /// Only events whose topic matches one of these patterns; `*` matches any characters.
        topics: Vec<TopicPattern> = list(text(pattern)).not_empty("a topic"), unset("all", r#"["order.*"]"#);
        /// The stores that have it, where there are several.
        ///
        /// [Many stores](many-stores.md).
        stores: Vec<StoreName> = store_names(), unset("all", r#"["acme"]"#);
        /// Only this tenant's events.
        tenant: Option<Tenant> = text(from_core::<Tenant>), unset("all", r#""acme""#);
        /// Only events of these kinds, by their exact names. An event without a kind is `domain`.
        kinds: Vec<String> = contents(list(text(as_written)).not_empty("a kind"), |kinds, filter| filter.kinds = kinds),
            unset("all", r#"["integration"]"#);
        /// Only events of these aggregates, by their exact names.
        aggregates: Vec<String> = contents(
            list(text(as_written)).not_empty("an aggregate"), |aggregates, filter| filter.aggregates = aggregates),
            unset("all", r#"["order"]"#);
        /// Only events that have all of these headers, with exactly these values.
        headers: Headers = contents(
            entries(as_written, text(as_written)).not_empty("a header").map(Headers::from_iter), |headers, filter| filter.headers = headers),
            unset("any", r#"{ region = "eu" }"#);
        /// `"key"`: the events of one key are delivered in order. `"none"`: in no order.
        ordering: Ordering = words([("key", Ordering::Key), ("none", Ordering::None)]), default("key");
        /// How many replicas can work on it at once. Used when the subscription is created; change
        /// it later with `postbox subscription lanes`.
        lanes: Option<u16> = integer(1..=LANES_MAX), unset("2; on SQLite 1", "4");
        /// Where a new subscription begins. `"now"`: only events committed after it was created.
        start: StartAt = words([("beginning", StartAt::Beginning), ("now", StartAt::Now)]), default("beginning");
        /// Most events that are delivered and settled together; one read brings up to four times as
        /// many.
        batch: usize = integer(1..=BATCH_EVENTS_MAX), default(500);
        /// Most payload bytes of one read.
        batch_bytes: usize = size(1..=1 << 30), default("8MiB");
        /// When a failed event is retried: exponential backoff with jitter.
        retry: RetryTable = nested::<RetryTable>();
        /// How long to wait between tries of a destination that is down.
        breaker: BreakerTable = nested::<BreakerTable>();
        /// After a dead event, its key continues with the next event. `"halt"`: it waits for a
        /// person.
        on_dead: OnDead = words([("continue", OnDead::Continue), ("halt", OnDead::Halt)]), default("continue");
        /// The longest one delivery may take.
        timeout: Duration = duration(MS), default("30s");
        /// Most deliveries at once.
        concurrency: Option<usize> = integer(1..=CONCURRENCY_MAX), unset("16", "16");
        /// Most deliveries per second (`s`), minute (`m`) or hour (`h`).
        ///
        /// All stores and replicas share it; each replica in proportion to the lanes it drives.
        /// Waiting costs no attempt.
        rate: Option<Rate> = text(from_core::<Rate>), unset("no limit", r#""50/s""#);
        /// The subscription whose `rate` this one shares: both together send no more than that.
        ///
        /// For a destination of several subscriptions. One with nothing to send leaves everything
        /// to the others in its process; but what belongs to its lanes that another replica drives
        /// stays there, and so does the part of one that failed, until it works again. Each process
        /// counts only the stores and subscriptions that it runs itself: run them in one process,
        /// or divide the rate.
        rate_of: Option<SubscriptionName> = text(from_core::<SubscriptionName>), unset("its own rate", r#""orders-out""#);
        /// The longest wait between two polls of an idle log.
        poll_interval: Duration = duration(MS), default("100ms");
        /// Another replica takes over a lane that was not renewed for this long.
        lease: Duration = duration(LEASE_MIN), default("10s");
        /// Deliver everything pending at these times only: second minute hour day month weekday, in
        /// UTC. A run that was cut short or failed goes on as soon as it can. A time may come twice
        /// if the clock is set back.
        schedule: Option<Cron> = text(Cron::from_str), unset("always", r#""0 */5 * * * *""#);
        /// Where the events go.
        sink: SinkChoice = sink().for_delivery(), unset("`{ type = \"none\" }`", SINKS[0].example);
        /// Where dead events are sent as well, with the reason.
        ///
        /// Any of the sinks below: [dead letters](operating.md#dead-letters).
        dead_to: Option<SinkChoice> = sink().for_delivery(), unset("nowhere", r#"{ type = "file", path = "dead.jsonl" }"#);
    }
}

table! {
    /// When a failed event is retried.
    #[check(check)]
    struct RetryTable {
        /// Attempts before an event is dead, or `"unlimited"`. With the defaults that is after 25
        /// to 50 hours.
        max_attempts: Option<u32> = integer(1..=ATTEMPTS_MAX).or_word("unlimited", u32::MAX),
            unset("30; with `delays`, one more than their number", "30");
        /// Upper bound of the first wait; it doubles with every attempt. Each wait is random
        /// between half of it and all of it. Not together with `delays`.
        base: Duration = duration(MS), default("1s");
        /// The longest wait, `Retry-After` included.
        max: Duration = duration(MS), default("3h");
        /// A list of waits instead, one for each retry; the last one repeats if `max_attempts` is
        /// higher.
        delays: Vec<Duration> = list(duration(Duration::ZERO)), unset("none", r#"["1s", "30s", "5m"]"#);
    }
}

impl RetryTable {
    fn check(&self, section: &Section<'_>) {
        let delays = section.name("delays");
        if section.has("delays") && self.delays.is_empty() && section.is_right(&["delays"]) {
            section.fault("delays", format!("{delays} is empty; name a wait, or leave it out for waits that double"));
        }
        if section.has("delays") && section.has("base") {
            let name = section.name("base");
            section.fault("base", format!("{name} cannot be used together with {delays}; remove one of them"));
        } else if self.base > self.max {
            let (base, max) = (duration_text(self.base), duration_text(self.max));
            let name = section.name("base");
            section.fault("base", format!("{name} is {base}, longer than max = {max}; raise max or lower base"));
        }
    }
}

table! {
    /// How long to wait between tries of a destination that is down.
    struct BreakerTable {
        /// Upper bound of the first wait; it doubles with every failed try.
        base: Duration = duration(MS), default("500ms");
        /// The longest wait. A broker tolerates a try every second; a third party's endpoint may
        /// not.
        max: Option<Duration> = duration(MS), unset("30s for `http`, 800ms for everything else", "5s");
    }
}

/// A subscription and the settings of its relay.
#[derive(Debug, Clone)]
pub struct SubscriptionConfig {
    /// The stores that have it, where there are several; empty: all of them.
    pub stores: Vec<StoreName>,
    /// Name, log, filter, ordering, what a dead event does to its key, lanes, start.
    pub subscription: Subscription,
    /// Batches, retries, timeouts, polling, lease.
    pub settings: RelaySettings,
    /// The subscription whose rate it shares. The rate itself is in the settings, too.
    pub rate_of: Option<SubscriptionName>,
    /// Deliver everything pending at these times only; `None`: always.
    pub schedule: Option<Cron>,
    /// Where the events go.
    pub sink: SinkChoice,
    /// Where dead events are sent as well.
    pub dead_to: Option<SinkChoice>,
}

/// All subscriptions, by name.
pub(super) fn subscriptions() -> Kind<Vec<SubscriptionConfig>> {
    entries(from_core::<SubscriptionName>, nested::<SubscriptionTable>()).map(|mut tables| {
        let rates: HashMap<_, _> = tables.iter().map(|(name, table)| (name.clone(), table.rate)).collect();
        for (_, table) in &mut tables {
            if let Some(named) = &table.rate_of {
                table.rate = rates.get(named).copied().flatten();
            }
        }
        tables.into_iter().map(|(name, table)| table.config(name)).collect()
    })
}

impl SubscriptionTable {
    fn check(&self, section: &Section<'_>) {
        if section.has("rate") && section.has("rate_of") {
            let (path, name) = (&section.path, section.name("rate_of"));
            section.fault("rate_of", format!("{name} cannot be used together with {path}.rate; remove one of them"));
        }
        if self.dead_to.as_ref().is_some_and(|sink| !sink.sends_headers()) {
            let name = section.name("dead_to");
            let text = "has an envelope without headers, but headers carry the reason of a dead event; write envelope = \"json\"";
            section.reader.for_delivery(|| section.fault("dead_to", format!("{name} {text}")));
        }
    }

    fn config(self, name: SubscriptionName) -> SubscriptionConfig {
        let mut subscription = Subscription::new(name, self.log);
        subscription.filter = Filter {
            topics: self.topics,
            tenant: self.tenant,
            kinds: self.kinds,
            aggregates: self.aggregates,
            headers: self.headers,
        };
        subscription.ordering = self.ordering;
        subscription.on_dead = self.on_dead;
        subscription.lanes = self.lanes;
        subscription.start = self.start;
        let usual = RelaySettings::default();
        let settings = RelaySettings {
            batch: BatchLimit { events: self.batch, payload_bytes: self.batch_bytes },
            retry: RetryPolicy {
                attempts_max: self.retry.max_attempts.unwrap_or(match self.retry.delays.len() {
                    0 => usual.retry.attempts_max,
                    retries => u32::try_from(retries).unwrap_or(u32::MAX).saturating_add(1),
                }),
                base: self.retry.base,
                delay_max: self.retry.max,
                delays: self.retry.delays,
            },
            breaker: BreakerPolicy {
                base: self.breaker.base,
                max: self.breaker.max.unwrap_or(match self.sink.type_name() {
                    "http" | "none" => usual.breaker.max,
                    _ => OWN_BREAKER_MAX,
                }),
            },
            concurrency: self.concurrency,
            rate: self.rate,
            lease_ttl: self.lease,
            deliver_timeout: self.timeout,
            poll_min: usual.poll_min.min(self.poll_interval),
            poll_max: self.poll_interval,
            ..usual
        };
        let Self { stores, rate_of, schedule, sink, dead_to, .. } = self;
        SubscriptionConfig { stores, subscription, settings, rate_of, schedule, sink, dead_to }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_declared_is_the_default_of_the_engine() {
        let name = SubscriptionName::new("a").expect("a name");
        let config = SubscriptionTable::default().config(name.clone());
        assert_eq!(config.settings, RelaySettings::default());
        assert_eq!(config.subscription, Subscription::new(name, LogName::outbox()));
    }
}
