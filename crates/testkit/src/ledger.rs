//! Compares what producers did with what arrived: lost, phantom, duplicate, misordered and torn
//! events.
//!
//! ```
//! use postbox_core::EventId;
//! use postbox_testkit::ledger::{Fate, Ledger};
//!
//! let ledger = Ledger::default();
//! let transaction = ledger.begin();
//! let id = EventId::now_v7();
//! ledger.append(transaction, id, Some("order-1"), 1);
//! ledger.end(transaction, Fate::Committed);
//! assert_eq!(ledger.check().lost, [id]);
//! ledger.arrive(id);
//! assert!(ledger.check().is_at_least_once());
//! ```

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Mutex, MutexGuard};

use postbox_core::EventId;

/// Maximum offenders of each kind named in a report.
const NAMED_MAX: usize = 5;

/// What a producer knows about the end of its transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fate {
    /// The commit was acknowledged: everything must arrive.
    Committed,
    /// Rolled back: nothing may arrive.
    Aborted,
    /// The answer to the commit was lost, or the producer died: all of it may arrive, or none.
    #[default]
    Unknown,
}

/// The record of all producers and all arrivals.
#[derive(Debug, Default)]
pub struct Ledger(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    transactions: Vec<(Fate, Vec<Appended>)>,
    arrivals: Vec<EventId>,
}

#[derive(Debug)]
struct Appended {
    id: EventId,
    key: Option<String>,
    version: i64,
}

impl Ledger {
    /// Begins a producer's transaction. Its fate is unknown until [`Self::end`].
    pub fn begin(&self) -> usize {
        let mut inner = self.lock();
        inner.transactions.push(Default::default());
        inner.transactions.len() - 1
    }

    /// Records that the transaction appends an event. `version` rises with commit order within a
    /// key. Call this before sending, because a producer may die in between.
    pub fn append(&self, transaction: usize, id: EventId, key: Option<&str>, version: i64) {
        let event = Appended { id, key: key.map(str::to_owned), version };
        self.lock().transactions[transaction].1.push(event);
    }

    /// Ends the transaction.
    pub fn end(&self, transaction: usize, fate: Fate) {
        self.lock().transactions[transaction].0 = fate;
    }

    /// Records an arrival at the destination. The order of calls is the order of arrival.
    pub fn arrive(&self, id: EventId) {
        self.lock().arrivals.push(id);
    }

    /// Compares both sides. Meaningful only once nothing more is in flight.
    pub fn check(&self) -> Report {
        let inner = self.lock();
        let mut report = Report::default();
        let mut arrived = HashSet::new();
        let firsts: Vec<EventId> = inner.arrivals.iter().copied().filter(|id| arrived.insert(*id)).collect();
        report.duplicates = inner.arrivals.len() - firsts.len();
        let mut known = HashMap::new();
        for (n, (fate, events)) in inner.transactions.iter().enumerate() {
            let there = events.iter().filter(|event| arrived.contains(&event.id)).count();
            match fate {
                Fate::Committed => {
                    report.committed += events.len();
                    report.lost.extend(events.iter().map(|it| it.id).filter(|id| !arrived.contains(id)));
                }
                Fate::Aborted => report.aborted += events.len(),
                Fate::Unknown => report.unknown += events.len(),
            }
            if *fate != Fate::Aborted {
                if there > 0 && there < events.len() {
                    report.torn.push(n);
                }
                known.extend(events.iter().map(|event| (event.id, event)));
            }
        }
        let mut latest: HashMap<&str, i64> = HashMap::new();
        for id in firsts {
            let Some(event) = known.get(&id) else {
                report.phantom.push(id);
                continue;
            };
            let Some(key) = event.key.as_deref() else { continue };
            let latest = latest.entry(key).or_insert(event.version);
            if event.version < *latest {
                report.misordered.push(id);
            }
            *latest = event.version.max(*latest);
        }
        report
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().expect("nobody panics while holding it, but for an unknown transaction")
    }
}

/// The result of a comparison.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// Events whose commit was acknowledged.
    pub committed: usize,
    /// Events rolled back.
    pub aborted: usize,
    /// Events whose commit was not acknowledged.
    pub unknown: usize,
    /// Arrivals after an event's first.
    pub duplicates: usize,
    /// Committed and never arrived.
    pub lost: Vec<EventId>,
    /// Arrived though rolled back, or never appended at all.
    pub phantom: Vec<EventId>,
    /// Arrived (for the first time) after a later one of their key.
    pub misordered: Vec<EventId>,
    /// Transactions of which only a part arrived.
    pub torn: Vec<usize>,
}

