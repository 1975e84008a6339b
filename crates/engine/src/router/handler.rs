//! Async functions as handlers.

use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;

use postbox_core::{Delivery, Outcome};

use super::extract::Extract;
use super::failure::{FailureRules, IntoFailure};

type Handled<'t> = Pin<Box<dyn Future<Output = Outcome> + Send + 't>>;

/// A call of a handler: what its arguments are taken from, and what judges its error.
pub struct Called<'t, S> {
    pub(super) delivery: &'t Delivery,
    pub(super) state: &'t S,
    pub(super) rules: &'t FailureRules,
}

impl<S> Clone for Called<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S> Copy for Called<'_, S> {}

/// A function that handles events; see [`Router`](super::Router).
///
/// `Arguments` tells functions apart for the compiler; it is inferred.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a handler",
    label = "not a handler",
    note = "a handler is an `async fn` that returns `Result<(), E>`, with a future that is `Send`; `E` is any `std::error::Error`, \
            an `anyhow::Error` or a `Failure`",
    note = "its arguments, eight at most, are `Event<T>`, `State<S>`, `Headers`, `Delivery`"
)]
pub trait Handler<S, Arguments>: Send + Sync + 'static {
    /// The topic that its arguments ask for.
    const TOPIC: Option<&'static str>;

    /// Handles an event.
    fn call<'t>(&'t self, called: Called<'t, S>) -> Handled<'t>;
}

/// The first topic that arguments ask for.
const fn first(topics: &[Option<&'static str>]) -> Option<&'static str> {
    let mut at = 0;
    while at < topics.len() {
        if topics[at].is_some() {
            return topics[at];
        }
        at += 1;
    }
    None
}

macro_rules! handlers {
    ($($($argument:ident)*;)*) => {
        $(
            #[allow(non_snake_case, unused_variables, reason = "named like their types; one has none")]
            impl<S, F, Done, E, Kind, $($argument,)*> Handler<S, (Kind, $($argument,)*)> for F
            where
                S: Send + Sync + 'static,
                F: Fn($($argument),*) -> Done + Send + Sync + 'static,
                Done: Future<Output = Result<(), E>> + Send,
                E: IntoFailure<Kind>,
                $($argument: Extract<S>,)*
            {
                const TOPIC: Option<&'static str> = first(&[$($argument::TOPIC),*]);

                fn call<'t>(&'t self, called: Called<'t, S>) -> Handled<'t> {
                    let Called { delivery, state, rules } = called;
                    Box::pin(async move {
                        $(
                            let $argument = match $argument::extract(delivery, state) {
                                Ok(argument) => argument,
                                Err(outcome) => return outcome,
                            };
                        )*
                        match self($($argument),*).await {
                            Ok(()) => Outcome::DELIVERED,
                            Err(error) => error.into_outcome(rules),
                        }
                    })
                }
            }
        )*
    };
}

handlers! {
    ;
    A;
    A B;
    A B C;
    A B C D;
    A B C D G;
    A B C D G H;
    A B C D G H I;
    A B C D G H I J;
}

/// A handler whose arguments nobody needs to know any more.
pub(super) trait Call<S>: Send + Sync {
    fn call<'t>(&'t self, called: Called<'t, S>) -> Handled<'t>;
}

pub(super) struct Typed<H, Arguments> {
    handler: H,
    arguments: PhantomData<fn(Arguments)>,
}

impl<H, Arguments> Typed<H, Arguments> {
    pub(super) fn new(handler: H) -> Self {
        Self { handler, arguments: PhantomData }
    }
}

impl<S, H: Handler<S, Arguments>, Arguments> Call<S> for Typed<H, Arguments> {
    fn call<'t>(&'t self, called: Called<'t, S>) -> Handled<'t> {
        self.handler.call(called)
    }
}

/// A handler that has its state.
pub(super) struct Bound<S> {
    pub(super) handler: Arc<dyn Call<S>>,
    pub(super) state: Arc<S>,
}

impl<S: Send + Sync> Call<()> for Bound<S> {
    fn call<'t>(&'t self, called: Called<'t, ()>) -> Handled<'t> {
        let Called { delivery, rules, .. } = called;
        self.handler.call(Called { delivery, state: &self.state, rules })
    }
}
