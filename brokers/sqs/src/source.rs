//! The source: it asks a queue for messages, and keeps them from coming again until they are
//! settled.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_sqs::Client;
use aws_sdk_sqs::types::{
    ChangeMessageVisibilityBatchRequestEntry, DeleteMessageBatchRequestEntry, Message, MessageSystemAttributeName,
};
use futures::future::join_all;
use postbox_core::{AckToken, Clock, RawMessage, Result, Source, SourceCapabilities, SourceMessage};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use crate::classify::Refusal;
use crate::message::Reading;
use crate::sink::BATCH_MAX;

/// How long SQS waits for a message before it answers that there is none: as long as it allows.
const WAIT: Duration = Duration::from_secs(20);
/// Most requests for messages at once, while there are plenty.
const POLLS_MAX: usize = 4;
/// Longest wait for any other answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The longest delay SQS knows, in seconds.
pub(crate) const DELAY_SECONDS_MAX: u64 = 43_200;

/// A queue of SQS.
///
/// SQS hides a message that it gave until a deadline, which is moved on while the message is held.
/// So a message comes again when it is given back, or some time after we are gone.
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
    /// How long SQS hides what it gave.
    visibility: Duration,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    /// Deadlines are moved by one at a time: what is given back must not be hidden again by a
    /// request that was made up before.
    moving: tokio::sync::Mutex<()>,
    /// Something came, was settled or given back, or the source was closed.
    changed: Notify,
}

/// What is done with messages that are held.
#[derive(Debug, Clone, Copy)]
enum Change {
    /// They are hidden for so long from now on.
    Hide(Duration),
    Delete,
}

#[derive(Default)]
struct State {
    /// Came and was not given out yet, in the order in which it came.
    ready: VecDeque<(String, RawMessage)>,
    /// The receipts of what is given out, by a number of that one time.
    given: BTreeMap<u64, String>,
    times: u64,
    polls: JoinSet<()>,
    /// How many requests are out, and for how many messages.
    polling: usize,
    asked: usize,
    /// The last answer was full: there is more.
    plenty: bool,
    failure: Option<Refusal>,
    closed: bool,
}

/// How a source reads.
pub(crate) struct Receiving {
    pub(crate) reading: Reading,
    pub(crate) visibility: Duration,
    pub(crate) in_flight_max: usize,
    /// The queue keeps its groups in order.
    pub(crate) fifo: bool,
}

impl SqsSource {
    /// A source that asks for messages when it is asked for some.
    pub(crate) fn new(client: Client, url: String, how: Receiving, clock: Arc<dyn Clock>) -> Self {
        let Receiving { reading, visibility, in_flight_max, fifo } = how;
        let (state, moving, changed) = (Mutex::default(), tokio::sync::Mutex::default(), Notify::new());
        let queue = Arc::new(Queue { client, url, reading, visibility, clock, state, moving, changed });
        let holding = AbortOnDropHandle::new(tokio::spawn(Arc::clone(&queue).hold()));
        Self { queue, in_flight_max, ordered: fifo, _holding: holding }
    }

    /// Takes messages out of those that are given.
    fn take_back(&self, tokens: &[AckToken]) -> Vec<String> {
        let number = |token: &AckToken| token.as_bytes().try_into().map(u64::from_be_bytes).ok();
        let mut state = self.queue.state();
        let receipts = tokens.iter().filter_map(|token| state.given.remove(&number(token)?)).collect();
        drop(state);
        self.queue.changed.notify_waiters();
        receipts
    }
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for so many messages, and keeps what comes. A task of its own: a call that is dropped
    /// must not lose what SQS gave in answer.
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

    /// Moves the deadlines of everything that is held, again and again.
    async fn hold(self: Arc<Self>) {
        loop {
            self.clock.sleep(self.visibility / 3).await;
            let _moving = self.moving.lock().await;
            let receipts: Vec<String> = {
                let state = self.state();
                state.ready.iter().map(|(receipt, _)| receipt).chain(state.given.values()).cloned().collect()
            };
            // What fails comes again, and is known then.
            let _ = self.change(&receipts, Change::Hide(self.visibility)).await;
        }
    }

    /// Does this with all of them, ten a request, all requests at once; the first failure of any.
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

/// Whole seconds, none too few.
fn seconds(time: Duration) -> i32 {
    let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    i32::try_from(seconds.min(DELAY_SECONDS_MAX)).unwrap_or(i32::MAX)
}

impl State {
    /// What has come, at most so many.
    fn give(&mut self, max: usize) -> Vec<SourceMessage> {
        let count = self.ready.len().min(max.max(1));
        let mut messages = Vec::with_capacity(count);
        for (receipt, message) in self.ready.drain(..count) {
            self.times += 1;
            self.given.insert(self.times, receipt);
            messages.push(SourceMessage { message, token: AckToken::new(self.times.to_be_bytes().to_vec()) });
        }
        messages
    }

    /// For how many messages another request may ask; `None` if there is to be none.
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
            // A queue that keeps order gives nothing of a group while something of it is out.
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
        // What came behind it, and may be of its group, must not be stored before it.
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

    /// What SQS gave in answer to a request that is still out comes again after its time.
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
        let _moving = self.queue.moving.lock().await;
        // What SQS does not hear of comes again after its time, too.
        let _ = self.queue.change(&receipts, Change::Hide(Duration::ZERO)).await;
    }
}
