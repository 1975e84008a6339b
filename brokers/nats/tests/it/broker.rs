//! A private server of a test, and what is stored in it.

use std::time::Duration;

use async_nats::header::{HeaderName, HeaderValue};
use async_nats::{Client, Message, Request, RequestErrorKind};
use postbox_testkit::sending::PATIENCE;
use postbox_testkit::servers::{NatsVersion, PrivateNats};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

pub(crate) struct Broker {
    pub(crate) server: PrivateNats,
    pub(crate) client: Client,
}

impl Broker {
    pub(crate) async fn launch(version: NatsVersion, config: &str) -> Self {
        let server = PrivateNats::launch_with(version, config).await;
        let client = async_nats::connect(server.url()).await.expect("it answers");
        Self { server, client }
    }

    /// Creates a stream with file storage for these subjects, with changes to its configuration.
    pub(crate) async fn stream(&self, name: &str, subjects: &[&str], change: Value) {
        stream(&self.client, name, subjects, change).await;
    }

    /// Publishes raw bytes that no client library would send.
    pub(crate) async fn raw(&self, subject: &[u8], headers: &[u8], payload: &[u8]) {
        let mut socket = TcpStream::connect(("127.0.0.1", self.server.port())).await.expect("it answers");
        let sizes = format!("{} {}", headers.len(), headers.len() + payload.len());
        let connect = b"CONNECT {\"verbose\":false,\"headers\":true}\r\nHPUB ";
        let sizes = format!(" {sizes}\r\n");
        let sent = [connect, subject, sizes.as_bytes(), headers, payload, b"\r\nPING\r\n"].concat();
        socket.write_all(&sent).await.expect("sent");
        let mut said = Vec::new();
        while !said.ends_with(b"PONG\r\n") {
            assert!(socket.read_buf(&mut said).await.expect("it answers") > 0, "{}", said.escape_ascii());
        }
        assert!(!said.windows(4).any(|word| word == b"-ERR"), "{}", said.escape_ascii());
    }

    /// Returns every message of a stream, in order.
    pub(crate) async fn stored(&self, stream: &str) -> Vec<Stored> {
        stored(&self.client, stream).await
    }

    /// Starts the server again after a kill, and waits until the client is connected again.
    pub(crate) async fn start(&mut self) {
        self.server.start().await;
        self.reached().await;
    }

    pub(crate) async fn reached(&self) {
        let answers = async {
            while api(&self.client, "INFO", Value::Null).await.is_err() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(PATIENCE, answers).await.expect("the server is reached again");
    }
}

/// A message in a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) subject: String,
    pub(crate) headers: String,
    pub(crate) payload: Vec<u8>,
}

impl Stored {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }
}

/// Makes one call of JetStream's API. Returns the answer or the error's number, 0 if there was no
/// answer.
pub(crate) async fn api(client: &Client, name: &str, body: Value) -> Result<Value, u64> {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let request = Request::new().payload(body.into()).timeout(Some(Duration::from_secs(2)));
    let message = client.send_request(format!("$JS.API.{name}"), request).await.map_err(|_| 0_u64)?;
    let answer: Value = serde_json::from_slice(&message.payload).expect("JSON");
    match answer["error"]["err_code"].as_u64() {
        Some(error) => Err(error),
        None => Ok(answer),
    }
}

/// Creates or changes a stream.
pub(crate) async fn stream(client: &Client, name: &str, subjects: &[&str], change: Value) {
    let mut config = json!({ "name": name, "subjects": subjects, "storage": "file", "num_replicas": 1 });
    for (key, value) in change.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    let made = async {
        loop {
            let known = api(client, &format!("STREAM.INFO.{name}"), Value::Null).await.is_ok();
            let verb = if known { "UPDATE" } else { "CREATE" };
            match api(client, &format!("STREAM.{verb}.{name}"), config.clone()).await {
                Ok(_) => return,
                // A cluster that has just started has no leader for it yet.
                Err(0 | 10_005 | 10_008 | 10_009 | 10_058) => tokio::time::sleep(Duration::from_millis(50)).await,
                Err(error) => panic!("the stream {name}: {error}"),
            }
        }
    };
    timeout(PATIENCE, made).await.expect("a stream in time");
}

/// Returns every message of a stream, in order.
pub(crate) async fn stored(client: &Client, stream: &str) -> Vec<Stored> {
    let Ok(info) = api(client, &format!("STREAM.INFO.{stream}"), Value::Null).await else { return Vec::new() };
    let number = |key: &str| info["state"][key].as_u64().expect("a number");
    let mut all = Vec::new();
    for seq in number("first_seq").max(1)..=number("last_seq") {
        let got = loop {
            match api(client, &format!("STREAM.MSG.GET.{stream}"), json!({ "seq": seq })).await {
                // No answer, as while a cluster elects, says nothing about the message.
                Err(0) => {}
                got => break got,
            }
        };
        let Ok(got) = got else { continue };
        let text = |key: &str| got["message"][key].as_str().unwrap_or_default().to_owned();
        let headers = String::from_utf8(base64(&text("hdrs"))).expect("text");
        all.push(Stored { subject: text("subject"), headers, payload: base64(&text("data")) });
    }
    all
}

/// Publishes as any client does. Returns whether the stream already had the message.
pub(crate) async fn publish(client: &Client, subject: &str, headers: &[(&str, &str)], payload: &[u8]) -> bool {
    let headers = headers.iter().map(|(name, value)| {
        (name.parse::<HeaderName>().expect("a name"), value.parse::<HeaderValue>().expect("a value"))
    });
    let published = async {
        loop {
            let request = Request::new()
                .headers(headers.clone().collect())
                .payload(payload.to_vec().into())
                .timeout(Some(Duration::from_secs(2)));
            match client.send_request(subject.to_owned(), request).await {
                Ok(message) => {
                    let answer: Value = serde_json::from_slice(&message.payload).expect("JSON");
                    assert!(answer["seq"].is_u64(), "{answer}");
                    return answer["duplicate"].as_bool().unwrap_or_default();
                }
                Err(error) if error.kind() == RequestErrorKind::MaxPayloadExceeded => panic!("{error}"),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    };
    timeout(PATIENCE, published).await.expect("published in time")
}

/// Returns what a core subscriber received so far.
pub(crate) async fn drain(client: &Client, subscriber: &mut async_nats::Subscriber) -> Vec<Message> {
    use futures::{FutureExt as _, StreamExt as _};
    // An answer on the same connection arrives after everything before it.
    let _ = api(client, "INFO", Value::Null).await;
    std::iter::from_fn(|| subscriber.next().now_or_never().flatten()).collect()
}

fn base64(text: &str) -> Vec<u8> {
    base64::engine::Engine::decode(&base64::engine::general_purpose::STANDARD, text).expect("base64")
}
