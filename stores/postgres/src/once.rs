//! `once`: for consumers with a loop of their own.

use postbox_core::limits::MESSAGE_ID_BYTES_MAX;
use postbox_core::{Error, Result, SourceName};
use tokio_postgres::Transaction;
use tokio_postgres::types::Type;

use crate::classify::classify;
use crate::schema::SchemaName;

/// Remembers a message. Index: primary key of `receipt`, on which a second one waits for the first
/// one's transaction.
pub(crate) const RECEIPT_CLAIM: &str =
    "INSERT INTO {s}.receipt (source, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING";

/// Whether this is the first time that `message_id` of `source` is seen, decided in your
/// transaction: do the message's work in it only if `true`, and both commit together or neither. A
/// second transaction with the same id waits for the first one's end.
///
/// Cancel-safety: dropped before it is done, the id may or may not be remembered by your
/// transaction; roll it back.
pub async fn once_in(tx: &Transaction<'_>, schema: &SchemaName, source: &SourceName, message_id: &str) -> Result<bool> {
    check_message_id(message_id)?;
    let claimed = tx
        .client()
        .execute_typed(&schema.sql(RECEIPT_CLAIM), &[(&source.as_str(), Type::TEXT), (&message_id, Type::TEXT)])
        .await;
    Ok(claimed.map_err(|error| classify("once", &error))? == 1)
}

pub(crate) fn check_message_id(message_id: &str) -> Result<()> {
    if message_id.is_empty() || message_id.len() > MESSAGE_ID_BYTES_MAX || message_id.contains('\0') {
        let message = format!("the message id must have 1 to {MESSAGE_ID_BYTES_MAX} bytes and no NUL character");
        return Err(Error::invalid("once", "message_id_invalid", message));
    }
    Ok(())
}
