//! A read that runs while the previous one is being sent.

use std::pin::{Pin, pin};

use futures::future::{BoxFuture, MaybeDone, OptionFuture};
use postbox_core::{Batch, Result};

use super::settle::{Settling, settle_behind};

/// At most one read. It is never dropped midway: the store may already have moved its read
/// position.
pub(super) struct ReadAhead<'a>(MaybeDone<BoxFuture<'a, Result<Option<Batch>>>>);

impl Default for ReadAhead<'_> {
    fn default() -> Self {
        Self(MaybeDone::Gone)
    }
}

impl<'a> ReadAhead<'a> {
    /// Returns whether there is neither a read under way nor a result to take.
    pub(super) fn is_free(&self) -> bool {
        matches!(self.0, MaybeDone::Gone)
    }

    /// Returns whether a read is under way.
    pub(super) fn is_reading(&self) -> bool {
        matches!(self.0, MaybeDone::Future(_))
    }

    pub(super) fn begin(&mut self, read: impl Future<Output = Result<Option<Batch>>> + Send + 'a) {
        self.0 = MaybeDone::Future(Box::pin(read));
    }

    /// Runs some work while the read goes on.
    pub(super) async fn beside<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                biased;
                () = &mut self.0, if self.is_reading() => {}
                done = &mut work => return done,
            }
        }
    }

    /// Waits for the read and returns its result. A settlement goes on meanwhile, and may last
    /// longer.
    pub(super) async fn finish_beside(&mut self, settling: &mut Option<Settling<'_>>) -> Result<Option<Batch>> {
        let mut settled = Ok(0);
        while self.is_reading() {
            tokio::select! {
                biased;
                () = &mut self.0 => {}
                Some(ended) = OptionFuture::from(settling.as_mut()) => {
                    *settling = None;
                    settled = ended;
                }
            }
        }
        let read = self.finish().await;
        if read.as_ref().is_err_and(|error| !error.is_stale()) {
            // The stream ends with this error. Otherwise the settlement would be dropped, perhaps
            // before it was sent, and what it settles would arrive again.
            _ = settle_behind(settling).await;
        }
        settled.and(read)
    }

    /// Waits for the read and returns its result; `None` if there was none.
    pub(super) async fn finish(&mut self) -> Result<Option<Batch>> {
        if self.is_reading() {
            (&mut self.0).await;
        }
        Pin::new(&mut self.0).take_output().transpose().map(Option::flatten)
    }
}
