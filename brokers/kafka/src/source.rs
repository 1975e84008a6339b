//! The source: a member of a consumer group.
//!
//! A separate task polls, whether or not a caller waits for messages: a member that does not poll
//! loses its partitions, and a store may be down for longer than that.

mod held;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use krafka::ConsumerRecord;
use postbox_core::{AckToken, Clock, Error, ErrorKind, Result, Source, SourceCapabilities, SourceMessage, lock};
use tokio::sync::{Mutex as AsyncMutex, Notify};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::held::Held;
use crate::classify::{self, Failure};
use crate::client::Consumer;
use crate::connection::Cluster;
use crate::group::{Membership, OPERATION, OffsetReset, Partition, Rebalances};
use crate::message::raw_message;

/// The longest wait for a commit of offsets.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a poll waits for messages. A stop or a rebalance is noticed at once.
const POLL: Duration = Duration::from_secs(1);
/// While there is no room for messages, the member polls at this interval with all partitions
/// paused, so that it stays in the group.
const PAUSED_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How long such a poll waits.
const PAUSED_POLL_WAIT: Duration = Duration::from_millis(20);
/// The wait after a failed poll. It is short, because the client and the receiver have waits of
/// their own.
const RETRY_WAIT: Duration = Duration::from_millis(250);
/// The longest time to leave the group. After that, the group removes the member when its session
/// times out.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(3);
/// The code of a topic that was deleted and created again.
const RECREATED: &str = "kafka_topic_recreated";

/// Reads topics as a member of a consumer group.
///
/// The group's offset in a partition advances once everything before it is settled. So after a lost
/// membership, a rebalance or a crash, unsettled messages are delivered again, to us or to another
/// member.
pub struct KafkaSource {
    member: Arc<Member>,
    polling: AtomicBool,
}

struct Member {
    cluster: Cluster,
    membership: Membership,
    clock: Arc<dyn Clock>,
    state: Arc<State>,
    /// Signals that a caller waits for messages.
    wanted: Notify,
    closed: CancellationToken,
    /// Cancelled when polling has ended and the group was left.
    left: CancellationToken,
}

#[derive(Default)]
struct State {
    held: Mutex<Held>,
    consumer: Mutex<Option<Consumer>>,
    failure: Mutex<Option<Error>>,
    /// Held while offsets are committed, and while revoked partitions are forgotten. A commit after
    /// that could set back the offset that the partition's next owner has committed.
    committing: AsyncMutex<()>,
    /// Signals that there is a message to hand out, or a failure to report.
    changed: Notify,
    /// Signals that there is room for more messages.
    room: Notify,
}

impl KafkaSource {
    /// Returns a source that connects when it is asked for the first message.
    pub(crate) fn new(cluster: Cluster, membership: Membership, clock: Arc<dyn Clock>) -> Self {
        let member = Member {
            cluster,
            membership,
            clock,
            state: Arc::default(),
            wanted: Notify::new(),
            closed: CancellationToken::new(),
            left: CancellationToken::new(),
        };
        Self { member: Arc::new(member), polling: AtomicBool::new(false) }
    }
}

impl Drop for KafkaSource {
    fn drop(&mut self) {
        self.member.closed.cancel();
    }
}

impl Member {
    /// Polls until the source is closed. Joins the group again when its client cannot continue.
    async fn run(self: Arc<Self>) {
        while !self.closed.is_cancelled() {
            let joined = tokio::select! {
                joined = Consumer::join(&self.cluster, &self.membership, &self.state) => joined,
                () = self.closed.cancelled() => break,
            };
            match joined {
                Ok(consumer) => {
                    *lock(&self.state.consumer) = Some(consumer.clone());
                    self.poll(&consumer).await;
                    *lock(&self.state.consumer) = None;
                    consumer.close(LEAVE_TIMEOUT).await;
                    // A commit that is on its way ends before the next membership begins.
                    let _committing = self.state.committing.lock().await;
                    lock(&self.state.held).forget_all();
                }
                Err(failure) => {
                    self.fail(failure);
                    tokio::select! {
                        () = self.closed.cancelled() => {}
                        () = self.wanted.notified() => {}
                    }
                }
            }
        }
        self.left.cancel();
    }

    /// Returns why the member has to join again: one of its topics is another by now, or gone. The
    /// client does not notice: it goes on asking for the former topic, or goes on in the new one
    /// where it stood in the former. Asks the cluster only if the client's metadata is old. The
    /// error is that of asking.
    async fn recreated(&self, consumer: &Consumer) -> Result<Option<Error>> {
        match consumer.recreated(&self.membership.topics).await {
            Ok(topic) => Ok(topic.map(|topic| {
                let text = format!("the topic {topic} was deleted and created again; it is read anew");
                Error::new(ErrorKind::Unavailable, OPERATION, RECREATED, text)
            })),
            Err(error) if error.code() == classify::TOPIC_MISSING => Ok(Some(error)),
            Err(error) => Err(error),
        }
    }

