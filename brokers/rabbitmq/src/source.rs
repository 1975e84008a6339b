//! The source: a consumer of a queue.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use futures::future::join_all;
use futures::{FutureExt as _, StreamExt as _};
use lapin::Channel;
use lapin::message::Delivery as Message;
use lapin::options::{BasicAckOptions, BasicRejectOptions};
use postbox_core::{AckToken, Clock, Down, RawMessage, Result, Source, SourceCapabilities, SourceMessage, Topic, lock};
use tokio::sync::{Mutex as AsyncMutex, Notify};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::caution::Caution;
use crate::classify::{self, UNREADABLE};
use crate::config::RabbitmqSourceTable;
use crate::connection::Servers;
use crate::consumer::{Session, bound};
use crate::message::raw_message;

/// The longest wait for the server to process a settlement.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest wait for the end of a consumer whose connection seems to be lost.
const END_TIMEOUT: Duration = Duration::from_millis(200);

const OPERATION: &str = "receive";

/// A consumer of a queue.
///
/// A message that is given back with a delay waits here and counts as in flight: a queue has no
/// delays, and each return to it counts towards its delivery limit.
pub struct RabbitmqSource {
    servers: Servers,
    table: RabbitmqSourceTable,
    consuming: AsyncMutex<Consuming>,
    state: Mutex<State>,
    /// Allows one settlement at a time, so that one that says "all up to here" is not overtaken.
    settling: AsyncMutex<()>,
    changed: Notify,
    closed: CancellationToken,
    clock: Arc<dyn Clock>,
}

/// The present session, and how carefully the next one begins.
#[derive(Default)]
struct Consuming {
    session: Option<Session>,
    caution: Caution,
}

/// What has arrived on the present connection and is not settled.
#[derive(Default)]
struct State {
    channel: Option<Channel>,
    /// The session is over, or must end, because the server may not have processed a settlement.
    is_lost: bool,
    times: u64,
    /// Messages that are handed out, by the number of the token, each with its delivery tag.
    given: BTreeMap<u64, (u64, RawMessage)>,
    /// Messages that were given back, by delivery tag, each with the time when it may be handed out
    /// again. A waiting message holds up those behind it.
    waiting: BTreeMap<u64, (Duration, RawMessage)>,
}

/// How a message is settled.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Word {
    Ack,
    Reject,
}

impl State {
    fn give(&mut self, tag: u64, message: RawMessage) -> SourceMessage {
        self.times += 1;
        self.given.insert(self.times, (tag, message.clone()));
        SourceMessage { message, token: AckToken(self.times) }
    }

    /// Hands out messages that were given back and are due.
    fn give_again(&mut self, max: usize, now: Duration) -> Vec<SourceMessage> {
        let mut messages = Vec::new();
        while messages.len() < max
            && let Some(first) = self.waiting.first_entry()
            && first.get().0 <= now
        {
            let (tag, (_, message)) = first.remove_entry();
            messages.push(self.give(tag, message));
        }
        messages
    }

    fn take_back(&mut self, token: &AckToken) -> Option<(u64, RawMessage)> {
        self.given.remove(&token.0)
    }

    /// Forgets everything: it will be redelivered with other tags and tokens.
    fn forget(&mut self, channel: Option<Channel>) {
        *self = Self { channel, times: self.times, ..Self::default() };
    }

    /// The lowest tag that is not settled.
    fn floor(&self) -> Option<u64> {
        self.given.values().map(|(tag, _)| *tag).chain(self.waiting.keys().copied()).min()
    }
}

