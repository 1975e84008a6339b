//! The source: a durable pull consumer of a stream.
//!
//! Messages are requested in portions that fit into what may be in flight, on an inbox of the
//! present connection. While they are handed out, the server is notified that they are in progress.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_nats::{Client, Message, Request, RequestErrorKind, StatusCode, Subject, Subscriber};
use async_trait::async_trait;
use bytes::Bytes;
use futures::future::join_all;
use futures::{FutureExt as _, StreamExt as _};
use postbox_core::{AckToken, Clock, Down, ErrorKind, Result, Source, SourceCapabilities, SourceMessage, lock};
use serde_json::json;
use tokio::sync::{Mutex as AsyncMutex, Notify};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use crate::classify;
use crate::config::NatsSourceTable;
use crate::connection::{Link, Servers, is_alive};
use crate::consumer::{ConsumerState, inspect};
use crate::jetstream::{Consumer, nanos};
use crate::message::{is_ack, raw_message};
use crate::unreadable::unreadable;

/// How long the server keeps a request for messages open. Then it ends the request, and we ask
/// again.
const EXPIRES: Duration = Duration::from_secs(30);
/// How often the server sends a heartbeat on an open request.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// How long a server may be silent before the connection counts as lost: longer than two
/// heartbeats.
const SILENCE_MAX: Duration = Duration::from_secs(12);
/// The longest wait for the server to confirm a settlement.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(5);

/// The shortest time that a consumer is taken to wait for an acknowledgement.
const ACK_WAIT_MIN: Duration = Duration::from_millis(300);

const OPERATION: &str = "receive";

/// A durable pull consumer of a stream.
pub struct NatsSource {
    link: Link,
    table: NatsSourceTable,
    /// The requests on the present connection.
    pulling: AsyncMutex<Option<Session>>,
    given: Arc<Mutex<Given>>,
    /// The server on which a connection was lost while messages were requested. If it still runs,
    /// one of the messages may be the reason.
    lost_on: Mutex<Option<String>>,
    /// The number of the message from which the next look for unreadable ones goes on; 0 for the
    /// first that is not acknowledged.
    look_from: AtomicU64,
    /// We have no right to read messages by their numbers. Asking again would only wait for a
    /// timeout.
    may_not_look: AtomicBool,
    settled: Notify,
    closed: CancellationToken,
    consumer: Arc<Mutex<ConsumerState>>,
    clock: Arc<dyn Clock>,
}

/// The inbox of one connection.
struct Session {
    client: Client,
    inbox: Subject,
    messages: Subscriber,
    /// How many messages were requested and have not arrived.
    asked: usize,
    /// How many messages are still to be requested one at a time, so that one that cannot be read
    /// affects no others.
    singly: usize,
    /// Messages that the client cannot read and that were read through the API instead.
    found: Vec<Message>,
    /// The tokens under which these are handed out. Nothing is requested before they are settled,
    /// because the server might send one of them again.
    found_given: Vec<u64>,
    _progress: AbortOnDropHandle<()>,
}

/// What is handed out on the present connection, and where to settle it.
#[derive(Default)]
struct Given {
    client: Option<Client>,
    tokens: u64,
    replies: HashMap<u64, Subject>,
}

impl NatsSource {
    /// Returns a source that connects when it is asked for messages.
    pub(crate) fn new(servers: Servers, table: NatsSourceTable, clock: Arc<dyn Clock>) -> Self {
        let consumer = Arc::<Mutex<ConsumerState>>::default();
        let known = (table.clone(), Arc::clone(&consumer), Arc::clone(&clock));
        let prepare = move |client, _| {
            let (table, consumer, clock) = known.clone();
            Box::pin(async move { inspect(&client, &table, &consumer, &*clock).await }) as _
        };
        Self {
            link: Link::new(servers, Box::new(prepare)),
            table,
            pulling: AsyncMutex::default(),
            given: Arc::default(),
            lost_on: Mutex::default(),
            look_from: AtomicU64::new(0),
            may_not_look: AtomicBool::new(false),
            settled: Notify::new(),
            closed: CancellationToken::new(),
            consumer,
            clock,
        }
    }

