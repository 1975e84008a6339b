//! Lanes: created by `subscribe`, held by leases, fenced by epochs.

use std::collections::BTreeMap;
use std::time::Duration;

use postbox_core::kit::{check_log, lanes_missing, subscription_unknown};
use postbox_core::{
    Acquired, Disposition, Error, ErrorKind, Filter, Lease, LogName, OnDead, Ordering, OwnerId, Pause, StartAt,
    Subscription, SubscriptionName, Tenant,
};
use rusqlite::{OptionalExtension, Row, Transaction, named_params, params};

use crate::classify::Work;
use crate::clock::{micros, timestamp};
use crate::inspect::Reader;
use crate::migrate::{enter_wal, require_log, validate};
use crate::schema::log_table;
use crate::thread::Session;
use crate::unrouted::routed;

/// The lanes of a subscription that asks for no number. The replicas of a file share one machine
/// and its one writer, and a relay that drives two lanes reads each row twice: it drains a quarter
/// slower (`cargo xtask bench drain`).
const LANES: u16 = 1;

/// A subscription by primary key; no lock.
const SUBSCRIPTION_READ: &str = "SELECT log, topics, tenant, ordering, lanes, paused_by, paused_why, paused_until, revision, \
generation, again_seq, again_replay, kinds, aggregates, headers, on_dead FROM postbox_subscription WHERE name = ?1";
/// Names for error texts, by primary key; no lock.
const SUBSCRIPTION_NAMES: &str = "SELECT name FROM postbox_subscription ORDER BY name LIMIT 50";
/// By primary key; takes the write lock.
const SUBSCRIPTION_INSERT: &str = "INSERT INTO postbox_subscription (name, log, topics, tenant, ordering, lanes, created_at, generation, \
kinds, aggregates, headers, on_dead) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, (SELECT max(epoch_next) FROM postbox_log), ?8, ?9, ?10, ?11)";
/// Gives the next new subscription another generation. By primary key; takes the write lock.
const EPOCH_NEXT: &str =
    "UPDATE postbox_log SET epoch_next = (SELECT max(epoch_next) + 1 FROM postbox_log) WHERE name = ?1";
/// By primary key; takes the write lock.
const SUBSCRIPTION_UPDATE: &str = "UPDATE postbox_subscription SET topics = ?2, tenant = ?3, ordering = ?4, \
kinds = ?5, aggregates = ?6, headers = ?7, on_dead = ?8, \
revision = revision + ((topics, kinds, aggregates, headers) <> (?2, ?5, ?6, ?7) OR tenant IS NOT ?3) WHERE name = ?1";
/// Without order no row holds its key, and no row waits for a turn. What was unblocked has left the
/// index, so each step begins anew. By the index of keys, then by primary key; takes the write
/// lock.
const DELIVERY_UNBLOCK: &str = "UPDATE postbox_delivery SET holds = 0, updated_at = ?2, \
due_at = iif(state = 'blocked', ?2, due_at), state = iif(state = 'blocked', 'retrying', state) \
WHERE subscription = ?1 AND seq IN (SELECT h.seq FROM postbox_delivery h INDEXED BY postbox_delivery_key \
WHERE h.subscription = ?1 AND h.holds = 1 AND EXISTS (SELECT 1 FROM postbox_subscription s WHERE s.name = ?1 AND s.ordering = 'none') \
ORDER BY h.key, h.seq LIMIT ?3)";
/// How many rows one step unblocks: some tens of milliseconds of the write lock.
const UNBLOCK_MAX: usize = 5_000;
/// Every filter is kept. By primary key; takes the write lock.
pub(crate) const FILTER_KEEP: &str = "INSERT OR IGNORE INTO postbox_filter (subscription, revision, topics, tenant, kinds, aggregates, headers) \
SELECT name, revision, topics, tenant, kinds, aggregates, headers FROM postbox_subscription WHERE name = ?1";
/// By primary key; no lock.
const FILTERS_READ: &str =
    "SELECT revision, topics, tenant, kinds, aggregates, headers FROM postbox_filter WHERE subscription = ?1";
