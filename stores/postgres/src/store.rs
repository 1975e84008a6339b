//! The store: a pool, a schema, and what its lanes remember between calls.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use deadpool_postgres::Pool;
use postbox_core::{Postbox, Result, SubscriptionName};
use tokio::sync::watch;

use crate::append::Postgres;
use crate::config::PostgresConfig;
use crate::connect::Target;
use crate::hint::Listener;
use crate::lane::Lane;
use crate::schema::SchemaName;
use crate::session::TransactionModes;
use crate::subscription::SubscriptionRow;

/// Most connections of those who only look. Each is made when it is needed.
const LOOK_CONNECTIONS: usize = 2;

/// The Postgres store. Clones share its connections.
#[derive(Clone)]
pub struct PostgresStore {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) pool: Pool,
    /// For those who only look: they are answered while relays wait for a lock on all of theirs.
    pub(crate) look_pool: Pool,
    /// Where the connections lead to and as whom, for errors; of a pool of yours it is not known.
    pub(crate) address: Option<String>,
    /// Where notifications are listened for, on connections that are not the pool's.
    pub(crate) listen_target: Option<Target>,
    pub(crate) config: PostgresConfig,
    pub(crate) schema: SchemaName,
    pub(crate) modes: TransactionModes,
    /// Rises with every local commit that may give a lane work.
    pub(crate) wakeups: watch::Sender<u64>,
    /// What is known of the subscriptions this process reads; as many as it has subscriptions.
    pub(crate) subscriptions: Mutex<HashMap<SubscriptionName, Arc<SubscriptionRow>>>,
    /// Where each lane of this process reads; as many as it has lanes.
    pub(crate) lanes: Mutex<HashMap<(SubscriptionName, u16), Arc<Lane>>>,
    /// The LISTEN connection, where asked for.
    pub(crate) listener: Listener,
}

impl PostgresStore {
    /// Connects, and checks that the database answers. The schema is not looked at: see
    /// [`postbox_core::Migrate`].
    ///
    /// Errors: `Mismatch` for a bad URL, schema name or missing database, `Unauthorized`,
    /// `Unavailable`.
    pub async fn connect(config: PostgresConfig) -> Result<Self> {
        let store = Self::new(config)?;
        store.session("connect").await?;
        Ok(store)
    }

    /// A store that connects when it is first used. Needs a tokio runtime only then.
    pub fn new(config: PostgresConfig) -> Result<Self> {
        let schema = SchemaName::new(config.schema.as_str())?;
        let target = Target::parse(&config)?;
        let listen_target = match &config.listen_url {
            Some(url) => Target::parse(&PostgresConfig { url: url.clone(), ..config.clone() })?,
            None => target.clone(),
        };
        let pools = (target.pool(&config, config.pool_size)?, target.pool(&config, LOOK_CONNECTIONS)?);
        Ok(Self::on(pools, Some(target.address()), Some(listen_target), schema, config))
    }

    /// A store on a pool of yours, with the default settings. It asks nothing of its connections
    /// beyond a transaction, and leaves nothing on them.
    ///
    /// What the pool lends to others, the store waits for, leases included: one that finds no
    /// connection for seconds loses its lanes. Leave two for each subscription, and a few.
    pub fn from_pool(pool: Pool, schema: SchemaName) -> Self {
        let config = PostgresConfig { schema: schema.to_string(), ..PostgresConfig::new("") };
        Self::on((pool.clone(), pool), None, None, schema, config)
    }

    fn on(
        (pool, look_pool): (Pool, Pool),
        address: Option<String>,
        listen_target: Option<Target>,
        schema: SchemaName,
        config: PostgresConfig,
    ) -> Self {
        let inner = Inner {
            pool,
            look_pool,
            address,
            listen_target,
            modes: TransactionModes::new(config.statement_timeout, config.tenant.as_ref()),
            schema,
            config,
            wakeups: watch::Sender::new(0),
            subscriptions: Mutex::default(),
            lanes: Mutex::default(),
            listener: Listener::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Appends to the log `outbox` of this store, in transactions of yours.
    pub fn postbox(&self) -> Postbox<Postgres> {
        Postbox::new(Postgres { schema: self.schema().clone(), ..Postgres::default() })
    }

    /// The schema of this store, for [`crate::once_in`].
    pub fn schema(&self) -> &SchemaName {
        &self.inner.schema
    }

    /// Tells the relays of this process that something was committed: call it after the commit of a
    /// transaction that appended events. Only a hint that saves a poll interval.
    pub fn wake(&self) {
        self.inner.wakeups.send_modify(|wakeups| *wakeups += 1);
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore").field("config", &self.inner.config).finish_non_exhaustive()
    }
}
