//! An event that ends its relay is found and becomes dead, under paused time. A relay that "ends"
//! is dropped in the middle of its call, and another one takes over.

use std::future::ready;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::{
    Admin as _, Apply, Capabilities, Change, Decide, Delivery, Error, ErrorKind, Lease, Log as _, OnDead, Outcome,
    OwnerId, Result, Selection, Settlement, State,
};
use postbox_engine::{Relay, RelaySettings, SeededRandom};
use postbox_memory::{Call, Wire};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use postbox_testkit::memory::{self, Answer, FailsAt, Recorder, TestEnv, event, fast, version};

const S: Duration = Duration::from_secs(1);
/// Three crashes to become careful, and three with the event sent alone.
const CRASHES_MAX: usize = 6;

/// A sink that ends its relay when it gets certain events.
struct Killer {
    sink: Arc<Recorder>,
    called: Arc<Notify>,
}

impl Killer {
    fn new(capabilities: Capabilities, is_killer: impl Fn(&Delivery) -> bool + Send + Sync + 'static) -> Self {
        let (sink, called) = (Recorder::new(capabilities), Arc::new(Notify::new()));
        let calls = called.clone();
        sink.script(move |delivery| {
            if !is_killer(delivery) {
                return Outcome::DELIVERED.into();
            }
            calls.notify_one();
            Answer::Hang
        });
        Self { sink, called }
    }

    /// Runs relays, each for ten minutes or until `after` it got such an event. Returns how many
    /// ended that way.
    async fn run(&self, env: &TestEnv, settings: &RelaySettings, after: Duration) -> usize {
        for crashes in 0..=CRASHES_MAX {
            let random = Arc::new(SeededRandom::new(crashes as u64));
            let relay = env.builder(env.subscription(), settings.clone()).random(random).sink(self.sink.clone());
            let relay = relay.build().expect("built");
            let called = async {
                self.called.notified().await;
                tokio::time::sleep(after).await;
            };
            if !ends_with(&relay, called).await {
                return crashes;
            }
        }
        panic!("it still ends its relays: {:?}", env.stats().await);
    }
}

/// Runs a relay for ten minutes, or drops it when `crash` resolves. Returns whether it crashed.
async fn ends_with(relay: &Relay, crash: impl Future<Output = ()>) -> bool {
    let stop = CancellationToken::new();
    let stopping = async {
        tokio::time::sleep(600 * S).await;
        stop.cancel();
        std::future::pending::<()>().await;
    };
    tokio::select! {
        ended = relay.run(stop.clone()) => {
            ended.expect("ran");
            false
        }
        () = crash => true,
        () = stopping => unreachable!("it waits for ever"),
    }
}

/// Asserts that this event is dead because of its crashes, and all others are delivered in order.
async fn assert_only_dead(env: &TestEnv, killer: &Killer, version: i64, others: u64) {
    let dead = env.list(State::Dead).await;
    assert_eq!(dead.iter().map(|record| record.event.version).collect::<Vec<_>>(), [Some(version)]);
    assert_eq!(dead[0].code.as_deref(), Some("relay_crashed"));
    let id = dead[0].event.id.to_string();
    assert!(dead[0].error.as_deref().is_some_and(|text| text.ends_with(&format!("postbox retry {id}"))));
    let stats = env.stats().await;
    assert_eq!((stats.dispatched, stats.pending, stats.dead), (others, 0, 1), "{stats:?}");
    killer.sink.assert_in_order();
}

#[tokio::test(start_paused = true)]
async fn an_event_that_ends_its_relay_dies_and_all_others_arrive() {
    for capabilities in memory::all_capabilities() {
        for number in [0, 17, 199] {
            let env = TestEnv::with((0..200).map(|n| event(n % 7, n))).await;
            let killer = Killer::new(capabilities, move |delivery| version(delivery) == number);
            let crashes = killer.run(&env, &fast(), Duration::ZERO).await;
            assert_eq!(crashes, CRASHES_MAX, "{capabilities:?} {number}");
            assert_only_dead(&env, &killer, number, 199).await;
        }
    }
}

