//! A primary that is killed under load, and the replica that three Sentinels promote.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use postbox_core::{HighWaterMarks as _, Sink as _};
use postbox_redis::{RedisSink, RedisSinkConfig, RedisSource, RedisSourceConfig};
use postbox_testkit::sending::{Working, codes};
use postbox_testkit::servers::{PrivateRedis, PrivateSentinel, RedisKind};
use redis::{FromRedisValue, Value};

use super::support::{Fields, text};
use super::{SERVERS, deliver, numbered, until};

const EVENTS: usize = 3_000;

/// A primary, its replica, and three Sentinels that know both and each other.
struct Watched {
    primary: PrivateRedis,
    replica: PrivateRedis,
    sentinels: [PrivateSentinel; 3],
}

impl Watched {
    async fn start(kind: RedisKind) -> Self {
        let primary = PrivateRedis::launch(kind).await;
        let follow = format!("127.0.0.1 {}", primary.port());
        let replica = PrivateRedis::launch_with(kind, &["--replicaof", &follow]).await;
        until("the replica follows", async || {
            ask::<String>(&replica.url(), "INFO replication").await.contains("master_link_status:up")
        })
        .await;
        let sentinel = || PrivateSentinel::launch(kind, &primary);
        let sentinels: [_; 3] = tokio::join!(sentinel(), sentinel(), sentinel()).into();
        for sentinel in &sentinels {
            let url = format!("redis://127.0.0.1:{}", sentinel.port());
            until("a Sentinel knows the replica and its peers", async || {
                let known: BTreeMap<String, String> = ask(&url, "SENTINEL MASTER main").await;
                known["num-slaves"] == "1" && known["num-other-sentinels"] == "2"
            })
            .await;
        }
        Self { primary, replica, sentinels }
    }

    fn url(&self, name: &str) -> String {
        let hosts = self.sentinels.each_ref().map(|sentinel| format!("127.0.0.1:{}", sentinel.port()));
        format!("redis+sentinel://{}/{name}", hosts.join(","))
    }

    fn sink(&self, url: String) -> RedisSink {
        let stream = "events".parse().expect("a template");
        let config = RedisSinkConfig { url, stream, ..RedisSinkConfig::default() };
        RedisSink::new(&config, Duration::from_secs(5), 4).expect("a sink")
    }
}

async fn ask<T: FromRedisValue>(url: &str, command: &str) -> T {
    let client = redis::Client::open(url).expect("a URL");
    let mut connection = client.get_multiplexed_async_connection().await.expect("the server is there");
    let mut words = command.split(' ');
    let mut command = redis::cmd(words.next().expect("a word"));
    words.for_each(|word| _ = command.arg(word));
    command.query_async(&mut connection).await.expect("an answer")
}

/// Returns the payloads in the stream, each event once: by key in their order, and as one set.
async fn arrived(url: &str) -> (BTreeMap<String, Vec<usize>>, BTreeSet<usize>) {
    let entries: Vec<(String, Fields)> = ask(url, "XRANGE events - +").await;
    let (mut by_key, mut ids) = (BTreeMap::<String, Vec<usize>>::new(), BTreeMap::new());
    for (_, fields) in entries {
        let field = |name: &str| text(&fields, name).expect("a field");
        let number: usize = field("payload").parse().expect("a number");
        match ids.insert(field("id"), number) {
            Some(before) => assert_eq!(before, number, "one id, one event"),
            None => by_key.entry(field("key")).or_default().push(number),
        }
    }
    let numbers: BTreeSet<usize> = ids.values().copied().collect();
    assert_eq!(numbers.len(), ids.len(), "an event came again under another id");
    (by_key, numbers)
}

/// The replica is in sync, so it has every acknowledged entry. The guide says what is lost if it
/// lags behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_is_killed_under_load_is_succeeded_by_its_replica() {
    for kind in SERVERS {
        let mut watched = Watched::start(kind).await;
        let sink = Arc::new(watched.sink(watched.url("main")));
        let work = Working::start(sink.clone());
        let (replica, metrics) = (watched.replica.url(), work.relay.metrics());
        for from in (0..EVENTS).step_by(100) {
            work.append(from..from + 100).await;
            if from == EVENTS / 3 {
                // Some events are sent, and more are in flight.
                until("some are sent", async || metrics.delivered() > from as u64 / 2).await;
                watched.primary.kill();
            }
        }
        until("all are sent", async || metrics.delivered() >= EVENTS as u64 && metrics.in_flight() == 0).await;
        assert!(metrics.unavailable() > 0, "nobody noticed");
        let (by_key, numbers) = arrived(&replica).await;
        let missing: Vec<usize> = (0..EVENTS).filter(|n| !numbers.contains(n)).collect();
        assert!(missing.is_empty(), "{kind:?}: {} are missing: {missing:?}", missing.len());
        assert!(by_key.values().all(|versions| versions.is_sorted()), "out of order");
        // The former primary restarts, and takes itself for the primary for some seconds. The sink
        // is not led to it.
        watched.primary.start().await;
        sink.close().await;
        let mark = sink.high_water_mark("events").await.expect("an answer");
        let entries: Vec<(String, Value)> = ask(&replica, "XREVRANGE events + - COUNT 1").await;
        assert_eq!(mark.as_ref(), Some(&entries[0].0));
        work.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_are_asked_one_after_the_other_and_never_written_to() {
    for kind in SERVERS {
        let mut watched = Watched::start(kind).await;
        let url = watched.url("main");
        // One Sentinel is down, another does not answer.
        watched.sentinels[0].kill();
        watched.sentinels[1].freeze();
        let sink = watched.sink(url);
        assert_eq!(codes(&deliver(&sink, &numbered(2)).await), ["delivered"]);
        watched.sentinels[1].thaw();
        let unknown = watched.sink(watched.url("other"));
        assert_eq!(codes(&deliver(&unknown, &numbered(1)).await), ["unavailable redis_primary_unknown"]);
        let direct = watched.sink(format!("redis://127.0.0.1:{}", watched.sentinels[1].port()));
        assert_eq!(codes(&deliver(&direct, &numbered(1)).await), ["unavailable redis_is_sentinel"]);
        // A source asks the Sentinels, too.
        let config =
            RedisSourceConfig { url: watched.url("main"), stream: "events".into(), ..RedisSourceConfig::default() };
        let clock = Arc::new(postbox_engine::TokioClock::default());
        let source = RedisSource::new(&config, clock).expect("a source");
        let messages = postbox_core::Source::next(&source, 10).await.expect("an answer");
        assert_eq!(messages.len(), 2);
    }
}
