//! Serves a router to strangers, like `axum::serve`, but slow or hostile clients cannot block
//! others.
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
//! A connection is *idle* while its client has to act: to send a head (of the first or the next
//! request, perhaps byte by byte), to read an answer, or to send the rest of a body. Idle
//! connections are closed as follows:
//!
//! - one that owes us its first request is closed after `header_timeout`, and one that was answered
//!   after 75 s, or after `header_timeout` if that is longer: a proxy in front that keeps idle
//!   connections for less time (commonly 60 s) never sends a request into one that is being closed;
//! - when all slots are taken, a newcomer takes the slot of the longest idle one. So ten thousand
//!   slow clients evict each other, and a client that sends its request at once is served at once;
//! - when the process can open no more files, the longest idle one is closed as well;
//! - a connection whose request has arrived completely is not evicted, even if we have not read it
//!   yet (but for a body in hundreds of small chunks); then newcomers wait in the listener's queue.
//!
//! The time limit of a request's *body* is up to the handler; the webhook ingress has one
//! (`SourceLimits` of `postbox-ingress`).
//!
//! A request is in service until its handler returns the answer. From then on the client has the
//! same time (75 s, or `header_timeout` if that is longer) to take all of it, even if the router is
//! still producing its body. So there are no long downloads, no server-sent events and no
//! WebSocket: serve those with `axum::serve`, behind a proxy.
//!
//! Only HTTP/1.1 is supported: HTTP/2 lets a stranger name a thousand header fields in as many
//! bytes. TLS, and HTTP/2 towards clients, are the job of the proxy in front. At a stop, requests
//! that have arrived completely are answered; an answer that is not taken within 50 ms is cut, and
//! an unfinished body of a request gets a second.

mod connection_limit;
mod linger;

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
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
use tracing::debug;

use connection_limit::{ConnectionLimiter, Slot};
use linger::Lingering;

/// Read buffer per connection, in bytes: the largest head, and what is read ahead of a slow
/// handler. More than any sender's headers need. A head has at most 100 fields (hyper's own limit).
/// Beyond either limit the answer is 431.
const READ_BYTES_MAX: usize = 32 * 1024;
/// Most polls of a connection that was asked to close. Each reads a piece of the body or two:
/// enough for 1 MiB, unless it came in hundreds of small chunks. A stranger who sends one byte
/// after the other cannot stay.
const LAST_POLLS_MAX: usize = 256;
/// Shortest `header_timeout`: with less, a distant sender has no chance.
const HEADER_TIMEOUT_MIN: Duration = Duration::from_millis(100);
/// Deadline checks per `header_timeout`: one timer for all connections, late by a tenth at most.
const SWEEPS_PER_TIMEOUT: u32 = 10;
/// Interval of deadline checks during a stop, where answered connections must close soon.
const STOP_SWEEP: Duration = Duration::from_millis(50);
/// Most age of an unfinished body during a stop. A body sent just before arrives within this time,
/// and an endless one delays nothing.
const STOP_GRACE: Duration = Duration::from_secs(1);

/// Limits on the resources of connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServeLimits {
    /// Most open connections. Default 512: half of the 1,024 files that a process usually may have
    /// open, at some 16 KiB each.
    pub connections: usize,
    /// Longest time until the head of a connection's first request has arrived. Default 10 s.
    pub header_timeout: Duration,
}

impl Default for ServeLimits {
    fn default() -> Self {
        Self { connections: 512, header_timeout: Duration::from_secs(10) }
    }
}

