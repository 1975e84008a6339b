//! One place that decides what an answer, or the lack of one, says of the event and of its target.

use std::borrow::Cow;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::StatusCode;
use jiff::Timestamp;
use jiff::civil::DateTime;
use postbox_core::{EventId, Outcome};

use crate::guard::Forbidden;

/// A named wait longer than this is a mistake of the target; the retry policy caps it further.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// What a request came to, before it is known whom to blame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Finding {
    /// It is clear.
    Clear(Outcome),
    /// It may be this event, or the whole target ([`Blame`]).
    Unclear {
        /// Stable reason.
        code: Cow<'static, str>,
        /// What happened.
        error: String,
        /// The target named a wait.
        after: Option<Duration>,
    },
}

/// Judges an answer by its status. `text` says what the target said, cut and escaped.
pub(crate) fn classify_status(status: StatusCode, after: Option<Duration>, text: String) -> Finding {
    let code = || Cow::Owned(format!("http_{}", status.as_u16()));
    Finding::Clear(match status.as_u16() {
        200..=299 => Outcome::DELIVERED,
        300..=399 => {
            Outcome::dead("http_redirect", format!("{text}; redirects are not followed, configure the final URL"))
        }
        409 => Outcome::Delivered { duplicate: true },
        410 => Outcome::Gone { code: code(), error: text },
        // About our pace, not about this event; without a named wait the breaker finds its own.
        429 => Outcome::Unavailable { code: code(), error: text, after: Some(after.unwrap_or_default()) },
        502..=504 => return Finding::Unclear { code: code(), error: text, after },
        408 | 425 | 500..=599 => Outcome::Retry { code: code(), error: text, after },
        _ => Outcome::Dead { code: code(), error: text },
    })
}

/// Judges a request that got no answer.
pub(crate) fn classify_failure(error: &reqwest::Error) -> Finding {
    let text = chain(error);
    if let Some(forbidden) = cause::<Forbidden>(error) {
        return Finding::Clear(Outcome::unavailable("address_forbidden", forbidden.to_string()));
    }
    if error.is_builder() {
        return Finding::Clear(Outcome::dead("request_invalid", text));
    }
    if error.is_dns() {
        return Finding::Clear(Outcome::unavailable("dns_failed", text));
    }
    // Also after the connection stands: with TLS 1.3 the target judges our certificate when we hold the handshake for done.
    if let Some(tls) = cause::<rustls::Error>(error) {
        return Finding::Clear(tls_failure(tls, text));
    }
    if error.is_connect() {
        let refused = cause::<io::Error>(error).is_some_and(|io| io.kind() == io::ErrorKind::ConnectionRefused);
        let code = match () {
            () if error.is_timeout() => "connect_timeout",
            () if refused => "connect_refused",
            () => "connect_failed",
        };
        return Finding::Clear(Outcome::unavailable(code, text));
    }
    let code = if error.is_timeout() { "timeout" } else { "connection_lost" };
    Finding::Unclear { code: code.into(), error: text, after: None }
}

/// Decides the unclear cases by what the target did since the last of them.
///
/// A gateway's 502, 503 or 504, a time-out and a lost connection say either that *this* event cannot be dealt with or that the
/// *target* is down. It is the event, [`Outcome::Retry`], if since the last such end the target has accepted another one; without
/// that evidence it is the target, [`Outcome::Unavailable`], and nobody's attempt is counted. So a poison event that makes its handler
/// answer 503 dies by itself without stopping the rest; a target that goes down costs one attempt of one event, and nothing more
/// for as long as it is down, however few events wait for it.
#[derive(Debug, Default)]
pub(crate) struct Blame(Mutex<Evidence>);

#[derive(Debug, Default)]
struct Evidence {
    /// How many unclear ends there were.
    ends: u64,
    /// An event that was sent after the last of them, and accepted.
    accepted: Option<EventId>,
}

/// A request on its way: how many unclear ends there were when it left. What left before the target went down is no evidence that it is up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sent(u64);

impl Blame {
    /// A request leaves.
    pub(crate) fn sent(&self) -> Sent {
        Sent(self.evidence().ends)
    }

