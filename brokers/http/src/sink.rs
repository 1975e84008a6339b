//! The sink: one signed POST per event.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::join_all;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use postbox_core::{Capabilities, Clock, Delivery, Error, Outcome, Result, Sink};
use reqwest::Response;
use url::Url;

use crate::classify::{classify_failure, classify_status, retry_after};
use crate::client::SinkClient;
use crate::config::HttpSinkConfig;
use crate::guard::{Lookup, SystemLookup};
use crate::request::Template;
use crate::secrets::Secrets;

/// How many bytes of an answer are kept for an operator to read.
const EXCERPT_BYTES_MAX: usize = 512;
/// How many bytes of an answer are read so that its connection can be reused. Beyond that a new
/// connection is cheaper.
const DRAIN_BYTES_MAX: usize = 64 * 1024;
/// How long to wait for the rest of an answer once its status is known: the outcome is decided by
/// then.
const DRAIN_TIME_MAX: Duration = Duration::from_millis(500);

/// Posts events to a URL. See the crate's README for headers, statuses and codes.
pub struct HttpSink {
    client: SinkClient,
    url: Url,
    template: Template,
    secrets: Secrets,
    concurrency: usize,
    clock: Arc<dyn Clock>,
}

impl HttpSink {
    /// Returns a sink for one target. Connects to nothing yet. Reports every fault of the
    /// configuration at once.
    ///
    /// `clock` stamps signatures and reads dates in `Retry-After`.
    pub fn new(config: HttpSinkConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        Self::with_lookup(config, clock, Arc::new(SystemLookup))
    }

    pub(crate) fn with_lookup(config: HttpSinkConfig, clock: Arc<dyn Clock>, lookup: Arc<dyn Lookup>) -> Result<Self> {
        config.validate()?;
        let invalid = |fault| Error::invalid("configure", "http_sink_invalid", fault);
        let url = config.target().map_err(invalid)?;
        let signer = config.signer().map_err(invalid)?;
        let fixed: HeaderMap = config
            .headers
            .iter()
            .filter_map(|(name, value)| {
                let mut value = HeaderValue::try_from(value.as_str()).ok()?;
                value.set_sensitive(true);
                Some((HeaderName::try_from(name.as_str()).ok()?, value))
            })
            .collect();
        Ok(Self {
            secrets: Secrets::new(&url, &fixed),
            template: Template { envelope: config.envelope, signer, fixed, source: config.source.clone() },
            concurrency: config.concurrency,
            client: SinkClient::new(config, url.clone(), lookup, clock.monotonic())?,
            url,
            clock,
        })
    }

    async fn post(&self, delivery: &Delivery) -> Outcome {
        let (headers, body) = match self.template.fill(delivery, self.clock.now()) {
            Ok(parts) => parts,
            Err(outcome) => return outcome,
        };
        let client = self.client.current(self.clock.monotonic());
        let mut request = client.post(self.url.clone()).headers(headers);
        if body.is_empty() {
            // The client sends no length for an empty body, which some servers refuse.
            request = request.header(header::CONTENT_LENGTH, 0);
        }
        let request = request.body(body);
        match request.send().await {
            Ok(response) => self.read(response).await,
            Err(error) => classify_failure(&error),
        }
    }

    async fn read(&self, response: Response) -> Outcome {
        let status = response.status();
        let is_refusal = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
        self.client.answered(is_refusal, self.clock.monotonic());
        let header = |name| response.headers().get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        let after = header(header::RETRY_AFTER).and_then(|value| retry_after(value, self.clock.now()));
        let mut text = format!("the target answered {status}");
        // Its path and query usually repeat ours, which may hold a token.
        if status.is_redirection()
            && let Some(location) = header(header::LOCATION)
            && let Ok(to) = self.url.join(location)
            && to.origin().is_tuple()
        {
            text.push_str(&format!(" to {}/…", to.origin().ascii_serialization()));
        }
        let excerpt = self.secrets.conceal(&excerpt(response).await);
        if !excerpt.is_empty() {
            text.push_str(&format!(": {}", escape(&excerpt)));
        }
        classify_status(status, after, text)
    }
}

#[async_trait]
impl Sink for HttpSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { batch_max: 1, concurrency: self.concurrency, prefix: false, system: Some("http") }
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        join_all(deliveries.iter().map(|delivery| self.post(delivery))).await
    }
}

/// Returns the beginning of the answer's body. Reads a little further so that the connection can be
/// reused.
async fn excerpt(mut response: Response) -> Vec<u8> {
    let mut excerpt = Vec::new();
    let drain = async {
        let mut total = 0;
        while total < DRAIN_BYTES_MAX
            && let Ok(Some(chunk)) = response.chunk().await
        {
            total += chunk.len();
            let room = EXCERPT_BYTES_MAX - excerpt.len();
            excerpt.extend_from_slice(&chunk[..chunk.len().min(room)]);
        }
    };
    // Too slow or broken off: what was read so far is enough.
    let _ = tokio::time::timeout(DRAIN_TIME_MAX, drain).await;
    excerpt
}

/// Turns text from outside into one harmless line: no control characters, no terminal escapes, no
/// change of writing direction.
fn escape(bytes: &[u8]) -> String {
    let mut safe = String::new();
    for c in String::from_utf8_lossy(bytes).chars() {
        let steers =
            matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}');
        let escaped: String = if c.is_control() || steers { c.escape_default().collect() } else { c.into() };
        if safe.len() + escaped.len() > EXCERPT_BYTES_MAX {
            break;
        }
        safe.push_str(&escaped);
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_target_says_is_one_harmless_line() {
        assert_eq!(escape(b"a\nb\x1b[31m\0\xff"), "a\\nb\\u{1b}[31m\\u{0}\u{fffd}");
        assert_eq!(escape("\u{202e}x".as_bytes()), "\\u{202e}x");
        assert!(escape(&[b'\n'; 5_000]).len() <= EXCERPT_BYTES_MAX);
        assert!(escape("€".repeat(500).as_bytes()).len() <= EXCERPT_BYTES_MAX);
    }
}
