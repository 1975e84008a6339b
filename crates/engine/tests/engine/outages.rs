//! A destination that is down, or throttles: one named case each, on the memory store under paused
//! time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    Admin as _, BatchLimit, Capabilities, Change, Outcome, Pause, Result, RetryPolicy, Selection, State,
};
use postbox_engine::{BreakerState, Relay, RelaySettings};
use postbox_memory::{Call, Wire};
use tokio_util::sync::CancellationToken;

use crate::scheduled::run_daily;
use postbox_testkit::memory::{self, Answer, Recorder, TestEnv, event, fast};

const S: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(86_400);

fn throttled(after: Duration) -> Outcome {
    Outcome::Throttled { code: "http_429".into(), error: "later".into(), after: Some(after) }
}

/// Sets up 200 events of 20 keys and a destination that is down.
async fn dead_destination(capabilities: Capabilities) -> (TestEnv, Arc<Recorder>, Relay) {
    let env = TestEnv::with((0..200).map(|n| event(n % 20, n))).await;
    let (sink, relay) = env.recorded(capabilities, fast());
    sink.down(true);
    (env, sink, relay)
}

#[tokio::test(start_paused = true)]
async fn an_outage_costs_no_attempts_and_everything_is_delivered_after_it() {
    for capabilities in memory::all_capabilities() {
        let (env, sink, relay) = dead_destination(capabilities).await;
        env.run_while(&relay, async {
            tokio::time::sleep(600 * S).await;
            assert!(sink.calls() < 80, "{} calls to a dead destination in ten minutes", sink.calls());
            assert_eq!(sink.arrivals().len(), 0);
            sink.down(false);
            tokio::time::sleep(40 * S).await;
        })
        .await;
        sink.assert_in_order();
        assert!(sink.arrivals().iter().all(|arrival| arrival.attempt == 1), "{capabilities:?}");
        assert_eq!(env.stats().await.dispatched, 200, "{capabilities:?}");
        assert_eq!(sink.arrivals().len(), 200, "and nothing twice");
    }
}

#[tokio::test(start_paused = true)]
async fn an_outage_leaves_one_row_with_its_reason() {
    for capabilities in memory::all_capabilities() {
        let (env, _, relay) = dead_destination(capabilities).await;
        // After a while, the probed event itself could be at fault.
        env.run_for(&relay, 7 * S).await;
        let stats = env.stats().await;
        assert_eq!(stats.retrying, 1, "{capabilities:?}: {stats:?}");
        let row = &env.list(State::Retrying).await[0];
        assert_eq!((row.event.version, row.attempts, row.code.as_deref()), (Some(0), 0, Some("connect_refused")));
    }
}

