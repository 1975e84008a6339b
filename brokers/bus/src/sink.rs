//! The sink: a call is one commit in the other store.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use postbox_core::{
    Capabilities, Delivery, Event, Inbound, Key, LogName, NewEvent, Outcome, Receive, Sink, SourceName, Tenant,
    death_of, header, hex, is_death,
};
use sha2::{Digest as _, Sha256};

use crate::classify;

/// The most events in one commit: beyond that a commit costs little more than its rows.
const BATCH_MAX: usize = 500;
/// The most calls at once. More would only wait for each other's commits.
const CONCURRENCY: usize = 4;
/// After this many refused events of one call, parts are no longer halved. 500 would cost 999
/// commits, 8 cost 145 at most.
const REFUSED_MAX: usize = 8;
/// The prefix of a message id that an event has from another log.
const ORIGIN: &str = "event:";
/// The separator before the number of the death that a dead letter is about.
const DEATH: &str = "-d";

/// Appends events to a log of another store, each once.
///
/// The other store remembers ids as long as its inbox does (`remember_ids`). An event sent again
/// after that is stored again.
///
/// Cancel-safety: a dropped call has stored all of its events or none. Sent again, they are
/// duplicates.
pub struct BusSink {
    store: Arc<dyn Receive>,
    log: LogName,
    source: SourceName,
}

impl BusSink {
    /// Returns a sink into `log` of `store`. `source` is the name under which that store remembers
    /// our ids.
    pub fn new(store: Arc<dyn Receive>, log: LogName, source: SourceName) -> Self {
        Self { store, log, source }
    }

    fn inbound(&self, delivery: &Delivery) -> Inbound {
        let Event { topic, key, tenant, payload, .. } = &delivery.event;
        let digest = content_digest(&delivery.event);
        let mark = hex(&digest[..8]);
        let message_id = message_id(delivery, &mark);
        let Event { aggregate, version, kind, source, content_type, mut headers, occurred_at, expires_at, .. } =
            delivery.event.clone();
        if let Some(trace) = &delivery.trace {
            trace.carry(&mut headers);
        }
        headers.insert(header::MESSAGE_ID.to_owned(), format!("{message_id}@{mark}"));
        // The store remembers ids for all of its logs: what is known in one is news to another.
        let message_id = if self.log == LogName::inbox() { message_id } else { format!("{message_id}>{}", self.log) };
        let event = NewEvent {
            // The other log assigns its own: there, a replay is another event.
            id: None,
            topic: topic.to_string(),
            key: key.as_ref().map(Key::to_string),
            aggregate,
            version,
            kind,
            source: source.or_else(|| Some(self.source.to_string())),
            tenant: tenant.as_ref().map(ToString::to_string),
            payload: payload.clone(),
            content_type,
            headers,
            occurred_at: Some(occurred_at),
            deliver_at: None,
            expires_at,
        };
        Inbound { source: self.source.clone(), message_id, digest, event }
    }

    /// Stores halves, and halves of those that are refused, so that a refused event stops only its
    /// key. One of 500 costs 19 commits: over a slow link, a commit for each event takes longer
    /// than a call may. After `REFUSED_MAX` of them, a refused part waits for a later call. If the
    /// store goes away meanwhile, the others do not each wait for it.
    async fn send_halves(&self, inbound: &[Inbound]) -> Vec<Outcome> {
        let mut outcomes = vec![classify::held_back(); inbound.len()];
        let (mut stopped, mut refused) = (HashSet::<&str>::new(), 0);
        let half = inbound.len() / 2;
        // The last one is next.
        let mut parts: Vec<Vec<usize>> = vec![(half..inbound.len()).collect(), (0..half).collect()];
        while let Some(mut part) = parts.pop() {
            part.retain(|n| inbound[*n].event.key.as_deref().is_none_or(|key| !stopped.contains(key)));
            if part.is_empty() {
                continue;
            }
            let messages: Vec<Inbound> = part.iter().map(|n| inbound[*n].clone()).collect();
            let sent: Vec<Outcome> = match self.store.receive_many(&self.log, &messages).await {
                Ok(received) => received.into_iter().map(classify::received).collect(),
                Err(error) if !error.is_refused_alone() => {
                    let left = part.into_iter().chain(parts.into_iter().flatten());
                    left.for_each(|n| outcomes[n] = classify::failed(&error));
                    return outcomes;
                }
                Err(error) if part.len() == 1 => {
                    refused += 1;
                    vec![classify::failed(&error)]
                }
                Err(_) if refused >= REFUSED_MAX => vec![classify::left(); part.len()],
                Err(_) => {
                    let second = part.split_off(part.len() / 2);
                    parts.extend([second, part]);
                    continue;
                }
            };
            for (n, outcome) in part.into_iter().zip(sent) {
                if !outcome.is_delivered() {
                    stopped.extend(inbound[n].event.key.as_deref());
                }
                outcomes[n] = outcome;
            }
        }
        outcomes
    }
}