/// Serves until `stop`, then lets requests in service finish. Dropping this future ends all
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
    let (mut connections, mut newcomer) = (JoinSet::new(), None);
    tokio::select! {
        () = stop => {}
        () = accept(&listener, &router, &limiter, &*clock, &stopped, &mut connections, &mut newcomer) => {}
    }
    stopping.send_replace(true);
    // Clients that wait for a slot, or in the listener's queue, may have sent their requests.
    // They get slots beyond the limit, so that they do not evict each other.
    for stream in newcomer.into_iter().chain(queued(listener, limits.connections)) {
        connections.spawn(serve_late(stream, limiter.admit(), router.clone(), stopped.clone()));
    }
    let finish = async { while connections.join_next().await.is_some() {} };
    let send_away = async {
        loop {
            limiter.close_unfinished(STOP_SWEEP, STOP_GRACE);
            clock.sleep(STOP_SWEEP).await;
        }
    };
    tokio::select! {
        () = finish => {}
        () = send_away => {}
    }
}

/// Closes overdue connections, in an endless loop.
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
    // An accepted connection without a slot.
    newcomer: &mut Option<TcpStream>,
) {
    let mut sweeping = std::pin::pin!(sweep(limiter, clock));
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
                Ok((stream, _)) => *newcomer = Some(stream),
                Err(error) if is_client_abort(&error) => {}
                Err(error) => limiter.recover(&error).await,
            },
        }
    }
}

/// Returns the connections that wait in the listener's queue, which is closed.
fn queued(listener: TcpListener, max: usize) -> Vec<TcpStream> {
    let Ok(listener) = listener.into_std() else { return Vec::new() };
    let next = || loop {
        match listener.accept() {
            Ok((stream, _)) => return stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream)).ok(),
            Err(error) if is_client_abort(&error) => {}
            Err(_) => return None,
        }
    };
    std::iter::from_fn(next).take(max).collect()
}

/// Whether the client aborted before it was accepted; the listener is fine.
fn is_client_abort(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// Serves a connection that was accepted during a stop, if its request has arrived.
async fn serve_late(stream: TcpStream, slot: Arc<Slot>, router: Router, stopped: watch::Receiver<bool>) {
    // The server library ends a connection that is asked to stop before anything was read from it.
    tokio::select! {
        biased;
        _ = stream.readable() => {}
        () = slot.closed() => return,
    }
    serve_connection(stream, slot, router, stopped).await;
}

/// Serves one connection from the first byte to the last.
async fn serve_connection(stream: TcpStream, slot: Arc<Slot>, router: Router, mut stopped: watch::Receiver<bool>) {
    // Answers are small and complete; waiting for more data would only delay them.
    let _ = stream.set_nodelay(true);
    let at = Arc::clone(&slot);
    let service = service_fn(move |request: Request<Incoming>| {
        let request = request.map(|body| Body::new(at.track(body)));
        // From here on the request is in service, until this future ends or is dropped.
        let in_service = at.serve();
        let mut router = router.clone();
        async move {
            let answer: Result<_, Infallible> = router.call(request).await;
            drop(in_service);
            answer
        }
    });
    let io = TokioIo::new(Lingering::new(stream, Arc::clone(&slot)));
    let mut connection = std::pin::pin!(Builder::new().max_buf_size(READ_BYTES_MAX).serve_connection(io, service));
    let mut graceful = false;
    loop {
        tokio::select! {
            biased;
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    debug!(%error, "connection closed early");
                }
                return;
            }
            () = slot.closed() => {
                if gives_way(connection.as_mut(), &slot).await {
                    return;
                }
            }
            () = async { drop(stopped.wait_for(|stopped| *stopped).await) }, if !graceful => {
                graceful = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

/// Whether a connection that was asked to close does so. Its request may have arrived unread, so
/// the connection is polled for as long as each poll reads more of a request.
async fn gives_way(mut connection: Pin<&mut (impl Future + Send)>, slot: &Slot) -> bool {
    for _ in 0..LAST_POLLS_MAX {
        let arrivals = slot.arrivals();
        // Other tasks go on meanwhile. The poll reads what the kernel has, although the runtime may
        // not know of it yet.
        tokio::task::yield_now().await;
        if poll_fn(|context| Poll::Ready(connection.as_mut().poll(context).is_ready())).await {
            return true;
        }
        if slot.stays() {
            return false;
        }
        if slot.arrivals() == arrivals {
            break;
        }
    }
    true
}
