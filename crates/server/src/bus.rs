//! `sink = { type = "bus", … }`: delivers events into a log of another store.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_bus::BusSink;
use postbox_config::{Key, Secret, Section, SinkConfig, SinkContext, Table, from_core, secret_always, table, text};
use postbox_core::kit::log_unknown;
use postbox_core::{Error, Inbound, LogName, Receive, Received, Result, Sink, SourceName, Store};
use tokio::sync::OnceCell;

use crate::stores::{StoreConfig, check_store_url, open_store};

table! {
    /// A log in another store: the event bus between two databases.
    struct BusKeys {
        /// The other store, as in `[store]`. With a password in it, write
        /// `"env:OTHER_DATABASE_URL"`.
        url: Secret = secret_always().check(|url| check_store_url(url.expose())), required(r#""env:OTHER_DATABASE_URL""#);
        /// The log in the other store, which must have it.
        log: LogName = text(from_core::<LogName>), default("inbox");
        /// The name of this sender in the other store, which remembers the ids of its events under
        /// it.
        source: SourceName = text(from_core::<SourceName>), default("bus");
    }
}

/// The sink's own keys, and the store that its `url` opens.
#[derive(Debug)]
pub(crate) struct BusTable {
    keys: BusKeys,
    store: StoreConfig,
}

impl Table for BusTable {
    fn doc() -> String {
        BusKeys::doc()
    }

    fn keys() -> Vec<Key> {
        BusKeys::keys().into_iter().chain(StoreConfig::option_keys()).collect()
    }

    fn read(section: &Section<'_>) -> Self {
        let keys = BusKeys::read(section);
        Self { store: StoreConfig::read_with(section, keys.url.clone()), keys }
    }
}

#[async_trait]
impl SinkConfig for BusTable {
    async fn build(&self, _: &SinkContext) -> Result<Arc<dyn Sink>> {
        let other = OtherStore { config: self.store.clone(), store: OnceCell::new() };
        Ok(Arc::new(BusSink::new(Arc::new(other), self.keys.log.clone(), self.keys.source.clone())))
    }

    async fn connect(&self, _: &SinkContext) -> Result<String> {
        let store = open_store(&self.store).await?;
        store.validate().await?;
        store.check_receiving().await?;
        let (log, logs) = (&self.keys.log, store.logs().await?);
        if !logs.contains(log) {
            let known: Vec<String> = logs.iter().map(LogName::to_string).collect();
            return Err(log_unknown("connect", log, &known));
        }
        Ok("is reached, its schema is valid".to_owned())
    }
}

/// The other store. Opened on first use, because it may be down when the service starts.
struct OtherStore {
    config: StoreConfig,
    store: OnceCell<Arc<dyn Store>>,
}

impl OtherStore {
    async fn store(&self) -> Result<&Arc<dyn Store>> {
        let open = async || {
            let store = open_store(&self.config).await?;
            // Checked here: a store with an older or newer schema would still accept events, but
            // could store them wrongly.
            store.validate().await?;
            Ok(store)
        };
        self.store.get_or_try_init(open).await.map_err(|error: Error| {
            let message = format!("the other store (the sink's url): {}", error.message());
            Error::new(error.kind(), error.operation(), error.code().to_owned(), message)
        })
    }
}

#[async_trait]
impl Receive for OtherStore {
    async fn receive_many(&self, log: &LogName, inbound: &[Inbound]) -> Result<Vec<Received>> {
        self.store().await?.receive_many(log, inbound).await
    }

    async fn forget(&self, older_than: Duration) -> Result<u64> {
        self.store().await?.forget(older_than).await
    }
}
