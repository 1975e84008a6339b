//! Migrations: embedded, numbered, one transaction each, run by one process at a time.

use async_trait::async_trait;
use postbox_core::{Error, ErrorKind, LogName, Migrate, Result, events_undelivered};

use crate::PostgresStore;
use crate::classify::MIGRATE;
use crate::params::params;
use crate::schema::{LOG_NAMES, MIGRATION, SchemaName};
use crate::script::script;
use crate::session::Session;

pub(crate) struct Migration {
    pub(crate) version: i32,
    pub(crate) name: &'static str,
    pub(crate) sql: &'static str,
}

pub(crate) const MIGRATIONS: [Migration; 1] = [Migration { version: 1, name: "0001_spine", sql: MIGRATION }];

/// Begins a migration. Timeouts are lifted, because rebuilding a large table may take long. String
/// literals are read literally.
const MIGRATION_BEGIN: &str = "
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL statement_timeout = 0;
SET LOCAL lock_timeout = 0;
SET LOCAL search_path = pg_catalog;
SET LOCAL standard_conforming_strings = on;
SET LOCAL client_min_messages = warning;
SET LOCAL check_function_bodies = off;";

/// Makes concurrent migrations wait for each other. The lock ends with the transaction, so that it
/// works behind a pooler. Index: none.
pub(crate) const MIGRATION_LOCK: &str = "SELECT pg_advisory_xact_lock(hashtextextended('postbox migrate', 0));";

/// How long a migration waits for another one. Everybody who can connect can hold the lock, so it
/// must not wait for ever.
const MIGRATION_LOCK_TIMEOUT: &str = "SET LOCAL lock_timeout = '60s';";

/// How long `down` waits for the tables: far longer than a relay's transaction, shorter than an
/// operator's patience.
pub(crate) const DOWN_LOCK_TIMEOUT: &str = "SET LOCAL lock_timeout = '5s';";

/// Lets the owner read all rows, even if row-level security applies to it (`row_security.rs`). The
/// tables belong to the owner; locks them.
const OWNER_SEES_ALL: &str = "
SELECT format('ALTER TABLE %s NO FORCE ROW LEVEL SECURITY', c.oid::regclass), format('ALTER TABLE %s FORCE ROW LEVEL SECURITY', c.oid::regclass)
FROM pg_class AS c WHERE c.relnamespace = {schema_literal}::regnamespace AND c.relforcerowsecurity ORDER BY c.oid";

/// Keeps everyone from appending and delivering until the end of the transaction. Waits for writers
/// and relays.
pub(crate) const DOWN_LOCK_TABLES: &str =
    "LOCK TABLE {s}.subscription, {s}.lane, {s}.delivery, {s}.receipt IN ACCESS EXCLUSIVE MODE";
/// See [`DOWN_LOCK_TABLES`].
const DOWN_LOCK_LOG: &str = "LOCK TABLE {log} IN ACCESS EXCLUSIVE MODE";

/// Whether a log holds an event that a subscription has still to deliver, or events and no
/// subscription. Indexes: `delivery_state`, then `(xid, seq)` of the log from the oldest window on.
pub(crate) const LOG_UNDELIVERED: &str = "
SELECT EXISTS (SELECT FROM {s}.subscription AS s JOIN {s}.delivery AS d ON d.subscription = s.id
    WHERE s.log = $1 AND d.state IN ('retrying', 'blocked', 'scheduled'))
  OR (NOT EXISTS (SELECT FROM {s}.subscription WHERE log = $1) AND EXISTS (SELECT FROM {log}))
  OR EXISTS (SELECT FROM {s}.subscription AS s
    JOIN {s}.lane AS n ON n.subscription = s.id
    JOIN {log} AS l ON l.xid >= pg_snapshot_xmin(n.from_snap) AND l.slot % s.lanes = n.lane
    WHERE s.log = $1 AND {is_wanted} AND {is_unread} AND NOT EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription = s.id AND d.seq = l.seq))";

/// The table that records the applied migrations.
pub(crate) const MIGRATION_TABLE: &str = "
CREATE SCHEMA IF NOT EXISTS {s};
CREATE TABLE IF NOT EXISTS {s}.migration (
  version int PRIMARY KEY,
  name text NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);";

/// The applied migrations. Reads the whole (tiny) table.
const MIGRATION_LIST: &str = "SELECT version, name FROM {s}.migration ORDER BY version";

/// The encoding in which the database stores text.
const DATABASE_ENCODING: &str = "SELECT pg_catalog.getdatabaseencoding()::pg_catalog.text";

/// Drops everything we made, and nothing else: the schema may hold tables of its owner. Takes
/// exclusive locks on what it drops. `unrouted` is dropped after the views and before the logs,
/// because a policy depends on both.
pub(crate) const MIGRATION_DOWN: &str = "
DO ${tag}$
DECLARE
  of_log text;
  of_kind text;
BEGIN
  FOR of_log IN SELECT name FROM {s}.log LOOP
    EXECUTE 'DROP VIEW ' || {schema_literal} || '.' || quote_ident(of_log || '_state') || ', ' || {schema_literal} || '.' || quote_ident(of_log || '_dead');
  END LOOP;
  DROP TABLE IF EXISTS {s}.unrouted;
  FOR of_log IN SELECT name FROM {s}.log LOOP
    EXECUTE 'DROP TABLE ' || {schema_literal} || '.' || quote_ident(of_log);
    FOREACH of_kind IN ARRAY ARRAY['window', 'append', 'append_many', 'has', 'receive', 'receive_many', 'depth'] LOOP
      EXECUTE 'DROP FUNCTION IF EXISTS ' || {schema_literal} || '.' || quote_ident(of_log || '_' || of_kind);
    END LOOP;
  END LOOP;
