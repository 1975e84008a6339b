//! What an operator sees: subscriptions, counts, lists, one event. Lists may walk the log, counts
//! never do. Both run in a snapshot of their own, hold no lock, and never wait long for one.

use std::borrow::Cow;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::kit::{Share, StatsCounter, attempts_from_json};
use postbox_core::limits::{LIST_PAYLOAD_BYTES_MAX, LIST_RECORDS_MAX};
use postbox_core::{
    BatchLimit, Conflict, Count, Error, ErrorKind, EventId, Inspect, LaneInfo, ListQuery, LogName, Ordering, OwnerId,
    Record, Result, SourceName, State, Stats, SubscriptionInfo, SubscriptionName, Unrouted,
};
use postbox_postgres_sql::{
    EVENT_COLUMNS, LOG_NAMES, check_log_name, cursor_foreign, is_meant, is_undefined, log_unknown, params,
};
use tokio_postgres::Row;

use crate::PostgresStore;
use crate::classify::{is_damage, plain};
use crate::criteria::{Meant, headers_json};
use crate::decode::{Raw, Stored};
use crate::diagnose::{holder, named};
use crate::lease::pause_of;
use crate::payload::{fill_payloads, fitting};
use crate::row_security::{require_sight, require_sight_for};
use crate::session::Session;
use crate::subscription::{filter_of, look_up};
use crate::unrouted::count_unrouted;
use crate::walk::walk;

/// The largest payload to read inline: none. Either the caller wants none, or the server failed to
/// return one of them; then they are fetched one by one, so that a damaged one fails alone.
const WITHOUT_PAYLOADS: i32 = -1;

/// All subscriptions with their lanes. Reads two small tables. No lock.
const SUBSCRIPTION_LIST: &str = "
SELECT s.name, s.log, s.topics, s.tenant, s.paused_by, s.paused_why, s.paused_until, {is_paused}, n.lane::int, n.epoch, n.owner, (extract(epoch FROM n.lease_until - clock_timestamp()) * 1000000)::bigint,
  s.ordering, s.generation, s.kinds, s.aggregates, s.headers::text,
  {crashes_in_a_row}
FROM {s}.subscription AS s LEFT JOIN {s}.lane AS n ON n.subscription = s.id
ORDER BY s.name, n.lane";

/// Counts by state and topic: see `0001_depth.sql`; and whether a cursor of the subscription was
/// made in another cluster, so that they mean nothing. No lock.
const SUBSCRIPTION_DEPTH: &str = "
SELECT d.*, d.subscription = ANY (ARRAY(
  SELECT s.name FROM {s}.subscription AS s JOIN {s}.lane AS n ON n.subscription = s.id
  WHERE s.name = ANY ($1) AND n.cluster <> (SELECT {s}.cluster_id()))) AS is_foreign
FROM {s}.depths($1, $2) AS d";

/// The lock timeout of each subscription, after counting all of them at once failed on a lock. A
/// lock on what one subscription needs then does not keep the others from being counted.
const ALONE: &str = "SET LOCAL lock_timeout = '10ms'";

/// Records with a delivery row in one state. Index: `delivery_state`, then the log's primary key.
/// No lock.
const RECORD_LIST_ROWS: &str = "
SELECT {record_columns} FROM {s}.delivery AS d
LEFT JOIN {log} AS l ON l.seq = d.seq
JOIN {s}.lane AS n ON n.subscription = d.subscription AND n.lane = d.lane
WHERE d.subscription = $2 AND d.state = $3 AND d.seq > $4 AND ($6::text IS NULL OR d.code = $6) AND {is_meant}
  AND ($12::text IS NULL OR l.headers @> $12::text::jsonb)
ORDER BY d.seq LIMIT $7";

/// Records in any state, the newest first. Index: the log's primary key, walked down from `$4`, and
/// that of `delivery`. No lock.
const RECORD_LIST_NEWEST: &str = "
SELECT {record_columns} FROM {log} AS l
JOIN {s}.lane AS n ON n.subscription = $2 AND n.lane = l.slot % $13
LEFT JOIN {s}.delivery AS d ON d.subscription = $2 AND d.seq = l.seq
WHERE l.seq < $4 AND $3::text IS NULL AND ($6::text IS NULL OR d.code = $6) AND {is_meant}
  AND ($12::text IS NULL OR l.headers @> $12::text::jsonb)
ORDER BY l.seq DESC LIMIT $7";

