//! The HTTP side: health, readiness, status, metrics, and webhooks in.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use postbox_config::Secret;
use postbox_core::{Clock, Store};
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;
use tokio::time::timeout;

use crate::Relays;
use crate::cache::Cached;
use crate::metrics::{self, Exporter};
use crate::status::{self, Fault, ServiceStatus, StormJson, WorkJson};
use crate::supervised_receiver::SupervisedReceiver;
use crate::text::{safe_json, safe_line};

/// Longest wait for the store before it counts as not reachable: probes give up after a few
/// seconds.
const STORE_WAIT: Duration = Duration::from_secs(2);
/// How long readiness is kept: probes come every second at most, and strangers make no work for the
/// store.
const READY_TTL: Duration = Duration::from_secs(1);

/// What the handlers know.
pub(crate) struct Api {
    store: Arc<dyn Store>,
    relays: Relays,
    exporter: Arc<Exporter>,
    address: SocketAddr,
    token: Option<Secret>,
    faults: Cached<Vec<Fault>>,
}

impl Api {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        relays: Relays,
        exporter: Arc<Exporter>,
        address: SocketAddr,
        token: Option<Secret>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self { store, relays, exporter, address, token, faults: Cached::new(clock, READY_TTL) }
    }

    /// Whether whoever asks may know more than that the service is there.
    fn may_read(&self, headers: &HeaderMap) -> bool {
        let Some(token) = &self.token else { return true };
        let given = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        // In constant time: how much of a wrong one fits is nobody's business.
        given
            .and_then(|given| given.strip_prefix(b"Bearer "))
            .is_some_and(|given| given.ct_eq(token.expose().as_bytes()).into())
    }

    async fn status(&self) -> ServiceStatus {
        let (store, relays, exporter) = (Arc::clone(&self.store), Arc::clone(&self.relays), Arc::clone(&self.exporter));
        let find = async move { Some(find_faults(store.as_ref(), &relays, exporter.receivers()).await) };
        let faults = self.faults.get(find).await;
        let faults = faults.map_or_else(
            || vec![of_store("check_failed", "the check itself failed; this is a defect".into())],
            |faults| faults.to_vec(),
        );
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let work = self.relays.iter().map(|relay| WorkJson::of(relay)).collect();
        let storms = self.exporter.sources().storms().into_iter().map(StormJson::of).collect();
        ServiceStatus { version, address: self.address, ready: faults.is_empty(), faults, work, storms }
    }
}

/// Everything that keeps the service from its work.
async fn find_faults(store: &dyn Store, relays: &Relays, receivers: &[Arc<SupervisedReceiver>]) -> Vec<Fault> {
    let of_the_store = match timeout(STORE_WAIT, store.validate()).await {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(of_store(error.code(), error.message().to_owned())),
        Err(_) => Some(of_store("store_timeout", format!("no answer within {STORE_WAIT:?}"))),
    };
    let store_is_up = of_the_store.is_none();
    let of_relays = relays.iter().filter_map(|relay| Fault::of_relay(relay, store_is_up));
    let of_sources = receivers.iter().filter_map(|receiver| receiver.fault());
    of_the_store.into_iter().chain(of_relays).chain(of_sources).collect()
}

fn of_store(code: &str, what: String) -> Fault {
    Fault { subscription: None, source: None, lane: None, code: code.to_owned(), what }
}

/// All routes; `ingress` brings its own under `/in`.
pub(crate) fn router(api: Arc<Api>, ingress: Router) -> Router {
    Router::new()
        .route("/status", get(status))
        .route("/metrics", get(metrics))
        .route("/high-water-marks", get(high_water_marks))
        .route_layer(from_fn_with_state(Arc::clone(&api), with_token))
        .route("/readyz", get(readyz))
        // The process lives and answers.
        .route("/healthz", get(async || "ok\n"))
        .with_state(api)
        .merge(ingress)
        .fallback(async || {
            (StatusCode::NOT_FOUND, "here are /healthz, /readyz, /status, /metrics, /high-water-marks and /in/SOURCE\n")
        })
}

async fn with_token(State(api): State<Arc<Api>>, request: Request, next: Next) -> Response {
    if api.may_read(request.headers()) {
        return next.run(request).await;
    }
    let asks = [(header::WWW_AUTHENTICATE, "Bearer")];
    (StatusCode::UNAUTHORIZED, asks, "this needs the status token: authorization: Bearer …\n").into_response()
}

/// The store is reachable with the right schema, every relay works, no breaker is open, no source
/// fails.
async fn readyz(State(api): State<Arc<Api>>, headers: HeaderMap) -> (StatusCode, String) {
    let status = api.status().await;
    if status.ready {
        return (StatusCode::OK, "ready\n".into());
    }
    let reasons = if api.may_read(&headers) {
        let line = |fault: &Fault| {
            let whose = match (&fault.subscription, &fault.source) {
                (Some(name), _) => name.to_string(),
                (None, Some(name)) => format!("source {name}"),
                (None, None) => "store".to_owned(),
            };
            safe_line(&format!("{whose}: {}", fault.what)) + "\n"
        };
        status.faults.iter().map(line).collect()
    } else {
        "not ready; the reasons need the status token\n".into()
    };
    (StatusCode::SERVICE_UNAVAILABLE, reasons)
}

async fn status(State(api): State<Arc<Api>>) -> Response {
    json(&api.status().await)
}

/// Which stream is meant.
#[derive(Deserialize)]
struct MarksOf {
    stream: Option<String>,
}

/// Asked anew each time: a kept answer could be behind what was delivered since.
async fn high_water_marks(State(api): State<Arc<Api>>, Query(of): Query<MarksOf>) -> Response {
    json(&status::marks(&api.relays, of.stream.as_deref()).await)
}

fn json(value: &impl Serialize) -> Response {
    match serde_json::to_string(value) {
        Ok(json) => ([(header::CONTENT_TYPE, "application/json")], safe_json(&json)).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn metrics(State(api): State<Arc<Api>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], api.exporter.page().await)
}
