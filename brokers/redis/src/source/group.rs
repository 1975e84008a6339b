//! What all calls of a source share: the connections, what is held, where reading goes on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use postbox_core::{AckToken, Clock, Error, ErrorKind, Result};
use redis::{Cmd, Pipeline, RedisError, RedisResult, Value};
use tokio::sync::Notify;
use tokio::time::timeout;
use tracing::{info, warn};

use super::entries::{self, Entry, EntryId};
use super::held::Held;
use crate::connection::{Connection, Server};
use crate::fields::Layout;
use crate::{RedisSourceConfig, classify};

/// Longest wait of the server for new entries in one call. A connection that is silent for longer
/// is given up.
const BLOCK_MAX: Duration = Duration::from_secs(5);
/// Bytes asked for at once, as far as the size of the last entries tells: a server answers with
/// whole entries, and an answer that is too large for the time given is asked for in vain.
const PORTION_BYTES: usize = 8 * 1024 * 1024;
/// Entries asked for at once while no size is known.
const PORTION_FIRST: usize = 32;

/// The code of an answer that did not come.
const TIMEOUT: &str = "redis_timeout";

/// What all calls share.
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
    /// Something was settled or given back, or the source was closed.
    pub(super) changed: Notify,
    trimmed: AtomicU64,
}

#[derive(Default)]
pub(super) struct State {
    session: Option<Session>,
    pub(super) held: Held,
    /// Where reading goes on.
    place: Place,
    /// From which id others' entries are looked through, and when.
    claim_from: EntryId,
    claim_at: Duration,
    /// How many entries are asked for at once; `None`: nothing was read yet.
    portion: Option<usize>,
    pub(super) closed: bool,
}

/// Where reading goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Our own pending entries behind this one.
    Pending(EntryId),
    /// New entries.
    New,
}

impl Default for Place {
    fn default() -> Self {
        Self::Pending(EntryId::default())
    }
}

/// Two connections that are given up together: one waits for new entries, the other does the rest.
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
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let lost = state.session.as_ref().is_some_and(|it| !(it.commands.is_open() && it.waiting.is_open()));
        if lost {
            state.lose(self.clock.monotonic());
        }
        state
    }

    /// Reads some entries, if there are any, and keeps them.
    pub(super) async fn read(self: Arc<Self>, room: usize) -> Result<()> {
        let portion = self.state().portion.unwrap_or(PORTION_FIRST);
        let read = self.try_read(room.min(portion)).await;
        match read {
            Err(error) if error.code() == "redis_group_missing" => {
                let session = self.session().await?;
                self.make_group(session.commands).await
            }
            Err(error) => {
                // Whatever it was: a new session begins with what is pending.
                let mut state = self.state();
                state.lose(self.clock.monotonic());
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
                        state.held.remember();
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

    /// The session; a new one if there is none.
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

    /// Makes the group unless it is there: from the first entry, or where it was lost.
    async fn make_group(&self, commands: Connection) -> Result<()> {
        let from = self.state().held.floor();
        let mut command = redis::cmd("XGROUP");
        command.arg("CREATE").arg(&self.stream).arg(&self.name).arg(from.to_string()).arg("MKSTREAM");
        match self.ask_raw(commands, command, Duration::ZERO).await? {
            Ok(_) => {
                let (stream, group) = (&self.stream, &self.name);
                match from == EntryId::default() {
                    true => info!(stream, group, "consumer group made"),
                    false => warn!(stream, group, %from, "consumer group was lost; made again behind the last entry"),
                }
                Ok(())
            }
            Err(error) if error.code() == Some("BUSYGROUP") => Ok(()),
            Err(error) => Err(classify::failure("receive", error)),
        }
    }

    /// Keeps what was read; acknowledges entries that are pending and no longer in the stream.
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

    /// Puts entries as they are into the stream of the dead, then acknowledges them.
    pub(super) async fn bury(&self, mut commands: Connection, ids: &[EntryId]) -> Result<()> {
        let mut looked_up = Pipeline::new();
        for id in ids {
            looked_up.cmd("XRANGE").arg(&self.stream).arg(id.to_string()).arg(id.to_string());
        }
        let found = self.in_time(commands.send::<Value>(looked_up.ignore_errors()), Duration::ZERO).await?;
        let mut buried = Pipeline::new();
        for answer in found.map_err(|error| classify::failure("reject", error))? {
            let entries = entries::list(answer.map_err(|error| classify::failure("reject", error))?);
            for fields in entries.into_iter().filter_map(|entry| entry.fields) {
                buried.cmd("XADD").arg(&self.dead_stream).arg("*");
                fields.into_iter().for_each(|(name, value)| _ = buried.arg(name).arg(value));
            }
        }
        if !buried.is_empty() {
            let answers = self.in_time(commands.send::<Value>(buried.ignore_errors()), Duration::ZERO).await?;
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

    /// The answer, which may come so much later than others.
    async fn in_time<T>(
        &self,
        answer: impl Future<Output = Result<T, RedisError>>,
        block: Duration,
    ) -> Result<Result<T, RedisError>> {
        timeout(self.server.timeout() + block, answer)
            .await
            .map_err(|_| Error::new(ErrorKind::Unavailable, "receive", TIMEOUT, classify::SILENT))
    }

    /// Takes messages out of those that are given, and does with them what `end` says. Where that
    /// fails, all of them come again.
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
            self.state().lose(self.clock.monotonic());
        }
        settled
    }
}

impl State {
    /// Nothing is given any more, and nothing is kept.
    pub(super) fn close(&mut self) {
        self.closed = true;
        self.session = None;
        self.held = Held::default();
    }

    /// The connections are lost or given up. What is given comes again; what waits for its time
    /// goes on waiting; everything else is read again.
    fn lose(&mut self, now: Duration) {
        self.session = None;
        self.place = Place::default();
        self.held.forget(now);
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Unavailable, "receive", "redis_source_closed", "the source was closed")
}