/// One record. Index: the log's unique id. No lock.
const RECORD_GET: &str = "
SELECT {record_columns} FROM {log} AS l
JOIN {s}.lane AS n ON n.subscription = $2 AND n.lane = l.slot % $4
LEFT JOIN {s}.delivery AS d ON d.subscription = $2 AND d.seq = l.seq
WHERE l.id = $3";

/// Message ids that arrived with a different body. Index: `conflict_last`. No lock.
const CONFLICT_LIST: &str = "
SELECT source, tenant, message_id, digest_stored, digest_refused, times, first_at, last_at
FROM {s}.conflict ORDER BY last_at DESC LIMIT $1";

/// The number of events in a log, up to a limit, and the number of places between its first and
/// last event. Index: the log's primary key, from where retention left the first event. No lock.
pub(crate) const LOG_COUNT: &str = "
WITH g AS MATERIALIZED (SELECT kept_from FROM {s}.log WHERE name = '{name}')
SELECT (SELECT count(*) FROM (SELECT FROM {log} AS l WHERE l.seq >= (SELECT kept_from FROM g) ORDER BY l.seq LIMIT $1) AS looked),
  coalesce((SELECT l.seq FROM {log} AS l WHERE l.seq >= (SELECT kept_from FROM g) ORDER BY l.seq DESC LIMIT 1)
    - (SELECT l.seq FROM {log} AS l WHERE l.seq >= (SELECT kept_from FROM g) ORDER BY l.seq LIMIT 1) + 1, 0)";

/// The session or prepared transaction that locks writers out of one of our tables, as CREATE INDEX
/// does, or out of a row for which somebody waits, in the columns of `diagnose.rs`, and which of
/// the two. One that locks out readers as well goes first.
///
/// Whoever waits for a row holds a lock on it as well, so sessions that wait are followed to the
/// one that waits for nobody. Each session is looked at once. Of a prepared transaction that others
/// wait for, `pg_blocking_pids` says only `0`; `postbox doctor` names it. Reads the server's list
/// of locks; waits for nothing.
const LOCK_HOLDERS: &str = "
WITH RECURSIVE locks AS MATERIALIZED (SELECT l.* FROM pg_catalog.pg_locks AS l),
held AS MATERIALIZED (
  SELECT l.pid, p.gid, p.owner, c.relname::pg_catalog.text AS name, l.locktype
  FROM locks AS l
  JOIN pg_catalog.pg_class AS c ON c.oid {=} l.relation
  JOIN pg_catalog.pg_namespace AS n ON n.oid {=} c.relnamespace
  LEFT JOIN locks AS x ON l.pid IS NULL AND x.pid IS NULL AND x.virtualtransaction {=} l.virtualtransaction AND x.locktype {=} 'transactionid'
  LEFT JOIN pg_catalog.pg_prepared_xacts AS p ON p.transaction {=} x.transactionid
  WHERE l.granted AND l.mode {=} ANY (ARRAY['AccessExclusiveLock', 'ExclusiveLock', 'ShareRowExclusiveLock', 'ShareLock'])
    AND l.locktype {=} ANY (ARRAY['relation', 'tuple'])
    AND n.nspname {=} $1 AND c.relkind {=} 'r'
    AND l.database {=} (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname {=} pg_catalog.current_database())
    AND (l.pid IS NOT NULL OR p.gid IS NOT NULL)
  ORDER BY l.locktype {=} 'relation' DESC, l.mode {=} 'AccessExclusiveLock' DESC, l.pid LIMIT 1),
chain AS (
  SELECT held.pid FROM held
  UNION
  SELECT b.pid FROM chain AS c CROSS JOIN LATERAL pg_catalog.unnest(pg_catalog.pg_blocking_pids(c.pid)) AS b (pid))
SELECT CASE WHEN c.pid IS NULL THEN 'prepared' ELSE 'session' END, coalesce(c.pid::pg_catalog.text, pg_catalog.quote_literal(h.gid)),
  coalesce(a.application_name, 'role ' {||} h.owner, ''), pg_catalog.left(coalesce(a.query, ''), 80), h.name, h.locktype
FROM chain AS c CROSS JOIN held AS h
LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid {=} c.pid
WHERE (c.pid IS NULL OR c.pid {<>} 0) AND NOT EXISTS (SELECT FROM locks AS w WHERE w.pid {=} c.pid AND NOT w.granted)
ORDER BY c.pid LIMIT 1";

