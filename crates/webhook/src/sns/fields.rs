//! The fields of a body that can be signed, each once and each a string.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::error::{Part, Refusal};

macro_rules! fields {
    ($($field:ident $name:literal $part:ident,)*) => {
        /// A field that is read.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Field {
            $($field,)*
        }

        impl Field {
            const ALL: [Self; 11] = [$(Self::$field),*];

            pub(super) fn name(self) -> &'static str {
                match self {
                    $(Self::$field => $name,)*
                }
            }

            /// The part that a refusal names.
            pub(super) fn part(self) -> Part {
                match self {
                    $(Self::$field => Part::$part,)*
                }
            }
        }
    };
}

fields! {
    Message "Message" Field,
    MessageId "MessageId" Id,
    Signature "Signature" Signature,
    SignatureVersion "SignatureVersion" Signature,
    SigningCertUrl "SigningCertURL" Field,
    Subject "Subject" Field,
    SubscribeUrl "SubscribeURL" Field,
    Timestamp "Timestamp" Timestamp,
    Token "Token" Field,
    TopicArn "TopicArn" Field,
    Type "Type" Field,
}

/// What was found for one field.
#[derive(Debug, Clone, Default)]
enum Found {
    #[default]
    Nothing,
    Null,
    Text(String),
    Other,
    Twice,
}

impl<'de> Deserialize<'de> for Found {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        json.deserialize_any(FoundVisitor)
    }
}

/// Keeps a text, and nothing of any other value: whoever sends it need not have signed it.
struct FoundVisitor;

impl<'de> Visitor<'de> for FoundVisitor {
    type Value = Found;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_str<E>(self, text: &str) -> Result<Found, E> {
        Ok(Found::Text(text.to_owned()))
    }

    fn visit_unit<E>(self) -> Result<Found, E> {
        Ok(Found::Null)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Found, E> {
        Ok(Found::Other)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Found, E> {
        Ok(Found::Other)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Found, E> {
        Ok(Found::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Found, E> {
        Ok(Found::Other)
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut seq: S) -> Result<Found, S::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Found::Other)
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Found, M::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Found::Other)
    }
}

/// The fields of a body.
#[derive(Debug)]
pub(super) struct Fields([Found; Field::ALL.len()]);

impl Fields {
    pub(super) fn parse(body: &[u8]) -> Result<Self, Refusal> {
        // The whole body must be UTF-8; otherwise invalid bytes would pass in fields that are
        // skipped.
        let text = std::str::from_utf8(body).map_err(|_| Refusal::Malformed(Part::Body))?;
        let mut json = serde_json::Deserializer::from_str(text);
        let read = json.deserialize_map(Object).and_then(|fields| json.end().map(|()| fields));
        read.map_err(|_| Refusal::Malformed(Part::Body))
    }

    /// Takes the field's text.
    pub(super) fn take(&mut self, field: Field) -> Result<String, Refusal> {
        match std::mem::take(&mut self.0[field as usize]) {
            Found::Text(text) => Ok(text),
            Found::Nothing => Err(Refusal::Missing(field.part())),
            Found::Twice => Err(Refusal::Duplicate(field.part())),
            Found::Null | Found::Other => Err(Refusal::Malformed(field.part())),
        }
    }

    /// Takes the text of an optional field; `null` counts as missing.
    pub(super) fn take_optional(&mut self, field: Field) -> Result<Option<String>, Refusal> {
        match &self.0[field as usize] {
            Found::Nothing | Found::Null => Ok(None),
            _ => self.take(field).map(Some),
        }
    }
}

/// Reads an object's known fields and skips the others.
struct Object;

impl<'de> Visitor<'de> for Object {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Fields, M::Error> {
        let mut found: [Found; Field::ALL.len()] = Default::default();
        while let Some(name) = map.next_key::<Cow<'de, str>>()? {
            let Some(field) = Field::ALL.into_iter().find(|field| field.name() == name) else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            let value = map.next_value()?;
            let place = &mut found[field as usize];
            *place = if matches!(place, Found::Nothing) { value } else { Found::Twice };
        }
        Ok(Fields(found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(body: &str) -> Result<String, &'static str> {
        Fields::parse(body.as_bytes()).and_then(|mut fields| fields.take(Field::MessageId)).map_err(Refusal::code)
    }

    #[test]
    fn a_known_field_is_there_once_and_a_string() {
        for (body, expected) in [
            (r#"{"MessageId":"a"}"#, Ok("a")),
            (r#" {"x":[{"MessageId":1}],"MessageId":"a"} "#, Ok("a")),
            (r#"{"Message\u0049d":"\u0061"}"#, Ok("a")),
            (r#"{"messageid":"b","MessageId":"a","MessageID":"c","x":1,"x":2}"#, Ok("a")),
            (r#"{}"#, Err("id_missing")),
            (r#"{"MessageId":"a","MessageId":"a"}"#, Err("id_duplicate")),
            (r#"{"MessageId":"a","Message\u0049d":"b"}"#, Err("id_duplicate")),
            (r#"{"MessageId":null,"MessageId":"a"}"#, Err("id_duplicate")),
            (r#"{"MessageId":1}"#, Err("id_malformed")),
            (r#"{"MessageId":null}"#, Err("id_malformed")),
            (r#"{"MessageId":["a"]}"#, Err("id_malformed")),
            (r#"{"MessageId":{"a":[{}]}}"#, Err("id_malformed")),
            (r#"{"MessageId":true}"#, Err("id_malformed")),
            (r#"{"MessageId":[}"#, Err("body_malformed")),
            ("", Err("body_malformed")),
            ("null", Err("body_malformed")),
            (r#"["MessageId","a"]"#, Err("body_malformed")),
            (r#"{"MessageId":"a"}{}"#, Err("body_malformed")),
            (r#"{"MessageId":"a",}"#, Err("body_malformed")),
            (r#"{"MessageId":"\ud800"}"#, Err("body_malformed")),
            ("\u{feff}{\"MessageId\":\"a\"}", Err("body_malformed")),
        ] {
            assert_eq!(id(body).as_deref().map_err(|code| *code), expected, "{body}");
        }
        // The second and third were found by the differential test, seed 9: bytes that are not
        // UTF-8 are not JSON, whether the field is read or not.
        for body in [&b"{\"MessageId\":\"\xff\"}"[..], b"{\"MessageId\":\"a\",\"x\":\"\xff\"}", b"{\"x\":{\"\xcf\":1}}"]
        {
            assert_eq!(Fields::parse(body).unwrap_err().code(), "body_malformed");
        }
        let deep = format!("{{\"x\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(Fields::parse(deep.as_bytes()).is_err() || id(&deep) == Err("id_missing"), "no stack overflows");
    }
}
