//! The configuration of an HTTP sink.

mod table;

use std::collections::HashSet;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderName, HeaderValue};
use ipnet::IpNet;
use jiff::Timestamp;
use postbox_core::envelope::Binding;
use postbox_core::{Envelope, Error, Result};
use postbox_webhook::UnixSeconds;
use postbox_webhook::standard::{SignKey, Signer};
use url::Url;

use crate::guard::{Guard, Ourselves};
use crate::reserved::is_ours;
use crate::tls;

pub use table::HttpSinkTable;

/// The most requests at once to one target. Whoever needs more should talk to the target's owner.
const CONCURRENCY_MAX: usize = 1_024;

/// The longest URL, in bytes: what servers commonly accept.
const URL_BYTES_MAX: usize = 8_000;

/// The settings of one HTTP target.
#[derive(Clone)]
pub struct HttpSinkConfig {
    /// The target: `http://` or `https://`, without user name, password and fragment.
    pub url: String,
    /// Keys to sign with. All of them sign every request; several while one is rotated. None: not
    /// signed.
    pub keys: Vec<SignKey>,
    /// Old keys, which sign too, each up to and including the second of its end. `keys` must have
    /// at least one.
    pub keys_retiring: Vec<(SignKey, Timestamp)>,
    /// Headers on every request, e.g. `authorization`. They replace an event's headers of the same
    /// name. Not those that Postbox or HTTP itself sets; those that proxies set are allowed here.
    pub headers: Vec<(String, String)>,
    /// The form in which events are sent. The signature covers its body.
    pub envelope: Envelope,
    /// The CloudEvents source of events that have none.
    pub source: String,
    /// The longest wait for a connection, TLS included. Keep it well below `timeout`. Otherwise a
    /// target that cannot be reached counts as one that does not answer, which costs an attempt.
    /// From the configuration file: 5 s, and at most three quarters of `timeout`.
    pub connect_timeout: Duration,
    /// The longest time for one request, from connecting to the end of the answer. Keep it below
    /// the subscription's timeout. Otherwise the relay gives up first and cannot say why.
    pub timeout: Duration,
    /// The most requests at once.
    pub concurrency: usize,
    /// Networks that may be called although they are not public. Default: none, so that a name
    /// which leads into your own network, by mistake or on purpose, is refused.
    pub allow: Vec<IpNet>,
    /// The addresses that this process itself listens on. A sink never calls these, whatever is
    /// allowed. `0.0.0.0` and `::` mean every address of this machine.
    pub listening: Vec<SocketAddr>,
    /// Certificates (PEM) to trust in addition to the system's, for a private authority. A
    /// request that begins 10 s after a change, or later, uses the new file.
    pub ca_file: Option<PathBuf>,
    /// The certificate for a target that asks for one (mutual TLS). Changed files are read like
    /// `ca_file`.
    pub client_cert: Option<ClientCert>,
}

/// A client certificate and its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientCert {
    /// The certificate and its intermediates (PEM).
    pub cert_file: PathBuf,
    /// Its key (PEM). No other user should be able to read it.
    pub key_file: PathBuf,
}

