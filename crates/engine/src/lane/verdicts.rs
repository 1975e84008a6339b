//! What is known about each delivery of one batch, and the settlement that follows from it.

use std::collections::HashSet;
use std::time::Duration;

use postbox_core::{Batch, Delivery, Disposition, Entry, Key, Seq, Settlement};

#[derive(Debug, Clone)]
enum Mark {
    /// Undecided: not sent yet, or in flight.
    Waiting,
    /// Undecided: it found the destination down. This is written if it leaves the stream.
    Outage(Disposition),
    /// Delivered.
    Delivered,
    /// Decided otherwise; this is written.
    Excepted(Disposition),
}

/// The verdicts over one batch.
#[derive(Debug)]
pub(super) struct Verdicts {
    marks: Vec<Mark>,
    /// Number of undecided deliveries.
    waiting: usize,
    /// The last delivery the destination answered for. Everything up to it must be written.
    answered: Option<usize>,
    /// Number of deliveries, from the start, that are written.
    settled: usize,
}

impl Verdicts {
    pub(super) fn new(count: usize) -> Self {
        Self { marks: vec![Mark::Waiting; count], waiting: count, answered: None, settled: 0 }
    }

    pub(super) fn is_waiting(&self, index: usize) -> bool {
        matches!(self.marks[index], Mark::Waiting | Mark::Outage(_))
    }

    /// Returns whether every delivery is decided.
    pub(super) fn is_complete(&self) -> bool {
        self.waiting == 0
    }

    /// Returns how many were sent or need not be.
    pub(super) fn sent(&self) -> usize {
        let waits = |mark: &&Mark| matches!(mark, Mark::Waiting | Mark::Outage(_) | Mark::Excepted(Disposition::Block));
        self.marks.len() - self.marks.iter().filter(waits).count()
    }

    /// Returns the deliveries that were decided but not delivered, in order.
    pub(super) fn exceptions(&self) -> impl Iterator<Item = (usize, &Disposition)> {
        self.marks.iter().enumerate().filter_map(|(index, mark)| match mark {
            Mark::Excepted(disposition) => Some((index, disposition)),
            _ => None,
        })
    }

    /// Returns what is written of a decided delivery. Nothing is written of what the stream
    /// delivered: its position says so.
    pub(super) fn decided(&self, index: usize, is_row: bool) -> Option<Disposition> {
        match &self.marks[index] {
            Mark::Delivered if is_row => Some(Disposition::Delivered),
            Mark::Excepted(disposition) => Some(disposition.clone()),
            _ => None,
        }
    }

    /// Marks a delivery as delivered.
    pub(super) fn delivered(&mut self, index: usize) {
        self.decide(index, Mark::Delivered);
        self.answered = self.answered.max(Some(index));
    }

    /// Marks a delivery that the destination answered for but does not have.
    pub(super) fn failed(&mut self, index: usize, disposition: Disposition) {
        self.defer(index, disposition);
        self.answered = self.answered.max(Some(index));
    }

    /// Marks a delivery that is not sent now for another reason: a held key, a later time,
    /// discarded.
    pub(super) fn defer(&mut self, index: usize, disposition: Disposition) {
        self.decide(index, Mark::Excepted(disposition));
    }

    /// Turns what was not sent into due rows, each behind the earlier ones of its key.
    pub(super) fn set_aside(&mut self, deliveries: &[Delivery], hold_keys: bool) {
        let mut keys: HashSet<&Key> = HashSet::new();
        for (index, delivery) in deliveries.iter().enumerate() {
            if matches!(self.marks[index], Mark::Waiting) {
                let key = delivery.event.key.as_ref().filter(|_| hold_keys);
                let is_first = key.is_none_or(|key| keys.insert(key));
                self.defer(index, if is_first { Disposition::NotSent } else { Disposition::Block });
            }
        }
    }

    /// Notes that a delivery found the destination down. It stays undecided.
    pub(super) fn record_outage(&mut self, index: usize, disposition: Disposition) {
        self.marks[index] = Mark::Outage(disposition);
    }

    fn decide(&mut self, index: usize, mark: Mark) {
        debug_assert!(self.is_waiting(index), "a delivery is decided once");
        self.marks[index] = mark;
        self.waiting -= 1;
    }

