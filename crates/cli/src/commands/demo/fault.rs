//! Faults between the two services: answers that fail, connections that break before or after the
//! message was stored. What happens to the n-th request depends on the seed and n only.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// 503 or 500, nothing stored.
    Answer(StatusCode),
    /// The connection breaks, nothing stored.
    CutBefore,
    /// The message is stored, then the connection breaks: the sender cannot know.
    CutAfter,
}

/// Of a thousand requests, so many meet each fault.
const FAULTS: [(Fault, u32); 4] = [
    (Fault::Answer(StatusCode::SERVICE_UNAVAILABLE), 10),
    (Fault::Answer(StatusCode::INTERNAL_SERVER_ERROR), 40),
    (Fault::CutBefore, 6),
    (Fault::CutAfter, 12),
];

/// Decides on faults, and counts them.
#[derive(Debug, Default)]
pub(super) struct FaultInjector {
    seed: u64,
    pub(super) requests: AtomicU64,
    pub(super) in_flight: AtomicU64,
    /// Answered 500 or 503.
    pub(super) failed: AtomicU64,
    /// Connections broken.
    pub(super) cut: AtomicU64,
}

impl FaultInjector {
    pub(super) fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self { seed, ..Self::default() })
    }

    fn next(&self) -> Option<Fault> {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        let mut random = SmallRng::seed_from_u64(self.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut draw = random.random_range(0..1_000_u32);
        for (fault, weight) in FAULTS {
            if draw < weight {
                return Some(fault);
            }
            draw -= weight;
        }
        None
    }
}

/// Counts a request as in flight as long as it lives, also when its connection goes away.
struct InFlight(Arc<FaultInjector>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The middleware in front of the receiver.
pub(super) async fn inject(State(faults): State<Arc<FaultInjector>>, request: Request, next: Next) -> Response {
    faults.in_flight.fetch_add(1, Ordering::Relaxed);
    let _in_flight = InFlight(Arc::clone(&faults));
    let fault = faults.next();
    match fault {
        None => return next.run(request).await,
        Some(Fault::Answer(status)) => {
            faults.failed.fetch_add(1, Ordering::Relaxed);
            return status.into_response();
        }
        Some(Fault::CutBefore) => {}
        Some(Fault::CutAfter) => drop(next.run(request).await),
    }
    faults.cut.fetch_add(1, Ordering::Relaxed);
    // Ends the task of this connection, and with it the connection, without an answer or a message.
    std::panic::resume_unwind(Box::new("a connection breaks"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_the_same_for_the_same_seed_and_the_exception() {
        let draw = |seed| {
            let faults = FaultInjector::new(seed);
            (0..10_000).map(|_| faults.next()).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        let count = draw(7).iter().flatten().count();
        assert!((500..900).contains(&count), "{count} of 10,000");
    }
}
