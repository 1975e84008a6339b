//! The endpoint: writes every arrival down before it answers.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use postbox_core::EventId;
use postbox_testkit::ledger::Ledger;

/// A webhook endpoint on loopback.
pub(crate) struct Endpoint {
    address: SocketAddr,
    arrived: Arc<Mutex<HashSet<EventId>>>,
}

#[derive(Clone)]
struct Arrivals {
    ledger: Arc<Ledger>,
    arrived: Arc<Mutex<HashSet<EventId>>>,
}

impl Endpoint {
    /// Starts it on a free port.
    pub(crate) async fn start(ledger: Arc<Ledger>) -> Self {
        let arrived = Arc::default();
        let app =
            Router::new().route("/hook", post(arrive)).with_state(Arrivals { ledger, arrived: Arc::clone(&arrived) });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound socket");
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { address, arrived }
    }

    /// Where to post.
    pub(crate) fn url(&self) -> String {
        format!("http://{}/hook", self.address)
    }

    /// Every event that ever arrived.
    pub(crate) fn arrived(&self) -> HashSet<EventId> {
        self.arrived.lock().expect("no panic while held").clone()
    }
}

async fn arrive(State(arrivals): State<Arrivals>, headers: HeaderMap, body: axum::body::Bytes) -> StatusCode {
    let Some(id) = headers.get("webhook-id").and_then(|id| id.to_str().ok()?.parse().ok()) else {
        return StatusCode::UNPROCESSABLE_ENTITY;
    };
    if !body.starts_with(b"{") {
        return StatusCode::UNPROCESSABLE_ENTITY;
    }
    arrivals.ledger.arrive(id);
    arrivals.arrived.lock().expect("no panic while held").insert(id);
    StatusCode::NO_CONTENT
}
