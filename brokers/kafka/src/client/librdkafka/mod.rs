//! librdkafka: a client in C, with threads of its own. Its waiting calls run on threads that may
//! block.

mod consumer;
mod producer;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ::krafka::error::ErrorCode;
use ::rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use ::rdkafka::consumer::{BaseConsumer, ConsumerContext, Rebalance};
use ::rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use ::rdkafka::message::{DeliveryResult, Message as _};
use ::rdkafka::producer::{Producer as _, ProducerContext, ThreadedProducer};
use ::rdkafka::{ClientContext, TopicPartitionList};
use postbox_core::{Error, Result, lock};
use tokio::sync::oneshot;
use tracing::debug;

pub(crate) use self::consumer::Consumer;
pub(crate) use self::producer::Producer;
use super::{CONNECT_TIMEOUT, METADATA_MAX_AGE};
use crate::classify::{self, Cause, Failure};
use crate::connection::{AuthTable, Cluster};
use crate::group::Partition;

/// How often a first connection is checked for success and for failures.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// How long a first connection may fail before it is given up. A broker may have several addresses,
/// which are tried in turn.
const REFUSED_WAIT: Duration = Duration::from_secs(1);
/// The longest wait between two attempts to connect again.
const RECONNECT_WAIT_MAX: Duration = Duration::from_secs(1);
/// The shortest timeout of a connection that the library accepts.
const CONNECT_TIMEOUT_MIN: Duration = Duration::from_secs(1);

impl From<KafkaError> for Failure {
    fn from(error: KafkaError) -> Self {
        let Some(code) = error.rdkafka_error_code() else {
            let cause = match &error {
                // Without the refused value, which may be the password.
                KafkaError::ClientConfig(_, why, key, _) => {
                    return Self::new(Cause::Config, format!("{key}: {why}"));
                }
                KafkaError::ClientCreation(_) => Cause::Config,
                KafkaError::Canceled => Cause::Closed,
                _ => Cause::Client,
            };
            return Self::new(cause, error);
        };
        let cause = match code {
            Code::MessageTimedOut => Cause::NoAnswer,
            // A record that was given up for this reason may have been sent before.
            Code::BrokerTransportFailure | Code::OperationTimedOut
                if matches!(error, KafkaError::MessageProduction(_)) =>
            {
                Cause::NoAnswer
            }
            Code::AllBrokersDown | Code::BrokerTransportFailure | Code::Resolve | Code::OperationTimedOut => {
                Cause::Unreachable
            }
            Code::Authentication => Cause::Unauthorized,
            Code::UnknownTopic | Code::UnknownPartition => Cause::TopicMissing,
            Code::OutOfOrderSequenceNumber | Code::UnknownProducerId | Code::InvalidProducerEpoch => {
                Cause::SequenceLost
            }
            Code::Fenced | Code::ProducerFenced => Cause::SequenceLost,
            Code::PurgeQueue | Code::PurgeInflight | Code::BrokerDestroy => Cause::Closed,
            Code::AssignmentLost => Cause::Refused(ErrorCode::UnknownMemberId),
            Code::UnsupportedFeature => Cause::Unsupported,
            // Answers of brokers have the protocol's numbers, the library's own are negative.
            code => match i16::try_from(code as i32) {
                Ok(number) if number > 0 => Cause::Refused(ErrorCode::from(number)),
                _ => Cause::Client,
            },
        };
        let is_final = matches!(error, KafkaError::MessageConsumptionFatal(_))
            || matches!(code, Code::Fatal | Code::Fenced | Code::ProducerFenced | Code::ClusterAuthorizationFailed);
        Self { is_final, ..Self::new(cause, error) }
    }
}

fn failed(error: KafkaError) -> Error {
    classify::error("connect", &error.into())
}

fn closed() -> Failure {
    Failure::new(Cause::Closed, "the client is closed")
}

