//! A connection on its own thread, fed by a bounded queue.
//!
//! SQLite calls block, so they never run on an async worker. The store has three of these threads.
//! One writes. One reads for relays: in WAL mode a reader never waits for a writer, so a batch is
//! read while the last one is flushed. One reads for operators, so that counting a long log delays
//! no delivery.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use postbox_core::{Clock, Error, ErrorKind, Result, lock};
use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, Transaction, TransactionBehavior};
use tokio::sync::{mpsc, oneshot};

use crate::classify::{Fault, Work, file_missing, read_only};
use crate::wal::{FileId, WalFiles, file_id, wal_removed};

/// How many jobs may wait at one thread. Each lane has at most a few at once, and a full queue
/// makes callers wait, which is the intended back-pressure.
const QUEUE_JOBS_MAX: usize = 64;
/// A job is never refused for a shorter wait than this, however small the busy timeout is.
const PATIENCE_MIN: Duration = Duration::from_secs(1);
/// The wait between two tries to get the write lock. SQLite's own waits grow to 100 ms, and rarely
/// meet the short moments in which a program that commits in a loop leaves the lock free.
const LOCK_TRY_EVERY: Duration = Duration::from_millis(1);
/// How many prepared statements a connection keeps: more than this crate has.
const STATEMENTS_MAX: usize = 128;
/// A write-ahead log that grew beyond this size in bytes, because of a long reader or a large
/// commit, is cut to it by the first write after a checkpoint, if this program makes that write.
pub(crate) const WAL_BYTES_KEPT: i64 = 64 * 1024 * 1024;

thread_local! {
    /// How long this thread's connection waits for the write lock before it gives up, and since
    /// when it waits. SQLite passes no state to [`wait_for_lock`].
    static LOCK_WAIT: Cell<(Duration, Option<Instant>)> = const { Cell::new((Duration::ZERO, None)) };
}

/// SQLite's busy handler: waits once, if it has not waited for too long. It looks at the machine's
/// time, because under load each wait takes longer than asked for.
fn wait_for_lock(waited: i32) -> bool {
    let (patience, since) = LOCK_WAIT.get();
    let since = since.filter(|_| waited > 0).unwrap_or_else(Instant::now);
    LOCK_WAIT.set((patience, Some(since)));
    let waits = since.elapsed() < patience;
    if waits {
        std::thread::sleep(LOCK_TRY_EVERY);
    }
    waits
}

/// What a thread's connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Writer,
    Reader,
}

/// What every thread of a store shares.
pub(crate) struct Settings {
    pub(crate) path: PathBuf,
    pub(crate) busy_timeout: Duration,
    /// The file that was opened first. The store uses that file and no other.
    pub(crate) file: OnceLock<FileId>,
    /// The write-ahead log of that file, while any thread has it open.
    pub(crate) wal: Mutex<Weak<WalFiles>>,
    pub(crate) clock: Arc<dyn Clock>,
}

impl Settings {
    pub(crate) fn now(&self) -> i64 {
        self.clock.now().as_microsecond()
    }
}

type Job = Box<dyn FnOnce(&mut Session) + Send>;

/// A handle to the thread of a connection.
pub(crate) struct Thread {
    // Dropped first: its end is what the thread waits for.
    jobs: mpsc::Sender<Job>,
    settings: Arc<Settings>,
    _running: Joined,
}

/// Waits for the end of a thread when dropped, so that its connection is closed: the last one to
/// close folds the WAL into the file. Bounded by the job that runs.
struct Joined(Option<JoinHandle<()>>);

impl Drop for Joined {
    fn drop(&mut self) {
        // A job that drops the store's last handle cannot wait for itself.
        let other = |thread: &JoinHandle<()>| thread.thread().id() != std::thread::current().id();
        if let Some(thread) = self.0.take().filter(other) {
            _ = thread.join();
        }
    }
}

impl Thread {
    /// Starts a thread. It ends when the last handle is dropped and its queue is empty.
    pub(crate) fn start(name: &str, role: Role, settings: Arc<Settings>) -> Result<Self> {
        let (jobs, mut queue) = mpsc::channel::<Job>(QUEUE_JOBS_MAX);
        let mut session = Session { settings: settings.clone(), role, connection: None, wal: None };
        let running = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                while let Some(job) = queue.blocking_recv() {
                    job(&mut session);
                }
            })
            .map_err(|error| {
                Error::new(ErrorKind::Unavailable, "open", "store_thread", "no thread could be started")
                    .with_source(error)
            })?;
        Ok(Self { jobs, settings, _running: Joined(Some(running)) })
    }

    /// Runs `work` on the thread's connection and waits for its result.
    ///
    /// Bounded in time: a job that has waited longer than twice the busy timeout is refused without
    /// running, and a running job waits for locks for at most the busy timeout. A job whose caller
    /// has gone is not started. Cancel-safe, but a started job runs to its end.
    pub(crate) async fn call<T, F>(&self, operation: &'static str, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Session) -> Work<T> + Send + 'static,
    {
        let (answer, result) = oneshot::channel();
        let clock = self.settings.clock.clone();
        let queued = clock.monotonic();
        let patience = (self.settings.busy_timeout * 2).max(PATIENCE_MIN);
        let job = move |session: &mut Session| {
            if answer.is_closed() {
                return;
            }
            if clock.monotonic().saturating_sub(queued) > patience {
                _ = answer.send(Err(overloaded(operation, session.role)));
                return;
            }
            let done = catch_unwind(AssertUnwindSafe(|| work(session)))
                .unwrap_or_else(|_| Err(Fault::Classified(panicked(operation))))
                .map_err(|fault| fault.into_error_of_file(operation, &session.settings.path));
            if done.is_err() {
                session.recover();
            }
            _ = answer.send(done);
        };
        self.jobs.send(Box::new(job)).await.map_err(|_| panicked(operation))?;
        result.await.unwrap_or_else(|_| Err(panicked(operation)))
    }
}

