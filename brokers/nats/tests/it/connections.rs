//! Authentication and TLS.

use std::time::Duration;

use postbox_config::SourceConfig as _;
use postbox_core::{ErrorKind, NewEvent, Outcome};
use postbox_testkit::receiving::source_context;
use postbox_testkit::sending::{PATIENCE, context, deliver, deliveries, said, send};
use postbox_testkit::servers::{NatsVersion, PrivateNats};
use postbox_testkit::tls;
use serde_json::json;
use tokio::net::{TcpListener, TcpSocket};
use tokio::time::timeout;

use crate::broker::{Broker, publish};
use crate::stand::{AS_BLIND, AS_LIMITED, LIMITED, SHORT, sink, sink_with, source, table};

/// The seed from the documentation of NATS, and its public key.
const SEED: &str = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY";
const PUBLIC: &str = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4";

const KEYS: &str = "subject = \"in.{topic}\"\nstream = \"EVENTS\"\ncreate = {}\n";

async fn outcome(url: &str, auth: &str) -> String {
    said(&send(&sink(url, &format!("{KEYS}{auth}")).await, NewEvent::json("t", "{}")).await)
}

#[tokio::test]
async fn each_way_to_say_who_we_are_is_understood() {
    for (server, right, wrong) in [
        (
            "authorization { user: a, password: b }".to_owned(),
            "auth = { user = \"a\", password = \"b\" }".to_owned(),
            "auth = { user = \"a\", password = \"c\" }",
        ),
        (
            "authorization { token: secret-token }".to_owned(),
            "auth = { token = \"secret-token\" }".to_owned(),
            "auth = { token = \"x\" }",
        ),
        (
            format!("authorization {{ users: [ {{ nkey: {PUBLIC} }} ] }}"),
            format!("auth = {{ nkey = \"{SEED}\" }}"),
            "auth = { user = \"a\", password = \"b\" }",
        ),
    ] {
        let server = PrivateNats::launch_with(NatsVersion::V2_15, &server).await;
        assert_eq!(outcome(&server.url(), &right).await, "delivered", "{right}");
        for wrong in [wrong, ""] {
            assert_eq!(outcome(&server.url(), wrong).await, "unavailable nats_unauthorized", "{wrong}");
        }
        let refused = source(&server.url(), "stream = \"EVENTS\"").await.next(1).await.expect_err("refused");
        assert_eq!((refused.kind(), refused.code()), (ErrorKind::Unauthorized, "nats_unauthorized"));
        assert!(!format!("{refused:?}").contains("secret-token"));
    }
}

#[tokio::test]
async fn tls_needs_the_right_authority_and_shows_our_certificate() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    tls::authority(folder.path());
    let config = format!(
        "tls {{ cert_file: {:?}, key_file: {:?}, ca_file: {:?}, verify: true }}\n",
        path("server.pem"),
        path("server.key"),
        path("ca.pem")
    );
    let server = PrivateNats::launch_with(NatsVersion::V2_15, &config).await;
    let ca = format!("ca_file = {:?}", path("ca.pem"));
    let cert = format!("client_cert = {:?}, client_key = {:?}", path("client.pem"), path("client.key"));
    assert_eq!(outcome(&server.url(), &format!("tls = {{ {ca}, {cert} }}")).await, "delivered");
    assert_eq!(
        outcome(&server.url().replace("nats:", "tls:"), &format!("tls = {{ {ca}, {cert} }}")).await,
        "delivered"
    );
    for without in [format!("tls = {{ {cert} }}"), format!("tls = {{ {ca} }}")] {
        assert!(outcome(&server.url(), &without).await.starts_with("unavailable "), "{without}");
    }
}

/// The server reports this only to the connection: the publish itself gets no answer.
#[tokio::test]
async fn a_publish_that_we_have_no_right_to_is_named() {
    for version in [NatsVersion::V2_9, NatsVersion::V2_15] {
        let broker = Broker::launch(version, LIMITED).await;
        broker.stream("EVENTS", &["in.>"], json!({})).await;
        let keys = format!("subject = \"in.{{topic}}\"\nstream = \"EVENTS\"\n{AS_LIMITED}");
        let sink = sink_with(&broker.server.url(), &keys, &context(SHORT)).await;
        let Outcome::Unavailable { code, error } = send(&sink, NewEvent::json("forbidden", "{}")).await else {
            panic!("nobody may")
        };
        assert_eq!(code, "nats_publish_denied", "{version:?}");
        assert!(error.contains("publishing to in.forbidden; grant"), "{error}");
        // The other event of the call is accepted: only this subject is denied.
        let two = deliveries([NewEvent::json("t", "{}"), NewEvent::json("forbidden", "{}")]);
        let outcomes: Vec<String> = deliver(&sink, &two).await.iter().map(said).collect();
        assert_eq!(outcomes, ["delivered", "ambiguous nats_publish_denied"], "{version:?}");
    }
}

