//! Migrations: embedded, numbered, one transaction each, run by one process at a time.

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::{Error, ErrorKind, Inspect as _, LogName, Migrate, Result, events_undelivered};
use postbox_postgres_sql::migration::{
    DOWN_LOCK_TABLES, DOWN_LOCK_TIMEOUT, LOG_UNDELIVERED, MIGRATION_DOWN, MIGRATION_LOCK, MIGRATION_TABLE, MIGRATIONS,
    Migration, Part, record, script,
};
use postbox_postgres_sql::{LOG_NAMES, MIGRATE, RELAY_TABLES, Roles, SCHEMA_DAMAGED, SchemaName, ToolScripts, params};
use tokio_postgres::Row;

use crate::PostgresStore;
use crate::session::Session;

/// Begins a migration or a rebase. Timeouts are lifted, because rebuilding a large table may take
/// long; Postgres has `transaction_timeout` from 17 on. String literals are read literally.
pub(crate) const MIGRATION_BEGIN: &str = "
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL statement_timeout = 0;
SET LOCAL lock_timeout = 0;
SELECT pg_catalog.set_config(name, '0', true) FROM pg_catalog.pg_settings WHERE name OPERATOR(pg_catalog.=) 'transaction_timeout';
SET LOCAL search_path = pg_catalog;
SET LOCAL standard_conforming_strings = on;
SET LOCAL client_min_messages = warning;
SET LOCAL check_function_bodies = off;";

/// How long a migration waits for another one. Everybody who can connect can hold the lock, so it
/// must not wait for ever.
const MIGRATION_LOCK_TIMEOUT: &str = "SET LOCAL lock_timeout = '60s';";

/// Lets the owner read all rows, even if row-level security applies to it (`row_security.rs`). The
/// tables belong to the owner; locks them.
const OWNER_SEES_ALL: &str = "
SELECT format('ALTER TABLE %s NO FORCE ROW LEVEL SECURITY', c.oid::regclass), format('ALTER TABLE %s FORCE ROW LEVEL SECURITY', c.oid::regclass)
FROM pg_class AS c WHERE c.relnamespace = {schema_literal}::regnamespace AND c.relforcerowsecurity ORDER BY c.oid";

/// See [`DOWN_LOCK_TABLES`].
const DOWN_LOCK_LOG: &str = "LOCK TABLE {log} IN ACCESS EXCLUSIVE MODE";

/// A table of `$1` and one of its rights in `$2` that this role lacks. Of UPDATE alone, one column
/// is enough. Reads the catalog; no lock.
const RELAY_LACKS: &str = "
SELECT t.name, r.needed FROM ROWS FROM (pg_catalog.unnest($1::text[]), pg_catalog.unnest($2::text[])) AS t(name, rights),
  pg_catalog.regexp_split_to_table(t.rights, ', ') AS r(needed)
WHERE NOT CASE t.rights WHEN 'UPDATE' THEN pg_catalog.has_any_column_privilege(t.name, t.rights)
  ELSE pg_catalog.has_table_privilege(t.name, r.needed) END LIMIT 1";

/// The applied migrations, with all columns of our table, by which we know it. Reads the whole
/// (tiny) table.
const MIGRATION_LIST: &str = "SELECT version, name, applied_at FROM {s}.migration ORDER BY version";

/// Which of the given tables, or indexes and constraints of tables, are missing or not valid, by
/// their place. Reads the catalog; no lock.
const PARTS_MISSING: &str = "
SELECT p.nth FROM unnest($2::text[], $3::text[]) WITH ORDINALITY AS p(of_table, name, nth)
WHERE NOT EXISTS (SELECT FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
  WHERE n.nspname = $1 AND c.relname = p.of_table AND c.relkind = 'r' AND (p.name = ''
    OR EXISTS (SELECT FROM pg_constraint AS k WHERE k.conrelid = c.oid AND k.conname = p.name)
    OR EXISTS (SELECT FROM pg_index AS i JOIN pg_class AS x ON x.oid = i.indexrelid
      WHERE i.indrelid = c.oid AND i.indisvalid AND x.relname = p.name)))
ORDER BY p.nth";

