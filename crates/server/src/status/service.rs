//! The running service's `/status`, and how `doctor` and `stats` fetch it.

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use axum::body::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
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
    /// What keeps it from working, and parts that fail beside its work.
    pub faults: Vec<Fault>,
    /// How each subscription proceeds.
    #[serde(default)]
    pub work: Vec<WorkJson>,
    /// Sources with a replay storm.
    #[serde(default)]
    pub storms: Vec<StormJson>,
    /// Its stores; without those that it has not reached yet.
    #[serde(default)]
    pub stores: Vec<StoreJson>,
}

/// A store of the service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreJson {
    /// Its name, where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<StoreName>,
    /// When its first migration was applied, by which it differs from another store.
    pub created_at: String,
}

impl ServiceStatus {
    /// Keeps only what concerns one of several stores, or the single store without a name.
    #[must_use]
    pub fn of_store(mut self, store: Option<&StoreName>) -> Self {
        self.faults.retain(|it| it.store.as_ref() == store);
        self.work.retain(|it| it.store.as_ref() == store);
        self.storms.retain(|it| it.store.as_ref() == store);
        self.stores.retain(|it| it.store.as_ref() == store);
        self
    }

    /// The finding that the service has another store than the one that was created then, so that
    /// nothing it says is about this one. Two projects on one machine have the same default port.
    /// `name` is that of this store, where there are several.
    pub fn of_another(&self, name: Option<&StoreName>, created_at: Timestamp) -> Option<Finding> {
        let is_this = |it: &StoreJson| it.created_at == created_at.to_string();
        let is_another = match self.has_store(name) {
            true => self.stores.iter().any(|it| it.store.as_ref() == name && !is_this(it)),
            // With a URL on the command line, one of several stores has no name here.
            false => !self.stores.is_empty() && !self.stores.iter().any(is_this),
        };
        (is_another && !self.is_replaced(name)).then(|| {
            let what = format!("the service at {} works for another store", self.address);
            let cure = "set another [server] listen in the configuration of one of them";
            Finding::note("service_of_another_store", what).cure(cure)
        })
    }

    /// Whether the store was replaced under the service, so that what it says is why stores differ.
    fn is_replaced(&self, name: Option<&StoreName>) -> bool {
        self.faults.iter().any(|it| it.code == "store_replaced" && it.store.as_ref() == name)
    }

    /// Whether it has a store of this name. One that it has not reached yet is a fault.
    fn has_store(&self, name: Option<&StoreName>) -> bool {
        let stores = self.stores.iter().map(|it| &it.store);
        stores.chain(self.faults.iter().map(|it| &it.store)).any(|it| it.as_ref() == name)
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

/// Adds the high-water marks to each count, if a service listens as configured. The counts are of
/// stores of that service.
pub async fn add_marks<'a>(config: &ServerConfig, counted: impl IntoIterator<Item = &'a mut StatsJson>) {
    let mut counted: Vec<_> = counted.into_iter().collect();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_of_another_store_is_known_by_the_time_of_the_first_migration() {
        let (mine, other) = (Timestamp::UNIX_EPOCH, Timestamp::MAX);
        let named = |name: &str| Some(name.parse::<StoreName>().expect("a name"));
        let of =
            |store: Option<StoreName>, created_at: Timestamp| StoreJson { store, created_at: created_at.to_string() };
        let service = |stores: &[StoreJson], faults: &[&str]| ServiceStatus {
            version: String::new(),
            address: ([127, 0, 0, 1], 8600).into(),
            ready: true,
            faults: faults.iter().map(|code| Fault::of_store(code, String::new())).collect(),
            work: Vec::new(),
            storms: Vec::new(),
            stores: stores.to_vec(),
        };
        let is_another = |service: ServiceStatus, store: Option<&StoreName>| {
            service.of_another(store, mine).is_some_and(|it| it.message.contains("127.0.0.1:8600"))
        };
        assert!(is_another(service(&[of(None, other)], &[]), None));
        assert!(!is_another(service(&[of(None, mine)], &[]), None));
        assert!(!is_another(service(&[], &[]), None), "one that does not say it may be ours");
        assert!(!is_another(service(&[of(None, other)], &["store_replaced"]), None), "its file was ours");
        let two = service(&[of(named("a"), mine), of(named("b"), other)], &[]);
        assert!(!is_another(two.clone(), named("a").as_ref()));
        assert!(is_another(two.clone(), named("b").as_ref()));
        assert!(is_another(service(&[of(None, other)], &[]), named("a").as_ref()), "it has one store, without a name");
        assert!(is_another(service(&[of(named("a"), other)], &[]), None), "all of its stores have names");
        assert!(!is_another(two, None), "a URL on the command line names one of its stores");
        let mut waits = service(&[of(named("a"), other)], &["store_unreachable"]);
        waits.faults.iter_mut().for_each(|it| it.store = named("b"));
        assert!(!is_another(waits, named("b").as_ref()), "it has not reached ours yet");
    }
}
