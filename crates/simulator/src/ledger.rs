//! What is known about each event of one subscription, and what must hold. It is computed from what
//! writers wrote, what the destination got and what the store shows.
//!
//! It shares no code with the engine. The store is checked right after each operation, so that a
//! fault is reported where it happens, not where it shows.

mod flight;

use postbox_core::{Epoch, Lease, State};
use postbox_memory::Cursor;

use crate::plan::{At, Fate};
use crate::server::{Place, Server};
use crate::world::LEASE;

/// Size of the tables below that are indexed by key. Plans have at most 3 keys.
const KEYS_MAX: usize = 4;
/// An event that finds the destination down this often, with other deliveries in between, is
/// charged for it.
const BLAMED_AFTER: u32 = 5;
/// An event that ended this many relays may be given up. No other event may.
const CRASHES_MAX: u32 = 3;
/// The operation under which a call for another subscription is judged.
const OF_ANOTHER: &str = "a call for another subscription";

/// One event, by its number.
#[derive(Debug, Clone)]
pub(crate) struct Fact {
    pub(crate) key: Option<u8>,
    pub(crate) topic: u8,
    pub(crate) fate: Fate,
    /// Its delivery time, if it has one. Such an event leaves the order.
    pub(crate) not_before: Option<At>,
    /// Its position in the order of commits; `None`: not committed.
    order: Option<u64>,
    /// Another store took over that did not have it.
    taken_back: bool,
    /// A person marked it dead, perhaps while it was in flight.
    marked: bool,
    /// A reset skipped it.
    skipped: bool,
    /// The subscription's filter left it out at some time since it was committed.
    left_out: bool,
    /// Number of arrivals, by replay.
    arrivals: Vec<u32>,
    /// It was last to be sent again as this replay or a later one: only their arrivals count.
    since: usize,
    /// By call of the destination that is under way: its replay.
    in_hand: Vec<u32>,
    /// Something abrupt happened since it was last sent, so it may be sent again.
    excused: bool,
    /// The relay that knows of an arrival, the epoch of its lane then, and the replay.
    answered: Option<(Who, Epoch, u32)>,
    /// Failures that count as an attempt, since the last replay.
    failures: u32,
    found_down: u32,
    refused: bool,
    /// Number of relays it ended.
    pub(crate) ended: u32,
    seen: Option<Seen>,
    tick: u64,
}

/// The state of an event when the store was last looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    state: State,
    lane: u16,
    attempts: u32,
    replays: u32,
}

impl Seen {
    fn of(place: &Place) -> Self {
        let Place { state, lane, attempts, replays, .. } = *place;
        Self { state, lane, attempts, replays }
    }
}

/// How often a relay may ask again after a grant whose answer it did not get. Other lanes come
/// first.
const UNUSED_ASKS_MAX: u32 = 6;

/// The relay that did something, and the number of its life.
pub(crate) type Who = (u8, u32);

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// The number of its subscription.
    subscription: usize,
    pub(crate) facts: Vec<Fact>,
    /// The first violation.
    pub(crate) violation: Option<String>,
    attempts_max: u32,
    ordered: bool,
    halt: bool,
    /// Topics that the filter leaves out now.
    left_out: [bool; 2],
    /// Arrivals beyond the first.
    repeated: usize,
    commits: u64,
    /// By key: the commit position of the latest first arrival.
    arrived: [u64; KEYS_MAX],
    cursors: Vec<Cursor>,
    /// By lane: the relay that got its current epoch.
    owners: Vec<Option<Who>>,
    /// By lane: something abrupt happened to its owner, who may lose it.
    disturbed: Vec<bool>,
    /// By lane: how often the owner of an epoch asked for lanes without ever using this one.
    unused: Vec<Option<u32>>,
    /// By lane and owner: until when the store granted it, by the store's clock.
    granted: Vec<(u16, Who, At)>,
    /// There was a reset, so events come from the stream as some replay.
    was_reset: bool,
    /// The store went back, so it may give out numbers of replays again.
    has_gone_back: bool,
    tick: u64,
}

impl Ledger {
    pub(crate) fn new(subscription: usize, attempts_max: u32, ordered: bool, halt: bool) -> Self {
        Self { subscription, attempts_max, ordered, halt, ..Self::default() }
    }

