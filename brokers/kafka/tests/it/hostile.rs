//! Hostile events, verified by what is stored in the topic.

use std::collections::BTreeMap;

use postbox_core::NewEvent;
use postbox_testkit::hostile::accepted;
use postbox_testkit::sending::{codes, deliver, deliveries, said};
use postbox_testkit::servers::PrivateKafka;

use super::stand::{client, header, make_topic, records, sink};

/// Every event that a store accepts is in the topic unchanged, byte for byte.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_event_is_in_the_topic_as_it_was() {
    let server = PrivateKafka::launch().await;
    let kafka = client(&server.brokers()).await;
    make_topic(&kafka, "events", 1).await;
    let keys = "topic = \"events\"\nenvelope = \"raw\"\nmessage_max = \"32MiB\"";
    let sink = sink(&server.brokers(), keys).await;
    // Half of the largest batch that a server accepts.
    let is_small = |event: &NewEvent| event.payload.len() < 512 * 1024;
    let taken = accepted().filter(|case| is_small(&case.event));
    let (names, events): (Vec<String>, Vec<NewEvent>) = taken.map(|case| (case.name, case.event)).unzip();
    let sent = deliveries(events);
    for (name, sent) in names.iter().zip(&sent) {
        assert_eq!(codes(&deliver(&sink, std::slice::from_ref(sent)).await), ["delivered"], "{name}");
    }
    let stored = records(&kafka, "events").await;
    assert_eq!(stored.len(), sent.len());
    for ((name, sent), record) in names.iter().zip(&sent).zip(&stored) {
        let event = &sent.event;
        assert_eq!(header(record, "postbox-id"), Some(sent.dedupe_id()), "{name}");
        assert_eq!(record.key_str(), event.key.as_ref().map(|key| key.as_str()), "{name}");
        assert_eq!(record.value.as_deref(), Some(&event.payload[..]), "{name}");
        assert_eq!(header(record, "content-type").as_deref(), Some(event.content_type()), "{name}");
        let is_reserved = |name: &str| {
            let name = name.to_ascii_lowercase();
            name.starts_with("ce_") || name == "content-type" || name == "postbox-id"
        };
        let text = |value: &Option<bytes::Bytes>| String::from_utf8(value.clone().expect("a value").to_vec());
        let found: BTreeMap<String, String> = record
            .headers
            .iter()
            .filter(|(name, _)| !is_reserved(name))
            .map(|(name, value)| (name.clone(), text(value).expect("text")))
            .collect();
        let expected: BTreeMap<String, String> =
            event.headers.clone().into_iter().filter(|(name, _)| !is_reserved(name)).collect();
        assert_eq!(found, expected, "{name}");
        assert_eq!(record.headers.iter().filter(|(name, _)| name == "postbox-id").count(), 1, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_can_be_no_topic_dies_alone() {
    let server = PrivateKafka::launch().await;
    let kafka = client(&server.brokers()).await;
    make_topic(&kafka, "plain", 1).await;
    let sink = sink(&server.brokers(), "topic = \"{topic}\"").await;
    for topic in ["a b", "a\r\nb", "..", "__consumer_offsets", "zażółć", "a/b", &"t".repeat(250)] {
        let plain = NewEvent::json("plain", "{}");
        let outcomes = deliver(&sink, &deliveries([NewEvent::json(topic, "{}"), plain])).await;
        assert_eq!([said(&outcomes[0]), said(&outcomes[1])], ["dead topic_invalid", "delivered"], "{topic:?}");
    }
    assert_eq!(records(&kafka, "plain").await.len(), 7);
    let listed = kafka.admin().list_topics(Default::default()).await.expect("an answer");
    assert_eq!(listed, ["plain"], "nothing else was made");
}
