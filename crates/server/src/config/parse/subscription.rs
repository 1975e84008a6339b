//! `[subscriptions.NAME]`, but for its sink.

use std::time::Duration;

use postbox_core::limits::{BATCH_EVENTS_MAX, LANES_MAX};
use postbox_core::{LogName, Ordering, RetryPolicy, StartAt, Subscription, SubscriptionName, Tenant, TopicPattern};
use postbox_engine::OnDead;

use super::super::model::{SinkConfig, SubscriptionConfig};
use super::super::reader::{At, Section};
use super::super::values::parse_duration;
use super::sink::read_sink;
use super::{choice, message, name_of, set};

/// Most deliveries at once to one destination: more than any endpoint answers faster for, and 1,024 sockets are the usual limit of a process.
const CONCURRENCY_MAX: u64 = 512;
/// Most attempts: at the 5 minute cap this is a week of trying.
const ATTEMPTS_MAX: u64 = 10_000;
/// Shortest lease: below it a pause of the program or the database already loses the lane.
const LEASE_MIN: Duration = Duration::from_secs(1);

pub(super) fn read_subscription(name: &At<String>, section: Section<'_, '_>) -> Option<SubscriptionConfig> {
    let subscription_name = name_of(&section, name, SubscriptionName::new)?;
    let log = section.parsed("log", |text| message(LogName::new(text))).unwrap_or_else(LogName::outbox);
    let mut subscription = Subscription::new(subscription_name, log);
    for at in section.strings("topics").unwrap_or_default() {
        match TopicPattern::new(at.value.as_str()) {
            Ok(pattern) => subscription.filter.topics.push(pattern),
            Err(error) => {
                let text = format!("{}: {}", section.name("topics"), error.message());
                section.reader.refuse(at.line, &at.value, text);
            }
        }
    }
    subscription.filter.tenant = section.parsed("tenant", |text| message(Tenant::new(text)));
    set(&mut subscription.ordering, choice(&section, "ordering", &[("key", Ordering::Key), ("none", Ordering::None)]));
    set(
        &mut subscription.start,
        choice(&section, "start", &[("beginning", StartAt::Beginning), ("now", StartAt::Now)]),
    );
    set(&mut subscription.lanes, section.integer("lanes", 1..=u64::from(LANES_MAX)).map(|lanes| lanes as u16));

    let sink = read_sink(&section);
    let mut config = SubscriptionConfig::new(subscription, SinkConfig::None);
    let settings = &mut config.settings;
    set(&mut settings.batch.events, section.integer("batch", 1..=BATCH_EVENTS_MAX as u64).map(|batch| batch as usize));
    set(&mut settings.batch.payload_bytes, section.size("batch_bytes", 1..=1 << 30));
    if let Some(retry) = section.section("retry") {
        read_retry(retry, &mut settings.retry);
    }
    if let Some(breaker) = section.section("breaker") {
        set(&mut settings.breaker.base, breaker.duration("base", Duration::from_millis(1)));
        set(&mut settings.breaker.max, breaker.duration("max", Duration::from_millis(1)));
        breaker.finish();
    }
    set(&mut settings.on_dead, choice(&section, "on_dead", &[("continue", OnDead::Continue), ("halt", OnDead::Halt)]));
    set(&mut settings.deliver_timeout, section.duration("timeout", Duration::from_millis(1)));
    settings.concurrency = section.integer("concurrency", 1..=CONCURRENCY_MAX).map(|most| most as usize);
    settings.rate = section.parsed("rate", |text| message(text.parse()));
    set(&mut settings.poll_max, section.duration("poll_interval", Duration::from_millis(1)));
    settings.poll_min = settings.poll_min.min(settings.poll_max);
    set(&mut settings.lease_ttl, section.duration("lease", LEASE_MIN));
    config.schedule = section.parsed("schedule", str::parse);
    section.finish();
    config.sink = sink?;
    Some(config)
}

fn read_retry(section: Section<'_, '_>, retry: &mut RetryPolicy) {
    set(&mut retry.attempts_max, section.integer("max_attempts", 1..=ATTEMPTS_MAX).map(|most| most as u32));
    set(&mut retry.base, section.duration("base", Duration::from_millis(1)));
    set(&mut retry.delay_max, section.duration("max", Duration::from_millis(1)));
    for at in section.strings("delays").unwrap_or_default() {
        match parse_duration(&at.value) {
            Ok(delay) => retry.delays.push(delay),
            Err(text) => section.reader.refuse(at.line, &at.value, format!("{}: {text}", section.name("delays"))),
        }
    }
    if retry.base > retry.delay_max {
        let (base, max) = (retry.base, retry.delay_max);
        section.fault(
            "base",
            format!("{} is {base:?}, longer than max = {max:?}; raise max or lower base", section.name("base")),
        );
    }
    section.finish();
}
