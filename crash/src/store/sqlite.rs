//! One SQLite file, shared by relays and writers.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::Context as _;
use postbox_crash_checker::arrivals::Body;
use rusqlite::{Connection, params};

use super::postgres::Copy;
use super::{Mount, Named, write_lines};
use crate::writer::KEYS;

const MEBIBYTES: u32 = 1_500;
/// Longest wait for a lock; they last a second or two.
const BUSY: Duration = Duration::from_secs(20);

/// The same tables and triggers as for Postgres.
const PREPARE: &str = "
CREATE TABLE crash_mark (tx TEXT PRIMARY KEY);
CREATE TABLE crash_aggregate (key TEXT PRIMARY KEY, version INTEGER NOT NULL);
CREATE TABLE crash_audit (n INTEGER PRIMARY KEY AUTOINCREMENT, what TEXT NOT NULL, old TEXT, new TEXT, body TEXT, at INTEGER NOT NULL, lease_until INTEGER);
";

fn trigger(table: &str, event: &str) -> String {
    let (what, columns): (_, &[&str]) = match table {
        "postbox_lane" => {
            ("lane", &["subscription", "lane", "position", "window_end", "epoch", "owner", "lease_until"])
        }
        "postbox_outbox" => ("outbox", &["seq"]),
        _ => ("delivery", &["subscription", "seq", "state", "attempts", "replays", "code"]),
    };
    let row = |name: &str| {
        let fields: Vec<String> = columns.iter().map(|column| format!("'{column}', {name}.{column}")).collect();
        format!("json_object({})", fields.join(", "))
    };
    let old = if event == "INSERT" { "NULL".to_owned() } else { row("OLD") };
    let new = if event == "DELETE" { "NULL".to_owned() } else { row("NEW") };
    let there = if event == "DELETE" { "OLD" } else { "NEW" };
    let body = match what {
        "lane" | "outbox" => "NULL".to_owned(),
        _ => format!("(SELECT CAST(l.payload AS TEXT) FROM postbox_outbox AS l WHERE l.seq = {there}.seq)"),
    };
    // Leases use clocks that are moved here, so the times of grants are not judged.
    format!(
        "CREATE TRIGGER crash_{what}_{event} AFTER {event} ON {table} BEGIN
         INSERT INTO crash_audit (what, old, new, body, at) VALUES ('{what}', {old}, {new}, {body}, 0); END;"
    )
}

/// The SQLite file of a round.
pub(crate) struct SqliteBed {
    folder: PathBuf,
    pub(crate) copy: Mutex<Option<Copy>>,
    pub(crate) small: Option<(Mount, PathBuf)>,
}

impl SqliteBed {
    pub(crate) fn launch(folder: &Path, seed: u64) -> anyhow::Result<Self> {
        let data = std::env::temp_dir().join(format!("postbox-crash-{}-{seed:x}", std::process::id()));
        std::fs::create_dir_all(&data)?;
        std::fs::write(folder.join("data-folder"), data.display().to_string())?;
        let small = Mount::make(&data, MEBIBYTES).map(|mount| (mount, data.clone()));
        Ok(Self { folder: data, copy: Mutex::default(), small })
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.join("shop.db")
    }

    pub(crate) fn url(&self) -> String {
        format!("sqlite:{}", self.path().display())
    }

    pub(crate) fn connection(&self) -> anyhow::Result<Connection> {
        let connection = Connection::open(self.path())?;
        connection.busy_timeout(BUSY)?;
        Ok(connection)
    }

    pub(crate) fn prepare(&self) -> anyhow::Result<()> {
        let mut connection = self.connection()?;
        let tx = connection.transaction()?;
        tx.execute_batch(PREPARE)?;
        for table in ["postbox_lane", "postbox_delivery"] {
            for event in ["INSERT", "UPDATE", "DELETE"] {
                tx.execute_batch(&trigger(table, event))?;
            }
        }
        tx.execute_batch(&trigger("postbox_outbox", "UPDATE"))?;
        for key in 0..KEYS {
            tx.execute("INSERT INTO crash_aggregate VALUES (?1, 0)", params![crate::writer::key_name(key)])?;
        }
        Ok(tx.commit()?)
    }

    pub(crate) fn some_events(&self, of: &str, state: &str, limit: i64) -> anyhow::Result<Vec<Named>> {
        let connection = self.connection()?;
        let mut rows = connection.prepare(
            "SELECT l.id, CAST(l.payload AS TEXT) FROM postbox_delivery AS d JOIN postbox_outbox AS l ON l.seq = d.seq
             WHERE d.subscription = ?3 AND d.state = ?1 ORDER BY d.seq LIMIT ?2",
        )?;
        let rows = rows.query_map(params![state, limit, of], |row| Ok((row.get(0)?, row.get::<_, String>(1)?)))?;
        rows.map(|row| {
            let (id, body) = row?;
            let body: Body = serde_json::from_str(&body).context("a payload of ours")?;
            Ok(Named { id, event: format!("{}/{}", body.tx, body.n) })
        })
        .collect()
    }

    pub(crate) fn lanes_of_one(&self) -> anyhow::Result<i64> {
        let sql = "SELECT coalesce(sum(most), 0) FROM (SELECT max(lanes) AS most FROM
                   (SELECT subscription, count(*) AS lanes FROM postbox_lane GROUP BY subscription, owner) GROUP BY subscription)";
        Ok(self.connection()?.query_row(sql, [], |row| row.get(0))?)
    }

    pub(crate) fn dump(&self, folder: &Path) -> anyhow::Result<()> {
        let connection = self.connection()?;
        let dumps = [
            ("marks.txt", "SELECT tx FROM crash_mark"),
            (
                "deliveries.jsonl",
                "SELECT json_object('subscription', d.subscription, 'state', d.state, 'code', d.code, 'body', CAST(l.payload AS TEXT))
                 FROM postbox_delivery AS d LEFT JOIN postbox_outbox AS l ON l.seq = d.seq",
            ),
            (
                "audit.jsonl",
                "SELECT json_object('what', what, 'old', json(old), 'new', json(new), 'body', body, 'at', at, 'lease_until', lease_until)
                 FROM crash_audit ORDER BY n",
            ),
        ];
        for (file, sql) in dumps {
            let mut statement = connection.prepare(sql)?;
            let rows = statement.query_map([], |row| row.get(0))?;
            write_lines(&folder.join(file), rows.collect::<Result<Vec<String>, _>>().context(file)?)?;
        }
        Ok(())
    }
}

impl Drop for SqliteBed {
    fn drop(&mut self) {
        drop(self.small.take());
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
