//! Loopback ports that no other test gets while this process lives.
//!
//! A server that is stopped for a while leaves its port unbound. So a port is also claimed by a
//! name that only one socket of the machine can have at a time, and that disappears with our
//! process.

use std::net::TcpListener;

use anyhow::Context as _;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

/// Below the range from which Linux takes outgoing ports.
const PORTS: std::ops::Range<u16> = 20_000..32_000;
/// Maximum ports tried, many more than can be taken.
const TRIES: usize = 1_000;
/// Maximum starts tried if another program took the port first.
const STARTS: usize = 5;

/// Returns a loopback port that nobody listens on, reserved until this process ends.
pub(super) fn free_port() -> anyhow::Result<u16> {
    Ok(listen_anywhere()?.local_addr()?.port())
}

/// Starts a server on such a port, or on another one if a program took it first.
pub(super) async fn on_free_port<T>(mut start: impl AsyncFnMut(u16) -> anyhow::Result<T>) -> anyhow::Result<T> {
    for _ in 1..STARTS {
        match start(free_port()?).await {
            Err(error) if format!("{error:#}").contains("in use") => {}
            started => return started,
        }
    }
    start(free_port()?).await
}

/// Listens on a loopback port that is reserved until this process ends.
///
/// # Errors
///
/// If there is none.
pub fn listen_anywhere() -> anyhow::Result<TcpListener> {
    let mut random = SmallRng::from_os_rng();
    let mut ports = (0..TRIES).map(|_| random.random_range(PORTS));
    let listener =
        ports.find_map(|port| if claim::is_ours(port) { TcpListener::bind(("127.0.0.1", port)).ok() } else { None });
    let listener = listener.context("no free loopback port between 20000 and 32000")?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

#[cfg(target_os = "linux")]
mod claim {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    use std::sync::Mutex;

    /// Claims held until this process ends.
    static CLAIMED: Mutex<Vec<UnixDatagram>> = Mutex::new(Vec::new());

    /// Claims a port, unless another process has claimed it.
    pub(super) fn is_ours(port: u16) -> bool {
        // An abstract name is visible wherever the port is, and disappears with its socket.
        let name = SocketAddr::from_abstract_name(format!("postbox-test-port-{port}"));
        let Ok(claim) = name.and_then(|name| UnixDatagram::bind_addr(&name)) else { return false };
        CLAIMED.lock().expect("nobody panics while holding it").push(claim);
        true
    }
}

#[cfg(not(target_os = "linux"))]
mod claim {
    /// Other systems have no such names, so two tests may get one port.
    pub(super) fn is_ours(_port: u16) -> bool {
        true
    }
}
