//! What an operator sees: subscriptions, counts, lists, one event. Reports may walk the log; they
//! run in a snapshot of their own and hold no lock.

use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    Conflict, Error, EventId, Filter, Inspect, Key, LaneInfo, ListQuery, LogName, OwnerId, Pause, Record, Result,
    SourceName, State, Stats, SubscriptionInfo, SubscriptionName, Tenant, TopicPattern, TopicStats,
};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};

use crate::PostgresStore;
use crate::classify::{classify, has_damage_code, is_undefined, log_unknown};
use crate::decode::{EVENT_COLUMNS, Raw, Stored, stored};
use crate::payload::fitting;
use crate::schema::{LOG_NAMES, check_log_name};
use crate::session::{COMMIT, Session};

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
  WHERE d.seq IS NOT NULL OR (($3::text[] IS NULL OR l.topic LIKE ANY ($3)) AND ($4::text IS NULL OR l.tenant = $4))
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
  FROM standing GROUP BY topic)
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
WHERE l.seq > $4 AND d.seq IS NULL AND ($3 = 'pending') = {is_unread} AND ($5::text IS NULL OR l.topic LIKE $5) AND $6::text IS NULL
  AND ($9::text[] IS NULL OR l.topic LIKE ANY ($9)) AND ($10::text IS NULL OR l.tenant = $10)
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
        self.bounded("subscriptions", subscriptions(self)).await
    }

    async fn stats(&self, subscription: &SubscriptionName) -> Result<Stats> {
        self.bounded("stats", stats(self, subscription)).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<Record>> {
        self.bounded("list", list(self, query)).await
    }

    async fn get(&self, subscription: &SubscriptionName, id: EventId) -> Result<Option<Record>> {
        self.bounded("get", get(self, subscription, id)).await
    }

    async fn conflicts(&self, limit: usize) -> Result<Vec<Conflict>> {
        self.bounded("conflicts", conflicts(self, limit)).await
    }

    async fn logs(&self) -> Result<Vec<LogName>> {
        self.bounded("logs", logs(self)).await
    }

    async fn count(&self, log: &LogName) -> Result<u64> {
        self.bounded("count", count(self, log)).await
    }
}

async fn logs(store: &PostgresStore) -> Result<Vec<LogName>> {
    let list = async |client: &Client| {
        let sql = store.schema().sql(LOG_NAMES);
        client.query_typed(&sql, &[]).await.map_err(|error| classify("logs", &error))
    };
    let rows = store.report("logs", list).await?;
    rows.iter().map(|row| row.get::<_, &str>(0).parse()).collect()
}

async fn count(store: &PostgresStore, log: &LogName) -> Result<u64> {
    check_log_name("count", log)?;
    let count = async |client: &Client| {
        let sql = store.schema().log_sql(LOG_COUNT, log);
        let counted = client.query_typed_one(&sql, &[]).await;
        counted.map(|row| row.get::<_, i64>(0).unsigned_abs()).map_err(|error| match is_undefined(&error) {
            true => log_unknown("count", log.as_str()),
            false => classify("count", &error),
        })
    };
    store.report("count", count).await
}

impl PostgresStore {
    /// Runs a report in one snapshot; the session comes back outside of a transaction, or is
    /// dropped.
    async fn report<T>(&self, operation: &'static str, read: impl AsyncFnOnce(&Client) -> Result<T>) -> Result<T> {
        let session: Session = self.session(operation).await?;
        let failed = |error: tokio_postgres::Error| classify(operation, &error);
        session.client().batch_execute(&self.inner.modes.report).await.map_err(failed)?;
        let result = read(session.client()).await;
        let ended = session.client().batch_execute(COMMIT).await;
        session.end_after(ended.is_ok());
        result
    }
}

async fn subscriptions(store: &PostgresStore) -> Result<Vec<SubscriptionInfo>> {
    let sql = store.schema().sql(SUBSCRIPTION_LIST);
    let rows = store
        .report("subscriptions", async |client: &Client| {
            client.query_typed(&sql, &[]).await.map_err(|error| classify("subscriptions", &error))
        })
        .await?;
    let mut subscriptions: Vec<SubscriptionInfo> = Vec::new();
    for row in &rows {
        let name: &str = row.get(0);
        if subscriptions.last().is_none_or(|last| last.name.as_str() != name) {
            subscriptions.push(subscription_info(row));
        }
        let last = subscriptions.last_mut().expect("pushed above");
        last.lanes.extend(lane_info(row));
    }
    Ok(subscriptions)
}

