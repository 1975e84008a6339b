//! Appending: one round trip for any number of events, in the caller's transaction or one of our
//! own.

use async_trait::async_trait;
use postbox_core::kit::in_context;
use postbox_core::{Append, AppendFuture, Appended, Error, LogName, Migrate, NewEvent, Result, Transaction};
use postbox_postgres_sql::{Columns, Param, Postgres, append_refused, is_undefined};

use crate::PostgresStore;
use crate::classify::classify;
use crate::session::Session;

/// Marks transactions of `tokio-postgres`, and of its pool.
#[derive(Debug)]
pub enum TokioPostgres {}

/// A transaction of the driver, with the pool's own if it has one: that keeps statements.
type Borrowed<'a> = (&'a tokio_postgres::Transaction<'a>, Option<&'a deadpool_postgres::Transaction<'a>>);

macro_rules! appends {
    ($($transaction:ty, $tx:ident => $borrowed:expr;)*) => {
        $(impl<'a> Transaction<'a, Postgres, TokioPostgres> for $transaction {
            type Appended = AppendFuture<'a>;

            fn append(&'a mut self, to: &'a Postgres, log: &'a LogName, events: Result<Vec<NewEvent>>) -> AppendFuture<'a> {
                let $tx = &*self;
                Box::pin(append_in($borrowed, to, log, events))
            }
        })*
    };
}

appends! {
    tokio_postgres::Transaction<'_>, tx => (tx, None);
    &tokio_postgres::Transaction<'_>, tx => (*tx, None);
    deadpool_postgres::Transaction<'_>, tx => (&**tx, Some(tx));
}

async fn append_in(
    (tx, pooled): Borrowed<'_>,
    to: &Postgres,
    log: &LogName,
    events: Result<Vec<NewEvent>>,
) -> Result<Appended> {
    let events = events?;
    let Some(columns) = Columns::of(log, &events)? else { return Ok(Appended::default()) };
    let (sql, params) = (columns.statement(&to.schema, log), columns.params());
    let known = match pooled.filter(|_| to.prepared) {
        Some(pooled) => execute_prepared(pooled, &sql, &params).await,
        None => tx.client().execute_typed(&sql, &params).await,
    };
    let known = known.map_err(|error| append_refused(log, classify("append", &error)))?;
    Ok(columns.appended(known))
}

async fn execute_prepared<const N: usize>(
    tx: &deadpool_postgres::Transaction<'_>,
    sql: &str,
    params: &[Param<'_>; N],
) -> std::result::Result<u64, tokio_postgres::Error> {
    let types = params.each_ref().map(|(_, of_type)| of_type.clone());
    let statement = tx.prepare_typed_cached(sql, &types).await?;
    tx.execute(&statement, &params.each_ref().map(|(value, _)| *value)).await
}

#[async_trait]
impl Append for PostgresStore {
    async fn append(&self, log: &LogName, events: &[NewEvent]) -> Result<Appended> {
        let events = in_context(events);
        let Some(columns) = Columns::of(log, &*events)? else { return Ok(Appended::default()) };
        let append = async |session: &Session| {
            let (sql, params) = (columns.statement(session.schema(), log), columns.params());
            session
                .at_once(&self.inner.modes.write, async |session: &Session| session.execute(&sql, &params).await)
                .await
        };
        let known = match self.call("append", append).await {
            Ok(known) => known,
            Err(error) => return Err(self.why_refused(log, error).await),
        };
        self.wake();
        Ok(columns.appended(known))
    }
}

impl PostgresStore {
    /// A writer's error. A missing log and a missing schema look the same; asks which it is.
    pub(crate) async fn why_refused(&self, log: &LogName, error: Error) -> Error {
        match is_undefined(&error) {
            true => Migrate::validate(self).await.err().unwrap_or_else(|| append_refused(log, error)),
            false => error,
        }
    }
}
