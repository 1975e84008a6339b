//! How to reach a database.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_config::{Secret, StoreOptions, boolean, duration, from_core, integer, secret, table, text};
use postbox_core::{Result, Store, Tenant};

use crate::PostgresStore;
use crate::connect::check_url;

/// The default pool size of a store that is one of many in a program: what one working lane needs.
/// Fifty such stores open at most 250 connections, including two each for status queries.
const POOL_OF_MANY: usize = 3;

/// Where the store is and how it is used.
#[derive(Clone, PartialEq, Eq)]
pub struct PostgresConfig {
    /// `postgres://user:password@host:port/database?sslmode=…`, or the `key=value` form. libpq's
    /// `disable`, `prefer` (default) and `require` are understood. In addition,
    /// `sslmode=verify-full` checks the server's certificate and name against `sslrootcert=FILE` or
    /// the system's certificates.
    pub url: String,
    /// The schema of all tables and functions. Default `postbox`.
    pub schema: String,
    /// The most connections at once. Default 8. A busy lane uses up to three: to read ahead, to
    /// settle or run handlers, and for due rows. Status queries use up to two more, and renewals of
    /// leases share these while no other is free.
    pub pool_size: usize,
    /// Whether idle relays ask writers for a NOTIFY. Default false: polling is fast enough for
    /// almost everyone, and NOTIFY takes a server-wide lock at commit. The relay's role must own
    /// the log's table, or its owner must have called `notify_enable(log)` once.
    pub notify: bool,
    /// The URL to LISTEN on, if not `url`: a pooler in transaction mode does not carry
    /// notifications.
    pub listen_url: Option<String>,
    /// The tenant that this store works for, where row-level security separates tenants. Each
    /// transaction names it, and a role that the policies do not limit is refused
    /// (`tenant_not_limited`). Default none, which suits a relay: it works for all tenants.
    pub tenant: Option<Tenant>,
    /// The longest that any one of our statements may take; every call is bounded by it. Default
    /// 30 s.
    pub statement_timeout: Duration,
    /// The longest to wait for a connection to be made, with all servers of the URL together. If
    /// one is silent for half a second, the next one is tried beside it. `connect_timeout=SECONDS`
    /// in the URL replaces this value. Default 5 s.
    pub connect_timeout: Duration,
    /// The longest to wait for a free connection of the pool. Default 10 s.
    pub pool_timeout: Duration,
}

impl PostgresConfig {
    /// The default settings for a database.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            schema: "postbox".to_owned(),
            pool_size: 8,
            notify: false,
            listen_url: None,
            tenant: None,
            statement_timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(5),
            pool_timeout: Duration::from_secs(10),
        }
    }

    /// Whether the server's identity is not checked: it is on another machine, and the URL does not
    /// have its certificate verified. Contacts nothing.
    pub fn is_unverified(&self) -> bool {
        crate::connect::is_unverified(&self.url)
    }
}

