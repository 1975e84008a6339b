//! The state of the memory store, and the small pure rules over it.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::MutexGuard;
use std::task::Waker;
use std::time::Duration;

use jiff::Timestamp;
use postbox_core::kit::{lane_of, log_unknown, subscription_unknown};
use postbox_core::{
    Attempt, Disposition, Epoch, Error, Event, EventId, Filter, Key, Lease, LogName, NewEvent, OwnerId, Pause, Result,
    State as EventState, Subscription, SubscriptionName,
};

use crate::receive::Inbox;

/// Distance of the epochs of one incarnation.
const EPOCHS_APART: Epoch = 1_000;

/// The lanes of a subscription that asks for no number: a second replica takes half of the work.
const LANES: u16 = 2;

/// Everything, behind the one mutex.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) data: Data,
    /// The part of `data` that a crash would leave, if crashes are simulated.
    pub(crate) durable: Option<Box<Data>>,
    /// Rises each time the store goes back to an earlier state. Transactions begun before are
    /// rolled back.
    pub(crate) incarnation: u64,
    /// Number of ids created so far. Makes ids unique within one millisecond. Never goes back.
    ids: u32,
    /// Part of each id: distinguishes this store from those created at another nanosecond.
    salt: u32,
    /// Rises with everything that may give a lane work. A lane compares it with the value at its
    /// last read.
    pub(crate) wakeups: u64,
    /// At most one waiting relay per lane.
    pub(crate) waiting: BTreeMap<(SubscriptionName, u16), Waker>,
}

/// What a database would store in its tables.
#[derive(Clone, Default)]
pub(crate) struct Data {
    /// When it was migrated; `None`: there is no schema.
    pub(crate) created_at: Option<Timestamp>,
    pub(crate) logs: BTreeMap<LogName, LogState>,
    pub(crate) readers: BTreeMap<SubscriptionName, Reader>,
    pub(crate) inbox: Inbox,
    /// First epoch of new lanes, so that no lease of an earlier subscription of the same name
    /// counts.
    pub(crate) epoch_next: Epoch,
}

/// One log.
#[derive(Clone, Default)]
pub(crate) struct LogState {
    pub(crate) rows: BTreeMap<i64, Row>,
    /// The `seq`s that each commit made visible. Windows are opened from this.
    pub(crate) commits: BTreeMap<u64, Vec<i64>>,
    pub(crate) commit_last: u64,
    pub(crate) ids: HashMap<EventId, i64>,
    seq_last: i64,
    /// Events that no subscription wants.
    pub(crate) unrouted: BTreeSet<i64>,
    /// The last commit up to which unrouted events were looked for.
    pub(crate) routed: u64,
}

/// One event. Invisible until its transaction has committed.
#[derive(Clone)]
pub(crate) struct Row {
    pub(crate) event: Event,
    pub(crate) commit: Option<u64>,
}

/// One subscription with its lanes and delivery rows.
#[derive(Clone)]
pub(crate) struct Reader {
    pub(crate) subscription: Subscription,
    /// Separates it from other subscriptions that had its name before.
    pub(crate) generation: i64,
    /// Every filter it had, the present one last. A filter's revision is its index. `None` means
    /// that nothing was wanted: the first one, for events before its start, and those added by
    /// resets.
    pub(crate) filters: Vec<Option<Filter>>,
    /// How far lanes got with each earlier filter.
    pub(crate) passages: Vec<Passage>,
    /// Up to which position events of the stream have which replay, since the last reset.
    pub(crate) again: (i64, u32),
    /// Skipped events that were sent after all.
    pub(crate) sent: BTreeSet<i64>,
    /// The highest replay of any of its events.
    pub(crate) replays: u32,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) pause: Option<Pause>,
    /// Number of events delivered so far.
    pub(crate) delivered: u64,
    /// Until when each relay counts as alive.
    pub(crate) alive_until: HashMap<OwnerId, Duration>,
    deliveries: BTreeMap<i64, DeliveryRow>,
    /// The delivery rows that hold their key, by key, in `seq` order. The first is the head.
    holding: HashMap<Key, BTreeSet<i64>>,
}

