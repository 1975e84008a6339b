//! `examples/verify`: receivers in other languages verify what the sink really posts, and nothing
//! else. Each runs as its own server.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use jiff::Timestamp;
use postbox_core::{Clock, Delivery, Envelope, NewEvent};
use postbox_http::{HttpSink, HttpSinkConfig};
use postbox_webhook::UnixSeconds;
use postbox_webhook::standard::{Signer, SigningKey};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::TcpStream;
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
        command.arg(path).arg("0").env("WEBHOOK_SECRETS", secrets);
        Self::run(command).await
    }

    async fn run(mut command: Command) -> Self {
        command.stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?} must be installed: {error}"));
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = timeout(DEADLINE, lines.next_line()).await.expect("it starts").unwrap().unwrap_or_default();
        let port: u16 =
            line.trim_start_matches("listening on ").parse().unwrap_or_else(|_| panic!("{command:?}: {line:?}"));
        Self { address: format!("127.0.0.1:{port}"), lines, _child: child }
    }

    fn url(&self) -> String {
        format!("http://{}/hooks", self.address)
    }

    /// Returns what it prints about the next message that it accepted as genuine.
    async fn heard(&mut self) -> String {
        timeout(DEADLINE, self.lines.next_line()).await.expect("it says so").unwrap().expect("it still runs")
    }

    /// Posts and returns the status.
    async fn post(&self, headers: &[(&str, &str)], body: &[u8]) -> String {
        self.post_as(&body.len().to_string(), headers, body).await
    }

    /// The same with a `content-length` that may be false.
    async fn post_as(&self, length: &str, headers: &[(&str, &str)], body: &[u8]) -> String {
        let mut stream = TcpStream::connect(&self.address).await.expect("it listens");
        let mut request = format!("POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n");
        headers.iter().for_each(|(name, value)| request += &format!("{name}: {value}\r\n"));
        stream.write_all(&[request.as_bytes(), b"\r\n", body].concat()).await.unwrap();
        let mut answer = String::new();
        timeout(DEADLINE, stream.read_to_string(&mut answer)).await.expect("an answer").unwrap();
        answer.split(' ').nth(1).unwrap_or_default().to_owned()
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

/// A malformed request is refused. Each differs in one place from a genuine one.
async fn refuses(sample: &mut Sample, key: &str) {
    const BODY: &[u8] = "{\"order\": 42, \"name\": \"Zoë\"}".as_bytes();
    let sign = |age: i64| {
        let time = UnixSeconds(Timestamp::now().as_second() - age);
        Signer::new([key.parse_key()]).unwrap().sign("msg_1", time, BODY).unwrap()
    };
    let fresh = sign(0);
    let [id, time, signature] = fresh.headers();
    assert_eq!(sample.post(&[id, time, signature], BODY).await, "204");
    sample.heard().await;
    assert_eq!(sample.post(&sign(200).headers(), BODY).await, "204", "within the tolerance");
    sample.heard().await;
    assert_eq!(sample.post(&sign(400).headers(), BODY).await, "401", "too old");
    assert_eq!(sample.post(&sign(-400).headers(), BODY).await, "401", "from the future");
    assert_eq!(sample.post(&[id, time, signature], &BODY[1..]).await, "401", "another body");
    assert_eq!(sample.post(&[("webhook-id", "msg_2"), time, signature], BODY).await, "401", "another id");
    assert_eq!(sample.post(&[("webhook-id", "m.1"), time, signature], BODY).await, "401", "an id with a dot");
    for wrong in ["", "v1", "v1,", "v2,AAAA", &signature.1[..20], &format!("v9{}", &signature.1[2..])] {
        assert_eq!(sample.post(&[id, time, ("webhook-signature", wrong)], BODY).await, "401", "{wrong:?}");
    }
    for wrong in ["", "x", "-1", "1e9", "99999999999999999999"] {
        assert_eq!(sample.post(&[id, ("webhook-timestamp", wrong), signature], BODY).await, "401", "{wrong:?}");
    }
    // Another encoding of the right code is not accepted.
    let code = |version: &str| signature.1.strip_prefix(version).map(str::to_owned);
    let (version, code) = match code("v1,") {
        Some(code) => ("v1,", code),
        None => ("v1a,", code("v1a,").expect("one of the two")),
    };
    let unpadded = code.trim_end_matches('=');
    let spellings = [
        code.replace('+', "-").replace('/', "_"),
        unpadded.to_owned(),
        format!("{code}="),
        format!("{}\t{}", &code[..20], &code[20..]),
        format!("{code},"),
        format!("{code},x"),
    ];
    for spelling in spellings.into_iter().filter(|spelling| *spelling != code) {
        let wrong = format!("{version}{spelling}");
        assert_eq!(sample.post(&[id, time, ("webhook-signature", &wrong)], BODY).await, "401", "{wrong:?}");
    }
    // A repeated header is ambiguous, equal or not, whichever comes first.
    for (twice, other) in [(id, "msg_2"), (time, "1"), (signature, "v1,AAAA")] {
        let all = [id, time, signature];
        for other in [other, twice.1] {
            let after = [&all[..], &[(twice.0, other)]].concat();
            let before = [&[(twice.0, other)], &all[..]].concat();
            assert_eq!(sample.post(&after, BODY).await, "401", "{} twice", twice.0);
            assert_eq!(sample.post(&before, BODY).await, "401", "{} twice", twice.0);
        }
    }
    for length in ["-1", "x", "99999999999", "+1", "1, 2"] {
        let status = sample.post_as(length, &[id, time, signature], b"").await;
        assert!(["400", "413"].contains(&status.as_str()), "content-length {length}: {status:?}");
    }
    for missing in 0..3 {
        let mut headers = vec![id, time, signature];
        headers.remove(missing);
        assert_eq!(sample.post(&headers, BODY).await, "401", "without header {missing}");
    }
}

#[tokio::test]
async fn the_python_receiver_takes_what_the_sink_posts_and_nothing_else() {
    let mut sample = Sample::start("python3", "verify.py", SECRET).await;
    refuses(&mut sample, SECRET).await;
    verifies(&mut sample, SECRET).await;
}

#[tokio::test]
async fn the_node_receiver_takes_what_the_sink_posts_and_nothing_else() {
    let public = SigningKey::parse(SEED).unwrap().public_key();
    let mut sample = Sample::start("node", "verify.mjs", &format!("{SECRET} {public}")).await;
    for key in [SECRET, SEED] {
        refuses(&mut sample, key).await;
        verifies(&mut sample, key).await;
    }
}

/// The receiver of the guide answers each malformed event by itself: an event without an answer
/// would count as an outage of the endpoint, and hold back all others.
#[tokio::test]
async fn the_guide_s_python_receiver_refuses_what_is_malformed_and_goes_on() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/guide/endpoint.md")).unwrap();
    let (_, rest) = page.split_once("```python\n").expect("a receiver");
    let (program, _) = rest.split_once("```").expect("its end");
    let last = "ThreadingHTTPServer((\"127.0.0.1\", int(sys.argv[1])), Receiver).serve_forever()";
    assert!(program.contains(last), "{program}");
    let announced = "server = ThreadingHTTPServer((\"127.0.0.1\", 0), Receiver)\n\
        print(f\"listening on {server.server_port}\", flush=True)\nserver.serve_forever()";
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("receiver.py"), program.replace(last, announced)).unwrap();
    let mut command = Command::new("python3");
    command.arg("receiver.py").current_dir(folder.path()).stderr(Stdio::null());
    command.env("PYTHONPATH", root.join("examples/verify")).env("WEBHOOK_SECRETS", SECRET);
    let sample = Sample::run(command).await;

    let sink = signing(sample.url(), &[SECRET]);
    let paid = |payload: &str| NewEvent::json("order.paid", payload.to_owned());
    let nested = "[".repeat(100_000);
    let malformed = [
        "no JSON",
        "{}",
        "[]",
        "5",
        r#"{"order":"abc"}"#,
        r#"{"order":{}}"#,
        r#"{"order":99999999999999999999}"#,
        nested.as_str(),
    ];
    for (number, payload) in (1..).zip(malformed) {
        let outcome = send(&sink, &delivery(number, paid(payload))).await;
        assert_eq!(short(&outcome), ("dead", "http_422"), "{payload:.40}: {outcome:?}");
    }
    // With its envelope it is larger than the receiver takes.
    let envelope = Envelope::Json;
    let large = HttpSink::new(HttpSinkConfig { envelope, ..config(sample.url()) }, Arc::new(WallClock)).unwrap();
    let payload = format!("\"{}\"", "x".repeat((16 << 20) - 2));
    for number in 50..60 {
        let outcome = send(&large, &delivery(number, paid(&payload))).await;
        assert_eq!(short(&outcome), ("dead", "http_413"), "{outcome:?}");
    }
    // It reads four times what it takes, and no more: an endless body would hold its thread.
    let mut stranger = TcpStream::connect(&sample.address).await.unwrap();
    let head = format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", (64 << 20) + 1);
    stranger.write_all(head.as_bytes()).await.unwrap();
    stranger.write_all("x".repeat(64 << 20).as_bytes()).await.unwrap();
    let mut answer = String::new();
    timeout(DEADLINE, stranger.read_to_string(&mut answer)).await.expect("it is answered and closed").unwrap();
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    let right = || delivery(99, paid(r#"{"order":17}"#));
    assert_eq!(short(&send(&sink, &right()).await), ("delivered", ""));
    assert_eq!(short(&send(&sink, &right()).await), ("duplicate", ""));
}

/// A full disk cuts a line of the guide's receiver. The next event must not be lost with it.
#[tokio::test]
async fn the_guide_s_node_receiver_keeps_what_it_accepts_after_a_cut_line() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/guide/endpoint.md")).unwrap();
    let (_, rest) = page.split_once("```js\n").expect("a receiver");
    let (program, _) = rest.split_once("```").expect("its end");
    let last = "}).listen(Number(process.argv[2]), \"127.0.0.1\");";
    assert!(program.contains(last), "{program}");
    let announced = "}).listen(0, \"127.0.0.1\", function () { console.log(`listening on ${this.address().port}`); });";
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("receiver.mjs"), program.replace(last, announced)).unwrap();
    std::fs::copy(root.join("examples/verify/verify.mjs"), folder.path().join("verify.mjs")).unwrap();
    let start = || {
        let mut command = Command::new("node");
        command.arg("receiver.mjs").current_dir(folder.path()).env("WEBHOOK_SECRETS", SECRET);
        Sample::run(command)
    };
    let event = |number| delivery(number, NewEvent::json("order.paid", r#"{"order":17}"#));

    let sample = start().await;
    let ledger = folder.path().join("ledger.jsonl");
    std::fs::write(&ledger, format!("{{\"id\":\"{}\",\"top", event_id(1))).unwrap();
    for number in [1, 2] {
        let outcome = send(&signing(sample.url(), &[SECRET]), &event(number)).await;
        assert_eq!(short(&outcome), ("delivered", ""), "{number}");
    }
    drop(sample);
    let again = start().await;
    for number in [1, 2] {
        let outcome = send(&signing(again.url(), &[SECRET]), &event(number)).await;
        assert_eq!(short(&outcome), ("duplicate", ""), "{number}: {:?}", std::fs::read_to_string(&ledger));
    }
}
