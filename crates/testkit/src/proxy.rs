//! A proxy between a client and a real server that makes connections and calls fail on demand.
//!
//! A black hole swallows all bytes of a [`Direction`], of any protocol, until it is healed. A
//! [`Trap`] affects one call to a Postgres or a pooler, by the wire protocol. At a [`Point`] the
//! proxy cuts the connection, loses the answer, or keeps the call until it is released:
//!
//! ```no_run
//! # async fn example(url: &str) {
//! # use postbox_testkit::proxy::{FaultProxy, Harm, Point};
//! let proxy = FaultProxy::in_front_of(url).await;
//! let trap = proxy.trap(Point::Statement("outbox_window(".into()), Harm::Delay);
//! // … a client of proxy.url(url) opens a window and is reset; it asks again on another connection …
//! trap.sprung().await;
//! assert_eq!(trap.release().await.last().map(String::as_str), Some("COMMIT"));
//! # }
//! ```
//!
//! A call is a statement that is its own transaction, or a transaction from `BEGIN` to `COMMIT`.
//! [`Point::Statement`] delays everything from there to the transaction's end, without waiting for
//! answers. If the client waits for answers in between, use [`Point::CommitOf`].

mod pump;
mod trap;
mod wire;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use postbox_core::lock;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use self::pump::{End, Line, Pump, deliver};
use self::trap::Armed;
pub use self::trap::{Harm, Point, Trap};
use self::wire::Said;
use crate::servers::listen_anywhere;

/// A direction of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server: requests.
    ToServer,
    /// From the server to the client: answers.
    ToClient,
}

impl Direction {
    /// Both directions.
    pub const BOTH: [Self; 2] = [Self::ToServer, Self::ToClient];
}

/// A running proxy. Dropping it resets every connection.
#[derive(Debug)]
pub struct FaultProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    upstream: SocketAddr,
    blackholes: [AtomicBool; 2],
    refused: AtomicBool,
    swallowed: [watch::Sender<usize>; 2],
    traps: Mutex<Vec<Weak<Armed>>>,
    resets: watch::Sender<u64>,
    stop: CancellationToken,
    connections: AtomicUsize,
}

impl Shared {
    /// Returns the trap that this message springs, and disarms it.
    fn spring(&self, said: &Said, call: &[String]) -> Option<Arc<Armed>> {
        let mut traps = lock(&self.traps);
        traps.retain(|armed| armed.strong_count() > 0);
        let sprung = traps.iter().position(|armed| armed.upgrade().is_some_and(|armed| armed.springs(said, call)))?;
        traps.remove(sprung).upgrade()
    }
}

impl FaultProxy {
    /// Listens on a free port and passes everything to `upstream`.
    pub async fn start(upstream: SocketAddr) -> Self {
        let listener = listen_anywhere().expect("a free loopback port");
        let listener = TcpListener::from_std(listener).expect("a socket that the runtime can wait for");
        let address = listener.local_addr().expect("a bound socket");
        let shared = Arc::new(Shared {
            upstream,
            blackholes: Default::default(),
            refused: AtomicBool::default(),
            swallowed: Default::default(),
            traps: Mutex::default(),
            resets: watch::Sender::new(0),
            stop: CancellationToken::new(),
            connections: AtomicUsize::new(0),
        });
        tokio::spawn(accept(Arc::clone(&shared), listener));
        Self { address, shared }
    }

    /// Starts a proxy in front of the server of a URL.
    pub async fn in_front_of(url: &str) -> Self {
        let upstream = authority(url).parse().expect("the URL has a numeric host and a port");
        Self::start(upstream).await
    }

    /// Returns the address for clients.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the same URL through the proxy.
    pub fn url(&self, url: &str) -> String {
        url.replacen(authority(url), &self.address.to_string(), 1)
    }

    /// Swallows bytes of these directions from now on, on new connections too. The sender notices
    /// nothing.
    pub fn swallow(&self, directions: &[Direction]) {
        for direction in directions {
            self.shared.blackholes[*direction as usize].store(true, Ordering::SeqCst);
        }
    }

    /// Lets bytes pass again.
    pub fn heal(&self) {
        for blackhole in &self.shared.blackholes {
            blackhole.store(false, Ordering::SeqCst);
        }
    }

    /// Resets (RST) every open connection, and discards what traps hold.
    pub fn reset(&self) {
        self.shared.resets.send_modify(|resets| *resets += 1);
    }

    /// Acts as if there were no server behind the proxy: every connection is reset, new ones at
    /// once.
    pub fn refuse(&self, refused: bool) {
        self.shared.refused.store(refused, Ordering::SeqCst);
        if refused {
            self.reset();
        }
    }

    /// Harms one future call, once, at a point.
    pub fn trap(&self, point: Point, harm: Harm) -> Trap {
        let trap = Trap::new(point, harm);
        lock(&self.shared.traps).push(Arc::downgrade(&trap.armed));
        trap
    }

    /// Waits until a black hole has swallowed bytes of this direction.
    pub async fn swallowed(&self, direction: Direction) {
        let mut swallowed = self.shared.swallowed[direction as usize].subscribe();
        swallowed.wait_for(|bytes| *bytes > 0).await.expect("we hold the sender");
    }

    /// Returns the number of open connections, including those with a delayed call.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}

/// Returns the `host:port` of a URL.
fn authority(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '?']).next().unwrap_or(rest);
    authority.rsplit('@').next().unwrap_or(authority)
}

async fn accept(shared: Arc<Shared>, listener: TcpListener) {
    loop {
        tokio::select! {
            () = shared.stop.cancelled() => return,
            accepted = listener.accept() => if let Ok((client, _)) = accepted {
                let shared = Arc::clone(&shared);
                tokio::spawn(async move {
                    shared.connections.fetch_add(1, Ordering::SeqCst);
                    serve(&shared, client).await;
                    shared.connections.fetch_sub(1, Ordering::SeqCst);
                });
            }
        }
    }
}

async fn serve(shared: &Shared, mut client: TcpStream) {
    let mut resets = shared.resets.subscribe();
    let refused = shared.refused.load(Ordering::SeqCst);
    let server = if refused { None } else { TcpStream::connect(shared.upstream).await.ok() };
    let Some(mut server) = server else {
        let _ = client.set_zero_linger();
        return;
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let line = Mutex::new(Line::default());
    let mut up = Pump::new(shared, &line, Direction::ToServer);
    let mut down = Pump::new(shared, &line, Direction::ToClient);
    let ended = {
        let ((client_read, client_write), (server_read, server_write)) = (client.split(), server.split());
        tokio::select! {
            () = shared.stop.cancelled() => Err(End::Reset),
            _ = resets.changed() => Err(End::Reset),
            ended = async { tokio::try_join!(up.run(client_read, server_write), down.run(server_read, client_write)) } => ended.map(|_| ()),
        }
    };
    match ended {
        Ok(()) => {}
        Err(End::Reset) => {
            let _ = (client.set_zero_linger(), server.set_zero_linger());
        }
        Err(End::Held(armed)) => {
            let _ = client.set_zero_linger();
            let waiting = (armed.harm == Harm::Hang).then_some(client);
            armed.spring(lock(&line).talk.call.clone());
            let mut released = armed.released.clone();
            let released = tokio::select! {
                () = shared.stop.cancelled() => false,
                _ = resets.changed() => false,
                released = released.wait_for(|released| *released) => released.is_ok(),
            };
            if released {
                deliver(&mut server, &up.kept, down.kept, &line).await;
            }
            armed.answered(&lock(&line).talk);
            drop(waiting);
        }
    }
}
