//! Connecting: addresses of brokers, credentials, TLS.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use krafka::auth::{AuthConfig, TlsConfig};
use krafka::consumer::Consumer;
use krafka::{Kafka, KafkaBuilder};
use postbox_config::{Secret, TlsTable};
use postbox_core::{Error, ErrorKind, Result};
use tokio::time::timeout;

use crate::classify;

/// The longest wait until a broker accepts a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How old the client's knowledge of topics may be. A topic that was deleted and created again is
/// noticed after this time.
const METADATA_MAX_AGE: Duration = Duration::from_secs(10);

/// The SASL mechanism.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mechanism {
    /// PLAIN: the password is sent as it is, so use this only with TLS.
    #[default]
    Plain,
    /// SCRAM with SHA-256.
    ScramSha256,
    /// SCRAM with SHA-512.
    ScramSha512,
}

/// The SASL credentials.
#[derive(Debug, Clone)]
pub(crate) struct Auth {
    pub(crate) mechanism: Mechanism,
    pub(crate) user: String,
    pub(crate) password: Secret,
}

/// The id that each topic has in the cluster.
pub(crate) type TopicIds = BTreeMap<String, [u8; 16]>;

/// Returns the ids of these topics, or the error of `operation` if one is missing. Asks the cluster
/// only if the client's metadata is old.
pub(crate) async fn topic_ids(consumer: &Consumer, topics: &[String], operation: &'static str) -> Result<TopicIds> {
    let mut ids = TopicIds::new();
    for topic in topics {
        let found = consumer.fetch_metadata(Some(topic)).await;
        let found = found.map_err(|error| classify::error("connect", &error))?.topics;
        let Some(found) = found.first() else {
            let text = classify::missing(topic);
            return Err(Error::new(ErrorKind::Mismatch, operation, classify::TOPIC_MISSING, text));
        };
        ids.insert(topic.clone(), found.topic_id);
    }
    Ok(ids)
}

/// The brokers and the credentials.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cluster {
    /// `HOST:PORT`, several separated by commas.
    pub(crate) brokers: String,
    pub(crate) auth: Option<Auth>,
    pub(crate) tls: Option<TlsTable>,
}

impl Cluster {
    /// Connects to the first broker that answers. `request_timeout` limits connecting as a whole,
    /// and then each request.
    pub(crate) async fn connect(&self, request_timeout: Duration) -> Result<Kafka> {
        let connecting = self.builder(request_timeout).connect();
        match timeout(request_timeout, connecting).await {
            Ok(connected) => connected.map_err(|error| classify::error("connect", &error)),
            Err(_) => {
                let text = format!("no broker of {} answered in time", self.brokers);
                Err(Error::new(ErrorKind::Unavailable, "connect", "kafka_connect_timeout", text))
            }
        }
    }

    /// Checks for an operator whether these topics exist.
    pub(crate) async fn look(&self, topics: &[String]) -> Result<String> {
        let kafka = self.connect(CONNECT_TIMEOUT).await?;
        // This consumer has no group and reads no records. It only fetches metadata.
        let consumer = kafka.consumer_without_group().metrics_push(false).build().await;
        let consumer = consumer.map_err(|error| classify::error("connect", &error))?;
        topic_ids(&consumer, topics, "connect").await?;
        // An error means that it is closed already.
        let _ = consumer.close().await;
        Ok(match topics {
            [] => "answers".to_owned(),
            topics => format!("answers; the topic {} is there", topics.join(", ")),
        })
    }

    fn builder(&self, request_timeout: Duration) -> KafkaBuilder {
        let builder = Kafka::builder(self.brokers.as_str())
            .client_id("postbox")
            .request_timeout(request_timeout)
            .connect_timeout(CONNECT_TIMEOUT.min(request_timeout))
            .metadata_max_age(METADATA_MAX_AGE);
        match self.security() {
            Some(security) => builder.security(security),
            None => builder,
        }
    }

    fn security(&self) -> Option<AuthConfig> {
        let auth = self.auth.as_ref().map(|Auth { mechanism, user, password }| {
            let with = match mechanism {
                Mechanism::Plain => AuthConfig::sasl_plain,
                Mechanism::ScramSha256 => AuthConfig::sasl_scram_sha256,
                Mechanism::ScramSha512 => AuthConfig::sasl_scram_sha512,
            };
            with(user.clone(), password.expose().to_owned())
        });
        let Some(tls) = &self.tls else { return auth };
        let shown = |path: &Path| path.to_string_lossy().into_owned();
        let mut config = match &tls.ca_file {
            Some(ca_file) => TlsConfig::new().with_ca_cert(shown(ca_file)),
            None => TlsConfig::new().with_native_roots(),
        };
        if let Some((cert, key)) = tls.client_cert() {
            config = config.with_client_cert(shown(cert), shown(key));
        }
        Some(auth.map_or_else(|| AuthConfig::ssl(config.clone()), |auth| auth.with_tls(config.clone())))
    }
}