impl HttpSinkConfig {
    /// A target with all other settings at their defaults: not signed, 5 s to connect, 20 s in all,
    /// 16 requests at once, public addresses only.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            keys: Vec::new(),
            keys_retiring: Vec::new(),
            headers: Vec::new(),
            envelope: Envelope::CloudEventsBinary,
            source: "postbox".into(),
            connect_timeout: Duration::from_secs(5),
            timeout: Duration::from_secs(20),
            concurrency: 16,
            allow: Vec::new(),
            listening: Vec::new(),
            ca_file: None,
            client_cert: None,
        }
    }

    /// Returns every fault at once, each as a line that says how to fix it.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        faults.extend(self.target().err());
        faults.extend(self.signer().err());
        if self.source.is_empty() {
            faults.push("source must not be empty: CloudEvents requires one".into());
        }
        if self.timeout.is_zero() || self.connect_timeout.is_zero() {
            faults.push("timeout and connect_timeout must be longer than zero".into());
        }
        if !(1..=CONCURRENCY_MAX).contains(&self.concurrency) {
            faults.push(format!("concurrency must be 1 to {CONCURRENCY_MAX}"));
        }
        let mut names = HashSet::new();
        for (name, value) in &self.headers {
            if !names.insert(name.to_ascii_lowercase()) {
                faults.push(format!(
                    "the header {name} is there twice, because upper and lower case are the same; keep one"
                ));
            }
            faults.extend(header_name_fault(name));
            faults.extend(header_value_fault(value).map(|fault| format!("the header {name}: {fault}")));
        }
        faults
    }

    /// Returns [`Self::faults`] as an error.
    pub fn validate(&self) -> Result<()> {
        match self.faults() {
            faults if faults.is_empty() => Ok(()),
            faults => Err(Error::invalid("configure", "http_sink_invalid", faults.join("; "))),
        }
    }

    /// Reads the files that an `https` target needs, as building the sink does: the trusted
    /// certificates, and our own with its key. The codes are `ca_file_invalid`,
    /// `client_cert_invalid` and `tls_roots_missing`.
    pub fn check_files(&self) -> Result<()> {
        let url = self.target().map_err(|fault| Error::invalid("configure", "http_sink_invalid", fault))?;
        tls::client_config(url.scheme() == "https", self.ca_file.as_deref(), self.client_cert.as_ref()).map(drop)
    }

    /// Returns the signer; `None` without keys. The error never repeats a key.
    pub(crate) fn signer(&self) -> Result<Option<Signer>, String> {
        if self.keys.is_empty() {
            return match self.keys_retiring.is_empty() {
                true => Ok(None),
                false => {
                    Err("every secret has an end, after which nothing could be signed; add the new one, without an end"
                        .into())
                }
            };
        }
        let signer = Signer::new(self.keys.iter().cloned());
        let retiring = self.keys_retiring.iter().map(|(key, until)| (key.clone(), UnixSeconds(until.as_second())));
        let signer = signer.and_then(|signer| {
            retiring.into_iter().try_fold(signer, |signer, (key, until)| signer.retiring(key, until))
        });
        signer.map(Some).map_err(|error| error.to_string())
    }

    pub(crate) fn guard(&self, url: &Url) -> Guard {
        Guard::new(&self.allow, Ourselves::behind(url, &self.listening))
    }

    /// Returns the parsed URL, or what is wrong with it.
    pub(crate) fn target(&self) -> Result<Url, String> {
        let url = parse_url(&self.url)?;
        self.guard(&url).check_host(&url)?;
        Ok(url)
    }
}

/// Checks the form of a URL, not where it leads. The error never repeats it: it may hold a
/// password.
pub fn check_url(text: &str) -> Result<(), String> {
    parse_url(text).map(drop)
}

fn parse_url(text: &str) -> Result<Url, String> {
    if text.len() > URL_BYTES_MAX {
        return Err(format!("the url has {} bytes; at most {URL_BYTES_MAX} are allowed", text.len()));
    }
    if text.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err("the url has white space or a control character".into());
    }
    let url = Url::parse(text).map_err(|error| format!("the url is not valid ({error}); write https://host/path"))?;
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
        return Err("the url must begin with https:// or http:// and name a host".into());
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("the url holds a user name or password; give them as a header `authorization` instead".into());
    }
    if url.fragment().is_some() {
        return Err("the url has a fragment (#…), which is never sent; leave it out".into());
    }
    Ok(url)
}

impl fmt::Debug for HttpSinkConfig {
    /// Header values may be credentials, and the URL may carry a token in its user name, path or
    /// query, so only its host is shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.headers.iter().map(|(name, _)| name.as_str()).collect();
        let url = Url::parse(&self.url).ok();
        let host = url.as_ref().and_then(Url::host_str).unwrap_or("…");
        f.debug_struct("HttpSinkConfig")
            .field("host", &host)
            .field("keys", &self.keys.len())
            .field("keys_retiring", &self.keys_retiring.len())
            .field("headers", &names)
            .field("envelope", &self.envelope)
            .field("source", &self.source)
            .field("connect_timeout", &self.connect_timeout)
            .field("timeout", &self.timeout)
            .field("concurrency", &self.concurrency)
            .field("allow", &self.allow)
            .field("listening", &self.listening)
            .field("ca_file", &self.ca_file)
            .field("client_cert", &self.client_cert)
            .finish()
    }
}

