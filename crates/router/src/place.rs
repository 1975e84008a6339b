//! Where handlers run: without a transaction, or in the transactions of a store.

use std::sync::Arc;

use postbox_core::{Database, Destination, HandledFuture, Outcome, Transact};

use crate::Router;

/// Where the handlers of a router run: [`Outside`] of any transaction, or in those of a store.
pub trait Place: Database {
    /// Returns the handlers of a router as the destination of a relay.
    fn place(router: Router<(), Self>) -> Destination;
}

/// Outside of any transaction of the store.
#[derive(Debug, Clone, Copy)]
pub struct Outside;

impl Database for Outside {
    type Lent<'t> = ();
    type Handled<'t> = HandledFuture<'t>;

    fn handled<'t>(outcome: Outcome) -> HandledFuture<'t> {
        Box::pin(std::future::ready(outcome))
    }
}

impl Place for Outside {
    fn place(router: Router) -> Destination {
        Destination::Sink(Arc::new(router))
    }
}

impl<D: Transact + Clone> Place for D {
    fn place(router: Router<(), D>) -> Destination {
        let store = router.database.clone();
        Destination::Apply(store.apply_handlers(Arc::new(router)))
    }
}
