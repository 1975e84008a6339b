//! The brokers, and what a client shows them.

use std::collections::BTreeMap;

use postbox_config::{Secret, TlsTable, plain, secret, table, text, words};

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

table! {
    /// The credentials (SASL).
    pub struct AuthTable {
        /// How the client authenticates: `plain`, `scram-sha-256` or `scram-sha-512`.
        mechanism: Mechanism = words([
            ("plain", Mechanism::Plain),
            ("scram-sha-256", Mechanism::ScramSha256),
            ("scram-sha-512", Mechanism::ScramSha512),
        ]), required(r#""scram-sha-512""#);
        /// The user name.
        user: String = text(plain), required(r#""postbox""#);
        /// The password.
        password: Secret = secret(), required(r#""env:KAFKA_PASSWORD""#);
    }
}

/// The id that each topic has in the cluster; without topics of which none is reported.
pub(crate) type TopicIds = BTreeMap<String, [u8; 16]>;

/// The brokers, the credentials, and the client to use.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cluster {
    pub(crate) client: Client,
    /// `HOST:PORT`, several separated by commas.
    pub(crate) brokers: String,
    pub(crate) auth: Option<AuthTable>,
    pub(crate) tls: Option<TlsTable>,
}
