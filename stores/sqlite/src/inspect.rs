//! What an operator sees. Reads have their own connection and delay no delivery.

use std::collections::BTreeMap;

use async_trait::async_trait;
use postbox_core::kit::{BatchLimiter, Share, attempts_from_json};
use postbox_core::{
    Conflict, Count, EventId, Filter, Inspect, LaneInfo, ListQuery, LogName, OwnerId, Record, Result, Seq, SourceName,
    State, Stats, SubscriptionInfo, SubscriptionName, Unrouted,
};
use rusqlite::{Row, Transaction, params};

use crate::classify::Work;
use crate::clock::{timestamp, until};
use crate::decode::{
    COLUMNS_WITHOUT_PAYLOAD, DELIVERY_COLUMNS, DELIVERY_COLUMNS_COUNT, Decoded, DeliveryRow, Head, LOG_COLUMNS,
    LOG_COLUMNS_COUNT, WALK_COLUMNS, integer, is_meant, is_payload_left_out, log_find, seq,
};
use crate::depth;
use crate::lease::{self, SubscriptionRow, crashes_in_a_row};
use crate::migrate::{log_names, require_log};
use crate::schema::log_table;
use crate::store::SqliteStore;
use crate::thread::Session;
use crate::unrouted::{count_unrouted, is_unrouted};

/// How many rows one step of a list looks at: bounds how long its snapshot lasts, not its result.
const LIST_LOOK_MAX: usize = 20_000;

/// By primary key; no lock.
const SUBSCRIPTION_NAMES: &str = "SELECT name FROM postbox_subscription ORDER BY name";
/// By primary key; no lock.
const LANES_READ: &str = concat!(
    "SELECT lane, epoch, owner, lease_until, position, revision, ",
    crashes_in_a_row!(),
    " FROM postbox_lane WHERE subscription = ?1 ORDER BY lane"
);
/// How far lanes came with former filters, by primary key; no lock.
const PASSAGES_READ: &str =
    "SELECT revision, lanes, lane, position FROM postbox_passage WHERE subscription = ?1 ORDER BY revision";
/// By primary key; no lock.
const SENT_HAS: &str = "SELECT 1 FROM postbox_sent WHERE subscription = ?1 AND seq = ?2";
/// Whether a leased lane has yet to take over a filter, by primary key; no lock.
const LANE_BEHIND: &str =
    "SELECT EXISTS (SELECT 1 FROM postbox_lane WHERE subscription = ?1 AND revision <> ?2 AND lease_until > ?3)";
/// By `postbox_conflict_age`; no lock.
const CONFLICT_LIST: &str = "SELECT source, tenant, message_id, digest_stored, digest_refused, times, first_at, last_at FROM postbox_conflict \
ORDER BY last_at DESC LIMIT ?1";

#[async_trait]
impl Inspect for SqliteStore {
    async fn subscriptions(&self) -> Result<Vec<SubscriptionInfo>> {
        self.inspector().call("subscriptions", subscriptions).await
    }

    async fn stats_of(&self, subscriptions: &[SubscriptionName]) -> Vec<Result<Stats>> {
        let share = Share::of_one_of(subscriptions.len());
        let mut all = Vec::with_capacity(subscriptions.len());
        for name in subscriptions {
            let name = name.clone();
            let stats = move |session: &mut Session| {
                let now = session.settings.now();
                let tx = session.read()?;
                depth::stats(&tx, &Reader::find("stats", &tx, &name)?, share, now)
            };
            all.push(self.inspector().call("stats", stats).await);
        }
        all
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<Record>> {
        let mut listing = Listing::new(query.clone());
        // Each step is a job of its own, so that the other readers get their turn.
        while !listing.is_over {
            listing = self.inspector().call("list", move |session| listing.step(&session.read()?)).await?;
        }
        Ok(listing.records)
    }

    async fn get(&self, subscription: &SubscriptionName, id: EventId) -> Result<Option<Record>> {
        let name = subscription.clone();
        self.inspector().call("get", move |session| get(session, &name, id)).await
    }

    async fn conflicts(&self, limit: usize) -> Result<Vec<Conflict>> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        self.inspector().call("conflicts", move |session| conflicts(session, limit)).await
    }

