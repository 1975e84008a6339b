//! A destination that is down, or throttles: one named case each, on the memory store under paused
//! time.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod bench;

use std::sync::Arc;
use std::time::Duration;

use bench::{Answer, Bench, Recorder, event, fast};
use postbox_core::{Capabilities, Outcome, State};
use postbox_engine::{Relay, RelaySettings};
use tokio_util::sync::CancellationToken;

const S: Duration = Duration::from_secs(1);

/// 200 events of 20 keys wait for a destination that is down.
async fn dead_destination(capabilities: Capabilities) -> (Bench, Arc<Recorder>, Relay) {
    let bench = Bench::new().await;
    bench.append((0..200).map(|n| event(n % 20, n))).await;
    let sink = Recorder::new(capabilities);
    sink.down(true);
    let relay = bench.relay(sink.clone(), fast());
    (bench, sink, relay)
}

#[tokio::test(start_paused = true)]
async fn an_outage_costs_no_attempts_and_everything_is_delivered_after_it() {
    for capabilities in bench::all_capabilities() {
        let (bench, sink, relay) = dead_destination(capabilities).await;
        let stop = CancellationToken::new();
        let operate = async {
            tokio::time::sleep(600 * S).await;
            assert!(sink.calls() < 80, "{} calls to a dead destination in ten minutes", sink.calls());
            assert_eq!(sink.arrivals().len(), 0);
            sink.down(false);
            tokio::time::sleep(40 * S).await;
            stop.cancel();
        };
        let (ended, ()) = tokio::join!(relay.run(stop.clone()), operate);
        ended.expect("ran");
        sink.assert_in_order();
        assert!(sink.arrivals().iter().all(|arrival| arrival.attempt == 1), "{capabilities:?}");
        assert_eq!(bench.stats().await.dispatched, 200, "{capabilities:?}");
        assert_eq!(sink.arrivals().len(), 200, "and nothing twice");
    }
}

#[tokio::test(start_paused = true)]
async fn an_outage_leaves_one_row_that_tells_of_it() {
    for capabilities in bench::all_capabilities() {
        let (bench, _, relay) = dead_destination(capabilities).await;
        bench.run_for(&relay, 3_600 * S).await;
        let stats = bench.stats().await;
        assert_eq!(stats.retrying, 1, "{capabilities:?}: {stats:?}");
        let row = &bench.list(State::Retrying).await[0];
        assert_eq!((row.event.version, row.attempts, row.code.as_deref()), (Some(0), 0, Some("connect_refused")));
    }
}

#[tokio::test(start_paused = true)]
async fn a_throttling_destination_is_probed_one_event_at_a_time_and_costs_no_attempts() {
    let bench = Bench::new().await;
    bench.append((0..300).map(|n| event(n, n))).await;
    let sink = Recorder::new(Capabilities::default());
    sink.script(|_| {
        let after = Some(3 * S);
        Answer::Say(Outcome::Throttled { code: "http_429".into(), error: "later".into(), after })
    });
    let relay = bench.relay(sink.clone(), fast());
    bench.run_for(&relay, 300 * S).await;
    // Those in flight when the first was sent away, then single probes no closer than it said.
    assert!(sink.calls() <= 16 + 100, "{} calls in five minutes", sink.calls());
    assert_eq!(bench.stats().await.dead, 0);
    // From now on it takes all but one, which it always sends away.
    sink.script(|delivery| match bench::version(delivery) {
        5 => Answer::Say(Outcome::Throttled { code: "http_429".into(), error: "later".into(), after: Some(3 * S) }),
        _ => Answer::Say(Outcome::DELIVERED),
    });
    let stop = CancellationToken::new();
    let mut waited = Duration::ZERO;
    let produce = async {
        tokio::time::sleep(120 * S).await;
        for n in 300..1_300 {
            if n == 800 {
                waited = sink.arrivals().iter().map(|arrival| arrival.waited).max().unwrap_or_default();
            }
            bench.append([event(n, n)]).await;
            tokio::time::sleep(S).await;
        }
        stop.cancel();
    };
    let (ended, ()) = tokio::join!(relay.run(stop.clone()), produce);
    ended.expect("ran");
    let stats = bench.stats().await;
    assert_eq!((stats.dead, stats.dispatched, stats.retrying), (0, 1_299, 1), "neither dead nor in the others' way");
    let late = sink.arrivals().iter().filter(|it| it.version >= 800 && it.waited > 2 * S).count();
    assert_eq!(late, 0, "in the end nobody waits for it");
}