/// One lane: its window, how far it is settled, and who drives it. Only its reader knows how far it
/// is read.
#[derive(Clone, Default)]
pub(crate) struct Lane {
    pub(crate) epoch: Epoch,
    pub(crate) owner: Option<OwnerId>,
    pub(crate) lease_until: Option<Duration>,
    /// The time for which it was granted or renewed.
    pub(crate) lease_ttl: Duration,
    pub(crate) granted_at: Duration,
    /// Number of holders in a row that vanished.
    pub(crate) crashes: u32,
    /// The window: rows with `from < commit <= to`.
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Every row of the window up to here is dealt with.
    pub(crate) settled: i64,
    /// Revision of the filter it reads by.
    pub(crate) revision: usize,
}

/// How far a lane got with one filter: its cursor when it took the next.
#[derive(Clone)]
pub(crate) struct Passage {
    /// Number of lanes there were, and which of them it was.
    pub(crate) lanes: u16,
    pub(crate) lane: u16,
    pub(crate) revision: usize,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) settled: i64,
    /// Everything beyond was taken back by a reset.
    pub(crate) seq_max: i64,
}

/// An event that left the stream.
#[derive(Clone)]
pub(crate) struct DeliveryRow {
    pub(crate) state: EventState,
    pub(crate) lane: u16,
    pub(crate) key: Option<Key>,
    /// Whether the subscription was ordered by key when the row was created.
    pub(crate) ordered: bool,
    /// Dead, and the key waits for a person.
    pub(crate) halt: bool,
    pub(crate) attempts: u32,
    pub(crate) replays: u32,
    /// Number of relays that ended while they sent it alone.
    pub(crate) crashes: u32,
    pub(crate) due_at: Option<Timestamp>,
    pub(crate) code: Option<String>,
    pub(crate) error: Option<String>,
    pub(crate) updated_at: Timestamp,
    pub(crate) last_attempts: Vec<Attempt>,
    /// The last death that was handed to a dead-letter sink, counted from 1.
    pub(crate) letters: u32,
    /// When its letter is to be handed over; `None`: at once.
    pub(crate) letter_at: Option<Timestamp>,
}

impl Data {
    pub(crate) fn migrated(now: Timestamp) -> Self {
        let logs = [LogName::outbox(), LogName::inbox()].map(|name| (name, LogState::default()));
        Self { created_at: Some(now), logs: logs.into(), ..Self::default() }
    }

    pub(crate) fn log(&self, operation: &'static str, name: &LogName) -> Result<&LogState> {
        let known = || self.logs.keys().map(LogName::to_string).collect::<Vec<_>>();
        self.logs.get(name).ok_or_else(|| log_unknown(operation, name, &known()))
    }

    /// Returns the reader and the log it reads.
    pub(crate) fn reader_mut(
        &mut self,
        operation: &'static str,
        name: &SubscriptionName,
    ) -> Result<(&mut Reader, &LogState)> {
        if !self.readers.contains_key(name) {
            let known: Vec<String> = self.readers.keys().map(SubscriptionName::to_string).collect();
            return Err(subscription_unknown(operation, name, &known));
        }
        let reader = self.readers.get_mut(name).expect("checked above");
        let log = self.logs.get(&reader.subscription.log).expect("a subscription's log is never removed");
        Ok((reader, log))
    }

    /// Returns the reader and log of a lease that is still held at `monotonic`; otherwise `Stale`.
    pub(crate) fn leased(
        &mut self,
        operation: &'static str,
        lease: &Lease,
        monotonic: Duration,
    ) -> Result<(&mut Reader, &LogState)> {
        let Ok((reader, log)) = self.reader_mut(operation, &lease.subscription) else {
            return Err(Error::stale(operation));
        };
        match reader.lanes.get(usize::from(lease.lane)) {
            Some(lane) if lane.is_held_by(lease, monotonic) => Ok((reader, log)),
            _ => Err(Error::stale(operation)),
        }
    }
}