    fn given(&self) -> MutexGuard<'_, Given> {
        lock(&self.given)
    }

    /// Opens an inbox on a connection, which may be a new one. Messages handed out before are
    /// delivered again, at once if the server can still be notified.
    async fn connect(&self) -> Result<Session, Down> {
        let client = self.link.client().await?;
        let inbox: Subject = client.new_inbox().into();
        let messages = client.subscribe(inbox.clone()).await.map_err(|_| classify::lost())?;
        let before = std::mem::replace(&mut *self.given(), Given { client: Some(client.clone()), ..Given::default() });
        self.given().tokens = before.tokens;
        let mut given_back: Vec<(u64, Subject)> = before.replies.into_iter().collect();
        given_back.sort_unstable_by_key(|(number, _)| *number);
        for (_, reply) in given_back {
            client.publish(reply, NAK).await.map_err(|_| classify::lost())?;
        }
        let (given, clock) = (Arc::clone(&self.given), Arc::clone(&self.clock));
        let every = lock(&self.consumer).settings().ack_wait.max(ACK_WAIT_MIN) / 3;
        let progress = AbortOnDropHandle::new(tokio::spawn(report_progress(client.clone(), given, clock, every)));
        let found = self.look_for_unreadable(&client).await;
        let singly = if found.is_none() { self.table.in_flight } else { 0 };
        let found = found.unwrap_or_default();
        Ok(Session { client, inbox, messages, asked: 0, singly, found, found_given: Vec::new(), _progress: progress })
    }

    fn note_lost(&self, session: &Session) {
        if session.asked > 0 && !is_alive(&session.client) {
            *lock(&self.lost_on) = Some(session.client.server_info().server_id);
        }
    }

    /// Looks for an unreadable message if a connection was lost while the server kept running.
    /// `None` means that it cannot be looked for.
    async fn look_for_unreadable(&self, client: &Client) -> Option<Vec<Message>> {
        let lost_on = lock(&self.lost_on).clone();
        let found =
            match lost_on {
                Some(server) if server == client.server_info().server_id => {
                    if self.may_not_look.load(Ordering::Relaxed) { None } else { self.look(client).await }
                }
                _ => Some(Vec::new()),
            };
        // Cleared only now: if this future was dropped earlier, the next connection looks for it.
        *lock(&self.lost_on) = None;
        found
    }

    async fn look(&self, client: &Client) -> Option<Vec<Message>> {
        let down = match unreadable(client, &self.table, self.look_from.load(Ordering::Relaxed)).await {
            Ok((found, next)) => {
                self.look_from.store(next, Ordering::Relaxed);
                return Some(found);
            }
            Err(down) => down.error(OPERATION),
        };
        let stream = &self.table.stream;
        let refused = self.link.has_refused_looks(stream);
        self.may_not_look.store(refused, Ordering::Relaxed);
        let cure = format!(
            "allow the user to publish to $JS.API.STREAM.MSG.GET.{stream}; messages that the client cannot read stay in the stream"
        );
        warn!(code = "nats_message_unreadable", stream, why = %down, cure, "messages asked for one at a time");
        None
    }

    /// Returns the next messages of this session, once there are any.
    async fn pull(&self, session: &mut Session, max: usize) -> Result<Vec<SourceMessage>, Down> {
        loop {
            let settled = self.settled.notified();
            if !session.found.is_empty() {
                let some = session.found.drain(..max.min(session.found.len()));
                let messages: Vec<SourceMessage> = some.map(|message| self.give(message)).collect();
                session.found_given.extend(messages.iter().map(|message| message.token.0));
                return Ok(messages);
            }
            if session.asked == 0 {
                session.found_given.retain(|number| self.given().replies.contains_key(number));
                if !session.found_given.is_empty() {
                    settled.await;
                    continue;
                }
                let most = if session.singly > 0 { 1 } else { max };
                let room = self.table.in_flight.saturating_sub(self.given().replies.len()).min(most);
                if room == 0 {
                    settled.await;
                    continue;
                }
                self.ask(session, room).await?;
            }
            // The inbox ends with its connection.
            let message = tokio::select! {
                message = session.messages.next() => message.ok_or_else(classify::lost)?,
                () = self.clock.sleep(SILENCE_MAX) => {
                    let asked = self.next_subject();
                    let may_ask = !self.link.has_refused(&asked);
                    return Err(if may_ask { classify::lost() } else { classify::no_right(&asked) });
                }
            };
            let expired = message.status == Some(StatusCode::TIMEOUT);
            let Some(first) = self.take(session, message)? else {
                if expired && lock(&self.consumer).may_ask(self.clock.monotonic()) {
                    inspect(&session.client, &self.table, &self.consumer, &*self.clock).await?;
                }
                continue;
            };
            let mut messages = vec![first];
            while messages.len() < max
                && let Some(Some(message)) = session.messages.next().now_or_never()
            {
                messages.extend(self.take(session, message)?);
            }
            return Ok(messages);
        }
    }

    async fn ask(&self, session: &mut Session, count: usize) -> Result<(), Down> {
        let Consumer { batch_max, expires_max, .. } = lock(&self.consumer).settings();
        let (count, expires) = (count.min(batch_max), EXPIRES.min(expires_max));
        // The server refuses a heartbeat longer than half of the request's time.
        let heartbeat = HEARTBEAT.min(expires / 2);
        let request = json!({ "batch": count, "expires": nanos(expires), "idle_heartbeat": nanos(heartbeat) });
        let (subject, inbox) = (self.next_subject(), session.inbox.clone());
        let asked = session.client.publish_with_reply(subject, inbox, request.to_string().into());
        // Counted only after the request was sent: if dropped before that, nothing was requested.
        asked.await.map_err(|_| classify::lost())?;
        session.asked = count;
        Ok(())
    }

    /// The subject on which messages are requested.
    fn next_subject(&self) -> String {
        format!("$JS.API.CONSUMER.MSG.NEXT.{}.{}", self.table.stream, self.table.consumer)
    }

    fn give(&self, message: Message) -> SourceMessage {
        let mut given = self.given();
        given.tokens += 1;
        let number = given.tokens;
        given.replies.extend(message.reply.clone().map(|reply| (number, reply)));
        let token = AckToken(number);
        SourceMessage { message: raw_message(message, &self.table.content_type), token }
    }

    /// Handles what arrived on the inbox: a message, or the server's status of the request.
    fn take(&self, session: &mut Session, message: Message) -> Result<Option<SourceMessage>, Down> {
        // A publisher may write a status into its message. A message that can be acknowledged is
        // never a status of the server.
        let status = message.status.filter(|_| !message.reply.as_ref().is_some_and(is_ack));
        let Some(status) = status else {
            session.asked = session.asked.saturating_sub(1);
            session.singly = session.singly.saturating_sub(1);
            return Ok(Some(self.give(message)));
        };
        let why = message.description.unwrap_or_default();
        match status {
            StatusCode::IDLE_HEARTBEAT => Ok(None),
            // The request expired, there was nothing, or the leader changed: ask again.
            StatusCode::TIMEOUT | StatusCode::NOT_FOUND => {
                session.asked = 0;
                Ok(None)
            }
            _ if why.contains("Leadership Change") => {
                session.asked = 0;
                Ok(None)
            }
            status => {
                let NatsSourceTable { stream, consumer: name, .. } = &self.table;
                let text = format!("the consumer {name} of the stream {stream} gives nothing: {status} {why}");
                Err(Down::new(ErrorKind::Unavailable, "nats_pull_ended", text.trim_end()))
            }
        }
    }

    /// Sends a settlement for each token, then waits for the server's confirmation of the last: it
    /// handles them in order.
    async fn settle(&self, tokens: &[AckToken], word: Bytes) -> Result<()> {
        let (client, mut replies) = {
            let given = self.given();
            let replies: Vec<Subject> =
                tokens.iter().filter_map(|token| given.replies.get(&token.0).cloned()).collect();
            (given.client.clone(), replies)
        };
        let (Some(client), Some(last)) = (client, replies.pop()) else { return Ok(()) };
        let sent = join_all(replies.into_iter().map(|reply| client.publish(reply, word.clone()))).await;
        let request = Request::new().payload(word).timeout(Some(SETTLE_TIMEOUT));
        let confirmed = client.send_request(last, request).await;
        let settled = match confirmed {
            Ok(_) if sent.iter().all(|sent| sent.is_ok()) => Ok(()),
            Err(error) if matches!(error.kind(), RequestErrorKind::TimedOut | RequestErrorKind::NoResponders) => {
                let NatsSourceTable { stream, consumer: name, .. } = &self.table;
                let down = match self.link.refused().any("$JS.ACK.") {
                    true => classify::no_right(&format!("$JS.ACK.{stream}.{name}.>")),
                    false => {
                        let text = "the server did not confirm the acks; the messages may come again";
                        Down::new(ErrorKind::Unavailable, "nats_settle_timeout", text)
                    }
                };
                Err(down.error("settle"))
            }
            // The connection is lost. The tokens belong to it, and the messages are given back on
            // the next one.
            _ => return Ok(()),
        };
        {
            let mut given = self.given();
            tokens.iter().for_each(|token| _ = given.replies.remove(&token.0));
        }
        self.settled.notify_waiters();
        settled
    }
}

