//! From a broker's messages to an inbox: shared by tests of sources.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use postbox_config::{SourceConfig, SourceContext, Table};
use postbox_core::{Delivery, ErrorKind, Key, LogName, NewEvent, RawMessage, Source, SourceMessage, Unreadable};
use postbox_engine::TokioClock;
use postbox_receiver::Receiver;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::inbox::Inbox;
use crate::sending::{PATIENCE, deliveries, table};

/// How often a condition is checked.
const LOOK: Duration = Duration::from_millis(5);

/// Returns the context for building the source `orders`.
pub fn source_context() -> SourceContext {
    SourceContext { name: "orders".parse().expect("a name"), clock: Arc::new(TokioClock::new()) }
}

/// Builds a source with these keys.
pub async fn source<T: Table + SourceConfig>(keys: &str) -> Arc<dyn Source> {
    table::<T>(keys).build(&source_context()).await.expect("a source")
}

/// Returns an event with every field set, and one with as many headers as allowed.
pub fn events() -> Vec<Delivery> {
    let headers = (0..64).map(|n| (format!("h{n}"), "v".to_owned())).collect();
    let paid = NewEvent::new("order.paid", &b"\xff\0"[..], "text/plain").key("Zoë 1");
    deliveries([
        paid.kind("fact").aggregate("order").version(7),
        NewEvent { headers, ..NewEvent::json("order.sent", "{}").tenant("acme") },
    ])
}

/// Takes `count` messages. Calls may fail for a while, because a connection was lost.
pub async fn take(source: &(impl Source + ?Sized), count: usize) -> Vec<SourceMessage> {
    let taken = async {
        let mut taken = Vec::new();
        while taken.len() < count {
            match source.next(count - taken.len()).await {
                Ok(some) => taken.extend(some),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
            }
        }
        taken
    };
    timeout(PATIENCE, taken).await.expect("they come in time")
}

/// Acknowledges these messages.
pub async fn ack(source: &(impl Source + ?Sized), taken: &[SourceMessage]) {
    let tokens: Vec<_> = taken.iter().map(|it| it.token).collect();
    source.ack(&tokens).await.expect("acknowledged");
}

/// A running receiver between a source and an inbox.
pub struct Receiving {
    /// The inbox.
    pub inbox: Arc<Inbox>,
    /// The receiver.
    pub receiver: Arc<Receiver>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Receiving {
    /// Starts a receiver with a source of this configuration.
    pub async fn start(table: impl SourceConfig) -> Self {
        let (inbox, context) = (Arc::new(Inbox::default()), source_context());
        let source = table.build(&context).await.expect("a source");
        let clock = Arc::new(TokioClock::new());
        let receiver = Receiver::builder(inbox.clone(), context.name.clone(), LogName::inbox(), clock)
            .pull(source)
            .decode(move |message: &RawMessage| table.decode(&context.name, message))
            .build();
        let (receiver, stop) = (Arc::new(receiver.expect("good settings")), CancellationToken::new());
        let task = tokio::spawn({
            let (receiver, stop) = (receiver.clone(), stop.clone());
            async move { receiver.run(stop).await }
        });
        Self { inbox, receiver, stop, task }
    }

    /// Waits until the condition holds.
    pub async fn until(&self, condition: impl Fn(&Self) -> bool) {
        let met = async {
            while !condition(self) {
                tokio::time::sleep(LOOK).await;
            }
        };
        timeout(PATIENCE, met).await.expect("it happens in time");
    }

    /// Returns the stored payloads.
    pub fn bodies(&self) -> BTreeSet<Vec<u8>> {
        self.inbox.all().iter().map(|it| it.event.payload.to_vec()).collect()
    }

    /// Asserts that each of [`events`] is stored as it was sent.
    pub fn has(&self, sent: &[Delivery]) {
        let stored = self.inbox.all();
        for delivery in sent {
            let (sent, id) = (&delivery.event, delivery.dedupe_id());
            let stored = &stored.iter().find(|it| it.message_id == id).expect("stored by its id").event;
            assert_eq!(
                (stored.topic.as_str(), stored.key.as_deref()),
                (sent.topic.as_str(), sent.key.as_ref().map(Key::as_str))
            );
            assert_eq!((&stored.payload, &stored.content_type), (&sent.payload, &sent.content_type));
            assert_eq!((&stored.kind, &stored.aggregate, stored.version), (&sent.kind, &sent.aggregate, sent.version));
            assert_eq!(stored.occurred_at, Some(sent.occurred_at));
            assert!(sent.headers.iter().all(|(name, value)| stored.headers.get(name) == Some(value)), "{stored:?}");
            assert_eq!(stored.tenant, None, "whoever may publish could name any");
        }
    }

    /// Calls `publish` with the id and the payload of messages, and waits until they are settled:
    /// one comes twice, one has the id of another, and the one with the payload `poison` must be no
    /// event.
    pub async fn settles(&self, mut publish: impl AsyncFnMut(&str, &str)) {
        let accepted = self.inbox.all().len() as u64 + 3;
        for (id, body) in [("1", "one"), ("1", "one"), ("1", "another"), ("2", "poison"), ("3", "three")] {
            publish(id, body).await;
        }
        let counted = || self.receiver.metrics().snapshot();
        self.until(|_| counted().accepted == accepted && counted().conflicts == 1).await;
        assert_eq!((counted().duplicates, counted().poison, counted().rejected), (1, 1, 0));
        let all = self.inbox.all();
        let poison: Vec<_> = all.iter().filter(|it| Unreadable::poison(&it.event.headers).is_some()).collect();
        assert_eq!((poison.len(), &poison[0].event.payload[..]), (1, &b"poison"[..]), "with its bytes");
    }

    /// Stops it.
    pub async fn stop(self) {
        self.stop.cancel();
        timeout(PATIENCE, self.task).await.expect("in time").expect("it stops");
    }
}