    /// Returns the settlement of the decided deliveries at the start that are not written yet, and
    /// how many are written once it is done; `None` if there are none.
    pub(super) fn settle_decided<'b>(&self, batch: &'b Batch, hold_keys: bool) -> Option<(usize, Settlement<'b>)> {
        let deliveries = &batch.deliveries;
        let decided = (self.settled..deliveries.len()).take_while(|index| !self.is_waiting(*index)).count();
        let end = self.settled + decided;
        // A batch of due rows has no position.
        let are_rows = batch.end.is_none();
        let position = (!are_rows && decided > 0).then(|| deliveries[end - 1].seq);
        let entries = self.entries(deliveries, end, are_rows, hold_keys);
        (decided > 0).then_some((end, Settlement { position, entries, rewind: false, hold_keys }))
    }

    /// Notes that this many deliveries, from the start, are written.
    pub(super) fn settled(&mut self, count: usize) {
        self.settled = count;
    }

    /// Returns the settlement of the rest of a stream batch.
    ///
    /// If all are decided, it goes to the end of the batch, otherwise to the last answered
    /// delivery, at least over those decided at the start: a probe must not find the blocked events
    /// of one key before it again and again. Undecided ones before that leave the stream as
    /// uncounted retries; the ones after it are read again. If none was answered and `outage_row`
    /// is set, the first one that found the destination down leaves the stream too. Its row shows
    /// every reader of the store why nothing goes on.
    pub(super) fn settle_stream<'b>(&self, batch: &'b Batch, hold_keys: bool, outage_row: bool) -> Settlement<'b> {
        let deliveries = &batch.deliveries;
        if self.is_complete() {
            let entries = self.entries(deliveries, deliveries.len(), false, hold_keys);
            return Settlement { position: batch.end, entries, rewind: false, hold_keys };
        }
        let first_outage = || self.marks.iter().position(|mark| outage_row && matches!(mark, Mark::Outage(_)));
        let decided = (0..deliveries.len()).take_while(|index| !self.is_waiting(*index)).count();
        let Some(last) = self.answered.or_else(first_outage).max(decided.checked_sub(1)) else {
            return Settlement { position: None, entries: Vec::new(), rewind: true, hold_keys };
        };
        let entries = self.entries(deliveries, last + 1, false, hold_keys);
        Settlement { position: Some(deliveries[last].seq), entries, rewind: true, hold_keys }
    }

    /// Returns the settlement of the rest of a batch of due rows. A row that was not sent has no
    /// entry and stays due.
    pub(super) fn settle_due<'b>(&self, batch: &'b Batch, hold_keys: bool) -> Settlement<'b> {
        let entries = self.entries(&batch.deliveries, batch.deliveries.len(), true, hold_keys);
        Settlement { position: None, entries, rewind: false, hold_keys }
    }

    /// Returns the entries of deliveries before `end` that are not written yet, in order. An
    /// undecided one becomes an uncounted retry or waits behind one of its key. An undecided due
    /// row is written only if it met an outage.
    fn entries<'b>(&self, deliveries: &'b [Delivery], end: usize, are_rows: bool, hold_keys: bool) -> Vec<Entry<'b>> {
        let mut waiting_keys: HashSet<&Key> = HashSet::new();
        let mut is_behind = |delivery: &'b Delivery| match &delivery.event.key {
            Some(key) => hold_keys && !waiting_keys.insert(key),
            None => false,
        };
        let mut entries = Vec::new();
        for (delivery, mark) in deliveries[..end].iter().zip(&self.marks).skip(self.settled) {
            let disposition = match mark {
                Mark::Delivered if are_rows => Disposition::Delivered,
                Mark::Delivered => continue,
                Mark::Excepted(disposition) => disposition.clone(),
                Mark::Waiting if are_rows => continue,
                _ if is_behind(delivery) => Disposition::Block,
                Mark::Outage(disposition) => disposition.clone(),
                Mark::Waiting => Disposition::NotSent,
            };
            entries.push(Entry { delivery, disposition });
        }
        entries
    }

    /// Returns the keys that later events must wait for once this batch is settled.
    pub(super) fn holding_keys(&self, deliveries: &[Delivery]) -> HashSet<Key> {
        let holding = self.exceptions().filter(|(_, disposition)| holds(disposition));
        holding.filter_map(|(index, _)| deliveries[index].event.key.clone()).collect()
    }
}

