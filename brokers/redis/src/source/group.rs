//! The state that all calls of a source share: the connections, the held messages, and what is read
//! next.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use postbox_core::limits::MESSAGE_IDS_AGE_MIN;
use postbox_core::{AckToken, Clock, Error, ErrorKind, Result, lock};
use redis::{Cmd, Pipeline, RedisError, RedisResult, Value};
use tokio::sync::Notify;
use tokio::time::timeout;
use tracing::{info, warn};

use super::entries::{self, Entry, EntryId};
use super::held::Held;
use crate::connection::{Connection, Server};
use crate::fields::Layout;
use crate::{RedisSourceConfig, classify};

/// How long the server waits for new entries in one call. If there is still no answer after that
/// and the usual timeout, the connection is given up.
const BLOCK_MAX: Duration = Duration::from_secs(5);
/// How many bytes to request at once, judging by the size of the last entries. A server answers
/// with whole entries, and an answer that is too large to arrive in time would be requested in
/// vain.
const PORTION_BYTES: usize = 8 * 1024 * 1024;
/// How many entries to request at once while no size is known.
const PORTION_FIRST: usize = 32;

/// The code of an answer that did not arrive in time.
const TIMEOUT: &str = "redis_timeout";

/// The state that all calls share.
pub(super) struct Group {
    server: Server,
    stream: String,
    name: String,
    consumer: String,
    dead_stream: String,
    claim_after: Duration,
    pub(super) in_flight_max: usize,
    layout: Layout,
    pub(super) clock: Arc<dyn Clock>,
    state: Mutex<State>,
    /// Signals that a message was settled or given back, or that the source was closed.
    pub(super) changed: Notify,
    trimmed: AtomicU64,
}

#[derive(Default)]
pub(super) struct State {
    session: Option<Session>,
    pub(super) held: Held,
    /// What is read next.
    place: Place,
    /// The id from which pending entries of other consumers are claimed next, and when.
    claim_from: EntryId,
    claim_at: Duration,
    /// How many entries to request at once; `None` if nothing was read yet.
    portion: Option<usize>,
    pub(super) closed: bool,
}

/// What is read next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Our own pending entries after this id.
    Pending(EntryId),
    /// New entries.
    New,
}

impl Default for Place {
    fn default() -> Self {
        Self::Pending(EntryId::default())
    }
}

/// Two connections that are given up together. One waits for new entries, the other is for all
/// other commands.
#[derive(Debug, Clone)]
struct Session {
    commands: Connection,
    waiting: Connection,
}

impl Group {
    pub(super) fn new(config: &RedisSourceConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        let layout = Layout {
            payload: config.payload.clone(),
            topic: config.topic.clone().unwrap_or_else(|| config.stream.clone()),
            stream: config.stream.clone(),
        };
        Ok(Self {
            server: config.server()?,
            stream: config.stream.clone(),
            name: config.group.clone(),
            consumer: config.consumer.clone(),
            dead_stream: config.dead_stream(),
            claim_after: config.claim_after,
            in_flight_max: config.in_flight,
            layout,
            clock,
            state: Mutex::default(),
            changed: Notify::new(),
            trimmed: AtomicU64::new(0),
        })
    }

    pub(super) fn is_connected(&self) -> bool {
        self.state().session.is_some()
    }

    pub(super) fn trimmed(&self) -> u64 {
        self.trimmed.load(Ordering::Relaxed)
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        let mut state = lock(&self.state);
        let lost = state.session.as_ref().is_some_and(|it| !(it.commands.is_open() && it.waiting.is_open()));
        if lost {
            state.drop_session(self.clock.monotonic());
        }
        state
    }

    /// Reads entries, if there are any, and keeps them.
    pub(super) async fn read(self: Arc<Self>, room: usize) -> Result<()> {
        let portion = self.state().portion.unwrap_or(PORTION_FIRST);
        let read = self.try_read(room.min(portion)).await;
        match read {
            Err(error) if error.code() == "redis_group_missing" => {
                let session = self.session().await?;
                self.make_group(session.commands).await
            }
            Err(error) => {
                // After any failure, a new session begins with the pending entries.
                let mut state = self.state();
                state.drop_session(self.clock.monotonic());
                if error.code() == TIMEOUT {
                    state.portion = Some((portion / 4).max(1));
                }
                Err(error)
            }
            read => read,
        }
    }

