//! The stores this program knows, and `[store]`, which names one.

use std::path::PathBuf;
use std::sync::Arc;

use futures::future::BoxFuture;
use postbox_config::{Fields, Key, Kind, Place, Secret, SecretText, Section, Shape, Table, default, table};
use postbox_core::{Error, LogName, MemoryStore, Result, Store};
use postbox_engine::TokioClock;
use postbox_postgres::{PostgresConfig, PostgresStore, PostgresTable, Roles};
use postbox_sqlite::{SqliteConfig, SqliteStore};

/// One row of the table of stores.
struct StoreType {
    /// What its URLs begin with.
    prefixes: &'static [&'static str],
    example: &'static str,
    /// What it has in `[store]` beside the URL.
    keys: fn() -> Vec<Key>,
    /// Checks the URL; the message never repeats it.
    check: fn(&str) -> Result<(), String>,
    /// What is allowed in the URL and still a risk.
    risk: fn(&str) -> Option<&'static str>,
    /// Opens it. Makes nothing: a SQLite file that is not there is made by its migration.
    open: for<'a> fn(&'a StoreConfig) -> BoxFuture<'a, Result<Arc<dyn Store>>>,
}

/// Every kind of store. A new one is one row here.
const STORES: &[StoreType] = &[
    StoreType {
        prefixes: &["postgres://", "postgresql://"],
        example: "postgres://user@host/db",
        keys: PostgresTable::keys,
        // The driver reads the whole of it.
        check: |_| Ok(()),
        risk: |url| {
            PostgresConfig::new(url).is_unverified().then_some(
                "the database is on another machine and its certificate is not checked, so whoever stands between can \
                 read the password and every event; write sslmode=verify-full into the URL (and sslrootcert=FILE for \
                 an authority of your own)",
            )
        },
        open: |config| {
            Box::pin(async move {
                let store = PostgresStore::connect(config.postgres.config(config.url.expose())).await?;
                Ok(Arc::new(store) as Arc<dyn Store>)
            })
        },
    },
    StoreType {
        prefixes: &["sqlite:"],
        example: "sqlite:PATH",
        keys: Vec::new,
        check: |url| match sqlite_path(url) {
            Some(_) => Ok(()),
            None => {
                Err("sqlite: needs a file, e.g. \"sqlite:postbox.db\"; for a store without one write \"memory:\""
                    .into())
            }
        },
        risk: |_| None,
        open: |config| {
            Box::pin(async move {
                let path = sqlite_path(config.url.expose()).unwrap_or_default();
                Ok(Arc::new(SqliteStore::open(SqliteConfig::new(path)).await?) as Arc<dyn Store>)
            })
        },
    },
    StoreType {
        prefixes: &["memory:"],
        example: "memory:",
        keys: Vec::new,
        check: |url| {
            if url == "memory:" { Ok(()) } else { Err("a store in memory has no path; write \"memory:\"".into()) }
        },
        risk: |_| None,
        open: |_| Box::pin(async { Ok(Arc::new(MemoryStore::new(Arc::new(TokioClock::new()))) as Arc<dyn Store>) }),
    },
];

/// `sqlite:PATH`, `sqlite://PATH` or `sqlite:///PATH`.
fn sqlite_path(url: &str) -> Option<PathBuf> {
    let path = url.strip_prefix("sqlite:")?;
    let path = path.strip_prefix("//").unwrap_or(path);
    (!path.is_empty() && path != ":memory:").then(|| path.into())
}

/// The row that a URL means. The message never repeats the URL, which may hold a password.
fn store_type(url: &str) -> Result<&'static StoreType, String> {
    let found = STORES.iter().find(|store| store.prefixes.iter().any(|prefix| url.starts_with(prefix)));
    let Some(found) = found else {
        let examples: Vec<_> = STORES.iter().map(|store| format!("{:?}", store.example)).collect();
        return Err(format!("no such kind of store; write {}", examples.join(" or ")));
    };
    (found.check)(url).map(|()| found)
}

/// Checks a store's URL. The message never repeats it.
pub fn check_store_url(url: &str) -> Result<(), String> {
    store_type(url).map(drop)
}

table! {
    /// Where the logs are.
    struct UrlTable {
        /// `"postgres://user@host/db?sslmode=verify-full"`, `"sqlite:PATH"` or `"memory:"`. With a
        /// password in it, write `"env:DATABASE_URL"`.
        ///
        /// `--store` and `POSTBOX_STORE` win ([TLS](#tls-to-postgres)).
        url: Secret = StoreUrl, default("sqlite:postbox.db");
    }
}

