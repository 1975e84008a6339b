//! The sink: a call publishes all its events without waiting, then waits for their acks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::header::{HeaderName, HeaderValue};
use async_nats::{Client, HeaderMap, Request, RequestError};
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{FuturesUnordered, StreamExt as _};
use postbox_config::SinkContext;
use postbox_core::envelope::Binding;
use postbox_core::{
    Capabilities, Clock, Delivery, Down, ErrorKind, HighWaterMarks, Outcome, Result, Sink, header, hex,
};
use sha2::{Digest as _, Sha256};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tracing::{info, warn};

use crate::classify::{self, Answer, NO_STREAM, no_stream};
use crate::config::{self, NatsSinkTable};
use crate::connection::{Link, Refused};
use crate::jetstream::{
    API_TOO_SLOW, NO_JETSTREAM, NewStream, Settings, create_stream, last_number, message_at, settings, streams_of,
};
use crate::subject;

/// The most events of a call. A client's queue holds 2,048, so two calls wait for the server, not
/// for each other.
const BATCH_MAX: usize = 1_000;
/// How many calls run at once. With order by key a call has one event of each key. The next calls
/// are sent while the slowest ack of the first is outstanding.
const CONCURRENCY: usize = 8;
/// How many known messages are looked at at once. After a killed relay there can be thousands, and
/// a server that is asked for all at once answers too late.
const LOOKS_MAX: usize = 16;
/// The most streams whose settings are looked at.
pub(crate) const STREAMS_MAX: usize = 3;

/// The stream that events are published to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Target {
    /// Its name, if configured: no other stream may take the events.
    pub(crate) stream: Option<String>,
    /// How it is created if it is missing.
    pub(crate) create: Option<NewStream>,
    /// The pattern that its subjects must match.
    pub(crate) pattern: String,
    /// The longest time until an event whose ack was lost is sent again.
    pub(crate) repeats_within: Duration,
}

/// What is known of the streams that take the events.
#[derive(Debug, Default)]
struct Known {
    /// Set once a look found a stream, and read the settings of all it found.
    is_found: AtomicBool,
    /// Set once one was found that deletes messages when they are acknowledged.
    deletes_acked: AtomicBool,
    /// Set once a short duplicate window was reported, or we cannot ask.
    is_checked: AtomicBool,
    /// Set once one without a consumer was reported.
    discards: AtomicBool,
    /// Set once one that never acknowledges was reported.
    no_ack: AtomicBool,
}

/// Publishes events to JetStream.
///
/// A call never holds two events of a key. JetStream stores each publish on its own, so a later
/// event of the key could be stored although an earlier one was refused.
pub struct NatsSink {
    link: Link,
    table: NatsSinkTable,
    pattern: String,
    /// The longest wait for the acks of a call.
    timeout: Duration,
    concurrency: usize,
    known: Arc<Known>,
    /// For looks at known messages.
    looks: Semaphore,
    /// Set once it is known that we cannot look.
    may_not_look: AtomicBool,
    clock: Arc<dyn Clock>,
}

impl NatsSink {
    /// Returns a sink that connects when the first event is sent.
    pub(crate) fn new(table: &NatsSinkTable, target: Target, wait: Duration, context: &SinkContext) -> Self {
        let (servers, pattern) = (config::connection(&table.url, &table.auth, &table.tls), target.pattern.clone());
        let (target, known) = (Arc::new(target), Arc::<Known>::default());
        let learnt = Arc::clone(&known);
        let prepare = move |client, refused: Refused| {
            let (target, known) = (Arc::clone(&target), Arc::clone(&learnt));
            Box::pin(async move {
                if target.create.is_some() {
                    return prepare(&client, &target, &known).await;
                }
                if known.is_checked.load(Ordering::Relaxed) {
                    return Ok(());
                }
                let looked = timeout(wait / 3, prepare(&client, &target, &known)).await;
                match looked.unwrap_or_else(|_| Err(look_too_slow())) {
                    // A server does not answer a user without the right to ask.
                    Err(_) if refused.any("$JS.API.STREAM.") => known.is_checked.store(true, Ordering::Relaxed),
                    // The next connection may learn that the stream deletes what is acknowledged,
                    // and would then repeat under another id what this one published.
                    Err(down) if may_pass(&down) && !known.is_found.load(Ordering::Relaxed) => return Err(down),
                    _ => {}
                }
                Ok(())
            }) as _
        };
        Self {
            link: Link::new(servers, Box::new(prepare)),
            table: table.clone(),
            pattern,
            timeout: wait,
            concurrency: context.concurrency.unwrap_or(CONCURRENCY),
            known,
            looks: Semaphore::new(LOOKS_MAX),
            may_not_look: AtomicBool::new(false),
            clock: Arc::clone(&context.clock),
        }
    }

