//! Handlers in the transaction that settles their event: the contract between stores and the
//! router.

use std::pin::Pin;
use std::sync::Arc;

use crate::apply::Apply;
use crate::batch::Delivery;
use crate::outcome::Outcome;

/// The return value of a handler with an async driver; see [`Database::Handled`].
pub type HandledFuture<'t> = Pin<Box<dyn Future<Output = Outcome> + Send + 't>>;

/// A store, or a driver on top of one, as seen by handlers in its transactions.
pub trait Database: Send + Sync + Sized + 'static {
    /// What a handler borrows during its call: a reference to the driver's transaction, or to the
    /// connection on which it is open.
    type Lent<'t>;

    /// A [`HandledFuture`]. For a blocking driver, the [`Outcome`] itself, because such a
    /// transaction cannot leave its thread.
    type Handled<'t>;

    /// Wraps an outcome that is known already.
    fn handled<'t>(outcome: Outcome) -> Self::Handled<'t>;
}

/// A store that can call handlers in the transaction that settles their event.
pub trait Transact: Database {
    /// Binds the handlers to this store.
    ///
    /// Behaviour, in addition to [`Apply`]: the handlers of an event are called one after the
    /// other, in one savepoint, up to the first that fails. Its outcome is then the event's
    /// outcome.
    fn apply_handlers(&self, handlers: Arc<dyn Handlers<Self>>) -> Arc<dyn Apply>;
}

/// The handlers of each event, for a store that calls them in its transaction.
pub trait Handlers<D: Database>: Send + Sync + 'static {
    /// Calls handler number `nth` (from 0) of the event; `None` if it has no more.
    fn call<'t>(&'t self, nth: usize, delivery: &'t Delivery, lent: D::Lent<'t>) -> Option<D::Handled<'t>>;
}

/// The transaction that settles the event: the last argument of a handler.
///
/// The handler's own writes, the events it appends with it and the position of the subscription
/// commit together or not at all. `D` is the store, or a driver that shares its database.
#[derive(Debug)]
pub struct Tx<'t, D: Database>(pub D::Lent<'t>);
