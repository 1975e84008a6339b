//! Traces, as configured by `[telemetry]` and OpenTelemetry's own variables.

use postbox_server::TelemetryConfig;
use tracing_subscriber::{Layer, Registry};

use crate::failure::Failure;

/// The layer that receives spans.
pub(crate) type Traces = Box<dyn Layer<Registry> + Send + Sync>;

#[cfg(feature = "otlp")]
pub(crate) use exported::{check, finish, start};
#[cfg(not(feature = "otlp"))]
pub(crate) use missing::{check, finish, start};

#[cfg(feature = "otlp")]
mod exported {
    use std::sync::Mutex;
    use std::time::Duration;

    use postbox_core::lock;
    use postbox_otel::{Exporter, ExporterConfig, propagate};
    use postbox_server::check_collector_url;
    use tokio::runtime::Handle;
    use tracing_subscriber::Layer as _;

    use super::{Failure, TelemetryConfig, Traces};

    /// The running exporter, until [`finish`].
    static EXPORTER: Mutex<Option<Exporter>> = Mutex::new(None);
    /// Longest wait for the last spans: a working collector accepts them in less.
    const FINISH_MAX: Duration = Duration::from_secs(2);
    /// OpenTelemetry's own variable for the collector's address.
    const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

    /// Checks what [`start`] would be given.
    pub(crate) fn check(config: &TelemetryConfig) -> Result<(), Failure> {
        asked(config, |name| std::env::var(name).ok()).map(drop)
    }

    /// Starts exporting spans, if configured. Must be called within a runtime.
    pub(crate) fn start(config: &TelemetryConfig) -> Result<Option<Traces>, Failure> {
        let Some(config) = asked(config, |name| std::env::var(name).ok())? else { return Ok(None) };
        let exporter = Exporter::start(config, Handle::current())
            .map_err(|error| Failure::usage(format!("telemetry: {error}; see docs/guide/tracing.md")))?;
        propagate();
        let traces = exporter.layer().boxed();
        *lock(&EXPORTER) = Some(exporter);
        Ok(Some(traces))
    }

    /// Exports the last spans, within this time at most.
    pub(crate) async fn finish(within: Duration) {
        let exporter = lock(&EXPORTER).take();
        if let Some(exporter) = exporter {
            // It blocks, while its requests need the runtime.
            _ = tokio::task::spawn_blocking(move || exporter.finish(within.min(FINISH_MAX))).await;
        }
    }

    /// Combines the file with the environment; the file wins. `None`: no collector is configured.
    fn asked(
        config: &TelemetryConfig,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<ExporterConfig>, Failure> {
        let said = |name| env(name).filter(|value| !value.is_empty());
        let endpoint = match (config.otlp.clone(), said(ENDPOINT)) {
            (Some(endpoint), _) => endpoint,
            (None, Some(endpoint)) => {
                check_collector_url(&endpoint).map_err(|text| Failure::usage(format!("{ENDPOINT}: {text}")))?;
                endpoint
            }
            (None, None) => return Ok(None),
        };
        let ratio = match (config.sample_ratio, said("OTEL_TRACES_SAMPLER_ARG")) {
            (Some(ratio), _) => ratio,
            (None, None) => 1.0,
            (None, Some(text)) => text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio)).ok_or_else(|| {
                Failure::usage(format!(
                    "OTEL_TRACES_SAMPLER_ARG: {text:?} is not a valid ratio; write a number from 0 to 1"
                ))
            })?,
        };
        let headers = config.headers.iter().map(|(name, value)| (name.clone(), value.expose().to_owned()));
        Ok(Some(ExporterConfig {
            endpoint,
            service_name: config
                .service_name
                .clone()
                .or_else(|| said("OTEL_SERVICE_NAME"))
                .unwrap_or_else(|| "postbox".to_owned()),
            sample_ratio: ratio,
            headers: headers.collect(),
        }))
    }

    #[cfg(test)]
    mod tests {
        use postbox_server::Config;

        use super::*;

        fn of(text: &str, env: &[(&str, &str)]) -> Result<Option<ExporterConfig>, Failure> {
            let config = Config::parse(text).expect("no faults").telemetry;
            asked(&config, |name| env.iter().find(|(its, _)| *its == name).map(|(_, value)| (*value).to_owned()))
        }

        #[test]
        fn the_file_wins_over_the_variables_of_opentelemetry() {
            let env = [
                ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://env:4318"),
                ("OTEL_SERVICE_NAME", "env"),
                ("OTEL_TRACES_SAMPLER_ARG", "0.25"),
            ];
            let said = of("", &env).ok().flatten().expect("the environment asks for it");
            assert_eq!((&*said.endpoint, &*said.service_name, said.sample_ratio), ("http://env:4318", "env", 0.25));
            let file = "[telemetry]\notlp = \"http://file:4318\"\nservice_name = \"file\"\nsample_ratio = 0.5\n";
            let said = of(file, &env).ok().flatten().expect("the file asks for it");
            assert_eq!((&*said.endpoint, &*said.service_name, said.sample_ratio), ("http://file:4318", "file", 0.5));
        }

        #[test]
        fn nothing_is_traced_without_a_collector() {
            let env = [("OTEL_EXPORTER_OTLP_ENDPOINT", ""), ("OTEL_SERVICE_NAME", "env")];
            assert!(matches!(of("[telemetry]\nsample_ratio = 1\n", &env), Ok(None)));
        }

        #[test]
        fn a_ratio_of_the_environment_is_checked_too() {
            let env = [("OTEL_EXPORTER_OTLP_ENDPOINT", "http://env:4318"), ("OTEL_TRACES_SAMPLER_ARG", "10")];
            assert!(of("", &env).is_err());
        }

        #[test]
        fn an_address_of_the_environment_is_checked_too_and_never_repeated() {
            for url in ["http://u:hunter2@collector:4318", "hunter2:4318", "http://hunter2:4318/v1/traces"] {
                let failure = of("", &[(ENDPOINT, url)]).expect_err("refused");
                let text = failure.text();
                assert!(text.starts_with("OTEL_EXPORTER_OTLP_ENDPOINT: ") && !text.contains("hunter2"), "{text}");
            }
        }
    }
}

#[cfg(not(feature = "otlp"))]
mod missing {
    use std::time::Duration;

    use super::{Failure, TelemetryConfig, Traces};

    pub(crate) fn start(config: &TelemetryConfig) -> Result<Option<Traces>, Failure> {
        check(config).map(|()| None)
    }

    /// This binary cannot export traces; configuring them is an error.
    pub(crate) fn check(config: &TelemetryConfig) -> Result<(), Failure> {
        match config.otlp {
            None => Ok(()),
            Some(_) => Err(Failure::usage(
                "telemetry.otlp: this binary cannot export traces; build it with --features otlp, or take the line out"
                    .to_owned(),
            )),
        }
    }

    pub(crate) async fn finish(_: Duration) {}
}
