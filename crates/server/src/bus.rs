//! `sink = { type = "bus", … }`: delivers events into a log of another store.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_bus::BusSink;
use postbox_config::{Key, Secret, Section, SinkConfig, SinkContext, Table, from_core, secret, table, text};
use postbox_core::kit::log_unknown;
use postbox_core::{Error, Inbound, LogName, Receive, Received, Result, Sink, SourceName, Store};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::stores::{StoreConfig, check_store_url, open_store, validate_schema};

/// How long the other store counts as valid. Somebody may migrate it while this program runs.
const VALID_FOR: Duration = Duration::from_secs(10);

table! {
    /// A log in another store: the event bus between two databases.
    struct BusKeys {
        /// The other store, as in `[store]`. With a password in it, write
        /// `"env:OTHER_DATABASE_URL"`.
        url: Secret = secret().check(|url| check_store_url(url.expose())), required(r#""env:OTHER_DATABASE_URL""#);
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
        let other = OtherStore { config: self.store.clone(), opened: Mutex::default() };
        Ok(Arc::new(BusSink::new(Arc::new(other), self.keys.log.clone(), self.keys.source.clone())))
    }

    async fn connect(&self, _: &SinkContext) -> Result<String> {
        let store = open_store(&self.store).await?;
        validate_schema(store.as_ref()).await?;
        store.check_receiving().await?;
        let (log, logs) = (&self.keys.log, store.logs().await?);
        if !logs.contains(log) {
            let known: Vec<String> = logs.iter().map(LogName::to_string).collect();
            return Err(log_unknown("connect", log, &known));
        }
        Ok(format!("{} is reached, its schema is valid", self.store.describe()))
    }
}

/// The other store. Opened on first use, because it may be down when the service starts.
struct OtherStore {
    config: StoreConfig,
    /// The store, and when it was found to be valid.
    opened: Mutex<Option<(Arc<dyn Store>, Instant)>>,
}

impl OtherStore {
    async fn store(&self) -> Result<Arc<dyn Store>> {
        let mut opened = self.opened.lock().await;
        if let Some((store, at)) = &*opened
            && at.elapsed() < VALID_FOR
        {
            return Ok(Arc::clone(store));
        }
        let known = opened.as_ref().map(|(store, _)| Arc::clone(store));
        let valid = async {
            let store = match known {
                Some(store) => store,
                None => open_store(&self.config).await?,
            };
            // A store with an older or newer schema would still accept events, but could store them
            // wrongly.
            store.validate().await?;
            Ok(store)
        };
        let store = valid.await.map_err(|error: Error| {
            let message = format!("the other store (the sink's url): {}", error.message());
            Error::new(error.kind(), error.operation(), error.code().to_owned(), message)
        })?;
        *opened = Some((Arc::clone(&store), Instant::now()));
        Ok(store)
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

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use postbox_core::{Clock, Delivery, EventId, Migrate as _, NewEvent, Outcome, Seq};
    use postbox_engine::TokioClock;
    use postbox_sqlite::{SqliteConfig, SqliteStore};

    use super::*;
    use crate::config::Config;
    use crate::wiring::sink_context;

    /// The other store has its own threads and clock, so only this test moves the paused time.
    #[tokio::test(start_paused = true)]
    async fn a_store_that_somebody_migrates_meanwhile_is_sent_nothing_more() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("other.db");
        let other = SqliteStore::open(SqliteConfig::new(&path)).await.expect("opened");
        other.up().await.expect("migrated");
        let text = format!("[subscriptions.out]\nsink = {{ type = \"bus\", url = \"sqlite:{}\" }}\n", path.display());
        let config = Config::parse(&text).expect("no faults");
        let (out, clock) = (&config.subscriptions[0], Arc::new(TokioClock::new()) as Arc<dyn Clock>);
        let context = sink_context(&out.settings, config.server.listen, &clock);
        let sink = out.sink.build(&context).await.expect("built").expect("a sink");
        let send = async || {
            let event = NewEvent::json("order.paid", "{}").into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH);
            let delivery = Delivery { event, seq: Seq(1), attempt: 1, replay: 0, trace: None };
            sink.deliver(&[&delivery]).await.remove(0)
        };
        let sql = |sql: &str| rusqlite::Connection::open(&path).and_then(|file| file.execute_batch(sql)).expect("done");

        assert_eq!(send().await, Outcome::DELIVERED);
        sql("INSERT INTO postbox_migration SELECT 9999, 'from_the_future', applied_at FROM postbox_migration");
        tokio::time::advance(VALID_FOR).await;
        let outcome = send().await;
        assert!(matches!(&outcome, Outcome::Unavailable { code, .. } if code == "schema_newer"), "{outcome:?}");
        sql("DELETE FROM postbox_migration WHERE number = 9999");
        assert_eq!(send().await, Outcome::DELIVERED);
    }
}
