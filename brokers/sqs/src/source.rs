//! The source: requests messages of a queue, and keeps them hidden until they are settled.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_sqs::Client;
use aws_sdk_sqs::types::{
    ChangeMessageVisibilityBatchRequestEntry, DeleteMessageBatchRequestEntry, Message, MessageSystemAttributeName,
};
use futures::future::join_all;
use postbox_core::{AckToken, Clock, RawMessage, Result, Source, SourceCapabilities, SourceMessage, lock};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use crate::classify::Refusal;
use crate::message::Reading;
use crate::sink::BATCH_MAX;

/// How long SQS waits for a message before it answers that there is none: the longest it allows.
const WAIT: Duration = Duration::from_secs(20);
/// The most requests for messages at once, while there are plenty of messages.
const POLLS_MAX: usize = 4;
/// The longest wait for any other answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The longest wait for messages to be given back at the end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest delay that SQS accepts, in seconds.
pub(crate) const DELAY_SECONDS_MAX: u64 = 43_200;

/// A queue of SQS.
///
/// SQS hides a delivered message until a deadline, which is extended while the message is held. So
/// a message is delivered again when it is given back, or some time after we are gone.
pub struct SqsSource {
    queue: Arc<Queue>,
    in_flight_max: usize,
    ordered: bool,
    _holding: AbortOnDropHandle<()>,
}

/// What all calls share.
struct Queue {
    client: Client,
    url: String,
    reading: Reading,
    /// How long SQS hides a delivered message.
    visibility: Duration,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    /// Allows one change of deadlines at a time: a request prepared earlier must not hide a message
    /// again that was given back since.
    moving: tokio::sync::Mutex<()>,
    /// Signals that a message arrived, was settled or was given back, or that the source was
    /// closed.
    changed: Notify,
}

/// What is done with held messages.
#[derive(Debug, Clone, Copy)]
enum Change {
    /// Hide them for this long from now on.
    Hide(Duration),
    Delete,
}

#[derive(Default)]
struct State {
    /// Messages that have arrived and are not handed out yet, in order of arrival.
    ready: VecDeque<(String, RawMessage)>,
    /// The receipts of messages that are handed out, by the number of their token.
    given: BTreeMap<u64, String>,
    times: u64,
    polls: JoinSet<()>,
    /// How many requests are outstanding, and for how many messages.
    polling: usize,
    asked: usize,
    /// Whether the last answer was full, so that there are more.
    plenty: bool,
    failure: Option<Refusal>,
    closed: bool,
}

/// How a source receives.
pub(crate) struct Receiving {
    pub(crate) reading: Reading,
    pub(crate) visibility: Duration,
    pub(crate) in_flight_max: usize,
    /// Whether the queue keeps its groups in order.
    pub(crate) fifo: bool,
}

impl SqsSource {
    /// Returns a source that requests messages when it is asked for some.
    pub(crate) fn new(client: Client, url: String, how: Receiving, clock: Arc<dyn Clock>) -> Self {
        let Receiving { reading, visibility, in_flight_max, fifo } = how;
        let (state, moving, changed) = (Mutex::default(), tokio::sync::Mutex::default(), Notify::new());
        let queue = Arc::new(Queue { client, url, reading, visibility, clock, state, moving, changed });
        let holding = AbortOnDropHandle::new(tokio::spawn(Arc::clone(&queue).hold()));
        Self { queue, in_flight_max, ordered: fifo, _holding: holding }
    }