impl State {
    pub(crate) fn migrated(now: Timestamp) -> Self {
        Self { data: Data::migrated(now), salt: now.as_nanosecond() as u32, ..Self::default() }
    }

    /// Marks everything so far as on disk.
    pub(crate) fn flush(&mut self) {
        if let Some(durable) = &mut self.durable {
            **durable = self.data.clone();
        }
    }

    /// Makes a UUIDv7 from the time, the store and a counter.
    pub(crate) fn next_id(&mut self, now: Timestamp) -> EventId {
        self.ids = self.ids.wrapping_add(1);
        let mut rest = [0; 10];
        rest[2..6].copy_from_slice(&self.salt.to_be_bytes());
        rest[6..].copy_from_slice(&self.ids.to_be_bytes());
        let millis = u64::try_from(now.as_millisecond()).unwrap_or_default();
        EventId::from_uuid(uuid::Builder::from_unix_timestamp_millis(millis, &rest).into_uuid())
    }

    /// Notes that there may be work, and wakes the waiting relays once the lock is released.
    pub(crate) fn wake(mut this: MutexGuard<'_, Self>) {
        this.wakeups += 1;
        let waiting = std::mem::take(&mut this.waiting);
        drop(this);
        waiting.into_values().for_each(Waker::wake);
    }

    /// Flushes a change that may give a lane work, and wakes the waiting relays.
    pub(crate) fn flush_and_wake(mut this: MutexGuard<'_, Self>) {
        this.flush();
        Self::wake(this);
    }
}

impl LogState {
    /// Writes an invisible row.
    pub(crate) fn insert(&mut self, event: NewEvent, id: EventId, now: Timestamp) -> i64 {
        self.seq_last += 1;
        let event = event.into_event(id, now);
        self.ids.insert(event.id, self.seq_last);
        self.rows.insert(self.seq_last, Row { event, commit: None });
        self.seq_last
    }

    /// Makes rows visible, all at once.
    pub(crate) fn commit(&mut self, seqs: Vec<i64>) {
        self.commit_last += 1;
        for seq in &seqs {
            self.rows.get_mut(seq).expect("an open transaction's rows are not pruned").commit = Some(self.commit_last);
        }
        self.commits.insert(self.commit_last, seqs);
    }

    /// Removes rows. Their `seq` stays used.
    pub(crate) fn remove(&mut self, seq: i64) {
        self.unrouted.remove(&seq);
        let Some(row) = self.rows.remove(&seq) else { return };
        self.ids.remove(&row.event.id);
        let Some(commit) = row.commit else { return };
        if let Some(seqs) = self.commits.get_mut(&commit) {
            seqs.retain(|other| *other != seq);
            if seqs.is_empty() {
                self.commits.remove(&commit);
            }
        }
    }

    /// Returns every committed row, in `seq` order.
    pub(crate) fn committed(&self) -> impl Iterator<Item = (i64, u64, &Event)> {
        self.rows.iter().filter_map(|(seq, row)| Some((*seq, row.commit?, &row.event)))
    }
}

impl Reader {
    /// Returns the number of lanes.
    pub(crate) fn lane_count(&self) -> u16 {
        self.subscription.lanes.unwrap_or(LANES)
    }

    pub(crate) fn new(subscription: Subscription, from: u64, epoch: Epoch) -> Self {
        let lane = Lane { from, to: from, revision: 1, epoch, ..Lane::default() };
        let lanes = subscription.lanes.unwrap_or(LANES);
        let before = |lane: u16| Passage { lanes, lane, revision: 0, from, to: from, settled: 0, seq_max: i64::MAX };
        Self {
            generation: epoch,
            filters: vec![None, Some(subscription.filter.clone())],
            passages: (0..lanes).map(before).collect(),
            again: (0, 0),
            sent: BTreeSet::new(),
            replays: 0,
            lanes: vec![lane; usize::from(lanes)],
            subscription,
            pause: None,
            delivered: 0,
            alive_until: HashMap::new(),
            deliveries: BTreeMap::new(),
            holding: HashMap::new(),
        }
    }

