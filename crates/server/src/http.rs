//! The HTTP side: health, readiness, status, metrics, and incoming webhooks.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::Router;
use axum::extract::{Query, Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures::future::join_all;
use postbox_config::Secret;
use postbox_core::Clock;
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;

use crate::metrics::{self, Exporter};
use crate::served_store::ServedStore;
use crate::status::{Fault, ServiceStatus, StoreJson, StormJson, WorkJson};
use crate::text::{safe_json, safe_line};

/// State shared by the handlers.
pub(crate) struct Api {
    stores: Vec<Arc<ServedStore>>,
    exporter: Exporter,
    address: SocketAddr,
    token: Option<Secret>,
}

impl Api {
    pub(crate) fn new(
        stores: Vec<Arc<ServedStore>>,
        address: SocketAddr,
        token: Option<Secret>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self { exporter: Exporter::new(stores.clone(), clock), stores, address, token }
    }

    /// Whether this request may read more than whether the service is healthy and ready.
    fn may_read(&self, headers: &HeaderMap) -> bool {
        let Some(token) = &self.token else {
            return !self.address.ip().is_loopback() || names_this_machine(headers);
        };
        let given = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        // Compared in constant time: the time must not reveal how much of a wrong token matches.
        given
            .and_then(|given| given.strip_prefix(b"Bearer "))
            .is_some_and(|given| given.ct_eq(token.expose().as_bytes()).into())
    }

    async fn status(&self) -> ServiceStatus {
        let faults = join_all(self.stores.iter().map(|store| store.faults())).await;
        // One working store is enough. Readiness covers all stores, so "not ready" because of one
        // store would take the working ones out of service too.
        let ready = faults.iter().any(|of| !of.iter().any(Fault::stops_work));
        let faults = faults.into_iter().flatten().collect();
        let work = self.stores.iter().flat_map(|of| of.relays().iter().map(|it| WorkJson::of(of.name.as_ref(), it)));
        let storms = self.stores.iter().flat_map(|of| {
            let storms = of.sources().storms().into_iter();
            storms.map(|storm| StormJson::of(of.name.as_ref(), storm))
        });
        let stores = self
            .stores
            .iter()
            .filter_map(|of| Some(StoreJson { store: of.name.clone(), created_at: of.created_at()?.to_string() }));
        let (work, storms, stores) = (work.collect(), storms.collect(), stores.collect());
        ServiceStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            address: self.address,
            ready,
            faults,
            work,
            storms,
            stores,
        }
    }
}

/// All routes; `ingress` brings its own under `/in`.
pub(crate) fn router(api: Arc<Api>, ingress: Router) -> Router {
    Router::new()
        .route("/status", get(status))
        .route("/metrics", get(metrics))
        .route("/high-water-marks", get(high_water_marks))
        .route_layer(from_fn_with_state(Arc::clone(&api), with_token))
        .route("/readyz", get(readyz))
        // Liveness: the process runs and answers.
        .route("/healthz", get(async || "ok\n"))
        .with_state(api)
        .merge(ingress)
        .fallback(nothing_here)
}

/// A webhook's path that leads to no store is answered as one that leads to no source. Nobody
/// counts it.
async fn nothing_here(uri: Uri) -> (StatusCode, &'static str) {
    let here = "not found; there are /healthz, /readyz, /status, /metrics, /high-water-marks and /in/SOURCE \
                (/in/STORE/SOURCE with several stores)\n";
    (StatusCode::NOT_FOUND, if uri.path().starts_with("/in/") { "source_unknown" } else { here })
}

async fn with_token(State(api): State<Arc<Api>>, request: Request, next: Next) -> Response {
    if api.may_read(request.headers()) {
        return next.run(request).await;
    }
    if api.token.is_none() {
        let cure = "only an address or localhost as host may read this without a token: set server.status_token\n";
        return (StatusCode::MISDIRECTED_REQUEST, cure).into_response();
    }
    let asks = [(header::WWW_AUTHENTICATE, "Bearer")];
    (StatusCode::UNAUTHORIZED, asks, "this needs the status token: authorization: Bearer …\n").into_response()
}

/// Whether a request names its host by address or as localhost. A web page whose name was made to
/// lead to this machine (DNS rebinding) can make a browser here ask under that name only.
fn names_this_machine(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST) else { return true };
    let host = host.to_str().unwrap_or_default().parse::<Authority>();
    host.is_ok_and(|host| {
        let name = host.host();
        name.eq_ignore_ascii_case("localhost") || name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
    })
}

/// Ready: the store is reachable with the right schema, every relay works, no breaker is open and
/// no source fails, nor the storing of its messages. Of several stores, one in that state is
/// enough.
async fn readyz(State(api): State<Arc<Api>>, headers: HeaderMap) -> (StatusCode, String) {
    let status = api.status().await;
    let (code, head) = match (status.ready, status.faults.is_empty()) {
        (true, true) => return (StatusCode::OK, "ready\n".into()),
        (true, false) => (StatusCode::OK, "ready, but not everything works"),
        (false, _) => (StatusCode::SERVICE_UNAVAILABLE, "not ready"),
    };
    if !api.may_read(&headers) {
        return (code, format!("{head}; the reasons need the status token\n"));
    }
    let line = |fault: &Fault| safe_line(&format!("{}: {}", fault.whose(), fault.what)) + "\n";
    let reasons: String = status.faults.iter().map(line).collect();
    (code, if status.ready { format!("{head}:\n{reasons}") } else { reasons })
}

async fn status(State(api): State<Arc<Api>>) -> Response {
    json(&api.status().await)
}

/// The stream that is asked for.
#[derive(Deserialize)]
struct MarksOf {
    stream: Option<String>,
}

/// Asks the destinations each time: a cached answer could be older than the last delivery.
async fn high_water_marks(State(api): State<Arc<Api>>, Query(of): Query<MarksOf>) -> Response {
    json(&api.exporter.ask_marks(of.stream.as_deref()).await)
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
