//! The sink: a call publishes all its events without waiting, then waits for their confirms.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use futures::stream::{self, FuturesUnordered, StreamExt as _};
use lapin::options::BasicPublishOptions;
use lapin::types::ShortString;
use lapin::{Confirmation, Error as ClientError};
use postbox_core::{Capabilities, Clock, Delivery, Down, Outcome, Sink};

use crate::classify;
use crate::config::RabbitmqSinkTable;
use crate::connection::{Connection, Lease, Link};
use crate::message::Outgoing;

/// The most events of a call: more outstanding confirms are not faster.
const BATCH_MAX: usize = 1_000;
/// How many calls run at once, unless the subscription sets it. With order by key a call has one
/// event of each key. The next calls are sent while the slowest confirm of the first is
/// outstanding.
const CONCURRENCY: usize = 4;
/// To how many exchanges a call publishes at once, each on its own channel.
const EXCHANGES_AT_ONCE: usize = 16;

/// Publishes events to exchanges.
///
/// A call never holds two events of a key. A queue takes or refuses each message on its own, so a
/// later event of the key could be stored although an earlier one was refused.
///
/// Cancel-safety: the messages of a dropped call may be in the queues.
pub struct RabbitmqSink {
    link: Link,
    table: RabbitmqSinkTable,
    timeout: Duration,
    concurrency: usize,
    clock: Arc<dyn Clock>,
}

/// The deadline of a call.
type Deadline<'a> = Shared<BoxFuture<'a, ()>>;

/// The result of one publish: the server's confirmation, or a failure and whether the publish was
/// written by then.
type Confirmed = Result<Confirmation, (ClientError, bool)>;

impl RabbitmqSink {
    /// Returns a sink that connects when the first event is sent. `timeout` is the longest that a
    /// call waits.
    pub(crate) fn new(
        table: &RabbitmqSinkTable,
        timeout: Duration,
        concurrency: Option<usize>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let (link, concurrency) = (Link::new(table.servers()), concurrency.unwrap_or(CONCURRENCY));
        Self { link, table: table.clone(), timeout, concurrency, clock }
    }
}

/// Publishes to one exchange. A refusal ends a channel, so each exchange has its own: a missing one
/// fails no event of another.
async fn publish_all(
    connection: &Connection,
    exchange: ShortString,
    messages: Vec<(usize, Outgoing)>,
    deadline: Deadline<'_>,
) -> Vec<(usize, Outcome)> {
    let leased = tokio::select! {
        leased = connection.lease(&exchange) => leased.map_err(|error| failed(connection, &error, 0, false)),
        () = deadline.clone() => {
            connection.give_up();
            Err(unanswered(connection, || classify::lost("no channel in time").outcome()))
        }
    };
    let lease = match leased {
        Ok(lease) => lease,
        Err(outcome) => return messages.into_iter().map(|(place, _)| (place, outcome.clone())).collect(),
    };
    let mut confirms: FuturesUnordered<_> = (0..)
        .zip(&messages)
        .map(|(index, (_, message))| publish(&lease, message).map(move |confirmed| (index, confirmed)))
        .collect();
    let mut confirmed: Vec<Option<Confirmed>> = messages.iter().map(|_| None).collect();
    loop {
        let next: Option<(usize, _)> = tokio::select! {
            biased;
            next = confirms.next() => next,
            () = deadline.clone() => break,
        };
        let Some((index, next)) = next else { break };
        confirmed[index] = Some(next);
    }
    // Confirms that arrived before the last one count, too.
    while let Some(Some((index, next))) = confirms.next().now_or_never() {
        confirmed[index] = Some(next);
    }
    drop(confirms);
    let whole = confirmed.iter().all(|confirmed| matches!(confirmed, Some(Ok(_))));
    if whole {
        lease.give_back();
    }
    let failed = |error: &ClientError, bytes, written| failed(connection, error, bytes, written);
    judge(messages, confirmed, whole, failed, || unanswered(connection, classify::no_confirm))
}

async fn publish(lease: &Lease<'_>, message: &Outgoing) -> Confirmed {
    let Outgoing { exchange, routing_key, properties, body, .. } = message;
    let options = BasicPublishOptions { mandatory: true, immediate: false };
    lease.unwritten.fetch_add(1, Ordering::Relaxed);
    let written =
        lease.channel().basic_publish(exchange.clone(), routing_key.clone(), options, body, properties.clone());
    let written = written.await;
    lease.unwritten.fetch_sub(1, Ordering::Relaxed);
    written.map_err(|error| (error, false))?.await.map_err(|error| (error, true))
}

