//! Which headers of a request an event keeps.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};

use http::{HeaderMap, HeaderName};
use postbox_core::limits::{HEADER_BYTES_MAX, HEADERS_MAX};
use postbox_core::{NewEvent, SourceName};
use tracing::warn;

use postbox_http::OF_ONE_REQUEST;

/// Headers that are not kept beside those [of one request](OF_ONE_REQUEST): more credentials,
/// signatures, what proxies add, and what has become a field of the event.
const DROPPED: [&str; 42] = [
    "accept",
    "accept-charset",
    "accept-language",
    "api-key",
    "apikey",
    "cache-control",
    "ce-aggregate",
    "ce-kind",
    "ce-specversion",
    "ce-subject",
    "ce-time",
    "ce-type",
    "ce-version",
    "pragma",
    "stripe-signature",
    "svix-signature",
    "svix-timestamp",
    "webhook-signature",
    "webhook-timestamp",
    "x-access-token",
    "x-amz-security-token",
    "x-api-key",
    "x-auth-key",
    "x-auth-token",
    "x-authorization",
    "x-client-cert",
    "x-csrf-token",
    "x-gitlab-token",
    "x-goog-iap-jwt-assertion",
    "x-id-token",
    "x-ms-client-principal",
    "x-real-ip",
    "x-refresh-token",
    "x-secret",
    "x-session-token",
    "x-shopify-hmac-sha256",
    "x-slack-request-timestamp",
    "x-slack-signature",
    "x-ssl-client-cert",
    "x-twilio-signature",
    "x-vault-token",
    "x-xsrf-token",
];

/// Beginnings of names that are not kept.
const DROPPED_PREFIXES: [&str; 7] =
    ["cf-access-", "postbox-", "proxy-", "x-amzn-oidc-", "x-forwarded-", "x-hub-signature", "x-ms-token-"];

fn is_kept(name: &HeaderName) -> bool {
    let name = name.as_str();
    !OF_ONE_REQUEST.contains(&name)
        && !DROPPED.contains(&name)
        && !DROPPED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Keeps the request's headers by name, as long as an event has room for them: a proxy's noise must
/// not make a genuine message impossible to store. Last come those that only repeat what is known,
/// so that an event's own are not lost for them. Says how many had to be left out.
pub(crate) fn keep_headers(event: &mut NewEvent, headers: &HeaderMap) -> u64 {
    let (mut places, mut room) = (HEADERS_MAX, HEADER_BYTES_MAX);
    let mut names: Vec<&HeaderName> = headers.keys().filter(|name| is_kept(name)).collect();
    let repeats = |name: &str| name.starts_with("ce-") || name.starts_with("webhook-");
    names.sort_by_key(|name| (repeats(name.as_str()), name.as_str()));
    let mut dropped = 0;
    for name in names {
        let text = text_of(headers, name).filter(|text| name.as_str().len() + text.len() <= room && places > 0);
        let Some(text) = text else {
            dropped += 1;
            continue;
        };
        places -= 1;
        room -= name.as_str().len() + text.len();
        event.headers.insert(name.as_str().into(), text.into_owned());
    }
    dropped
}

/// A header's values as one text, if that is what they are.
fn text_of<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<Cow<'h, str>> {
    let values = headers.get_all(name).iter().map(|value| std::str::from_utf8(value.as_bytes()).ok());
    let values = values.collect::<Option<Vec<&str>>>()?;
    let text = match values.as_slice() {
        [value] => Cow::Borrowed(*value),
        several => Cow::Owned(several.join(", ")),
    };
    Some(text).filter(|text| !text.chars().any(|c| c.is_control() && c != '\t'))
}

/// What a source's messages lost because an event had no room for it.
#[derive(Debug, Default)]
pub(crate) struct Dropped {
    messages: AtomicU64,
    headers: AtomicU64,
}

impl Dropped {
    /// Counts, and tells of the first, second, fourth … message: a proxy that adds too much adds it
    /// to all.
    pub(crate) fn note(&self, source: &SourceName, headers: u64) {
        if headers == 0 {
            return;
        }
        self.headers.fetch_add(headers, Ordering::Relaxed);
        let messages = self.messages.fetch_add(1, Ordering::Relaxed) + 1;
        if messages.is_power_of_two() {
            warn!(
                %source, code = "headers_dropped", headers, messages,
                "a message has headers that are not kept: an event has {HEADERS_MAX} at most, {HEADER_BYTES_MAX} bytes together, and of text; the rest is stored"
            );
        }
    }

    pub(crate) fn headers(&self) -> u64 {
        self.headers.load(Ordering::Relaxed)
    }
}
