//! The keys of `type = "nats"`, for sinks and for sources.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_nats::ServerAddr;
use async_trait::async_trait;
use postbox_config::{
    Secret, Section, SinkConfig, SinkContext, SourceConfig, SourceContext, TlsTable, boolean, duration, envelope,
    event_source, from_core, integer, list, nested, path, plain, secret, table, text,
};
use postbox_core::envelope::Binding;
use postbox_core::{Down, Envelope, Inbound, LogName, RawMessage, Result, Sink, Source, SourceName, Template};

use crate::classify::{NO_CONSUMER, no_stream};
use crate::connection::{Auth, Link, Servers};
use crate::jetstream::{NewStream, ensure_consumer, settings, streams_of};
use crate::sink::{DISCARDS, NO_ACK, NatsSink, STREAMS_MAX, Target};
use crate::source::NatsSource;
use crate::subject;

/// The longest wait for acks: electing a new leader of a cluster takes 7 s, and after that no ack
/// comes any more.
const ACK_TIMEOUT_MAX: Duration = Duration::from_secs(10);
/// The most messages handed out at once.
const IN_FLIGHT_MAX: usize = 10_000;
/// The most replicas that JetStream keeps.
const REPLICAS_MAX: u8 = 5;
/// The longest name of a stream or consumer, in bytes: it becomes a folder.
const NAME_BYTES_MAX: usize = 255;

/// The shortest duplicate window of a stream that we create: JetStream's own default.
const WINDOW_MIN: Duration = Duration::from_secs(120);

