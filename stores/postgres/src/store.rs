//! The store: a pool, a schema, and what is remembered of lanes between calls.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use deadpool_postgres::Pool;
use postbox_core::{Postbox, Result, SubscriptionName};
use postbox_postgres_sql::{Postgres, SchemaName};
use tokio::sync::watch;

use crate::config::PostgresConfig;
use crate::connect::Target;
use crate::hint::Listener;
use crate::lane::Lane;
use crate::receive::Forgotten;
use crate::session::TransactionModes;
use crate::subscription::SubscriptionRow;

/// The most connections for status queries. Each is opened when it is needed.
const LOOK_CONNECTIONS: usize = 2;

/// The Postgres store. Clones share its connections.
#[derive(Clone)]
pub struct PostgresStore {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) pool: Pool,
    /// For status queries: they are answered even while relays wait for locks on every connection
    /// of `pool`. Leases are renewed on them while handlers hold all of `pool`.
    pub(crate) look_pool: Pool,
    /// The database, servers and user, for error messages. Unknown for a pool that the caller made.
    pub(crate) target: Option<Target>,
    /// Where to LISTEN. Listening has a connection outside the pool.
    pub(crate) listen_target: Option<Target>,
    pub(crate) config: PostgresConfig,
    pub(crate) schema: SchemaName,
    pub(crate) modes: TransactionModes,
    /// Whether the role is known to be limited to the tenant of `config`.
    pub(crate) is_limited: AtomicBool,
    /// Incremented by every local commit that may give a lane work.
    pub(crate) wakeups: watch::Sender<u64>,
    /// What is known of the subscriptions that this process reads; one entry each.
    pub(crate) subscriptions: Mutex<HashMap<SubscriptionName, Arc<SubscriptionRow>>>,
    /// Where each lane of this process reads; one entry each.
    pub(crate) lanes: Mutex<HashMap<(SubscriptionName, u16), Arc<Lane>>>,
    /// The LISTEN connection, if enabled.
    pub(crate) listener: Listener,
    pub(crate) forgotten: Mutex<Forgotten>,
}

impl PostgresStore {
    /// Connects, and checks that the database answers. Does not check the schema: see
    /// [`postbox_core::Migrate`].
    ///
    /// Errors: `Mismatch` for a bad URL, schema name or missing database, `Unauthorized`,
    /// `Unavailable`.
    pub async fn connect(config: PostgresConfig) -> Result<Self> {
        let store = Self::new(config)?;
        store.session_on_schema("connect").await?;
        Ok(store)
    }

    /// Returns a store that connects on first use. Needs a tokio runtime only from then on.
    pub fn new(config: PostgresConfig) -> Result<Self> {
        let schema = SchemaName::new(config.schema.as_str())?;
        let target = Target::parse(&config)?;
        let listen_target = match &config.listen_url {
            Some(url) => Target::parse(&PostgresConfig { url: url.clone(), ..config.clone() })?,
            None => target.clone(),
        };
        let pools = (target.pool(&config, config.pool_size)?, target.pool(&config, LOOK_CONNECTIONS)?);
        Ok(Self::on(pools, Some(target), Some(listen_target), schema, config))
    }

    /// Returns a store on a pool of yours, with the default settings. The store only needs its
    /// connections to run transactions, and leaves no state on them.
    ///
    /// While others hold connections of the pool, the store waits for them, and so does the renewal
    /// of leases: a relay that gets no connection for seconds loses its lanes. Leave three
    /// connections for each lane (a subscription has two lanes unless you set another number), and
    /// two for renewals and status queries. A transaction of handlers waits for 10 seconds at most,
    /// and its events then wait without a failed attempt (`pool_exhausted`).
    pub fn from_pool(pool: Pool, schema: SchemaName) -> Self {
        let config = PostgresConfig { schema: schema.to_string(), ..PostgresConfig::new("") };
        Self::on((pool.clone(), pool), None, None, schema, config)
    }

    fn on(
        (pool, look_pool): (Pool, Pool),
        target: Option<Target>,
        listen_target: Option<Target>,
        schema: SchemaName,
        config: PostgresConfig,
    ) -> Self {
        let inner = Inner {
            pool,
            look_pool,
            target,
            listen_target,
            modes: TransactionModes::new(config.statement_timeout, config.tenant.as_ref()),
            is_limited: AtomicBool::new(false),
            schema,
            config,
            wakeups: watch::Sender::new(0),
            subscriptions: Mutex::default(),
            lanes: Mutex::default(),
            listener: Listener::default(),
            forgotten: Mutex::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Appends to this store's log `outbox`, in your transactions.
    pub fn postbox(&self) -> Postbox<Postgres> {
        Postbox::new(Postgres { schema: self.schema().clone(), ..Postgres::default() })
    }

    /// The schema of this store, for [`crate::once_in`].
    pub fn schema(&self) -> &SchemaName {
        &self.inner.schema
    }

    /// Tells the relays of this process that something was committed. Call it after committing a
    /// transaction that appended events. It is only a hint that saves a poll interval.
    pub fn wake(&self) {
        self.inner.wakeups.send_modify(|wakeups| *wakeups += 1);
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore").field("config", &self.inner.config).finish_non_exhaustive()
    }
}
