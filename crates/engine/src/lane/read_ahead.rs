//! A read that goes on while what was read before goes out.

use std::pin::{Pin, pin};

use futures::future::{BoxFuture, MaybeDone, OptionFuture};
use postbox_core::{Batch, Result};

use super::settle::Settling;

/// At most one read, never dropped half-way: the store may have moved its mark of what was given.
pub(super) struct ReadAhead<'a>(MaybeDone<BoxFuture<'a, Result<Option<Batch>>>>);

impl Default for ReadAhead<'_> {
    fn default() -> Self {
        Self(MaybeDone::Gone)
    }
}

impl<'a> ReadAhead<'a> {
    /// Whether there is no read, and nothing that one brought.
    pub(super) fn is_free(&self) -> bool {
        matches!(self.0, MaybeDone::Gone)
    }

    /// Whether a read goes on.
    pub(super) fn is_reading(&self) -> bool {
        matches!(self.0, MaybeDone::Future(_))
    }

    pub(super) fn begin(&mut self, read: impl Future<Output = Result<Option<Batch>>> + Send + 'a) {
        self.0 = MaybeDone::Future(Box::pin(read));
    }

    /// Does some work, and reads on meanwhile.
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

    /// What the read brought, once it is over; a settlement goes on meanwhile, and perhaps longer.
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
        settled.and(read)
    }

    /// What the read brought, once it is over; `None` if there was none.
    pub(super) async fn finish(&mut self) -> Result<Option<Batch>> {
        if self.is_reading() {
            (&mut self.0).await;
        }
        Pin::new(&mut self.0).take_output().transpose().map(Option::flatten)
    }
}
