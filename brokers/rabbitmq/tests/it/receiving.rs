//! Receives from a queue into an inbox.

use std::time::Duration;

use lapin::BasicProperties;
use lapin::options::QueueDeleteOptions;
use lapin::types::{AMQPValue, ShortString};
use postbox_core::NewEvent;
use postbox_testkit::inbox::Mode;
use postbox_testkit::receiving::{Receiving, events};
use postbox_testkit::sending::{PATIENCE, deliver, deliveries, said, send};
use postbox_testkit::servers::{PrivateRabbitmq, Rabbitmq};
use tokio::time::timeout;

use crate::broker::{Broker, arguments, quorum, unique};
use crate::stand::{LIMITS, sink, table};

async fn receiving(url: &str, keys: &str) -> Receiving {
    Receiving::start(table(url, keys)).await
}

/// Checks that nothing is left in the queue. Nothing may consume it any more.
async fn is_empty(broker: &Broker, queue: &str) {
    assert!(broker.drain(queue).await.is_empty(), "all of it is acknowledged");
}

fn properties(id: &str) -> BasicProperties {
    BasicProperties::default().with_message_id(id.into())
}

/// The first start found the exchange missing, when it had already declared the queue.
#[tokio::test]
async fn a_queue_whose_exchange_comes_later_is_bound() {
    let url = Rabbitmq::shared().await.url();
    let (broker, queue) = (Broker::connect(&url).await, unique("q"));
    let receiving = receiving(&url, &format!("queue = {queue:?}\nexchange = {queue:?}")).await;
    receiving.until(|it| it.receiver.metrics().snapshot().source_errors > 0).await;
    broker.exchange(&queue).await;
    let sink = sink(&url, &format!("exchange = {queue:?}")).await;
    let delivered = async { while said(&send(&sink, NewEvent::json("t", "{}")).await) != "delivered" {} };
    timeout(PATIENCE, delivered).await.expect("the queue is bound");
    receiving.until(|it| it.inbox.all().len() == 1).await;
    receiving.stop().await;
}

#[tokio::test]
async fn an_event_comes_out_as_it_went_in() {
    let url = Rabbitmq::shared().await.url();
    let (broker, queue) = (Broker::connect(&url).await, unique("q"));
    broker.exchange(&queue).await;
    // The queue is declared, and bound.
    let receiving = receiving(&url, &format!("queue = {queue:?}\nexchange = {queue:?}")).await;
    let made = async {
        let outcome = async || {
            let sink = sink(&url, &format!("exchange = {queue:?}")).await;
            said(&deliver(&sink, &deliveries([NewEvent::json("first", "{}")])).await[0])
        };
        while outcome().await != "delivered" {}
    };
    timeout(PATIENCE, made).await.expect("made");
    let sink = sink(&url, &format!("exchange = {queue:?}")).await;
    let sent = events();
    for outcome in deliver(&sink, &sent).await {
        assert_eq!(said(&outcome), "delivered");
    }
    // And two messages from a publisher that knows nothing of our properties: one with another
    // spelling, one with none.
    let text = |text: &str| AMQPValue::LongString(text.into());
    let spelled = [
        ("cloudEvents:specversion", text("1.0")),
        ("cloudEvents:id", text("ce-1")),
        ("cloudEvents:source", text("/shop")),
        ("cloudEvents:type", text("spelled")),
        ("cloudEvents:version", AMQPValue::LongInt(3)),
    ];
    let spelled = BasicProperties::default().with_headers(arguments(&spelled));
    broker.publish(&queue, "any", spelled, b"{}").await;
    broker.publish(&queue, "plain", BasicProperties::default(), b"plain").await;
    // As publishers to a fanout exchange do.
    broker.publish(&queue, "", BasicProperties::default(), b"no key").await;
    receiving.until(|it| it.inbox.all().len() == 6).await;
    let stored = receiving.inbox.all();
    let by_topic = |topic: &str| stored.iter().find(|it| it.event.topic == topic).expect(topic);
    receiving.has(&sent);
    assert_eq!((by_topic("spelled").message_id.as_str(), by_topic("spelled").event.version), ("/shop ce-1", Some(3)));
    assert!(by_topic("plain").message_id.starts_with("sha256:"));
    assert_eq!(by_topic(&queue).event.payload, "no key");
    receiving.stop().await;
    is_empty(&broker, &queue).await;
    // The queue is a quorum queue: to declare it as another kind is refused.
    let other = broker.channel.queue_declare(
        ShortString::from(queue.as_str()),
        lapin::options::QueueDeclareOptions { durable: true, ..Default::default() },
        arguments(&[("x-queue-type", text("classic"))]),
    );
    assert!(format!("{}", other.await.expect_err("another kind")).contains("quorum"));
}

#[tokio::test]
async fn duplicates_conflicts_and_poison_are_settled() {
    let url = Rabbitmq::shared().await.url();
    let (broker, queue) = (Broker::connect(&url).await, unique("q"));
    broker.exchange(&queue).await;
    broker.queue(&queue, quorum(&[]), &queue, "#").await;
    let receiving = receiving(&url, &format!("queue = {queue:?}")).await;
    // A topic cannot contain a space.
    let publish = async |id: &str, body: &str| {
        let key = if body == "poison" { "a b" } else { "a" };
        broker.publish(&queue, key, properties(id), body.as_bytes()).await;
    };
    receiving.settles(publish).await;
    receiving.stop().await;
    is_empty(&broker, &queue).await;
}

