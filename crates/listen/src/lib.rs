//! Serving a router to strangers: what `axum::serve` does, and nobody can hold it up.
//!
//! ```no_run
//! use std::sync::Arc;
//! use postbox_core::Clock;
//! use postbox_listen::{ServeLimits, serve};
//!
//! # async fn run(router: axum::Router, clock: Arc<dyn Clock>, stop: impl Future<Output = ()>) -> std::io::Result<()> {
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:8600").await?;
//! serve(listener, router, ServeLimits::default(), clock, stop).await;
//! # Ok(()) }
//! ```
//!
//! # Which connections are closed
//!
//! A connection is *idle* while its client has something to do: a head that has not come (fresh,
//! between two requests, or dripping in byte by byte), an answer that it does not read, or the rest
//! of a body. Of the idle ones:
//!
//! - one without a request in service is closed after `header_timeout`;
//! - when all slots are taken, a newcomer gets the slot of the one that has been idle for the
//!   longest time. So ten thousand slow clients evict each other, and whoever sends a request at
//!   once is served at once;
//! - a request that is wholly here is never evicted: then newcomers wait in the listener's queue.
//!
//! How long a *body* may take is the handler's to say; the webhook ingress does (`SourceLimits` of
//! `postbox-ingress`).
//!
//! HTTP/1.1 is spoken, and nothing else: HTTP/2 lets a stranger name a thousand header fields in as
//! many bytes. TLS, and HTTP/2 towards clients, are the business of the proxy in front. At a stop,
//! requests that are wholly here are served to their end; a body that is still on its way gets a
//! second.

mod connection_limit;
mod linger;

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use postbox_core::Clock;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tower::Service;
use tracing::{debug, warn};

use connection_limit::{ConnectionLimiter, Slot};
use linger::Lingering;

/// Bytes of one head, and of what is read ahead of a slow handler: more than any sender's headers
/// need. A head has 100 fields at most (hyper's own bound); beyond either the answer is 431.
const READ_BYTES_MAX: usize = 32 * 1024;
/// Pause after a failed accept (no file descriptors left, most likely), so that it is not repeated
/// in a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Shortest deadline: below it a distant sender has no chance.
const HEADER_TIMEOUT_MIN: Duration = Duration::from_millis(100);
/// How often the deadlines are looked at: one timer for all, a tenth late at most.
const SWEEPS_PER_TIMEOUT: u32 = 10;
/// The same during a stop, when connections that were answered are not waited for.
const STOP_SWEEP: Duration = Duration::from_millis(50);
/// How old a body on its way may be during a stop: what was sent just before it arrives in this
/// time, and one that never ends delays nobody.
const STOP_GRACE: Duration = Duration::from_secs(1);

/// Bounds on what connections may cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServeLimits {
    /// Most connections open at once. Default 512: half of the 1,024 files that a process commonly
    /// may have open, at some 16 KiB each.
    pub connections: usize,
    /// Longest time a connection may go without a request in service: for the head of one to
    /// arrive, and to read the answer to the last. Default 10 s.
    pub header_timeout: Duration,
}

impl Default for ServeLimits {
    fn default() -> Self {
        Self { connections: 512, header_timeout: Duration::from_secs(10) }
    }
}

/// Serves until `stop`, then lets every request that is in service finish. Dropping it ends all
/// connections at once.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: ServeLimits,
    clock: Arc<dyn Clock>,
    stop: impl Future<Output = ()>,
) {
    let limits = ServeLimits { header_timeout: limits.header_timeout.max(HEADER_TIMEOUT_MIN), ..limits };
    let limiter = ConnectionLimiter::new(limits, Arc::clone(&clock));
    let (stopping, stopped) = watch::channel(false);
    let mut connections = JoinSet::new();
    tokio::select! {
        () = stop => {}
        () = accept(&listener, &router, &limiter, &*clock, &stopped, &mut connections) => {}
    }
    drop(listener);
    stopping.send_replace(true);
    let finish = async { while connections.join_next().await.is_some() {} };
    let send_away = async {
        loop {
            limiter.close_unfinished(STOP_GRACE);
            clock.sleep(STOP_SWEEP).await;
        }
    };
    tokio::select! {
        () = finish => {}
        () = send_away => {}
    }
}

/// Closes what is overdue, for ever.
async fn sweep(limiter: &ConnectionLimiter, clock: &dyn Clock) {
    loop {
        clock.sleep(limiter.limits().header_timeout / SWEEPS_PER_TIMEOUT).await;
        limiter.close_overdue();
    }
}

async fn accept(
    listener: &TcpListener,
    router: &Router,
    limiter: &Arc<ConnectionLimiter>,
    clock: &dyn Clock,
    stopped: &watch::Receiver<bool>,
    connections: &mut JoinSet<()>,
) {
    let mut sweeping = std::pin::pin!(sweep(limiter, clock));
    // Accepted and without a slot yet. Kept here, because what is in a branch of the select below
    // is dropped when another wins.
    let mut newcomer = None;
    loop {
        tokio::select! {
            () = &mut sweeping => {}
            Some(_) = connections.join_next() => {}
            slot = limiter.acquire(), if newcomer.is_some() => {
                if let Some(stream) = newcomer.take() {
                    connections.spawn(serve_connection(stream, slot, router.clone(), stopped.clone()));
                }
            }
            accepted = listener.accept(), if newcomer.is_none() => match accepted {
                Ok((stream, _)) => newcomer = Some(stream),
                Err(error) if is_client_abort(&error) => {}
                Err(error) => {
                    warn!(%error, cure = "raise the limit of open files (ulimit -n)", "accept failed");
                    clock.sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
}

/// The client hung up before it was accepted; the listener is fine.
fn is_client_abort(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// One connection, from the first byte to the last.
async fn serve_connection(stream: TcpStream, slot: Arc<Slot>, router: Router, mut stopped: watch::Receiver<bool>) {
    // Answers are small and whole; waiting for more to send only delays them.
    let _ = stream.set_nodelay(true);
    let at = Arc::clone(&slot);
    let service = service_fn(move |request: Request<Incoming>| {
        let request = request.map(|body| Body::new(at.track(body)));
        // From here on: the request is in service until this future is done or dropped.
        let in_service = at.serve();
        let mut router = router.clone();
        async move {
            let answer: Result<_, Infallible> = router.call(request).await;
            drop(in_service);
            answer
        }
    });
    let io = TokioIo::new(Lingering::new(stream));
    let mut connection = std::pin::pin!(Builder::new().max_buf_size(READ_BYTES_MAX).serve_connection(io, service));
    let mut graceful = false;
    loop {
        tokio::select! {
            biased;
            () = slot.closed() => return,
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    debug!(%error, "connection closed early");
                }
                return;
            }
            _ = stopped.wait_for(|stopped| *stopped), if !graceful => {
                graceful = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}
