//! Watches a log as it grows. As for a lane, what is new is what one snapshot shows and an earlier
//! one does not (`window.rs`), so that a transaction which commits late is not missed. The caller
//! keeps the two snapshots.

use async_trait::async_trait;
use postbox_core::limits::BATCH_EVENTS_MAX;
use postbox_core::{BatchLimit, Criteria, Error, ErrorKind, LogName, Result, Tail, Tailed, place_invalid};
use postbox_postgres_sql::{check_log_name, is_meant, is_undefined, log_unknown, params};

use crate::PostgresStore;
use crate::classify::is_damage;
use crate::criteria::Meant;
use crate::decode::{Stored, stored};
use crate::payload::{fill_payloads, fitting};
use crate::session::Session;

/// Payloads up to this size, in bytes, are read with their rows. Larger ones are fetched
/// afterwards.
const INLINE_BYTES_MAX: i32 = 4 * 1024;
/// Reads no payload with its row, so that one that the server cannot return fails alone.
const WITHOUT_PAYLOADS: i32 = -1;

/// The present snapshot; none on a standby, whose snapshots do not list the transactions that still
/// run. Fails if there is no such log. No lock.
const SNAPSHOT: &str =
    "SELECT CASE WHEN NOT pg_is_in_recovery() THEN pg_current_snapshot()::text END, EXISTS (SELECT FROM {log} AS l)";

/// The place before the first row of transactions that began after a snapshot. Index: `(xid, seq)`.
/// `OFFSET 0`, because otherwise `min` walks the primary key from its start.
const WINDOW_LOW: &str = "
SELECT min(rest.seq) - 1 FROM (
  SELECT l.seq FROM {log} AS l WHERE l.xid >= pg_snapshot_xmax($1::text::pg_snapshot) OFFSET 0) AS rest";

/// The next rows that `$3` shows and `$2` does not, in `seq` order after `$5`. Those of
/// transactions that ran when `$2` was taken are read by `(xid, seq)`, those of later ones by the
/// primary key from `$4`. No lock.
const WINDOW_PAGE: &str = "
SELECT {columns} FROM (
  (SELECT l.* FROM {log} AS l
   WHERE l.xid = ANY (ARRAY(SELECT pg_snapshot_xip($2::text::pg_snapshot)))
     AND pg_visible_in_snapshot(l.xid, $3::text::pg_snapshot) AND l.seq > $5 AND {is_meant} ORDER BY l.seq LIMIT $6)
  UNION ALL
  (SELECT l.* FROM {log} AS l
   WHERE l.seq > greatest($4, $5) AND l.xid >= pg_snapshot_xmax($2::text::pg_snapshot)
     AND pg_visible_in_snapshot(l.xid, $3::text::pg_snapshot) AND {is_meant} ORDER BY l.seq LIMIT $6)) AS l
ORDER BY l.seq LIMIT $6";

#[async_trait]
impl Tail for PostgresStore {
    async fn tail(&self, log: &LogName, which: &Criteria, place: Option<&str>, limit: BatchLimit) -> Result<Tailed> {
        check_log_name("tail", log)?;
        let place = place.map(|text| Place::parse(text).ok_or_else(|| place_invalid(text))).transpose()?;
        let look = async |inline| {
            let look = async |session: &Session| page(session, log, which, place.as_ref(), limit, inline).await;
            self.dry_run("tail", look).await
        };
        let found = match look(INLINE_BYTES_MAX).await {
            Err(error) if is_damage(&error) => look(WITHOUT_PAYLOADS).await,
            found => found,
        };
        let (mut rows, mut tailed, window) = match found {
            Err(error) if is_undefined(&error) => return Err(log_unknown("tail", log.as_str())),
            found => found?,
        };
        let came = rows.len();
        rows.truncate(fitting(&rows, limit));
        if let (true, Some(last), Some(window)) = (rows.len() < came, rows.last().map(Stored::seq), window) {
            tailed = Tailed { place: window.after(last).to_string(), more: true, ..tailed };
        }
        // After the snapshot's transaction, which a payload that the server cannot return would
        // abort.
        self.call("tail", async |session: &Session| fill_payloads(session, log, &mut rows).await).await?;
        tailed.events = rows.into_iter().map(|row| (row.delivery.seq, row.delivery.event)).collect();
        Ok(tailed)
    }
}

