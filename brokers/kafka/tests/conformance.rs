//! Runs the suites that every sink and every source passes, against Tansu and against a broker in
//! this process. The latter can refuse requests, leave them unanswered, and go down without losing
//! data.

#[path = "it/stand.rs"]
#[allow(clippy::duplicate_mod, dead_code)]
mod stand;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use krafka::Kafka;
use krafka::error::ErrorCode;
use krafka::producer::Record;
use krafka::testing::{ApiKey, Control, FakeBroker};
use postbox_config::{SourceConfig as _, SourceContext};
use postbox_core::{NewEvent, RawMessage, Sink, Source};
use postbox_testkit::clock::ManualClock;
use postbox_testkit::conformance::{Attempt, Destination, SinkFixture, SinkTraits, SourceFixture};
use postbox_testkit::receiving::source_context;
use postbox_testkit::sending::{codes, deliver, numbered};
use postbox_testkit::servers::PrivateKafka;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use stand::{client, header, make_topic, records, sink, table};

/// The client under test. `librdkafka/main.rs` runs these suites with the other one.
#[allow(dead_code)]
const CLIENT: &str = "krafka";
const TOPIC: &str = "events";
/// The largest event, in bytes of key, headers and value. Larger ones are dead.
const MESSAGE_BYTES_MAX: usize = 256 * 1024;
/// The headers of an event with topic `t`.
const HEADERS: [(&str, &str); 7] = [
    ("ce_specversion", "1.0"),
    ("ce_id", "01900000-0000-7000-8000-000000000001"),
    ("ce_type", "t"),
    ("ce_source", "postbox"),
    ("ce_time", "1970-01-01T00:00:00Z"),
    ("content-type", "application/octet-stream"),
    ("postbox-id", "01900000-0000-7000-8000-000000000001"),
];

fn payload_bytes_max() -> usize {
    MESSAGE_BYTES_MAX - HEADERS.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>()
}

async fn events_sink(brokers: &str) -> Arc<dyn Sink> {
    sink(brokers, &format!("topic = \"{TOPIC}\"\nmessage_max = \"{MESSAGE_BYTES_MAX}\"")).await
}

/// Makes an event too large, even without any header.
fn poison(event: NewEvent) -> NewEvent {
    NewEvent { payload: Bytes::from(vec![b'x'; MESSAGE_BYTES_MAX]), ..event }
}

async fn accepted(kafka: &Kafka) -> Vec<Attempt> {
    let attempt = |record: krafka::ConsumerRecord| Attempt {
        dedupe_id: header(&record, "postbox-id"),
        payload: record.value.expect("a value").to_vec(),
        accepted: true,
    };
    records(kafka, TOPIC).await.into_iter().map(attempt).collect()
}

/// A broker in this process.
struct Fake {
    broker: FakeBroker,
    sink: Arc<dyn Sink>,
    /// Number of requests that it refused or did not answer.
    refused: Arc<AtomicUsize>,
}

impl Fake {
    async fn start() -> Self {
        let broker = FakeBroker::start().await.expect("a broker");
        broker.create_topic(TOPIC, 1);
        let brokers = broker.bootstrap_servers();
        let sink = events_sink(&brokers).await;
        // Connects the sink, so that `Destination::Hangs` meets an open connection.
        assert_eq!(codes(&deliver(&sink, &numbered(1)).await), ["delivered"]);
        broker.delete_topic(TOPIC);
        broker.create_topic(TOPIC, 1);
        Self { broker, sink, refused: Arc::default() }
    }

    fn answer(&self, control: Control) {
        let refused = Arc::clone(&self.refused);
        self.broker.on(ApiKey::Produce, move |_| {
            refused.fetch_add(1, Ordering::SeqCst);
            control.clone()
        });
    }
}

#[async_trait]
impl SinkFixture for Fake {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::clone(&self.sink)
    }

    fn traits(&self) -> SinkTraits {
        // Kafka throttles by delaying its answers.
        SinkTraits { throttles: false, payload_bytes_max: Some(payload_bytes_max()), ..SinkTraits::ALL }
    }

    async fn attempts(&self) -> Vec<Attempt> {
        let records = self.broker.all_records(TOPIC).expect("readable");
        let accepted = records.into_iter().map(|record| Attempt {
            dedupe_id: header(&record, "postbox-id"),
            payload: record.value.expect("a value").to_vec(),
            accepted: true,
        });
        let refusal = Attempt { dedupe_id: None, payload: Vec::new(), accepted: false };
        accepted.chain(std::iter::repeat_n(refusal, self.refused.load(Ordering::SeqCst))).collect()
    }

    fn poison(&self, event: NewEvent) -> NewEvent {
        poison(event)
    }

    async fn set(&self, destination: Destination) {
        match destination {
            Destination::Fails => self.answer(Control::Error(ErrorCode::TopicAuthorizationFailed)),
            Destination::Hangs => self.answer(Control::Silence),
            Destination::Down => self.broker.crash(0),
            Destination::Throttles => panic!("not claimed"),
            Destination::Works => {
                self.broker.clear_hooks();
                self.broker.restart(0);
            }
        }
    }
}

/// Tansu. It refuses nothing, and loses everything when it is stopped, so the suite cannot set
/// these faults. A test in `it/sink_faults.rs` freezes it.
struct Tansu {
    _server: PrivateKafka,
    kafka: Kafka,
    sink: Arc<dyn Sink>,
}