/// The event is detached by then, and what flows beside it is settled.
#[tokio::test(start_paused = true)]
async fn an_event_that_ends_its_relay_after_a_while_dies() {
    let env = TestEnv::with((0..2_000).map(|n| event(n, n))).await;
    let killer = Killer::new(Capabilities { concurrency: 16, ..Capabilities::default() }, |it| version(it) == 7);
    assert!(killer.run(&env, &fast(), 3 * S).await <= CRASHES_MAX);
    assert_only_dead(&env, &killer, 7, 1_999).await;
}

/// The stream beside it never stops.
#[tokio::test(start_paused = true)]
async fn a_due_row_that_ends_its_relay_dies() {
    let env = TestEnv::with([event(1, 0).deliver_at(Timestamp::UNIX_EPOCH + 5 * S), event(1, 1)]).await;
    let killer = Killer::new(Capabilities::default(), |it| version(it) == 0);
    let appending = async {
        env.append_each(2..20_000, 100, Duration::from_millis(10)).await;
        std::future::pending::<()>().await;
    };
    let settings = fast();
    let crashes = tokio::select! {
        crashes = killer.run(&env, &settings, Duration::from_millis(200)) => crashes,
        () = appending => unreachable!("it waits for ever"),
    };
    assert!(crashes <= CRASHES_MAX);
    assert_only_dead(&env, &killer, 0, 19_999).await;
}

/// Other lanes crash with it, and their events are innocent.
#[tokio::test(start_paused = true)]
async fn events_of_other_lanes_do_not_die_with_it() {
    let env = TestEnv::with_lanes(4).await;
    env.append((0..400).map(|n| event(n % 40, n))).await;
    let killer = Killer::new(Capabilities::default(), |it| version(it) == 5);
    killer.sink.takes(S / 10);
    assert!(killer.run(&env, &fast(), Duration::ZERO).await <= CRASHES_MAX + 1);
    assert_only_dead(&env, &killer, 5, 399).await;
}

