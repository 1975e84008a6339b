//! Scheduled runs that are cut short, and bounded runs whose store does not answer or whose
//! destination is gone.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::{Admin as _, Capabilities, Error, ErrorKind, Log as _, Outcome, OwnerId, Pause, Result};
use postbox_engine::{Every, Relay, RelaySettings, SupervisedRelay, TokioClock};
use postbox_memory::{Call, Wire};
use tokio_util::sync::CancellationToken;

use postbox_testkit::memory::{Answer, FailsAt, Recorder, TestEnv, event, fast};

const S: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(86_400);

/// Runs the relay once a day beside `operate`, then stops it. If the destination is away at that
/// time, the rest does not wait until tomorrow.
pub(super) async fn run_daily(relay: &Relay, stop: &CancellationToken, operate: impl Future<Output = ()>) {
    let every = Every(DAY);
    let (ended, ()) = tokio::join!(relay.run_on(&every, stop.clone()), operate);
    ended.expect("ran");
}

#[tokio::test(start_paused = true)]
async fn a_scheduled_run_that_the_store_cut_short_goes_on_once_that_is_back() {
    let env = TestEnv::with((0..200).map(|n| event(n % 20, n))).await;
    let (cable, sink, relay) = env.cuttable();
    let stop = CancellationToken::new();
    let operate = async {
        tokio::time::sleep(DAY - S).await;
        cable.cut(true);
        tokio::time::sleep(60 * S).await;
        cable.cut(false);
        tokio::time::sleep(40 * S).await;
        assert_eq!(env.stats().await.dispatched, 200);
        stop.cancel();
    };
    run_daily(&relay, &stop, operate).await;
    sink.assert_in_order();
}

/// Otherwise what one replica left behind when it crashed would wait until tomorrow.
#[tokio::test(start_paused = true)]
async fn a_scheduled_run_goes_on_with_the_lanes_of_another_that_crashed() {
    let env = TestEnv::with((0..200).map(|n| event(n % 20, n))).await;
    let (stuck, crashes) = env.recorded(Capabilities::default(), fast());
    stuck.script(|_| Answer::Hang);
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    let stop = CancellationToken::new();
    let operate = async {
        tokio::time::sleep(DAY - S).await;
        let died = tokio::time::timeout(2 * S, crashes.drain(None)).await;
        assert!(died.is_err(), "dropped in the middle");
        tokio::time::sleep(20 * S).await;
        assert_eq!(env.stats().await.dispatched, 200);
        let asked = relay.metrics().lanes_acquired();
        tokio::time::sleep(600 * S).await;
        assert_eq!(relay.metrics().lanes_acquired(), asked, "the rest of the day it rests");
        stop.cancel();
    };
    run_daily(&relay, &stop, operate).await;
    sink.assert_in_order();
}

/// The store grants the lowest free lane, and that one was given back in order.
#[tokio::test(start_paused = true)]
async fn a_scheduled_run_goes_on_with_all_lanes_that_crashed_behind_one_that_did_not() {
    let env = TestEnv::with_lanes(4).await;
    env.append((0..200).map(|n| event(n % 20, n))).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    let stop = CancellationToken::new();
    let operate = async {
        tokio::time::sleep(DAY - S).await;
        let (name, owner) = (env.subscription().name, OwnerId::new("crashes").expect("a name"));
        let mut leases = Vec::new();
        for held in [&[][..], &[0], &[0, 1], &[0, 1, 2]] {
            let acquired = env.store.acquire(&name, &owner, held, fast().lease_ttl).await.expect("asked");
            leases.push(acquired.lease.expect("free"));
        }
        env.store.release(&leases[0]).await.expect("given back");
        tokio::time::sleep(20 * S).await;
        assert_eq!(env.stats().await.dispatched, 200);
        stop.cancel();
    };
    run_daily(&relay, &stop, operate).await;
    sink.assert_in_order();
}

/// What comes after the end of a run waits for the next time, whichever replica ran.
#[tokio::test(start_paused = true)]
async fn a_scheduled_run_leaves_what_came_after_the_run_of_another() {
    let env = TestEnv::with((0..200).map(|n| event(n % 20, n))).await;
    let (slow, first) = env.recorded(Capabilities::default(), fast());
    slow.takes(S);
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    let stop = CancellationToken::new();
    let operate = async {
        tokio::time::sleep(DAY - S / 2).await;
        first.drain(None).await.expect("drained");
        env.append([event(0, 200)]).await;
        tokio::time::sleep(600 * S).await;
        assert_eq!((slow.arrivals().len(), sink.calls()), (200, 0));
        tokio::time::sleep(DAY).await;
        assert_eq!(sink.calls(), 1);
        stop.cancel();
    };
    run_daily(&relay, &stop, operate).await;
}

#[tokio::test(start_paused = true)]
async fn a_scheduled_run_that_loses_its_lane_goes_on() {
    let env = TestEnv::with((0..200).map(|n| event(n % 20, n))).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    sink.takes(S);
    let stop = CancellationToken::new();
    let operate = async {
        tokio::time::sleep(DAY + S / 2).await;
        let (name, pause) =
            (env.subscription().name, Pause { until: None, by: "ada".into(), why: "maintenance".into() });
        env.store.pause(&name, Some(&pause)).await.expect("paused");
        tokio::time::sleep(3 * S).await;
        env.store.pause(&name, None).await.expect("resumed");
        assert!(env.stats().await.pending > 0);
        tokio::time::sleep(600 * S).await;
        assert_eq!(env.stats().await.pending, 0);
        stop.cancel();
    };
    run_daily(&relay, &stop, operate).await;
}

