//! From window to window: page by page while there is more, then a look for news, then the next window.

use std::collections::{HashSet, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt as _;
use postbox_core::{Batch, BatchLimit, Error, ErrorKind, Key, Lease, Result, Seq};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};

use super::page::{Exceptions, LOG_READ_REST, LOG_READ_STRAGGLERS, Shared, fitting, read_rows};
use super::reader::{LaneReader, Position, Window};
use super::subscribe::Reading;
use crate::PostgresStore;
use crate::classify::{classify, told_damage};
use crate::decode::{AsText, EVENT_COLUMNS, Stored, stored};
use crate::session::COMMIT;
use crate::snapshot::Snapshot;

/// Windows without anything for the lane that one call passes before it answers.
const WINDOWS_PER_CALL_MAX: usize = 8;

/// Looks for news and opens the next window: see `0001_window.sql`, which says what it asks, writes and answers.
const LANE_WINDOW: &str = "SELECT * FROM {s}.{name}_window($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)";

/// What a look brought.
enum Look {
    Nothing,
    Page(Page),
    /// The cursor is not what we remember: the database went back to an earlier one, or a call of ours whose answer was lost moved it on.
    Undone,
}

/// What `{name}_window` answered beside its rows.
struct Opened {
    verdict: String,
    left_stream: bool,
    place: Option<String>,
    to: Option<String>,
    low: Option<i64>,
    high: Option<i64>,
}

