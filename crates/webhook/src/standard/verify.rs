//! The receiver's side.

use ed25519_dalek::Signature;

use super::{ID_HEADER, PublicKey, SIGNATURE_HEADER, SymmetricKey, TIMESTAMP_HEADER, is_id, preamble};
use crate::error::{Part, Refusal, SecretError};
use crate::headers::Headers;
use crate::keyed::{self, Key, Timed};
use crate::mac::{from_base64, hmac_sha256};
use crate::request::{Request, Scheme};
use crate::time::UnixSeconds;

/// Most entries in one signature list: twice the most keys of a sender.
const ENTRIES_MAX: usize = 16;

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
        Ok(Claim { id, signed_at, preamble: preamble(id, signed_at), entries })
    }

    fn signed(&self, claim: &Claim<'_>, body: &[u8]) -> bool {
        claim.entries.fit(self, &claim.preamble, body)
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

    fn fit(&self, key: &VerifyKey, preamble: &str, body: &[u8]) -> bool {
        match key {
            VerifyKey::Symmetric(key) => {
                let mac = hmac_sha256(&key.0, &[preamble.as_bytes(), body]);
                self.v1.iter().any(|signature| mac.is(signature))
            }
            VerifyKey::Public(_) if self.v1a.is_empty() => false,
            VerifyKey::Public(key) => {
                let message = [preamble.as_bytes(), body].concat();
                // Strict, so that no second encoding of a signature verifies.
                self.v1a.iter().any(|signature| key.0.verify_strict(&message, signature).is_ok())
            }
        }
    }
}
