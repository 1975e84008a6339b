//! Limits the number of open connections, and chooses which one is closed for a newcomer.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use postbox_core::{Clock, lock};
use tokio::sync::Notify;
use tracing::warn;

use super::ServeLimits;

/// How long a connection is kept after an answer: longer than proxies keep theirs (commonly 60 s).
/// If we close first, a request that is on its way is lost, and the proxy answers 502.
const KEEP_ALIVE: Duration = Duration::from_secs(75);
/// Interval between log lines about evicted connections, and between those about failed accepts.
const LOG_EVERY: Duration = Duration::from_secs(60);
/// Longest pause after a failed accept, so that it is not repeated in a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The numbers of "too many open files" on every Unix: of the whole system, and of this process.
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;

/// All connections of a listener.
pub(super) struct ConnectionLimiter {
    limits: ServeLimits,
    clock: Arc<dyn Clock>,
    slots: Mutex<Slots>,
    /// Notified when a connection has ended, and when one is idle while all slots are taken.
    freed: Notify,
}

#[derive(Default)]
struct Slots {
    open: usize,
    /// Connections asked to close that are still open.
    closing: usize,
    /// Connections evicted since the last log line, and the time of that line.
    evicted: u64,
    logged_at: Option<Duration>,
    /// The time of the last log line about a failed accept.
    failure_logged_at: Option<Duration>,
    /// Connections that wait for their client, longest first: numbers grow with time.
    idle: BTreeMap<u64, Idle>,
    next: u64,
}

struct Idle {
    since: Duration,
    waits_for: WaitsFor,
    close: Arc<Notify>,
}

/// What the client of an idle connection has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WaitsFor {
    /// Send the head of its first request.
    Head,
    /// Read the last answer, or send the head of another request.
    Next,
    /// Send the rest of a body.
    Body,
}

impl ConnectionLimiter {
    pub(super) fn new(limits: ServeLimits, clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self { limits, clock, slots: Mutex::default(), freed: Notify::new() })
    }

    pub(super) fn limits(&self) -> ServeLimits {
        self.limits
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        lock(&self.slots)
    }

    /// Returns a slot for a newcomer, evicting the longest idle connection if necessary.
    /// Cancel-safe.
    pub(super) async fn acquire(self: &Arc<Self>) -> Arc<Slot> {
        loop {
            {
                let mut slots = self.slots();
                if slots.open < self.limits.connections.max(1) {
                    break;
                }
                if slots.closing == 0 {
                    slots.evict();
                }
            }
            self.freed.notified().await;
        }
        self.admit()
    }

    /// Returns a slot even if all are taken.
    pub(super) fn admit(self: &Arc<Self>) -> Arc<Slot> {
        self.slots().open += 1;
        // Not idle yet: its request may already be here.
        let (close, asked) = (Arc::new(Notify::new()), AtomicBool::new(false));
        Arc::new(Slot { limiter: Arc::clone(self), close, asked, state: Mutex::default() })
    }

    /// Waits before the next accept, after one that failed. If no more files can be opened, the
    /// longest idle connection is closed. There may be no newcomer yet, because the kernel takes a
    /// file before it looks for one; then the next newcomer finds a file free.
    pub(super) async fn recover(&self, error: &io::Error) {
        let is_out_of_files = matches!(error.raw_os_error(), Some(ENFILE | EMFILE));
        {
            let (mut slots, now) = (self.slots(), self.clock.monotonic());
            if is_out_of_files && slots.closing == 0 {
                slots.evict();
            }
            // Nearly every accept may fail, which would be thousands of lines.
            if slots.failure_logged_at.is_none_or(|at| now.saturating_sub(at) >= LOG_EVERY) {
                slots.failure_logged_at = Some(now);
                let cure = "raise the limit of open files (ulimit -n), or lower the number of connections";
                warn!(%error, open = slots.open, cure, "accept failed");
            }
        }
        tokio::select! {
            () = self.freed.notified(), if is_out_of_files => {}
            () = self.clock.sleep(ACCEPT_PAUSE) => {}
        }
    }

    /// Closes connections whose first or next request head did not arrive in time.
    pub(super) fn close_overdue(&self) {
        let now = self.clock.monotonic();
        self.log_evicted(now);
        let first = self.limits.header_timeout;
        self.close(|idle| {
            let most = match idle.waits_for {
                WaitsFor::Head => first,
                WaitsFor::Next => first.max(KEEP_ALIVE),
                WaitsFor::Body => return false,
            };
            now.saturating_sub(idle.since) >= most
        });
    }

    /// Logs evictions at a limited rate, so that a crowd cannot flood the log.
    fn log_evicted(&self, now: Duration) {
        let mut slots = self.slots();
        let due = slots.logged_at.is_none_or(|at| now.saturating_sub(at) >= LOG_EVERY);
        if slots.evicted > 0 && due {
            let count = std::mem::take(&mut slots.evicted);
            slots.logged_at = Some(now);
            let limit = self.limits.connections;
            warn!(closed = count, limit, "connection limit reached");
        }
    }

    /// Closes connections that have waited this long for a head, or for the rest of a body.
    pub(super) fn close_unfinished(&self, head: Duration, body: Duration) {
        let now = self.clock.monotonic();
        self.close(|idle| {
            let most = if idle.waits_for == WaitsFor::Body { body } else { head };
            now.saturating_sub(idle.since) >= most
        });
    }

    fn close(&self, wanted: impl Fn(&Idle) -> bool) {
        let mut slots = self.slots();
        let Slots { idle, closing, .. } = &mut *slots;
        idle.retain(|_, idle| {
            let closes = wanted(idle);
            if closes {
                *closing += 1;
                idle.close.notify_one();
            }
            !closes
        });
    }
}

