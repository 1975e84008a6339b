//! Functions as handlers.

use std::marker::PhantomData;
use std::sync::Arc;

use postbox_core::{Database, Delivery, HandledFuture, Outcome, Tx};

use crate::Outside;
use crate::extract::Extract;
use crate::failure::{FailureRules, IntoFailure};

/// One call of a handler: the source of its arguments, and what judges its error.
pub struct Called<'t, S> {
    pub(crate) delivery: &'t Delivery,
    pub(crate) state: &'t S,
    pub(crate) judge: Judge<'t>,
}

/// Turns the return value of a handler into an outcome.
#[derive(Clone, Copy)]
pub struct Judge<'t> {
    pub(crate) rules: &'t FailureRules,
    pub(crate) name: &'static str,
}

impl Judge<'_> {
    fn outcome<E: IntoFailure<Kind>, Kind>(self, returned: Result<(), E>) -> Outcome {
        match returned {
            Ok(()) => Outcome::DELIVERED,
            Err(error) => self.named(error.into_outcome(self.rules)),
        }
    }

    /// Adds the handler's name to the text of a failure.
    fn named(self, mut outcome: Outcome) -> Outcome {
        match &mut outcome {
            Outcome::Delivered { .. } => {}
            Outcome::Retry { error, .. }
            | Outcome::ServerError { error, .. }
            | Outcome::Ambiguous { error, .. }
            | Outcome::Throttled { error, .. }
            | Outcome::Dead { error, .. }
            | Outcome::Unavailable { error, .. }
            | Outcome::Gone { error, .. } => error.insert_str(0, &format!("{}: ", self.name)),
        }
        outcome
    }
}

impl<S> Clone for Called<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S> Copy for Called<'_, S> {}

/// A function that handles events, either without a transaction or in the transactions of the store
/// `D`; see [`Router`](crate::Router).
///
/// `Arguments` separates functions for the compiler. It is inferred.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a handler of a `Router<{S}, {D}>`",
    label = "not a handler of this router",
    note = "a handler is an `async fn` that returns `Result<(), E>`, with a future that is `Send`; `E` is any `std::error::Error`, \
            an `anyhow::Error` or a `Failure`",
    note = "its arguments, eight at most, are `Event<T>` of a `T` that derives `postbox::Event` and `serde::Deserialize`, \
            `State<{S}>`, `Context`, `Headers`, `Delivery`",
    note = "with `Tx<'_, Store>` as its last argument it belongs into a `Router::in_transaction(&store)` of that store, \
            without into a `Router::new()`; on SQLite, the one with a `Tx` is a plain `fn`"
)]
pub trait Handler<S, D: Database, Arguments>: Send + Sync + 'static {
    /// The topic that its arguments imply.
    const TOPIC: Option<&'static str>;

    /// Returns whether its arguments can be taken from events of this schema version.
    fn reads(version: u32) -> bool;

    /// Handles an event.
    fn call<'t>(&'t self, called: Called<'t, S>, lent: D::Lent<'t>) -> D::Handled<'t>;
}

/// Marks handlers without a transaction.
#[derive(Debug)]
pub enum Alone {}
/// Marks async handlers with one.
#[derive(Debug)]
pub enum InTx {}
/// Marks blocking handlers with one.
#[derive(Debug)]
pub enum BlockingInTx {}

/// An async function that borrows a transaction. It has one lifetime, so that a bound can require
/// it for every lifetime.
pub trait TxFn<'t, D: Database, Arguments, Kind>: Send + Sync {
    /// Calls the function.
    fn call_in(&self, arguments: Arguments, tx: Tx<'t, D>, judge: Judge<'t>) -> HandledFuture<'t>;
}

/// A [`TxFn`] that blocks.
pub trait BlockingTxFn<'t, D: Database, Arguments, Kind>: Send + Sync {
    /// Calls the function.
    fn call_in(&self, arguments: Arguments, tx: Tx<'t, D>, judge: Judge<'t>) -> Outcome;
}

