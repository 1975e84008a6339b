//! The source: a member of a consumer group.

mod entries;
mod group;
mod held;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{AckToken, Clock, Result, Source, SourceCapabilities, SourceMessage};

use self::group::Group;
use crate::RedisSourceConfig;

/// Reads a stream as a member of a consumer group.
///
/// Entries stay pending in the group until they are acknowledged. So after a lost connection or a
/// restart, the source first receives its own pending entries. Those that another consumer left are
/// claimed after a while.
pub struct RedisSource {
    group: Arc<Group>,
    /// The read in progress. A dropped `next` leaves it here, because the server may have answered
    /// it with entries.
    reading: tokio::sync::Mutex<Option<Reading>>,
}

type Reading = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

impl RedisSource {
    /// Returns a source that connects when it is asked for the first message.
    pub fn new(config: &RedisSourceConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        let group = Arc::new(Group::new(config, clock)?);
        Ok(Self { group, reading: tokio::sync::Mutex::default() })
    }

    /// Returns whether the source is connected, as far as is known.
    pub fn is_connected(&self) -> bool {
        self.group.is_connected()
    }

    /// Returns how many entries are lost, because they were trimmed or deleted before they were
    /// stored.
    pub fn trimmed(&self) -> u64 {
        self.group.trimmed()
    }
}

#[async_trait]
impl Source for RedisSource {
    /// Messages are in order with one consumer in the group. Several consumers share the entries,
    /// and those that one left are received late.
    fn capabilities(&self) -> SourceCapabilities {
        let in_flight_max = self.group.in_flight_max;
        SourceCapabilities { in_flight_max, ordered: true, nak_delay: true, dead_letters: true }
    }

    async fn next(&self, max: usize) -> Result<Vec<SourceMessage>> {
        let group = &self.group;
        let mut reading = self.reading.lock().await;
        loop {
            let mut changed = std::pin::pin!(group.changed.notified());
            // From here on no change is missed.
            changed.as_mut().enable();
            let (room, due) = {
                let (mut state, now) = (group.state(), group.clock.monotonic());
                if state.closed {
                    *reading = None;
                    return Ok(Vec::new());
                }
                let given = state.held.give(max, now);
                if !given.is_empty() {
                    return Ok(given);
                }
                let room = group.in_flight_max.saturating_sub(state.held.len());
                (room, state.held.due().map(|due| due.saturating_sub(now)))
            };
            if reading.is_none() && room > 0 {
                *reading = Some(Box::pin(Arc::clone(group).read(room)));
            }
            let read = async {
                match reading.as_mut() {
                    Some(read) => read.await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = changed => {}
                () = group.clock.sleep(due.unwrap_or_default()), if due.is_some() => {}
                read = read => {
                    *reading = None;
                    read?;
                }
            }
        }
    }

    async fn ack(&self, tokens: &[AckToken]) -> Result<()> {
        let group = &self.group;
        group.settle(tokens, |commands, ids| async move { group.acknowledge(commands, &ids).await }).await
    }

    /// Keeps the message here until its time. If we stop before, it is delivered at the next start.
    async fn nak(&self, tokens: &[AckToken], delay: Duration) -> Result<()> {
        let due = self.group.clock.monotonic() + delay;
        let mut state = self.group.state();
        for token in tokens {
            if let Some((id, message)) = state.held.take_back(token) {
                state.held.keep(id, due, message);
            }
        }
        drop(state);
        self.group.changed.notify_waiters();
        Ok(())
    }

    async fn reject(&self, tokens: &[AckToken]) -> Result<()> {
        let group = &self.group;
        group.settle(tokens, |commands, ids| async move { group.dead_letter(commands, &ids).await }).await
    }

    async fn close(&self) {
        self.group.state().close();
        self.group.changed.notify_waiters();
        // A waiting `next` notices and ends. After that, nothing reads any more.
        *self.reading.lock().await = None;
    }
}