impl Report {
    /// Returns whether nothing is lost, phantom, misordered or torn. Repeats are allowed.
    pub fn is_at_least_once(&self) -> bool {
        self.lost.is_empty() && self.phantom.is_empty() && self.misordered.is_empty() && self.torn.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { committed, aborted, unknown, duplicates, lost, phantom, misordered, torn } = self;
        writeln!(f, "committed={committed} aborted={aborted} unknown={unknown} duplicates={duplicates}")?;
        for (what, ids) in [("lost", lost), ("phantom", phantom), ("misordered", misordered)] {
            writeln!(f, "{what}={} {:?}", ids.len(), ids.iter().take(NAMED_MAX).collect::<Vec<_>>())?;
        }
        writeln!(f, "torn={} {:?}", torn.len(), &torn[..torn.len().min(NAMED_MAX)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u128) -> EventId {
        EventId::from_uuid(uuid::Uuid::from_u128(n))
    }

    /// Builds transactions with events of one key, whose ids are their versions; then the arrivals.
    fn report(transactions: &[(Fate, &[u128])], arrivals: &[u128]) -> Report {
        let ledger = Ledger::default();
        for (fate, ids) in transactions {
            let transaction = ledger.begin();
            for n in *ids {
                ledger.append(transaction, id(*n), Some("k"), i64::try_from(*n).expect("small"));
            }
            ledger.end(transaction, *fate);
        }
        arrivals.iter().for_each(|n| ledger.arrive(id(*n)));
        ledger.check()
    }

    #[test]
    fn a_clean_run_is_clean() {
        let report = report(&[(Fate::Committed, &[1, 2]), (Fate::Aborted, &[3]), (Fate::Unknown, &[4])], &[1, 2]);
        assert!(report.is_at_least_once());
        assert_eq!((report.committed, report.aborted, report.unknown, report.duplicates), (2, 1, 1, 0));
    }

    #[test]
    fn a_missing_committed_event_is_lost_and_tears_its_transaction() {
        let report = report(&[(Fate::Committed, &[1, 2, 3])], &[1, 3]);
        assert_eq!((report.lost.as_slice(), report.torn.as_slice()), (&[id(2)][..], &[0][..]));
        assert!(!report.is_at_least_once());
    }

    #[test]
    fn an_aborted_or_unheard_of_arrival_is_a_phantom() {
        let report = report(&[(Fate::Aborted, &[1])], &[1, 9]);
        assert_eq!(report.phantom, [id(1), id(9)]);
        assert!(!report.is_at_least_once());
    }

    #[test]
    fn repeats_are_counted_and_allowed() {
        let report = report(&[(Fate::Committed, &[1, 2])], &[1, 2, 1, 1]);
        assert_eq!((report.duplicates, report.is_at_least_once()), (2, true));
    }

    #[test]
    fn order_is_judged_by_first_arrivals_within_a_key() {
        let report = report(&[(Fate::Committed, &[1, 2, 3])], &[1, 3, 2]);
        assert_eq!(report.misordered, [id(2)]);
        assert!(!report.is_at_least_once());
    }

    #[test]
    fn keys_and_keyless_events_have_no_order_among_each_other() {
        let ledger = Ledger::default();
        let transaction = ledger.begin();
        for (n, key) in [(1, Some("a")), (2, Some("b")), (3, None)] {
            ledger.append(transaction, id(n), key, i64::try_from(n).expect("small"));
        }
        ledger.end(transaction, Fate::Committed);
        [3, 2, 1].iter().for_each(|n| ledger.arrive(id(*n)));
        assert!(ledger.check().is_at_least_once());
    }

    #[test]
    fn an_unknown_commit_arrives_whole_or_not_at_all() {
        for (arrivals, torn) in [(&[][..], 0), (&[1, 2], 0), (&[1], 1)] {
            let report = report(&[(Fate::Unknown, &[1, 2])], arrivals);
            assert_eq!((report.torn.len(), report.is_at_least_once()), (torn, torn == 0));
        }
    }

    #[test]
    fn a_transaction_that_never_ended_is_unknown() {
        let ledger = Ledger::default();
        ledger.append(ledger.begin(), id(1), None, 0);
        assert_eq!(ledger.check().unknown, 1);
    }
}
