//! The keys of `sink = { type = "http", … }`, and the sink that is built from them.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use ipnet::IpNet;
use postbox_config::{
    Kind, LiveSecret, Secret, Section, SinkConfig, SinkContext, all_secrets, entries, envelope, event_source, list,
    path, secret, signing_secret, table, text,
};
use postbox_core::{Envelope, Error, Result, Sink};
use postbox_webhook::standard::SignKey;

use super::{ClientCert, HttpSinkConfig, check_url, header_name_fault, header_value_fault};
use crate::sink::HttpSink;

table! {
    /// One signed POST per event, to a URL.
    #[check(check)]
    pub struct HttpSinkTable {
        /// The target: `https://` or `http://`, without user name, password and fragment.
        ///
        /// With a token in it, write `"env:HOOK_URL"`.
        url: Secret = secret().check(|url| check_url(url.expose())), required(r#""https://example.org/hook""#);
        /// The key to sign with.
        ///
        /// A [Standard Webhooks](https://www.standardwebhooks.com) key: `whsec_…`, or `whsk_…` for
        /// asymmetric signatures.
        secret: Option<LiveSecret> = signing_secret(), unset("not signed", r#""env:HOOK_SECRET""#);
        /// Several keys during a rotation; all of them sign, an old one until its end.
        ///
        /// `["env:NEW", { secret = "env:OLD", until = "2026-12-01T00:00:00Z" }]`. At least one must
        /// have no end.
        secrets: Vec<LiveSecret> = list(signing_secret()), unset("", r#"["env:NEW", "env:OLD"]"#);
        /// Headers on every request.
        ///
        /// `{ name = "value" }`; values may be `"env:NAME"`.
        headers: Vec<(String, Secret)> = entries(header_name, header_value()), unset("none", r#"{ x-team = "billing" }"#);
        /// Networks that may be called although they are not public.
        ///
        /// `["10.20.0.0/16", "127.0.0.1"]`. Postbox's own `server.listen` is never called.
        allow: Vec<IpNet> = list(text(network)), unset("public addresses only", r#"["10.20.0.0/16"]"#);
        /// CA certificates (PEM) to trust in addition to the system's.
        ///
        /// A changed file is read within 10 seconds, without a restart.
        ca_file: Option<PathBuf> = path(), unset("none", r#""ca.pem""#);
        /// The client certificate (PEM), for targets that require one (mutual TLS).
        ///
        /// Together with `client_key`; `check-config` reads these files too. Changed files are read
        /// within 10 seconds, without a restart.
        client_cert: Option<PathBuf> = path(), unset("none", r#""client.pem""#);
        /// The key of `client_cert` (PEM).
        client_key: Option<PathBuf> = path(), unset("none", r#""client.key""#);
        /// The form in which events are sent.
        ///
        /// See [envelopes](envelopes.md). The signature covers the body, which in `standard` and
        /// `cloudevents` includes the topic.
        envelope: Envelope = envelope(Envelope::ALL), default("cloudevents-binary");
        /// The CloudEvents `source` of events that name none.
        source: String = event_source(), default("postbox");
    }
}

/// Parses a network, or a single address.
fn network(text: &str) -> Result<IpNet, String> {
    let net = text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    net.map_err(|_| format!("{text:?} is not a valid network; write e.g. \"10.20.0.0/16\""))
}

fn header_name(name: &str) -> Result<String, String> {
    header_name_fault(name).map_or_else(|| Ok(name.to_owned()), Err)
}

fn header_value() -> Kind<Secret> {
    secret().check(|value| header_value_fault(value.expose()).map_or(Ok(()), |fault| Err(fault.to_owned())))
}

impl HttpSinkTable {
    fn check(&self, section: &Section<'_>) {
        self.check_keys(section);
        section.both("client_cert", "client_key");
        // Without its variable it is empty, for a command that does not deliver.
        if section.is_right(&["url", "allow"]) && !self.url.expose().is_empty() {
            self.check_target(section);
        }
    }

    fn check_keys(&self, section: &Section<'_>) {
        if !section.is_right(&["secret", "secrets"]) {
            return;
        }
        let (secrets, known) = all_secrets(&self.secret, &self.secrets);
        let path = &section.path;
        let key = if section.has("secrets") { "secrets" } else { "secret" };
        if section.has("secrets") && secrets.is_empty() {
            let text = format!("{path} has no key in secrets; name one, or leave it out to send without a signature");
            section.fault(key, text);
        } else if known {
            let signer = with_keys(HttpSinkConfig::new(""), &secrets).and_then(|config| config.signer());
            if let Err(text) = signer {
                let hint = unlike_a_key(&secrets).map(|hint| format!("; {hint}")).unwrap_or_default();
                section.fault(key, format!("{path}: {text}{hint}"));
            }
        }
    }

    /// Checks that the URL does not lead back to us. Numeric addresses are known now; names are
    /// looked up later, at each connection.
    fn check_target(&self, section: &Section<'_>) {
        let target = HttpSinkConfig { listening: vec![section.reader.listening.get()], ..self.plain() };
        if let Err(fault) = target.target() {
            let text = format!("{}: {fault}", section.name("url"));
            section.reader.refuse(section.line_of("url"), self.url.expose(), text);
        } else if section.reader.options.files
            && (target.ca_file.is_some() || target.client_cert.is_some())
            && let Err(error) = target.check_files()
        {
            let key = if error.code() == "ca_file_invalid" { "ca_file" } else { "client_cert" };
            section.fault(key, format!("{}: {}", section.path, error.message()));
        }
    }

    /// Everything except the signing keys.
    fn plain(&self) -> HttpSinkConfig {
        let files = self.client_cert.clone().zip(self.client_key.clone());
        HttpSinkConfig {
            headers: self.headers.iter().map(|(name, value)| (name.clone(), value.expose().to_owned())).collect(),
            allow: self.allow.clone(),
            ca_file: self.ca_file.clone(),
            client_cert: files.map(|(cert_file, key_file)| ClientCert { cert_file, key_file }),
            envelope: self.envelope,
            source: self.source.clone(),
            ..HttpSinkConfig::new(self.url.expose())
        }
    }
}

#[async_trait]
impl SinkConfig for HttpSinkTable {
    async fn build(&self, context: &SinkContext) -> Result<Arc<dyn Sink>> {
        Ok(Arc::new(HttpSink::new(self.config(context)?, Arc::clone(&context.clock))?))
    }

    async fn connect(&self, context: &SinkContext) -> Result<String> {
        self.config(context)?.connect().await
    }
}

impl HttpSinkTable {
    fn config(&self, context: &SinkContext) -> Result<HttpSinkConfig> {
        let (secrets, _) = all_secrets(&self.secret, &self.secrets);
        let mut config = with_keys(self.plain(), &secrets)
            .map_err(|text| Error::invalid("configure", "secret_invalid", format!("the http sink: {text}")))?;
        config.timeout = context.answer_timeout(Duration::MAX);
        // Clearly less than for the whole request, which costs an attempt: the target must be known
        // as unreachable first.
        config.connect_timeout = config.connect_timeout.min(config.timeout / 4 * 3);
        config.concurrency = context.concurrency.unwrap_or(config.concurrency);
        config.listening.clone_from(&context.listening);
        Ok(config)
    }
}

/// Adds the signing keys. The error never repeats a key.
fn with_keys(mut config: HttpSinkConfig, secrets: &[LiveSecret]) -> Result<HttpSinkConfig, String> {
    for live in secrets {
        let key = SignKey::parse(live.secret.expose()).map_err(|error| error.to_string())?;
        match live.until {
            None => config.keys.push(key),
            Some(until) => config.keys_retiring.push((key, until)),
        }
    }
    Ok(config)
}

/// Suggests what a text that is no signing key probably is.
fn unlike_a_key(secrets: &[LiveSecret]) -> Option<&'static str> {
    let any = |is: fn(&str) -> bool| secrets.iter().any(|live| is(live.secret.expose()));
    if any(|text| text.starts_with("whpk_")) {
        return Some("a whpk_ key is the public half, for the receiver; sign with the private one, whsk_…");
    }
    any(|text| !text.starts_with("wh")).then_some(
        "a sink signs with whsec_ and 24 to 64 random bytes in base64: echo \"whsec_$(openssl rand -base64 32)\"",
    )
}

#[cfg(test)]
mod tests {
    use postbox_config::{ReadOptions, read};
    use postbox_testkit::sending::context;

    use super::*;

    #[test]
    fn connecting_is_given_up_before_the_whole_request() {
        let (sink, _) = read::<HttpSinkTable>("url = \"https://h/\"", ReadOptions::none()).expect("no faults");
        for (timeout_ms, connect_ms) in [(30_000, 5_000), (5_500, 3_750), (1_000, 375)] {
            let config = sink.config(&context(Duration::from_millis(timeout_ms))).expect("a configuration");
            assert_eq!(config.connect_timeout, Duration::from_millis(connect_ms), "{timeout_ms}");
        }
        let config = sink.config(&context(Duration::from_millis(1))).expect("a configuration");
        assert!(!config.connect_timeout.is_zero() && config.connect_timeout < config.timeout);
    }
}
