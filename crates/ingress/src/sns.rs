//! AWS SNS: fetches the certificate that a message names, and confirms subscriptions.
//!
//! Strangers can cause both kinds of request, so they go only to addresses that
//! [`postbox_webhook::sns`] accepts: hosts of AWS. They use the guarded client of the sinks: public
//! addresses only, checked before each connection, no redirects, no proxy, bounded in size and
//! time.

mod certificates;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::future::BoxFuture;
use postbox_core::{Clock, Result};
use postbox_http::{Fetched, PublicClient};
use postbox_webhook::sns::{Confirmation, Message, Verifier};
use postbox_webhook::{UnixSeconds, Verified};
use tracing::{info, warn};

use crate::answer::Answer;
use certificates::{ASKERS_MAX, Certificates, FETCHES_MAX};

/// Time limit for a certificate, queueing included, and for a confirmation.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);

/// Performs the requests: the guarded client, or a test double.
pub(crate) trait Fetch: Send + Sync + 'static {
    /// GETs `url`. Never logs it, because it may contain a token.
    fn get(&self, url: String) -> BoxFuture<'_, Fetched>;
}

impl Fetch for PublicClient {
    fn get(&self, url: String) -> BoxFuture<'_, Fetched> {
        Box::pin(self.get(url))
    }
}

/// The certificates of AWS, and the client that fetches them: one for all SNS sources of a process.
/// Clones share them. Its limits on requests and on waiting messages hold for all its sources
/// together: strangers can send to all of them.
#[derive(Clone)]
pub struct SnsClient {
    certificates: Arc<OnceLock<Arc<Certificates>>>,
    askers_max: usize,
}

impl SnsClient {
    /// For a server with so many connections. Messages that wait for certificates take at most half
    /// of them, because strangers can send such messages.
    pub fn for_connections(connections: usize) -> Self {
        // Even with fewer than four connections, one message must be able to wait.
        Self { certificates: Arc::default(), askers_max: (connections / 4).clamp(1, ASKERS_MAX) }
    }

    /// Made for the first source: a process without one needs no trusted certificates.
    fn certificates(&self) -> Result<Arc<Certificates>> {
        if let Some(certificates) = self.certificates.get() {
            return Ok(Arc::clone(certificates));
        }
        let certificates = Certificates::new(Arc::new(PublicClient::new(FETCHES_MAX)?), self.askers_max);
        Ok(Arc::clone(self.certificates.get_or_init(|| certificates)))
    }
}

impl Default for SnsClient {
    /// For a server with 512 connections or more.
    fn default() -> Self {
        Self::for_connections(4 * ASKERS_MAX)
    }
}

impl fmt::Debug for SnsClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SnsClient").finish_non_exhaustive()
    }
}

/// The SNS state of one source.
pub(crate) struct Sns {
    verifier: Verifier,
    confirm: bool,
    certificates: Arc<Certificates>,
}

impl Sns {
    pub(crate) fn new(verifier: Verifier, confirm: bool, client: &SnsClient) -> Result<Self> {
        Ok(Self { verifier, confirm, certificates: client.certificates()? })
    }

    /// Returns a verified notification, or the answer for anything else.
    pub(crate) async fn check(&self, body: &[u8], clock: &Arc<dyn Clock>) -> std::result::Result<Verified, Answer> {
        let unverified = self.verifier.read(body).map_err(Answer::Refused)?;
        let url = unverified.certificate_url().clone();
        let certificate = self.certificates.get(&url, clock).await?;
        let now = UnixSeconds(clock.now().as_second());
        let message = unverified.verify(&certificate, now).map_err(Answer::Refused)?;
        self.certificates.mark_proven(&url);
        match &message {
            Message::Notification(_) => Ok(message.verified()),
            Message::SubscriptionConfirmation(asked) => Err(self.confirm(asked, &**clock).await),
            Message::UnsubscribeConfirmation(removed) => {
                warn!(topic = %removed.topic_arn, "SNS subscription removed");
                Err(Answer::Unsubscribed)
            }
        }
    }

    /// Calls the confirmation URL, if the configuration allows it.
    async fn confirm(&self, asked: &Confirmation, clock: &dyn Clock) -> Answer {
        let topic = &asked.topic_arn;
        if !self.confirm {
            warn!(%topic, cure = "set confirm = true, or confirm it in AWS", "SNS subscription unconfirmed");
            return Answer::Unconfirmed;
        }
        let fetched = tokio::select! {
            fetched = self.certificates.fetch.get(asked.subscribe_url.as_str().to_owned()) => fetched,
            () = clock.sleep(FETCH_TIMEOUT) => Fetched::Failed("no answer in time".into()),
        };
        match fetched {
            Fetched::Body(_) => {
                info!(%topic, "SNS subscription confirmed");
                Answer::Confirmed
            }
            Fetched::Refused(why) | Fetched::Failed(why) => {
                warn!(%topic, why, "SNS confirmation failed");
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
