//! One sender: how its messages are verified, understood and bounded.

use std::time::Duration;

use postbox_core::{BoxError, LogName, NewEvent, Rate, Result, SourceName};
use postbox_webhook::{Scheme, Verify};

use crate::convert::{Convert, Message};
use crate::headers::Dropped;
use crate::mapping::Mapping;
use crate::sns::Sns;

/// Bounds on what one source may cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceLimits {
    /// Largest body. Default 1 MiB; at most 16 MiB, because it becomes a payload.
    pub body_bytes: usize,
    /// All bodies that are being received at one time, together. Default 12 MiB, and at least three
    /// largest bodies. What has not arrived does not count, so slow senders of little hold up
    /// nobody. When it is full, the body that began first and is not verified makes room (408).
    pub buffered_bytes: usize,
    /// Longest time for a body to arrive. Default 10 s.
    pub body_timeout: Duration,
    /// Most verified messages on their way into the store at once. Default 256.
    pub concurrency: usize,
    /// Most verified messages in a time. Default: no limit. What is not verified does not count, so
    /// nobody else can use it up.
    pub rate: Option<Rate>,
    /// Longest wait for the store. Default 10 s; after that the sender comes again.
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

/// One sender: how its messages are verified, understood and bounded.
#[derive(Debug)]
pub struct WebhookSource {
    /// Its name, which is its path: `/in/NAME`.
    pub name: SourceName,
    /// The log it stores into.
    pub log: LogName,
    pub(crate) check: Check,
    /// Where id, topic, key and tenant come from.
    pub mapping: Mapping,
    /// Bounds.
    pub limits: SourceLimits,
    /// CloudEvents: who gets consent by the `OPTIONS` handshake, by the names they send in
    /// `WebHook-Request-Origin`. Default: nobody. Consent is not authentication: what then comes is
    /// verified as everything else.
    pub allowed_origins: Vec<String>,
    pub(crate) convert: Option<Convert>,
    pub(crate) dropped: Dropped,
}

/// How a message is verified.
#[derive(Debug)]
pub(crate) enum Check {
    /// By keys that both sides know.
    Keys(Box<dyn Verify>),
    /// By a certificate that AWS has.
    Sns(Box<Sns>),
}

impl Check {
    pub(crate) fn scheme(&self) -> Scheme {
        match self {
            Self::Keys(verifier) => verifier.scheme(),
            Self::Sns(_) => Scheme::Sns,
        }
    }
}

impl From<Sns> for Check {
    fn from(sns: Sns) -> Self {
        Self::Sns(Box::new(sns))
    }
}

impl WebhookSource {
    /// A source with the scheme's usual mapping and the default limits.
    pub fn new(name: SourceName, log: LogName, verifier: Box<dyn Verify>) -> Self {
        Self::checked_by(name, log, Check::Keys(verifier))
    }

    /// A source for AWS SNS, which has no shared secret: the ingress fetches the certificates that
    /// messages name, from hosts of AWS only.
    ///
    /// With `confirm`, a genuine request to confirm a subscription to one of the verifier's topics
    /// is answered by visiting its URL; without, it is logged, and you confirm in AWS.
    pub fn sns(
        name: SourceName,
        log: LogName,
        verifier: postbox_webhook::sns::Verifier,
        confirm: bool,
    ) -> Result<Self> {
        Ok(Self::checked_by(name, log, Sns::new(verifier, confirm)?.into()))
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

    /// Stores events of your own making instead of the messages as they came: `convert` gets each
    /// verified message once per request, and gives the event to store, or `None` if there is
    /// nothing to store. The id by which it is stored once is the message's, from the mapping; so
    /// is the tenant, if the mapping has one. If it has none and your function sets a tenant, take
    /// it from the body: a message is known by source, tenant and id, so one captured message would
    /// be stored again under every tenant that an unsigned header says.
    ///
    /// An error is answered with 422 and logged; a panic with 500, and the sender comes again.
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
