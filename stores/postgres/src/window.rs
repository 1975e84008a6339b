//! `next_batch`: page by page while the window has more, then a look for news, then the next
//! window.

use std::collections::HashSet;
use std::pin::pin;

use futures::TryStreamExt as _;
use postbox_core::kit::window_undone;
use postbox_core::limits::BATCH_EVENTS_MAX;
use postbox_core::{Batch, BatchLimit, Error, ErrorKind, Key, Lease, Result, Seq};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};

use crate::PostgresStore;
use crate::classify::{classify, has_damage_code};
use crate::decode::{EVENT_COLUMNS, Stored, stored};
use crate::due::Exceptions;
use crate::lane::{Bounds, Lane, Position};
use crate::payload::fitting;
use crate::session::COMMIT;
use crate::subscription::SubscriptionRow;

/// Windows without anything for the lane that one call passes before it answers.
const WINDOWS_PER_CALL_MAX: usize = 8;
/// Payloads up to this size may come along with their rows.
const INLINE_BYTES_MAX: usize = 16 * 1024;
/// Below this a second round trip costs more than the bytes.
const INLINE_BYTES_MIN: usize = 1024;

/// Reads a page, or opens the next window: see `0001_window.sql`, which says what it asks, writes
/// and answers.
const LANE_WINDOW: &str = "SELECT * FROM {s}.{name}_window($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)";

/// A further page of a window without stragglers, straight from the log. Index: primary key.
const WINDOW_PAGE: &str = "
SELECT {columns} FROM {log} AS l
WHERE l.seq > $7 AND l.seq <= $8 AND l.xid >= $9::text::xid8 AND pg_visible_in_snapshot(l.xid, $10::text::pg_snapshot)
  AND ($4 = 1 OR l.slot % $4 = $3) AND ($5 IS NULL OR l.topic LIKE ANY ($5)) AND ($6 IS NULL OR l.tenant = $6)
ORDER BY l.seq LIMIT $2";

/// Which of some keys are held. Index: `delivery_held`.
const KEYS_HELD: &str = "
SELECT asked.key FROM pg_catalog.unnest($2::pg_catalog.text[]) AS asked(key)
WHERE EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription {=} $1 AND d.key {=} asked.key AND d.holds)";

/// Which of some events were discarded. Index: primary key of `delivery`.
const EVENTS_DISCARDED: &str = "
SELECT d.seq FROM pg_catalog.unnest($2::bigint[]) AS asked(seq) CROSS JOIN LATERAL (
  SELECT d.seq FROM {s}.delivery AS d WHERE d.subscription {=} $1 AND d.seq {=} asked.seq AND d.state {=} 'discarded' OFFSET 0) AS d";

/// What every read of a lane asks.
pub(crate) struct ReadParams<'a> {
    pub(crate) inline_bytes: i32,
    /// One row more than wanted: whether it comes says whether there is more.
    pub(crate) rows: i64,
    pub(crate) lane: i32,
    lanes: i32,
    likes: &'a Option<Vec<String>>,
    tenant: Option<&'a str>,
    /// What the caller can hold.
    pub(crate) limit: BatchLimit,
}

impl<'a> ReadParams<'a> {
    pub(crate) fn new(lease: &Lease, subscription: &'a SubscriptionRow, limit: BatchLimit) -> Self {
        let rows = limit.events.clamp(1, BATCH_EVENTS_MAX);
        // All rows together stay within the caller's bound on bytes, whatever their payloads.
        let inline = (limit.payload_bytes / (rows + 1)).clamp(INLINE_BYTES_MIN, INLINE_BYTES_MAX);
        Self {
            inline_bytes: i32::try_from(inline).unwrap_or(i32::MAX),
            rows: rows as i64 + 1,
            lane: lease.lane.into(),
            lanes: subscription.lanes.into(),
            likes: &subscription.likes,
            tenant: subscription.tenant(),
            limit: BatchLimit { events: rows, ..limit },
        }
    }

