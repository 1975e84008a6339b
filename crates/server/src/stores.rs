//! The stores this program knows, and `[store]`, which selects one.

use std::any::Any;
use std::sync::Arc;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_config::{
    Adapter, Key, Kind, Secret, Section, StoreOptions, Table, entries, from_core, has_stray_end, nested, secret_always,
    table,
};
use postbox_core::{Error, LogName, Result, Store, StoreName};
use postbox_engine::TokioClock;
use postbox_memory::MemoryStore;
use postbox_postgres::{PostgresStore, PostgresTable, Roles, ToolScripts};
use postbox_sqlite::SqliteTable;

/// The URL of a store in memory.
const MEMORY: &str = "memory:";

/// Every type of store, by the prefix of its URLs. A new one is one row here.
const STORES: &[Adapter<dyn StoreOptions>] = &[
    Adapter::new::<PostgresTable>("postgres", "postgres://user@host/db", |keys| Arc::new(PostgresTable::read(keys))),
    Adapter::new::<SqliteTable>("sqlite:", "sqlite:PATH", |keys| Arc::new(SqliteTable::read(keys))),
    Adapter::new::<MemoryTable>(MEMORY, MEMORY, |keys| Arc::new(MemoryTable::read(keys))),
];

table! {
    /// Where the logs are.
    struct UrlTable {
        /// `"postgres://user@host/db?sslmode=verify-full"`, `"sqlite:PATH"` or `"memory:"`. With a
        /// password in it, write `"env:DATABASE_URL"`.
        ///
        /// `--store` and `POSTBOX_STORE` override it ([TLS](#tls-to-postgres)).
        url: Secret = secret_always().check(|url| check_store_url(url.expose())), default("sqlite:postbox.db");
    }
}

