//! The keys of `type = "mqtt"`, for sinks and for sources.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_config::{
    Secret, Section, SinkConfig, SinkContext, SourceConfig, SourceContext, TlsTable, boolean, duration, envelope,
    event_source, from_core, integer, nested, secret, size, table, text,
};
use postbox_core::envelope::Binding;
use postbox_core::{Envelope, Inbound, LogName, RawMessage, Result, Sink, Source, SourceName, Template};

use crate::connection::{Server, address};
use crate::sink::MqttSink;
use crate::source::MqttSource;
use crate::topic::{self, check_text};

/// The longest wait for PUBACKs: a server that is silent for longer is given up.
const ACK_TIMEOUT_MAX: Duration = Duration::from_secs(10);
/// The largest packet of the protocol, in bytes.
const MESSAGE_BYTES_MAX: usize = 268_435_455;
/// The longest client id, in bytes: servers make file names of it.
const CLIENT_ID_BYTES_MAX: usize = 256;

table! {
    /// One message per event, to a topic of an MQTT 5 server.
    #[check(check)]
    pub struct MqttSinkTable {
        /// The server: `mqtt://HOST:PORT`, or `mqtts://` for TLS.
        url: String = text(server), required(r#""mqtt://127.0.0.1:1883""#);
        /// The user; together with `password`.
        user: Option<String> = text(plain), unset("no login", r#""postbox""#);
        /// The user's password.
        password: Option<Secret> = secret(), unset("none", r#""env:MQTT_PASSWORD""#);
        /// Certificates for `mqtts://`.
        tls: Option<TlsTable> = nested::<TlsTable>(), unset("the system's certificates", r#"{ ca_file = "ca.pem" }"#);
        /// The topic to publish to; it may contain `{topic}`, `{key}`, `{kind}`, `{aggregate}` and
        /// `{tenant}`.
        ///
        /// `{topic}` may be several levels, every other field is one level. An event without a
        /// valid topic is dead with the code `topic_invalid`.
        topic: Template = text(|text| topic::RULES.parse(text)), required(r#""orders/{topic}""#);
        /// Whether the topic must have a subscriber. If false, the server drops an event without
        /// one, and it counts as delivered.
        mandatory: bool = boolean(), default(true);
        /// What a message holds.
        ///
        /// See [envelopes](envelopes.md).
        envelope: Envelope = envelope(Envelope::ALL), default("cloudevents-binary");
        /// The CloudEvents `source` of events that name none.
        source: String = event_source(), default("postbox");
        /// An event whose packet is larger, or larger than the limit that the server announces, is
        /// dead.
        ///
        /// Keep it below the server's own limit (mosquitto's `message_size_limit`): a server need
        /// not announce its limit, and may close the connection instead.
        message_max: usize = size(1..=MESSAGE_BYTES_MAX), default("1MB");
    }
}

table! {
    /// A subscription at an MQTT 5 server, with QoS 1 and a persistent session.
    #[check(check)]
    pub struct MqttSourceTable {
        /// The server: `mqtt://HOST:PORT`, or `mqtts://` for TLS.
        url: String = text(server), required(r#""mqtts://127.0.0.1:8883""#);
        /// The user; together with `password`.
        user: Option<String> = text(plain), unset("no login", r#""postbox""#);
        /// The user's password.
        password: Option<Secret> = secret(), unset("none", r#""env:MQTT_PASSWORD""#);
        /// Certificates for `mqtts://`.
        tls: Option<TlsTable> = nested::<TlsTable>(), unset("the system's certificates", r#"{ ca_file = "ca.pem" }"#);
        /// The name of the session: the same after a restart, different for every process.
        client_id: String = text(client_id), required(r#""orders-1""#);
        /// The topic filter to subscribe to; `+` matches one level, `#` all that follow.
        topic: String = text(topic::filter), required(r##""orders/#""##);
        /// The group of a shared subscription: each message goes to one of its members.
        share: Option<String> = text(group), unset("every client gets every message", r#""orders""#);
        /// How long the server keeps the session and its messages while this process is
        /// disconnected.
        session_expiry: Duration = duration(Duration::from_secs(1)), default("7d");
        /// The user property with the id under which a message is stored once; without it, the id
        /// is the digest of the payload.
        id_property: String = text(plain), default("postbox-id");
        /// Most messages that are received and not yet stored. A server may send fewer.
        in_flight: u16 = integer(1..=u16::MAX), default(256);
        /// The content type of messages that have none.
        content_type: String = text(plain), default("application/json");
        /// The log where messages are stored.
        log: LogName = text(from_core::<LogName>), default("inbox");
    }
}

fn plain(text: &str) -> Result<String, String> {
    match text {
        "" => Err("is empty".to_owned()),
        text => check_text(text).map(|()| text.to_owned()),
    }
}

fn server(text: &str) -> Result<String, String> {
    address(text).map(|_| text.to_owned())
}

fn client_id(text: &str) -> Result<String, String> {
    let is_free = |c: char| !c.is_whitespace() && !c.is_control() && !"/+#".contains(c);
    match (1..=CLIENT_ID_BYTES_MAX).contains(&text.len()) && text.chars().all(is_free) {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "{text:?} cannot be a client id; use 1 to {CLIENT_ID_BYTES_MAX} bytes, without space, /, + and #"
        )),
    }
}

fn group(text: &str) -> Result<String, String> {
    match text.contains(['/', '+', '#']) {
        true => Err(format!("{text:?} cannot be a group; leave out /, + and #")),
        false => plain(text),
    }
}

fn check_connection(section: &Section<'_>, url: &str) {
    section.both("user", "password");
    if section.has("tls") && address(url).is_ok_and(|url| url.scheme() == "mqtt") {
        let path = &section.path;
        section.fault("url", format!("{path} has tls, but the address begins with mqtt://; write mqtts://"));
    }
}

impl MqttSinkTable {
    fn check(&self, section: &Section<'_>) {
        check_connection(section, &self.url);
    }

    pub(crate) fn server(&self) -> Server {
        let user = self.user.clone().zip(self.password.clone());
        Server { url: self.url.clone(), user, tls: self.tls.clone().unwrap_or_default(), client_id: String::new() }
    }
}

impl MqttSourceTable {
    fn check(&self, section: &Section<'_>) {
        check_connection(section, &self.url);
    }

    pub(crate) fn server(&self) -> Server {
        let user = self.user.clone().zip(self.password.clone());
        Server {
            url: self.url.clone(),
            user,
            tls: self.tls.clone().unwrap_or_default(),
            client_id: self.client_id.clone(),
        }
    }
}

#[async_trait]
impl SinkConfig for MqttSinkTable {
    async fn build(&self, context: &SinkContext) -> Result<Arc<dyn Sink>> {
        Ok(Arc::new(MqttSink::new(self, context.answer_timeout(ACK_TIMEOUT_MAX), context.concurrency)))
    }

    async fn connect(&self, _: &SinkContext) -> Result<String> {
        look(self.server()).await
    }
}

#[async_trait]
impl SourceConfig for MqttSourceTable {
    fn log(&self) -> &LogName {
        &self.log
    }

    async fn build(&self, context: &SourceContext) -> Result<Arc<dyn Source>> {
        Ok(Arc::new(MqttSource::new(self, Arc::clone(&context.clock))))
    }

    async fn connect(&self, _: &SourceContext) -> Result<String> {
        look(self.server()).await
    }

    /// A CloudEvent in binary mode becomes the original event. Any other message has its MQTT topic
    /// as topic.
    fn decode(&self, name: &SourceName, message: &RawMessage) -> Result<Option<Inbound>> {
        Binding::MQTT.read(message, name).map(Some)
    }
}

/// Checks the connection for an operator. Without a client id, because ours belongs to the running
/// process.
async fn look(server: Server) -> Result<String> {
    let nobody = Server { client_id: String::new(), ..server };
    let connected = nobody.connect(1, |_| ()).await;
    connected.map(|_| "answers".to_owned()).map_err(|down| down.error("connect"))
}

#[cfg(test)]
mod tests {
    use postbox_config::{ReadOptions, read};

    use super::*;
    use crate::message::ID;

    #[test]
    fn the_keys_are_checked() {
        let user = "user = \"u\"\npassword = \"canary\"\n";
        let keys = format!("url = \"mqtts://h\"\ntopic = \"in/{{topic}}\"\n{user}");
        let (sink, _) = read::<MqttSinkTable>(&keys, ReadOptions::none()).expect("no faults");
        assert!(!format!("{sink:?} {:?}", sink.server()).contains("canary"));
        for (keys, word) in [
            ("url = \"mqtt://u:canary@h:1\"\ntopic = \"t\"", "user and password"),
            ("url = \"tcp://h\"\ntopic = \"t\"", "mqtt://"),
            ("url = \"mqtt://h/x\"\ntopic = \"t\"", "HOST:PORT"),
            ("url = \"mqtt://h\"\ntopic = \"a/+\"", "is not a valid topic"),
            ("url = \"mqtt://h\"\ntopic = \"t\"\nuser = \"u\"", "needs both"),
            (
                "url = \"mqtt://h\"\ntopic = \"t\"\ntls = { client_cert = \"c\" }",
                "client_cert and client_key; it needs both",
            ),
            ("url = \"MQTT://h\"\ntopic = \"t\"\ntls = { ca_file = \"ca.pem\" }", "write mqtts://"),
        ] {
            let faults = read::<MqttSinkTable>(keys, ReadOptions::none()).expect_err("a fault").to_string();
            assert!(faults.contains(word) && !faults.contains("canary"), "{keys}: {faults}");
        }
        let source = "url = \"mqtt://h\"\nclient_id = \"orders-1\"\ntopic = \"orders/#\"";
        let (source, _) = read::<MqttSourceTable>(source, ReadOptions::none()).expect("no faults");
        assert_eq!((source.id_property.as_str(), source.session_expiry), (ID, Duration::from_secs(7 * 86_400)));
        let shared = "url = \"mqtt://h\"\nclient_id = \"a b\"\ntopic = \"$share/g/orders\"\nshare = \"a/b\"\ntls = {}";
        let faults = read::<MqttSourceTable>(shared, ReadOptions::none()).expect_err("faults").to_string();
        assert!(
            ["cannot be a client id;", "the key share", "cannot be a group", "write mqtts://"]
                .iter()
                .all(|it| faults.contains(it)),
            "{faults}"
        );
    }
}