impl RabbitmqSource {
    /// Returns a source that connects when it is asked for messages.
    pub(crate) fn new(servers: Servers, table: RabbitmqSourceTable, clock: Arc<dyn Clock>) -> Self {
        Self {
            servers,
            table,
            consuming: AsyncMutex::default(),
            state: Mutex::default(),
            settling: AsyncMutex::default(),
            changed: Notify::new(),
            closed: CancellationToken::new(),
            clock,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Returns the next messages from the server, once there are any.
    async fn receive(&self, consuming: &mut Consuming, max: usize) -> Result<Vec<SourceMessage>, Down> {
        let Consuming { session, caution } = consuming;
        if caution.is_over(usize::from(self.table.in_flight)) && self.state().floor().is_none() {
            *caution = Caution::default();
            if let Some(session) = session.take() {
                session.connection.close().await;
            }
        }
        let session = match session {
            Some(session) => session,
            None => {
                self.clock.sleep(caution.pause(self.clock.monotonic())).await;
                let prefetch = if caution.is_raised() { 1 } else { self.table.in_flight };
                let opened = Session::open(&self.servers, &self.table, prefetch).await?;
                self.state().forget(Some(opened.channel.clone()));
                session.insert(opened)
            }
        };
        let mut messages = Vec::new();
        let mut next = session.consumer.next().await;
        let ended = loop {
            match next {
                Some(Ok(message)) => messages.push(self.keep(message)),
                Some(Err(error)) => break Some(classify::ended(&self.table.queue, &error)),
                // The queue was deleted, or its leader is gone.
                None => break Some(classify::lost("the server cancelled the consumer")),
            }
            if messages.len() >= max {
                break None;
            }
            match session.consumer.next().now_or_never() {
                Some(another) => next = another,
                None => break None,
            }
        };
        caution.pass(messages.len());
        if let Some(down) = ended {
            consuming.session = None;
            if down.code() == UNREADABLE {
                consuming.caution.raise(self.clock.monotonic());
            }
            // The tokens of what is handed out now belong to an earlier connection.
            self.state().forget(None);
            if messages.is_empty() {
                return Err(down);
            }
        }
        Ok(messages)
    }

    /// Ends a session on which a settlement was not processed. The end of its consumer may say why.
    /// Messages that still arrive on it are redelivered.
    async fn lose(&self, consuming: &mut Consuming) {
        if let Some(session) = &mut consuming.session {
            let ended = async {
                loop {
                    match session.consumer.next().await {
                        Some(Ok(_)) => {}
                        Some(Err(error)) => return classify::ended(&self.table.queue, &error).code() == UNREADABLE,
                        None => return false,
                    }
                }
            };
            if timeout(END_TIMEOUT, ended).await == Ok(true) {
                consuming.caution.raise(self.clock.monotonic());
            }
        }
        consuming.session = None;
        self.state().forget(None);
    }

    fn keep(&self, message: Message) -> SourceMessage {
        let RabbitmqSourceTable { topic, queue, content_type, .. } = &self.table;
        let (topic, tag) = (topic.as_ref().map_or(queue.as_str(), Topic::as_str), message.delivery_tag);
        self.state().give(tag, raw_message(message, topic, content_type))
    }

    /// Sends a settlement to the server, and waits until it is processed.
    async fn settle(&self, tokens: &[AckToken], word: Word) -> Result<()> {
        let _one = self.settling.lock().await;
        let (channel, tags, floor) = {
            let mut state = self.state();
            let mut tags: Vec<u64> = tokens.iter().filter_map(|token| state.take_back(token)).map(|it| it.0).collect();
            tags.sort_unstable();
            (state.channel.clone(), tags, state.floor())
        };
        let (Some(channel), Some(last)) = (channel, tags.last().copied()) else { return Ok(()) };
        // If these tags include everything unsettled up to one of them, a single acknowledgement
        // settles all of it.
        let below = tags.partition_point(|tag| floor.is_none_or(|floor| *tag < floor));
        let (alone, all_to) = match (word, below) {
            (Word::Ack, 1..) => (&tags[below..], Some(if below == tags.len() { last } else { tags[below - 1] })),
            _ => (&tags[..], None),
        };
        let words = all_to.map(|tag| (tag, true)).into_iter().chain(alone.iter().map(|tag| (*tag, false)));
        let sent = words.map(|(tag, multiple)| {
            let channel = &channel;
            async move {
                match word {
                    Word::Ack => channel.basic_ack(tag, BasicAckOptions { multiple }).await,
                    Word::Reject => channel.basic_reject(tag, BasicRejectOptions { requeue: false }).await,
                }
            }
        });
        let heard = async {
            let sent = join_all(sent).await.into_iter().all(|sent| sent.is_ok());
            sent && bound(&channel, self.table.in_flight).await.is_ok()
        };
        if timeout(SETTLE_TIMEOUT, heard).await != Ok(true) {
            // The messages are redelivered on the next connection, as are those whose tokens belong
            // to an earlier one.
            self.state().is_lost = true;
            self.changed.notify_waiters();
        }
        Ok(())
    }
}

#[async_trait]
impl Source for RabbitmqSource {
    /// In order if the queue has one consumer.
    fn capabilities(&self) -> SourceCapabilities {
        SourceCapabilities {
            in_flight_max: usize::from(self.table.in_flight),
            ordered: true,
            nak_delay: true,
            dead_letters: self.table.dead_letter_exchange.is_some(),
        }
    }

    async fn next(&self, max: usize) -> Result<Vec<SourceMessage>> {
        let max = max.max(1);
        let mut consuming = self.consuming.lock().await;
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // From here on no change is missed.
            changed.as_mut().enable();
            if self.state().is_lost {
                self.lose(&mut consuming).await;
            }
            let due = {
                let (mut state, now) = (self.state(), self.clock.monotonic());
                let again = state.give_again(max, now);
                if !again.is_empty() {
                    return Ok(again);
                }
                state.waiting.first_key_value().map(|(_, (due, _))| due.saturating_sub(now))
            };
            tokio::select! {
                biased;
                () = self.closed.cancelled() => return Ok(Vec::new()),
                () = changed => {}
                () = self.clock.sleep(due.unwrap_or_default()), if due.is_some() => {}
                received = self.receive(&mut consuming, max), if due.is_none() => {
                    return received.map_err(|down| down.error(OPERATION));
                }
            }
        }
    }

    async fn ack(&self, tokens: &[AckToken]) -> Result<()> {
        self.settle(tokens, Word::Ack).await
    }

    /// Keeps the message here until its time. If we stop before, it is delivered at the next start.
    async fn nak(&self, tokens: &[AckToken], delay: Duration) -> Result<()> {
        let due = self.clock.monotonic() + delay;
        let mut state = self.state();
        for token in tokens {
            if let Some((tag, message)) = state.take_back(token) {
                state.waiting.insert(tag, (due, message));
            }
        }
        drop(state);
        self.changed.notify_waiters();
        Ok(())
    }

    async fn reject(&self, tokens: &[AckToken]) -> Result<()> {
        self.settle(tokens, Word::Reject).await
    }

    async fn close(&self) {
        self.closed.cancel();
        // A waiting call notices the cancellation and ends.
        if let Some(session) = self.consuming.lock().await.session.take() {
            session.connection.close().await;
        }
        self.state().forget(None);
    }
}
