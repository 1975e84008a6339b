//! Creates subscriptions and remembers them.

use std::sync::Arc;

use postbox_core::kit::{check_log, handlers_of_another_store, subscription_unknown};
use postbox_core::{
    Error, ErrorKind, Filter, Lease, LogName, Ordering, Result, Seq, Settlement, StartAt, Subscription,
    SubscriptionName, Tenant, TopicPattern, lock,
};
use postbox_postgres_sql::{REBASE, cursor_foreign, params};
use tokio_postgres::Row;

use crate::PostgresStore;
use crate::admin::lock_lanes;
use crate::criteria::headers_json;
use crate::migrate::{check_makers, check_parts};
use crate::row_security::{log_not_locked, require_sight_of, subscription_not_seen};
use crate::session::Session;

/// The lanes of a subscription that asks for no number: a second replica takes half of the work,
/// and one that drives both is as fast as with one lane (`cargo xtask bench replicas`, `drain`).
const LANES: u16 = 2;

/// Whether the log exists. Index: primary key of `log`. Locks its row, so that no filter changes
/// while decisions depend on it (`unrouted.rs`).
pub(crate) const LOG_LOCK: &str = "
SELECT FROM {s}.log WHERE name = $1 FOR NO KEY UPDATE";

/// Whether the newest row of a log comes from a transaction that this cluster has not reached.
/// Index: `(xid, seq)` of the log, read from its end down to the current snapshot's `xmax`: many
/// entries of deleted events may lie below. No lock. The transaction of every visible row has
/// ended, so its id is below that, unless the row came with a dump. Rows of a running transaction
/// are walked too, while no later one has ended.
pub(crate) const LOG_IS_FROM_FUTURE: &str = "
SELECT EXISTS (
  SELECT FROM (
    SELECT FROM {log} AS l WHERE l.xid >= pg_snapshot_xmax(pg_current_snapshot()) ORDER BY l.xid DESC LIMIT 1) AS newest)";

/// Updates the filter and order of the subscription, or creates it. The log is locked, so nobody
/// else creates one of its subscriptions meanwhile; one of the same name for another log wins. An
/// upsert would use up an id at every start. Index: the unique name. Locks the row.
///
/// The revision makes replicas that read with the former filter notice: they go on with this one,
/// whatever their own configuration says.
const SUBSCRIPTION_UPSERT: &str = "
WITH known AS (SELECT {takes_all_new} AS everything, s.revision FROM {s}.subscription AS s JOIN {s}.log AS g ON g.name = s.log WHERE s.name = $1),
changed AS (
  UPDATE {s}.subscription AS s SET topics = $3, tenant = $4, kinds = $7, aggregates = $8, headers = $9::text::jsonb, ordering = $5, on_dead = $10,
    revision = s.revision + ((s.topics, s.tenant, s.kinds, s.aggregates, s.headers)
      IS DISTINCT FROM ($3::text[], $4::text, $7::text[], $8::text[], $9::text::jsonb))::int,
    mixed = s.mixed OR s.tenant IS DISTINCT FROM $4
  WHERE s.name = $1 AND s.log = $2 RETURNING s.id, s.revision),
made AS (
  INSERT INTO {s}.subscription (name, log, topics, tenant, kinds, aggregates, headers, ordering, on_dead, lanes, generation)
  SELECT $1, $2, $3, $4, $7, $8, $9::text::jsonb, $5, $10, $6, (SELECT max(g.epoch_next) FROM {s}.log AS g)
  WHERE NOT EXISTS (SELECT FROM known) ON CONFLICT (name) DO NOTHING RETURNING id)
SELECT c.id, false AS is_new, k.everything AS took_everything, k.revision <> c.revision AS is_changed FROM changed AS c CROSS JOIN known AS k
UNION ALL SELECT m.id, true, false, false FROM made AS m";

/// Without order no row holds its key, and no row waits for a turn: neither a blocked one, nor a
/// follower that has no due time until the row before it is settled. Goes on after a place in the
/// index `delivery_held`: what was unblocked leaves dead entries in it. Returns the next place, if
/// there may be more. Locks the rows; the lanes are locked already.
const DELIVERY_UNBLOCK: &str = "
WITH step AS MATERIALIZED (
  SELECT h.ctid, h.key, h.seq FROM {s}.delivery AS h
  WHERE h.subscription = $1 AND h.holds AND (h.key, h.seq) > ($3, $4) ORDER BY h.key, h.seq LIMIT $2),
