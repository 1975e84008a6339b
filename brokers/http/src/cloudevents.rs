//! CloudEvents 1.0, HTTP binary mode: attribute names and how their values are spelt in headers.
//!
//! A header value holds visible ASCII; the binding percent-encodes the rest, the space, `"` and `%`
//! (HTTP protocol binding §3.1.3.2).

/// What every header of ours begins with.
pub const PREFIX: &str = "ce-";

/// Headers of one request and not of the message in it: framing and routing of HTTP, credentials,
/// what the body decides. No event sets them on its way out, and none keeps them from its way in.
pub const OF_ONE_REQUEST: [&str; 19] = [
    "accept-encoding",
    "authorization",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "cookie",
    "date",
    "expect",
    "forwarded",
    "host",
    "keep-alive",
    "set-cookie",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "via",
];

/// The spelling of an attribute's value in a header.
pub fn encode(value: &str) -> String {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let mut encoded = String::with_capacity(value.len());
    for byte in value.bytes() {
        if byte.is_ascii_graphic() && byte != b'"' && byte != b'%' {
            encoded.push(char::from(byte));
        } else {
            encoded.push('%');
            encoded.push(char::from(DIGITS[usize::from(byte >> 4)]));
            encoded.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
    }
    encoded
}

/// The value behind a header, or `None` if it is not text. A broken escape stands for itself; a
/// quoted value is unquoted first.
pub fn decode(header: &[u8]) -> Option<String> {
    let unquoted = match header {
        [b'"', inner @ .., b'"'] => unescape(inner),
        plain => plain.to_vec(),
    };
    let hex = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut decoded = Vec::with_capacity(unquoted.len());
    let mut rest = unquoted.as_slice();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        match (byte, tail) {
            (b'%', [high, low, after @ ..]) if hex(*high).is_some() && hex(*low).is_some() => {
                decoded.extend(hex(*high).zip(hex(*low)).map(|(high, low)| high << 4 | low));
                rest = after;
            }
            _ => decoded.push(byte),
        }
    }
    String::from_utf8(decoded).ok()
}

fn unescape(quoted: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(quoted.len());
    let mut bytes = quoted.iter();
    while let Some(&byte) = bytes.next() {
        plain.push(if byte == b'\\' { bytes.next().copied().unwrap_or(byte) } else { byte });
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_binding_s_examples() {
        assert_eq!(encode("Euro € 😀"), "Euro%20%E2%82%AC%20%F0%9F%98%80");
        assert_eq!(encode("a\"b%c\r\n"), "a%22b%25c%0D%0A");
        assert_eq!(decode(b"\"a \\\"b\\\" %E2%82%AC\"").as_deref(), Some("a \"b\" €"));
        assert_eq!(decode(b"50%zz%4").as_deref(), Some("50%zz%4"));
        assert_eq!(decode(b"%FF"), None);
    }

    #[test]
    fn any_text_comes_back() {
        for text in ["", "order.paid", "a%20b", "\"q\"", "\u{0}\u{7f}\u{202e}", "Zoë 📦", "\\", "%", "%%41"] {
            assert_eq!(decode(encode(text).as_bytes()).as_deref(), Some(text));
        }
    }
}
