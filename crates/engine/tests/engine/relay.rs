//! The promises of a relay, one named case each, on the memory store under paused time.

use std::sync::Arc;
use std::time::Duration;

use postbox_core::{
    Admin as _, BatchLimit, Capabilities, Change, Delivery, Inspect, Log as _, LogName, NewEvent, OnDead, Ordering,
    Outcome, Selection, State,
};
use postbox_engine::{Every, Relay, RelaySettings, Sweeper, TokioClock};
use postbox_memory::MemoryStore;
use postbox_router::{InProcessBus, handler_sink};
use tokio_util::sync::CancellationToken;

use postbox_testkit::memory::{self, Answer, Recorder, TestEnv, event, fast};
use postbox_testkit::warnings::Warnings;

const S: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn drain_delivers_everything_once_in_key_order() {
    for capabilities in memory::all_capabilities() {
        let env = TestEnv::with((0..500).map(|n| event(n % 7, n))).await;
        let sink = Recorder::new(capabilities);
        let relay = env
            .relay(sink.clone(), RelaySettings { batch: BatchLimit { events: 30, ..BatchLimit::default() }, ..fast() });
        let drained = relay.drain(None).await.expect("drained");
        assert_eq!((drained.fetched, drained.delivered, drained.failed, drained.dead), (500, 500, 0, 0));
        sink.assert_in_order();
        assert_eq!(sink.arrivals().len(), 500);
        assert_eq!(relay.drain(None).await.expect("again").fetched, 0);
        assert_eq!(env.stats().await.dispatched, 500);
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_event_holds_its_key_and_nothing_else() {
    for capabilities in memory::all_capabilities() {
        let env = TestEnv::with((0..40).map(|n| event(n % 4, n))).await;
        let (sink, relay) = env.recorded(capabilities, fast());
        // Key 1's first event fails once.
        sink.script(|delivery| match (memory::version(delivery), delivery.attempt) {
            (1, 1) => Outcome::retry("http_500", "boom"),
            _ => Outcome::DELIVERED,
        });
        let first = relay.drain(None).await.expect("drained");
        assert_eq!((first.delivered, first.failed), (30, 1), "{capabilities:?}");
        let stats = env.stats().await;
        assert_eq!((stats.retrying, stats.blocked), (1, 9));
        tokio::time::sleep(2 * S).await;
        assert_eq!(relay.drain(None).await.expect("drained").delivered, 10);
        sink.assert_in_order();
        assert_eq!(env.stats().await.dispatched, 40);
    }
}

#[tokio::test(start_paused = true)]
async fn an_event_dies_at_the_cap_and_its_key_goes_on_or_halts() {
    for (on_dead, delivered) in [(OnDead::Continue, 2), (OnDead::Halt, 0)] {
        let mut env = TestEnv::with((0..3).map(|n| event(1, n))).await;
        env.on_dead = on_dead;
        let (sink, relay) = env.recorded(Capabilities::default(), fast());
        sink.answers(0, Outcome::retry("http_500", "never"));
        env.run_for(&relay, 120 * S).await;
        let stats = env.stats().await;
        assert_eq!((stats.dead, stats.dispatched), (1, delivered), "{on_dead:?}");
        let dead = env.list(State::Dead).await;
        assert_eq!(dead[0].attempts, fast().retry.attempts_max);
        assert_eq!(dead[0].code.as_deref(), Some("http_500"));
        assert_eq!(dead[0].error.as_deref(), Some("never"));
        let causes = relay.metrics().failures_by_cause();
        assert_eq!(causes[&("t".to_owned(), "http_500".to_owned())], u64::from(fast().retry.attempts_max));
    }
}

#[tokio::test(start_paused = true)]
async fn a_permanent_failure_dies_at_once_and_a_replay_has_a_fresh_dedupe_id() {
    let env = TestEnv::with([event(1, 0)]).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    sink.script(|delivery| match delivery.replay {
        0 => Outcome::dead("http_422", "poison"),
        _ => Outcome::DELIVERED,
    });
    assert_eq!(relay.drain(None).await.expect("drained").dead, 1);
    assert_eq!(relay.drain(None).await.expect("drained").fetched, 0, "the dead are not retried on their own");
    let name = env.subscription().name;
    assert_eq!(env.store.change(&name, &Change::Retry, &Selection::default()).await.expect("requeued").count, 1);
    assert_eq!(relay.drain(None).await.expect("drained").delivered, 1);
    assert!(sink.arrivals()[0].dedupe_id.ends_with("-r1"));
}

#[tokio::test(start_paused = true)]
async fn a_panic_a_timeout_and_a_broken_contract_are_failed_attempts() {
    let env = TestEnv::with((0..4).map(|n| event(n, n))).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    sink.script(|delivery| match (memory::version(delivery), delivery.attempt) {
        (0, 1) => Answer::Panic,
        (1, 1) => Answer::Hang,
        (2, 1) => Answer::SayTooMuch,
        _ => Outcome::DELIVERED.into(),
    });
    env.run_for(&relay, 120 * S).await;
    assert_eq!(env.stats().await.dispatched, 4);
    let codes: Vec<String> = relay.metrics().failures_by_cause().into_keys().map(|(_, code)| code).collect();
    assert_eq!(codes, ["panic", "sink_contract", "timeout"]);
}

#[tokio::test(start_paused = true)]
async fn a_sink_that_fails_at_everything_fills_no_log() {
    for (panics, text) in [(true, "sink panicked"), (false, "sink contract broken")] {
        let env = TestEnv::with((0..400).map(|n| event(n, n))).await;
        let (sink, relay) = env.recorded(Capabilities::default(), fast());
        sink.script(move |_| if panics { Answer::Panic } else { Answer::SayTooMuch });
        let (warnings, _hears) = Warnings::hear();
        env.run_for(&relay, 10 * S).await;
        assert!(relay.metrics().failures_by_cause().values().sum::<u64>() >= 400);
        let lines = warnings.all().iter().filter(|line| line.contains(text)).count();
        assert!((1..=12).contains(&lines), "{lines}");
    }
}

#[tokio::test(start_paused = true)]
async fn one_poison_key_of_a_hundred_does_not_slow_the_others() {
    // The poison event hangs until the timeout each time, which is the worst kind.
    let time = async |poison: bool| {
        let env = TestEnv::new().await;
        let (sink, relay) = env.recorded(Capabilities::default(), fast());
        sink.script(move |delivery| {
            let hangs = poison && delivery.event.key.as_ref().is_some_and(|key| key.as_str() == "7");
            if hangs { Answer::Hang } else { Outcome::DELIVERED.into() }
        });
        env.run_while(&relay, async {
            env.append_each(0..6_000, 100, Duration::from_millis(10)).await;
            tokio::time::sleep(10 * S).await;
        })
        .await;
        sink.assert_in_order();
        let mut waits: Vec<Duration> = sink.arrivals().iter().map(|arrival| arrival.waited).collect();
        waits.sort_unstable();
        assert_eq!(waits.len(), if poison { 5_940 } else { 6_000 });
        (waits[waits.len() / 2], waits[waits.len() * 99 / 100], waits[waits.len() - 1])
    };
    let (calm, poisoned) = (time(false).await, time(true).await);
    assert!(poisoned.1 <= calm.1 + Duration::from_millis(20), "{calm:?} {poisoned:?}");
    assert!(poisoned.2 <= 2 * S, "nobody waits for the poison's timeout: {poisoned:?}");
}

#[tokio::test(start_paused = true)]
async fn a_destination_slower_than_its_keys_are_busy_is_read_for_no_more_than_it_takes() {
    for takes in [300, 700, 2_000].map(Duration::from_millis) {
        let env = TestEnv::new().await;
        let (sink, relay) = env.recorded(Capabilities { concurrency: 64, ..Capabilities::default() }, fast());
        sink.takes(takes);
        // 40 keys with 25 events a second each: eight to fifty times what one call after the other
        // can carry.
        env.run_while(&relay, async {
            env.append_each(0..10_000, 40, Duration::from_millis(1)).await;
            tokio::time::sleep(20 * S).await;
        })
        .await;
        sink.assert_in_order();
        let metrics = relay.metrics();
        let (fetched, delivered) = (metrics.fetched(), metrics.delivered());
        // Each event is read once in the stream. A returning row is delivered, or is one of few
        // behind it.
        assert!(fetched <= 10_000 + 3 * delivered, "{takes:?}: {fetched} read for {delivered} delivered");
        let possible = 40 * 30 * 1_000 / takes.as_millis() as u64;
        assert!(delivered >= possible / 2, "{takes:?}: {delivered} of {possible}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_graceful_stop_repeats_nothing() {
    for capabilities in memory::all_capabilities() {
        let env = TestEnv::with((0..2_000).map(|n| event(n % 50, n))).await;
        let sink = Recorder::new(capabilities);
        sink.takes(Duration::from_millis(40));
        let mut runs = 0;
        while env.stats().await.pending > 0 {
            runs += 1;
            let batch = BatchLimit { events: 60, ..BatchLimit::default() };
            let relay = env.relay(sink.clone(), RelaySettings { batch, ..fast() });
            env.run_for(&relay, Duration::from_millis(100 + runs * 7)).await;
        }
        assert!(runs > 3, "the stops fell into the work: {runs}");
        sink.assert_in_order();
        assert_eq!(sink.arrivals().len(), 2_000, "{capabilities:?}: no event twice");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stop_does_not_wait_longer_than_the_drain_time() {
    let env = TestEnv::with([event(1, 0)]).await;
    let settings = RelaySettings { drain_timeout: 2 * S, deliver_timeout: 300 * S, ..fast() };
    let (sink, relay) = env.recorded(Capabilities::default(), settings);
    sink.script(|_| Answer::Hang);
    let began = tokio::time::Instant::now();
    env.run_for(&relay, S).await;
    assert!(began.elapsed() < 4 * S, "{:?}", began.elapsed());
    assert_eq!(env.stats().await.pending, 1);
}

/// A scheduled run keeps to the drain time too. What is behind the call that hangs was delivered,
/// and must be settled.
#[tokio::test(start_paused = true)]
async fn a_stop_of_a_bounded_run_does_not_wait_longer_than_the_drain_time() {
    let env = TestEnv::with((0..10).map(|n| event(n, n))).await;
    let settings = RelaySettings { drain_timeout: 2 * S, deliver_timeout: 300 * S, ..fast() };
    let (sink, relay) = env.recorded(Capabilities::default(), settings);
    sink.script(|delivery| match memory::version(delivery) {
        0 => Answer::Hang,
        _ => Answer::Say(Outcome::DELIVERED),
    });
    let stop = CancellationToken::new();
    let every = Every(10 * S);
    let stopping = async {
        tokio::time::sleep(20 * S).await;
        stop.cancel();
    };
    let (ended, ()) = tokio::join!(relay.run_on(&every, stop.clone()), stopping);
    ended.expect("ran");
    assert!(env.now().as_second() < 25, "{}", env.now());
    assert_eq!(env.stats().await.dispatched, 9);
    let next = env.store.acquire(&env.subscription().name, &"next".parse().expect("a name"), &[], S).await;
    assert_eq!(next.expect("asked").lease.map(|lease| lease.crashes), Some(0), "the lane was given back");
}

#[tokio::test(start_paused = true)]
async fn without_a_next_time_a_schedule_waits_for_the_stop() {
    struct Never;
    impl postbox_engine::Schedule for Never {
        fn next_after(&self, _: jiff::Timestamp) -> Option<jiff::Timestamp> {
            None
        }
    }
    let env = TestEnv::with([event(1, 0)]).await;
    let relay = env.relay(Recorder::new(Capabilities::default()), fast());
    let stop = CancellationToken::new();
    let stopping = async {
        tokio::time::sleep(60 * S).await;
        stop.cancel();
    };
    let running = async {
        relay.run_on(&Never, stop.clone()).await.expect("ran");
        assert!(stop.is_cancelled(), "a service ends with the first of its relays");
    };
    tokio::join!(running, stopping);
}

/// A column, a label or a log line does not take what somebody else put into a code.
#[tokio::test(start_paused = true)]
async fn a_code_is_cleaned_before_it_is_stored() {
    let env = TestEnv::with([event(1, 0)]).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    sink.script(|_| Outcome::dead(format!("a\0b\n{}", "x".repeat(200)), "no"));
    relay.drain(None).await.expect("drained");
    let code = env.list(State::Dead).await[0].code.clone().expect("a code");
    assert_eq!((code.len() <= 128 + 8, code.contains(char::is_control)), (true, false), "{code:?}");
}

/// An event that a relay has read is sent whatever happens to it. With a rate, that must not be
/// long ago.
#[tokio::test(start_paused = true)]
async fn a_discarded_event_is_not_sent_minutes_later() {
    let env = TestEnv::with((0..100).map(|n| event(n, n))).await;
    let (sink, relay) = env.recorded(Capabilities::default(), RelaySettings { rate: "1/s".parse().ok(), ..fast() });
    env.run_while(&relay, async {
        tokio::time::sleep(2 * S).await;
        let id = env.list(State::Pending).await.iter().find(|it| it.event.version == Some(50)).map(|it| it.event.id);
        let which = Selection { ids: id.map(|id| vec![id]), ..Selection::default() };
        let name = env.subscription().name;
        let changed = env.store.change(&name, &Change::Discard, &which).await.expect("discarded");
        assert_eq!(changed.count, 1);
        tokio::time::sleep(300 * S).await;
    })
    .await;
    assert_eq!((sink.arrivals().len(), sink.versions().contains(&50)), (99, false));
}

#[tokio::test(start_paused = true)]
async fn stop_before_start_and_stop_twice_are_fine() {
    let env = TestEnv::new().await;
    let relay = env.relay(Recorder::new(Capabilities::default()), fast());
    let stop = CancellationToken::new();
    stop.cancel();
    stop.cancel();
    relay.run(stop.clone()).await.expect("stopped before start");
    relay.run(stop).await.expect("and again");
}

#[tokio::test(start_paused = true)]
async fn a_relay_runs_once_at_a_time() {
    let env = TestEnv::new().await;
    let relay = env.relay(Recorder::new(Capabilities::default()), fast());
    env.run_while(&relay, async {
        tokio::time::sleep(S).await;
        let refused = relay.run(CancellationToken::new()).await.expect_err("refused");
        assert_eq!(refused.code(), "relay_running");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn without_a_destination_events_stay_pending() {
    let env = TestEnv::with([event(1, 0)]).await;
    let relay = Relay::builder(env.store.clone(), env.subscription()).build().expect("built");
    env.run_for(&relay, 60 * S).await;
    assert_eq!(relay.drain(None).await.expect("nothing").fetched, 0);
    assert_eq!(env.stats().await.pending, 1);
}

#[tokio::test(start_paused = true)]
async fn a_delayed_event_waits_and_does_not_hold_its_key() {
    let env = TestEnv::new().await;
    let at = env.now() + 60 * S;
    env.append([event(1, 0).deliver_at(at), event(1, 1)]).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    env.run_for(&relay, 10 * S).await;
    assert_eq!(sink.versions(), [1]);
    assert_eq!(env.stats().await.scheduled, 1);
    env.run_for(&relay, 55 * S).await;
    let waited = sink.arrivals()[1].waited;
    assert!(waited >= 60 * S && waited < 61 * S, "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn a_gone_destination_pauses_the_subscription_until_a_person_resumes() {
    let env = TestEnv::with((0..10).map(|n| event(n, n))).await;
    let one_by_one = Capabilities { concurrency: 1, ..Capabilities::default() };
    let (sink, relay) = env.recorded(one_by_one, fast());
    sink.answers(3, Outcome::Gone { code: "http_410".into(), error: "gone\0".into() });
    env.run_for(&relay, 60 * S).await;
    let stats = env.stats().await;
    assert_eq!((stats.dispatched, stats.dead, stats.pending), (3, 1, 6));
    let name = env.subscription().name;
    let paused = env.store.subscriptions().await.expect("listed")[0].paused.clone().expect("paused");
    assert_eq!(paused.why, "http_410: gone\u{fffd}", "without NUL, which no store takes");
    env.store.pause(&name, None).await.expect("resumed");
    env.run_for(&relay, 10 * S).await;
    assert_eq!(env.stats().await.dispatched, 9);
}

#[tokio::test(start_paused = true)]
async fn a_crashed_relays_work_is_taken_over_within_lease_plus_a_second() {
    let env = TestEnv::with((0..10).map(|n| event(n, n))).await;
    let stuck = Recorder::new(Capabilities::default());
    stuck.script(|_| Answer::Hang);
    let settings = RelaySettings { deliver_timeout: 300 * S, ..fast() };
    let ttl = settings.lease_ttl;
    let victim = env.relay(stuck.clone(), settings);
    let successor_sink = Recorder::new(Capabilities::default());
    let successor = env.relay(successor_sink.clone(), fast());
    let victim_task = tokio::spawn(async move { victim.run(CancellationToken::new()).await });
    tokio::time::sleep(S).await;
    env.run_while(&successor, async {
        tokio::time::sleep(S).await;
        assert!(successor_sink.arrivals().is_empty(), "the standby waits");
        victim_task.abort();
        let crashed = tokio::time::Instant::now();
        successor_sink.wait_for(10).await;
        assert!(crashed.elapsed() <= ttl + S, "{:?}", crashed.elapsed());
    })
    .await;
    assert_eq!(successor.metrics().lane_takeovers(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_lane_that_was_given_back_is_not_taken_over() {
    let env = TestEnv::with([event(0, 0)]).await;
    let relays: Vec<_> = (0..2).map(|_| env.relay(Recorder::new(Capabilities::default()), fast())).collect();
    env.run_for(&relays[0], S).await;
    env.run_for(&relays[1], S).await;
    assert_eq!(relays[1].metrics().lanes_acquired(), 1);
    assert_eq!(relays[1].metrics().lane_takeovers(), 0);
}

#[tokio::test(start_paused = true)]
async fn replicas_share_lanes_evenly_and_a_newcomer_gets_its_share() {
    let env = TestEnv::with_lanes(4).await;
    let relays: Vec<_> = (0..2).map(|_| env.relay(Recorder::new(Capabilities::default()), fast())).collect();
    let stop = CancellationToken::new();
    let held = || relays.iter().map(|relay| relay.metrics().lanes_held()).collect::<Vec<_>>();
    let observe = async {
        tokio::time::sleep(5 * S).await;
        assert_eq!(held(), [4, 0]);
        tokio::time::sleep(30 * S).await;
        assert_eq!(held(), [2, 2]);
        stop.cancel();
    };
    let late = async {
        tokio::time::sleep(10 * S).await;
        relays[1].run(stop.clone()).await
    };
    let (first, second, ()) = tokio::join!(relays[0].run(stop.clone()), late, observe);
    first.and(second).expect("ran");
}

/// A restart, fewer replicas, or a `drain` beside them: nobody waits for a lease that was released.
#[tokio::test(start_paused = true)]
async fn who_stops_leaves_its_share_to_the_others_at_once() {
    let env = TestEnv::with_lanes(4).await;
    let relays: Vec<_> = (0..2).map(|_| env.relay(Recorder::new(Capabilities::default()), fast())).collect();
    let held = |n: usize| relays[n].metrics().lanes_held();
    let (stop, leave) = (CancellationToken::new(), CancellationToken::new());
    let observe = async {
        tokio::time::sleep(60 * S).await;
        assert_eq!((held(0), held(1)), (2, 2));
        leave.cancel();
        tokio::time::sleep(2 * S).await;
        assert_eq!((held(0), held(1)), (4, 0), "the lease is {:?} long", fast().lease_ttl);
        assert_eq!(relays[1].drain(None).await.expect("drained").fetched, 0);
        tokio::time::sleep(30 * S).await;
        assert_eq!(held(0), 4, "it has lost none to the one that is gone again");
        stop.cancel();
    };
    let (first, second, ()) = tokio::join!(relays[0].run(stop.clone()), relays[1].run(leave.clone()), observe);
    first.and(second).expect("ran");
    let begun = tokio::time::Instant::now();
    let (stop, relay) = (CancellationToken::new(), &relays[1]);
    let taken = async {
        while relay.metrics().lanes_held() < 4 {
            tokio::time::sleep(S / 10).await;
        }
        stop.cancel();
    };
    let (ran, ()) = tokio::join!(relay.run(stop.clone()), taken);
    ran.expect("ran");
    assert!(begun.elapsed() < S, "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn unordered_subscriptions_send_everything_at_once() {
    let env = TestEnv::with((0..64).map(|n| event(1, n))).await;
    let sink = Recorder::new(Capabilities { concurrency: 64, ..Capabilities::default() });
    sink.takes(S);
    let subscription = postbox_core::Subscription { ordering: Ordering::None, ..env.subscription() };
    let relay = env.builder(subscription, fast()).sink(sink.clone()).build().expect("built");
    let began = tokio::time::Instant::now();
    assert_eq!(relay.drain(None).await.expect("drained").delivered, 64);
    assert!(began.elapsed() < 2 * S, "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_local_append_wakes_an_idle_relay() {
    let env = TestEnv::new().await;
    let (sink, relay) = env.recorded(Capabilities::default(), RelaySettings { poll_max: 20 * S, ..fast() });
    env.run_while(&relay, async {
        tokio::time::sleep(300 * S).await;
        env.append([event(1, 0)]).await;
        sink.wait_for(1).await;
        assert!(sink.arrivals()[0].waited < Duration::from_millis(50), "{:?}", sink.arrivals()[0].waited);
    })
    .await;
    assert!(relay.metrics().polls_empty() < 400, "{} polls in five idle minutes", relay.metrics().polls_empty());
}

#[tokio::test(start_paused = true)]
async fn the_bus_retries_when_any_handler_fails() {
    let env = TestEnv::with([event(1, 0), NewEvent::json("unwanted", "{}")]).await;
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let (one, two) = (seen.clone(), seen.clone());
    let bus = InProcessBus::new()
        .on("t", move |delivery| {
            one.lock().unwrap().push("one");
            async move { if delivery.attempt == 1 { Err("not yet") } else { Ok(()) } }
        })
        .and_then(|bus| {
            bus.on("*", move |_| {
                two.lock().unwrap().push("two");
                async {}
            })
        })
        .expect("patterns");
    let relay = env.builder(env.subscription(), fast()).sink(Arc::new(bus)).build().expect("built");
    env.run_for(&relay, 10 * S).await;
    assert_eq!(env.stats().await.dispatched, 2);
    assert_eq!(seen.lock().unwrap().iter().filter(|name| **name == "one").count(), 2);
    assert_eq!(seen.lock().unwrap().iter().filter(|name| **name == "two").count(), 3);
}

#[tokio::test(start_paused = true)]
async fn scheduled_runs_drain_and_sweeps_prune() {
    let env = TestEnv::with((0..5).map(|n| event(n, n))).await;
    let sink = handler_sink(|_: Delivery| async {});
    let relay = env.builder(env.subscription(), fast()).sink(Arc::new(sink)).build().expect("built");
    let stop = CancellationToken::new();
    let clock = Arc::new(TokioClock::simulated(env.now()));
    let sweeper = Sweeper::new(Arc::new((*env.store).clone()), vec![LogName::outbox()], clock)
        .events_older_than(60 * S)
        .schedule(Every(30 * S));
    let operate = async {
        tokio::time::sleep(15 * S).await;
        assert_eq!(env.stats().await.dispatched, 5);
        tokio::time::sleep(120 * S).await;
        assert_eq!(env.store.count(&LogName::outbox()).await.expect("counted").events, 0);
        stop.cancel();
    };
    let every = Every(10 * S);
    let ((), ended, ()) = tokio::join!(sweeper.run(stop.clone()), relay.run_on(&every, stop.clone()), operate);
    ended.expect("ran");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_comes_back_is_served_within_two_seconds() {
    // Outages both shorter and longer than the lease.
    for outage in [S, 3 * S, 60 * S, 3_600 * S] {
        let env = TestEnv::new().await;
        let (cable, sink, relay) = env.cuttable();
        env.run_while(&relay, async {
            env.append([event(1, 0)]).await;
            sink.wait_for(1).await;
            // By then it is settled.
            tokio::time::sleep(S / 10).await;
            cable.cut(true);
            tokio::time::sleep(outage).await;
            env.append([event(1, 1)]).await;
            cable.cut(false);
            let back = tokio::time::Instant::now();
            sink.wait_for(2).await;
            assert!(back.elapsed() <= 2 * S, "{:?} after an outage of {outage:?}", back.elapsed());
            tokio::time::sleep(2 * S).await;
            assert_eq!((relay.store_outage(), relay.failing_lanes()), (None, vec![]), "after {outage:?}");
        })
        .await;
        assert_eq!(sink.arrivals().len(), 2, "and nothing twice");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stop_while_the_store_is_down_ends_in_time() {
    let env = TestEnv::new().await;
    let (cable, _, relay) = env.cuttable();
    let asked = env
        .run_while(&relay, async {
            tokio::time::sleep(S).await;
            cable.cut(true);
            tokio::time::sleep(2 * S).await;
            tokio::time::Instant::now()
        })
        .await;
    assert!(asked.elapsed() <= fast().drain_timeout, "{:?}", asked.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_store_without_schema_is_a_permanent_error() {
    use postbox_core::Migrate;
    let env = TestEnv::new().await;
    env.store.down(true).await.expect("down");
    let relay = env.relay(Recorder::new(Capabilities::default()), fast());
    assert_eq!(relay.run(CancellationToken::new()).await.expect_err("permanent").code(), "schema_missing");
}

#[tokio::test]
async fn starting_and_stopping_at_any_moment_is_clean() {
    let store = Arc::new(MemoryStore::new(Arc::new(TokioClock::new())));
    let env = TestEnv::on(store, 2).await;
    let sink = Recorder::new(Capabilities::default());
    let relays: Vec<_> = (0..3).map(|_| Arc::new(env.relay(sink.clone(), fast()))).collect();
    for turn in 0..60_u64 {
        env.append([event(turn, turn)]).await;
        let stop = CancellationToken::new();
        let run = |relay: Arc<Relay>, stop| tokio::spawn(async move { relay.run(stop).await });
        let runs: Vec<_> = relays.iter().map(|relay| run(relay.clone(), stop.clone())).collect();
        for _ in 0..turn {
            tokio::task::yield_now().await;
        }
        stop.cancel();
        for run in runs {
            tokio::time::timeout(60 * S, run).await.expect("stops in time").expect("no panic").expect("no error");
        }
    }
    relays[0].drain(None).await.expect("drained");
    assert_eq!(sink.arrivals().len(), 60);
}

#[tokio::test(start_paused = true)]
async fn listing_knows_what_waits() {
    let env = TestEnv::with([event(1, 0), event(1, 1)]).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    sink.script(|_| Outcome::retry("http_503", "later"));
    relay.drain(None).await.expect("drained");
    assert_eq!(env.list(State::Retrying).await[0].code.as_deref(), Some("http_503"));
    assert_eq!(env.list(State::Blocked).await.len(), 1);
}
