//! Shared by these tests: events and scripted targets.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use bytes::Bytes;
use http::HeaderMap;
use postbox_core::{Clock, Delivery, EventId, NewEvent, Outcome, Seq, Sink};
use postbox_http::{HttpSink, HttpSinkConfig, IpNet};
pub(crate) use postbox_testkit::clock::StillClock;
pub(crate) use postbox_testkit::sending::short;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

/// Longest wait in any test. Nothing takes nearly as long.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);
/// A wait that outlasts every test.
pub(crate) const HOUR: Duration = Duration::from_secs(3_600);
pub(crate) const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
pub(crate) const NOW_S: i64 = 1_767_225_600;

pub(crate) fn event_id(number: u64) -> EventId {
    format!("00000000-0000-7000-8000-{number:012x}").parse().unwrap()
}

pub(crate) fn delivery(number: u64, event: NewEvent) -> Delivery {
    let now = StillClock.now();
    Delivery {
        event: event.into_event(event_id(number), now),
        seq: Seq(number as i64),
        attempt: 1,
        replay: 0,
        trace: None,
    }
}

pub(crate) fn plain(number: u64) -> Delivery {
    delivery(number, NewEvent::json("order.paid", r#"{"id":1}"#))
}

/// Allows loopback addresses, since the targets of these tests are not public.
pub(crate) fn this_machine() -> Vec<IpNet> {
    ["127.0.0.0/8", "::1/128"].map(|net| net.parse().unwrap()).to_vec()
}

pub(crate) fn config(url: impl Into<String>) -> HttpSinkConfig {
    HttpSinkConfig {
        keys: vec![SECRET.parse_key()],
        timeout: HOUR,
        connect_timeout: HOUR,
        allow: this_machine(),
        ..HttpSinkConfig::new(url)
    }
}

pub(crate) trait ParseKey {
    fn parse_key(&self) -> postbox_webhook::standard::SignKey;
}

impl ParseKey for str {
    fn parse_key(&self) -> postbox_webhook::standard::SignKey {
        postbox_webhook::standard::SignKey::parse(self).unwrap()
    }
}

pub(crate) fn sink(config: HttpSinkConfig) -> HttpSink {
    HttpSink::new(config, Arc::new(StillClock)).unwrap()
}

/// Delivers one event, within the deadline.
pub(crate) async fn send(sink: &HttpSink, delivery: &Delivery) -> Outcome {
    let outcomes = tokio::time::timeout(DEADLINE, sink.deliver(&[delivery])).await.expect("an outcome in time");
    assert_eq!(outcomes.len(), 1);
    outcomes.into_iter().next().unwrap()
}

pub(crate) fn text(outcome: &Outcome) -> &str {
    match outcome {
        Outcome::Delivered { .. } => "",
        Outcome::Retry { error, .. }
        | Outcome::ServerError { error, .. }
        | Outcome::Ambiguous { error, .. }
        | Outcome::Throttled { error, .. }
        | Outcome::Dead { error, .. }
        | Outcome::Unavailable { error, .. }
        | Outcome::Gone { error, .. } => error,
    }
}

/// Serves a router on loopback until the test ends.
pub(crate) async fn serve(router: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

/// A request as the target saw it.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// A target that remembers its requests.
#[derive(Clone, Default)]
pub(crate) struct Target {
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Target {
    /// Starts a target that answers each request with `answer`. Returns its URL too.
    pub(crate) async fn start(answer: impl Fn(&Seen) -> Response + Clone + Send + Sync + 'static) -> (Self, String) {
        let target = Self::default();
        let remember = target.clone();
        let router = Router::new().fallback(move |request: Request| {
            let (remember, answer) = (remember.clone(), answer.clone());
            async move {
                let (parts, body) = request.into_parts();
                let body = axum::body::to_bytes(body, usize::MAX).await.unwrap_or_default();
                let seen = Seen { path: parts.uri.path().to_owned(), headers: parts.headers, body };
                let response = answer(&seen);
                remember.seen.lock().unwrap().push(seen);
                response
            }
        });
        let address = serve(router).await;
        (target, format!("http://{address}"))
    }

    pub(crate) async fn ok() -> (Self, String) {
        Self::start(|_| Response::new(Body::empty())).await
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }
}

/// Starts a target below HTTP: it reads the request's head and passes the connection to `talk`.
/// Returns its URL and a count of its connections.
pub(crate) async fn raw_target<F, R>(talk: F) -> (String, Arc<AtomicUsize>)
where
    F: Fn(TcpStream) -> R + Send + Sync + 'static,
    R: Future<Output = ()> + Send,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let connections = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&connections);
    let talk = Arc::new(talk);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::SeqCst);
            let talk = Arc::clone(&talk);
            tokio::spawn(async move {
                read_head(&mut stream).await;
                talk(stream).await;
            });
        }
    });
    (url, connections)
}

/// Returns an address at which connections are refused. No other process can listen there while the
/// socket exists.
pub(crate) fn nobody() -> (SocketAddr, TcpSocket) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    (socket.local_addr().unwrap(), socket)
}

pub(crate) async fn read_head(stream: &mut TcpStream) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
}

/// Writes until the peer closes the connection.
pub(crate) async fn write_for_ever(stream: &mut TcpStream, piece: &[u8]) {
    while stream.write_all(piece).await.is_ok() {}
}