    pub(crate) fn wants(&self, event: &Event) -> bool {
        wants(&self.subscription.filter, event)
    }

    /// Returns the revision of the present filter.
    pub(crate) fn revision(&self) -> usize {
        self.filters.len() - 1
    }

    /// Returns whether its lane has passed an event.
    pub(crate) fn has_passed(&self, seq: i64, commit: u64, event: &Event) -> bool {
        self.lanes[usize::from(self.lane_of(event))].has_passed(seq, commit)
    }

    /// Returns the revision of the filter by which its lane passed an event, or the present one; 0
    /// before the start.
    pub(crate) fn judged_by(&self, seq: i64, commit: u64, event: &Event) -> usize {
        let lane = &self.lanes[usize::from(self.lane_of(event))];
        if !lane.has_passed(seq, commit) {
            return self.revision();
        }
        let covers = |it: &&Passage| it.lane == lane_of_event(event, it.lanes) && it.covers(seq, commit);
        self.passages.iter().filter(covers).map(|it| it.revision).min().unwrap_or(lane.revision)
    }

    /// Returns whether a filter left an event out, or will, as opposed to a start position.
    pub(crate) fn is_judged(&self, seq: i64, commit: u64, event: &Event) -> bool {
        self.filters[self.judged_by(seq, commit, event)].is_some()
    }

    /// Lets a lane read on by the present filter. Allowed only if nothing returned is unsettled, so
    /// that every row is judged by one filter.
    pub(crate) fn take_filter(&mut self, lane: u16) {
        let (lanes, revision) = (self.lane_count(), self.revision());
        let of_lane = &mut self.lanes[usize::from(lane)];
        if of_lane.revision != revision {
            self.passages.push(of_lane.passage(lanes, lane));
            of_lane.revision = revision;
        }
    }

    /// Returns the replay of an event that comes from the stream.
    pub(crate) fn replay_of(&self, seq: i64) -> u32 {
        if seq <= self.again.0 { self.again.1 } else { 0 }
    }

    /// Returns whether an event goes out.
    pub(crate) fn takes(&self, seq: i64, commit: u64, event: &Event) -> bool {
        let filter = self.filters[self.judged_by(seq, commit, event)].as_ref();
        filter.is_some_and(|filter| wants(filter, event))
    }

    /// Returns the lane of an event: by its key, or by its id if it has none.
    pub(crate) fn lane_of(&self, event: &Event) -> u16 {
        lane_of_event(event, self.lane_count())
    }

    /// Returns the state of an event, from its row or from the cursor.
    pub(crate) fn state_of(&self, log: &LogState, seq: i64, commit: u64, event: &Event) -> EventState {
        match self.deliveries.get(&seq) {
            Some(row) => row.state,
            None if self.sent.contains(&seq) => EventState::Dispatched,
            None if !self.takes(seq, commit, event) && log.unrouted.contains(&seq) => EventState::Unrouted,
            None if !self.takes(seq, commit, event) => EventState::Skipped,
            None if self.has_passed(seq, commit, event) => EventState::Dispatched,
            None => EventState::Pending,
        }
    }

    /// Returns the pause in force.
    pub(crate) fn paused(&self, now: Timestamp) -> Option<&Pause> {
        self.pause.as_ref().filter(|pause| pause.holds_at(now))
    }

    pub(crate) fn delivery(&self, seq: i64) -> Option<&DeliveryRow> {
        self.deliveries.get(&seq)
    }

    pub(crate) fn deliveries(&self) -> impl Iterator<Item = (i64, &DeliveryRow)> {
        self.deliveries.iter().map(|(seq, row)| (*seq, row))
    }

