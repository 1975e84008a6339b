//! What a target's answer may repeat of the request, and nobody else may see: the answer is kept in
//! the log, the database and dead letters.

use std::iter::once;

use http::HeaderMap;
use postbox_core::envelope;
use url::{Position, Url};

/// A shorter segment of the path, value of the query or of a header is an ordinary word (`json`,
/// `true`, `prod`) rather than a secret, and part of other words.
const BYTES_MIN: usize = 8;
/// Fewer bytes at the end of the text are not taken for the beginning of a secret.
const CUT_BYTES_MIN: usize = 4;

/// The path and the query of a URL, which may hold a token, and the configured headers. The longest
/// first, so that none is replaced in part.
pub(crate) struct Secrets(Vec<Vec<u8>>);

impl Secrets {
    pub(crate) fn new(url: &Url, fixed: &HeaderMap) -> Self {
        let (path, query) = (url.path(), url.query().unwrap_or_default());
        let mut secrets: Vec<Vec<u8>> = Vec::new();
        let mut add = |text: &[u8], bytes_min: usize| {
            if text.len() >= bytes_min {
                secrets.push(text.to_vec());
                // As PHP's `json_encode` writes it.
                if text.contains(&b'/') {
                    secrets.push(text.split(|byte| *byte == b'/').collect::<Vec<_>>().join(&b"\\/"[..]));
                }
            }
        };
        // Everything beyond "/".
        add(url[Position::BeforePath..Position::AfterQuery].as_bytes(), 2);
        // As they are sent, and decoded: frameworks name the decoded path. `+` is no escape in it.
        for (part, bytes_min) in once((path, 2)).chain(path.split('/').map(|segment| (segment, BYTES_MIN))) {
            add(part.as_bytes(), bytes_min);
            if let Some(decoded) = envelope::decode(part.as_bytes()) {
                add(decoded.as_bytes(), bytes_min);
            }
        }
        for pair in query.split('&') {
            add(pair.split_once('=').map_or(pair, |(_, value)| value).as_bytes(), BYTES_MIN);
        }
        url.query_pairs().for_each(|(_, value)| add(value.as_bytes(), BYTES_MIN));
        for value in fixed.values().map(|value| value.as_bytes()) {
            add(value, BYTES_MIN);
            // The credentials after their scheme: `Bearer …`.
            add(value.rsplit(|byte| *byte == b' ').next().unwrap_or_default(), BYTES_MIN);
        }
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        Self(secrets)
    }

    /// Returns the text with `…` for each secret, also for one of which the end of the text leaves
    /// only the beginning.
    pub(crate) fn conceal(&self, text: &[u8]) -> Vec<u8> {
        let mut shown = Vec::with_capacity(text.len());
        let mut rest = text;
        while let [first, others @ ..] = rest {
            let is_cut = rest.len() >= CUT_BYTES_MIN && self.0.iter().any(|secret| secret.starts_with(rest));
            let whole = || self.0.iter().find(|secret| rest.starts_with(secret)).map(Vec::len);
            match is_cut.then_some(rest.len()).or_else(whole) {
                Some(bytes) => {
                    shown.extend_from_slice("…".as_bytes());
                    rest = &rest[bytes..];
                }
                None => {
                    shown.push(*first);
                    rest = others;
                }
            }
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn what_an_answer_repeats_of_the_request_is_concealed() {
        let url = Url::parse("https://h/in/canary-of-a-path?key=canary%20query&canary-bare").expect("a URL");
        let fixed = HeaderMap::from_iter([
            (http::header::AUTHORIZATION, HeaderValue::from_static("Bearer canary-header")),
            (http::HeaderName::from_static("x-flag"), HeaderValue::from_static("1")),
        ]);
        let secrets = Secrets::new(&url, &fixed);
        let shown = |text: &str| String::from_utf8(secrets.conceal(text.as_bytes())).expect("still UTF-8");
        for (said, expected) in [
            ("Cannot POST /in/canary-of-a-path", "Cannot POST …"),
            ("no /in/canary-of-a-path?key=canary%20query&canary-bare here", "no … here"),
            ("no route in/canary-of-a-path", "no route in/…"),
            (r#"{"path":"\/in\/canary-of-a-path"}"#, r#"{"path":"…"}"#),
            (
                r#"{"url":"https:\/\/h\/in\/canary-of-a-path?key=canary%20query&canary-bare"}"#,
                r#"{"url":"https:\/\/h…"}"#,
            ),
            (r#"{"key":"canary query","raw":"canary%20query"}"#, r#"{"key":"…","raw":"…"}"#),
            ("unknown flag canary-bare", "unknown flag …"),
            ("authorization: Bearer canary-header; token canary-header", "authorization: …; token …"),
            // The excerpt ends within a secret.
            ("no /in/canary-of-a-path?key=can", "no …"),
            ("token canary-he", "token …"),
            ("1 order has no /path", "1 order has no /path"),
        ] {
            assert_eq!(shown(said), expected, "{said}");
        }
        let url = Url::parse("https://h/in/canary%2Bof+a%2Fpath%3D?format=json&key=12345678").expect("a URL");
        let fixed = HeaderMap::from_iter([
            (http::header::AUTHORIZATION, HeaderValue::from_static("Bearer 1234567")),
            (http::HeaderName::from_static("x-stage"), HeaderValue::from_static("prod")),
        ]);
        let secrets = Secrets::new(&url, &fixed);
        let shown = |text: &str| String::from_utf8(secrets.conceal(text.as_bytes())).expect("still UTF-8");
        for (said, expected) in [
            ("Cannot POST /in/canary%2Bof+a%2Fpath%3D", "Cannot POST …"),
            ("Cannot POST /in/canary+of+a/path=", "Cannot POST …"),
            ("no route canary+of+a/path= here", "no route … here"),
            ("key 12345678; token 1234567 is short", "key …; token 1234567 is short"),
            ("the product is not valid jsonb", "the product is not valid jsonb"),
        ] {
            assert_eq!(shown(said), expected, "{said}");
        }
        let secrets = Secrets::new(&Url::parse("https://h/in/7-bytes/8-bytes.").expect("a URL"), &HeaderMap::new());
        assert_eq!(secrets.conceal(b"7-bytes, 8-bytes."), "7-bytes, …".as_bytes());
        let plain = Secrets::new(&Url::parse("https://h/").expect("a URL"), &HeaderMap::new());
        assert_eq!(plain.conceal(b"/ is all"), b"/ is all");
    }
}