    pub(crate) fn fail(&mut self, violation: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(violation());
        }
    }

    /// Records an event and returns its number.
    pub(crate) fn append(&mut self, key: Option<u8>, topic: u8, fate: Fate, not_before: Option<At>) -> usize {
        self.facts.push(Fact {
            key,
            topic,
            fate,
            not_before,
            order: None,
            taken_back: false,
            marked: false,
            skipped: false,
            left_out: false,
            arrivals: Vec::new(),
            since: 0,
            in_hand: Vec::new(),
            excused: false,
            answered: None,
            failures: 0,
            found_down: 0,
            refused: false,
            ended: 0,
            seen: None,
            tick: 0,
        });
        self.facts.len() - 1
    }

    pub(crate) fn commit(&mut self, number: usize) {
        self.commits += 1;
        let fact = &mut self.facts[number];
        fact.order = Some(self.commits);
        fact.left_out = self.left_out[usize::from(fact.topic)];
    }

    /// Reads the filter. What it leaves out may be skipped from now on, also by a lane that takes
    /// the next filter later.
    fn note_filter(&mut self, server: &Server) {
        self.left_out = server.left_out(self.subscription);
        for fact in &mut self.facts {
            fact.left_out |= fact.order.is_some() && self.left_out[usize::from(fact.topic)];
        }
    }

    /// Records the end of a granted lease, by the store's clock.
    fn grant(&mut self, lane: u16, who: Who, until: At) {
        match self.granted.iter_mut().find(|(of, by, _)| (*of, *by) == (lane, who)) {
            Some(known) => known.2 = known.2.max(until),
            None => self.granted.push((lane, who, until)),
        }
    }

    /// Checks the store after an operation.
    pub(crate) fn observe(
        &mut self,
        server: &Server,
        operation: &'static str,
        lease: Option<&Lease>,
        who: Who,
        lease_ends: At,
    ) {
        let cursors = server.cursors(self.subscription);
        let before = std::mem::replace(&mut self.cursors, cursors);
        match operation {
            "subscribe" => self.note_filter(server),
            // These take lanes away from relays.
            "pause" | "set_lanes" | "reset" => self.disturb_all(),
            _ => {}
        }
        if before.len() != self.cursors.len() {
            self.begin_lanes();
            self.check_lanes(operation, &before);
            return self.look(server, operation, None);
        }
        let mut changed = false;
        for (lane, &old) in before.iter().enumerate() {
            let new = self.cursors[lane];
            if old == new {
                continue;
            }
            let moved = (old.epoch, old.from, old.to, old.settled) != (new.epoch, new.from, new.to, new.settled);
            changed |= moved;
            if !moved && !matches!(operation, "acquire" | "renew" | "release") {
                self.fail(|| format!("lease: {operation} changed it, from {old:?} to {new:?}"));
            }
            if old.epoch != new.epoch {
                self.change_hands(lane);
                if !matches!(operation, "acquire" | "reset") || new.epoch < old.epoch {
                    self.fail(|| format!("epoch: {operation} changed it from {} to {}", old.epoch, new.epoch));
                }
                if operation == "reset" {
                    let now = lease_ends - LEASE.as_millis() as At;
                    if old.lease_until.is_some_and(|until| until.as_millis() as At > now) {
                        self.fail(|| format!("lease: reset moved lane {lane} while somebody held it"));
                    }
                    (self.owners[lane], self.unused[lane], self.was_reset) = (None, None, true);
                    continue;
                }
                self.owners[lane] = Some(who);
                self.unused[lane] = Some(0);
                self.grant(lane as u16, who, lease_ends);
            }
            if (new.to, new.settled) < (old.to, old.settled) || new.from < old.from {
                self.fail(|| format!("cursor: {operation} moved it back, from {old:?} to {new:?}"));
            }
            if (new.to, new.settled) != (old.to, old.settled) && !matches!(operation, "open" | "settle" | "apply") {
                self.fail(|| format!("cursor: {operation} moved it, from {old:?} to {new:?}"));
            }
        }
        self.count_unused(operation, lease, who, &before);
        let cursor_of = |cursors: &[Cursor], lease: &Lease| cursors.get(usize::from(lease.lane)).copied();
        let fenced = lease.filter(|it| cursor_of(&before, it).is_none_or(|cursor| cursor.epoch != it.epoch));
        match lease {
            Some(lease) if operation == "renew" && fenced.is_none() => self.grant(lease.lane, who, lease_ends),
            _ => {}
        }
        if let Some(lease) = fenced
            && cursor_of(&before, lease) != cursor_of(&self.cursors, lease)
        {
            self.fail(|| format!("fencing: {operation} under epoch {} moved the cursor of a later one", lease.epoch));
        }
        if changed || !matches!(operation, "open" | "page" | "load" | "due" | "renew" | "release") {
            self.look(server, operation, fenced);
        }
    }

    /// Checks that a call for another subscription changed nothing of this one.
    pub(crate) fn observe_other(&mut self, server: &Server, operation: &'static str) {
        if server.cursors(self.subscription) != self.cursors {
            self.fail(|| format!("isolation: {operation} for another subscription changed a lane"));
        }
        if !matches!(operation, "acquire" | "open" | "page" | "load" | "due" | "renew" | "release" | "leave") {
            self.look(server, OF_ANOTHER, None);
        }
    }

    /// Starts over with another number of lanes. An event may be sent under the lease of the lane
    /// that it had before.
    fn begin_lanes(&mut self) {
        let count = self.cursors.len();
        (self.owners, self.unused, self.disturbed) = (vec![None; count], vec![None; count], vec![true; count]);
        for (_, who, until) in std::mem::take(&mut self.granted) {
            (0..count).for_each(|lane| self.grant(lane as u16, who, until));
        }
    }

    /// Checks that new lanes begin beyond the former ones and cannot be held together with them.
    fn check_lanes(&mut self, operation: &str, before: &[Cursor]) {
        let leased_until = before.iter().filter_map(|old| old.lease_until).max();
        let follows = |new: &Cursor| {
            new.lease_until >= leased_until
                && before.iter().all(|old| old.epoch < new.epoch && old.from <= new.from && old.to <= new.to)
        };
        let is_right = before.is_empty() || operation == "set_lanes" && self.cursors.iter().all(follows);
        if !is_right {
            self.fail(|| format!("lanes: {operation} made other lanes of {before:?}"));
        }
    }

    /// Checks that a lane whose grant was lost with its answer is granted again and does not stand
    /// still.
    fn count_unused(&mut self, operation: &str, lease: Option<&Lease>, who: Who, before: &[Cursor]) {
        if let Some(unused) = lease.and_then(|lease| self.unused.get_mut(usize::from(lease.lane))) {
            *unused = None;
        }
        if operation == "pause" {
            // Nothing is granted during a pause.
            self.unused.fill(None);
        }
        for (lane, old) in before.iter().enumerate() {
            let asked_on = operation == "acquire" && self.owners[lane] == Some(who) && *old == self.cursors[lane];
            let Some(count) = self.unused[lane].as_mut().filter(|_| asked_on) else { continue };
            *count += 1;
            if *count > UNUSED_ASKS_MAX {
                self.fail(|| format!("grant: relay {}.{} asks on and on for lane {lane}, which it has", who.0, who.1));
            }
        }
    }

    /// Compares the state of each event with its previous one.
    fn look(&mut self, server: &Server, operation: &'static str, fenced: Option<&Lease>) {
        self.tick += 1;
        server.each_place(self.subscription, |place| {
            let Some(number) = place.version.map(|number| number as usize) else { return };
            let new = Seen::of(&place);
            let old = self.facts[number].seen.replace(new);
            self.facts[number].tick = self.tick;
            if old != Some(new) {
                self.judge(number, old, new, operation, fenced);
            }
        });
        for number in 0..self.facts.len() {
            let fact = &mut self.facts[number];
            if fact.tick == self.tick {
                continue;
            }
            // Only a sweep removes an event, and only one that nobody needs.
            if let Some(gone) = fact.seen.take()
                && !(operation == "prune"
                    && matches!(gone.state, State::Dispatched | State::Discarded | State::Skipped))
            {
                self.fail(|| format!("gone: {operation} removed event {number}, which was {}", gone.state));
            }
        }
    }

    /// Checks one change of one event.
    fn judge(&mut self, number: usize, old: Option<Seen>, new: Seen, operation: &str, fenced: Option<&Lease>) {
        let settles = matches!(operation, "settle" | "apply");
        let routes = matches!(operation, "note_unrouted" | "prune");
        let from = old.map_or(State::Pending, |old| old.state);
        let wanted = !self.facts[number].left_out;
        if fenced.is_some_and(|lease| lease.lane == new.lane) {
            self.fail(|| format!("fencing: {operation} of a former owner made event {number} {}", new.state));
        }
        // It becomes retrying, and is then put behind an earlier one of its key.
        let behind = new.state == State::Blocked
            && match from {
                State::Dead => operation == "retry",
                State::Dispatched => operation == "replay",
                State::Skipped | State::Unrouted => operation == "replay" || routes,
                _ => false,
            };
        // It is read again, or skipped. Only a discarded event is neither.
        let reset = operation == "reset"
            && match new.state {
                State::Pending => from != State::Discarded,
                State::Skipped | State::Unrouted => from == State::Pending || from != State::Discarded && !wanted,
                _ => false,
            };
        if from != new.state && !behind && !reset {
            if !from.may_become(new.state) {
                self.fail(|| format!("state: {operation} made event {number} {} from {from}", new.state));
            }
            let by = match new.state {
                // Events that a filter leaves out are skipped as long as it does.
                State::Skipped | State::Pending | State::Unrouted if !wanted || self.facts[number].skipped => true,
                State::Discarded => operation == "discard",
                State::Retrying if from == State::Dead => operation == "retry",
                State::Retrying | State::Scheduled if matches!(from, State::Unrouted | State::Skipped) => {
                    settles || routes || operation == "replay"
                }
                State::Retrying | State::Scheduled if from == State::Dispatched => settles || operation == "replay",
                State::Retrying | State::Scheduled | State::Blocked if operation == "set_lanes" => {
                    from == State::Pending
                }
                State::Dead => settles || operation == "mark_dead",
                State::Retrying => settles || matches!(operation, "discard" | "mark_dead" | "retry"),
                State::Dispatched => settles,
                _ => settles,
            };
            if !by {
                self.fail(|| format!("state: {operation} made event {number} {} from {from}", new.state));
            }
        }
        self.facts[number].marked |= operation == "mark_dead" && new.state == State::Dead;
        let old = old.unwrap_or(Seen { state: State::Pending, attempts: 0, replays: 0, ..new });
        let fact = &mut self.facts[number];
        let attempts = match () {
            () if reset => {
                (fact.failures, fact.skipped) = (0, new.state != State::Pending);
                // It is read as a replay that it never was before.
                fact.since = if self.has_gone_back { 0 } else { fact.arrivals.len() };
                (new.attempts, new.replays) == (0, 0)
            }
            // It leaves the stream as the replay that it is read as, also if a filter was changed
            // meanwhile.
            () if self.was_reset
                && (from == State::Pending || settles && matches!(from, State::Skipped | State::Unrouted))
                && new.state.has_row() =>
            {
                new.attempts <= u32::from(settles) && (new.replays as usize >= fact.since || self.has_gone_back)
            }
            () if new.replays > old.replays => {
                (fact.failures, fact.since) = (0, new.replays as usize);
                let is_next = match operation {
                    "retry" => new.replays == old.replays + 1,
                    // A different number than any before it, of any event.
                    _ => routes || operation == "replay",
                };
                let is_fresh = self.has_gone_back || fact.arrivals.get(new.replays as usize).is_none_or(|it| *it == 0);
                new.attempts == 0 && is_next && is_fresh
            }
            // The row is deleted, and its counters with it.
            () if matches!(new.state, State::Dispatched | State::Skipped) => true,
            () => {
                new.replays == old.replays
                    && (new.attempts == old.attempts || settles && new.attempts == old.attempts + 1)
            }
        };
        let charged = fact.failures + fact.found_down / BLAMED_AFTER;
        if !attempts || new.attempts > charged + u32::from(fact.refused) {
            self.fail(|| {
                format!("attempts: {operation} made {old:?} of event {number} {new:?}, after {charged} failures")
            });
        }
        let fact = &self.facts[number];
        match new.state {
            State::Dispatched
                if from != State::Dispatched && !fact.arrivals.iter().skip(fact.since).any(|count| *count > 0) =>
            {
                self.fail(|| format!("loss: {operation} passed event {number}, which never arrived"));
            }
            State::Dead
                if from != State::Dead && operation != "mark_dead" && !fact.refused && charged < self.attempts_max =>
            {
                self.fail(|| format!("dead: {operation} gave event {number} up after {charged} failures"));
            }
            _ => {}
        }
    }

    /// Starts over from what the store shows after it went back to an earlier state.
    pub(crate) fn went_back(&mut self, server: &Server, may_lose: bool, effects: bool) {
        let before = std::mem::replace(&mut self.cursors, server.cursors(self.subscription));
        if self.cursors.len() != self.owners.len() {
            self.begin_lanes();
        }
        for (owner, (old, new)) in self.owners.iter_mut().zip(before.iter().zip(&self.cursors)) {
            // A relay may go on under a lease that is still there.
            *owner = owner.filter(|_| old.epoch == new.epoch && new.lease_until.is_some());
        }
        self.unused.fill(None);
        self.has_gone_back |= may_lose;
        self.disturb_all();
        self.note_filter(server);
        self.tick += 1;
        server.each_place(self.subscription, |place| {
            let Some(number) = place.version.map(|number| number as usize) else { return };
            let seen = Seen::of(&place);
            let fact = &mut self.facts[number];
            // It died or was taken out, others of its key went on, and the store no longer knows
            // that. So it comes after them, and nobody could tell.
            let is_out = |seen: Seen| matches!(seen.state, State::Dead | State::Discarded);
            let skipped = fact.skipped;
            let was_out = |before: Seen| skipped || is_out(before) || before.replays > seen.replays;
            fact.taken_back |= fact.seen.is_some_and(was_out) && !is_out(seen);
            (fact.seen, fact.tick) = (Some(seen), self.tick);
            fact.since = 0;
            // Attempts made before a replay that is undone count again.
            fact.failures = fact.failures.max(seen.attempts);
        });
        for number in 0..self.facts.len() {
            let fact = &mut self.facts[number];
            fact.answered = None;
            fact.excused = true;
            if may_lose {
                // The numbers of replays that are undone are given again.
                let arrived: u32 = fact.arrivals.iter().sum();
                fact.arrivals = Some(arrived).filter(|count| *count > 0).into_iter().collect();
            }
            if effects {
                fact.arrivals.clear();
            }
            if fact.tick == self.tick || fact.order.is_none() {
                continue;
            }
            // If it was swept before, it was done. Otherwise it counts as never committed.
            if fact.seen.take().is_some() {
                fact.taken_back = true;
                if !may_lose && !fact.arrivals.is_empty() {
                    self.fail(|| format!("phantom: event {number} was published and is gone after a crash"));
                }
            }
        }
        if effects {
            self.arrived = [0; KEYS_MAX];
        }
    }

    /// Returns whether every event is in a state where it may stay.
    pub(crate) fn is_drained(&self) -> bool {
        self.pending().next().is_none()
    }

    /// Returns events that must still be delivered, and their states.
    fn pending(&self) -> impl Iterator<Item = (usize, State)> {
        let is_dead = |fact: &Fact| fact.seen.is_some_and(|seen| seen.state == State::Dead);
        self.facts.iter().enumerate().filter_map(move |(number, fact)| {
            let state = fact.seen?.state;
            // It waits behind a dead event of its key until a person decides about that one.
            let behind = |holds: &dyn Fn(&Fact) -> bool| {
                fact.key.is_some() && self.facts.iter().any(|it| it.key == fact.key && holds(it))
            };
            // While it answers some as if it were down, nobody can tell whether it accepts any
            // unless it does: what it always fails at waits too.
            let is_accepted = |it: &Fact| !matches!(it.fate, Fate::SeemsDown | Fate::Fails(100..));
            let holds = |it: &Fact| !is_accepted(it) && it.order < fact.order;
            let is_last = self.facts.iter().any(|it| it.fate == Fate::SeemsDown)
                && (!is_accepted(fact) || self.ordered && behind(&holds));
            let may_wait = || self.halt && behind(&is_dead) || is_last;
            (state.counts_as_pending() && !may_wait()).then_some((number, state))
        })
    }

    /// Checks everything once more at the end.
    pub(crate) fn close(&mut self, clean: bool) {
        let stuck = self.pending().next();
        if let Some((number, state)) = stuck {
            self.fail(|| format!("stuck: event {number} is {state} when all is over"));
        }
        let repeated = self.repeated;
        if clean && repeated > 0 {
            self.fail(|| format!("repeated: {repeated} arrivals beyond the first, and nothing abrupt happened"));
        }
    }

    /// Returns what is known about each event, for a report.
    pub(crate) fn lines(&self) -> Vec<String> {
        let line = |(number, fact): (usize, &Fact)| {
            let state = fact.seen.map_or("-", |seen| seen.state.as_str());
            let key = fact.key.map_or("no key".to_owned(), |key| format!("key {key}"));
            let order = fact.order.map_or("not committed".to_owned(), |order| format!("commit {order}"));
            format!("event {number}: {key}, {:?}, {order}, {state}, arrivals by replay {:?}", fact.fate, fact.arrivals)
        };
        self.facts.iter().enumerate().map(line).collect()
    }
}
