//! Serving strangers: slow and endless clients, and others at the same time.

#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use postbox_core::{Clock, LogName, SourceName};
use postbox_ingress::{Ingress, SourceLimits, WebhookSource};
use postbox_listen::{ServeLimits, serve};
use postbox_testkit::clock::{ManualClock, StillClock};
use postbox_testkit::inbox::Inbox;
use postbox_webhook::standard::{SignKey, Signer};
use postbox_webhook::{Scheme, Settings, UnixSeconds, verifier};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Deadline of every wait; nothing takes nearly as long.
const DEADLINE: Duration = Duration::from_secs(60);
/// Longer than any test runs.
const HOUR: Duration = Duration::from_secs(3_600);
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
/// The time on the test clocks.
const NOW_S: i64 = 1_767_225_600;
/// Well-formed headers that anybody can write, with that time.
const PLAUSIBLE: &str = "webhook-id: m\r\nwebhook-timestamp: 1767225600\r\nwebhook-signature: v1,AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\r\n";

struct Server {
    address: SocketAddr,
    clock: Arc<ManualClock>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

async fn start(router: Router, limits: ServeLimits) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel();
    let stopped = async { drop(stopped.await) };
    let clock = Arc::new(ManualClock::default());
    let task = tokio::spawn(serve(listener, router, limits, clock.clone(), stopped));
    Server { address, clock, stop, task }
}