    async fn logs(&self) -> Result<Vec<LogName>> {
        let names = self.inspector().call("logs", |session| log_names(session.connection()?)).await?;
        names.iter().map(|name| name.parse()).collect()
    }

    async fn unrouted(&self, log: &LogName) -> Result<Unrouted> {
        let log = log.clone();
        self.inspector().call("unrouted", move |session| count_unrouted(session, &log)).await
    }

    async fn count(&self, log: &LogName) -> Result<Count> {
        let log = log.clone();
        let counted = move |session: &mut Session| {
            let tx = session.read()?;
            let log = require_log("count", &tx, &log)?;
            depth::count_events(&tx, &log_table(&log))
        };
        self.inspector().call("count", counted).await
    }
}

fn names(tx: &Transaction<'_>) -> Work<Vec<SubscriptionName>> {
    let names: Vec<String> =
        tx.prepare_cached(SUBSCRIPTION_NAMES)?.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
    Ok(names.into_iter().map(SubscriptionName::from_stored).collect())
}

fn subscriptions(session: &mut Session) -> Work<Vec<SubscriptionInfo>> {
    let now = session.settings.now();
    let tx = session.read()?;
    let names = names(&tx)?;
    let mut infos = Vec::with_capacity(names.len());
    for name in names {
        let stored = lease::require("subscriptions", &tx, &name)?;
        let lanes = tx
            .prepare_cached(LANES_READ)?
            .query_map([name.as_str()], |row| {
                let owner: Option<String> = row.get(2)?;
                let left = until(now, row.get(3)?);
                Ok(LaneInfo {
                    lane: row.get(0)?,
                    epoch: row.get(1)?,
                    owner: owner.map(OwnerId::from_stored),
                    lease_left: (!left.is_zero()).then_some(left),
                    crashes: row.get(6)?,
                })
            })?
            .collect::<Result<_, _>>()?;
        let paused = stored.paused(now).cloned();
        let SubscriptionRow { log, filter, ordering, generation, .. } = stored;
        infos.push(SubscriptionInfo { name, log, filter, ordering, generation, lanes, paused });
    }
    Ok(infos)
}

/// A subscription with the positions of its lanes: all that decides between pending and dispatched.
pub(crate) struct Reader {
    pub(crate) name: SubscriptionName,
    pub(crate) stored: SubscriptionRow,
    pub(crate) table: String,
    lanes: Vec<LaneRead>,
    /// How far lanes came with former filters, by revision.
    passages: Vec<Passage>,
    /// Every filter that the subscription had, by revision.
    filters: BTreeMap<i64, Filter>,
}

/// How far a lane has read, and with which filter.
struct LaneRead {
    position: i64,
    revision: i64,
}

/// How far a lane came with a former filter, and which of how many lanes it was.
struct Passage {
    revision: i64,
    lanes: u16,
    lane: u16,
    position: i64,
}

