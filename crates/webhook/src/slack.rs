//! Slack: `X-Slack-Signature: v0=…` and `X-Slack-Request-Timestamp`, HMAC-SHA256 over `v0:timestamp:body` in lower-case hex.
//!
//! Verify before answering anything, the `url_verification` challenge included.

use crate::error::{Part, Refusal, SecretError};
use crate::mac::{from_hex, hmac_sha256, same};
use crate::request::{Request, Scheme, Verified, Verify};
use crate::secret::{Keys, text_secret};
use crate::time::{Tolerance, UnixSeconds};

text_secret! {
    /// An app's signing secret.
    "slack"
}

/// Verifies what Slack sends.
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
        Scheme::Slack
    }

    fn verify(&self, request: &Request<'_>, now: UnixSeconds) -> Result<Verified, Refusal> {
        let timestamp = request.headers.only(Part::Timestamp, "x-slack-request-timestamp")?;
        let signed_at = UnixSeconds::parse(timestamp)?;
        let header = request.headers.only(Part::Signature, "x-slack-signature")?;
        let hex = header.strip_prefix("v0=").ok_or(Refusal::VersionUnsupported)?;
        let signature = from_hex(hex).ok_or(Refusal::Malformed(Part::Signature))?;
        let fits =
            |key: &Secret| same(&hmac_sha256(&key.0, &[b"v0:", timestamp.as_bytes(), b":", request.body]), &signature);
        let key = self.keys.position(fits).ok_or(Refusal::Mismatch)?;
        self.tolerance.check(signed_at, now)?;
        Ok(Verified { message_id: None, signed_at: Some(signed_at), key })
    }
}
