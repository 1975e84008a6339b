//! Three servers and a stream with three replicas, whose leader is killed under load.

use std::time::Duration;

use postbox_testkit::sending::{PATIENCE, Working};
use postbox_testkit::servers::{NatsVersion, PrivateNats};
use postbox_testkit::sink_faults::whole_and_in_order;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::broker::{api, stream};
use crate::faults::arrived;
use crate::stand::sink;

/// Longest wait for a new leader. Nodes of a busy machine may vote in vain several times.
const ELECTION: Duration = PATIENCE.saturating_mul(3);

#[tokio::test]
async fn a_leader_of_2_9_that_is_killed_under_load_loses_and_repeats_nothing() {
    leaders_are_killed(NatsVersion::V2_9).await;
}

#[tokio::test]
async fn a_leader_of_2_15_that_is_killed_under_load_loses_and_repeats_nothing() {
    leaders_are_killed(NatsVersion::V2_15).await;
}

/// The second leader that is killed is one of those that took over from the first, and the first is
/// back by then. Each election takes seconds.
async fn leaders_are_killed(version: NatsVersion) {
    let mut nodes = PrivateNats::launch_cluster(version).await;
    let urls = [nodes[0].url(), nodes[1].url(), nodes[2].url()];
    let client = async_nats::connect(&urls[..]).await.expect("a client");
    stream(&client, "EVENTS", &["in.>"], json!({ "num_replicas": 3 })).await;
    let working = Working::start(sink(&urls.join(","), "subject = \"in.{topic}\"\nstream = \"EVENTS\"").await);
    let mut appended = 0;
    for _ in 0..2 {
        working.append(appended..appended + 1_000).await;
        appended += 1_000;
        let leader = leader_once(&client, &working, appended - 900).await;
        nodes[leader].kill();
        // Another node becomes leader and takes the rest.
        working.append(appended..appended + 200).await;
        appended += 200;
        leader_once(&client, &working, appended).await;
        nodes[leader].start().await;
        current(&client).await;
    }
    let snapshot = working.relay.metrics().snapshot();
    working.stop().await;
    let stored = arrived(&client).await;
    whole_and_in_order(&stored, appended);
    assert_eq!(stored.len(), appended, "each once");
    assert_eq!((snapshot.dead, snapshot.delivered), (0, appended as u64), "{version:?}");
}

/// Waits until `count` messages are stored, and returns the leader.
async fn leader_once(client: &async_nats::Client, working: &Working, count: usize) -> usize {
    let mut last = Ok(Value::Null);
    let there = async {
        loop {
            last = api(client, "STREAM.INFO.EVENTS", Value::Null).await;
            if let Ok(info) = &last
                && info["state"]["messages"].as_u64() >= Some(count as u64)
                && let Some(leader) = info["cluster"]["leader"].as_str()
            {
                return leader[1..].parse().expect("n and its number");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    match timeout(ELECTION, there).await {
        Ok(leader) => leader,
        Err(_) => panic!("{count} are not stored: the stream {last:?}; {:?}", working.relay.metrics().snapshot()),
    }
}

/// Waits until all replicas have all messages.
async fn current(client: &async_nats::Client) {
    let all = async {
        loop {
            if let Ok(info) = api(client, "STREAM.INFO.EVENTS", Value::Null).await {
                let replicas = info["cluster"]["replicas"].as_array().cloned().unwrap_or_default();
                if replicas.len() == 2 && replicas.iter().all(|replica| replica["current"] == true) {
                    return;
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(ELECTION, all).await.expect("the replicas catch up");
}