impl Reader {
    pub(crate) fn find(operation: &'static str, tx: &Transaction<'_>, name: &SubscriptionName) -> Work<Self> {
        let stored = lease::require(operation, tx, name)?;
        let lanes = tx
            .prepare_cached(LANES_READ)?
            .query_map([name.as_str()], |row| Ok(LaneRead { position: row.get(4)?, revision: row.get(5)? }))?
            .collect::<Result<_, _>>()?;
        let passage = |row: &Row<'_>| {
            Ok(Passage { revision: row.get(0)?, lanes: row.get(1)?, lane: row.get(2)?, position: row.get(3)? })
        };
        let passages =
            tx.prepare_cached(PASSAGES_READ)?.query_map([name.as_str()], passage)?.collect::<Result<_, _>>()?;
        let filters = lease::filters(tx, name)?;
        Ok(Self { name: name.clone(), table: log_table(&stored.log), stored, lanes, passages, filters })
    }

    /// Whether it takes every event beyond a place: no lane has passed one with a former filter.
    pub(crate) fn takes_everything(&self, beyond: i64) -> bool {
        self.stored.filter == Filter::default()
            && self.passages.iter().all(|passage| passage.position <= beyond)
            && !self.is_behind(beyond)
    }

    /// Whether a lane that is beyond a place has yet to take over the present filter.
    fn is_behind(&self, beyond: i64) -> bool {
        self.lanes.iter().any(|lane| lane.revision != self.stored.revision && lane.position > beyond)
    }

    /// Whether it gets an event that was unrouted, now that its filter is compared again.
    pub(crate) fn is_given(&self, head: &Head<'_>, seq: i64) -> bool {
        self.wants(head) && self.is_judged(head, seq)
    }

    /// Whether a leased lane has yet to take over the present filter.
    pub(crate) fn changes_filter(&self, tx: &Transaction<'_>, now: i64) -> Work<bool> {
        let row = params![self.name.as_str(), self.stored.revision, now];
        Ok(tx.prepare_cached(LANE_BEHIND)?.query_row(row, |row| row.get(0))?)
    }

    /// The place up to which every lane has passed everything.
    pub(crate) fn position_min(&self) -> i64 {
        self.lanes.iter().map(|lane| lane.position).min().unwrap_or(0)
    }

    /// The place beyond which no lane has passed anything.
    pub(crate) fn position_max(&self) -> i64 {
        self.lanes.iter().map(|lane| lane.position).max().unwrap_or(0)
    }

    pub(crate) fn lane(&self, head: &Head<'_>) -> u16 {
        head.lane(self.stored.lanes)
    }

    pub(crate) fn wants(&self, head: &Head<'_>) -> bool {
        head.is_wanted_by(&self.stored.filter)
    }

    /// The state of a row without a delivery row, as far as one subscription knows: `Skipped` may
    /// be `Unrouted`.
    ///
    /// What decides is the filter that its lane passed the event with, or will read it with.
    pub(crate) fn state(&self, head: &Head<'_>, seq: i64) -> State {
        let passed_by = self.passed_by(head, seq);
        let filter = self.filters.get(&passed_by.unwrap_or(self.stored.revision));
        let is_taken = filter.is_some_and(|filter| head.is_wanted_by(filter));
        match (is_taken, passed_by) {
            (false, _) => State::Skipped,
            (true, Some(_)) => State::Dispatched,
            (true, None) => State::Pending,
        }
    }

    /// The revision of the filter that its lane passed a row with. There is no filter for what lies
    /// before the subscription's start.
    fn passed_by(&self, head: &Head<'_>, seq: i64) -> Option<i64> {
        let lane = self.lanes.get(usize::from(self.lane(head))).filter(|lane| seq <= lane.position)?;
        let covers = |it: &&Passage| seq <= it.position && it.lane == head.lane(it.lanes);
        Some(self.passages.iter().find(covers).map_or(lane.revision, |it| it.revision))
    }

    /// Whether it was sent every event that it passed: it takes everything, and always did.
    pub(crate) fn skips_nothing(&self) -> bool {
        self.takes_everything(0) && self.lanes.iter().all(|lane| lane.revision == self.stored.revision)
    }

    /// Whether its lane has passed a row.
    pub(crate) fn has_passed(&self, head: &Head<'_>, seq: i64) -> bool {
        self.passed_by(head, seq).is_some()
    }

    /// Whether a filter accepted or rejected a row, or will. False for rows before the
    /// subscription's start.
    pub(crate) fn is_judged(&self, head: &Head<'_>, seq: i64) -> bool {
        self.passed_by(head, seq).is_none_or(|revision| self.filters.contains_key(&revision))
    }

    /// Whether a lane came beyond a place with a former filter.
    pub(crate) fn had_another_filter(&self, beyond: i64) -> bool {
        self.passages.iter().any(|it| it.revision > 0 && it.position > beyond) || self.is_behind(beyond)
    }

    /// Like [`Self::state`], for a row that was found: also checks whether it was sent later all
    /// the same, or is unrouted.
    pub(crate) fn state_found(&self, tx: &Transaction<'_>, head: &Head<'_>, seq: i64) -> Work<State> {
        Ok(match self.state(head, seq) {
            State::Skipped if tx.prepare_cached(SENT_HAS)?.exists(params![self.name.as_str(), seq])? => {
                State::Dispatched
            }
            State::Skipped if is_unrouted(tx, &self.stored.log, seq)? => State::Unrouted,
            // A former version skipped it.
            State::Dispatched if head.is_unparsable() && is_unrouted(tx, &self.stored.log, seq)? => State::Unrouted,
            state => state,
        })
    }
}

