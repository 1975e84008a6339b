//! What row-level security hides from the store, and what that means.

use postbox_core::{Error, ErrorKind, LogName, Result};
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
}

/// Whether this role sees no subscription: the policies let other roles work for all tenants, and
/// no tenant was named. Reads the catalog; no lock.
const SEES_NONE: &str = "
SELECT row_security_active(c.oid) AND nullif(current_setting('postbox.tenant', true), '') IS NULL
  AND NOT EXISTS (SELECT FROM pg_policy AS p, unnest(p.polroles) AS role
    WHERE p.polrelid = c.oid AND p.polname = 'all_tenants' AND (role = 0 OR pg_has_role(role, 'USAGE')))
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relname = 'subscription' AND n.nspname = $1";

/// Returns why no subscription of a name was found. Either it does not exist (`unknown`), or the
/// role sees none. In the second case they all exist, and a relay must not treat them as removed.
pub(crate) async fn subscription_not_seen(session: &Session, unknown: Error) -> Error {
    match session.rows(SEES_NONE, &params![session.schema().as_str()]).await {
        Ok(rows) if rows.first().is_some_and(|row| row.get(0)) => tenant_limited(session.operation()),
        Ok(_) => unknown,
        Err(error) => error,
    }
}

/// Refuses a role that sees no subscription because it named no tenant. Otherwise everything would
/// look empty to it.
pub(crate) async fn require_sight(session: &Session) -> Result<()> {
    let rows = session.rows(SEES_NONE, &params![session.schema().as_str()]).await?;
    if rows.first().is_some_and(|row| row.get(0)) {
        let message = "row-level security shows this role nothing, because no tenant is named: set `tenant` in [store], \
                       or use a role that was named in `postbox migrate grants --all-tenants`";
        return Err(Error::new(ErrorKind::Unauthorized, session.operation(), "tenant_not_named", message));
    }
    Ok(())
}

/// Returns why the row of a log could not be locked: it does not exist, or the role works for one
/// tenant.
pub(crate) async fn log_not_locked(session: &Session, log: &LogName) -> Error {
    match session.rows(&session.sql(LOG_EXISTS), &params![log.as_str()]).await {
        Ok(known) if known.is_empty() => log_unknown(session.operation(), log.as_str()),
        Ok(_) => tenant_limited(session.operation()),
        Err(error) => error,
    }
}

fn tenant_limited(operation: &'static str) -> Error {
    let message = "this is done for all tenants at once, and the store works for one: remove `tenant` from [store], \
                   and use a role that was named in `postbox migrate grants --all-tenants`";
    Error::new(ErrorKind::Unauthorized, operation, "tenant_limited", message)
}