    /// What its end says.
    pub(crate) fn judge(&self, event: EventId, sent: Sent, finding: Finding) -> Outcome {
        let mut evidence = self.evidence();
        match finding {
            Finding::Clear(outcome) => {
                if outcome.is_delivered() && sent.0 == evidence.ends {
                    evidence.accepted = Some(event);
                }
                outcome
            }
            Finding::Unclear { code, error, after } => {
                evidence.ends += 1;
                match evidence.accepted.take() {
                    Some(other) if other != event => Outcome::Retry { code, error, after },
                    _ => Outcome::Unavailable { code, error, after },
                }
            }
        }
    }

    fn evidence(&self) -> MutexGuard<'_, Evidence> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `Retry-After`: seconds or an HTTP date in any of its three forms; anything else counts as absent.
pub(crate) fn retry_after(value: &str, now: Timestamp) -> Option<Duration> {
    let value = value.trim();
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // Too many digits to be a number of seconds still means "a long time".
        let seconds = value.parse().unwrap_or(u64::MAX);
        return Some(Duration::from_secs(seconds).min(RETRY_AFTER_MAX));
    }
    let forms = ["%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %e %H:%M:%S %Y"];
    let date = forms.iter().find_map(|form| DateTime::strptime(form, value).ok())?;
    let at = date.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp();
    let wait = Duration::try_from(at.duration_since(now)).unwrap_or(Duration::ZERO);
    Some(wait.min(RETRY_AFTER_MAX))
}