/// The call ends before the API would count as too slow.
#[tokio::test]
async fn a_right_that_is_missing_to_create_a_stream_is_named() {
    let broker = Broker::launch(NatsVersion::V2_15, LIMITED).await;
    let sink = sink_with(&broker.server.url(), &format!("{KEYS}{AS_BLIND}"), &context(SHORT)).await;
    let Outcome::Unavailable { code, error } = send(&sink, NewEvent::json("t", "{}")).await else {
        panic!("nobody may")
    };
    assert_eq!(code, "nats_publish_denied", "{error}");
    assert!(error.contains("publishing to $JS.API.STREAM.INFO.EVENTS; grant"), "{error}");
}

/// A request and an ack that are refused get no answer either.
#[tokio::test]
async fn a_right_that_a_source_lacks_is_named() {
    let broker = Broker::launch(NatsVersion::V2_15, LIMITED).await;
    broker.stream("EVENTS", &["in.>"], json!({})).await;
    publish(&broker.client, "in.a", &[], b"{}").await;
    let of = async |user: &str| {
        let keys = format!("stream = \"EVENTS\"\nauth = {{ user = {user:?}, password = \"d\" }}");
        source(&broker.server.url(), &keys).await
    };
    let (mute, deaf) = (of("mute").await, of("deaf").await);
    let came = mute.next(1).await.expect("it comes");
    let acked = mute.ack(&[came[0].token]).await.expect_err("no right");
    let asked = deaf.next(1).await.expect_err("no right");
    let next = "$JS.API.CONSUMER.MSG.NEXT.EVENTS.postbox";
    for (refused, subject) in [(acked, "$JS.ACK.EVENTS.postbox.>"), (asked, next)] {
        assert_eq!((refused.kind(), refused.code()), (ErrorKind::Unauthorized, "nats_publish_denied"), "{refused}");
        assert!(refused.message().contains(&format!("publishing to {subject}; grant")), "{refused}");
    }
}

/// A source counts as failing for 15 s after an attempt, and the next one ends within that.
#[tokio::test]
async fn servers_that_say_nothing_cost_an_attempt_each() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    broker.stream("EVENTS", &["in.>"], json!({})).await;
    let silent = [TcpListener::bind("127.0.0.1:0").await, TcpListener::bind("127.0.0.1:0").await];
    let silent = silent.map(|listener| listener.expect("a port"));
    let urls = silent.iter().map(|silent| format!("nats://{}, ", silent.local_addr().expect("an address")));
    let urls = urls.collect::<String>() + &broker.server.url();
    let table = table(&urls, "stream = \"EVENTS\"");
    let attempts = async {
        let source = source(&urls, "stream = \"EVENTS\"").await;
        for _ in 0..2 {
            let attempt = timeout(Duration::from_secs(9), source.next(1)).await.expect("one server an attempt");
            assert_eq!(attempt.expect_err("it says nothing").code(), "connect_timeout");
        }
        publish(&broker.client, "in.a", &[], b"{}").await;
        assert_eq!(source.next(1).await.expect("the third answers").len(), 1);
    };
    // A check tries all of them.
    let context = source_context();
    let ((), looked) = tokio::join!(attempts, table.connect(&context));
    assert!(looked.is_ok(), "{looked:?}");
}

/// If TLS is required, the sink does not talk to a server without it.
#[tokio::test]
async fn required_tls_is_not_given_up() {
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    assert!(outcome(&broker.server.url(), "tls = {}").await.starts_with("unavailable "));
    assert!(outcome(&broker.server.url().replace("nats:", "tls:"), "").await.starts_with("unavailable "));
    assert!(broker.stored("EVENTS").await.is_empty());
}

#[tokio::test]
async fn the_next_server_is_asked_where_one_is_away() {
    let nobody = TcpSocket::new_v4().expect("a socket");
    nobody.bind("127.0.0.1:0".parse().expect("an address")).expect("a port");
    let away = format!("nats://{}", nobody.local_addr().expect("an address"));
    assert_eq!(outcome(&away, "").await, "unavailable connect_refused");
    let broker = Broker::launch(NatsVersion::V2_15, "").await;
    assert_eq!(outcome(&format!("{away}, {}", broker.server.url()), "").await, "delivered");
    // One that takes the connection and says nothing costs a call, and no more.
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let both = format!("nats://{}, {}", silent.local_addr().expect("an address"), broker.server.url());
    let sink = sink_with(&both, KEYS, &context(SHORT)).await;
    assert_eq!(said(&send(&sink, NewEvent::json("t", "{}")).await), "unavailable connect_timeout");
    // On a slow machine, the other one may take longer than a call, too.
    let delivered = async { while said(&send(&sink, NewEvent::json("t", "{}")).await) != "delivered" {} };
    timeout(PATIENCE, delivered).await.expect("delivered");
    let none = source(&away, "stream = \"S\"").await.next(1).await.expect_err("nobody");
    assert_eq!((none.kind(), none.code()), (ErrorKind::Unavailable, "connect_refused"));
}
