//! The keys of `type = "sqs"`, for sinks and for sources, and of `type = "sns"`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_sqs::types::QueueAttributeName;
use postbox_config::{
    Secret, Section, SinkConfig, SinkContext, SourceConfig, SourceContext, duration, envelope, event_source, from_core,
    integer, nested, path, plain, secret, size, table, text,
};
use postbox_core::envelope::Binding;
use postbox_core::{Envelope, Inbound, LogName, RawMessage, Result, Sink, Source, SourceName};
use tokio::time::timeout;
use tracing::warn;

use crate::classify::Refusal;
use crate::connection::{QueueUrl, TopicArn, check_url, load};
use crate::message::Writing;
use crate::sink::{SqsSink, Target};
use crate::source::{DELAY_SECONDS_MAX, SqsSource};

/// How many calls run at once, unless the subscription sets it: AWS answers one in 10 to 20 ms.
const CONCURRENCY: usize = 16;
/// The largest message, and the largest request, in bytes, that AWS accepts.
const MESSAGE_BYTES_MAX: usize = 1024 * 1024;
/// The most messages handed out at once.
const IN_FLIGHT_MAX: usize = 10_000;
/// How long a FIFO queue or topic remembers deduplication ids.
const DEDUPE_WINDOW: Duration = Duration::from_secs(300);
/// The longest wait of a connection check.
const LOOK_TIMEOUT: Duration = Duration::from_secs(10);

