//! Brokers that crash, come back empty, refuse, or do not answer.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use krafka::error::ErrorCode;
use krafka::testing::{ApiKey, Control, FakeBroker};
use postbox_core::{NewEvent, Outcome};
use postbox_testkit::proxy::{Direction, FaultProxy};
use postbox_testkit::sending::{PATIENCE, codes, deliver, deliveries, numbered, said};
use postbox_testkit::servers::PrivateKafka;

use super::stand::{LOOK, client, header, make_topic, payloads, records, sink};

async fn fake(brokers: usize) -> FakeBroker {
    let broker = FakeBroker::start_cluster(brokers).await.expect("a broker");
    broker.create_topic("events", 3);
    broker
}

fn arrived(broker: &FakeBroker) -> Vec<String> {
    broker.all_records("events").expect("readable").iter().map(|it| header(it, "postbox-id").expect("an id")).collect()
}

/// Events that were reported as delivered are stored. The others are sent again until they are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn brokers_that_crash_under_load_lose_nothing_and_store_nothing_twice() {
    let broker = Arc::new(fake(3).await);
    let sink = sink(&broker.bootstrap_servers(), "topic = \"events\"").await;
    let done = Arc::new(AtomicBool::new(false));
    let harm = tokio::spawn({
        let (broker, done) = (Arc::clone(&broker), Arc::clone(&done));
        async move {
            for crashes in 0.. {
                if done.load(Ordering::SeqCst) {
                    return crashes;
                }
                let node = crashes % 3;
                broker.crash(node);
                tokio::time::sleep(LOOK * 10).await;
                broker.restart(node);
                tokio::time::sleep(LOOK * 10).await;
            }
            0
        }
    });
    let mut open = numbered(5_000);
    let all: BTreeSet<String> = open.iter().map(|delivery| delivery.dedupe_id()).collect();
    while !open.is_empty() {
        let mut call: Vec<_> = open.drain(..open.len().min(100)).collect();
        let outcomes = deliver(&sink, &call).await;
        let mut delivered = outcomes.iter().map(Outcome::is_delivered);
        call.retain(|_| !delivered.next().expect("an outcome for each"));
        open.extend(call);
    }
    done.store(true, Ordering::SeqCst);
    assert!(harm.await.expect("no panic") > 3);
    let arrived = arrived(&broker);
    assert_eq!(arrived.len(), all.len(), "one producer's repetitions are known");
    assert_eq!(arrived.into_iter().collect::<BTreeSet<_>>(), all);
}