unblocked AS (
  UPDATE {s}.delivery AS d SET ordered = false, updated_at = clock_timestamp(),
    state = CASE state WHEN 'blocked' THEN 'retrying' ELSE state END, due_at = CASE WHEN state = 'blocked' OR (state = 'retrying' AND due_at IS NULL) THEN clock_timestamp() ELSE due_at END
  WHERE d.ctid = ANY (ARRAY(SELECT k.ctid FROM step AS k)))
SELECT k.key, k.seq FROM step AS k ORDER BY k.key, k.seq OFFSET $2 - 1";

/// How many rows one step unblocks: some tenths of a second, during which no lane can settle.
const UNBLOCK_MAX: i64 = 5_000;

/// The subscription, if it has no order and a row of it after a place holds its key. Indexes: the
/// unique name, `delivery_held`.
const SUBSCRIPTION_HELD: &str = "
SELECT s.id FROM {s}.subscription AS s WHERE s.name = $1 AND s.ordering = 'none'
  AND EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription = s.id AND d.holds AND (d.key, d.seq) > ($2, $3))";

/// Stores the new filter. Index: primary key of `filter`.
pub(crate) const FILTER_KEEP: &str = "
INSERT INTO {s}.filter (subscription, revision, topics, tenant, kinds, aggregates, headers)
SELECT id, revision, topics, tenant, kinds, aggregates, headers FROM {s}.subscription WHERE id = $1 ON CONFLICT DO NOTHING";

/// Events that the former filter would have taken may be unrouted now. They are checked again, from
/// where the slowest lane begins; all of them are, if the subscription took everything before,
/// because then nothing was checked. The new filter is also compared with every unrouted event: the
/// progress of the former filter does not count for it. Indexes: primary keys.
const LOG_ROUTE_AGAIN: &str = "
WITH ask AS (UPDATE {s}.subscription SET rerouted_seq = 0 WHERE id = $2)
UPDATE {s}.log AS g SET routed_seq = 0, routed_xid = CASE WHEN $3 THEN slowest.xid ELSE least(g.routed_xid, slowest.xid) END
FROM (SELECT min(pg_snapshot_xmin(n.from_snap)) AS xid FROM {s}.lane AS n WHERE n.subscription = $2) AS slowest
WHERE g.name = $1 AND slowest.xid IS NOT NULL";

/// Creates the missing lanes. Their cursor is before everything, or, for a new subscription, at
/// this moment. For `now`, `last_seq` and the window do not matter: the window between two equal
/// snapshots is empty.
const LANE_CREATE: &str = "
WITH start AS (SELECT CASE WHEN $3 THEN pg_current_snapshot() ELSE '1:1:'::pg_snapshot END AS snap),
before AS (INSERT INTO {s}.passage (subscription, revision, lanes, lane, from_snap, to_snap, last_seq)
  SELECT $1, 0, $2, n, snap, snap, 0 FROM generate_series(0, $2 - 1) AS n, start WHERE $3)
INSERT INTO {s}.lane (subscription, lane, from_snap, to_snap, low, high, last_seq, revision, epoch)
SELECT $1, n, snap, snap, 0, 0, 0, s.revision, s.generation
FROM generate_series(0, $2 - 1) AS n, start, {s}.subscription AS s WHERE s.id = $1
ON CONFLICT DO NOTHING";

/// Switches a lane to the present filter, and records how far it came with the one before. Only if
/// its cursor is the one that the caller knows: then everything that was handed out is settled. A
/// window without events for the lane was passed when it was opened, which the caller may not know.
/// Returns the position. Indexes: primary keys. Locks the lane. docs/cursor.md, write W13.
pub(crate) const LANE_TAKE_FILTER: &str = "
WITH old AS MATERIALIZED (
  SELECT l.* FROM {s}.lane AS l WHERE l.subscription = $1 AND l.lane = $2 AND l.epoch = $3 AND l.lease_until > clock_timestamp()
    AND l.to_snap::text = $4 AND (l.last_seq = $5 OR ($5 = 0 AND l.last_seq = l.high)) FOR NO KEY UPDATE),
