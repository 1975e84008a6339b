//! Keys and checks shared by the clients of several servers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::adapter::SinkContext;
use crate::kind::path;
use crate::reader::Section;
use crate::table;

/// The part of the subscription's timeout that a sink does not use, so that the sink gives up first
/// and can say why.
const TIMEOUT_SHARE: Duration = Duration::from_millis(500);

table! {
    /// Certificates of a TLS connection.
    #[check(check)]
    pub struct TlsTable {
        /// CA certificates (PEM) to trust instead of the system's.
        ca_file: Option<PathBuf> = path(), unset("the system's", r#""ca.pem""#);
        /// The client certificate (PEM), for servers that require one; together with `client_key`.
        client_cert: Option<PathBuf> = path(), unset("none", r#""client.pem""#);
        /// The key of `client_cert` (PEM).
        client_key: Option<PathBuf> = path(), unset("none", r#""client.key""#);
    }
}

impl TlsTable {
    fn check(&self, section: &Section<'_>) {
        section.both("client_cert", "client_key");
    }

    /// Our certificate and its key.
    pub fn client_cert(&self) -> Option<(&Path, &Path)> {
        self.client_cert.as_deref().zip(self.client_key.as_deref())
    }
}

impl Section<'_> {
    /// Reports a fault unless both keys or none are set.
    pub fn both(&self, first: &'static str, second: &'static str) {
        if self.has(first) != self.has(second) {
            self.fault(second, format!("{} has one of {first} and {second}; it needs both", self.path));
        }
    }
}

impl SinkContext {
    /// How long a sink waits for an answer: less than the engine, and at most `most`.
    pub fn answer_timeout(&self, most: Duration) -> Duration {
        let timeout = self.deliver_timeout;
        timeout.saturating_sub(TIMEOUT_SHARE).max(timeout / 2).min(most)
    }
}

/// Text that is not empty.
pub fn plain(text: &str) -> Result<String, String> {
    match text {
        "" => Err("is empty; leave it out, or write a value".to_owned()),
        text => Ok(text.to_owned()),
    }
}