#[async_trait]
impl Inspect for PostgresStore {
    async fn subscriptions(&self) -> Result<Vec<SubscriptionInfo>> {
        let read = async |session: &Session| session.rows(&session.sql(SUBSCRIPTION_LIST), &[]).await;
        let mut subscriptions: Vec<SubscriptionInfo> = Vec::new();
        let rows = self.look("subscriptions", read).await?;
        if rows.is_empty() {
            self.look("subscriptions", require_sight).await?;
        }
        for row in &rows {
            let name = SubscriptionName::from_stored(row.get::<_, String>(0));
            if subscriptions.last().is_none_or(|last| last.name != name) {
                let log = LogName::from_stored(row.get::<_, String>(1));
                let (filter, paused) = (filter_of(row, 2, 14), pause_of(row, 4));
                let ordering = if row.get::<_, &str>(12) == "none" { Ordering::None } else { Ordering::Key };
                let (lanes, generation) = (Vec::new(), row.get(13));
                subscriptions.push(SubscriptionInfo { name, log, filter, ordering, generation, lanes, paused });
            }
            if let (Some(last), Some(lane)) = (subscriptions.last_mut(), row.get::<_, Option<i32>>(8)) {
                last.lanes.push(LaneInfo {
                    lane: u16::try_from(lane).unwrap_or_default(),
                    epoch: row.get(9),
                    owner: row.get::<_, Option<String>>(10).map(OwnerId::from_stored),
                    lease_left: row.get::<_, Option<i64>>(11).filter(|micros| *micros > 0).map(wait),
                    crashes: row.get::<_, Option<i32>>(17).unwrap_or_default().unsigned_abs(),
                });
            }
        }
        Ok(subscriptions)
    }