async fn conflicts(store: &PostgresStore, limit: usize) -> Result<Vec<Conflict>> {
    let sql = store.schema().sql(CONFLICT_LIST);
    let limit = i64::try_from(limit.min(LIST_RECORDS_MAX)).expect("the most of a list is no large number");
    let read = async |client: &Client| {
        let params: [(&(dyn ToSql + Sync), Type); 1] = [(&limit, Type::INT8)];
        client.query_typed(&sql, &params).await.map_err(|error| classify("conflicts", &error))
    };
    let rows = store.report("conflicts", read).await?;
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
    Ok(rows.iter().map(conflict).collect())
}

async fn stats(store: &PostgresStore, name: &SubscriptionName) -> Result<Stats> {
    let rows = store
        .report("stats", async |client: &Client| {
            let subscription = store.look_up("stats", client, name).await?;
            let sql = store.schema().log_sql(STATS, &subscription.log);
            let lanes = i32::from(subscription.lanes);
            let params: [(&(dyn ToSql + Sync), Type); 4] = [
                (&subscription.id, Type::INT4),
                (&lanes, Type::INT4),
                (&subscription.likes, Type::TEXT_ARRAY),
                (&subscription.tenant(), Type::TEXT),
            ];
            client.query_typed(&sql, &params).await.map_err(|error| classify("stats", &error))
        })
        .await?;
    let mut stats = Stats::default();
    for row in &rows {
        let count = |column: usize| row.get::<_, i64>(column).unsigned_abs();
        let oldest = row.get::<_, Option<i64>>(8).map(|micros| Duration::from_micros(micros.max(0).unsigned_abs()));
        match row.get::<_, Option<Raw<'_>>>(0).map(|topic| String::from_utf8_lossy(topic.0).into_owned()) {
            Some(topic) => {
                stats.topics.push(TopicStats { topic, pending: count(2), oldest_pending: oldest.unwrap_or_default() });
            }
            None => {
                stats = Stats {
                    total: count(1),
                    pending: count(2),
                    retrying: count(3),
                    blocked: count(4),
                    scheduled: count(5),
                    dead: count(6),
                    discarded: count(7),
                    dispatched: count(1).saturating_sub(count(2) + count(6) + count(7)),
                    oldest_pending: oldest,
                    topics: std::mem::take(&mut stats.topics),
                };
            }
        }
    }
    Ok(stats)
}

async fn list(store: &PostgresStore, query: &ListQuery) -> Result<Vec<Record>> {
    let inline = i32::try_from(LIST_PAYLOAD_BYTES_MAX / LIST_RECORDS_MAX).unwrap_or(i32::MAX);
    let found = match list_rows(store, query, inline).await {
        Err(error) if has_damage_code(&error) => list_rows(store, query, WITHOUT_PAYLOADS).await?,
        found => found?,
    };
    records(store, "list", found).await
}

async fn list_rows(store: &PostgresStore, query: &ListQuery, inline: i32) -> Result<(LogName, Vec<Row>)> {
    store
        .report("list", async |client: &Client| {
            let subscription = store.look_up("list", client, &query.subscription).await?;
            let state = query.state.as_str();
            let after = query.after.map_or(i64::MIN, |seq| seq.0);
            let topic = query.topic.as_ref().map(TopicPattern::to_like);
            let limit = query.limit.clamp(1, LIST_RECORDS_MAX) as i64;
            let lanes = i32::from(subscription.lanes);
            let tenant = subscription.tenant();
            let mut params: Vec<(&(dyn ToSql + Sync), Type)> = vec![
                (&inline, Type::INT4),
                (&subscription.id, Type::INT4),
                (&state, Type::TEXT),
                (&after, Type::INT8),
                (&topic, Type::TEXT),
                (&query.code, Type::TEXT),
                (&limit, Type::INT8),
            ];
            let template = if query.state.has_row() {
                RECORD_LIST_ROWS
            } else {
                params.extend([
                    (&lanes as &(dyn ToSql + Sync), Type::INT4),
                    (&subscription.likes, Type::TEXT_ARRAY),
                    (&tenant, Type::TEXT),
                ]);
                RECORD_LIST_STREAM
            };
            let sql = store.schema().log_sql(template, &subscription.log);
            let rows = client.query_typed(&sql, &params).await.map_err(|error| classify("list", &error))?;
            Ok((subscription.log, rows))
        })
        .await
}

async fn get(store: &PostgresStore, name: &SubscriptionName, id: EventId) -> Result<Option<Record>> {
    let found = match get_row(store, name, id, i32::MAX).await {
        Err(error) if has_damage_code(&error) => get_row(store, name, id, WITHOUT_PAYLOADS).await?,
        found => found?,
    };
    Ok(records(store, "get", found).await?.pop())
}

