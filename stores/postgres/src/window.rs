//! `next_batch`: reads the window page by page. When it has no more rows, it looks for new ones and
//! opens the next window.

use std::collections::HashSet;
use std::pin::pin;
use std::time::Duration;

use futures::TryStreamExt as _;
use postbox_core::kit::window_undone;
use postbox_core::limits::BATCH_EVENTS_MAX;
use postbox_core::{Batch, BatchLimit, Error, ErrorKind, Key, Lease, ReadOn, Result, Seq, Settlement};
use postbox_postgres_sql::{EVENT_COLUMNS, params};
use tokio_postgres::Row;

use crate::PostgresStore;
use crate::classify::is_damage;
use crate::decode::{Stored, stored};
use crate::lane::{Bounds, Lane, Position};
use crate::payload::{fill_payloads, fitting};
use crate::session::Session;
use crate::settle::settle;
use crate::subscription::{LANE_TAKE_FILTER, SubscriptionRow};

/// How many windows, or parts of one, without events for the lane a call passes before it returns,
/// so that it stays short.
const WINDOWS_PER_CALL_MAX: usize = 8;
/// The most places of a window that one statement looks at, whatever it finds: a tenth of a second.
const WINDOW_LOOK_MAX: i64 = 200_000;
/// How long a lane stays in its window while the log's few new rows are for other lanes. What is
/// passed may be deleted by retention, so it is passed soon.
const STAY_MAX: Duration = Duration::from_secs(1);
/// The largest payload, in bytes, that may be read with its row.
const INLINE_BYTES_MAX: usize = 16 * 1024;
/// The smallest such limit, in bytes: below this, a second round trip costs more than the bytes.
const INLINE_BYTES_MIN: usize = 1024;

/// The cursor of a lane under an epoch. Index: primary key of `lane`.
const LANE_LOAD: &str = "
SELECT to_snap::pg_catalog.text, last_seq
FROM {s}.lane
WHERE subscription {=} $1 AND lane {=} $2 AND epoch {=} $3 AND lease_until {>} pg_catalog.clock_timestamp()";

/// Reads a page, or opens the next window. `0001_window.sql` describes its arguments, writes and
/// answers.
const LANE_WINDOW: &str = "SELECT * FROM {s}.{name}_window($1, $2, $3, $4, $5, $6, $7, $8, $9::pg_catalog.text::pg_catalog.jsonb, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20)";

/// A further page of a window without stragglers, directly from the log. Index: primary key.
const WINDOW_PAGE: &str = "
SELECT {columns} FROM {log} AS l
WHERE l.seq > $7 AND l.seq <= $8 AND l.xid >= $9::text::xid8 AND pg_visible_in_snapshot(l.xid, $10::text::pg_snapshot)
  AND ($4 = 1 OR l.slot % $4 = $3) AND ($5 IS NULL OR l.topic LIKE ANY ($5)) AND ($6 IS NULL OR l.tenant = $6)
  AND ($11 IS NULL OR coalesce(l.kind, 'domain') = ANY ($11)) AND ($12 IS NULL OR l.aggregate = ANY ($12))
  AND ($13::text IS NULL OR l.headers @> $13::text::jsonb)
ORDER BY l.seq LIMIT $2";

/// The place before the next row of a window. Index: primary key.
const WINDOW_REST: &str = "
SELECT l.seq {-} 1 FROM {log} AS l WHERE l.seq {>} $1 AND l.seq {<=} $2 ORDER BY l.seq LIMIT 1";

/// Which of the given keys are held. Index: `delivery_held`, key by key behind a fence: a planner
/// that knows of no held rows joins with all of them.
pub(crate) const KEYS_HELD: &str = "
SELECT asked.key FROM pg_catalog.unnest($2::pg_catalog.text[]) AS asked(key) CROSS JOIN LATERAL (
  SELECT FROM {s}.delivery AS d WHERE d.subscription {=} $1 AND d.key {=} asked.key AND d.holds
  ORDER BY d.key, d.seq LIMIT 1 OFFSET 0) AS held";

