//! Values as text, the only type that all drivers treat alike.

use std::borrow::Cow;

use jiff::Timestamp;
use uuid::Uuid;

/// A value as text that can be cast to its type.
pub trait AsText {
    /// `None` stands for null.
    fn text(&self) -> Option<String>;
}

impl AsText for str {
    fn text(&self) -> Option<String> {
        Some(self.to_owned())
    }
}

impl AsText for String {
    fn text(&self) -> Option<String> {
        Some(self.clone())
    }
}

impl AsText for Cow<'_, str> {
    fn text(&self) -> Option<String> {
        Some(self.clone().into_owned())
    }
}

macro_rules! displayed {
    ($($rust:ty),*) => {
        $(impl AsText for $rust {
            fn text(&self) -> Option<String> {
                Some(self.to_string())
            }
        })*
    };
}

displayed!(bool, i16, i32, i64, Timestamp, Uuid);

impl AsText for [u8] {
    fn text(&self) -> Option<String> {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digits = self.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(|digit| DIGITS[usize::from(digit)]);
        Some("\\x".chars().chain(digits.map(char::from)).collect())
    }
}

impl<T: AsText + ?Sized> AsText for &T {
    fn text(&self) -> Option<String> {
        (*self).text()
    }
}

impl<T: AsText> AsText for Option<T> {
    fn text(&self) -> Option<String> {
        self.as_ref().and_then(T::text)
    }
}

/// An array, in Postgres's notation; in JSON if it has a null, because with `array_nulls = off` the
/// notation has only the text NULL. [`elements`] reads both.
impl<T: AsText> AsText for Vec<T> {
    fn text(&self) -> Option<String> {
        let mut array = String::from("{");
        for (n, value) in self.iter().enumerate() {
            let Some(text) = value.text() else {
                let texts: Vec<_> = self.iter().map(AsText::text).collect();
                return Some(serde_json::to_string(&texts).expect("a list of strings is always JSON"));
            };
            array.push_str(if n == 0 { "\"" } else { ",\"" });
            for c in text.chars() {
                if matches!(c, '"' | '\\') {
                    array.push('\\');
                }
                array.push(c);
            }
            array.push('"');
        }
        array.push('}');
        Some(array)
    }
}

/// Returns what to cast to the type of this array, whose text the parameter has.
pub(crate) fn elements(parameter: &str, array: &str) -> String {
    match array.starts_with('[') {
        true => format!("(ARRAY(SELECT pg_catalog.json_array_elements_text({parameter}::pg_catalog.json)))"),
        false => parameter.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_is_written_as_postgres_reads_it() {
        let mut texts = vec![Some(""), Some("a,b"), Some(r#"{"a":"\n"}"#), Some("NULL")];
        let array = texts.text().expect("a text");
        assert_eq!(array, r#"{"","a,b","{\"a\":\"\\n\"}","NULL"}"#);
        assert_eq!(elements("$1", &array), "$1");
        texts.push(None);
        let array = texts.text().expect("a text");
        assert_eq!(array, r#"["","a,b","{\"a\":\"\\n\"}","NULL",null]"#);
        assert_eq!(elements("$1", &array), "(ARRAY(SELECT pg_catalog.json_array_elements_text($1::pg_catalog.json)))");
        assert_eq!(vec![&b"\0\xff"[..]].text().expect("a text"), r#"{"\\x00ff"}"#);
    }
}
