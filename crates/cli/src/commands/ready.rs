//! What a service that runs says of itself at `/readyz`.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use postbox_server::ServerConfig;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Longest wait: a service on this machine answers at once, and its look at the store is bounded too.
const WAIT_MAX: Duration = Duration::from_secs(3);
/// Most of an answer that is read: a line a subscription.
const ANSWER_BYTES_MAX: u64 = 256 * 1024;

/// The faults by subscription; none if nobody listens, or somebody else.
pub(super) async fn faults(server: &ServerConfig) -> BTreeMap<String, String> {
    match timeout(WAIT_MAX, ask(server)).await {
        Ok(Ok(answer)) => parse(&answer),
        _ => BTreeMap::new(),
    }
}

async fn ask(server: &ServerConfig) -> std::io::Result<String> {
    let listen = server.listen;
    let address = match listen.ip() {
        ip if !ip.is_unspecified() => listen,
        IpAddr::V4(_) => (Ipv4Addr::LOCALHOST, listen.port()).into(),
        IpAddr::V6(_) => (Ipv6Addr::LOCALHOST, listen.port()).into(),
    };
    let mut stream = TcpStream::connect(address).await?;
    let token = server.status_token.as_ref();
    let token = token.map(|token| format!("authorization: Bearer {}\r\n", token.expose())).unwrap_or_default();
    let request = format!("GET /readyz HTTP/1.1\r\nhost: {address}\r\n{token}connection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// A service that is not ready answers 503 and a line `NAME: why` for each fault.
fn parse(answer: &str) -> BTreeMap<String, String> {
    let Some((head, body)) = answer.split_once("\r\n\r\n") else { return BTreeMap::new() };
    if !head.starts_with("HTTP/1.1 503") {
        return BTreeMap::new();
    }
    body.lines().filter_map(|line| line.split_once(": ")).map(|(name, why)| (name.to_owned(), why.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_service_that_is_not_ready_has_faults() {
        let answer =
            |status: &str| format!("HTTP/1.1 {status}\r\nx: y\r\n\r\na: the breaker is open: x\nb: b\nnonsense\n");
        let faults = parse(&answer("503 Service Unavailable"));
        assert_eq!(faults.len(), 2);
        assert_eq!(faults["a"], "the breaker is open: x");
        assert!(parse(&answer("200 OK")).is_empty());
        assert!(parse("").is_empty());
    }
}
