//! The migrations, and the same as scripts for other tools. `validate` recognises what those
//! applied.

use postbox_core::LogName;

use crate::schema::{MIGRATION, SchemaName};

/// One step of the schema's growth.
#[derive(Debug)]
pub struct Migration {
    /// Its number, from 1.
    pub version: i32,
    /// Its name, which the table of applied migrations keeps.
    pub name: &'static str,
    /// A template for [`SchemaName::migration_sql`].
    pub sql: &'static str,
}

/// All migrations, in order.
pub const MIGRATIONS: [Migration; 1] = [Migration { version: 1, name: "0001_spine", sql: MIGRATION }];

/// A part of the schema that its owner can drop or move, and without which the store still starts.
#[derive(Debug, PartialEq, Eq)]
pub struct Part {
    /// The table.
    pub table: String,
    /// Its index or constraint; empty: the table itself.
    pub name: String,
    /// The statements that bring it back; a table can only be moved back.
    pub cure: String,
}

impl Part {
    fn of(table: &str, name: &str, cure: String) -> Self {
        Self { table: table.to_owned(), name: name.to_owned(), cure }
    }

    /// An index, by what follows CREATE INDEX. Building it locks out no writer. A build that failed
    /// leaves an index that is not used, under the same name.
    fn index(schema: &SchemaName, text: &str) -> Option<Self> {
        let text = text.trim_end_matches(';');
        let (name, rest) = text.split_once(" ON {s}.")?;
        let (table, _) = rest.split_once(' ')?;
        let cure = schema.sql(&format!("DROP INDEX IF EXISTS {{s}}.{name}; CREATE INDEX CONCURRENTLY {text}"));
        Some(Self::of(table.trim_matches('"'), name, cure))
    }

    /// The tables and the indexes that the migrations create, and the constraints of these logs.
    pub fn all(schema: &SchemaName, logs: &[LogName]) -> Vec<Self> {
        let tables = ["TABLE", "UNLOGGED TABLE"].into_iter().flat_map(|kind| created(&format!("CREATE {kind} {{s}}.")));
        let tables = tables.filter_map(|text| text.split_once(' ')).map(|(table, _)| table);
        // A log's table stands in quotes, as a placeholder.
        let tables = tables.filter(|table| !table.starts_with('"')).chain(logs.iter().map(LogName::as_str));
        let back = |table: &str| schema.sql(&format!("ALTER TABLE OTHER.{table} SET SCHEMA {{s}}"));
        let mut parts: Vec<Self> = tables.map(|table| Self::of(table, "", back(table))).collect();
        let (of_logs, fixed): (Vec<_>, Vec<_>) =
            created("CREATE INDEX ").into_iter().partition(|text| text.contains("{tag}_log"));
        parts.extend(fixed.into_iter().filter_map(|text| Self::index(schema, text)));
        for log in logs {
            let name = log.as_str();
            parts.extend(of_logs.iter().filter_map(|text| Self::index(schema, &text.replace("{tag}_log", name))));
            for (constraint, cure) in [
                (format!("{name}_pkey"), "ALTER TABLE {log} ADD PRIMARY KEY (seq)"),
                (format!("{name}_id_key"), "ALTER TABLE {log} ADD UNIQUE (id)"),
                ("event_invalid".to_owned(), "SELECT {s}.guard_log('{name}')"),
            ] {
                parts.push(Self::of(name, &constraint, schema.log_sql(cure, log)));
            }
        }
        parts
    }
}

/// What follows these words in the lines of the migrations that begin with them.
fn created(words: &str) -> Vec<&'static str> {
    let lines = MIGRATIONS.iter().flat_map(|migration| migration.sql.lines());
    lines.filter_map(|line| line.trim_start().strip_prefix(words)).collect()
}

/// Makes concurrent migrations wait for each other. The lock ends with the transaction, so that it
/// works behind a pooler. Index: none.
pub const MIGRATION_LOCK: &str = "SELECT pg_advisory_xact_lock(hashtextextended('postbox migrate', 0));";

/// How long `down` waits for the tables: far longer than a relay's transaction, shorter than an
/// operator's patience.
pub const DOWN_LOCK_TIMEOUT: &str = "SET LOCAL lock_timeout = '5s';";

/// Keeps everyone from appending and delivering until the end of the transaction. Waits for writers
/// and relays.
pub const DOWN_LOCK_TABLES: &str =
    "LOCK TABLE {s}.subscription, {s}.lane, {s}.delivery, {s}.receipt IN ACCESS EXCLUSIVE MODE";
