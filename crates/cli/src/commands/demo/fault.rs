//! Bad weather between the two services: answers that fail, connections that break before or after the message was stored.
//!
//! Deterministic: what happens to the n-th request depends on the seed and n only.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use axum::serve::{IncomingStream, Listener};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mishap {
    /// 503, nothing stored.
    Unavailable,
    /// 500, nothing stored.
    Broken,
    /// The connection breaks, nothing stored.
    CutBefore,
    /// The message is stored, then the connection breaks: the sender cannot know.
    CutAfter,
}

/// Of a thousand requests, so many meet each mishap.
const MISHAPS: [(Mishap, u32); 4] =
    [(Mishap::Unavailable, 10), (Mishap::Broken, 40), (Mishap::CutBefore, 6), (Mishap::CutAfter, 12)];

/// The weather and its record.
#[derive(Debug)]
pub(super) struct Weather {
    seed: u64,
    requests: AtomicU64,
    in_flight: AtomicUsize,
    failed: AtomicU64,
    cut: AtomicU64,
}

impl Weather {
    pub(super) fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self {
            seed,
            requests: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            failed: AtomicU64::new(0),
            cut: AtomicU64::new(0),
        })
    }

    pub(super) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Requests that are being answered now.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Requests answered 500 or 503.
    pub(super) fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Connections broken.
    pub(super) fn cut(&self) -> u64 {
        self.cut.load(Ordering::Relaxed)
    }

    fn next(&self) -> Option<Mishap> {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        let mut draw =
            SmallRng::seed_from_u64(self.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)).random_range(0..1_000_u32);
        for (mishap, weight) in MISHAPS {
            if draw < weight {
                return Some(mishap);
            }
            draw -= weight;
        }
        None
    }
}

/// Counts a request as in flight as long as it lives, also when its connection goes away.
struct InFlight<'a>(&'a AtomicUsize);

impl<'a> InFlight<'a> {
    fn enter(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The middleware in front of the receiver.
pub(super) async fn strike(
    State(weather): State<Arc<Weather>>,
    ConnectInfo(wire): ConnectInfo<Wire>,
    request: Request,
    next: Next,
) -> Response {
    let _in_flight = InFlight::enter(&weather.in_flight);
    let mishap = weather.next();
    match mishap {
        Some(Mishap::Unavailable | Mishap::Broken) => weather.failed.fetch_add(1, Ordering::Relaxed),
        Some(Mishap::CutBefore | Mishap::CutAfter) => weather.cut.fetch_add(1, Ordering::Relaxed),
        None => 0,
    };
    match mishap {
        None => next.run(request).await,
        Some(Mishap::Unavailable) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        Some(Mishap::Broken) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        Some(Mishap::CutBefore) => {
            wire.cut();
            StatusCode::OK.into_response()
        }
        Some(Mishap::CutAfter) => {
            let response = next.run(request).await;
            wire.cut();
            response
        }
    }
}

/// The handle by which a connection is broken: after it nothing is written any more, so that no answer gets out.
#[derive(Debug, Clone, Default)]
pub(super) struct Wire(Arc<AtomicBool>);

impl Wire {
    fn cut(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn check(&self) -> std::io::Result<()> {
        match self.0.load(Ordering::Acquire) {
            true => Err(std::io::ErrorKind::ConnectionReset.into()),
            false => Ok(()),
        }
    }
}

impl Connected<IncomingStream<'_, FragileListener>> for Wire {
    fn connect_info(stream: IncomingStream<'_, FragileListener>) -> Self {
        stream.io().wire.clone()
    }
}

/// A listener whose connections can be broken.
pub(super) struct FragileListener(pub(super) TcpListener);

impl Listener for FragileListener {
    type Io = FragileStream;
    type Addr = std::net::SocketAddr;

    async fn accept(&mut self) -> (FragileStream, Self::Addr) {
        let (stream, address) = Listener::accept(&mut self.0).await;
        (FragileStream { stream, wire: Wire::default() }, address)
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.0.local_addr()
    }
}

/// A connection that can be broken.
pub(super) struct FragileStream {
    stream: TcpStream,
    wire: Wire,
}

impl AsyncRead for FragileStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        self.wire.check()?;
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for FragileStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        self.wire.check()?;
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.wire.check()?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_weather_is_the_same_for_the_same_seed_and_never_all_bad() {
        let draw = |seed| {
            let weather = Weather::new(seed);
            (0..10_000).map(|_| weather.next()).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        let bad = draw(7).iter().flatten().count();
        assert!((500..900).contains(&bad), "{bad} of 10,000");
    }
}
