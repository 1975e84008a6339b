//! Receives from topics into an inbox.

use std::time::Duration;

use postbox_core::ErrorKind;
use postbox_testkit::inbox::Mode as Store;
use postbox_testkit::receiving::{Receiving, events};
use postbox_testkit::sending::{PATIENCE, codes, deliver, numbered};
use postbox_testkit::servers::PrivateMqtt;
use postbox_testkit::warnings::Warnings;
use rumqttc::v5::mqttbytes::v5::PublishProperties;
use tokio::time::timeout;

use crate::support::{Gateway, Peer, scripted, server, sink, source, table};

const KEYS: &str = "client_id = \"orders-1\"\ntopic = \"in/#\"";

/// Starts a receiver, and waits until its subscription exists.
async fn receiving(url: &str, keys: &str) -> Receiving {
    let receiving = Receiving::start(table(url, keys)).await;
    // A message that is published earlier has no subscriber.
    let mut publisher = Peer::connect(url).await;
    let subscribed = async {
        let reason = |reason| format!("{reason:?}");
        while reason(publisher.publish("in/first", &[("postbox-id", "first")], b"first").await) != "Success" {}
    };
    timeout(PATIENCE, subscribed).await.expect("subscribed in time");
    receiving.until(|it| it.inbox.all().len() == 1).await;
    receiving
}

#[tokio::test]
async fn an_event_comes_out_as_it_went_in() {
    let server = server().await;
    let receiving = receiving(&server.url(), KEYS).await;
    let sink = sink(&server.url(), "topic = \"in/{topic}\"").await;
    let sent = events();
    assert_eq!(codes(&deliver(&sink, &sent).await), ["delivered"]);
    // And one message from a publisher that knows nothing of CloudEvents.
    let mut publisher = Peer::connect(&server.url()).await;
    publisher.publish("in/plain", &[("a", "b")], b"plain").await;
    receiving.until(|it| it.inbox.all().len() == 4).await;
    receiving.has(&sent);
    let stored = receiving.inbox.all();
    let plain = stored.iter().find(|it| it.event.topic == "in/plain").expect("stored under its topic");
    assert_eq!((plain.event.headers["a"].as_str(), plain.event.content_type.as_deref()), ("b", None));
    assert!(plain.message_id.starts_with("sha256:"));
    receiving.stop().await;
}

#[tokio::test]
async fn duplicates_conflicts_and_poison_are_settled() {
    let server = server().await;
    let receiving = receiving(&server.url(), KEYS).await;
    let mut publisher = Peer::connect(&server.url()).await;
    // A topic of Postbox cannot contain a space.
    let publish = async |id: &str, body: &str| {
        let topic = if body == "poison" { "in/a b" } else { "in/a" };
        publisher.publish(topic, &[("postbox-id", id)], body.as_bytes()).await;
    };
    receiving.settles(publish).await;
    receiving.stop().await;
    // The session holds no more messages for us.
    let source = source(&server.url(), KEYS).await;
    publisher.publish("in/a", &[("postbox-id", "4")], b"four").await;
    let given = timeout(PATIENCE, source.next(10)).await.expect("in time").expect("a message");
    assert_eq!(given.iter().map(|it| &it.message.payload[..]).collect::<Vec<_>>(), [b"four"]);
}

/// The session keeps messages that arrive while no client is connected.
#[tokio::test]
async fn what_is_published_while_we_are_away_comes_later() {
    let server = server().await;
    receiving(&server.url(), KEYS).await.stop().await;
    let mut publisher = Peer::connect(&server.url()).await;
    for n in 0..50 {
        publisher.publish("in/a", &[("postbox-id", &n.to_string())], n.to_string().as_bytes()).await;
    }
    let again = Receiving::start(table(&server.url(), KEYS)).await;
    again.until(|it| it.inbox.all().len() == 50).await;
    let order: Vec<String> = again.inbox.all().into_iter().map(|it| it.message_id).collect();
    assert_eq!(order, (0..50).map(|n| n.to_string()).collect::<Vec<_>>(), "in their order");
    again.stop().await;
}

/// A task that reads a connection ends by a panic, or with the runtime that it was started in.
#[tokio::test]
async fn a_source_whose_task_is_gone_says_so_and_reads_again() {
    let server = server().await;
    let source = source(&server.url(), KEYS).await;
    let first = source.clone();
    let elsewhere = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            tokio::select! {
                biased;
                given = first.next(1) => panic!("nothing was published: {given:?}"),
                () = tokio::task::yield_now() => {}
            }
        });
    });
    elsewhere.await.expect("no panic");
    let gone = timeout(PATIENCE, source.next(1)).await.expect("in time").expect_err("nobody reads");
    assert_eq!((gone.kind(), gone.code()), (ErrorKind::Unavailable, "mqtt_connection_lost"));
    let mut publisher = Peer::connect(&server.url()).await;
    let publish = async {
        let reason = |reason| format!("{reason:?}");
        while reason(publisher.publish("in/a", &[("postbox-id", "1")], b"one").await) != "Success" {}
    };
    let (given, ()) = timeout(PATIENCE, async { tokio::join!(source.next(1), publish) }).await.expect("in time");
    assert_eq!(given.expect("read again").len(), 1);
}

