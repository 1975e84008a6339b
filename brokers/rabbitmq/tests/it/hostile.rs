//! What an event contains never becomes something else on the wire, and harms no other event.

use std::collections::{BTreeMap, BTreeSet};

use lapin::types::AMQPValue;
use postbox_core::{Delivery, NewEvent};
use postbox_testkit::hostile;
use postbox_testkit::proxy::FaultProxy;
use postbox_testkit::sending::{codes, deliver, deliveries, said, send};
use postbox_testkit::servers::{PrivateRabbitmq, Rabbitmq};

use crate::broker::{Broker, arguments, header, quorum, unique};
use crate::stand::{LIMITS, sink};

struct Stand {
    url: String,
    broker: Broker,
    exchange: String,
}

/// Creates an exchange, and a queue of the same name that takes everything.
async fn stand() -> Stand {
    let url = Rabbitmq::shared().await.url();
    let (broker, exchange) = (Broker::connect(&url).await, unique("in"));
    broker.exchange(&exchange).await;
    broker.queue(&exchange, quorum(&[]), &exchange, "#").await;
    Stand { url, broker, exchange }
}

fn plain() -> NewEvent {
    NewEvent::json("t", "plain").key("k")
}

#[tokio::test]
async fn a_hostile_event_is_itself_or_dead_and_harms_no_other() {
    let Stand { url, broker, exchange } = stand().await;
    let proxy = FaultProxy::in_front_of(&url).await;
    let keys = format!("exchange = {exchange:?}\nrouting_key = \"{{topic}}.{{key}}\"");
    let sink = sink(&proxy.url(&url), &keys).await;
    for hostile::Case { name, event, .. } in hostile::keyed() {
        let sent = deliveries([event, plain()]);
        let outcomes = deliver(&sink, &sent).await;
        let out = match said(&outcomes[0]).as_str() {
            "delivered" => &sent[..],
            "dead route_invalid" => &sent[1..],
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!(said(&outcomes[1]), "delivered", "beside {name}");
        let route = |it: &Delivery| format!("{}.{}", it.event.topic, it.event.key.as_ref().expect("a key"));
        let expected: BTreeMap<_, _> = out.iter().map(|it| (route(it), it.event.payload.to_vec())).collect();
        let messages = broker.drain(&exchange).await.into_iter();
        let arrived = messages.map(|it| (it.routing_key.to_string(), it.data)).collect::<BTreeMap<_, _>>();
        assert!(arrived == expected, "{name}: {:?}", arrived.keys());
    }
    assert_eq!(proxy.connections(), 1, "the connection survived all of it");
}

/// A routing key must not select another program's queue through the default exchange.
#[tokio::test]
async fn a_wildcard_in_a_routing_key_is_itself_and_the_server_s_own_names_are_refused() {
    let Stand { url, broker, exchange } = stand().await;
    let orders = unique("orders");
    broker.queue(&orders, quorum(&[]), &exchange, "order.paid").await;
    let sink = sink(&url, &format!("exchange = {exchange:?}")).await;
    for topic in ["#", "*", "order.#", "order.*"] {
        assert_eq!(said(&send(&sink, NewEvent::json(topic, "")).await), "delivered", "{topic}");
    }
    assert!(broker.drain(&orders).await.is_empty(), "only its own key leads there");
    let default = self::sink(&url, "exchange = \"\"").await;
    assert_eq!(said(&send(&default, NewEvent::json(orders.as_str(), "direct")).await), "delivered");
    assert_eq!(broker.take(&orders, 1).await[0].data, b"direct");
    let own = NewEvent::json("amq.rabbitmq.reply-to.x", "");
    assert_eq!(said(&send(&default, own).await), "dead route_invalid");
}

#[tokio::test]
async fn an_event_is_what_its_envelope_says_and_nothing_else() {
    let Stand { url, broker, exchange } = stand().await;
    let other = unique("other");
    broker.queue(&other, quorum(&[]), &exchange, "no.such.key").await;
    let sink = sink(&url, &format!("exchange = {exchange:?}")).await;
    let event = NewEvent::new("order.paid", &b"\xff\0"[..], "text/plain")
        .key("Zoë 1")
        .tenant("acme")
        .version(7)
        .header("Traceparent", "00-ab")
        .header("empty", "")
        // An event may set none of these. `CC` would add another routing key.
        .header("CC", other.as_str())
        .header("BCC", other.as_str())
        .header("x-death", "forged")
        .header("X-Delivery-Count", "99")
        .header("cloudEvents_type", "forged")
        .header("Content-Type", "application/cloudevents+json");
    let sent = deliveries([event]);
    assert_eq!(said(&deliver(&sink, &sent).await[0]), "delivered");
    let message = broker.take(&exchange, 1).await.remove(0);
    let id = sent[0].event.id.to_string();
    let properties = &message.properties;
    assert_eq!(properties.message_id().as_ref().map(ToString::to_string), Some(sent[0].dedupe_id()));
    assert_eq!(properties.content_type().as_ref().map(ToString::to_string).as_deref(), Some("text/plain"));
    assert_eq!(properties.delivery_mode(), &Some(2), "persistent");
    let names = properties.headers().as_ref().expect("headers").inner().keys();
    let mut headers: BTreeMap<String, String> =
        names.map(|name| (name.to_string(), header(&message, name.as_str()).expect("text"))).collect();
    // The queue counts deliveries, and starts as if the event had set nothing.
    assert_eq!(headers.remove("x-delivery-count").as_deref(), Some("LongLongInt(0)"));
    let expected = [
        ("Traceparent", "00-ab"),
        ("empty", ""),
        ("cloudEvents_specversion", "1.0"),
        ("cloudEvents_id", id.as_str()),
        ("cloudEvents_type", "order.paid"),
        ("cloudEvents_source", "postbox"),
        ("cloudEvents_time", "1970-01-01T00:00:00Z"),
        ("cloudEvents_subject", "Zoë 1"),
        ("cloudEvents_tenant", "acme"),
        ("cloudEvents_version", "7"),
    ];
    assert_eq!(headers, expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
    assert_eq!((message.routing_key.as_str(), message.data.as_slice()), ("order.paid", &b"\xff\0"[..]));
    assert!(broker.drain(&other).await.is_empty());
}

#[tokio::test]
async fn a_structured_event_says_so() {
    let Stand { url, broker, exchange } = stand().await;
    for (envelope, content_type) in [
        ("raw", "application/json"),
        ("json", "application/json"),
        ("replica", "application/json"),
        ("cloudevents", "application/cloudevents+json; charset=UTF-8"),
        ("standard", "application/json"),
    ] {
        let sink = sink(&url, &format!("exchange = {exchange:?}\nenvelope = {envelope:?}")).await;
        assert_eq!(said(&send(&sink, NewEvent::json("t", "{}")).await), "delivered");
        let message = broker.take(&exchange, 1).await.remove(0);
        let said = message.properties.content_type().as_ref().map(ToString::to_string);
        assert_eq!(said.as_deref(), Some(content_type), "{envelope}");
        assert_eq!(header(&message, "cloudEvents_type"), None, "{envelope}");
    }
}

/// The server closes the connection over larger headers. The largest that it accepts, it could
/// never pass on to a consumer.
#[tokio::test]
async fn headers_that_fill_a_frame_pass_and_one_byte_more_dies_alone() {
    let Stand { url, broker, exchange } = stand().await;
    let proxy = FaultProxy::in_front_of(&url).await;
    let sink = sink(&proxy.url(&url), &format!("exchange = {exchange:?}\nenvelope = \"raw\"")).await;
    // 131,072 bytes, less the server's own room, the parts that are always there,
    // `application/json` and a UUID. Headers of up to 16 KiB each fill the rest.
    let room = 131_072 - 4_096 - 27 - 1 - 16 - 1 - 36;
    let event = |bytes: usize| {
        let names = (0..8).map(|n| format!("h{n}"));
        let most = 16 * 1024;
        let mut left = bytes - 8 * (1 + 2 + 5);
        let headers = names.map(|name| {
            let value = "v".repeat(left.min(most));
            left -= value.len();
            (name, value)
        });
        NewEvent { headers: headers.collect(), ..NewEvent::json("t", "{}") }
    };
    let outcomes = deliver(&sink, &deliveries([event(room), event(room + 1), plain()])).await;
    assert_eq!(codes(&outcomes), ["delivered", "dead headers_too_large", "delivered"]);
    assert_eq!(broker.take(&exchange, 2).await.len(), 2);
    assert_eq!(proxy.connections(), 1);
}

/// The client reserves 64 frames. A server without a limit would get 256 GiB.
#[tokio::test]
async fn a_server_without_a_limit_does_not_decide_how_large_a_frame_is() {
    let server = PrivateRabbitmq::launch_with("frame_max = 0\n").await;
    let sink = sink(&server.url(), "exchange = \"amq.topic\"\nenvelope = \"raw\"").await;
    let headers = (0..8).map(|n| (format!("h{n}"), "v".repeat(16 * 1024))).collect();
    let outcome = send(&sink, NewEvent { headers, ..NewEvent::json("t", "{}") }).await;
    assert_eq!(said(&outcome), "dead headers_too_large", "{outcome:?}");
}

/// The client library reports a returned message with whichever confirm comes next.
#[tokio::test]
async fn of_many_events_exactly_those_that_no_queue_takes_are_not_delivered() {
    let url = Rabbitmq::shared().await.url();
    let (broker, exchange) = (Broker::connect(&url).await, unique("in"));
    broker.exchange(&exchange).await;
    broker.queue(&exchange, quorum(&[]), &exchange, "yes").await;
    let sink = sink(&url, &format!("exchange = {exchange:?}")).await;
    for round in 0..5 {
        let topic = |n: usize| if (n + round).is_multiple_of(3) { "no" } else { "yes" };
        let sent = deliveries((0..300).map(|n| NewEvent::json(topic(n), n.to_string()).key(n.to_string())));
        let outcomes = deliver(&sink, &sent).await;
        let arrived: BTreeSet<Vec<u8>> = broker.take(&exchange, 200).await.into_iter().map(|it| it.data).collect();
        for (delivery, outcome) in sent.iter().zip(&outcomes) {
            let expected = match arrived.contains(&delivery.event.payload[..]) {
                true => "delivered",
                false => "ambiguous rabbitmq_unroutable",
            };
            assert_eq!(said(outcome), expected, "{}", delivery.event.topic);
        }
    }
}

/// A missing exchange closes the channel.
#[tokio::test]
async fn an_exchange_that_is_missing_fails_no_event_of_another() {
    let Stand { url, broker, exchange } = stand().await;
    let proxy = FaultProxy::in_front_of(&url).await;
    let keys = format!("exchange = {:?}", exchange.replacen("in-", "{tenant}-", 1));
    let sink = sink(&proxy.url(&url), &keys).await;
    for _ in 0..3 {
        // So many that some are not written yet when the channel closes.
        let event = |n: usize| {
            let tenant = if n.is_multiple_of(2) { "in" } else { "missing" };
            NewEvent::json("t", vec![b' '; 2_000]).key(n.to_string()).tenant(tenant)
        };
        let sent: Vec<Delivery> = deliveries((0..1_000).map(event));
        for (n, outcome) in deliver(&sink, &sent).await.iter().enumerate() {
            let missing = "ambiguous rabbitmq_no_exchange";
            let expected = if n.is_multiple_of(2) { "delivered" } else { missing };
            assert_eq!(said(outcome), expected, "{n}: {outcome:?}");
        }
        assert_eq!(broker.take(&exchange, 500).await.len(), 500);
    }
    assert_eq!(proxy.connections(), 1, "the connection survived all of it");
}

#[tokio::test]
async fn what_only_the_server_finds_too_large_dies_alone() {
    let url = Rabbitmq::shared_with(LIMITS).await.url();
    let (broker, exchange) = (Broker::connect(&url).await, unique("in"));
    broker.exchange(&exchange).await;
    broker.queue(&exchange, quorum(&[]), &exchange, "#").await;
    let sink = sink(&url, &format!("exchange = {exchange:?}")).await;
    let sent = deliveries([NewEvent::json("t", vec![b' '; 100_001]), plain()]);
    let outcomes = deliver(&sink, &sent).await;
    assert_eq!(said(&outcomes[0]), "dead payload_too_large");
    // The channel was closed over it. The engine sends the other event again.
    assert!(outcomes[1].is_delivered() || said(&outcomes[1]).starts_with("ambiguous "), "{outcomes:?}");
    assert_eq!(said(&deliver(&sink, &sent[1..]).await[0]), "delivered");
}

#[tokio::test]
async fn a_queue_that_is_full_refuses_and_is_tried_again() {
    let Stand { url, broker, exchange } = stand().await;
    let full =
        [("x-max-length", AMQPValue::LongInt(0)), ("x-overflow", AMQPValue::LongString("reject-publish".into()))];
    broker.queue(&unique("full"), arguments(&full), &exchange, "full").await;
    let sink = sink(&url, &format!("exchange = {exchange:?}")).await;
    let outcomes = deliver(&sink, &deliveries([NewEvent::json("full", ""), plain()])).await;
    assert_eq!(said(&outcomes[0]), "ambiguous rabbitmq_rejected");
    assert_eq!(said(&outcomes[1]), "delivered");
}