before AS (INSERT INTO {s}.passage (subscription, revision, lanes, lane, from_snap, to_snap, last_seq)
  SELECT o.subscription, o.revision, s.lanes, o.lane, o.from_snap, o.to_snap, o.last_seq FROM old AS o
  JOIN {s}.subscription AS s ON s.id = o.subscription WHERE o.revision <> s.revision ON CONFLICT DO NOTHING)
UPDATE {s}.lane AS l SET revision = s.revision FROM old AS o JOIN {s}.subscription AS s ON s.id = o.subscription
WHERE l.subscription = o.subscription AND l.lane = o.lane
RETURNING l.last_seq";

/// Gives the next new subscription another generation. Index: primary keys. Locks the log's row.
const EPOCH_NEXT: &str = "
UPDATE {s}.log AS g SET epoch_next = greatest(g.epoch_next, s.generation + 1) FROM {s}.subscription AS s WHERE s.id = $1 AND g.name = s.log";

/// Whether a lane's cursor is ahead of this cluster, and whether one was made in another cluster,
/// where the same ids belong to other transactions. Index: primary key of `lane`.
const LANE_FAULTS: &str = "
SELECT min(s.name) FILTER (WHERE pg_snapshot_xmax(l.to_snap) > pg_snapshot_xmax(pg_current_snapshot())),
  coalesce(bool_or(l.cluster <> (SELECT {s}.cluster_id())), false)
FROM {s}.lane AS l JOIN {s}.subscription AS s ON s.id = l.subscription WHERE l.subscription = $1 OR $1 IS NULL";

/// The logs that are read. Reads the whole (small) table.
const LOGS_READ: &str = "SELECT DISTINCT s.log FROM {s}.subscription AS s ORDER BY s.log";

/// One subscription. Index: the unique name.
const SUBSCRIPTION_GET: &str = "SELECT id, log, topics, tenant, lanes::int, revision, again_seq, again_replay, kinds, aggregates, headers::pg_catalog.text FROM {s}.subscription WHERE name {=} $1";

/// The names, for an error text. Reads the whole (small) table.
const SUBSCRIPTION_NAMES: &str = "SELECT name FROM {s}.subscription ORDER BY name LIMIT 50";

/// What reading a subscription requires.
#[derive(Debug)]
pub(crate) struct SubscriptionRow {
    pub(crate) id: i32,
    pub(crate) log: LogName,
    pub(crate) lanes: u16,
    pub(crate) filter: Filter,
    /// Raised by every change of the filter.
    pub(crate) revision: i32,
    /// The topics as SQL patterns; `None` means all.
    pub(crate) likes: Option<Vec<String>>,
    /// The headers as JSON; `None` means any.
    pub(crate) headers: Option<String>,
    /// Since the last reset: up to which `seq` events of the stream belong to which replay.
    again: (i64, i32),
}

impl SubscriptionRow {
    fn from_row(row: &Row) -> Self {
        let filter = filter_of(row, 2, 8);
        let topics = &filter.topics;
        Self {
            id: row.get(0),
            revision: row.get(5),
            log: LogName::from_stored(row.get::<_, String>(1)),
            lanes: u16::try_from(row.get::<_, i32>(4)).unwrap_or(1),
            likes: (!topics.is_empty()).then(|| topics.iter().map(TopicPattern::to_like).collect()),
            headers: row.get(10),
            again: (row.get(6), row.get(7)),
            filter,
        }
    }

    /// Returns the replay number of an event from the stream.
    pub(crate) fn replay_of(&self, seq: Seq) -> u32 {
        if seq.0 <= self.again.0 { self.again.1.unsigned_abs() } else { 0 }
    }

    pub(crate) fn tenant(&self) -> Option<&str> {
        self.filter.tenant.as_ref().map(Tenant::as_str)
    }

    /// The kinds as a parameter; `None` means all.
    pub(crate) fn kinds(&self) -> Option<Vec<&str>> {
        named(&self.filter.kinds)
    }

