//! Extracts one value from a JSON body without parsing the rest.
//!
//! Only values along the pointer are visited. Numbers that fit no float, deep nesting and huge
//! objects elsewhere do not matter, and only the result is kept in memory.

use std::borrow::Cow;
use std::fmt;

use serde_json::value::RawValue;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Returns the text at `pointer` (RFC 6901): the content of a string, or a number or boolean as
/// written. `None` for anything else.
pub(crate) fn text_at(body: &[u8], pointer: &str) -> Option<String> {
    let mut value: &RawValue = serde_json::from_slice(body).ok()?;
    if !pointer.is_empty() {
        for token in pointer.strip_prefix('/')?.split('/') {
            let token = token.replace("~1", "/").replace("~0", "~");
            let mut json = serde_json::Deserializer::from_str(value.get());
            value = Step(&token).deserialize(&mut json).ok()??;
        }
    }
    match value.get().as_bytes().first()? {
        b'"' => serde_json::from_str(value.get()).ok(),
        b'{' | b'[' | b'n' => None,
        _ => Some(value.get().to_owned()),
    }
}

/// Steps from a value to the member or element of this name, keeping nothing else.
struct Step<'t>(&'t str);

impl<'de> DeserializeSeed<'de> for Step<'_> {
    type Value = Option<&'de RawValue>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Step<'_> {
    type Value = Option<&'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or an array")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        // Of several members with the same name the last one counts, as in other parsers.
        let mut found = None;
        while let Some(name) = map.next_key::<Cow<'de, str>>()? {
            match name == self.0 {
                true => found = Some(map.next_value()?),
                false => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(found)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Self::Value, A::Error> {
        let plain = self.0 == "0" || !self.0.starts_with('0');
        let wanted = self.0.parse::<usize>().ok().filter(|_| plain && !self.0.starts_with('+'));
        let mut found = None;
        let mut at = 0;
        loop {
            if wanted == Some(at) {
                found = elements.next_element()?;
            } else if elements.next_element::<IgnoredAny>()?.is_none() {
                return Ok(found);
            }
            at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_lead_to_scalars() {
        let body = br#"{"id":"evt_1","n":1e400,"big":12345678901234567890123456,"t":true,"z":null,
            "a":[{"b":"x"},"y"],"":"empty","a/b":{"m~n":"esc"},"dup":1,"dup":"last","u":"Zo\u00eb"}"#;
        for (pointer, expected) in [
            ("/id", Some("evt_1")),
            ("/n", Some("1e400")),
            ("/big", Some("12345678901234567890123456")),
            ("/t", Some("true")),
            ("/z", None),
            ("/a", None),
            ("/a/0/b", Some("x")),
            ("/a/1", Some("y")),
            ("/a/2", None),
            ("/a/01", None),
            ("/a/-", None),
            ("/a/+1", None),
            ("/", Some("empty")),
            ("/a~1b/m~0n", Some("esc")),
            ("/dup", Some("last")),
            ("/u", Some("Zoë")),
            ("/missing", None),
            ("/id/deeper", None),
            ("", None),
            ("id", None),
        ] {
            assert_eq!(text_at(body, pointer).as_deref(), expected, "{pointer}");
        }
        assert_eq!(text_at(b"\"whole\"", "").as_deref(), Some("whole"));
    }

    #[test]
    fn what_lies_beside_the_way_does_not_matter() {
        let deep = format!("{{\"d\":{}{},\"id\":\"x\"}}", "[".repeat(10_000), "]".repeat(10_000));
        assert_eq!(text_at(deep.as_bytes(), "/id").as_deref(), Some("x"));
        for broken in
            [&b""[..], b"{", b"{\"id\":\"x\"", b"{\"id\":\"x\"} x", b"\xff", b"{\"id\":\"\\ud800\"}", b"\xef\xbb\xbf{}"]
        {
            assert_eq!(text_at(broken, "/id"), None);
        }
    }
}
