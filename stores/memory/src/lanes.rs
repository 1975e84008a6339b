//! The server's side of a lane: who holds it, and its cursor.
//!
//! Each operation is atomic, and safe if it is repeated, late or overtaken: writes depend on the
//! epoch, and writes of the cursor on the very cursor that the caller read.

use std::time::Duration;

use postbox_core::kit::{check_log, window_undone};
use postbox_core::{
    Acquired, Batch, BatchLimit, Error, Lease, Ordering, OwnerId, Result, StartAt, Subscription, SubscriptionName,
};

use crate::Server;
use crate::read::Page;
use crate::settle::Write;
use crate::state::{Lane, Reader, State};

impl Server {
    pub(crate) fn subscribe(&self, subscription: &Subscription) -> Result<()> {
        let now = self.clock.now();
        let mut state = self.state("subscribe")?;
        let commit_last = state.data.log("subscribe", &subscription.log)?.commit_last;
        let mut changed_from = None;
        if let Some(reader) = state.data.readers.get_mut(&subscription.name) {
            check_log(subscription, &reader.subscription.log)?;
            if reader.subscription.filter != subscription.filter {
                reader.filters.push(Some(subscription.filter.clone()));
                // Events that were to go out by the former filter may now be wanted by nobody.
                changed_from = reader.lanes.iter().map(|lane| lane.from).min();
            }
            if subscription.ordering == Ordering::None {
                reader.unblock(now);
            }
            reader.subscription = Subscription { lanes: reader.subscription.lanes, ..subscription.clone() };
        } else {
            let from = match subscription.start {
                StartAt::Beginning => 0,
                StartAt::Now => commit_last,
            };
            let reader = Reader::new(subscription.clone(), from, state.data.epoch_next);
            state.data.epoch_next += 1;
            state.data.readers.insert(subscription.name.clone(), reader);
        }
        if let Some(log) = state.data.logs.get_mut(&subscription.log) {
            log.routed = log.routed.min(changed_from.unwrap_or(log.routed));
        }
        state.flush();
        Ok(())
    }

    pub(crate) fn acquire(
        &self,
        subscription: &SubscriptionName,
        owner: &OwnerId,
        held: &[u16],
        ttl: Duration,
    ) -> Result<Acquired> {
        let (now, monotonic) = (self.clock.now(), self.clock.monotonic());
        let mut state = self.state("acquire")?;
        let incarnation = state.incarnation;
        let (reader, _) = state.data.reader_mut("acquire", subscription)?;
        reader.alive_until.retain(|_, until| *until > monotonic);
        reader.alive_until.insert(owner.clone(), monotonic + ttl);
        let paused = reader.paused(now).cloned();
        let free = reader.lanes.iter().position(|lane| lane.is_free(monotonic));
        // Leased to the caller, who does not know it: the answer that granted it was lost.
        let lost = |(lane, index): (&Lane, u16)| lane.owner.as_ref() == Some(owner) && !held.contains(&index);
        let free = free.or_else(|| reader.lanes.iter().zip(0..).position(lost)).filter(|_| paused.is_none());
        let lease = free.map(|index| {
            let lane = &mut reader.lanes[index];
            lane.grant(owner, monotonic, ttl, incarnation);
            let (epoch, crashes) = (lane.epoch, lane.crashes);
            reader.make_in_flight_due(index as u16, now);
            reader.count_crashes(index as u16, now);
            Lease {
                subscription: subscription.clone(),
                log: reader.subscription.log.clone(),
                lane: index as u16,
                epoch,
                owner: owner.clone(),
                crashes,
            }
        });
        let replicas = u16::try_from(reader.alive_until.len()).unwrap_or(u16::MAX);
        let acquired = Acquired { lease, replicas, lanes: reader.lane_count(), paused };
        state.flush();
        Ok(acquired)
    }

    pub(crate) fn renew(&self, lease: &Lease, ttl: Duration) -> Result<()> {
        let (now, monotonic) = (self.clock.now(), self.clock.monotonic());
        let mut state = self.state("renew")?;
        let (reader, _) = state.data.leased("renew", lease, monotonic)?;
        reader.alive_until.insert(lease.owner.clone(), monotonic + ttl);
        let paused = reader.paused(now).is_some();
        if !paused {
            reader.lanes[usize::from(lease.lane)].hold(monotonic, ttl);
        }
        state.flush();
        if paused { Err(Error::stale("renew")) } else { Ok(()) }
    }

    pub(crate) fn release(&self, lease: &Lease) -> Result<()> {
        let monotonic = self.clock.monotonic();
        let mut state = self.state("release")?;
        if let Ok((reader, _)) = state.data.leased("release", lease, monotonic) {
            let lane = &mut reader.lanes[usize::from(lease.lane)];
            (lane.lease_until, lane.crashes) = (None, lease.crashes);
            // Relays that wait for a free lane need not wait for their next poll.
            State::wake(state);
        }
        Ok(())
    }