/// Runs what may block, on a thread of its own: the library may wait for a broker without a limit,
/// and a runtime that shuts down would wait for its own threads.
async fn blocking<T: Send + 'static>(
    run: impl FnOnce(&oneshot::Sender<Result<T, Failure>>) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let (done, result) = oneshot::channel();
    let call = move || {
        let got = run(&done);
        // An error means that the caller has given up.
        let _ = done.send(got);
    };
    let started = thread::Builder::new().name("librdkafka-call".to_owned()).spawn(call);
    started.map_err(|error| Failure::new(Cause::Client, error))?;
    // Without a result, the call has panicked. What it had taken is lost with it, so another client
    // has to begin where the last commit was.
    result.await.unwrap_or_else(|_| Err(Failure { is_final: true, ..closed() }))
}

type OnRebalance = dyn Fn(&Rebalance<'_>) + Send + Sync;

/// What the library reports on its own.
#[derive(Default)]
struct Context {
    /// The last failure of a connection.
    failure: Mutex<Option<Failure>>,
    /// A failure that the next poll reports.
    postponed: Mutex<Option<Failure>>,
    /// Is called before each rebalance takes effect, on a thread that may block: one that polls or
    /// closes.
    rebalance: Option<Box<OnRebalance>>,
    /// How often partitions were revoked.
    revocations: AtomicU64,
    /// Held during a commit.
    committing: Mutex<()>,
}

impl Context {
    /// Returns the failure with the reason that the library has reported apart from it.
    fn explained(&self, error: KafkaError) -> Failure {
        let failure = Failure::from(error);
        match lock(&self.failure).take() {
            Some(reported) if reported.cause == failure.cause => Failure { is_final: failure.is_final, ..reported },
            _ => failure,
        }
    }
}

impl ClientContext for Context {
    fn log(&self, _: RDKafkaLogLevel, facility: &str, text: &str) {
        debug!(facility, text, "librdkafka");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        debug!(%error, reason, "librdkafka");
        let text = format!("{error}: {reason}");
        let failure = Failure::new(Failure::from(error).cause, text);
        let mut last = lock(&self.failure);
        // A broker that refuses us counts as unreachable, too, but the refusal is the reason.
        if !failure.is_unreachable() || last.as_ref().is_none_or(Failure::is_unreachable) {
            *last = Some(failure);
        }
    }
}

impl ProducerContext for Context {
    type DeliveryOpaque = Box<oneshot::Sender<Result<(i32, i64), KafkaError>>>;

    fn delivery(&self, result: &DeliveryResult<'_>, waiting: Self::DeliveryOpaque) {
        // An error means that its call is over.
        let at = result.as_ref().map(|stored| (stored.partition(), stored.offset()));
        let _ = waiting.send(at.map_err(|(error, _)| error.clone()));
    }
}

impl ConsumerContext for Context {
    fn pre_rebalance(&self, _: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        if let Some(apply) = &self.rebalance {
            apply(rebalance);
        }
        if let Rebalance::Revoke(_) = rebalance {
            self.revocations.fetch_add(1, Ordering::SeqCst);
            // A commit that its caller has given up may still go on. It has to end before the next
            // owner of a partition starts.
            drop(lock(&self.committing));
        }
    }
}

fn partitions(list: &TopicPartitionList) -> Vec<Partition> {
    list.elements().iter().map(|it| (it.topic().into(), it.partition())).collect()
}

/// A client of the library. It is dropped on a thread of its own, because that waits for brokers.
struct Native<T: Send + Sync + 'static>(Option<Arc<T>>);

impl<T: Send + Sync + 'static> Native<T> {
    fn new(native: T) -> Self {
        Self(Some(Arc::new(native)))
    }

    fn get(&self) -> Result<&Arc<T>, Failure> {
        self.0.as_ref().ok_or_else(closed)
    }
}

impl<T: Send + Sync + 'static> Drop for Native<T> {
    fn drop(&mut self) {
        let native = self.0.take();
        // If no thread can be started, it is dropped here.
        let _ = thread::Builder::new().name("librdkafka-drop".to_owned()).spawn(move || drop(native));
    }
}

fn millis(duration: Duration) -> String {
    duration.as_millis().to_string()
}

