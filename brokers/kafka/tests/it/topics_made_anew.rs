//! Topics that are deleted and created again.
//!
//! Only for krafka. librdkafka does not notice another topic of the same name, and no server shows
//! what it then does: krafka's test broker refuses a fetch with an answer that librdkafka does not
//! accept (records of size -1), and librdkafka 2.12.1 crashes (it compares a name that is null)
//! when Tansu answers a fetch from a missing topic with neither its name nor its id.
//!
//! Tansu does not return the metadata of an offset, so only krafka's test broker shows that the
//! offset of a former topic is recognised.

use std::collections::BTreeSet;

use krafka::Kafka;
use krafka::admin::{AlterConsumerGroupOffsetsOptions, DeleteTopicsOptions, TopicPartition};
use postbox_testkit::receiving::{ack, take};
use postbox_testkit::servers::PrivateKafka;

use super::source_faults::{KEYS, fake};
use super::stand::{bodies, client, make_topic, publish, source};

/// The group's committed offset is past the end of the new topic.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_is_made_anew_is_read_from_its_beginning() {
    let broker = fake(1).await;
    let kafka = client(&broker.bootstrap_servers()).await;
    publish(&kafka, "orders", 0..5).await;
    let source = source(&broker.bootstrap_servers(), KEYS).await;
    ack(&*source, &take(&*source, 5).await).await;
    broker.delete_topic("orders");
    broker.create_topic("orders", 1);
    let kafka = client(&broker.bootstrap_servers()).await;
    publish(&kafka, "orders", 10..12).await;
    let taken = take(&*source, 2).await;
    assert_eq!(bodies(&taken), ["10", "11"]);
    ack(&*source, &taken).await;
    assert_eq!(broker.committed_offset("postbox", "orders", 0), Some(2), "the place is of this topic");
}

/// The server loses the group, too, and answers a member that it has forgotten as if nothing had
/// happened.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_comes_back_empty_is_read_from_its_beginning() {
    let mut server = PrivateKafka::launch().await;
    let kafka = client(&server.brokers()).await;
    make_topic(&kafka, "orders", 1).await;
    publish(&kafka, "orders", 0..5).await;
    let before = source(&server.brokers(), KEYS).await;
    ack(&*before, &take(&*before, 5).await).await;
    server.kill();
    server.start().await;
    let kafka = client(&server.brokers()).await;
    make_topic(&kafka, "orders", 1).await;
    publish(&kafka, "orders", 10..12).await;
    assert_eq!(bodies(&take(&*before, 2).await), ["10", "11"]);
}

/// Such a topic has another id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_a_real_server_makes_anew_is_read_by_the_same_member() {
    let server = PrivateKafka::launch().await;
    let kafka = client(&server.brokers()).await;
    make_topic(&kafka, "orders", 1).await;
    publish(&kafka, "orders", 0..5).await;
    let source = source(&server.brokers(), KEYS).await;
    ack(&*source, &take(&*source, 5).await).await;
    delete_topic(&kafka).await;
    make_topic(&kafka, "orders", 1).await;
    let kafka = client(&server.brokers()).await;
    publish(&kafka, "orders", 10..12).await;
    assert_eq!(bodies(&take(&*source, 2).await), ["10", "11"]);
}

async fn delete_topic(kafka: &Kafka) {
    let deleted = kafka.admin().delete_topics(["orders"], DeleteTopicsOptions::default()).await.expect("an answer");
    deleted.into_values().for_each(|deleted| deleted.expect("deleted"));
}

/// The offset that the group commits is within the new topic.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_offset_of_a_former_topic_skips_messages_of_the_new_one() {
    let broker = fake(1).await;
    let brokers = broker.bootstrap_servers();
    publish(&client(&brokers).await, "orders", 0..5).await;
    let source = source(&brokers, KEYS).await;
    let taken = take(&*source, 5).await;
    broker.delete_topic("orders");
    broker.create_topic("orders", 1);
    // The source does not know of it yet.
    ack(&*source, &taken).await;
    publish(&client(&brokers).await, "orders", 10..20).await;
    let mut seen = BTreeSet::new();
    while seen.len() < 10 {
        let taken = take(&*source, 1).await;
        ack(&*source, &taken).await;
        seen.extend(bodies(&taken));
    }
    assert_eq!(seen, (10..20).map(|n| n.to_string()).collect());
}

/// The id of the former topic is beside the group's offset, not in the memory of a member.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_is_made_anew_while_nobody_reads_is_read_whole_and_once() {
    let broker = fake(1).await;
    let brokers = broker.bootstrap_servers();
    publish(&client(&brokers).await, "orders", 0..5).await;
    let before = source(&brokers, KEYS).await;
    ack(&*before, &take(&*before, 5).await).await;
    before.close().await;
    broker.delete_topic("orders");
    broker.create_topic("orders", 1);
    let kafka = client(&brokers).await;
    publish(&kafka, "orders", 10..20).await;
    let first = source(&brokers, KEYS).await;
    let taken = take(&*first, 10).await;
    assert_eq!(bodies(&taken), (10..20).map(|n| n.to_string()).collect::<Vec<_>>());
    ack(&*first, &taken).await;
    first.close().await;
    publish(&kafka, "orders", 20..21).await;
    let next = source(&brokers, KEYS).await;
    assert_eq!(bodies(&take(&*next, 1).await), ["20"], "the group's offset is of the new topic");
}

/// Of a client that does not write a topic's id beside it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_offset_without_a_topic_id_is_taken_as_it_is() {
    let broker = fake(1).await;
    let brokers = broker.bootstrap_servers();
    let kafka = client(&brokers).await;
    publish(&kafka, "orders", 0..5).await;
    let (admin, options) = (kafka.admin(), AlterConsumerGroupOffsetsOptions::default());
    let offset = [(TopicPartition::new("orders", 0), 3)];
    let set = admin.alter_consumer_group_offsets("postbox", offset, options).await.expect("an answer");
    set.into_values().for_each(|set| set.expect("committed"));
    let source = source(&brokers, KEYS).await;
    assert_eq!(bodies(&take(&*source, 2).await), ["3", "4"]);
}
