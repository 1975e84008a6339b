//! One pulled source at work in this service, and the task that keeps it at work.

use std::sync::Arc;

use postbox_core::{Clock, Error, ErrorKind, SourceName};
use postbox_engine::{Outage, Receiver, ReceiverSnapshot, Storm, supervise};
use postbox_ingress::Count;
use tokio_util::sync::CancellationToken;
use tracing::error;

use crate::fault::Fault;

/// A receiver and its source's name.
pub(crate) struct SupervisedReceiver {
    pub(crate) name: SourceName,
    receiver: Receiver,
}

impl SupervisedReceiver {
    pub(crate) fn new(name: SourceName, receiver: Receiver) -> Arc<Self> {
        Arc::new(Self { name, receiver })
    }

    pub(crate) fn snapshot(&self) -> ReceiverSnapshot {
        self.receiver.metrics().snapshot()
    }

    /// What its sender repeats, if that is most of what it sends.
    pub(crate) fn storm(&self) -> Option<Storm> {
        self.receiver.storm()
    }

    /// Why nothing can be had from its source, if that is so.
    pub(crate) fn fault(&self) -> Option<Fault> {
        let Outage { since, code } = self.receiver.outage()?;
        let what = format!("it fails since {since:.0}, nothing is received; last reason: {code}");
        Some(Fault { store: None, subscription: None, source: Some(self.name.clone()), lane: None, code, what })
    }

    /// What became of the messages, by the words that webhooks are counted by.
    pub(crate) fn counts(&self) -> impl Iterator<Item = Count> + use<'_> {
        let counted = self.snapshot();
        let counts = [
            ("accepted", counted.accepted),
            ("duplicate", counted.duplicates),
            ("conflict", counted.conflicts),
            ("ignored", counted.ignored),
            ("rejected", counted.rejected),
            ("returned", counted.returned),
        ];
        counts.into_iter().map(|(code, count)| Count { source: Some(self.name.clone()), code, count })
    }

    /// Runs until `stop`; starts again when the source ends or after a panic. Dropping this ends
    /// the receiver; what is not settled comes again.
    pub(crate) async fn supervise(self: Arc<Self>, clock: Arc<dyn Clock>, stop: CancellationToken) {
        let run = || {
            let (this, stop) = (Arc::clone(&self), stop.clone());
            async move {
                this.receiver.run(stop.clone()).await;
                if stop.is_cancelled() {
                    return Ok(());
                }
                let text = "the source ended by itself; it is started again";
                Err(Error::new(ErrorKind::Unavailable, "receive", "source_ended", text))
            }
        };
        let ended = |ended| {
            if let Some((error, Some(wait))) = ended {
                error!(source = %self.name, %error, restart_in = ?wait, "receiver failed");
            }
        };
        supervise("receiver", run, ended, &[], clock.as_ref(), &stop).await;
    }
}
