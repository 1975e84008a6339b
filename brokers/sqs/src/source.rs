//! The source: requests messages of a queue, and keeps them hidden until they are settled.

use std::collections::{BTreeMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_sqs::Client;
use aws_sdk_sqs::types::{
    ChangeMessageVisibilityBatchRequestEntry, DeleteMessageBatchRequestEntry, Message, MessageSystemAttributeName,
};
use futures::FutureExt as _;
use futures::future::join_all;
use postbox_core::{AckToken, Clock, RawMessage, Result, Source, SourceCapabilities, SourceMessage, lock};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use crate::classify::Refusal;
use crate::config::SqsSourceTable;
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
    _holding: AbortOnDropHandle<()>,
}

/// What all calls share.
struct Queue {
    client: Client,
    table: SqsSourceTable,
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

/// A message that SQS hides for us.
#[derive(Debug, Clone)]
struct Held {
    receipt: String,
    /// What a FIFO queue keeps in order.
    group: Option<String>,
    message: RawMessage,
    /// To be handed out from this time on.
    due: Duration,
}

#[derive(Default)]
struct State {
    /// Messages that are not handed out: they have arrived, or were given back. By their place in
    /// the order of arrival.
    ready: BTreeMap<u64, Held>,
    /// Messages that are handed out, by the number of their token, each with its place.
    given: BTreeMap<u64, (u64, Held)>,
    /// The last place or token. Neither is used again.
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

impl SqsSource {
    /// Returns a source that requests messages when it is asked for some.
    pub(crate) fn new(client: Client, table: SqsSourceTable, clock: Arc<dyn Clock>) -> Self {
        let (state, moving, changed) = (Mutex::default(), tokio::sync::Mutex::default(), Notify::new());
        let queue = Arc::new(Queue { client, table, clock, state, moving, changed });
        let holding = AbortOnDropHandle::new(tokio::spawn(Arc::clone(&queue).hold()));
        Self { queue, _holding: holding }
    }

    /// Removes messages from those that are handed out, and returns their receipts.
    fn take_back(&self, tokens: &[AckToken]) -> Vec<String> {
        let receipts = self.queue.state().take_back(tokens).into_iter().map(|(_, held)| held.receipt).collect();
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
        // A panic must not leave the request counted as outstanding: nothing would be requested
        // any more.
        let received = AssertUnwindSafe(self.receive(count)).catch_unwind().await;
        {
            let mut state = self.state();
            state.polling -= 1;
            state.asked -= count;
            match received.unwrap_or_else(|_| Err(Refusal::incomplete("the reader panicked; this is a defect"))) {
                Ok(messages) => {
                    state.plenty = messages.len() == BATCH_MAX;
                    messages.into_iter().for_each(|held| state.keep(held));
                }
                Err(refusal) => state.failure = Some(refusal),
            }
        }
        self.changed.notify_waiters();
    }

    async fn receive(&self, count: usize) -> Result<Vec<Held>, Refusal> {
        let request = self.client.receive_message().queue_url(&self.table.queue_url.url);
        let request = request
            .max_number_of_messages(i32::try_from(count).unwrap_or(1))
            .wait_time_seconds(i32::try_from(WAIT.as_secs()).unwrap_or(0))
            .visibility_timeout(seconds(self.table.visibility))
            .message_attribute_names("All")
            .message_system_attribute_names(MessageSystemAttributeName::MessageGroupId);
        let answer = timeout(WAIT + TIMEOUT, request.send()).await.map_err(|_| Refusal::timed_out())?;
        let messages = answer.map_err(|error| Refusal::of(&error))?.messages.unwrap_or_default();
        let held = |mut message: Message| {
            let receipt = message.receipt_handle.take()?;
            let attributes = message.attributes.as_ref();
            let group = attributes.and_then(|all| all.get(&MessageSystemAttributeName::MessageGroupId)).cloned();
            Some(Held { receipt, group, message: self.table.message(message), due: Duration::ZERO })
        };
        Ok(messages.into_iter().filter_map(held).collect())
    }