    /// The aggregates as a parameter; `None` means all.
    pub(crate) fn aggregates(&self) -> Option<Vec<&str>> {
        named(&self.filter.aggregates)
    }
}

/// A list of names as a parameter; `None` means any.
fn named(names: &[String]) -> Option<Vec<&str>> {
    (!names.is_empty()).then(|| names.iter().map(String::as_str).collect())
}

/// Reads a filter: topics and tenant from column `at` on; kinds, aggregates and headers from column
/// `contents` on.
pub(crate) fn filter_of(row: &Row, at: usize, contents: usize) -> Filter {
    // The patterns were checked when they were written.
    let topics = row.get::<_, Vec<String>>(at).into_iter().filter_map(|topic| TopicPattern::new(topic).ok());
    let headers = row.get::<_, Option<&str>>(contents + 2).map(serde_json::from_str);
    Filter {
        topics: topics.collect(),
        tenant: row.get::<_, Option<String>>(at + 1).map(Tenant::from_stored),
        kinds: row.get(contents),
        aggregates: row.get(contents + 1),
        headers: headers.and_then(Result::ok).unwrap_or_default(),
    }
}

pub(crate) async fn subscribe(store: &PostgresStore, session: &Session, subscription: &Subscription) -> Result<()> {
    let write = async |session: &Session| write(session, subscription).await;
    let row = session.step_by_step(&store.inner.modes.write, write).await?;
    store.remember(&subscription.name, row);
    Ok(())
}

async fn write(session: &Session, subscription: &Subscription) -> Result<SubscriptionRow> {
    let Subscription { name, log, filter, ordering, on_dead, lanes, start } = subscription;
    if session.rows(&session.sql(LOG_LOCK), &params![log.as_str()]).await?.is_empty() {
        return Err(log_not_locked(session, log).await);
    }
    check_log_rows(session, log).await?;
    let topics: Vec<&str> = filter.topics.iter().map(TopicPattern::as_str).collect();
    let tenant = filter.tenant.as_ref().map(Tenant::as_str);
    let order = match ordering {
        Ordering::Key => "key",
        Ordering::None => "none",
    };
    let (name_text, log_text, lanes_wanted) = (name.as_str(), log.as_str(), lanes.unwrap_or(LANES).cast_signed());
    let [kinds, aggregates] = [&filter.kinds, &filter.aggregates];
    let headers = headers_json(&filter.headers);
    let on_dead = on_dead.as_str();
    let params = params![name_text, log_text, topics, tenant, order, lanes_wanted, kinds, aggregates, headers, on_dead];
    let made = session.rows(&session.sql(SUBSCRIPTION_UPSERT), &params).await?;
    let Some(row) = made.first() else {
        let known = session.rows(&session.sql(SUBSCRIPTION_GET), &params![name.as_str()]).await?;
        let known = known.first().map(SubscriptionRow::from_row);
        known.map_or(Ok(()), |known| check_log(subscription, &known.log))?;
        let message = format!("subscription {name} was changed at the same moment; try again");
        return Err(Error::new(ErrorKind::Conflict, "subscribe", "subscription_changed", message));
    };
    let id: i32 = row.get(0);
    // The lanes of a known subscription exist, unless someone deleted them. Then nobody knows what
    // they had passed.
    let is_new: bool = row.get(1);
    if is_new {
        session.execute(&session.sql(EPOCH_NEXT), &params![id]).await?;
    }
    let now = *start == StartAt::Now && is_new;
    let known = look_up(session, name).await?;
    session.execute(&session.sql(LANE_CREATE), &params![id, i32::from(known.lanes), now]).await?;
    session.execute(&session.sql(FILTER_KEEP), &params![id]).await?;
    if row.get(3) {
        let took_everything: bool = row.get(2);
        session.execute(&session.sql(LOG_ROUTE_AGAIN), &params![log_text, id, took_everything]).await?;
    }
    check_lanes(session, Some(id)).await?;
    Ok(known)
}

