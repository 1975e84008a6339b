//! The verifier of every scheme with keys. Schemes differ in the type of the key, and in how that
//! type reads a request.
//!
//! The order of the checks and the rules of key rotation are the same for all, so they are here
//! once. Keys of different schemes cannot be mixed: `Verifier<stripe::Secret>` and
//! `Verifier<slack::Secret>` are different types.

use std::fmt;

use crate::error::{Refusal, SecretError};
use crate::request::{Request, Scheme, Verified, Verify};
use crate::secret::Keys;
use crate::time::{Tolerance, UnixSeconds};

/// A key of a scheme. Sealed: only this crate implements it.
pub trait Key: fmt::Debug + Send + Sync {
    /// The scheme.
    const SCHEME: Scheme;

    /// What its verifier needs besides the keys.
    type Settings: fmt::Debug + Send + Sync;

    /// The decoded, unverified contents of a request.
    type Claim<'r>;

    /// Reads a request, and refuses one that no key could make acceptable.
    fn read<'r>(settings: &'r Self::Settings, request: &Request<'r>) -> Result<Self::Claim<'r>, Refusal>;

    /// Checks what the headers alone must contain, and returns their time.
    fn read_head(settings: &Self::Settings, request: &Request<'_>) -> Result<Option<UnixSeconds>, Refusal> {
        Self::read(settings, &Request { body: b"", ..*request }).map(|claim| Self::signed_at(&claim))
    }

    /// The headers of the signature and its time, if the settings choose their names.
    fn chosen_headers(_settings: &Self::Settings) -> Vec<&str> {
        Vec::new()
    }

    /// The one of them that holds the time, which is signed.
    fn chosen_time_header(_settings: &Self::Settings) -> Option<&str> {
        None
    }

    /// Whether this key signed exactly this claim and body.
    fn signed(&self, claim: &Self::Claim<'_>, body: &[u8]) -> bool;

    /// The claimed time of the signature.
    fn signed_at(_claim: &Self::Claim<'_>) -> Option<UnixSeconds> {
        None
    }

    /// The digest of the signed text, if that is not the body. Called for verified claims only.
    fn digest(_settings: &Self::Settings, _claim: &Self::Claim<'_>) -> Option<[u8; 32]> {
        None
    }

    /// The signed id. Called for verified claims only.
    fn message_id(_settings: &Self::Settings, _claim: &Self::Claim<'_>) -> Option<String> {
        None
    }
}

/// A key of a scheme that signs a time.
pub trait Timed: Key {}

/// Verifies messages of one scheme: [`crate::github::Verifier`] and its siblings.
#[derive(Debug, Clone)]
pub struct Verifier<K: Key> {
    keys: Keys<Live<K>>,
    settings: K::Settings,
    tolerance: Tolerance,
}

impl<K: Key<Settings = ()>> Verifier<K> {
    /// Creates a verifier that accepts any of `keys`, 1 to 8.
    pub fn new(keys: impl IntoIterator<Item = K>) -> Result<Self, SecretError> {
        Self::with(keys.into_iter().map(Live::always), ())
    }
}

impl<K: Key> Verifier<K> {
    pub(crate) fn with(keys: impl IntoIterator<Item = Live<K>>, settings: K::Settings) -> Result<Self, SecretError> {
        let keys = Keys::new(keys)?;
        if keys.iter().all(|live| live.until.is_some()) {
            return Err(SecretError::Setting(
                "every secret has an end, after which nothing could be verified; add the new one, without an end",
            ));
        }
        Ok(Self { keys, settings, tolerance: Tolerance::default() })
    }

    /// Also accepts an old key, up to and including `until`. Later, its signatures are refused as
    /// [`Refusal::KeyRetired`], whatever time the message claims: an attacker who has the old key
    /// can write any time.
    pub fn retiring(mut self, key: K, until: UnixSeconds) -> Result<Self, SecretError> {
        self.keys.push(Live { key, until: Some(until) })?;
        Ok(self)
    }

    pub(crate) fn within(mut self, tolerance: Tolerance) -> Self {
        self.tolerance = tolerance;
        self
    }
}

impl<K: Timed> Verifier<K> {
    /// Sets how far the signed time may be from now.
    #[must_use]
    pub fn tolerance(self, tolerance: Tolerance) -> Self {
        self.within(tolerance)
    }
}

impl<K: Key> Verify for Verifier<K> {
    fn scheme(&self) -> Scheme {
        K::SCHEME
    }

    fn check_head(&self, request: &Request<'_>, now: UnixSeconds) -> Result<(), Refusal> {
        let signed_at = K::read_head(&self.settings, request)?;
        signed_at.map_or(Ok(()), |signed_at| self.tolerance.check(signed_at, now))
    }

    fn chosen_headers(&self) -> Vec<&str> {
        K::chosen_headers(&self.settings)
    }

    fn chosen_time_header(&self) -> Option<&str> {
        K::chosen_time_header(&self.settings)
    }

    fn verify(&self, request: &Request<'_>, now: UnixSeconds) -> Result<Verified, Refusal> {
        let claim = K::read(&self.settings, request)?;
        let signed = |live: &Live<K>| live.key.signed(&claim, request.body);
        let Some(key) = self.keys.position(|live| live.is_live(now) && signed(live)) else {
            let retired = self.keys.iter().any(|live| !live.is_live(now) && signed(live));
            return Err(if retired { Refusal::KeyRetired } else { Refusal::Mismatch });
        };
        let signed_at = K::signed_at(&claim);
        // Checked last, so that only genuine messages are counted as stale.
        signed_at.map_or(Ok(()), |signed_at| self.tolerance.check(signed_at, now))?;
        let message_id = K::message_id(&self.settings, &claim);
        Ok(Verified { message_id, signed_at, digest: K::digest(&self.settings, &claim), key })
    }
}

/// A key, and the last second at which it verifies or signs.
#[derive(Debug, Clone)]
pub(crate) struct Live<K> {
    pub(crate) key: K,
    pub(crate) until: Option<UnixSeconds>,
}

impl<K> Live<K> {
    pub(crate) fn always(key: K) -> Self {
        Self { key, until: None }
    }

    /// Whether it is valid at this second.
    pub(crate) fn is_live(&self, now: UnixSeconds) -> bool {
        self.until.is_none_or(|until| now <= until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::github;

    const END: UnixSeconds = UnixSeconds(1_000_000);

    #[test]
    fn there_are_few_keys_and_one_of_them_stays() {
        let key = || github::Secret::new("0123456789abcdef").unwrap();
        let mut verifier = github::Verifier::new([key()]).unwrap();
        for _ in 1..8 {
            verifier = verifier.retiring(key(), END).unwrap();
        }
        assert!(matches!(verifier.retiring(key(), END), Err(SecretError::TooMany { given: 9, max: 8 })));
        let ends = || Live { key: key(), until: Some(END) };
        assert!(matches!(github::Verifier::with([ends(), ends()], ()), Err(SecretError::Setting(_))));
        assert!(matches!(github::Verifier::with([], ()), Err(SecretError::None)));
    }
}
