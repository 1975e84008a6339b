//! From window to window: page by page while there is more, then a look for news, then the next window.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use postbox_core::{Batch, BatchLimit, Error, Key, Lease, Result, Seq};
use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

use super::page::{
    Exceptions, LOG_READ_REST, LOG_READ_REST_FIRST, LOG_READ_STRAGGLERS, Shared, fitting, leased, read_rows,
};
use super::reader::{LaneReader, Position, Window};
use super::subscribe::Reading;
use crate::PostgresStore;
use crate::classify::classify;
use crate::decode::{AsText, Stored};
use crate::session::COMMIT;
use crate::snapshot::Snapshot;

/// Windows without anything for the lane that one call passes before it answers.
const WINDOWS_PER_CALL_MAX: usize = 8;
/// Rows whose index entries are looked at together with the first page: some 50 ms of work. The bounds of a larger window (a backlog
/// after a long stop) are looked for once more, without a limit: some 0.3 s a million rows.
const WINDOW_ROWS_MAX: i64 = 100_000;

/// Whether anything was committed since the window ended, and what a relay wants to know when nothing was. Two probes that find nothing
/// when idle. Indexes: `(xid, seq)` of the log, primary keys of `lane` and `delivery`. No lock, no write: an idle relay costs reads only.
///
/// Transactions that are still running are left out of the ranges, so that a probe never walks what a large one has written so far.
/// The last column is false where the cursor is no longer what we wrote: a crash or a failover took it back.
/// `ORDER BY xid LIMIT 1` makes the index the cheap way even on a table without statistics.
pub(crate) const LANE_PEEK: &str = concat!(
    "WITH current AS MATERIALIZED (SELECT pg_current_snapshot() AS snap),
gap AS MATERIALIZED (
  SELECT edge AS low, lead(edge) OVER (ORDER BY edge) AS high
  FROM (SELECT $4::xid8 AS edge UNION ALL SELECT pg_snapshot_xip(snap) FROM current UNION ALL SELECT pg_snapshot_xmax(snap) FROM current) AS edges
  WHERE edge >= $4)
SELECT snap::text,
  EXISTS (SELECT FROM gap CROSS JOIN LATERAL (
    SELECT FROM {log} AS l WHERE l.xid > gap.low AND l.xid < gap.high ORDER BY l.xid LIMIT 1 OFFSET 0) AS hit),
  EXISTS (SELECT FROM unnest($5::xid8[]) AS running(xid) CROSS JOIN LATERAL (
    SELECT FROM {log} AS l WHERE l.xid = running.xid ORDER BY l.xid, l.seq LIMIT 1 OFFSET 0) AS hit
    WHERE pg_visible_in_snapshot(running.xid, snap)), ",
    leased!(),
    ",
  EXISTS (SELECT FROM {s}.delivery WHERE subscription = $1),
  EXISTS (SELECT FROM {s}.lane WHERE {place} subscription = $1 AND lane = $2 AND to_snap::text = $6 AND last_seq >= $7)
FROM current"
);

/// What a look for news brought.
enum Look {
    Nothing,
    Page(Page),
    /// The database went back to an earlier cursor: what we remember is of transactions that never were.
    Undone,
}

/// What was found of one page.
struct Page {
    rows: VecDeque<Stored>,
    /// The window has more beyond them.
    more: bool,
    exceptions: Exceptions,
}

impl PostgresStore {
    pub(crate) async fn read_stream(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        let reading = self.reading("next_batch", &lease.subscription).await?;
        let reader = self.reader(lease);
        let _turn = reader.turn.lock().await;
        // Before anything is looked at: a commit from here on is news to the next wait.
        reader.mark_stirs_seen();
        let session = self.session("next_batch").await?;
        let lane = LaneCall {
            store: self,
            client: session.client(),
            lease,
            reading: &reading,
            shared: Shared::ahead(lease, &reading, limit),
        };
        let mut batch = lane.next(&reader).await;
        if batch.as_ref().is_err_and(Error::is_stale) && reader.forget_place() {
            // Perhaps only the row was not where we looked for it.
            batch = lane.next(&reader).await;
        }
        // No statement of ours leaves a transaction open when it was awaited to its end; only a dropped future does.
        session.finish();
        if batch.as_ref().is_err_and(Error::is_stale) {
            reader.forget();
        }
        batch
    }
}

