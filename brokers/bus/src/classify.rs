//! Classifies answers and failures of the other store.

use postbox_core::{Error, ErrorKind, Outcome, Received};

/// Returns the outcome of an event from the other store's answer.
pub(crate) fn received(received: Received) -> Outcome {
    match received {
        Received::Accepted(id) => Outcome::delivered_at(false, id),
        Received::Duplicate => Outcome::DUPLICATE,
        Received::Conflict => {
            let text = "the other log knows this event's id with another payload; the record is in its conflicts";
            Outcome::dead("bus_conflict", text)
        }
    }
}

/// Classifies a failed call. Either nothing of it was stored, or its answer was lost and the event
/// is a duplicate next time.
pub(crate) fn failed(error: &Error) -> Outcome {
    let code = || error.code().to_owned();
    match error.kind() {
        ErrorKind::Invalid => Outcome::dead(code(), error.message()),
        ErrorKind::RateLimited => {
            Outcome::Throttled { code: code().into(), error: error.message().into(), after: None }
        }
        // Perhaps a trigger, an index or a policy refuses this event, perhaps it refuses all.
        _ if error.is_refused_alone() => Outcome::ambiguous(code(), error.message()),
        // Something that an operator must fix concerns the other store, not this event.
        _ => Outcome::unavailable(code(), error.message()),
    }
}

/// An earlier event of its key failed in the same call.
pub(crate) fn held_back() -> Outcome {
    Outcome::retry("bus_held_back", "an earlier event of its key was not stored")
}

/// It was not sent alone, because many events of its call were refused. It costs no attempt:
/// perhaps nothing is wrong with it.
pub(crate) fn left() -> Outcome {
    let text = "many other events of its call were refused; it is sent again in a later one".to_owned();
    Outcome::Throttled { code: "bus_left".into(), error: text, after: None }
}
