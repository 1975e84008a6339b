//! What the sender hears, and what the owner counts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use postbox_core::SourceName;
use postbox_webhook::Refusal;

/// The end of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Accepted,
    Duplicate,
    Conflict,
    /// A provider's handshake, answered after verification; nothing is stored.
    Challenge(String),
    /// CloudEvents: this origin may send, so many a minute (`None`: as many as it likes).
    Consent {
        origin: String,
        per_minute: Option<u64>,
    },
    /// CloudEvents: no consent. The status alone would not be one anyway; only the headers are.
    OriginRefused,
    /// The source's own function wants nothing of it.
    Ignored,
    /// SNS: a subscription was confirmed; was not, because the configuration does not say so; could
    /// not be; has ended.
    Confirmed,
    Unconfirmed,
    ConfirmationFailed,
    Unsubscribed,
    /// SNS: the certificate could not be fetched.
    CertificateUnavailable,
    Refused(Refusal),
    UnknownSource,
    EncodingRefused,
    /// Another transfer coding than `chunked`, or one beside it.
    TransferRefused,
    BodyTooLarge,
    BodyTooSlow,
    /// It began first when there was no more room for bodies.
    BodyPushedOut,
    BodyBroken,
    /// Genuine, but not an event; the code says which part is wrong.
    Unmapped(&'static str),
    /// The source's own function panicked.
    ConvertPanicked,
    Busy,
    /// More than the source's rate; the wait until the next.
    TooMany(Duration),
    StoreDown,
}

/// Codes that are not refusals of the verifier.
const CODES: [&str; 29] = [
    "accepted",
    "duplicate",
    "conflict",
    "challenge",
    "consent",
    "origin_refused",
    "ignored",
    "confirmed",
    "unconfirmed",
    "confirmation_failed",
    "unsubscribed",
    "certificate_unavailable",
    "source_unknown",
    "encoding_refused",
    "transfer_refused",
    "body_too_large",
    "body_too_slow",
    "body_pushed_out",
    "body_broken",
    "id_unmapped",
    "topic_unmapped",
    "key_unmapped",
    "tenant_unmapped",
    "event_invalid",
    "convert_failed",
    "convert_panicked",
    "busy",
    "rate_limited",
    "store_unavailable",
];

impl Answer {
    pub(crate) fn code(&self) -> &'static str {
        self.code_and_status().0
    }

    /// The stable code, and the status that the sender gets.
    fn code_and_status(&self) -> (&'static str, StatusCode) {
        match self {
            Self::Accepted => ("accepted", StatusCode::ACCEPTED),
            Self::Duplicate => ("duplicate", StatusCode::OK),
            Self::Conflict => ("conflict", StatusCode::OK),
            Self::Challenge(_) => ("challenge", StatusCode::OK),
            Self::Consent { .. } => ("consent", StatusCode::OK),
            Self::OriginRefused => ("origin_refused", StatusCode::FORBIDDEN),
            Self::Ignored => ("ignored", StatusCode::OK),
            Self::Confirmed => ("confirmed", StatusCode::OK),
            Self::Unconfirmed => ("unconfirmed", StatusCode::OK),
            Self::ConfirmationFailed => ("confirmation_failed", StatusCode::SERVICE_UNAVAILABLE),
            Self::Unsubscribed => ("unsubscribed", StatusCode::OK),
            Self::CertificateUnavailable => ("certificate_unavailable", StatusCode::SERVICE_UNAVAILABLE),
            Self::Refused(refusal) => (refusal.code(), StatusCode::UNAUTHORIZED),
            Self::UnknownSource => ("source_unknown", StatusCode::NOT_FOUND),
            Self::EncodingRefused => ("encoding_refused", StatusCode::UNSUPPORTED_MEDIA_TYPE),
            Self::TransferRefused => ("transfer_refused", StatusCode::NOT_IMPLEMENTED),
            Self::BodyTooLarge => ("body_too_large", StatusCode::PAYLOAD_TOO_LARGE),
            Self::BodyTooSlow => ("body_too_slow", StatusCode::REQUEST_TIMEOUT),
            Self::BodyPushedOut => ("body_pushed_out", StatusCode::REQUEST_TIMEOUT),
            Self::BodyBroken => ("body_broken", StatusCode::BAD_REQUEST),
            Self::Unmapped(code) => (*code, StatusCode::UNPROCESSABLE_ENTITY),
            // The sender comes again, perhaps to a mended function.
            Self::ConvertPanicked => ("convert_panicked", StatusCode::INTERNAL_SERVER_ERROR),
            Self::Busy => ("busy", StatusCode::SERVICE_UNAVAILABLE),
            Self::TooMany(_) => ("rate_limited", StatusCode::TOO_MANY_REQUESTS),
            Self::StoreDown => ("store_unavailable", StatusCode::SERVICE_UNAVAILABLE),
        }
    }

    /// When to come again: soon after a crowd, a little later after an outage.
    fn retry_after(&self) -> Option<HeaderValue> {
        match self {
            Self::Busy => Some(HeaderValue::from_static("1")),
            Self::StoreDown | Self::ConfirmationFailed | Self::CertificateUnavailable => {
                Some(HeaderValue::from_static("10"))
            }
            // Whole seconds, up: whoever comes at the very moment would be too early.
            Self::TooMany(wait) => Some(HeaderValue::from(wait.as_secs() + 1)),
            _ => None,
        }
    }
}

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        let text = match &self {
            // Which of its parts was wrong would help somebody who guesses.
            Self::Refused(_) => "unverified".to_owned(),
            Self::Challenge(challenge) => challenge.clone(),
            other => other.code().to_owned(),
        };
        let mut response =
            (self.code_and_status().1, [(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response();
        response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        if self == Self::TransferRefused {
            // Whoever stands between may see another end of the body than we do.
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if let Some(wait) = self.retry_after() {
            response.headers_mut().insert(header::RETRY_AFTER, wait);
        }
        if let Self::Consent { origin, per_minute } = &self
            && let Ok(origin) = HeaderValue::try_from(origin.as_str())
        {
            let rate = per_minute.map_or(HeaderValue::from_static("*"), HeaderValue::from);
            response.headers_mut().insert("webhook-allowed-origin", origin);
            response.headers_mut().insert("webhook-allowed-rate", rate);
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("POST, OPTIONS"));
        }
        response
    }
}

/// One counter of one source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Count {
    /// The source; `None` for requests to names that are none.
    pub source: Option<SourceName>,
    /// The answer's stable code.
    pub code: &'static str,
    /// How often, since the start.
    pub count: u64,
}