table! {
    /// One of several stores, instead of `[store]`: a database for each tenant, or shards.
    struct UrlOfManyTable {
        /// As in `[store]`. With a password in it, write `"env:ACME_DATABASE_URL"`.
        url: Secret = secret_always().check(|url| check_store_url(url.expose())), required(r#""env:ACME_DATABASE_URL""#);
    }
}

/// `[stores.NAME]`.
struct StoreOfMany(StoreConfig);

impl Table for StoreOfMany {
    fn doc() -> String {
        UrlOfManyTable::doc()
    }

    fn keys() -> Vec<Key> {
        UrlOfManyTable::keys().into_iter().chain(StoreConfig::option_keys()).collect()
    }

    fn read(section: &Section<'_>) -> Self {
        let config = StoreConfig::read_with(section, UrlOfManyTable::read(section).url);
        Self(StoreConfig { is_one_of_many: true, ..config })
    }
}

/// All `[stores.NAME]`, by name.
pub(crate) fn stores() -> Kind<Vec<NamedStore>> {
    entries(from_core, nested::<StoreOfMany>())
        .map(|stores| stores.into_iter().map(|(name, StoreOfMany(config))| NamedStore { name, config }).collect())
}

/// One of several stores.
#[derive(Debug, Clone)]
pub struct NamedStore {
    /// Its name.
    pub name: StoreName,
    /// Where it is.
    pub config: StoreConfig,
}

/// `[store]`: where the logs are.
#[derive(Debug, Clone)]
pub struct StoreConfig {
    /// `postgres://…`, `sqlite:PATH` or `memory:`.
    pub url: Secret,
    /// The variable that gave another URL than the configuration.
    pub url_from: Option<&'static str>,
    /// The options of each of [`STORES`], read from the section.
    options: Vec<Arc<dyn StoreOptions>>,
    /// Whether it is one of several stores.
    is_one_of_many: bool,
}

impl Table for StoreConfig {
    fn doc() -> String {
        UrlTable::doc()
    }

    fn keys() -> Vec<Key> {
        UrlTable::keys().into_iter().chain(Self::option_keys()).collect()
    }

    fn read(section: &Section<'_>) -> Self {
        Self::read_with(section, UrlTable::read(section).url)
    }
}

impl StoreConfig {
    /// The keys that stores have besides the URL.
    pub(crate) fn option_keys() -> impl Iterator<Item = Key> {
        STORES.iter().flat_map(|store| (store.keys)())
    }

    /// The store at a URL, with the options of a section.
    pub(crate) fn read_with(section: &Section<'_>, url: Secret) -> Self {
        let options = STORES.iter().map(|store| (store.read)(section)).collect();
        let config = Self { url, url_from: None, options, is_one_of_many: false };
        // Where --store names the store, its tenant is checked with that one.
        let is_replaced = section.reader.options.replaced == Some(section.name("url").as_str());
        if section.has("url")
            && !is_replaced
            && let Some(why) = config.tenant_refused()
        {
            section.fault("tenant", format!("{}: {why}", section.name("tenant")));
        }
        if let Some(risk) = config.risk() {
            section.warning("url", format!("{}: {risk}", section.name("url")));
        }
        config
    }

    /// Whether it works for one tenant of several. What others and subscriptions for all tenants
    /// do is then not visible.
    pub fn is_of_one_tenant(&self) -> bool {
        self.chosen().is_ok_and(|chosen| self.has_tenant(chosen))
    }

    /// Whether a tenant is written, whatever store is chosen: `--store` may name it later.
    pub(crate) fn names_tenant(&self) -> bool {
        self.options.iter().any(|options| self.has_tenant(&**options))
    }

    fn has_tenant(&self, options: &dyn StoreOptions) -> bool {
        let postgres = (options as &dyn Any).downcast_ref::<PostgresTable>();
        postgres.is_some_and(|postgres| postgres.config(self.url.expose()).tenant.is_some())
    }

    /// Returns why its `tenant` must be left out, if it has one: the store would ignore it.
    pub fn tenant_refused(&self) -> Option<&'static str> {
        let is_ignored = self.names_tenant() && self.chosen().is_ok() && !self.is_of_one_tenant();
        is_ignored.then_some("only a Postgres store separates tenants; leave it out")
    }

    /// Returns what is risky about the connection to the store, if anything. Never repeats the URL.
    pub fn risk(&self) -> Option<&'static str> {
        self.chosen().ok()?.risk(self.url.expose())
    }

    /// Whether it is gone when the program ends, so that no other program can look at it.
    pub fn is_in_memory(&self) -> bool {
        self.url.expose() == MEMORY
    }

    /// Says in a few words which store it is, as errors do, and which variable chose it. Never
    /// contains a password.
    pub fn describe(&self) -> String {
        let at = self.chosen().map_or_else(|wrong| wrong, |store| store.describe(self.url.expose()));
        match self.url_from {
            Some(variable) => format!("{at} (from {variable})"),
            None => at,
        }
    }

    /// Whether both are the same store, as far as the configuration shows. Every memory store is
    /// its own.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.url == other.url && !self.is_in_memory() && format!("{:?}", self.options) == format!("{:?}", other.options)
    }

    fn chosen(&self) -> Result<&dyn StoreOptions, String> {
        find(self.url.expose()).map(|index| &*self.options[index])
    }

    /// As `chosen`, and the URL is valid.
    fn checked(&self) -> Result<&dyn StoreOptions> {
        let checked = self.chosen().and_then(|store| store.check(self.url.expose()).map(|()| store));
        checked.map_err(|text| Error::invalid("open", "store_url_invalid", text))
    }
}

impl Default for StoreConfig {
    fn default() -> Self {
        Section::empty(Self::read)
    }
}

/// Returns the row for a URL. The message never repeats the URL, which may hold a password.
fn find(url: &str) -> Result<usize, String> {
    STORES.iter().position(|store| url.starts_with(store.name)).ok_or_else(|| {
        // Nobody who mistyped a URL wants to lose what is in the store.
        let lasting = STORES.iter().filter(|store| store.name != MEMORY);
        let examples: Vec<_> = lasting.map(|store| format!("{:?}", store.example)).collect();
        format!("no such kind of store; write {}", examples.join(" or "))
    })
}

