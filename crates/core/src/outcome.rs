//! What a sink reports about one delivery. Sinks classify; the engine decides what it costs.

use std::borrow::Cow;
use std::fmt::Display;
use std::time::Duration;

use crate::trace;

/// The result of one delivery. Codes are stable snake_case words an operator can filter by; texts
/// are for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The event was delivered.
    Delivered {
        /// The destination already had it (found by its own deduplication). Counted separately,
        /// otherwise the same.
        duplicate: bool,
        /// Where the destination has it, in its own terms: a number, an offset, an id. Only traces
        /// use it. See [`delivered_at`](Self::delivered_at).
        position: Option<String>,
    },
    /// This event failed and may succeed later. Costs one attempt.
    Retry {
        /// The stable reason, e.g. `handler_error`.
        code: Cow<'static, str>,
        /// What the destination said, cut to a safe excerpt.
        error: String,
        /// The wait that the destination named (`Retry-After`).
        after: Option<Duration>,
    },
    /// The destination failed at this event (HTTP 500). Costs one attempt, as
    /// [`Retry`](Self::Retry) does, unless the destination fails at everything it gets: from the
    /// fifth consecutive event on, this counts as [`Unavailable`](Self::Unavailable).
    ServerError {
        /// The stable reason, e.g. `http_500`.
        code: Cow<'static, str>,
        /// What the destination said.
        error: String,
        /// The wait that the destination named (`Retry-After`).
        after: Option<Duration>,
    },
    /// The failure may be this event's or an outage: a gateway's 502, no answer in time, a lost
    /// connection. Costs one attempt while other events succeed. Otherwise it counts as
    /// [`Unavailable`](Self::Unavailable).
    Ambiguous {
        /// The stable reason, e.g. `http_503`.
        code: Cow<'static, str>,
        /// What went wrong.
        error: String,
        /// The wait that the destination named (`Retry-After`).
        after: Option<Duration>,
    },
    /// The destination asks for fewer requests (HTTP 429). Never costs an attempt, however often it
    /// happens to an event.
    Throttled {
        /// The stable reason, e.g. `http_429`.
        code: Cow<'static, str>,
        /// What the destination said.
        error: String,
        /// The wait that the destination named, which is the shortest wait.
        after: Option<Duration>,
    },
    /// This event can never succeed (poison, refused). It becomes dead at once.
    Dead {
        /// The stable reason, e.g. `http_422`.
        code: Cow<'static, str>,
        /// What the destination said.
        error: String,
    },
    /// The whole destination is down. No attempt is counted, and the breaker opens.
    Unavailable {
        /// The stable reason, e.g. `connect_refused`.
        code: Cow<'static, str>,
        /// What went wrong.
        error: String,
    },
    /// The destination asked never to be called again (HTTP 410). The event becomes dead and the
    /// subscription pauses until a person resumes it.
    Gone {
        /// The stable reason, e.g. `http_410`.
        code: Cow<'static, str>,
        /// What the destination said.
        error: String,
    },
}

impl Outcome {
    /// Delivered for the first time.
    pub const DELIVERED: Self = Self::Delivered { duplicate: false, position: None };
    /// The destination already had it.
    pub const DUPLICATE: Self = Self::Delivered { duplicate: true, position: None };

    /// Delivered at this position of the destination. Its text is made only while traces are on, so
    /// that it costs nothing otherwise.
    pub fn delivered_at(duplicate: bool, position: impl Display) -> Self {
        Self::Delivered { duplicate, position: trace::is_on().then(|| position.to_string()) }
    }

    /// A retry without a named wait.
    pub fn retry(code: impl Into<Cow<'static, str>>, error: impl Into<String>) -> Self {
        Self::Retry { code: code.into(), error: error.into(), after: None }
    }

    /// A server error at this event, without a named wait.
    pub fn server_error(code: impl Into<Cow<'static, str>>, error: impl Into<String>) -> Self {
        Self::ServerError { code: code.into(), error: error.into(), after: None }
    }

    /// A failure that may be this event's or the whole destination's, without a named wait.
    pub fn ambiguous(code: impl Into<Cow<'static, str>>, error: impl Into<String>) -> Self {
        Self::Ambiguous { code: code.into(), error: error.into(), after: None }
    }

    /// A permanent failure.
    pub fn dead(code: impl Into<Cow<'static, str>>, error: impl Into<String>) -> Self {
        Self::Dead { code: code.into(), error: error.into() }
    }

    /// The whole destination is down.
    pub fn unavailable(code: impl Into<Cow<'static, str>>, error: impl Into<String>) -> Self {
        Self::Unavailable { code: code.into(), error: error.into() }
    }

    /// Returns the code and the text of a failure; `None` if the event was delivered.
    pub fn failure(&self) -> Option<(&str, &str)> {
        match self {
            Self::Delivered { .. } => None,
            Self::Retry { code, error, .. }
            | Self::ServerError { code, error, .. }
            | Self::Ambiguous { code, error, .. }
            | Self::Throttled { code, error, .. }
            | Self::Dead { code, error }
            | Self::Unavailable { code, error }
            | Self::Gone { code, error } => Some((code, error)),
        }
    }

    /// Returns whether the event was delivered.
    pub fn is_delivered(&self) -> bool {
        matches!(self, Self::Delivered { .. })
    }
}

/// Maximum characters of an excerpt: enough for any error of a server.
const TEXT_CHARS_MAX: usize = 400;

/// Turns text of another program into one harmless line: its first characters, with unprintable
/// ones escaped. Quotes and backslashes stay as they are: some texts come here twice.
pub fn excerpt(text: &str) -> String {
    let shown = |c: char| match c {
        '"' | '\'' | '\\' => c.to_string(),
        c => c.escape_debug().to_string(),
    };
    text.chars().take(TEXT_CHARS_MAX).map(shown).collect()
}
