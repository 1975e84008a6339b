//! A subscription that keeps to a rate.

use std::time::Duration;

use postbox_core::Outcome;
use postbox_engine::RelaySettings;

use crate::support::{self, TestEnv, event, fast};

const S: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn a_rate_is_kept_and_costs_no_attempt() {
    for capabilities in support::all_capabilities() {
        for lanes in [1, 4] {
            let env = TestEnv::with_lanes(lanes).await;
            env.append((0..500).map(|n| event(n % 50, n))).await;
            let (sink, relay) = env.recorded(capabilities, RelaySettings { rate: "50/s".parse().ok(), ..fast() });
            // The first attempt of each tenth event fails; its second one is paced too.
            sink.script(|delivery| match (support::version(delivery) % 10, delivery.attempt) {
                (0, 1) => Outcome::retry("http_500", "boom"),
                _ => Outcome::DELIVERED,
            });
            let began = tokio::time::Instant::now();
            env.run_while(&relay, sink.wait_for(500)).await;
            let took = began.elapsed();
            // 550 calls at 50 a second are 11 s, less a burst; what a sink of whole chunks stops
            // behind a failure was sent too, and goes again.
            assert!((10 * S..25 * S).contains(&took), "{took:?} for {capabilities:?}, {lanes} lanes");
            assert!(sink.arrivals().iter().all(|arrival| arrival.attempt <= 2));
            assert_eq!(env.stats().await.dispatched, 500);
            sink.assert_in_order();
        }
    }
}