    /// Writes a row. Every change goes through here, so that `holding` is always right.
    pub(crate) fn put(&mut self, seq: i64, row: DeliveryRow) {
        self.take(seq);
        if let Some(key) = row.held_key() {
            self.holding.entry(key.clone()).or_default().insert(seq);
        }
        self.deliveries.insert(seq, row);
    }

    /// Deletes a row.
    pub(crate) fn take(&mut self, seq: i64) -> Option<DeliveryRow> {
        let row = self.deliveries.remove(&seq)?;
        if let Some(key) = row.held_key()
            && let Some(seqs) = self.holding.get_mut(key)
        {
            seqs.remove(&seq);
            if seqs.is_empty() {
                self.holding.remove(key);
            }
        }
        Some(row)
    }

    pub(crate) fn is_held(&self, key: &Key) -> bool {
        self.holding.contains_key(key)
    }

    /// Returns the first unfinished event of a key.
    pub(crate) fn head(&self, key: &Key) -> Option<i64> {
        self.holding.get(key).and_then(|seqs| seqs.first().copied())
    }

    /// Returns the unfinished events of a key that come after `seq`.
    pub(crate) fn behind(&self, key: &Key, seq: i64) -> impl Iterator<Item = (i64, &DeliveryRow)> {
        let seqs = self.holding.get(key).into_iter().flat_map(move |seqs| seqs.range(seq + 1..));
        seqs.filter_map(|seq| self.deliveries.get(seq).map(|row| (*seq, row)))
    }

    /// Makes rows due that wait for a call of the lane's former holder.
    pub(crate) fn make_in_flight_due(&mut self, lane: u16, now: Timestamp) {
        let waits = |row: &DeliveryRow| {
            row.lane == lane && row.state == EventState::Retrying && row.code.as_deref() == Some(Disposition::IN_FLIGHT)
        };
        for row in self.deliveries.values_mut().filter(|row| waits(row) && !row.is_due(now)) {
            // Whether it holds its key does not depend on the time.
            (row.due_at, row.updated_at) = (Some(now), now);
        }
    }

    /// Removes the order: no row holds its key any more, and blocked rows become due.
    pub(crate) fn unblock(&mut self, now: Timestamp) {
        let holding: Vec<i64> = self.holding.values().flatten().copied().collect();
        for seq in holding {
            let mut row = DeliveryRow { ordered: false, updated_at: now, ..self.deliveries[&seq].clone() };
            if row.state == EventState::Blocked {
                (row.state, row.due_at) = (EventState::Retrying, Some(now));
            }
            self.put(seq, row);
        }
    }

    /// Counts a crash for each event that the lane's former holder sent alone without writing a
    /// result.
    pub(crate) fn count_crashes(&mut self, lane: u16, now: Timestamp) {
        let was_sent = |row: &DeliveryRow| {
            row.lane == lane && row.state == EventState::Retrying && row.code.as_deref() == Some(Disposition::ALONE)
        };
        for row in self.deliveries.values_mut().filter(|row| was_sent(row)) {
            row.crashes += 1;
            row.code = Some(Disposition::RELAY_CRASHED.to_owned());
            row.error = Some(Disposition::RELAY_CRASHED_ERROR.to_owned());
            row.updated_at = now;
        }
    }

    /// Makes the head of a key due if it was blocked, because what it waited for is gone.
    pub(crate) fn release_head(&mut self, key: &Key, now: Timestamp) {
        let Some(seq) = self.head(key) else { return };
        let row = &self.deliveries[&seq];
        if row.state == EventState::Blocked {
            let row = DeliveryRow { state: EventState::Retrying, due_at: Some(now), updated_at: now, ..row.clone() };
            self.put(seq, row);
        }
    }
}

impl Lane {
    fn is_held_by(&self, lease: &Lease, monotonic: Duration) -> bool {
        self.epoch == lease.epoch
            && self.owner.as_ref() == Some(&lease.owner)
            && self.lease_until.is_some_and(|until| monotonic < until)
    }

