//! Where handlers run: without a transaction, or in the transactions of a store.

use std::sync::Arc;

use postbox_core::{Database, HandledFuture, Outcome, Transact};

use super::Router;
use crate::relay::RelayBuilder;

/// Where the handlers of a router run: [`Outside`] of any transaction, or in those of a store.
pub trait Place: Database {
    /// Sets a router as the destination of a relay.
    fn place(router: Router<(), Self>, relay: RelayBuilder) -> RelayBuilder;
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
    fn place(router: Router, relay: RelayBuilder) -> RelayBuilder {
        relay.sink(Arc::new(router))
    }
}

impl<D: Transact + Clone> Place for D {
    fn place(router: Router<(), D>, relay: RelayBuilder) -> RelayBuilder {
        let store = router.database.clone();
        relay.apply(store.apply_handlers(Arc::new(router)))
    }
}
