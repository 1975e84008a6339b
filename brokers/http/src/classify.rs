//! Classifies answers, and requests without one, in one place. The engine decides what an outcome
//! costs the event.

use std::borrow::Cow;
use std::io;
use std::time::Duration;

use http::StatusCode;
use jiff::Timestamp;
use jiff::civil::DateTime;
use postbox_core::Outcome;

use crate::guard::Forbidden;

/// The longest wait that a target may ask for: a longer one is a mistake. The retry policy limits
/// it further.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Classifies an answer by its status. `text` is the target's answer, cut and escaped.
pub(crate) fn classify_status(status: StatusCode, after: Option<Duration>, text: String) -> Outcome {
    let code = || Cow::Owned(format!("http_{}", status.as_u16()));
    match status.as_u16() {
        200..=299 => Outcome::DELIVERED,
        300..=399 => {
            Outcome::dead("http_redirect", format!("{text}; redirects are not followed, configure the final URL"))
        }
        409 => Outcome::DUPLICATE,
        410 => Outcome::Gone { code: code(), error: text },
        429 => Outcome::Throttled { code: code(), error: text, after },
        // A gateway sends these both for a handler that crashed on this event and for one that is
        // down.
        502..=504 => Outcome::Ambiguous { code: code(), error: text, after },
        500..=599 => Outcome::ServerError { code: code(), error: text, after },
        408 | 425 => Outcome::Retry { code: code(), error: text, after },
        _ => Outcome::Dead { code: code(), error: text },
    }
}

/// Classifies a request without an answer.
pub(crate) fn classify_failure(error: &reqwest::Error) -> Outcome {
    let text = chain(error);
    if let Some(forbidden) = cause::<Forbidden>(error) {
        return Outcome::unavailable("address_forbidden", forbidden.to_string());
    }
    if error.is_builder() {
        return Outcome::dead("request_invalid", text);
    }
    if error.is_dns() {
        return Outcome::unavailable("dns_failed", text);
    }
    // Checked before `is_connect`, because it can happen after the connection is open: with TLS 1.3
    // the target judges our certificate when our side considers the handshake complete.
    if let Some(tls) = cause::<rustls::Error>(error) {
        return tls_failure(tls, text);
    }
    if error.is_connect() {
        let refused = cause::<io::Error>(error).is_some_and(|io| io.kind() == io::ErrorKind::ConnectionRefused);
        let code = match () {
            () if error.is_timeout() => "connect_timeout",
            () if refused => "connect_refused",
            () => "connect_failed",
        };
        return Outcome::unavailable(code, text);
    }
    Outcome::ambiguous(if error.is_timeout() { "timeout" } else { "connection_lost" }, text)
}

/// Parses `Retry-After`: seconds, or an HTTP date in any of its three forms. Anything else counts
/// as absent.
pub(crate) fn retry_after(value: &str, now: Timestamp) -> Option<Duration> {
    let value = value.trim();
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // Too many digits to be a number of seconds still means "a long time".
        let seconds = value.parse().unwrap_or(u64::MAX);
        return Some(Duration::from_secs(seconds).min(RETRY_AFTER_MAX));
    }
    let forms = ["%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %e %H:%M:%S %Y"];
    let date = forms.iter().find_map(|form| DateTime::strptime(form, value).ok())?;
    // The last days of the year 9999 are beyond the range of a timestamp, and a long wait as well.
    let Ok(at) = jiff::tz::TimeZone::UTC.to_timestamp(date) else { return Some(RETRY_AFTER_MAX) };
    let wait = Duration::try_from(at.duration_since(now)).unwrap_or(Duration::ZERO);
    Some(wait.min(RETRY_AFTER_MAX))
}

/// Returns the first cause of a type in the chain. The source of an I/O error is what lies *behind*
/// the error it wraps, so the wrapped error is checked first.
pub(crate) fn cause<'a, E: std::error::Error + 'static>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a E> {
    let next = |error: &&'a (dyn std::error::Error + 'static)| {
        let wrapped = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        wrapped.map(|inner| inner as &(dyn std::error::Error + 'static)).or_else(|| error.source())
    };
    std::iter::successors(Some(error), next).find_map(|error| error.downcast_ref::<E>())
}

/// Classifies a TLS failure, which says nothing about the event. If the target rejects or requires
/// our certificate, the code says so.
pub(crate) fn tls_failure(error: &rustls::Error, text: String) -> Outcome {
    use rustls::AlertDescription as Alert;
    match error {
        rustls::Error::AlertReceived(Alert::CertificateRequired) => {
            let text = format!("the target requires a client certificate; set client_cert and client_key ({text})");
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
            // The signature made with the certificate's key.
            | Alert::DecryptError,
        ) => Outcome::unavailable("client_cert_refused", format!("the target refuses the client certificate ({text})")),
        _ => Outcome::unavailable("tls_failed", text),
    }
}

/// Joins the causes into one line, without the URL, whose query may hold a token.
pub(crate) fn chain(error: &reqwest::Error) -> String {
    let causes = std::iter::successors(std::error::Error::source(error), |&error| error.source());
    let mut texts: Vec<String> = causes.map(ToString::to_string).collect();
    texts.dedup();
    if texts.is_empty() { "the request could not be made".into() } else { texts.join(": ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(outcome: &Outcome) -> &'static str {
        match outcome {
            Outcome::Delivered { duplicate: false, .. } => "delivered",
            Outcome::Delivered { duplicate: true, .. } => "duplicate",
            Outcome::Retry { .. } => "retry",
            Outcome::ServerError { .. } => "server error",
            Outcome::Ambiguous { .. } => "ambiguous",
            Outcome::Throttled { .. } => "throttled",
            Outcome::Dead { .. } => "dead",
            Outcome::Gone { .. } => "gone",
            Outcome::Unavailable { .. } => "unavailable",
        }
    }

    #[test]
    fn every_status_has_one_meaning() {
        for status in 100..=999_u16 {
            let expected = match status {
                200..=299 => "delivered",
                409 => "duplicate",
                410 => "gone",
                429 => "throttled",
                502..=504 => "ambiguous",
                500..=599 => "server error",
                408 | 425 => "retry",
                _ => "dead",
            };
            let outcome = classify_status(StatusCode::from_u16(status).expect("a status"), None, String::new());
            assert_eq!(kind(&outcome), expected, "{status}");
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
        assert_eq!(wait("Fri, 31 Dec 9999 23:59:59 GMT"), Some(RETRY_AFTER_MAX.as_secs()));
        for nonsense in ["", "-1", "+1", "1.5", "soon", "Sun, 06 Nov", "1e3"] {
            assert_eq!(wait(nonsense), None, "{nonsense:?}");
        }
    }
}
