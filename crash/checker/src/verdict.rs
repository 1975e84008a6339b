//! The result of a round, or of many.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Most offenders named per kind of violation.
const NAMED_MAX: usize = 8;

/// Counts. Those of all rounds of a run are added up.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Verdict {
    /// Events whose transaction committed.
    pub events: u64,
    /// Transactions by fate, and other informative counts.
    pub facts: BTreeMap<String, u64>,
    /// Faults by kind.
    pub faults: BTreeMap<String, u64>,
    /// Arrivals, repeated and rejected ones included.
    pub arrivals: u64,
    /// Events accepted again without an operator's command.
    pub duplicates: u64,
    /// The sum of all windows in flight at faults. Each fault has a bound of its own.
    pub duplicates_bound: u64,
    /// Violations by kind. All must be zero.
    pub violations: BTreeMap<String, u64>,
    /// Some offenders.
    pub named: Vec<String>,
}

/// Every kind of violation, in the order of the table.
pub const VIOLATIONS: [(&str, &str); 12] = [
    ("lost", "committed, neither arrived nor dead"),
    ("phantom", "arrived, though rolled back, altered or unheard of"),
    ("dead for no reason", "dead, though neither refused nor marked dead nor sent while a relay vanished"),
    ("torn", "transactions of which a part arrived"),
    ("misordered", "first arrivals after a later one of their key"),
    ("stale", "writes by a former owner, or that the tables' rules forbid"),
    ("stuck", "not finished when everything was quiet"),
    ("duplicates unexplained", "sent again with no abrupt fault near enough"),
    ("duplicates beyond bound", "more than were in flight at the fault they are charged to"),
    ("lease lost for no reason", "another may have it, and no fault that costs leases was near"),
    ("relay failed", "it panicked, crashed, ended unasked, or did not stop in time"),
    ("taken back by the database", "acknowledged commits that a crash undid"),
];

impl Verdict {
    /// Whether there is no violation.
    pub fn is_clean(&self) -> bool {
        self.violations.values().all(|count| *count == 0)
    }

    /// Counts a violation.
    pub(crate) fn blame(&mut self, kind: &str, who: impl FnOnce() -> String) {
        debug_assert!(VIOLATIONS.iter().any(|(name, _)| *name == kind));
        let count = self.violations.entry(kind.to_owned()).or_default();
        *count += 1;
        if *count <= NAMED_MAX as u64 {
            self.named.push(format!("{kind}: {}", who()));
        }
    }

    /// Adds the counts of another round.
    pub fn add(&mut self, other: &Self) {
        fn sum(into: &mut BTreeMap<String, u64>, from: &BTreeMap<String, u64>) {
            from.iter().for_each(|(name, count)| *into.entry(name.clone()).or_default() += count);
        }
        self.events += other.events;
        self.arrivals += other.arrivals;
        self.duplicates += other.duplicates;
        self.duplicates_bound += other.duplicates_bound;
        sum(&mut self.facts, &other.facts);
        sum(&mut self.faults, &other.faults);
        sum(&mut self.violations, &other.violations);
        self.named.extend(other.named.iter().cloned());
    }
}
