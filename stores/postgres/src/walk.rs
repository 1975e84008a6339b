//! Lists records whose state follows from the cursor: walks the log in bounded steps, in the
//! snapshot of the caller. Only [`PENDING_FIRST`] takes longer the more events there are, and a
//! window that was read in part costs more steps: all events since its beginning are judged.

use postbox_core::{ListQuery, Result, State};
use postbox_postgres_sql::{is_meant, params};
use tokio_postgres::Row;

use crate::criteria::{Meant, headers_json};
use crate::session::Session;
use crate::subscription::SubscriptionRow;

/// How many events one statement judges: a quarter of a second, however few of them match. The
/// first judges two for each record of the page, which are enough if most match.
const STEP_LOOK_MAX: i64 = 50_000;

/// Where a step ends if the log goes on after it. Index: the log's primary key, walked from `$1`.
/// No lock.
const STEP_END: &str = "SELECT l.seq FROM {log} AS l WHERE l.seq > $1 ORDER BY l.seq OFFSET $2 LIMIT 1";

/// The first event after `$2` that a lane may not have passed. Finds a row of an old transaction
/// that committed late as well. Index: `(xid, seq)`, all of it since the first lane's window began:
/// 0.3 s for 1.5 million events. No lock.
const PENDING_FIRST: &str = "
WITH n AS MATERIALIZED (SELECT * FROM {s}.lane WHERE subscription = $1)
SELECT min(l.seq) FILTER (WHERE l.seq > $2) FROM {unpassed} AS l";

/// Records of one step, whose state follows from the cursor. Index: the log's primary key, walked
/// from `$4` to `$6`. No lock.
const RECORD_LIST_STREAM: &str = "
SELECT {record_columns} FROM {log} AS l
JOIN {s}.lane AS n ON n.subscription = $2 AND n.lane = l.slot % $13
LEFT JOIN {s}.delivery AS d ON d.subscription = $2 AND d.seq = l.seq AND d.seq > $4 AND d.seq <= $6
WHERE l.seq > $4 AND l.seq <= $6 AND d.seq IS NULL AND {state} = $3 AND {is_meant}
  AND ($12::text IS NULL OR l.headers @> $12::text::jsonb)
ORDER BY l.seq LIMIT $7";

/// Returns a page of the records in a state that has no delivery row.
pub(crate) async fn walk(
    session: &Session,
    subscription: &SubscriptionRow,
    (query, state): (&ListQuery, State),
    inline: i32,
) -> Result<Vec<Row>> {
    let mut found = Vec::new();
    // Only a delivery row has a code.
    if query.code.is_some() {
        return Ok(found);
    }
    let (id, lanes, log) = (subscription.id, i32::from(subscription.lanes), &subscription.log);
    let sql = session.schema().log_sql_with(RECORD_LIST_STREAM, log, &[("is_meant", &is_meant([5, 8, 9, 10, 11]))]);
    let through = ("through", "pg_snapshot_xmax(pg_current_snapshot())");
    let pending_first = session.schema().log_sql_with(PENDING_FIRST, log, &[through]);
    let step_end = session.log_sql(STEP_END, log);
    let Meant { topic, key, since, until, tenant } = Meant::by(&query.which);
    let (name, headers, page) = (state.as_str(), headers_json(&query.headers), query.page().events);
    let mut after = query.after.map_or(i64::MIN, |seq| seq.0);
    let mut look = STEP_LOOK_MAX.min(2 * page as i64);
    loop {
        let end = session.rows(&step_end, &params![after, look]).await?;
        let end: Option<i64> = end.first().map(|row| row.get(0));
        let (through, left) = (end.unwrap_or(i64::MAX), (page - found.len()) as i64);
        let params = params![inline, id, name, after, topic, through, left, key, since, until, tenant, headers, lanes];
        found.extend(session.rows(&sql, &params).await?);
        let Some(end) = end.filter(|_| found.len() < page) else { return Ok(found) };
        after = end;
        if state == State::Pending && look < STEP_LOOK_MAX {
            let first: Option<i64> = session.row(&pending_first, &params![id, after]).await?.get(0);
            let Some(first) = first else { return Ok(found) };
            after = first - 1;
        }
        look = STEP_LOOK_MAX;
    }
}
