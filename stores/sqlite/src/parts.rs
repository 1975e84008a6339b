//! Finds tables, indexes and triggers of Postbox that somebody dropped or changed.

use std::collections::HashSet;

use postbox_core::{Error, ErrorKind, LogName};
use rusqlite::{Connection, Transaction};

use crate::classify::Work;
use crate::migrate::{applied, log_names};
use crate::schema::{MIGRATION_TABLE, MIGRATIONS, VERSION, log_ddl};

/// What has a name of ours, in the order of its creation. Of a table only the name counts, because
/// a migration that alters one leaves another text than CREATE. Walks the small schema table; no
/// lock of its own.
const PARTS: &str = "SELECT type, name, iif(type = 'table', '', sql) FROM sqlite_master \
    WHERE name LIKE 'postbox\\_%' ESCAPE '\\' AND sql IS NOT NULL ORDER BY rowid";

/// A table, an index or a trigger.
struct Part {
    kind: String,
    name: String,
    /// On one line, without quotes: SQLite adds them when a table is renamed.
    sql: String,
}

impl Part {
    /// What two parts that do the same have in common, however a person typed them: no case, and no
    /// white space at brackets and commas.
    fn shape(&self) -> String {
        let mut shape = format!("{} {} {}", self.kind, self.name, self.sql).to_lowercase();
        for mark in ["(", ")", ","] {
            shape = shape.replace(&format!(" {mark}"), mark).replace(&format!("{mark} "), mark);
        }
        shape
    }
}

/// Checks that nothing of the schema is missing or another. A schema of another version is not
/// looked at, because that is reported elsewhere.
pub(crate) fn check_parts(tx: &Transaction<'_>) -> Work<()> {
    if applied(tx)? != Some(VERSION) {
        return Ok(());
    }
    let model = Connection::open_in_memory()?;
    model.execute_batch(MIGRATION_TABLE)?;
    for step in &MIGRATIONS {
        model.execute_batch(&(step.sql)())?;
    }
    let made = log_names(&model)?;
    let found = parts(tx)?;
    let logs = if found.iter().any(|part| part.name == "postbox_log") { log_names(tx)? } else { Vec::new() };
    for log in logs.into_iter().filter(|log| !made.contains(log)) {
        model.execute_batch(&log_ddl(&LogName::new(log)?))?;
    }
    let shapes: HashSet<String> = found.iter().map(Part::shape).collect();
    let missing: Vec<Part> = parts(&model)?.into_iter().filter(|part| !shapes.contains(&part.shape())).collect();
    if missing.is_empty() { Ok(()) } else { Err(damaged(&missing).into()) }
}

fn parts(connection: &Connection) -> Work<Vec<Part>> {
    let mut statement = connection.prepare_cached(PARTS)?;
    let parts = statement.query_map([], |row| {
        let sql: String = row.get(2)?;
        let sql = sql.replace('"', "").split_whitespace().collect::<Vec<_>>().join(" ");
        Ok(Part { kind: row.get(0)?, name: row.get(1)?, sql })
    })?;
    Ok(parts.collect::<Result<_, _>>()?)
}

/// Names what is missing, and the statements that bring it back. What belongs to a missing table
/// comes back with it.
fn damaged(missing: &[Part]) -> Error {
    let (tables, others): (Vec<&Part>, Vec<&Part>) = missing.iter().partition(|part| part.kind == "table");
    let message = if tables.is_empty() {
        let names = join(&others, ", ", |part| format!("{} {}", part.kind, part.name));
        let cures = join(&others, "; ", |part| format!("DROP {} IF EXISTS {}; {}", part.kind, part.name, part.sql));
        format!(
            "the database lacks {names}, or has another one of that name; with sqlite3, run: BEGIN IMMEDIATE; {cures}; COMMIT"
        )
    } else {
        let names = join(&tables, ", ", |part| part.name.clone());
        let cures = join(&tables, "; ", |part| format!("ALTER TABLE OTHER RENAME TO {}", part.name));
        format!(
            "the database has no table {names}; if it was renamed, run: {cures}; if it was dropped, restore a backup"
        )
    };
    Error::new(ErrorKind::Mismatch, "check_integrity", "schema_damaged", message)
}

fn join(parts: &[&Part], separator: &str, text: impl Fn(&Part) -> String) -> String {
    parts.iter().map(|part| text(part)).collect::<Vec<_>>().join(separator)
}
