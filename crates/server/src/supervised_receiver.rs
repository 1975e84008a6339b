//! The receiver of one pulled source, and the task that keeps it running.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use postbox_config::{SourceConfig, SourceContext};
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
    /// Builds its source.
    config: Arc<dyn SourceConfig>,
}

impl SupervisedReceiver {
    pub(crate) fn new(name: SourceName, receiver: Receiver, config: Arc<dyn SourceConfig>) -> Arc<Self> {
        Arc::new(Self { name, receiver, config })
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

    /// Runs until `stop`. Restarts when the source ends and after a panic, each time with a new
    /// source: the former one waits for what it has handed out. Dropping this future ends the
    /// receiver.
    pub(crate) async fn supervise(self: Arc<Self>, clock: Arc<dyn Clock>, stop: CancellationToken) {
        let has_run = AtomicBool::new(false);
        let run = || {
            let (this, stop) = (Arc::clone(&self), stop.clone());
            let context = SourceContext { name: self.name.clone(), clock: Arc::clone(&clock) };
            let again = has_run.swap(true, Ordering::Relaxed);
            async move {
                if again {
                    let renewing = this.receiver.renew(this.config.build(&context));
                    let Some(renewed) = stop.run_until_cancelled(renewing).await else { return Ok(()) };
                    renewed?;
                }
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

#[cfg(test)]
mod tests {
    use std::fmt;
    use std::time::Duration;

    use async_trait::async_trait;
    use postbox_core::{AckToken, LogName, RawMessage, Result, Source, SourceCapabilities, SourceMessage};
    use postbox_engine::TokioClock;
    use postbox_memory::{MemorySource, MemoryStore};

    use super::*;

    /// A queue whose first acknowledgement panics.
    #[derive(Clone)]
    struct Broker {
        queue: Arc<MemorySource>,
        panicked: Arc<AtomicBool>,
        log: LogName,
    }

    impl fmt::Debug for Broker {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Broker")
        }
    }

    #[async_trait]
    impl SourceConfig for Broker {
        fn log(&self) -> &LogName {
            &self.log
        }

        async fn build(&self, _: &SourceContext) -> Result<Arc<dyn Source>> {
            self.queue.reopen();
            Ok(Arc::new(self.clone()))
        }
    }

    #[async_trait]
    impl Source for Broker {
        fn capabilities(&self) -> SourceCapabilities {
            self.queue.capabilities()
        }

        async fn next(&self, max: usize) -> Result<Vec<SourceMessage>> {
            self.queue.next(max).await
        }

        async fn ack(&self, tokens: &[AckToken]) -> Result<()> {
            assert!(self.panicked.swap(true, Ordering::Relaxed), "as asked");
            self.queue.ack(tokens).await
        }

        async fn nak(&self, tokens: &[AckToken], delay: Duration) -> Result<()> {
            self.queue.nak(tokens, delay).await
        }

        async fn reject(&self, tokens: &[AckToken]) -> Result<()> {
            self.queue.reject(tokens).await
        }

        async fn close(&self) {
            self.queue.close().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_panic_left_unsettled_comes_again_from_a_new_source() {
        let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
        let queue = Arc::new(MemorySource::new(8, Arc::clone(&clock)));
        let broker = Broker { queue: Arc::clone(&queue), panicked: Arc::default(), log: LogName::inbox() };
        queue.publish(RawMessage {
            id: Some("1".into()),
            digest: [1; 32],
            topic: "t".into(),
            key: None,
            headers: Default::default(),
            content_type: "text/plain".into(),
            payload: "a".into(),
        });
        let (store, name) = (MemoryStore::new(Arc::clone(&clock)), "queue".parse::<SourceName>().expect("a name"));
        let receiver = Receiver::builder(Arc::new(store), name.clone(), LogName::inbox(), Arc::clone(&clock))
            .pull(Arc::new(broker.clone()))
            .build()
            .expect("good settings");
        let (supervised, stop) = (SupervisedReceiver::new(name, receiver, Arc::new(broker)), CancellationToken::new());
        let watch = async {
            while queue.acked().is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            stop.cancel();
        };
        let run = async { tokio::join!(supervised.supervise(clock, stop.clone()), watch) };
        tokio::time::timeout(Duration::from_secs(60), run).await.expect("in time");
    }
}
