//! Who is connected, who owes us something, and who has to go.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use postbox_core::Clock;
use tokio::sync::Notify;
use tracing::warn;

use super::ServeLimits;

/// How often it is logged that connections were pushed out.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// All connections of a listener.
pub(super) struct Crowd {
    limits: ServeLimits,
    clock: Arc<dyn Clock>,
    seats: Mutex<Seats>,
    /// Somebody left.
    left: Notify,
}

#[derive(Default)]
struct Seats {
    open: usize,
    /// Told to go, and still there.
    leaving: usize,
    /// Pushed out by newcomers since that was logged last, and when that was.
    pushed_out: u64,
    logged_at: Option<Duration>,
    /// Who owes something, by a number that grows with time.
    owing: BTreeMap<u64, Owing>,
    next: u64,
}

struct Owing {
    since: Duration,
    debt: Debt,
    close: Arc<Notify>,
}

/// What a connection owes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Debt {
    /// The head of a request, or to read the answer to the last one.
    Head,
    /// The rest of a body.
    Body,
}

impl Crowd {
    pub(super) fn new(limits: ServeLimits, clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self { limits, clock, seats: Mutex::default(), left: Notify::new() })
    }

    pub(super) fn limits(&self) -> ServeLimits {
        self.limits
    }

    fn seats(&self) -> MutexGuard<'_, Seats> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A seat for a newcomer; the one that has owed for the longest time makes room. Cancel-safe.
    pub(super) async fn seat(self: &Arc<Self>) -> Arc<Seat> {
        loop {
            {
                let mut seats = self.seats();
                if seats.open < self.limits.connections.max(1) {
                    seats.open += 1;
                    break;
                }
                if seats.leaving == 0
                    && let Some((_, owing)) = seats.owing.pop_first()
                {
                    seats.pushed_out += 1;
                    seats.leaving += 1;
                    owing.close.notify_one();
                }
            }
            self.left.notified().await;
        }
        let seat = Seat { crowd: Arc::clone(self), close: Arc::new(Notify::new()), place: Mutex::default() };
        seat.change(|_| {});
        Arc::new(seat)
    }

    /// Closes connections whose request has not come in time.
    pub(super) fn close_overdue(&self) {
        let now = self.clock.monotonic();
        self.log_pushed_out(now);
        self.close(|owing| owing.debt == Debt::Head && now.saturating_sub(owing.since) >= self.limits.header_timeout);
    }

    /// Says that places are short, now and then: a crowd must not fill the log as well.
    fn log_pushed_out(&self, now: Duration) {
        let mut seats = self.seats();
        let due = seats.logged_at.is_none_or(|at| now.saturating_sub(at) >= LOG_EVERY);
        if seats.pushed_out > 0 && due {
            let count = std::mem::take(&mut seats.pushed_out);
            seats.logged_at = Some(now);
            let places = self.limits.connections;
            warn!(
                count,
                places,
                "all places for connections were taken; those that sent no whole request for the longest time were closed"
            );
        }
    }

    /// Closes connections without a request, and those whose body has been on its way for so long.
    pub(super) fn close_unfinished(&self, grace: Duration) {
        let now = self.clock.monotonic();
        self.close(|owing| owing.debt == Debt::Head || now.saturating_sub(owing.since) >= grace);
    }

    fn close(&self, wanted: impl Fn(&Owing) -> bool) {
        let mut seats = self.seats();
        let Seats { owing, leaving, .. } = &mut *seats;
        owing.retain(|_, owing| {
            let goes = wanted(owing);
            if goes {
                *leaving += 1;
                owing.close.notify_one();
            }
            !goes
        });
    }
}

/// One connection's place. Dropping it leaves.
pub(super) struct Seat {
    crowd: Arc<Crowd>,
    close: Arc<Notify>,
    place: Mutex<Place>,
}

#[derive(Default)]
struct Place {
    /// Requests in service, and bodies of which more is to come.
    requests: usize,
    bodies: usize,
    /// Its number among those who owe, and what.
    owing: Option<(u64, Debt)>,
    told_to_go: bool,
}

impl Place {
    fn debt(&self) -> Option<Debt> {
        match (self.requests, self.bodies) {
            (0, _) => Some(Debt::Head),
            (_, 0) => None,
            _ => Some(Debt::Body),
        }
    }
}

impl Seat {
    /// It has to go.
    pub(super) async fn closed(&self) {
        self.close.notified().await;
    }

    /// A request is in service until this is dropped.
    pub(super) fn turn(self: &Arc<Self>) -> Turn {
        self.change(|place| place.requests += 1);
        Turn(Arc::clone(self))
    }

    /// A body that is owed until its end.
    pub(super) fn owing(self: &Arc<Self>, body: Incoming) -> OwedBody {
        let seat = (!body.is_end_stream()).then(|| {
            self.change(|place| place.bodies += 1);
            Arc::clone(self)
        });
        OwedBody { body, seat }
    }

    fn change(&self, change: impl FnOnce(&mut Place)) {
        let mut place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut place);
        let debt = place.debt();
        if place.owing.map(|(_, owed)| owed) == debt || place.told_to_go {
            return;
        }
        let mut seats = self.crowd.seats();
        if let Some((number, _)) = place.owing.take()
            && seats.owing.remove(&number).is_none()
        {
            place.told_to_go = true;
            return;
        }
        place.owing = debt.map(|debt| {
            let number = seats.next;
            seats.next += 1;
            let since = self.crowd.clock.monotonic();
            seats.owing.insert(number, Owing { since, debt, close: Arc::clone(&self.close) });
            (number, debt)
        });
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let place = self.place.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut seats = self.crowd.seats.lock().unwrap_or_else(PoisonError::into_inner);
        seats.open -= 1;
        let told_to_go = match place.owing {
            Some((number, _)) => seats.owing.remove(&number).is_none(),
            None => false,
        };
        if told_to_go || place.told_to_go {
            seats.leaving -= 1;
        }
        drop(seats);
        self.crowd.left.notify_one();
    }
}

/// A request in service.
pub(super) struct Turn(Arc<Seat>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.change(|place| place.requests -= 1);
    }
}

/// A body that pays its debt when it ends, or when nobody wants it any more.
pub(super) struct OwedBody {
    body: Incoming,
    seat: Option<Arc<Seat>>,
}

impl OwedBody {
    fn paid(&mut self) {
        if let Some(seat) = self.seat.take() {
            seat.change(|place| place.bodies -= 1);
        }
    }
}

impl Drop for OwedBody {
    fn drop(&mut self) {
        self.paid();
    }
}

impl Body for OwedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if self.body.is_end_stream() || !matches!(frame, Some(Ok(_))) {
            self.paid();
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
