//! Migrations: embedded, numbered, one transaction each, one starter at a time.

use async_trait::async_trait;
use postbox_core::{Error, ErrorKind, Migrate, Result};

use super::SchemaName;
use crate::PostgresStore;
use crate::classify::classify;
use crate::session::Session;

struct Migration {
    version: i32,
    name: &'static str,
    sql: &'static str,
}

const MIGRATIONS: [Migration; 1] = [Migration {
    version: 1,
    name: "0001_spine",
    sql: concat!(
        include_str!("0001_window.sql"),
        "\n",
        include_str!("0001_receive.sql"),
        "\n",
        include_str!("0001_spine.sql")
    ),
}];

/// Two starters wait for each other here; the lock ends with the transaction, so that it is right behind a pooler. Index: none.
/// The timeouts are lifted because rebuilding a large table may take long; string literals mean what they say.
const MIGRATION_BEGIN: &str = "
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL statement_timeout = 0;
SET LOCAL standard_conforming_strings = on;
SET LOCAL client_min_messages = warning;
SET LOCAL check_function_bodies = off;
SELECT pg_advisory_xact_lock(hashtextextended('postbox migrate', 0));";

/// Where it is written down what was applied.
const MIGRATION_TABLE: &str = "
CREATE SCHEMA IF NOT EXISTS {s};
CREATE TABLE IF NOT EXISTS {s}.migration (
  version int PRIMARY KEY,
  name text NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);";

/// What was applied. Reads the whole (tiny) table.
const MIGRATION_LIST: &str = "SELECT version, name FROM {s}.migration ORDER BY version";

/// Everything we made, and nothing else: the schema may hold tables of its owner. Takes exclusive locks on what it drops.
const MIGRATION_DOWN: &str = "
DO ${tag}$
DECLARE
  of_log text;
BEGIN
  FOR of_log IN SELECT name FROM {s}.log LOOP
    EXECUTE 'DROP TABLE ' || {schema_literal} || '.' || quote_ident(of_log);
    EXECUTE 'DROP FUNCTION IF EXISTS ' || {schema_literal} || '.' || quote_ident(of_log || '_window');
    EXECUTE 'DROP FUNCTION IF EXISTS ' || {schema_literal} || '.' || quote_ident(of_log || '_receive');
    EXECUTE 'DROP FUNCTION IF EXISTS ' || {schema_literal} || '.' || quote_ident(of_log || '_receive_many');
  END LOOP;
END
${tag}$;
DROP TABLE IF EXISTS {s}.delivery, {s}.lane, {s}.replica, {s}.subscription, {s}.receipt, {s}.conflict, {s}.sleeper, {s}.log, {s}.migration;
DROP FUNCTION IF EXISTS {s}.create_log, {s}.create_window, {s}.create_receive, {s}.recognise, {s}.event_is_valid, {s}.headers_fault, {s}.uuid_v7, {s}.cluster_id;
DO ${tag}$
DECLARE
  overload regprocedure;
BEGIN
  FOR overload IN SELECT p.oid FROM pg_catalog.pg_proc AS p
    WHERE p.pronamespace = {schema_literal}::regnamespace AND p.proname IN ('enqueue', 'notify_enable', 'notify_disable', 'notify_sleepers') LOOP
    EXECUTE 'DROP FUNCTION ' || overload;
  END LOOP;
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
        let mut applied = Vec::new();
        for migration in &MIGRATIONS {
            if self.apply_migration(migration).await? {
                applied.push(migration.name.to_owned());
            }
        }
        self.validate().await?;
        Ok(applied)
    }

    async fn down(&self) -> Result<Vec<String>> {
        match self.validate().await {
            Err(error) if error.code() == "schema_missing" => return Ok(Vec::new()),
            Err(error) if error.code() == "schema_newer" => return Err(error),
            Err(error) if error.code() == "schema_old" => {}
            Err(error) => return Err(error),
            Ok(()) => {}
        }
        let session = self.session("migrate").await?;
        let known = self.known_migrations(&session).await?;
        let sql = format!("{MIGRATION_BEGIN}{}COMMIT;", self.schema().migration_sql(MIGRATION_DOWN));
        let done = session.client().batch_execute(&sql).await;
        session.end_after(done.is_ok());
        done.map_err(|error| classify("migrate", &error))?;
        Ok(known.into_iter().rev().map(|(_, name)| name).collect())
    }

    async fn validate(&self) -> Result<()> {
        let session = self.session("validate").await?;
        let known = self.known_migrations(&session).await;
        session.finish();
        check_versions(self.schema(), &known?)
    }

    fn script(&self) -> String {
        script(self.schema())
    }
}

/// All migrations as one SQL script, for tools that apply SQL themselves. The result is recognised by `validate`.
pub(crate) fn script(schema: &SchemaName) -> String {
    let mut script = format!(
        "-- Postbox schema {}; apply once, in one session.\nBEGIN;\nSET LOCAL standard_conforming_strings = on;\n",
        schema.quoted().replace(['\n', '\r'], " ")
    );
    script.push_str(&schema.migration_sql(MIGRATION_TABLE));
    for Migration { version, name, sql } in &MIGRATIONS {
        script.push_str(&format!("\n\n-- {name}\n"));
        script.push_str(&schema.migration_sql(sql));
        script.push_str(
            &schema.sql(&format!("INSERT INTO {{s}}.migration (version, name) VALUES ({version}, '{name}');\n")),
        );
    }
    script.push_str("COMMIT;\n");
    script
}

impl PostgresStore {
    /// Applies one migration unless it is there; says whether it did.
    async fn apply_migration(&self, migration: &Migration) -> Result<bool> {
        let session = self.session("migrate").await?;
        let client = session.client();
        let done = async {
            client.batch_execute(MIGRATION_BEGIN).await?;
            client.batch_execute(&self.schema().migration_sql(MIGRATION_TABLE)).await?;
            let known = client.query_typed(&self.schema().sql(MIGRATION_LIST), &[]).await?;
            if known.iter().any(|row| row.get::<_, i32>(0) >= migration.version) {
                client.batch_execute("ROLLBACK").await?;
                return Ok(false);
            }
            client.batch_execute(&self.schema().migration_sql(migration.sql)).await?;
            let Migration { version, name, .. } = migration;
            let record = format!("INSERT INTO {{s}}.migration (version, name) VALUES ({version}, '{name}'); COMMIT");
            client.batch_execute(&self.schema().sql(&record)).await?;
            Ok(true)
        }
        .await;
        session.end_after(done.is_ok());
        done.map_err(|error: tokio_postgres::Error| classify("migrate", &error))
    }

    async fn known_migrations(&self, session: &Session) -> Result<Vec<(i32, String)>> {
        let listed = session.client().query_typed(&self.schema().sql(MIGRATION_LIST), &[]).await;
        let rows = listed.map_err(|error| match classify("validate", &error) {
            error if error.code() == "schema_missing" => schema_missing(self.schema()),
            error => error,
        })?;
        Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
    }
}

fn schema_missing(schema: &SchemaName) -> Error {
    let message = format!("the database has no Postbox schema {}; run: postbox migrate up", schema.quoted());
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
            format!(
                "schema {} is at version {n}, this program speaks {ours}; run: postbox migrate up",
                schema.quoted()
            ),
        ),
        n if n > ours => mismatch(
            "schema_newer",
            format!("schema {} is at version {n}, this program speaks {ours}; use a newer postbox", schema.quoted()),
        ),
        _ => Ok(()),
    }
}