/// The first cause of a type in the chain. An I/O error names as its source what lies *behind* the error it wraps, so the wrapped one is looked at
/// first.
fn cause<'a, E: std::error::Error + 'static>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a E> {
    let next = |error: &&'a (dyn std::error::Error + 'static)| {
        let wrapped = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        wrapped.map(|inner| inner as &(dyn std::error::Error + 'static)).or_else(|| error.source())
    };
    std::iter::successors(Some(error), next).find_map(|error| error.downcast_ref::<E>())
}

/// TLS that failed says nothing of the event. What the target wants of us is named.
fn tls_failure(error: &rustls::Error, text: String) -> Outcome {
    use rustls::AlertDescription as Alert;
    match error {
        rustls::Error::AlertReceived(Alert::CertificateRequired) => {
            let text = format!("the target demands a client certificate; set client_cert and client_key ({text})");
            Outcome::unavailable("client_cert_required", text)
        }
        rustls::Error::AlertReceived(
            Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::UnknownCA
            | Alert::AccessDenied
            // The signature that goes with it.
            | Alert::DecryptError,
        ) => Outcome::unavailable("client_cert_refused", format!("the target refuses our certificate ({text})")),
        _ => Outcome::unavailable("tls_failed", text),
    }
}

/// The causes in one line, without the URL (its query may hold a token).
fn chain(error: &reqwest::Error) -> String {
    let mut texts: Vec<String> = Vec::new();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        let text = error.to_string();
        if texts.last() != Some(&text) {
            texts.push(text);
        }
        source = error.source();
    }
    if texts.is_empty() { "the request could not be made".into() } else { texts.join(": ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u128) -> EventId {
        EventId::from_uuid(format!("{number:032x}").parse::<EventId>().expect("a UUID").as_uuid())
    }

    fn kind(finding: &Finding) -> &'static str {
        match finding {
            Finding::Unclear { .. } => "unclear",
            Finding::Clear(Outcome::Delivered { duplicate: false }) => "delivered",
            Finding::Clear(Outcome::Delivered { duplicate: true }) => "duplicate",
            Finding::Clear(Outcome::Retry { .. }) => "retry",
            Finding::Clear(Outcome::Dead { .. }) => "dead",
            Finding::Clear(Outcome::Gone { .. }) => "gone",
            Finding::Clear(Outcome::Unavailable { .. }) => "unavailable",
        }
    }

    #[test]
    fn every_status_has_one_meaning() {
        for status in 100..=999_u16 {
            let expected = match status {
                200..=299 => "delivered",
                409 => "duplicate",
                410 => "gone",
                429 => "unavailable",
                502..=504 => "unclear",
                408 | 425 | 500..=599 => "retry",
                _ => "dead",
            };
            let finding = classify_status(StatusCode::from_u16(status).expect("a status"), None, String::new());
            assert_eq!(kind(&finding), expected, "{status}");
        }
    }

    fn fails() -> Finding {
        classify_status(StatusCode::SERVICE_UNAVAILABLE, None, String::new())
    }

    #[test]
    fn an_event_is_blamed_when_others_get_through_and_the_target_when_none_does() {
        let blame = Blame::default();
        let works = || Finding::Clear(Outcome::DELIVERED);
        let judge = |event, finding| kind(&Finding::Clear(blame.judge(id(event), blame.sent(), finding)));
        assert_eq!(judge(1, fails()), "unavailable", "nothing was ever accepted");
        assert_eq!(judge(1, fails()), "unavailable", "however often");
        assert_eq!(judge(2, works()), "delivered");
        assert_eq!(judge(1, fails()), "retry", "others get through");
        assert_eq!(judge(1, fails()), "unavailable", "and since then no other did");
        assert_eq!(judge(2, fails()), "unavailable");
        assert_eq!(judge(3, Finding::Clear(Outcome::unavailable("connect_refused", ""))), "unavailable");
        assert_eq!(judge(3, Finding::Clear(Outcome::dead("http_422", ""))), "dead");
        assert_eq!(judge(3, Finding::Clear(Outcome::retry("http_500", ""))), "retry");
        assert_eq!(judge(1, fails()), "unavailable", "a refusal is no acceptance");
        assert_eq!(judge(1, works()), "delivered");
        assert_eq!(judge(1, fails()), "unavailable", "a replay of itself is no other");
        assert_eq!(judge(1, works()), "delivered");
        assert_eq!(judge(2, fails()), "retry");
    }

    #[test]
    fn what_left_before_the_target_went_down_is_no_evidence() {
        let blame = Blame::default();
        let judge = |event, sent, finding| kind(&Finding::Clear(blame.judge(id(event), sent, finding)));
        judge(1, blame.sent(), Finding::Clear(Outcome::DELIVERED));
        let together: Vec<Sent> = (0..16).map(|_| blame.sent()).collect();
        let mut charged = 0;
        for (number, sent) in together.into_iter().enumerate() {
            let finding = if number % 2 == 0 { fails() } else { Finding::Clear(Outcome::DELIVERED) };
            charged += u32::from(judge(10 + number as u128, sent, finding) == "retry");
        }
        assert_eq!(charged, 1, "one outage, one attempt");
        assert_eq!(judge(9, blame.sent(), fails()), "unavailable");
    }

    #[test]
    fn too_many_requests_are_nobodys_fault() {
        let blame = Blame::default();
        let busy = |after| classify_status(StatusCode::TOO_MANY_REQUESTS, after, String::new());
        for (named, expected) in [(None, 0), (Some(Duration::from_secs(3)), 3)] {
            blame.judge(id(1), blame.sent(), Finding::Clear(Outcome::DELIVERED));
            let outcome = blame.judge(id(2), blame.sent(), busy(named));
            let Outcome::Unavailable { after, .. } = outcome else { panic!("{outcome:?}") };
            assert_eq!(after, Some(Duration::from_secs(expected)), "it asked for patience");
        }
    }

    #[test]
    fn retry_after_is_read_in_all_its_forms() {
        let now: Timestamp = "1994-11-06T08:49:07Z".parse().expect("a time");
        let wait = |value| retry_after(value, now).map(|wait| wait.as_secs());
        assert_eq!(wait("120"), Some(120));
        assert_eq!(wait(" 0 "), Some(0));
        for date in ["Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"] {
            assert_eq!(wait(date), Some(30), "{date}");
        }
        assert_eq!(wait("Sun, 06 Nov 1994 08:00:00 GMT"), Some(0), "in the past");
        assert_eq!(wait("99999999999999999999999999"), Some(RETRY_AFTER_MAX.as_secs()));
        assert_eq!(wait("Thu, 31 Dec 9998 23:59:59 GMT"), Some(RETRY_AFTER_MAX.as_secs()));
        for nonsense in ["", "-1", "+1", "1.5", "soon", "Sun, 06 Nov", "1e3"] {
            assert_eq!(wait(nonsense), None, "{nonsense:?}");
        }
    }
}
