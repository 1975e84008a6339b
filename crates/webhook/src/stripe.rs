//! Stripe: `Stripe-Signature: t=…,v1=…[,v1=…]`, HMAC-SHA256 over `t.body` in lower-case hex.
//!
//! The trap: Stripe's secrets begin with `whsec_` like those of Standard Webhooks, but the key is the *whole text*, not
//! its decoded tail. The two key types of this crate cannot be mixed up.
//!
//! While a secret is rolled Stripe signs with both, old and new, for up to 24 hours. Every version but `v1` is ignored (`v0` is
//! for tests and is not a signature). Stripe retries for three days with a fresh `t`; deduplicate by the event's `id`.

use crate::error::{Part, Refusal, SecretError};
use crate::mac::{from_hex, hmac_sha256, same};
use crate::request::{Request, Scheme, Verified, Verify};
use crate::secret::{Keys, text_secret};
use crate::time::{Tolerance, UnixSeconds};

/// Most `v1` signatures in one header; Stripe sends two at most.
const SIGNATURES_MAX: usize = 16;

text_secret! {
    /// An endpoint's signing secret, `whsec_…`.
    "stripe", prefix "whsec_"
}

/// Verifies what Stripe sends.
#[derive(Debug, Clone)]
pub struct Verifier {
    keys: Keys<Secret>,
    tolerance: Tolerance,
}

impl Verifier {
    /// A verifier that accepts any of `keys`.
    pub fn new(keys: impl IntoIterator<Item = Secret>) -> Result<Self, SecretError> {
        Ok(Self { keys: Keys::new(keys)?, tolerance: Tolerance::default() })
    }

    /// Sets how far the signed time may be off.
    #[must_use]
    pub fn tolerance(mut self, tolerance: Tolerance) -> Self {
        self.tolerance = tolerance;
        self
    }
}

impl Verify for Verifier {
    fn scheme(&self) -> Scheme {
        Scheme::Stripe
    }

    fn verify(&self, request: &Request<'_>, now: UnixSeconds) -> Result<Verified, Refusal> {
        let header = SignatureHeader::parse(request.headers.only(Part::Signature, "stripe-signature")?)?;
        let signed_at = UnixSeconds::parse(header.timestamp)?;
        let fits = |key: &Secret| {
            let mac = hmac_sha256(&key.0, &[header.timestamp.as_bytes(), b".", request.body]);
            header.signatures.iter().any(|signature| same(&mac, signature))
        };
        let key = self.keys.position(fits).ok_or(Refusal::Mismatch)?;
        self.tolerance.check(signed_at, now)?;
        Ok(Verified { message_id: None, signed_at: Some(signed_at), key })
    }
}

struct SignatureHeader<'a> {
    timestamp: &'a str,
    signatures: Vec<[u8; 32]>,
}

impl<'a> SignatureHeader<'a> {
    fn parse(header: &'a str) -> Result<Self, Refusal> {
        let mut timestamp = None;
        let mut signatures = Vec::new();
        let mut versions = 0;
        for item in header.split(',') {
            let (name, value) = item.split_once('=').ok_or(Refusal::Malformed(Part::Signature))?;
            match name {
                "t" if timestamp.is_some() => return Err(Refusal::Duplicate(Part::Timestamp)),
                "t" => timestamp = Some(value),
                "v1" if versions == SIGNATURES_MAX => return Err(Refusal::Malformed(Part::Signature)),
                "v1" => {
                    versions += 1;
                    signatures.extend(from_hex(value));
                }
                _ => {}
            }
        }
        let timestamp = timestamp.ok_or(Refusal::Missing(Part::Timestamp))?;
        match (versions, signatures.is_empty()) {
            (0, _) => Err(Refusal::VersionUnsupported),
            (_, true) => Err(Refusal::Malformed(Part::Signature)),
            _ => Ok(Self { timestamp, signatures }),
        }
    }
}
