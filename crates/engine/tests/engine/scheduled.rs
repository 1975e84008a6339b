//! A scheduled relay that fails, and a bounded run whose store does not answer.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Capabilities, Error, ErrorKind, Outcome, Result};
use postbox_engine::{Every, RelaySettings, SupervisedRelay, TokioClock};
use postbox_memory::{Call, Wire};
use tokio_util::sync::CancellationToken;

use postbox_testkit::memory::{FailsAt, Recorder, TestEnv, event, fast};

const S: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(86_400);

/// A person mends it, and the run does not wait until tomorrow.
#[tokio::test(start_paused = true)]
async fn a_scheduled_run_that_ended_with_an_error_goes_on_once_that_is_mended() {
    for (panics, code) in [(false, "table_missing"), (true, "relay_panicked")] {
        let env = TestEnv::with((0..200).map(|n| event(n % 20, n))).await;
        let zero = tokio::time::Instant::now();
        let fails = move || {
            let fails = (DAY..DAY + 60 * S).contains(&zero.elapsed());
            assert!(!(fails && panics), "a defect");
            fails.then(|| Error::new(ErrorKind::Conflict, "simulate", "table_missing", "it has another name"))
        };
        let log = Arc::new(env.store.client(Some(Arc::new(FailsAt("acquire", fails)))));
        let sink = Recorder::new(Capabilities::default());
        let relay = SupervisedRelay::new(env.relay_on(log, sink.clone(), fast()), Some(Box::new(Every(DAY))));
        let stop = CancellationToken::new();
        let operate = async {
            tokio::time::sleep(DAY + 30 * S).await;
            assert_eq!(relay.fault(true).map(|fault| fault.code().to_owned()).as_deref(), Some(code));
            tokio::time::sleep(60 * S).await;
            assert!(relay.fault(true).is_none());
            assert_eq!(env.stats().await.dispatched, 200, "{code}");
            env.append([event(0, 200)]).await;
            tokio::time::sleep(3_600 * S).await;
            assert_eq!(sink.arrivals().len(), 200, "what comes later waits for its time");
            stop.cancel();
        };
        tokio::join!(Arc::clone(&relay).supervise(Arc::new(TokioClock::new()), stop.clone()), operate);
        sink.assert_in_order();
    }
}

/// Never answers calls of this operation.
struct HangsAt(&'static str);

#[async_trait]
impl Wire for HangsAt {
    async fn carry(&self, call: Arc<Call>) -> Result<()> {
        if call.operation == self.0 {
            std::future::pending::<()>().await;
        }
        call.execute();
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn a_stop_of_a_bounded_run_does_not_wait_for_a_store_that_does_not_answer() {
    for (operation, lost) in [("subscribe", 0), ("acquire", 0), ("settle", 1), ("release", 1), ("pause", 0)] {
        let env = TestEnv::with([event(1, 0)]).await;
        let log = Arc::new(env.store.client(Some(Arc::new(HangsAt(operation)))));
        let settings = RelaySettings { drain_timeout: 2 * S, ..fast() };
        let sink = Recorder::new(Capabilities::default());
        if operation == "pause" {
            sink.answers(0, Outcome::Gone { code: "http_410".into(), error: "gone".into() });
        }
        let builder = env.builder_on(log.clone(), env.subscription(), settings).admin(log).sink(sink);
        let relay = builder.build().expect("built");
        let stop = CancellationToken::new();
        let stopping = async {
            tokio::time::sleep(20 * S).await;
            stop.cancel();
        };
        let draining = tokio::time::timeout(30 * S, relay.drain_until(None, stop.clone()));
        let ended = tokio::join!(draining, stopping).0.unwrap_or_else(|_| panic!("it waits for {operation}"));
        assert_eq!(ended.expect("stopped").lanes_lost, lost, "{operation}");
    }
}
