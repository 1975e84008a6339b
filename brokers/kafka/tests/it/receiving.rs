//! Sends events to a topic, and receives from it into an inbox.

use bytes::Bytes;
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
    let send = async |id: &str, key: Option<&'static [u8]>, body: &'static str| {
        let mut record = Record::new("orders", body.as_bytes()).header("postbox-id", id.to_owned());
        if body == "poison" {
            record = record.header("large", "x".repeat(20_000));
        }
        record.key = key.map(Bytes::from_static);
        assert!(producer.send(record).await.expect("sent").is_persisted());
    };
    send("1", None, "one").await;
    send("1", None, "one").await;
    send("1", None, "another").await;
    // A key that is not text is accepted. Headers that no event can have make the message poison.
    send("2", Some(b"\xff\xfe"), "binary").await;
    send("3", None, "poison").await;
    send("4", None, "four").await;
    receiving.settled(4).await;
    let all = receiving.inbox.all();
    assert_eq!(all.iter().find(|it| it.message_id == "2").expect("stored").event.key.as_deref(), Some("fffe"));
    receiving.stop().await;
    assert_eq!(committed(&kafka, "postbox", "orders", 1).await, 6);
}
