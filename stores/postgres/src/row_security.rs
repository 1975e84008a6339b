//! What row-level security hides from the store or shows it, and what that means.

use std::sync::atomic::Ordering;

use postbox_core::{Error, ErrorKind, LogName, Result, SubscriptionName};
use postbox_postgres_sql::{log_unknown, params};

use crate::PostgresStore;
use crate::session::Session;
use crate::unrouted::LOG_EXISTS;

impl PostgresStore {
    /// Refuses an operation on the rows of all tenants if the store works for one: it would miss or
    /// lose the rows of the others.
    pub(crate) fn for_all_tenants(&self, operation: &'static str) -> Result<()> {
        match self.inner.config.tenant {
            Some(_) => Err(tenant_limited(operation)),
            None => Ok(()),
        }
    }

    /// Refuses a role that no policy limits if the store works for one tenant: it would see and
    /// change the rows of all. Asks until a role is limited, and then never again.
    pub(crate) async fn require_limit(&self, session: &Session) -> Result<()> {
        let is_limited = &self.inner.is_limited;
        if self.inner.config.tenant.is_none() || is_limited.load(Ordering::Relaxed) {
            return Ok(());
        }
        let schema = self.schema().as_str();
        let params = params![schema];
        let look = async |session: &Session| session.rows(SEES_ALL, &params).await;
        let rows = session.at_once(&self.inner.modes.look, look).await?;
        // Without a table, there is no schema, and the call says so.
        let Some(row) = rows.first() else { return Ok(()) };
        if row.get(1) {
            return Err(tenant_not_limited(session.operation(), row.get(0)));
        }
        is_limited.store(true, Ordering::Relaxed);
        Ok(())
    }
}

/// A log, or the table of subscriptions, and whether this role may see rows of every tenant there:
/// no policy is in force for it, or another one than a tenant's shows it rows. One of which that is
/// true comes first. A log is known by its function, because not every writer may read the names of
/// logs. Reads the catalog; no lock.
const SEES_ALL: &str = "
SELECT t.relname::pg_catalog.text, NOT row_security_active(t.oid)
  OR EXISTS (SELECT FROM pg_policy AS p, unnest(p.polroles) AS role
    WHERE p.polrelid = t.oid AND p.polpermissive AND p.polcmd IN ('r', '*') AND (role = 0 OR pg_has_role(role, 'USAGE'))
      AND p.polname NOT IN ('tenant', 'tenant_reads'))
FROM pg_class AS t JOIN pg_namespace AS n ON n.oid = t.relnamespace
WHERE n.nspname = $1 AND t.relkind = 'r' AND (t.relname = 'subscription'
  OR EXISTS (SELECT FROM pg_proc AS f WHERE f.pronamespace = n.oid AND f.proname = t.relname || '_has'))
ORDER BY 2 DESC, 1 LIMIT 1";

/// A table of `{tables}` in which this role sees no row: no policy is for it, or only one for the
/// tenant that is named, and none is. Reads the catalog; no lock.
const SEES_NONE: &str = "
SELECT c.relname::pg_catalog.text FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relname IN ({tables}) AND row_security_active(c.oid)
  AND NOT EXISTS (SELECT FROM pg_policy AS p, unnest(p.polroles) AS role
    WHERE p.polrelid = c.oid AND p.polpermissive AND p.polcmd IN ('r', '*') AND (role = 0 OR pg_has_role(role, 'USAGE'))
      AND (p.polname NOT IN ('tenant', 'tenant_reads') OR nullif(current_setting('postbox.tenant', true), '') IS NOT NULL))
LIMIT 1";

/// The tables that `$2` names.
const TABLES: &str = "SELECT unnest($2::pg_catalog.text[])";

/// The logs of the subscriptions that `$2` names. Index: the unique name.
const LOGS_OF: &str = "SELECT s.log FROM {s}.subscription AS s WHERE s.name = ANY ($2::pg_catalog.text[])";

/// The first of some tables in which this role sees no row. `tables` selects them by `names`.
async fn unseen(session: &Session, tables: &str, names: Vec<&str>) -> Result<Option<String>> {
    let sql = session.schema().sql_with(SEES_NONE, &[("tables", &session.sql(tables))]);
    let rows = session.rows(&sql, &params![session.schema().as_str(), names]).await?;
    Ok(rows.first().map(|row| row.get(0)))
}

