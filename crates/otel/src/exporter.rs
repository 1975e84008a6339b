//! Exports spans to a collector: OTLP over HTTP, in protobuf.

use std::collections::HashMap;
use std::time::Duration;

use http::HeaderMap;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use postbox_core::trace::TARGET;
use tokio::runtime::Handle;
use tracing::{Subscriber, warn};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::registry::LookupSpan;

use crate::client::{Client, REQUEST_TIMEOUT};
use crate::sampler::OwnRatio;

/// Where the spans of a program are sent, and which of them.
#[derive(Debug, Clone)]
pub struct ExporterConfig {
    /// The collector's URL, without the path: `http://127.0.0.1:4318`.
    pub endpoint: String,
    /// The name of the program in traces.
    pub service_name: String,
    /// The share of traces that begin here and are exported, from 0 to 1.
    pub sample_ratio: f64,
    /// Headers of every request. They replace those of the same name in
    /// `OTEL_EXPORTER_OTLP_HEADERS`.
    pub headers: HashMap<String, String>,
}

/// Exports the spans of Postbox.
///
/// Spans wait in a queue of 2048. What does not fit, or does not reach the collector, is lost;
/// nothing else waits or fails because of it.
#[derive(Debug)]
pub struct Exporter {
    provider: SdkTracerProvider,
}

impl Exporter {
    /// Starts the exporter's thread, whose requests run on the given runtime. The error says what
    /// is wrong with the configuration. Does not connect yet.
    pub fn start(config: ExporterConfig, runtime: Handle) -> Result<Self, String> {
        let headers = HeaderMap::try_from(&config.headers).map_err(|error| error.to_string())?;
        let client = Client::new(headers, runtime).map_err(|error| error.to_string())?;
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(client)
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(format!("{}/v1/traces", config.endpoint.trim_end_matches('/')))
            .with_timeout(REQUEST_TIMEOUT)
            .build()
            .map_err(|error| error.to_string())?;
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_sampler(OwnRatio::new(config.sample_ratio))
            .with_resource(Resource::builder().with_service_name(config.service_name).build())
            .build();
        Ok(Self { provider })
    }

    /// A subscriber layer that exports the spans of Postbox, and no others.
    pub fn layer<S>(&self) -> impl Layer<S> + Send + Sync + use<S>
    where
        S: Subscriber + for<'span> LookupSpan<'span> + Send + Sync,
    {
        tracing_opentelemetry::layer()
            .with_tracer(self.provider.tracer("postbox"))
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_tracked_inactivity(false)
            .with_filter(filter_fn(|metadata| metadata.target() == TARGET && metadata.is_span()))
    }

    /// Sends the queued spans and ends, within this time. Blocks. The runtime must be running.
    pub fn finish(self, within: Duration) {
        if let Err(error) = self.provider.shutdown_with_timeout(within) {
            warn!(code = "spans_lost", %error, "last spans not sent: only they are lost");
        }
    }
}
