//! Explains lag: the newest events, and a write-ahead log that grows. SQLite does not tell who
//! holds the lock of a file.

use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Arrival, Blocker, Diagnose, Hold, LogName, Result};

use crate::classify::Work;
use crate::clock::until;
use crate::config::wal_of;
use crate::decode::{HEAD_COLUMNS, integer, lossy, text_headers};
use crate::migrate::require_log;
use crate::schema::log_table;
use crate::store::SqliteStore;
use crate::thread::{Session, WAL_BYTES_KEPT};

#[async_trait]
impl Diagnose for SqliteStore {
    async fn arrivals(&self, log: &LogName, limit: usize) -> Result<Vec<Arrival>> {
        let log = log.clone();
        self.inspector().call("arrivals", move |session| arrivals(session, &log, limit)).await
    }

    async fn blockers(&self) -> Result<Vec<Blocker>> {
        self.inspector().call("blockers", |session| Ok(wal_grown(session)?.into_iter().collect())).await
    }
}

/// The write-ahead log, if it has grown far because no checkpoint ends, e.g. because a reader still
/// needs what it began with. The file keeps its size after a large commit, so SQLite is asked how
/// much of it is not in the database yet; that copies nothing.
fn wal_grown(session: &mut Session) -> Work<Option<Blocker>> {
    // As SQLite names it: beside the file that a link leads to.
    let wal = wal_of(session.connection()?.path().unwrap_or_default().as_ref());
    let bytes_max = 4 * WAL_BYTES_KEPT;
    let bytes = wal.metadata().map_or(0, |file| file.len());
    if bytes <= bytes_max.unsigned_abs() {
        return Ok(None);
    }
    let connection = session.connection()?;
    let page_bytes: i64 = connection.query_row("PRAGMA page_size", [], |row| row.get(0))?;
    let (frames, checkpointed): (i64, i64) =
        connection.query_row("PRAGMA wal_checkpoint(NOOP)", [], |row| Ok((row.get(1)?, row.get(2)?)))?;
    // Once the log was restarted, a short reader keeps only the little written since.
    let is_kept = checkpointed < frames && frames.saturating_mul(page_bytes) > bytes_max;
    Ok(is_kept.then(|| Blocker {
        holder: wal.display().to_string(),
        program: String::new(),
        query: String::new(),
        tables: Vec::new(),
        waiting: 0,
        waited: Duration::ZERO,
        end: String::new(),
        hold: Hold::Wal { bytes },
    }))
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
            headers: text(8).and_then(|json| text_headers(json.as_bytes())).unwrap_or_default(),
            age: until(at, now),
        });
    }
    Ok(arrivals)
}
