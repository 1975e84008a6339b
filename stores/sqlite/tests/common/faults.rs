//! Faults in calls of a store in this process: the caller goes away, and the writing thread does
//! its job all the same.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::future::BoxFuture;
use jiff::Timestamp;
use postbox_core::{Clock, Receive, Store};
use postbox_sqlite::{SqliteConfig, SqliteStore};
use postbox_testkit::conformance::faults::{Asked, Call, CallFaults, Late, Place};
use tokio::sync::watch;

/// Name of the writing thread. Each of its jobs first checks that its caller is still there, then
/// asks the clock how long the job waited.
const WRITER: &str = "postbox-write";
/// Older than any message id.
const NEVER: Duration = Duration::from_secs(100 * 365 * 24 * 3_600);

/// The machine's clock, which stops the writing thread when a job asks for the time.
struct Gate {
    began: Instant,
    shut: Mutex<bool>,
    opened: Condvar,
    stands: watch::Sender<bool>,
}

impl Gate {
    fn shut(&self, shut: bool) {
        *self.shut.lock().expect("no panic while held") = shut;
        self.opened.notify_all();
    }
}

#[async_trait]
impl Clock for Gate {
    fn now(&self) -> Timestamp {
        Timestamp::now()
    }

    fn monotonic(&self) -> Duration {
        if std::thread::current().name() == Some(WRITER) {
            let mut shut = self.shut.lock().expect("no panic while held");
            while *shut {
                self.stands.send_replace(true);
                shut = self.opened.wait(shut).expect("no panic while held");
            }
            self.stands.send_replace(false);
        }
        self.began.elapsed()
    }

    async fn sleep(&self, duration: Duration) {
        tokio::time::sleep(duration).await;
    }
}

/// A second store on the same file, which can be stopped.
pub(crate) struct SqliteFaults {
    store: SqliteStore,
    gate: Arc<Gate>,
    /// A store as in another process.
    other: SqliteStore,
}

impl SqliteFaults {
    pub(crate) async fn new(config: SqliteConfig, other: SqliteStore) -> Self {
        let (began, shut) = (Instant::now(), Mutex::new(false));
        let gate = Arc::new(Gate { began, shut, opened: Condvar::new(), stands: watch::Sender::new(false) });
        let store = SqliteStore::open_with_clock(config, gate.clone()).await.expect("opened");
        Self { store, gate, other }
    }

    pub(crate) fn sqlite(&self) -> &SqliteStore {
        &self.store
    }
}

#[async_trait]
impl CallFaults for SqliteFaults {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    /// The thread does one job after the other. While it is stopped, the caller goes on through the
    /// other store.
    fn again(&self) -> Arc<dyn Store> {
        Arc::new(self.other.clone())
    }

    fn places(&self, _call: Call) -> &'static [Place] {
        &[Place::Start]
    }

    async fn lose_answer(&self, call: Call, asked: Asked) {
        self.delay(call, Place::Start, asked).await.after(Box::pin(async {})).await;
    }

    async fn delay(&self, call: Call, _place: Place, asked: Asked) -> Box<dyn Late> {
        let mut stands = self.gate.stands.subscribe();
        self.gate.shut(true);
        tokio::select! {
            heard = asked => panic!("{call:?} wrote nothing: {heard:?}"),
            stands = stands.wait_for(|stands| *stands) => drop(stands.expect("we hold the sender")),
        }
        Box::new(Stopped { store: self.store.clone(), gate: self.gate.clone() })
    }
}

struct Stopped {
    store: SqliteStore,
    gate: Arc<Gate>,
}

#[async_trait]
impl Late for Stopped {
    async fn after(self: Box<Self>, meanwhile: BoxFuture<'static, ()>) {
        meanwhile.await;
        self.gate.shut(false);
        // Waits for the stopped job, since this one runs after it. Fails where that job removed the
        // schema.
        let _ = self.store.forget(NEVER).await;
    }
}