/// Unblocks the next rows of a subscription without order, in a transaction of their own: there may
/// be millions. Begins after a key and `seq`; returns those to go on with, if there may be more. If
/// the steps are interrupted, the next `subscribe` unblocks the rest. Until then, the rest is sent
/// in the order of its keys, but a key waits if its dead row that halts it was unblocked already.
pub(crate) async fn unblock(
    session: &Session,
    name: &SubscriptionName,
    (key, seq): &(String, i64),
) -> Result<Option<(String, i64)>> {
    let held = session.rows(&session.sql(SUBSCRIPTION_HELD), &params![name.as_str(), key, seq]).await?;
    let Some(id) = held.first().map(|row| row.get::<_, i32>(0)) else { return Ok(None) };
    lock_lanes(session, id).await?;
    let ends = session.rows(&session.sql(DELIVERY_UNBLOCK), &params![id, UNBLOCK_MAX, key, seq]).await?;
    Ok(ends.first().map(|row| (row.get(0), row.get(1))))
}

/// Checks that every log that is read is seen and fits this cluster, that every cursor fits it,
/// first that the schema is whole, and last that nobody else may make objects in it.
pub(crate) async fn check_integrity(session: &Session) -> Result<()> {
    check_parts(session).await?;
    for row in session.rows(&session.sql(LOGS_READ), &[]).await? {
        check_log_rows(session, &LogName::from_stored(row.get::<_, &str>(0))).await?;
    }
    check_lanes(session, None).await?;
    check_makers(session, true).await
}

async fn check_log_rows(session: &Session, log: &LogName) -> Result<()> {
    require_sight_of(session, log).await?;
    match session.row(&session.log_sql(LOG_IS_FROM_FUTURE, log), &[]).await?.get(0) {
        true => Err(from_future(session, &format!("log {log}"))),
        false => Ok(()),
    }
}

/// Checks the cursors of one subscription, or of all.
async fn check_lanes(session: &Session, subscription: Option<i32>) -> Result<()> {
    let faults = session.row(&session.sql(LANE_FAULTS), &params![subscription]).await?;
    if let Some(name) = faults.get::<_, Option<&str>>(0) {
        return Err(from_future(session, &format!("the cursor of subscription {name}")));
    }
    match faults.get(1) {
        true => Err(cursor_foreign(session.operation())),
        false => Ok(()),
    }
}

impl PostgresStore {
    /// Returns what this process knows of a subscription, from `subscribe` or else from the
    /// database.
    pub(crate) async fn subscription(
        &self,
        session: &Session,
        name: &SubscriptionName,
    ) -> Result<Arc<SubscriptionRow>> {
        let known = lock(&self.inner.subscriptions).get(name).cloned();
        match known {
            Some(row) => Ok(row),
            None => self.reload(session, name).await,
        }
    }

    /// The same for the holder of a lane. If the subscription is gone, its lease is stale.
    pub(crate) async fn leased(&self, session: &Session, lease: &Lease) -> Result<Arc<SubscriptionRow>> {
        self.subscription(session, &lease.subscription).await.map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::stale(session.operation()),
            _ => error,
        })
    }

    /// The same for handlers in a transaction. The relay may read another store than theirs, or
    /// another handle of it, which would look like a lost lease, for ever.
    pub(crate) async fn leased_for_handlers(
        &self,
        session: &Session,
        lease: &Lease,
        settlement: &Settlement<'_>,
    ) -> Result<Arc<SubscriptionRow>> {
        let name = &lease.subscription;
        let subscription = self.subscription(session, name).await.map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                let message = format!(
                    "the handlers' store has no subscription {name}; build the router on the store that the relay reads, unless \
                     the subscription was just removed"
                );
                Error::new(ErrorKind::Mismatch, session.operation(), "handlers_of_another_store", message)
            }
            _ => error,
        })?;
        match settlement.position {
            Some(_) if !self.lane(lease).is_ours() => Err(handlers_of_another_store(name)),
            _ => Ok(subscription),
        }
    }

    /// Reads the subscription from the database and remembers it. A subscription that is gone is
    /// forgotten.
    pub(crate) async fn reload(&self, session: &Session, name: &SubscriptionName) -> Result<Arc<SubscriptionRow>> {
        let row = look_up(session, name).await;
        if row.is_err() {
            lock(&self.inner.subscriptions).remove(name);
        }
        Ok(self.remember(name, row?))
    }

    fn remember(&self, name: &SubscriptionName, row: SubscriptionRow) -> Arc<SubscriptionRow> {
        let row = Arc::new(row);
        let mut known = lock(&self.inner.subscriptions);
        known.insert(name.clone(), row.clone());
        row
    }
}

