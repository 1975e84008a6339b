//! A plain async function as a sink.

use std::error::Error;

use async_trait::async_trait;
use postbox_core::{Capabilities, Delivery, Outcome, Sink};

use crate::failure::unruled;

/// Return type of a handler: an [`Outcome`], nothing, or a result. Its error is an
/// `anyhow::Error`, any other `std::error::Error` or a text.
pub trait IntoOutcome {
    /// Converts the value to an outcome.
    fn into_outcome(self) -> Outcome;
}

impl IntoOutcome for Outcome {
    fn into_outcome(self) -> Outcome {
        self
    }
}

impl IntoOutcome for () {
    fn into_outcome(self) -> Outcome {
        Outcome::DELIVERED
    }
}

/// `Ok` converts its value. `Err` is what a [`Router`](crate::Router) without rules makes of it:
/// what a [`Failure`](crate::Failure) in its chain of causes says, or a retry with code
/// `handler_error` and the texts of the chain.
impl<T: IntoOutcome, E: Into<Box<dyn Error + Send + Sync>> + 'static> IntoOutcome for Result<T, E> {
    fn into_outcome(self) -> Outcome {
        match self {
            Ok(done) => done.into_outcome(),
            Err(error) => unruled(error),
        }
    }
}

/// Makes a sink of an async function that handles one event.
///
/// Events with different keys are handled concurrently (up to 16; see
/// [`HandlerSink::concurrency`]), events of one key one after the other. A panic counts as a failed
/// attempt. Delivery is at least once: after a crash the handler may see an event again. It runs in
/// the event's [`Context`](postbox_core::Context).
///
/// ```
/// use postbox_core::Delivery;
/// use postbox_router::handler_sink;
///
/// let sink = handler_sink(|delivery: Delivery| async move {
///     if delivery.event.payload.is_empty() { Err("nothing in it") } else { Ok(()) }
/// });
/// # let _ = sink;
/// ```
pub fn handler_sink<H, F>(handler: H) -> HandlerSink<H>
where
    H: Fn(Delivery) -> F + Send + Sync + 'static,
    F: Future + Send + 'static,
    F::Output: IntoOutcome,
{
    HandlerSink { handler, concurrency: Capabilities::default().concurrency }
}

/// See [`handler_sink`].
#[derive(Debug)]
pub struct HandlerSink<H> {
    handler: H,
    concurrency: usize,
}

impl<H> HandlerSink<H> {
    /// Sets how many events are handled concurrently.
    #[must_use]
    pub fn concurrency(mut self, concurrency: usize) -> Self {
        self.concurrency = concurrency;
        self
    }
}

#[async_trait]
impl<H, F> Sink for HandlerSink<H>
where
    H: Fn(Delivery) -> F + Send + Sync + 'static,
    F: Future + Send + 'static,
    F::Output: IntoOutcome + Send,
{
    fn capabilities(&self) -> Capabilities {
        Capabilities { concurrency: self.concurrency, ..Capabilities::default() }
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(deliveries.len());
        for delivery in deliveries {
            let handled = async { (self.handler)((*delivery).clone()).await };
            outcomes.push(delivery.context().scope(handled).await.into_outcome());
        }
        outcomes
    }
}
