//! What an operator sees: subscriptions, counts, lists, one event. Reports may walk the log; they
//! run in a snapshot of their own and hold no lock.

use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    BatchLimit, Conflict, EventId, Inspect, LaneInfo, ListQuery, LogName, OwnerId, Record, Result, SourceName, Stats,
    SubscriptionInfo, SubscriptionName, TopicPattern, TopicStats, Unrouted,
};
use tokio_postgres::Row;

use crate::PostgresStore;
use crate::classify::{is_damage, is_undefined, log_unknown};
use crate::decode::{EVENT_COLUMNS, Raw, Stored};
use crate::lease::pause_of;
use crate::params::params;
use crate::payload::{fill_payloads, fitting};
use crate::schema::{LOG_NAMES, check_log_name};
use crate::session::Session;
use crate::subscription::{filter_of, look_up};
use crate::unrouted::count_unrouted;

/// Payload bytes one list may hold: an operator's page, not an export.
const LIST_PAYLOAD_BYTES_MAX: usize = 64 * 1024 * 1024;
/// The largest payload to bring along where the server cannot give one of them: none, so that it
/// fails alone.
const WITHOUT_PAYLOADS: i32 = -1;
/// Most records of one list.
const LIST_RECORDS_MAX: usize = 10_000;

/// Every subscription with its lanes. Reads two small tables. No lock.
const SUBSCRIPTION_LIST: &str = "
SELECT s.name, s.log, s.topics, s.tenant, s.paused_by, s.paused_why, s.paused_until, {is_paused}, n.lane::int, n.epoch, n.owner, (extract(epoch FROM n.lease_until - clock_timestamp()) * 1000000)::bigint
FROM {s}.subscription AS s LEFT JOIN {s}.lane AS n ON n.subscription = s.id
ORDER BY s.name, n.lane";

/// Counts by topic and state, of topics with pending events the hundred deepest, the rest in one
/// row without a topic. One walk of the log, and of the rows whose event somebody deleted from it.
const STATS: &str = "
WITH standing AS (
  SELECT l.seq, l.topic, l.created_at, {state} AS state
  FROM {log} AS l
  JOIN {s}.lane AS n ON n.subscription = $1 AND n.lane = l.slot % $2
  LEFT JOIN {s}.delivery AS d ON d.subscription = $1 AND d.seq = l.seq
  UNION ALL
  SELECT d.seq, '', d.updated_at, d.state
  FROM {s}.delivery AS d WHERE d.subscription = $1 AND NOT EXISTS (SELECT FROM {log} AS l WHERE l.seq = d.seq)),
topic AS MATERIALIZED (
  SELECT topic,
    count(*) AS total,
    count(*) FILTER (WHERE state IN ('pending', 'retrying', 'blocked', 'scheduled')) AS pending,
    count(*) FILTER (WHERE state = 'retrying') AS retrying,
    count(*) FILTER (WHERE state = 'blocked') AS blocked,
    count(*) FILTER (WHERE state = 'scheduled') AS scheduled,
    count(*) FILTER (WHERE state = 'dead') AS dead,
    count(*) FILTER (WHERE state = 'discarded') AS discarded,
    min(created_at) FILTER (WHERE state IN ('pending', 'retrying', 'blocked', 'scheduled') AND isfinite(created_at)) AS oldest
  FROM standing WHERE state NOT IN ('skipped', 'unrouted') GROUP BY topic)
(SELECT NULL::text AS topic, coalesce(sum(total), 0)::bigint, coalesce(sum(pending), 0)::bigint, coalesce(sum(retrying), 0)::bigint,
  coalesce(sum(blocked), 0)::bigint, coalesce(sum(scheduled), 0)::bigint, coalesce(sum(dead), 0)::bigint, coalesce(sum(discarded), 0)::bigint,
  (extract(epoch FROM clock_timestamp() - min(oldest)) * 1000000)::bigint
FROM topic)
UNION ALL
(SELECT topic, total, pending, retrying, blocked, scheduled, dead, discarded,
  (extract(epoch FROM clock_timestamp() - coalesce(oldest, clock_timestamp())) * 1000000)::bigint
FROM topic WHERE pending > 0 ORDER BY pending DESC, topic LIMIT 100)";

/// Records with a delivery row in one state. Index: `delivery_state`, then the log's primary key.
/// No lock.
const RECORD_LIST_ROWS: &str = "
SELECT {record_columns} FROM {s}.delivery AS d
LEFT JOIN {log} AS l ON l.seq = d.seq
JOIN {s}.lane AS n ON n.subscription = d.subscription AND n.lane = d.lane
WHERE d.subscription = $2 AND d.state = $3 AND d.seq > $4 AND ($5::text IS NULL OR l.topic LIKE $5) AND ($6::text IS NULL OR d.code = $6)
ORDER BY d.seq LIMIT $7";