/// The server's time passes only here, so that on a slow machine nobody who should be in time is
/// late.
async fn while_time_passes<T>(clock: &ManualClock, waiting: impl Future<Output = T>) -> T {
    let passing = async {
        loop {
            clock.advance(MOMENT);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        waited = waiting => waited,
        () = passing => unreachable!("time passes for ever"),
    }
}

async fn start_ingress(limits: ServeLimits, of_source: SourceLimits) -> (Server, Arc<Inbox>, Arc<Ingress>) {
    let inbox = Arc::new(Inbox::default());
    let verifier = verifier(Scheme::StandardWebhooks, &[SECRET], &Settings::default()).unwrap();
    let mut source = WebhookSource::new(SourceName::new("peer").unwrap(), LogName::inbox(), verifier);
    source.limits = of_source;
    let ingress = Ingress::new(vec![source], inbox.clone(), Arc::new(StillClock)).unwrap();
    let server = start(postbox_ingress::router(Arc::clone(&ingress)), limits).await;
    (server, inbox, ingress)
}

async fn connect(server: &Server, first: &[u8]) -> TcpStream {
    let stream = timeout(DEADLINE, TcpStream::connect(server.address)).await.expect("a connection in time");
    let mut stream = stream.unwrap();
    stream.write_all(first).await.unwrap();
    stream
}

/// A genuine message, up to its framing and body.
fn signed(id: &str) -> String {
    let signer = Signer::new([SignKey::parse(SECRET).unwrap()]).unwrap();
    let signed = signer.sign(id, UnixSeconds(NOW_S), b"{}").unwrap();
    let headers: String = signed.headers().iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    format!("POST /in/peer HTTP/1.1\r\nhost: x\r\n{headers}")
}

/// Sends a genuine message on a new connection; returns the answer.
async fn send(server: &Server, id: &str) -> String {
    let request = signed(id) + "content-length: 2\r\nconnection: close\r\n\r\n{}";
    hear(&mut connect(server, request.as_bytes()).await).await
}

/// Reads until the server ends the connection, in whichever way.
async fn hear(stream: &mut TcpStream) -> String {
    let mut heard = Vec::new();
    let _ = timeout(DEADLINE, stream.read_to_end(&mut heard)).await.expect("the connection ends");
    String::from_utf8_lossy(&heard).into_owned()
}

/// Much shorter than any timeout in these tests.
const MOMENT: Duration = Duration::from_millis(50);
const LIMITS: ServeLimits = ServeLimits { connections: 32, header_timeout: Duration::from_secs(10) };
const SLOW: [&[u8]; 4] = [
    b"",
    b"POST /in/peer HTTP/1.1\r\nhost: x\r\nx-slow: ",
    b"POST /in/peer HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\nwebhook-id: m\r\nwebhook-timestamp: 1767225600\r\n\
      webhook-signature: v1,AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\r\n\r\n{",
    b"PRI * HTTP/2.0\r\n",
];

#[tokio::test]
async fn slow_clients_push_out_each_other_and_everybody_else_is_served() {
    let body_for_ever = SourceLimits { body_timeout: HOUR, ..SourceLimits::default() };
    let (server, inbox, _) = start_ingress(LIMITS, body_for_ever).await;
    let mut slow = Vec::new();
    for number in 0..400 {
        slow.push(connect(&server, SLOW[number % SLOW.len()]).await);
        // One that was answered and is silent gives way like the others.
        let mut answered = connect(&server, b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n").await;
        timeout(DEADLINE, answered.read_exact(&mut [0; 12])).await.expect("an answer").unwrap();
        slow.push(answered);
        if number % 20 == 19 {
            let answer = send(&server, &format!("msg_{number}")).await;
            assert!(answer.starts_with("HTTP/1.1 202"), "after {number} slow ones: {answer}");
        }
    }
    assert_eq!(inbox.all().len(), 20);
    // Evicted connections end; as many as there are slots may still be open.
    let ends = slow.iter_mut().take(800 - LIMITS.connections).map(hear);
    timeout(DEADLINE, futures::future::join_all(ends)).await.expect("they are all closed");
    // Dropping them frees their slots.
    drop(slow);
    assert!(send(&server, "msg_last").await.starts_with("HTTP/1.1 202"));
}

#[tokio::test]
async fn whoever_sends_no_head_in_time_is_let_go() {
    let (server, ..) = start_ingress(LIMITS, SourceLimits::default()).await;
    for first in [SLOW[0], SLOW[1], SLOW[3]] {
        let mut slow = connect(&server, first).await;
        while_time_passes(&server.clock, hear(&mut slow)).await;
    }
    // Sending byte by byte does not help.
    let mut dripping = connect(&server, b"POST /in/peer HTTP/1.1\r\n").await;
    let drip = async { while dripping.write_all(b"x").await.is_ok() && !pause().await {} };
    while_time_passes(&server.clock, timeout(DEADLINE, drip)).await.expect("it is closed");
    // Nor does waiting before a second request, but a proxy may keep its connection for a minute.
    let mut idle = connect(&server, b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let mut answer = [0; 12];
    timeout(DEADLINE, idle.read_exact(&mut answer)).await.expect("an answer").unwrap();
    assert_eq!(&answer, b"HTTP/1.1 404");
    let answered_at = server.clock.monotonic();
    while_time_passes(&server.clock, hear(&mut idle)).await;
    let kept = server.clock.monotonic() - answered_at;
    assert!(kept >= Duration::from_secs(75), "{kept:?}");
}

/// A short pause; always `false`.
async fn pause() -> bool {
    tokio::time::sleep(Duration::from_millis(5)).await;
    false
}

#[tokio::test]
async fn an_answer_that_is_not_read_holds_up_nobody() {
    let router = Router::new().route("/", get(async || "x".repeat(64 * 1024 * 1024)));
    let server = start(router, ServeLimits { connections: 1, ..LIMITS }).await;
    let mut lazy = connect(&server, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let mut first = [0; 15];
    lazy.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200 OK");
    // There is only one slot, and it is freed although the answer is not read.
    let mut next = connect(&server, b"GET /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    assert!(hear(&mut next).await.starts_with("HTTP/1.1 404"));
    assert!(hear(&mut lazy).await.len() < 64 * 1024 * 1024);
}

/// Returns a server with a request in service, its connection, and what lets it be answered.
async fn start_busy(limits: ServeLimits) -> (Server, TcpStream, Arc<Notify>) {
    let (begun, finish) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (tell, wait) = (Arc::clone(&begun), Arc::clone(&finish));
    let answer = get(async move || {
        tell.notify_one();
        wait.notified().await;
        "done"
    });
    let server = start(Router::new().route("/", answer), limits).await;
    let busy = connect(&server, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
    timeout(DEADLINE, begun.notified()).await.expect("the request is in service");
    (server, busy, finish)
}

/// A newcomer that finds all connections busy must not wait until one ends: they may stay open.
#[tokio::test]
async fn a_connection_that_was_busy_gives_way_once_it_is_idle() {
    let (server, mut busy, finish) = start_busy(ServeLimits { connections: 1, ..LIMITS }).await;
    let mut next = connect(&server, b"GET /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    // Later, it would find the other one idle.
    for _ in 0..10 {
        pause().await;
    }
    finish.notify_one();
    assert!(hear(&mut next).await.starts_with("HTTP/1.1 404"));
    assert!(hear(&mut busy).await.ends_with("done"));
}

/// Connects and sends while the server's task, which is on this thread, cannot run.
fn connect_at_once(server: &Server, request: &str) -> TcpStream {
    let mut stream = std::net::TcpStream::connect(server.address).unwrap();
    std::io::Write::write_all(&mut stream, request.as_bytes()).unwrap();
    stream.set_nonblocking(true).unwrap();
    TcpStream::from_std(stream).unwrap()
}

#[tokio::test]
async fn a_request_that_has_arrived_is_answered_however_many_come_after_it() {
    let (server, mut busy, finish) = start_busy(ServeLimits { connections: 2, ..LIMITS }).await;
    let asked = "GET /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let mut crowd: Vec<_> = (0..50).map(|_| connect_at_once(&server, asked)).collect();
    for (number, asks) in crowd.iter_mut().enumerate() {
        let answer = hear(asks).await;
        assert!(answer.starts_with("HTTP/1.1 404"), "{number}: {answer:?}");
    }
    finish.notify_one();
    let answered = timeout(DEADLINE, busy.read_exact(&mut [0; 15])).await.expect("an answer").unwrap();
    assert_eq!(answered, 15);
}

/// The head, the body and its end are read in several steps, and each waits for the client if it is
/// not here yet.
#[tokio::test]
async fn a_message_that_has_arrived_is_stored_although_it_is_read_in_steps() {
    let limits = ServeLimits { connections: 1, ..LIMITS };
    let (server, inbox, _) = start_ingress(limits, SourceLimits::default()).await;
    let framings = ["content-length: 2\r\n\r\n{}", "transfer-encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"];
    let message = |number: usize| signed(&format!("msg_{number}")) + "connection: close\r\n" + framings[number % 2];
    let mut crowd: Vec<_> = (0..50).map(|number| connect_at_once(&server, &message(number))).collect();
    for (number, sender) in crowd.iter_mut().enumerate() {
        let answer = hear(sender).await;
        assert!(answer.starts_with("HTTP/1.1 202"), "{number}: {answer:?}");
    }
    assert_eq!(inbox.all().len(), 50);
    // Silent ones in between still give way.
    let _silent = connect_at_once(&server, "");
    assert!(send(&server, "msg_last").await.starts_with("HTTP/1.1 202"));
}

#[tokio::test]
async fn a_stop_serves_requests_that_have_arrived_and_were_not_accepted() {
    let (server, mut busy, finish) = start_busy(ServeLimits { connections: 1, ..LIMITS }).await;
    let mut waiting = Vec::new();
    // One is accepted and waits for a slot, one is in the queue.
    for _ in 0..2 {
        waiting.push(connect(&server, b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n").await);
    }
    server.stop.send(()).unwrap();
    for waiting in &mut waiting {
        assert!(hear(waiting).await.starts_with("HTTP/1.1 404"));
    }
    finish.notify_one();
    assert!(hear(&mut busy).await.ends_with("done"));
    // The server waits a while for the clients' ends, by a clock that stands still here.
    drop((busy, waiting));
    timeout(DEADLINE, server.task).await.expect("it has stopped").unwrap();
}

#[tokio::test]
async fn a_stop_lets_requests_in_service_finish_and_nobody_else_delays_it() {
    let (server, mut busy, finish) = start_busy(LIMITS).await;
    let mut idle: Vec<_> = Vec::new();
    for first in SLOW {
        idle.push(connect(&server, first).await);
    }
    server.stop.send(()).unwrap();
    let rest = async {
        for idle in idle.iter_mut().take(2) {
            hear(idle).await;
        }
        finish.notify_one();
        let answer = hear(&mut busy).await;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("done"), "{answer}");
        timeout(DEADLINE, server.task).await.expect("it has stopped").unwrap();
    };
    while_time_passes(&server.clock, rest).await;
    assert!(TcpStream::connect(server.address).await.is_err());
}

#[tokio::test]
async fn http_1_is_spoken_and_http_2_is_refused() {
    let server = start(Router::new().route("/", get(async || "here")), ServeLimits::default()).await;
    let url = format!("http://{}/", server.address);
    let tls = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let client = reqwest::Client::builder().no_proxy().tls_backend_preconfigured(tls).build().unwrap();
    for answer in futures::future::join_all((0..20).map(|_| client.get(&url).send())).await {
        let answer = answer.unwrap();
        assert_eq!((answer.version(), answer.status().as_u16()), (http::Version::HTTP_11, 200));
    }
    let mut preface = connect(&server, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await;
    assert_eq!(hear(&mut preface).await, "");
}

/// Resident memory of this process, in bytes.
fn memory_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4_096
}

#[tokio::test]
async fn a_body_without_end_is_cut_at_the_limit_and_hears_why() {
    let (server, inbox, ingress) = start_ingress(ServeLimits::default(), SourceLimits::default()).await;
    let before = memory_bytes();
    let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
    for head in ["transfer-encoding: chunked", "content-length: 68719476736"] {
        let head = format!("POST /in/peer HTTP/1.1\r\nhost: x\r\n{PLAUSIBLE}{head}\r\n\r\n");
        // A client that sends everything before it reads, as most do: three times the limit.
        let mut polite = connect(&server, head.as_bytes()).await;
        for _ in 0..48 {
            polite.write_all(chunk.as_bytes()).await.expect("what is sent is taken");
        }
        let mut answer = [0; 12];
        timeout(DEADLINE, polite.read_exact(&mut answer)).await.expect("an answer").unwrap();
        assert_eq!(&answer, b"HTTP/1.1 413");
        // A client that never reads: it can send a bounded amount.
        let mut deaf = connect(&server, head.as_bytes()).await;
        let mut sent = 0;
        while timeout(DEADLINE, deaf.write_all(chunk.as_bytes())).await.expect("taken or refused").is_ok() {
            sent += chunk.len();
            assert!(sent < 256 * 1024 * 1024, "nobody stops it");
        }
    }
    assert!(memory_bytes().saturating_sub(before) < 64 * 1024 * 1024, "{} MiB more", (memory_bytes() - before) >> 20);
    assert!(inbox.all().is_empty());
    assert!(ingress.counts().iter().any(|count| count.code == "body_too_large" && count.count == 4));
}

#[tokio::test]
async fn what_would_unpack_to_a_thousand_times_its_size_is_not_even_read() {
    let (server, inbox, _) = start_ingress(ServeLimits::default(), SourceLimits::default()).await;
    for encoding in ["gzip", "deflate", "br", "zstd", "x-gzip", "identity, gzip", "\"gzip\"", ""] {
        let head = format!(
            "POST /in/peer HTTP/1.1\r\nhost: x\r\ncontent-encoding: {encoding}\r\ntransfer-encoding: chunked\r\n\r\n"
        );
        let mut stream = connect(&server, head.as_bytes()).await;
        let mut answer = [0; 12];
        timeout(DEADLINE, stream.read_exact(&mut answer)).await.expect("an answer before any body").unwrap();
        assert_eq!(&answer, b"HTTP/1.1 415", "{encoding:?}");
    }
    assert!(inbox.all().is_empty());
}

/// A body whose end two parsers could see in two places, as used in request smuggling.
#[tokio::test]
async fn a_body_with_two_ends_is_refused_or_the_last_of_its_connection() {
    let (server, inbox, ingress) = start_ingress(LIMITS, SourceLimits::default()).await;
    let post = |id: &str, framing: &str| format!("{}{framing}\r\n", signed(id));
    let body = "2\r\n{}\r\n0\r\n\r\n";
    let plain = post("next", "content-length: 2\r\nconnection: close\r\n") + "{}";
    let answers = async |first: String| {
        let mut stream = connect(&server, (first + body + &plain).as_bytes()).await;
        let heard = hear(&mut stream).await;
        let statuses = heard.split("HTTP/1.1 ").skip(1).map(|answer| answer[..3].to_owned());
        statuses.collect::<Vec<_>>()
    };
    for coding in
        ["gzip, chunked", "chunked, chunked", "x, chunked", "identity, chunked", "gzip\r\ntransfer-encoding: chunked"]
    {
        let answers = answers(post("coded", &format!("transfer-encoding: {coding}\r\n"))).await;
        assert_eq!(answers, ["501"], "{coding}: and nothing more is read of that connection");
    }
    for coding in ["chunked, gzip", "gzip", "chunked\r\ntransfer-encoding: gzip"] {
        assert_eq!(answers(post("coded", &format!("transfer-encoding: {coding}\r\n"))).await, ["400"], "{coding}");
    }
    assert!(inbox.all().is_empty());
    let counts = ingress.counts();
    assert_eq!(counts.iter().find(|count| count.code == "transfer_refused").map(|count| count.count), Some(5));
    // Both a length and chunks: read by its chunks, and the connection is closed afterwards.
    for (id, framing) in [
        ("both-1", "content-length: 17\r\ntransfer-encoding: chunked\r\n"),
        ("both-2", "transfer-encoding: Chunked\r\ncontent-length: 2\r\n"),
    ] {
        assert_eq!(answers(post(id, framing)).await, ["202"], "{framing}");
    }
    assert_eq!(answers(post("chunks", "transfer-encoding: chunked\r\n")).await, ["202", "202"]);
    assert_eq!(inbox.all().len(), 4);
}

#[tokio::test]
async fn a_stop_waits_for_no_body_that_does_not_end() {
    let body_for_ever = SourceLimits { body_timeout: HOUR, ..SourceLimits::default() };
    let (server, ..) = start_ingress(LIMITS, body_for_ever).await;
    let mut withheld = connect(&server, SLOW[2]).await;
    // The body has been read up to here, because the same task later reads the next connection's
    // answer.
    let mut asked = connect(&server, b"GET /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    assert!(hear(&mut asked).await.starts_with("HTTP/1.1 404"));
    server.stop.send(()).unwrap();
    let rest = async {
        hear(&mut withheld).await;
        timeout(DEADLINE, server.task).await.expect("it has stopped").unwrap();
    };
    while_time_passes(&server.clock, rest).await;
}
