//! Stripe: `Stripe-Signature: t=…,v1=…[,v1=…]`, HMAC-SHA256 over `t.body` in lower-case hex.
//!
//! The trap: Stripe's secrets begin with `whsec_` like those of Standard Webhooks, but the key is
//! the *whole text*, not the decoded part after the prefix. The two key types of this crate cannot
//! be mixed up.
//!
//! While a secret is rolled, Stripe signs with both, old and new, for up to 24 hours. Every version
//! but `v1` is ignored (`v0` is for tests and is not a signature). Stripe retries for three days
//! with a fresh `t`; deduplicate by the event's `id`.

use crate::error::{Part, Refusal};
use crate::keyed::{self, Key, Timed};
use crate::mac::{from_hex, hmac_sha256, to_hex};
use crate::request::{Request, Scheme};
use crate::secret::text_secret;
use crate::time::UnixSeconds;

/// Most `v1` signatures in one header; Stripe sends two at most.
const SIGNATURES_MAX: usize = 16;

text_secret! {
    /// An endpoint's signing secret, `whsec_…`.
    "stripe", prefix "whsec_"
}

/// Verifies what Stripe sends.
pub type Verifier = keyed::Verifier<Secret>;

impl Secret {
    /// Returns the headers that Stripe sends with `body` at that time, for tests of a receiver.
    pub fn sign(&self, now: UnixSeconds, body: &[u8]) -> Vec<(String, String)> {
        let time = now.0.to_string();
        let mac = hmac_sha256(&self.0, &[time.as_bytes(), b".", body]);
        vec![("stripe-signature".into(), format!("t={time},v1={}", to_hex(mac.bytes())))]
    }
}

impl Timed for Secret {}

impl Key for Secret {
    const SCHEME: Scheme = Scheme::Stripe;
    type Settings = ();
    type Claim<'r> = SignatureHeader<'r>;

    fn read<'r>((): &'r (), request: &Request<'r>) -> Result<SignatureHeader<'r>, Refusal> {
        SignatureHeader::parse(request.headers.only(Part::Signature, "stripe-signature")?)
    }

    fn signed(&self, header: &SignatureHeader<'_>, body: &[u8]) -> bool {
        let mac = hmac_sha256(&self.0, &[header.timestamp.as_bytes(), b".", body]);
        header.signatures.iter().any(|signature| mac.is(signature))
    }

    fn signed_at(header: &SignatureHeader<'_>) -> Option<UnixSeconds> {
        Some(header.signed_at)
    }
}

/// The claims in the header.
#[doc(hidden)]
pub struct SignatureHeader<'a> {
    timestamp: &'a str,
    signed_at: UnixSeconds,
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
            _ => Ok(Self { timestamp, signed_at: UnixSeconds::parse(timestamp)?, signatures }),
        }
    }
}