/// Returns why no subscription of a name was found. Either it does not exist (`unknown`), or the
/// role sees none. In the second case they all exist, and a relay must not treat them as removed.
pub(crate) async fn subscription_not_seen(session: &Session, unknown: Error) -> Error {
    match unseen(session, TABLES, vec!["subscription"]).await {
        Ok(Some(_)) if session.is_of_one_tenant() => tenant_limited(session.operation()),
        Ok(Some(_)) => tenant_not_named(session.operation(), UNNAMED),
        Ok(None) => unknown,
        Err(error) => error,
    }
}

/// Refuses a role that sees no subscription because it named no tenant. Otherwise everything would
/// look empty to it.
pub(crate) async fn require_sight(session: &Session) -> Result<()> {
    match unseen(session, TABLES, vec!["subscription"]).await? {
        Some(_) => Err(tenant_not_named(session.operation(), UNNAMED)),
        None => Ok(()),
    }
}

/// Refuses a role that sees no event of this log. Otherwise nothing would ever be pending in it.
pub(crate) async fn require_sight_of(session: &Session, log: &LogName) -> Result<()> {
    seen(session, unseen(session, TABLES, vec![log.as_str()]).await?)
}

/// The same for the logs that these subscriptions read.
pub(crate) async fn require_sight_for(session: &Session, subscriptions: &[SubscriptionName]) -> Result<()> {
    let names = subscriptions.iter().map(SubscriptionName::as_str).collect();
    seen(session, unseen(session, LOGS_OF, names).await?)
}

fn seen(session: &Session, unseen: Option<String>) -> Result<()> {
    let Some(log) = unseen else { return Ok(()) };
    let message = format!(
        "row-level security shows this role no event of log {log}: the log has no policy for it; run what \
         `postbox migrate grants` prints for all roles once more or, without --all-tenants, \
         ALTER TABLE {}.\"{log}\" DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY",
        session.schema().quoted()
    );
    Err(Error::new(ErrorKind::Mismatch, session.operation(), "log_hidden", message))
}

/// Returns why the row of a log could not be locked: it does not exist, the store works for one
/// tenant, or policies limit the role. In the last case a tenant in `[store]` would be refused,
/// too.
pub(crate) async fn log_not_locked(session: &Session, log: &LogName) -> Error {
    match session.rows(&session.sql(LOG_EXISTS), &params![log.as_str()]).await {
        Ok(known) if known.is_empty() => log_unknown(session.operation(), log.as_str()),
        Ok(_) if session.is_of_one_tenant() => tenant_limited(session.operation()),
        Ok(_) => tenant_not_named(session.operation(), UNNAMED_FOR_ALL),
        Err(error) => error,
    }
}

fn tenant_limited(operation: &'static str) -> Error {
    let message = "this is done for all tenants at once, and the store works for one: remove `tenant` from [store], \
                   and use a role that was named in `postbox migrate grants --all-tenants`";
    Error::new(ErrorKind::Unauthorized, operation, "tenant_limited", message)
}

/// Why a role sees nothing.
const UNNAMED: &str = "row-level security shows this role nothing, because no tenant is named: set `tenant` in [store], \
                       or use a role that was named in `postbox migrate grants --all-tenants`";

/// The same for what is done for all tenants at once.
const UNNAMED_FOR_ALL: &str = "this is done for all tenants at once, and row-level security limits this role to one: use \
                               a role that was named in `postbox migrate grants --all-tenants`";

fn tenant_not_named(operation: &'static str, message: &'static str) -> Error {
    Error::new(ErrorKind::Unauthorized, operation, "tenant_not_named", message)
}

fn tenant_not_limited(operation: &'static str, table: &str) -> Error {
    let message = format!(
        "`tenant` is set, but row-level security does not limit this role to one tenant (table {table}), so it would see \
         and change what belongs to all; use a role that is neither in --all-tenants nor a superuser, or, if there are no \
         policies yet, run what `postbox migrate grants --all-tenants ROLE` prints, or remove `tenant` from [store]"
    );
    Error::new(ErrorKind::Unauthorized, operation, "tenant_not_limited", message)
}