const ACK: Bytes = Bytes::from_static(b"+ACK");
const NAK: Bytes = Bytes::from_static(b"-NAK");
const TERM: Bytes = Bytes::from_static(b"+TERM");
const PROGRESS: Bytes = Bytes::from_static(b"+WPI");

/// Tells the server that everything handed out is still in progress.
async fn report_progress(client: Client, given: Arc<Mutex<Given>>, clock: Arc<dyn Clock>, every: Duration) {
    while is_alive(&client) {
        clock.sleep(every).await;
        let replies: Vec<Subject> = lock(&given).replies.values().cloned().collect();
        for reply in replies {
            if client.publish(reply, PROGRESS).await.is_err() {
                return;
            }
        }
    }
}

#[async_trait]
impl Source for NatsSource {
    fn capabilities(&self) -> SourceCapabilities {
        SourceCapabilities {
            in_flight_max: self.table.in_flight,
            // A message that is given back is delivered after those handed out meanwhile.
            ordered: false,
            nak_delay: true,
            dead_letters: false,
        }
    }

    async fn next(&self, max: usize) -> Result<Vec<SourceMessage>> {
        let next = async {
            let mut pulling = self.pulling.lock().await;
            let session = match pulling.take() {
                Some(session) if is_alive(&session.client) => session,
                lost => {
                    lost.iter().for_each(|session| self.note_lost(session));
                    self.connect().await?
                }
            };
            // Kept during the wait: if this future is dropped, nothing that arrives on the inbox is
            // lost.
            let session = pulling.insert(session);
            let pulled = self.pull(session, max.max(1)).await;
            if pulled.is_err()
                && let Some(session) = pulling.take()
            {
                self.note_lost(&session);
                self.link.discard(&session.client).await;
            }
            pulled
        };
        tokio::select! {
            biased;
            () = self.closed.cancelled() => Ok(Vec::new()),
            next = next => next.map_err(|down: Down| down.error(OPERATION)),
        }
    }

    async fn ack(&self, tokens: &[AckToken]) -> Result<()> {
        self.settle(tokens, ACK).await
    }

    async fn nak(&self, tokens: &[AckToken], delay: Duration) -> Result<()> {
        let word = match delay {
            Duration::ZERO => NAK,
            delay => format!("-NAK {}", json!({ "delay": nanos(delay) })).into(),
        };
        self.settle(tokens, word).await
    }

    async fn reject(&self, tokens: &[AckToken]) -> Result<()> {
        self.settle(tokens, TERM).await
    }

    async fn close(&self) {
        self.closed.cancel();
        if let Some(mut session) = self.pulling.lock().await.take() {
            // Messages that were requested and have arrived are given back too.
            while let Some(Some(message)) = session.messages.next().now_or_never() {
                let _ = self.take(&mut session, message);
            }
        }
        let tokens: Vec<AckToken> = self.given().replies.keys().copied().map(AckToken).collect();
        // If the server does not receive this, messages are delivered again after the consumer's
        // ack wait.
        let _ = self.settle(&tokens, NAK).await;
        self.link.close().await;
    }
}