/// Returns whether a disposition holds back the later events of its key.
pub(super) fn holds(disposition: &Disposition) -> bool {
    disposition.retrying().is_some() || matches!(disposition, Disposition::Block | Disposition::Dead { halt: true, .. })
}

/// Returns when the lane should look for due rows because of this settlement. A blocked event whose
/// key is released at the same moment is found by the regular look.
pub(super) fn earliest_retry(settlement: &Settlement<'_>) -> Option<Duration> {
    let wait = |entry: &Entry<'_>| match &entry.disposition {
        // The store knows the time on its clock, and one look learns how long it is.
        Disposition::Schedule { .. } => Some(Duration::ZERO),
        // The next event of its key is released.
        Disposition::Dead { halt: false, .. } | Disposition::Expired { .. } => Some(Duration::ZERO),
        disposition => disposition.retrying().map(|row| row.after),
    };
    settlement.entries.iter().filter_map(wait).min()
}

/// Returns how many entries have the wanted disposition, for the counters.
pub(super) fn count(settlement: &Settlement<'_>, wanted: fn(&Disposition) -> bool) -> usize {
    settlement.entries.iter().filter(|entry| wanted(&entry.disposition)).count()
}

/// Returns the first and last position of a batch, for logs.
pub(super) fn span(batch: &Batch) -> (Seq, Seq) {
    let seq = |delivery: Option<&Delivery>| delivery.map(|delivery| delivery.seq).unwrap_or_default();
    (seq(batch.deliveries.first()), seq(batch.deliveries.last()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows that are written may be gone again because they came due and were delivered.
    #[test]
    fn what_was_settled_is_not_settled_again() {
        let deliveries = (1..=5).map(|seq| Delivery::placeholder(Seq(seq))).collect();
        let batch = Batch { deliveries, end: Some(Seq(5)), ..Batch::default() };
        let mut verdicts = Verdicts::new(5);
        assert!(verdicts.settle_decided(&batch, true).is_none());
        verdicts.failed(0, Disposition::Block);
        verdicts.delivered(1);
        verdicts.failed(3, Disposition::Discarded);
        let seqs = |settlement: &Settlement<'_>| {
            let entries = settlement.entries.iter().map(|entry| entry.delivery.seq.0);
            (settlement.position, entries.collect::<Vec<_>>())
        };
        let (count, settlement) = verdicts.settle_decided(&batch, true).expect("two are decided");
        assert_eq!((count, seqs(&settlement)), (2, (Some(Seq(2)), vec![1])));
        verdicts.settled(count);
        assert!(verdicts.settle_decided(&batch, true).is_none());
        assert_eq!(seqs(&verdicts.settle_stream(&batch, true, false)), (Some(Seq(4)), vec![3, 4]));
        verdicts.delivered(2);
        verdicts.delivered(4);
        assert_eq!(seqs(&verdicts.settle_stream(&batch, true, false)), (Some(Seq(5)), vec![4]));
    }

    /// Otherwise each probe would read the same blocked events again, and reach nothing behind
    /// them.
    #[test]
    fn what_is_decided_before_an_outage_is_settled() {
        let deliveries = (1..=3).map(|seq| Delivery::placeholder(Seq(seq))).collect();
        let batch = Batch { deliveries, end: Some(Seq(3)), ..Batch::default() };
        let mut verdicts = Verdicts::new(3);
        verdicts.defer(0, Disposition::Block);
        verdicts.record_outage(1, Disposition::NotSent);
        for (outage_row, position) in [(false, 1), (true, 2)] {
            let settlement = verdicts.settle_stream(&batch, true, outage_row);
            assert_eq!((settlement.position, settlement.entries.len()), (Some(Seq(position)), position as usize));
        }
    }

    #[test]
    fn a_position_that_is_settled_is_not_taken_back() {
        let deliveries = (1..=3).map(|seq| Delivery::placeholder(Seq(seq))).collect();
        let batch = Batch { deliveries, end: Some(Seq(3)), ..Batch::default() };
        let mut verdicts = Verdicts::new(3);
        verdicts.defer(0, Disposition::Block);
        let (count, _) = verdicts.settle_decided(&batch, true).expect("one is decided");
        verdicts.settled(count);
        let settlement = verdicts.settle_stream(&batch, true, false);
        assert_eq!((settlement.position, settlement.entries.len()), (Some(Seq(1)), 0));
    }
}
