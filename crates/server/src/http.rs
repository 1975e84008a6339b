//! The HTTP side: health, readiness, metrics, and webhooks in.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use postbox_config::Secret;
use postbox_core::{Clock, Store};
use subtle::ConstantTimeEq as _;
use tokio::time::timeout;

use crate::cache::Cached;
use crate::metrics::Measures;
use crate::part::Part;
use crate::visible::neutralise;

/// Longest wait for the store before it counts as not reachable: probes give up after a few seconds.
const STORE_WAIT: Duration = Duration::from_secs(2);
/// How long readiness is kept: probes come every second at most, and nobody from outside shall make work for the store.
const READY_TTL: Duration = Duration::from_secs(1);

/// What the handlers know.
pub(crate) struct Api {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) parts: Vec<Arc<Part>>,
    pub(crate) measures: Measures,
    token: Option<Secret>,
    faults: Cached<Vec<String>>,
}

impl Api {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        parts: Vec<Arc<Part>>,
        measures: Measures,
        token: Option<Secret>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self { store, parts, measures, token, faults: Cached::new(clock, READY_TTL) }
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

    /// Everything that keeps this service from its work, one line each.
    async fn find_faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        match timeout(STORE_WAIT, self.store.validate()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => faults.push(format!("store: {}", error.message())),
            Err(_) => faults.push(format!("store: no answer within {STORE_WAIT:?}")),
        }
        faults.extend(self.parts.iter().filter_map(|part| Some(format!("{}: {}", part.name, part.fault()?))));
        faults
    }
}

/// All routes; `ingress` brings its own under `/in`.
pub(crate) fn router(api: Arc<Api>, ingress: Router) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(api)
        .merge(ingress)
        .fallback(async || (StatusCode::NOT_FOUND, "here are /healthz, /readyz, /metrics and /in/SOURCE\n"))
}

/// The process lives and answers.
async fn healthz() -> &'static str {
    "ok\n"
}

/// The store is reachable with the right schema, every relay works, no breaker is open.
async fn readyz(State(api): State<Arc<Api>>, headers: HeaderMap) -> Response {
    let faults = api.faults.get(api.find_faults()).await;
    if faults.is_empty() {
        return "ready\n".into_response();
    }
    if !api.may_read(&headers) {
        return (StatusCode::SERVICE_UNAVAILABLE, "not ready; the reasons need the status token\n").into_response();
    }
    let told: String = faults.iter().map(|fault| neutralise(fault, |_| false) + "\n").collect();
    (StatusCode::SERVICE_UNAVAILABLE, told).into_response()
}

async fn metrics(State(api): State<Arc<Api>>, headers: HeaderMap) -> Response {
    if !api.may_read(&headers) {
        let asks = [(header::WWW_AUTHENTICATE, "Bearer")];
        return (StatusCode::UNAUTHORIZED, asks, "this needs the status token: authorization: Bearer …\n")
            .into_response();
    }
    let page = api.measures.page().await;
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response()
}
