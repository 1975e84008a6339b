//! Topics that are deleted and created again.
//!
//! Only for krafka. librdkafka does not notice another topic of the same name, and no server shows
//! what it then does: krafka's test broker refuses a fetch with an answer that librdkafka does not
//! accept (records of size -1), and librdkafka 2.12.1 crashes (it compares a name that is null)
//! when Tansu answers a fetch from a missing topic with neither its name nor its id.

use krafka::admin::DeleteTopicsOptions;
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
    let deleted = kafka.admin().delete_topics(["orders"], DeleteTopicsOptions::default()).await.expect("an answer");
    deleted.into_values().for_each(|deleted| deleted.expect("deleted"));
    make_topic(&kafka, "orders", 1).await;
    let kafka = client(&server.brokers()).await;
    publish(&kafka, "orders", 10..12).await;
    assert_eq!(bodies(&take(&*source, 2).await), ["10", "11"]);
}
