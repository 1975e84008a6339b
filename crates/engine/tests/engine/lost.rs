//! Relays that die, lanes that are lost, stores that go away.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::{
    Admin as _, BatchLimit, Capabilities, Change, Clock, Error, ErrorKind, Log as _, Outcome, OwnerId, Pause, Result,
    Selection, State,
};
use postbox_engine::{RelaySettings, TokioClock};
use postbox_memory::{Call, Wire};
use tokio_util::sync::CancellationToken;

use postbox_testkit::memory::{self, Answer, Cable, FailsAt, Recorder, TestEnv, event, fast};

const S: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn a_call_that_died_with_its_relay_is_repeated_after_the_lease() {
    let env = TestEnv::with([event(1, 1), event(1, 2), event(2, 3)]).await;
    let stuck = Recorder::new(Capabilities::default());
    stuck.script(|delivery| match memory::version(delivery) {
        1 => Answer::Hang,
        _ => Outcome::DELIVERED.into(),
    });
    let settings = RelaySettings { deliver_timeout: 600 * S, ..fast() };
    let killed = env.relay(stuck, settings.clone());
    let died = tokio::time::timeout(3 * S, killed.run(CancellationToken::new())).await;
    assert!(died.is_err(), "dropped in the middle");
    let waiting = env.list(State::Retrying).await;
    assert_eq!(waiting[0].code.as_deref(), Some("in_flight"), "its call outlived its batch");
    let sink = Recorder::new(Capabilities::default());
    env.run_for(&env.relay(sink.clone(), settings), 8 * S).await;
    assert_eq!(sink.versions(), [1, 2], "the lease is 5 s, the call's limit 600 s");
}

/// One event a second, two per batch: a drain of 30 events takes long enough to lose something
/// midway.
fn slow() -> (Arc<Recorder>, RelaySettings) {
    let sink = Recorder::new(Capabilities { batch_max: 1, concurrency: 1, prefix: false, system: None });
    sink.takes(S);
    (sink, RelaySettings { batch: BatchLimit { events: 2, ..BatchLimit::default() }, ..fast() })
}

#[tokio::test(start_paused = true)]
async fn a_drain_whose_store_dies_midway_is_an_error() {
    let env = TestEnv::with((0..30).map(|n| event(n, n))).await;
    let (sink, settings) = slow();
    let cable = Arc::new(Cable::default());
    let log = Arc::new(env.store.client(Some(cable.clone())));
    let relay = env.builder_on(log, env.subscription(), settings).sink(sink).build().expect("built");
    let dying = async {
        tokio::time::sleep(7 * S).await;
        cable.cut(true);
    };
    let (drained, ()) = tokio::join!(relay.drain(None), dying);
    let error = drained.expect_err("most was not delivered");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let delivered = relay.metrics().snapshot().delivered;
    assert!((1..30).contains(&delivered), "{delivered}");
}

