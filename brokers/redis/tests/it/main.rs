//! Tests of what is specific to Redis, on both servers.

#[path = "../support/mod.rs"]
mod support;

mod envelopes;
mod hostile;
mod lease_keys;
mod lease_relays;
mod looks;
mod portions;
mod sentinel;
mod sink_faults;
mod source_faults;
mod tls;
mod warnings;

use std::sync::Arc;
use std::time::Duration;

use postbox_core::{Delivery, NewEvent, Outcome, Sink as _};
use postbox_redis::{RedisSink, RedisSinkConfig, RedisSource, RedisSourceConfig};
use postbox_testkit::sending::{codes, deliveries, said};
use postbox_testkit::servers::RedisKind;
use support::{Broker, LOOK};

const SERVERS: [RedisKind; 2] = [RedisKind::Redis7, RedisKind::Valkey9];

/// A timeout that only a hang exceeds.
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

fn numbered(count: usize) -> Vec<Delivery> {
    deliveries((0..count).map(|n| NewEvent::json("t", n.to_string())))
}

async fn deliver(sink: &RedisSink, deliveries: &[Delivery]) -> Vec<Outcome> {
    let call: Vec<&Delivery> = deliveries.iter().collect();
    tokio::time::timeout(PATIENCE, sink.deliver(&call)).await.expect("an answer in time")
}

async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let wait = async {
        while !is_so().await {
            tokio::time::sleep(LOOK).await;
        }
    };
    tokio::time::timeout(3 * PATIENCE, wait).await.unwrap_or_else(|_| panic!("in vain: {what}"));
}
