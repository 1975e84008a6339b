//! Drives a source: pulls messages, stores them, and settles them after the commit.

use std::ops::SubAssign;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use postbox_core::{AckToken, Error, ErrorKind, Inbound, Outage, RawMessage, Result, Source, SourceMessage, lock};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::group_commit::COMMITS_MAX;
use crate::{Receiver, log_excerpt};

/// Maximum messages to ask for at once: one full commit.
const NEXT_MAX: usize = crate::group_commit::MESSAGES_MAX;
/// First and longest wait before a failed call to the store or the source is repeated. With this
/// cap a receiver notices within half a second that its store is back.
const BACKOFF_MIN: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_millis(500);
/// How long a message is given back for if the store refused it and may take it later.
const RETURN_DELAY: Duration = Duration::from_secs(30);

/// Most bytes of payloads at hand before no others are pulled: large messages must not fill the
/// memory. A portion that was asked for may go beyond it, and so may what a source holds by itself:
/// RabbitMQ and MQTT send up to `in_flight` messages of any size.
const BYTES_MAX: usize = 64 * 1024 * 1024;

/// Exponential backoff.
struct Backoff(Duration);

impl Backoff {
    fn new() -> Self {
        Self(BACKOFF_MIN)
    }

    fn next(&mut self) -> Duration {
        let wait = self.0;
        self.0 = (wait * 2).min(BACKOFF_MAX);
        wait
    }
}

/// A message being stored.
struct Pending {
    message: RawMessage,
    token: AckToken,
    /// Size of the payload as it came.
    bytes: usize,
    /// Code and reason why it cannot be stored as it is.
    poison: Option<(String, String)>,
}

/// A message and what is stored for it; `None`: nothing.
type Decoded = (Pending, Option<Inbound>);

/// Messages that the source has handed out.
#[derive(Clone, Copy, Default)]
struct Load {
    messages: usize,
    /// Size of their payloads.
    bytes: usize,
}

impl SubAssign for Load {
    fn sub_assign(&mut self, settled: Self) {
        self.messages -= settled.messages;
        self.bytes -= settled.bytes;
    }
}

/// What became of a settlement.
struct Settled {
    load: Load,
    failed: bool,
}

/// Tokens to settle, by how.
#[derive(Default)]
struct Acks {
    ack: Vec<AckToken>,
    nak: Vec<AckToken>,
    reject: Vec<AckToken>,
    /// Number of messages already settled at the source.
    reported: usize,
    /// Size of all their payloads.
    bytes: usize,
}

impl Acks {
    fn len(&self) -> usize {
        self.ack.len() + self.nak.len() + self.reject.len() + self.reported
    }

    fn extend(&mut self, more: Self) {
        self.ack.extend(more.ack);
        self.nak.extend(more.nak);
        self.reject.extend(more.reject);
        self.reported += more.reported;
        self.bytes += more.bytes;
    }
}

