//! Slack: `X-Slack-Signature: v0=…` and `X-Slack-Request-Timestamp`, HMAC-SHA256 over
//! `v0:timestamp:body` in lower-case hex.
//!
//! Verify before answering anything, the `url_verification` challenge included.

use crate::error::{Part, Refusal};
use crate::keyed::{self, Key, Timed};
use crate::mac::{from_hex, hmac_sha256, to_hex};
use crate::request::{Request, Scheme};
use crate::secret::text_secret;
use crate::time::UnixSeconds;

text_secret! {
    /// An app's signing secret.
    "slack"
}

/// Verifies what Slack sends.
pub type Verifier = keyed::Verifier<Secret>;

impl Secret {
    /// Returns the headers that Slack sends with `body` at that time, for tests of a receiver.
    pub fn sign(&self, now: UnixSeconds, body: &[u8]) -> Vec<(String, String)> {
        let time = now.0.to_string();
        let mac = hmac_sha256(&self.0, &[b"v0:", time.as_bytes(), b":", body]);
        let signature = format!("v0={}", to_hex(mac.bytes()));
        vec![("x-slack-request-timestamp".into(), time), ("x-slack-signature".into(), signature)]
    }
}

/// The claims in the two headers.
#[doc(hidden)]
pub struct Claim<'r> {
    timestamp: &'r str,
    signed_at: UnixSeconds,
    signature: [u8; 32],
}

impl Timed for Secret {}

impl Key for Secret {
    const SCHEME: Scheme = Scheme::Slack;
    type Settings = ();
    type Claim<'r> = Claim<'r>;

    fn read<'r>((): &'r (), request: &Request<'r>) -> Result<Claim<'r>, Refusal> {
        let timestamp = request.headers.only(Part::Timestamp, "x-slack-request-timestamp")?;
        let signed_at = UnixSeconds::parse(timestamp)?;
        let header = request.headers.only(Part::Signature, "x-slack-signature")?;
        let hex = header.strip_prefix("v0=").ok_or(Refusal::VersionUnsupported)?;
        let signature = from_hex(hex).ok_or(Refusal::Malformed(Part::Signature))?;
        Ok(Claim { timestamp, signed_at, signature })
    }

    fn signed(&self, claim: &Claim<'_>, body: &[u8]) -> bool {
        hmac_sha256(&self.0, &[b"v0:", claim.timestamp.as_bytes(), b":", body]).is(&claim.signature)
    }

    fn signed_at(claim: &Claim<'_>) -> Option<UnixSeconds> {
        Some(claim.signed_at)
    }
}
