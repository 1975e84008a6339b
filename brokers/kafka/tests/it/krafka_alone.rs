//! What the source does for krafka alone: krafka reports no outage by itself, and librdkafka does
//! not say where it stands in a partition before it has read a message.

use std::time::Duration;

use postbox_core::ErrorKind;
use postbox_testkit::receiving::{ack, take};
use postbox_testkit::sending::PATIENCE;
use tokio::time::timeout;

use super::source_faults::{KEYS, fake};
use super::stand::{bodies, client, publish, source};

/// The client's polls go on as if there were no messages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn brokers_that_are_gone_are_reported() {
    let broker = fake(1).await;
    publish(&client(&broker.bootstrap_servers()).await, "orders", 0..1).await;
    let source = source(&broker.bootstrap_servers(), KEYS).await;
    ack(&*source, &take(&*source, 1).await).await;
    broker.crash(0);
    let error = timeout(PATIENCE, source.next(1)).await.expect("in time").expect_err("no broker answers");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

/// It was never sent a message, so nothing but its beginning can be committed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_that_begins_at_the_end_misses_nothing_while_it_is_away() {
    let broker = fake(1).await;
    let kafka = client(&broker.bootstrap_servers()).await;
    publish(&kafka, "orders", 0..3).await;
    let keys = format!("{KEYS}\noffset_reset = \"latest\"");
    let before = source(&broker.bootstrap_servers(), &keys).await;
    let begun = async {
        while broker.committed_offset("postbox", "orders", 0) != Some(3) {
            assert!(timeout(Duration::from_millis(100), before.next(1)).await.is_err(), "nothing of before");
        }
    };
    timeout(PATIENCE, begun).await.expect("its beginning is committed");
    before.close().await;
    publish(&kafka, "orders", 3..5).await;
    let after = source(&broker.bootstrap_servers(), &keys).await;
    assert_eq!(bodies(&take(&*after, 2).await), ["3", "4"]);
}
