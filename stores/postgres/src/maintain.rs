//! Maintenance of logs and of the store itself.

use async_trait::async_trait;
use postbox_core::{Changed, Error, ErrorKind, LogName, Maintain, Prune, Result, Routed};
use postbox_postgres_sql::{STANDBY, params};

use crate::PostgresStore;
use crate::rebase::rebase;
use crate::session::Session;
use crate::subscription::check_integrity;
use crate::unrouted::note_unrouted;

/// Whether transactions are read-only by default, whether the URL says so, the role, the database,
/// and whether it is a standby. Reads settings.
const DEFAULT_READ_ONLY: &str = "
SELECT setting OPERATOR(pg_catalog.=) 'on', source OPERATOR(pg_catalog.=) 'client', pg_catalog.quote_ident(session_user), pg_catalog.quote_ident(pg_catalog.current_database()), pg_catalog.pg_is_in_recovery()
FROM pg_catalog.pg_settings WHERE name OPERATOR(pg_catalog.=) 'default_transaction_read_only'";

/// Reads the clock, in a transaction of its own.
const CLOCK: &str = "SELECT pg_catalog.clock_timestamp()";

#[async_trait]
impl Maintain for PostgresStore {
    async fn create_log(&self, log: &LogName) -> Result<()> {
        let name = log.as_str();
        let params = params![name];
        self.call_on_schema("create_log", async |session: &Session| {
            let sql = session.sql("SELECT {s}.create_log($1)");
            let create = async |session: &Session| session.rows(&sql, &params).await.map(drop);
            session.at_once(&self.inner.modes.change, create).await
        })
        .await
    }

    async fn note_unrouted(&self, log: &LogName) -> Result<Routed> {
        self.for_all_tenants("note_unrouted")?;
        let step = async |session: &Session| note_unrouted(session, log).await;
        self.with_lock_named(self.write("note_unrouted", &self.inner.modes.relay, step).await).await
    }

    async fn prune(&self, log: &LogName, prune: &Prune) -> Result<Changed> {
        self.for_all_tenants("prune")?;
        let step = async |session: &Session| crate::prune::prune(session, log, prune).await;
        match prune.dry_run {
            true => self.dry_run("prune", step).await,
            false => self.write("prune", &self.inner.modes.prune, step).await,
        }
    }

    async fn time(&self) -> Result<jiff::Timestamp> {
        let ask = async |session: &Session| session.row(CLOCK, &[]).await;
        Ok(self.call("time", ask).await?.get(0))
    }

    /// Receiving is one statement, whose transaction has the default mode of the role or database.
    /// All other writes begin READ WRITE explicitly. Error: `Mismatch`, code `default_read_only`;
    /// on a standby, which takes no write at all, `Unavailable`, code `store_read_only`.
    async fn check_receiving(&self) -> Result<()> {
        let ask = async |session: &Session| session.row(DEFAULT_READ_ONLY, &[]).await;
        let row = self.call("check_receiving", ask).await?;
        if row.get(4) {
            return Err(Error::new(ErrorKind::Unavailable, "check_receiving", "store_read_only", STANDBY));
        }
        if !row.get::<_, bool>(0) {
            return Ok(());
        }
        let (by_url, role, database): (bool, &str, &str) = (row.get(1), row.get(2), row.get(3));
        let cure = match by_url {
            true => "remove default_transaction_read_only from the store's URL".to_owned(),
            false => format!(
                "run: BEGIN READ WRITE; ALTER ROLE {role} IN DATABASE {database} SET default_transaction_read_only = off; COMMIT"
            ),
        };
        let text = format!("transactions of {role} are read-only by default, so no message can be received; {cure}");
        Err(Error::new(ErrorKind::Mismatch, "check_receiving", "default_read_only", text))
    }

    async fn check_integrity(&self) -> Result<()> {
        let look = async |session: &Session| session.step_by_step(&self.inner.modes.count, check_integrity).await;
        self.with_lock_named(self.call_to_look_at_schema("check_integrity", look).await).await
    }

    /// One transaction, without a time limit. It rewrites the logs, and writers wait meanwhile.
    async fn rebase(&self) -> Result<()> {
        rebase(self).await
    }
}
