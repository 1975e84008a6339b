//! An upper bound on the deliveries that a bounded run reads, over all of its lanes.

use postbox_core::BatchLimit;
use tokio::sync::{Mutex, MutexGuard};

/// How many deliveries may still be read; without a bound, any number.
pub(crate) struct ReadLimit(Option<Mutex<usize>>);

/// The right to one read. What is left is locked meanwhile: the next lane sees what this read did
/// not use.
pub(super) struct Reservation<'a> {
    pub(super) limit: BatchLimit,
    left: Option<MutexGuard<'a, usize>>,
}

impl ReadLimit {
    pub(crate) fn new(limit: Option<usize>) -> Self {
        Self(limit.map(Mutex::new))
    }

    /// Reserves one read of at most `batch`; `None`: nothing is left.
    pub(super) async fn reserve(&self, batch: BatchLimit) -> Option<Reservation<'_>> {
        let Some(left) = &self.0 else { return Some(Reservation::unbounded(batch)) };
        let left = left.lock().await;
        let events = batch.events.min(*left);
        (events > 0).then_some(Reservation { limit: BatchLimit { events, ..batch }, left: Some(left) })
    }
}

impl Reservation<'_> {
    pub(super) fn unbounded(limit: BatchLimit) -> Self {
        Self { limit, left: None }
    }

    /// The read brought so many; a reservation that is dropped instead used none.
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
        let five = BatchLimit { events: 5, ..BatchLimit::default() };
        let first = limit.reserve(five).await.expect("three are left");
        assert_eq!(first.limit.events, 3);
        first.used(1);
        drop(limit.reserve(five).await);
        let second = limit.reserve(five).await.expect("two are left");
        assert_eq!(second.limit.events, 2);
        second.used(2);
        assert!(limit.reserve(five).await.is_none());
        let unbounded = ReadLimit::new(None);
        unbounded.reserve(five).await.expect("any number").used(5);
        assert_eq!(unbounded.reserve(five).await.map(|it| it.limit.events), Some(5));
    }
}
