//! Sign and verify webhooks exactly as their providers specify. No I/O, no clock, no HTTP library.
//!
//! | scheme | verify | sign | what is authenticated |
//! |---|---|---|---|
//! | [`standard`] (Standard Webhooks 1.0, Svix) | yes | yes | id, time, body; HMAC-SHA256 (`v1`) or Ed25519 (`v1a`) |
//! | [`stripe`] | yes | for tests | time, body |
//! | [`github`] | yes | for tests | body |
//! | [`shopify`] | yes | for tests | body |
//! | [`slack`] | yes | for tests | time, body |
//! | [`twilio`] | yes | for tests | public URL, form parameters or body hash |
//! | [`sns`] (AWS) | yes | | id, time, topic, subject, message; RSA-SHA256 |
//! | [`plain`] | yes | yes | body, and a time if you configure one |
//!
//! ```
//! use postbox_webhook::standard::{Signer, SymmetricKey, Verifier};
//! use postbox_webhook::{Headers, Request, UnixSeconds, Verify};
//!
//! let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
//! let signed = Signer::new([SymmetricKey::parse(secret)?.into()])?.sign("msg_1", UnixSeconds(1_614_265_330), b"{}")?;
//!
//! let verifier = Verifier::new([SymmetricKey::parse(secret)?.into()])?;
//! let headers: Headers = signed.headers().into_iter().map(|(name, value)| (name, value.as_bytes())).collect();
//! let verified = verifier.verify(&Request::new(&headers, b"{}"), UnixSeconds(1_614_265_330))?;
//! assert_eq!(verified.message_id.as_deref(), Some("msg_1"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Rules that hold for every scheme
//!
//! - The signature is computed over the bytes as received. Never parse and re-serialise first.
//! - A signature is decoded to a value of exactly the right length, then compared in constant time.
//!   No prefix, no shorter text and no other spelling (upper-case hex, unpadded base64) matches.
//! - Every header that a scheme reads must occur exactly once ([`Headers`]).
//! - The signature is checked before the time, so [`Refusal::TooOld`] is reported only for genuine
//!   messages: its counter counts replays, and nobody without the key can raise it.
//! - Each scheme has its own key type with its own derivation. Empty, short and too many keys
//!   cannot be constructed.
//! - An old key may be given an end, after which it verifies nothing ([`Verifier::retiring`]) or
//!   signs nothing ([`standard::Signer::retiring`]).
//! - A [`Refusal`] is for the owner's logs and counters. Answer the sender with the same 401 for
//!   all of them.
//!
//! # What this crate deliberately does not do
//!
//! It does not remember ids (the inbox does), fetch anything, or interpret messages.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod error;
mod headers;
mod keyed;
mod mac;
mod request;
mod secret;
mod settings;
mod time;

pub mod github;
pub mod plain;
pub mod shopify;
pub mod slack;
pub mod sns;
pub mod standard;
pub mod stripe;
pub mod twilio;

pub use error::{Part, Refusal, SecretError, SignError};
pub use headers::Headers;
pub use keyed::Verifier;
pub use request::{Request, Scheme, SchemeUnknown, Verified, Verify};
pub use settings::{Settings, verifier, verifier_in_rotation};
pub use time::{Tolerance, UnixSeconds};
