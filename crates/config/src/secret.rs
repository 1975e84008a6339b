//! Values that must never be printed: not in logs, not in errors, not in `Debug`.

use std::fmt;

use jiff::Timestamp;
use serde_json::json;
use toml::de::DeValue;

use crate::kind::{Kind, nested, text};
use crate::reader::Place;
use crate::table;

/// A secret from the configuration. Printing it shows only that it exists.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the secret. Call it only where it is used, never where something is printed.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// A secret, `"env:NAME"` or the text itself, that only commands which deliver or receive need. For
/// other commands it is empty if its variable is unset.
pub fn secret() -> Kind<Secret> {
    Kind::new(json!({ "type": "string" }), |place| read(place, place.reader.options.delivers))
}

/// A secret that every command needs.
pub fn secret_always() -> Kind<Secret> {
    Kind::new(json!({ "type": "string" }), |place| read(place, true))
}

fn read(place: &Place<'_>, is_needed: bool) -> Option<Secret> {
    let (text, path) = (place.text()?, &place.name);
    let Some(name) = text.strip_prefix("env:") else { return Some(Secret::new(text)) };
    match (place.reader.options.env)(name).filter(|value| !value.is_empty()) {
        Some(value) if is_needed && has_stray_end(&value) => {
            let variable = if is_variable(name) { name } else { "named after env:" };
            place.fault(format!(
                "{path}: the environment variable {variable} begins or ends with a line break or a tab, perhaps that \
                 of a file; remove it"
            ))
        }
        Some(value) => Some(Secret(value)),
        None if !is_needed || place.reader.options.replaced == Some(path.as_str()) => None,
        None if is_variable(name) => {
            place.fault(format!("{path} needs the environment variable {name}, which is not set; export {name}=…"))
        }
        None => place.fault(format!(
            "{path} needs the environment variable named after env:, which is not set (not shown: it may be the \
             secret itself); write \"env:NAME\", with the secret in NAME"
        )),
    }
}

/// Whether this begins or ends with a line break or a tab, which nobody means. A password may begin
/// or end with a blank.
pub fn has_stray_end(text: &str) -> bool {
    text.trim_matches(['\n', '\r', '\t']) != text
}

/// Whether this looks like the name of a variable, so that it is safe to repeat.
pub(crate) fn is_variable(name: &str) -> bool {
    let usual = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    !name.is_empty() && name.len() <= 64 && name.chars().all(usual) && (name.contains('_') || name.len() <= 12)
}

table! {
    /// A key of a source or of a sink, with the end of its overlap if it is an old one.
    #[derive(PartialEq)]
    pub struct LiveSecret {
        /// The key.
        secret: Secret = signing_key(), required("\"env:NAME\"");
        /// The last second at which it verifies or signs.
        until: Option<Timestamp> = text(time), unset("no end", "\"2026-12-01T00:00:00Z\"");
    }
}

fn time(text: &str) -> Result<Timestamp, String> {
    text.parse().map_err(|_| format!("{text:?} is not a valid time; write it in UTC, e.g. \"2026-12-01T00:00:00Z\""))
}

/// A key must not be blank, because that could be guessed. Commands that do not need it do not look
/// it up, so a fault in it does not keep them from reading the store.
fn signing_key() -> Kind<Secret> {
    let key = secret().check(|secret| match secret.expose().trim() {
        "" => Err("is empty or blank; write \"env:NAME\", with the key in NAME".to_owned()),
        _ => Ok(()),
    });
    let is_elsewhere = |place: &Place<'_>| matches!(place.value, DeValue::String(text) if text.starts_with("env:"));
    Kind::new(key.shape.schema.clone(), move |place| {
        let is_unasked = !place.reader.options.delivers && is_elsewhere(place);
        if is_unasked { None } else { key.read(place) }
    })
}

/// A [`LiveSecret`]: the text alone, or a table with its end.
pub fn signing_secret() -> Kind<LiveSecret> {
    let (key, table) = (signing_key(), nested::<LiveSecret>());
    let schema = json!({ "anyOf": [key.shape.schema, table.shape.schema] });
    Kind::new(schema, move |place| match place.value {
        DeValue::String(_) => Some(LiveSecret { secret: key.read(place).unwrap_or_default(), until: None }),
        DeValue::Table(_) => table.read(place),
        _ => place.wrong_type("text in quotes or a table"),
    })
}

/// The secrets of the keys `secret` and `secrets` together, and whether all are known: for a
/// command that does not need it, an unset secret is empty.
pub fn all_secrets(secret: &Option<LiveSecret>, secrets: &[LiveSecret]) -> (Vec<LiveSecret>, bool) {
    let all: Vec<LiveSecret> = secret.iter().chain(secrets).cloned().collect();
    let known = all.iter().all(|live| !live.secret.expose().is_empty());
    (all, known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReadOptions;

    #[test]
    fn only_a_line_break_or_a_tab_at_an_end_is_a_mistake() {
        let read = |value: &str| {
            let env = |_: &str| Some(value.to_owned());
            let options = ReadOptions { env: &env, delivers: true, ..ReadOptions::none() };
            crate::read::<LiveSecret>("secret = \"env:KEY\"", options).map(|(live, _)| live.secret.expose().to_owned())
        };
        for wrong in ["hunter2\n", "hunter2\r\n", "\thunter2"] {
            assert!(read(wrong).is_err(), "{wrong:?}");
        }
        for right in [" hunter2", "hunter2 ", "hun\tter2"] {
            assert_eq!(read(right).ok().as_deref(), Some(right));
        }
    }

    #[test]
    fn debug_shows_nothing_of_it() {
        assert_eq!(format!("{:?}", Secret::new("whsec_abc")), "Secret(…)");
    }
}
