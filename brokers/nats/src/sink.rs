//! The sink: a call publishes all its events without waiting, then waits for their acks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::header::{HeaderName, HeaderValue};
use async_nats::{Client, HeaderMap, Message, Request, RequestError};
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{FuturesUnordered, StreamExt as _};
use postbox_core::envelope::Binding;
use postbox_core::{Capabilities, Clock, Delivery, Down, Envelope, HighWaterMarks, Outcome, Result, Sink, Template};
use tracing::{info, warn};

use crate::classify::{self, NO_STREAM, no_stream};
use crate::config;
use crate::connection::{Link, Servers};
use crate::jetstream::{NewStream, create_stream, duplicate_window, last_number, streams_of};
use crate::subject;

/// Most events of a call: a client's queue holds 2,048, so two calls wait for the server and not
/// for each other.
const BATCH_MAX: usize = 1_000;
/// Calls at once. With order by key a call has one event of each key; the next ones go out while
/// the slowest ack of the first is waited for.
const CONCURRENCY: usize = 8;
/// Most streams whose memory of ids is looked at.
const STREAMS_MAX: usize = 3;

/// The stream that is published to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Target {
    /// Its name, where that is given: no other may take the events.
    pub(crate) stream: Option<String>,
    /// It is made so if it is missing.
    pub(crate) create: Option<NewStream>,
    /// What its subjects must match.
    pub(crate) pattern: String,
    /// The longest time until an event whose ack was lost comes again.
    pub(crate) repeats_within: Duration,
}

/// Publishes events to JetStream.
///
/// A call never holds two events of a key: JetStream stores each publish for itself, so a later
/// event of the key could be stored though an earlier one was refused.
pub struct NatsSink {
    link: Link,
    subject: Template,
    stream: Option<String>,
    create: bool,
    pattern: String,
    envelope: Envelope,
    source: String,
    timeout: Duration,
    concurrency: usize,
    clock: Arc<dyn Clock>,
}

/// How events are published.
pub(crate) struct Publishing {
    pub(crate) subject: Template,
    pub(crate) envelope: Envelope,
    /// The CloudEvents source of events that name none.
    pub(crate) source: String,
    /// Longest wait for the acks of a call.
    pub(crate) timeout: Duration,
    pub(crate) concurrency: Option<usize>,
}

impl NatsSink {
    /// A sink that connects when the first event is sent.
    pub(crate) fn new(servers: Servers, target: Target, how: Publishing, clock: Arc<dyn Clock>) -> Self {
        let (stream, create, pattern) = (target.stream.clone(), target.create.is_some(), target.pattern.clone());
        let (target, warned) = (Arc::new(target), Arc::new(AtomicBool::new(false)));
        let prepare = move |client| {
            let (target, warned) = (Arc::clone(&target), Arc::clone(&warned));
            Box::pin(async move { prepare(&client, &target, &warned).await }) as _
        };
        Self {
            link: Link::new(servers, Box::new(prepare)),
            subject: how.subject,
            stream,
            create,
            pattern,
            envelope: how.envelope,
            source: how.source,
            timeout: how.timeout,
            concurrency: how.concurrency.unwrap_or(CONCURRENCY),
            clock,
        }
    }

    /// The message of an event, or why there can be none.
    fn message(&self, delivery: &Delivery) -> Result<(String, HeaderMap, Bytes), Outcome> {
        let event = &delivery.event;
        let subject = subject::render(&self.subject, event)?;
        let wrapped = self.envelope.wrap(event, &self.source)?;
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
        insert(&mut headers, "Nats-Msg-Id", &delivery.dedupe_id())?;
        if let Some(stream) = &self.stream {
            insert(&mut headers, "Nats-Expected-Stream", stream)?;
        }
        Ok((subject, headers, wrapped.body))
    }

    async fn publish(&self, client: &Client, delivery: &Delivery) -> Result<Acked, Outcome> {
        let (subject, headers, body) = self.message(delivery)?;
        // The call has its own deadline.
        let request = Request::new().headers(headers).payload(body).timeout(None);
        Ok(client.send_request(subject, request).await)
    }

    /// The outcome of an event that no stream takes. Others that were taken prove that the server
    /// and its streams are well, and that it is the subject.
    fn without_stream(&self, others_delivered: bool) -> Outcome {
        let down = no_stream(self.stream.as_deref(), &self.pattern);
        if others_delivered { down.ambiguous() } else { down.outcome() }
    }

