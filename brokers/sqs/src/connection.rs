//! The address of a queue or a topic, and a client for it that never retries.

use std::path::Path;
use std::time::Duration;

use aws_config::retry::RetryConfig;
use aws_config::stalled_stream_protection::StalledStreamProtectionConfig;
use aws_config::timeout::TimeoutConfig;
use aws_config::{BehaviorVersion, Region, SdkConfig};
use aws_sdk_sqs::config::Credentials;
use aws_smithy_http_client::Builder;
use aws_smithy_http_client::tls::rustls_provider::CryptoMode;
use aws_smithy_http_client::tls::{Provider, TlsContext, TrustStore};
use postbox_core::{Error, ErrorKind, Result};
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use url::Url;

use crate::config::AwsTable;

/// The longest wait for a connection, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The address of a queue: `https://sqs.REGION.amazonaws.com/ACCOUNT/NAME`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QueueUrl {
    pub(crate) url: String,
    /// The server to ask, unless the configuration names another.
    pub(crate) origin: String,
    pub(crate) region: Option<String>,
    pub(crate) name: String,
}

/// The name of a topic: `arn:aws:sns:REGION:ACCOUNT:NAME`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TopicArn {
    pub(crate) arn: String,
    pub(crate) region: String,
    pub(crate) name: String,
}

impl QueueUrl {
    /// Whether the queue keeps its groups in order.
    pub(crate) fn is_fifo(&self) -> bool {
        self.name.ends_with(".fifo")
    }
}

impl std::str::FromStr for QueueUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fault = "is not the URL of a queue; write https://sqs.REGION.amazonaws.com/ACCOUNT/NAME".to_owned();
        let url = check_url(text).ok_or_else(|| fault.clone())?;
        let name = url.path_segments().and_then(|mut path| path.next_back()).unwrap_or_default();
        let labels: Vec<&str> = url.host_str().unwrap_or_default().split('.').collect();
        // Works for gateways and endpoints of a VPC too: the label after `sqs` is the region.
        let region = labels.windows(2).find(|pair| pair[0] == "sqs" || pair[0] == "sqs-fips").map(|pair| pair[1]);
        match name {
            "" => Err(fault),
            name => Ok(Self {
                url: text.to_owned(),
                origin: url.origin().ascii_serialization(),
                region: region.map(str::to_owned),
                name: name.to_owned(),
            }),
        }
    }
}

impl std::str::FromStr for TopicArn {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split(':').collect::<Vec<_>>()[..] {
            ["arn", _, "sns", region, _, name] if !region.is_empty() && !name.is_empty() => {
                Ok(Self { arn: text.to_owned(), region: region.to_owned(), name: name.to_owned() })
            }
            _ => Err(format!("{text:?} is not a valid topic; write arn:aws:sns:REGION:ACCOUNT:NAME")),
        }
    }
}

/// Parses a plain HTTP address, without parts that would lead elsewhere or be a secret.
pub(crate) fn check_url(text: &str) -> Option<Url> {
    let url = Url::parse(text).ok()?;
    let is_plain = url.query().is_none() && url.fragment().is_none() && url.username().is_empty();
    let is_http = matches!(url.scheme(), "http" | "https") && url.password().is_none();
    (is_plain && is_http && url.host_str().is_some_and(|host| !host.is_empty())).then_some(url)
}

