//! What producers know they did, against what arrived: lost, phantom, duplicate, misordered and torn, counted from neither
//! store nor engine.
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
//! ledger.check().assert_exactly_once();
//! ```

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Mutex, MutexGuard};

use postbox_core::EventId;

/// How many offenders a report names of each kind: enough to look one up, not so many that the numbers scroll away.
const NAMED_MAX: usize = 5;

/// One transaction of a producer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Transaction(usize);

/// What a producer knows of its transaction's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fate {
    /// The commit was acknowledged: everything must arrive.
    Committed,
    /// Rolled back: nothing may arrive.
    Aborted,
    /// The answer to the commit was lost, or the producer died: all of it may arrive or none.
    #[default]
    Unknown,
}

/// The record of all producers and all arrivals. Share it freely; every method is quick and takes `&self`.
#[derive(Debug, Default)]
pub struct Ledger {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    transactions: Vec<Record>,
    arrivals: Vec<EventId>,
}

#[derive(Debug, Default)]
struct Record {
    fate: Fate,
    events: Vec<Appended>,
}

#[derive(Debug)]
struct Appended {
    id: EventId,
    key: Option<String>,
    version: i64,
}

impl Ledger {
    /// A producer begins a transaction. Its fate is unknown until [`Self::end`].
    pub fn begin(&self) -> Transaction {
        let mut inner = self.lock();
        inner.transactions.push(Record::default());
        Transaction(inner.transactions.len() - 1)
    }

    /// The transaction appended an event. `version` must rise with commit order within a key, as it does when the producer
    /// takes it from a row it has locked. Write it down *before* sending: a producer may die in between.
    pub fn append(&self, transaction: Transaction, id: EventId, key: Option<&str>, version: i64) {
        let event = Appended { id, key: key.map(str::to_owned), version };
        self.lock().transactions[transaction.0].events.push(event);
    }

    /// A savepoint was rolled back: these never happened, whatever becomes of the transaction.
    pub fn take_back(&self, transaction: Transaction, ids: &[EventId]) {
        let mut inner = self.lock();
        let record = &mut inner.transactions[transaction.0];
        let (back, kept) = std::mem::take(&mut record.events).into_iter().partition(|event| ids.contains(&event.id));
        record.events = kept;
        inner.transactions.push(Record { fate: Fate::Aborted, events: back });
    }

    /// The transaction ended.
    pub fn end(&self, transaction: Transaction, fate: Fate) {
        self.lock().transactions[transaction.0].fate = fate;
    }

    /// An event reached its destination. The order of calls is the order of arrival.
    pub fn arrive(&self, id: EventId) {
        self.lock().arrivals.push(id);
    }

    /// How many events are in transactions known to be committed.
    pub fn committed(&self) -> usize {
        self.lock().transactions.iter().filter(|it| it.fate == Fate::Committed).map(|it| it.events.len()).sum()
    }

    /// How many different committed events have not arrived yet: 0 means that waiting can end.
    pub fn outstanding(&self) -> usize {
        let inner = self.lock();
        let arrived: HashSet<&EventId> = inner.arrivals.iter().collect();
        let committed = inner.transactions.iter().filter(|it| it.fate == Fate::Committed);
        committed.flat_map(|it| &it.events).filter(|event| !arrived.contains(&event.id)).count()
    }

    /// Compares. Meaningful once nothing more is on its way.
    pub fn check(&self) -> Report {
        let inner = self.lock();
        let mut report = Report { arrivals: inner.arrivals.len(), ..Report::default() };
        let mut seen = HashSet::new();
        let firsts: Vec<EventId> = inner.arrivals.iter().copied().filter(|id| seen.insert(*id)).collect();
        report.duplicates = inner.arrivals.len() - firsts.len();
        inner.count_transactions(&seen, &mut report);
        inner.count_arrivals(&firsts, &mut report);
        report
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner
            .lock()
            .expect("nobody panics while holding it, but for an index that is no transaction of this ledger")
    }
}

