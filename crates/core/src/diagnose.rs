//! The diagnose contract: what explains late events, beside the counts.

use std::time::Duration;

use async_trait::async_trait;

use crate::error::Result;
use crate::event::Headers;
use crate::names::LogName;
use crate::subscription::Traits;

/// A recently appended event: the fields that decide who gets it, and in which order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    /// Its topic.
    pub topic: String,
    /// Its tenant.
    pub tenant: Option<String>,
    /// Its key.
    pub key: Option<String>,
    /// Its kind, if it has one.
    pub kind: Option<String>,
    /// Its aggregate.
    pub aggregate: Option<String>,
    /// Its headers.
    pub headers: Headers,
    /// How long ago it was appended, by the store's clock.
    pub age: Duration,
}

impl Arrival {
    /// Returns what a filter compares, except the headers.
    pub fn traits(&self) -> Traits<'_> {
        let [tenant, kind, aggregate] = [&self.tenant, &self.kind, &self.aggregate].map(Option::as_deref);
        Traits { topic: &self.topic, tenant, kind, aggregate }
    }
}

/// A database session that makes others wait for a lock on one of Postbox's tables, or that may
/// soon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocker {
    /// Its number in the database.
    pub session: i64,
    /// The name that its program gave.
    pub program: String,
    /// Its current or last query, as far as we may see it.
    pub query: String,
    /// Postbox's tables on which it holds a lock.
    pub tables: Vec<String>,
    /// Number of sessions that wait, itself included if its commit waits for a standby.
    pub waiting: u64,
    /// The longest of these waits.
    pub waited: Duration,
    /// The command with which a person can end it.
    pub end: String,
    /// Whether its commit waits for a synchronous standby. Ending it helps nobody then.
    pub awaits_standby: bool,
}

/// Explains why events are late. Only reads, at the same cost for any size of the log.
///
/// Behaviour:
/// - `arrivals` returns the newest events by their position in the log, the last one first. An
///   unknown log: `NotFound`, code `log_unknown`. A row with columns that no event can have is left
///   out.
/// - `blockers` returns sessions that make others wait for a second or longer, or whose own commit
///   waits so long for a standby, the longest wait first. It waits for no lock. It returns nothing
///   if the database cannot tell.
#[async_trait]
pub trait Diagnose: Send + Sync + 'static {
    /// Returns the newest events of a log, at most `limit`.
    async fn arrivals(&self, log: &LogName, limit: usize) -> Result<Vec<Arrival>>;
    /// Returns the sessions that make others wait for a lock.
    async fn blockers(&self) -> Result<Vec<Blocker>>;
}