/// A message that cannot be stored in any form goes where the queue dead-letters it, or stays.
#[tokio::test]
async fn what_cannot_be_kept_at_all_goes_to_the_dead_letter_exchange() {
    let url = Rabbitmq::shared().await.url();
    let (broker, queue, dead) = (Broker::connect(&url).await, unique("q"), unique("dead"));
    broker.exchange(&queue).await;
    let keys = format!("queue = {queue:?}\nexchange = {queue:?}\ndead_letter_exchange = {dead:?}");
    let receiving = receiving(&url, &keys).await;
    // To a missing exchange it would be rejected for nothing.
    receiving.until(|it| it.receiver.outage().is_some_and(|outage| outage.code == "rabbitmq_not_found")).await;
    broker.exchange(&dead).await;
    broker.queue(&dead, quorum(&[]), &dead, "#").await;
    // The second id ends with 8 bytes of the body's SHA-256.
    for id in ["1", "poison:1:83c874d33e8bff73"] {
        receiving.inbox.refuse(id);
    }
    let bound = async {
        loop {
            let broker = Broker::connect(&url).await;
            let options = lapin::options::QueueDeclareOptions { passive: true, ..Default::default() };
            let found = broker.channel.queue_declare(queue.as_str().into(), options, arguments(&[])).await;
            if found.is_ok_and(|found| found.consumer_count() == 1) {
                return;
            }
        }
    };
    timeout(PATIENCE, bound).await.expect("made");
    broker.publish(&queue, "in", properties("1"), b"refused").await;
    assert_eq!(broker.take(&dead, 1).await[0].data, b"refused");
    assert_eq!(receiving.receiver.metrics().snapshot().rejected, 1);
    receiving.stop().await;
    is_empty(&broker, &queue).await;
}

#[tokio::test]
async fn a_server_that_is_killed_while_it_is_received_from_loses_nothing() {
    let mut server = PrivateRabbitmq::launch().await;
    Broker::connect(&server.url()).await.queue("q", quorum(&[]), "amq.topic", "#").await;
    server.sync();
    let receiving = receiving(&server.url(), "queue = \"q\"\nin_flight = 50").await;
    let broker = Broker::connect(&server.url()).await;
    let published = 300;
    for n in 0..published {
        broker.publish("amq.topic", "a", properties(&n.to_string()), n.to_string().as_bytes()).await;
    }
    server.kill();
    server.start().await;
    receiving.until(|it| it.bodies().len() == published).await;
    assert_eq!(receiving.inbox.all().len(), published, "each once");
    receiving.stop().await;
    is_empty(&Broker::connect(&server.url()).await, "q").await;
}

/// A server can end a consumer without closing its connection. Such a consumer would wait for ever.
#[tokio::test]
async fn a_consumer_that_the_server_ended_is_opened_again() {
    let url = Rabbitmq::shared_with(LIMITS).await.url();
    let (broker, queue) = (Broker::connect(&url).await, unique("q"));
    broker.exchange(&queue).await;
    broker.queue(&queue, quorum(&[]), &queue, "#").await;
    let receiving = receiving(&url, &format!("queue = {queue:?}\nexchange = {queue:?}")).await;
    // The store is down for longer than a consumer may hold a message.
    receiving.inbox.set(Mode::Down);
    broker.publish(&queue, "a", properties("1"), b"1").await;
    let again = Broker::connect(&url).await;
    receiving.until(|it| it.inbox.counts().calls > 0).await;
    let ended = async {
        while again.is_consumed(&queue).await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, ended).await.expect("the server ends the consumer");
    receiving.inbox.set(Mode::Works);
    again.publish(&queue, "a", properties("2"), b"2").await;
    receiving.until(|it| it.bodies().len() == 2).await;
    // And a consumer whose queue is deleted: the source declares another.
    let deleted = again.channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await;
    deleted.expect("deleted");
    let sink = sink(&url, &format!("exchange = {queue:?}")).await;
    let published =
        async { while said(&deliver(&sink, &deliveries([NewEvent::json("t", "3")])).await[0]) != "delivered" {} };
    timeout(PATIENCE, published).await.expect("made and bound again");
    receiving.until(|it| it.bodies().len() == 3).await;
    receiving.stop().await;
}

#[tokio::test]
async fn a_store_that_is_away_is_waited_for_and_nothing_comes_twice() {
    let url = Rabbitmq::shared().await.url();
    let (broker, queue) = (Broker::connect(&url).await, unique("q"));
    broker.exchange(&queue).await;
    broker.queue(&queue, quorum(&[]), &queue, "#").await;
    let receiving = receiving(&url, &format!("queue = {queue:?}\nin_flight = 5")).await;
    receiving.inbox.set(Mode::Down);
    for n in 0..20 {
        broker.publish(&queue, "a", properties(&n.to_string()), b"{}").await;
    }
    receiving.until(|it| it.inbox.counts().calls > 3).await;
    assert!(receiving.inbox.counts().in_flight_peak <= 5, "{:?}", receiving.inbox.counts());
    receiving.inbox.set(Mode::Works);
    receiving.until(|it| it.inbox.all().len() == 20).await;
    let order: Vec<String> = receiving.inbox.all().into_iter().map(|it| it.message_id).collect();
    assert_eq!(order, (0..20).map(|n| n.to_string()).collect::<Vec<_>>(), "in the order of the queue");
    assert_eq!(receiving.inbox.counts().duplicates, 0);
    receiving.stop().await;
    is_empty(&broker, &queue).await;
}
