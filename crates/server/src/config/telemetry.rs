//! `[telemetry]`: where traces go.

use http::{HeaderName, HeaderValue};
use postbox_config::{Kind, Secret, Section, entries, fraction, secret, table, text};
use postbox_http::check_url;

/// The usual gRPC port of collectors. Traces are sent over HTTP, so this port is a mistake.
const GRPC_PORT: &str = ":4317";

table! {
    /// Traces of each event, for an OpenTelemetry collector.
    #[derive(PartialEq)]
    #[check(check)]
    pub struct TelemetryConfig {
        /// The collector's address for OTLP over HTTP, without `/v1/traces`.
        ///
        /// The port is usually 4318; 4317 is for gRPC. If it is unset,
        /// `OTEL_EXPORTER_OTLP_ENDPOINT` applies; if both are unset, nothing is traced.
        otlp: Option<String> = text(|url| check_collector_url(url).map(|()| url.to_owned())), unset("off", r#""http://127.0.0.1:4318""#);
        /// The name of this program in traces.
        ///
        /// If it is unset, `OTEL_SERVICE_NAME` applies.
        service_name: Option<String> = text(service_name), unset("postbox", r#""postbox-eu""#);
        /// The share of the traces that begin here to export, from 0 to 1.
        ///
        /// Traces that began in another of your programs keep their sampling decision. If it is
        /// unset, `OTEL_TRACES_SAMPLER_ARG` applies.
        sample_ratio: Option<f64> = fraction(), unset("1", "0.1");
        /// Headers on every request to the collector.
        ///
        /// `{ name = "value" }`; values may be `"env:NAME"`.
        headers: Vec<(String, Secret)> = entries(header_name, header_value()), unset("none", r#"{ x-api-key = "env:COLLECTOR_KEY" }"#);
    }
}

impl TelemetryConfig {
    fn check(&self, section: &Section<'_>) {
        let otlp = self.otlp.as_deref().unwrap_or_default();
        if otlp.trim_end_matches('/').ends_with(GRPC_PORT) {
            let text = "telemetry.otlp: 4317 is usually the gRPC port, but traces are sent over HTTP; its port is \
                        usually 4318";
            section.warning("otlp", text.to_owned());
        }
    }
}

/// Checks the address of a collector. The message never repeats it.
pub fn check_collector_url(url: &str) -> Result<(), String> {
    check_url(url)?;
    match url.contains("/v1/") || url.contains('?') {
        true => Err("includes the path of a request; leave out /v1/traces and what follows".to_owned()),
        false => Ok(()),
    }
}

fn service_name(name: &str) -> Result<String, String> {
    match name.trim() {
        "" => Err("is empty; leave it out".to_owned()),
        _ => Ok(name.to_owned()),
    }
}

fn header_name(name: &str) -> Result<String, String> {
    HeaderName::try_from(name).map(|_| name.to_owned()).map_err(|_| format!("{name:?} is not a valid header name"))
}

fn header_value() -> Kind<Secret> {
    secret().check(|value| match HeaderValue::try_from(value.expose()) {
        Ok(_) => Ok(()),
        Err(_) => Err("the value has a character that headers cannot carry".to_owned()),
    })
}
