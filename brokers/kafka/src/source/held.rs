//! The messages that are fetched and not settled, and where each partition stands.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use postbox_core::{AckToken, RawMessage, SourceMessage};

/// A topic and the number of a partition.
pub(super) type Partition = (Arc<str>, i32);

#[derive(Debug, Default)]
pub(super) struct Held {
    partitions: BTreeMap<Partition, Standing>,
    /// What is given out, by a number of that one time.
    given: BTreeMap<u64, (Partition, i64)>,
    times: u64,
}

/// One partition, since it was assigned to us.
#[derive(Debug, Default)]
struct Standing {
    /// To be given out, each not before its time. What waits for its time holds up those behind it.
    waiting: BTreeMap<i64, (Duration, RawMessage)>,
    given: BTreeMap<i64, RawMessage>,
    /// Behind the last that was fetched.
    end: i64,
    /// What the group knows.
    committed: i64,
}

impl Standing {
    /// Everything before it is settled.
    fn settled_to(&self) -> i64 {
        let first = self.waiting.keys().next().into_iter().chain(self.given.keys().next());
        first.copied().min().unwrap_or(self.end)
    }
}

impl Held {
    /// How many wait to be given out.
    pub(super) fn waiting(&self) -> usize {
        self.partitions.values().map(|standing| standing.waiting.len()).sum()
    }

    /// Keeps a message until it is given, from `now` on.
    pub(super) fn keep(&mut self, partition: &Partition, offset: i64, now: Duration, message: RawMessage) {
        let standing = self.partitions.entry(partition.clone()).or_insert_with(|| {
            // That is where the group stands, or begins; then nobody knows it, and a group that
            // begins at the end of a topic would pass what was fetched.
            Standing { end: offset, committed: -1, ..Standing::default() }
        });
        if offset < standing.end {
            // The log was cut off or made anew: what the group knows is not of this log.
            standing.committed = -1;
        }
        standing.end = offset + 1;
        standing.waiting.insert(offset, (now, message));
    }

    /// The next messages that are due, at most `max`, and at most `given_max` given out in all.
    pub(super) fn give(&mut self, max: usize, given_max: usize, now: Duration) -> Vec<SourceMessage> {
        let max = max.max(1).min(given_max.saturating_sub(self.given.len()));
        let mut messages = Vec::new();
        for (partition, standing) in &mut self.partitions {
            while messages.len() < max
                && let Some(first) = standing.waiting.first_entry()
                && first.get().0 <= now
            {
                let (offset, (_, message)) = first.remove_entry();
                self.times += 1;
                self.given.insert(self.times, (partition.clone(), offset));
                standing.given.insert(offset, message.clone());
                messages.push(SourceMessage { message, token: AckToken::new(self.times.to_be_bytes().to_vec()) });
            }
        }
        messages
    }

    /// When the next one is due, if one waits.
    pub(super) fn due(&self) -> Option<Duration> {
        let first = |standing: &Standing| standing.waiting.first_key_value().map(|(_, (due, _))| *due);
        self.partitions.values().filter_map(first).min()
    }

    /// The message of this token is settled, unless it was, or its partition is not ours any more.
    pub(super) fn settle(&mut self, token: &AckToken) {
        self.take_back(token);
    }

    /// The message of this token is given out again, from `due` on.
    pub(super) fn put_back(&mut self, token: &AckToken, due: Duration) {
        if let Some((standing, offset, message)) = self.take_back(token) {
            standing.waiting.insert(offset, (due, message));
        }
    }

    fn take_back(&mut self, token: &AckToken) -> Option<(&mut Standing, i64, RawMessage)> {
        let time = u64::from_be_bytes(token.as_bytes().try_into().ok()?);
        let (partition, offset) = self.given.remove(&time)?;
        let standing = self.partitions.get_mut(&partition)?;
        let message = standing.given.remove(&offset)?;
        Some((standing, offset, message))
    }

    /// Where partitions stand, as far as the group does not know it.
    pub(super) fn uncommitted(&self) -> Vec<(Partition, i64)> {
        let unknown = self.partitions.iter().filter(|(_, standing)| standing.settled_to() != standing.committed);
        unknown.map(|(partition, standing)| (partition.clone(), standing.settled_to())).collect()
    }

    /// The group knows it.
    pub(super) fn committed(&mut self, offsets: &[(Partition, i64)]) {
        for (partition, offset) in offsets {
            if let Some(standing) = self.partitions.get_mut(partition) {
                standing.committed = *offset;
            }
        }
    }

    /// Forgets everything: we are in no group any more.
    pub(super) fn forget_all(&mut self) {
        self.partitions.clear();
        self.given.clear();
    }

    /// Forgets everything of a partition: whoever has it next begins where the group stands.
    pub(super) fn forget(&mut self, partition: &Partition) {
        self.partitions.remove(partition);
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
    fn a_log_that_begins_anew_is_committed_anew() {
        let mut held = held(100..102);
        held.give(9, 9, NOW).iter().for_each(|it| held.settle(&it.token));
        held.committed(&[(partition(0), 102)]);
        held.keep(&partition(0), 0, NOW, message(0));
        assert_eq!(held.uncommitted(), [(partition(0), 0)]);
    }
}
