//! The proof: SQL over the two databases and the shop's notes. It reads no counter, metric or Rust
//! value of the run.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;

use postbox_server::text::grouped;
use rusqlite::{Connection, OpenFlags, params};

use super::{BAD, BOLD, DIM, GOOD, paint};

const NOTE_TABLE: &str =
    "CREATE TABLE note (outcome TEXT NOT NULL, event TEXT PRIMARY KEY, name TEXT, version INTEGER, cents INTEGER)";
const NOTE_INSERT: &str = "INSERT INTO note VALUES (?1, ?2, ?3, ?4, ?5)";

/// What happened: name, meaning and count. The first count is the number of events.
const FACTS: &str = "
SELECT 'committed', 'changes of orders, each together with its event', (SELECT count(*) FROM note WHERE outcome = 'committed')
UNION ALL SELECT 'rolled back', 'on purpose: no trace of these may ever arrive', (SELECT count(*) FROM note WHERE outcome = 'rolled_back')
UNION ALL SELECT 'delivered', 'messages in the receiver''s inbox', (SELECT count(*) FROM receiver.postbox_inbox)
UNION ALL SELECT 'applied', 'rows in the receiver''s ledger', (SELECT count(*) FROM receiver.ledger)";

/// What must not happen. "Unaccounted" are orders that are not at the version of their last
/// committed note, and orders without one.
const BROKEN: &str = "
SELECT 'lost', 'committed, but never applied',
  (SELECT count(*) FROM note WHERE outcome = 'committed' AND event NOT IN (SELECT event FROM receiver.ledger))
UNION ALL SELECT 'phantom', 'applied, but never committed',
  (SELECT count(*) FROM receiver.ledger WHERE event NOT IN (SELECT event FROM note WHERE outcome = 'committed'))
UNION ALL SELECT 'applied twice', 'events with more than one row',
  (SELECT count(*) FROM (SELECT 1 FROM receiver.ledger GROUP BY event HAVING count(*) > 1))
UNION ALL SELECT 'out of order', 'applied before an earlier change of the order',
  (SELECT count(*) FROM (SELECT version, lag(version, 1, 0) OVER (PARTITION BY name ORDER BY line) AS before FROM receiver.ledger)
   WHERE version < before)
UNION ALL SELECT 'unaccounted', 'orders whose row and notes differ',
  (SELECT count(*) FROM (SELECT name, max(version) AS version FROM note WHERE outcome = 'committed' GROUP BY name) AS n
   LEFT JOIN shop.orders AS o ON o.id = n.name WHERE o.version IS NOT n.version)
  + (SELECT count(*) FROM shop.orders WHERE id NOT IN (SELECT name FROM note WHERE outcome = 'committed'))";

/// Total cents in the shop and in the ledger. Each step of an order moves its price once.
const CENTS: &str = "SELECT (SELECT coalesce(sum(cents * version), 0) FROM shop.orders), (SELECT coalesce(sum(cents), 0) FROM receiver.ledger)";

/// Name, meaning and count.
type Figure = (String, String, i64);

/// The counts.
pub(super) struct Proof {
    facts: Vec<Figure>,
    broken: Vec<Figure>,
    cents_shop: i64,
    cents_ledger: i64,
}

impl Proof {
    /// Counts everything.
    pub(super) fn count(folder: &Path) -> anyhow::Result<Self> {
        let connection = Connection::open_in_memory()?;
        for name in ["shop", "receiver"] {
            let path = folder.join(format!("{name}.db"));
            // ATTACH creates a missing file, and a proof over an empty one would be worthless.
            Connection::open_with_flags(&path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
            connection.execute(&format!("ATTACH ?1 AS {name}"), params![path.display().to_string()])?;
        }
        connection.execute(NOTE_TABLE, [])?;
        load(&connection, &folder.join("notes.tsv"))?;
        let figures = |sql: &str| {
            let mut query = connection.prepare(sql)?;
            let figures = query.query_map([], |row| Figure::try_from(row))?;
            figures.collect::<rusqlite::Result<Vec<Figure>>>()
        };
        let (cents_shop, cents_ledger) = connection.query_row(CENTS, [], |row| <(i64, i64)>::try_from(row))?;
        Ok(Self { facts: figures(FACTS)?, broken: figures(BROKEN)?, cents_shop, cents_ledger })
    }

    /// Number of changes that the shop noted as committed.
    pub(super) fn committed(&self) -> u64 {
        self.facts[0].2.unsigned_abs()
    }

    /// Whether every promise was kept for at least one event: without events nothing is proven.
    pub(super) fn holds(&self) -> bool {
        let kept = self.broken.iter().all(|(.., count)| *count == 0) && self.cents_shop == self.cents_ledger;
        kept && self.committed() > 0
    }

    /// Renders the table.
    pub(super) fn table(&self) -> String {
        let by = "counted by SQL from both databases and the shop's own notes,\n  never from what the code believes";
        let mut text = format!("\n  {}\n  {}\n\n", paint(BOLD, "The proof"), paint(DIM, by));
        for (name, meaning, count) in &self.facts {
            text += &format!("    {name:<14}{:>9}   {}\n", grouped(count.unsigned_abs()), paint(DIM, meaning));
        }
        text.push('\n');
        let missing = self.cents_shop - self.cents_ledger;
        let sums = format!("shop {}, ledger {}", money(self.cents_shop), money(self.cents_ledger));
        let money = ("money missing", sums.as_str(), money(missing), missing == 0);
        let broken = self.broken.iter();
        let broken = broken.map(|(name, meaning, n)| (&**name, &**meaning, grouped(n.unsigned_abs()), *n == 0));
        for (name, meaning, value, kept) in broken.chain([money]) {
            let (colour, mark) = if kept { (GOOD, "✓") } else { (BAD, "✗") };
            let value = paint(colour, &format!("{value:>9}"));
            text += &format!("  {} {name:<14}{value}   {}\n", paint(colour, mark), paint(DIM, meaning));
        }
        text
    }
}

fn load(connection: &Connection, notes: &Path) -> anyhow::Result<()> {
    let mut insert = connection.prepare(NOTE_INSERT)?;
    for line in BufReader::new(File::open(notes)?).lines() {
        let line = line?;
        let fields: Vec<&str> = line.split('\t').collect();
        let [outcome, event, name, version, cents] = fields[..] else {
            anyhow::bail!("the shop's notes have an invalid line: {line:?}");
        };
        insert.execute(params![outcome, event, name, version.parse::<i64>()?, cents.parse::<i64>()?])?;
    }
    Ok(())
}

fn money(cents: i64) -> String {
    let sign = if cents < 0 { "-" } else { "" };
    format!("{sign}{}.{:02}", grouped(cents.unsigned_abs() / 100), cents.unsigned_abs() % 100)
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
    pub(super) fn commit(self, folder: &Path) -> anyhow::Result<()> {
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
        let changed = Connection::open(folder.join("receiver.db"))?.execute(sql, [])?;
        anyhow::ensure!(changed == 1, "nothing was there to tamper with");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn money_is_readable() {
        assert_eq!([money(0), money(5), money(-123_456)], ["0.00", "0.05", "-1,234.56"]);
    }
}
