//! A source's `convert` function, from a verified message to an event.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::Bytes;
use http::HeaderMap;
use postbox_core::{BoxError, NewEvent, SourceName};
use postbox_webhook::Verified;

use crate::answer::Answer;
use crate::mapping::Rejection;

/// A verified message. Only the headers that the scheme signs are verified; see the scheme's table.
#[derive(Debug, Clone, Copy)]
pub struct Message<'a> {
    /// The source it arrived at.
    pub source: &'a SourceName,
    /// The id under which it is stored once.
    pub message_id: &'a str,
    /// What the signature covers.
    pub verified: &'a Verified,
    /// The request's headers.
    pub headers: &'a HeaderMap,
    /// The body as it was received.
    pub body: &'a Bytes,
}

type Function = dyn Fn(&Message<'_>) -> Result<Option<NewEvent>, BoxError> + Send + Sync;

/// The function itself.
#[derive(Clone)]
pub(crate) struct Convert(Arc<Function>);

impl Convert {
    pub(crate) fn new(
        function: impl Fn(&Message<'_>) -> Result<Option<NewEvent>, BoxError> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(function))
    }

    /// Returns the event, or why there is none. A panic is caught here: it may concern this message
    /// only.
    pub(crate) fn call(&self, message: &Message<'_>) -> Result<NewEvent, Rejection> {
        match catch_unwind(AssertUnwindSafe(|| (self.0)(message))) {
            Ok(Ok(Some(event))) => Ok(event),
            Ok(Ok(None)) => Err(Answer::Ignored.into()),
            Ok(Err(failure)) => Err(Rejection::NotConverted(message.message_id.to_owned(), Some(failure.to_string()))),
            Err(_) => Err(Rejection::NotConverted(message.message_id.to_owned(), None)),
        }
    }
}

impl fmt::Debug for Convert {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Convert(…)")
    }
}