/// Returns the topic that arguments imply. A second one is an error of the compiler: the handler
/// would get the events of one topic, and decode them as those of both.
const fn only(topics: &[Option<&'static str>]) -> Option<&'static str> {
    let mut only = None;
    let mut at = 0;
    while at < topics.len() {
        if topics[at].is_some() {
            assert!(only.is_none(), "a handler takes one Event<T>: write a handler for each topic");
            only = topics[at];
        }
        at += 1;
    }
    only
}

/// Expands to the arguments as a tuple. If one fails, returns its outcome by `$refused`.
macro_rules! extracted {
    ($called:ident, $refused:expr, $($argument:ident)*) => {
        ($(
            match $argument::extract($called.delivery, $called.state) {
                Ok(argument) => argument,
                Err(outcome) => return $refused($called.judge.named(outcome)),
            },
        )*)
    };
}

macro_rules! handlers {
    ($($($argument:ident)*;)*) => {
        $(
            #[allow(non_snake_case, unused_variables, reason = "named like their types; one has none")]
            const _: () = {
                impl<S, F, Done, E, Kind, $($argument,)*> Handler<S, Outside, (Alone, Kind, $($argument,)*)> for F
                where
                    S: Send + Sync + 'static,
                    F: Fn($($argument),*) -> Done + Send + Sync + 'static,
                    Done: Future<Output = Result<(), E>> + Send,
                    E: IntoFailure<Kind>,
                    $($argument: Extract<S>,)*
                {
                    const TOPIC: Option<&'static str> = only(&[$($argument::TOPIC),*]);

                    fn reads(version: u32) -> bool {
                        true $(&& $argument::reads(version))*
                    }

                    fn call<'t>(&'t self, called: Called<'t, S>, (): ()) -> HandledFuture<'t> {
                        Box::pin(async move {
                            let ($($argument,)*) = extracted!(called, std::convert::identity, $($argument)*);
                            called.judge.outcome(self($($argument),*).await)
                        })
                    }
                }

                impl<'t, D, F, Done, E, Kind, $($argument,)*> TxFn<'t, D, ($($argument,)*), Kind> for F
                where
                    D: Database,
                    F: Fn($($argument,)* Tx<'t, D>) -> Done + Send + Sync,
                    Done: Future<Output = Result<(), E>> + Send + 't,
                    E: IntoFailure<Kind>,
                {
                    fn call_in(&self, ($($argument,)*): ($($argument,)*), tx: Tx<'t, D>, judge: Judge<'t>) -> HandledFuture<'t> {
                        let done = self($($argument,)* tx);
                        Box::pin(async move { judge.outcome(done.await) })
                    }
                }

                impl<'t, D, F, E, Kind, $($argument,)*> BlockingTxFn<'t, D, ($($argument,)*), Kind> for F
                where
                    D: Database,
                    F: Fn($($argument,)* Tx<'t, D>) -> Result<(), E> + Send + Sync,
                    E: IntoFailure<Kind>,
                {
                    fn call_in(&self, ($($argument,)*): ($($argument,)*), tx: Tx<'t, D>, judge: Judge<'t>) -> Outcome {
                        judge.outcome(self($($argument,)* tx))
                    }
                }

                impl<S, D, F, Kind, $($argument,)*> Handler<S, D, (InTx, Kind, $($argument,)*)> for F
                where
                    S: Send + Sync + 'static,
                    D: for<'t> Database<Handled<'t> = HandledFuture<'t>>,
                    F: for<'t> TxFn<'t, D, ($($argument,)*), Kind> + 'static,
                    $($argument: Extract<S>,)*
                {
                    const TOPIC: Option<&'static str> = only(&[$($argument::TOPIC),*]);

                    fn reads(version: u32) -> bool {
                        true $(&& $argument::reads(version))*
                    }

                    fn call<'t>(&'t self, called: Called<'t, S>, lent: D::Lent<'t>) -> HandledFuture<'t> {
                        let arguments = extracted!(called, D::handled, $($argument)*);
                        TxFn::call_in(self, arguments, Tx(lent), called.judge)
                    }
                }

                impl<S, D, F, Kind, $($argument,)*> Handler<S, D, (BlockingInTx, Kind, $($argument,)*)> for F
                where
                    S: Send + Sync + 'static,
                    D: for<'t> Database<Handled<'t> = Outcome>,
                    F: for<'t> BlockingTxFn<'t, D, ($($argument,)*), Kind> + 'static,
                    $($argument: Extract<S>,)*
                {
                    const TOPIC: Option<&'static str> = only(&[$($argument::TOPIC),*]);

                    fn reads(version: u32) -> bool {
                        true $(&& $argument::reads(version))*
                    }

                    fn call<'t>(&'t self, called: Called<'t, S>, lent: D::Lent<'t>) -> Outcome {
                        let arguments = extracted!(called, D::handled, $($argument)*);
                        BlockingTxFn::call_in(self, arguments, Tx(lent), called.judge)
                    }
                }
            };
        )*
    };
}

handlers! {
    ;
    A;
    A B;
    A B C;
    A B C G;
    A B C G H;
    A B C G H I;
    A B C G H I J;
    A B C G H I J K;
}

/// A handler with its argument types erased.
pub(crate) trait Call<S, D: Database>: Send + Sync {
    fn call<'t>(&'t self, called: Called<'t, S>, lent: D::Lent<'t>) -> D::Handled<'t>;
}

pub(crate) struct Typed<H, Arguments> {
    handler: H,
    arguments: PhantomData<fn(Arguments)>,
}

impl<H, Arguments> Typed<H, Arguments> {
    pub(crate) fn new(handler: H) -> Self {
        Self { handler, arguments: PhantomData }
    }
}

impl<S, D: Database, H: Handler<S, D, Arguments>, Arguments> Call<S, D> for Typed<H, Arguments> {
    fn call<'t>(&'t self, called: Called<'t, S>, lent: D::Lent<'t>) -> D::Handled<'t> {
        self.handler.call(called, lent)
    }
}

/// A handler bound to its state.
pub(crate) struct Bound<S, D> {
    pub(crate) handler: Arc<dyn Call<S, D>>,
    pub(crate) state: Arc<S>,
}

impl<S: Send + Sync, D: Database> Call<(), D> for Bound<S, D> {
    fn call<'t>(&'t self, called: Called<'t, ()>, lent: D::Lent<'t>) -> D::Handled<'t> {
        let Called { delivery, judge, .. } = called;
        self.handler.call(Called { delivery, state: &self.state, judge }, lent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_argument_of_any_has_the_topic() {
        assert_eq!(only(&[]), None);
        assert_eq!(only(&[None, Some("order.paid"), None]), Some("order.paid"));
    }

    #[test]
    #[should_panic(expected = "a handler takes one Event<T>")]
    fn two_topics_are_refused() {
        _ = only(&[Some("order.paid"), None, Some("order.placed")]);
    }
}
