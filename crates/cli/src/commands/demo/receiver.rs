//! The receiving service: a webhook endpoint that stores into its inbox, and a handler that applies each message to a ledger
//! in the very transaction that moves the inbox on.

use postbox_core::{Delivery, Outcome};
use postbox_sqlite::TxHandler;
use rusqlite::{Connection, Transaction, params};

/// Deliberately without a unique constraint: if a message were applied twice, the table would show it.
const LEDGER_SCHEMA: &str = "CREATE TABLE ledger (line INTEGER PRIMARY KEY AUTOINCREMENT, event TEXT NOT NULL, name TEXT NOT NULL, \
     version INTEGER NOT NULL, cents INTEGER NOT NULL)";
/// Appends at the end of the primary key; under the database's one write lock.
const LEDGER_INSERT: &str = "INSERT INTO ledger (event, name, version, cents) VALUES (?1, ?2, ?3, ?4)";

/// Makes the ledger's table.
pub(super) fn make_ledger(database: &std::path::Path) -> anyhow::Result<()> {
    Connection::open(database)?.execute(LEDGER_SCHEMA, [])?;
    Ok(())
}

/// Writes each message into the ledger.
pub(super) struct Ledger;

#[derive(serde::Deserialize)]
struct Message<'a> {
    event: &'a str,
    order: &'a str,
    version: i64,
    cents: i64,
}

impl TxHandler for Ledger {
    fn handle(&self, tx: &Transaction<'_>, delivery: &Delivery) -> Outcome {
        let message: Message<'_> = match serde_json::from_slice(&delivery.event.payload) {
            Ok(message) => message,
            Err(error) => return Outcome::dead("payload_invalid", error.to_string()),
        };
        let row = params![message.event, message.order, message.version, message.cents];
        match tx.prepare_cached(LEDGER_INSERT).and_then(|mut insert| insert.execute(row)) {
            Ok(_) => Outcome::DELIVERED,
            Err(error) => Outcome::retry("ledger_failed", error.to_string()),
        }
    }
}