/// The connection is cut again and again, with messages in flight and PUBACKs that do not arrive.
#[tokio::test]
async fn a_connection_that_is_cut_loses_nothing() {
    let server = server().await;
    let proxy = postbox_testkit::proxy::FaultProxy::in_front_of(&server.url()).await;
    let receiving = receiving(&proxy.url(&server.url()), KEYS).await;
    let mut publisher = Peer::connect(&server.url()).await;
    for n in 0..500 {
        if n % 50 == 25 {
            proxy.reset();
        }
        publisher.publish("in/a", &[("postbox-id", &n.to_string())], n.to_string().as_bytes()).await;
    }
    receiving.until(|it| it.bodies().len() == 501).await;
    assert_eq!(receiving.inbox.all().len(), 501, "each once");
    receiving.stop().await;
}

#[tokio::test]
async fn a_store_that_is_away_is_waited_for_and_no_more_is_taken() {
    let server = server().await;
    let receiving = receiving(&server.url(), &format!("{KEYS}\nin_flight = 5")).await;
    let before = receiving.inbox.counts().calls;
    receiving.inbox.set(Store::Down);
    let mut publisher = Peer::connect(&server.url()).await;
    for n in 0..20 {
        publisher.publish("in/a", &[("postbox-id", &n.to_string())], b"{}").await;
    }
    receiving.until(|it| it.inbox.counts().calls > before + 3).await;
    assert!(receiving.inbox.counts().in_flight_peak <= 5, "{:?}", receiving.inbox.counts());
    receiving.inbox.set(Store::Works);
    receiving.until(|it| it.inbox.all().len() == 21).await;
    let order: Vec<String> = receiving.inbox.all().into_iter().skip(1).map(|it| it.message_id).collect();
    assert_eq!(order, (0..20).map(|n| n.to_string()).collect::<Vec<_>>(), "in their order");
    assert_eq!(receiving.inbox.counts().duplicates, 0);
    receiving.stop().await;
}

/// A server holds no QoS 0 message back, and repeats none.
#[tokio::test]
async fn of_qos_0_what_comes_faster_than_it_is_stored_is_dropped_and_said() {
    let (warnings, _hearing) = Warnings::hear();
    let server = server().await;
    let receiving = receiving(&server.url(), &format!("{KEYS}\nin_flight = 5")).await;
    receiving.inbox.set(Store::Hangs);
    let mut publisher = Peer::connect(&server.url()).await;
    for n in 0..20 {
        publisher.publish_qos0("in/a", false, n.to_string().as_bytes()).await;
    }
    let said = || warnings.all().into_iter().filter(|line| line.contains("mqtt_qos0_dropped")).collect::<Vec<_>>();
    receiving.until(|_| !said().is_empty()).await;
    // A message that the server confirms is held back, and arrives after those.
    publisher.publish("in/a", &[("postbox-id", "last")], b"last").await;
    receiving.inbox.set(Store::Works);
    receiving.until(|it| it.bodies().contains(&b"last"[..])).await;
    let stored = receiving.inbox.all().len();
    assert!((1 + 5 + 1..1 + 20 + 1).contains(&stored), "{stored} are stored");
    assert!(said()[0].contains("topic=in/a"), "{:?}", said());
    receiving.stop().await;
}

/// A server that is killed forgets the session or some messages that it confirmed. The source warns
/// of that, and the rest arrives.
#[tokio::test]
async fn a_server_that_forgot_our_session_is_named() {
    let (warnings, _hearing) = Warnings::hear();
    let mut server = server().await;
    let receiving = receiving(&server.url(), KEYS).await;
    server.kill();
    server.empty();
    server.start().await;
    let mut publisher = Peer::connect(&server.url()).await;
    let heard =
        async { while format!("{:?}", publisher.publish("in/a", &[("postbox-id", "1")], b"1").await) != "Success" {} };
    timeout(PATIENCE, heard).await.expect("subscribed again");
    receiving.until(|it| it.inbox.all().len() == 2).await;
    receiving.stop().await;
    let said = warnings.all().into_iter().filter(|line| line.contains("mqtt_session_lost")).count();
    assert_eq!(said, 1, "{:?}", warnings.all());
}