table! {
    /// Region, endpoint and credentials.
    #[check(check)]
    pub struct AwsTable {
        /// The region.
        region: Option<String> = text(plain), unset("from the URL, or the environment", r#""eu-west-1""#);
        /// Another endpoint, such as an emulator or a gateway.
        endpoint: Option<String> = text(endpoint), unset("from the URL, or AWS", r#""http://127.0.0.1:4566""#);
        /// The id of an access key, together with `secret_access_key`.
        access_key_id: Option<String> = text(plain), unset("AWS's default credential chain", r#""AKIA…""#);
        /// The access key.
        secret_access_key: Option<Secret> = secret(), unset("AWS's default credential chain", r#""env:SQS_SECRET_KEY""#);
        /// The session token of a temporary access key.
        session_token: Option<Secret> = secret(), unset("none", r#""env:SQS_SESSION_TOKEN""#);
        /// CA certificates (PEM) to trust instead of the system's.
        ca_file: Option<PathBuf> = path(), unset("the system's", r#""ca.pem""#);
    }
}

table! {
    /// One message per event, to a queue of Amazon SQS.
    pub struct SqsSinkTable {
        /// The queue. One whose name ends in `.fifo` keeps the events of a key in order.
        queue_url: QueueUrl = text(str::parse::<QueueUrl>), required(r#""https://sqs.eu-west-1.amazonaws.com/123456789012/orders""#);
        /// Region, endpoint and credentials.
        aws: Option<AwsTable> = nested::<AwsTable>(), unset("from the environment", r#"{ region = "eu-west-1" }"#);
        /// What a message holds.
        ///
        /// See [envelopes](envelopes.md).
        envelope: Envelope = envelope(Envelope::ALL), default("raw");
        /// The CloudEvents `source` of events that name none.
        source: String = event_source(), default("postbox");
        /// Events with a larger message, attributes included, are dead. It also limits a whole
        /// request.
        message_max: usize = size(1024..=MESSAGE_BYTES_MAX), default("1MiB");
    }
}

table! {
    /// One message per event, to a topic of Amazon SNS.
    pub struct SnsSinkTable {
        /// The topic. One whose name ends in `.fifo` keeps the events of a key in order.
        topic_arn: TopicArn = text(str::parse::<TopicArn>), required(r#""arn:aws:sns:eu-west-1:123456789012:orders""#);
        /// Region, endpoint and credentials.
        aws: Option<AwsTable> = nested::<AwsTable>(), unset("from the environment", r#"{ region = "eu-west-1" }"#);
        /// What a message holds.
        ///
        /// See [envelopes](envelopes.md).
        envelope: Envelope = envelope(Envelope::ALL), default("raw");
        /// The CloudEvents `source` of events that name none.
        source: String = event_source(), default("postbox");
        /// Events with a larger message, attributes included, are dead. It also limits a whole
        /// request.
        message_max: usize = size(1024..=MESSAGE_BYTES_MAX), default("1MiB");
    }
}

table! {
    /// Messages of a queue of Amazon SQS, sent directly or through SNS.
    pub struct SqsSourceTable {
        /// The queue.
        queue_url: QueueUrl = text(str::parse::<QueueUrl>), required(r#""https://sqs.eu-west-1.amazonaws.com/123456789012/orders""#);
        /// Region, endpoint and credentials.
        aws: Option<AwsTable> = nested::<AwsTable>(), unset("from the environment", r#"{ region = "eu-west-1" }"#);
        /// The topic of messages that have none.
        topic: Option<String> = text(plain), unset("the name of their SNS topic, or of the queue", r#""orders""#);
        /// The content type of messages that have none.
        content_type: String = text(plain), default("application/json");
        /// How long a received message stays hidden from other consumers if this process ends.
        ///
        /// While the store is slow, it is extended after every third of this time.
        visibility: Duration = duration(Duration::from_secs(1)).check(is_visibility), default("30s");
        /// Most messages that are received and not yet stored.
        in_flight: usize = integer(1..=IN_FLIGHT_MAX), default(256);
        /// The log where messages are stored.
        log: LogName = text(from_core::<LogName>), default("inbox");
    }
}

fn endpoint(text: &str) -> Result<String, String> {
    check_url(text).map(|_| text.to_owned()).ok_or_else(|| "is not a valid address; write http://HOST:PORT".to_owned())
}

fn is_visibility(time: &Duration) -> Result<(), String> {
    match time.as_secs() <= DELAY_SECONDS_MAX && time.subsec_nanos() == 0 {
        true => Ok(()),
        false => Err("is not possible in SQS; write whole seconds, at most 12h".to_owned()),
    }
}

/// Warns if an event may be repeated after its destination has forgotten the first one.
fn check_window(context: &SinkContext, fifo: bool, name: &str) {
    let repeats_within = context.repeats_within;
    if fifo && repeats_within > DEDUPE_WINDOW {
        warn!(
            code = "dedupe_window_short", name, window = ?DEDUPE_WINDOW, ?repeats_within,
            "queue forgets ids too soon: an event whose answer was lost may be stored twice; shorten the longest wait before a retry"
        );
    }
}

fn build(target: Target, writing: Writing, context: &SinkContext) -> Arc<dyn Sink> {
    let timeout = context.answer_timeout(Duration::MAX);
    Arc::new(SqsSink::new(target, writing, timeout, context.concurrency.unwrap_or(CONCURRENCY)))
}

impl AwsTable {
    fn check(&self, section: &Section<'_>) {
        section.both("access_key_id", "secret_access_key");
        if section.has("session_token") && !section.has("access_key_id") && !section.has("secret_access_key") {
            let text = "has a session_token but no access_key_id and secret_access_key; set them, or leave it out";
            section.fault("session_token", format!("{} {text}", section.path));
        }
    }
}

async fn queue_client(queue: &QueueUrl, aws: &Option<AwsTable>) -> Result<aws_sdk_sqs::Client> {
    let config = load(aws.clone().unwrap_or_default(), queue.region.as_deref(), Some(&queue.origin)).await?;
    Ok(aws_sdk_sqs::Client::new(&config))
}

async fn topic_client(topic: &TopicArn, aws: &Option<AwsTable>) -> Result<aws_sdk_sns::Client> {
    let config = load(aws.clone().unwrap_or_default(), Some(&topic.region), None).await?;
    Ok(aws_sdk_sns::Client::new(&config))
}

/// Describes to an operator whether a queue exists.
async fn look_at_queue(queue: &QueueUrl, aws: &Option<AwsTable>) -> Result<String> {
    let client = queue_client(queue, aws).await?;
    let request = client.get_queue_attributes().queue_url(&queue.url);
    let request = request.attribute_names(QueueAttributeName::MaximumMessageSize).send();
    let server = aws.as_ref().and_then(|aws| aws.endpoint.as_deref()).unwrap_or(&queue.origin);
    let answer = timeout(LOOK_TIMEOUT, request).await.map_err(|_| Refusal::timed_out().at(server).error("connect"))?;
    let answer = answer.map_err(|error| Refusal::of(&error).at(server).error("connect"))?;
    let size = answer.attributes.and_then(|mut all| all.remove(&QueueAttributeName::MaximumMessageSize));
    let size = size.map(|bytes| format!(" and takes messages of up to {bytes} bytes")).unwrap_or_default();
    Ok(format!("answers; the queue {} exists{size}", queue.name))
}

#[async_trait]
impl SinkConfig for SqsSinkTable {
    async fn build(&self, context: &SinkContext) -> Result<Arc<dyn Sink>> {
        let fifo = self.queue_url.is_fifo();
        check_window(context, fifo, &self.queue_url.name);
        let (envelope, source, bytes_max) = (self.envelope, self.source.clone(), self.message_max);
        let target = Target::Queue(queue_client(&self.queue_url, &self.aws).await?, self.queue_url.url.clone());
        Ok(build(target, Writing { envelope, source, fifo, bytes_max }, context))
    }

    async fn connect(&self, _: &SinkContext) -> Result<String> {
        look_at_queue(&self.queue_url, &self.aws).await
    }
}

#[async_trait]
impl SinkConfig for SnsSinkTable {
    async fn build(&self, context: &SinkContext) -> Result<Arc<dyn Sink>> {
        let fifo = self.topic_arn.name.ends_with(".fifo");
        check_window(context, fifo, &self.topic_arn.name);
        let (envelope, source, bytes_max) = (self.envelope, self.source.clone(), self.message_max);
        let target = Target::Topic(topic_client(&self.topic_arn, &self.aws).await?, self.topic_arn.arn.clone());
        Ok(build(target, Writing { envelope, source, fifo, bytes_max }, context))
    }

    async fn connect(&self, _: &SinkContext) -> Result<String> {
        let client = topic_client(&self.topic_arn, &self.aws).await?;
        let request = client.get_topic_attributes().topic_arn(&self.topic_arn.arn).send();
        let endpoint = self.aws.as_ref().and_then(|aws| aws.endpoint.clone());
        let server = endpoint.unwrap_or_else(|| format!("SNS in {}", self.topic_arn.region));
        let answer = timeout(LOOK_TIMEOUT, request).await;
        let answer = answer.map_err(|_| Refusal::timed_out().at(&server).error("connect"))?;
        answer.map_err(|error| Refusal::of(&error).at(&server).error("connect"))?;
        Ok(format!("answers; the topic {} exists", self.topic_arn.name))
    }
}

#[async_trait]
impl SourceConfig for SqsSourceTable {
    fn log(&self) -> &LogName {
        &self.log
    }

    async fn build(&self, context: &SourceContext) -> Result<Arc<dyn Source>> {
        let client = queue_client(&self.queue_url, &self.aws).await?;
        Ok(Arc::new(SqsSource::new(client, self.clone(), Arc::clone(&context.clock))))
    }

    async fn connect(&self, _: &SourceContext) -> Result<String> {
        look_at_queue(&self.queue_url, &self.aws).await
    }

    /// A CloudEvent in binary mode becomes the original event.
    fn decode(&self, name: &SourceName, message: &RawMessage) -> Result<Option<Inbound>> {
        Binding::FIELDS.read(message, name).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use postbox_config::{ReadOptions, read};

    use super::*;

    #[test]
    fn the_keys_are_checked() {
        let keys = "queue_url = \"https://sqs.eu-west-1.amazonaws.com/1/q\"\n\
            aws = { access_key_id = \"AKIA1\", secret_access_key = \"canary\" }";
        let (table, _) = read::<SqsSinkTable>(keys, ReadOptions::none()).expect("no faults");
        assert!(!format!("{table:?}").contains("canary"));
        let keys = "queue_url = \"orders\"\naws = { endpoint = \"h\", access_key_id = \"x\" }\nmessage_max = \"2MiB\"";
        let faults = read::<SqsSinkTable>(keys, ReadOptions::none()).expect_err("faults").to_string();
        for word in ["https://sqs.REGION.amazonaws.com", "http://HOST:PORT", "needs both", "out of range"] {
            assert!(faults.contains(word), "{word}: {faults}");
        }
        let keys = "queue_url = \"https://h/q\"\naws = { session_token = \"canary\" }";
        let faults = read::<SqsSinkTable>(keys, ReadOptions::none()).expect_err("a fault").to_string();
        assert!(faults.contains("no access_key_id and secret") && !faults.contains("canary"), "{faults}");
        let keys = "queue_url = \"https://h/q\"\nvisibility = \"1500ms\"";
        let faults = read::<SqsSourceTable>(keys, ReadOptions::none()).expect_err("a fault").to_string();
        assert!(faults.contains("whole seconds"), "{faults}");
        let faults =
            read::<SnsSinkTable>("topic_arn = \"orders\"", ReadOptions::none()).expect_err("a fault").to_string();
        assert!(faults.contains("arn:aws:sns:REGION"), "{faults}");
    }
}
