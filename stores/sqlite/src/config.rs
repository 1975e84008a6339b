//! How a store is opened.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_config::{StoreOptions, table};
use postbox_core::{Error, ErrorKind, Result, Store};

use crate::SqliteStore;

/// How long a call waits for another process that holds the write lock: longer than any commit of
/// ours, shorter than a lease.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Where the file is, and how it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqliteConfig {
    /// The database file. It is meant to hold your own tables too.
    pub path: PathBuf,
    /// How long a call waits for another process that holds the write lock. Default 5 s. Then the
    /// call fails as `Unavailable`, code `store_busy`.
    pub busy_timeout: Duration,
}

impl SqliteConfig {
    /// The default settings for a file.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), busy_timeout: BUSY_TIMEOUT }
    }

    /// Returns the absolute path, or why no store can be there.
    pub(crate) fn resolved(&self) -> Result<PathBuf> {
        let refuse = |code: &'static str, message: String| Err(Error::new(ErrorKind::Mismatch, "open", code, message));
        if self.path.as_os_str().is_empty() || self.path == Path::new(":memory:") {
            return refuse(
                "store_path_invalid",
                "a SQLite store needs a file that several connections share; for a store in memory use memory:".into(),
            );
        }
        // In an absolute path, a leading `file:` is part of a name, never a URI.
        let path = std::path::absolute(&self.path).map_err(|error| {
            Error::new(ErrorKind::Mismatch, "open", "store_path_invalid", format!("{}: {error}", self.path.display()))
        })?;
        let folder = path.parent().unwrap_or(Path::new("/"));
        if !folder.is_dir() {
            return refuse(
                "store_folder_missing",
                format!("the folder {} does not exist; create it or correct the store's path", folder.display()),
            );
        }
        let wal = wal_of(&path);
        // In this order: while another process creates the store, its file is there before its WAL.
        if wal.metadata().is_ok_and(|wal| wal.len() > 0) && !path.exists() {
            return refuse(
                "store_file_missing",
                format!(
                    "{} is gone, but {} holds commits of it; put the file back beside it, or remove {} to begin with a new store",
                    path.display(),
                    wal.display(),
                    wal.display()
                ),
            );
        }
        if path.is_dir() {
            return refuse("store_path_invalid", format!("{} is a folder; name a file in it", path.display()));
        }
        Ok(path)
    }
}

/// The write-ahead log of a database file.
pub(crate) fn wal_of(path: &Path) -> PathBuf {
    PathBuf::from(format!("{}-wal", path.display()))
}

/// Why a URL with a `?` or a URI of SQLite is refused.
const NO_PARAMETERS: &str = "sqlite: takes the path of a file, no parameters and no URI; leave out \"file:\", the \"?\" and what follows it, \
     e.g. \"sqlite:postbox.db\"";

table! {
    /// SQLite.
    pub struct SqliteTable {}
}

#[async_trait]
impl StoreOptions for SqliteTable {
    fn check(&self, url: &str) -> Result<(), String> {
        let cure = "sqlite: needs a file, e.g. \"sqlite:postbox.db\"; for a store without one write \"memory:\"";
        // Other programs read parameters and a URI there. As a part of the name they would make
        // another file.
        match path(url) {
            Some(path) if url.contains('?') || path.to_string_lossy().starts_with("file:") => {
                Err(NO_PARAMETERS.to_owned())
            }
            Some(_) => Ok(()),
            None => Err(cure.to_owned()),
        }
    }

    fn risk(&self, _: &str) -> Option<&'static str> {
        None
    }

    fn describe(&self, url: &str) -> String {
        let path = path(url).unwrap_or_default();
        std::path::absolute(&path).unwrap_or(path).display().to_string()
    }

    async fn open(&self, url: &str, _: bool) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(SqliteStore::open(SqliteConfig::new(path(url).unwrap_or_default())).await?))
    }
}

/// Parses `sqlite:PATH`, `sqlite://PATH` or `sqlite:///PATH`.
fn path(url: &str) -> Option<PathBuf> {
    let path = url.strip_prefix("sqlite:")?;
    let path = path.strip_prefix("//").unwrap_or(path);
    (!path.is_empty() && path != ":memory:").then(|| path.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_a_file() {
        assert_eq!(path("sqlite:a.db"), Some("a.db".into()));
        assert_eq!(path("sqlite:///tmp/a.db"), Some("/tmp/a.db".into()));
        assert_eq!(path("sqlite:").or(path("sqlite::memory:")), None);
    }

    #[test]
    fn a_url_has_no_parameters_and_is_no_uri() {
        let table = SqliteTable {};
        for url in ["sqlite:shop.db?mode=rwc", "sqlite:file:shop.db", "sqlite://file:shop.db"] {
            assert_eq!(table.check(url), Err(NO_PARAMETERS.to_owned()), "{url}");
        }
        assert_eq!(table.check("sqlite:shop.db"), Ok(()));
    }
}