END
${tag}$;
DROP VIEW IF EXISTS {s}.stats;
DROP TABLE IF EXISTS {s}.delivery, {s}.sent, {s}.passage, {s}.filter, {s}.lane, {s}.replica, {s}.subscription, {s}.receipt, {s}.once, {s}.conflict, {s}.sleeper, {s}.log, {s}.migration;
DROP FUNCTION IF EXISTS {s}.create_log, {s}.guard_log, {s}.create_window, {s}.create_append, {s}.create_receive, {s}.create_depth, {s}.create_views, {s}.comment_log, {s}.depth, {s}.depths, {s}.lock_lanes, {s}.subscription_unknown, {s}.change, {s}.retry, {s}.discard, {s}.mark_dead, {s}.pause, {s}.resume, {s}.check_message, {s}.once, {s}.settle_lane, {s}.recognise, {s}.event_is_valid, {s}.headers_fault, {s}.uuid_v7, {s}.event_id, {s}.cluster_id;
DO ${tag}$
DECLARE
  overloads text := (SELECT string_agg(p.oid::regprocedure::text, ', ') FROM pg_catalog.pg_proc AS p
    WHERE p.pronamespace = {schema_literal}::regnamespace AND p.proname IN ('enqueue', 'check_json', 'receive', 'receive_body', 'notify_enable', 'notify_disable', 'notify_sleepers'));
BEGIN
  IF overloads IS NOT NULL THEN
    EXECUTE 'DROP FUNCTION ' || overloads;
  END IF;
  IF {schema_literal} <> '\"public\"'
     AND NOT EXISTS (SELECT FROM pg_catalog.pg_class WHERE relnamespace = {schema_literal}::regnamespace)
     AND NOT EXISTS (SELECT FROM pg_catalog.pg_proc WHERE pronamespace = {schema_literal}::regnamespace)
     AND NOT EXISTS (SELECT FROM pg_catalog.pg_type WHERE typnamespace = {schema_literal}::regnamespace) THEN
    EXECUTE 'DROP SCHEMA ' || {schema_literal};
  END IF;
END
${tag}$;";

#[async_trait]
impl Migrate for PostgresStore {
    async fn up(&self) -> Result<Vec<String>> {
        check_encoding(&self.session("migrate").await?).await?;
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
            validated => validated?,
        }
        let session = self.session("migrate").await?;
        let known = known_migrations(&session).await?;
        let begin = format!("{MIGRATION_BEGIN}{DOWN_LOCK_TIMEOUT}{MIGRATION_LOCK}");
        let remove = async |session: &Session| remove(session, discard_events).await;
        session.step_by_step(&begin, remove).await.map_err(in_use)?;
        Ok(known.into_iter().rev().map(|(_, name)| name).collect())
    }

    async fn validate(&self) -> Result<()> {
        let session = self.look_session("validate").await?;
        let look = async |session: &Session| {
            let (known, encoding) = futures::join!(known_migrations(session), check_encoding(session));
            check_versions(session.schema(), &known?)?;
            encoding
        };
        session.at_once(&self.inner.modes.count, look).await
    }

    fn script(&self) -> String {
        script(self.schema())
    }
}

impl PostgresStore {
    /// Applies one migration unless it was applied before. Returns whether it did.
    async fn apply_migration(&self, migration: &Migration) -> Result<bool> {
        let session = self.session("migrate").await?;
        let Migration { version, name, sql } = migration;
        let is_applied =
            async |session: &Session| Ok(known_migrations(session).await?.iter().any(|(known, _)| known >= version));
        // Without the lock, which anybody may hold. Any error shows below.
        if is_applied(&session).await.is_ok_and(|applied| applied) {
            return Ok(false);
        }
        let apply = async |session: &Session| {
            session.run(&session.schema().migration_sql(MIGRATION_TABLE)).await?;
            if is_applied(session).await? {
                return Ok(false);
            }
            session.run(&session.schema().migration_sql(sql)).await?;
            session.run(&session.sql(&record(*version, name))).await?;
            Ok(true)
        };
        let begin = format!("{MIGRATION_BEGIN}{MIGRATION_LOCK_TIMEOUT}{MIGRATION_LOCK}SET LOCAL lock_timeout = 0;");
        session.step_by_step(&begin, apply).await.map_err(migration_locked)
    }
}

/// The statement that records an applied migration.
pub(crate) fn record(version: i32, name: &str) -> String {
    format!("INSERT INTO {{s}}.migration (version, name) VALUES ({version}, '{name}');\n")
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

async fn known_migrations(session: &Session) -> Result<Vec<(i32, String)>> {
    let rows = session.rows(&session.sql(MIGRATION_LIST), &[]).await.map_err(|error| match error.code() {
        "schema_missing" => schema_missing(session.schema()),
        _ => error,
    })?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
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

/// Explains an error of `down`. If the tables are in use, the message names the cure.
fn in_use(error: Error) -> Error {
    if error.code() != "store_contention" {
        return error;
    }
    let message = "Postbox's tables are locked, and nothing was removed; end open transactions that wrote events, stop relays and other migrations, and run it again";
    Error::new(ErrorKind::Conflict, "migrate", "schema_in_use", message)
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

fn check_versions(schema: &SchemaName, known: &[(i32, String)]) -> Result<()> {
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
        _ => Ok(()),
    }
}
