//! `once`: deduplication for consumers with their own receive loop.

use postbox_core::kit::check_message_id;
use postbox_core::{Result, SourceName};
use postbox_postgres_sql::{SchemaName, once_statement, params};
use tokio_postgres::Transaction;

use crate::classify::classify;

/// Returns whether `message_id` of `source` is seen for the first time, decided in your
/// transaction. Do the message's work in it only if `true`: then both commit together or not at
/// all. A second transaction with the same id waits for the first to end.
///
/// If the transaction names a tenant (`set_config('postbox.tenant', …, true)`), ids are known per
/// tenant.
///
/// These ids are separate from those of [`postbox_core::Receive`]: a message that was received is
/// not applied yet.
///
/// Cancel-safety: if this future is dropped before it is done, your transaction may or may not
/// remember the id; roll it back.
pub async fn once_in(tx: &Transaction<'_>, schema: &SchemaName, source: &SourceName, message_id: &str) -> Result<bool> {
    check_message_id("once", message_id)?;
    let claimed = tx.client().query_typed_one(&once_statement(schema), &params![source.as_str(), message_id]).await;
    Ok(claimed.map_err(|error| classify("once", &error))?.get(0))
}
