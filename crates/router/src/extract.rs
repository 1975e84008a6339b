//! Arguments of handlers.

use postbox_core::typed::decode;
use postbox_core::{Context, Delivery, Error, Headers, Outcome, TypedEvent};
use serde::de::DeserializeOwned;

/// A handler argument that is taken from an event and from the router's state.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be an argument of a handler of a router with the state `{S}`",
    note = "arguments are `Event<T>` of a `TypedEvent` with `serde::Deserialize`, `State<S>`, `Context`, `Headers`, `Delivery`"
)]
pub trait Extract<S>: Sized + Send {
    /// The topic that this argument implies, if any.
    const TOPIC: Option<&'static str> = None;

    /// Returns whether it can be taken from events of this schema version.
    fn reads(_version: u32) -> bool {
        true
    }

    /// Takes the argument. On failure the handler is not called, and the error is the event's
    /// outcome.
    fn extract(delivery: &Delivery, state: &S) -> Result<Self, Outcome>;
}

/// The event, decoded to a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event<T>(pub T);

impl<T: TypedEvent + DeserializeOwned + Send, S> Extract<S> for Event<T> {
    const TOPIC: Option<&'static str> = Some(T::TOPIC);

    fn reads(version: u32) -> bool {
        T::reads(version)
    }

    fn extract(delivery: &Delivery, _: &S) -> Result<Self, Outcome> {
        let dead = |error: Error| Outcome::dead(error.code().to_owned(), error.message());
        decode(&delivery.event).map(Event).map_err(dead)
    }
}

/// The router's state, cloned; see [`Router::with_state`](crate::Router::with_state).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State<S>(pub S);

impl<S: Clone + Send> Extract<S> for State<S> {
    fn extract(_: &Delivery, state: &S) -> Result<Self, Outcome> {
        Ok(State(state.clone()))
    }
}

/// The context of the handler, for work that leaves its task; see [`Context::scope`].
impl<S> Extract<S> for Context {
    fn extract(delivery: &Delivery, _: &S) -> Result<Self, Outcome> {
        Ok(delivery.context())
    }
}

impl<S> Extract<S> for Delivery {
    fn extract(delivery: &Delivery, _: &S) -> Result<Self, Outcome> {
        Ok(delivery.clone())
    }
}

impl<S> Extract<S> for Headers {
    fn extract(delivery: &Delivery, _: &S) -> Result<Self, Outcome> {
        Ok(delivery.event.headers.clone())
    }
}
