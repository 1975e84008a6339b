//! From configuration to running parts.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use postbox_core::{Clock, Error, Result as PostboxResult, Sink, Store};
use postbox_engine::{JsonLines, Relay};
use postbox_http::{HttpSink, HttpSinkConfig};
use postbox_webhook::{Scheme, Settings, UnixSeconds, Verify, sns, standard};

use crate::config::{HttpConfig, LiveSecret, SinkConfig, SnsConfig, SubscriptionConfig};

/// What the HTTP client leaves of the subscription's timeout, so that it is the one to give up and can say why.
const TIMEOUT_SHARE: Duration = Duration::from_millis(500);

/// The relay of a subscription, with its sink. Touches no store. `listening` is where the service listens: guarded sinks do not call that.
pub async fn relay(
    store: &Arc<dyn Store>,
    config: &SubscriptionConfig,
    listening: SocketAddr,
    clock: &Arc<dyn Clock>,
) -> PostboxResult<Relay> {
    let mut builder = Relay::builder(Arc::clone(store) as _, config.subscription.clone())
        .admin(Arc::clone(store) as _)
        .settings(config.settings.clone())
        .clock(Arc::clone(clock));
    if let Some(sink) = sink(config, listening, clock).await? {
        builder = builder.sink(sink);
    }
    builder.build()
}

async fn sink(
    config: &SubscriptionConfig,
    listening: SocketAddr,
    clock: &Arc<dyn Clock>,
) -> PostboxResult<Option<Arc<dyn Sink>>> {
    Ok(match &config.sink {
        SinkConfig::None => None,
        SinkConfig::Stdout => Some(Arc::new(JsonLines::stdout())),
        SinkConfig::File { path } => Some(Arc::new(JsonLines::file(path).await?)),
        SinkConfig::Http(http) => {
            let sink = HttpSinkConfig { listening: vec![listening], ..http_sink(http, config)? };
            Some(Arc::new(HttpSink::new(sink, Arc::clone(clock))?))
        }
    })
}

fn http_sink(http: &HttpConfig, config: &SubscriptionConfig) -> PostboxResult<HttpSinkConfig> {
    let mut sink = HttpSinkConfig::new(http.url.as_str());
    give_keys(&mut sink, &http.secrets).map_err(|text| {
        Error::invalid("configure", "secret_invalid", format!("subscription {}: {text}", config.subscription.name))
    })?;
    sink.headers = http.headers.iter().map(|(name, value)| (name.clone(), value.expose().to_owned())).collect();
    sink.allow.clone_from(&http.allow);
    sink.ca_file.clone_from(&http.ca_file);
    sink.client_cert.clone_from(&http.client_cert);
    let timeout = config.settings.deliver_timeout;
    sink.timeout = timeout.saturating_sub(TIMEOUT_SHARE).max(timeout / 2);
    sink.connect_timeout = sink.connect_timeout.min(sink.timeout);
    if let Some(source) = &http.source {
        sink.source.clone_from(source);
    }
    if let Some(concurrency) = config.settings.concurrency {
        sink.concurrency = concurrency;
    }
    Ok(sink)
}

/// The keys a sink signs with. The message never repeats a key.
fn give_keys(sink: &mut HttpSinkConfig, secrets: &[LiveSecret]) -> Result<(), String> {
    for live in secrets {
        let key = standard::SignKey::parse(live.secret.expose()).map_err(|error| error.to_string())?;
        match live.until {
            None => sink.keys.push(key),
            Some(until) => sink.keys_retiring.push((key, until)),
        }
    }
    Ok(())
}

/// What a text that is no signing key probably is.
fn unlike_a_key(secrets: &[LiveSecret]) -> Option<&'static str> {
    let any = |is: fn(&str) -> bool| secrets.iter().any(|live| is(live.secret.expose()));
    if any(|text| text.starts_with("whpk_")) {
        return Some("a whpk_ key is the public half, for who verifies; sign with the private one, whsk_…");
    }
    any(|text| !text.starts_with("wh")).then_some(
        "a sink signs with whsec_ and 24 to 64 random bytes in base64: echo \"whsec_$(openssl rand -base64 32)\"",
    )
}

/// Whether a sink can sign with these. The message never repeats a key.
pub(crate) fn check_sign_keys(secrets: &[LiveSecret]) -> Result<(), String> {
    let mut probe = HttpSinkConfig::new("https://example.org/");
    give_keys(&mut probe, secrets).map_err(|text| match unlike_a_key(secrets) {
        Some(hint) => format!("{text}; {hint}"),
        None => text,
    })?;
    probe.faults().into_iter().next().map_or(Ok(()), Err)
}

/// The verifier of a source. The message never repeats a key.
pub(crate) fn verifier(scheme: Scheme, secrets: &[LiveSecret], settings: &Settings) -> Result<Box<dyn Verify>, String> {
    let seconds = |until: jiff::Timestamp| UnixSeconds(until.as_second());
    let secrets: Vec<_> = secrets.iter().map(|live| (live.secret.expose(), live.until.map(seconds))).collect();
    postbox_webhook::verifier_in_rotation(scheme, &secrets, settings).map_err(|error| error.to_string())
}

/// The verifier of a source of AWS SNS.
pub(crate) fn sns_verifier(config: &SnsConfig, settings: &Settings) -> Result<sns::Verifier, String> {
    let verifier = sns::Verifier::new(config.topics.iter().cloned()).map_err(|error| error.to_string())?;
    Ok(verifier.tolerance(settings.tolerance))
}