/// A server that checks no text relays a user property of other bytes.
#[tokio::test]
async fn what_the_client_cannot_read_is_named_and_a_session_that_is_not_kept_is_said_once() {
    let (warnings, _hearing) = Warnings::hear();
    // No session is present, and it will be kept for 60 seconds.
    let connack = b"\x20\x08\0\0\x05\x11\0\0\0\x3c";
    let suback = b"\x90\x04\0\x01\0\x01\x32\x0d\0\x01a\0\x01\x07\x26\0\x01k\0\x01\xff";
    let (url, _server) = scripted(connack, suback);
    let source = source(&url, KEYS).await;
    for _ in 0..4 {
        let failed = timeout(PATIENCE, source.next(1)).await.expect("in time").expect_err("nobody can read it");
        assert_eq!((failed.kind(), failed.code()), (ErrorKind::Invalid, "mqtt_message_unreadable"), "{failed}");
        assert!(failed.message().contains("client_id orders-1 and a clean start"), "{failed}");
    }
    let said = |what: &str| warnings.all().into_iter().filter(|line| line.contains(what)).collect::<Vec<_>>();
    assert_eq!(said("mqtt_session_lost").len(), 1, "{:?}", warnings.all());
    let short = said("mqtt_session_expiry_short");
    assert!(short.len() == 1 && short[0].contains("granted_seconds=60 asked_seconds=604800"), "{short:?}");
}

/// Two processes with one client id would disconnect each other for ever.
#[tokio::test]
async fn a_second_client_of_our_name_is_named() {
    let server = server().await;
    let first = source(&server.url(), KEYS).await;
    let waiting = tokio::spawn(async move { first.next(1).await });
    let mut publisher = Peer::connect(&server.url()).await;
    // A second source with the same client id.
    let second = source(&server.url(), KEYS).await;
    let both = async {
        loop {
            publisher.publish("elsewhere", &[], b"").await;
            let _ = timeout(Duration::from_millis(20), second.next(1)).await;
            if waiting.is_finished() {
                return waiting.await.expect("no panic").expect_err("thrown out");
            }
        }
    };
    let error = timeout(PATIENCE, both).await.expect("in time");
    // The client library does not read the reason that Mosquitto gives.
    assert_eq!((error.kind(), error.code()), (ErrorKind::Unavailable, "mqtt_connection_lost"));
    assert!(error.message().contains("client_id"), "{error}");
}

/// Each of two members receives a part of the messages, and together they receive all.
#[tokio::test]
async fn members_of_a_group_share_the_messages() {
    let server = server().await;
    let keys = |n: usize| format!("client_id = \"orders-{n}\"\ntopic = \"in/#\"\nshare = \"g\"");
    let one = receiving(&server.url(), &keys(1)).await;
    let other = Receiving::start(table(&server.url(), &keys(2))).await;
    let mut publisher = Peer::connect(&server.url()).await;
    let shared = async {
        for n in 0.. {
            publisher.publish("in/a", &[("postbox-id", &n.to_string())], n.to_string().as_bytes()).await;
            if n >= 100 && other.inbox.all().len() > 10 {
                return n + 1;
            }
        }
        unreachable!("it goes on")
    };
    let count = timeout(PATIENCE, shared).await.expect("the other one gets some");
    let all = async {
        loop {
            let both: std::collections::BTreeSet<_> = one.bodies().union(&other.bodies()).cloned().collect();
            if both.len() == count + 1 {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, all).await.expect("together they have all");
    assert_eq!(one.inbox.all().len() + other.inbox.all().len(), count + 1, "each went to one");
    one.stop().await;
    other.stop().await;
}

/// A retained message arrives with a new subscription, but not with every connection.
#[tokio::test]
async fn a_retained_message_comes_once() {
    let server = server().await;
    let gateway = Gateway::in_front_of(&server.url()).await;
    let mut publisher = Peer::connect(&server.url()).await;
    publisher.publish_qos0("in/kept", true, b"kept").await;
    publisher.publish("elsewhere", &[], b"").await;
    let source = source(&gateway.url(), KEYS).await;
    let given = timeout(PATIENCE, source.next(10)).await.expect("in time").expect("a message");
    assert_eq!(&given[0].message.payload[..], b"kept");
    source.ack(&[given[0].token]).await.expect("settled");
    gateway.cut().await;
    let error = timeout(PATIENCE, source.next(10)).await.expect("in time").expect_err("cut");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let next = source.next(10);
    let properties = PublishProperties::default();
    let published = async {
        gateway.subscriptions(2).await;
        publisher.publish_with("in/a", properties, b"new").await;
    };
    let (given, _) = timeout(PATIENCE, async { tokio::join!(next, published) }).await.expect("in time");
    assert_eq!(&given.expect("a message")[0].message.payload[..], b"new");
}

/// A server that confirms nothing cannot be used, in either direction.
#[tokio::test]
async fn a_server_without_confirmations_is_a_matter_for_a_person() {
    let server = PrivateMqtt::launch_with("allow_anonymous true\nmax_qos 0\n").await;
    let source = source(&server.url(), KEYS).await;
    let error = timeout(PATIENCE, source.next(1)).await.expect("in time").expect_err("refused");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "mqtt_subscribe_refused"), "{error}");
    let sink = sink(&server.url(), "topic = \"in/{topic}\"").await;
    assert_eq!(codes(&deliver(&sink, &numbered(2)).await), ["unavailable mqtt_refused"]);
}
