//! From an event to a topic to an inbox.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use krafka::Kafka;
use krafka::producer::Record;
use postbox_config::SourceConfig as _;
use postbox_core::{LogName, NewEvent, RawMessage, Unreadable};
use postbox_engine::{Receiver, TokioClock};
use postbox_testkit::inbox::Inbox;
use postbox_testkit::servers::PrivateKafka;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::stand::{
    LOOK, PATIENCE, client, codes, committed, deliver, deliveries, make_topic, sink, source_context, table,
};

struct Receiving {
    inbox: Arc<Inbox>,
    receiver: Arc<Receiver>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Receiving {
    async fn start(brokers: &str) -> Self {
        let context = source_context(Arc::new(TokioClock::new()));
        let (inbox, table) = (Arc::new(Inbox::default()), table(brokers, "topic = \"orders\""));
        let source = table.build(&context).await.expect("a source");
        let receiver = Receiver::builder(inbox.clone(), context.name.clone(), LogName::inbox())
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

    async fn until(&self, condition: impl Fn(&Self) -> bool) {
        let met = async {
            while !condition(self) {
                tokio::time::sleep(LOOK).await;
            }
        };
        timeout(PATIENCE, met).await.expect("it happens in time");
    }

    async fn stop(self) {
        self.stop.cancel();
        timeout(PATIENCE, self.task).await.expect("in time").expect("it stops");
    }
}

async fn server() -> (PrivateKafka, Kafka) {
    let server = PrivateKafka::launch().await;
    let kafka = client(&server.brokers()).await;
    make_topic(&kafka, "orders", 1).await;
    (server, kafka)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_comes_out_as_it_went_in() {
    let (server, kafka) = server().await;
    let sink = sink(&server.brokers(), "topic = \"orders\"").await;
    let sent = deliveries([
        NewEvent::new("order.paid", &b"\xff\0"[..], "text/plain")
            .key("Zoë 1")
            .kind("fact")
            .aggregate("order")
            .version(7),
        NewEvent::json("order.sent", "{}").tenant("acme").header("a", "b"),
    ]);
    assert_eq!(codes(&deliver(&sink, &sent).await), ["delivered"]);
    let receiving = Receiving::start(&server.brokers()).await;
    receiving.until(|it| it.inbox.all().len() == 2).await;
    let stored = receiving.inbox.all();
    let by_topic = |topic: &str| &stored.iter().find(|it| it.event.topic == topic).expect(topic).event;
    let paid = by_topic("order.paid");
    assert_eq!(paid.key.as_deref(), Some("Zoë 1"));
    assert_eq!((paid.kind.as_deref(), paid.aggregate.as_deref(), paid.version), (Some("fact"), Some("order"), Some(7)));
    assert_eq!((paid.content_type.as_deref(), &paid.payload[..]), (Some("text/plain"), &b"\xff\0"[..]));
    assert_eq!(paid.occurred_at, Some(sent[0].event.occurred_at));
    assert_eq!(by_topic("order.sent").headers["a"], "b");
    assert_eq!(by_topic("order.sent").tenant, None, "whoever may publish could name any");
    let ids: BTreeSet<String> = stored.iter().map(|it| it.message_id.clone()).collect();
    assert_eq!(ids, sent.iter().map(|it| it.dedupe_id()).collect());
    receiving.stop().await;
    assert_eq!(committed(&kafka, "postbox", "orders", 1).await, 2, "all of it is acknowledged");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn duplicates_conflicts_and_poison_are_settled() {
    let (server, kafka) = server().await;
    let receiving = Receiving::start(&server.brokers()).await;
    let producer = kafka.producer().metrics_push(false).build().await.expect("a producer");
    let send = async |id: &str, key: Option<&'static [u8]>, body: &'static str| {
        let mut record = Record::new("orders", body.as_bytes()).header("postbox-id", id.to_owned());
        record.key = key.map(Bytes::from_static);
        assert!(producer.send(record).await.expect("sent").is_persisted());
    };
    send("1", None, "one").await;
    send("1", None, "one").await;
    send("1", None, "another").await;
    // A key that is no text is no poison; one with a control character is.
    send("2", Some(b"\xff\xfe"), "binary").await;
    send("3", Some(b"a\0b"), "poison").await;
    send("4", None, "four").await;
    receiving.until(|it| it.receiver.metrics().snapshot().accepted == 4).await;
    receiving.until(|it| it.receiver.metrics().snapshot().conflicts == 1).await;
    let counted = receiving.receiver.metrics().snapshot();
    assert_eq!((counted.duplicates, counted.poison, counted.rejected), (1, 1, 0));
    let all = receiving.inbox.all();
    assert_eq!(all.iter().find(|it| it.message_id == "2").expect("stored").event.key.as_deref(), Some("fffe"));
    let poison: Vec<_> = all.iter().filter(|it| Unreadable::poison(&it.event.headers).is_some()).collect();
    assert_eq!((poison.len(), &poison[0].event.payload[..]), (1, &b"poison"[..]), "with its bytes");
    receiving.stop().await;
    assert_eq!(committed(&kafka, "postbox", "orders", 1).await, 6);
}
