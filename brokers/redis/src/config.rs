//! The keys of `sink = { type = "redis", … }` and of a source.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_config::{
    LeaseConfig, Leases, Secret, Section, SinkConfig, SinkContext, SourceConfig, SourceContext, TlsTable, boolean,
    duration, envelope, event_source, from_core, integer, nested, plain, secret, size, table, text,
};
use postbox_core::envelope::Binding;
use postbox_core::{
    Envelope, Error, ErrorKind, Inbound, LogName, RawMessage, Result, Sink, Source, SourceName, Template,
};
use redis::Value;
use tokio::time::timeout;

use crate::connection::{Connection, Server};
use crate::{RedisLeases, RedisSink, RedisSource, address, classify, stream};

/// How many calls run at once, unless the subscription sets it. One is answered while another is
/// written. More would only wait in the server, which runs one command at a time.
const CONCURRENCY: usize = 4;

/// The longest wait of a source for an answer.
const SOURCE_TIMEOUT: Duration = Duration::from_secs(10);

/// The highest value of `value_max`, in bytes: the largest value that a server accepts by default.
const VALUE_BYTES_MAX: usize = 512 * 1024 * 1024;

table! {
    /// One entry per event, to Redis or Valkey streams.
    pub struct RedisSinkConfig {
        /// Where the primary is: `redis://HOST:PORT/DATABASE`, or `rediss://` for TLS.
        ///
        /// With [Sentinels](redis.md#failover), `redis+sentinel://HOST:PORT,HOST:PORT/NAME`.
        url: String = text(url), required(r#""redis://127.0.0.1:6379""#);
        /// The user (ACL); without one, the password is the server's.
        user: Option<String> = text(plain), unset("the default user", r#""postbox""#);
        /// The password.
        password: Option<Secret> = secret(), unset("none", r#""env:REDIS_PASSWORD""#);
        /// Certificates, with `rediss://`.
        tls: Option<TlsTable> = nested::<TlsTable>(), unset("the system's certificates", r#"{ ca_file = "ca.pem" }"#);
        /// The stream of an event.
        ///
        /// `{topic}`, `{key}`, `{kind}`, `{aggregate}` and `{tenant}` stand for the event's; `{{`
        /// and `}}` for braces. An event without such a field is dead.
        stream: Template = text(|text| stream::RULES.parse(text)), default("events:{topic}");
        /// How many entries a stream keeps, about. Older ones are trimmed, even if no consumer has
        /// read them.
        maxlen: Option<u64> = integer(1_u64..=1_000_000_000_000), unset("all of them", "1000000");
        /// Whether to create a stream that does not exist. If not, its events are retried.
        make_stream: bool = boolean(), default(true);
        /// The form in which events are sent.
        ///
        /// See [envelopes](envelopes.md).
        envelope: Envelope = envelope(Envelope::ALL), default("raw");
        /// The CloudEvents `source` of events that have none.
        source: String = event_source(), default("postbox");
        /// The largest field. Events with a larger one are dead, also those above the server's own
        /// limit (`proto-max-bulk-len`).
        value_max: usize = size(1..=VALUE_BYTES_MAX), default("512MiB");
    }
}

table! {
    /// Messages from a Redis or Valkey stream, as a member of a consumer group.
    #[check(check)]
    pub struct RedisSourceConfig {
        /// Where the primary is: `redis://HOST:PORT/DATABASE`, or `rediss://` for TLS.
        ///
        /// With [Sentinels](redis.md#failover), `redis+sentinel://HOST:PORT,HOST:PORT/NAME`.
        url: String = text(url), required(r#""redis://127.0.0.1:6379""#);
        /// The user (ACL); without one, the password is the server's.
        user: Option<String> = text(plain), unset("the default user", r#""postbox""#);
        /// The password.
        password: Option<Secret> = secret(), unset("none", r#""env:REDIS_PASSWORD""#);
        /// Certificates, with `rediss://`.
        tls: Option<TlsTable> = nested::<TlsTable>(), unset("the system's certificates", r#"{ ca_file = "ca.pem" }"#);
        /// The log where messages are stored.
        log: LogName = text(from_core::<LogName>), default("inbox");
        /// The stream. Stream and group are created if missing; a new group starts with the first
        /// entry.
        stream: String = text(plain), required(r#""orders""#);
        /// The consumer group; all replicas of a service use the same, and each service its own.
        group: String = text(plain), default("postbox");
        /// The consumer name: different for each process, the same after its restart.
        consumer: String = text(plain), default("postbox");
        /// Entries pending at another consumer for so long are claimed.
        claim_after: Duration = duration(Duration::from_secs(1)), default("1min");
        /// Most messages that are read and not yet stored. A read takes a third of them, at most
        /// 256, so that reading and storing overlap.
        in_flight: usize = integer(1_usize..=100_000), default(512);
        /// The field with the payload. For entries without it, the payload is a JSON object of all
        /// fields.
        payload: String = text(plain), default("payload");
        /// The topic of entries without a field `topic`.
        topic: Option<String> = text(plain), unset("the stream's name", r#""orders""#);
        /// The stream for messages that cannot be stored, not even as poison.
        dead_stream: Option<String> = text(plain), unset("the stream's name and :dead", r#""orders:dead""#);
    }
}

table! {
    /// In Redis, or Valkey, beside the store: a relay needs a lane in both.
    pub struct RedisLeaseConfig {
        /// Where the primary is: `redis://HOST:PORT/DATABASE`, or `rediss://` for TLS.
        ///
        /// With [Sentinels](redis.md#failover), `redis+sentinel://HOST:PORT,HOST:PORT/NAME`.
        url: String = text(url), required(r#""redis://127.0.0.1:6379""#);
        /// The user (ACL); without one, the password is the server's.
        user: Option<String> = text(plain), unset("the default user", r#""postbox""#);
        /// The password.
        password: Option<Secret> = secret(), unset("none", r#""env:REDIS_PASSWORD""#);
        /// Certificates, with `rediss://`.
        tls: Option<TlsTable> = nested::<TlsTable>(), unset("the system's certificates", r#"{ ca_file = "ca.pem" }"#);
        /// The prefix of all keys. Databases that share a server need different prefixes; with the
        /// same one, their relays wait for each other.
        prefix: String = text(prefix), default("postbox");
    }
}

/// Checks a prefix of keys. It cannot contain braces, because the rest of a key is in braces.
fn prefix(text: &str) -> Result<String, String> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte);
    match (1..=128).contains(&text.len()) && text.bytes().all(fits) {
        true => Ok(text.to_owned()),
        false => Err("is no prefix; write 1 to 128 letters, digits, dots, colons, - and _".to_owned()),
    }
}

fn url(text: &str) -> Result<String, String> {
    address::parse(text).map(|_| text.to_owned())
}

impl RedisSinkConfig {
    pub(crate) fn server(&self, timeout: Duration) -> Result<Server> {
        Server::new(&self.url, self.user.as_deref(), self.password.as_ref(), self.tls.as_ref(), timeout)
    }
}

impl RedisLeaseConfig {
    pub(crate) fn server(&self, timeout: Duration) -> Result<Server> {
        let (user, password) = (self.user.as_deref(), self.password.as_ref());
        Ok(Server::new(&self.url, user, password, self.tls.as_ref(), timeout)?.without_warnings())
    }
}

impl RedisSourceConfig {
    fn check(&self, section: &Section<'_>) {
        if section.is_right(&["stream", "dead_stream"]) && self.dead_stream() == self.stream {
            section.fault("dead_stream", format!("{} is the stream itself; name another", section.name("dead_stream")));
        }
    }

    pub(crate) fn server(&self) -> Result<Server> {
        Server::new(&self.url, self.user.as_deref(), self.password.as_ref(), self.tls.as_ref(), SOURCE_TIMEOUT)
    }

    pub(crate) fn dead_stream(&self) -> String {
        self.dead_stream.clone().unwrap_or_else(|| format!("{}:dead", self.stream))
    }
}

/// Describes a server to an operator, and its stream if all events have the same one. With
/// `makes_stream`, the stream need not exist yet.
async fn look(server: &Server, stream: Option<&str>, makes_stream: bool) -> Result<String> {
    let mut connection = server.connect().await?;
    let Some(stream) = stream else { return Ok("answers".to_owned()) };
    let length = timeout(server.timeout(), connection.ask(redis::cmd("XLEN").arg(stream))).await;
    match length {
        Ok(Ok(Value::Int(0))) if !makes_stream && is_missing(server, &mut connection, stream).await => {
            Err(Error::new(ErrorKind::NotFound, "connect", "redis_stream_missing", classify::STREAM_MISSING))
        }
        Ok(Ok(Value::Int(0))) => Ok(format!("answers; the stream {stream} is empty or not there yet")),
        Ok(Ok(_)) => Ok(format!("answers; the stream {stream} is there")),
        Ok(Err(error)) => match classify::failure("connect", error) {
            // Neither sink nor source needs the right to run XLEN.
            error if error.code() == "redis_not_permitted" => Ok("answers".to_owned()),
            error => Err(error),
        },
        Err(_) => Err(Error::new(ErrorKind::Unavailable, "connect", "redis_connect_timeout", classify::SILENT)),
    }
}

/// Returns whether a stream without entries does not exist. Returns false if we may not ask.
async fn is_missing(server: &Server, connection: &mut Connection, stream: &str) -> bool {
    let answer = timeout(server.timeout(), connection.ask(redis::cmd("EXISTS").arg(stream))).await;
    matches!(answer, Ok(Ok(Value::Int(0))))
}

#[async_trait]
impl SinkConfig for RedisSinkConfig {
    async fn build(&self, context: &SinkContext) -> Result<Arc<dyn Sink>> {
        let timeout = context.answer_timeout(Duration::MAX);
        Ok(Arc::new(RedisSink::new(self, timeout, context.concurrency.unwrap_or(CONCURRENCY))?))
    }

    async fn connect(&self, context: &SinkContext) -> Result<String> {
        let server = self.server(context.answer_timeout(Duration::MAX))?;
        look(&server, self.stream.fixed(), self.make_stream).await
    }

    fn sends_headers(&self) -> bool {
        self.envelope != Envelope::Replica
    }
}

#[async_trait]
impl SourceConfig for RedisSourceConfig {
    fn log(&self) -> &LogName {
        &self.log
    }

    async fn build(&self, context: &SourceContext) -> Result<Arc<dyn Source>> {
        Ok(Arc::new(RedisSource::new(self, Arc::clone(&context.clock))?))
    }

    async fn connect(&self, _: &SourceContext) -> Result<String> {
        look(&self.server()?, Some(&self.stream), true).await
    }

    /// A CloudEvent in binary mode becomes the original event.
    fn decode(&self, name: &SourceName, message: &RawMessage) -> Result<Option<Inbound>> {
        Binding::FIELDS.read(message, name).map(Some)
    }
}

#[async_trait]
impl LeaseConfig for RedisLeaseConfig {
    fn build(&self) -> Result<Option<Arc<dyn Leases>>> {
        Ok(Some(Arc::new(RedisLeases::new(self)?)))
    }

    async fn connect(&self) -> Result<String> {
        RedisLeases::new(self)?.look().await
    }
}

#[cfg(test)]
mod tests {
    use postbox_config::{ReadOptions, read};

    use super::*;

    #[test]
    fn the_keys_are_checked() {
        let config = "url = \"redis://h\"\nstream = \"{tenant}:{topic}\"\nmaxlen = 5\npassword = \"canary\"";
        let (config, _) = read::<RedisSinkConfig>(config, ReadOptions::none()).expect("no faults");
        assert!(!format!("{config:?}").contains("canary"));
        let faults = read::<RedisSinkConfig>("url = \"h\"\nstream = \"{topik}\"", ReadOptions::none());
        let faults = faults.expect_err("faults").to_string();
        assert!(faults.contains("redis://HOST:PORT") && faults.contains("{topik} is no field"), "{faults}");
        let same = "url = \"redis://h\"\nstream = \"a\"\ndead_stream = \"a\"";
        let faults = read::<RedisSourceConfig>(same, ReadOptions::none()).expect_err("a fault").to_string();
        assert!(faults.contains("is the stream itself"), "{faults}");
    }
}
