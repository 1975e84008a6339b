//! What a handler's arguments can be.

use postbox_core::typed::decode;
use postbox_core::{Context, Delivery, Headers, Outcome, TypedEvent};
use serde::de::DeserializeOwned;

/// An argument of a handler, taken from an event and from the router's state.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be an argument of a handler of a router with the state `{S}`",
    note = "arguments are `Event<T>` of a `TypedEvent` with `serde::Deserialize`, `State<S>`, `Context`, `Headers`, `Delivery`"
)]
pub trait Extract<S>: Sized + Send {
    /// The topic that it asks for, if it does.
    const TOPIC: Option<&'static str> = None;

    /// Whether it can be taken from events of this version of the payload's form.
    fn reads(_version: u32) -> bool {
        true
    }

    /// Takes it. Where that fails, the handler is not called, and this becomes of the event.
    fn extract(delivery: &Delivery, state: &S) -> Result<Self, Outcome>;
}

/// The event, as a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event<T>(pub T);

impl<T: TypedEvent + DeserializeOwned + Send, S> Extract<S> for Event<T> {
    const TOPIC: Option<&'static str> = Some(T::TOPIC);

    fn reads(version: u32) -> bool {
        T::reads(version)
    }

    fn extract(delivery: &Delivery, _: &S) -> Result<Self, Outcome> {
        decode(&delivery.event).map(Event).map_err(|error| {
            // The cause names the field; it may quote the payload, as the dead event itself does.
            let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
            Outcome::dead(error.code().to_owned(), format!("{}{cause}", error.message()))
        })
    }
}

/// The router's state, cloned: see [`Router::with_state`](super::Router::with_state).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State<S>(pub S);

impl<S: Clone + Send> Extract<S> for State<S> {
    fn extract(_: &Delivery, state: &S) -> Result<Self, Outcome> {
        Ok(State(state.clone()))
    }
}

/// What the handler runs in, for work that leaves its task; see [`Context::scope`].
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
