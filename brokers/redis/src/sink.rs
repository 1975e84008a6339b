//! The sink: a call is one pipeline on one connection.

use std::collections::BTreeSet;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    Capabilities, Delivery, Envelope, Error, ErrorKind, HighWaterMarks, Outcome, Result, Sink, Template,
};
use redis::{Cmd, Pipeline, RedisResult, Value};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout, timeout_at};

use crate::connection::{Connection, Server};
use crate::{RedisSinkConfig, classify, fields, stream};

/// Most entries in one pipeline: beyond this a longer one is not faster.
const BATCH_MAX: usize = 1_000;
/// Keys that the server looks at in one step of a search for streams: some 0.2 ms of its time.
const SCAN_KEYS: usize = 1_000;
/// Most steps of a search: a database may have millions of other keys.
const SCAN_STEPS_MAX: usize = 50;

/// Adds events to streams.
///
/// The events of a call have different keys. Their entries stand in one pipeline, but a server that
/// is out of memory may refuse one and take the next, so `prefix` would be a lie; only a script or
/// a transaction could keep it, and neither works across the slots of a cluster.
///
/// Cancel-safety: the entries of a dropped call may be in the streams.
#[derive(Debug)]
pub struct RedisSink {
    server: Server,
    stream: Template,
    maxlen: Option<u64>,
    make_stream: bool,
    envelope: Envelope,
    source: String,
    value_bytes_max: usize,
    concurrency: usize,
    connection: Mutex<Option<Connection>>,
}

impl RedisSink {
    /// A sink whose calls take at most `timeout`, of which there are at most `concurrency` at once.
    /// Connects when the first event is sent.
    pub fn new(config: &RedisSinkConfig, timeout: Duration, concurrency: usize) -> Result<Self> {
        Ok(Self {
            server: config.server(timeout)?,
            stream: config.stream.clone(),
            maxlen: config.maxlen,
            make_stream: config.make_stream,
            envelope: config.envelope,
            source: config.source.clone(),
            value_bytes_max: config.value_max,
            concurrency: concurrency.max(1),
            connection: Mutex::default(),
        })
    }

    /// Whether there is a connection that stands, as far as we heard; not while one is made.
    pub fn is_connected(&self) -> bool {
        self.connection.try_lock().is_ok_and(|shared| shared.as_ref().is_some_and(Connection::is_open))
    }

    /// What the server answers to a question, in time.
    async fn ask(&self, command: &Cmd) -> Result<RedisResult<Value>> {
        let asked = async { Ok(self.connection().await?.ask(command).await) };
        let late = || Error::new(ErrorKind::Unavailable, "inspect", "redis_timeout", classify::SILENT);
        timeout(self.server.timeout(), asked).await.unwrap_or_else(|_| Err(late()))
    }

    /// The connection of all calls; a new one if there is none, or it is lost.
    async fn connection(&self) -> Result<Connection> {
        let mut shared = self.connection.lock().await;
        match &*shared {
            Some(connection) if connection.is_open() => Ok(connection.clone()),
            _ => {
                *shared = None;
                Ok(shared.insert(self.server.connect().await?).clone())
            }
        }
    }

    /// The next call connects anew: this connection is lost, or leads to a server that takes
    /// nothing.
    async fn drop_connection(&self) {
        *self.connection.lock().await = None;
    }

    /// The command for one event, or why there is none.
    fn command(&self, delivery: &Delivery, bytes_max: usize) -> Result<Cmd, Outcome> {
        let stream = stream::render(&self.stream, &delivery.event)?;
        let mut command = redis::cmd("XADD");
        command.arg(stream);
        if !self.make_stream {
            command.arg("NOMKSTREAM");
        }
        if let Some(maxlen) = self.maxlen {
            // Exactly would cost a deletion for each entry.
            command.arg("MAXLEN").arg("~").arg(maxlen);
        }
        command.arg("*");
        fields::put(delivery, self.envelope, &self.source, |name, value| {
            // A larger one ends the connection, and with it every other entry of the pipeline.
            if value.len() > bytes_max {
                let text = format!("{name} has {} bytes; at most {bytes_max} are sent to this server", value.len());
                return Err(Outcome::dead("redis_value_too_large", text));
            }
            command.arg(name).arg(value);
            Ok(())
        })?;
        Ok(command)
    }

