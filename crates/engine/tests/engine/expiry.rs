//! Events that expire.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use postbox_core::{Capabilities, Outcome, State};
use postbox_engine::{RelaySettings, TokioClock};

use postbox_testkit::memory::{self, Recorder, TestEnv, event, fast};

const S: Duration = Duration::from_secs(1);

/// Returns the codes of dead events, with their counted attempts.
async fn dead(env: &TestEnv) -> Vec<(String, u32)> {
    let records = env.list(State::Dead).await;
    records.into_iter().map(|record| (record.code.unwrap_or_default(), record.attempts)).collect()
}

#[tokio::test(start_paused = true)]
async fn an_event_is_not_sent_once_it_has_expired() {
    for capabilities in memory::all_capabilities() {
        let env = TestEnv::new().await;
        let at = env.now() + 5 * S;
        env.append([event(1, 0).expires_at(at), event(1, 1), event(2, 2).expires_at(at + 60 * S)]).await;
        tokio::time::sleep(5 * S).await;
        let (sink, relay) = env.recorded(capabilities, fast());
        env.run_for(&relay, 5 * S).await;
        assert_eq!(sink.versions(), [1, 2]);
        assert_eq!(dead(&env).await, [("expired".to_owned(), 0)]);
        assert_eq!(env.stats().await.dispatched, 2);
    }
}

#[tokio::test(start_paused = true)]
async fn an_event_that_fails_until_it_expires_lets_its_key_go_on() {
    let env = TestEnv::new().await;
    let at = env.now() + 2 * S;
    env.append([event(1, 0).expires_at(at), event(1, 1)]).await;
    let settings = RelaySettings { retry: postbox_core::RetryPolicy { attempts_max: 1_000, ..fast().retry }, ..fast() };
    let (sink, relay) = env.recorded(Capabilities::default(), settings);
    sink.answers(0, Outcome::retry("http_500", "boom"));
    env.run_for(&relay, 30 * S).await;
    assert_eq!(sink.versions(), [1]);
    let dead = dead(&env).await;
    assert!(dead.len() == 1 && dead[0].0 == "expired" && dead[0].1 > 0, "{dead:?}");
}

/// A batch waits for its rate or behind slow calls. Expiry is checked again right before each call.
#[tokio::test(start_paused = true)]
async fn an_event_that_expires_while_its_batch_waits_is_not_sent() {
    for capabilities in memory::all_capabilities() {
        let env = TestEnv::new().await;
        let at = env.now() + 10 * S;
        let ends = |n| if n % 2 == 1 { event(n, n).expires_at(at) } else { event(n, n) };
        env.append((0..200).map(ends)).await;
        let (sink, relay) = env.recorded(capabilities, RelaySettings { rate: "5/s".parse().ok(), ..fast() });
        env.run_for(&relay, 60 * S).await;
        let late = sink.arrivals().iter().filter(|it| it.version % 2 == 1 && it.waited >= 10 * S).count();
        assert_eq!(late, 0, "{capabilities:?}");
        let stats = env.stats().await;
        assert_eq!((stats.pending, stats.dispatched + stats.dead), (0, 200), "{capabilities:?}");
        assert!(stats.dead > 0 && sink.versions().iter().any(|version| version % 2 == 1), "{stats:?}");
    }
}

/// Each read behind an outage plans its death again.
#[tokio::test(start_paused = true)]
async fn what_expired_behind_an_outage_is_counted_once_it_is_written() {
    let env = TestEnv::new().await;
    let at = env.now() + S;
    env.append((0..8).map(|n| event(n, n))).await;
    env.append((8..108).map(|n| event(n, n).expires_at(at))).await;
    tokio::time::sleep(2 * S).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    sink.down(true);
    for _ in 0..3 {
        let drained = relay.drain(None).await.expect("drained");
        assert_eq!(relay.metrics().snapshot().dead, env.stats().await.dead, "{drained:?}");
        tokio::time::sleep(60 * S).await;
    }
    sink.down(false);
    env.run_for(&relay, 60 * S).await;
    assert_eq!((relay.metrics().snapshot().dead, dead(&env).await.len()), (100, 100));
}

/// The store's clock decides, because that of a relay's machine may be wrong.
#[tokio::test(start_paused = true)]
async fn a_relay_whose_clock_is_wrong_ends_no_event_early() {
    let env = TestEnv::new().await;
    env.append([event(1, 0).expires_at(env.now() + 60 * S)]).await;
    let sink = Recorder::new(Capabilities::default());
    let tomorrow = TokioClock::simulated(Timestamp::UNIX_EPOCH + 86_400 * S);
    let builder = env.builder(env.subscription(), fast()).clock(Arc::new(tomorrow)).sink(sink.clone());
    env.run_for(&builder.build().expect("built"), 5 * S).await;
    assert_eq!(sink.versions(), [0]);
}
