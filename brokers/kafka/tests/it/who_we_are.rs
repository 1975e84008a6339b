//! Authentication, warnings, and the answers of `check-config --connect`.

use krafka::testing::FakeBroker;
use postbox_config::{ReadOptions, SinkConfig as _, SourceConfig as _, read};
use postbox_core::ErrorKind;
use postbox_kafka::KafkaSinkTable;
use postbox_testkit::receiving::source_context;
use postbox_testkit::sending::{self, codes, context, deliver, numbered};
use postbox_testkit::warnings::Warnings;

use super::stand::{SHORT, basics, sink, table};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_is_needed_where_it_is_asked_for() {
    let broker = FakeBroker::start().await.expect("a broker");
    broker.create_topic("events", 1);
    broker.require_sasl_plain("writer", "secret");
    let with = async |password: &str| {
        let auth = format!("auth = {{ mechanism = \"plain\", user = \"writer\", password = {password:?} }}");
        sink(&broker.bootstrap_servers(), &format!("topic = \"events\"\n{auth}")).await
    };
    assert_eq!(codes(&deliver(&with("secret").await, &numbered(1)).await), ["delivered"]);
    let wrong = deliver(&with("wr0ng").await, &numbered(1)).await;
    assert_eq!(codes(&wrong), ["unavailable kafka_unauthorized"]);
    assert!(!format!("{wrong:?}").contains("wr0ng"), "{wrong:?}");
    let scram =
        "topic = \"events\"\nauth = { mechanism = \"scram-sha-512\", user = \"writer\", password = \"secret\" }";
    if crate::CLIENT == "krafka" {
        let scram = sink(&broker.bootstrap_servers(), scram).await;
        assert_eq!(codes(&deliver(&scram, &numbered(1)).await), ["unavailable kafka_unauthorized"]);
    } else {
        let keys = format!("{}\n{scram}", basics(&broker.bootstrap_servers()));
        let refused = read::<KafkaSinkTable>(&keys, ReadOptions::none()).expect_err("librdkafka has none");
        assert!(refused.to_string().contains("without SCRAM"), "{refused}");
    }
}

#[tokio::test]
async fn weak_acks_are_warned_of_at_the_start() {
    let (warnings, _guard) = Warnings::hear();
    for (acks, count) in [("all", 0), ("leader", 1)] {
        let keys = format!("{}\ntopic = \"events\"\nacks = {acks:?}", basics("127.0.0.1:9092"));
        let table: KafkaSinkTable = sending::table(&keys);
        table.build(&context(SHORT)).await.expect("a sink");
        let said = warnings.all().into_iter().filter(|line| line.contains("kafka_acks_weak")).count();
        assert_eq!(said, count, "acks = {acks}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_asks_hears_what_is_there_and_nothing_is_made() {
    let broker = FakeBroker::start().await.expect("a broker");
    broker.create_topic("events", 1);
    let brokers = broker.bootstrap_servers();
    let look = async |topic: &str| {
        let keys = format!("{}\ntopic = {topic:?}", basics(&brokers));
        let table: KafkaSinkTable = sending::table(&keys);
        table.connect(&context(SHORT)).await
    };
    assert_eq!(look("events").await.expect("it is there"), "answers; the topic events is there");
    assert_eq!(look("in.{topic}").await.expect("it answers"), "answers");
    let missing = look("missing").await.expect_err("not there");
    assert_eq!((missing.kind(), missing.code()), (ErrorKind::Mismatch, "kafka_topic_missing"));
    let context = source_context();
    let said = table(&brokers, "topic = \"events\"").connect(&context).await;
    assert_eq!(said.expect("it is there"), "answers; the topic events is there");
    assert!(table(&brokers, "topic = \"events, missing\"").connect(&context).await.is_err());
    assert!(broker.topic_id("missing").is_none(), "nothing is made");
    assert_eq!(broker.request_count(krafka::testing::ApiKey::JoinGroup), 0);
    let nobody = table("127.0.0.1:1", "topic = \"events\"").connect(&context).await.expect_err("nobody");
    assert_eq!(nobody.kind(), ErrorKind::Unavailable);
}