/// Returns a log with events that a subscription has still to deliver, that are dead or were found
/// unrouted, or that has events and no subscription.
pub(crate) fn undelivered(tx: &Transaction<'_>) -> Work<Option<String>> {
    let mut unread = log_names(tx)?;
    for name in names(tx)? {
        let reader = Reader::find("migrate", tx, &name)?;
        unread.retain(|log| log != reader.stored.log.as_str());
        if depth::is_undelivered(tx, &reader)? {
            return Ok(Some(reader.stored.log.to_string()));
        }
    }
    for log in unread {
        let log_any = format!("SELECT EXISTS (SELECT 1 FROM {})", log_table(&LogName::new(log.as_str())?));
        if tx.query_row(&log_any, [], |row| row.get(0))? {
            return Ok(Some(log));
        }
    }
    Ok(None)
}

/// Reads a `count(*)`, which is never negative.
pub(crate) fn count(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    Ok(row.get::<_, i64>(column)?.unsigned_abs())
}

/// Makes a record without a delivery row.
fn record(decoded: Decoded, state: State) -> Record {
    let (code, error) = decoded.unreadable.map(|why| (why.code.into_owned(), why.error)).unzip();
    let (event, seq) = (decoded.event, Seq(decoded.seq));
    let (due_at, updated_at, last_attempts) = (None, None, Vec::new());
    Record { event, seq, state, attempts: 0, replays: 0, due_at, code, error, updated_at, last_attempts }
}

/// Makes a record with a delivery row, which continues in columns `at` and the next two: error,
/// time and attempts.
fn record_of(decoded: Decoded, delivery: DeliveryRow, row: &Row<'_>, at: usize) -> rusqlite::Result<Record> {
    let record = record(decoded, delivery.state);
    Ok(Record {
        attempts: delivery.attempts,
        replays: delivery.replays,
        due_at: delivery.due_at.map(timestamp),
        // What a relay recorded of the event has precedence; otherwise the fault found here is
        // reported.
        code: delivery.code.or(record.code),
        error: row.get::<_, Option<String>>(at)?.or(record.error),
        updated_at: Some(timestamp(row.get(at + 1)?)),
        last_attempts: attempts_from_json(&row.get::<_, String>(at + 2)?),
        ..record
    })
}

fn conflicts(session: &mut Session, limit: i64) -> Work<Vec<Conflict>> {
    let tx = session.read()?;
    let mut statement = tx.prepare_cached(CONFLICT_LIST)?;
    let mut rows = statement.query(params![limit])?;
    let mut conflicts = Vec::new();
    while let Some(row) = rows.next()? {
        conflicts.push(Conflict {
            source: SourceName::from_stored(row.get::<_, String>(0)?),
            tenant: Some(row.get::<_, String>(1)?).filter(|tenant| !tenant.is_empty()),
            message_id: row.get(2)?,
            digest_stored: row.get(3)?,
            digest_refused: row.get(4)?,
            times: count(row, 5)?,
            first_at: timestamp(row.get(6)?),
            last_at: timestamp(row.get(7)?),
        });
    }
    Ok(conflicts)
}

/// A list that is read in steps. A snapshot that lasts keeps every checkpoint from the rows that
/// were written after it, so that the write-ahead log grows.
struct Listing {
    /// What to list, after the place that was looked at last.
    query: ListQuery,
    limiter: BatchLimiter,
    records: Vec<Record>,
    is_over: bool,
}

