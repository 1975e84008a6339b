//! Key material: wiped from memory when dropped, never printed, and long enough to be secret.

use std::fmt;

use zeroize::Zeroizing;

use crate::error::SecretError;

/// Most live keys of a verifier: a rotation needs two, a botched one three.
pub(crate) const KEYS_MAX: usize = 8;

/// Fewest bytes of a secret that is used as text: 128 bits if every byte is random, far less if
/// not.
pub(crate) const TEXT_BYTES_MIN: usize = 16;

/// Most bytes of a secret that is used as text. Anything longer is probably a file pasted by
/// mistake.
pub(crate) const TEXT_BYTES_MAX: usize = 512;

/// Raw key bytes.
#[derive(Clone)]
pub(crate) struct SecretBytes(Zeroizing<Vec<u8>>);

impl SecretBytes {
    pub(crate) fn new(scheme: &'static str, bytes: &[u8], min: usize, max: usize) -> Result<Self, SecretError> {
        if (min..=max).contains(&bytes.len()) {
            return Ok(Self(Zeroizing::new(bytes.to_vec())));
        }
        Err(SecretError::Length { scheme, given: bytes.len(), min, max })
    }

    pub(crate) fn expose(&self) -> &[u8] {
        &self.0
    }

    /// For published test vectors, whose keys are too short for real use.
    #[cfg(test)]
    pub(crate) fn unchecked(bytes: &[u8]) -> Self {
        Self(Zeroizing::new(bytes.to_vec()))
    }
}

impl fmt::Debug for SecretBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// Declares the key type of a scheme whose key is the secret's text, not decoded.
macro_rules! text_secret {
    ($(#[$doc:meta])* $scheme:literal $(, prefix $prefix:literal)?) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub struct Secret(pub(crate) $crate::secret::SecretBytes);

        impl Secret {
            /// Takes the secret's text; its bytes are the key, without decoding.
            pub fn new(text: &str) -> Result<Self, $crate::SecretError> {
                if text.trim() != text {
                    return Err($crate::SecretError::Setting(
                        "the secret begins or ends with white space, which would be part of the key; remove it",
                    ));
                }
                $(if !text.starts_with($prefix) {
                    return Err($crate::SecretError::Prefix { expected: $prefix });
                })?
                let (min, max) = ($crate::secret::TEXT_BYTES_MIN, $crate::secret::TEXT_BYTES_MAX);
                $crate::secret::SecretBytes::new($scheme, text.as_bytes(), min, max).map(Self)
            }

            #[cfg(test)]
            #[allow(dead_code)]
            pub(crate) fn unchecked(text: &str) -> Self {
                Self($crate::secret::SecretBytes::unchecked(text.as_bytes()))
            }
        }
    };
}

pub(crate) use text_secret;

/// One to [`KEYS_MAX`] keys, any of which may have signed.
#[derive(Debug, Clone)]
pub(crate) struct Keys<K>(Vec<K>);

impl<K> Keys<K> {
    pub(crate) fn new(keys: impl IntoIterator<Item = K>) -> Result<Self, SecretError> {
        let keys: Vec<K> = keys.into_iter().collect();
        match keys.len() {
            0 => Err(SecretError::None),
            1..=KEYS_MAX => Ok(Self(keys)),
            given => Err(SecretError::TooMany { given, max: KEYS_MAX }),
        }
    }

    /// Adds a key.
    pub(crate) fn push(&mut self, key: K) -> Result<(), SecretError> {
        if self.0.len() == KEYS_MAX {
            return Err(SecretError::TooMany { given: KEYS_MAX + 1, max: KEYS_MAX });
        }
        self.0.push(key);
        Ok(())
    }

    /// The index of the first key that matches.
    pub(crate) fn position(&self, fits: impl FnMut(&K) -> bool) -> Option<usize> {
        self.0.iter().position(fits)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &K> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_long_and_no_secrets_do_not_construct() {
        for length in [0, 1, 15, 513] {
            let refused = SecretBytes::new("x", &vec![b'a'; length], TEXT_BYTES_MIN, TEXT_BYTES_MAX);
            assert!(matches!(refused, Err(SecretError::Length { .. })), "{length}");
        }
        assert!(SecretBytes::new("x", &[b'a'; 16], TEXT_BYTES_MIN, TEXT_BYTES_MAX).is_ok());
        let spaced = ["0123456789abcdef\n", " 0123456789abcdef", "0123456789abcdef\u{a0}"].map(str::to_owned);
        for wrong in [" ".repeat(16), "\t\n".repeat(20), "\u{a0}".repeat(16)].into_iter().chain(spaced) {
            assert!(matches!(crate::github::Secret::new(&wrong), Err(SecretError::Setting(_))), "{wrong:?}");
        }
        assert!(crate::github::Secret::new("0123456789 abcdef").is_ok(), "white space inside is meant");
        assert_eq!(Keys::<u8>::new([]).unwrap_err(), SecretError::None);
        assert!(matches!(Keys::new(0..9), Err(SecretError::TooMany { given: 9, max: 8 })));
    }

    #[test]
    fn nothing_prints_a_secret() {
        let canary = "canary-canary-canary";
        let secret = crate::github::Secret::new(canary).unwrap();
        let printed = format!("{secret:?} {:?}", crate::github::Verifier::new([secret.clone()]).unwrap());
        assert!(!printed.contains("canary"), "{printed}");
        assert!(!format!("{:?}", crate::stripe::Secret::new(canary).unwrap_err()).contains("canary"));
    }
}
