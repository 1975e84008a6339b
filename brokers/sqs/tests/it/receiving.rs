//! The source while it feeds a store that is slow, killed or cut off, and repeated messages.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use postbox_core::{AckToken, Source, SourceMessage};
use postbox_testkit::proxy::{Direction, FaultProxy};
use tokio::time::timeout;

use crate::support::{Broker, queue_keys, sink, source, unique};
use postbox_core::NewEvent;
use postbox_testkit::sending::{PATIENCE, deliver, deliveries, numbered, table};

fn keys(queue: &str, by: &str, more: &str) -> String {
    format!("{}{more}\n", queue_keys(queue, by))
}

async fn gather(source: &Arc<dyn Source>, count: usize) -> Vec<SourceMessage> {
    let mut given = Vec::new();
    let all = async {
        while given.len() < count {
            match source.next(count - given.len()).await {
                Ok(messages) => given.extend(messages),
                // moto answers 500 if two calls find the same message visible again.
                Err(error) => assert_eq!(error.code(), "aws_internal", "{error}"),
            }
        }
    };
    timeout(PATIENCE, all).await.expect("in time");
    given
}

fn tokens(given: &[SourceMessage]) -> Vec<AckToken> {
    given.iter().map(|it| it.token).collect()
}

fn payloads(given: &[SourceMessage]) -> Vec<String> {
    given.iter().map(|it| String::from_utf8_lossy(&it.message.payload).into_owned()).collect()
}

async fn fill(broker: &Broker, queue: &str, count: usize) {
    let sink = sink(&queue_keys(queue, &broker.server.url())).await;
    for ten in numbered(count).chunks(10) {
        assert!(deliver(&sink, ten).await.iter().all(postbox_core::Outcome::is_delivered));
    }
}

#[tokio::test]
async fn what_a_slow_store_holds_comes_no_second_time_until_we_are_gone() {
    let broker = Broker::launch().await;
    let queue = broker.queue("orders").await;
    fill(&broker, &queue, 25).await;
    let with = keys(&queue, &broker.server.url(), "visibility = \"4s\"");
    let (slow, other) = (source(&with).await, source(&with).await);
    let mut given = HashSet::new();
    // On a slow machine, a message that is hidden for four seconds may arrive twice.
    while given.len() < 25 {
        given.extend(payloads(&gather(&slow, 1).await));
    }
    // Twice as long as SQS hides a message if nobody prolongs that.
    assert!(timeout(Duration::from_secs(8), other.next(10)).await.is_err(), "it is held");
    // As if the process were killed: nothing is returned to the queue.
    drop(slow);
    let mut again = Vec::new();
    while payloads(&again).into_iter().collect::<HashSet<_>>() != given {
        again.extend(gather(&other, 1).await);
    }
    other.ack(&tokens(&again)).await.expect("deleted");
    assert_eq!(broker.remaining(&queue).await, 0);
}