impl Listing {
    fn new(query: ListQuery) -> Self {
        // Only a delivery row has a code.
        let is_over = query.code.is_some() && query.state.is_some_and(|state| !state.has_row());
        Self { limiter: BatchLimiter::new(query.page()), query, records: Vec::new(), is_over }
    }

    /// Looks at the next rows, in one snapshot.
    fn step(mut self, tx: &Transaction<'_>) -> Work<Self> {
        let reader = Reader::find("list", tx, &self.query.subscription)?;
        let (walk, [after, before]) = self.walk(&reader);
        let (mut statement, mut find) = (tx.prepare_cached(&walk)?, log_find(tx, &reader.table)?);
        let mut rows = statement.query(params![reader.name.as_str(), after, before])?;
        let asked = Filter { headers: self.query.headers.clone(), ..Filter::default() };
        let mut looked = 0;
        while !self.limiter.is_full()
            && let Some(row) = rows.next()?
        {
            let has_row = row.get::<_, Option<i64>>(LOG_COLUMNS_COUNT)?.is_some();
            let delivery = has_row.then(|| DeliveryRow::read(row, LOG_COLUMNS_COUNT)).transpose()?;
            let place = delivery.as_ref().map_or_else(|| seq(row), |delivery| Ok(delivery.seq))?;
            let (head, is_gone) = (Head::read(row)?, integer(row, 0)?.is_none());
            let code = delivery.as_ref().and_then(|delivery| delivery.code.as_ref());
            let is_asked = (self.query.code.is_none() || code == self.query.code.as_ref())
                && (is_gone || (is_meant(&self.query.which, row, &head)? && head.is_wanted_by(&asked)));
            if is_asked {
                let state = match &delivery {
                    Some(delivery) => delivery.state,
                    None => reader.state_found(tx, &head, place)?,
                };
                if self.query.state.is_none_or(|wanted| wanted == state) {
                    let mut found = find.query([place])?;
                    let event = if is_payload_left_out(row)? { found.next()? } else { Some(row) };
                    if !self.take(event, state, delivery, row)? {
                        break;
                    }
                }
            }
            (self.query.after, looked) = (Some(Seq(place)), looked + 1);
            if looked == LIST_LOOK_MAX {
                return Ok(self);
            }
        }
        self.is_over = true;
        Ok(self)
    }

    /// The statement that walks what may be listed, and the two places between which it walks. It
    /// selects [`WALK_COLUMNS`], or [`COLUMNS_WITHOUT_PAYLOAD`], then those of [`record_of`].
    fn walk(&self, reader: &Reader) -> (String, [i64; 2]) {
        let (log, after) = (&reader.table, self.query.after.map(|seq| seq.0));
        let columns = if self.query.payloads { WALK_COLUMNS } else { COLUMNS_WITHOUT_PAYLOAD };
        let columns = format!("{columns}, {DELIVERY_COLUMNS}, d.error, d.updated_at, d.last_attempts");
        // Walks the log's primary key, then that of `postbox_delivery`; no lock.
        let log_list = format!(
            "SELECT {columns} FROM {log} l LEFT JOIN postbox_delivery d ON d.subscription = ?1 AND d.seq = l.seq \
             WHERE l.seq > ?2 AND l.seq < ?3 ORDER BY l.seq"
        );
        let from = after.unwrap_or(0);
        match self.query.state {
            None => (format!("{log_list} DESC"), [i64::MIN, after.unwrap_or(i64::MAX)]),
            // By `postbox_delivery_state`, then the log's primary key; no lock.
            Some(state) if state.has_row() => {
                let delivery_list = format!(
                    "SELECT {columns} FROM postbox_delivery d INDEXED BY postbox_delivery_state LEFT JOIN {log} l ON l.seq = d.seq \
                     WHERE d.subscription = ?1 AND d.state = '{state}' AND d.seq > ?2 AND d.seq < ?3 ORDER BY d.seq"
                );
                (delivery_list, [from, i64::MAX])
            }
            Some(State::Pending) => (log_list, [from.max(reader.position_min()), i64::MAX]),
            Some(State::Dispatched) => (log_list, [from, reader.position_max().saturating_add(1)]),
            Some(_) => (log_list, [from, i64::MAX]),
        }
    }

