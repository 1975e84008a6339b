//! Hostile events are dead with a code and never become something else on the wire. The connection
//! survives, and other events flow.

use bytes::Bytes;
use postbox_core::{Delivery, NewEvent};
use postbox_testkit::hostile;
use postbox_testkit::sending::{codes, deliver, deliveries, said};
use postbox_testkit::servers::PrivateMqtt;

use crate::support::{Gateway, Peer, property, server, sink};

fn plain() -> NewEvent {
    NewEvent::json("t", "{}").key("k")
}

#[tokio::test]
async fn hostile_events_never_become_another_message() {
    let server = server().await;
    let gateway = Gateway::in_front_of(&server.url()).await;
    let mut all = Peer::connect(&server.url()).await;
    all.subscribe("#").await;
    let sink = sink(&gateway.url(), "topic = \"in/{topic}/{key}\"").await;
    for hostile::Case { name, event, .. } in hostile::keyed() {
        let sent = deliveries([event, plain()]);
        let outcomes = deliver(&sink, &sent).await;
        let out = match said(&outcomes[0]).as_str() {
            "delivered" => &sent[..],
            "dead topic_invalid" | "dead header_invalid" => &sent[1..],
            "dead payload_too_large" if sent[0].event.payload.len() >= 1_000_000 => &sent[1..],
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!(said(&outcomes[1]), "delivered", "beside {name}");
        let topic = |it: &Delivery| format!("in/{}/{}", it.event.topic, it.event.key.as_ref().expect("a key"));
        let expected: Vec<_> = out.iter().map(|it| (Bytes::from(topic(it)), it.event.payload.clone())).collect();
        let arrived: Vec<_> = all.drain().await.into_iter().map(|it| (it.topic, it.payload)).collect();
        assert!(arrived == expected, "{name}: {:?}", arrived.iter().map(|it| &it.0).collect::<Vec<_>>());
    }
    assert_eq!(gateway.connections(), 1, "the connection survived all of it");
}

#[tokio::test]
async fn what_no_message_can_have_dies_alone() {
    let server = server().await;
    let gateway = Gateway::in_front_of(&server.url()).await;
    let mut all = Peer::connect(&server.url()).await;
    all.subscribe("#").await;
    let sink = sink(&gateway.url(), "topic = \"{topic}\"\nmessage_max = \"64KiB\"").await;
    for (event, code) in [
        (plain().header("x", "a\r\nb"), "header_invalid"),
        (plain().header("x", "a\0b"), "header_invalid"),
        (plain().key("a\u{85}"), "header_invalid"),
        (plain().header("x", "v".repeat(65_536)), "header_invalid"),
        (NewEvent::json("$SYS/broker/uptime", "{}"), "topic_invalid"),
        (NewEvent::json("a/+/b", "{}"), "topic_invalid"),
        (NewEvent::json("t".repeat(65_536), "{}"), "topic_invalid"),
        (NewEvent::json("t", vec![b'x'; 64 * 1024]), "payload_too_large"),
    ] {
        let outcomes = deliver(&sink, &deliveries([event, plain()])).await;
        assert_eq!(codes(&outcomes), [format!("dead {code}"), "delivered".to_owned()]);
        assert_eq!(all.drain().await.len(), 1, "only the plain one went out");
    }
    assert_eq!(gateway.connections(), 1);
}

/// If a server names its own limit, a larger message is not sent at all.
#[tokio::test]
async fn what_the_server_finds_too_large_is_not_sent() {
    let server = PrivateMqtt::launch_with("allow_anonymous true\nmax_packet_size 1000\n").await;
    let gateway = Gateway::in_front_of(&server.url()).await;
    let mut all = Peer::connect(&server.url()).await;
    all.subscribe("#").await;
    let sink = sink(&gateway.url(), "topic = \"{topic}\"").await;
    let outcomes = deliver(&sink, &deliveries([NewEvent::json("t", vec![b' '; 1_000]), plain()])).await;
    assert_eq!(codes(&outcomes), ["dead payload_too_large", "delivered"]);
    assert_eq!(gateway.attempts().len(), 1);
}

/// A header of an event cannot replace an attribute of the event, or its id.
#[tokio::test]
async fn no_event_can_pose_as_another() {
    let server = server().await;
    let mut all = Peer::connect(&server.url()).await;
    all.subscribe("#").await;
    for envelope in ["cloudevents-binary", "raw"] {
        let sink = sink(&server.url(), &format!("topic = \"{{topic}}\"\nenvelope = {envelope:?}")).await;
        let forged = ["id", "type", "Source", "subject", "tenant", "Postbox-Id", "content-type"];
        let event = forged.iter().fold(plain(), |event, name| event.header(*name, "forged")).header("mine", "1");
        let sent = deliveries([event]);
        assert_eq!(codes(&deliver(&sink, &sent).await), ["delivered"]);
        let arrived = all.drain().await.remove(0);
        assert_eq!(property(&arrived, "postbox-id"), Some(sent[0].dedupe_id()));
        assert_eq!(property(&arrived, "mine").as_deref(), Some("1"));
        let properties = arrived.properties.expect("properties");
        assert!(properties.user_properties.iter().all(|(_, value)| value != "forged"), "{properties:?}");
        assert_eq!(properties.content_type.as_deref(), Some("application/json"));
    }
}

/// Mosquitto closes the connection over such a message. The engine sends other events of the call
/// again.
#[tokio::test]
async fn a_message_beyond_a_limit_that_the_server_does_not_name_is_named_by_us() {
    let server = PrivateMqtt::launch_with("allow_anonymous true\nmessage_size_limit 1000\n").await;
    let mut all = Peer::connect(&server.url()).await;
    all.subscribe("#").await;
    let sink = sink(&server.url(), "topic = \"{topic}\"").await;
    let outcomes = deliver(&sink, &deliveries([NewEvent::json("t", vec![b' '; 1_001])])).await;
    assert_eq!(codes(&outcomes), ["ambiguous mqtt_message_too_large"]);
    assert_eq!(codes(&deliver(&sink, &deliveries([plain()])).await), ["delivered"]);
}
