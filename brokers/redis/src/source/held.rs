//! The messages that were read from the stream and are not settled.

use std::collections::BTreeMap;
use std::time::Duration;

use postbox_core::{AckToken, RawMessage, SourceMessage};

use super::entries::EntryId;

#[derive(Debug, Default)]
pub(super) struct Held {
    /// Messages to hand out, each from a time on, in the order of the stream. One whose time has
    /// not come holds up those after it.
    waiting: BTreeMap<EntryId, (Duration, RawMessage)>,
    /// The messages that are handed out, by the number of their token.
    given: BTreeMap<u64, (EntryId, RawMessage)>,
    given_ids: BTreeMap<EntryId, u64>,
    times: u64,
    /// The highest id that was ever held.
    last: EntryId,
    /// The floor at the time when messages were forgotten, until they are read again.
    forgotten: Option<EntryId>,
}

impl Held {
    pub(super) fn len(&self) -> usize {
        self.waiting.len() + self.given.len()
    }

    pub(super) fn has(&self, id: EntryId) -> bool {
        self.waiting.contains_key(&id) || self.given_ids.contains_key(&id)
    }

    /// Keeps a message, which may be handed out from `due` on.
    pub(super) fn keep(&mut self, id: EntryId, due: Duration, message: RawMessage) {
        self.last = self.last.max(id);
        self.waiting.insert(id, (due, message));
    }

    /// Hands out the next due messages, at most `max`.
    pub(super) fn give(&mut self, max: usize, now: Duration) -> Vec<SourceMessage> {
        let mut messages = Vec::new();
        while messages.len() < max.max(1)
            && let Some(first) = self.waiting.first_entry()
            && first.get().0 <= now
        {
            let (id, (_, message)) = first.remove_entry();
            self.times += 1;
            self.given.insert(self.times, (id, message.clone()));
            self.given_ids.insert(id, self.times);
            messages.push(SourceMessage { message, token: AckToken(self.times) });
        }
        messages
    }

    /// When the next waiting message is due, if there is one.
    pub(super) fn due(&self) -> Option<Duration> {
        self.waiting.first_key_value().map(|(_, (due, _))| *due)
    }

    /// Takes back the message that a token was handed out for, unless it is settled or was
    /// forgotten.
    pub(super) fn take_back(&mut self, token: &AckToken) -> Option<(EntryId, RawMessage)> {
        let (id, message) = self.given.remove(&token.0)?;
        self.given_ids.remove(&id);
        Some((id, message))
    }

    /// Forgets all messages except those whose time has not come, because the rest is read again.
    pub(super) fn forget(&mut self, now: Duration) {
        self.forgotten = Some(self.floor());
        self.given.clear();
        self.given_ids.clear();
        self.waiting.retain(|_, (due, _)| *due > now);
    }

    /// Notes that all pending entries have been read again.
    pub(super) fn clear_forgotten(&mut self) {
        self.forgotten = None;
    }

    /// Returns the id up to which everything is settled.
    pub(super) fn floor(&self) -> EntryId {
        let unsettled = self.waiting.keys().chain(self.given_ids.keys()).min();
        let floor = unsettled.map_or(self.last, |first| first.before());
        self.forgotten.map_or(floor, |forgotten| forgotten.min(floor))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(ids: &[&str]) -> Held {
        let mut held = Held::default();
        for id in ids {
            let message = RawMessage {
                id: None,
                digest: [0; 32],
                topic: (*id).to_owned(),
                key: None,
                headers: Default::default(),
                content_type: String::new(),
                payload: Default::default(),
            };
            held.keep(id.parse().expect("an id"), Duration::ZERO, message);
        }
        held
    }

    #[test]
    fn a_lost_group_is_made_again_behind_what_is_settled() {
        let id = |text: &str| text.parse::<EntryId>().expect("an id");
        let mut held = held(&["5-1", "5-2", "5-3"]);
        let given = held.give(3, Duration::ZERO);
        assert_eq!(held.floor(), id("5-0"));
        held.take_back(&given[0].token);
        assert_eq!(held.floor(), id("5-1"));
        held.forget(Duration::ZERO);
        assert_eq!((held.len(), held.floor()), (0, id("5-1")), "what was given is not settled by forgetting it");
        assert!(held.take_back(&given[1].token).is_none(), "a token is of one delivery");
        held.clear_forgotten();
        assert_eq!(held.floor(), id("5-3"));
    }

    #[test]
    fn what_waits_for_its_time_holds_up_those_behind_it() {
        let mut held = held(&["5-1", "5-2"]);
        let first = held.give(1, Duration::ZERO).remove(0);
        let (id, message) = held.take_back(&first.token).expect("given");
        held.keep(id, Duration::from_secs(9), message);
        assert!(held.give(2, Duration::from_secs(8)).is_empty());
        assert_eq!(held.due(), Some(Duration::from_secs(9)));
        assert_eq!(held.give(2, Duration::from_secs(9)).len(), 2);
    }
}
