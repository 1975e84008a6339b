//! Values that must never be seen: not in logs, not in errors, not in `Debug`.

use std::fmt;

use jiff::Timestamp;

use crate::key::{Shape, required, unset};
use crate::kind::{Kind, Text};
use crate::reader::Place;
use crate::value::Value;
use crate::{Fields as _, Table, table};

/// A secret from the configuration. Printing it shows only that it is there.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The secret itself. Call it only where it is used, never where something is printed.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// A secret: `"env:NAME"`, or the text itself.
#[derive(Debug)]
pub enum SecretText {
    /// Every command needs it.
    Always,
    /// Only commands that deliver or receive need it. For others an unset variable is an empty
    /// secret.
    Serving,
    /// As [`Self::Serving`], and what is written must not be blank: whoever guesses that has
    /// guessed it.
    Key,
}

impl Kind for SecretText {
    type Value = Secret;

    fn shape(&self) -> Shape {
        Shape::Text("secret")
    }

    fn read(&self, place: &Place<'_>) -> Option<Secret> {
        let (text, path, reader) = (place.text()?, &place.name, place.reader);
        let secret = match text.strip_prefix("env:") {
            None => text.to_owned(),
            Some(name) => match reader.env(name).filter(|value| !value.is_empty()) {
                Some(value) => value,
                None if !reader.secrets_needed() && !matches!(self, Self::Always) => return Some(Secret::default()),
                None if is_variable(name) => {
                    return place.fault(format!(
                        "{path} needs the environment variable {name}, which is not set; export {name}=…"
                    ));
                }
                None => {
                    return place.fault(format!(
                        "{path} needs the environment variable that it names after env:, which is not set (and not \
                         repeated here: is it the secret itself?); write \"env:NAME\", with the secret in NAME"
                    ));
                }
            },
        };
        if matches!(self, Self::Key) && secret.trim().is_empty() {
            return place.fault(format!("{path} is empty or blank; write \"env:NAME\", with the key in NAME"));
        }
        Some(Secret(secret))
    }
}

/// Whether this looks like the name of a variable, so that it can be repeated.
fn is_variable(name: &str) -> bool {
    let usual = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    !name.is_empty() && name.len() <= 64 && name.chars().all(usual) && (name.contains('_') || name.len() <= 12)
}

table! {
    /// A key of a source or of a sink, with the end of its overlap if it is an old one.
    pub struct LiveSecret {
        /// The key.
        secret: Secret = SecretText::Key, required("\"env:NAME\"");
        /// The last second at which it verifies or signs.
        until: Option<Timestamp> = TIME, unset("for ever", "\"2026-12-01T00:00:00Z\"");
    }
}

impl Table for LiveSecret {}

const TIME: Text<Timestamp> = Text {
    what: "time",
    parse: |text| {
        text.parse().map_err(|_| format!("{text:?} is no time; write it in UTC, e.g. \"2026-12-01T00:00:00Z\""))
    },
};

/// A [`LiveSecret`]: the text alone, or a table with its end.
#[derive(Debug)]
pub struct SigningSecret;

impl Kind for SigningSecret {
    type Value = LiveSecret;

    fn shape(&self) -> Shape {
        Shape::Either(vec![SecretText::Key.shape(), Shape::Table(LiveSecret::keys())])
    }

    fn read(&self, place: &Place<'_>) -> Option<LiveSecret> {
        match place.node.value {
            Value::Text(_) => Some(LiveSecret { secret: SecretText::Key.read(place)?, until: None }),
            Value::Table(_) => {
                let section = place.section()?;
                let live = LiveSecret::read(&section);
                section.finish();
                Some(live)
            }
            _ => place.wrong_type("text in quotes or a table"),
        }
    }
}

/// The secrets of the keys `secret` and `secrets` together, and whether all of them are known: what
/// is unset for a command that does not need it is empty.
pub fn all_secrets(secret: &Option<LiveSecret>, secrets: &[LiveSecret]) -> (Vec<LiveSecret>, bool) {
    let all: Vec<LiveSecret> = secret.iter().chain(secrets).cloned().collect();
    let known = all.iter().all(|live| !live.secret.expose().is_empty());
    (all, known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_shows_nothing_of_it() {
        assert_eq!(format!("{:?}", Secret::new("whsec_abc")), "Secret(…)");
    }
}
