//! A GET that an outsider can cause: limited in size and time, and to public addresses.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use postbox_core::{Error, ErrorKind, Result};
use reqwest::{Client, redirect, retry};

use crate::classify::{cause, chain};
use crate::guard::{Forbidden, Guard, GuardedResolver, SystemLookup};
use crate::tls;

/// The longest time for one request.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The largest answer, in bytes: certificates have about 2 KiB, confirmations less.
const BODY_BYTES_MAX: usize = 16 * 1024;

/// The result of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fetched {
    /// The answer.
    Body(Bytes),
    /// The server says that there is no such thing, or the answer is too large.
    Refused(String),
    /// There was no answer, or the server is failing.
    Failed(String),
}

/// A client with the address guard of the sinks: public addresses only, `https` only, no redirects,
/// no proxy, limited in size and time.
pub struct PublicClient(Client);

impl PublicClient {
    /// Returns a client that keeps this many idle connections, so that an outsider who causes
    /// requests does not cause a handshake for each.
    pub fn new(idle_connections_max: usize) -> Result<Self> {
        let client = Client::builder()
            .tls_backend_preconfigured(tls::client_config(true, None, None)?)
            .https_only(true)
            .no_proxy()
            .redirect(redirect::Policy::none())
            .referer(false)
            .retry(retry::never())
            .timeout(TIMEOUT)
            .pool_max_idle_per_host(idle_connections_max)
            .dns_resolver(GuardedResolver { guard: Guard::default(), lookup: Arc::new(SystemLookup) })
            .user_agent(concat!("postbox/", env!("CARGO_PKG_VERSION")));
        let client = client.build().map_err(|error| {
            Error::new(ErrorKind::Internal, "configure", "http_client_failed", "the HTTP client could not be built")
                .with_source(error)
        })?;
        Ok(Self(client))
    }

    /// Fetches `url` with a GET. Never prints the URL: it may hold a token.
    pub async fn get(&self, url: String) -> Fetched {
        let mut response = match self.0.get(url).send().await {
            Ok(response) => response,
            Err(error) => return lost(&error),
        };
        let status = response.status();
        if status.is_server_error() || status.as_u16() == 429 {
            return Fetched::Failed(format!("the answer was {status}"));
        }
        if !status.is_success() {
            return Fetched::Refused(format!("the answer was {status}"));
        }
        let mut body = BytesMut::new();
        loop {
            match response.chunk().await {
                Ok(Some(chunk)) if body.len() + chunk.len() <= BODY_BYTES_MAX => body.extend_from_slice(&chunk),
                Ok(Some(_)) => return Fetched::Refused(format!("the answer has more than {BODY_BYTES_MAX} bytes")),
                Ok(None) => return Fetched::Body(body.freeze()),
                Err(error) => return lost(&error),
            }
        }
    }
}

/// Names the cause, without the URL.
fn lost(error: &reqwest::Error) -> Fetched {
    Fetched::Failed(match cause::<Forbidden>(error) {
        // Not the text of the guard: here, no `allow` is a cure.
        Some(Forbidden::NotPublic(addresses)) => format!(
            "the host's name resolves to {addresses:?}, which is not public, and no other address is called; let it \
             resolve to public addresses on this machine"
        ),
        _ => chain(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_private_address_is_named_and_the_url_is_not() {
        let client = PublicClient::new(1).expect("a client");
        let Fetched::Failed(why) = client.get("https://localhost/a.pem?Token=canary".into()).await else {
            panic!("it called this machine");
        };
        assert!(why.contains("which is not public") && (why.contains("127.0.0.1") || why.contains("::1")), "{why}");
        assert!(!why.contains("canary"), "{why}");
    }
}