#[tokio::test]
async fn closing_gives_everything_back_at_once() {
    let broker = Broker::launch().await;
    let queue = broker.queue("orders").await;
    fill(&broker, &queue, 12).await;
    let keys = keys(&queue, &broker.server.url(), "visibility = \"1h\"");
    let first = source(&keys).await;
    // Ten messages arrive at once. One of them is handed out.
    gather(&first, 1).await;
    first.close().await;
    let began = Instant::now();
    let second = source(&keys).await;
    assert_eq!(gather(&second, 12).await.len(), 12);
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_failed_deletion_is_said_and_the_message_comes_again() {
    let broker = Broker::launch().await;
    let queue = broker.queue("orders").await;
    fill(&broker, &queue, 3).await;
    let proxy = FaultProxy::in_front_of(&broker.server.url()).await;
    let source = source(&keys(&queue, &proxy.url(&broker.server.url()), "visibility = \"2s\"")).await;
    let given = gather(&source, 3).await;
    proxy.swallow(&[Direction::ToServer]);
    let lost = async {
        proxy.swallowed(Direction::ToServer).await;
        proxy.reset();
    };
    let tokens = tokens(&given);
    let (settled, ()) = tokio::join!(source.ack(&tokens), lost);
    assert_eq!(settled.expect_err("nobody answered").code(), "aws_connection_lost");
    proxy.heal();
    let mut again = HashSet::new();
    let all = async {
        while again.len() < 3 {
            for given in source.next(10).await.unwrap_or_default() {
                again.insert(given.message.id.clone().expect("an id"));
                source.ack(&[given.token]).await.expect("deleted");
            }
        }
    };
    timeout(PATIENCE, all).await.expect("they come again");
    assert_eq!(broker.remaining(&queue).await, 0);
}

#[tokio::test]
async fn a_server_that_is_away_is_an_error_of_each_call_until_it_is_back() {
    let mut broker = Broker::launch().await;
    let queue = broker.queue("orders").await;
    let source = source(&keys(&queue, &broker.server.url(), "")).await;
    broker.server.kill();
    assert_eq!(source.next(10).await.expect_err("nobody there").code(), "connect_refused");
    broker.server.start().await;
    assert_eq!(source.next(10).await.expect_err("empty").code(), "sqs_queue_missing");
    broker.queue("orders").await;
    fill(&broker, &queue, 2).await;
    assert_eq!(gather(&source, 2).await.len(), 2);
}

#[tokio::test]
async fn a_group_of_a_fifo_queue_comes_in_order() {
    let broker = Broker::shared().await;
    let queue = broker.queue(&unique("orders.fifo")).await;
    let sink = sink(&queue_keys(&queue, &broker.url)).await;
    for n in 0..30 {
        let event = NewEvent::json("t", n.to_string()).key("one");
        assert!(deliver(&sink, &deliveries([event])).await[0].is_delivered());
    }
    let source = source(&keys(&queue, &broker.url, "")).await;
    let mut all = Vec::new();
    while all.len() < 30 {
        let given = timeout(PATIENCE, source.next(7)).await.expect("in time").expect("messages");
        assert!(given.iter().all(|it| it.message.key.as_deref() == Some("one")));
        source.ack(&tokens(&given)).await.expect("deleted");
        all.extend(payloads(&given));
    }
    assert_eq!(all, (0..30).map(|n| n.to_string()).collect::<Vec<_>>());
}

/// A redrive policy moves a message to a dead-letter queue by the number of its receives.
#[tokio::test]
async fn a_refused_message_costs_those_of_other_groups_no_receive() {
    let broker = Broker::shared().await;
    let queue = broker.queue(&unique("orders.fifo")).await;
    let sink = sink(&queue_keys(&queue, &broker.url)).await;
    for n in 0..4 {
        let event = NewEvent::json("t", n.to_string()).key(n.to_string());
        assert!(deliver(&sink, &deliveries([event])).await[0].is_delivered());
    }
    let source = source(&keys(&queue, &broker.url, "")).await;
    let given = gather(&source, 4).await;
    assert_eq!(payloads(&given), ["0", "1", "2", "3"]);
    // The first one was refused, and the others came behind it.
    source.nak(&tokens(&given), Duration::from_secs(1)).await.expect("given back");
    let again = gather(&source, 4).await;
    assert_eq!(payloads(&again), ["1", "2", "3", "0"], "the others are stored before it comes again");
    source.close().await;
    let receives = async {
        let mut receives = Vec::new();
        while receives.len() < 4 {
            receives.extend(broker.take(&queue).await.into_iter().map(|it| (it.body, it.receives)));
        }
        receives.sort();
        receives
    };
    let receives = timeout(PATIENCE, receives).await.expect("in time");
    let expected = [("0", "3"), ("1", "2"), ("2", "2"), ("3", "2")];
    assert_eq!(receives, expected.map(|(body, count)| (body.to_owned(), count.to_owned())));
}

#[tokio::test]
async fn whoever_publishes_what_is_no_event_fills_the_dead_list_and_blocks_nobody() {
    use postbox_config::SourceConfig as _;
    let broker = Broker::shared().await;
    let queue = broker.queue(&unique("orders")).await;
    let keys = keys(&queue, &broker.url, "");
    let value = aws_sdk_sqs::types::MessageAttributeValue::builder().data_type("String").string_value("no topic");
    let request = broker.client.send_message().queue_url(&queue).message_body("its bytes");
    request.message_attributes("postbox-topic", value.build().expect("a type")).send().await.expect("sent");
    let source = source(&keys).await;
    let given = gather(&source, 1).await.remove(0);
    let name = "orders".parse().expect("a name");
    let table = table::<postbox_sqs::SqsSourceTable>(&keys);
    let fault = table.decode(&name, &given.message).expect_err("no event");
    let poison = given.message.into_poison(&name, fault.code(), fault.message());
    assert_eq!(&poison.event.payload[..], b"its bytes");
    source.ack(&[given.token]).await.expect("deleted");
    assert_eq!(broker.remaining(&queue).await, 0);
}
