//! Judges a round of the crash ledger from its files: what the writers know they did, what arrived,
//! which faults were injected, and what the database contains. It shares no code with the product
//! (the layers test ensures that): it has its own types, parser and transition table.
//!
//! | file | written by | a line |
//! |---|---|---|
//! | `ledger-*.jsonl` | each writer, with fsync | [`ledger::Line`]: the events of a transaction before it ends, then its end |
//! | `arrivals-*.log` | the sink | `STATUS BODY`, or a line of the file sink |
//! | `faults.jsonl` | the orchestrator | [`faults::Fault`] |
//! | `operator.jsonl` | the orchestrator | [`faults::Order`], written before it is given |
//! | `marks.txt` | the database, at the end | transactions whose mark is there |
//! | `deliveries.jsonl`, `audit.jsonl` | the database, at the end | rows that left the stream; every change of a cursor or such a row |
//!
//! A *mark* is a row of the writers' own table, inserted in each transaction. It shows whether the
//! database committed the transaction. So a commit whose answer was lost is not simply allowed
//! either way: it is judged by what the database kept.

pub mod arrivals;
pub mod audit;
pub mod faults;
pub mod judge;
pub mod ledger;
pub mod verdict;

pub use judge::judge;
pub use verdict::Verdict;

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use serde::de::DeserializeOwned;

/// Returns every line of a JSON lines file. A last line that is incomplete because its writer was
/// killed is left out.
pub(crate) fn lines<T: DeserializeOwned>(path: &Path) -> anyhow::Result<Vec<T>> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let parse = |(n, line)| serde_json::from_str(line).with_context(|| format!("{}:{}: {line}", path.display(), n + 1));
    whole.lines().enumerate().map(parse).collect()
}
