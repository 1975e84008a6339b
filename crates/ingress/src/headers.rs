//! Which request headers an event keeps.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};

use http::{HeaderMap, HeaderName};
use postbox_core::limits::{HEADER_BYTES_MAX, HEADERS_MAX};
use postbox_core::{NewEvent, SourceName, header};
use tracing::warn;

use postbox_http::is_of_one_request;

/// Headers that are dropped in addition to those [of one request](is_of_one_request) and those that
/// a source names for its signature: what the client accepts as an answer, signatures, and those
/// stored as a field of the event.
const DROPPED: [&str; 15] = [
    "accept",
    "accept-charset",
    "accept-language",
    "cache-control",
    "ce-aggregate",
    "ce-kind",
    "ce-specversion",
    "ce-subject",
    "ce-time",
    "ce-type",
    "ce-version",
    "svix-signature",
    "svix-timestamp",
    "webhook-signature",
    "webhook-timestamp",
];

/// The prefix of headers that only Postbox itself sets, for example in dead letters.
const DROPPED_PREFIX: &str = "postbox-";

fn is_kept(name: &HeaderName) -> bool {
    let name = name.as_str();
    !is_of_one_request(name) && !DROPPED.contains(&name) && !name.starts_with(DROPPED_PREFIX)
}

/// Copies the request's headers by name, as long as the event has room for them: noise from a proxy
/// must not make a genuine message impossible to store. Headers that only repeat event fields come
/// last, so that they never displace others. `of_signature` is not stored. Returns the number of
/// headers left out.
pub(crate) fn keep_headers(event: &mut NewEvent, headers: &HeaderMap, of_signature: &[&str]) -> u64 {
    let (mut places, mut room) = (HEADERS_MAX, HEADER_BYTES_MAX);
    let mut names: Vec<&HeaderName> = headers.keys().filter(|name| is_kept(name)).collect();
    names.retain(|name| !of_signature.iter().any(|its| name.as_str().eq_ignore_ascii_case(its)));
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

/// Returns the header's values as one text; `None` if they are not text.
fn text_of<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<Cow<'h, str>> {
    let values = headers.get_all(name).iter().map(|value| std::str::from_utf8(value.as_bytes()).ok());
    let values = values.collect::<Option<Vec<&str>>>()?;
    let text = match values.as_slice() {
        [value] => Cow::Borrowed(*value),
        several => Cow::Owned(several.join(", ")),
    };
    Some(text).filter(|text| header::is_value(text))
}

/// Counts headers that did not fit into an event, and the messages concerned.
#[derive(Debug, Default)]
pub(crate) struct Dropped {
    messages: AtomicU64,
    headers: AtomicU64,
}

impl Dropped {
    /// Counts, and logs the first, second, fourth … message: a proxy that adds too many headers
    /// does so to every message.
    pub(crate) fn note(&self, source: &SourceName, headers: u64) {
        if headers == 0 {
            return;
        }
        self.headers.fetch_add(headers, Ordering::Relaxed);
        let messages = self.messages.fetch_add(1, Ordering::Relaxed) + 1;
        if messages.is_power_of_two() {
            warn!(
                %source, code = "headers_dropped", headers, messages,
                "headers dropped: an event has at most {HEADERS_MAX} headers of text, {HEADER_BYTES_MAX} bytes together; the message is stored without the others"
            );
        }
    }

    pub(crate) fn headers(&self) -> u64 {
        self.headers.load(Ordering::Relaxed)
    }
}