    /// Removes messages from those that are handed out, and returns their receipts.
    fn take_back(&self, tokens: &[AckToken]) -> Vec<String> {
        let mut state = self.queue.state();
        let receipts = tokens.iter().filter_map(|token| state.given.remove(&token.0)).collect();
        drop(state);
        self.queue.changed.notify_waiters();
        receipts
    }
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Requests `count` messages and keeps what arrives. Runs as its own task, because a dropped
    /// call must not lose what SQS delivered.
    async fn poll(self: Arc<Self>, count: usize) {
        let received = self.receive(count).await;
        {
            let mut state = self.state();
            state.polling -= 1;
            state.asked -= count;
            match received {
                Ok(messages) => {
                    state.plenty = messages.len() == BATCH_MAX;
                    let kept =
                        |mut message: Message| Some((message.receipt_handle.take()?, self.reading.message(message)));
                    state.ready.extend(messages.into_iter().filter_map(kept));
                }
                Err(refusal) => state.failure = Some(refusal),
            }
        }
        self.changed.notify_waiters();
    }

    async fn receive(&self, count: usize) -> Result<Vec<Message>, Refusal> {
        let request = self.client.receive_message().queue_url(&self.url);
        let request = request
            .max_number_of_messages(i32::try_from(count).unwrap_or(1))
            .wait_time_seconds(i32::try_from(WAIT.as_secs()).unwrap_or(0))
            .visibility_timeout(seconds(self.visibility))
            .message_attribute_names("All")
            .message_system_attribute_names(MessageSystemAttributeName::MessageGroupId);
        let answer = timeout(WAIT + TIMEOUT, request.send()).await.map_err(|_| Refusal::timed_out())?;
        Ok(answer.map_err(|error| Refusal::of(&error))?.messages.unwrap_or_default())
    }

    /// Extends the deadlines of all held messages, again and again.
    async fn hold(self: Arc<Self>) {
        loop {
            self.clock.sleep(self.visibility / 3).await;
            let _moving = self.moving.lock().await;
            let receipts: Vec<String> = {
                let state = self.state();
                state.ready.iter().map(|(receipt, _)| receipt).chain(state.given.values()).cloned().collect()
            };
            // A message whose change fails is delivered again, and is recognised then.
            let _ = self.change(&receipts, Change::Hide(self.visibility)).await;
        }
    }

    /// Changes all of them, ten per request, all requests at once. Returns the first failure of
    /// any.
    async fn change(&self, receipts: &[String], change: Change) -> Result<(), Refusal> {
        let ten = |ten| async move { timeout(TIMEOUT, self.change_ten(ten, change)).await };
        let changed = join_all(receipts.chunks(BATCH_MAX).map(ten)).await;
        changed.into_iter().try_for_each(|ten| ten.map_err(|_| Refusal::timed_out())?)
    }

    async fn change_ten(&self, receipts: &[String], change: Change) -> Result<(), Refusal> {
        let numbered = receipts.iter().enumerate().map(|(n, receipt)| (n.to_string(), receipt));
        let failed = match change {
            Change::Hide(time) => {
                let mut request = self.client.change_message_visibility_batch().queue_url(&self.url);
                for (n, receipt) in numbered {
                    let entry = ChangeMessageVisibilityBatchRequestEntry::builder().id(n).receipt_handle(receipt);
                    request =
                        request.entries(entry.visibility_timeout(seconds(time)).build().map_err(Refusal::incomplete)?);
                }
                request.send().await.map_err(|error| Refusal::of(&error))?.failed
            }
            Change::Delete => {
                let mut request = self.client.delete_message_batch().queue_url(&self.url);
                for (n, receipt) in numbered {
                    let entry = DeleteMessageBatchRequestEntry::builder().id(n).receipt_handle(receipt);
                    request = request.entries(entry.build().map_err(Refusal::incomplete)?);
                }
                request.send().await.map_err(|error| Refusal::of(&error))?.failed
            }
        };
        let first = failed.first().map(|it| Refusal::answered(&it.code, it.message.as_deref()));
        first.map_or(Ok(()), Err)
    }
}

/// Whole seconds, rounded up.
fn seconds(time: Duration) -> i32 {
    let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    i32::try_from(seconds.min(DELAY_SECONDS_MAX)).unwrap_or(i32::MAX)
}