impl Slots {
    /// Closes the longest idle connection, if there is one.
    fn evict(&mut self) {
        if let Some((_, idle)) = self.idle.pop_first() {
            self.evicted += 1;
            self.closing += 1;
            idle.close.notify_one();
        }
    }
}

/// A connection's slot. Dropping it frees the slot.
pub(super) struct Slot {
    limiter: Arc<ConnectionLimiter>,
    close: Arc<Notify>,
    /// Whether it was asked to close. From then on, reads ask the kernel and not only the runtime.
    asked: AtomicBool,
    state: Mutex<SlotState>,
}

#[derive(Default)]
struct SlotState {
    /// Requests in service, and bodies with bytes to come.
    requests: usize,
    bodies: usize,
    has_answered: bool,
    /// Heads and pieces of bodies that have arrived.
    arrivals: u64,
    /// Its number among the idle connections, and what it waits for.
    idle: Option<(u64, WaitsFor)>,
    closing: bool,
}

impl SlotState {
    fn waits_for(&self) -> Option<WaitsFor> {
        match (self.requests, self.bodies) {
            (0, _) if self.has_answered => Some(WaitsFor::Next),
            (0, _) => Some(WaitsFor::Head),
            (_, 0) => None,
            _ => Some(WaitsFor::Body),
        }
    }
}

impl Slot {
    /// Resolves when the connection is asked to close. From the first poll of this on, the
    /// connection counts as idle while its client has to act. So poll the connection first.
    pub(super) async fn closed(&self) {
        self.change(|_| {});
        self.close.notified().await;
        self.asked.store(true, Relaxed);
    }

    pub(super) fn is_asked(&self) -> bool {
        self.asked.load(Relaxed)
    }

    /// Returns how many heads and pieces of bodies have arrived.
    pub(super) fn arrivals(&self) -> u64 {
        lock(&self.state).arrivals
    }

    /// Whether a connection that was asked to close stays open, because all of its request has
    /// arrived since. Then another one is closed in its place.
    pub(super) fn stays(&self) -> bool {
        let mut state = lock(&self.state);
        if state.waits_for().is_some() {
            return false;
        }
        (state.idle, state.closing) = (None, false);
        let mut slots = self.limiter.slots();
        slots.closing -= 1;
        drop(slots);
        self.asked.store(false, Relaxed);
        self.limiter.freed.notify_one();
        true
    }

    /// Marks a request as in service until the result is dropped.
    pub(super) fn serve(self: &Arc<Self>) -> InService {
        self.change(|state| {
            state.requests += 1;
            state.arrivals += 1;
        });
        InService(Arc::clone(self))
    }

    /// Tracks a body until its client has sent all of it.
    pub(super) fn track(self: &Arc<Self>, body: Incoming) -> TrackedBody {
        let slot = (!body.is_end_stream()).then(|| {
            self.change(|state| state.bodies += 1);
            Arc::clone(self)
        });
        TrackedBody { body, slot }
    }

    fn change(&self, change: impl FnOnce(&mut SlotState)) {
        let mut state = lock(&self.state);
        change(&mut state);
        let waits_for = state.waits_for();
        if state.idle.map(|(_, for_what)| for_what) == waits_for || state.closing {
            return;
        }
        let mut slots = self.limiter.slots();
        if let Some((number, _)) = state.idle.take()
            && slots.idle.remove(&number).is_none()
        {
            state.closing = true;
            return;
        }
        state.idle = waits_for.map(|waits_for| {
            let number = slots.next;
            slots.next += 1;
            let since = self.limiter.clock.monotonic();
            slots.idle.insert(number, Idle { since, waits_for, close: Arc::clone(&self.close) });
            (number, waits_for)
        });
        // A newcomer that found every connection busy may take this one's slot.
        if state.idle.is_some() && slots.open >= self.limiter.limits.connections {
            self.limiter.freed.notify_one();
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut slots = self.limiter.slots();
        slots.open -= 1;
        let closing = match state.idle {
            Some((number, _)) => slots.idle.remove(&number).is_none(),
            None => false,
        };
        if closing || state.closing {
            slots.closing -= 1;
        }
        drop(slots);
        self.limiter.freed.notify_one();
    }
}

/// A request in service.
pub(super) struct InService(Arc<Slot>);

impl Drop for InService {
    fn drop(&mut self) {
        self.0.change(|state| {
            state.requests -= 1;
            state.has_answered = true;
        });
    }
}

/// A body that counts as unfinished until it ends or is dropped.
pub(super) struct TrackedBody {
    body: Incoming,
    slot: Option<Arc<Slot>>,
}

impl TrackedBody {
    fn ended(&mut self) {
        if let Some(slot) = self.slot.take() {
            slot.change(|state| state.bodies -= 1);
        }
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        self.ended();
    }
}

impl Body for TrackedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if let Some(slot) = &self.slot {
            slot.change(|state| state.arrivals += 1);
        }
        if self.body.is_end_stream() || !matches!(frame, Some(Ok(_))) {
            self.ended();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