    pub(crate) fn is_free(&self, monotonic: Duration) -> bool {
        self.lease_until.is_none_or(|until| until <= monotonic)
    }

    /// Grants it under the next epoch. Each incarnation has epochs of its own: after the store went
    /// back, an epoch may be lower than a lost one, but is never the same. So it is with Postgres,
    /// which takes them from the clock.
    pub(crate) fn grant(&mut self, owner: &OwnerId, monotonic: Duration, ttl: Duration, incarnation: u64) {
        let has_crashed = self.lease_until.is_some() && self.owner.as_ref().is_some_and(|former| former != owner);
        self.crashes = self.crashes_in_a_row().saturating_add(u32::from(has_crashed));
        let remainder = EPOCHS_APART - 1 - incarnation as Epoch % EPOCHS_APART;
        self.epoch = (self.epoch / EPOCHS_APART + 1) * EPOCHS_APART + remainder;
        self.owner = Some(owner.clone());
        self.granted_at = monotonic;
        self.hold(monotonic, ttl);
    }

    /// How many holders in a row have crashed, if the last one has not held it for long.
    pub(crate) fn crashes_in_a_row(&self) -> u32 {
        let alive_at = self.lease_until.map(|until| until.saturating_sub(self.lease_ttl));
        let was_long = alive_at.is_some_and(|at| at > self.granted_at + self.lease_ttl * Lease::LONG);
        if was_long { 0 } else { self.crashes }
    }

    pub(crate) fn hold(&mut self, monotonic: Duration, ttl: Duration) {
        (self.lease_until, self.lease_ttl) = (Some(monotonic + ttl), ttl);
    }

    /// Returns whether the cursor is beyond a row.
    pub(crate) fn has_passed(&self, seq: i64, commit: u64) -> bool {
        commit <= self.from || (commit <= self.to && seq <= self.settled)
    }

    /// Returns how far it got with its filter.
    pub(crate) fn passage(&self, lanes: u16, lane: u16) -> Passage {
        let Self { revision, from, to, settled, .. } = *self;
        Passage { lanes, lane, revision, from, to, settled, seq_max: i64::MAX }
    }
}

impl Passage {
    fn covers(&self, seq: i64, commit: u64) -> bool {
        seq <= self.seq_max && (commit <= self.from || (commit <= self.to && seq <= self.settled))
    }
}

/// Returns the lane of an event: by its key, or by its id if it has none.
pub(crate) fn lane_of_event(event: &Event, lanes: u16) -> u16 {
    let id = event.id.as_uuid();
    let key = event.key.as_ref().map(|key| key.as_str().as_bytes());
    lane_of(key.unwrap_or(id.as_bytes()), lanes)
}

pub(crate) fn wants(filter: &Filter, event: &Event) -> bool {
    filter.matches(event.traits(), || Cow::Borrowed(&event.headers))
}

impl DeliveryRow {
    /// Creates the row of an event that is about to leave the stream.
    pub(crate) fn new(lane: u16, key: Option<Key>, now: Timestamp) -> Self {
        Self {
            state: EventState::Pending,
            lane,
            key,
            ordered: false,
            halt: false,
            attempts: 0,
            replays: 0,
            crashes: 0,
            due_at: None,
            code: None,
            error: None,
            updated_at: now,
            last_attempts: Vec::new(),
            letters: 0,
            letter_at: None,
        }
    }

    /// Returns whether it is dead and this death has not been handed over.
    pub(crate) fn is_letter(&self) -> bool {
        self.state == EventState::Dead && self.letters <= self.replays
    }

    /// Returns the key this row holds, if any.
    pub(crate) fn held_key(&self) -> Option<&Key> {
        let holds = match self.state {
            EventState::Retrying | EventState::Blocked => true,
            EventState::Dead => self.halt,
            _ => false,
        };
        self.key.as_ref().filter(|_| self.ordered && holds)
    }

    pub(crate) fn is_due(&self, now: Timestamp) -> bool {
        self.due_at.is_some_and(|at| at <= now)
    }
}
