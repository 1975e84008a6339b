//! Classifies answers of SQS and SNS, missing answers and failures of the client. The engine
//! decides what they cost.

use std::error::Error as StdError;

use aws_sdk_sqs::config::http::HttpResponse;
use aws_sdk_sqs::error::{ProvideErrorMetadata, SdkError};
use postbox_core::{Error, ErrorKind, Outcome, excerpt};

/// What a failure concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Concerns {
    /// All messages: nothing was accepted, or nothing was sent.
    Everybody,
    /// All messages, until an operator fixes our credentials or permissions.
    Credentials,
    /// The rate of requests.
    Pace,
    /// This message, for good.
    Message,
    /// Perhaps this message: the answer would be the same if it concerned all.
    Perhaps,
    /// Unknown: the message may have been accepted.
    Unknown,
}

/// Why something was not done, or may not have been done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) concerns: Concerns,
    pub(crate) code: &'static str,
    text: String,
}

/// Returns what an AWS error code means: what it concerns, our code for it, and the cure.
fn meaning(code: &str, text: &str) -> (Concerns, &'static str, &'static str) {
    use Concerns::{Credentials, Everybody, Message, Pace, Perhaps};
    let code = code.strip_prefix("AWS.SimpleQueueService.").unwrap_or(code);
    match code.strip_suffix("Exception").unwrap_or(code) {
        "RequestThrottled"
        | "Throttling"
        | "Throttled"
        | "TooManyRequests"
        | "RequestLimitExceeded"
        | "OverLimit"
        | "KmsThrottled"
        | "KMS.Throttling" => (Pace, "aws_throttled", ""),
        "AccessDenied" | "AuthorizationError" => {
            (Credentials, "aws_not_permitted", "; allow it in a policy; the guide has one")
        }
        "InvalidClientTokenId"
        | "UnrecognizedClient"
        | "SignatureDoesNotMatch"
        | "InvalidSignature"
        | "IncompleteSignature"
        | "MissingAuthenticationToken"
        | "ExpiredToken"
        | "InvalidAccessKeyId"
        | "OptInRequired"
        | "InvalidSecurity"
        | "RequestExpired"
        | "NotAuthorized" => (Credentials, "aws_unauthorized", "; check the credentials, the region and the clock"),
        "QueueDoesNotExist" | "NonExistentQueue" => {
            (Everybody, "sqs_queue_missing", "; correct queue_url, or create it: aws sqs create-queue")
        }
        "NotFound" => (Everybody, "sns_topic_missing", "; correct topic_arn, or create it: aws sns create-topic"),
        kms if kms.starts_with("Kms") || kms.starts_with("KMS") => {
            (Everybody, "aws_key_failed", "; allow the use of its encryption key, and check that the key is enabled")
        }
        "InvalidMessageContents" => (Message, "body_not_text", ""),
        "BatchRequestTooLong" | "MessageTooLong" => (Message, "payload_too_large", "; lower message_max"),
        _ if text.contains("must be shorter than") || text.contains("Message too long") => {
            (Message, "payload_too_large", "; lower message_max")
        }
        "InternalError" | "InternalFailure" | "ServiceUnavailable" | "InternalServerError" => {
            (Perhaps, "aws_internal", "")
        }
        _ => (Perhaps, "aws_refused", ""),
    }
}

impl Refusal {
    pub(crate) fn new(concerns: Concerns, code: &'static str, text: impl Into<String>) -> Self {
        Self { concerns, code, text: text.into() }
    }

    /// AWS's answer about one message, or about a whole request.
    pub(crate) fn answered(aws: &str, text: Option<&str>) -> Self {
        let text = text.unwrap_or_default();
        let (concerns, code, cure) = meaning(aws, text);
        Self::new(concerns, code, excerpt(&format!("{aws}: {text}{cure}")))
    }

    /// There was no answer within the time of a call.
    pub(crate) fn timed_out() -> Self {
        Self::new(Concerns::Unknown, "aws_timeout", "no answer in time")
    }

    /// The client could not build a request.
    pub(crate) fn incomplete(error: impl std::fmt::Display) -> Self {
        Self::new(Concerns::Everybody, "aws_request_invalid", error.to_string())
    }

