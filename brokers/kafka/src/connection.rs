//! The brokers, and what a client shows them.

use std::collections::BTreeMap;

use postbox_config::{Secret, TlsTable};

use crate::client::Client;

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

/// The id that each topic has in the cluster; without topics of which none is reported.
pub(crate) type TopicIds = BTreeMap<String, [u8; 16]>;

/// The brokers, the credentials, and the client to use.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cluster {
    pub(crate) client: Client,
    /// `HOST:PORT`, several separated by commas.
    pub(crate) brokers: String,
    pub(crate) auth: Option<Auth>,
    pub(crate) tls: Option<TlsTable>,
}