    /// Returns where the group stands in each partition, if it is to be committed before any
    /// message was received: the next member would otherwise start at the end that the partition
    /// has then.
    async fn positions(&self, consumer: &Consumer) -> Vec<(Partition, i64)> {
        match self.membership.offset_reset {
            OffsetReset::Earliest => Vec::new(),
            OffsetReset::Latest => consumer.positions().await,
        }
    }

    /// Moves our new partitions to their beginning where the group's offset is of a former topic.
    /// Drops what was fetched from there. Returns where they begin.
    async fn rewind(
        &self,
        consumer: &Consumer,
        records: &mut Vec<ConsumerRecord>,
    ) -> Result<Vec<(Partition, i64)>, Failure> {
        let assigned = lock(&self.state.held).take_assigned();
        if assigned.is_empty() {
            return Ok(Vec::new());
        }
        // The client does not fetch these records again, so a member without an answer joins again.
        let rewound = consumer.rewind(&assigned).await.map_err(|failure| Failure { is_final: true, ..failure })?;
        for (topic, partitions) in by_topic(rewound.iter().map(|(partition, _)| partition)) {
            warn!(code = RECREATED, topic, ?partitions, "partitions of a topic created again");
        }
        records.retain(|it| !rewound.iter().any(|((topic, number), _)| it.topic == *topic && it.partition == *number));
        Ok(rewound.into_iter().filter_map(|(partition, begin)| Some((partition, begin?))).collect())
    }

    /// Polls until the client cannot continue, a topic is another, or the source is closed.
    async fn poll(&self, consumer: &Consumer) {
        loop {
            let is_full = lock(&self.state.held).waiting() >= self.membership.in_flight_max;
            let polled = async {
                let mut records = match is_full {
                    false => consumer.poll(POLL).await?,
                    true => self.poll_paused(consumer).await?,
                };
                let recreated = self.recreated(consumer).await;
                let mut positions = Vec::new();
                // Otherwise we join again, with the topic's new id.
                if !matches!(recreated, Ok(Some(_))) {
                    positions = self.rewind(consumer, &mut records).await?;
                    positions.extend(self.positions(consumer).await);
                }
                Ok::<_, Failure>((records, recreated, positions))
            };
            let polled = tokio::select! {
                biased;
                () = self.closed.cancelled() => break,
                polled = polled => polled,
            };
            match polled {
                Ok((_, Ok(Some(recreated)), _)) => return self.fail(recreated),
                Ok((records, recreated, positions)) => {
                    self.keep(records);
                    lock(&self.state.held).begin(positions);
                    // The client's polls only return nothing while no broker answers.
                    if let Err(failure) = recreated {
                        self.fail(failure);
                        tokio::time::sleep(RETRY_WAIT).await;
                    }
                }
                Err(failure) => {
                    self.fail(classify::error(OPERATION, &failure));
                    if failure.is_final {
                        return;
                    }
                    tokio::time::sleep(RETRY_WAIT).await;
                }
            }
            if let Err(failure) = self.commit().await {
                self.fail(failure);
            }
        }
        // Commits what was settled since the last commit.
        let _ = self.commit().await;
    }

    /// Waits for room. If that takes long, polls once with all partitions paused, only to stay in
    /// the group.
    async fn poll_paused(&self, consumer: &Consumer) -> Result<Vec<ConsumerRecord>, Failure> {
        match timeout(PAUSED_POLL_INTERVAL, self.state.room.notified()).await {
            Ok(()) => Ok(Vec::new()),
            Err(_) => consumer.poll_paused(PAUSED_POLL_WAIT).await,
        }
    }

    fn keep(&self, records: Vec<ConsumerRecord>) {
        if records.is_empty() {
            return;
        }
        let now = self.clock.monotonic();
        let Membership { id_header, content_type, .. } = &self.membership;
        let mut held = lock(&self.state.held);
        for record in records {
            let (partition, offset) = ((Arc::clone(&record.topic), record.partition), record.offset);
            held.keep(&partition, offset, now, raw_message(record, id_header, content_type));
        }
        drop(held);
        self.state.changed.notify_waiters();
    }

    fn fail(&self, failure: Error) {
        *lock(&self.state.failure) = Some(failure);
        self.state.changed.notify_waiters();
    }