/// Whether the role `r` may make what runs with the rights of the role `u` that is meant: a
/// superuser, the database's owner, or a role that `u` is a member of, as each is of itself. A
/// superuser is a member of every role, so it is not asked that.
macro_rules! is_trusted {
    ($u_is_meant:literal) => {
        concat!(
            "(r.rolsuper OR r.oid = (SELECT d.datdba FROM pg_database AS d WHERE d.datname = current_database())
    OR EXISTS (SELECT FROM pg_roles AS u WHERE ",
            $u_is_meant,
            " AND NOT u.rolsuper AND pg_has_role(u.oid, r.oid, 'USAGE')))"
        )
    };
}

/// The quoted names of a renamed schema: today's, and the one in the bodies of its functions. The
/// schema is ours or, if ours has no functions, one that was called `$1`. Anybody can make such
/// functions, so the latter counts only if their owner is trusted. Index:
/// `pg_proc_proname_args_nsp_index`; no lock.
const SCHEMA_RENAMED: &str = concat!(
    "
SELECT s.now, s.made FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
CROSS JOIN LATERAL (SELECT format('\"%s\"', replace(n.nspname, '\"', '\"\"')), substring(p.prosrc FROM 'UPDATE (\"(?:[^\"]|\"\")*\")[.]lane AS l ')) AS s(now, made)
WHERE p.proname = 'settle_lane' AND CASE WHEN n.oid = to_regnamespace($1) OR n.nspname !~ '^pg_'
  AND NOT EXISTS (SELECT FROM pg_proc AS ours WHERE ours.proname = 'settle_lane' AND ours.pronamespace = to_regnamespace($1))
  AND EXISTS (SELECT FROM pg_class AS c WHERE c.relname = 'migration' AND c.relnamespace = n.oid)
  AND EXISTS (SELECT FROM pg_roles AS r WHERE r.oid = p.proowner AND ",
    is_trusted!("u.rolname = current_user"),
    ")
  THEN s.now <> s.made AND $1 IN (s.now, s.made) END
ORDER BY s.now LIMIT 1"
);

/// A role that may make objects in the schema: its owner, or one that may CREATE there. Not one
/// that is trusted by the role that migrates, or later (`$2`) by the one that did: the owner of the
/// table `migration`. Reads the catalog; no lock.
const SCHEMA_MAKER: &str = concat!(
    "
SELECT coalesce(quote_ident(r.rolname), 'PUBLIC') FROM pg_namespace AS n CROSS JOIN LATERAL (
  SELECT n.nspowner AS oid UNION ALL SELECT a.grantee FROM aclexplode(n.nspacl) AS a WHERE a.privilege_type = 'CREATE') AS maker
LEFT JOIN pg_roles AS r ON r.oid = maker.oid
WHERE n.oid = to_regnamespace($1) AND NOT coalesce(r.rolname = 'pg_database_owner' OR ",
    is_trusted!(
        "CASE WHEN $2 THEN u.oid = (SELECT c.relowner FROM pg_class AS c WHERE c.relname = 'migration' AND c.relnamespace = n.oid)
      ELSE u.rolname = current_user END"
    ),
    ", false)
LIMIT 1"
);

/// The encoding in which the database stores text.
const DATABASE_ENCODING: &str = "SELECT pg_catalog.getdatabaseencoding()::pg_catalog.text";

#[async_trait]
impl Migrate for PostgresStore {
    async fn up(&self) -> Result<Vec<String>> {
        check_encoding(&self.session_on_schema("migrate").await?).await?;
        let mut applied = Vec::new();
        for migration in &MIGRATIONS {
            if self.apply_migration(migration).await? {
                applied.push(migration.name.to_owned());
            }
        }
        self.validate().await?;
        Ok(applied)
    }

    async fn down(&self, discard_events: bool) -> Result<Vec<String>> {
        match self.validate().await {
            Err(error) if error.code() == "schema_missing" => return Ok(Vec::new()),
            Err(error) if ["schema_old", "encoding_unsupported"].contains(&error.code()) => {}
            validated => _ = validated?,
        }
        let session = self.session_on_schema("migrate").await?;
        let known = known_migrations(&session).await?;
        let begin = format!("{MIGRATION_BEGIN}{DOWN_LOCK_TIMEOUT}{MIGRATION_LOCK}");
        let remove = async |session: &Session| remove(session, discard_events).await;
        session.step_by_step(&begin, remove).await.map_err(in_use)?;
        Ok(known.into_iter().rev().map(|(_, name, _)| name).collect())
    }

    async fn validate(&self) -> Result<Timestamp> {
        let look = async |session: &Session| {
            // The last one ends the transaction if the schema is missing.
            let (named, encoding, known) =
                futures::join!(check_name(session), check_encoding(session), known_migrations(session));
            named?;
            let created_at = check_versions(session.schema(), &known?)?;
            encoding.map(|()| created_at)
        };
        self.look_at_schema("validate", look).await
    }

    fn script(&self) -> String {
        script(self.schema())
    }
}

impl PostgresStore {
    /// Returns the schema for tools that run it in their own transactions.
    pub fn tool_scripts(&self) -> ToolScripts {
        ToolScripts::of(self.schema())
    }

    /// Returns the GRANT statements that these roles need on this store, and the policies that
    /// separate tenants if `all_tenants` is given. The schema's owner runs them, and runs them
    /// again after a log was created.
    pub async fn grants(&self, roles: &Roles) -> Result<String> {
        roles.grants(self.schema(), &self.logs().await?)
    }

    /// Checks that the store's role may write the tables that every relay writes, as
    /// [`Self::grants`] lets it, and read these logs. Changes nothing.
    pub async fn check_relay_rights(&self, logs: &[LogName]) -> Result<()> {
        let schema = self.schema().quoted();
        let mut needed: Vec<(String, &str)> = Vec::new();
        for (rights, tables) in RELAY_TABLES {
            needed.extend(tables.iter().map(|table| (format!("{schema}.{table}"), rights)));
        }
        needed.extend(logs.iter().map(|log| (format!("{schema}.\"{log}\""), "SELECT")));
        needed.extend(["lane", "log", "subscription"].map(|table| (format!("{schema}.{table}"), "UPDATE")));
        let (tables, rights): (Vec<String>, Vec<&str>) = needed.into_iter().unzip();
        let params = params![tables, rights];
        let ask = async |session: &Session| session.rows(RELAY_LACKS, &params).await;
        let lacked = self.call("check_relay_rights", ask).await?;
        let Some(row) = lacked.first() else { return Ok(()) };
        let (table, right): (&str, &str) = (row.get(0), row.get(1));
        let text = format!(
            "the role lacks {right} on {table}, which each relay needs; `postbox migrate grants --relay ROLE` prints \
             the rights that the role needs"
        );
        Err(Error::new(ErrorKind::Unauthorized, "check_relay_rights", "permission_denied", text))
    }

    /// Applies one migration unless it was applied before. Returns whether it did.
    async fn apply_migration(&self, migration: &Migration) -> Result<bool> {
        let session = self.session_on_schema("migrate").await?;
        let Migration { version, name, sql } = migration;
        let is_applied =
            async |session: &Session| Ok(known_migrations(session).await?.iter().any(|(known, ..)| known >= version));
        // Without the lock, which anybody may hold. Any error shows below.
        if is_applied(&session).await.is_ok_and(|applied| applied) {
            return Ok(false);
        }
        let apply = async |session: &Session| {
            check_name(session).await?;
            check_makers(session, false).await?;
            session.run(&session.schema().migration_sql(MIGRATION_TABLE)).await?;
            if is_applied(session).await? {
                return Ok(false);
            }
            session.run(&session.schema().migration_sql(sql)).await?;
            session.run(&session.sql(&record(*version, name))).await?;
            // An empty table of somebody else may have taken the row, as text.
            is_applied(session).await
        };
        let begin = format!("{MIGRATION_BEGIN}{MIGRATION_LOCK_TIMEOUT}{MIGRATION_LOCK}SET LOCAL lock_timeout = 0;");
        session.step_by_step(&begin, apply).await.map_err(migration_locked)
    }
}

/// Removes everything. Each step waits for its answer before the next is sent, and the commit comes
/// last. If the command is interrupted while it waits for locks, nothing is removed, however late
/// the locks become free.
async fn remove(session: &Session, discard_events: bool) -> Result<()> {
    let logs = session.rows(&session.sql(LOG_NAMES), &[]).await?;
    let logs: Vec<LogName> = logs.iter().map(|row| LogName::from_stored(row.get::<_, String>(0))).collect();
    for log in &logs {
        session.run(&session.log_sql(DOWN_LOCK_LOG, log)).await?;
    }
    session.run(&session.sql(DOWN_LOCK_TABLES)).await?;
    owner_sees_all(session).await?;
    for log in logs.iter().filter(|_| !discard_events) {
        let row = session.row(&session.log_sql(LOG_UNDELIVERED, log), &params![log.as_str()]).await?;
        if row.get(0) {
            return Err(events_undelivered(log.as_str()));
        }
    }
    session.run(&session.schema().migration_sql(MIGRATION_DOWN)).await
}

/// Lets the owner read all rows for the rest of the transaction. Returns the statements that undo
/// it.
pub(crate) async fn owner_sees_all(session: &Session) -> Result<Vec<String>> {
    let rows = session.rows(&session.schema().migration_sql(OWNER_SEES_ALL), &[]).await?;
    for row in &rows {
        session.run(row.get(0)).await?;
    }
    Ok(rows.iter().map(|row| row.get(1)).collect())
}

/// The number, the name and the time of each.
async fn known_migrations(session: &Session) -> Result<Vec<(i32, String, Timestamp)>> {
    let rows = session.rows(&session.sql(MIGRATION_LIST), &[]).await.map_err(|error| match error.code() {
        "schema_missing" => schema_missing(session.schema()),
        // A column is missing.
        "schema_old" => migrations_foreign(session),
        _ => error,
    })?;
    let of_row = |row: &Row| {
        Some((row.try_get::<_, i32>(0).ok()?, row.try_get::<_, String>(1).ok()?, row.try_get::<_, Timestamp>(2).ok()?))
    };
    let known: Option<Vec<(i32, String, Timestamp)>> = rows.iter().map(of_row).collect();
    let first = (MIGRATIONS[0].version, MIGRATIONS[0].name);
    let is_ours = |known: &Vec<(i32, String, Timestamp)>| {
        known.first().is_none_or(|(version, name, _)| (*version, &**name) == first)
    };
    known.filter(is_ours).ok_or_else(|| migrations_foreign(session))
}

/// The schema, probably `public`, has a table `migration` of another program.
fn migrations_foreign(session: &Session) -> Error {
    let table = format!("{}.migration", session.schema().quoted());
    let message = format!("the table {table} is not Postbox's; choose another schema for Postbox: `schema` in [store]");
    Error::new(ErrorKind::Mismatch, session.operation(), "schema_foreign", message)
}

/// Checks that the schema was not renamed: every call of its functions would fail, and a second
/// one, made under its old name, would lack its events.
async fn check_name(session: &Session) -> Result<()> {
    let quoted = session.schema().quoted();
    let rows = session.rows(SCHEMA_RENAMED, &params![quoted]).await?;
    let Some(row) = rows.first() else { return Ok(()) };
    let (now, old): (&str, &str) = (row.get(0), row.get(1));
    let message = format!(
        "schema {now} was called {old} when it was made, and its functions still use that name; \
         as its owner, run: ALTER SCHEMA {now} RENAME TO {old}; then use that name: `schema` in [store]"
    );
    Err(Error::new(ErrorKind::Mismatch, session.operation(), "schema_renamed", message))
}

/// Checks that nobody else may make objects in the schema, before it is made or later. A function
/// that they plant there, for example, could run with the rights of relays and of the owner.
pub(crate) async fn check_makers(session: &Session, is_made: bool) -> Result<()> {
    let quoted = session.schema().quoted();
    let rows = session.rows(SCHEMA_MAKER, &params![quoted, is_made]).await?;
    let Some(row) = rows.first() else { return Ok(()) };
    let maker: &str = row.get(0);
    let revoke = format!("REVOKE CREATE ON SCHEMA {quoted} FROM {maker}");
    let cure = match is_made {
        true => format!(
            "as its owner, run: {revoke}; if that role owns it, let the owner of its tables own it; then drop what is \
             in it and not Postbox's"
        ),
        false => format!(
            "run `postbox migrate up` as the schema's owner, and {revoke}, or choose another schema: `schema` in [store]"
        ),
    };
    let message = format!(
        "{maker} may create objects in schema {quoted}, which could then run with the rights of others; {cure}"
    );
    Err(Error::new(ErrorKind::Mismatch, session.operation(), "schema_open", message))
}

/// Checks that no table, index or rule of the schema was dropped or moved.
pub(crate) async fn check_parts(session: &Session) -> Result<()> {
    check_name(session).await?;
    let logs = session.rows(&session.sql(LOG_NAMES), &[]).await?;
    let logs: Vec<LogName> = logs.iter().map(|row| LogName::from_stored(row.get::<_, String>(0))).collect();
    let schema = session.schema();
    let parts = Part::all(schema, &logs);
    let tables: Vec<&str> = parts.iter().map(|part| part.table.as_str()).collect();
    let names: Vec<&str> = parts.iter().map(|part| part.name.as_str()).collect();
    let name = schema.as_str();
    let missing = session.rows(PARTS_MISSING, &params![name, tables, names]).await?;
    let nth = |row: &Row| usize::try_from(row.get::<_, i64>(0)).ok()?.checked_sub(1);
    let missing: Vec<&Part> = missing.iter().filter_map(|row| parts.get(nth(row)?)).collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(damaged(session, &missing)),
    }
}

/// Names what is missing, and the statements that bring it back. What belongs to a missing table
/// comes back with it.
fn damaged(session: &Session, missing: &[&Part]) -> Error {
    let schema = session.schema().quoted();
    let (tables, others): (Vec<&Part>, Vec<&Part>) = missing.iter().copied().partition(|part| part.name.is_empty());
    let cures = |parts: &[&Part]| parts.iter().map(|part| part.cure.as_str()).collect::<Vec<_>>().join("; ");
    let message = if tables.is_empty() {
        let names: Vec<String> = others.iter().map(|part| format!("{} of {}", part.name, part.table)).collect();
        format!("schema {schema} lacks {}; as its owner, run: {}", names.join(", "), cures(&others))
    } else {
        let names: Vec<&str> = tables.iter().map(|part| part.table.as_str()).collect();
        let (names, cures) = (names.join(", "), cures(&tables));
        format!(
            "schema {schema} has no table {names}; if it was moved, run: {cures}; if it was dropped, restore a backup"
        )
    };
    Error::new(ErrorKind::Mismatch, session.operation(), SCHEMA_DAMAGED, message)
}

/// Explains that another session held the lock for too long.
fn migration_locked(error: Error) -> Error {
    if error.code() != "store_contention" {
        return error;
    }
    let message = "another session has held the lock of migrations for a minute; run it again after it, or end it: \
                   SELECT pid, pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted \
                   AND (classid::bigint << 32) + objid::bigint = hashtextextended('postbox migrate', 0)";
    Error::new(ErrorKind::Unavailable, "migrate", "migration_locked", message)
}

/// Explains an error of `down` or `rebase`. If the tables are in use, the message names the cure.
pub(crate) fn in_use(error: Error) -> Error {
    if error.code() != "store_contention" {
        return error;
    }
    let message = "Postbox's tables are locked, and nothing was changed; end open transactions that wrote events, stop relays and other migrations, and run it again";
    Error::new(ErrorKind::Conflict, error.operation(), "schema_in_use", message)
}

/// Text is stored byte for byte, and its length is measured in bytes. In another encoding both
/// would differ from what was sent.
async fn check_encoding(session: &Session) -> Result<()> {
    let row = session.row(DATABASE_ENCODING, &[]).await?;
    let encoding: &str = row.get(0);
    if encoding == "UTF8" {
        return Ok(());
    }
    let message = format!(
        "the database keeps text in {encoding}, Postbox needs UTF8; make one with `createdb -E UTF8 -T template0 NAME` and move the data there"
    );
    Err(Error::new(ErrorKind::Mismatch, session.operation(), "encoding_unsupported", message))
}

fn schema_missing(schema: &SchemaName) -> Error {
    let message = format!("the database has no Postbox schema {}; {MIGRATE}", schema.quoted());
    Error::new(ErrorKind::Mismatch, "validate", "schema_missing", message)
}

/// Returns when the first was applied.
fn check_versions(schema: &SchemaName, known: &[(i32, String, Timestamp)]) -> Result<Timestamp> {
    let ours = MIGRATIONS.len();
    let mismatch =
        |code: &'static str, message: String| Err(Error::new(ErrorKind::Mismatch, "validate", code, message));
    match known.len() {
        0 => Err(schema_missing(schema)),
        n if n < ours => mismatch(
            "schema_old",
            format!("schema {} is at version {n}, this program needs {ours}; {MIGRATE}", schema.quoted()),
        ),
        n if n > ours => mismatch(
            "schema_newer",
            format!("schema {} is at version {n}, this program needs {ours}; use a newer postbox", schema.quoted()),
        ),
        _ => Ok(known[0].2),
    }
}
