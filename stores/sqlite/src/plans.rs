//! Checks of query plans, for the tests beside the statements.
//!
//! A plan is judged without statistics, and with those that an application's ANALYZE may leave in
//! the file. Text that is built where it runs is not judged by its plan: the instructions that its
//! call takes are counted.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use rusqlite::Connection;

use crate::schema::MIGRATIONS;

/// Rows that a call has no reason to read.
pub(crate) const ROWS: u64 = 5_000;

/// What a plan may scan, because it is no table.
const NO_TABLES: [&str; 3] = ["json_each", "(subquery-", "CONSTANT ROW"];

/// Returns a database in memory with the schema.
pub(crate) fn database() -> Connection {
    let database = Connection::open_in_memory().expect("opened");
    MIGRATIONS.iter().for_each(|step| database.execute_batch(&(step.sql)()).expect("migrated"));
    database
}

/// Adds delivery rows of the subscription `s`. The values are those of `lane`, `key`, `state`,
/// `holds` and `due_at`, for row `n`.
pub(crate) fn fill(database: &Connection, rows: u64, values: &str) {
    let insert = format!(
        "INSERT INTO postbox_delivery (seq, lane, key, state, holds, due_at, subscription, id, topic, created_at, attempts, updated_at) \
         WITH RECURSIVE n(n) AS (SELECT coalesce(max(seq), 0) + 1 FROM postbox_delivery UNION ALL SELECT n + 1 FROM n LIMIT {rows}) \
         SELECT n, {values}, 's', '', 't', 0, 0, 0 FROM n"
    );
    database.execute_batch(&insert).expect("filled");
}

/// Asserts that statements find their rows as wanted, and that none scans a table or sorts. Each
/// has a name, its text, and parts of its plan.
pub(crate) fn judge(statements: &[(&str, &str, &[&str])]) {
    let database = database();
    fill(&database, ROWS, "0, 'k' || n, 'discarded', 0, NULL");
    for statistics in ["", "ANALYZE"] {
        database.execute_batch(statistics).expect("analysed");
        for (name, sql, wanted) in statements {
            let plan = plan(&database, sql);
            let context = format!("{name} {statistics}\n{plan}");
            for part in *wanted {
                assert!(plan.contains(part), "not by {part}: {context}");
            }
            let is_table = |line: &str| !NO_TABLES.iter().any(|it| line.contains(it));
            assert!(!plan.lines().any(|line| line.starts_with("SCAN") && is_table(line)), "{context}");
            assert!(!plan.contains("TEMP B-TREE"), "{context}");
        }
    }
}

fn plan(database: &Connection, sql: &str) -> String {
    let mut statement = database.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).expect("prepared");
    // With statistics the plan depends on the values. The first one is the subscription.
    statement.raw_bind_parameter(1, "s").expect("bound");
    (2..=statement.parameter_count()).for_each(|n| statement.raw_bind_parameter(n, 1).expect("bound"));
    let lines = statement.raw_query().mapped(|row| row.get(3));
    lines.collect::<Result<Vec<String>, _>>().expect("explained").join("\n")
}

/// Makes a call. Also returns how many instructions SQLite executed in it.
pub(crate) fn instructions<T>(database: &Connection, call: impl FnOnce() -> T) -> (T, u64) {
    let count = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&count);
    let note = move || {
        counted.fetch_add(1, Relaxed);
        false
    };
    database.progress_handler(1, Some(note)).expect("set");
    let done = call();
    database.progress_handler(0, None::<fn() -> bool>).expect("taken back");
    (done, count.load(Relaxed))
}