    /// Makes the message of an event, or returns why there can be none. `is_own`: its id is of this
    /// subject and body alone. The body of an event is the same at each attempt, and so is that id.
    fn message(&self, delivery: &Delivery, is_own: bool) -> Result<(String, HeaderMap, Bytes), Outcome> {
        let event = &delivery.event;
        let subject = subject::RULES.name(&self.table.subject, event)?;
        let wrapped = self.table.envelope.wrap(event, &self.table.source)?;
        let mut headers = HeaderMap::new();
        for (name, value) in delivery.headers().filter(|(name, _)| !is_reserved(name)) {
            insert(&mut headers, name, value)?;
        }
        for (name, value) in Binding::NATS.spell(&wrapped) {
            insert(&mut headers, &name, &value)?;
        }
        if wrapped.attributes.is_empty() {
            insert(&mut headers, "Content-Type", &wrapped.content_type)?;
        }
        let mut id = delivery.dedupe_id();
        if is_own {
            let content = Sha256::new().chain_update(&subject).chain_update(" ").chain_update(&wrapped.body).finalize();
            id = format!("{id}-{}", hex(&content[..8]));
        }
        insert(&mut headers, "Nats-Msg-Id", &id)?;
        if let Some(stream) = &self.table.stream {
            insert(&mut headers, "Nats-Expected-Stream", stream)?;
        }
        Ok((subject, headers, wrapped.body))
    }

    /// Publishes an event.
    ///
    /// A stream knows an id whatever the subject and the body. If it has another message under it,
    /// of another subscription or of another database with the same idempotency key, the event is
    /// published under an id of its own. That is seen by a look at the known message, so where
    /// messages are deleted once they are acknowledged, each event has an id of its own.
    async fn publish(&self, client: &Client, delivery: &Delivery) -> Result<Acked, Outcome> {
        let is_own = self.known.deletes_acked.load(Ordering::Relaxed);
        let (subject, headers, body) = self.message(delivery, is_own)?;
        let acked = request(client, subject.clone(), headers, body.clone()).await;
        let Ok(Answer { stream: Some(stream), seq: Some(number), duplicate: true, .. }) = &acked else {
            return Ok(acked);
        };
        if is_own || !self.is_another(client, stream, *number, &subject, &body).await? {
            return Ok(acked);
        }
        let (subject, headers, body) = self.message(delivery, true)?;
        Ok(request(client, subject, headers, body).await)
    }

    /// Whether a message of a stream has another subject or body. If we cannot look, it has not:
    /// most known messages are repetitions.
    async fn is_another(
        &self,
        client: &Client,
        stream: &str,
        number: u64,
        subject: &str,
        body: &[u8],
    ) -> Result<bool, Outcome> {
        let _turn = self.looks.acquire().await;
        if self.may_not_look.load(Ordering::Relaxed) {
            return Ok(false);
        }
        match timeout(self.timeout / 3, message_at(client, stream, number)).await {
            Ok(Ok(Some((its, payload)))) => return Ok(its != subject || payload != body),
            // Gone. That is a repetition, unless the stream may delete what is acknowledged.
            Ok(Ok(None)) => return Ok(self.may_delete(client, stream).await),
            // The stream may be in another domain or account, whose API is out of reach.
            Ok(Err(down)) if [NO_STREAM, NO_JETSTREAM].contains(&down.code()) => {}
            Ok(Err(down)) => return Err(down.ambiguous()),
            Err(_) if !self.link.has_refused_looks(stream) => return Err(classify::no_ack()),
            Err(_) => {}
        }
        if !self.may_not_look.swap(true, Ordering::Relaxed) {
            warn!(
                code = "nats_duplicates_unseen",
                stream,
                "this connection cannot look at known messages; if other subscriptions or databases publish to the \
                 stream, allow the user to publish to $JS.API.STREAM.MSG.GET.{stream}, or use a stream for each"
            );
        }
        Ok(false)
    }

    /// Whether a stream may delete what is acknowledged. It may be another, or edited, since the
    /// connection was made, so it is asked again. If nobody knows, an event is rather stored twice.
    async fn may_delete(&self, client: &Client, stream: &str) -> bool {
        if !self.known.is_found.load(Ordering::Relaxed) {
            return true;
        }
        let Ok(Ok(found)) = timeout(self.timeout / 3, settings(client, stream)).await else { return true };
        let deletes_acked = found.is_none_or(|found| found.deletes_acked);
        self.known.deletes_acked.fetch_or(deletes_acked, Ordering::Relaxed);
        deletes_acked
    }