/// Events that the former filter would have taken may be unrouted now. They are checked again, from
/// the position of the slowest lane; all of them are, if the subscription took everything before
/// (`?3`), because then nothing was checked. By primary keys; takes the write lock.
const LOG_ROUTE_AGAIN: &str = "UPDATE postbox_log SET routed = CASE WHEN ?3 THEN slowest.position ELSE min(routed, slowest.position) END \
FROM (SELECT min(position) AS position FROM postbox_lane WHERE subscription = ?2) AS slowest \
WHERE name = ?1 AND slowest.position IS NOT NULL";
/// Compares the new filter with every unrouted event: the progress of the former filter does not
/// count for it. By primary key; takes the write lock.
const SUBSCRIPTION_ASK_ALL: &str = "UPDATE postbox_subscription SET rerouted_seq = 0 WHERE name = ?1";
/// Records how far a lane came with its filter, if everything that was handed out is settled. By
/// primary key; takes the write lock; nothing for a stale epoch.
const PASSAGE_NOTE: &str = "INSERT OR IGNORE INTO postbox_passage (subscription, revision, lanes, lane, position) \
SELECT l.subscription, l.revision, s.lanes, l.lane, l.position FROM postbox_lane l JOIN postbox_subscription s ON s.name = l.subscription \
WHERE l.subscription = ?1 AND l.lane = ?2 AND l.epoch = ?3 AND l.owner = ?4 AND l.lease_until > ?5 AND l.position = ?6";
/// Switches the lane to the present filter. By primary key; takes the write lock.
const LANE_TAKE_FILTER: &str = "UPDATE postbox_lane SET revision = \
(SELECT s.revision FROM postbox_subscription s WHERE s.name = postbox_lane.subscription) \
WHERE subscription = ?1 AND lane = ?2 AND epoch = ?3 AND owner = ?4 AND lease_until > ?5 AND position = ?6";
/// By primary key; takes the write lock.
const LANE_INSERT: &str = "INSERT OR IGNORE INTO postbox_lane (subscription, lane, position, window_end, revision, epoch) \
SELECT name, ?2, ?3, ?3, revision, generation FROM postbox_subscription WHERE name = ?1";
/// Records that no filter applies before the subscription's start. By primary key; takes the write
/// lock.
const PASSAGE_BEFORE: &str = "INSERT OR IGNORE INTO postbox_passage (subscription, revision, lanes, lane, position) \
SELECT name, 0, lanes, ?2, ?3 FROM postbox_subscription WHERE name = ?1";
/// A lane whose position is beyond the last `seq` that the log ever assigned: the file is older
/// than the cursor. Primary key; no lock.
const LANE_IN_FUTURE: &str =
    "SELECT lane, position FROM postbox_lane WHERE subscription = ?1 AND position > ?2 LIMIT 1";
/// Reads the whole (small) table; no lock.
const SUBSCRIPTIONS_READ: &str = "SELECT name, log FROM postbox_subscription ORDER BY name";
/// The last `seq` that a log ever assigned, pruned ones included. From AUTOINCREMENT's own table,
/// which has a few rows; no lock.
pub(crate) const LOG_LAST: &str = "SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = ?1), 0)";
/// The first lane that is free, or that the caller holds without knowing it, because the answer to
/// its grant was lost. By primary key.
///
/// A lease granted in the future was written before the clock was set back, and is void. Otherwise
/// a crashed holder would keep the lane until the clock catches up. "Future" means later than
/// `:clock`, the time of this read. The request itself is older: a lease that was granted while the
/// request waited for the write lock is still valid.
const LANE_FREE: &str = "SELECT lane FROM postbox_lane WHERE subscription = :subscription \
AND (lease_until <= :now OR lease_until - lease_ttl > :clock + 1000000 \
OR (owner = :owner AND lane NOT IN (SELECT value FROM json_each(:held)))) ORDER BY lane LIMIT 1";
/// By primary key; no lock.
const LANE_COUNT: &str = "SELECT count(*) FROM postbox_lane WHERE subscription = ?1";
/// How many relays in a row have crashed while they held the lane: none if the last one held it for
/// long (`Lease::LONG`).
macro_rules! crashes_in_a_row {
    () => {
        "iif(lease_until - lease_ttl > granted_at + 10 * lease_ttl, 0, crashes)"
    };
}
pub(crate) use crashes_in_a_row;

