//! Which store a URL means.

use std::path::PathBuf;
use std::sync::Arc;

use postbox_core::{Error, ErrorKind, Result, Store};

use crate::config::StoreConfig;

/// A store's URL, taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreUrl {
    /// `postgres://…` or `postgresql://…`: the driver reads the whole of it.
    Postgres,
    /// `sqlite:PATH`, `sqlite://PATH` or `sqlite:///PATH`.
    Sqlite(PathBuf),
    /// `memory:`: gone when the program ends.
    Memory,
}

impl StoreUrl {
    /// Takes a URL apart. The message never repeats the URL, which may hold a password.
    pub fn parse(url: &str) -> Result<Self, String> {
        if url.starts_with("postgres://") || url.starts_with("postgresql://") {
            return Ok(Self::Postgres);
        }
        if let Some(path) = url.strip_prefix("sqlite:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() || path == ":memory:" {
                return Err(
                    "sqlite: needs a file, e.g. \"sqlite:postbox.db\"; for a store without one write \"memory:\""
                        .into(),
                );
            }
            return Ok(Self::Sqlite(path.into()));
        }
        if url == "memory:" {
            return Ok(Self::Memory);
        }
        Err("no such kind of store; write \"postgres://user@host/db\", \"sqlite:PATH\" or \"memory:\"".into())
    }
}

/// What to do when the SQLite file is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissingFile {
    /// Make it: only for whoever creates the schema.
    Create,
    /// Say so: a mistyped path makes no empty database.
    Refuse,
}

/// Opens the store that `config` names.
pub async fn open_store(config: &StoreConfig, missing: MissingFile) -> Result<Arc<dyn Store>> {
    match parse(config)? {
        StoreUrl::Postgres => Err(later()),
        StoreUrl::Sqlite(path) => {
            if missing == MissingFile::Refuse && !path.exists() {
                return Err(Error::new(
                    ErrorKind::Mismatch,
                    "open",
                    "store_missing",
                    format!("there is no file {}; make it with `postbox migrate up`", path.display()),
                ));
            }
            Err(later())
        }
        StoreUrl::Memory => Err(later()),
    }
}

/// All migrations of the kind of store that `config` names, as one SQL script. Needs no connection.
pub fn schema_script(config: &StoreConfig) -> Result<String> {
    match parse(config)? {
        StoreUrl::Postgres => Err(later()),
        StoreUrl::Sqlite(_) => Err(later()),
        StoreUrl::Memory => Ok("-- the memory store has no schema\n".into()),
    }
}

/// How many events the outbox has, whoever reads it.
pub async fn count_outbox(config: &StoreConfig) -> Result<u64> {
    match parse(config)? {
        StoreUrl::Postgres => Err(later()),
        StoreUrl::Sqlite(_) => Err(later()),
        StoreUrl::Memory => Ok(0),
    }
}

fn later() -> Error {
    Error::new(ErrorKind::Internal, "open", "not_yet", "not wired yet")
}

fn parse(config: &StoreConfig) -> Result<StoreUrl> {
    StoreUrl::parse(config.url.expose()).map_err(|text| Error::invalid("open", "store_url_invalid", text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_store_has_its_url() {
        assert_eq!(StoreUrl::parse("postgres://h/db"), Ok(StoreUrl::Postgres));
        assert_eq!(StoreUrl::parse("sqlite:a.db"), Ok(StoreUrl::Sqlite("a.db".into())));
        assert_eq!(StoreUrl::parse("sqlite:///tmp/a.db"), Ok(StoreUrl::Sqlite("/tmp/a.db".into())));
        assert_eq!(StoreUrl::parse("memory:"), Ok(StoreUrl::Memory));
        assert!(StoreUrl::parse("sqlite:").is_err());
        assert!(StoreUrl::parse("mysql://u:hunter2@h").is_err_and(|text| !text.contains("hunter2")));
    }
}
