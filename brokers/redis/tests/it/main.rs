//! What the suites do not know: what is special about Redis, on both servers.

#[path = "../support/mod.rs"]
mod support;

mod envelopes;
mod hostile;
mod sink_faults;
mod source_faults;
mod tls;
mod warnings;

use std::sync::Arc;
use std::time::Duration;

use postbox_core::{Delivery, EventId, NewEvent, Outcome, Seq, Sink as _};
use postbox_redis::{RedisSink, RedisSinkConfig, RedisSource, RedisSourceConfig};
use postbox_testkit::servers::RedisKind;
use support::Broker;

const SERVERS: [RedisKind; 2] = [RedisKind::Redis7, RedisKind::Valkey9];

/// Longer than anything takes that does not hang.
const PATIENCE: Duration = Duration::from_secs(20);

fn sink_with(broker: &Broker, timeout: Duration, change: impl FnOnce(&mut RedisSinkConfig)) -> RedisSink {
    let mut config = RedisSinkConfig { url: broker.url(), ..RedisSinkConfig::default() };
    config.stream = "events".parse().expect("a template");
    change(&mut config);
    RedisSink::new(&config, timeout, 4).expect("a sink")
}

fn sink(broker: &Broker) -> RedisSink {
    sink_with(broker, PATIENCE, |_| ())
}

fn source_with(broker: &Broker, change: impl FnOnce(&mut RedisSourceConfig)) -> RedisSource {
    let mut config = RedisSourceConfig { url: broker.url(), stream: "events".into(), ..RedisSourceConfig::default() };
    change(&mut config);
    RedisSource::new(&config, Arc::new(postbox_engine::TokioClock::default())).expect("a source")
}

fn deliveries(events: impl IntoIterator<Item = NewEvent>) -> Vec<Delivery> {
    let delivery = |(event, seq): (NewEvent, i64)| {
        let event = event.into_event(EventId::now_v7(), jiff::Timestamp::UNIX_EPOCH);
        Delivery { event, seq: Seq(seq), attempt: 1, replay: 0 }
    };
    events.into_iter().zip(1..).map(delivery).collect()
}

fn numbered(count: usize) -> Vec<Delivery> {
    deliveries((0..count).map(|n| NewEvent::json("t", n.to_string())))
}

async fn deliver(sink: &RedisSink, deliveries: &[Delivery]) -> Vec<Outcome> {
    let call: Vec<&Delivery> = deliveries.iter().collect();
    tokio::time::timeout(PATIENCE, sink.deliver(&call)).await.expect("an answer in time")
}

/// The stable code, and whether it is a failure of everybody.
fn code(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Delivered { .. } => "delivered".into(),
        Outcome::Unavailable { code, .. } => format!("unavailable {code}"),
        Outcome::Ambiguous { code, .. } => format!("ambiguous {code}"),
        Outcome::Dead { code, .. } => format!("dead {code}"),
        other => panic!("{other:?}"),
    }
}

fn codes(outcomes: &[Outcome]) -> Vec<String> {
    let mut codes: Vec<String> = outcomes.iter().map(code).collect();
    codes.dedup();
    codes
}