/// By primary key; takes the write lock. If another owner's lease expired, that owner has crashed,
/// which is counted.
const LANE_GRANT: &str = concat!(
    "UPDATE postbox_lane SET epoch = epoch + 1, owner = ?3, lease_until = ?4, lease_ttl = ?5, granted_at = ?6, crashes = ",
    crashes_in_a_row!(),
    " + iif(lease_until = 0 OR coalesce(owner = ?3, 1), 0, 1) WHERE subscription = ?1 AND lane = ?2 RETURNING epoch, crashes"
);
/// Makes events due that wait for a call of the former holder (`Disposition::IN_FLIGHT`). Index
/// `postbox_delivery_in_flight`; takes the write lock.
const DELIVERIES_MAKE_DUE: &str = "UPDATE postbox_delivery INDEXED BY postbox_delivery_in_flight SET due_at = ?3, updated_at = ?3 \
WHERE subscription = ?1 AND lane = ?2 AND code IN ('in_flight', 'alone') AND code = 'in_flight' AND state = 'retrying' AND due_at > ?3";
/// Counts a crash against events that the former holder sent alone and recorded no outcome for: it
/// crashed while sending them (`Disposition::ALONE`, `RELAY_CRASHED`). Index
/// `postbox_delivery_in_flight`; takes the write lock.
const DELIVERY_COUNT_CRASH: &str = "UPDATE postbox_delivery INDEXED BY postbox_delivery_in_flight SET crashes = crashes + 1, code = 'relay_crashed', error = ?4, updated_at = ?3 \
WHERE subscription = ?1 AND lane = ?2 AND code IN ('in_flight', 'alone') AND code = 'alone' AND state = 'retrying'";
/// By primary key; takes the write lock; changes nothing for a stale epoch.
const LANE_RENEW: &str = "UPDATE postbox_lane SET lease_until = ?6, lease_ttl = ?7 \
WHERE subscription = ?1 AND lane = ?2 AND epoch = ?3 AND owner = ?4 AND lease_until > ?5";
/// By primary key; takes the write lock; changes nothing for a stale epoch.
const LANE_RELEASE: &str = "UPDATE postbox_lane SET lease_until = 0, crashes = ?6 \
WHERE subscription = ?1 AND lane = ?2 AND epoch = ?3 AND owner = ?4 AND lease_until > ?5";
/// The lane, if the lease is still valid. By primary key; no lock in a read.
const LANE_HELD: &str = "SELECT position, window_end, lease_until, revision FROM postbox_lane \
WHERE subscription = ?1 AND lane = ?2 AND epoch = ?3 AND owner = ?4 AND lease_until > ?5";
/// By primary key; takes the write lock.
const REPLICA_SEEN: &str = "INSERT INTO postbox_replica (subscription, owner, seen_at) VALUES (?1, ?2, ?3) \
ON CONFLICT (subscription, owner) DO UPDATE SET seen_at = excluded.seen_at";
/// By primary key; no lock. A relay seen in the future was seen before the clock was set back. It
/// is not counted: if it is dead, it would take its share of the lanes from the living until the
/// clock catches up.
const REPLICA_COUNT: &str = "SELECT count(*) FROM postbox_replica WHERE subscription = ?1 AND owner <> ?2 \
AND seen_at > ?3 AND seen_at <= ?4 + 1000000";
/// By primary key; no lock.
const REPLICA_LAST: &str = "SELECT seen_at FROM postbox_replica WHERE subscription = ?1 AND owner = ?2";
/// By primary key; takes the write lock.
const REPLICA_LEAVES: &str = "DELETE FROM postbox_replica WHERE subscription = ?1 AND owner = ?2";
/// Deletes relays that are long gone. By primary key; takes the write lock.
const REPLICA_FORGET_GONE: &str = "DELETE FROM postbox_replica WHERE subscription = ?1 AND seen_at < ?2";

