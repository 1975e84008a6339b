//! A webhook endpoint that records every arrival. It can be closed at first, or withhold its
//! answers.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use tokio::net::TcpSocket;
use tokio::sync::watch;

use crate::env::{DEADLINE, http_sink};

/// One request.
#[derive(Debug, Clone)]
pub(crate) struct Arrival {
    pub(crate) at: Instant,
    pub(crate) key: String,
    /// The field `n` of its payload.
    pub(crate) n: i64,
    /// The relay's name, from the header `x-relay`.
    pub(crate) relay: String,
    /// Whether the answer was success.
    pub(crate) taken: bool,
}

/// The endpoint's answer to an event of this key, and its delay.
pub(crate) type Answer = fn(key: &str) -> (u16, Duration);

/// Accepts everything at once.
pub(crate) fn takes_all(_key: &str) -> (u16, Duration) {
    (204, Duration::ZERO)
}

/// Refuses everything for good.
pub(crate) fn refuses_all(_key: &str) -> (u16, Duration) {
    (422, Duration::ZERO)
}

/// A reserved port without a listener: connections are refused.
pub(crate) struct Shut {
    socket: TcpSocket,
    address: SocketAddr,
}

impl Shut {
    pub(crate) fn reserve() -> Result<Self> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
        let address = socket.local_addr()?;
        Ok(Self { socket, address })
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    pub(crate) fn open(self, answer: Answer) -> Result<Endpoint> {
        let (note, arrivals) = watch::channel(Vec::new());
        let answer = Arc::new(Mutex::new(answer));
        let current = Arc::clone(&answer);
        let (answered_max, may_answer) = watch::channel(usize::MAX);
        let handler = async move |headers: HeaderMap, body: Bytes| {
            let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
            let payload: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
            let (status, wait) = (current.lock().expect("no panic while held"))(&text("ce-subject"));
            let status = StatusCode::from_u16(status).unwrap_or_default();
            let (at, taken) = (Instant::now(), status.is_success());
            let n = payload["n"].as_i64().unwrap_or(-1);
            let arrival = Arrival { at, key: text("ce-subject"), n, relay: text("x-relay"), taken };
            let mut number = 0;
            note.send_modify(|arrivals: &mut Vec<Arrival>| {
                arrivals.push(arrival);
                number = arrivals.len();
            });
            tokio::time::sleep(wait).await;
            // Fails only when the test is over.
            let _ = may_answer.clone().wait_for(|max| number <= *max).await;
            status
        };
        let listener = self.socket.listen(1024)?;
        tokio::spawn(axum::serve(listener, Router::new().route("/", post(handler))).into_future());
        Ok(Endpoint { address: self.address, answer, arrivals, answered_max })
    }
}

/// A webhook endpoint on loopback.
pub(crate) struct Endpoint {
    address: SocketAddr,
    answer: Arc<Mutex<Answer>>,
    arrivals: watch::Receiver<Vec<Arrival>>,
    answered_max: watch::Sender<usize>,
}

impl Endpoint {
    pub(crate) fn start(answer: Answer) -> Result<Self> {
        Shut::reserve()?.open(answer)
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    /// A subscription that posts here.
    pub(crate) fn subscription(&self, name: &str) -> String {
        format!("[subscriptions.{name}]\n{}", http_sink(&self.url()))
    }

    /// Changes the answer from now on.
    pub(crate) fn set(&self, answer: Answer) {
        *self.answer.lock().expect("no panic while held") = answer;
    }

    /// Answers only this many requests and holds back later ones, so that a fault finds work in
    /// flight.
    pub(crate) fn answer_only(&self, requests: usize) {
        self.answered_max.send_replace(requests);
    }

    /// Answers everything, held requests first.
    pub(crate) fn answer_all(&self) {
        self.answer_only(usize::MAX);
    }

    /// Arrivals so far, in order.
    pub(crate) fn arrivals(&self) -> Vec<Arrival> {
        self.arrivals.borrow().clone()
    }

    pub(crate) fn count(&self) -> usize {
        self.arrivals.borrow().len()
    }

    /// Waits until the arrivals are as wanted, and returns them.
    pub(crate) async fn until(&self, what: &str, wanted: impl Fn(&[Arrival]) -> bool) -> Result<Vec<Arrival>> {
        let mut arrivals = self.arrivals.clone();
        let waited = tokio::time::timeout(DEADLINE, arrivals.wait_for(|arrivals| wanted(arrivals))).await;
        let seen = waited.with_context(|| format!("{what}: it never came; {} arrived", self.count()))??;
        Ok(seen.clone())
    }

    /// Waits until nothing has arrived for this time.
    pub(crate) async fn quiet_for(&self, time: Duration) -> Result<()> {
        let mut arrivals = self.arrivals.clone();
        let quiet = async {
            arrivals.mark_unchanged();
            while tokio::time::timeout(time, arrivals.changed()).await.is_ok() {}
        };
        tokio::time::timeout(DEADLINE, quiet).await.context("it never grew quiet")
    }
}

/// The numbers accepted for one key, first arrivals only.
pub(crate) fn firsts(arrivals: &[Arrival], key: &str) -> Vec<i64> {
    let mut firsts = Vec::new();
    for arrival in arrivals.iter().filter(|arrival| arrival.taken && arrival.key == key) {
        if !firsts.contains(&arrival.n) {
            firsts.push(arrival.n);
        }
    }
    firsts
}