/// Returns the outcomes of messages that were published on one channel.
///
/// The server returns a message before it confirms it. The client hands over a returned message
/// with whichever confirm comes next, so the message is identified by its id, not by that confirm.
fn judge(
    messages: Vec<(usize, Outgoing)>,
    confirmed: Vec<Option<Confirmed>>,
    whole: bool,
    failed: impl Fn(&ClientError, usize, bool) -> Outcome,
    unanswered: impl Fn() -> Outcome,
) -> Vec<(usize, Outcome)> {
    let returned = |confirmed: &Confirmed| match confirmed {
        Ok(Confirmation::Ack(Some(returned)) | Confirmation::Nack(Some(returned))) => {
            let id = returned.properties.message_id().as_ref().map(ToString::to_string).unwrap_or_default();
            Some((id, classify::returned(returned.reply_code, returned.reply_text.as_str())))
        }
        _ => None,
    };
    let returns: HashMap<String, Outcome> = confirmed.iter().flatten().filter_map(returned).collect();
    let outcome = |message: &Outgoing, confirmed: Option<Confirmed>| match (returns.get(&message.id), confirmed) {
        (Some(returned), _) => returned.clone(),
        // This confirm carried another message's return, so the return of this message may still
        // arrive.
        (None, Some(Ok(Confirmation::Ack(Some(_))))) if !whole => classify::no_confirm(),
        (None, Some(Ok(Confirmation::Ack(_)))) => Outcome::DELIVERED,
        (None, Some(Ok(Confirmation::Nack(_)))) => classify::rejected(),
        // Cannot happen on a channel in confirm mode.
        (None, Some(Ok(Confirmation::NotRequested))) => classify::no_confirm(),
        (None, Some(Err((error, written)))) => failed(&error, message.body.len(), written),
        (None, None) => unanswered(),
    };
    messages.into_iter().zip(confirmed).map(|((place, message), it)| (place, outcome(&message, it))).collect()
}

/// The outcome of a failed publish. Also gives up the connection, because the client learns of a
/// lost connection before its status shows it.
fn failed(connection: &Connection, error: &ClientError, body_bytes: usize, written: bool) -> Outcome {
    if !error.is_amqp_soft_error() {
        connection.give_up();
    }
    classify::unpublished(error, body_bytes, written)
}

/// The outcome if nothing was answered in time.
fn unanswered(connection: &Connection, otherwise: impl FnOnce() -> Outcome) -> Outcome {
    connection.blocked().map_or_else(otherwise, |reason| classify::blocked(&reason))
}

#[async_trait]
impl Sink for RabbitmqSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { batch_max: BATCH_MAX, concurrency: self.concurrency, prefix: false, system: Some("rabbitmq") }
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        if deliveries.is_empty() {
            return Vec::new();
        }
        let deadline: Deadline<'_> = self.clock.sleep(self.timeout).shared();
        let connection = tokio::select! {
            connection = self.link.connection() => connection.map_err(Down::outcome),
            () = deadline.clone() => Err(classify::lost("no connection in time").outcome()),
        };
        let connection = match connection {
            Ok(connection) => connection,
            Err(outcome) => return vec![outcome; deliveries.len()],
        };
        if let Some(reason) = connection.blocked() {
            return vec![classify::blocked(&reason); deliveries.len()];
        }
        let mut outcomes: Vec<Outcome> = vec![classify::no_confirm(); deliveries.len()];
        let mut exchanges: BTreeMap<ShortString, Vec<(usize, Outgoing)>> = BTreeMap::new();
        for (place, delivery) in deliveries.iter().enumerate() {
            match self.table.message(delivery, connection.frame_bytes_max()) {
                Ok(message) => exchanges.entry(message.exchange.clone()).or_default().push((place, message)),
                Err(dead) => outcomes[place] = dead,
            }
        }
        let publish = |(exchange, messages)| publish_all(&connection, exchange, messages, deadline.clone());
        let published = exchanges.into_iter().map(publish);
        let mut published = stream::iter(published).buffer_unordered(EXCHANGES_AT_ONCE);
        while let Some(results) = published.next().await {
            results.into_iter().for_each(|(place, outcome)| outcomes[place] = outcome);
        }
        drop(published);
        // The connection may be at fault, not the server. If the server only blocks us, it says so.
        let silent = outcomes.contains(&classify::no_confirm());
        if silent && !outcomes.iter().any(Outcome::is_delivered) {
            connection.give_up();
        }
        outcomes
    }

    async fn close(&self) {
        self.link.close().await;
    }
}

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;
    use lapin::message::{BasicReturnMessage, Delivery};

    use super::*;

    fn properties(id: &str) -> BasicProperties {
        BasicProperties::default().with_message_id(id.into())
    }

    /// The second message is returned, and the client hands it over with the confirm of the first.
    #[test]
    fn a_return_is_of_the_message_it_names() {
        let message = |id: &str| Outgoing {
            exchange: "x".into(),
            routing_key: "k".into(),
            properties: properties(id),
            body: Vec::new().into(),
            id: id.to_owned(),
        };
        let mut delivery = Delivery::mock(0, "x".into(), "k".into(), false, Vec::new());
        delivery.properties = properties("second");
        let returned = BasicReturnMessage { delivery, reply_code: 312, reply_text: "NO_ROUTE".into() };
        let messages = vec![(0, message("first")), (1, message("second"))];
        let confirmed = vec![Some(Ok(Confirmation::Ack(Some(returned)))), Some(Ok(Confirmation::Ack(None)))];
        let outcomes = judge(messages, confirmed, true, |_, _, _| unreachable!(), || unreachable!());
        let said: Vec<String> = outcomes.iter().map(|(_, outcome)| postbox_testkit::sending::said(outcome)).collect();
        assert_eq!(said, ["delivered", "ambiguous rabbitmq_unroutable"]);
    }
}
