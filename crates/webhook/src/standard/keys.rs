//! The three kinds of keys, distinguished by their prefix.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

use crate::error::SecretError;
use crate::mac::to_base64;
use crate::secret::SecretBytes;

const SYMMETRIC_PREFIX: &str = "whsec_";
const SIGNING_PREFIX: &str = "whsk_";
const PUBLIC_PREFIX: &str = "whpk_";

/// Bounds of a symmetric key, in bytes, from the specification.
const SYMMETRIC_BYTES: (usize, usize) = (24, 64);

/// A shared secret for `v1`: `whsec_` and base64, which is *decoded*. (Stripe's secrets look the
/// same and are not decoded.)
#[derive(Debug, Clone)]
pub struct SymmetricKey(pub(super) SecretBytes);

impl SymmetricKey {
    /// Parses `whsec_` + base64; the prefix is optional.
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        if text.starts_with(SIGNING_PREFIX) || text.starts_with(PUBLIC_PREFIX) {
            return Err(SecretError::Prefix { expected: SYMMETRIC_PREFIX });
        }
        Self::from_bytes(&decode(SYMMETRIC_PREFIX, text)?)
    }

    /// Takes 24 to 64 random bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, SecretError> {
        SecretBytes::new("standard-webhooks", bytes, SYMMETRIC_BYTES.0, SYMMETRIC_BYTES.1).map(Self)
    }

    /// The secret's text, to be given to the receiver.
    pub fn expose(&self) -> Zeroizing<String> {
        Zeroizing::new(format!("{SYMMETRIC_PREFIX}{}", to_base64(self.0.expose())))
    }
}

/// A private Ed25519 key for `v1a`: `whsk_` and base64 of the seed, or of seed and public key.
#[derive(Clone)]
pub struct SigningKey(pub(super) ed25519_dalek::SigningKey);

impl SigningKey {
    /// Parses `whsk_` + base64; the prefix is optional.
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        if text.starts_with(SYMMETRIC_PREFIX) || text.starts_with(PUBLIC_PREFIX) {
            return Err(SecretError::Prefix { expected: SIGNING_PREFIX });
        }
        let bytes = decode(SIGNING_PREFIX, text)?;
        if let Ok(seed) = bytes.as_slice().try_into() {
            return Ok(Self(ed25519_dalek::SigningKey::from_bytes(seed)));
        }
        let pair = bytes.as_slice().try_into().map_err(|_| SecretError::Key)?;
        ed25519_dalek::SigningKey::from_keypair_bytes(pair).map(Self).map_err(|_| SecretError::Key)
    }

    /// The public half.
    pub fn public_key(&self) -> PublicKey {
        PublicKey(self.0.verifying_key())
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey(secret, public half {})", self.public_key())
    }
}

/// A public Ed25519 key for `v1a`: `whpk_` and base64.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicKey(pub(super) ed25519_dalek::VerifyingKey);

impl PublicKey {
    /// Parses `whpk_` + base64; the prefix is optional. Keys of small order, under which any
    /// signature verifies, are refused.
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        if text.starts_with(SYMMETRIC_PREFIX) || text.starts_with(SIGNING_PREFIX) {
            return Err(SecretError::Prefix { expected: PUBLIC_PREFIX });
        }
        let bytes = decode(PUBLIC_PREFIX, text)?;
        let bytes = bytes.as_slice().try_into().map_err(|_| SecretError::Key)?;
        let key = ed25519_dalek::VerifyingKey::from_bytes(bytes).map_err(|_| SecretError::Key)?;
        if key.is_weak() { Err(SecretError::Key) } else { Ok(Self(key)) }
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PUBLIC_PREFIX}{}", to_base64(self.0.as_bytes()))
    }
}

fn decode(prefix: &'static str, text: &str) -> Result<Zeroizing<Vec<u8>>, SecretError> {
    let base64 = text.strip_prefix(prefix).unwrap_or(text);
    STANDARD.decode(base64).map(Zeroizing::new).map_err(|_| SecretError::Encoding { prefix })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_another_kind_or_length_do_not_construct() {
        let short = to_base64(&[1; 23]);
        let long = to_base64(&[1; 65]);
        for text in ["", "whsec_", "whsec_!", "whsk_AAAA", "whpk_AAAA", short.as_str(), long.as_str()] {
            assert!(SymmetricKey::parse(text).is_err(), "{text}");
        }
        for text in ["", "whsk_", "whsk_AAAA", "whsec_AAAA"] {
            assert!(SigningKey::parse(text).is_err(), "{text}");
        }
        // The neutral element: under this key, a forged signature verifies any message.
        let mut neutral = [0; 32];
        neutral[0] = 1;
        for text in ["", "whpk_", "whpk_AAAA", "whsk_AAAA", to_base64(&neutral).as_str()] {
            assert!(PublicKey::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_key_pair_must_fit_together() {
        let key = SigningKey::parse(&to_base64(&[7; 32])).unwrap();
        let mut pair = [7; 64];
        pair[32..].copy_from_slice(key.public_key().0.as_bytes());
        assert!(SigningKey::parse(&to_base64(&pair)).is_ok());
        pair[40] ^= 1;
        assert!(SigningKey::parse(&to_base64(&pair)).is_err());
    }

    #[test]
    fn keys_round_trip_as_text_and_never_print() {
        let key = SymmetricKey::from_bytes(&[9; 32]).unwrap();
        assert_eq!(SymmetricKey::parse(&key.expose()).unwrap().0.expose(), [9; 32]);
        assert!(!format!("{key:?}").contains("CQkJ"));
        let signing = SigningKey::parse(&to_base64(&[9; 32])).unwrap();
        assert_eq!(PublicKey::parse(&signing.public_key().to_string()).unwrap(), signing.public_key());
        assert!(!format!("{signing:?}").contains("CQkJ"));
    }
}
