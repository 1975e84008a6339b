//! A plain async function as a sink.

use async_trait::async_trait;
use postbox_core::{Capabilities, Delivery, Outcome, Sink};

/// What a handler may return: an [`Outcome`], nothing, or a result whose error is retried.
pub trait IntoOutcome {
    /// The outcome.
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

/// `Ok` is delivered, `Err` is retried with code `handler_error` and the error's text.
impl<T: IntoOutcome, E: std::fmt::Display> IntoOutcome for Result<T, E> {
    fn into_outcome(self) -> Outcome {
        match self {
            Ok(done) => done.into_outcome(),
            Err(error) => Outcome::retry("handler_error", error.to_string()),
        }
    }
}

/// Makes a sink of an async function that handles one event.
///
/// Different keys are handled concurrently (up to 16; see [`HandlerSink::concurrency`]), events of
/// one key one after the other. A panic counts as a failed attempt. The handler may see an event
/// again after a crash: at least once. It runs in the [`Context`](postbox_core::Context) of the
/// event.
///
/// ```
/// use postbox_core::Delivery;
/// use postbox_engine::handler_sink;
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
    /// How many events are handled at once.
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
