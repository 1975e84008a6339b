//! What goes out and arrives, and which of it may arrive again.
//!
//! An event is in flight from the moment when the destination is handed it until the store shows it
//! as settled. It may be sent again only if its call was not answered with an arrival, or if its
//! lane changed hands after something abrupt happened to the relay that had it. Then just what is
//! in flight at that moment may be sent again, once.

use postbox_core::State;

use super::{BLAMED_AFTER, CRASHES_MAX, Ledger, Seen, Who};
use crate::plan::At;

impl Ledger {
    /// Records that an event is about to be sent.
    pub(crate) fn send(&mut self, who: Who, number: usize, attempt: u32, replay: u32, now: At) {
        let fact = &self.facts[number];
        if attempt > 1 + fact.failures + fact.found_down / BLAMED_AFTER {
            let (failures, down) = (fact.failures, fact.found_down);
            self.fail(|| format!("attempts: event {number} goes out as attempt {attempt} after {failures} failures and {down} outages"));
        }
        if self.facts[number].not_before.is_some_and(|at| now < at) {
            self.fail(|| format!("early: event {number} goes out before its time"));
        }
        let Some(seen) = self.facts[number].seen else { return };
        let lane = usize::from(seen.lane);
        let is_owner = self.owners.get(lane).copied().flatten() == Some(who);
        let fact = &self.facts[number];
        // The number of a replay is gone with the row.
        let has_arrived = fact.arrivals.get(replay as usize).is_some_and(|count| *count > 0);
        let is_known = match seen.state {
            State::Dispatched => seen.replays == replay || has_arrived,
            State::Dead => seen.replays == replay,
            _ => false,
        };
        if is_owner && !fact.marked && is_known && replay as usize >= fact.since {
            self.fail(|| format!("sent again: event {number} is {} and goes out once more", seen.state));
        }
        if is_owner && self.facts[number].answered == Some((who, self.cursors[lane].epoch, replay)) {
            self.fail(|| format!("sent twice: event {number} goes out again under one lease, after its answer"));
        }
        let until = self.granted.iter().filter(|(of, by, _)| *of == seen.lane && *by == who).map(|(.., until)| *until);
        if until.max().is_some_and(|until| now >= until) {
            self.fail(|| format!("lease: event {number} goes out after the lease of lane {lane} ended"));
        }
        let fact = &mut self.facts[number];
        let is_excused = std::mem::replace(&mut fact.excused, !is_owner);
        if is_owner && !is_excused && (has_arrived || fact.in_hand.contains(&replay)) {
            self.fail(|| format!("repeated: event {number} goes out again, though nothing abrupt happened"));
        }
    }

    /// Records that the destination is handed an event.
    pub(crate) fn hand(&mut self, number: usize, replay: u32) {
        self.facts[number].in_hand.push(replay);
    }

    /// Records that a call of the destination is over.
    pub(crate) fn take_back(&mut self, number: usize, replay: u32) {
        let in_hand = &mut self.facts[number].in_hand;
        if let Some(place) = in_hand.iter().position(|it| *it == replay) {
            in_hand.remove(place);
        }
    }

    /// Records that the relay cannot know that an event arrived: its call has no answer, or one
    /// that says it did not.
    pub(crate) fn excuse(&mut self, number: usize) {
        self.facts[number].excused = true;
    }

    /// Records that something abrupt happens to a relay. It may lose the lanes that it has.
    pub(crate) fn disturb(&mut self, relay: u8) {
        for (owner, disturbed) in self.owners.iter().zip(&mut self.disturbed) {
            *disturbed |= owner.is_some_and(|(it, _)| it == relay);
        }
    }

    /// Records that something abrupt happens to all relays.
    pub(crate) fn disturb_all(&mut self) {
        self.disturbed.fill(true);
    }

    /// Records that a lane has another lease. If something abrupt happened under the former one,
    /// what is in flight now may be sent again, once.
    pub(super) fn change_hands(&mut self, lane: usize) {
        if std::mem::take(&mut self.disturbed[lane]) {
            let is_unsettled = |seen: Seen| usize::from(seen.lane) == lane && seen.state != State::Dispatched;
            for fact in &mut self.facts {
                fact.excused |= fact.seen.is_some_and(is_unsettled);
            }
        }
    }

    /// Records a failure that counts as an attempt.
    pub(crate) fn failed(&mut self, number: usize) {
        self.facts[number].failures += 1;
    }

    pub(crate) fn found_down(&mut self, number: usize) {
        self.facts[number].found_down += 1;
    }

    pub(crate) fn refused(&mut self, number: usize) {
        self.facts[number].refused = true;
    }

    /// Records that a relay ended with it.
    pub(crate) fn ended(&mut self, number: usize) {
        let fact = &mut self.facts[number];
        fact.ended += 1;
        fact.refused |= fact.ended >= CRASHES_MAX;
    }

    /// Records that a relay got the answer that an event arrived.
    pub(crate) fn answered(&mut self, who: Who, number: usize, replay: u32) {
        let Some(lane) = self.facts[number].seen.map(|seen| usize::from(seen.lane)) else { return };
        if self.owners.get(lane).copied().flatten() == Some(who) {
            self.facts[number].answered = Some((who, self.cursors[lane].epoch, replay));
        }
    }

    /// Records that the destination accepted it.
    pub(crate) fn arrive(&mut self, number: usize, replay: u32) {
        let fact = &mut self.facts[number];
        let Some(order) = fact.order else {
            return self.fail(|| format!("phantom: event {number} arrived and was not committed"));
        };
        let first = fact.arrivals.is_empty();
        fact.arrivals.resize(fact.arrivals.len().max(replay as usize + 1), 0);
        fact.arrivals[replay as usize] += 1;
        if fact.arrivals[replay as usize] > 1 {
            self.repeated += 1;
        }
        let Some(key) = fact.key.map(usize::from) else { return };
        // A person took it out while it was in flight.
        let is_out = fact.marked || fact.skipped || fact.seen.is_some_and(|seen| seen.state == State::Discarded);
        let is_free = fact.not_before.is_some() || fact.taken_back || fact.left_out || !self.ordered;
        if first && !is_out && replay == 0 && !is_free {
            let before = self.arrived[key];
            if order < before {
                self.fail(|| format!("order: event {number} of key {key} arrived after a later one"));
            }
            self.arrived[key] = order.max(before);
        }
    }
}
