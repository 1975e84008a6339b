//! Which logs there are and how much is in one, whoever reads it.

use postbox_core::{LogName, Result};

use crate::migrate::log_names;
use crate::schema::log_table;
use crate::store::SqliteStore;

impl SqliteStore {
    /// The logs there are, by name.
    pub async fn logs(&self) -> Result<Vec<LogName>> {
        let names = self.inspector().call("list logs", |session| log_names(session.connection()?)).await?;
        names.iter().map(|name| name.parse()).collect()
    }

    /// How many events `log` has, whoever reads it or nobody. Walks an index of the log; no lock.
    pub async fn count(&self, log: &LogName) -> Result<u64> {
        let sql = format!("SELECT count(*) FROM {}", log_table(log));
        let counted = self
            .inspector()
            .call("count", move |session| Ok(session.connection()?.query_row(&sql, [], |row| row.get::<_, i64>(0))?));
        Ok(counted.await?.unsigned_abs())
    }
}
