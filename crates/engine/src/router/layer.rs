//! What happens around the handlers of every event.

use async_trait::async_trait;
use postbox_core::{Delivery, Outcome};

use super::Router;

/// Something to do around the handlers of each event of a router: to time them, to note what became
/// of the event, to give them less time, to pass an event by. See [`Router::layer`].
///
/// ```
/// use postbox_core::{Delivery, Outcome};
/// use postbox_engine::router::{Layer, Next};
///
/// /// What this service said itself is no news to it.
/// struct SkipOwn;
///
/// #[async_trait::async_trait]
/// impl Layer for SkipOwn {
///     async fn around(&self, delivery: &Delivery, next: Next<'_>) -> Outcome {
///         match delivery.event.source.as_deref() {
///             Some("billing") => Outcome::DELIVERED,
///             _ => next.run().await,
///         }
///     }
/// }
/// ```
///
/// Behaviour:
/// - It runs in the [`Context`](postbox_core::Context) of the event.
/// - What it gives becomes of the event, whatever the handlers said.
/// - `next` not run: no handler sees the event. Dropped before its end: they stop there, as at a
///   timeout.
#[async_trait]
pub trait Layer: Send + Sync + 'static {
    /// Runs what is within, or does not.
    async fn around(&self, delivery: &Delivery, next: Next<'_>) -> Outcome;
}

/// What a [`Layer`] is around: further layers, and the handlers.
#[must_use = "handlers that are not run handle nothing"]
pub struct Next<'t> {
    pub(super) router: &'t Router,
    pub(super) delivery: &'t Delivery,
    /// Of the router's layers, so many are outside of this.
    pub(super) outside: usize,
}

impl Next<'_> {
    /// Runs it, and says what becomes of the event.
    pub async fn run(self) -> Outcome {
        let Self { router, delivery, outside } = self;
        match router.layers.get(outside) {
            Some(layer) => layer.around(delivery, Next { outside: outside + 1, ..self }).await,
            None => router.handle(delivery).await,
        }
    }
}