impl Opened {
    fn from_row(row: &Row) -> Result<Self, tokio_postgres::Error> {
        let column = EVENT_COLUMNS;
        Ok(Self {
            verdict: row.try_get::<_, Option<String>>(column)?.unwrap_or_default(),
            left_stream: row.try_get::<_, Option<bool>>(column + 1)?.unwrap_or_default(),
            place: row.try_get(column + 2)?,
            to: row.try_get(column + 3)?,
            low: row.try_get(column + 4)?,
            high: row.try_get(column + 5)?,
        })
    }
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
        let mut reading = self.reading("next_batch", &lease.subscription).await?;
        let reader = self.reader(lease);
        let _turn = reader.turn.lock().await;
        // Before anything is looked at: a commit from here on is news to the next wait.
        reader.mark_stirs_seen();
        let session = self.session("next_batch").await?;
        let client = session.client();
        let (mut reloaded, mut inline) = (false, true);
        let batch = loop {
            let mut lane = LaneCall::new(self, client, lease, &reading, limit);
            if !inline {
                lane.shared.leave_payloads_behind();
            }
            match lane.next(&reader).await {
                Err(error) if !reloaded && error.code() == FILTER_CHANGED => {
                    reading = self.reload("next_batch", client, &lease.subscription).await?;
                    reloaded = true;
                }
                Err(error) if inline && told_damage(&error) => inline = false,
                batch => break batch,
            }
        };
        // No statement of ours leaves a transaction open when it was awaited to its end; only a dropped future does.
        session.finish();
        if batch.as_ref().is_err_and(Error::is_stale) {
            reader.forget(lease.epoch);
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

impl<'a> LaneCall<'a> {
    fn new(
        store: &'a PostgresStore,
        client: &'a Client,
        lease: &'a Lease,
        reading: &'a Reading,
        limit: BatchLimit,
    ) -> Self {
        Self { store, client, lease, reading, shared: Shared::ahead(lease, reading, limit) }
    }

    async fn next(&self, reader: &LaneReader) -> Result<Batch> {
        let mut at = match reader.position(self.lease.epoch) {
            Some(position) => position,
            None => self.load(reader).await?,
        };
        let mut due_in = None;
        for _ in 0..WINDOWS_PER_CALL_MAX {
            let unsettled = at.settled < at.read;
            let look = if !at.drained {
                match reader.take_ahead(&at) {
                    Some((rows, more)) => self.give_ahead(&at, rows, more).await?,
                    None => self.read_page(&at).await?,
                }
            } else if unsettled {
                // The window's last batch is not settled. Opening the next now would forget it after a crash.
                match self.give_ahead(&at, VecDeque::new(), false).await? {
                    Look::Page(page) => return Ok(Batch { due_in: page.exceptions.due_in, ..Batch::default() }),
                    other => other,
                }
            } else {
                self.open_next(&mut at, &mut due_in).await?
            };
            let page = match look {
                Look::Page(page) => page,
                Look::Nothing => {
                    reader.advance(at);
                    return Ok(Batch { due_in, ..Batch::default() });
                }
                // Not to be read on under this lease, even if all that was given out is settled: calls of it may still be on their way, and would
                // settle rows by numbers that a database which went back has given to other events.
                Look::Undone => return Err(undone("next_batch")),
            };
            due_in = page.exceptions.due_in;
            if page.rows.is_empty() {
                at.drained = true;
                // Noted before the next is opened: a settlement beside us may be one window behind the database, no more.
                reader.advance(at.clone());
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
    async fn give_ahead(&self, at: &Position, rows: VecDeque<Stored>, more: bool) -> Result<Look> {
        let guarded = self.store.guard(self.client, self.lease, self.reading, Some(at)).await?;
        if !guarded.same_window {
            return Ok(Look::Undone);
        }
        if !guarded.same_filter {
            return Err(filter_changed());
        }
        let exceptions = self.exceptions(guarded.left_stream, at.read).await?;
        Ok(Look::Page(Page { rows, more, exceptions }))
    }

    async fn exceptions(&self, left_stream: bool, after: i64) -> Result<Exceptions> {
        self.store.exceptions(self.client, self.lease, self.reading, left_stream, after).await
    }

    /// Reads on in the window. One round trip.
    async fn read_page(&self, at: &Position) -> Result<Look> {
        let Window { from, to, low, high } = &at.window;
        let (after, low) = (at.read, at.read.max(*low));
        let (xmax, snap) = (AsText(from.xmax.to_string()), AsText(to.to_string()));
        let sql = self.store.schema().log_sql(LOG_READ_REST, &self.reading.log);
        let rest = async {
            if low >= *high {
                return Ok(Vec::new());
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
        let (begun, guarded, late, rest, committed) = futures::join!(
            self.client.batch_execute(&self.store.inner.preambles.read),
            self.store.guard(self.client, self.lease, self.reading, Some(at)),
            self.read_stragglers(from.ended_by(to), after),
            rest,
            self.client.batch_execute(COMMIT),
        );
        let failed = |error: tokio_postgres::Error| classify("next_batch", &error);
        begun.map_err(failed)?;
        let guarded = guarded?;
        let (mut rows, mut rest) = (late.map_err(failed)?, rest.map_err(failed)?);
        committed.map_err(failed)?;
        if !guarded.same_window {
            return Ok(Look::Undone);
        }
        if !guarded.same_filter {
            return Err(filter_changed());
        }
        let exceptions = self.exceptions(guarded.left_stream, after).await?;
        rows.append(&mut rest);
        Ok(Look::Page(self.page(rows, exceptions)))
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
        read_rows(self.client, &sql, params, self.shared.rows_max() + 1).await
    }

    /// Looks for news and reads the first page of the window they make; `at` becomes that window. One round trip.
    ///
    /// The window is written down before `at` counts, and before anything of it is given out.
    async fn open_next(&self, at: &mut Position, due_in: &mut Option<Duration>) -> Result<Look> {
        let reader = self.store.reader(self.lease);
        let (begun, called, committed) = futures::join!(
            self.client.batch_execute(&self.store.inner.preambles.call),
            self.call_window(at, reader.ctid()),
            self.client.batch_execute(COMMIT),
        );
        let failed = |error: tokio_postgres::Error| classify("next_batch", &error);
        begun.map_err(failed)?;
        let (rows, opened) = called.map_err(failed)?;
        committed.map_err(failed)?;
        let opened = opened.ok_or_else(|| invalid_answer("nothing"))?;
        match opened.verdict.as_str() {
            "stale" => return Err(Error::stale("next_batch")),
            "undone" => return Ok(Look::Undone),
            "changed" => return Err(filter_changed()),
            "nothing" | "window" => {}
            verdict => return Err(invalid_answer(verdict)),
        }
        let exceptions = self.exceptions(opened.left_stream, 0).await?;
        *due_in = exceptions.due_in;
        let (Some(to), Some(low), Some(high)) = (opened.to, opened.low, opened.high) else { return Ok(Look::Nothing) };
        if let Some(place) = &opened.place {
            reader.found_at(place);
        }
        let to = Arc::new(Snapshot::parse(&to)?);
        at.enter(Window { from: at.window.to.clone(), to, low, high });
        Ok(Look::Page(self.page(rows, exceptions)))
    }

    async fn call_window(
        &self,
        at: &Position,
        place: Option<String>,
    ) -> Result<(Vec<Stored>, Option<Opened>), tokio_postgres::Error> {
        let (lane, known) = (self.lease.lane.cast_signed(), at.window.to.to_string());
        let shared = &self.shared;
        let params: [(&(dyn ToSql + Sync), Type); 12] = [
            (&self.reading.id, Type::INT4),
            (&lane, Type::INT2),
            (&self.lease.epoch, Type::INT8),
            (&self.reading.revision, Type::INT4),
            (&place, Type::TEXT),
            (&known, Type::TEXT),
            (&at.settled, Type::INT8),
            (&shared.inline_bytes, Type::INT4),
            (&shared.rows, Type::INT8),
            (&shared.lanes, Type::INT4),
            (shared.likes, Type::TEXT_ARRAY),
            (&shared.tenant, Type::TEXT),
        ];
        let sql = self.store.schema().sql(&LANE_WINDOW.replace("{name}", self.reading.log.as_str()));
        let mut answer = pin!(self.client.query_typed_raw(&sql, params).await?);
        let (mut rows, mut opened) = (Vec::new(), None);
        while let Some(row) = answer.try_next().await? {
            match row.try_get::<_, Option<i64>>(0)? {
                Some(_) => rows.push(stored(&row)?),
                None => opened = Some(Opened::from_row(&row)?),
            }
        }
        Ok((rows, opened))
    }

    /// Stragglers and the rest of a page in one order. Each are ordered, and they share no row.
    fn page(&self, mut rows: Vec<Stored>, exceptions: Exceptions) -> Page {
        // A stable sort finds the runs that are there, and merges them.
        rows.sort_by_key(Stored::seq);
        // Beyond what one half gives at most, rows of the other may stand before rows that did not come.
        let more = rows.len() > self.shared.rows_max();
        rows.truncate(self.shared.rows_max());
        Page { rows: rows.into(), more, exceptions }
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
            if !reader.is_of(self.lease.epoch) {
                return Err(Error::stale("next_batch"));
            }
            // Rewound while we read: what we have is from before. The next call reads it again.
            return Ok(Batch { more: true, due_in: exceptions.due_in, ..Batch::default() });
        }
        reader.keep_ahead(&at, ahead, more_beyond);
        let mut batch = Batch {
            end: Some(Seq(end)),
            held: held.into_iter().map(Key::from_stored).collect(),
            discarded: discarded.into_iter().map(Seq).collect::<HashSet<_>>(),
            more,
            due_in: exceptions.due_in,
            ..Batch::default()
        };
        batch.deliveries.reserve_exact(rows.len());
        rows.into_iter().for_each(|row| batch.push(row.delivery, row.unreadable));
        Ok(batch)
    }
}

/// The code of [`filter_changed`].
const FILTER_CHANGED: &str = "filter_changed";

/// Another relay brought a newer filter. Nothing was read; the caller reads by that one.
fn filter_changed() -> Error {
    let message = "the subscription's filter changes too often to be read by";
    Error::new(ErrorKind::Unavailable, "next_batch", FILTER_CHANGED, message)
}

/// The cursor we read by is not the one in the database: a crash or a failover took it back. Whoever reads on begins from there.
pub(crate) fn undone(operation: &'static str) -> Error {
    let message = "the database went back to an earlier state; what it had given out is read again";
    Error::new(ErrorKind::Stale, operation, "window_undone", message)
}

fn invalid_answer(verdict: &str) -> Error {
    let message = format!("the schema's function answered {verdict:?}; run: postbox migrate validate");
    Error::new(ErrorKind::Internal, "next_batch", "window_invalid", message)
}

impl Position {
    fn enter(&mut self, window: Window) {
        self.window = window;
        (self.settled, self.read, self.drained) = (0, 0, false);
    }
}