    async fn try_read(&self, room: usize) -> Result<()> {
        let Session { commands, waiting } = self.session().await?;
        let (place, claim_in, claim_from) = {
            let state = self.state();
            (state.place, state.claim_at.saturating_sub(self.clock.monotonic()), state.claim_from)
        };
        match place {
            Place::Pending(from) => {
                let mut command = self.command("XREADGROUP");
                command.arg("COUNT").arg(room).arg("STREAMS").arg(&self.stream).arg(from.to_string());
                let entries = entries::read(self.ask(commands, command, Duration::ZERO).await?);
                let place = entries.last().map_or(Place::New, |entry| Place::Pending(entry.id));
                let set_place = |state: &mut State| {
                    state.place = place;
                    if place == Place::New {
                        state.held.clear_forgotten();
                    }
                };
                self.keep(entries, set_place).await
            }
            Place::New if claim_in.is_zero() => {
                let mut command = redis::cmd("XAUTOCLAIM");
                command.arg(&self.stream).arg(&self.name).arg(&self.consumer).arg(self.claim_after.as_millis() as u64);
                command.arg(claim_from.to_string()).arg("COUNT").arg(room);
                let claimed = entries::claimed(self.ask(commands, command, Duration::ZERO).await?);
                self.count_trimmed(claimed.deleted);
                let now = self.clock.monotonic();
                self.keep(claimed.entries, |state| {
                    state.claim_from = claimed.next;
                    if claimed.next == EntryId::default() {
                        state.claim_at = now + self.claim_after / 2;
                    }
                })
                .await
            }
            Place::New => {
                let block = BLOCK_MAX.min(claim_in).max(Duration::from_millis(1));
                let mut command = self.command("XREADGROUP");
                command.arg("COUNT").arg(room).arg("BLOCK").arg(block.as_millis() as u64);
                command.arg("STREAMS").arg(&self.stream).arg(">");
                let entries = entries::read(self.ask(waiting, command, block).await?);
                self.keep(entries, |_| ()).await
            }
        }
    }

    fn command(&self, name: &str) -> Cmd {
        let mut command = redis::cmd(name);
        command.arg("GROUP").arg(&self.name).arg(&self.consumer);
        command
    }

    /// Returns the session. Opens one if there is none.
    async fn session(&self) -> Result<Session> {
        if let Some(session) = self.state().session.clone() {
            return Ok(session);
        }
        let session = Session { commands: self.server.connect().await?, waiting: self.server.connect().await? };
        self.make_group(session.commands.clone()).await?;
        let mut state = self.state();
        if state.closed {
            return Err(closed());
        }
        state.session = Some(session.clone());
        Ok(session)
    }

    /// Creates the group unless it exists. A new group starts at the first entry. One that was lost
    /// starts as far back as every inbox remembers ids: what other consumers had pending was lost
    /// with it. Ids that are no times are only known up to the entries settled here.
    async fn make_group(&self, commands: Connection) -> Result<()> {
        let remembered = self.clock.now().checked_sub(MESSAGE_IDS_AGE_MIN).unwrap_or_default();
        let from = self.state().held.floor().min(EntryId::at(remembered));
        let mut command = redis::cmd("XGROUP");
        command.arg("CREATE").arg(&self.stream).arg(&self.name).arg(from.to_string()).arg("MKSTREAM");
        match self.ask_raw(commands, command, Duration::ZERO).await? {
            Ok(_) => {
                let (stream, group) = (&self.stream, &self.name);
                match from == EntryId::default() {
                    true => info!(stream, group, "consumer group made"),
                    false => {
                        warn!(stream, group, %from, "consumer group was lost; made again, and what is remembered is read again")
                    }
                }
                Ok(())
            }
            Err(error) if error.code() == Some("BUSYGROUP") => Ok(()),
            Err(error) => Err(classify::failure("receive", error)),
        }
    }

    /// Keeps entries that were read. Acknowledges those that are pending and no longer in the
    /// stream.
    async fn keep(&self, entries: Vec<Entry>, change: impl FnOnce(&mut State)) -> Result<()> {
        let gone: Vec<EntryId> = entries.iter().filter(|entry| entry.fields.is_none()).map(|entry| entry.id).collect();
        let session = {
            let mut state = self.state();
            let now = self.clock.monotonic();
            if !entries.is_empty() {
                let bytes: usize = entries.iter().map(Entry::bytes).sum();
                state.portion = Some((PORTION_BYTES / (bytes / entries.len()).max(1)).max(1));
            }
            for Entry { id, fields } in entries {
                if let Some(fields) = fields.filter(|_| !state.held.has(id)) {
                    state.held.keep(id, now, self.layout.message(&id.to_string(), fields));
                }
            }
            change(&mut state);
            state.session.clone()
        };
        self.count_trimmed(gone.len());
        match session {
            Some(session) if !gone.is_empty() => self.acknowledge(session.commands, &gone).await,
            _ => Ok(()),
        }
    }

