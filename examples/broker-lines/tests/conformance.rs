//! The suite that every sink passes.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use broker_lines::server::{Received, Server, listen};
use broker_lines::{LinesConfig, LinesSink};
use postbox_core::{NewEvent, Sink};
use postbox_testkit::conformance::{Attempt, Destination, SinkFixture, SinkTraits};
use serde_json::Value;
use tokio::net::TcpListener;

/// The largest payload; larger ones are refused.
const PAYLOAD_BYTES_MAX: usize = 64 * 1024;

struct Fixture {
    sink: Arc<dyn Sink>,
    address: SocketAddr,
    state: Arc<Mutex<Destination>>,
    server: Mutex<Option<Server>>,
    /// Attempts at servers that were stopped.
    earlier: Mutex<Vec<Attempt>>,
}

fn answer(state: Destination, head: &Value) -> Option<&'static str> {
    let is_refused = head["headers"].get("poison").is_some() || head["bytes"].as_u64() > Some(PAYLOAD_BYTES_MAX as u64);
    match state {
        Destination::Hangs => None,
        Destination::Fails => Some("failed"),
        Destination::Throttles => Some("slower"),
        Destination::Works | Destination::Down if is_refused => Some("refused"),
        Destination::Works | Destination::Down => Some("ok"),
    }
}

fn start(listener: TcpListener, state: &Arc<Mutex<Destination>>) -> Server {
    let state = Arc::clone(state);
    Server::start(listener, Arc::new(move |head| answer(*state.lock().expect("no panic while held"), head)))
}

fn attempts(received: Vec<Received>) -> Vec<Attempt> {
    let attempt = |received: Received| Attempt {
        dedupe_id: received.head["id"].as_str().map(str::to_owned),
        payload: received.payload,
        accepted: received.answer == Some("ok"),
    };
    received.into_iter().map(attempt).collect()
}

async fn fixture() -> Fixture {
    let (listener, address) = listen().await.expect("a free port");
    let state = Arc::new(Mutex::new(Destination::Works));
    let server = start(listener, &state);
    let config = LinesConfig { address: address.to_string(), ..LinesConfig::default() };
    let sink = Arc::new(LinesSink::new(&config));
    Fixture { sink, address, state, server: Mutex::new(Some(server)), earlier: Mutex::default() }
}

#[async_trait]
impl SinkFixture for Fixture {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::clone(&self.sink)
    }

    fn traits(&self) -> SinkTraits {
        SinkTraits { positions: false, payload_bytes_max: Some(PAYLOAD_BYTES_MAX), ..SinkTraits::ALL }
    }

    async fn attempts(&self) -> Vec<Attempt> {
        let mut all = self.earlier.lock().expect("no panic while held").clone();
        all.extend(
            self.server.lock().expect("no panic while held").iter().flat_map(|server| attempts(server.received())),
        );
        all
    }

    fn poison(&self, event: NewEvent) -> NewEvent {
        event.header("poison", "1")
    }

    async fn set(&self, destination: Destination) {
        *self.state.lock().expect("no panic while held") = destination;
        let server = self.server.lock().expect("no panic while held").take();
        let server = match (server, destination) {
            (Some(server), Destination::Down) => {
                let received = server.stop().await;
                self.earlier.lock().expect("no panic while held").extend(attempts(received));
                None
            }
            (None, Destination::Works) => {
                let listener = TcpListener::bind(self.address).await.expect("the port is still free");
                Some(start(listener, &self.state))
            }
            (server, _) => server,
        };
        *self.server.lock().expect("no panic while held") = server;
    }
}

postbox_testkit::sink_suite!(fixture);
