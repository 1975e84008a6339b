//! The apply contract: exactly-once effect, where handler and store share a database.

use async_trait::async_trait;

use crate::batch::{Delivery, Disposition, Settlement};
use crate::error::Result;
use crate::log::Lease;
use crate::outcome::Outcome;

/// Decides what becomes of a delivery, given its outcome. Owned by the engine; pure.
pub type Decide<'a> = dyn Fn(&Delivery, &Outcome) -> Disposition + Send + Sync + 'a;

/// A handler bound to its store: it runs inside the very transaction that settles the events.
///
/// Behaviour:
/// - A handler runs in the [`Context`](crate::Context) of its event.
/// - One transaction: every handler's effect, the position of `settlement` and all delivery rows
///   commit together or not at all.
/// - Handlers run one after the other in the order of `deliveries`. A handler's failure (an outcome
///   other than delivered, or a panic) rolls back its own effect only (a savepoint) and is written
///   down as `decide` says; later deliveries of the same key in this call are settled as
///   [`Disposition::Block`] without being run, when `settlement.hold_keys`.
/// - Entries already in `settlement` are written as they are.
/// - The outcomes come back in the order of `deliveries`; a delivery that was not run has `None`.
/// - `Stale` if the lease is lost: then nothing was committed.
/// - [`transaction_ended`](crate::Error::transaction_ended) if a handler committed or rolled back:
///   nothing was settled. Where it committed, `decide` was asked about each delivery that ran, with
///   its outcome, and none of them may run again.
///
/// Cancel-safety: dropping the future rolls the transaction back, or leaves it committed whole.
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
