//! Dead events with a dead-letter sink, on the memory store under paused time.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use postbox_core::{
    Admin as _, Capabilities, Change, DeadLetters, Error, ErrorKind, Outcome, Selection, State, dead_header,
};
use postbox_engine::Relay;
use postbox_testkit::memory::{self, Answer, FailsAt, Recorder, TestEnv, event, fast};

const S: Duration = Duration::from_secs(1);

/// A sink that refuses every third event for good.
fn refusing() -> Arc<Recorder> {
    let sink = Recorder::new(Capabilities::default());
    sink.script(|delivery| match memory::version(delivery) % 3 {
        0 => Outcome::dead("http_422", "no\nway"),
        _ => Outcome::DELIVERED,
    });
    sink
}

/// Sets up this many events, a sink that lets each of them die, and a sink of letters that takes
/// one at a time, for this long.
async fn dying(events: u64, takes: Duration) -> (TestEnv, Arc<Recorder>, Arc<Recorder>) {
    let env = TestEnv::with((0..events).map(|n| event(n, n))).await;
    let sink = Recorder::new(Capabilities::default());
    sink.script(|_| Outcome::dead("http_422", "no"));
    let letters = Recorder::new(Capabilities { concurrency: 1, ..Capabilities::default() });
    letters.takes(takes);
    (env, sink, letters)
}

fn relay_on(env: &TestEnv, sink: &Arc<Recorder>, letters: &Arc<Recorder>, store: Arc<dyn DeadLetters>) -> Relay {
    let builder = env.builder(env.subscription(), fast()).sink(sink.clone());
    builder.dead_to(letters.clone(), store).build().expect("built")
}

fn relay(env: &TestEnv, sink: &Arc<Recorder>, letters: &Arc<Recorder>) -> Relay {
    relay_on(env, sink, letters, env.store.clone())
}

fn sorted(recorder: &Recorder) -> Vec<i64> {
    let mut versions = recorder.versions();
    versions.sort_unstable();
    versions
}

fn ids(recorder: &Recorder) -> BTreeSet<String> {
    recorder.arrivals().into_iter().map(|arrival| arrival.dedupe_id).collect()
}

