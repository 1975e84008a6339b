//! A world's SQLite file: opened by relays, written by writers, and read by the ledger with
//! separate SQL.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use postbox_core::{EventId, Migrate as _, NewEvent, State, SubscriptionName, lock};
use postbox_memory::Cursor;
use postbox_sqlite::{SqliteConfig, SqliteStore};
use rusqlite::{Connection, Transaction, params};

use crate::gate::{Gate, ServerClock, SimTime};
use crate::plan::{End, Plan};
use crate::server::Place;

/// Busy timeout, in wall time. If nobody holds a lock across simulated time, it is never used up.
/// It must not be zero, because the store's `apply` waits this long for the answer of its own
/// caller.
const BUSY_NEVER: Duration = Duration::from_secs(60);

/// A migrated empty file. Each new file is a copy of it.
fn template() -> &'static [u8] {
    static TEMPLATE: OnceLock<Vec<u8>> = OnceLock::new();
    TEMPLATE.get_or_init(|| {
        let folder = Folder::new();
        let (grown, whole) = (folder.0.join("grown.db"), folder.0.join("whole.db"));
        let opened = Opened::new(&grown, BUSY_NEVER, &Arc::new(SimTime::new()));
        opened.gate.run(opened.store.up()).expect("a schema");
        let connection = Connection::open(&grown).expect("the file");
        connection.execute("VACUUM INTO ?1", [whole.to_str()]).expect("a copy in one file");
        std::fs::read(whole).expect("the copy")
    })
}

/// A folder, in memory if the machine allows, which is removed when this is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let memory = Path::new("/dev/shm");
        let base = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let name = format!("postbox-simulate-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let folder = base.join(name);
        std::fs::create_dir_all(&folder).expect("a folder for the database");
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The store, as one process has opened it.
#[derive(Clone)]
pub(crate) struct Opened {
    pub(crate) store: SqliteStore,
    pub(crate) gate: Arc<Gate>,
}

impl Opened {
    fn new(path: &Path, busy_timeout: Duration, time: &Arc<SimTime>) -> Self {
        let gate = Arc::<Gate>::default();
        let clock = Arc::new(ServerClock { time: time.clone(), gate: Some(gate.clone()) });
        let config = SqliteConfig { busy_timeout, ..SqliteConfig::new(path) };
        let store = gate.run(SqliteStore::open_with_clock(config, clock)).expect("the file is a database");
        Self { store, gate }
    }
}

/// What the ledger last saw, by subscription.
#[derive(Default)]
pub(crate) struct Look {
    data_version: Option<i64>,
    pub(crate) cursors: Vec<Vec<Cursor>>,
    pub(crate) places: Vec<Vec<Place>>,
}

pub(crate) struct SqliteFile {
    folder: Folder,
    time: Arc<SimTime>,
    busy_timeout: Duration,
    subscriptions: Vec<SubscriptionName>,
    /// Number of crashes, which is the file's number.
    crashes: AtomicU32,
    state: Mutex<FileState>,
}

struct FileState {
    writer: Connection,
    ledger: Connection,
    look: Look,
    home: Option<Opened>,
    /// Every store that was opened. Kept until the end, because closing connections in the middle
    /// of a world would happen at an unpredictable moment.
    opened: Vec<Opened>,
}

impl SqliteFile {
    pub(crate) fn new(plan: &Plan, time: Arc<SimTime>, subscriptions: Vec<SubscriptionName>) -> Self {
        let folder = Folder::new();
        let path = folder.0.join("0.db");
        std::fs::write(&path, template()).expect("room for a file");
        let file = Self {
            state: Mutex::new(FileState::new(&path)),
            folder,
            time,
            busy_timeout: if plan.locks() { Duration::ZERO } else { BUSY_NEVER },
            subscriptions,
            crashes: AtomicU32::new(0),
        };
        file.lock().home = Some(file.open());
        file
    }

    fn lock(&self) -> MutexGuard<'_, FileState> {
        lock(&self.state)
    }

    fn path(&self) -> PathBuf {
        self.folder.0.join(format!("{}.db", self.crashes.load(Ordering::Relaxed)))
    }

    /// Opens it as a new process does.
    pub(crate) fn open(&self) -> Opened {
        let opened = Opened::new(&self.path(), self.busy_timeout, &self.time);
        self.lock().opened.push(opened.clone());
        opened
    }

    /// Returns the store for calls without faults.
    pub(crate) fn home(&self) -> Opened {
        self.lock().home.clone().expect("opened with the file")
    }

    /// Ends all processes and opens a copy of what they left.
    pub(crate) fn crash(&self) {
        let before = self.path();
        self.crashes.fetch_add(1, Ordering::Relaxed);
        let after = self.path();
        let wal = |path: &Path| path.with_extension("db-wal");
        std::fs::copy(&before, &after).expect("room for a file");
        _ = std::fs::copy(wal(&before), wal(&after));
        {
            let mut state = self.lock();
            let FileState { writer, ledger, look, .. } = FileState::new(&after);
            (state.writer, state.ledger, state.look) = (writer, ledger, look);
        }
        let home = self.open();
        self.lock().home = Some(home);
    }

    pub(crate) fn name(&self, subscription: usize) -> &SubscriptionName {
        &self.subscriptions[subscription]
    }

    /// Returns whether anything was committed since the ledger last looked.
    pub(crate) fn has_changed(&self) -> bool {
        let state = self.lock();
        state.look.data_version != Some(data_version(&state.ledger))
    }

    /// Returns the present state of everything.
    pub(crate) fn look(&self) -> LookGuard<'_> {
        let mut state = self.lock();
        let version = data_version(&state.ledger);
        if state.look.data_version != Some(version) {
            let mut look = look(&mut state.ledger, &self.subscriptions).expect("the ledger can read");
            look.data_version = Some(version);
            state.look = look;
        }
        LookGuard(state)
    }

    /// Returns position and number of everything that handlers wrote.
    pub(crate) fn effects(&self) -> Vec<(i64, i64)> {
        let state = self.lock();
        let mut statement =
            state.ledger.prepare_cached("SELECT seq, version FROM postbox_inbox ORDER BY seq").expect("SQL");
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).expect("the ledger can read");
        rows.collect::<Result<_, _>>().expect("the ledger can read")
    }
}