fn overloaded(operation: &'static str, role: Role) -> Error {
    let message = match role {
        Role::Writer => "the store's queue is not served in time; another process may hold the write lock",
        Role::Reader => {
            "the store's queue is not served in time, because earlier reads took too long; look at the load of its disk"
        }
    };
    Error::new(ErrorKind::Unavailable, operation, "store_busy", message)
}

fn panicked(operation: &'static str) -> Error {
    let message = "the store's thread met a defect; the call was rolled back";
    Error::new(ErrorKind::Internal, operation, "store_panic", message)
}

fn store_replaced(is_there: bool) -> Error {
    let (kind, message) = match is_there {
        true => (
            ErrorKind::Mismatch,
            "the database file was replaced while it was open; restart postbox, and every writer, to use the new one",
        ),
        false => (ErrorKind::Unavailable, "the database file was moved or deleted while it was open; put it back"),
    };
    Error::new(kind, "open", "store_replaced", message)
}

/// What a job works on: the thread's connection, opened when first needed.
pub(crate) struct Session {
    pub(crate) settings: Arc<Settings>,
    role: Role,
    connection: Option<Connection>,
    /// The log that the connection has open. Kept after that was removed, so that no other one is
    /// ever used.
    wal: Option<Arc<WalFiles>>,
}

impl Session {
    /// The connection to an existing file. Never creates one: only `migrate up` does.
    pub(crate) fn connection(&mut self) -> Work<&mut Connection> {
        let file = file_id(&self.settings.path);
        let opened = self.settings.file.get();
        if opened.is_some() && opened != file.as_ref() {
            // An open connection would go on reading and writing the old file, and what was
            // remembered of it does not fit the new one.
            return Err(store_replaced(file.is_some()).into());
        }
        if self.is_wal_gone() {
            self.wal.iter().for_each(|files| files.give_up());
            self.close();
            return Err(wal_removed().into());
        }
        if self.connection.is_none() {
            if file.is_none() {
                return Err(file_missing("open", &self.settings.path).into());
            }
            self.connection = Some(self.open(OpenFlags::empty())?);
        }
        let connection = self.connection.as_mut().expect("opened just above");
        if self.wal.is_none()
            && let Some(files) = WalFiles::of(connection)
        {
            let mut shared = lock(&self.settings.wal);
            let files = shared.upgrade().unwrap_or_else(|| Arc::new(files));
            *shared = Arc::downgrade(&files);
            self.wal = Some(files);
        }
        Ok(connection)
    }

    /// Whether the write-ahead log that this thread or another one has open was removed.
    fn is_wal_gone(&self) -> bool {
        let open = self.wal.clone().or_else(|| lock(&self.settings.wal).upgrade());
        open.is_some_and(|files| files.are_gone())
    }

