//! When a lane stops, and the upper bound on the deliveries that a bounded run reads.

use postbox_core::{Batch, BatchLimit};
use tokio::sync::{Mutex, MutexGuard};

/// When a lane stops.
#[derive(Clone, Copy)]
pub(super) enum Until<'a> {
    Stopped,
    /// When what was there at the start of the run is delivered, or the limit is reached.
    Drained(&'a ReadLimit),
}

/// How many deliveries may still be read over all lanes; `None`: any number.
pub(crate) struct ReadLimit(Option<Mutex<usize>>);

/// The right to one read. It locks the remaining number, so that the next lane gets what this read
/// did not use.
pub(super) struct Reservation<'a> {
    pub(super) limit: BatchLimit,
    left: Option<MutexGuard<'a, usize>>,
}

impl<'a> Until<'a> {
    pub(super) fn is_stopped(self) -> bool {
        matches!(self, Self::Stopped)
    }

    /// Whether the stream ends with this batch, however many events keep arriving.
    pub(super) fn ends_with(self, batch: &Batch) -> bool {
        !self.is_stopped() && batch.caught_up
    }

    /// Whether the limit is reached.
    pub(super) async fn is_used_up(self) -> bool {
        let Self::Drained(ReadLimit(Some(left))) = self else { return false };
        *left.lock().await == 0
    }

    /// Reserves one read of at most `batch`; `None` if the limit is reached.
    pub(super) async fn reserve(self, batch: BatchLimit) -> Option<Reservation<'a>> {
        let unbounded = Reservation { limit: batch, left: None };
        let Self::Drained(ReadLimit(Some(left))) = self else { return Some(unbounded) };
        let left = left.lock().await;
        let events = batch.events.min(*left);
        (events > 0).then_some(Reservation { limit: BatchLimit { events, ..batch }, left: Some(left) })
    }
}

impl ReadLimit {
    pub(crate) fn new(limit: Option<usize>) -> Self {
        Self(limit.map(Mutex::new))
    }
}

impl Reservation<'_> {
    /// Notes how many deliveries the read brought. A reservation that is dropped uses none.
    pub(super) fn used(self, count: usize) {
        if let Some(mut left) = self.left {
            *left = left.saturating_sub(count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_what_was_read_is_used() {
        let limit = ReadLimit::new(Some(3));
        let limited = Until::Drained(&limit);
        let five = BatchLimit { events: 5, ..BatchLimit::default() };
        let first = limited.reserve(five).await.expect("three are left");
        assert_eq!(first.limit.events, 3);
        first.used(1);
        drop(limited.reserve(five).await);
        let second = limited.reserve(five).await.expect("two are left");
        assert_eq!(second.limit.events, 2);
        second.used(2);
        assert!(limited.reserve(five).await.is_none());
        assert!(limited.is_used_up().await);
        for unbounded in [Until::Stopped, Until::Drained(&ReadLimit::new(None))] {
            unbounded.reserve(five).await.expect("any number").used(5);
            assert_eq!(unbounded.reserve(five).await.map(|it| it.limit.events), Some(5));
        }
    }
}