/// Which of the given events were discarded or marked dead. Index: primary key of `delivery`.
const EVENTS_DISCARDED: &str = "
SELECT d.seq FROM pg_catalog.unnest($2::bigint[]) AS asked(seq) CROSS JOIN LATERAL (
  SELECT d.seq FROM {s}.delivery AS d WHERE d.subscription {=} $1 AND d.seq {=} asked.seq AND {is_mark} OFFSET 0) AS d";

/// The parameters of every read of a lane.
pub(crate) struct ReadParams<'a> {
    pub(crate) inline_bytes: i32,
    /// One row more than wanted, which tells whether there are more.
    pub(crate) rows: i64,
    pub(crate) lane: i32,
    lanes: i32,
    subscription: &'a SubscriptionRow,
    /// What the caller can hold.
    pub(crate) limit: BatchLimit,
}

impl<'a> ReadParams<'a> {
    pub(crate) fn new(lease: &Lease, subscription: &'a SubscriptionRow, limit: BatchLimit) -> Self {
        let rows = limit.events.clamp(1, BATCH_EVENTS_MAX);
        // All rows together stay within the caller's limit of bytes, whatever their payloads.
        let inline = (limit.payload_bytes / (rows + 1)).clamp(INLINE_BYTES_MIN, INLINE_BYTES_MAX);
        Self {
            inline_bytes: i32::try_from(inline).unwrap_or(i32::MAX),
            rows: rows as i64 + 1,
            lane: lease.lane.into(),
            lanes: subscription.lanes.into(),
            subscription,
            limit: BatchLimit { events: rows, ..limit },
        }
    }

    /// Reads no payload with its row, so that one that the server cannot return fails alone.
    pub(crate) fn leave_payloads_behind(&mut self) {
        self.inline_bytes = -1;
    }
}

/// The delivery rows of a lane: whether keys are held, whether an operator may have discarded or
/// marked unread events, and how long until the next row is due, in microseconds. Indexes:
/// `delivery_held_lane`, `delivery_mark`, `delivery_due`. No lock. A row behind an unfinished one
/// of its key is not due, whatever its time.
const LANE_EXCEPTIONS: &str = "
SELECT EXISTS (SELECT FROM {s}.delivery WHERE subscription {=} $1 AND lane {=} $2 AND holds),
  EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription {=} $1 AND d.lane {=} $2 AND {is_mark} AND d.seq {>} $3),
  (SELECT greatest(0, extract(epoch FROM d.due_at {-} pg_catalog.clock_timestamp()) {*} 1000000)::bigint
   FROM {s}.delivery AS d
   WHERE d.subscription {=} $1 AND d.lane {=} $2 AND d.due_at IS NOT NULL
     AND (NOT d.holds OR d.seq {=} (SELECT h.seq FROM {s}.delivery AS h
       WHERE h.subscription {=} d.subscription AND h.key {=} d.key AND h.holds ORDER BY h.key, h.seq LIMIT 1))
   ORDER BY d.due_at LIMIT 1)";

/// What is known of a lane's delivery rows.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Exceptions {
    holds: bool,
    discards: bool,
    pub(crate) due_in: Option<Duration>,
}

impl Exceptions {
    /// Asks only if the subscription has any delivery rows.
    pub(crate) async fn ask(
        session: &Session,
        lease: &Lease,
        subscription: i32,
        left: bool,
        after: i64,
    ) -> Result<Self> {
        if !left {
            return Ok(Self::default());
        }
        let lane = lease.lane.cast_signed();
        let row = session.row(&session.sql(LANE_EXCEPTIONS), &params![subscription, lane, after]).await?;
        let due_in = row.get::<_, Option<i64>>(2).map(|micros| Duration::from_micros(micros.unsigned_abs()));
        Ok(Self { holds: row.get(0), discards: row.get(1), due_in })
    }
}