impl Receiver {
    /// Receives from the source until `stop`, or until the source ends. Then it waits for messages
    /// that are being stored, and closes the source, which gives back the others.
    ///
    /// - A message is acknowledged after its commit. So is a duplicate or a conflict.
    /// - While some messages are being stored, the next are pulled and decoded, and earlier ones
    ///   are acknowledged, together if several commits have ended. While the store is down, the
    ///   messages at hand are kept and tried again, and no others are pulled.
    /// - A message that cannot be decoded or stored is kept as poison
    ///   ([`RawMessage::into_poison`]).
    ///
    /// Cancel-safety: if dropped, messages that are not acknowledged stay with the source, which
    /// waits for them. [`renew`](Self::renew) gives them back.
    pub async fn run(&self, stop: CancellationToken) {
        let pulled = lock(&self.pulled).clone();
        let Some(source) = pulled.as_deref() else { return stop.cancelled().await };
        let in_flight_max = source.capabilities().in_flight_max.min(self.settings.in_flight_max);
        let (ordered, batches_max) = if self.group.ordered { (true, 1) } else { (false, COMMITS_MAX) };
        // One share for each batch being stored, one being read and one being acknowledged.
        let batch_max = NEXT_MAX.min(in_flight_max / (batches_max + 2)).max(1);
        let (mut storing, mut settling) = (FuturesUnordered::new(), FuturesUnordered::new());
        let (mut in_flight, mut not_before) = (Load::default(), Duration::ZERO);
        let (mut backoff, mut settle_backoff) = (None::<Backoff>, None::<Backoff>);
        // Pulled while others are being stored. Closing the source gives them back.
        let mut ready = Vec::<Decoded>::new();
        let mut ended = Acks::default();
        loop {
            if storing.len() < batches_max && !ready.is_empty() {
                storing.push(self.store_batch(source, std::mem::take(&mut ready), &stop));
            }
            // One call at a time, so that the source is notified in the order of its messages.
            if settling.is_empty() && ended.len() > 0 {
                settling.push(self.settle(source, std::mem::take(&mut ended)));
            }
            // Pull in large portions: small ones would become small commits, and lead to small ones
            // again.
            let wanted = batch_max.saturating_sub(ready.len());
            let has_room = 2 * wanted >= batch_max
                && wanted <= in_flight_max.saturating_sub(in_flight.messages)
                && in_flight.bytes < BYTES_MAX;
            let next = async {
                if let Some(wait) = not_before.checked_sub(self.clock.monotonic()) {
                    self.clock.sleep(wait).await;
                }
                source.next(wanted).await
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(settlement) = storing.next(), if !storing.is_empty() => {
                    let gave_back = !settlement.nak.is_empty();
                    ended.extend(settlement);
                    if gave_back && ordered {
                        // In order, nothing is stored past a message that comes again: neither
                        // messages already read behind it, nor messages read before the source
                        // knows.
                        ended.bytes += ready.iter().map(|(pending, _)| pending.bytes).sum::<usize>();
                        ended.nak.extend(ready.drain(..).map(|(pending, _)| pending.token));
                        while let Some(settled) = settling.next().await {
                            in_flight -= settled.load;
                        }
                        let settled = self.settle(source, std::mem::take(&mut ended)).await;
                        in_flight -= settled.load;
                        if settled.failed {
                            let wait = settle_backoff.get_or_insert_with(Backoff::new).next();
                            not_before = self.clock.monotonic() + wait;
                        }
                    }
                }
                Some(settled) = settling.next(), if !settling.is_empty() => {
                    in_flight -= settled.load;
                    // What was not settled comes again, and would at once not be settled again.
                    if settled.failed {
                        not_before = self.clock.monotonic() + settle_backoff.get_or_insert_with(Backoff::new).next();
                    } else {
                        settle_backoff = None;
                    }
                }
                messages = next, if has_room => match messages {
                    Ok(messages) if messages.is_empty() => break,
                    Ok(messages) => {
                        backoff = None;
                        if settle_backoff.is_none() {
                            self.watch().failing = None;
                        }
                        in_flight.messages += messages.len();
                        in_flight.bytes += messages.iter().map(|it| it.message.payload.len()).sum::<usize>();
                        let pending = |SourceMessage { message, token }| {
                            let bytes = message.payload.len();
                            Pending { message, token, bytes, poison: None }
                        };
                        ready.extend(self.decode_all(messages.into_iter().map(pending)));
                    }
                    Err(failure) => {
                        not_before = self.clock.monotonic() + backoff.get_or_insert_with(Backoff::new).next();
                        self.observe_source(&failure);
                    }
                },
            }
        }
        info!(source = %self.source, in_flight = in_flight.messages, "receiver stopping");
        let stored = async {
            while settling.next().await.is_some() {}
            self.settle(source, ended).await;
        };
        let on_their_way = async {
            while let Some(settlement) = storing.next().await {
                self.settle(source, settlement).await;
            }
        };
        tokio::select! {
            _ = futures::future::join(stored, on_their_way) => {}
            () = self.clock.sleep(self.settings.drain_timeout) => {}
        }
        source.close().await;
    }

