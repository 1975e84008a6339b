//! The receiver's side.

use std::cell::{Cell, OnceCell};

use ed25519_dalek::Signature;

use super::{ID_HEADER, PublicKey, SIGNATURE_HEADER, SymmetricKey, TIMESTAMP_HEADER, is_id, preamble};
use crate::error::{Part, Refusal, SecretError};
use crate::headers::Headers;
use crate::keyed::{self, Key, Timed};
use crate::mac::{from_base64, hmac_sha256};
use crate::request::{Request, Scheme};
use crate::secret::KEYS_MAX;
use crate::time::UnixSeconds;

/// Most entries in one signature list: twice the most keys of a sender.
const ENTRIES_MAX: usize = 16;

/// Most `v1a` signatures that are tried for one request, over all keys. Each try hashes the whole
/// body, and anybody can cause it. Enough for both signatures of a rotating sender and every key.
const PUBLIC_TRIES_MAX: usize = 2 * KEYS_MAX;

/// A key to verify with.
#[derive(Debug, Clone)]
pub enum VerifyKey {
    /// Accepts `v1` entries only.
    Symmetric(SymmetricKey),
    /// Accepts `v1a` entries only.
    Public(PublicKey),
}

impl VerifyKey {
    /// Parses a key of either kind by its prefix: `whpk_` is public, everything else symmetric.
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        match text.starts_with("whpk_") {
            true => PublicKey::parse(text).map(Self::Public),
            false => SymmetricKey::parse(text).map(Self::Symmetric),
        }
    }
}

impl From<SymmetricKey> for VerifyKey {
    fn from(key: SymmetricKey) -> Self {
        Self::Symmetric(key)
    }
}

impl From<PublicKey> for VerifyKey {
    fn from(key: PublicKey) -> Self {
        Self::Public(key)
    }
}

/// Verifies messages of any Standard Webhooks sender.
pub type Verifier = keyed::Verifier<VerifyKey>;

/// The claims in the three headers.
#[doc(hidden)]
pub struct Claim<'r> {
    id: &'r str,
    signed_at: UnixSeconds,
    preamble: String,
    entries: Entries,
    /// What `v1a` signs, built once for all keys.
    message: OnceCell<Vec<u8>>,
    tries_left: Cell<usize>,
}

impl Claim<'_> {
    fn fits(&self, key: &VerifyKey, body: &[u8]) -> bool {
        let preamble = self.preamble.as_bytes();
        match key {
            VerifyKey::Symmetric(key) => {
                let mac = hmac_sha256(&key.0, &[preamble, body]);
                self.entries.v1.iter().any(|signature| mac.is(signature))
            }
            VerifyKey::Public(key) => self.entries.v1a.iter().any(|signature| {
                let Some(left) = self.tries_left.get().checked_sub(1) else { return false };
                self.tries_left.set(left);
                let message = self.message.get_or_init(|| [preamble, body].concat());
                // Strict, so that no second encoding of a signature verifies.
                key.0.verify_strict(message, signature).is_ok()
            }),
        }
    }
}

impl Timed for VerifyKey {}

impl Key for VerifyKey {
    const SCHEME: Scheme = Scheme::StandardWebhooks;
    type Settings = ();
    type Claim<'r> = Claim<'r>;

    fn read<'r>((): &'r (), request: &Request<'r>) -> Result<Claim<'r>, Refusal> {
        let [id_header, timestamp_header, signature_header] = family(request.headers);
        let id = request.headers.only(Part::Id, id_header)?;
        if !is_id(id) {
            return Err(Refusal::Malformed(Part::Id));
        }
        let signed_at = UnixSeconds::parse(request.headers.only(Part::Timestamp, timestamp_header)?)?;
        let entries = Entries::parse(request.headers.only(Part::Signature, signature_header)?)?;
        let (preamble, tries_left) = (preamble(id, signed_at), Cell::new(PUBLIC_TRIES_MAX));
        Ok(Claim { id, signed_at, preamble, entries, message: OnceCell::new(), tries_left })
    }