/// Builds the configuration of a client. Sends no request, unless the region has to be looked up.
/// `region` and `origin` come from the address of the queue or topic.
pub(crate) async fn load(aws: AwsTable, region: Option<&str>, origin: Option<&str>) -> Result<SdkConfig> {
    let roots = match &aws.ca_file {
        Some(path) => TrustStore::empty().with_pem_certificate(certificates(path).await?),
        None => TrustStore::default(),
    };
    let tls = TlsContext::builder().with_trust_store(roots).build();
    let tls = tls.map_err(|error| invalid("tls_invalid", error.to_string()))?;
    let http = Builder::new().tls_provider(Provider::Rustls(CryptoMode::Ring)).tls_context(tls).build_https();
    let mut loader = aws_config::defaults(BehaviorVersion::v2026_01_12())
        .http_client(http)
        // The engine retries, and the caller decides when a slow answer is given up.
        .retry_config(RetryConfig::disabled())
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
        .timeout_config(TimeoutConfig::builder().connect_timeout(CONNECT_TIMEOUT).build());
    if let Some(region) = aws.region.as_deref().or(region) {
        loader = loader.region(Region::new(region.to_owned()));
    }
    if let Some(endpoint) = aws.endpoint.as_deref().or(origin) {
        loader = loader.endpoint_url(endpoint);
    }
    if let (Some(id), Some(secret)) = (aws.access_key_id, aws.secret_access_key) {
        let token = aws.session_token.map(|token| token.expose().to_owned());
        loader = loader.credentials_provider(Credentials::new(id, secret.expose(), token, None, "postbox"));
    }
    let config = loader.load().await;
    match config.region() {
        Some(_) => Ok(config),
        None => Err(invalid("region_missing", "no region is known; set aws.region, or AWS_REGION".to_owned())),
    }
}

/// Reads the file's certificates and checks them, because a client accepts them unchecked.
async fn certificates(path: &Path) -> Result<Vec<u8>> {
    let fault = |why: String| invalid("ca_file_invalid", format!("{}: {why}", path.display()));
    let pem = tokio::fs::read(path).await.map_err(|error| fault(error.to_string()))?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate.map_err(|error| fault(error.to_string()))?;
        roots.add(certificate).map_err(|error| fault(error.to_string()))?;
    }
    if roots.is_empty() { Err(fault("holds no certificate (PEM)".to_owned())) } else { Ok(pem) }
}

fn invalid(code: &'static str, text: String) -> Error {
    Error::new(ErrorKind::Invalid, "configure", code, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_says_where_it_is() {
        for (url, origin, region, name) in [
            (
                "https://sqs.eu-west-1.amazonaws.com/123/orders",
                "https://sqs.eu-west-1.amazonaws.com",
                Some("eu-west-1"),
                "orders",
            ),
            ("http://127.0.0.1:5000/123/orders.fifo", "http://127.0.0.1:5000", None, "orders.fifo"),
            (
                "https://vpce-1.sqs.us-east-1.vpce.amazonaws.com/1/q",
                "https://vpce-1.sqs.us-east-1.vpce.amazonaws.com",
                Some("us-east-1"),
                "q",
            ),
            ("http://sqs.us-east-1.localhost:4566/1/q", "http://sqs.us-east-1.localhost:4566", Some("us-east-1"), "q"),
        ] {
            let queue: QueueUrl = url.parse().expect(url);
            assert_eq!((queue.origin.as_str(), queue.region.as_deref(), queue.name.as_str()), (origin, region, name));
            assert_eq!(queue.url, url);
        }
    }

    #[test]
    fn what_is_no_queue_or_topic_is_refused() {
        for url in
            ["", "orders", "https://h", "https://h/", "ftp://h/q", "https://u:p@h/q", "https://h/q?x", "https://h/q#@i"]
        {
            assert!(url.parse::<QueueUrl>().is_err(), "{url}");
        }
        let topic: TopicArn = "arn:aws-cn:sns:cn-north-1:1:orders.fifo".parse().expect("a topic");
        assert_eq!((topic.region.as_str(), topic.name.as_str()), ("cn-north-1", "orders.fifo"));
        for arn in
            ["", "orders", "arn:aws:sqs:eu-west-1:1:q", "arn:aws:sns::1:t", "arn:aws:sns:r:1:", "arn:aws:sns:r:1:t:sub"]
        {
            assert!(arn.parse::<TopicArn>().is_err(), "{arn}");
        }
    }
}
