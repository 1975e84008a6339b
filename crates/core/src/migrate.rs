//! The migrate contract: how a store's schema is created, removed and checked.

use async_trait::async_trait;
use jiff::Timestamp;

use crate::error::{Error, ErrorKind, Result};
use crate::inspect::Stats;
use crate::kit::subscription_unknown;
use crate::names::SubscriptionName;
use crate::{Admin, Append, DeadLetters, Diagnose, Find, Inspect, Log, Maintain, Receive, Tail};

/// Brings a store's schema to the version of this program.
///
/// Behaviour:
/// - Migrations are embedded and numbered from 1. Each is applied in one transaction and recorded
///   by number and name.
/// - `up` is idempotent and safe if two programs start at once (a lock in the store; the second
///   finds nothing to do).
/// - `validate` changes nothing: `Mismatch` with code `schema_missing`, `schema_old` or
///   `schema_newer` and the cure in the message. What it returns is the same by whatever address
///   the store is reached, until `down`.
/// - `down` removes everything Postbox created, including events. It refuses a newer schema. Unless
///   `discard_events` is set, it also refuses (`Conflict`, code `events_undelivered`) while a log
///   holds an event that a subscription has still to deliver, that is dead, that was found
///   unrouted, or that no subscription reads. A call that was refused, dropped or cut off has
///   changed nothing. A call that cannot lock the tables within seconds is refused.
#[async_trait]
pub trait Migrate: Send + Sync + 'static {
    /// Applies missing migrations. Returns their names, in order.
    async fn up(&self) -> Result<Vec<String>>;
    /// Removes the schema. Returns the names of what was removed, newest first.
    async fn down(&self, discard_events: bool) -> Result<Vec<String>>;
    /// Checks that the schema has the version of this program. What somebody dropped later is the
    /// concern of [`Maintain::check_integrity`]. Returns when the first migration was applied, by
    /// which a store is known from another.
    async fn validate(&self) -> Result<Timestamp>;
    /// Returns all migrations as one SQL script, for other tools.
    fn script(&self) -> String;
}

/// The error of [`Migrate::down`] if `log` holds events that are still waited for.
pub fn events_undelivered(log: &str) -> Error {
    let message = format!(
        "log {log} holds events that are not delivered (see: postbox stats); deliver, discard or prune them first, also dead and \
         unrouted ones, or throw them away with: postbox migrate down --yes --discard-events"
    );
    Error::new(ErrorKind::Conflict, "migrate", "events_undelivered", message)
}

/// Everything a store offers, as one object.
#[async_trait]
pub trait Store:
    Append + Log + DeadLetters + Inspect + Diagnose + Admin + Maintain + Receive + Tail + Find + Migrate
{
    /// Returns the counts of one subscription, with the whole share for it alone.
    async fn stats(&self, subscription: &SubscriptionName) -> Result<Stats> {
        let mut counted = self.stats_of(std::slice::from_ref(subscription)).await;
        counted.pop().unwrap_or_else(|| Err(subscription_unknown("stats", subscription, &[])))
    }
}

impl<T: Append + Log + DeadLetters + Inspect + Diagnose + Admin + Maintain + Receive + Tail + Find + Migrate> Store
    for T
{
}