    /// Extends the deadlines of all held messages, again and again.
    async fn hold(self: Arc<Self>) {
        loop {
            self.clock.sleep(self.table.visibility / 3).await;
            let _moving = self.moving.lock().await;
            let receipts: Vec<String> = {
                let state = self.state();
                let given = state.given.values().map(|(_, held)| held);
                state.ready.values().chain(given).map(|held| held.receipt.clone()).collect()
            };
            // A message whose change fails is delivered again, and is recognised then.
            let _ = self.change(&receipts, Change::Hide(self.table.visibility)).await;
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
        let url = &self.table.queue_url.url;
        let numbered = receipts.iter().enumerate().map(|(n, receipt)| (n.to_string(), receipt));
        let failed = match change {
            Change::Hide(time) => {
                let mut request = self.client.change_message_visibility_batch().queue_url(url);
                for (n, receipt) in numbered {
                    let entry = ChangeMessageVisibilityBatchRequestEntry::builder().id(n).receipt_handle(receipt);
                    request =
                        request.entries(entry.visibility_timeout(seconds(time)).build().map_err(Refusal::incomplete)?);
                }
                request.send().await.map_err(|error| Refusal::of(&error))?.failed
            }
            Change::Delete => {
                let mut request = self.client.delete_message_batch().queue_url(url);
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
    fn keep(&mut self, held: Held) {
        self.times += 1;
        self.ready.insert(self.times, held);
    }

    /// Hands out messages that are due, at most `max`.
    fn give(&mut self, max: usize, now: Duration) -> Vec<SourceMessage> {
        let mut messages = Vec::new();
        for place in self.due_places(max.max(1), now) {
            let Some(held) = self.ready.remove(&place) else { continue };
            self.times += 1;
            messages.push(SourceMessage { message: held.message.clone(), token: AckToken(self.times) });
            self.given.insert(self.times, (place, held));
        }
        messages
    }

    /// Returns the places of messages that may be handed out. One that is not due holds up those of
    /// its group behind it.
    fn due_places(&self, max: usize, now: Duration) -> Vec<u64> {
        let (mut places, mut waiting) = (Vec::new(), HashSet::<&str>::new());
        for (place, held) in &self.ready {
            let group = held.group.as_deref();
            if held.due > now || group.is_some_and(|group| waiting.contains(group)) {
                waiting.extend(group);
            } else if places.len() < max {
                places.push(*place);
            }
        }
        places
    }

    /// When the next message becomes due, if one waits for its time.
    fn due(&self, now: Duration) -> Option<Duration> {
        self.ready.values().map(|held| held.due).filter(|due| *due > now).min()
    }

    /// Removes messages from those that are handed out, and returns them with their places.
    fn take_back(&mut self, tokens: &[AckToken]) -> Vec<(u64, Held)> {
        tokens.iter().filter_map(|token| self.given.remove(&token.0)).collect()
    }

    /// Keeps messages until they are due, except those of the first one's group, whose receipts are
    /// returned: the first was refused, the others were given back because they came behind it.
    /// Without a delay all are kept, and are due in their order.
    fn put_back(&mut self, tokens: &[AckToken], delay: Duration, now: Duration) -> Vec<String> {
        // The first one handed out: places do not say that, because what was kept goes out again.
        let given = tokens.iter().filter_map(|token| self.given.get_key_value(&token.0));
        let first = given.min_by_key(|(token, _)| **token).map(|(_, (_, held))| held.group.clone());
        let back = self.take_back(tokens);
        self.ready.extend(back.into_iter().map(|(place, held)| (place, Held { due: now + delay, ..held })));
        let Some(group) = first.filter(|_| !delay.is_zero()) else { return Vec::new() };
        let mut receipts = Vec::new();
        self.ready.retain(|_, held| {
            let returns = held.group == group;
            if returns {
                receipts.push(std::mem::take(&mut held.receipt));
            }
            !returns
        });
        receipts
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
            in_flight_max: self.queue.table.in_flight,
            // A FIFO queue delivers nothing of a group while a message of it is out.
            ordered: self.queue.table.queue_url.is_fifo(),
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
            let wait = {
                let (mut state, now) = (queue.state(), queue.clock.monotonic());
                if state.closed {
                    return Ok(Vec::new());
                }
                let given = state.give(max, now);
                if !given.is_empty() {
                    return Ok(given);
                }
                if let Some(refusal) = state.failure.take() {
                    return Err(refusal.error("receive"));
                }
                while let Some(count) = state.wanted(queue.table.in_flight) {
                    while state.polls.try_join_next().is_some() {}
                    state.polling += 1;
                    state.asked += count;
                    state.polls.spawn(Arc::clone(queue).poll(count));
                }
                state.due(now).map(|due| due.saturating_sub(now))
            };
            tokio::select! {
                biased;
                () = changed => {}
                () = queue.clock.sleep(wait.unwrap_or_default()), if wait.is_some() => {}
            }
        }
    }

    async fn ack(&self, tokens: &[AckToken]) -> Result<()> {
        let receipts = self.take_back(tokens);
        self.queue.change(&receipts, Change::Delete).await.map_err(|refusal| refusal.error("settle"))
    }

    /// Of a FIFO queue, only the group of the refused message returns to SQS, which delivers it
    /// again in order, counts that, and in the end moves it to a dead-letter queue. Messages of
    /// other groups stay here until their time: SQS must not count what is not their fault.
    async fn nak(&self, tokens: &[AckToken], delay: Duration) -> Result<()> {
        let receipts = match self.queue.table.queue_url.is_fifo() {
            true => self.queue.state().put_back(tokens, delay, self.queue.clock.monotonic()),
            false => self.take_back(tokens),
        };
        self.queue.changed.notify_waiters();
        let _moving = self.queue.moving.lock().await;
        self.queue.change(&receipts, Change::Hide(delay)).await.map_err(|refusal| refusal.error("settle"))
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
            let given = given.into_values().map(|(_, held)| held);
            given.chain(ready.into_values()).map(|held| held.receipt).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    const LATER: Duration = Duration::from_secs(30);

    /// Returns messages whose receipts are these; the first letter is the group.
    fn arrived(receipts: &[&str]) -> State {
        let mut state = State::default();
        for receipt in receipts {
            let message = RawMessage {
                id: None,
                digest: [0; 32],
                topic: (*receipt).to_owned(),
                key: None,
                headers: Default::default(),
                content_type: String::new(),
                payload: Default::default(),
            };
            let group = Some(receipt[..1].to_owned());
            state.keep(Held { receipt: (*receipt).to_owned(), group, message, due: Duration::ZERO });
        }
        state
    }

    fn topics(given: &[SourceMessage]) -> Vec<&str> {
        given.iter().map(|it| it.message.topic.as_str()).collect()
    }

    #[test]
    fn only_the_group_of_a_refused_message_returns_to_the_queue() {
        let mut state = arrived(&["a1", "b1", "a2", "b2", "c1", "a3"]);
        let given = state.give(3, Duration::ZERO);
        assert_eq!(topics(&given), ["a1", "b1", "a2"]);
        let tokens: Vec<AckToken> = given.iter().map(|it| it.token).collect();
        assert_eq!(state.put_back(&tokens, LATER, Duration::ZERO), ["a1", "a2", "a3"]);
        assert_eq!(state.put_back(&tokens, LATER, Duration::ZERO), [""; 0], "the first word counts");
        assert_eq!(topics(&state.give(9, Duration::ZERO)), ["c1"], "b2 waits for b1");
        assert_eq!(state.due(Duration::ZERO), Some(LATER));
        // What was refused comes again behind them.
        state.ready.extend(arrived(&["a1"]).ready.into_values().map(|held| (99, held)));
        assert_eq!(topics(&state.give(9, LATER)), ["b1", "b2", "a1"]);
        assert_eq!(state.due(LATER), None);
    }

    /// Before a refused message, a receiver gives back what is behind it, without a delay.
    #[test]
    fn other_groups_than_that_of_a_refused_message_are_due_at_once() {
        let mut state = arrived(&["a1", "b1", "a2", "a3"]);
        let tokens: Vec<AckToken> = state.give(3, Duration::ZERO).iter().map(|it| it.token).collect();
        assert_eq!(state.put_back(&tokens[1..], Duration::ZERO, Duration::ZERO), [""; 0]);
        assert_eq!(state.put_back(&tokens[..1], LATER, Duration::ZERO), ["a1", "a2", "a3"]);
        assert_eq!(topics(&state.give(9, Duration::ZERO)), ["b1"]);
    }

    #[test]
    fn the_refused_message_is_the_first_one_handed_out_wherever_it_arrived() {
        let mut state = arrived(&["a1", "b1", "c1"]);
        let tokens = |given: Vec<SourceMessage>| given.iter().map(|it| it.token).collect::<Vec<_>>();
        let given = tokens(state.give(3, Duration::ZERO));
        assert_eq!(state.put_back(&given, LATER, Duration::ZERO), ["a1"]);
        // One of another group arrives and is handed out before the earlier ones are due again.
        state.ready.extend(arrived(&["d1"]).ready.into_values().map(|held| (99, held)));
        let mut given = tokens(state.give(9, Duration::ZERO));
        given.extend(tokens(state.give(9, LATER)));
        assert_eq!(state.put_back(&given, LATER, LATER), ["d1"]);
        assert_eq!(topics(&state.give(9, 2 * LATER)), ["b1", "c1"]);
    }
}
