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

/// The path and the query of a URL, which may hold a token, and the configured headers.
pub(crate) struct Secrets(Vec<Vec<u8>>);

impl Secrets {
    pub(crate) fn new(url: &Url, fixed: &HeaderMap) -> Self {
        let (path, query) = (url.path(), url.query().unwrap_or_default());
        let mut secrets: Vec<Vec<u8>> = Vec::new();
        // As it is sent, and decoded: frameworks name the decoded path. `+` is no escape in it.
        let mut add = |text: &[u8], bytes_min: usize| {
            let decoded = envelope::decode(text).map(String::into_bytes);
            let forms = once(text.to_vec()).chain(decoded);
            secrets.extend(forms.filter(|form| form.len() >= bytes_min));
        };
        // Everything beyond "/".
        add(url[Position::BeforePath..Position::AfterQuery].as_bytes(), 2);
        for (part, bytes_min) in once((path, 2)).chain(path.split('/').map(|segment| (segment, BYTES_MIN))) {
            add(part.as_bytes(), bytes_min);
        }
        for pair in query.split('&') {
            add(pair.split_once('=').map_or(pair, |(_, value)| value).as_bytes(), BYTES_MIN);
        }
        // With a space for `+`, as forms are decoded.
        url.query_pairs().for_each(|(_, value)| add(value.as_bytes(), BYTES_MIN));
        for value in fixed.values().map(|value| value.as_bytes()) {
            add(value, BYTES_MIN);
            // The credentials after their scheme: `Bearer …`.
            add(value.rsplit(|byte| *byte == b' ').next().unwrap_or_default(), BYTES_MIN);
        }
        Self(secrets)
    }

    /// Returns the text with `…` for each secret, also for one of which the end of the text leaves
    /// only the beginning.
    pub(crate) fn conceal(&self, text: &[u8]) -> Vec<u8> {
        let mut shown = Vec::with_capacity(text.len());
        let mut rest = text;
        while let [first, others @ ..] = rest {
            // The longest, so that none is replaced in part.
            match self.0.iter().filter_map(|secret| length_of(secret, rest)).max() {
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

/// Returns how many bytes spell the secret at the beginning of the text: all, if the text ends
/// within it. `None` if the text begins otherwise.
fn length_of(secret: &[u8], text: &[u8]) -> Option<usize> {
    if text.starts_with(secret) {
        return Some(secret.len());
    }
    let mut length = 0;
    for byte in secret {
        match spelled(*byte, &text[length..]) {
            Spelled::Whole(bytes) => length += bytes,
            Spelled::Cut if text.len() >= CUT_BYTES_MIN => return Some(text.len()),
            Spelled::Cut | Spelled::Not => return None,
        }
    }
    Some(length)
}

/// How a text begins with a byte.
enum Spelled {
    /// In so many bytes.
    Whole(usize),
    /// It ends before the byte, or within its escape.
    Cut,
    Not,
}

/// Looks for a byte in any spelling: itself, `%XX` (or `+` for a space), and `%25XX`, as in a URL
/// within a URL. Ignores case, because hexadecimal digits have either. PHP's `json_encode` writes
/// `\/`.
fn spelled(byte: u8, text: &[u8]) -> Spelled {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let (high, low) = (DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 0xF)]);
    let plain = [byte];
    let other: &[u8] = match byte {
        b'/' => b"\\/",
        b' ' => b"+",
        _ => &plain,
    };
    // The longest first: it begins like the next one if the byte is `%`.
    let forms = [&[b'%', b'2', b'5', high, low][..], &[b'%', high, low], other, &plain];
    let begins =
        |longer: &[u8], start: &[u8]| longer.get(..start.len()).is_some_and(|it| it.eq_ignore_ascii_case(start));
    if let Some(form) = forms.iter().find(|form| begins(text, form)) {
        return Spelled::Whole(form.len());
    }
    if forms.iter().any(|form| begins(form, text)) { Spelled::Cut } else { Spelled::Not }
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
            ("Cannot POST /in/canary%2bof+a%2fpath%3d", "Cannot POST …"),
            ("?next=%2Fin%2Fcanary%252Bof%2Ba%252Fpath%253D%3Fformat%3Djson%26key%3D12345678&x", "?next=…&x"),
            // The excerpt ends within an escape.
            ("no /in/canary%2", "no …"),
        ] {
            assert_eq!(shown(said), expected, "{said}");
        }
        let url = Url::parse("https://h/?tok=canary%2Bq%3D1&k=can+ary%2Fz9&u=%C3%A9%25canary").expect("a URL");
        let secrets = Secrets::new(&url, &HeaderMap::new());
        let shown = |text: &str| String::from_utf8(secrets.conceal(text.as_bytes())).expect("still UTF-8");
        for said in [
            "canary%2Bq%3D1",
            "canary%2bq%3d1",
            "canary+q=1",
            "canary%252Bq%253D1",
            "can+ary%2Fz9",
            "can+ary/z9",
            "can ary/z9",
            "can%20ary%2fz9",
            "can%2520ary%252Fz9",
            "can%2Bary%2Fz9",
            "é%canary",
            "%C3%A9%25canary",
            "%c3%a9%25canary",
            "%25C3%25A9%2525canary",
        ] {
            assert_eq!(shown(&format!("<{said}>")), "<…>", "{said}");
        }
        assert_eq!(shown("canary of q"), "canary of q");
        let secrets = Secrets::new(&Url::parse("https://h/in/7-bytes/8-bytes.").expect("a URL"), &HeaderMap::new());
        assert_eq!(secrets.conceal(b"7-bytes, 8-bytes."), "7-bytes, …".as_bytes());
        let plain = Secrets::new(&Url::parse("https://h/").expect("a URL"), &HeaderMap::new());
        assert_eq!(plain.conceal(b"/ is all"), b"/ is all");
    }
}
