//! A relay whose subscription is removed, renamed or gets other lanes while it runs.

use std::time::Duration;

use postbox_core::kit::lane_of;
use postbox_core::{Admin as _, Capabilities, Inspect as _, Log as _, Outcome, SubscriptionInfo};
use postbox_engine::{Every, RelaySettings, SUBSCRIPTION_REMOVED};
use postbox_memory::MemoryStore;
use tokio_util::sync::CancellationToken;

use postbox_testkit::memory::{self, Answer, TestEnv, event, fast};

const S: Duration = Duration::from_secs(1);

async fn known(store: &MemoryStore) -> Vec<SubscriptionInfo> {
    store.subscriptions().await.expect("listed")
}

/// The relay ends, says why, and creates nothing again, however often it is restarted.
#[tokio::test(start_paused = true)]
async fn a_relay_whose_subscription_is_taken_away_ends_and_makes_nothing_anew() {
    for renamed in [false, true] {
        let env = TestEnv::with((0..10).map(|n| event(n, n))).await;
        let (sink, relay) = env.recorded(Capabilities::default(), fast());
        let take_away = async {
            sink.wait_for(10).await;
            let info = &known(&env.store).await[0];
            match renamed {
                true => env.store.rename(&info.name, info.generation, &"other".parse().expect("a name")).await,
                false => env.store.remove(&info.name, info.generation).await,
            }
        };
        let (ended, taken) = tokio::join!(relay.run(CancellationToken::new()), take_away);
        taken.expect("taken away");
        let error = ended.expect_err("it has nothing to do any more");
        assert_eq!(error.code(), SUBSCRIPTION_REMOVED);
        assert!(error.is_permanent() && error.message().contains("configuration"), "{error}");
        for again in [relay.run(CancellationToken::new()).await, relay.drain(None).await.map(drop)] {
            assert_eq!(again.expect_err("not by this relay").code(), SUBSCRIPTION_REMOVED);
        }
        let left = known(&env.store).await;
        assert_eq!(left.len(), usize::from(renamed));
        assert!(left.iter().all(|info| info.name.as_str() == "other"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_scheduled_relay_makes_nothing_anew_either() {
    let env = TestEnv::with([event(1, 1)]).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    let take_away = async {
        sink.wait_for(1).await;
        tokio::time::sleep(2 * S).await;
        let info = &known(&env.store).await[0];
        env.store.remove(&info.name, info.generation).await.expect("removed");
    };
    let every = Every(10 * S);
    let (ended, ()) = tokio::join!(relay.run_on(&every, CancellationToken::new()), take_away);
    assert_eq!(ended.expect_err("it ends").code(), SUBSCRIPTION_REMOVED);
    assert!(known(&env.store).await.is_empty());
    // A new relay is different: somebody wants the subscription.
    env.store.subscribe(&env.subscription()).await.expect("made anew");
}

/// The next call begins with the run that a failure ended; a stop leaves none.
#[tokio::test(start_paused = true)]
async fn a_schedule_that_was_stopped_begins_at_its_next_time() {
    let env = TestEnv::with([event(1, 1)]).await;
    let (sink, relay) = env.recorded(Capabilities::default(), fast());
    sink.down(true);
    let (every, mut calls) = (Every(3_600 * S), Vec::new());
    for time in [3_900 * S, 300 * S] {
        let stop = CancellationToken::new();
        let stopping = async {
            tokio::time::sleep(time).await;
            stop.cancel();
        };
        let (ended, ()) = tokio::join!(relay.run_on(&every, stop.clone()), stopping);
        ended.expect("ran");
        calls.push(sink.calls());
    }
    assert!(calls[0] > 0 && calls[0] == calls[1], "{calls:?}");
}

/// With a limit of minutes per call, its other keys would stand still for longer than after a
/// crash.
#[tokio::test(start_paused = true)]
async fn a_lane_for_a_new_replica_waits_no_longer_than_the_drain_time_for_its_calls() {
    assert_eq!(lane_of(b"0", 2), 1, "the key that hangs is of the lane that is given up");
    let env = TestEnv::with_lanes(2).await;
    let settings = RelaySettings { deliver_timeout: 300 * S, ..fast() };
    let (sink, first) = env.recorded(Capabilities::default(), settings.clone());
    sink.script(|delivery| match memory::version(delivery) {
        0 => Answer::Hang,
        _ => Answer::Say(Outcome::DELIVERED),
    });
    let second = env.relay(sink.clone(), settings);
    let stop = CancellationToken::new();
    let joining = async {
        tokio::time::sleep(5 * S).await;
        second.run(stop.clone()).await
    };
    let append = async {
        env.append([event(0, 0)]).await;
        for n in 1..60 {
            env.append([event(1 + n % 9, n)]).await;
            tokio::time::sleep(S).await;
        }
        assert_eq!([&first, &second].map(|relay| relay.metrics().lanes_held()), [1, 1]);
        stop.cancel();
    };
    let (one, two, ()) = tokio::join!(first.run(stop.clone()), joining, append);
    one.and(two).expect("ran");
    let waited: Vec<Duration> = sink.arrivals().iter().map(|arrival| arrival.waited).collect();
    assert_eq!(waited.len(), 59, "all but the one that hangs");
    assert!(waited.iter().all(|waited| *waited < 15 * S), "{waited:?}");
}

/// Two replicas go from one lane to four and back to two while events arrive.
#[tokio::test(start_paused = true)]
async fn lanes_change_while_replicas_run() {
    let env = TestEnv::new().await;
    let (sink, first) =
        env.recorded(Capabilities { batch_max: 1, concurrency: 4, prefix: false, system: None }, fast());
    let second = env.relay(sink.clone(), fast());
    let stop = CancellationToken::new();
    let change = async {
        let mut sent = 0;
        for lanes in [4, 2, 3] {
            env.append_each(sent..sent + 50, 7, S / 10).await;
            sent += 50;
            env.store.set_lanes(&env.subscription().name, lanes).await.expect("changed");
        }
        env.append_each(sent..sent + 50, 7, S / 10).await;
        tokio::time::sleep(30 * S).await;
        let lanes = known(&env.store).await.remove(0).lanes;
        assert!(lanes.len() == 3 && lanes.iter().all(|lane| lane.lease_left.is_some()), "{lanes:?}");
        let mut owners: Vec<_> = lanes.into_iter().filter_map(|lane| lane.owner).collect();
        owners.sort();
        owners.dedup();
        assert_eq!(owners.len(), 2, "shared by both");
        stop.cancel();
    };
    let (one, two, ()) = tokio::join!(first.run(stop.clone()), second.run(stop.clone()), change);
    one.and(two).expect("ran");
    assert_eq!((env.stats().await.pending, env.stats().await.dispatched), (0, 200));
    sink.assert_in_order();
}
