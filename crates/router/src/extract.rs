//! Arguments of handlers.

use postbox_core::typed::decode;
use postbox_core::{Context, Delivery, Headers, Outcome, TypedEvent};
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
        decode(&delivery.event).map(Event).map_err(|error| {
            let cause = std::error::Error::source(&error).and_then(|cause| unquoted(&cause.to_string()));
            let cause = cause.map(|cause| format!(": {cause}")).unwrap_or_default();
            Outcome::dead(error.code().to_owned(), format!("{}{cause}", error.message()))
        })
    }
}

/// What serde says of a payload, without the value that it quotes: errors go into logs and traces.
/// `None` for any other text: it is a field's own, and may quote the payload in any form.
fn unquoted(said: &str) -> Option<String> {
    let begins = |forms: &[&str]| forms.iter().any(|form| said.starts_with(form));
    // These name a field of the type.
    if begins(&["missing field `", "duplicate field `"]) {
        return Some(said.to_owned());
    }
    if !begins(&["invalid type: ", "invalid value: ", "invalid length ", "unknown variant `", "unknown field `"]) {
        return None;
    }
    // The last of them: a value may contain such words, too.
    let rest = [", expected", ", there are"].iter().filter_map(|rest| said.rfind(rest)).max()?;
    let found = said[..rest].find(['"', '`']).map_or(&said[..rest], |quote| said[..quote].trim_end());
    Some(format!("{found}{}", &said[rest..]))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_serde_says_in_its_own_words_is_repeated() {
        for (said, repeated) in [
            ("missing field `order` at line 1 column 2", Some("missing field `order` at line 1 column 2")),
            ("invalid type: string \"a, expected b\", expected i64", Some("invalid type: string, expected i64")),
            ("unknown field `a, expected b`, there are no fields", Some("unknown field, there are no fields")),
            ("invalid length 3, expected a tuple of size 2", Some("invalid length 3, expected a tuple of size 2")),
            ("parsed value '1', but unparsed input \"2\" remains (expected no unparsed input)", None),
            ("no date: secret, expected another", None),
        ] {
            assert_eq!(unquoted(said).as_deref(), repeated, "{said}");
        }
    }
}
