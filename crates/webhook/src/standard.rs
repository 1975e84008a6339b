//! Standard Webhooks 1.0: `webhook-id`, `webhook-timestamp`, `webhook-signature` over
//! `id.timestamp.body`.
//!
//! Symmetric signatures (`v1`, HMAC-SHA256) and asymmetric ones (`v1a`, Ed25519) may occur in one
//! list, and several keys may be live during a rotation: the sender signs with all of its keys, and
//! the receiver accepts if any entry matches any of its keys *of the same version*. Of `v1a`, it
//! tries sixteen pairs of key and entry at most, because each try hashes the whole body.
//!
//! Svix's `svix-*` headers are read only if there is no `webhook-*` header at all. The two families
//! are never mixed.

mod keys;
mod sign;
mod verify;

pub use keys::{PublicKey, SigningKey, SymmetricKey};
pub use sign::{SignKey, Signed, Signer};
pub use verify::{Verifier, VerifyKey};

use crate::time::UnixSeconds;

/// The header with the message's id, which is the receiver's idempotency key.
pub const ID_HEADER: &str = "webhook-id";
/// The header with the seconds since 1970 at which this attempt was signed.
pub const TIMESTAMP_HEADER: &str = "webhook-timestamp";
/// The header with the list of signatures.
pub const SIGNATURE_HEADER: &str = "webhook-signature";

/// Longest id in bytes.
const ID_BYTES_MAX: usize = 255;

/// An id has no dot, because `id.timestamp.body` could otherwise be read in two ways.
fn is_id(id: &str) -> bool {
    (1..=ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'.')
}

/// The signed bytes before the body.
fn preamble(id: &str, timestamp: UnixSeconds) -> String {
    format!("{id}.{}.", timestamp.0)
}
