//! The HTTP client of the exporter.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use opentelemetry_http::{HttpClient, HttpError};
use postbox_core::lock;
use reqwest::redirect::Policy;
use tokio::runtime::Handle;
use tracing::warn;

/// Time limit of a request. The exporter's thread waits for it, and spans queue up meanwhile.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between log lines about failures: a collector that is down stays so for a while.
const SAY_EVERY: Duration = Duration::from_secs(60);

/// Sends on the program's runtime, because the exporter calls it from its own thread.
#[derive(Debug)]
pub(crate) struct Client {
    http: reqwest::Client,
    headers: HeaderMap,
    runtime: Handle,
    failures: Mutex<Failures>,
}

impl Client {
    /// `headers` replace those that the exporter takes from `OTEL_EXPORTER_OTLP_HEADERS`.
    pub(crate) fn new(headers: HeaderMap, runtime: Handle) -> Result<Self, reqwest::Error> {
        // TLS panics without a provider. An error means that the program has installed one.
        _ = rustls::crypto::ring::default_provider().install_default();
        // No redirects: headers contain secrets, which must go only to the configured address.
        let http = reqwest::Client::builder().timeout(REQUEST_TIMEOUT).redirect(Policy::none()).build()?;
        Ok(Self { http, headers, runtime, failures: Mutex::default() })
    }

    fn failed(&self, error: &str) {
        let mut failures = lock(&self.failures);
        if let Some(failures) = failures.observe(Instant::now()) {
            warn!(code = "spans_lost", failures, error, "spans lost");
        }
    }
}

#[async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, mut request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        request.headers_mut().extend(self.headers.clone());
        let http = self.http.clone();
        let sent = self.runtime.spawn(async move {
            let answer = http.execute(request.try_into()?).await?;
            let mut response = Response::new(Bytes::new());
            (*response.status_mut(), *response.headers_mut()) = (answer.status(), answer.headers().clone());
            // The body of the answer is not needed, and may be long.
            Ok::<_, reqwest::Error>(response)
        });
        match sent.await {
            Ok(Ok(response)) if response.status().is_success() => return Ok(response),
            Ok(Ok(response)) => {
                self.failed(&format!("it answered {}", response.status()));
                Ok(response)
            }
            Ok(Err(error)) => {
                let error = error.without_url();
                let why = std::error::Error::source(&error).map(|why| format!(": {why}")).unwrap_or_default();
                self.failed(&format!("{error}{why}"));
                Err(error.into())
            }
            // The runtime is shutting down, and the program with it.
            Err(ended) => Err(ended.into()),
        }
    }
}

/// Rate limit of log lines about failures.
#[derive(Debug, Default)]
struct Failures {
    said: Option<Instant>,
    since: u64,
}

impl Failures {
    /// Counts a failure. Returns the number since the last log line if another line is due.
    fn observe(&mut self, now: Instant) -> Option<u64> {
        self.since += 1;
        if self.said.is_some_and(|said| now.saturating_duration_since(said) < SAY_EVERY) {
            return None;
        }
        self.said = Some(now);
        Some(std::mem::take(&mut self.since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_minute_says_how_often_it_failed() {
        let (mut failures, start) = (Failures::default(), Instant::now());
        assert_eq!(failures.observe(start), Some(1));
        for second in 1..60 {
            assert_eq!(failures.observe(start + Duration::from_secs(second)), None);
        }
        assert_eq!(failures.observe(start + Duration::from_secs(60)), Some(60));
    }
}
