//! The sink: a call is one batch of ten, or several if its messages are large.

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_sns::types::{MessageAttributeValue as TopicValue, PublishBatchRequestEntry};
use aws_sdk_sqs::types::{MessageAttributeValue as QueueValue, SendMessageBatchRequestEntry};
use futures::future::join_all;
use postbox_core::{Capabilities, Delivery, Outcome, Sink};
use tokio::time::{Instant, timeout_at};

use crate::classify::{Concerns, Refusal};
use crate::message::{Outgoing, STRING, Writing};

/// The most messages of a request.
pub(crate) const BATCH_MAX: usize = 10;

/// Where messages are sent: always the same place, whatever an event contains.
#[derive(Debug, Clone)]
pub(crate) enum Target {
    Queue(aws_sdk_sqs::Client, String),
    Topic(aws_sdk_sns::Client, String),
}

/// The outcome of each message of a request, by its number in the request. Missing ones have no
/// answer.
type Answers = HashMap<usize, Outcome>;

/// Sends events to a queue of SQS, or publishes them to a topic of SNS.
///
/// The events of a call have different keys. Each message of a request is accepted or refused on
/// its own, so a later event of a key could be accepted although an earlier one was refused.
///
/// Cancel-safety: the events of a dropped call may have been accepted.
#[derive(Debug)]
pub struct SqsSink {
    target: Target,
    writing: Writing,
    timeout: Duration,
    concurrency: usize,
}

impl SqsSink {
    pub(crate) fn new(target: Target, writing: Writing, timeout: Duration, concurrency: usize) -> Self {
        Self { target, writing, timeout, concurrency }
    }

    /// Sends messages as one request. If the request is refused as a whole because of one message's
    /// contents, nothing was accepted. Then each message is sent alone, so that only the faulty one
    /// is refused.
    async fn send(&self, batch: &[(usize, Outgoing)], deadline: Instant) -> Vec<(usize, Outcome)> {
        match self.send_once(batch, deadline).await {
            Err(refusal) if refusal.is_of_one() && batch.len() > 1 => {
                let alone = batch.chunks(1).map(|one| async move {
                    self.send_once(one, deadline).await.unwrap_or_else(|refusal| refused(one, &refusal))
                });
                join_all(alone).await.concat()
            }
            sent => sent.unwrap_or_else(|refusal| refused(batch, &refusal)),
        }
    }

    async fn send_once(
        &self,
        batch: &[(usize, Outgoing)],
        deadline: Instant,
    ) -> Result<Vec<(usize, Outcome)>, Refusal> {
        let messages: Vec<&Outgoing> = batch.iter().map(|(_, message)| message).collect();
        let answers = timeout_at(deadline, self.target.request(&messages)).await;
        let mut answers = answers.map_err(|_| Refusal::timed_out())??;
        let left_out = || Refusal::new(Concerns::Unknown, "aws_answer_unknown", "the answer leaves it out").outcome();
        let outcome = |(n, (place, _)): (usize, &(usize, _))| (*place, answers.remove(&n).unwrap_or_else(left_out));
        Ok(batch.iter().enumerate().map(outcome).collect())
    }
}

/// The same outcome for all of them.
fn refused(batch: &[(usize, Outgoing)], refusal: &Refusal) -> Vec<(usize, Outcome)> {
    batch.iter().map(|(place, _)| (*place, refusal.clone().outcome())).collect()
}

/// Groups messages into requests: at most ten each, and together no larger than one message may be.
fn batches(messages: Vec<(usize, Outgoing)>, bytes_max: usize) -> Vec<Vec<(usize, Outgoing)>> {
    let (mut batches, mut bytes): (Vec<Vec<(usize, Outgoing)>>, usize) = (Vec::new(), 0);
    for message in messages {
        bytes += message.1.bytes;
        match batches.last_mut().filter(|batch| batch.len() < BATCH_MAX && bytes <= bytes_max) {
            Some(batch) => batch.push(message),
            None => {
                bytes = message.1.bytes;
                batches.push(vec![message]);
            }
        }
    }
    batches
}