/// Checks a store's URL. The message never repeats it.
pub fn check_store_url(url: &str) -> Result<(), String> {
    if has_stray_end(url) {
        return Err("the URL begins or ends with a line break or a tab; remove it".into());
    }
    let store = &STORES[find(url)?];
    Section::empty(store.read).check(url)
}

table! {
    /// A store that is gone when the program ends.
    struct MemoryTable {}
}

#[async_trait]
impl StoreOptions for MemoryTable {
    fn check(&self, url: &str) -> Result<(), String> {
        if url == MEMORY { Ok(()) } else { Err("a store in memory has no path; write \"memory:\"".into()) }
    }

    fn risk(&self, _: &str) -> Option<&'static str> {
        None
    }

    fn describe(&self, _: &str) -> String {
        "the memory of this process".to_owned()
    }

    async fn open(&self, _: &str, _: bool) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(MemoryStore::new(Arc::new(TokioClock::new()))))
    }
}

/// Opens the store that `config` names.
pub async fn open_store(config: &StoreConfig) -> Result<Arc<dyn Store>> {
    config.checked()?.open(config.url.expose(), config.is_one_of_many).await
}

/// Validates the schema, and returns when it was created. A standby without a schema is said to be
/// a standby: `migrate up` fails there.
pub async fn validate_schema(store: &dyn Store) -> Result<Timestamp> {
    match store.validate().await {
        Err(error) if error.code() == "schema_missing" => check_standby(store).await.and(Err(error)),
        validated => validated,
    }
}

/// Refuses a standby. Whatever else keeps a store from receiving is no error here.
pub async fn check_standby(store: &dyn Store) -> Result<()> {
    match store.check_receiving().await {
        Err(error) if error.code() == "store_read_only" => Err(error),
        _ => Ok(()),
    }
}

/// The GRANT statements that roles need on a Postgres store.
pub async fn grants(config: &StoreConfig, roles: &Roles) -> Result<String> {
    match (config.checked()? as &dyn Any).downcast_ref::<PostgresTable>() {
        Some(postgres) => PostgresStore::connect(postgres.config(config.url.expose())).await?.grants(roles).await,
        None => {
            let text = "only a Postgres store has roles; who may write an SQLite file is decided by the file system";
            Err(Error::invalid("grants", "roles_unsupported", text))
        }
    }
}

/// Checks that the role of a Postgres store may deliver from these logs, and receive.
pub(crate) async fn check_rights(config: &StoreConfig, logs: &[LogName]) -> Result<()> {
    let Some(postgres) = (config.checked()? as &dyn Any).downcast_ref::<PostgresTable>() else { return Ok(()) };
    PostgresStore::connect(postgres.config(config.url.expose())).await?.check_relay_rights(logs).await
}

/// The schema of a Postgres store, for tools that migrate a database.
pub fn tool_scripts(config: &StoreConfig) -> Result<ToolScripts> {
    match (config.checked()? as &dyn Any).downcast_ref::<PostgresTable>() {
        Some(postgres) => Ok(PostgresStore::new(postgres.config(config.url.expose()))?.tool_scripts()),
        None => {
            let text = "files for other tools are made for a Postgres store only; an SQLite store gets its schema from `postbox migrate up`, \
                 or from `store.up()` in your program; for a Postgres store, name it: --store postgres://…";
            Err(Error::invalid("migrate", "tools_unsupported", text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_store_has_its_url() {
        for url in ["postgres://h/db", "postgresql://h/db", "sqlite:a.db", "sqlite:///tmp/a.db", "memory:"] {
            assert_eq!(check_store_url(url), Ok(()), "{url}");
        }
        for url in ["sqlite:", "sqlite::memory:", "memory:x", "postgres:u@h/db", ""] {
            assert!(check_store_url(url).is_err(), "{url}");
        }
        assert_eq!(check_store_url("postgres://u@h/db?password=hunter2 "), Ok(()), "a password may end with a blank");
        assert!(check_store_url("mysql://u:hunter2@h").is_err_and(|text| !text.contains("hunter2")));
        assert!(check_store_url("shop.db").is_err_and(|text| text.contains("sqlite:PATH") && !text.contains(MEMORY)));
    }
}
