//! The service: relays, receivers, the retention sweep and the HTTP side, started and stopped
//! together.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use postbox_core::{Clock, Error, ErrorKind, Result, Store};
use postbox_engine::TokioClock;
use postbox_ingress::SnsClient;
use postbox_listen::serve;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{Instrument as _, error, info, warn};

use crate::config::Config;
use crate::http::{Api, router};
use crate::served_store::ServedStore;
use crate::wiring::Sinks;

/// The part of the stop deadline reserved for relays and receivers, to settle and release what they
/// hold after the last answer.
const SETTLE_SHARE: Duration = Duration::from_millis(500);

/// A running service. Dropping it ends everything at once without settling: nothing is lost, but
/// what was in flight may be delivered again.
pub struct Service {
    address: SocketAddr,
    stop: CancellationToken,
    task: AbortOnDropHandle<Result<()>>,
}

impl Service {
    /// Starts on the configured store or stores. What is wrong with a single store is an error. If
    /// it is only unreachable or slow, it is waited for while probes and scrapers are answered;
    /// what is found wrong later ends the service.
    ///
    /// Several stores are taken up independently: each as soon as it is reachable and valid,
    /// whatever the state of the others.
    pub async fn start(config: Config) -> Result<Self> {
        Self::serve(config, None).await
    }

    /// Starts on one store that is already open; the stores in the configuration are ignored.
    pub async fn start_on(config: Config, store: Arc<dyn Store>) -> Result<Self> {
        Self::serve(Config { stores: Vec::new(), ..config }, Some(store)).await
    }

    async fn serve(config: Config, store: Option<Arc<dyn Store>>) -> Result<Self> {
        let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
        if let Some(risk) = config.server.risk() {
            warn!(code = "listens_everywhere", why = %risk, "listener open to all");
        }
        // Bind first. A port in use is the most common failure, and failing later would leave
        // subscriptions behind in the store.
        let listener = bind(config.server.listen).await?;
        let address = listener.local_addr().unwrap_or(config.server.listen);
        let drain_timeout = config.server.stop_timeout.saturating_sub(SETTLE_SHARE).max(config.server.stop_timeout / 2);
        let sinks = Arc::new(Sinks::build(&config.subscriptions, config.stores.len(), address, &clock).await?);
        let (leases, sns) = (config.lease.build()?, SnsClient::for_connections(config.server.connections));
        // Several are named by what is logged of each.
        let of_one = (config.stores.is_empty() && store.is_none()).then(|| config.store.describe());
        let (mut stores, shares) = (Vec::new(), config.per_store());
        // Requests that wait for a store that does not answer must leave connections for the other
        // stores, and for probes and scrapers.
        let connections = config.server.connections / (shares.len() + 1);
        for share in shares {
            let built = (Arc::clone(&sinks), leases.clone(), sns.clone());
            stores.push(ServedStore::new(share, store.clone(), built, (connections, drain_timeout), &clock).await?);
        }
        // Several are taken up while the service runs.
        let mut opening = match &stores[..] {
            [only] if only.name.is_none() => only.try_once().await?,
            _ => None,
        };
        let (subscriptions, sources) = (config.subscriptions.len(), config.sources.len());
        info!(%address, store = of_one.as_deref(), stores = stores.len(), subscriptions, sources, "postbox serves");
        if subscriptions + sources == 0 {
            let cure = "add [subscriptions.NAME] with a sink to the configuration";
            warn!(code = "no_subscription", cure, "no event is delivered");
        }

        let stop = CancellationToken::new();
        let mut tasks: JoinSet<Result<()>> = JoinSet::new();
        for served in stores.iter().map(Arc::clone) {
            let span = served.span();
            tasks.spawn(served.run(opening.take(), stop.clone()).instrument(span));
        }
        let ingress = stores.iter().fold(Router::new(), |all, served| all.merge(served.router()));
        let api = Api::new(stores, address, config.server.status_token.clone(), Arc::clone(&clock));
        let (limits, stopped) = (config.server.limits(), stop.clone().cancelled_owned());
        let serving = serve(listener, router(Arc::new(api), ingress), limits, clock, stopped);
        tasks.spawn(async move {
            serving.await;
            Ok(())
        });
        let task = tokio::spawn(lead(tasks, sinks, stop.clone(), config.server.stop_timeout));
        Ok(Self { address, stop, task: AbortOnDropHandle::new(task) })
    }

    /// The address it listens on; with the real port if the configuration says 0.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Asks the service to stop. Idempotent; returns at once.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// A handle that stops the service when cancelled, for use while another task waits for the
    /// end.
    pub fn stop_handle(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Waits until the service has stopped: after [`Self::stop`], or because one of its tasks
    /// failed for good.
    ///
    /// The error code `stop_timeout` means that the deadline passed; what was in flight may be
    /// delivered again.
    pub async fn wait(self) -> Result<()> {
        match self.task.await {
            Ok(ended) => ended,
            Err(error) => {
                Err(Error::new(ErrorKind::Internal, "serve", "service_failed", format!("the service failed: {error}")))
            }
        }
    }
}

async fn bind(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|source| {
        let (code, why) = match source.kind() {
            std::io::ErrorKind::AddrInUse => {
                ("port_in_use", "is in use; stop the other program or set another port in [server] listen")
            }
            std::io::ErrorKind::PermissionDenied => {
                ("port_refused", "may not be opened by this user; use a port above 1023 in [server] listen")
            }
            std::io::ErrorKind::AddrNotAvailable => {
                ("address_unknown", "is not an address of this machine; correct [server] listen")
            }
            _ => ("listen_failed", "cannot be listened on; correct [server] listen"),
        };
        Error::new(ErrorKind::Mismatch, "listen", code, format!("{address} {why}")).with_source(source)
    })
}

/// Waits for the stop, or for the first task that ends without one. Then waits for all tasks,
/// within the deadline.
async fn lead(
    mut tasks: JoinSet<Result<()>>,
    sinks: Arc<Sinks>,
    stop: CancellationToken,
    deadline: Duration,
) -> Result<()> {
    let mut ended = Ok(());
    tokio::select! {
        () = stop.cancelled() => {}
        Some(early) = tasks.join_next() => {
            ended = flatten(early);
            stop.cancel();
        }
    }
    info!("postbox stops");
    let rest = async {
        let rest = join(&mut tasks, &stop).await;
        if ended.is_ok() {
            ended = rest;
        }
        sinks.close().await;
    };
    if timeout(deadline, rest).await.is_err() {
        // Dropping the set aborts the remaining tasks. What they held is not settled, so it is
        // delivered again.
        let text = format!("did not stop within {deadline:?}; events in flight may arrive again");
        return Err(Error::new(ErrorKind::Unavailable, "stop", "stop_timeout", text));
    }
    match &ended {
        Ok(()) => info!("postbox stopped"),
        Err(error) => error!(%error, "postbox failed"),
    }
    ended
}

/// Waits for all tasks; the first one to end stops the others. Returns the first error.
pub(crate) async fn join(tasks: &mut JoinSet<Result<()>>, stop: &CancellationToken) -> Result<()> {
    let mut ended = Ok(());
    while let Some(one) = tasks.join_next().await {
        stop.cancel();
        let one = flatten(one);
        if ended.is_ok() {
            ended = one;
        }
    }
    ended
}

fn flatten(joined: std::result::Result<Result<()>, tokio::task::JoinError>) -> Result<()> {
    match joined {
        Ok(result) => result,
        Err(error) => Err(Error::new(ErrorKind::Internal, "serve", "task_failed", format!("a task failed: {error}"))),
    }
}