    fn count_trimmed(&self, entries: usize) {
        if entries > 0 {
            let total = self.trimmed.fetch_add(entries as u64, Ordering::Relaxed) + entries as u64;
            warn!(stream = self.stream, entries, total, "entries trimmed or deleted before they were received");
        }
    }

    pub(super) async fn acknowledge(&self, commands: Connection, ids: &[EntryId]) -> Result<()> {
        let mut command = redis::cmd("XACK");
        command.arg(&self.stream).arg(&self.name);
        for id in ids {
            command.arg(id.to_string());
        }
        self.ask(commands, command, Duration::ZERO).await.map(drop)
    }

    /// Copies entries unchanged to the dead stream, then acknowledges them.
    pub(super) async fn dead_letter(&self, mut commands: Connection, ids: &[EntryId]) -> Result<()> {
        let mut looked_up = Pipeline::new();
        for id in ids {
            looked_up.cmd("XRANGE").arg(&self.stream).arg(id.to_string()).arg(id.to_string());
        }
        let found = self.in_time(commands.send::<Value>(looked_up.ignore_errors()), Duration::ZERO).await?;
        let mut copied = Pipeline::new();
        for answer in found.map_err(|error| classify::failure("reject", error))? {
            let entries = entries::list(answer.map_err(|error| classify::failure("reject", error))?);
            for fields in entries.into_iter().filter_map(|entry| entry.fields) {
                copied.cmd("XADD").arg(&self.dead_stream).arg("*");
                fields.into_iter().for_each(|(name, value)| _ = copied.arg(name).arg(value));
            }
        }
        if !copied.is_empty() {
            let answers = self.in_time(commands.send::<Value>(copied.ignore_errors()), Duration::ZERO).await?;
            let answers = answers.and_then(|answers| answers.into_iter().collect::<RedisResult<Vec<_>>>());
            answers.map_err(|error| classify::failure("reject", error))?;
        }
        self.acknowledge(commands, ids).await
    }

    async fn ask(&self, connection: Connection, command: Cmd, block: Duration) -> Result<Value> {
        self.ask_raw(connection, command, block).await?.map_err(|error| match error.code() {
            Some("NOGROUP") => {
                Error::new(ErrorKind::Unavailable, "receive", "redis_group_missing", "the consumer group is missing")
            }
            _ => classify::failure("receive", error),
        })
    }

    async fn ask_raw(&self, mut connection: Connection, command: Cmd, block: Duration) -> Result<RedisResult<Value>> {
        self.in_time(connection.ask(&command), block).await
    }

    /// Waits for an answer. `block` is added to the timeout, because the server may wait that long.
    async fn in_time<T>(
        &self,
        answer: impl Future<Output = Result<T, RedisError>>,
        block: Duration,
    ) -> Result<Result<T, RedisError>> {
        timeout(self.server.timeout() + block, answer)
            .await
            .map_err(|_| Error::new(ErrorKind::Unavailable, "receive", TIMEOUT, classify::SILENT))
    }

    /// Removes messages from those that are handed out, and calls `end` with their ids. If that
    /// fails, all of them are delivered again.
    pub(super) async fn settle<F>(
        &self,
        tokens: &[AckToken],
        end: impl FnOnce(Connection, Vec<EntryId>) -> F,
    ) -> Result<()>
    where
        F: Future<Output = Result<()>>,
    {
        let (ids, session) = {
            let mut state = self.state();
            let ids: Vec<EntryId> =
                tokens.iter().filter_map(|token| state.held.take_back(token)).map(|it| it.0).collect();
            (ids, state.session.clone())
        };
        self.changed.notify_waiters();
        let (false, Some(session)) = (ids.is_empty(), session) else { return Ok(()) };
        let settled = end(session.commands, ids).await;
        if settled.is_err() {
            self.state().drop_session(self.clock.monotonic());
        }
        settled
    }
}

impl State {
    /// Drops the connections and all messages. Nothing is handed out any more.
    pub(super) fn close(&mut self) {
        self.closed = true;
        self.session = None;
        self.held = Held::default();
    }

    /// Drops the connections, which are lost or given up. Messages that are handed out are
    /// delivered again. Those whose time has not come keep waiting. All others are read again.
    fn drop_session(&mut self, now: Duration) {
        self.session = None;
        self.place = Place::default();
        self.held.forget(now);
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Unavailable, "receive", "redis_source_closed", "the source was closed")
}