impl Inner {
    fn count_transactions(&self, arrived: &HashSet<EventId>, report: &mut Report) {
        for (n, record) in self.transactions.iter().enumerate() {
            let there = record.events.iter().filter(|event| arrived.contains(&event.id)).count();
            let all = record.events.len();
            match record.fate {
                Fate::Committed => {
                    report.committed += all;
                    report.lost.extend(record.events.iter().map(|it| it.id).filter(|id| !arrived.contains(id)));
                }
                Fate::Aborted => report.aborted += all,
                Fate::Unknown => report.unknown += all,
            }
            if record.fate != Fate::Aborted && there > 0 && there < all {
                report.torn.push(Torn { transaction: Transaction(n), arrived: there, of: all });
            }
        }
    }

    fn count_arrivals(&self, firsts: &[EventId], report: &mut Report) {
        let known: HashMap<EventId, (Fate, &Appended)> = self
            .transactions
            .iter()
            .flat_map(|it| it.events.iter().map(|event| (event.id, (it.fate, event))))
            .collect();
        let mut latest: HashMap<&str, i64> = HashMap::new();
        for id in firsts {
            let Some((fate, event)) = known.get(id).filter(|(fate, _)| *fate != Fate::Aborted) else {
                report.phantom.push(*id);
                continue;
            };
            report.unknown_arrived += usize::from(*fate == Fate::Unknown);
            let Some(key) = event.key.as_deref() else { continue };
            let latest = latest.entry(key).or_insert(event.version);
            if event.version < *latest {
                report.misordered.push(*id);
            }
            *latest = event.version.max(*latest);
        }
    }
}

/// A transaction of which only a part arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Torn {
    /// Which.
    pub transaction: Transaction,
    /// How many of its events arrived.
    pub arrived: usize,
    /// How many it has.
    pub of: usize,
}

/// What became of it all.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// Events whose commit was acknowledged.
    pub committed: usize,
    /// Events rolled back.
    pub aborted: usize,
    /// Events whose commit nobody heard of.
    pub unknown: usize,
    /// Those of them that turned out to be committed.
    pub unknown_arrived: usize,
    /// Arrivals, repeated ones included.
    pub arrivals: usize,
    /// Committed and never arrived.
    pub lost: Vec<EventId>,
    /// Arrived though rolled back, or never appended at all.
    pub phantom: Vec<EventId>,
    /// Arrivals after an event's first.
    pub duplicates: usize,
    /// Arrived (for the first time) after a later one of their key.
    pub misordered: Vec<EventId>,
    /// Transactions of which a part arrived.
    pub torn: Vec<Torn>,
}

impl Report {
    /// Nothing lost, phantom, misordered or torn; repeats allowed.
    pub fn is_at_least_once(&self) -> bool {
        self.lost.is_empty() && self.phantom.is_empty() && self.misordered.is_empty() && self.torn.is_empty()
    }

    /// The same without repeats.
    pub fn is_exactly_once(&self) -> bool {
        self.is_at_least_once() && self.duplicates == 0
    }

    /// # Panics
    ///
    /// Unless [`Self::is_at_least_once`]; prints the report.
    #[track_caller]
    pub fn assert_at_least_once(&self) {
        assert!(self.is_at_least_once(), "a promise broke:\n{self}");
    }

