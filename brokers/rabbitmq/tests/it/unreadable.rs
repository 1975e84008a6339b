//! A message that the client library cannot read: its connection ends each time the message
//! arrives.

use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable};
use postbox_core::ErrorKind;
use postbox_rabbitmq::RabbitmqSourceTable;
use postbox_testkit::receiving::{Receiving, source};
use postbox_testkit::sending::PATIENCE;
use postbox_testkit::servers::Rabbitmq;
use tokio::time::timeout;

use crate::broker::{Broker, SPOILT, arguments, quorum, spoiling, unique};
use crate::stand::{LIMITS, table};

fn properties(id: &str) -> BasicProperties {
    BasicProperties::default().with_message_id(id.into())
}

#[tokio::test]
async fn it_is_named_with_the_cure_and_asked_for_less_and_less_often() {
    let url = Rabbitmq::shared().await.url();
    let (broker, queue) = (Broker::connect(&spoiling(&url).await).await, unique("q"));
    broker.exchange(&queue).await;
    broker.queue(&queue, FieldTable::default(), &queue, "a").await;
    broker.publish(&queue, "a", properties(SPOILT), b"unreadable").await;
    let source = source::<RabbitmqSourceTable>(&format!("url = {url:?}\nqueue = {queue:?}")).await;
    let began = Instant::now();
    for _ in 0..4 {
        let failed = timeout(PATIENCE, source.next(10)).await.expect("in time").expect_err("nobody can read it");
        assert_eq!((failed.kind(), failed.code()), (ErrorKind::Invalid, "rabbitmq_message_unreadable"), "{failed}");
        let look = format!("rabbitmqadmin get queue={queue} ackmode=ack_requeue_true");
        let [look, remove] = [look.as_str(), "ackmode=ack_requeue_false"].map(|cure| failed.message().find(cure));
        assert!(look.is_some() && look < remove, "{failed}");
    }
    // The waits are 100, 200 and 400 ms.
    assert!(began.elapsed() >= Duration::from_millis(700), "{:?}", began.elapsed());
    source.close().await;
}

/// A server with larger frames sends a header as it is.
#[tokio::test]
async fn so_are_headers_that_are_larger_than_our_frames() {
    let url = Rabbitmq::shared_with(LIMITS).await.url();
    let (broker, queue) = (Broker::connect(&url).await, unique("q"));
    broker.exchange(&queue).await;
    broker.queue(&queue, quorum(&[]), &queue, "#").await;
    let large = arguments(&[("large", AMQPValue::LongString("v".repeat(200_000).into()))]);
    broker.publish(&queue, "a", BasicProperties::default().with_headers(large), b"").await;
    let source = source::<RabbitmqSourceTable>(&format!("url = {url:?}\nqueue = {queue:?}")).await;
    let failed = timeout(PATIENCE, source.next(1)).await.expect("in time").expect_err("nobody can read it");
    assert_eq!((failed.kind(), failed.code()), (ErrorKind::Invalid, "rabbitmq_message_unreadable"), "{failed}");
    source.close().await;
}

/// Each arrival counts towards the queue's delivery limit, for every message that is unacknowledged
/// at the time.
#[tokio::test]
async fn it_takes_no_others_with_it() {
    let url = Rabbitmq::shared().await.url();
    let (broker, queue, dead) = (Broker::connect(&spoiling(&url).await).await, unique("q"), unique("dead"));
    broker.exchange(&queue).await;
    broker.queue(&dead, FieldTable::default(), &queue, "dead").await;
    let limits = [
        ("x-delivery-limit", AMQPValue::LongInt(6)),
        ("x-dead-letter-exchange", AMQPValue::LongString(queue.as_str().into())),
        ("x-dead-letter-routing-key", AMQPValue::LongString("dead".into())),
    ];
    broker.queue(&queue, quorum(&limits), &queue, "a").await;
    for n in 0..40 {
        let id = if n == 5 { SPOILT.to_owned() } else { n.to_string() };
        broker.publish(&queue, "a", properties(&id), n.to_string().as_bytes()).await;
    }
    let receiving = Receiving::start(table(&url, &format!("queue = {queue:?}\nin_flight = 8"))).await;
    receiving.until(|it| it.bodies().len() == 39).await;
    let passive = || QueueDeclareOptions { passive: true, ..Default::default() };
    let there = async || {
        let declared = broker.channel.queue_declare(dead.as_str().into(), passive(), FieldTable::default()).await;
        declared.expect("it is there").message_count()
    };
    timeout(PATIENCE, async { while there().await == 0 {} }).await.expect("it reaches the limit");
    assert_eq!(there().await, 1, "no other did");
    // Once other messages have passed, many at a time arrive again.
    for n in 40..60 {
        broker.publish(&queue, "a", properties(&n.to_string()), n.to_string().as_bytes()).await;
    }
    receiving.until(|it| it.bodies().len() == 59).await;
    let consumer = async || {
        let arguments = ["list_consumers", "queue_name", "prefetch_count"];
        let all = Rabbitmq::shared().await.ctl(&arguments);
        all.lines().find_map(|line| line.strip_prefix(&queue)).map(|count| count.trim().to_owned())
    };
    timeout(PATIENCE, async { while consumer().await.as_deref() != Some("8") {} }).await.expect("as configured");
    receiving.stop().await;
}
