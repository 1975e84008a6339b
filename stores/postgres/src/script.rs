//! The schema as SQL for other migration tools. `validate` recognises what they applied.

use crate::PostgresStore;
use crate::migrate::{
    DOWN_LOCK_TABLES, DOWN_LOCK_TIMEOUT, LOG_UNDELIVERED, MIGRATION_DOWN, MIGRATION_LOCK, MIGRATION_TABLE, MIGRATIONS,
    Migration, record,
};
use crate::schema::SchemaName;

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
        USING HINT = 'deliver or discard them first (see: postbox stats), or throw them away with: postbox migrate down --yes --discard-events';
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

impl PostgresStore {
    /// Returns the schema for tools that run it in their own transactions.
    pub fn tool_scripts(&self) -> ToolScripts {
        let schema = self.schema();
        let guard = DOWN_GUARD.replace("{lock_tables}", DOWN_LOCK_TABLES).replace("{look}", LOG_UNDELIVERED);
        let down = format!("{DOWN_LOCK_TIMEOUT}\n{MIGRATION_LOCK}\n{guard}{MIGRATION_DOWN}\n");
        let lent = |what, sql: &str| lent(&format!("-- {what} {}.\n", in_a_comment(schema)), sql);
        ToolScripts {
            up: lent("Makes Postbox schema", &migrations(schema)),
            down: lent("Removes Postbox schema", &schema.migration_sql(&down)),
        }
    }
}

/// Returns all migrations as one SQL script with its own transaction.
pub(crate) fn script(schema: &SchemaName) -> String {
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
