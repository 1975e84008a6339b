//! A subscription with a rate limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::join_all;
use postbox_core::{Admin as _, Capabilities, Error, ErrorKind, Log, Outcome, Pause, RetryPolicy, Subscription};
use postbox_engine::{Relay, RelaySettings, SharedRate};
use tokio_util::sync::CancellationToken;

use postbox_testkit::memory::{self, Cable, FailsAt, Recorder, TestEnv, event, fast};

const S: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn a_rate_is_kept_and_costs_no_attempt() {
    for capabilities in memory::all_capabilities() {
        for lanes in [1, 4] {
            let env = TestEnv::with_lanes(lanes).await;
            env.append((0..500).map(|n| event(n % 50, n))).await;
            let (sink, relay) = env.recorded(capabilities, RelaySettings { rate: "50/s".parse().ok(), ..fast() });
            // The first attempt of every tenth event fails. Its second attempt counts towards the
            // rate too.
            sink.script(|delivery| match (memory::version(delivery) % 10, delivery.attempt) {
                (0, 1) => Outcome::retry("http_500", "boom"),
                _ => Outcome::DELIVERED,
            });
            let began = tokio::time::Instant::now();
            env.run_while(&relay, sink.wait_for(500)).await;
            let took = began.elapsed();
            // 550 calls at 50 a second take 11 s, minus a burst. With a sink that takes whole
            // chunks, the events behind a failure were sent too, and are sent again.
            assert!((10 * S..25 * S).contains(&took), "{took:?} for {capabilities:?}, {lanes} lanes");
            assert!(sink.arrivals().iter().all(|arrival| arrival.attempt <= 2));
            assert_eq!(env.stats().await.dispatched, 500);
            sink.assert_in_order();
        }
    }
}

