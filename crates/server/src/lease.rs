//! Who says which relay has a lane, and `[lease]`, which names one.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use postbox_config::{Adapter, Kind, LeaseConfig, Leases, Table, adapter, table};
use postbox_core::{Log, Result, Store, StoreName};

/// Every way of leasing. A new one is one row here.
const LEASES: &[Adapter<dyn LeaseConfig>] = &[
    Adapter::new::<StoreTable>("store", r#"{ type = "store" }"#, |keys| Arc::new(StoreTable::read(keys))),
    #[cfg(feature = "redis")]
    Adapter::new::<postbox_redis::RedisLeaseConfig>(
        "redis",
        r#"{ type = "redis", url = "redis://127.0.0.1:6379" }"#,
        |keys| Arc::new(postbox_redis::RedisLeaseConfig::read(keys)),
    ),
];

/// Ways that a program may be built without.
const OPTIONAL: &[&str] = &["redis"];

/// `[lease]`: who says which relay has a lane.
#[derive(Debug, Clone)]
pub struct LeaseChoice {
    type_name: &'static str,
    config: Arc<dyn LeaseConfig>,
}

impl Default for LeaseChoice {
    fn default() -> Self {
        Self { type_name: LEASES[0].name, config: Arc::new(StoreTable::default()) }
    }
}

impl LeaseChoice {
    /// Whether nobody is asked but the store.
    pub(crate) fn is_store_alone(&self) -> bool {
        self.type_name == LEASES[0].name
    }

    /// Reads what it needs; calls nobody. Of one of them, all relays of a program share what it
    /// connects to.
    pub fn build(&self) -> Result<LaneLeases> {
        Ok(LaneLeases(self.config.build()?))
    }

    /// Tries to reach it; says what was found. Takes no lane.
    pub(crate) async fn connect(&self) -> Result<String> {
        self.config.connect().await
    }
}

/// `{ type = "…", … }`
pub(crate) fn lease() -> Kind<LeaseChoice> {
    adapter("lease", LEASES, OPTIONAL).map(|(type_name, config)| LeaseChoice { type_name, config })
}

/// What the relays of a program take lanes by.
#[derive(Clone, Default)]
pub struct LaneLeases(Option<Arc<dyn Leases>>);

impl LaneLeases {
    /// The log of a store, as relays are to see it. `name` is the store's where there are several.
    pub fn log(&self, store: &Arc<dyn Store>, name: Option<&StoreName>) -> Arc<dyn Log> {
        let log = Arc::clone(store) as Arc<dyn Log>;
        match &self.0 {
            Some(leases) => Arc::clone(leases).on(log, name),
            None => log,
        }
    }
}

impl fmt::Debug for LaneLeases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "LaneLeases(..)" } else { "LaneLeases(store)" })
    }
}

table! {
    /// In the store alone.
    struct StoreTable {}
}

#[async_trait]
impl LeaseConfig for StoreTable {
    fn build(&self) -> Result<Option<Arc<dyn Leases>>> {
        Ok(None)
    }

    async fn connect(&self) -> Result<String> {
        Ok("is the store's".to_owned())
    }
}