/// One call of `next_batch`.
struct LaneCall<'a> {
    store: &'a PostgresStore,
    client: &'a Client,
    lease: &'a Lease,
    reading: &'a Reading,
    shared: Shared<'a>,
}

impl LaneCall<'_> {
    async fn next(&self, reader: &LaneReader) -> Result<Batch> {
        let mut at = match reader.position(self.lease.epoch) {
            Some(position) => position,
            None => self.load(reader).await?,
        };
        let mut due_in = None;
        for _ in 0..WINDOWS_PER_CALL_MAX {
            let page = if !at.drained {
                match reader.take_ahead(&at) {
                    Some((rows, more)) => self.give_ahead(&at, rows, more).await?,
                    None => self.read_page(&at).await?,
                }
            } else if at.settled < at.read {
                // The window's last batch is not settled. Opening the next now would forget it after a crash.
                let Page { exceptions, .. } = self.give_ahead(&at, VecDeque::new(), false).await?;
                return Ok(Batch { due_in: exceptions.due_in, ..Batch::default() });
            } else {
                match self.open_next(&mut at, &mut due_in).await? {
                    Look::Page(page) => page,
                    Look::Nothing => {
                        reader.advance(at);
                        return Ok(Batch { due_in, ..Batch::default() });
                    }
                    Look::Undone => {
                        // Everything given out is settled, so nobody is surprised.
                        reader.forget();
                        at = self.load(reader).await?;
                        continue;
                    }
                }
            };
            due_in = page.exceptions.due_in;
            if page.rows.is_empty() {
                at.drained = true;
                continue;
            }
            return self.give(reader, at, page).await;
        }
        reader.advance(at);
        Ok(Batch { due_in, ..Batch::default() })
    }

    /// Begins where the database says.
    async fn load(&self, reader: &LaneReader) -> Result<Position> {
        let position = self.store.load_position(self.client, self.lease, self.reading).await?;
        reader.advance(position.clone());
        Ok(position)
    }

    /// A page of what we have already, perhaps nothing. Whether the lane is still ours is asked all the same.
    async fn give_ahead(&self, at: &Position, rows: VecDeque<Stored>, more: bool) -> Result<Page> {
        let guard = self.store.guard(self.client, self.lease, self.reading).await;
        let left = guard.map_err(|error| classify("next_batch", &error))?.ok_or_else(|| Error::stale("next_batch"))?;
        let exceptions = self.store.exceptions(self.client, self.lease, self.reading, left, at.read).await?;
        Ok(Page { rows, more, exceptions })
    }

    /// Reads on in the window. One round trip.
    async fn read_page(&self, at: &Position) -> Result<Page> {
        let Window { from, to, low, high } = &at.window;
        let (after, low) = (at.read, at.read.max(*low));
        let (xmax, snap) = (AsText(from.xmax.to_string()), AsText(to.to_string()));
        let sql = self.store.schema().log_sql(LOG_READ_REST, &self.reading.log);
        let rest = async {
            if low >= *high {
                return Ok((Vec::new(), None));
            }
            let mut params = self.shared.params();
            params.extend([
                (&low as &(dyn ToSql + Sync), Type::INT8),
                (high, Type::INT8),
                (&xmax, Type::XID8),
                (&snap, Type::PG_SNAPSHOT),
            ]);
            read_rows(self.client, &sql, params, self.shared.rows_max() + 1).await
        };
        let (begun, guard, late, rest, committed) = futures::join!(
            self.client.batch_execute(&self.store.inner.preambles.read),
            self.store.guard(self.client, self.lease, self.reading),
            self.read_stragglers(from.ended_by(to), after),
            rest,
            self.client.batch_execute(COMMIT),
        );
        let failed = |error: tokio_postgres::Error| classify("next_batch", &error);
        begun.map_err(failed)?;
        let left = guard.map_err(failed)?.ok_or_else(|| Error::stale("next_batch"))?;
        let (late, rest) = (late.map_err(failed)?, rest.map_err(failed)?.0);
        committed.map_err(failed)?;
        let exceptions = self.store.exceptions(self.client, self.lease, self.reading, left, after).await?;
        Ok(self.page(late, rest, exceptions))
    }

    /// Rows of transactions that were running when the window began, `seq` order.
    async fn read_stragglers(&self, ended: Vec<u64>, after: i64) -> Result<Vec<Stored>, tokio_postgres::Error> {
        if ended.is_empty() {
            return Ok(Vec::new());
        }
        let ended: Vec<String> = ended.iter().map(u64::to_string).collect();
        let ended = AsText::numbers(&ended);
        let sql = self.store.schema().log_sql(LOG_READ_STRAGGLERS, &self.reading.log);
        let mut params = self.shared.params();
        params.extend([(&after as &(dyn ToSql + Sync), Type::INT8), (&ended, Type::XID8_ARRAY)]);
        Ok(read_rows(self.client, &sql, params, self.shared.rows_max() + 1).await?.0)
    }

    /// Looks for news and reads the first page of the window they make; `at` becomes that window.
    ///
    /// The window is written down before `at` counts: durably if something of it is about to be given out, else without waiting for the
    /// disk.
    async fn open_next(&self, at: &mut Position, due_in: &mut Option<std::time::Duration>) -> Result<Look> {
        let from = at.window.to.clone();
        let (reading, lease) = (self.reading, self.lease);
        let place = self.store.reader(lease).place();
        let sql = self.store.schema().log_sql(LANE_PEEK, &reading.log).replace("{place}", &place);
        let lane = lease.lane.cast_signed();
        let edge = AsText(from.xmax.saturating_sub(1).to_string());
        let running: Vec<String> = from.xip.iter().map(u64::to_string).collect();
        let running = AsText::numbers(&running);
        let known = from.to_string();
        let params: [(&(dyn ToSql + Sync), Type); 7] = [
            (&reading.id, Type::INT4),
            (&lane, Type::INT2),
            (&lease.epoch, Type::INT8),
            (&edge, Type::XID8),
            (&running, Type::XID8_ARRAY),
            (&known, Type::TEXT),
            (&at.settled, Type::INT8),
        ];
        let row = self.client.query_typed_one(&sql, &params).await.map_err(|error| classify("next_batch", &error))?;
        if !row.get::<_, bool>(3) {
            return Err(Error::stale("next_batch"));
        }
        *due_in = self.store.exceptions(self.client, lease, reading, row.get(4), 0).await?.due_in;
        if !row.get::<_, bool>(5) {
            return Ok(Look::Undone);
        }
        let (rest, late): (bool, bool) = (row.get(1), row.get(2));
        if !rest && !late {
            return Ok(Look::Nothing);
        }
        let to = Snapshot::parse(row.get(0))?;
        let page =
            if from.is_zero() { self.open_whole(at, to).await? } else { self.open_between(at, to, rest).await? };
        if page.rows.is_empty() {
            at.drained = true;
            self.store.pass_window(self.client, lease, reading, at).await?;
        } else {
            self.store.open_window(self.client, lease, reading, at).await?;
        }
        Ok(Look::Page(page))
    }

    /// The first window of all: everything in the log, so its lower bound need not be looked for.
    async fn open_whole(&self, at: &mut Position, to: Snapshot) -> Result<Page> {
        let window = Window { from: at.window.to.clone(), to: Arc::new(to), low: 0, high: i64::MAX };
        at.enter(window);
        self.read_page(at).await
    }

    async fn open_between(&self, at: &mut Position, to: Snapshot, mut rest: bool) -> Result<Page> {
        let from = at.window.to.clone();
        let mut rows_max = WINDOW_ROWS_MAX;
        loop {
            let gaps = from.gaps_until(&to);
            rest = rest && !gaps.is_empty();
            let (lows, highs) = (AsText::numbers(&gaps.lows), AsText::numbers(&gaps.highs));
            let (xmax, snap) = (AsText(from.xmax.to_string()), AsText(to.to_string()));
            let sql = self.store.schema().log_sql(LOG_READ_REST_FIRST, &self.reading.log);
            let first = async {
                if !rest {
                    return Ok((Vec::new(), None));
                }
                let mut params = self.shared.params();
                params.extend([
                    (&lows as &(dyn ToSql + Sync), Type::XID8_ARRAY),
                    (&highs, Type::XID8_ARRAY),
                    (&xmax, Type::XID8),
                    (&snap, Type::PG_SNAPSHOT),
                    (&rows_max, Type::INT8),
                ]);
                read_rows(self.client, &sql, params, self.shared.rows_max() + 1).await
            };
            let (begun, guard, late, first, committed) = futures::join!(
                self.client.batch_execute(&self.store.inner.preambles.read),
                self.store.guard(self.client, self.lease, self.reading),
                self.read_stragglers(from.ended_by(&to), 0),
                first,
                self.client.batch_execute(COMMIT),
            );
            let failed = |error: tokio_postgres::Error| classify("next_batch", &error);
            begun.map_err(failed)?;
            let left = guard.map_err(failed)?.ok_or_else(|| Error::stale("next_batch"))?;
            let (late, (first, bounds)) = (late.map_err(failed)?, first.map_err(failed)?);
            committed.map_err(failed)?;
            if bounds.is_some_and(|bounds| bounds.size >= rows_max) {
                // The bounds of a part are no bounds. The window itself cannot be made smaller: a snapshot cut at some transaction's id is no
                // moment of the database, and would show a later commit with an early id before what it follows.
                rows_max = i64::MAX;
                continue;
            }
            let exceptions = self.store.exceptions(self.client, self.lease, self.reading, left, 0).await?;
            let (low, high) = bounds.map_or((0, 0), |bounds| (bounds.low, bounds.high));
            at.enter(Window { from, to: Arc::new(to), low, high });
            return Ok(self.page(late, first, exceptions));
        }
    }

    /// Both halves of a page in one order. Each is ordered, and they share no row.
    fn page(&self, mut late: Vec<Stored>, mut rest: Vec<Stored>, exceptions: Exceptions) -> Page {
        if late.is_empty() {
            std::mem::swap(&mut late, &mut rest);
        }
        late.append(&mut rest);
        // A stable sort finds the runs that are there, and merges them.
        late.sort_by_key(Stored::seq);
        // Beyond what one half gives at most, rows of the other may stand before rows that did not come.
        let more = late.len() > self.shared.rows_max();
        late.truncate(self.shared.rows_max());
        Page { rows: late.into(), more, exceptions }
    }

    /// Makes a batch of a page's beginning and remembers how far it goes.
    async fn give(&self, reader: &LaneReader, mut at: Position, page: Page) -> Result<Batch> {
        let Page { rows: mut ahead, more: more_beyond, exceptions } = page;
        let fitting = fitting(&ahead, self.shared.limit);
        let mut rows: Vec<Stored> = ahead.drain(..fitting).collect();
        self.store.fill_payloads(self.client, &self.reading.log, &mut rows).await?;
        let (held, discarded) = self.store.held_and_discarded(self.client, self.reading, exceptions, &rows).await?;
        let more = more_beyond || !ahead.is_empty();
        let end = rows.last().map(Stored::seq).unwrap_or(at.read);
        at.read = end;
        at.drained = !more;
        if !reader.advance(at.clone()) {
            // Rewound while we read: what we have is from before. The next call reads it again.
            return Ok(Batch { more: true, due_in: exceptions.due_in, ..Batch::default() });
        }
        reader.keep_ahead(&at, ahead, more_beyond);
        Ok(Batch {
            deliveries: rows.into_iter().map(|row| row.delivery).collect(),
            end: Some(Seq(end)),
            held: held.into_iter().map(Key::from_stored).collect(),
            discarded: discarded.into_iter().map(Seq).collect::<HashSet<_>>(),
            more,
            due_in: exceptions.due_in,
        })
    }
}

impl Position {
    fn enter(&mut self, window: Window) {
        self.window = window;
        (self.settled, self.read, self.drained) = (0, 0, false);
    }
}
