//! What the writers know.

use std::collections::HashMap;
use std::path::Path;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::lines;

/// A line of a writer's ledger. Times are microseconds of the machine's own clock, which no fault
/// moves.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Line {
    /// Everything the transaction appended. Synced to disk before the transaction may end.
    Events {
        /// The transaction's name.
        tx: String,
        /// When it was written.
        at: u64,
        /// Events that were appended and kept.
        kept: Vec<Event>,
        /// Events taken back by a rollback to a savepoint.
        back: Vec<Event>,
    },
    /// How the transaction ended, as far as the writer knows.
    End {
        /// The transaction's name.
        tx: String,
        /// When it was written.
        at: u64,
        /// How it ended.
        fate: Fate,
    },
}

/// An event, as in its payload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Its number within the transaction.
    pub n: u32,
    /// Its key.
    pub key: String,
    /// Its number within the key, in commit order: it is taken from a row that the transaction has
    /// locked.
    pub v: i64,
    /// Its topic.
    pub topic: String,
}

/// How a transaction ended, as far as its writer knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// The commit was acknowledged.
    Committed,
    /// Acknowledged before it was on disk (asynchronous commit): a crash may take it back.
    CommittedAsync,
    /// Rolled back, or failed before the commit was sent.
    RolledBack,
    /// Prepared. A later line says how it ended.
    Prepared,
    /// The answer was lost, or the writer died.
    Unknown,
}

/// A transaction.
#[derive(Debug)]
pub struct Tx {
    pub(crate) name: String,
    /// The earliest time of its commit.
    pub(crate) from: u64,
    /// The latest time of its commit; for an unknown fate, the end of time.
    pub(crate) until: u64,
    pub(crate) fate: Fate,
    pub(crate) prepared: bool,
    pub(crate) kept: Vec<Event>,
    pub(crate) back: Vec<Event>,
}

/// All ledgers of a round.
#[derive(Debug, Default)]
pub struct Ledger {
    pub(crate) transactions: Vec<Tx>,
    pub(crate) by_name: HashMap<String, usize>,
}

impl Ledger {
    /// Reads every `ledger-*.jsonl` of a folder.
    pub(crate) fn read(folder: &Path) -> anyhow::Result<Self> {
        let mut ledger = Self::default();
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            if name.starts_with("ledger-") {
                lines(&path)?.into_iter().try_for_each(|line| ledger.add(line))?;
            }
        }
        Ok(ledger)
    }

    pub(crate) fn add(&mut self, line: Line) -> anyhow::Result<()> {
        match line {
            Line::Events { tx, at, kept, back } => {
                let number = self.transactions.len();
                anyhow::ensure!(self.by_name.insert(tx.clone(), number).is_none(), "the ledger has {tx} twice");
                let fate = Fate::Unknown;
                self.transactions.push(Tx { name: tx, from: at, until: u64::MAX, fate, prepared: false, kept, back });
            }
            Line::End { tx, at, fate } => {
                let number =
                    self.by_name.get(&tx).with_context(|| format!("the ledger ends {tx}, which never began"))?;
                let found = &mut self.transactions[*number];
                (found.until, found.fate) = match fate {
                    Fate::Prepared | Fate::Unknown => (u64::MAX, Fate::Unknown),
                    _ => (at, fate),
                };
                found.prepared |= fate == Fate::Prepared;
            }
        }
        Ok(())
    }
}
