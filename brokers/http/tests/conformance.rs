//! The suite every sink passes, against a real HTTP server.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use axum::Router;
use axum::extract::Request;
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use postbox_core::{NewEvent, Sink};
use postbox_http::{HttpSink, HttpSinkConfig};
use postbox_testkit::clock::ManualClock;
use postbox_testkit::conformance::{Attempt, Destination, SinkFixture, SinkTraits};
use postbox_testkit::servers::listen_anywhere;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Largest body that the server accepts, in bytes. It answers larger ones with 413.
const BODY_BYTES_MAX: usize = 64 * 1024;

struct Seen {
    attempts: Mutex<Vec<Attempt>>,
    state: Mutex<Destination>,
}

struct Endpoint {
    seen: Arc<Seen>,
    sink: Arc<dyn Sink>,
    address: SocketAddr,
    server: Mutex<Option<Server>>,
}

struct Server {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Seen {
    async fn answer(&self, request: Request) -> Response {
        let headers = request.headers();
        let poison = headers.contains_key("poison");
        let dedupe_id = headers.get("webhook-id").and_then(|id| Some(id.to_str().ok()?.to_owned()));
        let payload = axum::body::to_bytes(request.into_body(), usize::MAX).await.unwrap_or_default().to_vec();
        let state = *self.state.lock().expect("no panic while held");
        let status = match state {
            Destination::Fails => StatusCode::INTERNAL_SERVER_ERROR,
            Destination::Throttles => StatusCode::TOO_MANY_REQUESTS,
            _ if poison => StatusCode::UNPROCESSABLE_ENTITY,
            _ if payload.len() > BODY_BYTES_MAX => StatusCode::PAYLOAD_TOO_LARGE,
            _ => StatusCode::OK,
        };
        let accepted = status.is_success() && state != Destination::Hangs;
        self.attempts.lock().expect("no panic while held").push(Attempt { dedupe_id, payload, accepted });
        if state == Destination::Hangs {
            std::future::pending::<()>().await;
        }
        status.into_response()
    }
}

impl Server {
    fn start(listener: TcpListener, seen: Arc<Seen>) -> Self {
        let router = Router::new().fallback(move |request: Request| {
            let seen = Arc::clone(&seen);
            async move { seen.answer(request).await }
        });
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            let served = axum::serve(listener, router).with_graceful_shutdown(async { drop(stopped.await) });
            served.await.expect("the server runs");
        });
        Self { stop, task }
    }
}

async fn endpoint() -> Endpoint {
    let seen = Arc::new(Seen { attempts: Mutex::default(), state: Mutex::new(Destination::Works) });
    // No other process listens on this port while the server is down.
    let listener = TcpListener::from_std(listen_anywhere().expect("a free port")).expect("a listener");
    let address = listener.local_addr().expect("an address");
    let config = HttpSinkConfig {
        allow: vec!["127.0.0.1/32".parse().expect("a network")],
        ..HttpSinkConfig::new(format!("http://{address}/hook"))
    };
    let sink = HttpSink::new(config, Arc::new(ManualClock::default())).expect("a sink");
    let server = Mutex::new(Some(Server::start(listener, Arc::clone(&seen))));
    Endpoint { seen, sink: Arc::new(sink), address, server }
}

#[async_trait]
impl SinkFixture for Endpoint {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::clone(&self.sink)
    }

    fn traits(&self) -> SinkTraits {
        SinkTraits { positions: false, payload_bytes_max: Some(BODY_BYTES_MAX), ..SinkTraits::ALL }
    }

    async fn attempts(&self) -> Vec<Attempt> {
        self.seen.attempts.lock().expect("no panic while held").clone()
    }

    fn poison(&self, event: NewEvent) -> NewEvent {
        event.header("poison", "1")
    }

    async fn set(&self, destination: Destination) {
        *self.seen.state.lock().expect("no panic while held") = destination;
        let server = self.server.lock().expect("no panic while held").take();
        let server = match (server, destination) {
            (Some(Server { stop, task }), Destination::Down) => {
                drop(stop);
                task.await.expect("it stops");
                None
            }
            (None, Destination::Down) => None,
            (Some(server), _) => Some(server),
            (None, _) => {
                let listener = TcpListener::bind(self.address).await.expect("the port is ours");
                Some(Server::start(listener, Arc::clone(&self.seen)))
            }
        };
        *self.server.lock().expect("no panic while held") = server;
    }
}

postbox_testkit::sink_suite!(endpoint);
