//! GitHub: `X-Hub-Signature-256: sha256=…`, HMAC-SHA256 over the body in lower-case hex.
//!
//! The SHA-1 header `X-Hub-Signature` is never read. Only the body is signed, neither a time nor
//! the delivery id (`X-GitHub-Delivery`), so the only defence against a replay is to remember the
//! bodies.

use crate::error::{Part, Refusal};
use crate::keyed::{self, Key};
use crate::mac::{from_hex, hmac_sha256, to_hex};
use crate::request::{Request, Scheme};
use crate::secret::text_secret;

text_secret! {
    /// A webhook's secret, at least 16 bytes of your own choice.
    "github"
}

/// Verifies what GitHub sends.
pub type Verifier = keyed::Verifier<Secret>;

impl Secret {
    /// Returns the headers that GitHub sends with `body`, for tests of a receiver.
    pub fn sign(&self, body: &[u8]) -> Vec<(String, String)> {
        let mac = hmac_sha256(&self.0, &[body]);
        vec![("x-hub-signature-256".into(), format!("sha256={}", to_hex(mac.bytes())))]
    }
}

impl Key for Secret {
    const SCHEME: Scheme = Scheme::GitHub;
    type Settings = ();
    type Claim<'r> = [u8; 32];

    fn read<'r>((): &'r (), request: &Request<'r>) -> Result<[u8; 32], Refusal> {
        let header = request.headers.only(Part::Signature, "x-hub-signature-256")?;
        let hex = header.strip_prefix("sha256=").ok_or(Refusal::VersionUnsupported)?;
        from_hex(hex).ok_or(Refusal::Malformed(Part::Signature))
    }

    fn signed(&self, signature: &[u8; 32], body: &[u8]) -> bool {
        hmac_sha256(&self.0, &[body]).is(signature)
    }
}
