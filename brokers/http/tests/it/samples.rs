//! `examples/verify`: receivers in other languages verify what the sink really posts. Each runs as
//! its own server.
//!
//! `crates/webhook` tests the same receivers with every kind of malformed header. These tests cover
//! the whole path: envelope, signature, connection, answer, outcome.

use std::collections::VecDeque;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use bytes::Bytes;
use jiff::{SignedDuration, Timestamp};
use postbox_core::{Clock, Delivery, NewEvent};
use postbox_http::{HttpSink, HttpSinkConfig};
use postbox_webhook::standard::SigningKey;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;

use crate::stand::{DEADLINE, ParseKey, SECRET, StillClock, config, delivery, event_id, send, serve, short, text};

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

/// The wall clock, or one that is off by some seconds: the samples use the machine's clock.
struct WallClock {
    off_s: i64,
}

#[async_trait]
impl Clock for WallClock {
    fn now(&self) -> Timestamp {
        Timestamp::now() + SignedDuration::from_secs(self.off_s)
    }

    fn monotonic(&self) -> Duration {
        StillClock.monotonic()
    }

    async fn sleep(&self, duration: Duration) {
        StillClock.sleep(duration).await;
    }
}

fn signing(url: impl Into<String>, keys: &[&str], off_s: i64) -> HttpSink {
    let config = HttpSinkConfig { keys: keys.iter().map(|key| key.parse_key()).collect(), ..config(url) };
    HttpSink::new(config, Arc::new(WallClock { off_s })).unwrap()
}

/// A change to a request on its way to the receiver.
type Tamper = fn(&mut http::request::Parts, &mut Vec<u8>);

/// Starts a proxy between sink and receiver. It applies the next change of the list to each
/// request, and passes the receiver's answer back.
async fn between(receiver: &Sample, tamperings: impl IntoIterator<Item = Tamper>) -> String {
    let tamperings: VecDeque<Tamper> = tamperings.into_iter().collect();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (client, url) = (reqwest::Client::builder().no_proxy().build().unwrap(), receiver.url());
    let state = Arc::new((client, url, Mutex::new(tamperings)));
    let router = Router::new().fallback(move |request: Request| {
        let state = Arc::clone(&state);
        async move {
            let (client, url, tamperings) = &*state;
            let (mut parts, body) = request.into_parts();
            let mut body = axum::body::to_bytes(body, usize::MAX).await.unwrap().to_vec();
            let tamper = tamperings.lock().unwrap().pop_front().expect("one for each request");
            tamper(&mut parts, &mut body);
            parts.headers.remove("host");
            parts.headers.remove("content-length");
            let answer = client.post(url.as_str()).headers(parts.headers).body(body).send().await.unwrap();
            (answer.status(), Body::empty())
        }
    });
    format!("http://{}/", serve(router).await)
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
    let sink = signing(&url, &[key], 0);
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
        assert_eq!(outcome(&signing(&url, &keys, 0), &delivery(9, event("{}"))).await, took());
        sample.heard().await;
    }
    assert_eq!(outcome(&signing(&url, &[OTHER], 0), &delivery(9, event("{}"))).await, refused(), "another key");
    assert_eq!(outcome(&signing(&url, &[], 0), &delivery(9, event("{}"))).await, refused(), "not signed");
    for off_s in [-200, 200] {
        assert_eq!(outcome(&signing(&url, &[key], off_s), &delivery(9, event("{}"))).await, took(), "{off_s} s off");
        sample.heard().await;
    }
    for off_s in [-400, 400] {
        assert_eq!(outcome(&signing(&url, &[key], off_s), &delivery(9, event("{}"))).await, refused(), "{off_s} s off");
    }

    let harmless: [Tamper; 2] =
        [|_, _| {}, |parts, _| drop(parts.headers.insert("x-proxy", "was here".parse().unwrap()))];
    let tamperings: [Tamper; 8] = [
        |_, body| body[0] ^= 1,
        |_, body| *body.last_mut().unwrap() ^= 0x80,
        |_, body| body.push(b'\n'),
        |_, body| body.truncate(body.len() - 1),
        |_, body| body.clear(),
        |parts, _| drop(parts.headers.insert("webhook-id", "msg_of_mine".parse().unwrap())),
        |parts, _| {
            let time: i64 = parts.headers["webhook-timestamp"].to_str().unwrap().parse().unwrap();
            parts.headers.insert("webhook-timestamp", (time + 1).into());
        },
        |parts, _| {
            let signature = parts.headers["webhook-signature"].to_str().unwrap();
            let prefix = signature[..signature.len() - 8].to_owned();
            parts.headers.insert("webhook-signature", prefix.parse().unwrap());
        },
    ];
    let sink = signing(between(sample, harmless.into_iter().chain(tamperings)).await, &[key], 0);
    for number in 0..harmless.len() {
        assert_eq!(outcome(&sink, &delivery(9, event("{\"n\":1}"))).await, took(), "harmless change {number}");
        sample.heard().await;
    }
    for number in 0..tamperings.len() {
        assert_eq!(outcome(&sink, &delivery(9, event("{\"n\":1}"))).await, refused(), "tampering {number}");
    }
    // No refused request was called genuine: the next line is about the next genuine one.
    assert_eq!(outcome(&signing(&url, &[key], 0), &delivery(77, event("{}"))).await, took());
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