    /// No payload comes with its row: what the server cannot give of one then fails alone.
    pub(crate) fn leave_payloads_behind(&mut self) {
        self.inline_bytes = -1;
    }
}

pub(crate) async fn next_batch(store: &PostgresStore, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
    let mut subscription = store.subscription("next_batch", &lease.subscription).await?;
    let lane = store.lane(lease);
    let _turn = lane.turn.lock().await;
    // Before anything is looked at: a commit from here on is news to the next wait.
    lane.mark_wakeups_seen();
    let session = store.session("next_batch").await?;
    let client = session.client();
    let (mut reloaded, mut inline) = (false, true);
    let batch = loop {
        let mut params = ReadParams::new(lease, &subscription, limit);
        if !inline {
            params.leave_payloads_behind();
        }
        let call = NextBatch { store, client, lease, lane: &lane, subscription: &subscription, params };
        match call.run().await {
            Err(error) if !reloaded && error.code() == FILTER_CHANGED => {
                subscription = store.reload("next_batch", client, &lease.subscription).await?;
                reloaded = true;
            }
            Err(error) if inline && has_damage_code(&error) => inline = false,
            batch => break batch,
        }
    };
    // No statement of ours leaves a transaction open when it was awaited to its end; only a dropped
    // future does.
    session.finish();
    if batch.as_ref().is_err_and(Error::is_stale) {
        lane.forget(lease.epoch);
    }
    batch
}

/// One call of `next_batch`.
struct NextBatch<'a> {
    store: &'a PostgresStore,
    client: &'a Client,
    lease: &'a Lease,
    lane: &'a Lane,
    subscription: &'a SubscriptionRow,
    params: ReadParams<'a>,
}

/// What `<log>_window` answered beside its rows.
struct Answer {
    verdict: String,
    left_stream: bool,
    place: Option<String>,
    /// The window that was opened.
    window: Option<String>,
    bounds: Option<Bounds>,
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
        })
    }
}

