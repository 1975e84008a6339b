//! The messages that are fetched and not settled, and the offsets of each partition.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use postbox_core::{AckToken, RawMessage, SourceMessage};

use crate::group::Partition;

#[derive(Debug, Default)]
pub(super) struct Held {
    partitions: BTreeMap<Partition, PartitionState>,
    /// The messages that are handed out, by the number of their token.
    given: BTreeMap<u64, (Partition, i64)>,
    times: u64,
    /// Our new partitions. Whether their committed offset is of this topic is yet to be asked.
    assigned: BTreeSet<Partition>,
}

/// The messages and offsets of a partition since it was assigned to us.
#[derive(Debug, Default)]
struct PartitionState {
    /// Messages to hand out, each from a time on. One whose time has not come holds up those after
    /// it.
    waiting: BTreeMap<i64, (Duration, RawMessage)>,
    given: BTreeMap<i64, RawMessage>,
    /// The offset after the last fetched message.
    end: i64,
    /// The group's committed offset; -1 if unknown.
    committed: i64,
}

impl PartitionState {
    /// The first offset is the group's committed offset, or where a group without one starts. It
    /// counts as not committed, so that it is committed next: a group that starts at the end of a
    /// topic would otherwise skip messages after a restart.
    fn at(offset: i64) -> Self {
        Self { end: offset, committed: -1, ..Self::default() }
    }

    /// Returns the offset to commit: that of the first unsettled message, or the end.
    fn settled_to(&self) -> i64 {
        let first = self.waiting.keys().next().into_iter().chain(self.given.keys().next());
        first.copied().min().unwrap_or(self.end)
    }
}

impl Held {
    /// Returns how many messages wait to be handed out.
    pub(super) fn waiting(&self) -> usize {
        self.partitions.values().map(|state| state.waiting.len()).sum()
    }

    /// Keeps a message, which may be handed out from `now` on.
    pub(super) fn keep(&mut self, partition: &Partition, offset: i64, now: Duration, message: RawMessage) {
        let state = self.partitions.entry(partition.clone()).or_insert_with(|| PartitionState::at(offset));
        if offset < state.end {
            // The log was truncated or created anew, so the committed offset does not belong to it.
            state.committed = -1;
        }
        state.end = offset + 1;
        state.waiting.insert(offset, (now, message));
    }

    /// Notes where the group stands in partitions without messages so far.
    pub(super) fn begin(&mut self, positions: Vec<(Partition, i64)>) {
        for (partition, offset) in positions {
            self.partitions.entry(partition).or_insert_with(|| PartitionState::at(offset));
        }
    }

    /// Hands out the next due messages: at most `max`, and so that at most `given_max` in all are
    /// handed out.
    pub(super) fn give(&mut self, max: usize, given_max: usize, now: Duration) -> Vec<SourceMessage> {
        let max = max.max(1).min(given_max.saturating_sub(self.given.len()));
        let mut messages = Vec::new();
        for (partition, state) in &mut self.partitions {
            while messages.len() < max
                && let Some(first) = state.waiting.first_entry()
                && first.get().0 <= now
            {
                let (offset, (_, message)) = first.remove_entry();
                self.times += 1;
                self.given.insert(self.times, (partition.clone(), offset));
                state.given.insert(offset, message.clone());
                messages.push(SourceMessage { message, token: AckToken(self.times) });
            }
        }
        messages
    }

    /// When the next waiting message is due, if there is one.
    pub(super) fn due(&self) -> Option<Duration> {
        let first = |state: &PartitionState| state.waiting.first_key_value().map(|(_, (due, _))| *due);
        self.partitions.values().filter_map(first).min()
    }

    /// Settles the message of a token, unless it is settled already or its partition is no longer
    /// ours.
    pub(super) fn settle(&mut self, token: &AckToken) {
        self.take_back(token);
    }

    /// Makes the message of a token wait, to be handed out again from `due` on.
    pub(super) fn put_back(&mut self, token: &AckToken, due: Duration) {
        if let Some((state, offset, message)) = self.take_back(token) {
            state.waiting.insert(offset, (due, message));
        }
    }

    fn take_back(&mut self, token: &AckToken) -> Option<(&mut PartitionState, i64, RawMessage)> {
        let (partition, offset) = self.given.remove(&token.0)?;
        let state = self.partitions.get_mut(&partition)?;
        let message = state.given.remove(&offset)?;
        Some((state, offset, message))
    }

    /// Returns the offsets to commit that differ from the committed ones.
    pub(super) fn uncommitted(&self) -> Vec<(Partition, i64)> {
        let unknown = self.partitions.iter().filter(|(_, state)| state.settled_to() != state.committed);
        unknown.map(|(partition, state)| (partition.clone(), state.settled_to())).collect()
    }

    /// Notes that these offsets are committed.
    pub(super) fn committed(&mut self, offsets: &[(Partition, i64)]) {
        for (partition, offset) in offsets {
            if let Some(state) = self.partitions.get_mut(partition) {
                state.committed = *offset;
            }
        }
    }

    /// Notes which partitions have become ours.
    pub(super) fn assigned(&mut self, partitions: &[Partition]) {
        self.assigned.extend(partitions.iter().cloned());
    }