/// A subscription as it is stored.
pub(crate) struct SubscriptionRow {
    pub(crate) log: LogName,
    pub(crate) filter: Filter,
    pub(crate) ordering: Ordering,
    pub(crate) on_dead: OnDead,
    pub(crate) lanes: u16,
    pub(crate) pause: Option<Pause>,
    /// Raised by every change of the filter.
    pub(crate) revision: i64,
    /// Distinguishes it from earlier subscriptions with the same name.
    pub(crate) generation: i64,
    /// Since the last reset: up to which place events of the stream belong to which replay.
    again: (i64, u32),
}

impl SubscriptionRow {
    /// Returns the replay number of an event from the stream.
    pub(crate) fn replay_of(&self, seq: i64) -> u32 {
        if seq <= self.again.0 { self.again.1 } else { 0 }
    }

    /// Whether a dead event holds its key.
    pub(crate) fn halts(&self) -> bool {
        self.ordering == Ordering::Key && self.on_dead == OnDead::Halt
    }

    /// The pause in force.
    pub(crate) fn paused(&self, now: i64) -> Option<&Pause> {
        self.pause.as_ref().filter(|pause| pause.holds_at(timestamp(now)))
    }
}

/// Reads a subscription; `None` if there is none with this name.
pub(crate) fn find(tx: &Transaction<'_>, name: &SubscriptionName) -> Work<Option<SubscriptionRow>> {
    let found = tx.prepare_cached(SUBSCRIPTION_READ)?.query_row([name.as_str()], |row| {
        let ordering: String = row.get(3)?;
        let by: Option<String> = row.get(5)?;
        let (why, until): (Option<String>, Option<i64>) = (row.get(6)?, row.get(7)?);
        Ok(SubscriptionRow {
            log: LogName::from_stored(row.get::<_, String>(0)?),
            filter: filter_of(row, 1, 12)?,
            ordering: if ordering == "none" { Ordering::None } else { Ordering::Key },
            on_dead: if row.get::<_, String>(15)? == "halt" { OnDead::Halt } else { OnDead::Continue },
            lanes: row.get(4)?,
            pause: by.map(|by| Pause { until: until.map(timestamp), by, why: why.unwrap_or_default() }),
            revision: row.get(8)?,
            generation: row.get(9)?,
            again: (row.get(10)?, row.get(11)?),
        })
    });
    Ok(found.optional()?)
}