    /// The outcome of an event that no answer came to in time.
    fn without_answer(&self, delivery: &Delivery, others_delivered: bool) -> Outcome {
        match subject::render(&self.subject, &delivery.event) {
            Ok(subject) if self.link.has_refused(&subject) => {
                let down = classify::no_right(&subject);
                if others_delivered { down.ambiguous() } else { down.outcome() }
            }
            _ => classify::no_ack(),
        }
    }
}

/// The answer to a publish, or why there is none.
type Acked = Result<Message, RequestError>;

/// Names that no event sets: what JetStream goes by, and what the envelope says.
fn is_reserved(name: &str) -> bool {
    let begins = name.as_bytes().get(..5);
    Binding::NATS.is_reserved(name) || begins.is_some_and(|begins| begins.eq_ignore_ascii_case(b"nats-"))
}

/// NATS headers are lines: white space around a value would be lost on the way.
fn insert(headers: &mut HeaderMap, name: &str, value: &str) -> Result<(), Outcome> {
    let same = value.trim() == value && !value.contains(|c: char| c.is_control() && c != '\t');
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
        let client = match self.link.client().await {
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
        let deadline = self.clock.sleep(self.timeout);
        tokio::pin!(deadline);
        loop {
            let (place, acked): (usize, _) = tokio::select! {
                biased;
                acked = acks.next() => match acked {
                    Some(acked) => acked,
                    None => break,
                },
                () = &mut deadline => break,
            };
            // Once the connection is lost the count stands: its queue is thrown away.
            outcomes[place] = Some(match acked {
                Ok(Ok(message)) => classify::answer(&message),
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

/// The position is the number of the last message that a stream has taken. It does not fall while
/// the stream is there, whatever is purged or deleted in it.
#[async_trait]
impl HighWaterMarks for NatsSink {
    async fn high_water_mark(&self, stream: &str) -> Result<Option<String>> {
        // What is no name would be another question.
        if config::name(stream).is_err() {
            return Ok(None);
        }
        let asked = async { last_number(&self.link.client().await?, stream).await };
        Ok(asked.await.map_err(|down| down.error("inspect"))?.map(|number| number.to_string()))
    }

    async fn streams(&self, max: usize) -> Result<Vec<String>> {
        if let Some(stream) = &self.stream {
            return Ok(vec![stream.clone()]);
        }
        let asked = async { streams_of(&self.link.client().await?, &self.pattern).await };
        let mut streams = asked.await.map_err(|down| down.error("inspect"))?;
        streams.truncate(max);
        Ok(streams)
    }
}

impl NatsSink {
    /// The outcomes of a call, in the light of each other.
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
        // Before another connection forgets what this one was refused.
        let concluded = outcomes.into_iter().zip(deliveries).map(conclude).collect();
        // Nothing comes back, so something else than the server may be at fault; and a stream that
        // we make is made on a new connection.
        if !delivered && (silent || (missing && self.create)) {
            self.link.discard(client).await;
        }
        concluded
    }
}

/// Makes the stream if that is wanted, and compares its memory of ids with ours.
async fn prepare(client: &Client, target: &Target, warned: &AtomicBool) -> Result<(), Down> {
    let streams = match &target.stream {
        Some(stream) => vec![stream.clone()],
        // Only for a warning: whoever may not ask is not warned.
        None => streams_of(client, &target.pattern).await.unwrap_or_default(),
    };
    for stream in streams.iter().take(STREAMS_MAX) {
        let window = match (duplicate_window(client, stream).await, &target.create) {
            (Ok(None), Some(new)) => {
                create_stream(client, stream, new).await?;
                info!(stream, "stream made");
                Some(new.duplicate_window)
            }
            (Err(down), Some(_)) => return Err(down),
            (known, _) => known.unwrap_or_default(),
        };
        let short = window.filter(|window| *window < target.repeats_within);
        if let Some(window) = short
            && !warned.swap(true, Ordering::Relaxed)
        {
            warn!(
                code = "dedupe_window_short", stream, ?window, repeats_within = ?target.repeats_within,
                "stream forgets ids too soon: an event whose ack was lost may be stored twice; \
                 raise its duplicate window: nats stream edit {stream} --dupe-window {}s", target.repeats_within.as_secs()
            );
        }
    }
    Ok(())
}
