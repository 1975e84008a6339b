//! GitHub: `X-Hub-Signature-256: sha256=…`, HMAC-SHA256 over the body in lower-case hex.
//!
//! The SHA-1 header `X-Hub-Signature` is never read. Nothing but the body is signed: neither a time nor the delivery id
//! (`X-GitHub-Delivery`), so the only defence against a replay is to remember the bodies.

use crate::error::{Part, Refusal, SecretError};
use crate::mac::{from_hex, hmac_sha256, same};
use crate::request::{Request, Scheme, Verified, Verify};
use crate::secret::{Keys, text_secret};
use crate::time::UnixSeconds;

text_secret! {
    /// A webhook's secret, at least 16 bytes of your own choice.
    "github"
}

/// Verifies what GitHub sends.
#[derive(Debug, Clone)]
pub struct Verifier {
    keys: Keys<Secret>,
}

impl Verifier {
    /// A verifier that accepts any of `keys`.
    pub fn new(keys: impl IntoIterator<Item = Secret>) -> Result<Self, SecretError> {
        Ok(Self { keys: Keys::new(keys)? })
    }
}

impl Verify for Verifier {
    fn scheme(&self) -> Scheme {
        Scheme::GitHub
    }

    fn verify(&self, request: &Request<'_>, _now: UnixSeconds) -> Result<Verified, Refusal> {
        let header = request.headers.only(Part::Signature, "x-hub-signature-256")?;
        let hex = header.strip_prefix("sha256=").ok_or(Refusal::VersionUnsupported)?;
        let signature = from_hex(hex).ok_or(Refusal::Malformed(Part::Signature))?;
        let fits = |key: &Secret| same(&hmac_sha256(&key.0, &[request.body]), &signature);
        let key = self.keys.position(fits).ok_or(Refusal::Mismatch)?;
        Ok(Verified { message_id: None, signed_at: None, key })
    }
}
