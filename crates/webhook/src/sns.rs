//! AWS SNS over HTTP: JSON bodies that carry their own RSA signature and name the certificate it
//! was made with.
//!
//! Two steps, because between them somebody has to have the certificate, and this crate fetches
//! nothing:
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
//! From one place: an HTTPS request to a host of AWS itself. So the host is compared exactly
//! ([`CertificateUrl`]): a looser rule has let forgers name a bucket of their own. Fetch it with
//! the usual check of the server's name and without following redirects; keep the [`Certificate`]
//! by its URL, which is never reused for another one. Any number of *different* URLs can be asked
//! for by anybody who can reach the endpoint, so cap the cache and the rate, and see that forgers
//! do not use it up (`postbox-ingress` fetches first what is named most often).
//!
//! A certificate that is not valid at the moment given as `now` verifies nothing (both ends of its
//! period included, no tolerance): AWS replaces it long before. Its issuer is not checked, because
//! the connection it came over was.
//!
//! # How the body is read
//!
//! - It is one JSON object. Each field that is signed must be there once, as a string; twice is
//!   refused, equal or not, because readers differ in which one they keep. Names are compared after
//!   JSON's escapes are undone, and exactly.
//! - Every other field (`UnsubscribeURL`, `MessageAttributes`, a `Token` in a notification) is not
//!   signed, so it is neither read nor handed out, whatever it holds.
//! - The signed text is names and values line by line. All values but `Message` must therefore be
//!   free of line breaks (AWS forbids them in subjects): else the text of a message could pass for
//!   the id and subject of another.
//! - `SignatureVersion` must be `2`. Version 1 is SHA-1 and has a code of its own, because the cure
//!   is a setting of the topic. Raw message delivery signs nothing and cannot be verified: turn it
//!   off.
//!
//! # Time
//!
//! `Timestamp` is when the message was *published*; all retries carry it and the same signature.
//! AWS retries HTTP for up to an hour, so the tolerance is [`TOLERANCE`] rather than five minutes.
//! Whoever sets less refuses genuine retries.

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

/// An hour of retries, and five minutes for clocks.
pub const TOLERANCE: Tolerance = Tolerance { past_s: 3_900, future_s: 300 };
