//! One sender: how its messages are verified, mapped and bounded.

use std::time::Duration;

use postbox_core::{BoxError, LogName, NewEvent, Rate, Result, SourceName};
use postbox_webhook::{Scheme, Verify};

use crate::convert::{Convert, Message};
use crate::headers::Dropped;
use crate::mapping::Mapping;
use crate::sns::{Sns, SnsClient};

/// Limits on what one source may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceLimits {
    /// Largest body. Default 1 MiB; at most 16 MiB, the limit of a payload.
    pub body_bytes: usize,
    /// Memory for all bodies that are being received. Default 12 MiB, and at least three bodies of
    /// the largest size. Only bytes that arrived count, so slow senders block nobody. When it is
    /// full, the oldest unverified body is dropped (503).
    pub buffered_bytes: usize,
    /// Time limit for a body. Default 10 s.
    pub body_timeout: Duration,
    /// Most verified messages that are being stored at once. Default 256.
    pub concurrency: usize,
    /// Rate limit of verified messages. Default: none. Neither unverified messages nor repetitions
    /// count, so a stranger cannot use it up, not even one who captured a message. Messages that
    /// arrive together may exceed it, by at most [`Self::concurrency`]; later ones wait longer.
    pub rate: Option<Rate>,
    /// Longest wait for the store. Default 10 s; then the sender is asked to repeat.
    pub store_timeout: Duration,
}

impl Default for SourceLimits {
    fn default() -> Self {
        Self {
            body_bytes: 1024 * 1024,
            buffered_bytes: 12 * 1024 * 1024,
            body_timeout: Duration::from_secs(10),
            concurrency: 256,
            rate: None,
            store_timeout: Duration::from_secs(10),
        }
    }
}

/// One sender: how its messages are verified, mapped and bounded.
#[derive(Debug)]
pub struct WebhookSource {
    /// Its name, which is its path: `/in/NAME`.
    pub name: SourceName,
    /// The log that it writes to.
    pub log: LogName,
    pub(crate) check: Check,
    /// Where id, topic, key and tenant are taken from.
    pub mapping: Mapping,
    /// Its limits.
    pub limits: SourceLimits,
    /// CloudEvents: the origins that get consent in the `OPTIONS` handshake, by their
    /// `WebHook-Request-Origin`. Default: none. Consent is not authentication: their messages are
    /// verified like any other.
    pub allowed_origins: Vec<String>,
    pub(crate) convert: Option<Convert>,
    pub(crate) dropped: Dropped,
}

/// How a message is verified.
#[derive(Debug)]
pub(crate) enum Check {
    /// With secrets that both sides have.
    Keys(Box<dyn Verify>),
    /// With a certificate of AWS.
    Sns(Box<Sns>),
}

impl Check {
    pub(crate) fn scheme(&self) -> Scheme {
        match self {
            Self::Keys(verifier) => verifier.scheme(),
            Self::Sns(_) => Scheme::Sns,
        }
    }

    /// The headers of the signature, if the configuration names them.
    pub(crate) fn chosen_headers(&self) -> Vec<&str> {
        match self {
            Self::Keys(verifier) => verifier.chosen_headers(),
            Self::Sns(_) => Vec::new(),
        }
    }

    /// The one of them that holds the signed time.
    pub(crate) fn chosen_time_header(&self) -> Option<&str> {
        match self {
            Self::Keys(verifier) => verifier.chosen_time_header(),
            Self::Sns(_) => None,
        }
    }
}

impl From<Sns> for Check {
    fn from(sns: Sns) -> Self {
        Self::Sns(Box::new(sns))
    }
}

impl WebhookSource {
    /// Creates a source with the scheme's default mapping and the default limits.
    pub fn new(name: SourceName, log: LogName, verifier: Box<dyn Verify>) -> Self {
        Self::checked_by(name, log, Check::Keys(verifier))
    }

    /// Creates a source for AWS SNS. It has no shared secret: the ingress fetches the certificates
    /// that messages name, from hosts of AWS only.
    ///
    /// With `confirm`, the ingress confirms a verified request to subscribe to one of the
    /// verifier's topics by visiting its URL. Without it, the request is logged, and you confirm in
    /// AWS.
    ///
    /// All SNS sources of a process share one `client`.
    pub fn sns(
        name: SourceName,
        log: LogName,
        verifier: postbox_webhook::sns::Verifier,
        confirm: bool,
        client: &SnsClient,
    ) -> Result<Self> {
        Ok(Self::checked_by(name, log, Sns::new(verifier, confirm, client)?.into()))
    }

    pub(crate) fn checked_by(name: SourceName, log: LogName, check: Check) -> Self {
        let mapping = Mapping::usual(check.scheme(), &name);
        Self {
            name,
            log,
            check,
            mapping,
            limits: SourceLimits::default(),
            allowed_origins: Vec::new(),
            convert: None,
            dropped: Dropped::default(),
        }
    }

    /// Stores events of your own making instead of the messages as they arrived. `convert` is
    /// called once per verified request and returns the event to store, or `None` to store nothing.
    /// The id under which it is stored once is the message's id from the mapping, and so is the
    /// tenant if the mapping has one. If your function sets the tenant, take it from the body and
    /// not from a header, which is unsigned: a message is identified by source, tenant and id, so
    /// one captured message could be stored again under any number of tenants.
    ///
    /// An error is answered with 422 and logged. A panic is answered with 500, and the sender
    /// repeats.
    ///
    /// ```
    /// # use postbox_core::{LogName, NewEvent, SourceName};
    /// # use postbox_ingress::WebhookSource;
    /// # use postbox_webhook::{Scheme, Settings, verifier};
    /// # fn example(secret: &str) -> Result<WebhookSource, Box<dyn std::error::Error>> {
    /// # let stripe = verifier(Scheme::Stripe, &[secret], &Settings::default())?;
    /// let source = WebhookSource::new(SourceName::new("stripe")?, LogName::inbox(), stripe).convert(|message| {
    ///     let body: serde_json::Value = serde_json::from_slice(message.body)?;
    ///     let Some(invoice) = body["data"]["object"]["id"].as_str().filter(|_| body["type"] == "invoice.paid") else {
    ///         return Ok(None);
    ///     };
    ///     Ok(Some(NewEvent::json("billing.paid", message.body.clone()).key(invoice)))
    /// });
    /// # Ok(source) }
    /// ```
    #[must_use]
    pub fn convert<F>(mut self, convert: F) -> Self
    where
        F: Fn(&Message<'_>) -> std::result::Result<Option<NewEvent>, BoxError> + Send + Sync + 'static,
    {
        self.convert = Some(Convert::new(convert));
        self
    }
}