    async fn stats_of(&self, subscriptions: &[SubscriptionName]) -> Vec<Result<Stats>> {
        if subscriptions.is_empty() {
            return Vec::new();
        }
        let share = Share::of_one_of(subscriptions.len());
        let mut all = Vec::with_capacity(subscriptions.len());
        match self.depths(subscriptions, share, None).await {
            Ok(rows) => {
                for name in subscriptions {
                    all.push(self.counted(name, &rows, share).await);
                }
            }
            Err(error) if subscriptions.len() > 1 && may_be_of_one(&error) => {
                for name in subscriptions {
                    all.push(match self.depths(std::slice::from_ref(name), share, Some(ALONE)).await {
                        Ok(rows) => self.counted(name, &rows, share).await,
                        Err(error) => Err(error),
                    });
                }
            }
            Err(error) => {
                let same = || Error::new(error.kind(), error.operation(), error.code().to_owned(), error.message());
                all.extend(subscriptions.iter().skip(1).map(|_| Err(same())));
                all.insert(0, Err(error));
            }
        }
        all
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<Record>> {
        let inline = match query.payloads {
            true => i32::try_from(LIST_PAYLOAD_BYTES_MAX / LIST_RECORDS_MAX).unwrap_or(i32::MAX),
            false => WITHOUT_PAYLOADS,
        };
        let found = match self.list_rows(query, inline).await {
            Err(error) if query.payloads && is_damage(&error) => self.list_rows(query, WITHOUT_PAYLOADS).await,
            found => found,
        };
        self.records("list", found.map_err(took_long)?, query.payloads).await
    }

    async fn get(&self, subscription: &SubscriptionName, id: EventId) -> Result<Option<Record>> {
        let found = match self.get_row(subscription, id, i32::MAX).await {
            Err(error) if is_damage(&error) => self.get_row(subscription, id, WITHOUT_PAYLOADS).await?,
            found => found?,
        };
        Ok(self.records("get", found, true).await?.pop())
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
        self.look_at_schema("logs", read).await?.iter().map(|row| row.get::<_, &str>(0).parse()).collect()
    }

    async fn unrouted(&self, log: &LogName) -> Result<Unrouted> {
        check_log_name("unrouted", log)?;
        match self.report("unrouted", async |session: &Session| count_unrouted(session, log).await).await {
            Err(error) if is_undefined(&error) => Err(log_unknown("unrouted", log.as_str())),
            counted => counted,
        }
    }

    async fn count(&self, log: &LogName) -> Result<Count> {
        check_log_name("count", log)?;
        let rows_max = Share::of_one_of(1).rows_max();
        let params = params![rows_max];
        let read = async |session: &Session| session.row(&session.log_sql(LOG_COUNT, log), &params).await;
        let row = match self.look("count", read).await {
            Err(error) if is_undefined(&error) => return Err(log_unknown("count", log.as_str())),
            counted => counted?,
        };
        let [events, places] = [0, 1].map(|column| row.get::<_, i64>(column));
        let is_estimate = events == rows_max;
        let events = if is_estimate { places.max(events) } else { events };
        Ok(Count { events: events.unsigned_abs(), is_estimate })
    }
}

/// Whether an error may concern one subscription only, so that the others can be counted.
fn may_be_of_one(error: &Error) -> bool {
    error.kind() != ErrorKind::Unavailable || ["table_locked", "store_contention"].contains(&error.code())
}

/// A list reads all that its query does not exclude, so a time that is exceeded has more cures than
/// that of other calls.
fn took_long(error: Error) -> Error {
    if !["statement_timeout", "store_timeout"].contains(&error.code()) {
        return error;
    }
    let message = "the list took too long; ask for fewer events (--since, --key), or raise `statement_timeout` in [store]; \
                   postbox doctor names the locks it may wait for";
    Error::new(error.kind(), error.operation(), error.code().to_owned(), message).with_source(error)
}

/// Adds up the rows of [`SUBSCRIPTION_DEPTH`] for one subscription. `None` if there are none: the
/// subscription does not exist. A cursor of another cluster is an error.
fn added(subscription: &SubscriptionName, rows: &[Row], share: Share) -> Result<Option<StatsCounter>> {
    let mut rows = rows.iter().filter(|row| row.get::<_, &str>(0) == subscription.as_str()).peekable();
    match rows.peek() {
        None => return Ok(None),
        Some(row) if row.get(6) => return Err(cursor_foreign("stats")),
        Some(_) => {}
    }
    let mut counter = StatsCounter::within(share);
    for row in rows {
        let state: State = row.get::<_, &str>(1).parse()?;
        let topic = row.get::<_, Option<Raw<'_>>>(2).map_or(Cow::default(), |topic| String::from_utf8_lossy(topic.0));
        let age = row.get::<_, Option<i64>>(4).map(|micros| wait(micros.max(0)));
        counter.add(state, &topic, row.get::<_, i64>(3).unsigned_abs(), age);
        if row.get(5) {
            counter.note_estimate(state);
        }
    }
    counter.note_limit();
    Ok(Some(counter))
}

fn wait(micros: i64) -> Duration {
    Duration::from_micros(micros.unsigned_abs())
}

impl PostgresStore {
    /// Runs [`SUBSCRIPTION_DEPTH`] for several subscriptions.
    async fn depths(&self, subscriptions: &[SubscriptionName], share: Share, lock: Option<&str>) -> Result<Vec<Row>> {
        let names: Vec<&str> = subscriptions.iter().map(SubscriptionName::as_str).collect();
        let (sql, rows_max) = (self.schema().sql(SUBSCRIPTION_DEPTH), share.rows_max());
        let params = params![names, rows_max];
        let read = async |session: &Session| {
            let limit = async {
                match lock {
                    Some(lock) => session.run(lock).await,
                    None => Ok(()),
                }
            };
            let seen = require_sight_for(session, subscriptions);
            let (limited, seen, rows) = futures::join!(limit, seen, session.rows(&sql, &params));
            limited.and(seen).and(rows)
        };
        self.look("stats", read).await
    }

    /// Returns the counts of one subscription from the rows of several. An unknown subscription is
    /// an error.
    async fn counted(&self, subscription: &SubscriptionName, rows: &[Row], share: Share) -> Result<Stats> {
        let counter = added(subscription, rows, share)?;
        if counter.is_none() {
            self.call_to_look("stats", async |session: &Session| look_up(session, subscription).await).await?;
        }
        Ok(counter.unwrap_or_else(|| StatsCounter::within(share)).finish())
    }

    /// Runs a read of one statement that is polled, and must not be slow.
    pub(crate) async fn look<T>(
        &self,
        operation: &'static str,
        read: impl AsyncFnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        let look = async |session: &Session| session.at_once(&self.inner.modes.count, read).await;
        self.with_lock_named(self.call_to_look(operation, look).await).await
    }

    /// The same for a read that concerns no rows of tenants.
    pub(crate) async fn look_at_schema<T>(
        &self,
        operation: &'static str,
        read: impl AsyncFnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        let look = async |session: &Session| session.at_once(&self.inner.modes.count, read).await;
        self.with_lock_named(self.call_to_look_at_schema(operation, look).await).await
    }

    /// If a read failed on a lock, puts the session that holds it into the error.
    pub(crate) async fn with_lock_named<T>(&self, looked: Result<T>) -> Result<T> {
        match looked {
            Err(error) if error.code() == "store_contention" => Err(self.name_lock(error).await),
            looked => looked,
        }
    }

