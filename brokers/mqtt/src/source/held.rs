//! The messages that have arrived and are not acknowledged.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use postbox_core::{AckToken, RawMessage, SourceMessage};

/// Messages in order of arrival. PUBACKs are sent in that order, too (MQTT-4.6.0-2).
#[derive(Debug, Default)]
pub(super) struct Held {
    entries: VecDeque<Entry>,
    /// The place of the first entry. Places increase by one and are never reused.
    first: u64,
    /// The places of messages that are handed out, by the number of their token.
    given: BTreeMap<u64, u64>,
    times: u64,
}

#[derive(Debug)]
struct Entry {
    /// The number of its packet; `None` if no PUBACK is expected (QoS 0).
    number: Option<u16>,
    message: RawMessage,
    state: State,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// To be handed out from this time on.
    Waiting(Duration),
    Given,
    Settled,
}

impl Held {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn keep(&mut self, number: Option<u16>, now: Duration, message: RawMessage) {
        self.entries.push_back(Entry { number, message, state: State::Waiting(now) });
    }

    /// Hands out the next messages: at most `max`, and so that at most `most` in all are unsettled.
    /// After a PUBACK, Mosquitto lets more through than the receive maximum. A waiting message
    /// holds up those behind it.
    pub(super) fn give(&mut self, max: usize, most: usize, now: Duration) -> Vec<SourceMessage> {
        let max = max.max(1).min(most.saturating_sub(self.given.len()));
        let mut messages = Vec::new();
        for (place, entry) in (self.first..).zip(&mut self.entries) {
            match entry.state {
                State::Waiting(due) if due > now || messages.len() == max => break,
                State::Waiting(_) => {
                    entry.state = State::Given;
                    self.times += 1;
                    self.given.insert(self.times, place);
                    let token = AckToken(self.times);
                    messages.push(SourceMessage { message: entry.message.clone(), token });
                }
                State::Given | State::Settled => {}
            }
        }
        messages
    }

    /// When the next waiting message is due, if there is one.
    pub(super) fn due(&self) -> Option<Duration> {
        self.entries.iter().find_map(|entry| match entry.state {
            State::Waiting(due) => Some(due),
            State::Given | State::Settled => None,
        })
    }

    pub(super) fn settle(&mut self, token: &AckToken) {
        if let Some(entry) = self.take_back(token) {
            entry.state = State::Settled;
        }
    }

    pub(super) fn put_back(&mut self, token: &AckToken, due: Duration) {
        if let Some(entry) = self.take_back(token) {
            entry.state = State::Waiting(due);
        }
    }

    /// Returns the entry that a token was handed out for, unless it is settled or was forgotten.
    fn take_back(&mut self, token: &AckToken) -> Option<&mut Entry> {
        let place = self.given.remove(&token.0)?;
        self.entries.get_mut(usize::try_from(place.checked_sub(self.first)?).ok()?)
    }

    /// Removes settled entries up to the first that is not settled, and returns their packet
    /// numbers.
    pub(super) fn take_settled(&mut self) -> Vec<u16> {
        let mut numbers = Vec::new();
        while self.entries.front().is_some_and(|entry| entry.state == State::Settled) {
            numbers.extend(self.entries.pop_front().and_then(|entry| entry.number));
            self.first += 1;
        }
        numbers
    }

    /// Forgets the messages that expect a PUBACK, because the next connection delivers them again.
    /// The others will be handed out again.
    pub(super) fn forget(&mut self) {
        self.first += self.entries.len() as u64;
        self.given.clear();
        self.entries.retain(|entry| entry.number.is_none() && entry.state != State::Settled);
        for entry in &mut self.entries {
            entry.state = State::Waiting(Duration::ZERO);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(numbers: &[Option<u16>]) -> Held {
        let mut held = Held::default();
        for number in numbers {
            let message = RawMessage {
                id: None,
                digest: [0; 32],
                topic: format!("{number:?}"),
                key: None,
                headers: Default::default(),
                content_type: String::new(),
                payload: Default::default(),
            };
            held.keep(*number, Duration::ZERO, message);
        }
        held
    }

    #[test]
    fn pubacks_go_in_the_order_of_the_messages() {
        let mut held = held(&[Some(1), Some(2), None, Some(3)]);
        let given = held.give(9, 9, Duration::ZERO);
        held.settle(&given[1].token);
        assert!(held.take_settled().is_empty());
        held.settle(&given[0].token);
        assert_eq!(held.take_settled(), [1, 2]);
        held.settle(&given[0].token);
        held.settle(&given[3].token);
        held.settle(&given[2].token);
        assert_eq!((held.take_settled(), held.len()), (vec![3], 0), "nobody waits for that of QoS 0");
    }

    #[test]
    fn what_the_server_does_not_repeat_is_kept() {
        let mut held = held(&[Some(1), None]);
        let before = held.give(9, 9, Duration::ZERO);
        held.forget();
        before.iter().for_each(|it| held.settle(&it.token));
        let again = held.give(9, 9, Duration::ZERO);
        assert_eq!(again.iter().map(|it| &it.message).collect::<Vec<_>>(), [&before[1].message]);
        assert!(again[0].token != before[1].token, "a token is of one delivery");
    }

    #[test]
    fn no_more_are_given_than_may_be_unsettled() {
        let mut held = held(&[Some(1), Some(2), Some(3)]);
        let given = held.give(9, 2, Duration::ZERO);
        assert_eq!((given.len(), held.give(9, 2, Duration::ZERO).len()), (2, 0));
        held.settle(&given[1].token);
        assert_eq!(held.give(9, 2, Duration::ZERO).len(), 1);
    }

    #[test]
    fn what_waits_for_its_time_holds_up_those_behind_it() {
        let mut held = held(&[Some(1), Some(2)]);
        let first = held.give(1, 9, Duration::ZERO).remove(0);
        held.put_back(&first.token, Duration::from_secs(9));
        assert!(held.take_settled().is_empty(), "what was given back is not settled");
        assert!(held.give(2, 9, Duration::from_secs(8)).is_empty());
        assert_eq!(held.due(), Some(Duration::from_secs(9)));
        assert_eq!(held.give(2, 9, Duration::from_secs(9)).len(), 2);
    }
}