impl NextBatch<'_> {
    async fn run(&self) -> Result<Batch> {
        let mut at = match self.lane.position(self.lease.epoch) {
            Some(position) => position,
            None => self.load().await?,
        };
        let mut due_in = None;
        for _ in 0..WINDOWS_PER_CALL_MAX {
            let unsettled = at.settled < at.read;
            let after = if !at.drained {
                Some(at.read)
            } else if unsettled {
                // The window's last batch is not settled. Opening the next now would forget it
                // after a crash.
                Some(i64::MAX)
            } else {
                None
            };
            let (rows, answer) = self.ask(&at, after).await?;
            if let Some(window) = answer.window {
                at.enter(window.into());
            }
            if matches!(answer.verdict.as_str(), "page" | "window") {
                at.bounds = answer.bounds;
            }
            let exceptions = self.exceptions(answer.left_stream, at.read).await?;
            due_in = exceptions.due_in;
            if !rows.is_empty() {
                return self.give(at, rows, exceptions).await;
            }
            if answer.verdict == "nothing" || (at.drained && unsettled) {
                break;
            }
            at.drained = true;
            // Noted before the next is opened: a call that is dropped there loses one window at most.
            self.lane.advance(at.clone());
        }
        self.lane.advance(at);
        Ok(Batch { due_in, ..Batch::default() })
    }

    /// Begins where the database says.
    async fn load(&self) -> Result<Position> {
        let position = self.store.load_position(self.client, self.lease, self.subscription).await?;
        self.lane.advance(position.clone());
        Ok(position)
    }

    /// Reads on in the window after a place, or looks for the next window. One round trip.
    ///
    /// A window is written down before its answer counts, and before anything of it is given out.
    async fn ask(&self, at: &Position, after: Option<i64>) -> Result<(Vec<Stored>, Answer)> {
        let modes = &self.store.inner.modes;
        let bounds = at.bounds.as_ref().filter(|_| after.is_some());
        let (mode, rows_max) = match (bounds, after) {
            // The function only says whether the window is still ours.
            (Some(_), _) => (&modes.read, 0),
            (None, Some(_)) => (&modes.look, self.params.rows),
            (None, None) => (&modes.call, self.params.rows),
        };
        let (begun, called, page, committed) = futures::join!(
            self.client.batch_execute(mode),
            self.call_window(at, after, rows_max),
            self.read_page(at, bounds, after),
            self.client.batch_execute(COMMIT),
        );
        let failed = |error: tokio_postgres::Error| classify("next_batch", &error);
        begun.map_err(failed)?;
        let (mut rows, answer) = called.map_err(failed)?;
        rows.extend(page.map_err(failed)?);
        committed.map_err(failed)?;
        let answer = answer.ok_or_else(|| invalid_answer("nothing"))?;
        match answer.verdict.as_str() {
            "stale" => return Err(Error::stale("next_batch")),
            // Not to be read on under this lease, even if all that was given out is settled: calls
            // of it may still be on their way, and would settle rows by numbers that a database
            // which went back has given to other events.
            "undone" => return Err(window_undone("next_batch")),
            "changed" => return Err(filter_changed()),
            "page" | "nothing" | "window" => {}
            verdict => return Err(invalid_answer(verdict)),
        }
        if let Some(place) = &answer.place {
            self.lane.found_at(place);
        }
        Ok((rows, answer))
    }

    async fn call_window(
        &self,
        at: &Position,
        after: Option<i64>,
        rows_max: i64,
    ) -> Result<(Vec<Stored>, Option<Answer>), tokio_postgres::Error> {
        let (read, place, known) = (&self.params, self.lane.place(), &*at.window);
        let params: [(&(dyn ToSql + Sync), Type); 13] = [
            (&read.inline_bytes, Type::INT4),
            (&rows_max, Type::INT8),
            (&read.lane, Type::INT4),
            (&read.lanes, Type::INT4),
            (read.likes, Type::TEXT_ARRAY),
            (&read.tenant, Type::TEXT),
            (&self.subscription.id, Type::INT4),
            (&self.lease.epoch, Type::INT8),
            (&self.subscription.revision, Type::INT4),
            (&place, Type::TEXT),
            (&known, Type::TEXT),
            (&at.settled, Type::INT8),
            (&after, Type::INT8),
        ];
        let sql = self.store.schema().log_sql(LANE_WINDOW, &self.subscription.log);
        let mut answer = pin!(self.client.query_typed_raw(&sql, params).await?);
        let (mut rows, mut last) = (Vec::new(), None);
        while let Some(row) = answer.try_next().await? {
            match row.try_get::<_, Option<i64>>(0)? {
                Some(_) => rows.push(stored(&row)?),
                None => last = Some(Answer::from_row(&row)?),
            }
        }
        // Stragglers and the rest share no row. A stable sort finds the two runs that are there,
        // and merges them.
        rows.sort_by_key(Stored::seq);
        Ok((rows, last))
    }

    /// Rows of the window after a place. Unless the function agrees in the same transaction that the
    /// window is ours, they mean nothing.
    async fn read_page(
        &self,
        at: &Position,
        bounds: Option<&Bounds>,
        after: Option<i64>,
    ) -> Result<Vec<Stored>, tokio_postgres::Error> {
        let (Some(Bounds { low, high, xid_low }), Some(after)) = (bounds, after) else { return Ok(Vec::new()) };
        let low = after.max(*low);
        if low >= *high {
            return Ok(Vec::new());
        }
        let (read, window) = (&self.params, &*at.window);
        let params: [(&(dyn ToSql + Sync), Type); 10] = [
            (&read.inline_bytes, Type::INT4),
            (&read.rows, Type::INT8),
            (&read.lane, Type::INT4),
            (&read.lanes, Type::INT4),
            (read.likes, Type::TEXT_ARRAY),
            (&read.tenant, Type::TEXT),
            (&low, Type::INT8),
            (high, Type::INT8),
            (xid_low, Type::TEXT),
            (&window, Type::TEXT),
        ];
        let sql = self.store.schema().log_sql(WINDOW_PAGE, &self.subscription.log);
        let mut answer = pin!(self.client.query_typed_raw(&sql, params).await?);
        let mut rows = Vec::with_capacity(usize::try_from(read.rows).unwrap_or_default());
        while let Some(row) = answer.try_next().await? {
            rows.push(stored(&row)?);
        }
        Ok(rows)
    }

    async fn exceptions(&self, left_stream: bool, after: i64) -> Result<Exceptions> {
        self.store.exceptions(self.client, self.lease, self.subscription, left_stream, after).await
    }

    /// Makes a batch of what was read and remembers how far it goes.
    async fn give(&self, mut at: Position, mut rows: Vec<Stored>, exceptions: Exceptions) -> Result<Batch> {
        let found = rows.len();
        // No more than one half gives: beyond that, rows of the other may stand before rows that
        // did not come.
        rows.truncate(fitting(&rows, self.params.limit));
        let more = rows.len() < found;
        self.store.fill_payloads(self.client, &self.subscription.log, &mut rows).await?;
        let (held, discarded) = self.held_and_discarded(exceptions, &rows).await?;
        let end = rows.last().map_or(at.read, Stored::seq);
        (at.read, at.drained) = (end, !more);
        if !self.lane.advance(at) {
            if !self.lane.is_of(self.lease.epoch) {
                return Err(Error::stale("next_batch"));
            }
            // Rewound while we read: what we have is from before. The next call reads it again.
            return Ok(Batch { more: true, due_in: exceptions.due_in, ..Batch::default() });
        }
        let mut batch =
            Batch { end: Some(Seq(end)), held, discarded, more, due_in: exceptions.due_in, ..Batch::default() };
        batch.deliveries.reserve_exact(rows.len());
        rows.into_iter().for_each(|row| batch.push(row.delivery, row.unreadable));
        Ok(batch)
    }

    /// Which of the page's keys are held and which of its events were discarded; asks only if there
    /// are any.
    async fn held_and_discarded(
        &self,
        exceptions: Exceptions,
        rows: &[Stored],
    ) -> Result<(HashSet<Key>, HashSet<Seq>)> {
        let ask = async |template: &str, of: (&(dyn ToSql + Sync), Type)| {
            let sql = self.store.schema().sql(template);
            let found = self.client.query_typed(&sql, &[(&self.subscription.id, Type::INT4), of]).await;
            found.map_err(|error| classify("next_batch", &error))
        };
        let (mut held, mut discarded) = (HashSet::new(), HashSet::new());
        if exceptions.holds {
            let keys: HashSet<&str> =
                rows.iter().filter_map(|row| row.delivery.event.key.as_ref()).map(Key::as_str).collect();
            let keys: Vec<&str> = keys.into_iter().collect();
            let found = ask(KEYS_HELD, (&keys, Type::TEXT_ARRAY)).await?;
            held = found.iter().map(|row| Key::from_stored(row.get::<_, String>(0))).collect();
        }
        if exceptions.discards {
            let seqs: Vec<i64> = rows.iter().map(Stored::seq).collect();
            let found = ask(EVENTS_DISCARDED, (&seqs, Type::INT8_ARRAY)).await?;
            discarded = found.iter().map(|row| Seq(row.get(0))).collect();
        }
        Ok((held, discarded))
    }
}

/// The code of [`filter_changed`].
const FILTER_CHANGED: &str = "filter_changed";

/// Another relay brought a newer filter. Nothing was read; the caller reads by that one.
fn filter_changed() -> Error {
    let message = "the subscription's filter changes too often to be read by";
    Error::new(ErrorKind::Unavailable, "next_batch", FILTER_CHANGED, message)
}

fn invalid_answer(verdict: &str) -> Error {
    let message = format!("the schema's function answered {verdict:?}; run: postbox migrate validate");
    Error::new(ErrorKind::Internal, "next_batch", "window_invalid", message)
}