/// A crash counts against each event that is sent alone then.
#[tokio::test(start_paused = true)]
async fn lanes_send_one_event_alone_at_a_time() {
    let env = TestEnv::with_lanes(2).await;
    env.append((0..20).map(|n| event(n, n))).await;
    let killer = Killer::new(Capabilities::default(), |_| true);
    for _ in 0..3 {
        // Longer than a lease, so that each relay gets both lanes. Shorter than a call may last.
        let called = async {
            killer.called.notified().await;
            tokio::time::sleep(8 * S).await;
        };
        assert!(ends_with(&env.relay(killer.sink.clone(), fast()), called).await);
    }
    killer.sink.script(|_| Outcome::DELIVERED);
    killer.sink.takes(S);
    let relay = env.relay(killer.sink.clone(), fast());
    let most_alone = async {
        let mut most = 0_usize;
        while killer.sink.arrivals().len() < 20 {
            let rows = env.list(State::Retrying).await;
            most = most.max(rows.iter().filter(|row| row.code.as_deref() == Some("alone")).count());
            tokio::time::sleep(S / 4).await;
        }
        most
    };
    let most = env.run_while(&relay, tokio::time::timeout(300 * S, most_alone)).await.expect("all arrive");
    assert_eq!((most, relay.metrics().lanes_acquired()), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn its_key_goes_on_or_halts() {
    for (on_dead, delivered) in [(OnDead::Continue, 9), (OnDead::Halt, 0)] {
        let mut env = TestEnv::with((0..10).map(|n| event(1, n))).await;
        env.on_dead = on_dead;
        let killer = Killer::new(Capabilities::default(), |it| version(it) == 0);
        killer.run(&env, &fast(), Duration::ZERO).await;
        let stats = env.stats().await;
        assert_eq!((stats.dead, stats.dispatched, stats.blocked), (1, delivered, 9 - delivered), "{on_dead:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_replayed_one_goes_alone_at_once() {
    let env = TestEnv::with((0..10).map(|n| event(n, n))).await;
    let heals = Arc::new(AtomicBool::new(false));
    let healed = heals.clone();
    let killer = Killer::new(Capabilities::default(), move |it| version(it) == 3 && !healed.load(Ordering::SeqCst));
    killer.run(&env, &fast(), Duration::ZERO).await;
    let name = env.subscription().name;
    assert_eq!(env.store.change(&name, &Change::Retry, &Selection::default()).await.expect("replayed").count, 1);
    assert_eq!(killer.run(&env, &fast(), Duration::ZERO).await, 2, "one crash was left of the three");
    assert_only_dead(&env, &killer, 3, 9).await;
    heals.store(true, Ordering::SeqCst);
    assert_eq!(env.store.change(&name, &Change::Retry, &Selection::default()).await.expect("replayed").count, 1);
    assert_eq!(killer.run(&env, &fast(), Duration::ZERO).await, 0);
    assert_eq!(env.stats().await.dispatched, 10);
}

/// Kills by a person cost no event an attempt, even at the worst moment.
#[tokio::test(start_paused = true)]
async fn kills_cost_no_attempt() {
    let env = TestEnv::with((0..50).map(|n| event(n % 5, n))).await;
    let killer = Killer::new(Capabilities::default(), |_| false);
    killer.sink.takes(S);
    for _ in 0..5 {
        let relay = env.relay(killer.sink.clone(), fast());
        let calls = killer.sink.calls();
        let in_a_call = async {
            while killer.sink.calls() == calls {
                tokio::time::sleep(S / 10).await;
            }
        };
        assert!(ends_with(&relay, in_a_call).await);
    }
    assert_eq!(killer.run(&env, &fast(), Duration::ZERO).await, 0);
    let stats = env.stats().await;
    assert_eq!((stats.dispatched, stats.dead), (50, 0));
    assert!(killer.sink.arrivals().iter().all(|arrival| arrival.attempt == 1));
    killer.sink.assert_in_order();
}

/// A destination that is down while a lane is careful costs no attempt either.
#[tokio::test(start_paused = true)]
async fn an_outage_of_a_careful_lane_costs_no_attempt() {
    let env = TestEnv::with((0..20).map(|n| event(n, n))).await;
    let killer = Killer::new(Capabilities::default(), |it| version(it) == 0);
    for _ in 0..3 {
        assert!(ends_with(&env.relay(killer.sink.clone(), fast()), killer.called.notified()).await);
    }
    killer.sink.script(|_| Outcome::DELIVERED);
    killer.sink.down(true);
    env.run_for(&env.relay(killer.sink.clone(), fast()), 300 * S).await;
    killer.sink.down(false);
    assert_eq!(killer.run(&env, &fast(), Duration::ZERO).await, 0);
    assert_eq!((env.stats().await.dispatched, env.stats().await.dead), (20, 0));
    assert!(killer.sink.arrivals().iter().all(|arrival| arrival.attempt == 1));
}

/// A kill meanwhile would count a crash against it, and the searches of all other subscriptions
/// would wait.
#[tokio::test(start_paused = true)]
async fn an_event_that_waits_for_the_rate_is_not_yet_sent_alone() {
    let mut envs = Vec::new();
    for _ in 0..2 {
        let env = TestEnv::with((0..3).map(|n| event(n, n))).await;
        let killer = Killer::new(Capabilities::default(), |it| version(it) == 0);
        for _ in 0..3 {
            assert!(ends_with(&env.relay(killer.sink.clone(), fast()), killer.called.notified()).await);
        }
        envs.push(env);
    }
    tokio::time::sleep(2 * fast().lease_ttl).await;
    // One every two seconds, so that one read brings more than one.
    let rate = "30/m".parse().ok();
    let (slow, slow_relay) = envs[0].recorded(Capabilities::default(), RelaySettings { rate, ..fast() });
    let (other, other_relay) = envs[1].recorded(Capabilities::default(), fast());
    let beside = async {
        slow.wait_for(1).await;
        tokio::time::sleep(S / 2).await;
        let rows = envs[0].list(State::Retrying).await;
        let codes: Vec<_> = rows.iter().filter_map(|row| row.code.as_deref()).collect();
        assert!(codes.contains(&"not_sent") && !codes.contains(&"alone"), "{codes:?}");
        let search = tokio::time::timeout(S, other.wait_for(3));
        envs[1].run_while(&other_relay, search).await.expect("it waits for no other subscription's rate");
    };
    envs[0].run_while(&slow_relay, beside).await;
}

/// A stop that does not wait for the call to end is no crash.
#[tokio::test(start_paused = true)]
async fn stops_in_the_middle_of_a_call_that_goes_alone_are_no_crashes() {
    let env = TestEnv::with((0..3).map(|n| event(n, n))).await;
    let killer = Killer::new(Capabilities::default(), |it| version(it) == 0);
    for _ in 0..3 {
        assert!(ends_with(&env.relay(killer.sink.clone(), fast()), killer.called.notified()).await);
    }
    for _ in 0..4 {
        let settings = RelaySettings { drain_timeout: S, deliver_timeout: 60 * S, ..fast() };
        let relay = env.relay(killer.sink.clone(), settings);
        env.run_while(&relay, killer.called.notified()).await;
        let retrying = env.list(State::Retrying).await;
        let said: Vec<_> = retrying.iter().map(|it| (it.event.version, it.code.as_deref())).collect();
        assert_eq!(said[0], (Some(0), Some("not_sent")));
        assert_eq!(crashes_given_back(&env).await, 3, "the next one goes on looking");
    }
    killer.sink.script(|_| Outcome::DELIVERED);
    assert_eq!(killer.run(&env, &fast(), Duration::ZERO).await, 0);
    assert!(killer.sink.arrivals().iter().all(|arrival| arrival.attempt == 1));
    assert_eq!(crashes_given_back(&env).await, 0, "nothing is left to look at");
}

/// Runs that do not reach the event, because the destination is down, do not end the row of
/// holders that vanished.
#[tokio::test(start_paused = true)]
async fn holders_that_send_nothing_leave_the_count_of_those_that_vanished() {
    let env = TestEnv::with((0..3).map(|n| event(n, n))).await;
    let killer = Killer::new(Capabilities::default(), |it| version(it) == 0);
    let down = Recorder::new(Capabilities::default());
    down.script(|_| Outcome::unavailable("connect_refused", "down"));
    for vanished in 1..=2 {
        assert!(ends_with(&env.relay(killer.sink.clone(), fast()), killer.called.notified()).await);
        tokio::time::sleep(60 * S).await;
        let drained = env.relay(down.clone(), fast()).drain(None).await.expect("drained");
        assert_eq!((drained.delivered, drained.lanes_elsewhere), (0, 0));
        assert_eq!(crashes_given_back(&env).await, vanished);
    }
    killer.sink.script(|_| Outcome::DELIVERED);
    env.relay(killer.sink.clone(), fast()).drain(None).await.expect("drained");
    assert_eq!(crashes_given_back(&env).await, 0, "all went out");
}

/// Answers a look for due rows late.
struct LateLooks;

#[async_trait]
impl Wire for LateLooks {
    async fn carry(&self, call: Arc<Call>) -> Result<()> {
        call.execute();
        if call.operation == "due" {
            tokio::time::sleep(S / 10).await;
        }
        Ok(())
    }
}

/// The look does not know the rows of the stream that was set aside before its answer came.
#[tokio::test(start_paused = true)]
async fn a_late_answer_that_nothing_is_due_does_not_end_the_search() {
    let env = TestEnv::with((0..20).map(|n| event(n, n))).await;
    let killer = Killer::new(Capabilities::default(), |it| version(it) == 0);
    for _ in 0..3 {
        assert!(ends_with(&env.relay(killer.sink.clone(), fast()), killer.called.notified()).await);
    }
    let sink = Recorder::new(Capabilities::default());
    sink.takes(S);
    let relay = env.relay_on(Arc::new(env.store.client(Some(Arc::new(LateLooks)))), sink.clone(), fast());
    env.run_while(&relay, sink.wait_for(3)).await;
    assert_eq!(crashes_given_back(&env).await, 3, "the next one goes on looking");
}

/// Returns the crash count in the released lease of the only lane.
async fn crashes_given_back(env: &TestEnv) -> u32 {
    let owner = OwnerId::new("looker").expect("a name");
    let acquired = env.store.acquire(&env.subscription().name, &owner, &[], S).await.expect("asked");
    let lease = acquired.lease.expect("free");
    env.store.release(&lease).await.expect("given back");
    lease.crashes
}

/// Applies events in a transaction, and runs `before` ahead of each.
struct After<B> {
    before: B,
    handler: Arc<dyn Apply>,
}

#[async_trait]
impl<B, F> Apply for After<B>
where
    B: Fn(&[&Delivery], &Decide<'_>) -> F + Send + Sync + 'static,
    F: Future<Output = Result<()>> + Send + 'static,
{
    async fn apply(
        &self,
        lease: &Lease,
        deliveries: &[&Delivery],
        settlement: Settlement<'_>,
        decide: &Decide<'_>,
    ) -> Result<Vec<Option<Outcome>>> {
        (self.before)(deliveries, decide).await?;
        self.handler.apply(lease, deliveries, settlement, decide).await
    }
}

/// Ends its relay when event 4 is applied in a transaction.
fn ending(env: &TestEnv, called: &Arc<Notify>) -> Relay {
    let called = called.clone();
    let before = move |deliveries: &[&Delivery], _: &Decide<'_>| {
        let (called, ends) = (called.clone(), deliveries.iter().any(|delivery| version(delivery) == 4));
        async move {
            if ends {
                called.notify_one();
                std::future::pending::<()>().await;
            }
            Ok(())
        }
    };
    let apply = After { before, handler: env.store.apply(|_, _| Outcome::DELIVERED) };
    env.builder(env.subscription(), fast()).apply(Arc::new(apply)).build().expect("built")
}

/// The same for a handler in the transaction that settles.
#[tokio::test(start_paused = true)]
async fn a_handler_in_a_transaction_that_ends_its_relay_dies_too() {
    let env = TestEnv::with((0..30).map(|n| event(n % 3, n))).await;
    let called = Arc::new(Notify::new());
    for crashes in 0.. {
        assert!(crashes <= CRASHES_MAX, "it still ends its relays: {:?}", env.stats().await);
        if !ends_with(&ending(&env, &called), called.notified()).await {
            break;
        }
    }
    assert_only_4_is_dead(&env, "relay_crashed").await;
}

async fn assert_only_4_is_dead(env: &TestEnv, code: &str) {
    let dead = env.list(State::Dead).await;
    assert_eq!(dead.iter().map(|record| record.event.version).collect::<Vec<_>>(), [Some(4)]);
    assert_eq!((env.stats().await.dispatched, dead[0].code.as_deref()), (29, Some(code)));
}

/// A transaction that hangs does come back, by its timeout, so it is no crash.
#[tokio::test(start_paused = true)]
async fn a_handler_that_hangs_alone_fails_by_its_attempts() {
    let env = TestEnv::with((0..30).map(|n| event(n % 3, n))).await;
    let called = Arc::new(Notify::new());
    for _ in 0..3 {
        assert!(ends_with(&ending(&env, &called), called.notified()).await);
    }
    assert!(!ends_with(&ending(&env, &called), std::future::pending()).await);
    assert_only_4_is_dead(&env, "timeout").await;
    assert_eq!(env.list(State::Dead).await[0].attempts, fast().retry.attempts_max);
}

/// It would be handled again without end, and its lane would do nothing else.
#[tokio::test]
async fn an_event_whose_handler_blocks_until_the_lease_has_ended_is_retried_alone() {
    let env = TestEnv::with((0..3).map(|n| event(n, n))).await;
    let apply = env.store.apply(|_, delivery| {
        if version(delivery) == 1 {
            std::thread::sleep(Duration::from_millis(1_500));
        }
        Outcome::DELIVERED
    });
    let settings = RelaySettings { lease_ttl: S, ..fast() };
    let relay = env.builder(env.subscription(), settings).apply(apply).build().expect("built");
    for _ in 0..5 {
        relay.drain(None).await.expect("drained");
    }
    let retrying = env.list(State::Retrying).await;
    let retrying: Vec<_> = retrying.iter().map(|it| (it.event.version, it.code.as_deref())).collect();
    assert_eq!(retrying, [(Some(1), Some("handler_outlived_lease"))]);
    assert_eq!(env.stats().await.dispatched, 2);
}

/// Nothing renews the lease while they run, e.g. because they hold the connections of the pool. The
/// same events would be handled and rolled back without end.
#[tokio::test(start_paused = true)]
async fn transactions_that_outlast_their_lease_get_fewer_events() {
    let env = TestEnv::with((0..30).map(|n| event(n, n))).await;
    let busy = Arc::new(AtomicBool::new(false));
    let renewing = busy.clone();
    let no_renewal = move || {
        let error = || Error::new(ErrorKind::Unavailable, "simulate", "pool_empty", "no connection is free");
        renewing.load(Ordering::SeqCst).then(error)
    };
    let store = Arc::new(env.store.client(Some(Arc::new(FailsAt("renew", no_renewal)))));
    let a_second_each = move |deliveries: &[&Delivery], _: &Decide<'_>| {
        let (busy, count) = (busy.clone(), deliveries.len() as u32);
        async move {
            busy.store(true, Ordering::SeqCst);
            tokio::time::sleep(S * count).await;
            busy.store(false, Ordering::SeqCst);
            Ok(())
        }
    };
    let apply = Arc::new(After { before: a_second_each, handler: store.apply(|_, _| Outcome::DELIVERED) });
    let relay = env.builder_on(store, env.subscription(), fast()).apply(apply).build().expect("built");
    env.run_for(&relay, 300 * S).await;
    assert_eq!(env.stats().await.dispatched, 30);
}

/// Handlers of two lanes that lock the same rows: each deadlock costs a second, and almost every
/// transaction had one.
#[tokio::test(start_paused = true)]
async fn transactions_whose_handlers_fail_slowly_get_fewer_events() {
    let env = TestEnv::with((0..2_000).map(|n| event(n, n))).await;
    let (victim, slow) = (Arc::new(AtomicI64::new(-1)), Arc::new(AtomicUsize::new(0)));
    let (fails, slow_ones) = (victim.clone(), slow.clone());
    let deadlock = move |deliveries: &[&Delivery], _: &Decide<'_>| {
        let (victim, slow) = (victim.clone(), slow.clone());
        let first = (deliveries.len() > 1).then(|| version(deliveries[0]));
        async move {
            if first.is_some() {
                slow.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(S).await;
            }
            victim.store(first.unwrap_or(-1), Ordering::SeqCst);
            Ok(())
        }
    };
    let handler = env.store.apply(move |_, delivery| match version(delivery) == fails.load(Ordering::SeqCst) {
        true => Outcome::retry("handler_error", "deadlock detected"),
        false => Outcome::DELIVERED,
    });
    let apply = Arc::new(After { before: deadlock, handler });
    let relay = env.builder(env.subscription(), fast()).apply(apply).build().expect("built");
    env.run_for(&relay, 300 * S).await;
    assert_eq!(env.stats().await.dispatched, 2_000);
    let slow_ones = slow_ones.load(Ordering::SeqCst);
    assert!(slow_ones <= 16, "{slow_ones} transactions failed slowly");
}

/// At the commit it can only concern what they did, e.g. a deferred key whose parent is gone. It
/// once stopped the subscription.
#[tokio::test(start_paused = true)]
async fn an_effect_that_is_refused_for_good_at_the_commit_fails_its_event_only() {
    let refused = |deliveries: &[&Delivery], decide: &Decide<'_>| {
        if !deliveries.iter().any(|delivery| version(delivery) == 4) {
            return ready(Ok(()));
        }
        deliveries.iter().for_each(|delivery| _ = decide(delivery, &Outcome::DELIVERED));
        ready(Err(Error::new(ErrorKind::NotFound, "apply", "reference_missing", "its parent is gone")))
    };
    let run = async |env: &TestEnv, time: Duration| {
        let apply = Arc::new(After { before: refused, handler: env.store.apply(|_, _| Outcome::DELIVERED) });
        let relay = env.builder(env.subscription(), fast()).apply(apply).build().expect("built");
        env.run_for(&relay, time).await;
        relay
    };
    let env = TestEnv::with((0..30).map(|n| event(n % 3, n))).await;
    run(&env, 300 * S).await;
    assert_only_4_is_dead(&env, "reference_missing").await;
    assert_eq!(env.list(State::Dead).await[0].attempts, fast().retry.attempts_max);
    // No event after it commits, and its lane does not look failed.
    let env = TestEnv::with([event(1, 4)]).await;
    let relay = run(&env, 50 * S).await;
    assert_eq!((env.list(State::Dead).await.len(), relay.failing_lanes()), (1, vec![]));
}

/// A right that is missing, or a schema that is being migrated: no event is at fault.
#[tokio::test(start_paused = true)]
async fn a_store_that_refuses_everything_for_a_while_costs_no_attempt() {
    let env = TestEnv::with([event(1, 1)]).await;
    let refuses = Arc::new(AtomicBool::new(true));
    let denied = || Error::new(ErrorKind::Unauthorized, "simulate", "permission_denied", "a right is missing");
    let (settling, applying) = (refuses.clone(), refuses.clone());
    let no_settlement = move || settling.load(Ordering::SeqCst).then(denied);
    let store = Arc::new(env.store.client(Some(Arc::new(FailsAt("settle", no_settlement)))));
    let no_commit = move |deliveries: &[&Delivery], decide: &Decide<'_>| {
        if !applying.load(Ordering::SeqCst) {
            return ready(Ok(()));
        }
        deliveries.iter().for_each(|delivery| _ = decide(delivery, &Outcome::DELIVERED));
        ready(Err(denied()))
    };
    let apply = Arc::new(After { before: no_commit, handler: store.apply(|_, _| Outcome::DELIVERED) });
    let mut settings = fast();
    settings.retry.attempts_max = 1;
    let relay = env.builder_on(store, env.subscription(), settings).apply(apply).build().expect("built");
    let error = relay.run(CancellationToken::new()).await.expect_err("refused");
    assert_eq!(error.code(), "permission_denied");
    refuses.store(false, Ordering::SeqCst);
    env.run_for(&relay, 30 * S).await;
    let stats = env.stats().await;
    assert_eq!((stats.dispatched, stats.dead), (1, 0));
}

