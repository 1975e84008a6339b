//! Sends events to a topic, and receives from it into an inbox.

use krafka::Kafka;
use krafka::producer::Record;
use postbox_testkit::receiving::{Receiving, events};
use postbox_testkit::sending::{codes, deliver};
use postbox_testkit::servers::PrivateKafka;

use super::stand::{client, committed, make_topic, sink, table};

async fn receiving(server: &PrivateKafka) -> Receiving {
    Receiving::start(table(&server.brokers(), "topic = \"orders\"")).await
}

async fn server() -> (PrivateKafka, Kafka) {
    let server = PrivateKafka::launch().await;
    let kafka = client(&server.brokers()).await;
    make_topic(&kafka, "orders", 1).await;
    (server, kafka)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_comes_out_as_it_went_in() {
    let (server, kafka) = server().await;
    let sink = sink(&server.brokers(), "topic = \"orders\"").await;
    let sent = events();
    assert_eq!(codes(&deliver(&sink, &sent).await), ["delivered"]);
    let receiving = receiving(&server).await;
    receiving.until(|it| it.inbox.all().len() == 2).await;
    receiving.has(&sent);
    receiving.stop().await;
    assert_eq!(committed(&kafka, "postbox", "orders", 1).await, 2, "all of it is acknowledged");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn duplicates_conflicts_and_poison_are_settled() {
    let (server, kafka) = server().await;
    let receiving = receiving(&server).await;
    let producer = kafka.producer().metrics_push(false).build().await.expect("a producer");
    let send = async |record: Record| assert!(producer.send(record).await.expect("sent").is_persisted());
    // A key that is not text is accepted.
    send(Record::new("orders", "binary").header("postbox-id", "0").key(&b"\xff\xfe"[..])).await;
    receiving.until(|it| it.inbox.all().len() == 1).await;
    assert_eq!(receiving.inbox.all()[0].event.key.as_deref(), Some("fffe"));
    let publish = async |id: &str, body: &str| {
        // Headers that no event can have make a message poison.
        let large = "x".repeat(if body == "poison" { 20_000 } else { 0 });
        send(Record::new("orders", body.to_owned()).header("postbox-id", id.to_owned()).header("large", large)).await;
    };
    receiving.settles(publish).await;
    receiving.stop().await;
    assert_eq!(committed(&kafka, "postbox", "orders", 1).await, 6);
}