/// One counter for each code.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    plain: [AtomicU64; CODES.len()],
    refused: [AtomicU64; Refusal::ALL.len()],
}

impl Counters {
    pub(crate) fn count(&self, answer: &Answer) {
        let cell = match answer {
            Answer::Refused(refusal) => {
                Refusal::ALL.iter().position(|known| known == refusal).map(|at| &self.refused[at])
            }
            other => CODES.iter().position(|known| *known == other.code()).map(|at| &self.plain[at]),
        };
        if let Some(cell) = cell {
            cell.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn counts(&self, source: Option<&SourceName>) -> impl Iterator<Item = Count> {
        let codes = CODES.into_iter().chain(Refusal::ALL.into_iter().map(Refusal::code));
        codes.zip(self.plain.iter().chain(&self.refused)).map(move |(code, cell)| Count {
            source: source.cloned(),
            code,
            count: cell.load(Ordering::Relaxed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_answer_has_a_counter_of_its_own() {
        let unmapped =
            ["id_unmapped", "topic_unmapped", "key_unmapped", "tenant_unmapped", "event_invalid", "convert_failed"];
        let answers = [
            Answer::Accepted,
            Answer::Duplicate,
            Answer::Conflict,
            Answer::Challenge(String::new()),
            Answer::Consent { origin: "o".into(), per_minute: None },
            Answer::OriginRefused,
            Answer::Ignored,
            Answer::Confirmed,
            Answer::Unconfirmed,
            Answer::ConfirmationFailed,
            Answer::Unsubscribed,
            Answer::CertificateUnavailable,
            Answer::ConvertPanicked,
            Answer::TooMany(Duration::ZERO),
            Answer::UnknownSource,
            Answer::EncodingRefused,
            Answer::TransferRefused,
            Answer::BodyTooLarge,
            Answer::BodyTooSlow,
            Answer::BodyPushedOut,
            Answer::BodyBroken,
            Answer::Busy,
            Answer::StoreDown,
        ];
        let answers: Vec<Answer> = answers
            .into_iter()
            .chain(unmapped.map(Answer::Unmapped))
            .chain(Refusal::ALL.map(Answer::Refused))
            .collect();
        let counters = Counters::default();
        answers.iter().for_each(|answer| counters.count(answer));
        let counts: Vec<Count> = counters.counts(None).collect();
        assert_eq!(counts.len(), answers.len());
        assert!(counts.iter().all(|count| count.count == 1), "{counts:?}");
    }

    #[test]
    fn all_refusals_sound_alike() {
        for refusal in Refusal::ALL {
            let response = Answer::Refused(refusal).into_response();
            assert_eq!(response.status(), StatusCode::UNAUTHORIZED);
            assert_eq!(response.headers().len(), 2);
        }
    }
}
