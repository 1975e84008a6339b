//! The store: a pool, a schema, and what its lanes remember between calls.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use deadpool_postgres::Pool;
use postbox_core::{Error, ErrorKind, LogName, Result, SubscriptionName};
use tokio::sync::watch;
use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

use crate::classify::classify;
use crate::config::PostgresConfig;
use crate::connect::Target;
use crate::hint::Listener;
use crate::lane::Lane;
use crate::schema::SchemaName;
use crate::session::TransactionModes;
use crate::subscription::SubscriptionRow;

/// The Postgres store. Clones share one pool.
#[derive(Clone)]
pub struct PostgresStore {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) pool: Pool,
    /// Where notifications are listened for.
    pub(crate) listen_target: Target,
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

/// How transactions begin, where that was said, and the role that it was said of. Reads settings.
const DEFAULT_READ_ONLY: &str = "
SELECT setting OPERATOR(pg_catalog.=) 'on', source OPERATOR(pg_catalog.=) 'client', pg_catalog.quote_ident(session_user), pg_catalog.quote_ident(pg_catalog.current_database())
FROM pg_catalog.pg_settings WHERE name OPERATOR(pg_catalog.=) 'default_transaction_read_only'";

impl PostgresStore {
    /// Connects, and checks that the database answers. The schema is not looked at: see [`postbox_core::Migrate`].
    ///
    /// Errors: `Mismatch` for a bad URL, schema name or missing database, `Unauthorized`, `Unavailable`.
    pub async fn connect(config: PostgresConfig) -> Result<Self> {
        let store = Self::new(config)?;
        store.session("connect").await?.finish();
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
        let inner = Inner {
            pool: target.pool(&config)?,
            listen_target,
            modes: TransactionModes::new(config.statement_timeout),
            schema,
            config,
            wakeups: watch::Sender::new(0),
            subscriptions: Mutex::default(),
            lanes: Mutex::default(),
            listener: Listener::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The schema of this store, for [`crate::append_in`] and [`crate::once_in`].
    pub fn schema(&self) -> &SchemaName {
        &self.inner.schema
    }

    /// Tells the relays of this process that something was committed: call it after the commit of a transaction that used
    /// [`crate::append_in`]. Only a hint that saves a poll interval.
    pub fn wake(&self) {
        self.inner.wakeups.send_modify(|wakeups| *wakeups += 1);
    }

    /// Checks that messages can be received. A receive is one statement, so its transaction begins as the role or database says; everything else says itself
    /// that it writes. For start-ups; changes nothing.
    ///
    /// Error: `Mismatch`, code `default_read_only`, with the cure.
    pub async fn check_receiving(&self) -> Result<()> {
        self.bounded("check_receiving", self.look_at_defaults()).await
    }

    async fn look_at_defaults(&self) -> Result<()> {
        let session = self.session("check_receiving").await?;
        let row = session.client().query_typed_one(DEFAULT_READ_ONLY, &[]).await;
        session.finish();
        let row = row.map_err(|error| classify("check_receiving", &error))?;
        let (read_only, by_url, role, database): (bool, bool, String, String) =
            (row.get(0), row.get(1), row.get(2), row.get(3));
        if !read_only {
            return Ok(());
        }
        let cure = match by_url {
            true => "take default_transaction_read_only out of the store's URL".to_owned(),
            false => format!(
                "run: BEGIN READ WRITE; ALTER ROLE {role} IN DATABASE {database} SET default_transaction_read_only = off; COMMIT"
            ),
        };
        let text = format!("transactions of {role} are read-only by default, so no message can be received; {cure}");
        Err(Error::new(ErrorKind::Mismatch, "check_receiving", "default_read_only", text))
    }

    /// Makes another log; one that is there already stays as it is.
    pub async fn create_log(&self, log: &LogName) -> Result<()> {
        self.bounded("create_log", self.make_log(log)).await
    }

    async fn make_log(&self, log: &LogName) -> Result<()> {
        let session = self.session("create_log").await?;
        let sql = self.schema().sql("SELECT {s}.create_log($1)");
        let params: [(&(dyn ToSql + Sync), Type); 1] = [(&log.as_str(), Type::TEXT)];
        let make = async |client: &Client| client.query_typed(&sql, &params).await;
        let made = session.transact(&self.inner.modes.change, make).await;
        made.map(drop).map_err(|error| classify("create_log", &error))
    }

    pub(crate) fn lanes(&self) -> std::sync::MutexGuard<'_, HashMap<(SubscriptionName, u16), Arc<Lane>>> {
        // A panic while it was locked would have been between two whole changes.
        self.inner.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore").field("config", &self.inner.config).finish_non_exhaustive()
    }
}