    /// Closes the source that [`run`](Self::run) has left when it ended or was dropped, and pulls
    /// from `built` at the next run: no source works again once it was closed. It is the same kind
    /// of source with the same settings.
    ///
    /// Cancel-safety: if dropped, or if it fails, there may be no source. It may be called again.
    pub async fn renew(&self, built: impl Future<Output = Result<Arc<dyn Source>>>) -> Result<()> {
        let left = lock(&self.pulled).take();
        if let Some(left) = left {
            // After a panic it may never be closed.
            tokio::select! {
                () = left.close() => {}
                () = self.clock.sleep(self.settings.drain_timeout) => {}
            }
        }
        let source = built.await.inspect_err(|failure| self.observe_source(failure))?;
        *lock(&self.pulled) = Some(source);
        Ok(())
    }

    /// Stores messages. Returns how they are to be settled.
    async fn store_batch(&self, source: &dyn Source, mut messages: Vec<Decoded>, stop: &CancellationToken) -> Acks {
        let (mut settlement, mut backoff) = (Acks::default(), Backoff::new());
        loop {
            let (round, kept, away) = self.store_round(source, messages).await;
            settlement.extend(round);
            if kept.is_empty() {
                return settlement;
            }
            if away {
                // The store may be away for long, so acknowledge now what is stored.
                let ack = std::mem::take(&mut settlement.ack);
                settlement.reported += self.settle(source, Acks { ack, ..Acks::default() }).await.load.messages;
                tokio::select! {
                    // Closing the source gives them back.
                    () = stop.cancelled() => return settlement,
                    () = self.clock.sleep(backoff.next()) => {}
                }
            }
            messages = self.decode_all(kept);
        }
    }

    /// Tries to store each message once. Returns how finished ones are settled, which to try again,
    /// and whether the store is away.
    async fn store_round(&self, source: &dyn Source, messages: Vec<Decoded>) -> (Acks, Vec<Pending>, bool) {
        let (mut settlement, mut kept, mut away) = (Acks::default(), Vec::new(), false);
        settlement.bytes = messages.iter().map(|(pending, _)| pending.bytes).sum();
        let (mut inbound, mut sent) = (Vec::with_capacity(messages.len()), Vec::with_capacity(messages.len()));
        for (pending, decoded) in messages {
            match decoded {
                Some(message) => {
                    inbound.push(message);
                    sent.push(pending);
                }
                None => {
                    self.metrics.add(&self.metrics.ignored, 1);
                    settlement.ack.push(pending.token);
                }
            }
        }
        let ids: Vec<String> = inbound.iter().map(|message: &Inbound| message.message_id.clone()).collect();
        let committed = self.group.commit(inbound).await;
        for ((mut pending, id), committed) in sent.into_iter().zip(ids).zip(committed) {
            self.observe(&id, &committed);
            let failure = match committed {
                Ok(_) => {
                    self.metrics.add(&self.metrics.poison, usize::from(pending.poison.is_some()));
                    settlement.ack.push(pending.token);
                    continue;
                }
                Err(failure) => failure,
            };
            match failure.kind() {
                ErrorKind::Invalid if pending.poison.is_none() => {
                    pending.poison = Some(self.poison(&id, &failure));
                    kept.push(pending);
                }
                // No store can keep it, but perhaps the broker can.
                ErrorKind::Invalid if source.capabilities().dead_letters => settlement.reject.push(pending.token),
                ErrorKind::Invalid if let Some(bytes) = pending.message.cut() => {
                    let why = format!("{}; only the first of its {bytes} bytes are stored", failure.message());
                    if let Some(messages) = self.watch().cut.observe(self.clock.monotonic()) {
                        let message_id = log_excerpt(&id);
                        error!(source = %self.source, message_id, bytes, messages, "message cut: no store can keep it whole");
                    }
                    pending.poison = Some((failure.code().to_owned(), why));
                    kept.push(pending);
                }
                _ if failure.is_refused_alone() => settlement.nak.push(pending.token),
                // The store is down, or it refuses everything (rights, schema). If the messages
                // were given back, a broker that counts deliveries would give up all it has.
                _ => {
                    away = true;
                    kept.push(pending);
                }
            }
        }
        settlement.bytes -= kept.iter().map(|pending| pending.bytes).sum::<usize>();
        (settlement, kept, away)
    }

