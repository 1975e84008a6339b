//! Groups with several members, brokers that are down or lose data, and failed commits.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use krafka::Compression;
use krafka::error::ErrorCode;
use krafka::producer::Record;
use krafka::testing::{ApiKey, Control, FakeBroker};
use postbox_core::{ErrorKind, Source};
use postbox_testkit::receiving::{ack, take};
use postbox_testkit::sending::PATIENCE;
use postbox_testkit::servers::PrivateKafka;
use tokio::time::timeout;

use super::stand::{LOOK, bodies, client, committed, make_topic, publish, source};

pub(crate) const KEYS: &str = "topic = \"orders\"";

pub(crate) async fn fake(partitions: i32) -> FakeBroker {
    let broker = FakeBroker::start().await.expect("a broker");
    broker.create_topic("orders", partitions);
    broker
}

/// Receives and acknowledges from all sources, until `all` different messages were seen.
async fn drain(sources: &[Arc<dyn Source>], seen: &mut BTreeMap<String, usize>, all: usize) {
    let drained = async {
        while seen.len() < all {
            for source in sources {
                let Ok(Ok(taken)) = timeout(Duration::from_millis(100), source.next(50)).await else { continue };
                ack(&**source, &taken).await;
                bodies(&taken).into_iter().for_each(|body| *seen.entry(body).or_default() += 1);
            }
        }
    };
    timeout(PATIENCE, drained).await.expect("all of them in time");
}

