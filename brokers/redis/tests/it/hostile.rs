//! Hostile events, verified by what is stored in the stream.

use std::collections::BTreeMap;

use postbox_core::{NewEvent, Outcome};
use postbox_testkit::hostile::accepted;

use super::support::{Broker, Fields, field, text};
use super::{PATIENCE, SERVERS, deliver, deliveries, said, sink_with};

/// Every event that a store accepts is in its stream unchanged, byte for byte, and in no other
/// stream.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_event_is_in_its_stream_as_it_was() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let sink = sink_with(&broker, PATIENCE, |config| config.stream = "s:{topic}".parse().expect("a template"));
        for case in accepted() {
            let event = case.event.clone();
            let sent = deliveries([event, NewEvent::json("plain", "{}")]);
            let outcomes = deliver(&sink, &sent).await;
            assert_eq!([said(&outcomes[0]), said(&outcomes[1])], ["delivered", "delivered"], "{}", case.name);
            let stream = format!("s:{}", case.event.topic);
            let last: Vec<(String, Fields)> = {
                let mut command = redis::cmd("XREVRANGE");
                command.arg(&stream).arg("+").arg("-").arg("COUNT").arg(1);
                command.query_async(&mut broker.connection().await).await.expect("an answer")
            };
            let fields = &last[0].1;
            let event = &sent[0].event;
            assert_eq!(text(fields, "id"), Some(sent[0].dedupe_id()), "{}", case.name);
            assert_eq!(text(fields, "topic").as_deref(), Some(event.topic.as_str()), "{}", case.name);
            assert_eq!(text(fields, "key").as_deref(), event.key.as_ref().map(|key| key.as_str()), "{}", case.name);
            assert_eq!(text(fields, "content-type").as_deref(), Some(event.content_type()), "{}", case.name);
            assert_eq!(field(fields, "payload").expect("a payload"), event.payload, "{}", case.name);
            let headers: BTreeMap<String, String> = fields
                .iter()
                .filter_map(|(name, value)| {
                    Some((name.strip_prefix("header:")?.to_owned(), String::from_utf8(value.clone()).expect("text")))
                })
                .collect();
            let reserved = |name: &str| name.starts_with("ce-") || name == "content-type";
            let expected: BTreeMap<String, String> =
                event.headers.clone().into_iter().filter(|(name, _)| !reserved(name)).collect();
            assert_eq!(headers, expected, "{}", case.name);
        }
        let keys: Vec<Vec<u8>> = broker.ask("KEYS *").await;
        assert!(keys.iter().all(|key| key.starts_with(b"s:")), "no other key was made");
    }
}

/// A server with a small limit closes the connection at a larger value, and the other events of the
/// call would fail too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_server_would_not_take_dies_alone() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let () = broker.ask("CONFIG SET proto-max-bulk-len 1048576").await;
        let sink = sink_with(&broker, PATIENCE, |_| ());
        let large = |bytes| NewEvent::new("t", vec![b'x'; bytes], "a/b");
        let events = [NewEvent::json("t", "1"), large(1024 * 1024), large(1024 * 1024 + 1), NewEvent::json("t", "2")];
        let outcomes: Vec<String> = deliver(&sink, &deliveries(events)).await.iter().map(said).collect();
        assert_eq!(outcomes, ["delivered", "delivered", "dead redis_value_too_large", "delivered"]);
        assert_eq!(broker.ask::<usize>("XLEN events").await, 3);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_event_gets_into_the_stream_of_another_tenant() {
    for kind in SERVERS {
        let broker = Broker::start(kind).await;
        let sink =
            sink_with(&broker, PATIENCE, |config| config.stream = "{tenant}:{topic}".parse().expect("a template"));
        let event = |tenant: &str, topic: &str| NewEvent::json(topic, "{}").tenant(tenant);
        let sent = deliveries([event("a", "b:c"), event("a:b", "c"), NewEvent::json("c", "{}")]);
        let outcomes = deliver(&sink, &sent).await;
        assert!(matches!(&outcomes[0], Outcome::Delivered { .. }));
        assert_eq!([said(&outcomes[1]), said(&outcomes[2])], ["dead stream_invalid"; 2]);
        assert_eq!(broker.ask::<usize>("XLEN a:b:c").await, 1);
    }
}
