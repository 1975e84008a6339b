//! Lanes and leases; reading and settling are next door.

use std::future::poll_fn;
use std::task::{Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;

use super::MemoryStore;
use super::state::{Lane, Reader};
use crate::batch::{Batch, BatchLimit, Settlement};
use crate::error::{Error, ErrorKind, Result};
use crate::log::{Acquired, Lease, Log};
use crate::names::{OwnerId, SubscriptionName};
use crate::subscription::{StartAt, Subscription};

#[async_trait]
impl Log for MemoryStore {
    async fn subscribe(&self, subscription: &Subscription) -> Result<()> {
        subscription.validate()?;
        let mut state = self.state("subscribe")?;
        let commit_last = state.log("subscribe", &subscription.log)?.commit_last;
        if let Some(reader) = state.readers.get_mut(&subscription.name) {
            refuse_other_shape(&reader.subscription, subscription)?;
            reader.subscription = subscription.clone();
            return Ok(());
        }
        let from = match subscription.start {
            StartAt::Beginning => 0,
            StartAt::Now => commit_last,
        };
        state.readers.insert(subscription.name.clone(), Reader::new(subscription.clone(), from));
        Ok(())
    }

    async fn acquire(
        &self,
        subscription: &SubscriptionName,
        owner: &OwnerId,
        held: &[u16],
        ttl: Duration,
    ) -> Result<Acquired> {
        let (now, monotonic) = (self.clock().now(), self.clock().monotonic());
        let mut state = self.state("acquire")?;
        let (reader, _) = state.reader_mut("acquire", subscription)?;
        reader.alive_until.retain(|_, until| *until > monotonic);
        reader.alive_until.insert(owner.clone(), monotonic + ttl);
        let paused = reader.paused(now).cloned();
        let free = reader.lanes.iter().position(|lane| lane.is_free(monotonic));
        // Leased to the caller, who does not know it: the answer that granted it was lost.
        let lost = |(lane, index): (&Lane, u16)| lane.owner.as_ref() == Some(owner) && !held.contains(&index);
        let free = free.or_else(|| reader.lanes.iter().zip(0..).position(lost)).filter(|_| paused.is_none());
        let lease = free.map(|index| {
            let lane = &mut reader.lanes[index];
            lane.epoch += 1;
            lane.owner = Some(owner.clone());
            lane.lease_until = Some(monotonic + ttl);
            // What the last holder read but did not settle is read again.
            lane.read = lane.settled;
            let epoch = lane.epoch;
            reader.hurry_in_flight(index as u16, now);
            Lease {
                subscription: subscription.clone(),
                log: reader.subscription.log.clone(),
                lane: index as u16,
                epoch,
                owner: owner.clone(),
            }
        });
        let replicas = u16::try_from(reader.alive_until.len()).unwrap_or(u16::MAX);
        Ok(Acquired { lease, replicas, lanes: reader.subscription.lanes, paused })
    }

    async fn renew(&self, lease: &Lease, ttl: Duration) -> Result<()> {
        let (now, monotonic) = (self.clock().now(), self.clock().monotonic());
        let mut state = self.state("renew")?;
        let (reader, _) = state.leased("renew", lease, monotonic)?;
        reader.alive_until.insert(lease.owner.clone(), monotonic + ttl);
        let paused = reader.paused(now).is_some();
        let lane = &mut reader.lanes[usize::from(lease.lane)];
        lane.lease_until = (!paused).then_some(monotonic + ttl);
        if paused { Err(Error::stale("renew")) } else { Ok(()) }
    }

    async fn release(&self, lease: &Lease) -> Result<()> {
        let monotonic = self.clock().monotonic();
        let mut state = self.state("release")?;
        if let Ok((reader, _)) = state.leased("release", lease, monotonic) {
            reader.lanes[usize::from(lease.lane)].lease_until = None;
            // Whoever waits for a free lane need not wait for its next poll.
            let wakers = state.stir();
            drop(state);
            wakers.into_iter().for_each(Waker::wake);
        }
        Ok(())
    }

    async fn next_batch(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        let (now, monotonic) = (self.clock().now(), self.clock().monotonic());
        let mut state = self.state("next_batch")?;
        let stirs = state.stirs;
        let (reader, log) = state.leased("next_batch", lease, monotonic)?;
        reader.lanes[usize::from(lease.lane)].stirs_seen = stirs;
        Ok(reader.next_batch(log, lease.lane, limit, now))
    }

    async fn due(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        let (now, monotonic) = (self.clock().now(), self.clock().monotonic());
        let mut state = self.state("due")?;
        let (reader, log) = state.leased("due", lease, monotonic)?;
        Ok(reader.due(log, lease.lane, limit, now))
    }

    async fn settle(&self, lease: &Lease, settlement: Settlement<'_>) -> Result<()> {
        let (now, monotonic) = (self.clock().now(), self.clock().monotonic());
        let mut state = self.state("settle")?;
        let (reader, _) = state.leased("settle", lease, monotonic)?;
        reader.settle(lease.lane, &settlement, now);
        Ok(())
    }

    async fn hint(&self, lease: &Lease) {
        poll_fn(|context| {
            let mut state = self.lock();
            let stirs = state.stirs;
            let seen = state
                .readers
                .get(&lease.subscription)
                .and_then(|reader| reader.lanes.get(usize::from(lease.lane)))
                .map_or(stirs, |lane| lane.stirs_seen);
            // Comparing with what the last read saw closes the gap between an empty read and this wait.
            if seen != stirs {
                return Poll::Ready(());
            }
            state.waiting.insert((lease.subscription.clone(), lease.lane), context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

/// A subscription may change its filter and ordering, not its log and lanes.
fn refuse_other_shape(known: &Subscription, asked: &Subscription) -> Result<()> {
    let refuse = |code: &'static str, message: String| Err(Error::new(ErrorKind::Conflict, "subscribe", code, message));
    if known.log != asked.log {
        let message = format!(
            "subscription {} reads log {}, not {}; give the new one another name",
            known.name, known.log, asked.log
        );
        return refuse("log_differs", message);
    }
    if known.lanes != asked.lanes {
        let message = format!(
            "subscription {} was made with {} lanes, not {}; lanes are fixed once created",
            known.name, known.lanes, asked.lanes
        );
        return refuse("lanes_differ", message);
    }
    Ok(())
}
