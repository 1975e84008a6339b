//! The files beside the database that all its connections share, and whether they are still there.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use postbox_core::{Error, ErrorKind};
use rusqlite::Connection;

/// Identifies the file that a path leads to: device and inode.
pub(crate) type FileId = (u64, u64);

pub(crate) fn file_id(path: &Path) -> Option<FileId> {
    std::fs::metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// The write-ahead log that a connection has open, and its index. SQLite removes them when the last
/// connection is closed, and never before.
pub(crate) struct WalFiles {
    /// As SQLite names it: the file that a link leads to.
    database: String,
    ids: [Option<FileId>; 2],
    /// Set for good: once this log is closed, the next one may get the same inodes.
    given_up: AtomicBool,
}

impl WalFiles {
    /// `None` if the connection has no write-ahead log open, e.g. before the schema is made.
    pub(crate) fn of(connection: &Connection) -> Option<Self> {
        // Reading opens it.
        connection.query_row("PRAGMA schema_version", [], |_| Ok(())).ok()?;
        let mode: String = connection.query_row("PRAGMA journal_mode", [], |row| row.get(0)).ok()?;
        let database = connection.path()?.to_owned();
        (mode == "wal").then(|| Self { ids: ids(&database), database, given_up: AtomicBool::new(false) })
    }

    /// Whether they were removed or replaced. Then other programs write to another log, or the file
    /// was overwritten with a copy, and what this log holds does not fit it.
    pub(crate) fn are_gone(&self) -> bool {
        self.given_up.load(Relaxed) || ids(&self.database) != self.ids
    }

    pub(crate) fn give_up(&self) {
        self.given_up.store(true, Relaxed);
    }
}

fn ids(database: &str) -> [Option<FileId>; 2] {
    ["-wal", "-shm"].map(|ending| file_id(format!("{database}{ending}").as_ref()))
}

pub(crate) fn wal_removed() -> Error {
    let message = "the database's -wal or -shm file was removed while it was open, and what only they held is lost; \
                   restart postbox, and every writer";
    Error::new(ErrorKind::Mismatch, "open", "store_replaced", message)
}
