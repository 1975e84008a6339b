//! Traces of Postbox in OpenTelemetry.
//!
//! The spans are `tracing` spans, created where things happen: [`postbox_core::trace`] lists them.
//! This crate connects them to a tracer, so that the context of a span travels in the event to
//! another service, and the trace continues there.
//!
//! ```
//! use opentelemetry::trace::TracerProvider as _;
//! use opentelemetry_sdk::trace::SdkTracerProvider;
//! use tracing_subscriber::prelude::*;
//!
//! let provider = SdkTracerProvider::builder().build(); // with your exporter
//! let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("my-service"));
//! tracing_subscriber::registry().with(layer).init();
//! postbox_otel::propagate();
//! ```
//!
//! | feature | what it adds |
//! |---|---|
//! | `otlp` | `Exporter`: spans to a collector, by OTLP over HTTP |
//!
//! # What this crate deliberately does not do
//!
//! It creates no spans, and exports neither metrics nor logs.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

#[cfg(feature = "otlp")]
mod client;
#[cfg(feature = "otlp")]
mod exporter;
mod propagator;
#[cfg(feature = "otlp")]
mod sampler;

#[cfg(feature = "otlp")]
pub use exporter::{Exporter, ExporterConfig};
pub use propagator::propagate;
