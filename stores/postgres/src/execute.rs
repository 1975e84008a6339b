//! Where a settlement is written: on a connection of the store, or on one of another driver.

use postbox_core::Result;
use postbox_postgres_sql::Bound;
use tokio_postgres::Client;

use crate::classify::classify;

/// Columns of a row, each as `text`.
pub(crate) type Row = Vec<Option<String>>;

/// A connection with a transaction open.
pub(crate) trait Execute: Sync {
    /// Executes a statement whose columns, if any, are `text`. Statements are executed in the order
    /// of the calls, even if their answers are not awaited.
    fn rows(&self, sql: &str, bound: &[Bound<'_>]) -> impl Future<Output = Result<Vec<Row>>> + Send;
}

impl Execute for Client {
    async fn rows(&self, sql: &str, bound: &[Bound<'_>]) -> Result<Vec<Row>> {
        let params: Vec<_> = bound.iter().map(Bound::param).collect();
        let rows = self.query_typed(sql, &params).await.map_err(|error| classify("settle", &error))?;
        Ok(rows.iter().map(|row| (0..row.len()).map(|column| row.get(column)).collect()).collect())
    }
}
