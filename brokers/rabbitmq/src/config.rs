//! The keys of `type = "rabbitmq"`, for sinks and for sources.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lapin::uri::AMQPUri;
use postbox_config::{
    Secret, Section, SinkConfig, SinkContext, SourceConfig, SourceContext, TlsTable, boolean, envelope, event_source,
    from_core, integer, nested, secret, size, table, text,
};
use postbox_core::envelope::Binding;
use postbox_core::{Down, Envelope, Inbound, LogName, RawMessage, Result, Sink, Source, SourceName, Template, Topic};

use crate::classify::MISSING;
use crate::connection::Servers;
use crate::consumer::{find_exchange, find_queue};
use crate::message::SHORT_BYTES_MAX;
use crate::route;
use crate::sink::RabbitmqSink;
use crate::source::RabbitmqSource;

/// The longest wait for confirms.
const CONFIRM_TIMEOUT_MAX: Duration = Duration::from_secs(10);
/// The largest message, in bytes, that any server accepts.
const MESSAGE_BYTES_MAX: usize = 512 * 1024 * 1024;

table! {
    /// One message per event, to an exchange of RabbitMQ.
    #[check(check)]
    pub struct RabbitmqSinkTable {
        /// The servers: `amqp://HOST:PORT/VHOST`, several with commas between; `amqps://` for TLS.
        url: Vec<String> = text(servers), required(r#""amqp://127.0.0.1:5672""#);
        /// The user; together with `password`.
        user: Option<String> = text(name), unset("guest, accepted from the server's own machine only", r#""postbox""#);
        /// The user's password.
        password: Option<Secret> = secret(), unset("guest's", r#""env:RABBITMQ_PASSWORD""#);
        /// Certificates for `amqps://`.
        tls: Option<TlsTable> = nested::<TlsTable>(), unset("the system's certificates", r#"{ ca_file = "ca.pem" }"#);
        /// The exchange, which must exist; `""` is the default exchange, whose routing key is the
        /// name of a queue.
        ///
        /// It and the routing key may contain `{topic}`, `{key}`, `{kind}`, `{aggregate}` and
        /// `{tenant}`. `{topic}` may be several words, every other field is one word. An event
        /// without a valid exchange and routing key is dead with the code `route_invalid`.
        exchange: Template = text(|text| route::RULES.parse(text)), required(r#""amq.topic""#);
        /// The routing key.
        routing_key: Template = text(|text| route::RULES.parse(text)), default("{topic}");
        /// What a message holds.
        ///
        /// See [envelopes](envelopes.md).
        envelope: Envelope = envelope(Envelope::ALL), default("cloudevents-binary");
        /// The CloudEvents `source` of events that name none.
        source: String = event_source(), default("postbox");
        /// Events with a larger message are dead. The server's own limit (`max_message_size`) is 16
        /// MiB since 4.0.
        message_max: usize = size(1..=MESSAGE_BYTES_MAX), default("16MiB");
    }
}

table! {
    /// A consumer of a queue of RabbitMQ.
    #[check(check)]
    pub struct RabbitmqSourceTable {
        /// The servers: `amqp://HOST:PORT/VHOST`, several with commas between; `amqps://` for TLS.
        url: Vec<String> = text(servers), required(r#""amqps://127.0.0.1:5671""#);
        /// The user; together with `password`.
        user: Option<String> = text(name), unset("guest, accepted from the server's own machine only", r#""postbox""#);
        /// The user's password.
        password: Option<Secret> = secret(), unset("guest's", r#""env:RABBITMQ_PASSWORD""#);
        /// Certificates for `amqps://`.
        tls: Option<TlsTable> = nested::<TlsTable>(), unset("the system's certificates", r#"{ ca_file = "ca.pem" }"#);
        /// The log where messages are stored.
        log: LogName = text(from_core::<LogName>), default("inbox");
        /// The queue.
        queue: String = text(name), required(r#""orders""#);
        /// Whether a missing queue is created, as a durable quorum queue.
        create: bool = boolean(), default(true);
        /// The exchange that the queue is bound to at each start, if `create` is true.
        exchange: Option<String> = text(name), unset("the default exchange only", r#""amq.topic""#);
        /// The routing key of that binding.
        routing_key: String = text(name), default("#");
        /// The queue's dead-letter exchange, which must exist: messages that cannot be stored, not
        /// even as poison, are rejected to it. A queue that is created gets it; an existing one
        /// must have it. Without it, the first bytes of such messages are stored.
        dead_letter_exchange: Option<String> = text(name), unset("none", r#""orders-dead""#);
        /// Most messages that are received and not yet stored (prefetch).
        in_flight: u16 = integer(1..=u16::MAX), default(256);
        /// The topic of messages that have no routing key.
        topic: Option<Topic> = text(from_core::<Topic>), unset("the name of the queue", r#""orders""#);
        /// The content type of messages that have none.
        content_type: String = text(name), default("application/json");
    }
}

fn name(text: &str) -> Result<String, String> {
    match (1..=SHORT_BYTES_MAX).contains(&text.len()) && !text.contains(char::is_control) {
        true => Ok(text.to_owned()),
        false => Err(format!("has 1 to {SHORT_BYTES_MAX} bytes and no control character")),
    }
}

/// Parses addresses separated by commas. The error never repeats one: it may hold a password.
fn servers(text: &str) -> Result<Vec<String>, String> {
    let server = |url: &str| {
        let rest = url.strip_prefix("amqp://").or_else(|| url.strip_prefix("amqps://"));
        match rest {
            None => Err("begins with amqp:// or amqps://, e.g. \"amqp://127.0.0.1:5672\""),
            Some(rest) if rest.contains('@') => Err("holds a user name or password; give them in user and password"),
            Some(rest) if rest.contains(['?', '#']) => Err("takes no parameters; write amqp://HOST:PORT/VHOST"),
            Some(rest) if rest.ends_with('/') => {
                Err("ends with a slash, which names a virtual host without a name; leave it out for the host \"/\"")
            }
            Some(rest) if rest.is_empty() || url.parse::<AMQPUri>().is_err() => {
                Err("is not a valid address; write amqp://HOST:PORT/VHOST")
            }
            Some(_) => Ok(url.to_owned()),
        }
    };
    text.split(',').map(|url| server(url.trim()).map_err(str::to_owned)).collect()
}

fn check_connection(section: &Section<'_>, urls: &[String]) {
    let path = &section.path;
    section.both("user", "password");
    if section.has("tls") && section.is_right(&["url"]) && urls.iter().any(|url| url.starts_with("amqp://")) {
        section.fault("url", format!("{path} has tls, but an address begins with amqp://; write amqps://"));
    }
}

impl RabbitmqSinkTable {
    fn check(&self, section: &Section<'_>) {
        check_connection(section, &self.url);
    }

    pub(crate) fn servers(&self) -> Servers {
        let user = self.user.clone().zip(self.password.clone());
        Servers {
            urls: self.url.clone(),
            user,
            tls: self.tls.clone().unwrap_or_default(),
            name: "postbox sink".to_owned(),
            ..Servers::default()
        }
    }
}

impl RabbitmqSourceTable {
    fn check(&self, section: &Section<'_>) {
        check_connection(section, &self.url);
        if section.has("routing_key") && !section.has("exchange") {
            section.fault(
                "routing_key",
                format!(
                    "{} has a routing_key but no exchange to bind to; set exchange, or leave routing_key out",
                    section.path
                ),
            );
        }
    }

    fn servers(&self, name: &SourceName) -> Servers {
        let user = self.user.clone().zip(self.password.clone());
        Servers {
            urls: self.url.clone(),
            user,
            tls: self.tls.clone().unwrap_or_default(),
            name: format!("postbox source {name}"),
            ..Servers::default()
        }
    }
}

#[async_trait]
impl SinkConfig for RabbitmqSinkTable {
    async fn build(&self, context: &SinkContext) -> Result<Arc<dyn Sink>> {
        let timeout = context.answer_timeout(CONFIRM_TIMEOUT_MAX);
        Ok(Arc::new(RabbitmqSink::new(self, timeout, context.concurrency, Arc::clone(&context.clock))))
    }

    async fn connect(&self, _: &SinkContext) -> Result<String> {
        let look = async {
            let connection = self.servers().connect().await?;
            let found = match self.exchange.fixed() {
                None | Some("") => Ok("answers".to_owned()),
                Some(name) => {
                    find_exchange(&connection, name).await.map(|()| format!("answers; the exchange {name} exists"))
                }
            };
            connection.close().await;
            found
        };
        look.await.map_err(|down: Down| down.error("connect"))
    }
}

#[async_trait]
impl SourceConfig for RabbitmqSourceTable {
    fn log(&self) -> &LogName {
        &self.log
    }

    async fn build(&self, context: &SourceContext) -> Result<Arc<dyn Source>> {
        let servers = self.servers(&context.name);
        Ok(Arc::new(RabbitmqSource::new(servers, self.clone(), Arc::clone(&context.clock))))
    }

    async fn connect(&self, context: &SourceContext) -> Result<String> {
        let look = async {
            let connection = self.servers(&context.name).connect().await?;
            let found = match find_queue(&connection, &self.queue).await {
                Ok(()) => Ok(format!("answers; the queue {} exists", self.queue)),
                Err(missing) if missing.code() == MISSING && self.create => match &self.exchange {
                    Some(exchange) => find_exchange(&connection, exchange).await.map(|()| will_be_made(&self.queue)),
                    None => Ok(will_be_made(&self.queue)),
                },
                Err(down) => Err(down),
            };
            let found = match &self.dead_letter_exchange {
                Some(exchange) if found.is_ok() => find_exchange(&connection, exchange).await.and(found),
                _ => found,
            };
            connection.close().await;
            found
        };
        look.await.map_err(|down: Down| down.error("connect"))
    }

    /// A CloudEvent in binary mode becomes the original event. Any other message has its routing
    /// key as topic.
    fn decode(&self, name: &SourceName, message: &RawMessage) -> Result<Option<Inbound>> {
        Binding::AMQP.read(message, name).map(Some)
    }
}

fn will_be_made(queue: &str) -> String {
    format!("answers; the queue {queue} will be created")
}

#[cfg(test)]
mod tests {
    use postbox_config::{ReadOptions, read};

    use super::*;

    #[test]
    fn the_keys_are_checked() {
        let keys = "url = \"amqps://h:1/v, amqps://i\"\nuser = \"u\"\npassword = \"canary\"\nexchange = \"x.{tenant}\"";
        let (table, _) = read::<RabbitmqSinkTable>(keys, ReadOptions::none()).expect("no faults");
        assert_eq!(table.url, ["amqps://h:1/v", "amqps://i"]);
        assert!(!format!("{table:?}").contains("canary"));
        for (keys, word) in [
            ("url = \"h\"", "amqp://"),
            ("url = \"amqp://u:canary@h\"", "user and password"),
            ("url = \"amqp://h/?heartbeat=0\"", "no parameters"),
            ("url = \"amqp://h/\"", "slash"),
            ("url = \"amqp://\"", "not a valid address"),
            ("url = \"amqp://h\"\nuser = \"u\"", "needs both"),
            ("url = \"amqp://h\"\ntls = { ca_file = \"x\" }", "amqps://"),
            ("url = \"amqp://h\"\nrouting_key = \"{topik}\"", "{topik} is no field"),
        ] {
            let faults = read::<RabbitmqSinkTable>(&format!("exchange = \"\"\n{keys}"), ReadOptions::none());
            let faults = faults.expect_err(keys).to_string();
            assert!(faults.contains(word) && !faults.contains("canary"), "{keys}: {faults}");
        }
        let keys = "url = \"amqp://h\"\nqueue = \"q\"\nrouting_key = \"a.#\"";
        let faults = read::<RabbitmqSourceTable>(keys, ReadOptions::none()).expect_err("no exchange").to_string();
        assert!(faults.contains("no exchange to bind to"), "{faults}");
    }
}