/// Sends messages as one request and returns the answers. A macro, because the two services have
/// the same request in different types.
macro_rules! answers {
    ($messages:ident, $request:expr, $entries:ident, $entry:ident, $body:ident, $value:ident) => {{
        let mut request = $request;
        for (n, message) in $messages.iter().enumerate() {
            let mut entry = $entry::builder().id(n.to_string()).$body(&message.body);
            for (name, text) in &message.attributes {
                let value = $value::builder().data_type(STRING).string_value(text).build();
                entry = entry.message_attributes(name, value.map_err(Refusal::incomplete)?);
            }
            if let Some(fifo) = &message.fifo {
                entry = entry.message_group_id(&fifo.group).message_deduplication_id(&fifo.id);
            }
            request = request.$entries(entry.build().map_err(Refusal::incomplete)?);
        }
        let answer = request.send().await.map_err(|error| Refusal::of(&error))?;
        let taken = answer.successful().iter().filter_map(|it| {
            let position = Option::<&str>::from(it.message_id()).unwrap_or_default();
            Some((Option::<&str>::from(it.id())?, Outcome::delivered_at(false, position)))
        });
        let refused = answer.failed().iter().map(|it| (it.id(), Refusal::answered(it.code(), it.message()).outcome()));
        Ok(taken.chain(refused).filter_map(|(id, answer)| Some((id.parse().ok()?, answer))).collect())
    }};
}

impl Target {
    async fn request(&self, messages: &[&Outgoing]) -> Result<Answers, Refusal> {
        match self {
            Self::Queue(client, url) => {
                let request = client.send_message_batch().queue_url(url);
                answers!(messages, request, entries, SendMessageBatchRequestEntry, message_body, QueueValue)
            }
            Self::Topic(client, arn) => {
                let request = client.publish_batch().topic_arn(arn);
                answers!(
                    messages,
                    request,
                    publish_batch_request_entries,
                    PublishBatchRequestEntry,
                    message,
                    TopicValue
                )
            }
        }
    }
}

#[async_trait]
impl Sink for SqsSink {
    fn capabilities(&self) -> Capabilities {
        let system = match &self.target {
            Target::Queue(..) => "aws_sqs",
            Target::Topic(..) => "aws.sns",
        };
        Capabilities { batch_max: BATCH_MAX, concurrency: self.concurrency, prefix: false, system: Some(system) }
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        let deadline = Instant::now() + self.timeout;
        let mut messages = Vec::with_capacity(deliveries.len());
        let mut outcomes: Vec<Option<Outcome>> = vec![None; deliveries.len()];
        for (place, delivery) in deliveries.iter().enumerate() {
            match self.writing.message(delivery) {
                Ok(message) => messages.push((place, message)),
                Err(refused) => outcomes[place] = Some(refused),
            }
        }
        let batches = batches(messages, self.writing.bytes_max);
        let sent = join_all(batches.iter().map(|batch| self.send(batch, deadline))).await;
        for (place, outcome) in sent.concat() {
            outcomes[place] = Some(outcome);
        }
        outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(|| Refusal::timed_out().outcome())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_ten_messages_and_the_size_of_one_at_most() {
        let message = |bytes| Outgoing { body: String::new(), attributes: Vec::new(), fifo: None, bytes };
        let sizes = |bytes: &[usize]| {
            let messages = bytes.iter().map(|bytes| message(*bytes)).enumerate().collect();
            batches(messages, 100).iter().map(Vec::len).collect::<Vec<_>>()
        };
        assert_eq!(sizes(&[]), Vec::<usize>::new());
        assert_eq!(sizes(&[1; 25]), [10, 10, 5]);
        assert_eq!(sizes(&[60, 40, 1, 99, 100, 100]), [2, 2, 1, 1]);
    }
}
