//! The sink: a call is one pipeline on one connection.

use std::collections::BTreeSet;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Capabilities, Delivery, Error, ErrorKind, HighWaterMarks, Outcome, Result, Sink};
use redis::{Cmd, Pipeline, RedisResult, Value};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout, timeout_at};

use crate::connection::{Connection, Server};
use crate::{RedisSinkConfig, classify, fields, stream};

/// The most entries in one pipeline. Longer ones are not faster.
const BATCH_MAX: usize = 1_000;
/// How many keys the server examines in one step of a search for streams, in about 0.2 ms.
const SCAN_KEYS: usize = 1_000;
/// The longest wait to drop a connection.
const DROP_TIMEOUT: Duration = Duration::from_millis(100);
/// The most steps of a search, because a database may have millions of other keys.
const SCAN_STEPS_MAX: usize = 50;

/// Adds events to streams.
///
/// The events of a call have different keys. Their entries are in one pipeline, but a server that
/// is out of memory may refuse one and accept the next, so the sink does not claim `prefix`. Only a
/// script or a transaction could keep the order, and neither works across the slots of a cluster.
///
/// Cancel-safety: the entries of a dropped call may be in the streams.
#[derive(Debug)]
pub struct RedisSink {
    server: Server,
    config: RedisSinkConfig,
    concurrency: usize,
    connection: Mutex<Option<Connection>>,
}

impl RedisSink {
    /// Returns a sink whose calls take at most `timeout`, with at most `concurrency` calls at once.
    /// It connects when the first event is sent.
    pub fn new(config: &RedisSinkConfig, timeout: Duration, concurrency: usize) -> Result<Self> {
        Ok(Self {
            server: config.server(timeout)?,
            config: config.clone(),
            concurrency: concurrency.max(1),
            connection: Mutex::default(),
        })
    }

    /// Returns whether the sink is connected, as far as is known. It is not while it connects.
    pub fn is_connected(&self) -> bool {
        self.connection.try_lock().is_ok_and(|shared| shared.as_ref().is_some_and(Connection::is_open))
    }

    /// Sends one command. Returns its answer, or an error if there is none in time.
    async fn ask(&self, command: &Cmd) -> Result<RedisResult<Value>> {
        let asked = async { Ok(self.connection().await?.ask(command).await) };
        let late = || Error::new(ErrorKind::Unavailable, "inspect", "redis_timeout", classify::SILENT);
        timeout(self.server.timeout(), asked).await.unwrap_or_else(|_| Err(late()))
    }

    /// Returns the connection that all calls share. Opens one if there is none or it is lost.
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

    /// Makes the next call reconnect: this connection is lost, or leads to a server that accepts no
    /// writes.
    async fn drop_connection(&self) {
        // If it is locked for longer, another call is connecting. Waiting for it could outlast this
        // one.
        if let Ok(mut connection) = timeout(DROP_TIMEOUT, self.connection.lock()).await {
            *connection = None;
        }
    }

    /// Makes the command for one event, or returns why there can be none.
    fn command(&self, delivery: &Delivery, bytes_max: usize) -> Result<Cmd, Outcome> {
        let config = &self.config;
        let stream = stream::RULES.name(&config.stream, &delivery.event)?;
        let mut command = redis::cmd("XADD");
        command.arg(stream);
        if !config.make_stream {
            command.arg("NOMKSTREAM");
        }
        if let Some(maxlen) = config.maxlen {
            // An exact limit would cost a deletion for each entry.
            command.arg("MAXLEN").arg("~").arg(maxlen);
        }
        command.arg("*");
        fields::put(delivery, config.envelope, &config.source, |name, value| {
            // The server would close the connection because of a larger value, and every other
            // entry of the pipeline would fail.
            if value.len() > bytes_max {
                let text = format!("{name} has {} bytes; at most {bytes_max} are sent to this server", value.len());
                return Err(Outcome::dead("redis_value_too_large", text));
            }
            command.arg(name).arg(value);
            Ok(())
        })?;
        Ok(command)
    }

    /// Sends a pipeline. Returns an outcome for each of its entries.
    async fn send(&self, mut connection: Connection, pipeline: &Pipeline, deadline: Instant) -> Vec<Outcome> {
        let answers = timeout_at(deadline, connection.send::<Option<String>>(pipeline)).await;
        let lost = match answers {
            Ok(Ok(answers)) => {
                let outcomes: Vec<Outcome> = answers.iter().map(outcome).collect();
                // The server may no longer be the primary, and its name may lead to another by now.
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
        Ok(Some(id)) => Outcome::delivered_at(false, id),
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
        let bytes_max = self.config.value_max.min(connection.bulk_bytes_max);
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

/// The position is the last entry id that the server has generated in a stream. Trimming does not
/// change it. A failover or a lost disk may set it back.
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

    /// Returns the streams of the template. They are found by a bounded search: all of them, unless
    /// the database has many other keys.
    async fn streams(&self, max: usize) -> Result<Vec<String>> {
        if let Some(stream) = self.config.stream.fixed() {
            return Ok(vec![stream.to_owned()]);
        }
        let (pattern, mut cursor, mut streams) =
            (stream::pattern(&self.config.stream), "0".to_owned(), BTreeSet::new());
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