pub(crate) struct LookGuard<'a>(MutexGuard<'a, FileState>);

impl std::ops::Deref for LookGuard<'_> {
    type Target = Look;

    fn deref(&self) -> &Look {
        &self.0.look
    }
}

impl FileState {
    fn new(path: &Path) -> Self {
        let open = || {
            let connection = Connection::open(path).expect("the file");
            connection.execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF").expect("a setting");
            connection
        };
        Self { writer: open(), ledger: open(), look: Look::default(), home: None, opened: Vec::new() }
    }
}

/// Returns a number that changes with each commit of another connection.
fn data_version(ledger: &Connection) -> i64 {
    let mut statement = ledger.prepare_cached("PRAGMA data_version").expect("SQL");
    statement.query_row([], |row| row.get(0)).expect("the ledger can read")
}

fn look(ledger: &mut Connection, subscriptions: &[SubscriptionName]) -> rusqlite::Result<Look> {
    // One snapshot for all.
    let tx = ledger.transaction()?;
    let mut look = Look::default();
    for name in subscriptions {
        let cursors = cursors(&tx, name.as_str())?;
        look.places.push(places(&tx, name.as_str(), &cursors)?);
        look.cursors.push(cursors);
    }
    Ok(look)
}

fn places(tx: &Transaction<'_>, name: &str, cursors: &[Cursor]) -> rusqlite::Result<Vec<Place>> {
    let filters = Filters::read(tx, name)?;
    let lanes = cursors.len() as u16;
    let mut statement = tx.prepare_cached(
        "SELECT l.id, l.version, l.seq, l.key, coalesce(d.state, iif(t.seq IS NULL, NULL, 'dispatched')), \
           d.attempts, d.replays, l.topic, u.seq FROM postbox_outbox l \
         LEFT JOIN postbox_delivery d ON d.subscription = ?1 AND d.seq = l.seq \
         LEFT JOIN postbox_sent t ON t.subscription = ?1 AND t.seq = l.seq \
         LEFT JOIN postbox_unrouted u ON u.log = 'outbox' AND u.seq = l.seq ORDER BY l.seq",
    )?;
    let mut rows = statement.query([name])?;
    let mut places = Vec::new();
    while let Some(row) = rows.next()? {
        let (id, seq): (String, u64) = (row.get(0)?, number(row, 2)?);
        let (key, state): (Option<String>, Option<String>) = (row.get(3)?, row.get(4)?);
        // As the guide for writers in other languages says: FNV-1a of the key, or of the id.
        let bytes = key.as_ref().unwrap_or(&id).bytes();
        let hash =
            bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        let lane_of = |lanes: u16| (hash % u64::from(lanes.max(1))) as u16;
        let lane = lane_of(lanes);
        let passed = cursors.get(usize::from(lane)).is_some_and(|cursor| seq <= cursor.to);
        let state = match state {
            Some(state) => state.parse().expect("a state"),
            None if !filters.take(passed, lane, lane_of, seq, &row.get::<_, String>(7)?) => {
                match row.get::<_, Option<i64>>(8)? {
                    Some(_) => State::Unrouted,
                    None => State::Skipped,
                }
            }
            None if passed => State::Dispatched,
            None => State::Pending,
        };
        let (attempts, replays): (Option<u32>, Option<u32>) = (row.get(5)?, row.get(6)?);
        let (attempts, replays) = (attempts.unwrap_or_default(), replays.unwrap_or_default());
        places.push(Place { id: id.parse().expect("an id"), version: row.get(1)?, lane, state, attempts, replays });
    }
    Ok(places)
}