/// Whether a log holds an event that a subscription has still to deliver, that is dead, or that was
/// found unrouted; or events and no subscription. Indexes: `delivery_state`, the primary keys of
/// `unrouted` and the log up to the first event, then `(xid, seq)` of the log from the oldest
/// window on.
pub const LOG_UNDELIVERED: &str = "
SELECT EXISTS (SELECT FROM {s}.subscription AS s JOIN {s}.delivery AS d ON d.subscription = s.id
    WHERE s.log = $1 AND d.state IN ('retrying', 'blocked', 'scheduled', 'dead'))
  OR EXISTS (SELECT FROM {s}.unrouted AS u WHERE u.log = $1 AND EXISTS (SELECT FROM {log} AS l WHERE l.seq = u.seq OFFSET 0))
  OR (NOT EXISTS (SELECT FROM {s}.subscription WHERE log = $1) AND EXISTS (SELECT FROM {log}))
  OR EXISTS (SELECT FROM {s}.subscription AS s
    JOIN {s}.lane AS n ON n.subscription = s.id
    JOIN {log} AS l ON l.xid >= pg_snapshot_xmin(n.from_snap) AND l.slot % s.lanes = n.lane
    WHERE s.log = $1 AND {is_wanted} AND {is_unread} AND NOT EXISTS (SELECT FROM {s}.delivery AS d WHERE d.subscription = s.id AND d.seq = l.seq))";

/// The table that records the applied migrations.
pub const MIGRATION_TABLE: &str = "
CREATE SCHEMA IF NOT EXISTS {s};
CREATE TABLE IF NOT EXISTS {s}.migration (
  version int PRIMARY KEY,
  name text NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);";

/// Drops everything we made, and nothing else: the schema may hold tables of its owner, and
/// functions with names of ours and other arguments. Takes exclusive locks on what it drops.
/// `unrouted` is dropped after the views and before the logs, because a policy depends on both.
pub const MIGRATION_DOWN: &str = "
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
    WHERE p.pronamespace = {schema_literal}::regnamespace AND (p.proname, p.pronargs, coalesce(array_to_string(p.proargnames[1:2], ','), '')) IN (
      ('enqueue', 15, 'topic,payload'), ('receive', 9, 'source,message_id'), ('receive_body', 10, 'source,message_id'),
      ('check_json', 2, 'payload,content_type'), ('notify_enable', 1, 'log_name'), ('notify_disable', 1, 'log_name'), ('notify_sleepers', 0, '')));
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

/// Settings that make the scripts mean the same everywhere, for their duration only.
const SETTINGS: [(&str, &str); 3] =
    [("search_path", "pg_catalog"), ("standard_conforming_strings", "on"), ("check_function_bodies", "off")];

/// The checks that `up` makes first, for a script that other tools apply: the encoding, and whether
/// the schema exists already. Without it, the tool would fail on the first table that exists.
const GUARD: &str = "DO ${tag}$
BEGIN
  IF to_regclass({schema_literal} || '.migration') IS NOT NULL THEN
    RAISE EXCEPTION 'schema % has Postbox''s tables already', {schema_literal}
      USING HINT = 'mark this migration as applied; to check the existing schema: postbox migrate validate';
  END IF;
  IF getdatabaseencoding() <> 'UTF8' THEN
    RAISE EXCEPTION 'Postbox needs a database in UTF8, this one is in %', getdatabaseencoding() USING HINT = 'createdb -E UTF8 -T template0 NAME';
  END IF;
END
${tag}$;
";

/// The checks before a tool removes the schema. Like `down`, it waits for writers and relays, reads
/// the rows of every tenant, and fails if an event is not delivered.
const DOWN_GUARD: &str = "DO ${tag}$
DECLARE
  of_log text;
  of_table regclass;
  is_undelivered boolean;
BEGIN
  FOR of_log IN SELECT name FROM {s}.log ORDER BY name LOOP
    EXECUTE 'LOCK TABLE ' || {schema_literal} || '.' || quote_ident(of_log) || ' IN ACCESS EXCLUSIVE MODE';
  END LOOP;
  {lock_tables};
  FOR of_table IN SELECT c.oid FROM pg_class AS c WHERE c.relnamespace = {schema_literal}::regnamespace AND c.relforcerowsecurity LOOP
    EXECUTE 'ALTER TABLE ' || of_table::text || ' NO FORCE ROW LEVEL SECURITY';
  END LOOP;
  FOR of_log IN SELECT name FROM {s}.log ORDER BY name LOOP
    EXECUTE replace(${tag}_look$ {look} ${tag}_look$, '{name}', of_log) INTO is_undelivered USING of_log;
    IF is_undelivered THEN
      RAISE EXCEPTION 'log % holds events that are not delivered', of_log
        USING HINT = 'deliver, discard or prune them first, also dead and unrouted ones (see: postbox stats), or throw them away with: postbox migrate down --yes --discard-events';
    END IF;
  END LOOP;
