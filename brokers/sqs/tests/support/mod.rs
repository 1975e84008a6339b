//! A server, a separate client, and a gateway that sees every request and can inject faults.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use aws_sdk_sqs::config::{BehaviorVersion, Credentials, Region};
use aws_sdk_sqs::types::{MessageSystemAttributeName, QueueAttributeName};
use aws_sdk_sqs::{Client, Config};
use aws_smithy_http_client::Builder;
use postbox_core::{EventId, Outcome, Sink, Source};
use postbox_sqs::{SnsSinkTable, SqsSinkTable, SqsSourceTable};
use postbox_testkit::conformance::Attempt;
use postbox_testkit::receiving;
use postbox_testkit::sending::{self, PATIENCE, context};
use postbox_testkit::servers::{PrivateSqs, Sqs, listen_anywhere};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

/// The account of every queue and topic.
const ACCOUNT: &str = "123456789012";
/// Returns the key `aws` with the credentials and the endpoint `by`: a server or a gateway.
pub(crate) fn aws(by: &str) -> String {
    let key = "access_key_id = \"AKIATEST\", secret_access_key = \"canary\"";
    format!("aws = {{ region = \"us-east-1\", endpoint = {by:?}, {key} }}\n")
}

/// Returns a name that no other test uses. That of a FIFO queue has to end with `.fifo`.
pub(crate) fn unique(name: &str) -> String {
    format!("{}-{name}", EventId::now_v7())
}

/// A server and a client for it.
pub(crate) struct Broker<S = PrivateSqs> {
    pub(crate) server: S,
    pub(crate) client: Client,
    pub(crate) url: String,
}

impl Broker<PrivateSqs> {
    pub(crate) async fn launch() -> Self {
        let server = PrivateSqs::launch().await;
        let url = server.url();
        Self::of(server, url)
    }
}

impl Broker<Sqs> {
    /// The server that all tests share, each with names of its own: see [`unique`].
    pub(crate) async fn shared() -> Self {
        let server = Sqs::shared().await;
        let url = server.url();
        Self::of(server, url)
    }
}

impl<S> Broker<S> {
    fn of(server: S, url: String) -> Self {
        let config = Config::builder()
            .behavior_version(BehaviorVersion::v2026_01_12())
            .http_client(Builder::new().build_http())
            .region(Region::new("us-east-1"))
            .endpoint_url(&url)
            .credentials_provider(Credentials::new("AKIATEST", "secret", None, None, "test"))
            .build();
        Self { server, client: Client::from_conf(config), url }
    }

    /// Creates a queue. Returns its URL.
    pub(crate) async fn queue(&self, name: &str) -> String {
        let mut request = self.client.create_queue().queue_name(name);
        if name.ends_with(".fifo") {
            request = request.attributes(QueueAttributeName::FifoQueue, "true");
        }
        request.send().await.expect("made");
        self.url_of(name)
    }

    pub(crate) fn url_of(&self, name: &str) -> String {
        format!("{}/{ACCOUNT}/{name}", self.url)
    }

    /// Takes all messages out of a queue. Returns the body and attributes of each, in order of
    /// arrival.
    pub(crate) async fn take(&self, queue: &str) -> Vec<Taken> {
        let mut taken = Vec::new();
        loop {
            let request = self.client.receive_message().queue_url(queue).max_number_of_messages(10);
            let request = request.message_attribute_names("All");
            let request = request.message_system_attribute_names(MessageSystemAttributeName::All);
            let messages = request.send().await.expect("an answer").messages.unwrap_or_default();
            if messages.is_empty() {
                return taken;
            }
            for message in messages {
                let handle = message.receipt_handle.expect("a handle");
                self.client.delete_message().queue_url(queue).receipt_handle(handle).send().await.expect("deleted");
                let value = |(name, value): (String, aws_sdk_sqs::types::MessageAttributeValue)| {
                    (name, value.string_value.expect("text"))
                };
                let system = message.attributes.unwrap_or_default();
                taken.push(Taken {
                    body: message.body.expect("a body"),
                    attributes: message.message_attributes.unwrap_or_default().into_iter().map(value).collect(),
                    group: system.get(&MessageSystemAttributeName::MessageGroupId).cloned(),
                    dedupe_id: system.get(&MessageSystemAttributeName::MessageDeduplicationId).cloned(),
                    receives: system[&MessageSystemAttributeName::ApproximateReceiveCount].clone(),
                });
            }
        }
    }