/// The record is stored, but the answer is lost. The client repeats the request under its sequence
/// number. With `acks = "leader"` there is none, so the record is stored twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_is_asked_for_again_and_stored_once() {
    for (acks, stored) in [("all", 1), ("leader", 2)] {
        let broker = fake(1).await;
        let sink = sink(&broker.bootstrap_servers(), &format!("topic = \"events\"\nacks = {acks:?}")).await;
        broker.on_once(ApiKey::Produce, |_| Control::ApplyThen(Box::new(Control::Disconnect)));
        assert_eq!(codes(&deliver(&sink, &numbered(1)).await), ["delivered"]);
        assert_eq!(arrived(&broker).len(), stored, "acks = {acks}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_of_a_real_server_is_ambiguous_or_delivered_and_never_lost() {
    let mut proxy = None;
    let server =
        PrivateKafka::launch_behind(async |server| proxy.insert(FaultProxy::start(server).await).address()).await;
    let proxy = proxy.expect("it asked for an address");
    let kafka = client(&server.brokers()).await;
    make_topic(&kafka, "events", 1).await;
    let sink = sink(&server.brokers(), "topic = \"events\"").await;
    assert_eq!(codes(&deliver(&sink, &numbered(1)).await), ["delivered"]);
    proxy.swallow(&[Direction::ToClient]);
    let sent = deliveries([NewEvent::json("t", "swallowed")]);
    let cut = async {
        proxy.swallowed(Direction::ToClient).await;
        proxy.heal();
        proxy.reset();
    };
    let (mut outcomes, ()) = tokio::join!(deliver(&sink, &sent), cut);
    while !outcomes[0].is_delivered() {
        assert!(matches!(outcomes[0], Outcome::Ambiguous { .. } | Outcome::Unavailable { .. }), "{outcomes:?}");
        outcomes = deliver(&sink, &sent).await;
    }
    let stored = payloads(&kafka, "events").await;
    assert!(stored.contains(&"swallowed".to_owned()), "{stored:?}");
}

/// Each call ends at its deadline. After three of them, the sink makes a new producer, which
/// delivers once the brokers answer again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn brokers_that_say_nothing_cost_a_deadline_and_then_the_producer() {
    let broker = fake(1).await;
    let sink = sink(&broker.bootstrap_servers(), "topic = \"events\"").await;
    assert_eq!(codes(&deliver(&sink, &numbered(1)).await), ["delivered"]);
    assert_eq!(broker.request_count(ApiKey::InitProducerId), 1);
    broker.on(ApiKey::Produce, |_| Control::Silence);
    for _ in 0..3 {
        assert_eq!(codes(&deliver(&sink, &numbered(3)).await), ["ambiguous kafka_ack_timeout"]);
    }
    broker.clear_hooks();
    let (before, sent) = (arrived(&broker).len(), numbered(3));
    assert_eq!(codes(&deliver(&sink, &sent).await), ["delivered"]);
    assert_eq!(broker.request_count(ApiKey::InitProducerId), 2, "another producer");
    let after = arrived(&broker);
    assert_eq!(after.len(), before + 3, "what was given up is sent no more");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_server_costs_a_deadline() {
    let server = PrivateKafka::launch().await;
    let kafka = client(&server.brokers()).await;
    make_topic(&kafka, "events", 1).await;
    let sink = sink(&server.brokers(), "topic = \"events\"").await;
    assert_eq!(codes(&deliver(&sink, &numbered(1)).await), ["delivered"]);
    server.freeze();
    // A record that was still in the producer at the deadline was not sent.
    for code in codes(&deliver(&sink, &numbered(2)).await) {
        assert!(["ambiguous kafka_ack_timeout", "unavailable kafka_unreachable"].contains(&&*code), "{code}");
    }
    server.thaw();
    let mut outcomes = deliver(&sink, &numbered(1)).await;
    while !outcomes[0].is_delivered() {
        outcomes = deliver(&sink, &numbered(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_comes_back_empty_takes_events_again() {
    let mut server = PrivateKafka::launch().await;
    let kafka = client(&server.brokers()).await;
    make_topic(&kafka, "events", 1).await;
    let sink = sink(&server.brokers(), "topic = \"events\"").await;
    assert_eq!(codes(&deliver(&sink, &numbered(3)).await), ["delivered"]);
    server.kill();
    let Outcome::Unavailable { .. } = &deliver(&sink, &numbered(3)).await[0] else { panic!("unavailable") };
    server.start().await;
    make_topic(&client(&server.brokers()).await, "events", 1).await;
    let (sent, mut said) = (numbered(2), Vec::new());
    loop {
        let outcomes = deliver(&sink, &sent).await;
        if outcomes.iter().all(Outcome::is_delivered) {
            break;
        }
        said.extend(codes(&outcomes));
        assert!(said.len() < 10, "{said:?}: a new producer comes after three calls");
    }
    let kafka = client(&server.brokers()).await;
    let stored: BTreeSet<String> = payloads(&kafka, "events").await.into_iter().collect();
    assert_eq!(stored, ["0".to_owned(), "1".to_owned()].into(), "the others are lost, and nobody said so");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_topic_refuses_no_other_event_pays_for() {
    let broker = fake(1).await;
    let sink = sink(&broker.bootstrap_servers(), "topic = \"{topic}\"").await;
    let events = ["events", "missing", "events"].map(|topic| NewEvent::json(topic, "{}"));
    let outcomes = deliver(&sink, &deliveries(events)).await;
    assert_eq!(codes(&outcomes), ["delivered", "ambiguous kafka_topic_missing", "delivered"]);
    let Outcome::Ambiguous { error, .. } = &outcomes[1] else { panic!("ambiguous") };
    assert!(error.contains("--create --topic missing"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_have_their_codes() {
    for (answer, expected) in [
        (ErrorCode::TopicAuthorizationFailed, "ambiguous kafka_not_permitted"),
        (ErrorCode::MessageTooLarge, "ambiguous kafka_message_too_large"),
        (ErrorCode::InvalidRecord, "ambiguous kafka_refused"),
        // The client repeats the request until the call's time is over.
        (ErrorCode::NotEnoughReplicas, "ambiguous kafka_ack_timeout"),
    ] {
        let broker = fake(1).await;
        let sink = sink(&broker.bootstrap_servers(), "topic = \"events\"").await;
        broker.on(ApiKey::Produce, move |_| Control::Error(answer));
        assert_eq!(codes(&deliver(&sink, &numbered(2)).await), [expected], "{answer:?}");
        broker.clear_hooks();
        assert_eq!(codes(&deliver(&sink, &numbered(2)).await), ["delivered"], "{answer:?}");
    }
}

/// A topic's `max.message.bytes` applies to whole batches. A hook of the broker does not see how
/// large a request is, but its log has the batches as they came.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_batch_is_larger_than_the_largest_record() {
    let broker = fake(1).await;
    broker.create_topic("small", 1);
    let sink = sink(&broker.bootstrap_servers(), "topic = \"small\"\nmessage_max = \"60KB\"").await;
    let events = (0..1_000).map(|n| NewEvent::json("t", vec![b' '; 1_000]).key(format!("k{n}")));
    assert_eq!(codes(&deliver(&sink, &deliveries(events)).await), ["delivered"]);
    let largest = broker.with_state(|state| {
        let log = &state.partition("small", 0).expect("made").log;
        log.iter().map(Bytes::len).max().expect("batches")
    });
    assert!(largest <= 60_000, "{largest} bytes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_leader_is_found_within_the_call() {
    let broker = fake(3).await;
    let sink = sink(&broker.bootstrap_servers(), "topic = \"events\"").await;
    assert_eq!(codes(&deliver(&sink, &numbered(9)).await), ["delivered"]);
    for partition in 0..3 {
        broker.set_leader("events", partition, (partition + 1) % 3);
    }
    assert_eq!(codes(&deliver(&sink, &numbered(9)).await), ["delivered"]);
    assert_eq!(arrived(&broker).len(), 18);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_there_is_unavailable_at_once() {
    let sink = sink("127.0.0.1:1", "topic = \"events\"").await;
    let outcome = tokio::time::timeout(PATIENCE, deliver(&sink, &numbered(1))).await.expect("in time");
    assert!(
        ["unavailable kafka_connect_failed", "unavailable kafka_connect_timeout"].contains(&said(&outcome[0]).as_str()),
        "{outcome:?}"
    );
}

/// A key is always in the same partition, whichever client wrote it: the hash is that of the Java
/// client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_key_chooses_the_partition() {
    let server = PrivateKafka::launch().await;
    let kafka = client(&server.brokers()).await;
    make_topic(&kafka, "events", 5).await;
    let sink = sink(&server.brokers(), "topic = \"events\"").await;
    for _ in 0..3 {
        assert_eq!(codes(&deliver(&sink, &numbered(50)).await), ["delivered"]);
    }
    let records = records(&kafka, "events").await;
    assert_eq!(records.len(), 150);
    for record in &records {
        let key = record.key.as_deref().expect("a key");
        let hash = i32::try_from(krafka::producer::murmur2(key) & 0x7fff_ffff).expect("31 bits");
        assert_eq!(record.partition, hash % 5, "{key:?}");
    }
    assert!(records.iter().map(|it| it.partition).collect::<BTreeSet<_>>().len() > 1);
}
