//! Explains lag: the newest events. SQLite does not tell who holds the lock of a file.

use async_trait::async_trait;
use postbox_core::{Arrival, Blocker, Diagnose, LogName, Result};

use crate::classify::Work;
use crate::clock::until;
use crate::decode::{HEAD_COLUMNS, integer, lossy, text_headers};
use crate::migrate::require_log;
use crate::schema::log_table;
use crate::store::SqliteStore;
use crate::thread::Session;

#[async_trait]
impl Diagnose for SqliteStore {
    async fn arrivals(&self, log: &LogName, limit: usize) -> Result<Vec<Arrival>> {
        let log = log.clone();
        self.inspector().call("arrivals", move |session| arrivals(session, &log, limit)).await
    }

    async fn blockers(&self) -> Result<Vec<Blocker>> {
        Ok(Vec::new())
    }
}

fn arrivals(session: &mut Session, log: &LogName, limit: usize) -> Work<Vec<Arrival>> {
    let now = session.settings.now();
    let tx = session.read()?;
    let table = log_table(&require_log("arrivals", &tx, log)?);
    // Walks the log's primary key backwards; no lock.
    let log_newest = format!("SELECT {HEAD_COLUMNS} FROM {table} l ORDER BY l.seq DESC LIMIT ?1");
    let mut statement = tx.prepare_cached(&log_newest)?;
    let mut rows = statement.query([i64::try_from(limit).unwrap_or(i64::MAX)])?;
    let mut arrivals = Vec::new();
    while let Some(row) = rows.next()? {
        let text = |column| lossy(row, column).unwrap_or_default();
        let (Some(topic), Some(at)) = (text(1), integer(row, 5)?) else { continue };
        arrivals.push(Arrival {
            topic,
            tenant: text(2),
            key: text(3),
            kind: text(6),
            aggregate: text(7),
            headers: text(8).map(|json| text_headers(json.as_bytes())).unwrap_or_default(),
            age: until(at, now),
        });
    }
    Ok(arrivals)
}