/// Returns a page of the window at a place, or of the next window, and the window itself.
async fn page(
    session: &Session,
    log: &LogName,
    which: &Criteria,
    place: Option<&Place>,
    limit: BatchLimit,
    inline: i32,
) -> Result<(Vec<Stored>, Tailed, Option<Window>)> {
    let nothing = |place: String| (Vec::new(), Tailed { events: Vec::new(), place, more: false }, None);
    let now: Option<String> = session.row(&session.log_sql(SNAPSHOT, log), &[]).await?.get(0);
    let now = now.ok_or_else(|| {
        let message = "the database is a standby, where events of open transactions would be missed; name the primary in the store's URL";
        Error::new(ErrorKind::Unavailable, "tail", "store_read_only", message)
    })?;
    let window = match place {
        None => return Ok(nothing(now)),
        Some(Place::Between(from)) if *from == now => return Ok(nothing(now)),
        Some(Place::Between(from)) => {
            let row = session.row(&session.log_sql(WINDOW_LOW, log), &params![from]).await?;
            let low = row.get::<_, Option<i64>>(0).unwrap_or(i64::MAX);
            Window { from: from.clone(), to: now, low, last: i64::MIN }
        }
        Some(Place::Within(window)) => window.clone(),
    };
    let rows_max = limit.events.clamp(1, BATCH_EVENTS_MAX) as i64;
    let meant = is_meant([7, 8, 9, 10, 11]);
    let sql = session.schema().log_sql_with(WINDOW_PAGE, log, &[("is_meant", &meant)]);
    let Meant { topic, key, since, until, tenant } = Meant::by(which);
    let Window { from, to, low, last } = &window;
    let params = params![inline, from, to, low, last, rows_max, topic, key, since, until, tenant];
    let rows: Vec<Stored> = session.rows(&sql, &params).await?.iter().filter_map(stored).collect();
    let more = rows.len() as i64 == rows_max;
    let place = match rows.last() {
        Some(row) if more => window.after(row.seq()).to_string(),
        _ => window.to.clone(),
    };
    Ok((rows, Tailed { events: Vec::new(), place, more }, Some(window)))
}

/// How far a caller has read.
enum Place {
    /// Everything that this snapshot shows.
    Between(String),
    Within(Window),
}

/// What one snapshot shows and an earlier one does not.
#[derive(Clone)]
struct Window {
    from: String,
    to: String,
    /// No row of a transaction later than `from` is at or before this place.
    low: i64,
    /// Read up to here.
    last: i64,
}

impl Window {
    fn after(&self, last: i64) -> Self {
        Self { last, ..self.clone() }
    }
}

impl std::fmt::Display for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { from, to, low, last } = self;
        write!(f, "{from}/{to}/{low}/{last}")
    }
}

impl Place {
    fn parse(text: &str) -> Option<Self> {
        let is_snapshot =
            |text: &&str| text.contains(':') && text.bytes().all(|byte| byte.is_ascii_digit() || b":,".contains(&byte));
        let parts: Vec<&str> = text.split('/').collect();
        match parts[..] {
            [snapshot] => Some(snapshot).filter(is_snapshot).map(|it| Self::Between(it.to_owned())),
            [from, to, low, last] => {
                let (from, to) = (Some(from).filter(is_snapshot)?, Some(to).filter(is_snapshot)?);
                let (low, last) = (low.parse().ok()?, last.parse().ok()?);
                Some(Self::Within(Window { from: from.to_owned(), to: to.to_owned(), low, last }))
            }
            _ => None,
        }
    }
}