/// Reads a page, or opens the next window. A settlement is written first. If it ends the window, it
/// is written by the call that opens the next one, once there is one.
pub(crate) async fn next_batch(
    store: &PostgresStore,
    lease: &Lease,
    settlement: Option<&Settlement<'_>>,
    limit: BatchLimit,
) -> Result<ReadOn> {
    let lane = store.lane(lease);
    let lane = &*lane;
    let _turn = lane.turn.lock().await;
    // Before anything is read: a commit from here on ends the next wait.
    lane.mark_wakeups_seen();
    let session = &store.session("next_batch").await?;
    let mut subscription = store.leased(session, lease).await?;
    let (mut reloaded, mut inline) = (false, true);
    let ends = |at: &Position, it| at.revision == subscription.revision && at.is_ended_by(it);
    let mut ending = settlement.and_then(|it| lane.position(lease.epoch).filter(|at| ends(at, it)));
    if let (Some(settlement), None) = (settlement, &ending) {
        settle(store, session, lease, settlement).await?;
    }
    let batch = loop {
        let mut params = ReadParams::new(lease, &subscription, limit);
        if !inline {
            params.leave_payloads_behind();
        }
        let read = NextBatch { store, session, lease, lane, params }.run(&mut ending).await;
        if let (Err(error), Some(settlement), Some(_)) = (&read, settlement, &ending)
            && (error.code() == FILTER_CHANGED || is_damage(error))
        {
            settle(store, session, lease, settlement).await?;
            ending = None;
        }
        match read {
            Err(error) if !reloaded && error.code() == FILTER_CHANGED => {
                // Everything that was read with the former filter is settled first, so that each
                // event is judged by one filter only.
                let Some(at) = lane.position(lease.epoch).filter(|at| at.settled == at.read) else {
                    break Ok(Batch::default());
                };
                let settled = take_filter(store, session, lease, subscription.id, &at).await?;
                subscription = store.reload(session, &lease.subscription).await?;
                // Events of the window that the former filter rejected may be wanted now.
                lane.settled(lease.epoch, Some(settled), true);
                reloaded = true;
            }
            Err(error) if inline && is_damage(&error) => inline = false,
            batch => break batch,
        }
    };
    // After an error, the caller repeats the settlement. It must not name a window that was opened
    // since.
    let is_settled = settlement.is_some() && ending.is_none();
    if batch.as_ref().is_err_and(|error| is_settled || error.is_stale()) {
        lane.forget(lease.epoch);
    }
    batch.map(|batch| ReadOn { batch, is_settled: ending.is_none() })
}

/// Switches the lane to the subscription's present filter. Returns the place to continue after.
async fn take_filter(
    store: &PostgresStore,
    session: &Session,
    lease: &Lease,
    subscription: i32,
    at: &Position,
) -> Result<i64> {
    let (lane, epoch, window, settled) = (lease.lane.cast_signed(), lease.epoch, &*at.window, at.settled);
    let sql = session.sql(LANE_TAKE_FILTER);
    let params = params![subscription, lane, epoch, window, settled];
    let take = async |session: &Session| session.rows(&sql, &params).await;
    let rows = session.at_once(&store.inner.modes.relay, take).await?;
    rows.first().map(|row| row.get(0)).ok_or_else(|| Error::stale("next_batch"))
}

/// One call of `next_batch`.
struct NextBatch<'a> {
    store: &'a PostgresStore,
    session: &'a Session,
    lease: &'a Lease,
    lane: &'a Lane,
    params: ReadParams<'a>,
}

/// What `<log>_window` returned beside its rows.
#[derive(Default)]
struct Answer {
    verdict: String,
    left_stream: bool,
    place: Option<String>,
    /// The window that was opened, if any.
    window: Option<String>,
    bounds: Option<Bounds>,
    /// How far the window was looked through, if not to its end.
    looked: Option<i64>,
}

impl Answer {
    fn from_row(row: &Row) -> Result<Self, tokio_postgres::Error> {
        let column = EVENT_COLUMNS.len();
        Ok(Self {
            verdict: row.try_get::<_, Option<String>>(column)?.unwrap_or_default(),
            left_stream: row.try_get::<_, Option<bool>>(column + 1)?.unwrap_or_default(),
            place: row.try_get(column + 2)?,
            window: row.try_get(column + 3)?,
            bounds: match row.try_get(column + 4)? {
                Some(low) => Some(Bounds { low, high: row.try_get(column + 5)?, xid_low: row.try_get(column + 6)? }),
                None => None,
            },
            looked: row.try_get(column + 7)?,
        })
    }
}