async fn members_share_and_lose_nothing(brokers: &str) {
    let kafka = client(brokers).await;
    let first = source(brokers, KEYS).await;
    publish(&kafka, "orders", 0..200).await;
    let mut seen = BTreeMap::new();
    // Some messages are acknowledged and some are in flight when the second member joins.
    let taken = take(&*first, 100).await;
    ack(&*first, &taken[..50]).await;
    bodies(&taken[..50]).into_iter().for_each(|body| *seen.entry(body).or_default() += 1);
    let second = source(brokers, KEYS).await;
    let both = [Arc::clone(&first), Arc::clone(&second)];
    drain(&both, &mut seen, 200).await;
    publish(&kafka, "orders", 200..400).await;
    drain(&both, &mut seen, 400).await;
    // One member leaves with messages in flight. The other gets all partitions.
    publish(&kafka, "orders", 400..600).await;
    let left_open = take(&*first, 10).await;
    timeout(PATIENCE, first.close()).await.expect("closed in time");
    drop(left_open);
    drain(&[Arc::clone(&second)], &mut seen, 600).await;
    let expected: BTreeSet<String> = (0..600).map(|n| n.to_string()).collect();
    assert_eq!(seen.keys().cloned().collect::<BTreeSet<_>>(), expected);
    // Messages that were acknowledged during a rebalance are not committed, and are delivered
    // again.
    let all_committed = async {
        while committed(&kafka, "postbox", "orders", 4).await < 600 {
            if let Ok(Ok(again)) = timeout(Duration::from_millis(100), second.next(50)).await {
                ack(&*second, &again).await;
            }
        }
    };
    timeout(PATIENCE, all_committed).await.expect("all of it committed in time");
    assert_eq!(committed(&kafka, "postbox", "orders", 4).await, 600, "and no more");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_come_and_go_without_loss() {
    let broker = fake(4).await;
    members_share_and_lose_nothing(&broker.bootstrap_servers()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_of_a_real_server_s_group_come_and_go_without_loss() {
    let server = PrivateKafka::launch().await;
    make_topic(&client(&server.brokers()).await, "orders", 4).await;
    members_share_and_lose_nothing(&server.brokers()).await;
}

/// Messages are delivered again from the first unsettled one on, and none before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_begins_where_everything_before_is_settled() {
    let server = PrivateKafka::launch().await;
    let kafka = client(&server.brokers()).await;
    make_topic(&kafka, "orders", 1).await;
    publish(&kafka, "orders", 0..5).await;
    let before = source(&server.brokers(), KEYS).await;
    let taken = take(&*before, 5).await;
    ack(&*before, &taken[3..]).await;
    assert_eq!(committed(&kafka, "postbox", "orders", 1).await.max(0), 0, "the first is not settled");
    ack(&*before, &taken[..2]).await;
    assert_eq!(committed(&kafka, "postbox", "orders", 1).await, 2);
    before.close().await;
    let after = source(&server.brokers(), KEYS).await;
    assert_eq!(bodies(&take(&*after, 3).await), ["2", "3", "4"]);
}

/// A second member gets its partitions although nothing reads from the first, because its store is
/// down.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_whose_store_is_away_takes_part_in_the_group() {
    let broker = fake(2).await;
    let kafka = client(&broker.bootstrap_servers()).await;
    publish(&kafka, "orders", 0..100).await;
    let keys = format!("{KEYS}\nin_flight = 1");
    let away = source(&broker.bootstrap_servers(), &keys).await;
    let held = take(&*away, 1).await;
    let other = source(&broker.bootstrap_servers(), KEYS).await;
    assert!(!take(&*other, 1).await.is_empty());
    // The rebalance took the partition of the message in flight, so there is room for another.
    assert!(!take(&*away, 1).await.is_empty());
    ack(&*away, &held).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_fails_is_said_and_made_up_for() {
    let broker = fake(1).await;
    let kafka = client(&broker.bootstrap_servers()).await;
    publish(&kafka, "orders", 0..3).await;
    let source = source(&broker.bootstrap_servers(), KEYS).await;
    let taken = take(&*source, 3).await;
    broker.on(ApiKey::OffsetCommit, |_| Control::Error(ErrorCode::GroupAuthorizationFailed));
    let tokens: Vec<_> = taken.iter().map(|it| it.token).collect();
    let error = source.ack(&tokens).await.expect_err("refused");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Unauthorized, "kafka_not_permitted"));
    broker.clear_hooks();
    let caught_up = async {
        while broker.committed_offset("postbox", "orders", 0) != Some(3) {
            tokio::time::sleep(LOOK).await;
        }
    };
    timeout(PATIENCE, caught_up).await.expect("without another ack");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_is_away_loses_no_message() {
    let broker = fake(1).await;
    let kafka = client(&broker.bootstrap_servers()).await;
    publish(&kafka, "orders", 0..3).await;
    let source = source(&broker.bootstrap_servers(), KEYS).await;
    let taken = take(&*source, 2).await;
    ack(&*source, &taken[..1]).await;
    broker.crash(0);
    tokio::time::sleep(Duration::from_millis(500)).await;
    broker.restart(0);
    publish(&kafka, "orders", 3..5).await;
    let mut seen: BTreeSet<String> = bodies(&taken).into_iter().collect();
    while seen.len() < 5 {
        seen.extend(bodies(&take(&*source, 1).await));
    }
    assert_eq!(seen, (0..5).map(|n| n.to_string()).collect());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_aborted_transaction_is_not_received() {
    let broker = fake(1).await;
    let kafka = client(&broker.bootstrap_servers()).await;
    let producer = kafka.producer().metrics_push(false).build_transactional("writer").await.expect("a producer");
    for (body, keep) in [("aborted", false), ("committed", true)] {
        producer.begin().expect("begun");
        let sent = producer.send(Record::new("orders", body.as_bytes().to_vec())).await;
        assert!(sent.expect("sent").is_persisted());
        match keep {
            true => producer.commit().await.expect("committed"),
            false => producer.abort().await.expect("aborted"),
        }
    }
    let source = source(&broker.bootstrap_servers(), KEYS).await;
    assert_eq!(bodies(&take(&*source, 1).await), ["committed"]);
}

/// zstd is not here: the client of these tests cannot write it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_others_compress_is_read() {
    let broker = fake(1).await;
    let kafka = client(&broker.bootstrap_servers()).await;
    let body = "compressible ".repeat(1_000);
    let all = [Compression::Gzip, Compression::Snappy, Compression::Lz4];
    for compression in all {
        let producer = kafka.producer().compression(compression).metrics_push(false).build().await.expect("a producer");
        assert!(producer.send(Record::new("orders", body.clone())).await.expect("sent").is_persisted());
        producer.close().await.expect("closed");
    }
    let source = source(&broker.bootstrap_servers(), KEYS).await;
    assert!(bodies(&take(&*source, all.len()).await).iter().all(|read| *read == body));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_begins_where_the_configuration_says() {
    let broker = fake(1).await;
    let kafka = client(&broker.bootstrap_servers()).await;
    publish(&kafka, "orders", 0..3).await;
    let latest =
        source(&broker.bootstrap_servers(), &format!("{KEYS}\ngroup = \"l\"\noffset_reset = \"latest\"")).await;
    assert!(timeout(Duration::from_secs(2), latest.next(1)).await.is_err(), "nothing of before");
    publish(&kafka, "orders", 3..4).await;
    assert_eq!(bodies(&take(&*latest, 1).await), ["3"]);
    let earliest = source(&broker.bootstrap_servers(), KEYS).await;
    assert_eq!(bodies(&take(&*earliest, 4).await), ["0", "1", "2", "3"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_missing_is_named_with_the_command_that_makes_it() {
    let broker = fake(1).await;
    let source = source(&broker.bootstrap_servers(), "topic = \"nothing\"").await;
    let error = timeout(PATIENCE, source.next(1)).await.expect("in time").expect_err("not there");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "kafka_topic_missing"), "{error}");
    assert!(error.message().contains("--create --topic nothing"), "{error}");
    // The topic is created now, and the next call finds it.
    broker.create_topic("nothing", 1);
    publish(&client(&broker.bootstrap_servers()).await, "nothing", 0..1).await;
    assert_eq!(bodies(&take(&*source, 1).await), ["0"]);
}