impl Tansu {
    async fn start() -> Self {
        let server = PrivateKafka::launch().await;
        let kafka = client(&server.brokers()).await;
        make_topic(&kafka, TOPIC, 1).await;
        let sink = events_sink(&server.brokers()).await;
        Self { _server: server, kafka, sink }
    }
}

#[async_trait]
impl SinkFixture for Tansu {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::clone(&self.sink)
    }

    fn traits(&self) -> SinkTraits {
        SinkTraits {
            throttles: false,
            fails: false,
            hangs: false,
            goes_down: false,
            payload_bytes_max: Some(payload_bytes_max()),
            ..SinkTraits::ALL
        }
    }

    async fn attempts(&self) -> Vec<Attempt> {
        accepted(&self.kafka).await
    }

    fn poison(&self, event: NewEvent) -> NewEvent {
        poison(event)
    }

    async fn set(&self, destination: Destination) {
        assert_eq!(destination, Destination::Works);
    }
}

/// The handle that keeps a broker running.
enum Server {
    Fake(FakeBroker),
    Tansu(PrivateKafka),
}

struct Group {
    server: Server,
    kafka: Kafka,
    clock: Arc<ManualClock>,
    source: Arc<dyn Source>,
}

impl Group {
    async fn join(server: Server) -> Self {
        let kafka = client(&brokers(&server)).await;
        make_topic(&kafka, "order.paid", 1).await;
        let clock = Arc::new(ManualClock::default());
        let context = SourceContext { clock: Arc::clone(&clock) as _, ..source_context() };
        let source = table(&brokers(&server), "topic = \"order.paid\"\nin_flight = 8").build(&context).await;
        Self { server, kafka, clock, source: source.expect("a source") }
    }
}

fn brokers(server: &Server) -> String {
    match server {
        Server::Fake(broker) => broker.bootstrap_servers(),
        Server::Tansu(server) => server.brokers(),
    }
}

/// Removes all members from a group, as an administrator does.
async fn expel(kafka: &Kafka, brokers: &str, group: &str) {
    let described = kafka.admin().describe_consumer_groups([group], Default::default()).await.expect("an answer");
    let members: Vec<String> = described
        .into_values()
        .flat_map(|group| group.expect("described").members)
        .map(|member| member.member_id)
        .collect();
    assert!(!members.is_empty(), "somebody is in the group");
    let mut request = Vec::new();
    let text = |request: &mut Vec<u8>, text: &str| {
        request.extend(u16::try_from(text.len()).expect("short").to_be_bytes());
        request.extend(text.as_bytes());
    };
    // LeaveGroup, version 3, with a correlation id and without a client id.
    request.extend([0, 13, 0, 3, 0, 0, 0, 1, 0xff, 0xff]);
    text(&mut request, group);
    request.extend(u32::try_from(members.len()).expect("few").to_be_bytes());
    for member in &members {
        text(&mut request, member);
        request.extend([0xff, 0xff]);
    }
    let mut stream = TcpStream::connect(brokers).await.expect("connected");
    stream.write_all(&u32::try_from(request.len()).expect("short").to_be_bytes()).await.expect("sent");
    stream.write_all(&request).await.expect("sent");
    let length = stream.read_u32().await.expect("an answer");
    let mut answer = vec![0; length as usize];
    stream.read_exact(&mut answer).await.expect("an answer");
    // After the correlation id and the throttle time comes the error code.
    assert_eq!(answer[8..10], [0, 0], "{answer:?}");
}

#[async_trait]
impl SourceFixture for Group {
    fn source(&self) -> Arc<dyn Source> {
        Arc::clone(&self.source)
    }

    async fn publish(&self, message: RawMessage) {
        let mut record = Record::new(message.topic, message.payload).header("content-type", message.content_type);
        record = record.header("postbox-id", message.id.expect("an id"));
        for (name, value) in message.headers {
            record = record.header(name, value);
        }
        let producer = self.kafka.producer().metrics_push(false).build().await.expect("a producer");
        assert!(producer.send(record).await.expect("sent").is_persisted());
        producer.close().await.expect("closed");
    }

    /// Removes the member from the group. A lost connection would not do: Kafka's client
    /// reconnects, and the membership survives.
    async fn disconnect(&self) {
        expel(&self.kafka, &brokers(&self.server), "postbox").await;
    }

    async fn dead_letters(&self) -> Vec<RawMessage> {
        Vec::new()
    }

    async fn pass(&self, time: Duration) {
        self.clock.advance(time);
    }
}

mod fake {
    use super::*;

    async fn sink() -> Fake {
        Fake::start().await
    }

    async fn source() -> Group {
        Group::join(Server::Fake(FakeBroker::start().await.expect("a broker"))).await
    }

    postbox_testkit::sink_suite!(sink);
    postbox_testkit::source_suite!(source);
}

mod tansu {
    use super::*;

    async fn sink() -> Tansu {
        Tansu::start().await
    }

    async fn source() -> Group {
        Group::join(Server::Tansu(PrivateKafka::launch().await)).await
    }

    postbox_testkit::sink_suite!(sink);
    postbox_testkit::source_suite!(source);
}