#[tokio::test(start_paused = true)]
async fn failed_attempts_beyond_the_first_are_counted_and_throttled_ones_are_not() {
    let retry = RetryPolicy { attempts_max: 7, ..fast().retry };
    for (outcome, over) in [(Outcome::retry("http_500", "boom"), [6, 2, 0]), (throttled(S), [0; 3])] {
        let env = TestEnv::with([event(1, 0)]).await;
        let (sink, relay) = env.recorded(Capabilities::default(), RelaySettings { retry: retry.clone(), ..fast() });
        sink.answers(0, outcome);
        env.run_for(&relay, 120 * S).await;
        assert_eq!(relay.metrics().attempts_over(), [(1, over[0]), (5, over[1]), (10, over[2])]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_throttling_destination_is_probed_one_event_at_a_time_and_costs_no_attempts() {
    let env = TestEnv::with((0..300).map(|n| event(n, n))).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    sink.script(|_| throttled(3 * S));
    env.run_for(&relay, 300 * S).await;
    // Calls in flight when the first was throttled, then single probes, no closer than the named
    // wait.
    assert!(sink.calls() <= 16 + 100, "{} calls in five minutes", sink.calls());
    assert_eq!(env.stats().await.dead, 0);
    // From here on it accepts all events but one, which it always throttles.
    sink.answers(5, throttled(3 * S));
    env.run_while(&relay, async {
        tokio::time::sleep(120 * S).await;
        env.append_each(300..1_300, 1_300, S).await;
    })
    .await;
    let stats = env.stats().await;
    assert_eq!((stats.dead, stats.dispatched, stats.retrying), (0, 1_299, 1), "neither dead nor in the others' way");
    let late = sink.arrivals().iter().filter(|it| it.version >= 800 && it.waited > 2 * S).count();
    assert_eq!(late, 0, "in the end nobody waits for it");
}

#[tokio::test(start_paused = true)]
async fn one_event_that_is_always_throttled_slows_no_other() {
    for after in [Duration::ZERO, 3 * S] {
        let env = TestEnv::new().await;
        let (sink, relay) = env.recorded(Capabilities::default(), fast());
        sink.answers(5, throttled(after));
        env.run_while(&relay, async {
            env.append_each(0..3_000, 3_000, Duration::from_millis(100)).await;
        })
        .await;
        let stats = env.stats().await;
        assert_eq!((stats.dead, stats.dispatched, stats.retrying), (0, 2_999, 1));
        let slowest = sink.arrivals().iter().map(|arrival| arrival.waited).max().unwrap_or_default();
        assert!(slowest < S, "somebody waited for {slowest:?}");
        assert_eq!(relay.metrics().breaker_opened(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_is_to_be_tried_again_does_not_close_the_breaker() {
    let env = TestEnv::with((0..300).map(|n| event(n, n))).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    let calls = AtomicUsize::new(0);
    let stumbles = Arc::new(std::sync::Mutex::new(Vec::new()));
    let noted = stumbles.clone();
    sink.takes(Duration::from_millis(50));
    sink.script(move |_| match calls.fetch_add(1, Ordering::Relaxed) {
        0..16 => Outcome::unavailable("connect_refused", "down"),
        16..30 => {
            noted.lock().unwrap().push(tokio::time::Instant::now());
            Outcome::retry("http_500", "starting")
        }
        _ => Outcome::DELIVERED,
    });
    env.run_for(&relay, 600 * S).await;
    assert_eq!(env.stats().await.dispatched, 300);
    let charged: u32 = sink.arrivals().iter().map(|it| it.attempt - 1).sum();
    assert_eq!(relay.metrics().snapshot().retries, u64::from(charged), "what is not written is not counted");
    let stumbles = stumbles.lock().unwrap();
    assert!(stumbles.windows(2).all(|two| two[1] - two[0] >= Duration::from_millis(50)), "one at a time: {stumbles:?}");
}

#[tokio::test(start_paused = true)]
async fn an_event_that_brings_the_destination_down_is_found_and_dies() {
    let env = TestEnv::with((0..400).map(|n| event(n % 40, n))).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    sink.answers(5, Outcome::unavailable("connection_reset", "it crashed"));
    one_dies_of_1_120(&env, &relay).await;
}

/// Asserts that one of 1,120 events dies. Unless others succeed, nobody could tell it from an
/// outage.
async fn one_dies_of_1_120(env: &TestEnv, relay: &Relay) {
    env.run_while(relay, async {
        env.append_each(400..1_120, 40, 5 * S).await;
        tokio::time::sleep(60 * S).await;
    })
    .await;
    let stats = env.stats().await;
    assert_eq!((stats.dead, stats.dispatched), (1, 1_119));
}

#[tokio::test(start_paused = true)]
async fn a_relay_dropped_in_the_middle_of_a_probe_probes_again_when_run_again() {
    let env = TestEnv::with((0..10).map(|n| event(n, n))).await;
    let sink = Recorder::new(Capabilities { concurrency: 1, ..Capabilities::default() });
    let calls = AtomicUsize::new(0);
    sink.script(move |_| match calls.fetch_add(1, Ordering::Relaxed) {
        0 => Outcome::unavailable("connect_refused", "down").into(),
        1 => Answer::Hang,
        _ => Outcome::DELIVERED.into(),
    });
    let relay = Arc::new(env.relay(sink.clone(), RelaySettings { deliver_timeout: 300 * S, ..fast() }));
    let run = tokio::spawn({
        let relay = relay.clone();
        async move { relay.run(CancellationToken::new()).await }
    });
    sink.wait_for(2).await;
    run.abort();
    assert!(run.await.expect_err("aborted").is_cancelled());
    env.run_for(&relay, 60 * S).await;
    assert_eq!(env.stats().await.dispatched, 10);
}

/// This event's failures look like an outage but are none, because others succeed.
#[tokio::test(start_paused = true)]
async fn an_event_that_looks_like_an_outage_dies_of_its_attempts() {
    for capabilities in memory::all_capabilities() {
        let env = TestEnv::with((0..400).map(|n| event(n % 40, n))).await;
        let (sink, relay) = env.recorded(capabilities, fast());
        sink.answers(5, Outcome::ambiguous("http_503", "it crashed"));
        env.run_while(&relay, async {
            env.append_each(400..700, 40, S).await;
        })
        .await;
        let stats = env.stats().await;
        assert_eq!((stats.dead, stats.dispatched), (1, 699), "{capabilities:?}");
        assert_eq!(env.list(State::Dead).await[0].attempts, fast().retry.attempts_max);
        sink.assert_in_order();
    }
}

#[tokio::test(start_paused = true)]
async fn an_ambiguous_outage_costs_one_attempt_of_one_event() {
    for capabilities in memory::all_capabilities() {
        let env = TestEnv::new().await;
        let (sink, relay) = env.recorded(capabilities, fast());
        env.run_while(&relay, async {
            env.append((0..100).map(|n| event(n % 20, n))).await;
            sink.wait_for(100).await;
            sink.script(|_| Outcome::ambiguous("connection_lost", "down"));
            env.append((100..200).map(|n| event(n % 20, n))).await;
            tokio::time::sleep(3_600 * S).await;
            sink.script(|_| Outcome::DELIVERED);
            sink.wait_for(200).await;
        })
        .await;
        let charged: Vec<u32> = sink.arrivals().iter().map(|it| it.attempt - 1).filter(|it| *it > 0).collect();
        assert_eq!(charged, [1], "{capabilities:?}");
        sink.assert_in_order();
    }
}

/// One lane acts on such answers while the other one probes.
#[tokio::test(start_paused = true)]
async fn answers_to_calls_from_before_an_outage_do_not_end_it() {
    let env = TestEnv::with_lanes(2).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    sink.script(|delivery| match memory::version(delivery) {
        0..8 => Outcome::DELIVERED,
        _ => Outcome::ambiguous("http_503", "down"),
    });
    sink.takes(8 * S);
    env.append((0..8).map(|n| event(n, n))).await;
    env.run_while(&relay, async {
        tokio::time::sleep(S).await;
        sink.takes(Duration::ZERO);
        env.append((8..200).map(|n| event(n, n))).await;
        while relay.metrics().outage().is_none() {
            tokio::time::sleep(S / 100).await;
        }
        // From now on a probe lasts until the old answers are here.
        sink.takes(9 * S);
        sink.wait_for(8).await;
        tokio::time::sleep(S).await;
        assert!(relay.metrics().outage().is_some());
    })
    .await;
}

/// A destination that only answers 500 is down. Finding out costs four events an attempt each.
#[tokio::test(start_paused = true)]
async fn a_destination_that_fails_at_all_it_gets_is_an_outage() {
    for capabilities in memory::all_capabilities() {
        let env = TestEnv::new().await;
        let (sink, relay) = env.recorded(capabilities, fast());
        env.run_while(&relay, async {
            env.append((0..100).map(|n| event(n % 20, n))).await;
            sink.wait_for(100).await;
            sink.script(|_| Outcome::server_error("http_500", "down"));
            env.append((100..200).map(|n| event(n % 20, n))).await;
            tokio::time::sleep(3_600 * S).await;
            sink.script(|_| Outcome::DELIVERED);
            sink.wait_for(200).await;
        })
        .await;
        let charged: Vec<u32> = sink.arrivals().iter().map(|it| it.attempt - 1).filter(|it| *it > 0).collect();
        assert_eq!(charged, [1; 4], "{capabilities:?}");
        assert_eq!(env.stats().await.dead, 0);
        sink.assert_in_order();
    }
}

/// Events that the destination fails at die of their attempts and hold up others only briefly, even
/// if they are the first it gets.
#[tokio::test(start_paused = true)]
async fn events_that_a_destination_fails_at_die_while_others_succeed() {
    for capabilities in memory::all_capabilities() {
        let env = TestEnv::with((0..8).map(|n| event(n, n))).await;
        let (sink, relay) = env.recorded(capabilities, fast());
        sink.script(|delivery| match memory::version(delivery) {
            0..8 => Outcome::server_error("http_500", "it crashed"),
            _ => Outcome::DELIVERED,
        });
        env.run_while(&relay, async {
            env.append_each(8..700, 40, S).await;
        })
        .await;
        let stats = env.stats().await;
        assert_eq!((stats.dead, stats.dispatched), (8, 692), "{capabilities:?}");
        assert!(env.list(State::Dead).await.iter().all(|it| it.attempts == fast().retry.attempts_max));
    }
}

/// The handler of an apply subscription is judged like a sink.
#[tokio::test(start_paused = true)]
async fn a_handler_whose_event_always_finds_its_service_down_gives_up_while_others_succeed() {
    let env = TestEnv::with((0..400).map(|n| event(n % 40, n))).await;
    let apply = env.store.apply(|_, delivery| match memory::version(delivery) {
        5 => Outcome::unavailable("connect_refused", "it crashed"),
        _ => Outcome::DELIVERED,
    });
    let relay = env.builder(env.subscription(), fast()).apply(apply).build().expect("built");
    one_dies_of_1_120(&env, &relay).await;
}

#[tokio::test(start_paused = true)]
async fn a_scheduled_run_probes_a_destination_that_was_down_in_the_one_before() {
    let (env, sink, relay) = dead_destination(Capabilities::default()).await;
    assert_eq!(relay.drain(None).await.expect("drained").delivered, 0);
    sink.down(false);
    tokio::time::sleep(60 * S).await;
    assert_eq!(relay.drain(None).await.expect("drained").delivered, 200);
    sink.assert_in_order();
    assert_eq!(env.stats().await.dispatched, 200);
}

/// The lane that probes first may have nothing to probe with, in each run.
#[tokio::test(start_paused = true)]
async fn a_bounded_run_probes_from_each_of_its_lanes() {
    for key in 0..8 {
        let env = TestEnv::with_lanes(3).await;
        env.append([event(key, 1)]).await;
        let (sink, relay) = env.recorded(Capabilities::default(), fast());
        sink.down(true);
        assert_eq!(relay.drain(None).await.expect("drained").delivered, 0);
        sink.down(false);
        tokio::time::sleep(60 * S).await;
        assert_eq!(relay.drain(None).await.expect("drained").delivered, 1, "key {key}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_scheduled_run_that_is_cut_short_goes_on_once_the_destination_is_back() {
    for capabilities in memory::all_capabilities() {
        let (env, sink, relay) = dead_destination(capabilities).await;
        let stop = CancellationToken::new();
        let operate = async {
            tokio::time::sleep(DAY + 600 * S).await;
            assert!((1..80).contains(&sink.calls()), "{} calls to a dead destination in ten minutes", sink.calls());
            sink.down(false);
            tokio::time::sleep(40 * S).await;
            assert_eq!(env.stats().await.dispatched, 200, "{capabilities:?}");
            env.append([event(0, 200)]).await;
            tokio::time::sleep(3_600 * S).await;
            assert_eq!(sink.arrivals().len(), 200, "what comes later waits for its time");
            stop.cancel();
        };
        run_daily(&relay, &stop, operate).await;
        sink.assert_in_order();
    }
}

/// The relay that has its lanes knows more.
#[tokio::test(start_paused = true)]
async fn a_relay_without_lanes_says_nothing_about_the_destination() {
    let (env, _, relay) = dead_destination(Capabilities::default()).await;
    env.run_while(&relay, async {
        tokio::time::sleep(10 * S).await;
        assert!(relay.metrics().outage().is_some());
        let pause = Pause { until: None, by: "ada".into(), why: "maintenance".into() };
        env.store.pause(&env.subscription().name, Some(&pause)).await.expect("paused");
        tokio::time::sleep(60 * S).await;
        assert_eq!((relay.metrics().outage(), relay.metrics().breaker_state()), (None, BreakerState::Closed));
    })
    .await;
}

/// Nothing is left to send, so there is no way to ask whether the destination is back.
#[tokio::test(start_paused = true)]
async fn a_scheduled_run_with_nothing_left_rests_until_its_time() {
    let (env, sink, relay) = dead_destination(Capabilities::default()).await;
    let stop = CancellationToken::new();
    let operate = async {
        tokio::time::sleep(DAY + 60 * S).await;
        let mut ids = Vec::new();
        for state in [State::Pending, State::Retrying, State::Blocked] {
            ids.extend(env.list(state).await.into_iter().map(|row| row.event.id));
        }
        let selection = Selection { ids: Some(ids), ..Selection::default() };
        let discarded =
            env.store.change(&env.subscription().name, &Change::Discard, &selection).await.expect("discarded");
        assert_eq!(discarded.count, 200);
        tokio::time::sleep(3_600 * S).await;
        let calls = sink.calls();
        let batches = relay.metrics().lanes_acquired();
        tokio::time::sleep(3_600 * S).await;
        assert_eq!((sink.calls(), relay.metrics().lanes_acquired()), (calls, batches));
        stop.cancel();
    };
    run_daily(&relay, &stop, operate).await;
}

/// Enough in a row that each call of the destination contains one of them, and they come first.
#[tokio::test(start_paused = true)]
async fn events_that_bring_the_destination_down_keep_the_others_for_minutes_at_most() {
    let ambiguous = || Outcome::Ambiguous { code: "http_503".into(), error: "no".into(), after: None };
    let down = || Outcome::unavailable("stream_wrong_type", "no");
    let wrong: [fn() -> Outcome; 3] = [ambiguous, || throttled(3 * S), down];
    for capabilities in memory::all_capabilities() {
        for (which, outcome) in wrong.iter().enumerate() {
            let env = TestEnv::with((0..220).map(|n| event(n, n))).await;
            let (sink, relay) = env.recorded(capabilities, fast());
            let outcome = *outcome;
            sink.script(move |delivery| if delivery.event.version < Some(20) { outcome() } else { Outcome::DELIVERED });
            env.run_for(&relay, 1_200 * S).await;
            let stats = env.stats().await;
            assert_eq!(stats.dispatched, 200, "{capabilities:?}, {which}: {stats:?}");
            sink.assert_in_order();
        }
    }
}

/// No read reaches past them, and the window has more behind them.
#[tokio::test(start_paused = true)]
async fn more_failing_events_than_a_read_brings_keep_the_others_for_two_hours_at_most() {
    // How many a read brings, how many fail, and how many of them share each key.
    for (events, failing, shared) in [(20, 25, 1), (100, 600, 300)] {
        let failing_keys = (0..failing).map(|n| event(n / shared, n));
        let env = TestEnv::with(failing_keys.chain((failing..failing + 10).map(|n| event(n, n)))).await;
        let batch = BatchLimit { events, ..BatchLimit::default() };
        let (sink, relay) = env.recorded(Capabilities::default(), RelaySettings { batch, ..fast() });
        sink.script(move |delivery| match memory::version(delivery) < failing as i64 {
            true => Outcome::ambiguous("http_503", "no"),
            false => Outcome::DELIVERED,
        });
        env.run_while(&relay, async {
            let arrived = tokio::time::timeout(7_200 * S, sink.wait_for(10)).await;
            arrived.unwrap_or_else(|_| panic!("{failing} fail: {} of 10", sink.arrivals().len()));
        })
        .await;
    }
}

/// Nobody can tell a long outage from events that always fail, and rows for all would be many.
#[tokio::test(start_paused = true)]
async fn a_long_outage_leaves_one_row_however_many_events_wait() {
    let env = TestEnv::with((0..1_000).map(|n| event(n % 20, n))).await;
    let batch = BatchLimit { events: 20, ..BatchLimit::default() };
    let capabilities = Capabilities { concurrency: 1, ..Capabilities::default() };
    let (sink, relay) = env.recorded(capabilities, RelaySettings { batch, ..fast() });
    sink.down(true);
    env.run_while(&relay, async {
        tokio::time::sleep(7_200 * S).await;
        let rows = env.list(State::Retrying).await;
        assert_eq!(
            rows.iter().map(|row| (row.attempts, row.code.as_deref())).collect::<Vec<_>>(),
            [(0, Some("connect_refused"))]
        );
        assert!(sink.calls() > 100 && env.list(State::Blocked).await.len() < 50, "of one key");
        sink.down(false);
        tokio::time::sleep(60 * S).await;
    })
    .await;
    assert_eq!((env.stats().await.dispatched, sink.arrivals().len()), (1_000, 1_000));
    assert!(sink.arrivals().iter().all(|arrival| arrival.attempt == 1));
}

/// What found the destination down is gone, and nothing else comes for days.
#[tokio::test(start_paused = true)]
async fn an_outage_ends_with_the_last_event_that_could_tell() {
    let env = TestEnv::with([event(1, 0)]).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    sink.down(true);
    env.run_while(&relay, async {
        tokio::time::sleep(30 * S).await;
        assert!(relay.metrics().outage().is_some());
        let name = env.subscription().name;
        let changed = env.store.change(&name, &Change::Discard, &Selection::default()).await;
        assert_eq!(changed.expect("discarded").count, 1);
        tokio::time::sleep(600 * S).await;
        assert_eq!(relay.metrics().outage(), None);
        // The next event finds it down again, at no cost.
        env.append([event(2, 1)]).await;
        tokio::time::sleep(30 * S).await;
        assert!(relay.metrics().outage().is_some());
    })
    .await;
    assert_eq!(env.stats().await.retrying, 1);
    assert_eq!(env.list(State::Retrying).await[0].attempts, 0);
}

/// A sink that takes whole calls or nothing, e.g. a pipe whose reader has stopped.
#[tokio::test(start_paused = true)]
async fn a_call_that_never_ends_costs_no_attempts_where_it_says_nothing_about_an_event() {
    let env = TestEnv::with((0..10).map(|n| event(n, n))).await;
    let capabilities = Capabilities { batch_max: 500, concurrency: 1, prefix: true, system: None };
    let (sink, relay) = env.recorded(capabilities, fast());
    sink.script(|_| Answer::Hang);
    env.run_while(&relay, async {
        tokio::time::sleep(35 * S).await;
        let rows = env.list(State::Retrying).await;
        assert!(rows.iter().all(|row| row.attempts == 0), "{rows:?}");
        assert!(relay.metrics().breaker_opened() > 0);
        sink.script(|_| Outcome::DELIVERED);
        tokio::time::sleep(60 * S).await;
    })
    .await;
    assert_eq!(env.stats().await.dispatched, 10);
}

/// Counts looks for due rows.
#[derive(Default)]
struct Looks(AtomicUsize);

#[async_trait]
impl Wire for Looks {
    async fn carry(&self, call: Arc<Call>) -> Result<()> {
        self.0.fetch_add(usize::from(call.operation == "due"), Ordering::Relaxed);
        call.execute();
        Ok(())
    }
}

/// How many due rows were sent before an outage was found says nothing of the time after it.
#[tokio::test(start_paused = true)]
async fn after_an_outage_several_due_rows_are_read_at_once() {
    let env = TestEnv::with((0..200).map(|n| event(n, n))).await;
    let sink = Recorder::new(Capabilities { concurrency: 1, ..Capabilities::default() });
    let is_found = AtomicBool::new(false);
    sink.script(move |delivery| match delivery.attempt {
        1 => Outcome::retry("http_500", "once"),
        _ if !is_found.swap(true, Ordering::Relaxed) => Outcome::unavailable("connect_refused", "down"),
        _ => Outcome::DELIVERED,
    });
    let looks = Arc::new(Looks::default());
    let relay = env.relay_on(Arc::new(env.store.client(Some(looks.clone()))), sink, fast());
    env.run_for(&relay, 20 * S).await;
    assert_eq!(env.stats().await.dispatched, 200);
    let looks = looks.0.load(Ordering::Relaxed);
    assert!(looks < 150, "{looks} looks, of which about 40 were due to the time");
}