    pub(crate) fn leave(&self, subscription: &SubscriptionName, owner: &OwnerId) -> Result<()> {
        let mut state = self.state("leave")?;
        if let Ok((reader, _)) = state.data.reader_mut("leave", subscription) {
            reader.alive_until.remove(owner);
            // Relays whose share changes need not wait for their next poll.
            State::wake(state);
        }
        Ok(())
    }

    /// Returns the cursor of a lane, for a client that knows nothing of it.
    pub(crate) fn load(&self, lease: &Lease) -> Result<(u64, i64, usize, u64)> {
        let monotonic = self.clock.monotonic();
        let mut state = self.state("next_batch")?;
        let wakeups = state.wakeups;
        let (reader, _) = state.data.leased("next_batch", lease, monotonic)?;
        let lane = &reader.lanes[usize::from(lease.lane)];
        Ok((lane.to, lane.settled, lane.revision, wakeups))
    }

    /// Returns the next events of the window after a position. Without a position, returns the
    /// first of the next window, which is opened if anything was committed since the last one.
    ///
    /// Works only with the very cursor the caller read. Otherwise a call that is executed late or
    /// twice could move the window back, or past events that were never returned. And a store that
    /// went back to an earlier state may have lost rows of a settlement, so that their keys would
    /// not be held, or the filter by which unsettled events were read.
    pub(crate) fn window(
        &self,
        lease: &Lease,
        (to, settled, revision): (u64, i64, usize),
        mut after: Option<i64>,
        limit: BatchLimit,
    ) -> Result<Page> {
        let (now, monotonic) = (self.clock.now(), self.clock.monotonic());
        let mut state = self.state("next_batch")?;
        let wakeups = state.wakeups;
        let (reader, log) = state.data.leased("next_batch", lease, monotonic)?;
        let lane = &reader.lanes[usize::from(lease.lane)];
        let unsettled = after.is_some_and(|read| read > lane.settled);
        if lane.to != to || lane.settled < settled || (unsettled && lane.revision != revision) {
            return Err(window_undone("next_batch"));
        }
        // In a call that is executed late, the filter may have changed since, so it is not known
        // that nothing was left.
        let is_late = after.is_none() && lane.revision != revision;
        if is_late || lane.revision != reader.revision() {
            // Everything that was read by the former filter must be settled first.
            if unsettled {
                return Ok(Page { batch: Batch::default(), end: None, window: to, revision, wakeups });
            }
            let (from, settled) = (lane.from, lane.settled);
            reader.take_filter(lease.lane);
            // Events of the window that nobody wanted may be wanted now.
            let is_left = !reader.page(log, lease.lane, (from, to), settled, limit, now).is_empty();
            after = after.or(is_left.then_some(settled));
        }
        let lane = &mut reader.lanes[usize::from(lease.lane)];
        let opens = after.is_none() && log.commit_last > to;
        if opens {
            (lane.from, lane.to, lane.settled) = (to, log.commit_last, 0);
        }
        let (from, to, revision) = (lane.from, lane.to, lane.revision);
        let batch = match after {
            None if !opens => Batch { due_in: reader.due_in(lease.lane, now), ..Batch::default() },
            after => reader.page(log, lease.lane, (from, to), after.unwrap_or_default(), limit, now),
        };
        if opens {
            // Events we return must be on disk, including the writers' commits: a crash must not
            // take back what was published.
            state.flush();
        }
        Ok(Page { end: batch.end.map(|end| end.0), batch, window: to, revision, wakeups })
    }

    /// Returns whether there may be something after a window, an empty batch, and the wakeups so
    /// far.
    pub(crate) fn look(&self, lease: &Lease, window: u64) -> Result<(bool, Batch, u64)> {
        let (now, monotonic) = (self.clock.now(), self.clock.monotonic());
        let mut state = self.state("next_batch")?;
        let wakeups = state.wakeups;
        let (reader, log) = state.data.leased("next_batch", lease, monotonic)?;
        let lane = &reader.lanes[usize::from(lease.lane)];
        let is_as_known = lane.to == window && lane.revision == reader.revision();
        let has_news = !is_as_known || log.commit_last > window;
        Ok((has_news, Batch { due_in: reader.due_in(lease.lane, now), ..Batch::default() }, wakeups))
    }

    pub(crate) fn due(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        let (now, monotonic) = (self.clock.now(), self.clock.monotonic());
        let mut state = self.state("due")?;
        let (reader, log) = state.data.leased("due", lease, monotonic)?;
        Ok(reader.due(log, lease.lane, limit, now))
    }

    pub(crate) fn settle(&self, lease: &Lease, write: &Write) -> Result<()> {
        let (now, monotonic) = (self.clock.now(), self.clock.monotonic());
        let mut state = self.state("settle")?;
        let (reader, log) = state.data.leased("settle", lease, monotonic)?;
        reader.settle(log, lease.lane, write, now)?;
        // A mere position may be lost: its events would only be delivered again. A row records what
        // is known nowhere else.
        if !write.entries.is_empty() {
            state.flush();
        }
        Ok(())
    }
}