    /// Returns the number of messages in a queue, hidden or not.
    pub(crate) async fn remaining(&self, queue: &str) -> usize {
        let counts = [
            QueueAttributeName::ApproximateNumberOfMessages,
            QueueAttributeName::ApproximateNumberOfMessagesNotVisible,
        ];
        let request = self.client.get_queue_attributes().queue_url(queue).set_attribute_names(Some(counts.into()));
        let answer = request.send().await.expect("an answer").attributes.unwrap_or_default();
        answer.values().map(|count| count.parse::<usize>().expect("a number")).sum()
    }
}

/// A message that was in a queue.
#[derive(Debug, Clone)]
pub(crate) struct Taken {
    pub(crate) body: String,
    pub(crate) attributes: BTreeMap<String, String>,
    pub(crate) group: Option<String>,
    pub(crate) dedupe_id: Option<String>,
    /// How often the server has handed it out, this time included.
    pub(crate) receives: String,
}

/// What a gateway does with requests that send messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The server answers.
    Pass,
    /// The gateway answers with this status and body.
    Say(u16, String),
    /// The gateway answers so if the request contains this text.
    SayTo(&'static str, u16, String),
    /// The server receives the request, but its answer is lost.
    Lose,
    /// The gateway drops the request without an answer.
    Hang,
}

/// Returns an error in the protocol of SQS. [`sns_refusal`] returns one in that of SNS.
pub(crate) fn refusal(code: &str) -> String {
    format!("{{\"__type\":\"com.amazonaws.sqs#{code}\",\"message\":\"why\"}}")
}

pub(crate) fn sns_refusal(code: &str) -> String {
    format!(
        "<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>why</Message></Error></ErrorResponse>"
    )
}

/// Stands in front of a server, at a fixed address.
pub(crate) struct Gateway {
    address: SocketAddr,
    shared: Arc<Shared>,
    task: Mutex<Option<AbortOnDropHandle<()>>>,
}

struct Shared {
    upstream: String,
    mode: Mutex<Mode>,
    attempts: Mutex<Vec<Attempt>>,
    /// Number of requests that send messages.
    requests: watch::Sender<usize>,
    connections: watch::Sender<usize>,
}

