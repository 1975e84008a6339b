//! Shopify: `X-Shopify-Hmac-SHA256`, HMAC-SHA256 over the body in base64; the key is the app's client secret.
//!
//! Only the body is signed: `X-Shopify-Topic`, `X-Shopify-Webhook-Id` and `X-Shopify-Event-Id` are not. After a rotation Shopify may
//! sign with the old secret for an hour; keep both.

use crate::error::{Part, Refusal, SecretError};
use crate::mac::{from_base64, hmac_sha256, same};
use crate::request::{Request, Scheme, Verified, Verify};
use crate::secret::{Keys, text_secret};
use crate::time::UnixSeconds;

text_secret! {
    /// An app's client secret.
    "shopify"
}

/// Verifies what Shopify sends.
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
        Scheme::Shopify
    }

    fn verify(&self, request: &Request<'_>, _now: UnixSeconds) -> Result<Verified, Refusal> {
        let header = request.headers.only(Part::Signature, "x-shopify-hmac-sha256")?;
        let signature = from_base64(header).ok_or(Refusal::Malformed(Part::Signature))?;
        let fits = |key: &Secret| same(&hmac_sha256(&key.0, &[request.body]), &signature);
        let key = self.keys.position(fits).ok_or(Refusal::Mismatch)?;
        Ok(Verified { message_id: None, signed_at: None, key })
    }
}