    /// Returns the partitions that have become ours since the last call, and still are.
    pub(super) fn take_assigned(&mut self) -> BTreeSet<Partition> {
        std::mem::take(&mut self.assigned)
    }

    /// Forgets everything, because we have left the group.
    pub(super) fn forget_all(&mut self) {
        self.partitions.clear();
        self.given.clear();
        self.assigned.clear();
    }

    /// Forgets a partition. Its next owner starts at the committed offset.
    pub(super) fn forget(&mut self, partition: &Partition) {
        self.partitions.remove(partition);
        self.assigned.remove(partition);
        self.given.retain(|_, (its, _)| its != partition);
    }
}

#[cfg(test)]
mod tests {
    use postbox_core::Headers;

    use super::*;

    const NOW: Duration = Duration::from_secs(1);
    const LATER: Duration = Duration::from_secs(5);

    fn partition(number: i32) -> Partition {
        ("orders".into(), number)
    }

    fn message(id: i64) -> RawMessage {
        RawMessage {
            id: Some(id.to_string()),
            digest: [0; 32],
            topic: "orders".into(),
            key: None,
            headers: Headers::new(),
            content_type: String::new(),
            payload: Default::default(),
        }
    }

    fn held(offsets: std::ops::Range<i64>) -> Held {
        let mut held = Held::default();
        offsets.for_each(|offset| held.keep(&partition(0), offset, NOW, message(offset)));
        held
    }

    fn ids(given: &[SourceMessage]) -> Vec<String> {
        given.iter().map(|it| it.message.message_id()).collect()
    }

    #[test]
    fn only_what_is_settled_without_a_gap_is_committed() {
        let mut held = held(7..11);
        let given = held.give(9, 9, NOW);
        assert_eq!(ids(&given), ["7", "8", "9", "10"]);
        assert_eq!(held.uncommitted(), [(partition(0), 7)], "where the group begins");
        held.committed(&[(partition(0), 7)]);
        held.settle(&given[1].token);
        held.settle(&given[3].token);
        assert_eq!(held.uncommitted(), [], "the first is not settled");
        held.settle(&given[0].token);
        assert_eq!(held.uncommitted(), [(partition(0), 9)]);
        held.committed(&[(partition(0), 9)]);
        held.put_back(&given[2].token, NOW);
        assert_eq!(held.uncommitted(), [], "it waits again");
        let again = held.give(9, 9, NOW);
        assert_eq!(ids(&again), ["9"]);
        held.settle(&given[2].token);
        assert_eq!(held.uncommitted(), [], "a token is of one time");
        held.settle(&again[0].token);
        assert_eq!(held.uncommitted(), [(partition(0), 11)]);
    }

    #[test]
    fn where_a_group_begins_is_committed_without_any_message() {
        let mut held = held(7..9);
        held.begin(vec![(partition(0), 9), (partition(1), 3)]);
        assert_eq!(held.uncommitted(), [(partition(0), 7), (partition(1), 3)]);
        held.committed(&held.uncommitted());
        held.begin(vec![(partition(1), 3)]);
        assert_eq!(held.uncommitted(), [], "they have begun");
        held.keep(&partition(1), 5, NOW, message(5));
        assert_eq!(held.uncommitted(), [(partition(1), 5)], "there is no message before");
    }

    #[test]
    fn what_waits_for_its_time_holds_up_its_partition_alone() {
        let mut held = held(0..3);
        held.keep(&partition(1), 50, NOW, message(50));
        let first = held.give(1, 9, NOW);
        held.put_back(&first[0].token, LATER);
        assert_eq!(ids(&held.give(9, 9, NOW)), ["50"]);
        assert_eq!(held.due(), Some(LATER));
        assert_eq!(ids(&held.give(9, 3, LATER)), ["0", "1"], "no more than may be out");
    }

    #[test]
    fn a_partition_that_is_not_ours_is_nobody_s_to_settle() {
        let mut held = held(0..3);
        let given = held.give(9, 9, NOW);
        held.forget(&partition(0));
        held.settle(&given[0].token);
        held.put_back(&given[1].token, NOW);
        assert_eq!((held.uncommitted(), held.waiting()), (Vec::new(), 0));
    }

    #[test]
    fn a_partition_is_asked_for_once_each_time_that_it_comes_to_us() {
        let mut held = Held::default();
        for _ in 0..2 {
            held.assigned(&[partition(0), partition(1)]);
            held.forget(&partition(1));
            assert_eq!(held.take_assigned(), BTreeSet::from([partition(0)]));
            assert!(held.take_assigned().is_empty());
        }
        held.assigned(&[partition(0)]);
        held.forget_all();
        assert!(held.take_assigned().is_empty());
    }

    #[test]
    fn a_log_that_begins_anew_is_committed_anew() {
        let mut held = held(100..102);
        held.give(9, 9, NOW).iter().for_each(|it| held.settle(&it.token));
        held.committed(&[(partition(0), 102)]);
        held.keep(&partition(0), 0, NOW, message(0));
        assert_eq!(held.uncommitted(), [(partition(0), 0)]);
    }
}
