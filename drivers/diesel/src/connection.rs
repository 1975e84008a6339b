//! The connection on libpq.

use diesel::connection::{AnsiTransactionManager, TransactionManager as _};
use diesel::{PgConnection, RunQueryDsl as _};
use postbox_core::{Appended, LogName, NewEvent, Result, Transaction};
use postbox_postgres_sql::{AppendStatement, Postgres, no_transaction};

/// Marks transactions of `diesel`.
#[derive(Debug)]
pub enum Diesel {}

impl<'a> Transaction<'a, Postgres, Diesel> for PgConnection {
    type Appended = Result<Appended>;

    fn append(&'a mut self, to: &'a Postgres, log: &'a LogName, events: Result<Vec<NewEvent>>) -> Self::Appended {
        let depth = AnsiTransactionManager::transaction_manager_status_mut(self).transaction_depth();
        if !matches!(depth, Ok(Some(_))) {
            return Err(no_transaction("append"));
        }
        let Some(statement) = AppendStatement::of(to, log, events)? else { return Ok(Appended::default()) };
        let executed = crate::query(statement.sql, statement.texts).execute(self);
        let known = executed.map_err(|error| crate::classify("append", &error, Some(log)))?;
        Ok(Appended::new(statement.ids, known))
    }
}