/// Renewals succeed, so the lease never runs out.
#[tokio::test(start_paused = true)]
async fn a_drain_whose_store_refuses_only_some_calls_is_an_error() {
    for operation in ["load", "page", "open", "due", "settle"] {
        let env = TestEnv::with((0..30).map(|n| event(n, n))).await;
        let down = || Some(Error::new(ErrorKind::Unavailable, "simulate", "store_down", "this call fails"));
        let log = Arc::new(env.store.client(Some(Arc::new(FailsAt(operation, down)))));
        let relay = env.relay_on(log, Recorder::new(Capabilities::default()), fast());
        let drained = tokio::time::timeout(60 * S, relay.drain(None)).await.expect("it ends");
        assert_eq!(drained.expect_err(operation).code(), "store_down", "{operation}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_that_loses_its_lane_says_so() {
    let env = TestEnv::with((0..30).map(|n| event(n, n))).await;
    let (sink, settings) = slow();
    let relay = env.relay(sink, settings);
    let pausing = async {
        tokio::time::sleep(7 * S).await;
        let pause = Pause { until: None, by: "ada".into(), why: "maintenance".into() };
        env.store.pause(&env.subscription().name, Some(&pause)).await.expect("paused");
    };
    let (drained, ()) = tokio::join!(relay.drain(None), pausing);
    let drained = drained.expect("what was delivered counts");
    assert_eq!(drained.lanes_lost, 1);
    assert!((1..30).contains(&drained.delivered), "{drained:?}");
}

#[tokio::test(start_paused = true)]
async fn a_pause_repeats_nothing_that_is_answered_within_the_lease() {
    let env = TestEnv::with((0..4).map(|n| event(n, n))).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    sink.takes(3 * S);
    let name = env.subscription().name;
    let pausing = async {
        tokio::time::sleep(S).await;
        let pause = Pause { until: None, by: "ada".into(), why: "maintenance".into() };
        env.store.pause(&name, Some(&pause)).await.expect("paused");
        tokio::time::sleep(10 * S).await;
        assert_eq!(env.stats().await.dispatched, 4, "what was in flight is settled");
        env.store.pause(&name, None).await.expect("resumed");
        tokio::time::sleep(10 * S).await;
    };
    env.run_while(&relay, pausing).await;
    assert_eq!(sink.calls(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_relay_that_gets_no_lane_for_any_reason_says_so() {
    let env = TestEnv::with([event(1, 1)]).await;
    // A reason that only a person can mend.
    let damaged = || Some(Error::new(ErrorKind::Internal, "simulate", "row_damaged", "a page cannot be read"));
    let log = Arc::new(env.store.client(Some(Arc::new(FailsAt("acquire", damaged)))));
    let relay = env.relay_on(log, Recorder::new(Capabilities::default()), fast());
    env.run_while(&relay, async {
        tokio::time::sleep(60 * S).await;
        assert_eq!(relay.lease_outage().map(|outage| outage.code).as_deref(), Some("row_damaged"));
    })
    .await;
}

/// Otherwise the lane stands still for a lease, and its next holder takes that for a crash.
#[tokio::test(start_paused = true)]
async fn a_drain_that_fails_between_two_lanes_gives_back_the_first() {
    let env = TestEnv::with_lanes(2).await;
    env.append([event(1, 1)]).await;
    let (is_held, down) =
        (AtomicBool::default(), || Error::new(ErrorKind::Unavailable, "simulate", "store_down", "the cable is cut"));
    let one_lane = FailsAt("acquire", move || is_held.swap(true, Ordering::SeqCst).then(down));
    let log = Arc::new(env.store.client(Some(Arc::new(one_lane))));
    let relay = env.relay_on(log, Recorder::new(Capabilities::default()), fast());
    let error = relay.drain(None).await.expect_err("one of two lanes is missing");
    assert_eq!(error.code(), "store_down", "{error}");
    let (name, owner) = (env.subscription().name, OwnerId::new("next").expect("valid"));
    for held in [&[][..], &[0]] {
        let acquired = env.store.acquire(&name, &owner, held, fast().lease_ttl).await.expect("asked");
        assert_eq!(acquired.lease.expect("free").crashes, 0);
    }
}

/// Executes each call at once, but answers renewals late. After the first such answer it blocks
/// every call.
#[derive(Default)]
struct SlowRenewal(Cable);

#[async_trait]
impl Wire for SlowRenewal {
    async fn carry(&self, call: Arc<Call>) -> Result<()> {
        let renews = call.operation == "renew";
        self.0.carry(call).await?;
        if renews {
            tokio::time::sleep(2 * S).await;
            self.0.cut(true);
        }
        Ok(())
    }
}

/// Never answers.
struct Silent;

#[async_trait]
impl Wire for Silent {
    async fn carry(&self, _: Arc<Call>) -> Result<()> {
        std::future::pending().await
    }
}

/// A store may take long to create the subscription, e.g. if it has to unblock many rows.
#[tokio::test(start_paused = true)]
async fn a_stop_is_seen_while_the_store_creates_the_subscription() {
    let env = TestEnv::new().await;
    let log = Arc::new(env.store.client(Some(Arc::new(Silent))));
    let relay = env.relay_on(log, Recorder::new(Capabilities::default()), fast());
    let stop = CancellationToken::new();
    let stopping = async {
        tokio::time::sleep(S).await;
        stop.cancel();
    };
    let run = tokio::time::timeout(10 * S, relay.run(stop.clone()));
    tokio::join!(run, stopping).0.expect("in time").expect("stopped");
}

/// The store counts a lease from the moment it executes the call, so the holder must not count it
/// from the answer.
#[tokio::test(start_paused = true)]
async fn a_lease_ends_for_its_holder_before_anybody_else_gets_it() {
    let env = TestEnv::with((0..30).map(|n| event(n, n))).await;
    let (sink, settings) = slow();
    let batch = BatchLimit { events: 30, ..BatchLimit::default() };
    let log = Arc::new(env.store.client(Some(Arc::new(SlowRenewal::default()))));
    let victim = env.relay_on(log, sink.clone(), RelaySettings { batch, ..settings });
    let successor_sink = Recorder::new(Capabilities::default());
    let successor = env.relay(successor_sink.clone(), fast());
    let succeeding = async {
        tokio::time::sleep(S).await;
        env.run_for(&successor, 12 * S).await;
    };
    tokio::join!(env.run_for(&victim, 13 * S), succeeding);
    let (last, first) = (sink.arrivals().pop().expect("some"), successor_sink.arrivals().swap_remove(0));
    assert!(last.waited < first.waited, "sent until {:?}, succeeded at {:?}", last.waited, first.waited);
}

/// The clock of a process that stands still now and then, which its sleeps do not notice.
struct StandingStill(TokioClock, Mutex<Duration>);

#[async_trait]
impl Clock for StandingStill {
    fn now(&self) -> Timestamp {
        self.0.now()
    }

    fn monotonic(&self) -> Duration {
        self.0.monotonic() + *self.1.lock().unwrap()
    }

    async fn sleep(&self, duration: Duration) {
        self.0.sleep(duration).await;
    }
}

/// Another relay may have its lane by then.
#[tokio::test(start_paused = true)]
async fn a_process_that_stood_still_sends_nothing_before_it_looks_at_its_lease() {
    let env = TestEnv::with((0..3).map(|n| event(1, n))).await;
    let sink = Recorder::new(Capabilities::default());
    let clock = Arc::new(StandingStill(TokioClock::new(), Mutex::default()));
    let relay = env.builder(env.subscription(), fast()).clock(clock.clone()).sink(sink.clone()).build().expect("built");
    let (lost, metrics) = (Arc::new(Mutex::new(Vec::new())), relay.metrics().clone());
    sink.script({
        let lost = lost.clone();
        move |_| {
            let mut lost = lost.lock().unwrap();
            lost.push(metrics.leases_lost());
            if lost.len() == 1 {
                *clock.1.lock().unwrap() += fast().lease_ttl;
            }
            Outcome::DELIVERED
        }
    });
    env.run_for(&relay, 10 * S).await;
    assert_eq!(*lost.lock().unwrap(), [0, 1, 1, 1], "leases lost before each call");
    sink.assert_in_order();
}

/// A person makes a row due whose call is still in flight.
#[tokio::test(start_paused = true)]
async fn a_call_in_flight_is_not_made_beside_itself() {
    let env = TestEnv::with([event(1, 1)]).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    sink.takes(8 * S);
    let hurrying = async {
        tokio::time::sleep(4 * S).await;
        let changed =
            env.store.change(&env.subscription().name, &Change::Retry, &Selection::default()).await.expect("hurried");
        assert_eq!(changed.count, 1, "its call outlived its batch");
    };
    tokio::join!(env.run_for(&relay, 20 * S), hurrying);
    assert_eq!((sink.calls(), env.stats().await.dispatched), (1, 1));
}
