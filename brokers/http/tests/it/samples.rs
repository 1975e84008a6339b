//! `examples/verify`: receivers in other languages verify what the sink really posts. Each runs as
//! its own server.
//!
//! `crates/webhook` tests the same receivers with every kind of malformed header. These tests cover
//! the whole path: envelope, signature, connection, answer, outcome.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use jiff::Timestamp;
use postbox_core::{Clock, Delivery, NewEvent};
use postbox_http::{HttpSink, HttpSinkConfig};
use postbox_webhook::standard::SigningKey;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;

use crate::stand::{DEADLINE, ParseKey, SECRET, StillClock, config, delivery, event_id, send, short, text};

const OTHER: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
const SEED: &str = "whsk_VEVTVFNJR05JTkdLRVlET05PVFVTRVRISVNGT1JBTlk=";

/// A sample that runs as a server, on a port that the system chose.
struct Sample {
    address: String,
    lines: Lines<BufReader<ChildStdout>>,
    _child: Child,
}

impl Sample {
    async fn start(program: &str, file: &str, secrets: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/verify").join(file);
        let mut command = Command::new(program);
        command.arg(path).arg("0").env("WEBHOOK_SECRETS", secrets).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{program} must be installed: {error}"));
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = timeout(DEADLINE, lines.next_line()).await.expect("it starts").unwrap().unwrap_or_default();
        let port: u16 = line.trim_start_matches("listening on ").parse().unwrap_or_else(|_| panic!("{file}: {line:?}"));
        Self { address: format!("127.0.0.1:{port}"), lines, _child: child }
    }

    fn url(&self) -> String {
        format!("http://{}/hooks", self.address)
    }

    /// Returns what it prints about the next message that it accepted as genuine.
    async fn heard(&mut self) -> String {
        timeout(DEADLINE, self.lines.next_line()).await.expect("it says so").unwrap().expect("it still runs")
    }
}

/// The wall clock, which the samples use.
struct WallClock;

#[async_trait]
impl Clock for WallClock {
    fn now(&self) -> Timestamp {
        Timestamp::now()
    }

    fn monotonic(&self) -> Duration {
        StillClock.monotonic()
    }

    async fn sleep(&self, duration: Duration) {
        StillClock.sleep(duration).await;
    }
}

fn signing(url: impl Into<String>, keys: &[&str]) -> HttpSink {
    let config = HttpSinkConfig { keys: keys.iter().map(|key| key.parse_key()).collect(), ..config(url) };
    HttpSink::new(config, Arc::new(WallClock)).unwrap()
}

fn event(payload: impl Into<Bytes>) -> NewEvent {
    NewEvent::json("order.placed", payload.into()).key("Zoë 42").header("traceparent", "00-ab-cd-01")
}

async fn outcome(sink: &HttpSink, delivery: &Delivery) -> (&'static str, String) {
    let outcome = send(sink, delivery).await;
    let (kind, code) = short(&outcome);
    assert!(kind == "delivered" || text(&outcome).contains("401"), "{outcome:?}");
    (kind, code.to_owned())
}

/// Genuine requests are accepted, whichever of several keys signed them. All others are refused,
/// and the sink's outcome says so.
async fn verifies(sample: &mut Sample, key: &str) {
    let took = || ("delivered", String::new());
    let refused = || ("dead", "http_401".to_owned());
    let url = sample.url();

    let payloads: [&'static [u8]; 4] =
        ["{\"name\": \"Zoë\",\n\"n\": 1e400}".as_bytes(), b"", b"\x00\xff\r\n.", &[b'x'; 1 << 20]];
    let sink = signing(&url, &[key]);
    for (number, payload) in (1..).zip(payloads) {
        assert_eq!(outcome(&sink, &delivery(number, event(payload))).await, took(), "{} bytes", payload.len());
        let id = event_id(number);
        assert_eq!(sample.heard().await, format!("genuine {id} order.placed {} bytes", payload.len()));
    }
    let mut again = delivery(1, event("{}"));
    again.replay = 2;
    assert_eq!(outcome(&sink, &again).await, took(), "a replay is signed under its own id");
    assert_eq!(sample.heard().await, format!("genuine {} order.placed 2 bytes", again.dedupe_id()));

    // While a key is rotated, both keys sign.
    for keys in [[OTHER, key], [key, OTHER]] {
        assert_eq!(outcome(&signing(&url, &keys), &delivery(9, event("{}"))).await, took());
        sample.heard().await;
    }
    assert_eq!(outcome(&signing(&url, &[OTHER]), &delivery(9, event("{}"))).await, refused(), "another key");
    assert_eq!(outcome(&signing(&url, &[]), &delivery(9, event("{}"))).await, refused(), "not signed");
    // No refused request was called genuine: the next line is about the next genuine one.
    assert_eq!(outcome(&signing(&url, &[key]), &delivery(77, event("{}"))).await, took());
    assert_eq!(sample.heard().await, format!("genuine {} order.placed 2 bytes", event_id(77)));
}

#[tokio::test]
async fn the_python_receiver_verifies_what_the_sink_posts() {
    verifies(&mut Sample::start("python3", "verify.py", SECRET).await, SECRET).await;
}

#[tokio::test]
async fn the_node_receiver_verifies_what_the_sink_posts() {
    let public = SigningKey::parse(SEED).unwrap().public_key();
    let mut sample = Sample::start("node", "verify.mjs", &format!("{SECRET} {public}")).await;
    for key in [SECRET, SEED] {
        verifies(&mut sample, key).await;
    }
}