    /// Returns why there was no connection within the time of a call. The API does not answer a
    /// user without rights.
    fn without_connection(&self) -> Down {
        let refused = self.link.refused().first("$JS.API.");
        refused.map_or_else(classify::connect_too_slow, |subject| classify::no_right(&subject))
    }

    /// Returns the outcome of an event that no stream takes. If other events of the call were
    /// delivered, the server and its streams work, so the subject is the problem.
    fn without_stream(&self, others_delivered: bool) -> Outcome {
        let down = no_stream(self.table.stream.as_deref(), &self.pattern);
        if others_delivered { down.ambiguous() } else { down.outcome() }
    }

    /// Returns the outcome of an event without an answer in time.
    fn without_answer(&self, delivery: &Delivery, others_delivered: bool) -> Outcome {
        match subject::RULES.name(&self.table.subject, &delivery.event) {
            Ok(subject) if self.link.has_refused(&subject) => {
                let down = classify::no_right(&subject);
                if others_delivered { down.ambiguous() } else { down.outcome() }
            }
            _ => classify::no_ack(),
        }
    }
}

/// The answer to a publish, or why there is none.
type Acked = Result<Answer, RequestError>;

async fn request(client: &Client, subject: String, headers: HeaderMap, body: Bytes) -> Acked {
    // The call has its own deadline.
    let request = Request::new().headers(headers).payload(body).timeout(None);
    client.send_request(subject, request).await.map(|message| classify::read(&message))
}

/// Whether no event may set this header: JetStream or the envelope uses it.
fn is_reserved(name: &str) -> bool {
    let begins = name.as_bytes().get(..5);
    Binding::NATS.is_reserved(name) || begins.is_some_and(|begins| begins.eq_ignore_ascii_case(b"nats-"))
}

/// Adds a header. NATS headers are lines, so white space around a value would be lost.
fn insert(headers: &mut HeaderMap, name: &str, value: &str) -> Result<(), Outcome> {
    let same = value.trim() == value && header::is_value(value);
    match (name.parse::<HeaderName>(), value.parse::<HeaderValue>()) {
        (Ok(name), Ok(value)) if same => {
            headers.insert(name, value);
            Ok(())
        }
        _ => {
            let name: String = name.escape_debug().take(100).collect();
            let text = format!("the event's header \"{name}\" has a name or value that NATS cannot carry");
            Err(Outcome::dead("header_invalid", text))
        }
    }
}

#[async_trait]
impl Sink for NatsSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { batch_max: BATCH_MAX, concurrency: self.concurrency, prefix: false, system: Some("nats") }
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        if deliveries.is_empty() {
            return Vec::new();
        }
        let deadline = self.clock.sleep(self.timeout);
        tokio::pin!(deadline);
        let connected = tokio::select! {
            biased;
            connected = self.link.client() => connected,
            () = &mut deadline => Err(self.without_connection()),
        };
        let client = match connected {
            Ok(client) => client,
            Err(down) => return vec![down.outcome(); deliveries.len()],
        };
        let sent = || client.statistics().out_messages.load(Ordering::Relaxed);
        let before = sent();
        let mut outcomes: Vec<Option<Outcome>> = vec![None; deliveries.len()];
        let mut acks: FuturesUnordered<_> = (0..)
            .zip(deliveries)
            .map(|(place, delivery)| {
                let client = &client;
                async move { (place, self.publish(client, delivery).await) }
            })
            .collect();
        loop {
            let (place, acked): (usize, _) = tokio::select! {
                biased;
                acked = acks.next() => match acked {
                    Some(acked) => acked,
                    None => break,
                },
                () = &mut deadline => break,
            };
            // After the connection is lost the count no longer changes, because its queue is
            // discarded.
            outcomes[place] = Some(match acked {
                Ok(Ok(answer)) => classify::outcome(answer),
                Ok(Err(error)) => classify::failure(&error, sent() == before),
                Err(outcome) => outcome,
            });
        }
        drop(acks);
        self.conclude(&client, deliveries, outcomes).await
    }

    fn high_water_marks(&self) -> Option<&dyn HighWaterMarks> {
        Some(self)
    }

    async fn close(&self) {
        self.link.close().await;
    }
}

/// The high-water mark is the number of the last message that a stream has stored. It never
/// decreases while the stream exists, whatever is purged or deleted in it.
#[async_trait]
impl HighWaterMarks for NatsSink {
    async fn high_water_mark(&self, stream: &str) -> Result<Option<String>> {
        // A text that is no name would make a different API call.
        if config::name(stream).is_err() {
            return Ok(None);
        }
        let asked = async { last_number(&self.link.client().await?, stream).await };
        Ok(asked.await.map_err(|down| down.error("inspect"))?.map(|number| number.to_string()))
    }

