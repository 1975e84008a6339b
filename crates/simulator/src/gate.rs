//! Simulated time for the threads of a SQLite store, and the gate that makes their order the same
//! in every run.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::ThreadId;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::{Clock, lock};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

/// The time of one world. Only the thread of the world's runtime can read the runtime's time; other
/// threads get the value it last saw.
pub(crate) struct SimTime {
    zero: Instant,
    home: ThreadId,
    last_micros: AtomicU64,
}

impl SimTime {
    pub(crate) fn new() -> Self {
        Self { zero: Instant::now(), home: std::thread::current().id(), last_micros: AtomicU64::new(0) }
    }

    pub(crate) fn zero(&self) -> Instant {
        self.zero
    }

    fn is_home(&self) -> bool {
        std::thread::current().id() == self.home
    }

    pub(crate) fn elapsed(&self) -> Duration {
        if self.is_home() {
            let elapsed = self.zero.elapsed();
            self.last_micros.store(elapsed.as_micros() as u64, Ordering::Relaxed);
            return elapsed;
        }
        Duration::from_micros(self.last_micros.load(Ordering::Relaxed))
    }
}

/// A server's clock.
pub(crate) struct ServerClock {
    pub(crate) time: Arc<SimTime>,
    /// Where jobs of a store's threads wait until they may begin. The memory store has none.
    pub(crate) gate: Option<Arc<Gate>>,
}

#[async_trait]
impl Clock for ServerClock {
    fn now(&self) -> Timestamp {
        Timestamp::UNIX_EPOCH + self.time.elapsed()
    }

    fn monotonic(&self) -> Duration {
        // A store's thread asks once, when it takes a job from its queue.
        if let Some(gate) = self.gate.as_ref().filter(|_| !self.time.is_home()) {
            gate.arrive();
        }
        self.time.elapsed()
    }

    async fn sleep(&self, duration: Duration) {
        sleep(duration).await;
    }
}

/// Holds each job of a store's threads until its caller waits for it, and holds the world until the
/// job has answered. Otherwise it would be random whether a call finds its answer at once or is
/// polled again.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
    /// Notified when a job committed something. Wakes in the order of waiting, unlike the store's
    /// own channel, whose order is random.
    pub(crate) committed: Notify,
}

#[derive(Default)]
struct GateState {
    /// A job is waiting at the gate.
    arrived: bool,
    /// The job may proceed.
    granted: bool,
    /// The call's waker was called.
    woken: bool,
}

impl Wake for Gate {
    fn wake(self: Arc<Self>) {
        self.lock().woken = true;
        self.changed.notify_all();
    }
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, GateState> {
        lock(&self.state)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, GateState>) -> MutexGuard<'a, GateState> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn arrive(&self) {
        let mut state = self.lock();
        state.arrived = true;
        self.changed.notify_all();
        while !state.granted {
            state = self.wait(state);
        }
        state.granted = false;
    }

    /// Polls a call once. If the call waits for a job, that job is done when this returns.
    pub(crate) fn step<T>(self: &Arc<Self>, call: Pin<&mut (dyn Future<Output = T> + '_)>) -> Poll<T> {
        self.lock().woken = false;
        let waker = Waker::from(self.clone());
        let polled = call.poll(&mut Context::from_waker(&waker));
        if polled.is_pending() {
            let mut state = self.lock();
            while !state.woken {
                if std::mem::take(&mut state.arrived) {
                    state.granted = true;
                    self.changed.notify_all();
                }
                state = self.wait(state);
            }
        }
        polled
    }

    /// Runs a call to its end at once.
    pub(crate) fn run<T>(self: &Arc<Self>, call: impl Future<Output = T>) -> T {
        let mut call = std::pin::pin!(call);
        loop {
            if let Poll::Ready(answer) = self.step(call.as_mut()) {
                return answer;
            }
        }
    }
}
