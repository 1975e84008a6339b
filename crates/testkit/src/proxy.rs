//! A TCP proxy that misbehaves on demand, between a client and a real server.
//!
//! Faults are set per [`Direction`] and may be switched at any time; every open connection and every new one follows at once.
//! Jitter comes from a seed: print [`FaultProxy::seed`] in a test that uses it.

mod pump;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use self::pump::{Pump, Reset};
use crate::servers::listen_anywhere;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server: requests.
    ToServer,
    /// From the server to the client: answers.
    ToClient,
}

/// What happens to bytes of one direction.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Fault {
    /// Nothing.
    #[default]
    None,
    /// Every piece waits `base` plus up to `jitter` more, in order.
    Delay {
        /// At least.
        base: Duration,
        /// And up to this much more, drawn anew for each piece.
        jitter: Duration,
    },
    /// Each connection passes this many more bytes, then is reset.
    CutAfter(usize),
    /// Bytes are taken and never passed on; the sender notices nothing.
    Blackhole,
    /// Bytes are kept, and passed on in order once the fault changes.
    Hold,
    /// This direction is closed in an orderly way (FIN) while the other goes on.
    HalfClose,
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
    seed: u64,
    faults: [watch::Sender<Fault>; 2],
    /// Connections are accepted; otherwise nobody listens on the port.
    open: watch::Sender<bool>,
    /// The accept loop has done what `open` says.
    opened: watch::Sender<bool>,
    resets: watch::Sender<u64>,
    stop: CancellationToken,
    /// The next connection whose server answers with this is reset instead.
    lose: watch::Sender<Option<Vec<u8>>>,
    lost: AtomicUsize,
    connections: AtomicUsize,
    held: [AtomicU64; 2],
    event: Notify,
}

impl FaultProxy {
    /// Listens on a free loopback port and passes everything to `upstream`.
    ///
    /// # Panics
    ///
    /// If it cannot listen.
    pub async fn start(upstream: SocketAddr, seed: u64) -> Self {
        let listener = listen_anywhere().expect("a free loopback port");
        let listener = TcpListener::from_std(listener).expect("a socket that the runtime can wait for");
        let address = listener.local_addr().expect("a bound socket");
        let shared = Arc::new(Shared {
            upstream,
            seed,
            faults: [watch::Sender::new(Fault::None), watch::Sender::new(Fault::None)],
            open: watch::Sender::new(true),
            opened: watch::Sender::new(true),
            resets: watch::Sender::new(0),
            stop: CancellationToken::new(),
            lose: watch::Sender::new(None),
            lost: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            held: Default::default(),
            event: Notify::new(),
        });
        tokio::spawn(accept(Arc::clone(&shared), address, listener));
        Self { address, shared }
    }