impl Gateway {
    pub(crate) async fn in_front_of<S>(broker: &Broker<S>) -> Self {
        let listener = TcpListener::from_std(listen_anywhere().expect("a port")).expect("listening");
        let shared = Arc::new(Shared {
            upstream: broker.url.trim_start_matches("http://").to_owned(),
            mode: Mutex::new(Mode::Pass),
            attempts: Mutex::default(),
            requests: watch::Sender::new(0),
            connections: watch::Sender::new(0),
        });
        let address = listener.local_addr().expect("an address");
        let task = AbortOnDropHandle::new(tokio::spawn(Arc::clone(&shared).serve(listener)));
        Self { address, shared, task: Mutex::new(Some(task)) }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn set(&self, mode: Mode) {
        *lock(&self.shared.mode) = mode;
    }

    /// Stops listening, and closes every connection.
    pub(crate) async fn stop(&self) {
        drop(lock(&self.task).take());
        while TcpStream::connect(self.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    }

    pub(crate) async fn start(&self) {
        if lock(&self.task).is_none() {
            let listener = TcpListener::bind(self.address).await.expect("our own port");
            *lock(&self.task) = Some(AbortOnDropHandle::new(tokio::spawn(Arc::clone(&self.shared).serve(listener))));
        }
    }

    /// Returns the messages that arrived in requests, accepted or not.
    pub(crate) fn attempts(&self) -> Vec<Attempt> {
        lock(&self.shared.attempts).clone()
    }

    /// Waits until there were `count` requests that send messages.
    pub(crate) async fn requests(&self, count: usize) {
        let mut requests = self.shared.requests.subscribe();
        let came = requests.wait_for(|requests| *requests >= count);
        tokio::time::timeout(PATIENCE, came).await.expect("in time").expect("the gateway lives");
    }

    pub(crate) fn request_count(&self) -> usize {
        *self.shared.requests.borrow()
    }

    /// Returns the highest number of connections that were open at once.
    pub(crate) fn connections(&self) -> usize {
        *self.shared.connections.borrow()
    }
}

impl Shared {
    async fn serve(self: Arc<Self>, listener: TcpListener) {
        let mut connections = JoinSet::new();
        loop {
            let Ok((stream, _)) = listener.accept().await else { return };
            while connections.try_join_next().is_some() {}
            let shared = Arc::clone(&self);
            connections.spawn(async move {
                let _ = shared.connection(stream).await;
            });
            self.connections.send_modify(|most| *most = (*most).max(connections.len()));
        }
    }

    async fn connection(&self, stream: TcpStream) -> std::io::Result<()> {
        let mut stream = BufReader::new(stream);
        loop {
            let (mut head, mut bytes) = (String::new(), 0);
            loop {
                let mut line = String::new();
                if stream.read_line(&mut line).await? == 0 {
                    return Ok(());
                }
                if let Some(length) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                    bytes = length.trim().parse().expect("a length");
                }
                if line == "\r\n" {
                    break;
                }
                // Drops the client's own `Connection` header: the server must close, so that the
                // end of the answer is seen.
                if !line.to_ascii_lowercase().starts_with("connection:") {
                    head += &line;
                }
            }
            let mut body = vec![0; bytes];
            stream.read_exact(&mut body).await?;
            let text = String::from_utf8_lossy(&body).into_owned();
            let sends = head.contains("AmazonSQS.SendMessageBatch") || text.contains("Action=PublishBatch");
            let mode = if sends { lock(&self.mode).clone() } else { Mode::Pass };
            let answer = match &mode {
                Mode::Say(status, said) => answer(*status, said),
                Mode::SayTo(word, status, said) if text.contains(word) => answer(*status, said),
                Mode::Hang => Vec::new(),
                Mode::Pass | Mode::SayTo(..) | Mode::Lose => self.ask(&head, &body).await?,
            };
            if sends {
                let accepted = answer.starts_with(b"HTTP/1.1 200") && !matches!(mode, Mode::Say(..));
                lock(&self.attempts).extend(messages(&text).map(|(dedupe_id, payload)| Attempt {
                    dedupe_id,
                    payload: payload.into_bytes(),
                    accepted,
                }));
                self.requests.send_modify(|requests| *requests += 1);
            }
            match mode {
                Mode::Hang => std::future::pending().await,
                Mode::Lose => return Ok(()),
                _ => stream.write_all(&answer).await?,
            }
        }
    }

    /// Returns the server's answer, as if the connection stayed open.
    async fn ask(&self, head: &str, body: &[u8]) -> std::io::Result<Vec<u8>> {
        let mut server = TcpStream::connect(&self.upstream).await?;
        server.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes()).await?;
        server.write_all(body).await?;
        let mut answer = Vec::new();
        server.read_to_end(&mut answer).await?;
        let close = b"Connection: close\r\n";
        if let Some(at) = answer.windows(close.len()).position(|window| window == close) {
            answer.drain(at..at + close.len());
        }
        Ok(answer)
    }
}

