//! The sender's side.

use std::fmt;

use ed25519_dalek::Signer as _;

use super::{ID_HEADER, SIGNATURE_HEADER, SigningKey, SymmetricKey, TIMESTAMP_HEADER, is_id, preamble};
use crate::error::{SecretError, SignError};
use crate::keyed::Live;
use crate::mac::{hmac_sha256, to_base64};
use crate::secret::Keys;
use crate::time::UnixSeconds;

/// A key to sign with.
#[derive(Debug, Clone)]
pub enum SignKey {
    /// Signs a `v1` entry.
    Symmetric(SymmetricKey),
    /// Signs a `v1a` entry.
    Asymmetric(SigningKey),
}

impl SignKey {
    /// Parses a key of either kind by its prefix: `whsk_` is asymmetric, everything else symmetric.
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        match text.starts_with("whsk_") {
            true => SigningKey::parse(text).map(Self::Asymmetric),
            false => SymmetricKey::parse(text).map(Self::Symmetric),
        }
    }

    fn entry(&self, preamble: &str, body: &[u8]) -> String {
        match self {
            Self::Symmetric(key) => {
                format!("v1,{}", to_base64(hmac_sha256(&key.0, &[preamble.as_bytes(), body]).bytes()))
            }
            Self::Asymmetric(key) => {
                let message = [preamble.as_bytes(), body].concat();
                format!("v1a,{}", to_base64(&key.0.sign(&message).to_bytes()))
            }
        }
    }
}

impl From<SymmetricKey> for SignKey {
    fn from(key: SymmetricKey) -> Self {
        Self::Symmetric(key)
    }
}

impl From<SigningKey> for SignKey {
    fn from(key: SigningKey) -> Self {
        Self::Asymmetric(key)
    }
}

/// Signs messages with every live key, so that receivers can switch from the old key to the new one
/// at any time.
#[derive(Debug, Clone)]
pub struct Signer {
    keys: Keys<Live<SignKey>>,
}

impl Signer {
    /// Creates a signer with 1 to 8 keys; entries are in the order of the keys.
    pub fn new(keys: impl IntoIterator<Item = SignKey>) -> Result<Self, SecretError> {
        Ok(Self { keys: Keys::new(keys.into_iter().map(Live::always))? })
    }

    /// Also signs with an old key, up to and including `until`. So a rotation ends by itself: a
    /// receiver that has not switched by then refuses messages, instead of trusting an old key for
    /// ever that may have leaked.
    pub fn retiring(mut self, key: SignKey, until: UnixSeconds) -> Result<Self, SecretError> {
        self.keys.push(Live { key, until: Some(until) })?;
        Ok(self)
    }

    /// Signs `body` under `id` at `now`. Sign each attempt anew: receivers refuse old timestamps.
    pub fn sign(&self, id: &str, now: UnixSeconds, body: &[u8]) -> Result<Signed, SignError> {
        if !is_id(id) {
            return Err(SignError::Id);
        }
        let timestamp = now.0.to_string();
        UnixSeconds::parse(&timestamp).map_err(|_| SignError::Timestamp)?;
        let preamble = preamble(id, now);
        let live = self.keys.iter().filter(|live| live.is_live(now));
        let entries: Vec<String> = live.map(|live| live.key.entry(&preamble, body)).collect();
        Ok(Signed { id: id.to_owned(), timestamp, signature: entries.join(" ") })
    }
}

/// The three headers of a signed message.
#[derive(Clone, PartialEq, Eq)]
pub struct Signed {
    /// `webhook-id`
    pub id: String,
    /// `webhook-timestamp`
    pub timestamp: String,
    /// `webhook-signature`
    pub signature: String,
}

impl Signed {
    /// Returns names and values, ready to be sent.
    pub fn headers(&self) -> [(&'static str, &str); 3] {
        [(ID_HEADER, &self.id), (TIMESTAMP_HEADER, &self.timestamp), (SIGNATURE_HEADER, &self.signature)]
    }
}

impl fmt::Debug for Signed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Signed({} at {})", self.id, self.timestamp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: UnixSeconds = UnixSeconds(1_000_000);

    fn key(byte: u8) -> SignKey {
        SymmetricKey::from_bytes(&[byte; 32]).unwrap().into()
    }

    #[test]
    fn an_old_key_signs_until_its_end_and_not_a_second_longer() {
        let signature = |signer: &Signer, now| signer.sign("msg_1", now, b"{}").unwrap().signature;
        let [new, old] = [1, 2].map(|byte| Signer::new([key(byte)]).unwrap());
        let both = new.clone().retiring(key(2), END).unwrap();
        for now in [UnixSeconds(1), END] {
            assert_eq!(signature(&both, now), format!("{} {}", signature(&new, now), signature(&old, now)));
        }
        for now in [UnixSeconds(END.0 + 1), UnixSeconds(999_999_999_999)] {
            assert_eq!(signature(&both, now), signature(&new, now));
        }
    }

    #[test]
    fn there_are_few_keys_and_one_of_them_has_no_end() {
        assert!(matches!(Signer::new([]), Err(SecretError::None)));
        let mut signer = Signer::new([key(0)]).unwrap();
        for byte in 1..8 {
            signer = signer.retiring(key(byte), END).unwrap();
        }
        assert!(matches!(signer.retiring(key(9), END), Err(SecretError::TooMany { given: 9, max: 8 })));
    }
}
