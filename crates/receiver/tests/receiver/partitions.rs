//! A source whose messages are in order within a partition, and a store that refuses one of them.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::FutureExt as _;
use futures::future::select_all;
use postbox_core::{
    AckToken, Error, ErrorKind, Inbound, LogName, Receive, Received, Result, Source, SourceCapabilities, SourceMessage,
};
use postbox_engine::TokioClock;
use postbox_memory::MemorySource;
use postbox_testkit::inbox::Inbox;
use postbox_testkit::warnings::Warnings;

use crate::source::{message, receive_while};

/// Two partitions, each a queue in order. The first one comes first, as in Kafka.
struct Partitions([MemorySource; 2]);

impl Partitions {
    fn new() -> Self {
        Self([(); 2].map(|()| MemorySource::new(64, Arc::new(TokioClock::new()))))
    }

    /// Returns those of the tokens that are of this partition, as it knows them.
    fn of(tokens: &[AckToken], partition: u64) -> Vec<AckToken> {
        tokens.iter().filter(|token| token.0 % 2 == partition).map(|token| AckToken(token.0 / 2)).collect()
    }
}

#[async_trait]
impl Source for Partitions {
    fn capabilities(&self) -> SourceCapabilities {
        self.0[0].capabilities()
    }

    /// What both have comes together.
    async fn next(&self, max: usize) -> Result<Vec<SourceMessage>> {
        let (given, which, mut others) = select_all(self.0.iter().map(|queue| queue.next(max))).await;
        let beside = others.remove(0).now_or_never().unwrap_or_else(|| Ok(Vec::new()));
        let mut messages = Vec::new();
        for (partition, given) in [(which as u64, given), (1 - which as u64, beside)] {
            let token = |token: AckToken| AckToken(2 * token.0 + partition);
            messages.extend(given?.into_iter().map(|it| SourceMessage { token: token(it.token), ..it }));
        }
        Ok(messages)
    }

    async fn ack(&self, tokens: &[AckToken]) -> Result<()> {
        self.0[0].ack(&Self::of(tokens, 0)).await?;
        self.0[1].ack(&Self::of(tokens, 1)).await
    }

    async fn nak(&self, tokens: &[AckToken], delay: Duration) -> Result<()> {
        self.0[0].nak(&Self::of(tokens, 0), delay).await?;
        self.0[1].nak(&Self::of(tokens, 1), delay).await
    }

    async fn reject(&self, tokens: &[AckToken]) -> Result<()> {
        self.0[0].reject(&Self::of(tokens, 0)).await?;
        self.0[1].reject(&Self::of(tokens, 1)).await
    }

    async fn close(&self) {
        self.0[0].close().await;
        self.0[1].close().await;
    }
}

/// A store with a trigger that refuses the message `bad`.
#[derive(Default)]
struct Trigger {
    inbox: Inbox,
}

#[async_trait]
impl Receive for Trigger {
    async fn receive_many(&self, log: &LogName, inbound: &[Inbound]) -> Result<Vec<Received>> {
        if inbound.iter().any(|message| message.message_id == "bad") {
            return Err(Error::new(ErrorKind::Internal, "receive", "store_error", "a trigger refuses it"));
        }
        self.inbox.receive_many(log, inbound).await
    }

    async fn forget(&self, _older_than: Duration) -> Result<u64> {
        Ok(0)
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_message_holds_up_its_partition_alone_and_is_the_only_one_that_is_named() {
    let (source, store) = (Arc::new(Partitions::new()), Arc::new(Trigger::default()));
    let [first, second] = &source.0;
    first.publish(message("bad", "a"));
    first.publish(message("behind", "a"));
    second.publish(message("0", "a"));
    let watch = async {
        for n in 1..=20 {
            tokio::time::sleep(Duration::from_secs(5)).await;
            let last = store.inbox.all().last().map(|stored| stored.message_id.clone());
            assert_eq!(last, Some((n - 1).to_string()));
            second.publish(message(&n.to_string(), "a"));
        }
        // Nothing else is tried for a while.
        tokio::time::sleep(Duration::from_secs(100)).await;
    };
    let (warnings, guard) = Warnings::hear();
    let receiver = receive_while(store.clone(), source.clone(), watch).await;
    drop(guard);
    assert_eq!(store.inbox.all().len(), 21);
    assert_eq!(first.remaining(), 2, "in order, what is behind it waits");
    let failed: Vec<String> = warnings.all().into_iter().filter(|line| line.contains("store failed")).collect();
    assert!(failed.len() > 2 && failed.iter().all(|line| line.contains("message_id=\"bad\"")), "{failed:?}");
    assert_eq!(receiver.store_outage(), None, "one message says nothing about the store");
}
