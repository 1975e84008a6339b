//! The store under test, as the orchestrator sees it: plain SQL and files, no product code.

pub(crate) mod postgres;
pub(crate) mod sqlite;

use std::path::Path;
use std::process::Command;

use clap::ValueEnum;

use self::postgres::PostgresBed;
use self::sqlite::SqliteBed;
use crate::relay::{LANES_MAIN, LANES_PART, WINDOW};

/// The kind of store, and what is in front of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StoreKind {
    /// Postgres 15; each relay behind a proxy of its own.
    Postgres,
    /// The same with a pooler in transaction mode between proxies and server.
    Pooler,
    /// One SQLite file.
    Sqlite,
}

impl StoreKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Postgres => "postgres",
            Self::Pooler => "pooler",
            Self::Sqlite => "sqlite",
        }
    }
}

/// A running store.
pub(crate) enum Bed {
    Postgres(Box<PostgresBed>),
    Sqlite(SqliteBed),
}

/// An event as an operator names it: its id, and its name in the ledgers (`TX/N`).
pub(crate) struct Named {
    pub(crate) id: String,
    pub(crate) event: String,
}

impl Bed {
    pub(crate) fn relay_url(&self, number: usize) -> String {
        match self {
            Self::Postgres(bed) => bed.relay_url(number),
            Self::Sqlite(bed) => bed.url(),
        }
    }

    /// The store for writers: `postgres://…`, or a path.
    pub(crate) fn writer_store(&self) -> String {
        match self {
            Self::Postgres(bed) => bed.writer_url(),
            Self::Sqlite(bed) => bed.path().display().to_string(),
        }
    }

    /// The URL for operator commands, which bypasses all faults.
    pub(crate) fn operator_url(&self) -> String {
        match self {
            Self::Postgres(bed) => bed.url().to_owned(),
            Self::Sqlite(bed) => bed.url(),
        }
    }

    /// Creates the writers' tables, and the triggers that audit the product's tables.
    pub(crate) async fn prepare(&self) -> anyhow::Result<()> {
        match self {
            Self::Postgres(bed) => bed.prepare().await,
            Self::Sqlite(bed) => bed.prepare(),
        }
    }

    /// Some events of a subscription in a state, for an operator to name.
    pub(crate) async fn some_events(&self, of: &str, state: &str, limit: i64) -> anyhow::Result<Vec<Named>> {
        match self {
            Self::Postgres(bed) => bed.some_events(of, state, limit).await,
            Self::Sqlite(bed) => bed.some_events(of, state, limit),
        }
    }

    /// Most events in flight at one relay: the lanes of the relay that holds most.
    pub(crate) async fn window_of_one(&self) -> u64 {
        let lanes = match self {
            Self::Postgres(bed) => bed.lanes_of_one().await,
            Self::Sqlite(bed) => bed.lanes_of_one(),
        };
        lanes.ok().and_then(|lanes| u64::try_from(lanes).ok()).map_or(window_of_all(), |lanes| lanes * WINDOW)
    }

    /// Writes the database's part of the files for the checker.
    pub(crate) async fn dump(&self, folder: &Path) -> anyhow::Result<()> {
        match self {
            Self::Postgres(bed) => bed.dump(folder).await,
            Self::Sqlite(bed) => bed.dump(folder),
        }
    }
}

/// Most events in flight at all relays.
pub(crate) fn window_of_all() -> u64 {
    (LANES_MAIN + LANES_PART) * WINDOW
}

/// A small file system in memory that can be filled; only root can mount one.
#[derive(Debug)]
pub(crate) struct Mount {
    folder: std::path::PathBuf,
}

impl Mount {
    pub(crate) fn make(folder: &Path, mebibytes: u32) -> Option<Self> {
        let options = format!("size={mebibytes}m,mode=755");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "postbox-crash"]).arg(folder).stderr(std::process::Stdio::null());
        mount.status().is_ok_and(|status| status.success()).then(|| Self { folder: folder.to_owned() })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.folder).status();
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// Fills a file system until dropped.
pub(crate) struct Ballast {
    file: std::path::PathBuf,
}

impl Ballast {
    pub(crate) fn fill(folder: &Path) -> anyhow::Result<Self> {
        let file = folder.join("ballast");
        let ballast = Self { file: file.clone() };
        let mut written = std::fs::File::create(&file)?;
        let piece = vec![0; 1 << 20];
        // Until it is full, in ever smaller pieces.
        let mut size = piece.len();
        while size > 0 {
            if std::io::Write::write(&mut written, &piece[..size]).is_err() {
                size /= 8;
            }
        }
        Ok(ballast)
    }
}

impl Drop for Ballast {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.file);
    }
}

/// Writes lines to a file.
fn write_lines(path: &Path, lines: impl IntoIterator<Item = String>) -> anyhow::Result<()> {
    let mut text = String::new();
    for line in lines {
        text.push_str(&line);
        text.push('\n');
    }
    Ok(std::fs::write(path, text)?)
}