/// Records whose state follows from the cursor. Index: the log's primary key, walked from `$4`. No
/// lock.
const RECORD_LIST_STREAM: &str = "
SELECT {record_columns} FROM {log} AS l
JOIN {s}.lane AS n ON n.subscription = $2 AND n.lane = l.slot % $8
LEFT JOIN {s}.delivery AS d ON d.subscription = $2 AND d.seq = l.seq
WHERE l.seq > $4 AND d.seq IS NULL AND {state} = $3 AND ($5::text IS NULL OR l.topic LIKE $5) AND $6::text IS NULL
ORDER BY l.seq LIMIT $7";

/// One record. Index: the log's unique id. No lock.
const RECORD_GET: &str = "
SELECT {record_columns} FROM {log} AS l
JOIN {s}.lane AS n ON n.subscription = $2 AND n.lane = l.slot % $4
LEFT JOIN {s}.delivery AS d ON d.subscription = $2 AND d.seq = l.seq
WHERE l.id = $3";

/// Ids that came with another body. Index: `conflict_last`. No lock.
const CONFLICT_LIST: &str = "
SELECT source, tenant, message_id, digest_stored, digest_refused, times, first_at, last_at
FROM {s}.conflict ORDER BY last_at DESC LIMIT $1";

/// Every event of a log. Walks an index of it. No lock.
const LOG_COUNT: &str = "SELECT count(*) FROM {log} AS l";

#[async_trait]
impl Inspect for PostgresStore {
    async fn subscriptions(&self) -> Result<Vec<SubscriptionInfo>> {
        let read = async |session: &Session| session.rows(&session.sql(SUBSCRIPTION_LIST), &[]).await;
        let mut subscriptions: Vec<SubscriptionInfo> = Vec::new();
        for row in &self.report("subscriptions", read).await? {
            let name = SubscriptionName::from_stored(row.get::<_, String>(0));
            if subscriptions.last().is_none_or(|last| last.name != name) {
                let log = LogName::from_stored(row.get::<_, String>(1));
                let (filter, paused) = (filter_of(row, 2), pause_of(row, 4));
                subscriptions.push(SubscriptionInfo { name, log, filter, lanes: Vec::new(), paused });
            }
            if let (Some(last), Some(lane)) = (subscriptions.last_mut(), row.get::<_, Option<i32>>(8)) {
                last.lanes.push(LaneInfo {
                    lane: u16::try_from(lane).unwrap_or_default(),
                    epoch: row.get(9),
                    owner: row.get::<_, Option<String>>(10).map(OwnerId::from_stored),
                    lease_left: row.get::<_, Option<i64>>(11).filter(|micros| *micros > 0).map(wait),
                });
            }
        }
        Ok(subscriptions)
    }

    async fn stats(&self, subscription: &SubscriptionName) -> Result<Stats> {
        let read = async |session: &Session| {
            let subscription = look_up(session, subscription).await?;
            let lanes = i32::from(subscription.lanes);
            let params = params![subscription.id, lanes];
            session.rows(&session.log_sql(STATS, &subscription.log), &params).await
        };
        let mut stats = Stats::default();
        for row in &self.report("stats", read).await? {
            let count = |column: usize| row.get::<_, i64>(column).unsigned_abs();
            let oldest_pending = row.get::<_, Option<i64>>(8).map(|micros| wait(micros.max(0)));
            if let Some(topic) = row.get::<_, Option<Raw<'_>>>(0) {
                let topic = String::from_utf8_lossy(topic.0).into_owned();
                let oldest_pending = oldest_pending.unwrap_or_default();
                stats.topics.push(TopicStats { topic, pending: count(2), oldest_pending });
                continue;
            }
            stats = Stats {
                total: count(1),
                pending: count(2),
                retrying: count(3),
                blocked: count(4),
                scheduled: count(5),
                dead: count(6),
                discarded: count(7),
                dispatched: count(1).saturating_sub(count(2) + count(6) + count(7)),
                oldest_pending,
                topics: stats.topics,
            };
        }
        Ok(stats)
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<Record>> {
        let inline = i32::try_from(LIST_PAYLOAD_BYTES_MAX / LIST_RECORDS_MAX).unwrap_or(i32::MAX);
        let found = match self.list_rows(query, inline).await {
            Err(error) if is_damage(&error) => self.list_rows(query, WITHOUT_PAYLOADS).await?,
            found => found?,
        };
        self.records("list", found).await
    }

    async fn get(&self, subscription: &SubscriptionName, id: EventId) -> Result<Option<Record>> {
        let found = match self.get_row(subscription, id, i32::MAX).await {
            Err(error) if is_damage(&error) => self.get_row(subscription, id, WITHOUT_PAYLOADS).await?,
            found => found?,
        };
        Ok(self.records("get", found).await?.pop())
    }

    async fn conflicts(&self, limit: usize) -> Result<Vec<Conflict>> {
        let limit = limit.min(LIST_RECORDS_MAX) as i64;
        let read = async |session: &Session| session.rows(&session.sql(CONFLICT_LIST), &params![limit]).await;
        let conflict = |row: &Row| Conflict {
            source: SourceName::from_stored(row.get::<_, String>(0)),
            tenant: Some(row.get::<_, String>(1)).filter(|tenant| !tenant.is_empty()),
            message_id: row.get(2),
            digest_stored: row.get(3),
            digest_refused: row.get(4),
            times: row.get::<_, i64>(5).unsigned_abs(),
            first_at: row.get(6),
            last_at: row.get(7),
        };
        Ok(self.report("conflicts", read).await?.iter().map(conflict).collect())
    }