    async fn streams(&self, max: usize) -> Result<Vec<String>> {
        if let Some(stream) = &self.table.stream {
            return Ok(vec![stream.clone()]);
        }
        let asked = async { streams_of(&self.link.client().await?, &self.pattern).await };
        let mut streams = asked.await.map_err(|down| down.error("inspect"))?;
        streams.truncate(max);
        Ok(streams)
    }
}

impl NatsSink {
    /// Returns the outcomes of a call, each in view of the others.
    async fn conclude(
        &self,
        client: &Client,
        deliveries: &[&Delivery],
        outcomes: Vec<Option<Outcome>>,
    ) -> Vec<Outcome> {
        let delivered = outcomes.iter().flatten().any(Outcome::is_delivered);
        let is_missing = |outcome: &Outcome| matches!(outcome, Outcome::Ambiguous { code, .. } if code == NO_STREAM);
        let missing = outcomes.iter().flatten().any(is_missing);
        let silent = outcomes.iter().any(Option::is_none);
        let conclude = |(outcome, delivery): (Option<Outcome>, &&Delivery)| match outcome {
            None => self.without_answer(delivery, delivered),
            Some(outcome) if is_missing(&outcome) => self.without_stream(delivered),
            Some(outcome) => outcome,
        };
        // Before a new connection clears the list of refused subjects.
        let concluded = outcomes.into_iter().zip(deliveries).map(conclude).collect();
        // No event was delivered, so the connection itself may be at fault. On a new connection a
        // stream is created if configured, and one that was never seen is looked at.
        let helps = self.table.create.is_some() || !self.known.is_found.load(Ordering::Relaxed);
        if !delivered && (silent || (missing && helps)) {
            self.link.discard(client).await;
        }
        concluded
    }
}

/// What a stream with retention `interest` and no consumer does, and the cure.
pub(crate) const DISCARDS: &str = "its retention is interest, so it throws away every event that no consumer wants; \
                                   create the consumers first, or a stream with retention limits";

/// What a stream with `no_ack` does, and the cure.
pub(crate) const NO_ACK: &str = "it has no_ack, so no event ever counts as delivered; edit the stream so that it \
                                 acknowledges (no_ack = false)";

/// Creates the stream if configured, notes whether it deletes messages, warns if it discards them
/// or acknowledges none, and compares its duplicate window with the time in which events can
/// repeat.
async fn prepare(client: &Client, target: &Target, known: &Known) -> Result<(), Down> {
    let streams = match &target.stream {
        Some(stream) => vec![stream.clone()],
        None => streams_of(client, &target.pattern).await?,
    };
    let mut is_found = false;
    for stream in streams.iter().take(STREAMS_MAX) {
        let found = match (settings(client, stream).await?, &target.create) {
            (None, Some(new)) => {
                create_stream(client, stream, new).await?;
                info!(stream, "stream made");
                Some(Settings { duplicate_window: new.duplicate_window, ..Settings::default() })
            }
            (found, _) => found,
        };
        let Some(Settings { duplicate_window: window, deletes_acked, discards, no_ack }) = found else { continue };
        is_found = true;
        known.deletes_acked.fetch_or(deletes_acked, Ordering::Relaxed);
        if discards && !known.discards.swap(true, Ordering::Relaxed) {
            warn!(code = "nats_interest_none", stream, "stream without a consumer: {DISCARDS}");
        }
        if no_ack && !known.no_ack.swap(true, Ordering::Relaxed) {
            warn!(code = "nats_no_ack", stream, "stream without acknowledgements: {NO_ACK}");
        }
        if window < target.repeats_within && !known.is_checked.swap(true, Ordering::Relaxed) {
            warn!(
                code = "dedupe_window_short", stream, ?window, repeats_within = ?target.repeats_within,
                "stream forgets ids too soon: an event whose ack was lost may be stored twice; \
                 raise its duplicate window: nats stream edit {stream} --dupe-window {}s", target.repeats_within.as_secs()
            );
        }
    }
    known.is_found.fetch_or(is_found, Ordering::Relaxed);
    Ok(())
}

/// The settings of the streams did not come in time.
fn look_too_slow() -> Down {
    let text = "JetStream did not describe the stream in time; events wait, because their ids depend on its retention";
    Down::new(ErrorKind::Unavailable, API_TOO_SLOW, text)
}

/// Returns whether a look that failed may succeed on the next connection. A stream in another
/// domain or account can be published to, but its API stays out of reach.
fn may_pass(down: &Down) -> bool {
    down.code() != NO_JETSTREAM && !down.clone().error("inspect").is_permanent()
}