/// The topics by which the lanes read, now and before.
struct Filters {
    /// By revision; none means all topics.
    topics: BTreeMap<u64, Vec<String>>,
    /// The revision of the subscription, and of each lane.
    revision: u64,
    lanes: Vec<u64>,
    /// Number of lanes there were, lane, revision, and how far the lane got with it. By revision.
    passages: Vec<(u16, u16, u64, u64)>,
}

impl Filters {
    fn read(tx: &Transaction<'_>, name: &str) -> rusqlite::Result<Self> {
        let mut filters = tx.prepare_cached(
            "SELECT f.revision, t.value FROM postbox_filter f LEFT JOIN json_each(f.topics) t WHERE f.subscription = ?1",
        )?;
        let mut rows = filters.query([name])?;
        let mut topics: BTreeMap<u64, Vec<String>> = BTreeMap::new();
        while let Some(row) = rows.next()? {
            topics.entry(number(row, 0)?).or_default().extend(row.get::<_, Option<String>>(1)?);
        }
        let mut lanes = tx.prepare_cached("SELECT revision FROM postbox_lane WHERE subscription = ?1 ORDER BY lane")?;
        let mut passages = tx.prepare_cached(
            "SELECT lanes, lane, revision, position FROM postbox_passage WHERE subscription = ?1 ORDER BY revision",
        )?;
        let passage = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, number(row, 2)?, number(row, 3)?));
        let revision = "SELECT coalesce(max(revision), 0) FROM postbox_subscription WHERE name = ?1";
        Ok(Self {
            topics,
            revision: tx.query_row(revision, [name], |row| number(row, 0))?,
            lanes: lanes.query_map([name], |row| number(row, 0))?.collect::<Result<_, _>>()?,
            passages: passages.query_map([name], passage)?.collect::<Result<_, _>>()?,
        })
    }

    /// Returns whether an event goes out by the filter of its time. What a reset skipped has none.
    fn take(&self, passed: bool, lane: u16, lane_of: impl Fn(u16) -> u16, seq: u64, topic: &str) -> bool {
        let covers = |it: &&(u16, u16, u64, u64)| it.1 == lane_of(it.0) && seq <= it.3;
        let before = self.passages.iter().find(covers);
        let now = || self.lanes.get(usize::from(lane)).copied().unwrap_or(self.revision);
        let revision = if passed { before.map_or_else(now, |it| it.2) } else { self.revision };
        let topics = self.topics.get(&revision);
        topics.is_some_and(|topics| topics.is_empty() || topics.iter().any(|it| it == topic))
    }
}

