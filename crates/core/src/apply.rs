//! The apply contract: exactly-once effect, for handlers that share a database with the store.

use std::sync::Arc;

use async_trait::async_trait;

use crate::batch::{Delivery, Disposition, Settlement};
use crate::error::Result;
use crate::log::Lease;
use crate::outcome::Outcome;
use crate::sink::Sink;

/// Decides the disposition of a delivery, given its outcome. Provided by the engine; pure.
pub type Decide<'a> = dyn Fn(&Delivery, &Outcome) -> Disposition + Send + Sync + 'a;

/// A handler bound to its store. It runs inside the very transaction that settles the events.
///
/// Behaviour:
/// - A handler runs in the [`Context`](crate::Context) of its event.
/// - There is one transaction: the effects of all handlers, the position of `settlement` and all
///   delivery rows commit together or not at all.
/// - Handlers run one after the other in the order of `deliveries`. If one fails (any outcome but
///   delivered, or a panic), only its own effect is rolled back (a savepoint), and what `decide`
///   returns is written. With `settlement.hold_keys`, later deliveries of the same key in this call
///   are settled as [`Disposition::Block`] without running.
/// - Entries already in `settlement` are written as they are.
/// - The outcomes come back in the order of `deliveries`, with `None` for a delivery that did not
///   run.
/// - `Stale` if the lease is lost. Then nothing was committed.
/// - [`transaction_ended`](crate::Error::transaction_ended) if a handler committed or rolled back.
///   Nothing was settled. If it committed, `decide` has been called for each delivery that ran,
///   with its outcome, and none of them may run again.
/// - [`transaction_lost`](crate::Error::transaction_lost) if the connection ended while a handler
///   had it, or its driver lost the transaction. Nothing was settled.
///
/// Cancel-safety: if the future is dropped, the transaction is rolled back or wholly committed.
#[async_trait]
pub trait Apply: Send + Sync + 'static {
    /// Runs the handler over `deliveries` and settles, in one transaction.
    async fn apply(
        &self,
        lease: &Lease,
        deliveries: &[&Delivery],
        settlement: Settlement<'_>,
        decide: &Decide<'_>,
    ) -> Result<Vec<Option<Outcome>>>;
}

/// Where the events of a subscription go.
#[derive(Clone)]
pub enum Destination {
    /// To a sink, outside of any transaction.
    Sink(Arc<dyn Sink>),
    /// To handlers inside the transaction that settles the events.
    Apply(Arc<dyn Apply>),
}