table! {
    /// Postgres.
    pub struct PostgresTable {
        /// Postgres: the schema of all tables and functions.
        schema: String = text(schema), default("postbox");
        /// Postgres: writers wake idle relays with NOTIFY. Polling is fast enough for almost
        /// everybody.
        notify: bool = boolean(), default(false);
        /// Postgres: the URL for `notify`, if `url` leads to a pooler: LISTEN needs a connection of
        /// its own.
        listen_url: Option<Secret> = secret().check(|url| check(url.expose())), unset("as `url`", r#""env:DIRECT_DATABASE_URL""#);
        /// Postgres: most connections. Status queries (`stats`, `/readyz`) use up to two more.
        pool: Option<usize> = integer(1_usize..=100), unset("8; in `[stores.NAME]` 3", "8");
        /// Postgres: the longest that one statement may take.
        statement_timeout: Duration = duration(Duration::from_millis(100)), default("30s");
        /// Postgres: the tenant whose events commands see and change, where row-level security
        /// limits the role to one. `[store]` and `[stores.NAME]` with this key have no
        /// subscriptions, because `run` delivers for all tenants.
        tenant: Option<Tenant> = text(from_core::<Tenant>), unset("all", r#""acme""#);
    }
}

fn schema(text: &str) -> Result<String, String> {
    match text.is_empty() || text.len() > 63 || text.contains('\0') || text.starts_with("pg_") {
        true => Err(format!("{text:?} cannot be a schema; 1 to 63 bytes, not beginning with pg_")),
        false => Ok(text.to_owned()),
    }
}

/// Checks a URL as far as that is possible without contacting anything. The message never repeats
/// it.
fn check(url: &str) -> Result<(), String> {
    match url.starts_with("postgres://") || url.starts_with("postgresql://") {
        true => check_url(url).map_err(|text| format!("the URL is invalid: {text}")),
        false => Err("not a Postgres URL; write \"postgres://user@host/db\"".to_owned()),
    }
}

impl PostgresTable {
    /// Returns the configuration of a database with these settings.
    pub fn config(&self, url: &str) -> PostgresConfig {
        let usual = PostgresConfig::new(url);
        PostgresConfig {
            schema: self.schema.clone(),
            pool_size: self.pool.unwrap_or(usual.pool_size),
            tenant: self.tenant.clone(),
            notify: self.notify,
            listen_url: self.listen_url.as_ref().map(|url| url.expose().to_owned()),
            statement_timeout: self.statement_timeout,
            ..usual
        }
    }

    /// The same, for one of many stores in a program.
    fn config_of_many(&self, url: &str) -> PostgresConfig {
        PostgresConfig { pool_size: self.pool.unwrap_or(POOL_OF_MANY), ..self.config(url) }
    }
}

#[async_trait]
impl StoreOptions for PostgresTable {
    fn check(&self, url: &str) -> Result<(), String> {
        check(url)
    }

    fn risk(&self, url: &str) -> Option<&'static str> {
        PostgresConfig::new(url).is_unverified().then_some(
            "the database is on another machine and its certificate is not checked, so anybody in between can read \
             the password and every event; write sslmode=verify-full into the URL (and sslrootcert=FILE for your own \
             CA)",
        )
    }

    fn describe(&self, url: &str) -> String {
        crate::connect::address_of_url(url)
    }

    async fn open(&self, url: &str, is_one_of_many: bool) -> Result<Arc<dyn Store>> {
        let config = if is_one_of_many { self.config_of_many(url) } else { self.config(url) };
        Ok(Arc::new(PostgresStore::connect(config).await?))
    }
}

/// Leaves out the URL, which may hold a password.
impl fmt::Debug for PostgresConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresConfig")
            .field("schema", &self.schema)
            .field("pool_size", &self.pool_size)
            .field("notify", &self.notify)
            .field("tenant", &self.tenant)
            .field("statement_timeout", &self.statement_timeout)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_elsewhere_that_proves_nothing_is_recognised() {
        let unverified = |url: &str| PostgresConfig::new(url).is_unverified();
        for url in [
            "postgres://u:p@db.example/d",
            "postgres://u:p@10.0.0.1/d?sslmode=require",
            "postgres://u@localhost,db.example/d",
            "host=db.example user=u sslmode=prefer",
            "host=localhost hostaddr=10.0.0.1 user=u",
            // Without sslmode=require, the driver accepts a server that speaks no TLS.
            "postgres://u@db.example/d?sslrootcert=/ca.pem",
        ] {
            assert!(unverified(url), "{url}");
        }
        for url in [
            "postgres://u@localhost/d",
            "postgres://u@127.0.0.1:5433/d",
            "postgres://u@[::1]/d",
            "postgres://u@%2Fvar%2Frun%2Fpostgresql/d",
            "host=db.example hostaddr=127.0.0.1 user=u",
            "postgres://u@db.example/d?sslmode=verify-full",
            "postgres://u@db.example/d?sslmode=verify-ca&sslrootcert=%2Fca.pem",
            "postgres://u@db.example/d?sslmode=require&sslrootcert=%2Fca.pem",
            "postgres://u@h:port/d",
        ] {
            assert!(!unverified(url), "{url}");
        }
    }

    #[test]
    fn what_no_connection_could_use_is_refused_without_the_password() {
        for (url, said) in [
            ("postgres://u:hunter2@h:99999/d", "invalid value for option `port`"),
            ("postgres://u:hunter2@h/d?sslmode=verifyfull", "invalid value for option `sslmode`"),
            ("postgres://u:hunter2@h/d?hunter2=1", "unknown option;"),
            ("postgres://u:hunter2@h/d?sslcert=a&sslkey=b", "unknown option `ssl"),
            ("postgres://u:hunter2@h/d?hunter2", "wrong form"),
            ("postgres://u:se@hunter2@h/d", "%40"),
            ("mysql://u:hunter2@h/d", "not a Postgres URL"),
            ("postgres:///d?user=u&password=hunter2", "?host=/FOLDER"),
        ] {
            let text = check(url).expect_err("refused");
            assert!(text.contains(said) && !text.contains("hunter2"), "{text}");
        }
        let verified = "postgres://u:p@h:5433/d?sslmode=verify-full&sslrootcert=%2Fca.pem";
        for url in [verified, "postgresql:///d?host=/run/postgresql", "postgresql:///d?hostaddr=::1", "postgres://h"] {
            assert_eq!(check(url), Ok(()), "{url}");
        }
    }

    #[test]
    fn one_of_many_takes_few_connections_unless_it_is_configured() {
        let sizes = |table: PostgresTable| [table.config("url"), table.config_of_many("url")].map(|it| it.pool_size);
        assert_eq!(sizes(PostgresTable::default()), [8, 3]);
        assert_eq!(sizes(PostgresTable { pool: Some(5), ..PostgresTable::default() }), [5, 5]);
    }

    #[test]
    fn notifications_may_come_from_another_address() {
        let table = PostgresTable { listen_url: Some(Secret::new("postgres://direct/d")), ..PostgresTable::default() };
        assert_eq!(table.config("url").listen_url.as_deref(), Some("postgres://direct/d"));
        assert_eq!(table.config_of_many("url").listen_url.as_deref(), Some("postgres://direct/d"));
        assert_eq!(PostgresTable::default().config("url").listen_url, None);
    }

    #[test]
    fn debug_shows_no_secret() {
        let text = format!("{:?}", PostgresConfig::new("postgres://u:hunter2@h/d"));
        assert!(!text.contains("hunter2"), "{text}");
        let described = PostgresTable::default().describe("postgres://u:hunter2@127.0.0.1:7411/shop");
        assert_eq!(described, "the database shop at 127.0.0.1:7411 as u");
    }
}
