//! A value that must never be seen: not in logs, not in errors, not in `Debug`.

use std::fmt;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_shows_nothing_of_it() {
        assert_eq!(format!("{:?}", Secret::new("whsec_abc")), "Secret(…)");
    }
}
