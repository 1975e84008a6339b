//! `once`: deduplication for consumers with their own receive loop.

use postbox_core::kit::check_message_id;
use postbox_core::{Result, SourceName};
use rusqlite::{Connection, params};

use crate::append::require_transaction;
use crate::classify::Work;
use crate::schema::NOW_MICROS;

/// Records a message id in *your* transaction: returns `true` the first time, `false` if it was
/// recorded before. If you roll back, the id is free again. If you commit, your effect has happened
/// once.
///
/// For consumers with their own receive loop. These ids are separate from those of
/// [`postbox_core::Receive`], so that a message which was received but not yet applied does not
/// look applied.
///
/// ```
/// # fn example(connection: &mut rusqlite::Connection) -> Result<(), Box<dyn std::error::Error>> {
/// use postbox_core::SourceName;
///
/// let tx = connection.transaction()?;
/// if postbox_sqlite::once_in(&tx, &SourceName::new("billing")?, "msg-1")? {
///     tx.execute("UPDATE account SET balance = balance + 1", [])?;
/// }
/// tx.commit()?;
/// # Ok(())
/// # }
/// ```
pub fn once_in(tx: &Connection, source: &SourceName, message_id: &str) -> Result<bool> {
    check_message_id("once", message_id)?;
    require_transaction("once", tx)?;
    let note =
        || -> Work<bool> { Ok(tx.prepare_cached(&once_insert())?.execute(params![source.as_str(), message_id])? == 1) };
    note().map_err(|fault| fault.into_error("once"))
}

/// By primary key; takes the write lock.
pub(crate) fn once_insert() -> String {
    format!(
        "INSERT INTO postbox_once (source, message_id, seen_at) VALUES (?1, ?2, {NOW_MICROS}) ON CONFLICT DO NOTHING"
    )
}
