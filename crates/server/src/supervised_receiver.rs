//! The receiver of one pulled source, and the task that keeps it running.

use std::sync::Arc;

use postbox_core::{Clock, Error, ErrorKind, Outage, SourceName};
use postbox_engine::supervise;
use postbox_ingress::Count;
use postbox_receiver::{Receiver, ReceiverSnapshot, Storm};
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

    /// Returns the replay storm of its source, if most of its messages are repeats.
    pub(crate) fn storm(&self) -> Option<Storm> {
        self.receiver.storm()
    }

    /// Returns why its source cannot be read, if that is so.
    pub(crate) fn fault(&self) -> Option<Fault> {
        let Outage { since, code } = self.receiver.outage()?;
        let what = format!("it has failed since {since:.0}, nothing is received; last reason: {code}");
        Some(Fault { source: Some(self.name.clone()), code, what, ..Fault::default() })
    }

    /// Returns since when and why its messages cannot be stored, if that is so.
    pub(crate) fn store_outage(&self) -> Option<Outage> {
        self.receiver.store_outage()
    }

    /// Counts what became of its messages, with the codes that webhook answers have.
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

    /// Runs until `stop`. Restarts when the source ends and after a panic. Dropping this future
    /// ends the receiver; what is not settled is delivered again.
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
