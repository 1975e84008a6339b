//! The proof: SQL over the two databases and the shop's notes. It asks no counter, no metric and no Rust value of the run.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;

use rusqlite::{Connection, OpenFlags, params};

/// What was counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Proof {
    /// Changes that the shop noted as committed.
    pub(super) committed: u64,
    /// Transactions that the shop noted as rolled back.
    pub(super) rolled_back: u64,
    /// Messages in the receiver's inbox.
    pub(super) delivered: u64,
    /// Rows in the receiver's ledger.
    pub(super) applied: u64,
    /// Committed, not in the ledger.
    pub(super) lost: u64,
    /// In the ledger, not committed.
    pub(super) phantom: u64,
    /// More than once in the ledger.
    pub(super) twice: u64,
    /// In the ledger before an earlier change of the same order.
    pub(super) disordered: u64,
    /// Changes that the shop's own table and its notes disagree about.
    pub(super) unnoted: u64,
    /// Money that moved according to the shop's table, in cents.
    pub(super) cents_shop: i64,
    /// Money that moved according to the ledger, in cents.
    pub(super) cents_ledger: i64,
}

impl Proof {
    /// Whether every promise was kept, for at least one event: nothing at all proves nothing.
    pub(super) fn holds(&self) -> bool {
        let kept = self.lost + self.phantom + self.twice + self.disordered + self.unnoted == 0;
        kept && self.committed > 0 && self.cents_shop == self.cents_ledger
    }
}

const NOTE_TABLE: &str =
    "CREATE TABLE note (outcome TEXT NOT NULL, event TEXT PRIMARY KEY, name TEXT, version INTEGER, cents INTEGER)";
const NOTE_INSERT: &str = "INSERT INTO note VALUES (?1, ?2, ?3, ?4, ?5)";
const COMMITTED: &str = "SELECT count(*) FROM note WHERE outcome = 'committed'";
const ROLLED_BACK: &str = "SELECT count(*) FROM note WHERE outcome = 'rolled_back'";
const DELIVERED: &str = "SELECT count(*) FROM receiver.postbox_inbox";
const APPLIED: &str = "SELECT count(*) FROM receiver.ledger";
const LOST: &str =
    "SELECT count(*) FROM note WHERE outcome = 'committed' AND event NOT IN (SELECT event FROM receiver.ledger)";
const PHANTOM: &str =
    "SELECT count(*) FROM receiver.ledger WHERE event NOT IN (SELECT event FROM note WHERE outcome = 'committed')";
const TWICE: &str = "SELECT count(*) FROM (SELECT 1 FROM receiver.ledger GROUP BY event HAVING count(*) > 1)";
const DISORDERED: &str = "SELECT count(*) FROM (SELECT version, lag(version, 1, 0) OVER (PARTITION BY name ORDER BY line) AS before \
     FROM receiver.ledger) WHERE version < before";
/// Orders that do not stand at the version that their last committed note says, by the orders' primary key …
const UNNOTED: &str = "SELECT count(*) FROM \
     (SELECT name, max(version) AS version FROM note WHERE outcome = 'committed' GROUP BY name) AS n \
     LEFT JOIN shop.orders AS o ON o.id = n.name WHERE o.version IS NOT n.version";
/// … and orders without any.
const UNNOTED_ORDERS: &str =
    "SELECT count(*) FROM shop.orders WHERE id NOT IN (SELECT name FROM note WHERE outcome = 'committed')";
/// Each step of an order moves its price once.
const CENTS_SHOP: &str = "SELECT coalesce(sum(cents * version), 0) FROM shop.orders";
const CENTS_LEDGER: &str = "SELECT coalesce(sum(cents), 0) FROM receiver.ledger";

/// Counts.
pub(super) fn count(shop: &Path, receiver: &Path, notes: &Path) -> anyhow::Result<Proof> {
    let connection = Connection::open_in_memory()?;
    for (path, name) in [(shop, "shop"), (receiver, "receiver")] {
        // Through a URI, because ATTACH makes a missing file otherwise; a proof over an empty file would be worthless.
        Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
        connection.execute(&format!("ATTACH ?1 AS {name}"), params![path.display().to_string()])?;
    }
    connection.execute(NOTE_TABLE, [])?;
    load(&connection, notes)?;
    let number = |sql: &str| connection.query_row(sql, [], |row| row.get::<_, i64>(0));
    let count = |sql: &str| number(sql).map(|count| count.unsigned_abs());
    Ok(Proof {
        committed: count(COMMITTED)?,
        rolled_back: count(ROLLED_BACK)?,
        delivered: count(DELIVERED)?,
        applied: count(APPLIED)?,
        lost: count(LOST)?,
        phantom: count(PHANTOM)?,
        twice: count(TWICE)?,
        disordered: count(DISORDERED)?,
        unnoted: count(UNNOTED)? + count(UNNOTED_ORDERS)?,
        cents_shop: number(CENTS_SHOP)?,
        cents_ledger: number(CENTS_LEDGER)?,
    })
}

fn load(connection: &Connection, notes: &Path) -> anyhow::Result<()> {
    let mut insert = connection.prepare(NOTE_INSERT)?;
    for line in BufReader::new(File::open(notes)?).lines() {
        let line = line?;
        let fields: Vec<&str> = line.split('\t').collect();
        let [outcome, event, name, version, cents] = fields[..] else {
            anyhow::bail!("the shop's notes have a line that is none: {line:?}");
        };
        insert.execute(params![outcome, event, name, version.parse::<i64>()?, cents.parse::<i64>()?])?;
    }
    Ok(())
}

/// A promise broken on purpose, so that tests see the proof fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Tamper {
    /// Takes one row out of the ledger.
    Lose,
    /// Writes one row for a transaction that was rolled back.
    Phantom,
    /// Writes one row twice.
    Twice,
    /// Swaps two changes of one order.
    Reorder,
    /// Changes an amount.
    Money,
}

impl Tamper {
    pub(super) fn commit(self, receiver: &Path) -> anyhow::Result<()> {
        let sql = match self {
            Self::Lose => "DELETE FROM ledger WHERE line = (SELECT max(line) FROM ledger)",
            Self::Phantom => {
                "INSERT INTO ledger (event, name, version, cents) VALUES ('00000000-0000-4000-8000-000000000000', 'X-1', 1, 0)"
            }
            Self::Twice => {
                "INSERT INTO ledger (event, name, version, cents) SELECT event, name, version, cents FROM ledger ORDER BY line DESC LIMIT 1"
            }
            Self::Reorder => {
                "UPDATE ledger SET line = -line WHERE line = (SELECT line FROM ledger WHERE version = 3 LIMIT 1)"
            }
            Self::Money => "UPDATE ledger SET cents = cents + 1 WHERE line = (SELECT min(line) FROM ledger)",
        };
        let changed = Connection::open(receiver)?.execute(sql, [])?;
        anyhow::ensure!(changed == 1, "nothing was there to tamper with");
        Ok(())
    }
}