/// Returns what is wrong with the name of a configured header.
fn header_name_fault(name: &str) -> Option<String> {
    match HeaderName::try_from(name) {
        Err(_) => Some(format!("{name:?} is not a valid header name")),
        Ok(parsed) if is_ours(parsed.as_str()) && parsed != http::header::AUTHORIZATION => {
            Some(format!("the header {name} is set by Postbox or by HTTP itself; {}", instead(&parsed)))
        }
        Ok(_) => None,
    }
}

fn header_value_fault(value: &str) -> Option<&'static str> {
    HeaderValue::try_from(value).err().map(|_| "the value has a character that headers cannot carry")
}

/// Suggests what to use instead of a reserved header.
fn instead(name: &HeaderName) -> &'static str {
    match name.as_str() {
        "cookie" | "proxy-authorization" => "send credentials as `authorization`",
        "host" => "it is the host of the url",
        "content-type" => "it is the event's own",
        "webhook-signature" | "webhook-id" | "webhook-timestamp" => "give a `secret`, and requests are signed",
        "ce-source" => "give `source`",
        name if Binding::HTTP.is_reserved(name) => "it is the event's own; send yours under another name",
        name if name.starts_with("svix-") => "give a `secret`, and requests are signed with webhook-*",
        _ => "leave it out",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_urls_are_refused() {
        for url in [
            "",
            "example.org/hook",
            "ftp://example.org/",
            "file:///etc/passwd",
            "https://user:pw@example.org/",
            "https://user@example.org/",
            "https://example.org/#frag",
            "https://good.example#@evil.example/",
            "https://example.org/\r\nHost: evil",
            "https://example.org/a b",
            "https://",
        ] {
            assert!(HttpSinkConfig::new(url).validate().is_err(), "{url:?}");
        }
        assert!(HttpSinkConfig::new("https://example.org:8443/hook?token=1").validate().is_ok());
    }

    #[test]
    fn all_faults_come_at_once_and_no_secret_with_them() {
        let config = HttpSinkConfig {
            headers: vec![("a b".into(), "canary\n".into()), ("Host".into(), "x".into()), ("ce-id".into(), "x".into())],
            concurrency: 0,
            ..HttpSinkConfig::new("https://canary:canary@example.org/")
        };
        assert_eq!(config.faults().len(), 6, "{:?}", config.faults());
        let printed = format!("{config:?} {}", config.validate().expect_err("faults"));
        assert!(!printed.contains("canary"), "{printed}");
    }

    #[test]
    fn the_operator_may_set_what_proxies_set_and_nothing_of_ours() {
        for name in [
            "X-Forwarded-Proto",
            "x-forwarded-user",
            "x-real-ip",
            "x-remote-user",
            "x-client-cert",
            "x-ssl-client-cert",
            "x-http-method",
            "x-http-method-override",
            "x-method-override",
            "x-original-url",
            "x-rewrite-url",
            "authorization",
        ] {
            assert_eq!(header_name_fault(name), None);
        }
        for name in ["Host", "forwarded", "proxy-authorization", "http2-settings", "webhook-id", "svix-id", "ce-type"] {
            let fault = header_name_fault(name).expect("refused");
            assert!(fault.contains("is set by Postbox or by HTTP itself"), "{fault}");
        }
    }

    #[test]
    fn credentials_do_not_print() {
        let config = HttpSinkConfig {
            headers: vec![("authorization".into(), "Bearer canary".into())],
            ..HttpSinkConfig::new("https://example.org/hook?token=canary")
        };
        assert!(config.validate().is_ok());
        assert!(!format!("{config:?}").contains("canary"));
    }
}
