//! Which store a URL means.

use std::path::PathBuf;
use std::sync::Arc;

use postbox_core::{Error, LogName, MemoryStore, Result, Store};
use postbox_engine::TokioClock;
use postbox_postgres::{PostgresConfig, PostgresStore, Roles};
use postbox_sqlite::{SqliteConfig, SqliteStore};

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

/// Opens the store that `config` names. Makes nothing: a SQLite file that is not there is made by its migration.
pub async fn open_store(config: &StoreConfig) -> Result<Arc<dyn Store>> {
    Ok(match parse(config)? {
        StoreUrl::Postgres => Arc::new(PostgresStore::connect(postgres(config)).await?),
        StoreUrl::Sqlite(path) => Arc::new(SqliteStore::open(SqliteConfig::new(path)).await?),
        StoreUrl::Memory => Arc::new(MemoryStore::new(Arc::new(TokioClock::new()))),
    })
}

/// The logs there are.
pub async fn list_logs(config: &StoreConfig) -> Result<Vec<LogName>> {
    open_store(config).await?.logs().await
}

/// How many events those logs have that are `wanted`, whoever reads them or nobody.
pub async fn count_logs(config: &StoreConfig, wanted: impl Fn(&LogName) -> bool) -> Result<Vec<(LogName, u64)>> {
    let store = open_store(config).await?;
    let mut counts = Vec::new();
    for log in store.logs().await?.into_iter().filter(wanted) {
        let count = store.count(&log).await?;
        counts.push((log, count));
    }
    Ok(counts)
}

/// Checks that nothing in the store keeps messages from being received. Changes nothing.
pub async fn check_receiving(config: &StoreConfig) -> Result<()> {
    open_store(config).await?.check_receiving().await
}

/// Puts cursors and rows right after a dump was restored into another Postgres cluster. Stop every relay first.
pub async fn rebase(config: &StoreConfig) -> Result<()> {
    open_store(config).await?.rebase().await
}

/// The GRANT statements that roles need on a Postgres store.
pub async fn grants(config: &StoreConfig, roles: &Roles) -> Result<String> {
    match parse(config)? {
        StoreUrl::Postgres => PostgresStore::connect(postgres(config)).await?.grants(roles).await,
        StoreUrl::Sqlite(_) | StoreUrl::Memory => {
            let text = "only a Postgres store has roles; who may write an SQLite file is decided by the file system";
            Err(Error::invalid("grants", "roles_unsupported", text))
        }
    }
}

fn postgres(config: &StoreConfig) -> PostgresConfig {
    PostgresConfig::new(config.url.expose())
        .schema(config.schema.as_str())
        .pool_size(config.pool)
        .notify(config.notify)
        .statement_timeout(config.statement_timeout)
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
