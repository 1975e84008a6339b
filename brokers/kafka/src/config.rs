//! The keys of `type = "kafka"`, for sinks and for sources.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_config::{
    Section, SinkConfig, SinkContext, SourceConfig, SourceContext, TlsTable, duration, envelope, event_source,
    from_core, integer, nested, plain, size, table, text, words,
};
use postbox_core::envelope::Binding;
use postbox_core::{Envelope, Inbound, LogName, RawMessage, Result, Sink, Source, SourceName, Template};
use tracing::warn;

use crate::client::{Acks, Client};
use crate::connection::{AuthTable, Cluster, Mechanism};
use crate::group::{Membership, OffsetReset};
use crate::sink::KafkaSink;
use crate::source::KafkaSource;
use crate::topic;

/// The longest time of a call. An election of a partition leader is over by then, or takes much
/// longer.
const TIMEOUT_MAX: Duration = Duration::from_secs(30);
/// The highest value of `in_flight`.
const IN_FLIGHT_MAX: usize = 10_000;
/// The highest value of `message_max`, in bytes.
const MESSAGE_BYTES_MAX: usize = 32 * 1024 * 1024;

table! {
    /// One record per event, to a Kafka topic.
    #[check(check)]
    pub struct KafkaSinkTable {
        /// The bootstrap brokers: `HOST:PORT`, separated by commas.
        brokers: String = text(brokers), required(r#""127.0.0.1:9092""#);
        /// The credentials (SASL).
        auth: Option<AuthTable> = nested::<AuthTable>(), unset("none", r#"{ mechanism = "scram-sha-512", user = "postbox", password = "env:KAFKA_PASSWORD" }"#);
        /// TLS; without this table, connections are not encrypted.
        tls: Option<TlsTable> = nested::<TlsTable>(), unset("no TLS", r#"{ ca_file = "ca.pem" }"#);
        /// The client that speaks with the brokers: `krafka`, or `librdkafka`.
        ///
        /// `librdkafka` also speaks with brokers older than Kafka 3.9, but has neither TLS nor
        /// SCRAM here. It needs a build with the feature `rdkafka`. See
        /// [which client](kafka.md#which-client).
        client: Client = words([("krafka", Client::Krafka), ("librdkafka", Client::Librdkafka)]), default("krafka");
        /// The topic, or a template with `{topic}`, `{key}`, `{kind}`, `{aggregate}` or `{tenant}`.
        ///
        /// If the result is no valid topic name, the event is dead with the code `topic_invalid`.
        /// The record's key is the event's key, which selects the partition.
        topic: Template = text(|text| topic::RULES.parse(text)), required(r#""orders""#);
        /// Who confirms a record: `all` in-sync replicas, or the `leader` alone.
        ///
        /// With `leader`, a record can be lost after it was confirmed, and a request without an
        /// answer may be stored twice. A warning at the start says so.
        acks: Acks = words([("all", Acks::All), ("leader", Acks::Leader)]), default("all");
        /// The form in which events are sent.
        ///
        /// See [envelopes](envelopes.md).
        envelope: Envelope = envelope(Envelope::ALL), default("cloudevents-binary");
        /// The CloudEvents `source` of events that have none.
        source: String = event_source(), default("postbox");
        /// The largest record: key, headers and value together. Larger events are dead. Keep it
        /// below the topic's `max.message.bytes`.
        message_max: usize = size(1..=MESSAGE_BYTES_MAX), default("1MB");
    }
}

table! {
    /// Messages from Kafka topics, as a member of a consumer group.
    #[check(check)]
    pub struct KafkaSourceTable {
        /// The bootstrap brokers: `HOST:PORT`, separated by commas.
        brokers: String = text(brokers), required(r#""127.0.0.1:9092""#);
        /// The credentials (SASL).
        auth: Option<AuthTable> = nested::<AuthTable>(), unset("none", r#"{ mechanism = "scram-sha-512", user = "postbox", password = "env:KAFKA_PASSWORD" }"#);
        /// TLS; without this table, connections are not encrypted.
        tls: Option<TlsTable> = nested::<TlsTable>(), unset("no TLS", r#"{ ca_file = "ca.pem" }"#);
        /// The client that speaks with the brokers: `krafka`, or `librdkafka`.
        ///
        /// `librdkafka` also speaks with brokers older than Kafka 3.9, but has neither TLS nor
        /// SCRAM here. It needs a build with the feature `rdkafka`. See
        /// [which client](kafka.md#which-client).
        client: Client = words([("krafka", Client::Krafka), ("librdkafka", Client::Librdkafka)]), default("krafka");
        /// The topics, separated by commas.
        topic: Vec<String> = text(topics), required(r#""orders""#);
        /// The consumer group; all replicas of a service use the same.
        group: String = text(plain), default("postbox");
        /// Where a group starts in a partition without a committed offset, or if that offset no
        /// longer exists: `earliest` or `latest`.
        offset_reset: OffsetReset =
            words([("earliest", OffsetReset::Earliest), ("latest", OffsetReset::Latest)]), default("earliest");
        /// The header with the message id, by which a message is stored once. Without this header,
        /// the id is topic, partition and offset.
        id_header: String = text(plain), default("postbox-id");
        /// Without a heartbeat for so long, the group assigns our partitions to others.
        session_timeout: Duration = duration(Duration::from_secs(1)), default("45s");
        /// Most messages that are read and not yet stored.
        in_flight: usize = integer(1..=IN_FLIGHT_MAX), default(256);
        /// The content type of messages without a `content-type` header.
        content_type: String = text(plain), default("application/json");
        /// The log where messages are stored.
        log: LogName = text(from_core::<LogName>), default("inbox");
    }
}

impl KafkaSinkTable {
    fn check(&self, section: &Section<'_>) {
        check_client(section, self.client, &self.auth, &self.tls);
    }
}

impl KafkaSourceTable {
    fn check(&self, section: &Section<'_>) {
        check_client(section, self.client, &self.auth, &self.tls);
    }
}

/// Reports what the client cannot do in this build.
fn check_client(section: &Section<'_>, client: Client, auth: &Option<AuthTable>, tls: &Option<TlsTable>) {
    if client == Client::Krafka {
        return;
    }
    let path = &section.path;
    #[cfg(not(feature = "rdkafka"))]
    section.fault("client", format!("{path} has {}", crate::client::MISSING));
    let is_scram = auth.as_ref().is_some_and(|auth| auth.mechanism != Mechanism::Plain);
    for (key, is_set, what) in [("tls", tls.is_some(), "TLS"), ("auth", is_scram, "SCRAM")] {
        if is_set {
            let text = format!("{path} has {key}, but librdkafka is built without {what}: write client = \"krafka\"");
            section.fault(key, text);
        }
    }
}

/// Checks addresses separated by commas. The error never repeats one: it may contain a password.
fn brokers(text: &str) -> Result<String, String> {
    let is_broker = |broker: &str| {
        let (host, port) = broker.trim().rsplit_once(':').unwrap_or_default();
        let is_host = |c: char| c.is_ascii_alphanumeric() || ".-_[]:".contains(c);
        !host.is_empty() && host.chars().all(is_host) && port.parse::<u16>().is_ok_and(|port| port > 0)
    };
    match text.split(',').all(is_broker) {
        true => Ok(text.to_owned()),
        false => Err("is no list of brokers; write HOST:PORT, with commas between".to_owned()),
    }
}

fn topics(text: &str) -> Result<Vec<String>, String> {
    let named = |name: &str| match topic::check(name.trim()) {
        Ok(()) => Ok(name.trim().to_owned()),
        Err(fault) => Err(format!("{name:?} is no topic: {fault}")),
    };
    text.split(',').map(named).collect()
}

fn cluster(client: Client, brokers: &str, auth: &Option<AuthTable>, tls: &Option<TlsTable>) -> Cluster {
    Cluster { client, brokers: brokers.to_owned(), auth: auth.clone(), tls: tls.clone() }
}

#[async_trait]
impl SinkConfig for KafkaSinkTable {
    async fn build(&self, context: &SinkContext) -> Result<Arc<dyn Sink>> {
        if self.acks == Acks::Leader {
            warn!(
                code = "kafka_acks_weak", topic = %self.topic,
                "records are confirmed by the leader alone: what it loses before a replica has it is lost, and an \
                 unanswered request may be stored twice; write acks = \"all\""
            );
        }
        let cluster = cluster(self.client, &self.brokers, &self.auth, &self.tls);
        let timeout = context.answer_timeout(TIMEOUT_MAX);
        Ok(Arc::new(KafkaSink::new(cluster, self.clone(), timeout, context.concurrency)))
    }

    async fn connect(&self, _: &SinkContext) -> Result<String> {
        let topics: Vec<String> = self.topic.fixed().map(str::to_owned).into_iter().collect();
        cluster(self.client, &self.brokers, &self.auth, &self.tls).look(&topics).await
    }
}

#[async_trait]
impl SourceConfig for KafkaSourceTable {
    fn log(&self) -> &LogName {
        &self.log
    }

    async fn build(&self, context: &SourceContext) -> Result<Arc<dyn Source>> {
        let membership = Membership {
            topics: self.topic.clone(),
            group: self.group.clone(),
            offset_reset: self.offset_reset,
            id_header: self.id_header.clone(),
            session_timeout: self.session_timeout,
            in_flight_max: self.in_flight,
            content_type: self.content_type.clone(),
        };
        let cluster = cluster(self.client, &self.brokers, &self.auth, &self.tls);
        Ok(Arc::new(KafkaSource::new(cluster, membership, Arc::clone(&context.clock))))
    }

    async fn connect(&self, _: &SourceContext) -> Result<String> {
        cluster(self.client, &self.brokers, &self.auth, &self.tls).look(&self.topic).await
    }

    /// A CloudEvent in binary mode becomes the original event. Any other message has its Kafka
    /// topic as topic.
    fn decode(&self, name: &SourceName, message: &RawMessage) -> Result<Option<Inbound>> {
        Binding::KAFKA.read(message, name).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use postbox_config::{ReadOptions, read};

    use super::*;
    use crate::message::ID;

    #[test]
    fn the_keys_are_checked() {
        let auth = "auth = { mechanism = \"plain\", user = \"u\", password = \"canary\" }";
        let keys = format!("brokers = \"a:1, b:2\"\ntopic = \"t.{{topic}}\"\nacks = \"leader\"\n{auth}");
        let (sink, _) = read::<KafkaSinkTable>(&keys, ReadOptions::none()).expect("no faults");
        assert!(!format!("{sink:?}").contains("canary"));
        let cluster = cluster(sink.client, &sink.brokers, &sink.auth, &sink.tls);
        assert!(!format!("{cluster:?}").contains("canary"));
        for (keys, word) in [
            ("brokers = \"kafka://u:canary@h:1\"\ntopic = \"t\"", "HOST:PORT"),
            ("brokers = \"h\"\ntopic = \"t\"", "HOST:PORT"),
            ("brokers = \"h:0\"\ntopic = \"t\"", "HOST:PORT"),
            ("brokers = \"h:1\"\ntopic = \"a b\"", "not a valid topic"),
            ("brokers = \"h:1\"\ntopic = \"t\"\nacks = \"none\"", "none of all, leader"),
            (
                "brokers = \"h:1\"\ntopic = \"t\"\ntls = { client_cert = \"c\" }",
                "client_cert and client_key; it needs both",
            ),
        ] {
            let faults = read::<KafkaSinkTable>(keys, ReadOptions::none()).expect_err("a fault").to_string();
            assert!(faults.contains(word) && !faults.contains("canary"), "{keys}: {faults}");
        }
        let several = "brokers = \"h:1\"\ntopic = \"a, b\"";
        let (source, _) = read::<KafkaSourceTable>(several, ReadOptions::none()).expect("no faults");
        assert_eq!((source.topic, source.id_header.as_str()), (vec!["a".to_owned(), "b".to_owned()], ID));
    }

    #[test]
    fn what_a_client_cannot_do_is_refused_before_it_starts() {
        let said = |more: &str| {
            let keys = format!("brokers = \"h:1\"\ntopic = \"t\"\nclient = \"librdkafka\"\n{more}");
            let sink = read::<KafkaSinkTable>(&keys, ReadOptions::none()).map(drop).map_err(|it| it.to_string());
            let source = read::<KafkaSourceTable>(&keys, ReadOptions::none()).map(drop).map_err(|it| it.to_string());
            assert_eq!(sink, source);
            sink.err().unwrap_or_default()
        };
        let plain = "auth = { mechanism = \"plain\", user = \"u\", password = \"p\" }";
        let scram = plain.replace("plain", "scram-sha-256");
        for (more, word) in [("", ""), (plain, ""), (scram.as_str(), "without SCRAM"), ("tls = {}", "without TLS")] {
            let faults = said(more);
            assert!(faults.contains(word), "{more}: {faults}");
            match cfg!(feature = "rdkafka") {
                true => assert_eq!(faults.is_empty(), word.is_empty(), "{more}: {faults}"),
                false => assert!(faults.contains("--features rdkafka"), "{more}: {faults}"),
            }
        }
    }
}