    /// Names the server that was asked.
    pub(crate) fn at(self, server: &str) -> Self {
        Self { text: format!("{server}: {}", self.text), ..self }
    }

    /// Classifies a request that failed as a whole.
    pub(crate) fn of<E>(error: &SdkError<E, HttpResponse>) -> Self
    where
        E: ProvideErrorMetadata + StdError + 'static,
    {
        let text = chain(error);
        match error {
            SdkError::ServiceError(answer) => {
                let (status, meta) = (answer.raw().status().as_u16(), answer.err().meta());
                match (meta.code(), status) {
                    (Some(code), _) => Self::answered(code, meta.message()),
                    (None, 200..=299) => Self::new(Concerns::Unknown, "aws_answer_unknown", excerpt(&text)),
                    (None, 429) => Self::new(Concerns::Pace, "aws_throttled", excerpt(&text)),
                    (None, _) => {
                        Self::new(Concerns::Perhaps, "aws_internal", excerpt(&format!("HTTP {status}: {text}")))
                    }
                }
            }
            SdkError::TimeoutError(_) => Self::timed_out(),
            SdkError::DispatchFailure(failure) => match unsent(error, &text, failure.is_other()) {
                Some((Concerns::Credentials, code)) => {
                    let cure = "no credentials; set aws.access_key_id, or credentials in AWS's default chain";
                    Self::new(Concerns::Credentials, code, excerpt(&format!("{cure}: {text}")))
                }
                Some((concerns, code)) => Self::new(concerns, code, excerpt(&text)),
                None => Self::new(Concerns::Unknown, "aws_connection_lost", excerpt(&text)),
            },
            SdkError::ConstructionFailure(_) => Self::incomplete(excerpt(&text)),
            _ => Self::new(Concerns::Unknown, "aws_answer_unknown", excerpt(&text)),
        }
    }

    /// Whether it is about the contents of one message, so that others of its request may be fine.
    pub(crate) fn is_of_one(&self) -> bool {
        self.concerns == Concerns::Message || self.code == "aws_refused"
    }

    pub(crate) fn outcome(self) -> Outcome {
        let Self { concerns, code, text } = self;
        match concerns {
            Concerns::Everybody | Concerns::Credentials => Outcome::unavailable(code, text),
            Concerns::Pace => Outcome::Throttled { code: code.into(), error: text, after: None },
            Concerns::Message => Outcome::dead(code, text),
            Concerns::Perhaps | Concerns::Unknown => Outcome::ambiguous(code, text),
        }
    }

    pub(crate) fn error(self, operation: &'static str) -> Error {
        let kind = match (self.concerns, self.code) {
            (Concerns::Credentials, _) => ErrorKind::Unauthorized,
            (_, "sqs_queue_missing" | "sns_topic_missing" | "aws_request_invalid") => ErrorKind::Mismatch,
            (Concerns::Pace, _) => ErrorKind::RateLimited,
            _ => ErrorKind::Unavailable,
        };
        Error::new(kind, operation, self.code, self.text)
    }
}

/// Returns why a request was never sent; `None` if it may have been.
fn unsent(error: &(dyn StdError + 'static), text: &str, is_other: bool) -> Option<(Concerns, &'static str)> {
    let connecting = find::<hyper_util::client::legacy::Error>(error).is_some_and(|error| error.is_connect());
    let io = find::<std::io::Error>(error).map(std::io::Error::kind);
    match io {
        _ if !connecting && is_other && text.contains("credential") => {
            Some((Concerns::Credentials, "aws_credentials_missing"))
        }
        _ if !connecting => None,
        Some(std::io::ErrorKind::ConnectionRefused) => Some((Concerns::Everybody, "connect_refused")),
        _ if text.contains("timeout") || text.contains("timed out") => Some((Concerns::Everybody, "connect_timeout")),
        _ if text.contains("dns") => Some((Concerns::Everybody, "dns_failed")),
        _ if text.contains("certificate") || text.contains("tls") => Some((Concerns::Everybody, "tls_failed")),
        _ => Some((Concerns::Everybody, "connect_failed")),
    }
}

fn find<'a, E: StdError + 'static>(error: &'a (dyn StdError + 'static)) -> Option<&'a E> {
    std::iter::successors(Some(error), |&error| error.source()).find_map(|error| error.downcast_ref())
}