table! {
    /// How to log in; use one of the ways.
    #[check(check)]
    pub struct AuthTable {
        /// The user's name, together with `password`.
        user: Option<String> = text(plain), unset("none", r#""postbox""#);
        /// The user's password.
        password: Option<Secret> = secret(), unset("none", r#""env:NATS_PASSWORD""#);
        /// A token.
        token: Option<Secret> = secret(), unset("none", r#""env:NATS_TOKEN""#);
        /// The seed of an NKey, `SU…`.
        nkey: Option<Secret> = secret(), unset("none", r#""env:NATS_SEED""#);
        /// A credentials file with a JWT and a seed; read at each connection.
        credentials: Option<PathBuf> = path(), unset("none", r#""postbox.creds""#);
    }
}

table! {
    /// How a missing stream is created; an existing one is not changed.
    pub struct CreateTable {
        /// The subjects of the stream.
        subjects: Vec<String> = list(text(plain)), unset("all that the sink's subject can become", r#"["orders.>"]"#);
        /// How many servers store it.
        replicas: u8 = integer(1..=REPLICAS_MAX), default(1);
        /// How long it remembers ids.
        ///
        /// If it is unset, as long as an event may take to be sent again: `retry.max` plus the
        /// call's time.
        duplicate_window: Option<Duration> = duration(Duration::from_millis(100)), unset("as long as a retry may take", r#""4h""#);
    }
}

table! {
    /// One message per event, to a stream of NATS JetStream.
    #[check(check)]
    pub struct NatsSinkTable {
        /// The servers: `nats://HOST:PORT`, several with commas between; `tls://` requires TLS.
        url: Vec<String> = text(servers), required(r#""nats://127.0.0.1:4222""#);
        /// How to log in.
        auth: Option<AuthTable> = nested::<AuthTable>(), unset("no login", r#"{ credentials = "postbox.creds" }"#);
        /// Requires TLS; the certificates.
        tls: Option<TlsTable> = nested::<TlsTable>(), unset("if the server requires it", r#"{ ca_file = "ca.pem" }"#);
        /// The subject to publish to; it may contain `{topic}`, `{key}`, `{kind}`, `{aggregate}`
        /// and `{tenant}`.
        ///
        /// `{topic}` may be several tokens, every other field is one token. An event without a
        /// valid subject is dead with the code `subject_invalid`.
        subject: Template = text(|text| subject::RULES.parse(text)), required(r#""orders.{topic}""#);
        /// The stream that must store the events; any other refuses them.
        stream: Option<String> = text(name), unset("any that has the subject", r#""ORDERS""#);
        /// How `stream` is created if it is missing.
        create: Option<CreateTable> = nested::<CreateTable>(), unset("never", r#"{ replicas = 3, duplicate_window = "4h" }"#);
        /// What a message holds.
        ///
        /// See [envelopes](envelopes.md).
        envelope: Envelope = envelope(Envelope::ALL), default("cloudevents-binary");
        /// The CloudEvents `source` of events that name none.
        source: String = event_source(), default("postbox");
    }
}

table! {
    /// A durable consumer of a stream of NATS JetStream.
    pub struct NatsSourceTable {
        /// The servers: `nats://HOST:PORT`, several with commas between; `tls://` requires TLS.
        url: Vec<String> = text(servers), required(r#""nats://127.0.0.1:4222""#);
        /// How to log in.
        auth: Option<AuthTable> = nested::<AuthTable>(), unset("no login", r#"{ credentials = "postbox.creds" }"#);
        /// Requires TLS; the certificates.
        tls: Option<TlsTable> = nested::<TlsTable>(), unset("if the server requires it", r#"{ ca_file = "ca.pem" }"#);
        /// The stream.
        stream: String = text(name), required(r#""ORDERS""#);
        /// The durable consumer: a pull consumer with explicit acks. All replicas share it.
        consumer: String = text(name), default("postbox");
        /// Whether a missing consumer is created.
        create: bool = boolean(), default(true);
        /// The subjects of the consumer, e.g. `"orders.*.paid"`; one that exists must have them.
        filter: Option<String> = text(plain), unset("all", r#""orders.>""#);
        /// How long a consumer that is created waits for an ack before a message comes again.
        ///
        /// While the store is slow, it is extended after every third of this time.
        ack_wait: Duration = duration(Duration::from_secs(1)), default("30s");
        /// Most messages that are received and not yet stored. More are requested while some are
        /// being stored, a quarter at a time and 256 at most.
        in_flight: usize = integer(1..=IN_FLIGHT_MAX), default(512);
        /// The content type of messages that have none.
        content_type: String = text(plain), default("application/json");
        /// The log where messages are stored.
        log: LogName = text(from_core::<LogName>), default("inbox");
    }
}

/// Parses addresses separated by commas. The error never repeats one: it may hold a password.
fn servers(text: &str) -> Result<Vec<String>, String> {
    let server = |url: &str| {
        let address: ServerAddr = match url.contains("://") {
            true => url.parse().map_err(|_| "is not a valid address; write nats://HOST:PORT".to_owned())?,
            false => return Err("begins with nats:// or tls://, e.g. \"nats://127.0.0.1:4222\"".to_owned()),
        };
        match address.scheme() {
            "nats" | "tls" if address.has_user_pass() => {
                Err("holds a user name or password; give them in auth = { … }".to_owned())
            }
            "nats" | "tls" if !address.host().is_empty() => Ok(url.to_owned()),
            _ => Err("is not a valid address; write nats://HOST:PORT".to_owned()),
        }
    };
    text.split(',').map(|url| server(url.trim())).collect()
}

/// Checks the name of a stream or consumer, which becomes one token of a subject and a folder.
pub(crate) fn name(text: &str) -> Result<String, String> {
    let is_free = |c: char| !c.is_whitespace() && !c.is_control() && !".*>/\\".contains(c);
    match (1..=NAME_BYTES_MAX).contains(&text.len()) && text.chars().all(is_free) {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "{text:?} cannot be a name; use 1 to {NAME_BYTES_MAX} bytes, without space, dot, *, >, / and \\"
        )),
    }
}

impl AuthTable {
    fn check(&self, section: &Section<'_>) {
        let path = &section.path;
        let ways = ["user", "token", "nkey", "credentials"].into_iter().filter(|way| section.has(way));
        if ways.count() != 1 {
            let text = format!("{path} needs exactly one of: user and password, token, nkey, credentials");
            section.fault("user", text);
        } else {
            section.both("user", "password");
        }
    }

    fn auth(self) -> Auth {
        match self {
            Self { user: Some(user), password, .. } => Auth::User(user, password.unwrap_or_default()),
            Self { token: Some(token), .. } => Auth::Token(token),
            Self { nkey: Some(seed), .. } => Auth::Nkey(seed),
            Self { credentials: Some(path), .. } => Auth::Credentials(path),
            _ => Auth::None,
        }
    }
}

pub(crate) fn connection(urls: &[String], auth: &Option<AuthTable>, tls: &Option<TlsTable>) -> Servers {
    Servers { urls: urls.to_vec(), auth: auth.clone().map(AuthTable::auth).unwrap_or_default(), tls: tls.clone() }
}

impl NatsSinkTable {
    fn check(&self, section: &Section<'_>) {
        if self.create.is_some() && !section.has("stream") {
            section.fault("create", format!("{} has create but no stream; name the stream to create", section.path));
        }
        // JetStream's own subjects begin with a token too, so it takes no stream of these.
        let pattern = subject::pattern(&self.subject);
        if self.create.as_ref().is_some_and(|create| create.subjects.is_empty())
            && (pattern == ">" || pattern.starts_with("*."))
        {
            let path = &section.path;
            let text = format!(
                "{path} has create, but no stream can take all that its subject can become, because that begins with \
                 a field; begin it with a word, as in \"orders.{{topic}}\", or name create.subjects"
            );
            section.fault("create", text);
        }
    }
}

#[async_trait]
impl SinkConfig for NatsSinkTable {
    async fn build(&self, context: &SinkContext) -> Result<Arc<dyn Sink>> {
        let pattern = subject::pattern(&self.subject);
        let new = |create: &CreateTable| NewStream {
            subjects: if create.subjects.is_empty() { vec![pattern.clone()] } else { create.subjects.clone() },
            replicas: create.replicas,
            duplicate_window: create.duplicate_window.unwrap_or(context.repeats_within.max(WINDOW_MIN)),
        };
        let target = Target {
            stream: self.stream.clone(),
            create: self.create.as_ref().map(new),
            pattern: pattern.clone(),
            repeats_within: context.repeats_within,
        };
        Ok(Arc::new(NatsSink::new(self, target, context.answer_timeout(ACK_TIMEOUT_MAX), context)))
    }

    async fn connect(&self, _: &SinkContext) -> Result<String> {
        let found = look_at_stream(self).await;
        found.map_err(|down| down.error("connect"))
    }
}

#[async_trait]
impl SourceConfig for NatsSourceTable {
    fn log(&self) -> &LogName {
        &self.log
    }

    async fn build(&self, context: &SourceContext) -> Result<Arc<dyn Source>> {
        let servers = connection(&self.url, &self.auth, &self.tls);
        Ok(Arc::new(NatsSource::new(servers, self.clone(), Arc::clone(&context.clock))))
    }

    async fn connect(&self, _: &SourceContext) -> Result<String> {
        let found = look_at_consumer(self).await;
        found.map_err(|down| down.error("connect"))
    }

    /// A CloudEvent in binary mode becomes the original event. Any other message has its subject as
    /// topic.
    fn decode(&self, name: &SourceName, message: &RawMessage) -> Result<Option<Inbound>> {
        Binding::NATS.read(message, name).map(Some)
    }
}

/// Describes to an operator whether events would arrive.
async fn look_at_stream(table: &NatsSinkTable) -> Result<String, Down> {
    let client = Link::look(connection(&table.url, &table.auth, &table.tls)).await?;
    let pattern = subject::pattern(&table.subject);
    let mut streams = Vec::new();
    match &table.stream {
        Some(stream) => streams.extend(settings(&client, stream).await?.map(|found| (stream.clone(), found))),
        None => {
            for stream in streams_of(&client, &pattern).await?.into_iter().take(STREAMS_MAX) {
                // A stream that we may not look at exists all the same.
                let found = settings(&client, &stream).await.ok().flatten().unwrap_or_default();
                streams.push((stream, found));
            }
        }
    }
    match (&streams[..], &table.stream, &table.create) {
        ([], Some(stream), Some(_)) => Ok(format!("answers; the stream {stream} will be created")),
        ([], stream, _) => Err(no_stream(stream.as_deref(), &pattern)),
        (streams, ..) => Ok(streams.iter().fold("answers".to_owned(), |text, (stream, found)| {
            let discards = if found.discards { format!("; {DISCARDS}") } else { String::new() };
            let no_ack = if found.no_ack { format!("; {NO_ACK}") } else { String::new() };
            format!("{text}; the stream {stream} exists{discards}{no_ack}")
        })),
    }
}

/// Describes to an operator whether messages would be received.
async fn look_at_consumer(table: &NatsSourceTable) -> Result<String, Down> {
    let client = Link::look(connection(&table.url, &table.auth, &table.tls)).await?;
    let (stream, name) = (&table.stream, &table.consumer);
    match ensure_consumer(&client, &NatsSourceTable { create: false, ..table.clone() }, None).await {
        Ok(_) => Ok(format!("answers; the consumer {name} of {stream} exists")),
        Err(down) if down.code() == NO_CONSUMER && table.create => {
            Ok(format!("answers; the consumer {name} of {stream} will be created"))
        }
        Err(down) => Err(down),
    }
}

#[cfg(test)]
mod tests {
    use postbox_config::{ReadOptions, read};

    use super::*;

    #[test]
    fn a_stream_of_every_subject_is_not_created() {
        let fault = |subject: &str, create: &str| {
            let keys = format!("url = \"nats://h:1\"\nsubject = {subject:?}\nstream = \"S\"\ncreate = {create}");
            read::<NatsSinkTable>(&keys, ReadOptions::none()).err().map(|faults| faults.to_string())
        };
        for subject in ["{topic}", "{tenant}.{topic}", "{tenant}.x"] {
            assert!(fault(subject, "{}").is_some_and(|fault| fault.contains("create.subjects")), "{subject}");
            assert_eq!(fault(subject, "{ subjects = [\"a.>\"] }"), None, "{subject}");
        }
        for subject in ["a.{topic}", "{tenant}", "orders"] {
            assert_eq!(fault(subject, "{}"), None, "{subject}");
        }
    }
}