    async fn logs(&self) -> Result<Vec<LogName>> {
        let read = async |session: &Session| session.rows(&session.sql(LOG_NAMES), &[]).await;
        self.report("logs", read).await?.iter().map(|row| row.get::<_, &str>(0).parse()).collect()
    }

    async fn unrouted(&self, log: &LogName) -> Result<Unrouted> {
        check_log_name("unrouted", log)?;
        match self.report("unrouted", async |session: &Session| count_unrouted(session, log).await).await {
            Err(error) if is_undefined(&error) => Err(log_unknown("unrouted", log.as_str())),
            counted => counted,
        }
    }

    async fn count(&self, log: &LogName) -> Result<u64> {
        check_log_name("count", log)?;
        let read = async |session: &Session| session.row(&session.log_sql(LOG_COUNT, log), &[]).await;
        match self.report("count", read).await {
            Err(error) if is_undefined(&error) => Err(log_unknown("count", log.as_str())),
            counted => Ok(counted?.get::<_, i64>(0).unsigned_abs()),
        }
    }
}

fn wait(micros: i64) -> Duration {
    Duration::from_micros(micros.unsigned_abs())
}

impl PostgresStore {
    /// Runs a report in one snapshot.
    async fn report<T>(&self, operation: &'static str, read: impl AsyncFnOnce(&Session) -> Result<T>) -> Result<T> {
        let report = async |session: &Session| session.step_by_step(&self.inner.modes.report, read).await;
        self.call(operation, report).await
    }

    async fn list_rows(&self, query: &ListQuery, inline: i32) -> Result<(LogName, Vec<Row>)> {
        let read = async |session: &Session| {
            let subscription = look_up(session, &query.subscription).await?;
            let (state, after) = (query.state.as_str(), query.after.map_or(i64::MIN, |seq| seq.0));
            let topic = query.topic.as_ref().map(TopicPattern::to_like);
            let limit = query.limit.clamp(1, LIST_RECORDS_MAX) as i64;
            let (id, lanes) = (subscription.id, i32::from(subscription.lanes));
            let params = params![inline, id, state, after, topic, query.code, limit, lanes];
            let (template, params) = match query.state.has_row() {
                true => (RECORD_LIST_ROWS, &params[..7]),
                false => (RECORD_LIST_STREAM, &params[..]),
            };
            let rows = session.rows(&session.log_sql(template, &subscription.log), params).await?;
            Ok((subscription.log, rows))
        };
        self.report("list", read).await
    }

    async fn get_row(&self, name: &SubscriptionName, id: EventId, inline: i32) -> Result<(LogName, Vec<Row>)> {
        let read = async |session: &Session| {
            let subscription = look_up(session, name).await?;
            let (lanes, uuid) = (i32::from(subscription.lanes), id.as_uuid());
            let sql = session.log_sql(RECORD_GET, &subscription.log);
            let rows = session.rows(&sql, &params![inline, subscription.id, uuid, lanes]).await?;
            Ok((subscription.log, rows))
        };
        self.report("get", read).await
    }

    /// Rows to records. Large payloads are fetched as far as the bound goes, and the list ends
    /// there; after the snapshot, because one that the server cannot give would fail the whole of
    /// it.
    async fn records(&self, operation: &'static str, (log, rows): (LogName, Vec<Row>)) -> Result<Vec<Record>> {
        let mut events: Vec<Stored> =
            rows.iter().map(|row| Stored::of_delivery(row, EVENT_COLUMNS.len() + 7)).collect();
        let limit = BatchLimit { events: LIST_RECORDS_MAX, payload_bytes: LIST_PAYLOAD_BYTES_MAX };
        events.truncate(fitting(&events, limit));
        self.call(operation, async |session: &Session| fill_payloads(session, &log, &mut events).await).await?;
        events.into_iter().zip(&rows).map(|(event, row)| record(event, row)).collect()
    }
}

fn record(stored: Stored, row: &Row) -> Result<Record> {
    // What a relay wrote down of it stands; before that, what is wrong with it is said here.
    let (code, error) = stored.unreadable.map(|why| (why.code.into_owned(), why.error)).unzip();
    let column = |offset: usize| EVENT_COLUMNS.len() + offset;
    let count = |offset: usize| row.get::<_, i32>(column(offset)).unsigned_abs();
    Ok(Record {
        event: stored.delivery.event,
        seq: stored.delivery.seq,
        state: row.get::<_, &str>(column(0)).parse()?,
        attempts: count(1),
        replays: count(2),
        due_at: row.try_get(column(3)).ok().flatten(),
        code: row.get::<_, Option<String>>(column(4)).or(code),
        error: row.get::<_, Option<String>>(column(5)).or(error),
        updated_at: row.get(column(6)),
    })
}