fn answer(status: u16, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status} Said\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// Returns the dedupe id and the body of each message in a request.
fn messages(request: &str) -> impl Iterator<Item = (Option<String>, String)> {
    let mut found = Vec::new();
    if let Ok(json) = serde_json::from_str::<serde_json::Value>(request) {
        for entry in json["Entries"].as_array().into_iter().flatten() {
            let id = entry["MessageAttributes"]["postbox-id"]["StringValue"].as_str();
            found.push((id.map(str::to_owned), entry["MessageBody"].as_str().expect("a body").to_owned()));
        }
    } else {
        let fields: BTreeMap<String, String> = url::form_urlencoded::parse(request.as_bytes()).into_owned().collect();
        for n in 1.. {
            let entry = format!("PublishBatchRequestEntries.member.{n}");
            let Some(message) = fields.get(&format!("{entry}.Message")) else { break };
            let id = (1..=10).find_map(|n| {
                let attribute = format!("{entry}.MessageAttributes.entry.{n}");
                let is_id = fields.get(&format!("{attribute}.Name")).is_some_and(|name| name == "postbox-id");
                is_id.then(|| fields[&format!("{attribute}.Value.StringValue")].clone())
            });
            found.push((id, message.clone()));
        }
    }
    found.into_iter()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panics while holding it")
}

/// Returns the keys of a sink or source for a queue, by way of the endpoint `by`.
pub(crate) fn queue_keys(queue: &str, by: &str) -> String {
    format!("queue_url = {queue:?}\n{}", aws(by))
}

pub(crate) fn topic_keys(topic: &str, by: &str) -> String {
    format!("topic_arn = \"arn:aws:sns:us-east-1:{ACCOUNT}:{topic}\"\n{}", aws(by))
}

pub(crate) async fn sink(keys: &str) -> Arc<dyn Sink> {
    sink_within(keys, PATIENCE).await
}

pub(crate) async fn sink_within(keys: &str, timeout: Duration) -> Arc<dyn Sink> {
    let context = context(timeout);
    match keys.starts_with("topic_arn") {
        true => sending::sink::<SnsSinkTable>(keys, &context).await,
        false => sending::sink::<SqsSinkTable>(keys, &context).await,
    }
}

pub(crate) async fn source(keys: &str) -> Arc<dyn Source> {
    receiving::source::<SqsSourceTable>(keys).await
}

/// Returns each outcome, with its stable code.
pub(crate) fn said(outcomes: &[Outcome]) -> Vec<String> {
    outcomes.iter().map(sending::said).collect()
}

/// Returns a client of SNS.
pub(crate) fn sns<S>(broker: &Broker<S>) -> aws_sdk_sns::Client {
    let config = aws_sdk_sns::Config::builder()
        .behavior_version(BehaviorVersion::v2026_01_12())
        .http_client(Builder::new().build_http())
        .region(Region::new("us-east-1"))
        .endpoint_url(&broker.url)
        .credentials_provider(Credentials::new("AKIATEST", "secret", None, None, "test"))
        .build();
    aws_sdk_sns::Client::from_conf(config)
}

/// Creates a topic. Returns its ARN.
pub(crate) async fn make_topic<S>(broker: &Broker<S>, name: &str) -> String {
    let mut request = sns(broker).create_topic().name(name);
    if name.ends_with(".fifo") {
        request = request.attributes("FifoTopic", "true");
    }
    request.send().await.expect("made").topic_arn.expect("a name")
}

/// Subscribes a queue to a topic, raw or as SNS wraps it.
pub(crate) async fn subscribe(broker: &Broker, topic: &str, queue: &str, raw: bool) {
    let arn = format!("arn:aws:sqs:us-east-1:{ACCOUNT}:{queue}");
    let request = sns(broker).subscribe().topic_arn(topic).protocol("sqs").endpoint(arn);
    request.attributes("RawMessageDelivery", raw.to_string()).send().await.expect("subscribed");
}