    /// # Panics
    ///
    /// Unless [`Self::is_exactly_once`]; prints the report.
    #[track_caller]
    pub fn assert_exactly_once(&self) {
        assert!(self.is_exactly_once(), "a promise broke:\n{self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { committed, aborted, unknown, unknown_arrived, arrivals, duplicates, .. } = self;
        writeln!(f, "committed={committed} aborted={aborted} unknown={unknown} (of which arrived={unknown_arrived})")?;
        let (lost, phantom, misordered) = (self.lost.len(), self.phantom.len(), self.misordered.len());
        let torn = self.torn.len();
        writeln!(
            f,
            "arrivals={arrivals} lost={lost} phantom={phantom} duplicates={duplicates} misordered={misordered} torn={torn}"
        )?;
        for (what, ids) in [("lost", &self.lost), ("phantom", &self.phantom), ("misordered", &self.misordered)] {
            for id in ids.iter().take(NAMED_MAX) {
                writeln!(f, "  {what}: {id}")?;
            }
        }
        for torn in self.torn.iter().take(NAMED_MAX) {
            writeln!(f, "  torn: {} of {} of transaction {}", torn.arrived, torn.of, torn.transaction.0)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u128) -> EventId {
        EventId::from_uuid(uuid::Uuid::from_u128(n))
    }

    /// One transaction with events `ids`, all of key `k`, versions as the ids.
    fn transaction(ledger: &Ledger, fate: Fate, ids: &[u128]) {
        let transaction = ledger.begin();
        for n in ids {
            ledger.append(transaction, id(*n), Some("k"), i64::try_from(*n).expect("small"));
        }
        ledger.end(transaction, fate);
    }

    fn report(transactions: &[(Fate, &[u128])], arrivals: &[u128]) -> Report {
        let ledger = Ledger::default();
        for (fate, ids) in transactions {
            transaction(&ledger, *fate, ids);
        }
        arrivals.iter().for_each(|n| ledger.arrive(id(*n)));
        assert_eq!(ledger.outstanding(), ledger.check().lost.len());
        ledger.check()
    }

    #[test]
    fn a_clean_run_is_clean() {
        let report = report(&[(Fate::Committed, &[1, 2]), (Fate::Aborted, &[3]), (Fate::Unknown, &[4])], &[1, 2]);
        report.assert_exactly_once();
        assert_eq!((report.committed, report.aborted, report.unknown, report.unknown_arrived), (2, 1, 1, 0));
    }

    #[test]
    fn a_missing_committed_event_is_lost_and_tears_its_transaction() {
        let report = report(&[(Fate::Committed, &[1, 2, 3])], &[1, 3]);
        assert_eq!(report.lost, [id(2)]);
        assert_eq!(report.torn, [Torn { transaction: Transaction(0), arrived: 2, of: 3 }]);
        assert!(!report.is_at_least_once());
    }

    #[test]
    fn an_aborted_or_unheard_of_arrival_is_a_phantom() {
        let report = report(&[(Fate::Aborted, &[1])], &[1, 9]);
        assert_eq!(report.phantom, [id(1), id(9)]);
        assert!(!report.is_at_least_once());
    }

    #[test]
    fn repeats_are_counted_and_break_only_exactly_once() {
        let report = report(&[(Fate::Committed, &[1, 2])], &[1, 2, 1, 1]);
        assert_eq!(report.duplicates, 2);
        assert!(report.is_at_least_once() && !report.is_exactly_once());
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
        ledger.check().assert_exactly_once();
    }

    #[test]
    fn an_unknown_commit_arrives_whole_or_not_at_all() {
        assert!(report(&[(Fate::Unknown, &[1, 2])], &[]).is_exactly_once());
        let whole = report(&[(Fate::Unknown, &[1, 2])], &[1, 2]);
        assert!(whole.is_exactly_once());
        assert_eq!(whole.unknown_arrived, 2);
        let half = report(&[(Fate::Unknown, &[1, 2])], &[1]);
        assert_eq!(half.torn.len(), 1);
        assert!(!half.is_at_least_once());
    }

    #[test]
    fn a_transaction_that_never_ended_is_unknown() {
        let ledger = Ledger::default();
        let open = ledger.begin();
        ledger.append(open, id(1), None, 0);
        assert_eq!(ledger.check().unknown, 1);
    }

    #[test]
    fn a_rolled_back_savepoint_may_not_arrive() {
        let ledger = Ledger::default();
        let transaction = ledger.begin();
        (1..=2).for_each(|n| ledger.append(transaction, id(n), None, 0));
        ledger.take_back(transaction, &[id(2)]);
        ledger.end(transaction, Fate::Committed);
        ledger.arrive(id(1));
        ledger.check().assert_exactly_once();
        ledger.arrive(id(2));
        assert_eq!(ledger.check().phantom, [id(2)]);
    }
}
