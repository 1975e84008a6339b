//! A broker in memory, to test receivers.

use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    AckToken, Clock, Error, ErrorKind, RawMessage, Result, Source, SourceCapabilities, SourceMessage, lock,
};

/// An in-memory queue that implements the [`Source`] contract, and can lose its connection.
pub struct MemorySource {
    capabilities: SourceCapabilities,
    clock: Arc<dyn Clock>,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    /// Messages to deliver, in order of publishing, each with the earliest time to deliver it at.
    ready: BTreeMap<u64, (Duration, RawMessage)>,
    /// Delivered messages, by token.
    unsettled: BTreeMap<u64, (u64, RawMessage)>,
    published: u64,
    tokens: u64,
    acked: Vec<RawMessage>,
    rejected: Vec<RawMessage>,
    disconnected: bool,
    settling_fails: bool,
    closed: bool,
    wakers: VecDeque<Waker>,
}

impl MemorySource {
    /// Creates an empty queue with every capability. `clock` times the delays of `nak`.
    pub fn new(in_flight_max: usize, clock: Arc<dyn Clock>) -> Self {
        let capabilities = SourceCapabilities {
            in_flight_max: in_flight_max.max(1),
            ordered: true,
            nak_delay: true,
            dead_letters: true,
        };
        Self { capabilities, clock, queue: Mutex::default() }
    }

    /// Changes its capabilities, e.g. to a queue without dead letters or without order.
    #[must_use]
    pub fn with_capabilities(mut self, change: impl FnOnce(&mut SourceCapabilities)) -> Self {
        change(&mut self.capabilities);
        self
    }

    /// Puts a message at the end of the queue.
    pub fn publish(&self, message: RawMessage) {
        self.change(|queue| {
            queue.published += 1;
            queue.ready.insert(queue.published, (Duration::ZERO, message));
        });
    }

    /// Breaks the connection. Unsettled messages come again, and one call of `next` fails.
    pub fn disconnect(&self) {
        self.change(|queue| {
            queue.disconnected = true;
            queue.give_back_all();
        });
    }

    /// Makes settling calls fail from now on, or work again.
    pub fn fail_settling(&self, fails: bool) {
        self.change(|queue| queue.settling_fails = fails);
    }

    /// Opens a closed queue again, as a new consumer of the same broker does.
    pub fn reopen(&self) {
        self.change(|queue| queue.closed = false);
    }

    /// Returns the acknowledged messages, in that order.
    pub fn acked(&self) -> Vec<RawMessage> {
        self.queue().acked.clone()
    }

    /// Returns the rejected messages, in that order.
    pub fn rejected(&self) -> Vec<RawMessage> {
        self.queue().rejected.clone()
    }

    /// Returns the number of messages neither acknowledged nor rejected.
    pub fn remaining(&self) -> usize {
        let queue = self.queue();
        queue.ready.len() + queue.unsettled.len()
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// Changes the queue and wakes waiting calls.
    fn change<T>(&self, change: impl FnOnce(&mut Queue) -> T) -> T {
        let mut queue = self.queue();
        let changed = change(&mut queue);
        let wakers = std::mem::take(&mut queue.wakers);
        drop(queue);
        wakers.into_iter().for_each(Waker::wake);
        changed
    }

    fn settle(&self, tokens: &[AckToken], end: impl Fn(&mut Queue, u64, RawMessage)) -> Result<()> {
        self.change(|queue| {
            if queue.settling_fails {
                return Err(disconnected("settle"));
            }
            for token in tokens {
                if let Some((place, message)) = queue.unsettled.remove(&token.0) {
                    end(queue, place, message);
                }
            }
            Ok(())
        })
    }
}

impl Queue {
    fn give_back_all(&mut self) {
        let unsettled = std::mem::take(&mut self.unsettled);
        self.ready.extend(unsettled.into_values().map(|(place, message)| (place, (Duration::ZERO, message))));
    }

    /// Returns the answer of `next`, or the time before which there is none unless something
    /// changes.
    fn take(
        &mut self,
        max: usize,
        of: SourceCapabilities,
        now: Duration,
    ) -> Result<Result<Vec<SourceMessage>>, Option<Duration>> {
        if self.closed {
            return Ok(Ok(Vec::new()));
        }
        if std::mem::take(&mut self.disconnected) {
            return Ok(Err(disconnected("next")));
        }
        let room = of.in_flight_max.saturating_sub(self.unsettled.len()).min(max.max(1));
        let due = |at: Duration| at <= now;
        let places: Vec<u64> = match of.ordered {
            true => self.ready.iter().take_while(|(_, (at, _))| due(*at)).map(|(place, _)| *place).take(room).collect(),
            false => self.ready.iter().filter(|(_, (at, _))| due(*at)).map(|(place, _)| *place).take(room).collect(),
        };
        if places.is_empty() {
            let wait = self.ready.values().map(|(at, _)| *at).filter(|at| !due(*at)).min();
            return Err(wait.filter(|_| room > 0));
        }
        let mut given = Vec::with_capacity(places.len());
        for place in places {
            let Some((_, message)) = self.ready.remove(&place) else { continue };
            self.tokens += 1;
            self.unsettled.insert(self.tokens, (place, message.clone()));
            given.push(SourceMessage { message, token: AckToken(self.tokens) });
        }
        Ok(Ok(given))
    }
}

fn disconnected(operation: &'static str) -> Error {
    Error::new(ErrorKind::Unavailable, operation, "source_disconnected", "the connection to the source was lost")
}

#[async_trait]
impl Source for MemorySource {
    fn capabilities(&self) -> SourceCapabilities {
        self.capabilities
    }

    async fn next(&self, max: usize) -> Result<Vec<SourceMessage>> {
        let mut alarm: Option<(Duration, Pin<Box<dyn Future<Output = ()> + Send + '_>>)> = None;
        poll_fn(|context: &mut Context<'_>| {
            loop {
                let now = self.clock.monotonic();
                let wait = {
                    let mut queue = self.queue();
                    match queue.take(max, self.capabilities, now) {
                        Ok(answer) => return Poll::Ready(answer),
                        Err(wait) => {
                            if !queue.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                                queue.wakers.push_back(context.waker().clone());
                            }
                            wait
                        }
                    }
                };
                let Some(at) = wait else { return Poll::Pending };
                if alarm.as_ref().is_none_or(|(set, _)| *set != at) {
                    alarm = Some((at, Box::pin(self.clock.sleep(at.saturating_sub(now)))));
                }
                match alarm.as_mut().map(|(_, sleep)| sleep.as_mut().poll(context)) {
                    Some(Poll::Ready(())) => alarm = None,
                    _ => return Poll::Pending,
                }
            }
        })
        .await
    }

    async fn ack(&self, tokens: &[AckToken]) -> Result<()> {
        self.settle(tokens, |queue, _, message| queue.acked.push(message))
    }

    async fn nak(&self, tokens: &[AckToken], delay: Duration) -> Result<()> {
        let at = self.clock.monotonic() + delay;
        self.settle(tokens, |queue, place, message| drop(queue.ready.insert(place, (at, message))))
    }

    async fn reject(&self, tokens: &[AckToken]) -> Result<()> {
        self.settle(tokens, |queue, _, message| queue.rejected.push(message))
    }

    async fn close(&self) {
        self.change(|queue| {
            queue.closed = true;
            queue.give_back_all();
        });
    }
}
