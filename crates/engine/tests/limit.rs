//! A bounded drain keeps its limit, exactly.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod bench;

use std::time::Duration;

use bench::{Answer, Bench, Recorder, event, fast};
use postbox_core::{Admin as _, Capabilities, Outcome, Selection, State};

#[tokio::test(start_paused = true)]
async fn drain_stops_at_its_limit() {
    let bench = Bench::new().await;
    bench.append((0..100).map(|n| event(n, n))).await;
    let sink = Recorder::new(Capabilities::default());
    let relay = bench.relay(sink.clone(), fast());
    assert_eq!(relay.drain(Some(30)).await.expect("drained").dispatched, 30);
    assert_eq!(bench.stats().await.pending, 70);
    assert_eq!(relay.drain(Some(1_000)).await.expect("drained").dispatched, 70);
}

/// A slow answer makes a call outlive its batch, and what is behind it wait; it is delivered within the limit all the same.
#[tokio::test(start_paused = true)]
async fn a_limit_is_kept_exactly_however_slow_the_target_is() {
    for (keys, limit, seconds) in [(1, 2, 1), (1, 5, 1), (3, 7, 1), (40, 11, 1), (3, 7, 0)] {
        for (capabilities, lanes) in bench::all_capabilities().into_iter().flat_map(|it| [(it, 1), (it, 3)]) {
            let bench = Bench::with_lanes(lanes).await;
            bench.append((0..40).map(|n| event(n % keys, n))).await;
            let sink = Recorder::new(capabilities);
            sink.takes(Duration::from_secs(seconds));
            let relay = bench.relay(sink.clone(), fast());
            for done in (limit..=40).step_by(limit as usize) {
                let drained = relay.drain(Some(limit as usize)).await.expect("drained");
                assert_eq!(drained.dispatched, limit, "{keys} keys, {seconds} s, {lanes} lanes, after {done}");
            }
            assert_eq!(relay.drain(Some(1_000)).await.expect("drained").dispatched, 40 % limit);
            sink.assert_in_order();
            assert_eq!(sink.arrivals().len(), 40);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_limit_is_kept_when_the_target_is_down() {
    for capabilities in bench::all_capabilities() {
        let bench = Bench::with_lanes(2).await;
        bench.append((0..40).map(|n| event(n, n))).await;
        let sink = Recorder::new(capabilities);
        sink.down(true);
        let drained = bench.relay(sink.clone(), fast()).drain(Some(3)).await.expect("drained");
        assert!((1..=3).contains(&drained.tried()) && drained.dispatched == 0, "{drained:?}");
        assert_eq!(bench.stats().await.pending, 40);
    }
}

/// What cannot go now takes no place of what can: a later time, a key whose head waits for its retry, what was taken out.
#[tokio::test(start_paused = true)]
async fn a_limit_counts_only_what_goes_out() {
    let bench = Bench::new().await;
    let sink = Recorder::new(Capabilities { batch_max: 1, concurrency: 16, prefix: false });
    sink.script(|delivery| match (bench::version(delivery), delivery.attempt) {
        (0, 1) => {
            let (code, error) = ("http_500".into(), "boom".into());
            Answer::Say(Outcome::Retry { code, error, after: Some(Duration::from_secs(60)) })
        }
        _ => Answer::Say(Outcome::DELIVERED),
    });
    let relay = bench.relay(sink.clone(), fast());
    bench.append([event(1, 0)]).await;
    let drained = relay.drain(Some(5)).await.expect("drained");
    assert_eq!((drained.failed, drained.tried()), (1, 1));
    let later = bench.now() + Duration::from_secs(3_600);
    bench.append((1..4).map(|n| event(1, n))).await;
    bench.append((4..7).map(|n| event(n, n).deliver_at(later))).await;
    bench.append((7..10).map(|n| event(n, n))).await;
    let taken_out =
        bench.list(State::Pending).await.iter().map(|record| record.event.id).nth(6).expect("of the last three");
    let selection = Selection { ids: Some(vec![taken_out]), ..Selection::default() };
    assert_eq!(bench.store.discard(&bench.subscription().name, &selection).await.expect("discarded").count, 1);
    assert_eq!(relay.drain(Some(1)).await.expect("drained").dispatched, 1);
    assert_eq!(relay.drain(Some(5)).await.expect("drained").dispatched, 1, "the last one");
    let versions: Vec<i64> = sink.arrivals().iter().map(|arrival| arrival.version).collect();
    assert_eq!(versions, [8, 9]);
}