END
${tag}$;
";

/// The schema for a tool that runs a migration in its own transaction, where it also records the
/// migration. Neither script begins or ends a transaction, and both restore the settings.
#[derive(Debug, Clone)]
pub struct ToolScripts {
    /// Creates the schema.
    pub up: String,
    /// Removes it, as [`down`](postbox_core::Migrate::down) does. Fails if events are not
    /// delivered.
    pub down: String,
}

impl ToolScripts {
    /// The scripts that make and remove one schema.
    pub fn of(schema: &SchemaName) -> Self {
        let guard = DOWN_GUARD.replace("{lock_tables}", DOWN_LOCK_TABLES).replace("{look}", LOG_UNDELIVERED);
        let down = format!("{DOWN_LOCK_TIMEOUT}\n{MIGRATION_LOCK}\n{guard}{MIGRATION_DOWN}\n");
        let lent = |what, sql: &str| lent(&format!("-- {what} {}.\n", in_a_comment(schema)), sql);
        Self {
            up: lent("Makes Postbox schema", &migrations(schema)),
            down: lent("Removes Postbox schema", &schema.migration_sql(&down)),
        }
    }
}

/// The statement that records an applied migration.
pub fn record(version: i32, name: &str) -> String {
    format!("INSERT INTO {{s}}.migration (version, name) VALUES ({version}, '{name}');\n")
}

/// Returns all migrations as one SQL script with its own transaction.
pub fn script(schema: &SchemaName) -> String {
    let head = format!("-- Postbox schema {}; apply once, in one session.\nBEGIN;\n", in_a_comment(schema));
    format!("{head}{}{}COMMIT;\n", settings(), migrations(schema))
}

fn migrations(schema: &SchemaName) -> String {
    let mut sql = schema.migration_sql(GUARD) + &schema.migration_sql(MIGRATION_TABLE);
    for Migration { version, name, sql: migration } in &MIGRATIONS {
        sql.push_str(&format!("\n\n-- {name}\n"));
        sql.push_str(&schema.migration_sql(migration));
        sql.push_str(&schema.sql(&record(*version, name)));
    }
    sql
}

fn settings() -> String {
    SETTINGS.iter().map(|(name, value)| format!("SET LOCAL {name} = {value};\n")).collect()
}

/// Wraps a script for a transaction that is not ours. Others may work in it afterwards, so the
/// settings are restored. Their old values are kept in settings with a dot in the name, which any
/// session may set and which end with the transaction.
fn lent(head: &str, sql: &str) -> String {
    let all = || SETTINGS.iter().map(|(name, _)| *name).chain(["lock_timeout"]);
    let copy = |from: String, to: String| {
        format!("SELECT pg_catalog.set_config('{to}', pg_catalog.current_setting('{from}'), true);\n")
    };
    let keep: String = all().map(|name| copy(name.to_owned(), format!("postbox.was_{name}"))).collect();
    let restore: String = all().map(|name| copy(format!("postbox.was_{name}"), name.to_owned())).collect();
    format!("{head}{keep}{}{sql}{restore}", settings())
}

/// Removes line breaks from the name, which would end the comment.
fn in_a_comment(schema: &SchemaName) -> String {
    schema.quoted().replace(['\n', '\r'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A statement that is broken into lines, or of another form, would be missing from the parts.
    #[test]
    fn every_index_and_table_of_the_migrations_is_a_part() {
        let (schema, outbox) = (SchemaName::default(), LogName::outbox());
        let parts = Part::all(&schema, &[outbox]);
        let sql: String = MIGRATIONS.iter().map(|migration| migration.sql).collect();
        let of = |is_meant: fn(&Part) -> bool| parts.iter().filter(|part| is_meant(part)).count();
        assert_eq!(of(|part| part.cure.starts_with("DROP INDEX ")), sql.matches("INDEX ").count());
        let tables = sql.matches(" TABLE {s}.").count() - sql.matches("COMMENT ON TABLE {s}.").count();
        assert_eq!(of(|part| part.name.is_empty()), tables);
        let part = |name: &str| parts.iter().find(|part| part.name == name).map(|part| part.cure.as_str());
        assert_eq!(
            part("outbox_xid_seq"),
            Some(
                r#"DROP INDEX IF EXISTS "postbox".outbox_xid_seq; CREATE INDEX CONCURRENTLY outbox_xid_seq ON "postbox"."outbox" (xid, seq)"#
            )
        );
        assert_eq!(part("event_invalid"), Some(r#"SELECT "postbox".guard_log('outbox')"#));
    }
}
