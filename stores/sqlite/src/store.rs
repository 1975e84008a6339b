//! The store: three connections, and what it remembers between calls.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use postbox_core::{Clock, Error, ErrorKind, Lease, Postbox, Result, SubscriptionName, lock};
use tokio::sync::watch;

use crate::append::Sqlite;
use crate::clock::MachineClock;
use crate::config::SqliteConfig;
use crate::migrate::validate;
use crate::thread::{Role, Settings, Thread};
use crate::window::Cursor;

/// A Postbox store in a SQLite file. Cheap to clone: clones share everything.
///
/// ```no_run
/// # async fn example() -> postbox_core::Result<()> {
/// use postbox_core::{Append, LogName, Migrate, NewEvent};
/// use postbox_sqlite::{SqliteConfig, SqliteStore};
///
/// let store = SqliteStore::open(SqliteConfig::new("shop.db")).await?;
/// store.up().await?;
/// store.append(&LogName::outbox(), &[NewEvent::json("order.paid", r#"{"id":1}"#).key("42")]).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct SqliteStore {
    shared: Arc<Shared>,
}

struct Shared {
    settings: Arc<Settings>,
    reader: Thread,
    inspector: Thread,
    // Closed last, because it may write what the WAL holds into the file.
    writer: Thread,
    /// How far each lane has been read, if at all; one entry for each that was ever granted or read
    /// here. Not stored: after a crash, reading starts again from the settled position.
    cursors: Mutex<HashMap<(SubscriptionName, u16), Option<Cursor>>>,
    /// Incremented by every local change that may give a lane work.
    wakeups: watch::Sender<u64>,
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore").field("path", &self.shared.settings.path).finish_non_exhaustive()
    }
}

impl SqliteStore {
    /// Opens the file, or prepares to. A missing file is created only by
    /// [`postbox_core::Migrate::up`].
    ///
    /// Errors (`Mismatch`): `store_path_invalid`, `store_folder_missing`, `store_readonly`,
    /// `store_not_a_database`, `store_cannot_open`. A missing schema is reported by the first call
    /// that needs it.
    pub async fn open(config: SqliteConfig) -> Result<Self> {
        Self::open_with_clock(config, Arc::new(MachineClock::new())).await
    }

    /// [`Self::open`] with another clock, which measures lease deadlines, due times and stamps.
    pub async fn open_with_clock(config: SqliteConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        let settings = Arc::new(Settings {
            path: config.resolved()?,
            busy_timeout: config.busy_timeout,
            file: OnceLock::new(),
            wal: Mutex::default(),
            clock,
        });
        let thread = |name, role| Thread::start(name, role, settings.clone());
        let store = Self {
            shared: Arc::new(Shared {
                writer: thread("postbox-write", Role::Writer)?,
                reader: thread("postbox-read", Role::Reader)?,
                inspector: thread("postbox-look", Role::Reader)?,
                cursors: Mutex::default(),
                wakeups: watch::Sender::new(0),
                settings,
            }),
        };
        if store.shared.settings.path.exists() {
            // Only reading the file tells a database from something else.
            let looked = store.writer().call("open", |session| validate(session.connection()?)).await;
            match looked {
                Err(error) if !error.code().starts_with("schema_") => return Err(name_file(error, &store)),
                _ => {}
            }
        }
        Ok(store)
    }

    /// Appends to this store's log `outbox`, in your transactions.
    pub fn postbox(&self) -> Postbox<Sqlite> {
        Postbox::new(Sqlite)
    }

    /// Wakes this store's relays. Call it after your own commit, and they need not wait for their
    /// next poll. Only a hint.
    pub fn wake(&self) {
        self.shared.wakeups.send_modify(|wakeups| *wakeups = wakeups.wrapping_add(1));
    }

    pub(crate) fn writer(&self) -> &Thread {
        &self.shared.writer
    }

    pub(crate) fn reader(&self) -> &Thread {
        &self.shared.reader
    }

    pub(crate) fn inspector(&self) -> &Thread {
        &self.shared.inspector
    }

    pub(crate) fn now(&self) -> i64 {
        self.shared.settings.now()
    }

    pub(crate) fn clock(&self) -> &dyn Clock {
        &*self.shared.settings.clock
    }

    pub(crate) fn wakeups(&self) -> &watch::Sender<u64> {
        &self.shared.wakeups
    }

    /// How far this lease has read, if it has.
    pub(crate) fn cursor(&self, lease: &Lease) -> Option<Cursor> {
        self.cursors()
            .get(&(lease.subscription.clone(), lease.lane))
            .and_then(Option::as_ref)
            .filter(|cursor| cursor.epoch == lease.epoch)
            .cloned()
    }

    /// Whether this store ever granted or read the lane.
    pub(crate) fn knows_lane(&self, lease: &Lease) -> bool {
        self.cursors().contains_key(&(lease.subscription.clone(), lease.lane))
    }

    pub(crate) fn set_cursor(&self, lease: &Lease, cursor: Option<Cursor>) {
        self.cursors().insert((lease.subscription.clone(), lease.lane), cursor);
    }

    pub(crate) fn forget_cursors(&self) {
        self.cursors().values_mut().for_each(|cursor| *cursor = None);
    }

    fn cursors(&self) -> MutexGuard<'_, HashMap<(SubscriptionName, u16), Option<Cursor>>> {
        // Every change leaves a whole map, so a panic elsewhere leaves nothing half-done.
        lock(&self.shared.cursors)
    }
}

/// Adds the file's name to a one-line error.
fn name_file(error: Error, store: &SqliteStore) -> Error {
    let message = format!("{}: {}", store.shared.settings.path.display(), error.message());
    let kind: ErrorKind = error.kind();
    Error::new(kind, "open", error.code().to_owned(), message).with_source(error)
}