fn config(cluster: &Cluster, request_timeout: Duration) -> ClientConfig {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", &cluster.brokers)
        .set("client.id", "postbox")
        .set("socket.timeout.ms", millis(request_timeout))
        .set("socket.connection.setup.timeout.ms", millis(request_timeout.clamp(CONNECT_TIMEOUT_MIN, CONNECT_TIMEOUT)))
        .set("reconnect.backoff.max.ms", millis(RECONNECT_WAIT_MAX))
        .set("topic.metadata.refresh.interval.ms", millis(METADATA_MAX_AGE))
        .set("allow.auto.create.topics", "false")
        .set("enable.metrics.push", "false")
        .set_log_level(RDKafkaLogLevel::Notice);
    // The configuration refuses SCRAM and TLS.
    if let Some(AuthTable { user, password, .. }) = &cluster.auth {
        config
            .set("security.protocol", "sasl_plaintext")
            .set("sasl.mechanisms", "PLAIN")
            .set("sasl.username", user)
            .set("sasl.password", password.expose());
    }
    config
}

type Threaded = ThreadedProducer<Context>;

/// Waits until a broker has answered, or fails if none can be reached.
fn reach(producer: &Threaded, within: Duration) -> Result<(), Failure> {
    let begun = Instant::now();
    loop {
        if producer.client().fetch_cluster_id(CHECK_INTERVAL).is_some() {
            return Ok(());
        }
        let failure = lock(&producer.context().failure).clone();
        match failure {
            Some(failure) if !failure.is_unreachable() || begun.elapsed() >= REFUSED_WAIT => return Err(failure),
            None if begun.elapsed() >= within => {
                return Err(Failure::new(Cause::Unreachable, "no broker answered in time"));
            }
            _ => {}
        }
    }
}

/// Checks whether these topics exist; without topics, whether any broker answers.
pub(super) async fn look(
    cluster: &Cluster,
    topics: &[String],
    within: Duration,
    operation: &'static str,
) -> Result<()> {
    let (config, topics) = (config(cluster, within), topics.to_vec());
    let looked = blocking(move |_| {
        // Of all clients, only a producer has a thread that hears of failed connections.
        let producer: Threaded = config.create_with_context(Context::default())?;
        reach(&producer, within)?;
        for topic in topics {
            let found = producer.client().fetch_metadata(Some(&topic), within)?;
            let error = found.topics().first().and_then(|it| it.error());
            match error.map(Code::from) {
                None => {}
                Some(Code::UnknownTopicOrPartition) => return Ok(Some(topic)),
                Some(code) => return Err(KafkaError::MetadataFetch(code).into()),
            }
        }
        Ok(None)
    });
    match looked.await.map_err(|failure| classify::error("connect", &failure))? {
        None => Ok(()),
        Some(topic) => Err(classify::missing(operation, &topic)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_has_one_cause() {
        for (code, cause) in [
            (Code::MessageTimedOut, Cause::NoAnswer),
            (Code::OperationTimedOut, Cause::NoAnswer),
            (Code::AllBrokersDown, Cause::Unreachable),
            (Code::Authentication, Cause::Unauthorized),
            (Code::UnknownTopic, Cause::TopicMissing),
            (Code::UnknownTopicOrPartition, Cause::Refused(ErrorCode::UnknownTopicOrPartition)),
            (Code::TopicAuthorizationFailed, Cause::Refused(ErrorCode::TopicAuthorizationFailed)),
            (Code::MessageSizeTooLarge, Cause::Refused(ErrorCode::MessageTooLarge)),
            (Code::UnknownMemberId, Cause::Refused(ErrorCode::UnknownMemberId)),
            (Code::OutOfOrderSequenceNumber, Cause::SequenceLost),
            (Code::PurgeInflight, Cause::Closed),
            (Code::InvalidArgument, Cause::Client),
        ] {
            let failure = Failure::from(KafkaError::MessageProduction(code));
            assert_eq!((failure.cause, failure.is_final), (cause, false), "{code:?}");
        }
        assert!(Failure::from(KafkaError::MetadataFetch(Code::OperationTimedOut)).is_unreachable());
        assert!(Failure::from(KafkaError::MessageProduction(Code::Fatal)).is_final);
        assert!(Failure::from(KafkaError::MessageConsumptionFatal(Code::Fenced)).is_final);
        let lost = Failure::from(KafkaError::ConsumerCommit(Code::IllegalGeneration));
        assert!(lost.is_membership_lost() && !lost.is_unreachable());
    }
}
