//! Relays that die, lanes that are lost, stores that go away.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod bench;

use std::time::Duration;

use bench::{Answer, Bench, Recorder, event, fast};
use postbox_core::{Capabilities, Outcome, State};
use postbox_engine::RelaySettings;
use tokio_util::sync::CancellationToken;

const S: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn a_call_that_died_with_its_relay_is_repeated_after_the_lease() {
    let bench = Bench::new().await;
    bench.append([event(1, 1), event(1, 2), event(2, 3)]).await;
    let stuck = Recorder::new(Capabilities::default());
    stuck.script(|delivery| match bench::version(delivery) {
        1 => Answer::Hang,
        _ => Answer::Say(Outcome::DELIVERED),
    });
    let settings = RelaySettings { deliver_timeout: 600 * S, ..fast() };
    let killed = bench.relay(stuck, settings.clone());
    let died = tokio::time::timeout(3 * S, killed.run(CancellationToken::new())).await;
    assert!(died.is_err(), "dropped in the middle");
    let waiting = bench.list(State::Retrying).await;
    assert_eq!(waiting[0].code.as_deref(), Some("in_flight"), "its call outlived its batch");
    let sink = Recorder::new(Capabilities::default());
    bench.run_for(&bench.relay(sink.clone(), settings), 8 * S).await;
    let versions: Vec<i64> = sink.arrivals().iter().map(|arrival| arrival.version).collect();
    assert_eq!(versions, [1, 2], "the lease is 5 s, the call's limit 600 s");
}
