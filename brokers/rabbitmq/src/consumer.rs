//! A queue, created if configured, and its consumer.

use std::fmt::Display;
use std::time::Duration;

use lapin::options::{BasicConsumeOptions, BasicQosOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, Consumer};
use postbox_core::Down;
use tokio::time::timeout;

use crate::classify::{self, MISSING};
use crate::config::RabbitmqSourceTable;
use crate::connection::{Connection, Servers, declare_passively};

/// The longest wait for an answer that needs no work.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a message may be redelivered by a queue that we create. By default a quorum queue of
/// RabbitMQ 4 drops it after 20 deliveries, and each stop of ours counts as one. Poison messages
/// are detected by us.
const DELIVERY_LIMIT: i32 = i32::MAX;

/// The consumer of one connection.
pub(crate) struct Session {
    pub(crate) connection: Connection,
    pub(crate) channel: Channel,
    pub(crate) consumer: Consumer,
}

impl Session {
    /// Connects and starts consuming. `prefetch` is the most messages that are out of the queue.
    ///
    /// Cancel-safety: if dropped, there is no session.
    pub(crate) async fn open(servers: &Servers, table: &RabbitmqSourceTable, prefetch: u16) -> Result<Self, Down> {
        let connection = servers.connect().await?;
        if let Some(exchange) = &table.dead_letter_exchange {
            // The server drops what is rejected to a missing exchange.
            find_exchange(&connection, exchange).await?;
        }
        match find_queue(&connection, &table.queue).await {
            Err(missing) if missing.code() == MISSING && table.create => make(&connection, table).await?,
            found => found?,
        }
        if table.create {
            // At every start: a start that ended between creating and binding would leave a queue
            // that gets nothing.
            bind(&connection, table).await?;
        }
        let channel = ask("opening a channel", connection.channel()).await?;
        bound(&channel, prefetch).await?;
        let (queue, options) = (short(&table.queue), BasicConsumeOptions::default());
        let consumed = channel.basic_consume(queue, ShortString::default(), options, FieldTable::default());
        let consumer = ask(format!("consuming the queue {}", table.queue), consumed).await?;
        Ok(Self { connection, channel, consumer })
    }
}

/// Limits what the server delivers. The server handles the commands of a channel in order, so its
/// answer also confirms everything sent before.
pub(crate) async fn bound(channel: &Channel, prefetch: u16) -> Result<(), Down> {
    ask("bounding the prefetch", channel.basic_qos(prefetch, BasicQosOptions::default())).await
}

/// Checks that a queue exists; changes nothing.
pub(crate) async fn find_queue(connection: &Connection, name: &str) -> Result<(), Down> {
    // An error ends the channel, so it has its own.
    let channel = ask("opening a channel", connection.channel()).await?;
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    ask(format!("the queue {name}"), channel.queue_declare(short(name), options, FieldTable::default())).await?;
    Ok(())
}

/// Checks that an exchange exists; changes nothing.
pub(crate) async fn find_exchange(connection: &Connection, name: &str) -> Result<(), Down> {
    let channel = ask("opening a channel", connection.channel()).await?;
    ask(format!("the exchange {name}"), declare_passively(&channel, short(name))).await
}

async fn make(connection: &Connection, table: &RabbitmqSourceTable) -> Result<(), Down> {
    let channel = ask("opening a channel", connection.channel()).await?;
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    if let Some(exchange) = &table.dead_letter_exchange {
        arguments.insert("x-dead-letter-exchange".into(), AMQPValue::LongString(exchange.as_str().into()));
    }
    arguments.insert("x-delivery-limit".into(), AMQPValue::LongInt(DELIVERY_LIMIT));
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    let name = &table.queue;
    ask(format!("creating the queue {name}"), channel.queue_declare(short(name), options, arguments)).await?;
    tracing::info!(queue = name, "queue made");
    Ok(())
}

/// Binds the queue to its exchange, if it has one. Idempotent.
async fn bind(connection: &Connection, table: &RabbitmqSourceTable) -> Result<(), Down> {
    let Some(exchange) = &table.exchange else { return Ok(()) };
    let channel = ask("opening a channel", connection.channel()).await?;
    let (queue, from, key) = (short(&table.queue), short(exchange), short(&table.routing_key));
    let binding = channel.queue_bind(queue, from, key, QueueBindOptions::default(), FieldTable::default());
    ask(format!("binding the queue {} to the exchange {exchange}", table.queue), binding).await
}

/// A name of the configuration, which has checked its length.
fn short(name: &str) -> ShortString {
    ShortString::try_new(name).unwrap_or_default()
}

async fn ask<T>(what: impl Display, call: impl Future<Output = lapin::Result<T>>) -> Result<T, Down> {
    match timeout(ANSWER_TIMEOUT, call).await {
        Ok(answer) => answer.map_err(|error| classify::refused(&what.to_string(), &error)),
        Err(_) => Err(classify::lost(&format!("{what}: no answer within {ANSWER_TIMEOUT:?}"))),
    }
}