/// Returns a number that is never negative.
fn number(row: &rusqlite::Row<'_>, column: usize) -> rusqlite::Result<u64> {
    Ok(row.get::<_, i64>(column)?.unsigned_abs())
}

/// Returns the cursors. In this store a cursor is an integer and a reading limit; neither goes
/// back.
fn cursors(tx: &Transaction<'_>, name: &str) -> rusqlite::Result<Vec<Cursor>> {
    let mut statement = tx.prepare_cached(
        "SELECT epoch, window_end, position, lease_until FROM postbox_lane WHERE subscription = ?1 ORDER BY lane",
    )?;
    let cursor = |row: &rusqlite::Row<'_>| {
        let lease_until = Some(Duration::from_micros(number(row, 3)?));
        Ok(Cursor { epoch: row.get(0)?, from: number(row, 1)?, to: number(row, 2)?, settled: 0, lease_until })
    };
    statement.query_map([name], cursor)?.collect()
}

/// A writer's transaction. Only one can be open: one that takes no lock writes when it ends.
pub(crate) struct SqliteTransaction {
    file: Arc<SqliteFile>,
    events: Vec<NewEvent>,
    holds_lock: bool,
}

impl SqliteTransaction {
    pub(crate) fn begin(file: &Arc<SqliteFile>, events: &[NewEvent], locks: bool) -> Self {
        let mut transaction = Self { file: file.clone(), events: events.to_vec(), holds_lock: false };
        if locks && !transaction.waits() {
            transaction.write();
        }
        transaction
    }

    pub(crate) fn waits(&self) -> bool {
        !self.holds_lock && !self.file.lock().writer.is_autocommit()
    }

    fn execute(&self, sql: &str) {
        self.file.lock().writer.execute_batch(sql).expect("the lock is free, or ours");
    }

    fn write(&mut self) {
        self.execute("BEGIN IMMEDIATE");
        self.holds_lock = true;
        for event in &self.events {
            self.execute("SAVEPOINT last");
            self.insert(event).expect("within the limits");
        }
    }

    fn insert(&self, event: &NewEvent) -> rusqlite::Result<usize> {
        let number = event.version.unwrap_or_default();
        // A random id would put it into another lane in each run.
        let id: EventId = format!("00000000-0000-7000-8000-{number:012x}").parse().expect("an id");
        let now = self.file.time.elapsed().as_micros() as i64;
        let row = params![
            id.to_string(),
            event.topic,
            event.key,
            number,
            event.deliver_at.map(|at| at.as_microsecond()),
            now,
            event.payload.as_ref()
        ];
        let state = self.file.lock();
        let insert = "INSERT INTO postbox_outbox (id, topic, key, version, deliver_at, created_at, payload) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
        state.writer.prepare_cached(insert)?.execute(row)
    }

    pub(crate) fn end(mut self, end: End) {
        if !self.holds_lock {
            self.write();
        }
        if end == End::Savepoint && !self.events.is_empty() {
            self.execute("ROLLBACK TO last");
        }
        self.execute(if end == End::Rollback { "ROLLBACK" } else { "COMMIT" });
        self.holds_lock = false;
    }
}

impl Drop for SqliteTransaction {
    fn drop(&mut self) {
        if self.holds_lock {
            self.execute("ROLLBACK");
        }
    }
}