/// Returns the causes of a client error, which itself only says where it arose.
fn chain(error: &(dyn StdError + 'static)) -> String {
    let error = error.source().unwrap_or(error);
    let all: Vec<String> =
        std::iter::successors(Some(error), |&error| error.source()).map(|it| it.to_string()).collect();
    all.join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_answer_has_one_meaning() {
        for (answer, text, expected, code) in [
            ("RequestThrottled", "", "throttled", "aws_throttled"),
            ("ThrottlingException", "", "throttled", "aws_throttled"),
            ("KmsThrottled", "", "throttled", "aws_throttled"),
            ("KMS.ThrottlingException", "", "throttled", "aws_throttled"),
            ("InvalidSignatureException", "", "unavailable", "aws_unauthorized"),
            ("KMSDisabledException", "", "unavailable", "aws_key_failed"),
            ("AccessDenied", "", "unavailable", "aws_not_permitted"),
            ("AccessDeniedException", "", "unavailable", "aws_not_permitted"),
            ("AuthorizationErrorException", "", "unavailable", "aws_not_permitted"),
            ("InvalidClientTokenId", "", "unavailable", "aws_unauthorized"),
            ("ExpiredTokenException", "", "unavailable", "aws_unauthorized"),
            ("AWS.SimpleQueueService.NonExistentQueue", "", "unavailable", "sqs_queue_missing"),
            ("QueueDoesNotExist", "", "unavailable", "sqs_queue_missing"),
            ("NotFoundException", "", "unavailable", "sns_topic_missing"),
            ("InvalidMessageContents", "", "dead", "body_not_text"),
            ("AWS.SimpleQueueService.BatchRequestTooLong", "", "dead", "payload_too_large"),
            ("InvalidParameterValue", "Message must be shorter than 262144 bytes", "dead", "payload_too_large"),
            ("InvalidParameter", "Invalid parameter: Message too long", "dead", "payload_too_large"),
            ("InvalidParameterValue", "something else", "ambiguous", "aws_refused"),
            ("InternalError", "", "ambiguous", "aws_internal"),
            ("ServiceUnavailable", "", "ambiguous", "aws_internal"),
            ("NeverHeardOf", "", "ambiguous", "aws_refused"),
        ] {
            let (kind, found) = match Refusal::answered(answer, Some(text)).outcome() {
                Outcome::Unavailable { code, .. } => ("unavailable", code),
                Outcome::Ambiguous { code, .. } => ("ambiguous", code),
                Outcome::Throttled { code, .. } => ("throttled", code),
                Outcome::Dead { code, .. } => ("dead", code),
                other => panic!("{other:?}"),
            };
            assert_eq!((kind, &*found), (expected, code), "{answer}");
        }
    }

    #[test]
    fn what_a_person_must_mend_is_said_so() {
        let kind = |code: &str| Refusal::answered(code, None).error("receive").kind();
        assert_eq!(kind("AccessDenied"), ErrorKind::Unauthorized);
        assert_eq!(kind("QueueDoesNotExist"), ErrorKind::Mismatch);
        assert_eq!(kind("RequestThrottled"), ErrorKind::RateLimited);
        assert_eq!(kind("InternalError"), ErrorKind::Unavailable);
    }

    #[test]
    fn an_error_names_the_server_that_was_asked() {
        let error = Refusal::timed_out().at("https://sqs.example").error("connect");
        assert_eq!((error.code(), error.message()), ("aws_timeout", "https://sqs.example: no answer in time"));
    }

    #[test]
    fn an_answer_s_text_is_one_harmless_line() {
        let hostile = Refusal::answered("X", Some(&"a\r\nb\u{1b}[1m".repeat(1_000)));
        let Outcome::Ambiguous { error, .. } = hostile.outcome() else { panic!("ambiguous") };
        assert!(!error.contains(['\r', '\n', '\u{1b}']) && error.len() < 4_000, "{error}");
    }
}