    /// Commits the offsets that have changed since the last commit.
    async fn commit(&self) -> Result<()> {
        let _committing = self.state.committing.lock().await;
        let offsets = lock(&self.state.held).uncommitted();
        let consumer = lock(&self.state.consumer).clone();
        let (false, Some(consumer)) = (offsets.is_empty(), consumer) else { return Ok(()) };
        match timeout(COMMIT_TIMEOUT, consumer.commit(&offsets)).await {
            Ok(Ok(())) => lock(&self.state.held).committed(&offsets),
            // The next poll shows which partitions are still ours. Messages of the others that are
            // not committed are delivered again.
            Ok(Err(failure)) if failure.is_membership_lost() => {}
            Ok(Err(failure)) => return Err(classify::error("settle", &failure)),
            Err(_) => {
                let text = "the group did not confirm what was settled; it may come again";
                return Err(Error::new(ErrorKind::Unavailable, "settle", "kafka_commit_timeout", text));
            }
        }
        Ok(())
    }
}

fn by_topic<'a>(partitions: impl IntoIterator<Item = &'a Partition>) -> BTreeMap<&'a str, Vec<i32>> {
    let mut topics: BTreeMap<&str, Vec<i32>> = BTreeMap::new();
    for (topic, partition) in partitions {
        topics.entry(topic).or_default().push(*partition);
    }
    topics
}

impl Rebalances for State {
    fn assigned(&self, partitions: &[Partition]) {
        for (topic, partitions) in by_topic(partitions) {
            info!(topic, ?partitions, "partitions assigned");
        }
        lock(&self.held).assigned(partitions);
    }

    async fn revoked(&self, partitions: &[Partition]) {
        let _committing = self.committing.lock().await;
        let mut held = lock(&self.held);
        partitions.iter().for_each(|partition| held.forget(partition));
        drop(held);
        self.room.notify_one();
    }
}

#[async_trait]
impl Source for KafkaSource {
    /// Messages are in order within a partition, and so within a key.
    fn capabilities(&self) -> SourceCapabilities {
        let in_flight_max = self.member.membership.in_flight_max;
        SourceCapabilities { in_flight_max, ordered: true, nak_delay: true, dead_letters: false }
    }

    async fn next(&self, max: usize) -> Result<Vec<SourceMessage>> {
        let (member, state) = (&self.member, &self.member.state);
        if !self.polling.swap(true, Ordering::Relaxed) {
            tokio::spawn(Arc::clone(member).run());
        }
        loop {
            let mut changed = std::pin::pin!(state.changed.notified());
            // From here on no change is missed.
            changed.as_mut().enable();
            if member.closed.is_cancelled() {
                return Ok(Vec::new());
            }
            let now = member.clock.monotonic();
            let (given, due) = {
                let mut held = lock(&state.held);
                (held.give(max, member.membership.in_flight_max, now), held.due())
            };
            if !given.is_empty() {
                state.room.notify_one();
                return Ok(given);
            }
            if let Some(failure) = lock(&state.failure).take() {
                return Err(failure);
            }
            member.wanted.notify_one();
            // If a message is due but not handed out, too many are in flight. `changed` signals
            // when one of those is settled.
            let wait = due.map(|due| due.saturating_sub(now)).filter(|wait| !wait.is_zero());
            tokio::select! {
                biased;
                () = changed => {}
                () = member.clock.sleep(wait.unwrap_or_default()), if wait.is_some() => {}
            }
        }
    }

    async fn ack(&self, tokens: &[AckToken]) -> Result<()> {
        let state = &self.member.state;
        {
            let mut held = lock(&state.held);
            tokens.iter().for_each(|token| held.settle(token));
        }
        state.changed.notify_waiters();
        self.member.commit().await
    }

    /// Keeps the message here until its time. If we stop before, it is delivered at the next start.
    async fn nak(&self, tokens: &[AckToken], delay: Duration) -> Result<()> {
        let state = &self.member.state;
        let due = self.member.clock.monotonic() + delay;
        {
            let mut held = lock(&state.held);
            tokens.iter().for_each(|token| held.put_back(token, due));
        }
        state.changed.notify_waiters();
        Ok(())
    }

    /// Kafka has no dead letters: the message stays in its topic, and the group's offset passes it.
    async fn reject(&self, tokens: &[AckToken]) -> Result<()> {
        self.ack(tokens).await
    }

    async fn close(&self) {
        self.member.closed.cancel();
        self.member.state.changed.notify_waiters();
        if self.polling.load(Ordering::Relaxed) {
            self.member.left.cancelled().await;
        }
    }
}
