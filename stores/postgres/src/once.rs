//! `once`: for consumers with a loop of their own.

use postbox_core::kit::check_message_id;
use postbox_core::{Result, SourceName};
use tokio_postgres::Transaction;

use crate::classify::classify;
use crate::params::params;
use crate::schema::SchemaName;

/// Remembers a message: see `0001_operate.sql`.
pub(crate) const ONCE: &str = "SELECT {s}.once($1, $2)";

/// Whether this is the first time that `message_id` of `source` is seen, decided in your
/// transaction: do the message's work in it only if `true`, and both commit together or neither. A
/// second transaction with the same id waits for the first one's end.
///
/// Where the transaction names a tenant (`set_config('postbox.tenant', …, true)`), ids are known by
/// tenant.
///
/// These ids are kept apart from those of [`postbox_core::Receive`]: a message that was received is
/// not applied yet.
///
/// Cancel-safety: dropped before it is done, the id may or may not be remembered by your
/// transaction; roll it back.
pub async fn once_in(tx: &Transaction<'_>, schema: &SchemaName, source: &SourceName, message_id: &str) -> Result<bool> {
    check_message_id("once", message_id)?;
    let claimed = tx.client().query_typed_one(&schema.sql(ONCE), &params![source.as_str(), message_id]).await;
    Ok(claimed.map_err(|error| classify("once", &error))?.get(0))
}
