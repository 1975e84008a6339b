//! What may be sent while something is being settled.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{BatchLimit, Capabilities, Error, ErrorKind, Outcome, Result};
use postbox_engine::RelaySettings;
use postbox_memory::{Call, Wire};
use tokio::sync::watch;

use postbox_testkit::memory::{FailsAt, Recorder, TestEnv, event, fast, version};

/// A store whose settlements wait until the gate opens.
struct Gate(watch::Receiver<bool>);

#[async_trait]
impl Wire for Gate {
    async fn carry(&self, call: Arc<Call>) -> Result<()> {
        if call.operation == "settle" {
            self.0.clone().wait_for(|open| *open).await.expect("opened some time");
        }
        call.execute();
        Ok(())
    }
}

/// Returns how many events of batches of ten arrive while no settlement ends. The rest come later.
async fn arrive_meanwhile(answer: impl Fn(i64) -> Outcome + Send + Sync + 'static) -> usize {
    let env = TestEnv::with((0..100).map(|n| event(n, n))).await;
    let (open, gate) = watch::channel(false);
    let sink = Recorder::new(Capabilities { batch_max: 10, concurrency: 1, prefix: true, system: None });
    sink.script(move |delivery| match delivery.attempt {
        1 => answer(version(delivery)),
        _ => Outcome::DELIVERED,
    });
    let log = Arc::new(env.store.client(Some(Arc::new(Gate(gate)))));
    let batch = BatchLimit { events: 10, ..BatchLimit::default() };
    let relay = env.relay_on(log, sink.clone(), RelaySettings { batch, ..fast() });
    let meanwhile = env.run_while(&relay, async {
        tokio::time::sleep(Duration::from_secs(30)).await;
        let meanwhile = sink.arrivals().len();
        open.send_replace(true);
        while env.stats().await.pending > 0 {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        meanwhile
    });
    let meanwhile = meanwhile.await;
    assert_eq!(env.stats().await.dispatched, 100);
    sink.assert_in_order();
    meanwhile
}

/// One batch is being settled and one is being sent, so a crash repeats at most these two.
#[tokio::test(start_paused = true)]
async fn one_batch_goes_out_while_the_one_before_is_settled() {
    assert_eq!(arrive_meanwhile(|_| Outcome::DELIVERED).await, 20);
}

/// A failure is written before anything else is sent, because the next event of its key must wait.
#[tokio::test(start_paused = true)]
async fn nothing_goes_out_before_a_failure_is_written() {
    assert_eq!(arrive_meanwhile(|version| fails(version, 3)).await, 9, "the rest of its batch");
    assert_eq!(arrive_meanwhile(|version| fails(version, 13)).await, 19, "the rest of its batch");
}

/// Otherwise it would arrive again, although nothing abrupt happened.
#[tokio::test(start_paused = true)]
async fn what_arrived_is_settled_though_the_read_beside_it_fails_for_good() {
    let env = TestEnv::with((0..100).map(|n| event(n, n))).await;
    let pages = AtomicUsize::new(0);
    // The first page is that of an empty window, and the second one is read ahead.
    let refused = move || {
        let error = || Error::new(ErrorKind::Unauthorized, "simulate", "permission_denied", "it may not read");
        (pages.fetch_add(1, Ordering::SeqCst) == 1).then(error)
    };
    let log = Arc::new(env.store.client(Some(Arc::new(FailsAt("page", refused)))));
    let sink = Recorder::new(Capabilities { batch_max: 10, concurrency: 1, prefix: true, system: None });
    let batch = BatchLimit { events: 10, ..BatchLimit::default() };
    let relay = env.relay_on(log, sink.clone(), RelaySettings { batch, ..fast() });
    let error = relay.drain(None).await.expect_err("it may not read");
    assert_eq!((error.code(), sink.arrivals().len()), ("permission_denied", 10));
    env.relay(sink.clone(), fast()).drain(None).await.expect("drained");
    assert_eq!(sink.versions(), (0..100).collect::<Vec<i64>>(), "each once");
}

fn fails(version: i64, failing: i64) -> Outcome {
    match version == failing {
        true => Outcome::retry("http_500", "boom"),
        false => Outcome::DELIVERED,
    }
}
