//! The diagnose contract: what explains that events are late, beside the counts.

use std::time::Duration;

use async_trait::async_trait;

use crate::error::Result;
use crate::event::Headers;
use crate::names::LogName;
use crate::subscription::Traits;

/// An event that came lately: what decides who gets it, and in which order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    /// Its topic.
    pub topic: String,
    /// Its tenant.
    pub tenant: Option<String>,
    /// Its key.
    pub key: Option<String>,
    /// Its kind, if it names one.
    pub kind: Option<String>,
    /// Its aggregate.
    pub aggregate: Option<String>,
    /// Its headers.
    pub headers: Headers,
    /// How long ago it was appended, by the store's clock.
    pub age: Duration,
}

impl Arrival {
    /// What a filter compares, beside the headers.
    pub fn traits(&self) -> Traits<'_> {
        let [tenant, kind, aggregate] = [&self.tenant, &self.kind, &self.aggregate].map(Option::as_deref);
        Traits { topic: &self.topic, tenant, kind, aggregate }
    }
}

/// A session of the database that keeps others waiting for a lock on a table of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocker {
    /// Its number in the database.
    pub session: i64,
    /// The program, as it calls itself.
    pub program: String,
    /// What it does, or did last; as far as we may know.
    pub query: String,
    /// Tables of ours on which it holds a lock.
    pub tables: Vec<String>,
    /// How many sessions wait for it.
    pub waiting: u64,
    /// The longest of these waits.
    pub waited: Duration,
    /// What ends it, for a person to run.
    pub end: String,
}

/// What explains that events are late. Looks only, and costs the same at any size of the log.
///
/// Behaviour:
/// - `arrivals` gives the newest events, by their place in the log, the last first. An unknown log:
///   `NotFound`, code `log_unknown`. One whose columns no event can have is left out.
/// - `blockers` gives who keeps others waiting for a second or longer, the longest wait first. It
///   waits for no lock. Where the database does not know: nothing.
#[async_trait]
pub trait Diagnose: Send + Sync + 'static {
    /// The newest events of a log, at most `limit`.
    async fn arrivals(&self, log: &LogName, limit: usize) -> Result<Vec<Arrival>>;
    /// Who keeps others waiting for a lock.
    async fn blockers(&self) -> Result<Vec<Blocker>>;
}
