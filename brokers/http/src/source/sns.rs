//! AWS SNS: the certificate a message names, fetched once; and the handshake of a subscription.
//!
//! Both are requests that a stranger can cause, to addresses that [`postbox_webhook::sns`] lets through: hosts of AWS itself, and nothing else. They are
//! made with the guard of the sinks: public addresses only, checked before each connection, no redirect, no proxy, bounded in size and time.

mod fetch;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postbox_core::{Bucket, Clock, Rate, Result};
use postbox_webhook::sns::{Certificate, CertificateUrl, Confirmation, Message, Verifier};
use postbox_webhook::{Refusal, UnixSeconds, Verified};
use tracing::{info, warn};

pub(super) use fetch::{AwsClient, Fetch, Fetched};

use super::answer::Answer;

/// Most certificates kept. AWS uses one per region and changes it about once a year.
const CERTIFICATES_MAX: usize = 16;
/// Most requests to AWS that strangers can cause: anybody may name a certificate that is not there.
const FETCHES_PER_SECOND: u32 = 1;
/// What of them may come at once: several regions after a start.
const FETCH_BURST: Duration = Duration::from_secs(8);
/// Longest wait for a certificate, and for those that were asked for before it; or for a confirmation.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);

/// What one source needs to take messages of SNS.
pub(super) struct Sns {
    verifier: Verifier,
    confirm: bool,
    fetch: Arc<dyn Fetch>,
    known: Mutex<BTreeMap<String, Certificate>>,
    /// Held while one is fetched, so that a crowd costs one request.
    fetching: tokio::sync::Mutex<Bucket>,
}

impl Sns {
    pub(super) fn new(verifier: Verifier, confirm: bool) -> Result<Self> {
        Ok(Self::with_fetch(verifier, confirm, Arc::new(AwsClient::new()?)))
    }

    fn with_fetch(verifier: Verifier, confirm: bool, fetch: Arc<dyn Fetch>) -> Self {
        let rate = Rate::per_second(FETCHES_PER_SECOND).expect("one a second is a rate");
        let fetching = tokio::sync::Mutex::new(Bucket::new(rate, FETCH_BURST));
        Self { verifier, confirm, fetch, known: Mutex::default(), fetching }
    }

    /// A notification that is genuine, or the answer to anything else.
    pub(super) async fn check(&self, body: &[u8], clock: &dyn Clock) -> std::result::Result<Verified, Answer> {
        let unverified = self.verifier.read(body).map_err(Answer::Refused)?;
        let certificate = tokio::select! {
            certificate = self.certificate(unverified.certificate_url(), clock) => certificate?,
            () = clock.sleep(FETCH_TIMEOUT) => return Err(Answer::CertificateUnavailable),
        };
        let now = UnixSeconds(clock.now().as_second());
        let message = unverified.verify(&certificate, now).map_err(Answer::Refused)?;
        match &message {
            Message::Notification(_) => Ok(message.verified()),
            Message::SubscriptionConfirmation(asked) => Err(self.confirm(asked, clock).await),
            Message::UnsubscribeConfirmation(told) => {
                warn!(topic = %told.topic_arn, "SNS says that this endpoint was unsubscribed");
                Err(Answer::Unsubscribed)
            }
        }
    }

    fn known(&self, url: &CertificateUrl) -> Option<Certificate> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(url.as_str()).cloned()
    }

    async fn certificate(&self, url: &CertificateUrl, clock: &dyn Clock) -> std::result::Result<Certificate, Answer> {
        if let Some(certificate) = self.known(url) {
            return Ok(certificate);
        }
        let mut fetching = self.fetching.lock().await;
        // Whoever held it may have fetched this one.
        if let Some(certificate) = self.known(url) {
            return Ok(certificate);
        }
        fetching.take(clock.monotonic()).map_err(|_| Answer::CertificateUnavailable)?;
        let pem = match self.fetch.get(url.as_str().to_owned()).await {
            Fetched::Body(pem) => pem,
            // AWS has no such certificate: the message is made up.
            Fetched::Refused(why) => {
                warn!(%url, why, "an SNS message names a certificate that AWS does not have; refused");
                return Err(Answer::Refused(Refusal::CertificateUrlRefused));
            }
            Fetched::Failed(why) => {
                warn!(%url, why, "the certificate of an SNS message could not be fetched; the sender was told to come again");
                return Err(Answer::CertificateUnavailable);
            }
        };
        let certificate = Certificate::from_pem(url, &pem).map_err(|error| {
            warn!(%url, "what an SNS message names as its certificate is none: {error}");
            Answer::Refused(Refusal::CertificateUrlRefused)
        })?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= CERTIFICATES_MAX {
            // The one that ends first; it is fetched again if it is still in use.
            let first = known.iter().min_by_key(|(_, certificate)| certificate.validity().1.0);
            if let Some(url) = first.map(|(url, _)| url.clone()) {
                known.remove(&url);
            }
        }
        known.insert(url.as_str().to_owned(), certificate.clone());
        Ok(certificate)
    }

    /// Visits the URL that confirms, if the configuration says so.
    async fn confirm(&self, asked: &Confirmation, clock: &dyn Clock) -> Answer {
        let topic = &asked.topic_arn;
        if !self.confirm {
            warn!(%topic, "SNS asks to confirm a subscription; set confirm = true, or confirm it in AWS");
            return Answer::Unconfirmed;
        }
        let fetched = tokio::select! {
            fetched = self.fetch.get(asked.subscribe_url.as_str().to_owned()) => fetched,
            () = clock.sleep(FETCH_TIMEOUT) => Fetched::Failed("no answer in time".into()),
        };
        match fetched {
            Fetched::Body(_) => {
                info!(%topic, "a subscription to SNS is confirmed");
                Answer::Confirmed
            }
            Fetched::Refused(why) | Fetched::Failed(why) => {
                warn!(%topic, why, "a subscription to SNS could not be confirmed; SNS asks again");
                Answer::ConfirmationFailed
            }
        }
    }
}

impl fmt::Debug for Sns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sns").field("verifier", &self.verifier).field("confirm", &self.confirm).finish_non_exhaustive()
    }
}
