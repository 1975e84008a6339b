//! A subscription that keeps to a rate.

#![allow(clippy::unwrap_used)]

mod bench;

use std::time::Duration;

use bench::{Answer, Bench, Recorder, event};
use postbox_core::Outcome;
use postbox_engine::RelaySettings;
use tokio_util::sync::CancellationToken;

use crate::bench::fast;

const S: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn a_rate_is_kept_and_costs_no_attempt() {
    for capabilities in bench::all_capabilities() {
        for lanes in [1, 4] {
            let bench = Bench::with_lanes(lanes).await;
            bench.append((0..500).map(|n| event(n % 50, n))).await;
            let sink = Recorder::new(capabilities);
            // The first attempt of each tenth event fails; its second one is paced too.
            sink.script(|delivery| match (bench::version(delivery) % 10, delivery.attempt) {
                (0, 1) => Answer::Say(Outcome::retry("http_500", "boom")),
                _ => Answer::Say(Outcome::DELIVERED),
            });
            let relay = bench.relay(sink.clone(), RelaySettings { rate: "50/s".parse().ok(), ..fast() });
            let began = tokio::time::Instant::now();
            let stop = CancellationToken::new();
            tokio::join!(async { relay.run(stop.clone()).await.expect("it ran") }, async {
                sink.wait_for(500).await;
                stop.cancel();
            });
            let took = began.elapsed();
            // 550 calls at 50 a second are 11 s, less a burst; what a sink of whole chunks stops
            // behind a failure was sent too, and goes again.
            assert!((10 * S..25 * S).contains(&took), "{took:?} for {capabilities:?}, {lanes} lanes");
            assert!(sink.arrivals().iter().all(|arrival| arrival.attempt <= 2));
            assert_eq!(bench.stats().await.dispatched, 500);
            sink.assert_in_order();
        }
    }
}