/// Only this relay knows their outcomes: another one that gets the lane would run them again.
#[tokio::test(start_paused = true)]
async fn a_handler_that_commits_does_not_cost_its_relay_the_lane() {
    let env = TestEnv::with((0..30).map(|n| event(n % 3, n))).await;
    let ran = Arc::new(Mutex::new(Vec::new()));
    let all = ran.clone();
    // The handler of event 4 commits by itself, which also keeps what ran before it.
    let before = move |deliveries: &[&Delivery], decide: &Decide<'_>| {
        let at = deliveries.iter().position(|delivery| version(delivery) == 4);
        let run = &deliveries[..at.map_or(deliveries.len(), |at| at + 1)];
        all.lock().unwrap().extend(run.iter().map(|delivery| version(delivery)));
        if at.is_none() {
            return ready(Ok(()));
        }
        let ended = Error::transaction_ended("apply");
        for delivery in run {
            _ = match version(delivery) {
                4 => decide(delivery, &Outcome::dead(ended.code().to_owned(), ended.message())),
                _ => decide(delivery, &Outcome::DELIVERED),
            };
        }
        ready(Err(ended))
    };
    let apply = After { before, handler: env.store.apply(|_, _| Outcome::DELIVERED) };
    let relay = env.builder(env.subscription(), fast()).apply(Arc::new(apply)).build().expect("built");
    env.run_for(&relay, 10 * S).await;
    assert_eq!(*ran.lock().unwrap(), (0..30).collect::<Vec<i64>>(), "each once");
    assert_eq!(relay.metrics().lanes_acquired(), 1);
    assert_only_4_is_dead(&env, "handler_ended_transaction").await;
}