    /// False if it does not fit. `event` is the row of [`LOG_COLUMNS`], `row` that of the walk.
    fn take(
        &mut self,
        event: Option<&Row<'_>>,
        state: State,
        delivery: Option<DeliveryRow>,
        row: &Row<'_>,
    ) -> rusqlite::Result<bool> {
        let decoded = match (event, &delivery) {
            (Some(event), _) => Decoded::read(event)?,
            (None, Some(delivery)) => Decoded::missing(delivery),
            // One snapshot shows both rows of a log, or none.
            (None, None) => return Ok(true),
        };
        if !self.query.which.mean_event(Some(&decoded.event)) || !self.query.has_headers(&decoded.event) {
            return Ok(true);
        }
        let fits = self.limiter.take(decoded.event.payload.len());
        if fits {
            self.records.push(match delivery {
                Some(delivery) => record_of(decoded, delivery, row, LOG_COLUMNS_COUNT + DELIVERY_COLUMNS_COUNT)?,
                None => record(decoded, state),
            });
        }
        Ok(fits)
    }
}

fn get(session: &mut Session, name: &SubscriptionName, id: EventId) -> Work<Option<Record>> {
    let tx = session.read()?;
    let reader = Reader::find("get", &tx, name)?;
    // By the unique index on id; no lock.
    let log_get = format!("SELECT {LOG_COLUMNS} FROM {} l WHERE l.id = ?1", reader.table);
    let mut statement = tx.prepare_cached(&log_get)?;
    let mut rows = statement.query([id.to_string()])?;
    let Some(row) = rows.next()? else { return Ok(None) };
    let decoded = Decoded::read(row)?;
    // A row by primary key; no lock.
    let delivery_get = format!(
        "SELECT {DELIVERY_COLUMNS}, d.error, d.updated_at, d.last_attempts FROM postbox_delivery d WHERE d.subscription = ?1 AND d.seq = ?2"
    );
    let mut statement = tx.prepare_cached(&delivery_get)?;
    let mut deliveries = statement.query(params![name.as_str(), decoded.seq])?;
    Ok(Some(match deliveries.next()? {
        Some(delivery) => record_of(decoded, DeliveryRow::read(delivery, 0)?, delivery, DELIVERY_COLUMNS_COUNT)?,
        None => {
            let state = reader.state_found(&tx, &Head::read(row)?, decoded.seq)?;
            record(decoded, state)
        }
    }))
}

#[cfg(test)]
mod tests {
    use postbox_core::{Criteria, Headers};

    use super::*;
    use crate::plans::database;

    #[test]
    fn a_step_of_a_list_looks_at_a_bounded_part_of_the_log() {
        let mut database = database();
        let fill = format!(
            "INSERT INTO postbox_subscription (name, log, topics, ordering, lanes, generation, created_at) \
             VALUES ('s', 'outbox', '[]', 'key', 1, 0, 0); \
             INSERT INTO postbox_outbox (topic, payload) \
             WITH RECURSIVE n(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < {LIST_LOOK_MAX} + 5) SELECT 't', '' FROM n"
        );
        database.execute_batch(&fill).expect("filled");
        let tx = database.transaction().expect("begun");
        let which = Criteria { topic: Some("rare".parse().expect("a pattern")), ..Criteria::default() };
        let (subscription, headers) = ("s".parse().expect("a name"), Headers::new());
        let (state, code, after, limit, payloads) = (None, None, None, 10, true);
        let query = ListQuery { subscription, state, which, code, headers, after, limit, payloads };
        let listing = Listing::new(query).step(&tx).expect("looked");
        assert_eq!((listing.is_over, listing.query.after), (false, Some(Seq(6))), "the newest first");
        let listing = listing.step(&tx).expect("looked");
        assert_eq!((listing.is_over, listing.records.len()), (true, 0));
    }
}
