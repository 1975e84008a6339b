//! The running service's `/status`, and how `doctor` and `stats` fetch it.

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use axum::body::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use postbox_core::StoreName;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::{Finding, MarksJson, StatsJson, StormJson, WorkJson};
use crate::config::ServerConfig;
use crate::fault::Fault;

/// Longest wait for the service. One on this machine answers at once, and its queries to the store
/// are bounded.
const WAIT_MAX: Duration = Duration::from_secs(3);
/// Most bytes read of an answer. A fault or a subscription's work takes a few hundred bytes, and
/// there may be a hundred stores with twenty subscriptions each.
const ANSWER_BYTES_MAX: usize = 1024 * 1024;

/// A running service.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServiceStatus {
    /// The program's version.
    pub version: String,
    /// Where it listens.
    pub address: SocketAddr,
    /// Whether nothing keeps it from working; with several stores, whether that holds for at least
    /// one.
    pub ready: bool,
    /// What keeps it from working.
    pub faults: Vec<Fault>,
    /// How each subscription proceeds.
    #[serde(default)]
    pub work: Vec<WorkJson>,
    /// Sources with a replay storm.
    #[serde(default)]
    pub storms: Vec<StormJson>,
}

impl ServiceStatus {
    /// Keeps only what concerns one of several stores, or the single store without a name.
    #[must_use]
    pub fn of_store(mut self, store: Option<&StoreName>) -> Self {
        self.faults.retain(|it| it.store.as_ref() == store);
        self.work.retain(|it| it.store.as_ref() == store);
        self.storms.retain(|it| it.store.as_ref() == store);
        self
    }
}

/// Fetches the status of the service that listens as configured; `None` if none does, or if another
/// program answers. A service that listens and does not answer, or refuses to, is a finding.
pub async fn fetch(config: &ServerConfig) -> Result<Option<ServiceStatus>, Finding> {
    let Ok(answer) = timeout(WAIT_MAX, ask(config, "/status")).await else {
        let what =
            format!("the service at {} accepts connections, and has not answered for {WAIT_MAX:?}", config.listen);
        let cure = "is its process stopped (SIGSTOP, a debugger) or starved? Let it go on, or end it and start `postbox run` again";
        return Err(Finding::problem("service_silent", what, cure));
    };
    match answer {
        Ok(status) => Ok(Some(status)),
        Err(NoAnswer::Refused) => {
            let what = format!("the service at {} refuses to say how it is, so much below is not known", config.listen);
            let cure = "give this command the service's server.status_token; is the variable that it names set here?";
            Err(Finding::problem("service_refuses", what, cure))
        }
        Err(NoAnswer::Other) => Ok(None),
    }
}

/// Adds the high-water marks to each count, if a service listens as configured.
pub async fn add_marks(config: &ServerConfig, counted: &mut [StatsJson]) {
    let asked = timeout(WAIT_MAX, ask::<Vec<MarksJson>>(config, "/high-water-marks")).await;
    for marks in asked.ok().and_then(Result::ok).unwrap_or_default() {
        // With several stores, each has a row of it.
        let of = counted.iter_mut().filter(|stats| stats.subscription.as_ref() == Some(&marks.subscription));
        of.for_each(|stats| stats.high_water_marks.clone_from(&marks.high_water_marks));
    }
}

/// Why there is no status.
enum NoAnswer {
    /// The token is missing or wrong.
    Refused,
    Other,
}

impl<E: Error> From<E> for NoAnswer {
    fn from(_: E) -> Self {
        Self::Other
    }
}

async fn ask<T: DeserializeOwned>(config: &ServerConfig, path: &str) -> Result<T, NoAnswer> {
    let mut address = config.listen;
    if address.ip().is_unspecified() {
        address.set_ip(match address.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    let stream = TokioIo::new(TcpStream::connect(address).await?);
    let (mut sender, connection) = http1::handshake(stream).await?;
    let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
    let mut request = Request::get(path).header(header::HOST, address.to_string());
    if let Some(token) = &config.status_token {
        request = request.header(header::AUTHORIZATION, format!("Bearer {}", token.expose()));
    }
    let answer = sender.send_request(request.body(Empty::<Bytes>::new())?).await?;
    if answer.status() == StatusCode::UNAUTHORIZED {
        return Err(NoAnswer::Refused);
    }
    let body =
        Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await.map_err(|_| NoAnswer::Other)?.to_bytes();
    Ok(serde_json::from_slice(&body)?)
}