#[tokio::test(start_paused = true)]
async fn each_dead_event_is_handed_over_once_with_its_reason() {
    for capabilities in memory::all_capabilities() {
        let env = TestEnv::with((0..30).map(|n| event(n % 7, n))).await;
        let (sink, letters) = (refusing(), Recorder::new(capabilities));
        let headers = Arc::new(Mutex::new(Vec::new()));
        let seen = headers.clone();
        letters.script(move |delivery| {
            seen.lock().unwrap().push((delivery.event.id, delivery.event.headers.clone()));
            Outcome::DELIVERED
        });
        let relay = relay(&env, &sink, &letters);
        env.run_for(&relay, 5 * S).await;
        assert_eq!(sorted(&letters), [0, 3, 6, 9, 12, 15, 18, 21, 24, 27], "{capabilities:?}");
        let dead = env.list(State::Dead).await;
        assert_eq!(dead.len(), 10, "they are dead as before");
        for (id, headers) in headers.lock().unwrap().iter() {
            assert!(dead.iter().all(|record| record.event.id != *id), "a letter has an id of its own");
            assert!(dead.iter().any(|record| record.event.id.to_string() == headers[dead_header::ID]));
            assert_eq!(headers[dead_header::CODE], "http_422");
            assert_eq!(headers[dead_header::REASON], "no way");
            assert_eq!((&*headers[dead_header::ATTEMPTS], &*headers[dead_header::SUBSCRIPTION]), ("1", "test"));
            assert_eq!(headers[dead_header::LOG], "outbox");
        }
        let counted = relay.metrics().snapshot();
        assert_eq!((counted.dead_letters, counted.dead_letters_failed), (10, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_bounded_run_hands_over_too_and_so_does_what_died_before() {
    let env = TestEnv::with((0..3).map(|n| event(n, n))).await;
    let sink = refusing();
    // A relay with an older configuration, without a dead-letter sink.
    env.relay(sink.clone(), fast()).drain(None).await.expect("drained");
    let letters = Recorder::new(Capabilities::default());
    env.append([event(3, 3)]).await;
    relay(&env, &sink, &letters).drain(None).await.expect("drained");
    assert_eq!(sorted(&letters), [0, 3]);
}

#[tokio::test(start_paused = true)]
async fn a_sink_of_letters_that_is_down_holds_nobody_up_and_gets_all_later() {
    let env = TestEnv::new().await;
    let (sink, letters) = (refusing(), Recorder::new(Capabilities::default()));
    letters.down(true);
    let relay = relay(&env, &sink, &letters);
    env.run_while(&relay, async {
        env.append_each(0..60, 5, S).await;
        let stats = env.stats().await;
        assert_eq!((stats.pending, stats.dead), (0, 20), "its outage is not the subscription's");
        assert!(letters.versions().is_empty());
        assert!(letters.calls() <= 8 * 16, "it is asked rarely: {}", letters.calls());
        letters.down(false);
        letters.wait_for(20).await;
    })
    .await;
    assert_eq!(sorted(&letters), (0..60).step_by(3).collect::<Vec<_>>());
}

/// Each call of the sink contains one of these letters, because they died first.
#[tokio::test(start_paused = true)]
async fn letters_that_bring_their_sink_down_keep_no_other_for_ever() {
    for down in [
        Outcome::unavailable("stream_wrong_type", "no"),
        Outcome::Throttled { code: "x".into(), error: "no".into(), after: None },
    ] {
        let env = TestEnv::with((0..240).map(|n| event(n, n))).await;
        let (sink, letters) = (refusing(), Recorder::new(Capabilities::default()));
        letters.script(move |delivery| if memory::version(delivery) < 120 { down.clone() } else { Outcome::DELIVERED });
        let relay = relay(&env, &sink, &letters);
        env.run_while(&relay, letters.wait_for(40)).await;
        assert_eq!(sorted(&letters), (120..240).step_by(3).collect::<Vec<_>>());
    }
}

#[tokio::test(start_paused = true)]
async fn what_one_process_did_not_hand_over_the_next_one_does() {
    let env = TestEnv::with((0..9).map(|n| event(n, n))).await;
    let (sink, letters) = (refusing(), Recorder::new(Capabilities::default()));
    letters.down(true);
    env.run_for(&relay(&env, &sink, &letters), 5 * S).await;
    letters.down(false);
    env.run_for(&relay(&env, &sink, &letters), 5 * S).await;
    assert_eq!(sorted(&letters), [0, 3, 6]);
}

#[tokio::test(start_paused = true)]
async fn a_letter_that_is_refused_never_dies_and_holds_no_other_up() {
    let env = TestEnv::with((0..30).map(|n| event(n, n))).await;
    let (sink, letters) =
        (refusing(), Recorder::new(Capabilities { batch_max: 4, concurrency: 1, prefix: false, system: None }));
    let refused = Arc::new(AtomicUsize::default());
    let times = refused.clone();
    letters.script(move |delivery| {
        if memory::version(delivery) == 0 && times.fetch_add(1, Ordering::SeqCst) < 3 {
            return Answer::Say(Outcome::dead("http_413", "too large"));
        }
        Answer::Say(Outcome::DELIVERED)
    });
    let relay = relay(&env, &sink, &letters);
    env.run_while(&relay, async {
        letters.wait_for(9).await;
        assert!(refused.load(Ordering::SeqCst) <= 1, "the others do not wait for it");
        tokio::time::sleep(1000 * S).await;
    })
    .await;
    assert_eq!(refused.load(Ordering::SeqCst), 4, "until it is taken");
    let stats = env.stats().await;
    assert_eq!((stats.dead, stats.total), (10, 30), "no new event, no new death");
}

/// A broker may refuse a letter for a reason of its own with what looks like an outage.
#[tokio::test(start_paused = true)]
async fn letters_with_an_unknown_end_hold_no_other_up() {
    let env = TestEnv::with((0..900).map(|n| event(n, n))).await;
    let (sink, letters) = (refusing(), Recorder::new(Capabilities::default()));
    // First as many as are sent together, then every second one.
    letters.script(|delivery| match memory::version(delivery) {
        n if n < 16 * 3 || n % 2 == 0 => Outcome::ambiguous("mqtt_no_subscriber", "no"),
        _ => Outcome::DELIVERED,
    });
    let relay = relay(&env, &sink, &letters);
    let others = tokio::time::timeout(S, letters.wait_for(142));
    env.run_while(&relay, others).await.expect("no wait as for an outage");
}

/// The first letters would be due again before the last one was tried.
#[tokio::test(start_paused = true)]
async fn a_bounded_run_does_not_wait_for_a_sink_of_letters_that_takes_none() {
    let (env, sink, letters) = dying(400, S).await;
    letters.script(|_| Outcome::dead("http_413", "too large"));
    let relay = relay(&env, &sink, &letters);
    let drained = tokio::time::timeout(3_600 * S, relay.drain(None)).await.expect("it ends");
    assert_eq!(drained.expect("drained").dead, 400);
    let refused = letters.calls();
    assert!((2..30).contains(&refused), "{refused} calls");
    letters.script(|_| Outcome::DELIVERED);
    letters.takes(Duration::ZERO);
    relay.drain(None).await.expect("drained");
    assert_eq!(letters.versions().len(), 400 - refused, "the next run continues");
}

#[tokio::test(start_paused = true)]
async fn a_lane_that_ends_waits_for_one_call_of_the_sink_of_letters() {
    let (env, sink, letters) = dying(100, 3 * S).await;
    let relay = relay(&env, &sink, &letters);
    let calls = env.run_while(&relay, async {
        letters.wait_for(1).await;
        letters.calls()
    });
    let calls = calls.await;
    assert!(letters.calls() <= calls + 1, "{} calls, {calls} at the stop", letters.calls());
    assert_eq!(letters.versions().len(), letters.calls(), "none was dropped");
}

#[tokio::test(start_paused = true)]
async fn a_sink_of_letters_that_hangs_or_panics_holds_nobody_up() {
    for hangs in [true, false] {
        let env = TestEnv::with((0..30).map(|n| event(n, n))).await;
        let (sink, letters) = (refusing(), Recorder::new(Capabilities::default()));
        letters.script(move |_| if hangs { Answer::Hang } else { Answer::Panic });
        let relay = relay(&env, &sink, &letters);
        env.run_while(&relay, async {
            tokio::time::sleep(5 * S).await;
            env.append((30..60).map(|n| event(n, n))).await;
            tokio::time::sleep(30 * S).await;
            assert_eq!(env.stats().await.pending, 0);
            letters.script(|_| Outcome::DELIVERED);
            tokio::time::sleep(1000 * S).await;
        })
        .await;
        let distinct: BTreeSet<_> = letters.versions().into_iter().collect();
        assert_eq!((distinct.len(), relay.metrics().dead_letters()), (20, 20), "hangs: {hangs}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_letter_that_was_sent_and_not_noted_is_sent_again_under_the_same_id() {
    let env = TestEnv::with([event(0, 0)]).await;
    let (sink, letters) = (refusing(), Recorder::new(Capabilities::default()));
    let (lost, down) = (AtomicUsize::default(), || {
        Error::new(ErrorKind::Unavailable, "simulate", "store_down", "it went down before that")
    });
    let nothing_noted = FailsAt("hand_over", move || (lost.fetch_add(1, Ordering::SeqCst) < 3).then(down));
    let store = Arc::new(env.store.client(Some(Arc::new(nothing_noted))));
    env.run_for(&relay_on(&env, &sink, &letters, store), 60 * S).await;
    assert_eq!(letters.versions(), [0; 4]);
    assert_eq!(ids(&letters).len(), 1, "whoever takes them can know");
}

#[tokio::test(start_paused = true)]
async fn an_outage_ends_when_the_letter_it_is_about_is_discarded() {
    let env = TestEnv::with([event(0, 0)]).await;
    let (sink, letters) = (refusing(), Recorder::new(Capabilities::default()));
    letters.script(|_| Outcome::dead("http_413", "too large"));
    let relay = relay(&env, &sink, &letters);
    env.run_while(&relay, async {
        tokio::time::sleep(1000 * S).await;
        let outage = relay.metrics().dead_letters_outage().expect("it waits, and is tried again");
        assert_eq!(outage.code, "http_413");
        let (name, all) = (env.subscription().name, Selection::default());
        assert_eq!(env.store.change(&name, &Change::Discard, &all).await.expect("discarded").count, 1);
        tokio::time::sleep(1000 * S).await;
        assert_eq!(relay.metrics().dead_letters_outage(), None);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_replay_that_dies_again_is_another_letter() {
    let env = TestEnv::with([event(0, 0)]).await;
    let (sink, letters) = (refusing(), Recorder::new(Capabilities::default()));
    let relay = relay(&env, &sink, &letters);
    env.run_while(&relay, async {
        for deaths in 1..4 {
            letters.wait_for(deaths).await;
            let name = env.subscription().name;
            assert_eq!(
                env.store.change(&name, &Change::Retry, &Selection::default()).await.expect("replayed").count,
                1
            );
        }
        letters.wait_for(4).await;
        // Nothing more arrives.
        tokio::time::sleep(600 * S).await;
    })
    .await;
    assert_eq!((letters.versions().len(), ids(&letters).len()), (4, 4));
}