/// A secret, because it may hold a password.
struct StoreUrl;

impl Kind for StoreUrl {
    type Value = Secret;

    fn shape(&self) -> Shape {
        Shape::Text("URL")
    }

    fn read(&self, place: &Place<'_>) -> Option<Secret> {
        let url = SecretText::Always.read(place)?;
        match check_store_url(url.expose()) {
            Ok(()) => Some(url),
            Err(text) => place.fault(format!("{}: {text}", place.name)),
        }
    }
}

/// `[store]`: where the logs are.
#[derive(Debug, Clone, PartialEq)]
pub struct StoreConfig {
    /// `postgres://…`, `sqlite:PATH` or `memory:`.
    pub url: Secret,
    /// What Postgres has beside the URL. Other stores have nothing.
    pub postgres: PostgresTable,
}

impl Fields for StoreConfig {
    fn doc() -> String {
        UrlTable::doc()
    }

    fn keys() -> Vec<Key> {
        let rows = STORES.iter().flat_map(|store| (store.keys)());
        UrlTable::keys().into_iter().chain(rows).collect()
    }

    fn fields(section: &Section<'_>) -> Self {
        Self { url: UrlTable::fields(section).url, postgres: PostgresTable::read(section) }
    }
}

impl Table for StoreConfig {
    fn validate(&self, section: &Section<'_>) {
        if let Some(risk) = self.risk() {
            section.warning("url", format!("{}: {risk}", section.name("url")));
        }
    }
}

impl Default for StoreConfig {
    fn default() -> Self {
        Section::empty(Self::fields)
    }
}

impl StoreConfig {
    /// What is risky about the way to the store. Never repeats the URL.
    pub fn risk(&self) -> Option<&'static str> {
        let url = self.url.expose();
        store_type(url).ok().and_then(|store| (store.risk)(url))
    }

    async fn open(&self) -> Result<Arc<dyn Store>> {
        let found = store_type(self.url.expose());
        let found = found.map_err(|text| Error::invalid("open", "store_url_invalid", text))?;
        (found.open)(self).await
    }
}

/// Opens the store that `config` names.
pub async fn open_store(config: &StoreConfig) -> Result<Arc<dyn Store>> {
    config.open().await
}

/// The logs there are.
pub async fn list_logs(config: &StoreConfig) -> Result<Vec<LogName>> {
    config.open().await?.logs().await
}

/// How many events those logs have that are `wanted`, whoever reads them or nobody.
pub async fn count_logs(config: &StoreConfig, wanted: impl Fn(&LogName) -> bool) -> Result<Vec<(LogName, u64)>> {
    let store = config.open().await?;
    let mut counts = Vec::new();
    for log in store.logs().await?.into_iter().filter(wanted) {
        let count = store.count(&log).await?;
        counts.push((log, count));
    }
    Ok(counts)
}

/// Checks that nothing in the store keeps messages from being received. Changes nothing.
pub async fn check_receiving(config: &StoreConfig) -> Result<()> {
    config.open().await?.check_receiving().await
}

/// Puts cursors and rows right after a dump was restored into another Postgres cluster. Stop every
/// relay first.
pub async fn rebase(config: &StoreConfig) -> Result<()> {
    config.open().await?.rebase().await
}

/// The GRANT statements that roles need on a Postgres store.
pub async fn grants(config: &StoreConfig, roles: &Roles) -> Result<String> {
    let url = config.url.expose();
    if !STORES[0].prefixes.iter().any(|prefix| url.starts_with(prefix)) {
        let text = "only a Postgres store has roles; who may write an SQLite file is decided by the file system";
        return Err(Error::invalid("grants", "roles_unsupported", text));
    }
    PostgresStore::connect(config.postgres.config(url)).await?.grants(roles).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_store_has_its_url() {
        for url in ["postgres://h/db", "postgresql://h/db", "sqlite:a.db", "memory:"] {
            assert_eq!(check_store_url(url), Ok(()), "{url}");
        }
        assert_eq!(sqlite_path("sqlite:a.db"), Some("a.db".into()));
        assert_eq!(sqlite_path("sqlite:///tmp/a.db"), Some("/tmp/a.db".into()));
        assert!(check_store_url("sqlite:").is_err() && check_store_url("sqlite::memory:").is_err());
        assert!(check_store_url("memory:x").is_err());
        assert!(check_store_url("mysql://u:hunter2@h").is_err_and(|text| !text.contains("hunter2")));
    }
}