/// At the times in between nothing may be sent, which does not mean that nothing is left.
#[tokio::test(start_paused = true)]
async fn a_scheduled_run_whose_destination_is_down_goes_on_over_the_next_times() {
    let env = TestEnv::with((0..200).map(|n| event(n % 20, n))).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    sink.script(|_| Outcome::Throttled { code: "http_429".into(), error: "later".into(), after: Some(50 * S) });
    let each_20_s = |now: Timestamp| Timestamp::from_second(now.as_second() / 20 * 20 + 20).ok();
    let relay = SupervisedRelay::new(relay, Some(Box::new(each_20_s)));
    let stop = CancellationToken::new();
    let operate = async {
        tokio::time::sleep(10 * S).await;
        assert!(relay.waits_by_configuration());
        tokio::time::sleep(55 * S).await;
        assert_eq!(relay.fault(true).map(|fault| fault.code().to_owned()).as_deref(), Some("http_429"));
        assert!(!relay.waits_by_configuration());
        sink.script(|_| Outcome::DELIVERED);
        tokio::time::sleep(10 * S).await;
        assert_eq!(env.stats().await.dispatched, 200, "once the destination allows it");
        assert!(relay.waits_by_configuration());
        stop.cancel();
    };
    tokio::join!(Arc::clone(&relay).supervise(Arc::new(TokioClock::new()), stop.clone()), operate);
    sink.assert_in_order();
}

/// A person mends it, and the run does not wait until tomorrow.
#[tokio::test(start_paused = true)]
async fn a_scheduled_run_that_ended_with_an_error_goes_on_once_that_is_mended() {
    for (panics, code) in [(false, "table_missing"), (true, "relay_panicked")] {
        let env = TestEnv::with((0..200).map(|n| event(n % 20, n))).await;
        let zero = tokio::time::Instant::now();
        let fails = move || {
            let fails = (DAY..DAY + 60 * S).contains(&zero.elapsed());
            assert!(!(fails && panics), "a defect");
            fails.then(|| Error::new(ErrorKind::Conflict, "simulate", "table_missing", "it has another name"))
        };
        let log = Arc::new(env.store.client(Some(Arc::new(FailsAt("acquire", fails)))));
        let sink = Recorder::new(Capabilities::default());
        let relay = SupervisedRelay::new(env.relay_on(log, sink.clone(), fast()), Some(Box::new(Every(DAY))));
        let stop = CancellationToken::new();
        let operate = async {
            tokio::time::sleep(DAY + 30 * S).await;
            assert_eq!(relay.fault(true).map(|fault| fault.code().to_owned()).as_deref(), Some(code));
            tokio::time::sleep(60 * S).await;
            assert!(relay.fault(true).is_none());
            assert_eq!(env.stats().await.dispatched, 200, "{code}");
            env.append([event(0, 200)]).await;
            tokio::time::sleep(3_600 * S).await;
            assert_eq!(sink.arrivals().len(), 200, "what comes later waits for its time");
            stop.cancel();
        };
        tokio::join!(Arc::clone(&relay).supervise(Arc::new(TokioClock::new()), stop.clone()), operate);
        sink.assert_in_order();
    }
}

/// Never answers calls of this operation.
struct HangsAt(&'static str);

#[async_trait]
impl Wire for HangsAt {
    async fn carry(&self, call: Arc<Call>) -> Result<()> {
        if call.operation == self.0 {
            std::future::pending::<()>().await;
        }
        call.execute();
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn a_stop_of_a_bounded_run_does_not_wait_for_a_store_that_does_not_answer() {
    for (operation, lost) in [("subscribe", 0), ("acquire", 0), ("settle", 1), ("release", 1), ("pause", 0)] {
        let env = TestEnv::with([event(1, 0)]).await;
        let log = Arc::new(env.store.client(Some(Arc::new(HangsAt(operation)))));
        let settings = RelaySettings { drain_timeout: 2 * S, ..fast() };
        let sink = Recorder::new(Capabilities::default());
        if operation == "pause" {
            sink.answers(0, Outcome::Gone { code: "http_410".into(), error: "gone".into() });
        }
        let builder = env.builder_on(log.clone(), env.subscription(), settings).admin(log).sink(sink);
        let relay = builder.build().expect("built");
        let stop = CancellationToken::new();
        let stopping = async {
            tokio::time::sleep(20 * S).await;
            stop.cancel();
        };
        let draining = tokio::time::timeout(30 * S, relay.drain_until(None, stop.clone()));
        let ended = tokio::join!(draining, stopping).0.unwrap_or_else(|_| panic!("it waits for {operation}"));
        assert_eq!(ended.expect("stopped").lanes_lost, lost, "{operation}");
    }
}

/// Nothing pauses the subscription, so the relay has to remember it.
#[tokio::test(start_paused = true)]
async fn a_relay_without_an_admin_calls_a_destination_that_is_gone_no_more() {
    let env = TestEnv::with((0..10).map(|n| event(n, n))).await;
    let sink = Recorder::new(Capabilities { concurrency: 1, ..Capabilities::default() });
    sink.script(|_| Outcome::Gone { code: "http_410".into(), error: "gone".into() });
    let builder = Relay::builder(env.store.clone(), env.subscription()).settings(fast());
    let relay = builder.sink(sink.clone()).build().expect("built");
    for run in 0..2 {
        relay.drain(None).await.expect("drained");
        assert_eq!((sink.calls(), env.stats().await.dead), (1, 1), "run {run}");
    }
}