    fn close(&mut self) {
        let Some(connection) = self.connection.take() else { return };
        if self.is_wal_gone() {
            // The last one to close would fold pages into the file that do not fit it any more.
            _ = connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true);
        }
    }

    /// The connection to a file that is created if it is missing.
    pub(crate) fn create(&mut self) -> Work<&mut Connection> {
        if self.connection.is_none() {
            // Only for its owner, because it holds payloads. SQLite accepts an empty file as a new
            // database, gives its -wal and -shm files the same mode, and reports why a file cannot
            // be created.
            #[cfg(unix)]
            {
                use std::os::unix::fs::OpenOptionsExt as _;
                let mut options = std::fs::OpenOptions::new();
                let _ = options.write(true).create_new(true).mode(0o600).open(&self.settings.path);
            }
            self.connection = Some(self.open(OpenFlags::SQLITE_OPEN_CREATE)?);
        }
        Ok(self.connection.as_mut().expect("opened just above"))
    }

    /// Runs `work` in a transaction and commits it if `work` succeeds. The transaction takes the
    /// write lock with its first statement, so that it never fails halfway because it cannot get
    /// the lock.
    ///
    /// The commit is flushed to disk, and with it everything that the transaction can see,
    /// including commits of other processes with weaker settings: there is one write-ahead log, and
    /// it is flushed as a whole.
    pub(crate) fn transact<T>(&mut self, work: impl FnOnce(&Transaction<'_>) -> Work<T>) -> Work<T> {
        let transaction = self.connection()?.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let done = work(&transaction)?;
        transaction.commit()?;
        Ok(done)
    }

    /// Begins one snapshot for several reads.
    pub(crate) fn read(&mut self) -> Work<Transaction<'_>> {
        Ok(self.connection()?.transaction()?)
    }

    /// Opens the file with this thread's settings.
    fn open(&self, create: OpenFlags) -> Work<Connection> {
        // No URI flag, because a path is only a path. No shared cache, which would let readers see
        // uncommitted rows.
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX | create;
        let connection = Connection::open_with_flags(&self.settings.path, flags)?;
        if let Some(file) = file_id(&self.settings.path) {
            _ = self.settings.file.set(file);
        }
        match self.role {
            Role::Writer => {
                LOCK_WAIT.set((self.settings.busy_timeout, None));
                connection.busy_handler(Some(wait_for_lock))?;
            }
            Role::Reader => connection.busy_timeout(self.settings.busy_timeout)?,
        }
        connection.set_prepared_statement_cache_capacity(STATEMENTS_MAX);
        if connection.is_readonly("main")? {
            return Err(read_only("open").into());
        }
        // What is published, or acknowledged to a sender, is on disk first.
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.pragma_update_and_check(None, "journal_size_limit", WAL_BYTES_KEPT, |_| Ok(()))?;
        if self.role == Role::Reader {
            connection.pragma_update(None, "query_only", true)?;
        }
        Ok(connection)
    }

    /// Cleans up after a failed job: a connection that is still inside a transaction, or whose file
    /// is gone, is dropped.
    fn recover(&mut self) {
        if self.connection.as_ref().is_some_and(|connection| !connection.is_autocommit())
            || !self.settings.path.exists()
        {
            self.close();
            self.wal = None;
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::MachineClock;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn thread() -> (tempfile::TempDir, Thread) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("shop.db");
        Connection::open(&path).expect("opened").execute_batch("PRAGMA journal_mode = WAL").expect("set");
        let clock = Arc::new(MachineClock::new());
        let settings = Settings { path, busy_timeout: PATIENCE, file: OnceLock::new(), wal: Mutex::default(), clock };
        (folder, Thread::start("test", Role::Writer, Arc::new(settings)).expect("started"))
    }

    #[tokio::test]
    async fn a_commit_is_flushed_before_it_is_answered() {
        const FULL: i64 = 2;
        let (_folder, thread) = thread();
        let ask = |session: &mut Session| {
            session.transact(|tx| Ok(tx.query_row("PRAGMA synchronous", [], |row| row.get::<_, i64>(0))?))
        };
        assert_eq!(thread.call("test", ask).await.expect("asked"), FULL);
    }

    #[tokio::test]
    async fn the_writer_tries_for_the_lock_each_millisecond_until_the_busy_timeout_is_over() {
        let (folder, thread) = thread();
        let other = Connection::open(folder.path().join("shop.db")).expect("opened");
        other.execute_batch("BEGIN IMMEDIATE").expect("locked");
        let (began, short) = (Instant::now(), Duration::from_millis(20));
        let waited = move |session: &mut Session| {
            session.connection()?;
            // SQLite's own handler would wait for a minute here.
            let (patience, _) = LOCK_WAIT.replace((short, None));
            let code = session.transact(|_| Ok(())).err().map(|it| it.into_error("test"));
            Ok((patience, code.map(|it| it.code().to_owned())))
        };
        let (patience, code) = thread.call("test", waited).await.expect("asked");
        assert_eq!((patience, code.as_deref()), (PATIENCE, Some("store_busy")));
        assert!((short..PATIENCE).contains(&began.elapsed()), "{:?}", began.elapsed());
    }

    #[test]
    fn waits_that_take_long_do_not_prolong_the_busy_timeout() {
        LOCK_WAIT.set((PATIENCE, Some(Instant::now() - PATIENCE)));
        assert!(!wait_for_lock(1), "the one wait took the whole time");
        assert!(wait_for_lock(0), "the next call waits anew");
        assert!(wait_for_lock(1));
    }

    #[test]
    fn who_waits_for_the_reader_does_not_hear_of_a_write_lock() {
        for (role, of_lock) in [(Role::Writer, true), (Role::Reader, false)] {
            assert_eq!(overloaded("test", role).message().contains("write lock"), of_lock, "{role:?}");
        }
    }

    #[tokio::test]
    async fn a_panicking_job_is_an_error_and_rolls_back() {
        let (_folder, thread) = thread();
        let broken: Result<()> = thread
            .call("test", |session| {
                session.transact(|tx| {
                    tx.execute_batch("CREATE TABLE half (id)")?;
                    panic!("on purpose")
                })
            })
            .await;
        assert_eq!(broken.expect_err("a defect").code(), "store_panic");
        let tables = |session: &mut Session| {
            Ok(session.connection()?.query_row("SELECT count(*) FROM sqlite_master", [], |row| row.get::<_, i64>(0))?)
        };
        assert_eq!(thread.call("test", tables).await.expect("the thread lives on"), 0);
    }
}