    /// Sends a pipeline: an outcome for each of its entries.
    async fn send(&self, mut connection: Connection, pipeline: &Pipeline, deadline: Instant) -> Vec<Outcome> {
        let answers = timeout_at(deadline, connection.send::<Option<String>>(pipeline)).await;
        let lost = match answers {
            Ok(Ok(answers)) => {
                let outcomes: Vec<Outcome> = answers.iter().map(outcome).collect();
                // Perhaps it was the primary, and the name leads to another by now.
                if outcomes.iter().any(|outcome| matches!(outcome, Outcome::Unavailable { .. })) {
                    self.drop_connection().await;
                }
                return outcomes;
            }
            Ok(Err(error)) => classify::unanswered(&error),
            Err(_) => classify::timed_out(),
        };
        self.drop_connection().await;
        vec![lost; pipeline.len()]
    }
}

fn last_generated_id(info: Value) -> Option<String> {
    let Value::Map(info) = info else { return None };
    let last =
        info.into_iter().find(|(name, _)| matches!(name, Value::BulkString(name) if name == b"last-generated-id"));
    redis::from_redis_value(last?.1).ok()
}

fn outcome(answer: &RedisResult<Option<String>>) -> Outcome {
    match answer {
        Ok(Some(_)) => Outcome::DELIVERED,
        Ok(None) => classify::stream_missing(),
        Err(error) => classify::refused(error),
    }
}

#[async_trait]
impl Sink for RedisSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { batch_max: BATCH_MAX, concurrency: self.concurrency, prefix: false, system: Some("redis") }
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        if deliveries.is_empty() {
            return Vec::new();
        }
        let deadline = Instant::now() + self.server.timeout();
        let connection = match timeout_at(deadline, self.connection()).await {
            Ok(Ok(connection)) => connection,
            Ok(Err(error)) => {
                let outcome = Outcome::unavailable(error.code().to_owned(), error.message());
                return vec![outcome; deliveries.len()];
            }
            Err(_) => {
                let text = "no connection in time";
                return vec![Outcome::unavailable("redis_connect_timeout", text); deliveries.len()];
            }
        };
        let bytes_max = self.value_bytes_max.min(connection.bulk_bytes_max);
        let mut pipeline = Pipeline::with_capacity(deliveries.len());
        pipeline.ignore_errors();
        let refused = deliveries
            .iter()
            .map(|delivery| self.command(delivery, bytes_max).map(|command| _ = pipeline.add_command(command)).err());
        let refused: Vec<Option<Outcome>> = refused.collect();
        let sent = match pipeline.is_empty() {
            true => Vec::new(),
            false => self.send(connection, &pipeline, deadline).await,
        };
        let mut sent = sent.into_iter();
        let answered = |refused: Option<Outcome>| refused.or_else(|| sent.next()).unwrap_or_else(classify::timed_out);
        refused.into_iter().map(answered).collect()
    }

    fn high_water_marks(&self) -> Option<&dyn HighWaterMarks> {
        Some(self)
    }

    async fn close(&self) {
        self.drop_connection().await;
    }
}

/// The position is the last id that the server gave in a stream. Trimming leaves it as it is; a
/// failover or a lost disk may not.
#[async_trait]
impl HighWaterMarks for RedisSink {
    async fn high_water_mark(&self, stream: &str) -> Result<Option<String>> {
        let mut command = redis::cmd("XINFO");
        command.arg("STREAM").arg(stream);
        match self.ask(&command).await? {
            Ok(answer) => Ok(last_generated_id(answer)),
            Err(error) if error.detail().is_some_and(|detail| detail.contains("no such key")) => Ok(None),
            Err(error) => Err(classify::failure("inspect", error)),
        }
    }

    /// Of a template, the streams that a bounded search finds: all of them, unless there are many
    /// other keys in the database.
    async fn streams(&self, max: usize) -> Result<Vec<String>> {
        if let Some(stream) = self.stream.fixed() {
            return Ok(vec![stream.to_owned()]);
        }
        let (pattern, mut cursor, mut streams) = (stream::pattern(&self.stream), "0".to_owned(), BTreeSet::new());
        for _ in 0..SCAN_STEPS_MAX {
            let mut command = redis::cmd("SCAN");
            command.arg(&cursor).arg("MATCH").arg(&pattern).arg("TYPE").arg("stream").arg("COUNT").arg(SCAN_KEYS);
            let found = self.ask(&command).await?.and_then(|found| Ok(redis::from_redis_value(found)?));
            let (next, names): (String, Vec<Vec<u8>>) = found.map_err(|error| classify::failure("inspect", error))?;
            streams.extend(names.into_iter().filter_map(|name| String::from_utf8(name).ok()));
            cursor = next;
            if cursor == "0" || streams.len() >= max {
                break;
            }
        }
        Ok(streams.into_iter().take(max).collect())
    }
}