/// Returns the id of the event in its first log, whatever logs it came through, so that in a ring
/// of stores it stops where it began. A replay that an operator asked for is another message, with
/// the event's id in this log: another store may replay the same event. For the same reason a dead
/// letter begins with the id in this log. A letter that dies again keeps that of the first one, and
/// only the death differs, so that a ring of letters ends too.
///
/// The header that carries the id ends with a mark of the event's content. So a header that was
/// copied to another event is ignored.
fn message_id(delivery: &Delivery, mark: &str) -> String {
    let noted = delivery.event.header(header::MESSAGE_ID).filter(|id| id.starts_with(ORIGIN));
    let origin = noted.and_then(|id| id.rsplit_once('@')).filter(|(_, of)| *of == mark).map(|(origin, _)| origin);
    let own = || format!("{ORIGIN}{}", delivery.dedupe_id());
    if let Some(death) = death_of(delivery) {
        let first = origin.and_then(|id| id.rsplit_once(DEATH)).filter(|(_, death)| is_death(death));
        return format!("{}{DEATH}{death}", first.map_or_else(own, |(first, _)| first.to_owned()));
    }
    origin.filter(|_| delivery.replay == 0).map_or_else(own, str::to_owned)
}

/// Returns a digest of the fields that every log keeps unchanged. Other fields under a known id are
/// a conflict: a writer may copy the id of another's event, and must not pass for it.
fn content_digest(event: &Event) -> [u8; 32] {
    let Event { topic, key, tenant, aggregate, kind, payload, .. } = event;
    let texts = [
        Some(topic.as_str()),
        key.as_ref().map(Key::as_str),
        tenant.as_ref().map(Tenant::as_str),
        aggregate.as_deref(),
        kind.as_deref(),
    ];
    let mut digest = Sha256::new();
    for text in texts {
        digest.update(text.map_or(u64::MAX, |text| text.len() as u64).to_be_bytes());
        digest.update(text.unwrap_or_default());
    }
    digest.update(payload);
    digest.finalize().into()
}

impl fmt::Debug for BusSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BusSink").field("log", &self.log).field("source", &self.source).finish_non_exhaustive()
    }
}

#[async_trait]
impl Sink for BusSink {
    /// A call is one transaction that stores its events in the given order. A failed event fails
    /// the later ones of its key too.
    fn capabilities(&self) -> Capabilities {
        Capabilities { batch_max: BATCH_MAX, concurrency: CONCURRENCY, prefix: true, system: Some("postbox") }
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        let inbound: Vec<Inbound> = deliveries.iter().map(|delivery| self.inbound(delivery)).collect();
        match self.store.receive_many(&self.log, &inbound).await {
            Ok(received) => received.into_iter().map(classify::received).collect(),
            // The error does not say which event caused it.
            Err(error) if error.is_refused_alone() && inbound.len() > 1 => self.send_halves(&inbound).await,
            Err(error) => inbound.iter().map(|_| classify::failed(&error)).collect(),
        }
    }
}