    fn decode_all(&self, pending: impl IntoIterator<Item = Pending>) -> Vec<Decoded> {
        let decode = |mut pending| {
            let decoded = self.decode_one(&mut pending);
            (pending, decoded)
        };
        pending.into_iter().map(decode).collect()
    }

    /// Returns what is stored for a message; `None`: nothing.
    fn decode_one(&self, pending: &mut Pending) -> Option<Inbound> {
        if pending.poison.is_none() {
            let decoded = catch_unwind(AssertUnwindSafe(|| (self.decode)(&pending.message)));
            let decoded =
                decoded.unwrap_or_else(|_| Err(Error::invalid("decode", "decode_panicked", "the decoder panicked")));
            let valid = |inbound: Option<Inbound>| {
                inbound.as_ref().map_or(Ok(()), Inbound::validate)?;
                Ok(inbound)
            };
            match decoded.and_then(valid) {
                Ok(decoded) => return decoded,
                Err(failure) => pending.poison = Some(self.poison(&pending.message.message_id(), &failure)),
            }
        }
        let (code, why) = pending.poison.as_ref()?;
        Some(pending.message.clone().into_poison(&self.source, code, why))
    }

    fn poison(&self, message_id: &str, failure: &Error) -> (String, String) {
        if let Some(messages) = self.watch().poison.observe(self.clock.monotonic()) {
            let (message_id, code) = (log_excerpt(message_id), failure.code());
            warn!(source = %self.source, message_id, code, messages, "message is poison: {}", log_excerpt(failure.message()));
        }
        (failure.code().to_owned(), failure.message().to_owned())
    }

    /// Settles messages at the source. If the source does not receive this, they come again and are
    /// duplicates.
    async fn settle(&self, source: &dyn Source, settlement: Acks) -> Settled {
        let load = Load { messages: settlement.len(), bytes: settlement.bytes };
        let Acks { ack, nak, reject, .. } = settlement;
        self.metrics.add(&self.metrics.rejected, reject.len());
        self.metrics.add(&self.metrics.returned, nak.len());
        let mut settled: Vec<Result<()>> = Vec::with_capacity(3);
        if !ack.is_empty() {
            settled.push(source.ack(&ack).await);
        }
        if !nak.is_empty() {
            settled.push(source.nak(&nak, RETURN_DELAY).await);
        }
        if !reject.is_empty() {
            if let Some(times) = self.watch().rejected.observe(self.clock.monotonic()) {
                let messages = reject.len();
                error!(source = %self.source, messages, times, "messages rejected: they cannot even be kept as poison");
            }
            settled.push(source.reject(&reject).await);
        }
        let failed = settled.iter().any(Result::is_err);
        settled.into_iter().filter_map(Result::err).for_each(|failure| self.observe_source(&failure));
        Settled { load, failed }
    }

    fn observe_source(&self, failure: &Error) {
        self.metrics.add(&self.metrics.source_errors, 1);
        let since = self.outage().map_or_else(|| self.clock.now(), |outage| outage.since);
        let outage = Outage { since, code: failure.code().to_owned() };
        self.watch().failing = Some((outage, self.clock.monotonic()));
        if let Some(failures) = self.watch().source_failures.observe(self.clock.monotonic()) {
            warn!(source = %self.source, code = failure.code(), error = %failure, failures, "source failed");
        }
    }
}