#[tokio::test(start_paused = true)]
async fn one_event_that_is_always_throttled_slows_no_other() {
    for after in [Duration::ZERO, 3 * S] {
        let bench = Bench::new().await;
        let sink = Recorder::new(Capabilities::default());
        sink.script(move |delivery| match bench::version(delivery) {
            5 => Answer::Say(Outcome::Throttled { code: "http_429".into(), error: "later".into(), after: Some(after) }),
            _ => Answer::Say(Outcome::DELIVERED),
        });
        let relay = bench.relay(sink.clone(), fast());
        let stop = CancellationToken::new();
        let produce = async {
            for n in 0..3_000 {
                bench.append([event(n, n)]).await;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            stop.cancel();
        };
        let (ended, ()) = tokio::join!(relay.run(stop.clone()), produce);
        ended.expect("ran");
        let stats = bench.stats().await;
        assert_eq!((stats.dead, stats.dispatched, stats.retrying), (0, 2_999, 1));
        let slowest = sink.arrivals().iter().map(|arrival| arrival.waited).max().unwrap_or_default();
        assert!(slowest < S, "somebody waited for {slowest:?}");
        assert_eq!(relay.metrics().breaker_opened(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_is_to_be_tried_again_does_not_close_the_breaker() {
    let bench = Bench::new().await;
    bench.append((0..300).map(|n| event(n, n))).await;
    let sink = Recorder::new(Capabilities::default());
    let calls = std::sync::atomic::AtomicUsize::new(0);
    let stumbles = Arc::new(std::sync::Mutex::new(Vec::new()));
    let noted = stumbles.clone();
    sink.takes(Duration::from_millis(50));
    sink.script(move |_| match calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
        0..16 => Answer::Say(Outcome::unavailable("connect_refused", "down")),
        16..30 => {
            noted.lock().unwrap().push(tokio::time::Instant::now());
            Answer::Say(Outcome::retry("http_500", "starting"))
        }
        _ => Answer::Say(Outcome::DELIVERED),
    });
    let relay = bench.relay(sink.clone(), fast());
    bench.run_for(&relay, 600 * S).await;
    assert_eq!(bench.stats().await.dispatched, 300);
    let stumbles = stumbles.lock().unwrap();
    assert!(stumbles.windows(2).all(|two| two[1] - two[0] >= Duration::from_millis(50)), "one at a time: {stumbles:?}");
}

#[tokio::test(start_paused = true)]
async fn an_event_that_brings_the_destination_down_is_found_and_dies() {
    let bench = Bench::new().await;
    bench.append((0..400).map(|n| event(n % 40, n))).await;
    let sink = Recorder::new(Capabilities::default());
    sink.script(|delivery| match bench::version(delivery) {
        5 => Answer::Say(Outcome::unavailable("connection_reset", "it crashed")),
        _ => Answer::Say(Outcome::DELIVERED),
    });
    let relay = bench.relay(sink.clone(), fast());
    let stop = CancellationToken::new();
    // Without others that get through, nobody could tell it from an outage.
    let produce = async {
        for n in 400..1_120 {
            bench.append([event(n % 40, n)]).await;
            tokio::time::sleep(5 * S).await;
        }
        tokio::time::sleep(60 * S).await;
        stop.cancel();
    };
    let (ended, ()) = tokio::join!(relay.run(stop.clone()), produce);
    ended.expect("ran");
    let stats = bench.stats().await;
    assert_eq!((stats.dead, stats.dispatched), (1, 1_119));
}

#[tokio::test(start_paused = true)]
async fn a_relay_dropped_in_the_middle_of_a_probe_probes_again_when_run_again() {
    let bench = Bench::new().await;
    bench.append((0..10).map(|n| event(n, n))).await;
    let sink = Recorder::new(Capabilities { concurrency: 1, ..Capabilities::default() });
    let calls = std::sync::atomic::AtomicUsize::new(0);
    sink.script(move |_| match calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
        0 => Answer::Say(Outcome::unavailable("connect_refused", "down")),
        1 => Answer::Hang,
        _ => Answer::Say(Outcome::DELIVERED),
    });
    let relay = Arc::new(bench.relay(sink.clone(), RelaySettings { deliver_timeout: 300 * S, ..fast() }));
    let run = tokio::spawn({
        let relay = relay.clone();
        async move { relay.run(CancellationToken::new()).await }
    });
    sink.wait_for(2).await;
    run.abort();
    assert!(run.await.expect_err("aborted").is_cancelled());
    bench.run_for(&relay, 60 * S).await;
    assert_eq!(bench.stats().await.dispatched, 10);
}

/// What this event meets looks like an outage, and is none: others succeed.
#[tokio::test(start_paused = true)]
async fn an_event_that_looks_like_an_outage_dies_of_its_attempts() {
    for capabilities in bench::all_capabilities() {
        let bench = Bench::new().await;
        bench.append((0..400).map(|n| event(n % 40, n))).await;
        let sink = Recorder::new(capabilities);
        sink.script(|delivery| match bench::version(delivery) {
            5 => Answer::Say(Outcome::ambiguous("http_503", "it crashed")),
            _ => Answer::Say(Outcome::DELIVERED),
        });
        let relay = bench.relay(sink.clone(), fast());
        let stop = CancellationToken::new();
        let produce = async {
            for n in 400..700 {
                bench.append([event(n % 40, n)]).await;
                tokio::time::sleep(S).await;
            }
            stop.cancel();
        };
        let (ended, ()) = tokio::join!(relay.run(stop.clone()), produce);
        ended.expect("ran");
        let stats = bench.stats().await;
        assert_eq!((stats.dead, stats.dispatched), (1, 699), "{capabilities:?}");
        assert_eq!(bench.list(State::Dead).await[0].attempts, fast().retry.attempts_max);
        sink.assert_in_order();
    }
}

#[tokio::test(start_paused = true)]
async fn an_ambiguous_outage_costs_one_attempt_of_one_event() {
    for capabilities in bench::all_capabilities() {
        let bench = Bench::new().await;
        let sink = Recorder::new(capabilities);
        let relay = bench.relay(sink.clone(), fast());
        let stop = CancellationToken::new();
        let operate = async {
            bench.append((0..100).map(|n| event(n % 20, n))).await;
            sink.wait_for(100).await;
            sink.script(|_| Answer::Say(Outcome::ambiguous("connection_lost", "down")));
            bench.append((100..200).map(|n| event(n % 20, n))).await;
            tokio::time::sleep(3_600 * S).await;
            sink.script(|_| Answer::Say(Outcome::DELIVERED));
            sink.wait_for(200).await;
            stop.cancel();
        };
        let (ended, ()) = tokio::join!(relay.run(stop.clone()), operate);
        ended.expect("ran");
        let charged: Vec<u32> = sink.arrivals().iter().map(|it| it.attempt - 1).filter(|it| *it > 0).collect();
        assert_eq!(charged, [1], "{capabilities:?}");
        sink.assert_in_order();
    }
}

/// The handler of an apply subscription is judged as a sink is.
#[tokio::test(start_paused = true)]
async fn a_handler_whose_event_always_finds_its_service_down_gives_up_while_others_succeed() {
    let bench = Bench::new().await;
    bench.append((0..400).map(|n| event(n % 40, n))).await;
    let apply = bench.store.apply(|_, delivery| match bench::version(delivery) {
        5 => Outcome::unavailable("connect_refused", "it crashed"),
        _ => Outcome::DELIVERED,
    });
    let relay = bench.builder(bench.subscription(), fast()).apply(apply).build().expect("built");
    let stop = CancellationToken::new();
    let produce = async {
        for n in 400..1_120 {
            bench.append([event(n % 40, n)]).await;
            tokio::time::sleep(5 * S).await;
        }
        tokio::time::sleep(60 * S).await;
        stop.cancel();
    };
    let (ended, ()) = tokio::join!(relay.run(stop.clone()), produce);
    ended.expect("ran");
    let stats = bench.stats().await;
    assert_eq!((stats.dead, stats.dispatched), (1, 1_119));
}

#[tokio::test(start_paused = true)]
async fn a_scheduled_run_probes_a_destination_that_was_down_in_the_one_before() {
    let (bench, sink, relay) = dead_destination(Capabilities::default()).await;
    assert_eq!(relay.drain(None).await.expect("drained").delivered, 0);
    sink.down(false);
    tokio::time::sleep(60 * S).await;
    assert_eq!(relay.drain(None).await.expect("drained").delivered, 200);
    sink.assert_in_order();
    assert_eq!(bench.stats().await.dispatched, 200);
}
