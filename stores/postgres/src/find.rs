//! Finds events by the first digits of their id.

use async_trait::async_trait;
use postbox_core::{EventId, Find, IdPrefix, LogName, Result};
use postbox_postgres_sql::{check_log_name, is_undefined, log_unknown, params};

use crate::PostgresStore;
use crate::session::Session;

/// Ids in a range, both ends included. Index: the log's unique id. No lock.
const LOG_IDS: &str = "SELECT l.id FROM {log} AS l WHERE l.id BETWEEN $1 AND $2 ORDER BY l.id LIMIT $3";

#[async_trait]
impl Find for PostgresStore {
    async fn ids(&self, log: &LogName, prefix: &IdPrefix, limit: usize) -> Result<Vec<EventId>> {
        check_log_name("ids", log)?;
        let (first, last) = prefix.range();
        let (first, last, limit) = (first.as_uuid(), last.as_uuid(), limit as i64);
        let params = params![first, last, limit];
        let read = async |session: &Session| session.rows(&session.log_sql(LOG_IDS, log), &params).await;
        match self.look("ids", read).await {
            Err(error) if is_undefined(&error) => Err(log_unknown("ids", log.as_str())),
            rows => Ok(rows?.iter().map(|row| EventId::from_uuid(row.get(0))).collect()),
        }
    }
}
