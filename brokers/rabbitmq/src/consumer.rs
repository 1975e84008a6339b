//! A queue, made if that is wanted, and what is consumed from it.

use std::fmt::Display;
use std::time::Duration;

use lapin::options::{BasicConsumeOptions, BasicQosOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, Consumer};
use postbox_core::Down;
use tokio::time::timeout;

use crate::classify::{self, MISSING};
use crate::connection::{Connection, Servers, declare_passively};

/// Longest wait for an answer that needs no work.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a message of a queue that we make may come again. A quorum queue of RabbitMQ 4 drops
/// it after 20 times otherwise, and each stop of ours is one; what is poison, we know ourselves.
const DELIVERY_LIMIT: i32 = i32::MAX;

/// The queue that is consumed from.
#[derive(Debug, Clone, Default)]
pub(crate) struct QueueSpec {
    pub(crate) name: String,
    /// Made if it is missing: durable, a quorum queue.
    pub(crate) create: bool,
    /// What a queue that is made is bound to, with which routing key.
    pub(crate) binding: Option<(String, String)>,
    /// Where it sends what is rejected.
    pub(crate) dead_letter_exchange: Option<String>,
    pub(crate) in_flight_max: u16,
}

/// One connection's consumer.
pub(crate) struct Session {
    pub(crate) connection: Connection,
    pub(crate) channel: Channel,
    pub(crate) consumer: Consumer,
}

impl Session {
    /// Cancel-safety: dropped, there is none.
    ///
    /// `prefetch`: most messages that are out of the queue.
    pub(crate) async fn open(servers: &Servers, spec: &QueueSpec, prefetch: u16) -> Result<Self, Down> {
        let connection = servers.connect().await?;
        match find_queue(&connection, &spec.name).await {
            Err(missing) if missing.code() == MISSING && spec.create => make(&connection, spec).await?,
            found => found?,
        }
        if spec.create {
            // Each time: a start that ended between the two would leave a queue that gets nothing.
            bind(&connection, spec).await?;
        }
        let channel = ask("opening a channel", connection.channel()).await?;
        bound(&channel, prefetch).await?;
        let (queue, options) = (short(&spec.name), BasicConsumeOptions::default());
        let consumed = channel.basic_consume(queue, ShortString::default(), options, FieldTable::default());
        let consumer = ask(format!("consuming the queue {}", spec.name), consumed).await?;
        Ok(Self { connection, channel, consumer })
    }
}

/// Bounds what the server gives out. The server does what a channel says in order, so its answer
/// also says that it has heard everything before.
pub(crate) async fn bound(channel: &Channel, prefetch: u16) -> Result<(), Down> {
    ask("bounding the prefetch", channel.basic_qos(prefetch, BasicQosOptions::default())).await
}

/// Whether there is such a queue; changes nothing.
pub(crate) async fn find_queue(connection: &Connection, name: &str) -> Result<(), Down> {
    // An error ends the channel.
    let channel = ask("opening a channel", connection.channel()).await?;
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    ask(format!("the queue {name}"), channel.queue_declare(short(name), options, FieldTable::default())).await?;
    Ok(())
}

/// Whether there is such an exchange; changes nothing.
pub(crate) async fn find_exchange(connection: &Connection, name: &str) -> Result<(), Down> {
    let channel = ask("opening a channel", connection.channel()).await?;
    ask(format!("the exchange {name}"), declare_passively(&channel, short(name))).await
}

async fn make(connection: &Connection, spec: &QueueSpec) -> Result<(), Down> {
    let channel = ask("opening a channel", connection.channel()).await?;
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    arguments.insert("x-delivery-limit".into(), AMQPValue::LongInt(DELIVERY_LIMIT));
    if let Some(exchange) = &spec.dead_letter_exchange {
        arguments.insert("x-dead-letter-exchange".into(), AMQPValue::LongString(exchange.as_str().into()));
    }
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    let name = &spec.name;
    ask(format!("making the queue {name}"), channel.queue_declare(short(name), options, arguments)).await?;
    tracing::info!(queue = name, "queue made");
    Ok(())
}

/// Binds the queue to its exchange, if it has one. Idempotent.
async fn bind(connection: &Connection, spec: &QueueSpec) -> Result<(), Down> {
    let Some((exchange, key)) = &spec.binding else { return Ok(()) };
    let channel = ask("opening a channel", connection.channel()).await?;
    let (queue, from, key) = (short(&spec.name), short(exchange), short(key));
    let binding = channel.queue_bind(queue, from, key, QueueBindOptions::default(), FieldTable::default());
    ask(format!("binding the queue {} to the exchange {exchange}", spec.name), binding).await
}

/// A name of the configuration, whose length is checked there.
fn short(name: &str) -> ShortString {
    ShortString::try_new(name).unwrap_or_default()
}

async fn ask<T>(what: impl Display, call: impl Future<Output = lapin::Result<T>>) -> Result<T, Down> {
    match timeout(ANSWER_TIMEOUT, call).await {
        Ok(answer) => answer.map_err(|error| classify::refused(&what.to_string(), &error)),
        Err(_) => Err(classify::lost(&format!("{what}: no answer within {ANSWER_TIMEOUT:?}"))),
    }
}