    /// In front of the server a URL names; `seed` as in [`Self::start`].
    ///
    /// # Panics
    ///
    /// If the URL has no `host:port`.
    pub async fn in_front_of(url: &str, seed: u64) -> Self {
        let upstream = authority(url).parse().expect("the URL has a numeric host and a port");
        Self::start(upstream, seed).await
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The same URL through the proxy.
    pub fn url(&self, url: &str) -> String {
        url.replacen(authority(url), &self.address.to_string(), 1)
    }

    /// Print it where jitter matters.
    pub fn seed(&self) -> u64 {
        self.shared.seed
    }

    /// Sets what happens to one direction, now and for new connections.
    pub fn set(&self, direction: Direction, fault: Fault) {
        self.shared.faults[direction as usize].send_replace(fault);
    }

    /// Sets both directions.
    pub fn set_both(&self, fault: Fault) {
        self.set(Direction::ToServer, fault.clone());
        self.set(Direction::ToClient, fault);
    }

    /// No more faults; what was held goes out.
    pub fn heal(&self) {
        self.set_both(Fault::None);
    }

    /// Resets (RST) every open connection, with whatever it holds.
    pub fn reset(&self) {
        self.shared.resets.send_modify(|resets| *resets += 1);
    }

    /// Nobody listens any more: connecting is refused. Open connections go on. Returns once that is so.
    pub async fn refuse(&self) {
        self.listen(false).await;
    }

    /// Ends [`Self::refuse`].
    pub async fn accept(&self) {
        self.listen(true).await;
    }

    /// The next connection whose server sends these bytes is reset in their place: what comes before them passes, of them nothing.
    /// `b"COMMIT\0"`, Postgres's word for a commit that is done: the server did it, the client never hears. Once; await
    /// [`Self::answer_lost`].
    ///
    /// It is the answer that is named, not the request: answers to earlier requests of a pipeline are still on their way then.
    /// Bytes that may be the beginning of the answer wait for what follows them.
    ///
    /// # Panics
    ///
    /// If `answer` is empty.
    pub fn lose_answer(&self, answer: &[u8]) {
        assert!(!answer.is_empty(), "an answer has bytes");
        self.shared.lose.send_replace(Some(answer.to_vec()));
    }

    /// Waits until `count` answers were lost since the start.
    pub async fn answer_lost(&self, count: usize) {
        self.wait(|shared| shared.lost.load(Ordering::SeqCst) >= count).await;
    }

    /// Waits until bytes of this direction are being held (or swallowed): the other side did send something.
    pub async fn holding(&self, direction: Direction) {
        self.wait(|shared| shared.held[direction as usize].load(Ordering::SeqCst) > 0).await;
    }

    /// Open connections.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    async fn listen(&self, open: bool) {
        self.shared.open.send_replace(open);
        let mut opened = self.shared.opened.subscribe();
        opened.wait_for(|now| *now == open).await.expect("we hold the sender");
    }

    async fn wait(&self, condition: impl Fn(&Shared) -> bool) {
        loop {
            let event = self.shared.event.notified();
            tokio::pin!(event);
            // Registered before looking, so that no event falls between the two.
            event.as_mut().enable();
            if condition(&self.shared) {
                return;
            }
            event.await;
        }
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}

/// The `host:port` of a URL.
fn authority(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '?']).next().unwrap_or(rest);
    authority.rsplit('@').next().unwrap_or(authority)
}

async fn accept(shared: Arc<Shared>, address: SocketAddr, listener: TcpListener) {
    let mut listener = Some(listener);
    let mut open = shared.open.subscribe();
    let mut number = 0;
    loop {
        let wanted = *open.borrow_and_update();
        if wanted && listener.is_none() {
            listener = Some(TcpListener::bind(address).await.expect("our port stays ours"));
        } else if !wanted {
            listener = None;
        }
        shared.opened.send_replace(wanted);
        let next = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = shared.stop.cancelled() => return,
            _ = open.changed() => {}
            accepted = next => if let Ok((client, _)) = accepted {
                number += 1;
                tokio::spawn(serve(Arc::clone(&shared), client, number));
            }
        }
    }
}

async fn serve(shared: Arc<Shared>, mut client: TcpStream, number: u64) {
    shared.connections.fetch_add(1, Ordering::SeqCst);
    let mut resets = shared.resets.subscribe();
    if let Ok(mut server) = TcpStream::connect(shared.upstream).await {
        let _ = (client.set_nodelay(true), server.set_nodelay(true));
        let pump = |direction| Pump::new(&shared, direction, number);
        let (up, down) = (pump(Direction::ToServer), pump(Direction::ToClient));
        let (client_read, client_write) = client.split();
        let (server_read, server_write) = server.split();
        let ended = tokio::select! {
            () = shared.stop.cancelled() => Err(Reset),
            _ = resets.changed() => Err(Reset),
            ended = async { tokio::try_join!(up.run(client_read, server_write), down.run(server_read, client_write)) } => ended.map(|_| ()),
        };
        if ended.is_err() {
            let _ = (client.set_zero_linger(), server.set_zero_linger());
        }
    } else {
        let _ = client.set_zero_linger();
    }
    shared.connections.fetch_sub(1, Ordering::SeqCst);
    shared.event.notify_waiters();
}
