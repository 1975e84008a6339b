//! Answers to senders, and the counters of each answer.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use postbox_core::SourceName;
use postbox_webhook::{Refusal, Scheme};

/// The result of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Accepted,
    Duplicate,
    Conflict,
    /// A provider's handshake: answered after verification, nothing is stored.
    Challenge(String),
    /// CloudEvents consent: this origin may send `per_minute` messages a minute (`None`: no limit).
    Consent {
        origin: String,
        per_minute: Option<u64>,
    },
    /// CloudEvents consent denied. The headers grant consent, not the status.
    OriginRefused,
    /// The source's `convert` function returned nothing to store.
    Ignored,
    /// SNS subscription: confirmed; not confirmed because the configuration does not allow it;
    /// confirmation failed; subscription ended.
    Confirmed,
    Unconfirmed,
    ConfirmationFailed,
    Unsubscribed,
    /// SNS: the certificate could not be fetched.
    CertificateUnavailable,
    Refused(Refusal),
    UnknownSource,
    EncodingRefused,
    /// A transfer coding other than exactly `chunked`.
    TransferRefused,
    BodyTooLarge,
    BodyTooSlow,
    /// The oldest body, dropped when the buffer was full.
    BodyPushedOut,
    BodyBroken,
    /// Verified, but not an event. The code names the part that is wrong.
    Unmapped(&'static str),
    /// The source's `convert` function panicked.
    ConvertPanicked,
    /// What may be right later, for a sender that repeats only what gets a server error.
    Later(&'static str),
    Busy,
    /// The source's rate is exceeded; with the wait until the next message is allowed.
    TooMany(Duration),
    StoreDown,
}

/// Codes of answers that do not come from the verifier.
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

/// The text of every refusal. It does not say which part was wrong: that would help an attacker who
/// guesses.
const UNVERIFIED: &str = "unverified";

impl Answer {
    pub(crate) fn code(&self) -> &'static str {
        self.code_and_status().0
    }

    /// Returns the stable code and the HTTP status.
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
            // These limits are ours, and a sender need not repeat what gets 408.
            Self::BodyTooSlow => ("body_too_slow", StatusCode::SERVICE_UNAVAILABLE),
            Self::BodyPushedOut => ("body_pushed_out", StatusCode::SERVICE_UNAVAILABLE),
            Self::BodyBroken => ("body_broken", StatusCode::BAD_REQUEST),
            Self::Unmapped(code) => (*code, StatusCode::UNPROCESSABLE_ENTITY),
            // A server error, so that the sender repeats the message: the function may be fixed by
            // then.
            Self::ConvertPanicked => ("convert_panicked", StatusCode::INTERNAL_SERVER_ERROR),
            Self::Later(code) => (*code, StatusCode::SERVICE_UNAVAILABLE),
            Self::Busy => ("busy", StatusCode::SERVICE_UNAVAILABLE),
            Self::TooMany(_) => ("rate_limited", StatusCode::TOO_MANY_REQUESTS),
            Self::StoreDown => ("store_unavailable", StatusCode::SERVICE_UNAVAILABLE),
        }
    }

    /// Returns the answer to SNS, which repeats a message after 429 and 5xx only: a genuine message
    /// that is refused for now would be lost.
    fn for_sns(self) -> Self {
        match self {
            Self::Refused(refusal) if refusal.is_stale() || refusal == Refusal::CertificateExpired => {
                Self::Later(UNVERIFIED)
            }
            Self::Unmapped(code) => Self::Later(code),
            Self::BodyTooLarge => Self::Later(self.code()),
            other => other,
        }
    }

    /// Returns the response as the scheme's sender reads it. Twilio and Slack show the body of a
    /// success to a person: Twilio texts it to the sender of an SMS, Slack posts it below a slash
    /// command.
    pub(crate) fn into_response_to(self, scheme: Scheme) -> Response {
        let is_challenge = matches!(self, Self::Challenge(_));
        let answer = if scheme == Scheme::Sns { self.for_sns() } else { self };
        let mut response = answer.into_response();
        if is_challenge || !response.status().is_success() {
            return response;
        }
        let (content_type, body) = match scheme {
            // TwiML that does nothing. Twilio reports a body that is not TwiML as an error.
            Scheme::Twilio => ("text/xml", "<Response/>"),
            Scheme::Slack => ("text/plain; charset=utf-8", ""),
            _ => return response,
        };
        // Slack asks for exactly this for commands and buttons; Twilio takes any success.
        *response.status_mut() = StatusCode::OK;
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        *response.body_mut() = Body::from(body);
        response
    }

    /// When the sender should repeat: after a second if the ingress is busy, later after an outage.
    fn retry_after(&self) -> Option<HeaderValue> {
        match self {
            Self::Busy | Self::BodyTooSlow | Self::BodyPushedOut => Some(HeaderValue::from_static("1")),
            Self::StoreDown | Self::ConfirmationFailed | Self::CertificateUnavailable | Self::Later(_) => {
                Some(HeaderValue::from_static("10"))
            }
            // Rounded up to whole seconds: a sender that comes at the exact moment could be too
            // early.
            Self::TooMany(wait) => Some(HeaderValue::from(wait.as_secs() + 1)),
            _ => None,
        }
    }
}

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        let text = match &self {
            Self::Refused(_) => UNVERIFIED.to_owned(),
            Self::Challenge(challenge) => challenge.clone(),
            other => other.code().to_owned(),
        };
        let mut response =
            (self.code_and_status().1, [(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response();
        response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        if self == Self::TransferRefused {
            // A proxy in between may disagree about where the body ends, so the connection is not
            // reused.
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

/// The counter of one answer of one source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Count {
    /// The source; `None` for requests to unknown sources.
    pub source: Option<SourceName>,
    /// The answer's stable code.
    pub code: &'static str,
    /// Number of such answers since the start.
    pub count: u64,
}

/// A counter for each code.
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
    use http_body::Body as _;

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

    #[test]
    fn no_person_is_shown_a_code() {
        let answered = |answer: &Answer, scheme| {
            let response = answer.clone().into_response_to(scheme);
            let content_type = response.headers()[header::CONTENT_TYPE].to_str().expect("text").to_owned();
            (response.status().as_u16(), content_type, response.body().size_hint().exact())
        };
        let plain = "text/plain; charset=utf-8";
        for answer in [Answer::Accepted, Answer::Duplicate, Answer::Conflict, Answer::Ignored] {
            assert_eq!(answered(&answer, Scheme::Twilio), (200, "text/xml".to_owned(), Some(11)));
            assert_eq!(answered(&answer, Scheme::Slack), (200, plain.to_owned(), Some(0)));
        }
        assert_eq!(answered(&Answer::Accepted, Scheme::Stripe), (202, plain.to_owned(), Some(8)));
        assert_eq!(answered(&Answer::StoreDown, Scheme::Twilio), (503, plain.to_owned(), Some(17)));
        assert_eq!(answered(&Answer::Challenge("3eZ".into()), Scheme::Slack), (200, plain.to_owned(), Some(3)));
    }
}