    fn signed(&self, claim: &Claim<'_>, body: &[u8]) -> bool {
        claim.fits(self, body)
    }

    fn signed_at(claim: &Claim<'_>) -> Option<UnixSeconds> {
        Some(claim.signed_at)
    }

    fn message_id((): &(), claim: &Claim<'_>) -> Option<String> {
        Some(claim.id.to_owned())
    }
}

/// One family for all three headers: `webhook-*` if any of them exists, else Svix's.
fn family(headers: &Headers<'_>) -> [&'static str; 3] {
    let standard = [ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER];
    let svix = ["svix-id", "svix-timestamp", "svix-signature"];
    let any = |family: &[&str; 3]| family.iter().any(|name| headers.has(name));
    if !any(&standard) && any(&svix) { svix } else { standard }
}

/// The decoded signatures by version.
struct Entries {
    v1: Vec<[u8; 32]>,
    v1a: Vec<Signature>,
}

impl Entries {
    fn parse(list: &str) -> Result<Self, Refusal> {
        let mut entries = Self { v1: Vec::new(), v1a: Vec::new() };
        let mut known = 0;
        for (place, entry) in list.split(' ').enumerate() {
            if place == ENTRIES_MAX {
                return Err(Refusal::Malformed(Part::Signature));
            }
            let (version, signature) = entry.split_once(',').ok_or(Refusal::Malformed(Part::Signature))?;
            match version {
                "v1" => entries.v1.extend(from_base64(signature)),
                "v1a" => entries.v1a.extend(from_base64(signature).map(|bytes| Signature::from_bytes(&bytes))),
                // A future or unknown version: other entries may still match.
                _ => continue,
            }
            known += 1;
        }
        match (known, entries.v1.is_empty() && entries.v1a.is_empty()) {
            (0, _) => Err(Refusal::VersionUnsupported),
            (_, true) => Err(Refusal::Malformed(Part::Signature)),
            _ => Ok(entries),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mac::to_base64;
    use crate::request::Verify;
    use crate::standard::{SignKey, Signer, SigningKey};

    const NOW: UnixSeconds = UnixSeconds(1_000_000);

    fn key(byte: u8) -> SigningKey {
        SigningKey::parse(&to_base64(&[byte; 32])).unwrap()
    }

    /// What a receiver with these keys says of a message signed with those.
    fn verdict(receiver: impl Iterator<Item = u8>, sender: impl Iterator<Item = u8>) -> Result<usize, Refusal> {
        let verifier = Verifier::new(receiver.map(|byte| key(byte).public_key().into())).unwrap();
        let sign = |byte| Signer::new([SignKey::from(key(byte))]).unwrap().sign("msg_1", NOW, b"{}").unwrap();
        let entries: Vec<String> = sender.map(|byte| sign(byte).signature).collect();
        let (time, entries) = (NOW.0.to_string(), entries.join(" "));
        let fields = [(ID_HEADER, "msg_1"), (TIMESTAMP_HEADER, time.as_str()), (SIGNATURE_HEADER, entries.as_str())];
        let headers: Headers<'_> = fields.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
        verifier.verify(&Request { headers: &headers, query: None, body: b"{}" }, NOW).map(|verified| verified.key)
    }

    #[test]
    fn public_keys_are_tried_a_bounded_number_of_times() {
        // A rotation on both sides, with as many keys as there may be.
        assert_eq!(verdict(1..=8, [9, 8].into_iter()), Ok(7));
        // The last of sixteen tries, and the one after it.
        assert_eq!(verdict([1, 20].into_iter(), 13..=20), Ok(1));
        assert_eq!(verdict([1, 20].into_iter(), 12..=20), Err(Refusal::Mismatch));
        assert_eq!(verdict([20].into_iter(), 5..=20), Ok(0));
    }
}