/// Reads every filter that a subscription had, by revision.
pub(crate) fn filters(tx: &Transaction<'_>, name: &SubscriptionName) -> Work<BTreeMap<i64, Filter>> {
    let mut statement = tx.prepare_cached(FILTERS_READ)?;
    let rows = statement.query_map([name.as_str()], |row| Ok((row.get(0)?, filter_of(row, 1, 3)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Reads a filter that `subscribe` wrote. A text that does not parse, after someone's UPDATE, wants
/// everything, so that nothing is lost.
///
/// Topics and tenant start at column `at`; kinds, aggregates and headers at column `contents`.
fn filter_of(row: &Row<'_>, at: usize, contents: usize) -> rusqlite::Result<Filter> {
    let text = |column| row.get::<_, String>(column);
    Ok(Filter {
        topics: serde_json::from_str(&text(at)?).unwrap_or_default(),
        tenant: row.get::<_, Option<String>>(at + 1)?.map(Tenant::from_stored),
        kinds: serde_json::from_str(&text(contents)?).unwrap_or_default(),
        aggregates: serde_json::from_str(&text(contents + 1)?).unwrap_or_default(),
        headers: serde_json::from_str(&text(contents + 2)?).unwrap_or_default(),
    })
}

/// Reads a subscription that must exist.
pub(crate) fn require(operation: &'static str, tx: &Transaction<'_>, name: &SubscriptionName) -> Work<SubscriptionRow> {
    if let Some(stored) = find(tx, name)? {
        return Ok(stored);
    }
    let known: Vec<String> =
        tx.prepare_cached(SUBSCRIPTION_NAMES)?.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
    Err(subscription_unknown(operation, name, &known).into())
}

/// Unblocks the next rows of a subscription without order. Returns whether there may be more: there
/// may be millions, and each step is a transaction of its own. If the steps are interrupted, the
/// next `subscribe` unblocks the rest. Until then it is sent in the order of its keys, and a key
/// still waits if the dead row that halts it was unblocked already.
pub(crate) fn unblock(tx: &Transaction<'_>, name: &SubscriptionName, now: i64) -> Work<bool> {
    let step = params![name.as_str(), now, UNBLOCK_MAX as i64];
    Ok(tx.prepare_cached(DELIVERY_UNBLOCK)?.execute(step)? == UNBLOCK_MAX)
}

/// Creates or checks a subscription. Writes only if something differs.
pub(crate) fn subscribe(session: &mut Session, subscription: &Subscription) -> Work<()> {
    let now = session.settings.now();
    let connection = session.connection()?;
    validate(connection)?;
    // Another program may have left WAL mode, and then readers would wait for writers.
    enter_wal(connection)?;
    session.transact(|tx| {
        let log = require_log("subscribe", tx, &subscription.log)?;
        let last: i64 = tx.prepare_cached(LOG_LAST)?.query_row([log_table(&log)], |row| row.get(0))?;
        let Filter { topics, kinds, aggregates, headers, .. } = &subscription.filter;
        let topics = serde_json::to_string(topics).expect("a list of strings is JSON");
        let [kinds, aggregates] =
            [kinds, aggregates].map(|names| serde_json::to_string(names).expect("a list of strings is JSON"));
        let headers = serde_json::to_string(headers).expect("a map of strings is JSON");
        let tenant = subscription.filter.tenant.as_ref().map(|tenant| tenant.as_str().to_owned());
        let ordering = if subscription.ordering == Ordering::None { "none" } else { "key" };
        let on_dead = subscription.on_dead;
        let name = subscription.name.as_str();
        let known = find(tx, &subscription.name)?;
        let is_new = known.is_none();
        let lanes = known.as_ref().map_or(subscription.lanes.unwrap_or(LANES), |stored| stored.lanes);
        if let Some(stored) = known {
            check_log(subscription, &stored.log)?;
            let is_changed = stored.filter != subscription.filter;
            let took_everything =
                is_changed && Reader::find("subscribe", tx, &subscription.name)?.takes_everything(routed(tx, &log)?);
            check_cursor("subscribe", tx, name, &log, last)?;
            if is_changed || (stored.ordering, stored.on_dead) != (subscription.ordering, on_dead) {
                tx.prepare_cached(SUBSCRIPTION_UPDATE)?.execute(params![
                    name,
                    topics,
                    tenant,
                    ordering,
                    kinds,
                    aggregates,
                    headers,
                    on_dead.as_str()
                ])?;
            }
            if is_changed {
                tx.prepare_cached(LOG_ROUTE_AGAIN)?.execute(params![log.as_str(), name, took_everything])?;
                tx.prepare_cached(SUBSCRIPTION_ASK_ALL)?.execute([name])?;
            }
        } else {
            let row = params![
                name,
                log.as_str(),
                topics,
                tenant,
                ordering,
                lanes,
                now,
                kinds,
                aggregates,
                headers,
                on_dead.as_str()
            ];
            tx.prepare_cached(SUBSCRIPTION_INSERT)?.execute(row)?;
            tx.prepare_cached(EPOCH_NEXT)?.execute([log.as_str()])?;
        }
        // The lanes of a known subscription exist, unless someone deleted them. Then nobody knows
        // what they had passed.
        let position = if is_new && subscription.start == StartAt::Now { last } else { 0 };
        tx.prepare_cached(FILTER_KEEP)?.execute([name])?;
        for lane in 0..lanes {
            tx.prepare_cached(LANE_INSERT)?.execute(params![name, lane, position])?;
            if position > 0 {
                tx.prepare_cached(PASSAGE_BEFORE)?.execute(params![name, lane, position])?;
            }
        }
        Ok(())
    })
}

/// Refuses cursors of a subscription beyond the end of its log.
fn check_cursor(operation: &'static str, tx: &Transaction<'_>, name: &str, log: &LogName, last: i64) -> Work<()> {
    let ahead: Option<(u16, i64)> = tx
        .prepare_cached(LANE_IN_FUTURE)?
        .query_row(params![name, last], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    let Some((lane, position)) = ahead else { return Ok(()) };
    let message = format!(
        "lane {lane} of {name} stands at {position}, but log {log} ends at {last}: the log was restored from an older copy; restore the newer one, \
         or start from here with: UPDATE postbox_lane SET position = min(position, {last}), window_end = min(window_end, {last}) \
         WHERE subscription = '{name}'"
    );
    Err(Error::new(ErrorKind::Mismatch, operation, "cursor_from_future", message).into())
}

/// Checks the cursors of all subscriptions.
pub(crate) fn check_cursors(tx: &Transaction<'_>) -> Work<()> {
    let all: Vec<(String, String)> = tx
        .prepare_cached(SUBSCRIPTIONS_READ)?
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<Result<_, _>>()?;
    for (name, log) in all {
        let log = LogName::from_stored(log);
        let last: i64 = tx.prepare_cached(LOG_LAST)?.query_row([log_table(&log)], |row| row.get(0))?;
        check_cursor("check_integrity", tx, &name, &log, last)?;
    }
    Ok(())
}

/// A request for a lane.
#[derive(Clone)]
pub(crate) struct AcquireRequest {
    pub(crate) subscription: SubscriptionName,
    pub(crate) owner: OwnerId,
    /// The lanes that the caller knows it holds.
    pub(crate) held: Vec<u16>,
    pub(crate) ttl: Duration,
    /// When the call was made. The lease counts from then, so that waiting in a queue never extends
    /// it.
    pub(crate) asked_at: i64,
}

/// Returns the answer if nothing needs to be written: the subscription is paused or no lane is
/// free, and our heartbeat is recent. So standbys do not write at every poll.
pub(crate) fn peek(session: &mut Session, request: &AcquireRequest) -> Work<Option<Acquired>> {
    let clock = session.settings.now();
    let tx = session.read()?;
    let stored = require("acquire", &tx, &request.subscription)?;
    let seen: Option<i64> = tx
        .prepare_cached(REPLICA_LAST)?
        .query_row([request.subscription.as_str(), request.owner.as_str()], |row| row.get(0))
        .optional()?;
    let fresh_after = request.asked_at.saturating_sub(micros(request.ttl / 4));
    if seen.is_none_or(|seen| seen < fresh_after || seen > request.asked_at) {
        return Ok(None);
    }
    let paused = stored.paused(request.asked_at).cloned();
    if paused.is_none() && free_lane(&tx, request, clock)?.is_some() {
        return Ok(None);
    }
    Ok(Some(Acquired { lease: None, replicas: replicas(&tx, request, clock)?, lanes: stored.lanes, paused }))
}

/// Records the heartbeat and takes a free lane if there is one.
pub(crate) fn acquire(session: &mut Session, request: &AcquireRequest) -> Work<Acquired> {
    let settings = session.settings.clone();
    session.transact(|tx| {
        let stored = require("acquire", tx, &request.subscription)?;
        heartbeat(tx, &request.subscription, &request.owner, request.asked_at, request.ttl)?;
        let paused = stored.paused(request.asked_at).cloned();
        let clock = settings.now();
        let free = if paused.is_none() { free_lane(tx, request, clock)? } else { None };
        let lanes: u16 = tx.prepare_cached(LANE_COUNT)?.query_row([request.subscription.as_str()], |row| row.get(0))?;
        if lanes < stored.lanes {
            return Err(lanes_missing(&request.subscription).into());
        }
        let (subscription, owner) = (request.subscription.clone(), request.owner.clone());
        let mut lease = None;
        if let Some(lane) = free {
            let until = request.asked_at.saturating_add(micros(request.ttl));
            let row =
                params![subscription.as_str(), lane, owner.as_str(), until, micros(request.ttl), request.asked_at];
            let granted = tx.prepare_cached(LANE_GRANT)?.query_row(row, |row| Ok((row.get(0)?, row.get(1)?)));
            let (epoch, crashes) = granted?;
            let made_due = params![subscription.as_str(), lane, request.asked_at];
            tx.prepare_cached(DELIVERIES_MAKE_DUE)?.execute(made_due)?;
            let error = Disposition::RELAY_CRASHED_ERROR;
            let crashed = params![subscription.as_str(), lane, request.asked_at, error];
            tx.prepare_cached(DELIVERY_COUNT_CRASH)?.execute(crashed)?;
            lease = Some(Lease { subscription, log: stored.log.clone(), lane, epoch, owner, crashes });
        }
        Ok(Acquired { lease, replicas: replicas(tx, request, clock)?, lanes: stored.lanes, paused })
    })
}

/// `clock` is the present time, read under the lock of the transaction if it has one.
fn free_lane(tx: &Transaction<'_>, request: &AcquireRequest, clock: i64) -> Work<Option<u16>> {
    let held = serde_json::to_string(&request.held).expect("a list of numbers is JSON");
    let parameters = named_params! {
        ":subscription": request.subscription.as_str(), ":now": request.asked_at, ":clock": clock, ":owner": request.owner.as_str(), ":held": held,
    };
    Ok(tx.prepare_cached(LANE_FREE)?.query_row(parameters, |row| row.get(0)).optional()?)
}

/// The number of relays seen within the lease time, the caller included.
fn replicas(tx: &Transaction<'_>, request: &AcquireRequest, clock: i64) -> Work<u16> {
    let alive_after = request.asked_at.saturating_sub(micros(request.ttl));
    let row = params![request.subscription.as_str(), request.owner.as_str(), alive_after, clock];
    let others: u16 = tx.prepare_cached(REPLICA_COUNT)?.query_row(row, |row| row.get(0))?;
    Ok(others.saturating_add(1))
}

fn heartbeat(tx: &Transaction<'_>, name: &SubscriptionName, owner: &OwnerId, now: i64, ttl: Duration) -> Work<()> {
    tx.prepare_cached(REPLICA_SEEN)?.execute(params![name.as_str(), owner.as_str(), now])?;
    let gone_before = now.saturating_sub(micros(ttl).saturating_mul(10));
    tx.prepare_cached(REPLICA_FORGET_GONE)?.execute(params![name.as_str(), gone_before])?;
    Ok(())
}

/// Extends the lease, or ends it if the subscription is paused. Returns whether it is still held.
pub(crate) fn renew(session: &mut Session, lease: &Lease, ttl: Duration) -> Work<bool> {
    let now = session.settings.now();
    session.transact(|tx| {
        if find(tx, &lease.subscription)?.is_none_or(|stored| stored.paused(now).is_some()) {
            return Ok(false);
        }
        let until = now.saturating_add(micros(ttl));
        let (name, owner) = (lease.subscription.as_str(), lease.owner.as_str());
        let row = params![name, lease.lane, lease.epoch, owner, now, until, micros(ttl)];
        let changed = tx.prepare_cached(LANE_RENEW)?.execute(row)?;
        if changed == 1 {
            heartbeat(tx, &lease.subscription, &lease.owner, now, ttl)?;
        }
        Ok(changed == 1)
    })
}

/// Gives the lane back. Returns whether it was ours.
pub(crate) fn release(session: &mut Session, lease: &Lease) -> Work<bool> {
    let now = session.settings.now();
    session.transact(|tx| {
        let (name, owner) = (lease.subscription.as_str(), lease.owner.as_str());
        let row = params![name, lease.lane, lease.epoch, owner, now, lease.crashes];
        Ok(tx.prepare_cached(LANE_RELEASE)?.execute(row)? == 1)
    })
}

/// Stops counting the owner as a replica.
pub(crate) fn leave(session: &mut Session, subscription: &SubscriptionName, owner: &OwnerId) -> Work<()> {
    session.transact(|tx| {
        tx.prepare_cached(REPLICA_LEAVES)?.execute([subscription.as_str(), owner.as_str()])?;
        Ok(())
    })
}

/// The state of a leased lane.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaneRow {
    pub(crate) position: i64,
    pub(crate) window_end: i64,
    pub(crate) lease_until: i64,
    /// The revision of the filter that it reads with.
    pub(crate) revision: i64,
}

/// Returns the lane, or `Stale` if the lease is no longer held.
pub(crate) fn held(operation: &'static str, tx: &Transaction<'_>, lease: &Lease, now: i64) -> Work<LaneRow> {
    let row = params![lease.subscription.as_str(), lease.lane, lease.epoch, lease.owner.as_str(), now];
    let held = tx.prepare_cached(LANE_HELD)?.query_row(row, |row| {
        let (position, window_end) = (row.get(0)?, row.get(1)?);
        Ok(LaneRow { position, window_end, lease_until: row.get(2)?, revision: row.get(3)? })
    });
    held.optional()?.ok_or_else(|| Error::stale(operation).into())
}

/// Switches the lane to the subscription's present filter.
pub(crate) fn take_filter(session: &mut Session, lease: &Lease, position: i64) -> Work<()> {
    let now = session.settings.now();
    session.transact(|tx| {
        let row = params![lease.subscription.as_str(), lease.lane, lease.epoch, lease.owner.as_str(), now, position];
        tx.prepare_cached(PASSAGE_NOTE)?.execute(row)?;
        match tx.prepare_cached(LANE_TAKE_FILTER)?.execute(row)? {
            0 => Err(Error::stale("next_batch").into()),
            _ => Ok(()),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plans::judge;

    #[test]
    fn a_lane_and_what_was_in_flight_are_found_by_an_index() {
        let in_flight = "postbox_delivery_in_flight (subscription=? AND lane=?)";
        judge(&[
            ("LANE_FREE", LANE_FREE, &["postbox_lane USING PRIMARY KEY (subscription=?)"]),
            ("LANE_HELD", LANE_HELD, &["postbox_lane USING PRIMARY KEY (subscription=? AND lane=?)"]),
            ("DELIVERIES_MAKE_DUE", DELIVERIES_MAKE_DUE, &[in_flight]),
            ("DELIVERY_COUNT_CRASH", DELIVERY_COUNT_CRASH, &[in_flight]),
            (
                "DELIVERY_UNBLOCK",
                DELIVERY_UNBLOCK,
                &["PRIMARY KEY (subscription=? AND seq=?)", "postbox_delivery_key (subscription=?)"],
            ),
        ]);
    }
}