    async fn name_lock(&self, error: Error) -> Error {
        let schema = self.schema().as_str();
        let ask = async |session: &Session| session.rows(&session.sql(LOCK_HOLDERS), &params![schema]).await;
        let holders = self.call_to_look_at_schema(error.operation(), ask).await.unwrap_or_default();
        let Some(row) = holders.first() else { return error };
        let ((holder, end), table) = (holder(row.get(0), row.get(1)), row.get::<_, &str>(4));
        let whose = [named(row.get(2)), row.get(3)].join(": ");
        let part = if row.get::<_, &str>(5) == "tuple" { "a row of " } else { "" };
        // No foreign text may contain a semicolon.
        let what = format!(
            "{part}the table {} is locked by {} ({})",
            table.replace(';', ","),
            holder.replace(';', ","),
            plain(whose.trim_end_matches(": "))
        );
        let message = format!("{what}; wait for it, or end it: {end}");
        Error::new(ErrorKind::Unavailable, error.operation(), "table_locked", message).with_source(error)
    }

    /// Runs a report in one snapshot.
    pub(crate) async fn report<T>(
        &self,
        operation: &'static str,
        read: impl AsyncFnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        self.report_in(&self.inner.modes.report, operation, read).await
    }

    async fn report_in<T>(
        &self,
        mode: &str,
        operation: &'static str,
        read: impl AsyncFnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        let report = async |session: &Session| session.step_by_step(mode, read).await;
        self.with_lock_named(self.call_to_look(operation, report).await).await
    }

    async fn list_rows(&self, query: &ListQuery, inline: i32) -> Result<(LogName, Vec<Row>)> {
        let stream = query.state.filter(|state| !state.has_row());
        let read = async |session: &Session| {
            let subscription = look_up(session, &query.subscription).await?;
            if let Some(state) = stream {
                let rows = walk(session, &subscription, (query, state), inline).await?;
                return Ok((subscription.log, rows));
            }
            let end = if query.state.is_some() { i64::MIN } else { i64::MAX };
            let (state, after) = (query.state.map(State::as_str), query.after.map_or(end, |seq| seq.0));
            let Meant { topic, key, since, until, tenant } = Meant::by(&query.which);
            let limit = query.page().events as i64;
            let (id, lanes) = (subscription.id, i32::from(subscription.lanes));
            let (code, headers) = (&query.code, headers_json(&query.headers));
            let params =
                params![inline, id, state, after, topic, code, limit, key, since, until, tenant, headers, lanes];
            let (template, params) = match query.state {
                Some(_) => (RECORD_LIST_ROWS, &params[..12]),
                None => (RECORD_LIST_NEWEST, &params[..]),
            };
            let sql = session.schema().log_sql_with(
                template,
                &subscription.log,
                &[("is_meant", &is_meant([5, 8, 9, 10, 11]))],
            );
            let rows = session.rows(&sql, params).await?;
            Ok((subscription.log, rows))
        };
        let modes = &self.inner.modes;
        self.report_in(if stream.is_some() { &modes.dry_run } else { &modes.list }, "list", read).await
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

    /// Turns rows into records. If payloads are wanted, large ones are fetched up to a total size,
    /// where the list ends. This happens after the snapshot, because a payload that the server
    /// cannot return would abort its transaction.
    async fn records(
        &self,
        operation: &'static str,
        (log, rows): (LogName, Vec<Row>),
        payloads: bool,
    ) -> Result<Vec<Record>> {
        let mut events: Vec<Stored> =
            rows.iter().map(|row| Stored::of_delivery(row, EVENT_COLUMNS.len() + 7)).collect();
        if payloads {
            let limit = BatchLimit { events: LIST_RECORDS_MAX, payload_bytes: LIST_PAYLOAD_BYTES_MAX };
            events.truncate(fitting(&events, limit));
            self.call_to_look(operation, async |session: &Session| fill_payloads(session, &log, &mut events).await)
                .await?;
        }
        events.into_iter().zip(&rows).map(|(event, row)| record(event, row)).collect()
    }
}

fn record(stored: Stored, row: &Row) -> Result<Record> {
    // What a relay recorded of the event has precedence; otherwise the fault found here is
    // reported.
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
        updated_at: row.try_get(column(6)).ok().flatten(),
        last_attempts: row.get::<_, Option<&str>>(column(9)).map_or_else(Vec::new, attempts_from_json),
    })
}
