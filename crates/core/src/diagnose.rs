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

/// What is in the way of others in the database, or may soon be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocker {
    /// Its name: `session 4711`, `the prepared transaction 'x'`.
    pub holder: String,
    /// The name that its program gave. For what has no program, what else is known of it.
    pub program: String,
    /// Its current or last query, as far as we may see it.
    pub query: String,
    /// Postbox's tables on which it holds a lock.
    pub tables: Vec<String>,
    /// Number of sessions that wait, itself included if its commit waits for a standby.
    pub waiting: u64,
    /// The longest of these waits. Of [`Hold::Horizon`]: how long it has been open, zero if that is
    /// not known.
    pub waited: Duration,
    /// The command with which a person can end it; empty if there is none.
    pub end: String,
    /// How it is in the way.
    pub hold: Hold,
}

/// How a [`Blocker`] is in the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// It holds a lock on one of Postbox's tables, and others wait for it.
    Lock,
    /// Its commit waits for a synchronous standby, with its locks. Ending it helps nobody.
    Standby,
    /// It has been open for long. The database keeps every row that it might still see.
    Horizon {
        /// Whether it has written. No event that was committed since is then deleted or called
        /// unrouted.
        has_written: bool,
    },
    /// Unknown programs keep a read transaction open, or have so many that they overlap. Meanwhile
    /// the write-ahead log (SQLite), which [`Blocker::holder`] names, grows with each write.
    Wal {
        /// Its size.
        bytes: u64,
    },
}

/// Explains why events are late. Only reads, at the same cost for any size of the log.
///
/// Behaviour:
/// - `arrivals` returns the newest events by their position in the log, the last one first. An
///   unknown log: `NotFound`, code `log_unknown`. A row with columns that no event can have is left
///   out.
/// - `blockers` returns sessions and prepared transactions that make others wait for a second or
///   longer, or whose own commit waits so long for a standby, the longest wait first. The last one
///   may be what holds the database's horizon; there is one at most. It waits for no lock. It
///   returns nothing if the database cannot tell. Of a SQLite file only [`Hold::Wal`] is known.
#[async_trait]
pub trait Diagnose: Send + Sync + 'static {
    /// Returns the newest events of a log, at most `limit`.
    async fn arrivals(&self, log: &LogName, limit: usize) -> Result<Vec<Arrival>>;
    /// Returns what makes others wait.
    async fn blockers(&self) -> Result<Vec<Blocker>>;
}
