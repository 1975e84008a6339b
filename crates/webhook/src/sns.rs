//! AWS SNS over HTTP: JSON bodies that carry an RSA signature and name its certificate.
//!
//! Verification has two steps, because the caller provides the certificate in between; this crate
//! fetches nothing:
//!
//! ```no_run
//! use postbox_webhook::UnixSeconds;
//! use postbox_webhook::sns::{Certificate, Message, TopicArn, Verifier};
//! # fn fetched_or_cached(_: &str) -> Vec<u8> { Vec::new() }
//! # fn get(_: &str) {}
//! # fn example(body: &[u8], now: UnixSeconds) -> Result<(), Box<dyn std::error::Error>> {
//! let verifier = Verifier::new([TopicArn::parse("arn:aws:sns:eu-central-1:123456789012:orders")?])?;
//! let unverified = verifier.read(body)?;
//! let url = unverified.certificate_url().clone();
//! let certificate = Certificate::from_pem(&url, &fetched_or_cached(url.as_str()))?;
//! match unverified.verify(&certificate, now)? {
//!     Message::Notification(it) => println!("{}: {}", it.message_id, it.message),
//!     Message::SubscriptionConfirmation(it) => get(it.subscribe_url.as_str()),
//!     Message::UnsubscribeConfirmation(_) => {}
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Where trust comes from
//!
//! Only from an HTTPS request to a host of AWS itself. So the host is compared exactly
//! ([`CertificateUrl`]): looser rules have let forgers name a bucket of their own. Fetch the
//! certificate with the usual check of the server's name and without following redirects. Cache the
//! [`Certificate`] by its URL, which is never reused for another one. Anybody who can reach the
//! endpoint can name any number of *different* URLs, so limit the cache and the rate of fetches,
//! and make sure that forgers cannot use them up (`postbox-ingress` first fetches what is named
//! most often).
//!
//! A certificate that is not valid at `now` verifies nothing (both ends of its period included, no
//! tolerance); AWS replaces it long before it expires. Its issuer is not checked, because the TLS
//! connection authenticated AWS.
//!
//! # How the body is read
//!
//! - It is one JSON object. Each signed field must occur once, as a string. Twice is refused, equal
//!   or not, because parsers differ in which one they keep. Names are compared exactly, after JSON
//!   escapes are decoded.
//! - All other fields (`UnsubscribeURL`, `MessageAttributes`, a `Token` in a notification) are
//!   unsigned, so they are neither read nor returned.
//! - The signed text is names and values, line by line. All values but `Message` must therefore
//!   contain no line breaks (AWS forbids them in subjects). Otherwise the text of one message could
//!   pass for the id and subject of another.
//! - `SignatureVersion` must be `2`. Version 1 is SHA-1 and has its own code, because the cure is a
//!   setting of the topic. Raw message delivery signs nothing and cannot be verified: turn it off.
//!
//! # Time
//!
//! `Timestamp` is when the message was *published*; all retries carry it and the same signature.
//! AWS retries HTTP for up to an hour, so the tolerance is [`TOLERANCE`] rather than five minutes.
//! A shorter one refuses genuine retries.

mod certificate;
mod fields;
mod message;
mod urls;
mod verify;

pub use certificate::{Certificate, CertificateError};
pub use message::{Confirmation, Message, Notification, TopicArn};
pub use urls::{CertificateUrl, SubscribeUrl};
pub use verify::{Unverified, Verifier};

use crate::time::Tolerance;

/// An hour of retries, and five minutes for wrong clocks.
pub const TOLERANCE: Tolerance = Tolerance { past_s: 3_900, future_s: 300 };