impl State {
    /// Hands out messages that have arrived, at most `max`.
    fn give(&mut self, max: usize) -> Vec<SourceMessage> {
        let count = self.ready.len().min(max.max(1));
        let mut messages = Vec::with_capacity(count);
        for (receipt, message) in self.ready.drain(..count) {
            self.times += 1;
            self.given.insert(self.times, receipt);
            messages.push(SourceMessage { message, token: AckToken(self.times) });
        }
        messages
    }

    /// Returns how many messages the next request may ask for; `None` if there should be none.
    fn wanted(&self, in_flight_max: usize) -> Option<usize> {
        let room = in_flight_max.saturating_sub(self.ready.len() + self.given.len() + self.asked);
        let polls_max = if self.plenty { POLLS_MAX } else { 1 };
        (self.polling < polls_max && room > 0).then(|| room.min(BATCH_MAX))
    }
}

#[async_trait]
impl Source for SqsSource {
    fn capabilities(&self) -> SourceCapabilities {
        SourceCapabilities {
            in_flight_max: self.in_flight_max,
            // A FIFO queue delivers nothing of a group while a message of it is out.
            ordered: self.ordered,
            nak_delay: true,
            dead_letters: false,
        }
    }

    async fn next(&self, max: usize) -> Result<Vec<SourceMessage>> {
        let queue = &self.queue;
        loop {
            let mut changed = std::pin::pin!(queue.changed.notified());
            // From here on no change is missed.
            changed.as_mut().enable();
            {
                let mut state = queue.state();
                if state.closed {
                    return Ok(Vec::new());
                }
                let given = state.give(max);
                if !given.is_empty() {
                    return Ok(given);
                }
                if let Some(refusal) = state.failure.take() {
                    return Err(refusal.error("receive"));
                }
                while let Some(count) = state.wanted(self.in_flight_max) {
                    while state.polls.try_join_next().is_some() {}
                    state.polling += 1;
                    state.asked += count;
                    state.polls.spawn(Arc::clone(queue).poll(count));
                }
            }
            changed.await;
        }
    }

    async fn ack(&self, tokens: &[AckToken]) -> Result<()> {
        let receipts = self.take_back(tokens);
        self.queue.change(&receipts, Change::Delete).await.map_err(|refusal| refusal.error("settle"))
    }

    async fn nak(&self, tokens: &[AckToken], delay: Duration) -> Result<()> {
        let receipts = self.take_back(tokens);
        // Messages that arrived after it, and may be of its group, must not be stored before it.
        let behind: Vec<String> = match self.ordered && !receipts.is_empty() {
            true => self.queue.state().ready.drain(..).map(|(receipt, _)| receipt).collect(),
            false => Vec::new(),
        };
        let _moving = self.queue.moving.lock().await;
        let moved = self.queue.change(&receipts, Change::Hide(delay)).await;
        moved
            .and(self.queue.change(&behind, Change::Hide(Duration::ZERO)).await)
            .map_err(|refusal| refusal.error("settle"))
    }

    async fn reject(&self, tokens: &[AckToken]) -> Result<()> {
        self.ack(tokens).await
    }

    /// What SQS delivers for a request that is still outstanding is delivered again after its
    /// deadline.
    async fn close(&self) {
        let receipts: Vec<String> = {
            let mut state = self.queue.state();
            state.closed = true;
            state.polls.abort_all();
            let given = std::mem::take(&mut state.given);
            let ready = std::mem::take(&mut state.ready);
            given.into_values().chain(ready.into_iter().map(|(receipt, _)| receipt)).collect()
        };
        self.queue.changed.notify_waiters();
        let given_back = async {
            let _moving = self.queue.moving.lock().await;
            self.queue.change(&receipts, Change::Hide(Duration::ZERO)).await
        };
        // If SQS does not receive this, the messages are delivered again after their deadline too.
        let _ = timeout(CLOSE_TIMEOUT, given_back).await;
    }
}
