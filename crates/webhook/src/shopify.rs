//! Shopify: `X-Shopify-Hmac-SHA256`, HMAC-SHA256 over the body in base64; the key is the app's
//! client secret.
//!
//! Only the body is signed, not `X-Shopify-Topic`, `X-Shopify-Webhook-Id` or `X-Shopify-Event-Id`.
//! After a rotation Shopify may sign with the old secret for an hour; keep both.

use crate::error::{Part, Refusal};
use crate::keyed::{self, Key};
use crate::mac::{from_base64, hmac_sha256, to_base64};
use crate::request::{Request, Scheme};
use crate::secret::text_secret;

text_secret! {
    /// An app's client secret.
    "shopify"
}

/// Verifies what Shopify sends.
pub type Verifier = keyed::Verifier<Secret>;

impl Secret {
    /// Returns the headers that Shopify sends with `body`, for tests of a receiver.
    pub fn sign(&self, body: &[u8]) -> Vec<(String, String)> {
        let mac = hmac_sha256(&self.0, &[body]);
        vec![("x-shopify-hmac-sha256".into(), to_base64(mac.bytes()))]
    }
}

impl Key for Secret {
    const SCHEME: Scheme = Scheme::Shopify;
    type Settings = ();
    type Claim<'r> = [u8; 32];

    fn read<'r>((): &'r (), request: &Request<'r>) -> Result<[u8; 32], Refusal> {
        let header = request.headers.only(Part::Signature, "x-shopify-hmac-sha256")?;
        from_base64(header).ok_or(Refusal::Malformed(Part::Signature))
    }

    fn signed(&self, signature: &[u8; 32], body: &[u8]) -> bool {
        hmac_sha256(&self.0, &[body]).is(signature)
    }
}
