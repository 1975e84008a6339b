//! A test's view of a server, without this crate's own code.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::StreamExt as _;
use lapin::message::Delivery as Message;
use lapin::options::{
    BasicConsumeOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions,
    QueueBindOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, ExchangeKind};
use postbox_core::EventId;
use postbox_testkit::sending::PATIENCE;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

/// A separate connection of the test.
pub(crate) struct Broker {
    pub(crate) channel: Channel,
    _connection: Connection,
}

/// Returns a name that no other test uses.
pub(crate) fn unique(what: &str) -> String {
    static NAMES: AtomicU64 = AtomicU64::new(1);
    format!("{what}-{}-{}", EventId::now_v7(), NAMES.fetch_add(1, Ordering::Relaxed))
}

/// Text that the proxy of [`spoiling`] turns into invalid UTF-8.
pub(crate) const SPOILT: &str = "spoilt-on-the-way";

/// Returns an address of a proxy to the same server, which spoils [`SPOILT`]: no client library
/// would send invalid UTF-8.
pub(crate) async fn spoiling(url: &str) -> String {
    let address = url.trim_start_matches("amqp://").to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("amqp://{}", listener.local_addr().expect("an address"));
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(&address).await.expect("it answers");
            let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
                (client.into_split(), server.into_split());
            tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
            tokio::spawn(async move {
                let mut bytes = vec![0; 65_536];
                while let Ok(count @ 1..) = from_client.read(&mut bytes).await {
                    let is_there = |place: &usize| bytes[*place..count].starts_with(SPOILT.as_bytes());
                    for place in (0..count).filter(is_there).collect::<Vec<_>>() {
                        bytes[place] = 0xff;
                    }
                    to_server.write_all(&bytes[..count]).await.expect("sent");
                }
            });
        }
    });
    url
}

/// Returns the arguments of a quorum queue, and others.
pub(crate) fn quorum(others: &[(&str, AMQPValue)]) -> FieldTable {
    arguments(&[&[("x-queue-type", AMQPValue::LongString("quorum".into()))], others].concat())
}

pub(crate) fn arguments(all: &[(&str, AMQPValue)]) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in all {
        table.insert((*name).into(), value.clone());
    }
    table
}

impl Broker {
    /// Waits until the server accepts a connection.
    pub(crate) async fn connect(url: &str) -> Self {
        let connected = async {
            loop {
                if let Ok(connection) = Connection::connect(url, ConnectionProperties::default()).await
                    && let Ok(channel) = connection.create_channel().await
                {
                    channel.confirm_select(ConfirmSelectOptions::default()).await.expect("confirms");
                    return Self { channel, _connection: connection };
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE, connected).await.expect("the server is reached")
    }

    /// Declares a durable topic exchange.
    pub(crate) async fn exchange(&self, name: &str) {
        let options = ExchangeDeclareOptions { durable: true, ..Default::default() };
        let declared = self.channel.exchange_declare(name.into(), ExchangeKind::Topic, options, FieldTable::default());
        declared.await.expect("an exchange");
    }

    /// Declares a durable queue, bound to an exchange.
    pub(crate) async fn queue(&self, name: &str, arguments: FieldTable, exchange: &str, key: &str) {
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        self.channel.queue_declare(name.into(), options, arguments).await.expect("a queue");
        self.bind(name, exchange, key).await;
    }

    /// Returns whether a queue that is there has a consumer.
    pub(crate) async fn is_consumed(&self, name: &str) -> bool {
        let options = QueueDeclareOptions { passive: true, ..Default::default() };
        let found = self.channel.queue_declare(name.into(), options, FieldTable::default()).await;
        found.expect("a queue").consumer_count() > 0
    }

    pub(crate) async fn bind(&self, queue: &str, exchange: &str, key: &str) {
        let options = QueueBindOptions::default();
        let bound = self.channel.queue_bind(queue.into(), exchange.into(), key.into(), options, FieldTable::default());
        bound.await.expect("bound");
    }

    /// Publishes as any client does, and waits for the confirm.
    pub(crate) async fn publish(&self, exchange: &str, key: &str, properties: BasicProperties, body: &[u8]) {
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        let sent = self.channel.basic_publish(exchange.into(), key.into(), options, body, properties).await;
        let confirmed = sent.expect("sent").await.expect("confirmed");
        assert!(confirmed.is_ack() && confirmed.take_message().is_none(), "it is in a queue");
    }

    /// Takes all messages out of a queue.
    pub(crate) async fn drain(&self, queue: &str) -> Vec<Message> {
        let mut all = Vec::new();
        while let Some(got) =
            self.channel.basic_get(queue.into(), BasicGetOptions { no_ack: true }).await.expect("a queue")
        {
            all.push(got.delivery);
        }
        all
    }

    /// Takes messages until there are `count`.
    pub(crate) async fn take(&self, queue: &str, count: usize) -> Vec<Message> {
        let mut all = Vec::new();
        let taken = async {
            while all.len() < count {
                all.extend(self.drain(queue).await);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(PATIENCE, taken).await.expect("they come in time");
        all
    }

    /// Consumes a queue until `count` different ids have arrived. Returns all messages.
    pub(crate) async fn until_ids(&self, queue: &str, count: usize) -> Vec<Message> {
        let (options, none) = (BasicConsumeOptions { no_ack: true, ..Default::default() }, FieldTable::default());
        let consumer = self.channel.basic_consume(queue.into(), "".into(), options, none).await;
        let (mut consumer, mut ids, mut all) = (consumer.expect("a consumer"), BTreeSet::new(), Vec::new());
        let taken = async {
            while ids.len() < count {
                let message = consumer.next().await.expect("it goes on").expect("a message");
                ids.insert(message_id(&message));
                all.push(message);
            }
        };
        timeout(PATIENCE, taken).await.expect("they come in time");
        all
    }
}

pub(crate) fn message_id(message: &Message) -> String {
    message.properties.message_id().as_ref().map(ToString::to_string).expect("an id")
}

pub(crate) fn header(message: &Message, name: &str) -> Option<String> {
    match message.properties.headers().as_ref()?.inner().get(name)? {
        AMQPValue::LongString(text) => Some(text.to_string()),
        other => Some(format!("{other:?}")),
    }
}
