//! What a verifier is given and what it gives back.

use std::fmt;
use std::str::FromStr;

use crate::error::Refusal;
use crate::headers::Headers;
use crate::time::UnixSeconds;

/// A received request, untouched.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Its headers.
    pub headers: &'a Headers<'a>,
    /// The query of its URL without the question mark, as received. Only Twilio signs it.
    pub query: Option<&'a str>,
    /// The bytes of its body as received.
    pub body: &'a [u8],
}

impl<'a> Request<'a> {
    /// A request without a query.
    pub fn new(headers: &'a Headers<'a>, body: &'a [u8]) -> Self {
        Self { headers, query: None, body }
    }
}

/// What is known of a genuine message. Everything in here was covered by the signature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// The message's id, if the scheme signs one. Where it does not (GitHub's and Shopify's id
    /// headers are not signed), a replay can carry any id: deduplicate by a digest of the body
    /// instead.
    pub message_id: Option<String>,
    /// When it was signed, if the scheme says so.
    pub signed_at: Option<UnixSeconds>,
    /// SHA-256 of what was signed, where that is not the body as it was sent: Twilio signs the
    /// parameters of a form, SNS some fields, and both can be spelt in more than one way. Messages
    /// of one id that have the same digest say the same; `None`: compare the bodies.
    pub digest: Option<[u8; 32]>,
    /// Which of the verifier's keys fitted, counted from 0: shows when an old key is no longer in
    /// use.
    pub key: usize,
}

/// A verifier of one scheme, with its live keys.
///
/// Behaviour:
/// - `Ok` only if one of the keys signed exactly these bytes, and the signed time (if the scheme
///   has one) is within the tolerance of `now`.
/// - Pure: no I/O, no clock, no memory of earlier messages.
/// - Never panics, whatever the request.
pub trait Verify: fmt::Debug + Send + Sync {
    /// Which scheme this is.
    fn scheme(&self) -> Scheme;

    /// Checks what can be known before the body is there (`request.body` is not looked at): that
    /// what the scheme reads from the headers is there once and in its form, and that the time they
    /// say is within the tolerance. That is no proof of anything, since anybody can write headers:
    /// [`Refusal::TooOld`] and [`Refusal::TooNew`] are said of a genuine message only by
    /// [`Self::verify`].
    fn check_head(&self, request: &Request<'_>, now: UnixSeconds) -> Result<(), Refusal>;

    /// Checks that the request is genuine.
    fn verify(&self, request: &Request<'_>, now: UnixSeconds) -> Result<Verified, Refusal>;
}

const _: Option<&dyn Verify> = None;

/// The schemes, by the names used in configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scheme {
    /// `standard-webhooks`
    StandardWebhooks,
    /// `stripe`
    Stripe,
    /// `github`
    GitHub,
    /// `shopify`
    Shopify,
    /// `slack`
    Slack,
    /// `twilio`
    Twilio,
    /// `hmac`
    Hmac,
    /// `sns`: no shared secret and a certificate to fetch, so its [`crate::sns::Verifier`] is no
    /// [`Verify`].
    Sns,
}

impl Scheme {
    /// Every scheme.
    pub const ALL: [Self; 8] = [
        Self::StandardWebhooks,
        Self::Stripe,
        Self::GitHub,
        Self::Shopify,
        Self::Slack,
        Self::Twilio,
        Self::Hmac,
        Self::Sns,
    ];

    /// The name used in configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::StandardWebhooks => "standard-webhooks",
            Self::Stripe => "stripe",
            Self::GitHub => "github",
            Self::Shopify => "shopify",
            Self::Slack => "slack",
            Self::Twilio => "twilio",
            Self::Hmac => "hmac",
            Self::Sns => "sns",
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The text names no scheme.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no webhook scheme; one of standard-webhooks, stripe, github, shopify, slack, twilio, hmac, sns")]
pub struct SchemeUnknown(String);

impl FromStr for Scheme {
    type Err = SchemeUnknown;

    fn from_str(name: &str) -> Result<Self, SchemeUnknown> {
        Self::ALL.into_iter().find(|scheme| scheme.as_str() == name).ok_or_else(|| SchemeUnknown(name.to_owned()))
    }
}
