//! The suite every sink passes, against a real HTTP server.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use axum::Router;
use axum::extract::Request;
use http::StatusCode;
use postbox_core::{NewEvent, Sink};
use postbox_http::{HttpSink, HttpSinkConfig};
use postbox_testkit::clock::ManualClock;
use postbox_testkit::conformance::SinkFixture;
use postbox_testkit::servers::listen_anywhere;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

#[derive(Default)]
struct Seen {
    arrived: Mutex<Vec<Vec<u8>>>,
    failing: AtomicBool,
}

struct Endpoint {
    seen: Arc<Seen>,
    sink: Arc<dyn Sink>,
    stop: Mutex<Option<oneshot::Sender<()>>>,
    server: tokio::task::JoinHandle<()>,
}

async fn endpoint() -> Endpoint {
    let seen = Arc::new(Seen::default());
    let state = Arc::clone(&seen);
    let router = Router::new().fallback(move |request: Request| {
        let seen = Arc::clone(&state);
        async move {
            let poison = request.headers().contains_key("poison");
            let body = axum::body::to_bytes(request.into_body(), usize::MAX).await.unwrap_or_default();
            match (seen.failing.load(Ordering::SeqCst), poison) {
                (true, _) => StatusCode::INTERNAL_SERVER_ERROR,
                (_, true) => StatusCode::UNPROCESSABLE_ENTITY,
                _ => {
                    seen.arrived.lock().expect("not poisoned").push(body.to_vec());
                    StatusCode::OK
                }
            }
        }
    });
    // Nobody else listens there when it is taken down.
    let listener = TcpListener::from_std(listen_anywhere().expect("a free port")).expect("a listener");
    let url = format!("http://{}/hook", listener.local_addr().expect("an address"));
    let (stop, stopped) = oneshot::channel::<()>();
    let server = tokio::spawn(async move {
        let served = axum::serve(listener, router).with_graceful_shutdown(async { drop(stopped.await) });
        served.await.expect("the server runs");
    });
    let config = HttpSinkConfig { allow: vec!["127.0.0.1/32".parse().expect("a network")], ..HttpSinkConfig::new(url) };
    let sink = HttpSink::new(config, Arc::new(ManualClock::default())).expect("a sink");
    Endpoint { seen, sink: Arc::new(sink), stop: Mutex::new(Some(stop)), server }
}

#[async_trait]
impl SinkFixture for Endpoint {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::clone(&self.sink)
    }

    async fn arrived(&self) -> Vec<Vec<u8>> {
        self.seen.arrived.lock().expect("not poisoned").clone()
    }

    fn poison(&self, event: NewEvent) -> Option<NewEvent> {
        Some(event.header("poison", "1"))
    }

    async fn fail(&self, failing: bool) -> bool {
        self.seen.failing.store(failing, Ordering::SeqCst);
        true
    }

    async fn take_down(&self) -> bool {
        drop(self.stop.lock().expect("not poisoned").take());
        while !self.server.is_finished() {
            tokio::task::yield_now().await;
        }
        true
    }
}

postbox_testkit::sink_suite!(endpoint);