async fn get_row(
    store: &PostgresStore,
    name: &SubscriptionName,
    id: EventId,
    inline: i32,
) -> Result<(LogName, Vec<Row>)> {
    store
        .report("get", async |client: &Client| {
            let subscription = store.look_up("get", client, name).await?;
            let (lanes, uuid) = (i32::from(subscription.lanes), id.as_uuid());
            let params: [(&(dyn ToSql + Sync), Type); 4] =
                [(&inline, Type::INT4), (&subscription.id, Type::INT4), (&uuid, Type::UUID), (&lanes, Type::INT4)];
            let sql = store.schema().log_sql(RECORD_GET, &subscription.log);
            let rows = client.query_typed(&sql, &params).await.map_err(|error| classify("get", &error))?;
            Ok((subscription.log, rows))
        })
        .await
}

/// Rows to records. Large payloads are fetched as far as the bound goes, and the list ends there;
/// after the snapshot, because one that the server cannot give would fail the whole of it.
async fn records(store: &PostgresStore, operation: &'static str, found: (LogName, Vec<Row>)) -> Result<Vec<Record>> {
    let (log, rows) = found;
    let failed = |error: tokio_postgres::Error| classify(operation, &error);
    let mut events = rows.iter().map(stored_of_record).collect::<Result<Vec<Stored>, _>>().map_err(failed)?;
    let limit = postbox_core::BatchLimit { events: LIST_RECORDS_MAX, payload_bytes: LIST_PAYLOAD_BYTES_MAX };
    events.truncate(fitting(&events, limit));
    let session = store.session(operation).await?;
    let filled = store.fill_payloads(session.client(), &log, &mut events).await;
    session.end_after(filled.is_ok());
    filled?;
    events.into_iter().zip(&rows).map(|(event, row)| record(event, row)).collect()
}

/// A record's event, or what stands for one that is no longer in the log.
fn stored_of_record(row: &Row) -> Result<Stored, tokio_postgres::Error> {
    if row.try_get::<_, Option<i64>>(0)?.is_some() {
        return stored(row);
    }
    let key = row.try_get::<_, Option<String>>(EVENT_COLUMNS.len() + 8).ok().flatten();
    Ok(Stored::missing(row.try_get(EVENT_COLUMNS.len() + 7)?, key.map(Key::from_stored)))
}

fn record(stored: Stored, row: &Row) -> Result<Record> {
    // What a relay wrote down of it stands; before that, what is wrong with it is said here.
    let (code, error) = stored.unreadable.map(|why| (why.code.into_owned(), why.error)).unzip();
    let column = |offset: usize| EVENT_COLUMNS.len() + offset;
    let count = |offset: usize| row.get::<_, i32>(column(offset)).unsigned_abs();
    Ok(Record {
        event: stored.delivery.event,
        seq: stored.delivery.seq,
        state: row.get::<_, &str>(column(0)).parse::<State>().map_err(|error: Error| error)?,
        attempts: count(1),
        replays: count(2),
        due_at: row.try_get(column(3)).ok().flatten(),
        code: row.get::<_, Option<String>>(column(4)).or(code),
        error: row.get::<_, Option<String>>(column(5)).or(error),
        updated_at: row.get(column(6)),
    })
}

fn subscription_info(row: &Row) -> SubscriptionInfo {
    let topics: Vec<String> = row.get(2);
    let paused = row.get::<_, Option<String>>(4).filter(|_| row.get(7));
    SubscriptionInfo {
        name: SubscriptionName::from_stored(row.get::<_, String>(0)),
        log: LogName::from_stored(row.get::<_, String>(1)),
        filter: Filter {
            topics: topics.into_iter().filter_map(|topic| TopicPattern::new(topic).ok()).collect(),
            tenant: row.get::<_, Option<String>>(3).map(Tenant::from_stored),
        },
        lanes: Vec::new(),
        paused: paused.map(|by| Pause {
            until: row.get(6),
            by,
            why: row.get::<_, Option<String>>(5).unwrap_or_default(),
        }),
    }
}

fn lane_info(row: &Row) -> Option<LaneInfo> {
    let lane: Option<i32> = row.get(8);
    lane.map(|lane| LaneInfo {
        lane: u16::try_from(lane).unwrap_or_default(),
        epoch: row.get(9),
        owner: row.get::<_, Option<String>>(10).map(OwnerId::from_stored),
        lease_left: row
            .get::<_, Option<i64>>(11)
            .filter(|micros| *micros > 0)
            .map(|micros| Duration::from_micros(micros.unsigned_abs())),
    })
}