/// A slow rate reads few events at once, but a probe chooses among as many as without it.
#[tokio::test(start_paused = true)]
async fn with_a_slow_rate_events_that_always_fail_do_not_stand_in_the_way() {
    let env = TestEnv::with((0..40).map(|n| event(n, n))).await;
    let (sink, relay) = env.recorded(Capabilities::default(), RelaySettings { rate: "11/m".parse().ok(), ..fast() });
    sink.script(|delivery| match memory::version(delivery) {
        0..3 => Outcome::ambiguous("http_504", "no answer in time"),
        _ => Outcome::DELIVERED,
    });
    env.run_while(&relay, async {
        tokio::time::timeout(3_600 * S, sink.wait_for(37)).await.expect("an hour is enough for 37 at 11 a minute");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn retries_that_need_all_of_the_rate_leave_half_of_it_to_new_events() {
    for capabilities in memory::all_capabilities() {
        let env = TestEnv::with((0..60).map(|n| event(n, n))).await;
        let retry = RetryPolicy { attempts_max: 1_000, delays: vec![S], ..RetryPolicy::default() };
        let settings = RelaySettings { rate: "5/s".parse().ok(), retry, ..fast() };
        let (sink, relay) = env.recorded(capabilities, settings);
        sink.script(|delivery| match memory::version(delivery) {
            0..60 => Outcome::retry("http_409", "not yet"),
            _ => Outcome::DELIVERED,
        });
        env.run_while(&relay, async {
            tokio::time::sleep(60 * S).await;
            env.append((60..70).map(|n| event(n, n))).await;
            let calls = sink.calls();
            let arrived = tokio::time::timeout(8 * S, sink.wait_for(10)).await;
            arrived.unwrap_or_else(|_| panic!("{} of 10: {capabilities:?}", sink.arrivals().len()));
            assert!(sink.calls() - calls >= 15, "the retries go on: {} calls", sink.calls() - calls);
        })
        .await;
    }
}

/// Each replica gets the share that its lanes are of all lanes; the last one gets the whole rate.
#[tokio::test(start_paused = true)]
async fn replicas_share_a_rate() {
    let env = TestEnv::with_lanes(4).await;
    let settings = RelaySettings { rate: "50/s".parse().ok(), ..fast() };
    let sink = Recorder::new(Capabilities::default());
    let relays: Vec<_> = (0..2).map(|_| env.relay(sink.clone(), settings.clone())).collect();
    let stops = [CancellationToken::new(), CancellationToken::new()];
    let operate = async {
        while relays.iter().any(|relay| relay.metrics().lanes_held() != 2) {
            tokio::time::sleep(S).await;
        }
        let began = tokio::time::Instant::now();
        env.append((0..1_000).map(|n| event(n % 50, n))).await;
        sink.wait_for(1_000).await;
        let took = began.elapsed();
        // The lanes have different numbers of events, so the last ones go at half the rate.
        assert!((18 * S..30 * S).contains(&took), "{took:?} with two replicas");
        stops[0].cancel();
        tokio::time::sleep(60 * S).await;
        let began = tokio::time::Instant::now();
        env.append((1_000..1_500).map(|n| event(n % 50, n))).await;
        sink.wait_for(1_500).await;
        assert!((9 * S..12 * S).contains(&began.elapsed()), "{:?} with one", began.elapsed());
        stops[1].cancel();
    };
    let (one, two, ()) = tokio::join!(relays[0].run(stops[0].clone()), relays[1].run(stops[1].clone()), operate);
    one.and(two).expect("ran");
    sink.assert_in_order();
}

/// Two subscriptions that share a rate of 50/s: the sink of each, and their relays in this many
/// processes. The second one wants only events of this topic.
fn sharing(env: &TestEnv, processes: usize, topic: &str) -> ([Arc<Recorder>; 2], Vec<Relay>) {
    let sinks = ["*", topic].map(|topic| (topic, Recorder::new(Capabilities::default())));
    let mut relays = Vec::new();
    for _ in 0..processes {
        let rate = Arc::new(SharedRate::new("50/s".parse().expect("a rate")));
        for ((topic, sink), name) in sinks.iter().zip(["one", "two"]) {
            let mut subscription = Subscription { name: name.parse().expect("a name"), ..env.subscription() };
            subscription.filter.topics = vec![topic.parse().expect("a pattern")];
            let builder = env.builder(subscription, fast()).sink(sink.clone()).shared_rate(rate.clone());
            relays.push(builder.build().expect("built"));
        }
    }
    (sinks.map(|(_, sink)| sink), relays)
}

/// Runs these relays of two lanes until `operate` has ended. It begins when they have their shares.
async fn run_all<T>(relays: &[Relay], operate: impl Future<Output = T>) -> T {
    let stop = CancellationToken::new();
    let operating = async {
        // Each process has a relay of both subscriptions.
        while relays.iter().any(|relay| relay.metrics().lanes_held() as usize != 4 / relays.len()) {
            tokio::time::sleep(S).await;
        }
        let outcome = operate.await;
        stop.cancel();
        outcome
    };
    let (ended, outcome) = tokio::join!(join_all(relays.iter().map(|relay| relay.run(stop.clone()))), operating);
    ended.into_iter().for_each(|ended| ended.expect("ran"));
    outcome
}

#[tokio::test(start_paused = true)]
async fn subscriptions_of_one_destination_share_a_rate() {
    for processes in [1, 2] {
        let env = TestEnv::with_lanes(2).await;
        let (sinks, relays) = sharing(&env, processes, "*");
        let operate = async {
            env.append((0..2_000).map(|n| event(n % 50, n))).await;
            tokio::time::sleep(20 * S).await;
            sinks.each_ref().map(|sink| sink.arrivals().len())
        };
        let arrived = run_all(&relays, operate).await;
        let all = arrived[0] + arrived[1];
        assert!((900..=20 * 51).contains(&all), "{arrived:?} in 20 s, {processes} processes");
        assert!(arrived.iter().all(|one| one * 10 >= all * 3), "{arrived:?}, {processes} processes");
    }
}

#[tokio::test(start_paused = true)]
async fn who_sends_nothing_leaves_a_shared_rate_to_the_others() {
    // Idle in the only process, or paused in both.
    for processes in [1, 2] {
        let env = TestEnv::with_lanes(2).await;
        let (sinks, relays) = sharing(&env, processes, if processes == 1 { "idle" } else { "*" });
        let operate = async {
            if processes == 2 {
                let pause = Pause { until: None, by: "me".into(), why: "a test".into() };
                env.store.pause(&relays[1].subscription().name, Some(&pause)).await.expect("paused");
                tokio::time::sleep(10 * S).await;
            }
            let began = tokio::time::Instant::now();
            env.append((0..500).map(|n| event(n % 50, n))).await;
            sinks[0].wait_for(500).await;
            began.elapsed()
        };
        let took = run_all(&relays, operate).await;
        assert!((9 * S..16 * S).contains(&took), "{took:?}, {processes} processes");
        assert_eq!(sinks[1].arrivals().len(), 0);
    }
}

/// Another replica may reach the store, and too slow is the safe side of a limit.
#[tokio::test(start_paused = true)]
async fn who_cannot_reach_its_store_keeps_its_part_of_a_shared_rate() {
    let env = TestEnv::with_lanes(2).await;
    let (cable, rate) = (Arc::new(Cable::default()), Arc::new(SharedRate::new("50/s".parse().expect("a rate"))));
    let logs: [Arc<dyn Log>; 2] = [env.store.clone(), Arc::new(env.store.client(Some(cable.clone())))];
    let sink = Recorder::new(Capabilities::default());
    let relays = logs.into_iter().zip(["one", "two"]).map(|(log, name)| {
        let subscription = Subscription { name: name.parse().expect("a name"), ..env.subscription() };
        let builder = env.builder_on(log, subscription, fast()).sink(sink.clone());
        builder.shared_rate(rate.clone()).build().expect("built")
    });
    let relays: Vec<Relay> = relays.collect();
    let operate = async {
        cable.cut(true);
        tokio::time::sleep(20 * S).await;
        let began = tokio::time::Instant::now();
        env.append((0..500).map(|n| event(n % 50, n))).await;
        sink.wait_for(500).await;
        began.elapsed()
    };
    let took = run_all(&relays, operate).await;
    assert!((18 * S..25 * S).contains(&took), "{took:?} at half of the rate");
}

/// The next try may be long after.
#[tokio::test(start_paused = true)]
async fn who_ends_with_an_error_keeps_its_part_of_a_shared_rate() {
    for is_bounded in [false, true] {
        let env = TestEnv::with_lanes(2).await;
        let (sink, rate) = (Recorder::new(Capabilities::default()), Arc::new(SharedRate::new("50/s".parse().unwrap())));
        let relay = |log: Arc<dyn Log>, name: &str| {
            let subscription = Subscription { name: name.parse().expect("a name"), ..env.subscription() };
            let builder = env.builder_on(log, subscription, fast()).sink(sink.clone());
            builder.shared_rate(rate.clone()).build().expect("built")
        };
        let has_one = AtomicBool::default();
        let no_second = move || {
            let error = || Error::new(ErrorKind::Conflict, "simulate", "table_missing", "it has another name");
            has_one.swap(true, Ordering::SeqCst).then(error)
        };
        let ends = relay(Arc::new(env.store.client(Some(Arc::new(FailsAt("acquire", no_second))))), "ends");
        let ended = match is_bounded {
            false => ends.run(CancellationToken::new()).await,
            true => ends.drain(None).await.map(drop),
        };
        assert_eq!(ended.expect_err("its second lane is missing").code(), "table_missing");
        let operate = async {
            tokio::time::sleep(10 * S).await;
            let began = tokio::time::Instant::now();
            env.append((0..500).map(|n| event(n % 50, n))).await;
            sink.wait_for(500).await;
            began.elapsed()
        };
        let took = env.run_while(&relay(env.store.clone(), "goes-on"), operate).await;
        assert!((18 * S..25 * S).contains(&took), "{took:?} at half of the rate, bounded {is_bounded}");
    }
}

#[tokio::test(start_paused = true)]
async fn bounded_runs_share_a_rate_too() {
    let env = TestEnv::with_lanes(2).await;
    env.append((0..1_000).map(|n| event(n % 50, n))).await;
    let (_, relays) = sharing(&env, 1, "*");
    let relay = &relays[0];
    relay.subscribe(&CancellationToken::new()).await.expect("subscribed");
    // A run that is dropped takes no part of the rate any more.
    let dropped = tokio::time::timeout(2 * S, relays[1].drain(None));
    dropped.await.expect_err("it runs until it is dropped");
    // A lane that another one holds is not waited for.
    let first = env.store.acquire(&relay.subscription().name, &"else".parse().expect("a name"), &[], 5 * S).await;
    let began = tokio::time::Instant::now();
    assert_eq!(first.expect("acquired").lease.expect("free").lane, 0);
    let drained = relay.drain(None).await.expect("drained");
    let (count, took) = (drained.delivered as f64, began.elapsed().as_secs_f64());
    assert!((20.0..30.0).contains(&(count / took)), "{count} in {took} s with one of two lanes");
}

/// A batch of 100 takes 20 s at this rate, and nearly as long at this destination. It may be a
/// stream batch or one of due rows.
#[tokio::test(start_paused = true)]
async fn a_crash_repeats_no_more_than_a_second_of_deliveries() {
    for capabilities in memory::all_capabilities() {
        for (rate, takes) in [("5/s".parse().ok(), Duration::ZERO), (None, 3 * S)] {
            for failing in [false, true] {
                let env = TestEnv::with((0..100).map(|n| event(n % 50, n))).await;
                if failing {
                    let (sink, relay) = env.recorded(capabilities, fast());
                    sink.script(|delivery| match memory::version(delivery) % 10 {
                        0 => Outcome::DELIVERED,
                        _ => Outcome::retry("http_500", "boom"),
                    });
                    env.run_for(&relay, S / 4).await;
                }
                let (sink, relay) = env.recorded(capabilities, RelaySettings { rate, ..fast() });
                sink.takes(takes);
                // Dropped in the middle of a batch.
                let running = tokio::time::timeout(14 * S + S / 2, relay.run(CancellationToken::new()));
                running.await.expect_err("it runs until it is dropped");
                let (arrived, settled) = (sink.arrivals().len(), env.stats().await.dispatched as usize);
                let of_a_second = capabilities.batch_max.max(6);
                assert!(
                    arrived <= settled + of_a_second,
                    "{settled} of {arrived} are settled: {capabilities:?}, rate {rate:?}, failing {failing}"
                );
                assert!(settled >= 32, "{settled} of {arrived}: {capabilities:?}, rate {rate:?}, failing {failing}");
            }
        }
    }
}
