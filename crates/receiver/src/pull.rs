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

use crate::group_commit::{COMMITS_MAX, is_held_up};
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
    /// Given back only because, in order, nothing is stored past one that is.
    held_up: Vec<AckToken>,
    reject: Vec<AckToken>,
    /// Number of messages already settled at the source.
    reported: usize,
    /// Size of all their payloads.
    bytes: usize,
}

impl Acks {
    fn len(&self) -> usize {
        self.ack.len() + self.nak.len() + self.held_up.len() + self.reject.len() + self.reported
    }

    fn extend(&mut self, more: Self) {
        self.ack.extend(more.ack);
        self.nak.extend(more.nak);
        self.held_up.extend(more.held_up);
        self.reject.extend(more.reject);
        self.reported += more.reported;
        self.bytes += more.bytes;
    }
}

/// The messages of a run, and when the next are pulled.
struct Rounds<'a> {
    receiver: &'a Receiver,
    in_flight_max: usize,
    /// Most batches being stored at once.
    batches_max: usize,
    /// Most messages of one batch.
    batch_max: usize,
    in_flight: Load,
    /// Pulled while others are being stored. Closing the source gives them back.
    ready: Vec<Decoded>,
    /// To be settled at the source, together.
    ended: Acks,
    /// When the next are pulled.
    not_before: Duration,
    /// `None`: the last pull did not fail.
    pull_backoff: Option<Backoff>,
    settle_backoff: Option<Backoff>,
}

impl<'a> Rounds<'a> {
    fn new(receiver: &'a Receiver, source: &dyn Source) -> Self {
        let in_flight_max = source.capabilities().in_flight_max.min(receiver.settings.in_flight_max);
        let batches_max = if receiver.group.ordered { 1 } else { COMMITS_MAX };
        Self {
            receiver,
            in_flight_max,
            batches_max,
            // One share for each batch being stored, one being read and one being acknowledged.
            batch_max: NEXT_MAX.min(in_flight_max / (batches_max + 2)).max(1),
            in_flight: Load::default(),
            ready: Vec::new(),
            ended: Acks::default(),
            not_before: Duration::ZERO,
            pull_backoff: None,
            settle_backoff: None,
        }
    }

    /// Returns how many messages to ask for; `None`: no room. Asks for large portions: small ones
    /// would become small commits, and lead to small ones again.
    fn wanted(&self) -> Option<usize> {
        let wanted = self.batch_max.saturating_sub(self.ready.len());
        let has_room = 2 * wanted >= self.batch_max
            && wanted <= self.in_flight_max.saturating_sub(self.in_flight.messages)
            && self.in_flight.bytes < BYTES_MAX;
        has_room.then_some(wanted)
    }

    fn pulled(&mut self, messages: Vec<SourceMessage>) {
        self.pull_backoff = None;
        if self.settle_backoff.is_none() {
            self.receiver.watch().failing = None;
        }
        self.in_flight.messages += messages.len();
        self.in_flight.bytes += messages.iter().map(|it| it.message.payload.len()).sum::<usize>();
        let pending = |SourceMessage { message, token }| {
            let bytes = message.payload.len();
            Pending { message, token, bytes, poison: None }
        };
        self.ready.extend(self.receiver.decode_all(messages.into_iter().map(pending)));
    }

    fn pull_failed(&mut self, failure: &Error) {
        self.not_before = self.receiver.after(&mut self.pull_backoff);
        self.receiver.observe_source(failure);
    }

    fn settled(&mut self, settled: &Settled) {
        self.in_flight -= settled.load;
        // What was not settled comes again, and would at once not be settled again.
        if settled.failed {
            self.not_before = self.receiver.after(&mut self.settle_backoff);
        }
    }

    /// In order, nothing is stored past a message that comes again: not even what was already read
    /// behind it.
    fn give_back_ready(&mut self) {
        self.ended.bytes += self.ready.iter().map(|(pending, _)| pending.bytes).sum::<usize>();
        self.ended.held_up.extend(self.ready.drain(..).map(|(pending, _)| pending.token));
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
        let mut rounds = Rounds::new(self, source);
        let (mut storing, mut settling) = (FuturesUnordered::new(), FuturesUnordered::new());
        loop {
            if storing.len() < rounds.batches_max && !rounds.ready.is_empty() {
                storing.push(self.store_batch(source, std::mem::take(&mut rounds.ready), &stop));
            }
            // One call at a time, so that the source is notified in the order of its messages.
            if settling.is_empty() && rounds.ended.len() > 0 {
                settling.push(self.settle(source, std::mem::take(&mut rounds.ended)));
            }
            let (wanted, not_before) = (rounds.wanted(), rounds.not_before);
            let next = async {
                if let Some(wait) = not_before.checked_sub(self.clock.monotonic()) {
                    self.clock.sleep(wait).await;
                }
                source.next(wanted.unwrap_or_default()).await
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(settlement) = storing.next(), if !storing.is_empty() => {
                    let gave_back = !(settlement.nak.is_empty() && settlement.held_up.is_empty());
                    rounds.ended.extend(settlement);
                    if gave_back && self.group.ordered {
                        rounds.give_back_ready();
                        // Nothing is read before the source knows.
                        while let Some(settled) = settling.next().await {
                            rounds.in_flight -= settled.load;
                        }
                        let settled = self.settle(source, std::mem::take(&mut rounds.ended)).await;
                        rounds.settled(&settled);
                    }
                }
                Some(settled) = settling.next(), if !settling.is_empty() => {
                    rounds.settled(&settled);
                    if !settled.failed {
                        rounds.settle_backoff = None;
                    }
                }
                messages = next, if wanted.is_some() => match messages {
                    Ok(messages) if messages.is_empty() => break,
                    Ok(messages) => rounds.pulled(messages),
                    Err(failure) => rounds.pull_failed(&failure),
                },
            }
        }
        info!(source = %self.source, in_flight = rounds.in_flight.messages, "receiver stopping");
        let stored = async {
            while settling.next().await.is_some() {}
            self.settle(source, rounds.ended).await;
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
                _ if is_held_up(&failure) => settlement.held_up.push(pending.token),
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
        let Acks { ack, nak, held_up, reject, .. } = settlement;
        self.metrics.add(&self.metrics.rejected, reject.len());
        self.metrics.add(&self.metrics.returned, nak.len() + held_up.len());
        let mut settled: Vec<Result<()>> = Vec::with_capacity(4);
        if !ack.is_empty() {
            settled.push(source.ack(&ack).await);
        }
        // With the delay of the refused one they would come due together with it, fail behind it
        // again, and so on for ever. Without a delay, those of other partitions come at once, and
        // the source keeps the others behind the refused one. They go first: SQS takes back the
        // refused message with what it then has of its group.
        if !held_up.is_empty() {
            settled.push(source.nak(&held_up, Duration::ZERO).await);
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

    /// Returns when to try again what failed.
    fn after(&self, backoff: &mut Option<Backoff>) -> Duration {
        self.clock.monotonic() + backoff.get_or_insert_with(Backoff::new).next()
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
