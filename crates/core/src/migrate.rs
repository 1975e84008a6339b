//! The migrate contract: how a store's schema comes, goes and is checked.

use async_trait::async_trait;

use crate::error::{Error, ErrorKind, Result};
use crate::inspect::Stats;
use crate::kit::subscription_unknown;
use crate::names::SubscriptionName;
use crate::{Admin, Append, DeadLetters, Diagnose, Find, Inspect, Log, Maintain, Receive, Tail};

/// Brings a store's schema to the version this program speaks.
///
/// Behaviour:
/// - Migrations are embedded, numbered from 1, each applied in one transaction, recorded by number
///   and name.
/// - `up` is idempotent and safe with two starters at once (a lock in the store; the second finds
///   nothing to do).
/// - `validate` changes nothing: `Mismatch` with code `schema_missing`, `schema_old` or
///   `schema_newer` and the cure in the message.
/// - `down` removes everything Postbox made, events included; it refuses a newer schema. Unless
///   `discard_events`, it also refuses (`Conflict`, code `events_undelivered`) while a log holds an
///   event that a subscription has still to deliver, or that no subscription reads. A call that was
///   refused, dropped or cut off has changed nothing; one that cannot have the tables within
///   seconds is refused.
#[async_trait]
pub trait Migrate: Send + Sync + 'static {
    /// Applies what is missing; returns the names of what was applied, in order.
    async fn up(&self) -> Result<Vec<String>>;
    /// Removes the schema; returns the names of what was removed, newest first.
    async fn down(&self, discard_events: bool) -> Result<Vec<String>>;
    /// Checks that the schema is exactly the one this program speaks.
    async fn validate(&self) -> Result<()>;
    /// All migrations as one SQL script, for other tools.
    fn script(&self) -> String;
}

/// The error of [`Migrate::down`] where `log` holds events that somebody waits for.
pub fn events_undelivered(log: &str) -> Error {
    let message = format!(
        "log {log} holds events that are not delivered (see: postbox stats); deliver or discard them first, or throw them away with: \
         postbox migrate down --yes --discard-events"
    );
    Error::new(ErrorKind::Conflict, "migrate", "events_undelivered", message)
}

/// Everything a store offers, as one object.
#[async_trait]
pub trait Store:
    Append + Log + DeadLetters + Inspect + Diagnose + Admin + Maintain + Receive + Tail + Find + Migrate
{
    /// Counts of one subscription, which has all that is looked at to itself.
    async fn stats(&self, subscription: &SubscriptionName) -> Result<Stats> {
        let mut counted = self.stats_of(std::slice::from_ref(subscription)).await;
        counted.pop().unwrap_or_else(|| Err(subscription_unknown("stats", subscription, &[])))
    }
}

impl<T: Append + Log + DeadLetters + Inspect + Diagnose + Admin + Maintain + Receive + Tail + Find + Migrate> Store
    for T
{
}
