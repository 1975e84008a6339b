//! The HTTP client of a sink. It is built again when one of its certificate files has changed, so
//! that a renewed certificate needs no restart, and when the next request should open a connection.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use postbox_core::{Error, ErrorKind, Result, lock};
use reqwest::{Client, redirect, retry};
use tracing::{info, warn};
use url::Url;

use crate::config::HttpSinkConfig;
use crate::guard::{GuardedResolver, Lookup};
use crate::tls;

/// How often the files are looked at: rarely enough to cost nothing, and soon enough for a person
/// who has just replaced one.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// How long a client and its connections are used: then the target's name is looked up again, so
/// that a target which has moved is followed although it still answers at its old address.
const LIFE_MAX: Duration = Duration::from_secs(5 * 60);
/// How long they are used if the target has refused every request since they were opened. Behind a
/// balancer of connections the others may be well. A target that refuses everything does not get a
/// new connection for each request.
const LIFE_OF_REFUSED: Duration = Duration::from_secs(1);
/// The same if it has taken requests before: one that refuses now and then keeps its connections.
const LIFE_OF_REFUSED_LATER: Duration = Duration::from_secs(10);
/// How long an idle connection is kept: less than the minute after which servers and load balancers
/// commonly hang up.
const IDLE_TIME_MAX: Duration = Duration::from_secs(30);
/// The most headers of an answer that are read, so that an endless list is cut off.
const RESPONSE_HEADERS_MAX: usize = 100;

/// The client for one target.
pub(crate) struct SinkClient {
    config: HttpSinkConfig,
    url: Url,
    lookup: Arc<dyn Lookup>,
    built: Mutex<Built>,
}

/// A client, and the state of the files that it was built from.
struct Built {
    client: Client,
    files: Vec<Stamp>,
    looked: Duration,
    made: Duration,
    /// Since when the target has refused every request of this client.
    refused_since: Option<Duration>,
    /// Whether it answered one otherwise.
    has_succeeded: bool,
}

/// When a file was changed, and its length. None if that cannot be read.
type Stamp = Option<(SystemTime, u64)>;

impl SinkClient {
    /// `now` is a monotonic time.
    pub(crate) fn new(config: HttpSinkConfig, url: Url, lookup: Arc<dyn Lookup>, now: Duration) -> Result<Self> {
        let files = stamps(&config, &url);
        let client = build(&config, &url, Arc::clone(&lookup))?;
        let built = Built { client, files, looked: now, made: now, refused_since: None, has_succeeded: false };
        Ok(Self { config, url, lookup, built: Mutex::new(built) })
    }

    /// Returns the client for the next request. Does not wait for a failure, because some servers
    /// answer an expired certificate with a status that makes the event dead.
    pub(crate) fn current(&self, now: Duration) -> Client {
        let mut built = lock(&self.built);
        let refused_max = if built.has_succeeded { LIFE_OF_REFUSED_LATER } else { LIFE_OF_REFUSED };
        let is_left = built.refused_since.is_some_and(|since| now.saturating_sub(since) >= refused_max);
        let is_over = is_left || now.saturating_sub(built.made) >= LIFE_MAX;
        if is_over || now.saturating_sub(built.looked) >= LOOK_EVERY {
            built.looked = now;
            // Taken before the files are read: a change in between is seen at the next look.
            let files = stamps(&self.config, &self.url);
            if is_over || files != built.files {
                // Also if it fails, so that not every request reads the files.
                built.made = now;
                self.renew(&mut built, files);
            }
        }
        built.client.clone()
    }

    /// Notes an answer, and whether it is a refusal (429 or 5xx). If nothing else is answered for a
    /// while, the next request opens a connection.
    pub(crate) fn answered(&self, is_refusal: bool, now: Duration) {
        let mut built = lock(&self.built);
        built.has_succeeded |= !is_refusal;
        built.refused_since = is_refusal.then(|| built.refused_since.unwrap_or(now));
    }

    /// Requests in progress keep the old client. So do the next ones if the files are unusable, for
    /// example because only the certificate is there yet and not its key.
    fn renew(&self, built: &mut Built, files: Vec<Stamp>) {
        let host = self.url.host_str().unwrap_or_default();
        let has_changed = files != built.files;
        match build(&self.config, &self.url, Arc::clone(&self.lookup)) {
            Ok(client) => {
                if has_changed {
                    info!(host, "changed certificate files read");
                }
                (built.client, built.files, built.has_succeeded) = (client, files, false);
            }
            Err(error) => {
                let (what, within) = match has_changed {
                    true => ("changed certificate files unusable", "10 seconds"),
                    false => ("certificate files unusable", "5 minutes"),
                };
                let cure = format!("the old ones stay in use; correct the files, they are read again within {within}");
                warn!(host, code = error.code(), why = error.message(), %cure, "{what}");
            }
        }
        built.refused_since = None;
    }
}

/// The files of a plain target are never read.
fn stamps(config: &HttpSinkConfig, url: &Url) -> Vec<Stamp> {
    if url.scheme() != "https" {
        return Vec::new();
    }
    let client_cert = config.client_cert.iter().flat_map(|files| [&files.cert_file, &files.key_file]);
    config.ca_file.iter().chain(client_cert).map(|path| stamp(path)).collect()
}

fn stamp(path: &Path) -> Stamp {
    let file = fs::metadata(path).ok()?;
    Some((file.modified().ok()?, file.len()))
}

fn build(config: &HttpSinkConfig, url: &Url, lookup: Arc<dyn Lookup>) -> Result<Client> {
    let tls = tls::client_config(url.scheme() == "https", config.ca_file.as_deref(), config.client_cert.as_ref())?;
    let builder = Client::builder()
        .tls_backend_preconfigured(tls)
        .no_proxy()
        .redirect(redirect::Policy::none())
        .referer(false)
        // The engine owns retry. A hidden second request would also hide a duplicate.
        .retry(retry::never())
        .connect_timeout(config.connect_timeout)
        .timeout(config.timeout)
        .pool_max_idle_per_host(config.concurrency)
        .pool_idle_timeout(IDLE_TIME_MAX)
        .http1_max_headers(RESPONSE_HEADERS_MAX)
        .tcp_nodelay(true)
        .user_agent(concat!("postbox/", env!("CARGO_PKG_VERSION")))
        .dns_resolver(GuardedResolver { guard: config.guard(url), lookup });
    builder.build().map_err(|error| {
        Error::new(ErrorKind::Internal, "configure", "http_client_failed", "the HTTP client could not be built")
            .with_source(error)
    })
}
