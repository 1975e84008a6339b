//! What a sink reports of one delivery. Sinks classify; the engine decides what it costs.

use std::borrow::Cow;
use std::time::Duration;

/// What became of one delivery. Codes are stable snake_case words an operator can filter by; texts
/// are for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The destination has it.
    Delivered {
        /// The destination already had it (its own deduplication said so). Counted, otherwise the
        /// same.
        duplicate: bool,
    },
    /// This event failed and may succeed later. Costs one attempt.
    Retry {
        /// Stable reason, e.g. `handler_error`.
        code: Cow<'static, str>,
        /// What the destination said, cut to a safe excerpt.
        error: String,
        /// The destination named a wait (`Retry-After`).
        after: Option<Duration>,
    },
    /// The destination failed at this event (HTTP 500). Costs one attempt, as
    /// [`Retry`](Self::Retry) does, unless it fails at all it gets: from the fifth event in a row
    /// on, this counts as [`Unavailable`](Self::Unavailable).
    ServerError {
        /// Stable reason, e.g. `http_500`.
        code: Cow<'static, str>,
        /// What the destination said.
        error: String,
        /// The destination named a wait (`Retry-After`).
        after: Option<Duration>,
    },
    /// What this event met is what an outage looks like, too: a gateway's 502, no answer in time, a
    /// connection that was lost. Costs one attempt while other events succeed; otherwise it counts
    /// as [`Unavailable`](Self::Unavailable).
    Ambiguous {
        /// Stable reason, e.g. `http_503`.
        code: Cow<'static, str>,
        /// What went wrong.
        error: String,
        /// The destination named a wait (`Retry-After`).
        after: Option<Duration>,
    },
    /// The destination asks for fewer requests (HTTP 429). Never costs an attempt, however often
    /// the event meets it.
    Throttled {
        /// Stable reason, e.g. `http_429`.
        code: Cow<'static, str>,
        /// What the destination said.
        error: String,
        /// The wait it named: the least that is waited.
        after: Option<Duration>,
    },
    /// This event can never succeed (poison, refused). It dies at once.
    Dead {
        /// Stable reason, e.g. `http_422`.
        code: Cow<'static, str>,
        /// What the destination said.
        error: String,
    },
    /// The whole destination is down: no attempt is counted, and the breaker opens.
    Unavailable {
        /// Stable reason, e.g. `connect_refused`.
        code: Cow<'static, str>,
        /// What went wrong.
        error: String,
    },
    /// The destination asked never to be called again (HTTP 410). The event dies and the
    /// subscription pauses until a person resumes it.
    Gone {
        /// Stable reason, e.g. `http_410`.
        code: Cow<'static, str>,
        /// What the destination said.
        error: String,
    },
}

impl Outcome {
    /// Delivered for the first time.
    pub const DELIVERED: Self = Self::Delivered { duplicate: false };

    /// A retry without a named wait.
    pub fn retry(code: impl Into<Cow<'static, str>>, error: impl Into<String>) -> Self {
        Self::Retry { code: code.into(), error: error.into(), after: None }
    }

    /// A failure of the destination at this event, without a named wait.
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

    /// Why the destination does not have the event: the code, and the text.
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

    /// Whether the destination has the event.
    pub fn is_delivered(&self) -> bool {
        matches!(self, Self::Delivered { .. })
    }
}

/// Enough for every error of a server.
const TEXT_CHARS_MAX: usize = 400;

/// What another program said, as one harmless line: its first characters, what does not print
/// escaped.
pub fn excerpt(text: &str) -> String {
    text.chars().take(TEXT_CHARS_MAX).flat_map(char::escape_debug).collect()
}
