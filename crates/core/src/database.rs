//! Handlers in the transaction that settles their event: what store and router agree on.

use std::pin::Pin;
use std::sync::Arc;

use crate::apply::Apply;
use crate::batch::Delivery;
use crate::outcome::Outcome;

/// What a handler gives where the driver is async: see [`Database::Handled`].
pub type HandledFuture<'t> = Pin<Box<dyn Future<Output = Outcome> + Send + 't>>;

/// A store, or a driver beside it, to handlers in its transactions.
pub trait Database: Send + Sync + Sized + 'static {
    /// What a handler is lent for its call: a reference to the driver's transaction, or to the
    /// connection that it is open on.
    type Lent<'t>;

    /// A [`HandledFuture`], or where the driver blocks the [`Outcome`] itself: such a transaction
    /// cannot leave its thread.
    type Handled<'t>;

    /// An outcome that is there already.
    fn handled<'t>(outcome: Outcome) -> Self::Handled<'t>;
}

/// A store that can call handlers in the transaction that settles their event.
pub trait Transact: Database {
    /// Binds the handlers to this store.
    ///
    /// Behaviour, beside that of [`Apply`]: the handlers of an event are called one after the
    /// other, in one savepoint, up to the first that fails. What that gives is the event's outcome.
    fn apply_handlers(&self, handlers: Arc<dyn Handlers<Self>>) -> Arc<dyn Apply>;
}

/// The handlers of each event, for a store that calls them in its transaction.
pub trait Handlers<D: Database>: Send + Sync + 'static {
    /// Calls one handler of the event: the first is 0. `None`: it has no more.
    fn call<'t>(&'t self, nth: usize, delivery: &'t Delivery, lent: D::Lent<'t>) -> Option<D::Handled<'t>>;
}

/// The transaction that settles the event: the last argument of a handler.
///
/// What the handler does with it, what it appends with it and the position of the subscription
/// commit together, or none of them does. `D` is the store, or a driver that shares its database.
#[derive(Debug)]
pub struct Tx<'t, D: Database>(pub D::Lent<'t>);
