//! The input and the result of a verifier.

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
    /// The query of its URL as received, without the question mark. Only Twilio signs it.
    pub query: Option<&'a str>,
    /// Its body as received.
    pub body: &'a [u8],
}

impl<'a> Request<'a> {
    /// Creates a request without a query.
    pub fn new(headers: &'a Headers<'a>, body: &'a [u8]) -> Self {
        Self { headers, query: None, body }
    }
}

/// What is known about a genuine message. The signature covers all of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// The message's id, if the scheme signs one. If it does not (the id headers of GitHub and
    /// Shopify are unsigned), a replay can carry any id: deduplicate by a digest of the body
    /// instead.
    pub message_id: Option<String>,
    /// When it was signed, if the scheme signs a time.
    pub signed_at: Option<UnixSeconds>,
    /// SHA-256 of the signed text, where that is not the body: Twilio signs the parameters of a
    /// form, SNS some fields, and both can be written in several ways. Two messages with the same
    /// id and digest have the same content. `None`: compare the bodies.
    pub digest: Option<[u8; 32]>,
    /// The index of the key that matched, counted from 0. It shows when an old key is no longer
    /// used.
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
    /// Returns the scheme.
    fn scheme(&self) -> Scheme;

    /// Checks what can be checked without the body (`request.body` is not read): each header that
    /// the scheme reads occurs once and has its format, and the time is within the tolerance. That
    /// proves nothing, since anybody can write headers. Only [`Self::verify`] returns
    /// [`Refusal::TooOld`] and [`Refusal::TooNew`] for genuine messages alone.
    fn check_head(&self, request: &Request<'_>, now: UnixSeconds) -> Result<(), Refusal>;

    /// Returns the names of the headers that its settings choose for the signature and its time.
    /// They are of no use once a message is verified, and whoever reads them can send it again.
    /// Default: none, because the scheme's headers are fixed.
    fn chosen_headers(&self) -> Vec<&str> {
        Vec::new()
    }

    /// Returns the one of [`Self::chosen_headers`] that holds the time, which is signed. Default:
    /// none.
    fn chosen_time_header(&self) -> Option<&str> {
        None
    }

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
    /// `sns`: it has no shared secret but a certificate to fetch, so its [`crate::sns::Verifier`]
    /// does not implement [`Verify`].
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

/// The text is not the name of a scheme.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a known webhook scheme; one of standard-webhooks, stripe, github, shopify, slack, twilio, hmac, sns"
)]
pub struct SchemeUnknown(String);

impl FromStr for Scheme {
    type Err = SchemeUnknown;

    fn from_str(name: &str) -> Result<Self, SchemeUnknown> {
        Self::ALL.into_iter().find(|scheme| scheme.as_str() == name).ok_or_else(|| SchemeUnknown(name.to_owned()))
    }
}
