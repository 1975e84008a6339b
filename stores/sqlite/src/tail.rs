//! Watches a log as it grows. `seq` order is commit order (`window.rs`), so a place is a `seq`.

use async_trait::async_trait;
use postbox_core::kit::BatchLimiter;
use postbox_core::{BatchLimit, Criteria, LogName, Result, Seq, Tail, Tailed, place_invalid};

use crate::classify::Work;
use crate::decode::{Decoded, Head, WALK_COLUMNS, is_meant, payload_len, read_whole, seq};
use crate::migrate::require_log;
use crate::schema::log_table;
use crate::store::SqliteStore;
use crate::thread::Session;
use crate::window::log_end;

/// How many rows one call reads, however few of them match: bounds its time.
const LOOK_ROWS_MAX: usize = 20_000;

#[async_trait]
impl Tail for SqliteStore {
    async fn tail(&self, log: &LogName, which: &Criteria, place: Option<&str>, limit: BatchLimit) -> Result<Tailed> {
        let after = place.map(|place| place.parse().map_err(|_| place_invalid(place))).transpose()?;
        let (log, which) = (log.clone(), which.clone());
        self.inspector().call("tail", move |session| tail(session, &log, &which, after, limit)).await
    }
}

fn tail(session: &mut Session, log: &LogName, which: &Criteria, after: Option<i64>, limit: BatchLimit) -> Work<Tailed> {
    let tx = session.read()?;
    let table = log_table(&require_log("tail", &tx, log)?);
    let Some(after) = after else {
        let place = log_end(&tx, &table)?.to_string();
        return Ok(Tailed { events: Vec::new(), place, more: false });
    };
    // Walks the log's primary key; no lock.
    let log_tail = format!("SELECT {WALK_COLUMNS} FROM {table} l WHERE l.seq > ?1 ORDER BY l.seq");
    let mut statement = tx.prepare_cached(&log_tail)?;
    let mut rows = statement.query([after])?;
    let (mut events, mut limiter, mut last, mut looked) = (Vec::new(), BatchLimiter::new(limit), after, 0);
    let more = loop {
        if looked == LOOK_ROWS_MAX {
            break true;
        }
        let Some(row) = rows.next()? else { break false };
        if is_meant(which, row, &Head::read(row)?)? {
            let fits = read_whole(&tx, &table, row, |row| {
                let fits = limiter.take(payload_len(row)?);
                if fits {
                    events.push((Seq(seq(row)?), Decoded::read(row)?.event));
                }
                Ok(fits)
            })?;
            if !fits {
                break true;
            }
        }
        (last, looked) = (seq(row)?, looked + 1);
    };
    Ok(Tailed { events, place: last.to_string(), more })
}
