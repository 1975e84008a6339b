//! Finds events by the first digits of their id.

use async_trait::async_trait;
use postbox_core::{EventId, Find, IdPrefix, LogName, Result};
use rusqlite::params;

use crate::classify::Work;
use crate::migrate::require_log;
use crate::schema::log_table;
use crate::store::SqliteStore;
use crate::thread::Session;

#[async_trait]
impl Find for SqliteStore {
    async fn ids(&self, log: &LogName, prefix: &IdPrefix, limit: usize) -> Result<Vec<EventId>> {
        let (log, (first, last)) = (log.clone(), prefix.range());
        self.inspector().call("ids", move |session| ids(session, &log, [first, last], limit)).await
    }
}

fn ids(session: &mut Session, log: &LogName, [first, last]: [EventId; 2], limit: usize) -> Work<Vec<EventId>> {
    let tx = session.read()?;
    // By the unique index on id; no lock.
    let log_ids = format!(
        "SELECT l.id FROM {} l WHERE l.id BETWEEN ?1 AND ?2 ORDER BY l.id LIMIT ?3",
        log_table(&require_log("ids", &tx, log)?)
    );
    let mut statement = tx.prepare_cached(&log_ids)?;
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let ids =
        statement.query_map(params![first.to_string(), last.to_string(), limit], |row| row.get::<_, String>(0))?;
    let ids: Vec<String> = ids.collect::<Result<_, _>>()?;
    // A text in this range that is no id got past every CHECK, and cannot be named by its id.
    Ok(ids.iter().filter_map(|id| id.parse().ok()).collect())
}