impl NextBatch<'_> {
    /// `ending`: where the lane stands, if everything that was read is delivered and not settled.
    /// `None` once it is settled.
    async fn run(&self, ending: &mut Option<Position>) -> Result<Batch> {
        let mut at = match ending.clone().or_else(|| self.lane.position(self.lease.epoch)) {
            Some(position) => position,
            None => self.load().await?,
        };
        let revision = self.params.subscription.revision;
        if at.revision != revision && at.settled < at.read {
            return Err(filter_changed());
        }
        if at.revision != revision {
            // What the former filter passed over may be wanted now.
            (at.revision, at.drained) = (revision, false);
        }
        let mut due_in = None;
        // Looked through up to here, and nothing beyond `at.read` is for the lane.
        let mut looked = at.read;
        let mut is_over = false;
        for _ in 0..WINDOWS_PER_CALL_MAX {
            let unsettled = at.settled < at.read && ending.is_none();
            let after = if !at.drained {
                Some(looked)
            } else if unsettled {
                // The window's last batch is not settled. Opening the next window now would lose it
                // after a crash.
                Some(i64::MAX)
            } else {
                None
            };
            let (rows, answer) = self.ask(&at, after, ending.is_some()).await?;
            if let Some(window) = answer.window {
                if ending.take().is_some() {
                    self.lane.settled(self.lease.epoch, Some(at.read), false);
                }
                at.enter(window.into());
                looked = at.read;
            }
            if matches!(answer.verdict.as_str(), "page" | "window") {
                at.bounds = answer.bounds.or(at.bounds);
            }
            let (session, id, left) = (self.session, self.params.subscription.id, answer.left_stream);
            let exceptions = Exceptions::ask(session, self.lease, id, left, at.read).await?;
            due_in = exceptions.due_in;
            if !rows.is_empty() {
                return self.give(at, rows, answer.looked, exceptions).await;
            }
            if let Some(place) = answer.looked {
                looked = place;
                continue;
            }
            if answer.verdict == "nothing" || (at.drained && unsettled) {
                is_over = true;
                break;
            }
            at.drained = true;
            // Recorded before the next window is opened: a call that is dropped there loses the
            // memory of one window at most.
            self.lane.advance(at.clone());
        }
        // A call that found nothing in a long stretch passes it, so that the next one looks on.
        let end = Some(looked).filter(|looked| !at.drained && *looked > at.read);
        at.read = end.unwrap_or(at.read);
        // A former holder's window may end with the last step. What came since was not looked at.
        let more = at.drained && at.opened.is_none() && !is_over;
        let is_current = self.lane.advance(at);
        Ok(Batch { end: end.filter(|_| is_current).map(Seq), more, due_in, ..Batch::default() })
    }

    /// Starts from the position in the database.
    async fn load(&self) -> Result<Position> {
        let lane = self.lease.lane.cast_signed();
        let params = params![self.params.subscription.id, lane, self.lease.epoch];
        let rows = self.session.rows(&self.session.sql(LANE_LOAD), &params).await?;
        let row = rows.first().ok_or_else(|| Error::stale("next_batch"))?;
        let position =
            Position::at(self.lease.epoch, row.get::<_, &str>(0).into(), self.params.subscription.revision, row.get(1));
        self.lane.advance(position.clone());
        Ok(position)
    }

    /// Reads on in the window after a place, or looks for the next window, in one round trip. With
    /// `settles`, the next window settles everything that was read.
    ///
    /// A window is written before its answer counts, and before any event of it is handed out.
    async fn ask(&self, at: &Position, after: Option<i64>, settles: bool) -> Result<(Vec<Stored>, Answer)> {
        let modes = &self.store.inner.modes;
        let page = after.zip(at.bounds.as_ref());
        let (mode, rows_max) = match (page, after) {
            // The function then only says whether the window is still ours.
            (Some(_), _) => (&modes.read, 0),
            (None, Some(_)) => (&modes.look, self.params.rows),
            (None, None) => (&modes.call, self.params.rows),
        };
        let calls = async |session: &Session| {
            let window = session.answer(self.call_window(at, after, rows_max, settles));
            let page = session.answer(self.read_page(at, page));
            let (window, page) = futures::join!(window, page);
            let (mut rows, mut answer) = window?;
            let (page, looked) = page?;
            rows.extend(page);
            answer.looked = answer.looked.or(looked);
            Ok((rows, answer))
        };
        let (rows, mut answer) = self.session.at_once(mode, calls).await?;
        match answer.verdict.as_str() {
            "stale" => return Err(Error::stale("next_batch")),
            // Do not read on under this lease, even if everything handed out is settled.
            // Settlements may still be on their way. After a database has gone back, they would
            // settle rows by `seq` values that now belong to other events.
            "undone" => return Err(window_undone("next_batch")),
            "changed" => return Err(filter_changed()),
            "page" | "nothing" | "window" => {}
            verdict => return Err(invalid_answer(verdict)),
        }
        if let Some(place) = &answer.place {
            self.lane.found_at(place);
        }
        if let (Some(looked), Some((_, bounds))) = (answer.looked, page)
            && (rows.len() as i64) < self.params.rows
        {
            let rest = self.session.log_sql(WINDOW_REST, &self.params.subscription.log);
            let found = self.session.rows(&rest, &params![looked, bounds.high]).await?;
            let rest = found.first().map(|row| row.get(0));
            answer.looked = if rows.is_empty() { rest } else { rest.map(|_: i64| looked) };
        }
        Ok((rows, answer))
    }

    async fn call_window(
        &self,
        at: &Position,
        after: Option<i64>,
        rows_max: i64,
        settles: bool,
    ) -> Result<(Vec<Stored>, Answer), tokio_postgres::Error> {
        let ReadParams { inline_bytes, lane, lanes, subscription, .. } = self.params;
        let (likes, tenant, headers) = (&subscription.likes, subscription.tenant(), &subscription.headers);
        let (kinds, aggregates) = (subscription.kinds(), subscription.aggregates());
        let (id, epoch, revision) = (subscription.id, self.lease.epoch, subscription.revision);
        let (place, window, settled) = (self.lane.place(), &*at.window, at.settled);
        let (settle_to, delivered) = (settles.then_some(at.read), at.given.len() as i64);
        let may_stay = at.opened.is_some_and(|opened| opened.elapsed() < STAY_MAX);
        let params = params![
            inline_bytes,
            rows_max,
            lane,
            lanes,
            likes,
            tenant,
            kinds,
            aggregates,
            headers,
            id,
            epoch,
            revision,
            place,
            window,
            settled,
            after,
            WINDOW_LOOK_MAX,
            may_stay,
            settle_to,
            delivered
        ];
        let sql = self.session.log_sql(LANE_WINDOW, &subscription.log);
        let mut found = pin!(self.session.client().query_typed_raw(&sql, params).await?);
        let (mut rows, mut answer) = (Vec::new(), Answer::default());
        while let Some(row) = found.try_next().await? {
            match stored(&row) {
                Some(stored) => rows.push(stored),
                None => answer = Answer::from_row(&row)?,
            }
        }
        // Stragglers and later rows have no row in common. A stable sort finds these two sorted
        // runs and merges them.
        rows.sort_by_key(Stored::seq);
        Ok((rows, answer))
    }

    /// Rows of the window after a place, and how far it was looked through if not to its end. They
    /// are valid only if the function confirms, in the same transaction, that the window is ours.
    async fn read_page(
        &self,
        at: &Position,
        page: Option<(i64, &Bounds)>,
    ) -> Result<(Vec<Stored>, Option<i64>), tokio_postgres::Error> {
        let Some((after, Bounds { low, high: end, xid_low })) = page else { return Ok((Vec::new(), None)) };
        let low = after.max(*low);
        if low >= *end {
            return Ok((Vec::new(), None));
        }
        let high = low.saturating_add(WINDOW_LOOK_MAX).min(*end);
        let ReadParams { inline_bytes, rows, lane, lanes, subscription, .. } = self.params;
        let (likes, tenant, headers) = (&subscription.likes, subscription.tenant(), &subscription.headers);
        let (kinds, aggregates, window) = (subscription.kinds(), subscription.aggregates(), &*at.window);
        let params = params![
            inline_bytes,
            rows,
            lane,
            lanes,
            likes,
            tenant,
            low,
            high,
            xid_low,
            window,
            kinds,
            aggregates,
            headers
        ];
        let sql = self.session.log_sql(WINDOW_PAGE, &subscription.log);
        let mut found = pin!(self.session.client().query_typed_raw(&sql, params).await?);
        let mut page = Vec::with_capacity(usize::try_from(rows).unwrap_or_default());
        while let Some(row) = found.try_next().await? {
            page.extend(stored(&row));
        }
        Ok((page, (high < *end).then_some(high)))
    }

    /// Makes a batch of the rows and records how far it goes.
    async fn give(
        &self,
        mut at: Position,
        mut rows: Vec<Stored>,
        looked: Option<i64>,
        exceptions: Exceptions,
    ) -> Result<Batch> {
        let found = rows.len();
        // No more than the page size: beyond it, rows of the one half (stragglers and later rows)
        // may come before rows of the other that were not read.
        rows.truncate(fitting(&rows, self.params.limit));
        let more = rows.len() < found;
        fill_payloads(self.session, &self.params.subscription.log, &mut rows).await?;
        for row in &mut rows {
            row.delivery.replay = self.params.subscription.replay_of(row.delivery.seq);
        }
        let (held, discarded) = self.held_and_discarded(exceptions, &rows).await?;
        let end = looked.filter(|_| !more).or(rows.last().map(Stored::seq)).unwrap_or(at.read);
        (at.read, at.drained) = (end, !more && looked.is_none());
        let caught_up = at.opened.is_some() && at.drained;
        at.given.extend(rows.iter().map(Stored::seq));
        if !self.lane.advance(at) {
            if !self.lane.is_of(self.lease.epoch) {
                return Err(Error::stale("next_batch"));
            }
            // Rewound while we read, so these rows are obsolete. The next call reads them again.
            return Ok(Batch { more: true, due_in: exceptions.due_in, ..Batch::default() });
        }
        let (end, due_in) = (Some(Seq(end)), exceptions.due_in);
        let mut batch = Batch { end, held, discarded, more, caught_up, due_in, ..Batch::default() };
        batch.deliveries.reserve_exact(rows.len());
        rows.into_iter().for_each(|row| row.into_batch(&mut batch));
        Ok(batch)
    }

    /// Which of the page's keys are held and which of its events were discarded. Asks only if the
    /// lane has any.
    async fn held_and_discarded(
        &self,
        exceptions: Exceptions,
        rows: &[Stored],
    ) -> Result<(HashSet<Key>, HashSet<Seq>)> {
        let (session, id) = (self.session, self.params.subscription.id);
        let (mut held, mut discarded) = (HashSet::new(), HashSet::new());
        if exceptions.holds {
            let keys: HashSet<&str> =
                rows.iter().filter_map(|row| row.delivery.event.key.as_ref()).map(Key::as_str).collect();
            let keys: Vec<&str> = keys.into_iter().collect();
            let found = session.rows(&session.sql(KEYS_HELD), &params![id, keys]).await?;
            held = found.iter().map(|row| Key::from_stored(row.get::<_, String>(0))).collect();
        }
        if exceptions.discards {
            let seqs: Vec<i64> = rows.iter().map(Stored::seq).collect();
            let found = session.rows(&session.sql(EVENTS_DISCARDED), &params![id, seqs]).await?;
            discarded = found.iter().map(|row| Seq(row.get(0))).collect();
        }
        Ok((held, discarded))
    }
}

/// The code of [`filter_changed`].
const FILTER_CHANGED: &str = "filter_changed";

/// The filter has changed, or the number of lanes. Nothing was read; the caller reads with the new
/// ones.
fn filter_changed() -> Error {
    let message = "the subscription's filter or lanes changed twice during one read; it is read again";
    Error::new(ErrorKind::Unavailable, "next_batch", FILTER_CHANGED, message)
}

fn invalid_answer(verdict: &str) -> Error {
    let message = format!("the schema's function answered {verdict:?}; run: postbox migrate validate");
    Error::new(ErrorKind::Internal, "next_batch", "window_invalid", message)
}