/// Reads a subscription from the database, without the memory of this process: an operator asks
/// about its present state.
pub(crate) async fn look_up(session: &Session, name: &SubscriptionName) -> Result<SubscriptionRow> {
    let rows = session.rows(&session.sql(SUBSCRIPTION_GET), &params![name.as_str()]).await?;
    if let Some(row) = rows.first() {
        return Ok(SubscriptionRow::from_row(row));
    }
    let names = session.rows(&session.sql(SUBSCRIPTION_NAMES), &[]).await?;
    let names: Vec<String> = names.iter().map(|row| row.get(0)).collect();
    Err(subscription_not_seen(session, subscription_unknown(session.operation(), name, &names)).await)
}

fn from_future(session: &Session, what: &str) -> Error {
    let message = format!("{what} is ahead of this database cluster (a restored dump?); {REBASE}");
    Error::new(ErrorKind::Mismatch, session.operation(), "cursor_from_future", message)
}

#[cfg(test)]
mod tests {
    use postbox_core::{Log as _, Migrate as _};
    use postbox_testkit::servers::{Postgres, Version};

    use super::*;
    use crate::PostgresConfig;
    use crate::plans::filled;

    /// Relays subscribe at every start, and there are two billion ids.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_subscription_that_is_known_uses_up_no_id() {
        let url = Postgres::shared(Version::V15).await.fresh_database().await;
        let store = PostgresStore::connect(PostgresConfig::new(&url)).await.expect("a store");
        store.up().await.expect("migrated");
        let session = store.session("test").await.expect("a session");
        let name = SubscriptionName::new("s").expect("a name");
        for ordering in [Ordering::Key, Ordering::Key, Ordering::None] {
            let subscription = Subscription { ordering, ..Subscription::new(name.clone(), LogName::outbox()) };
            store.subscribe(&subscription).await.expect("subscribed");
            let elsewhere = store.subscribe(&Subscription::new(name.clone(), LogName::inbox())).await;
            assert!(elsewhere.is_err(), "its name is taken");
            let last = session.row("SELECT last_value FROM postbox.subscription_id_seq", &[]).await.expect("asked");
            assert_eq!(last.get::<_, i64>(0), 1);
        }
    }

    /// What a step unblocks leaves dead entries in the index, which the next one does not read.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn each_step_of_unblocking_goes_on_where_the_last_one_ended() {
        for version in Version::ALL {
            let store = filled(version, "INSERT INTO postbox.outbox (topic, payload) SELECT 't', 'x'").await;
            let name = SubscriptionName::new("s").expect("a name");
            let subscription = Subscription::new(name.clone(), LogName::outbox());
            let subscription = Subscription { ordering: Ordering::None, ..subscription };
            store.subscribe(&subscription).await.expect("subscribed");
            let session = store.session("test").await.expect("a session");
            session.begin(&store.inner.modes.write).await.expect("begun");
            let blocked = "INSERT INTO postbox.delivery (subscription, lane, seq, key, state, ordered)
                SELECT s.id, 0, n, 'k' || n % 7, 'blocked', true FROM postbox.subscription AS s, generate_series(1, 12000) AS n";
            session.run(blocked).await.expect("blocked");
            let (mut next, mut reads) = (Some((String::new(), 0)), vec![0]);
            while let Some(after) = next {
                next = unblock(&session, &name, &after).await.expect("unblocked");
                let read = "SELECT pg_stat_get_xact_tuples_returned('postbox.delivery_held'::regclass)";
                reads.push(session.row(read, &[]).await.expect("counted").get::<_, i64>(0));
            }
            let steps: Vec<i64> = reads.windows(2).map(|reads| reads[1] - reads[0]).collect();
            let context = format!("{steps:?} entries read (Postgres {})", version.number());
            assert!(steps.len() == 3 && steps[1] <= steps[0] + 100 && steps[2] < steps[0], "{context}");
            session.commit().await.expect("ended");
        }
    }
}
