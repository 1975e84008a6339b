//! Answers that no emulator gives, and the contents of requests.

use postbox_core::NewEvent;

use crate::support::{Broker, Gateway, Mode, queue_keys, refusal, said, sink, topic_keys, unique};
use postbox_config::SinkConfig as _;
use postbox_sqs::SqsSinkTable;
use postbox_testkit::sending::{PATIENCE, context, deliver, deliveries, numbered, table};

#[tokio::test]
async fn each_message_of_a_request_has_its_own_answer() {
    let broker = Broker::shared().await;
    let gateway = Gateway::in_front_of(&broker).await;
    let sink = sink(&queue_keys(&broker.queue(&unique("events")).await, &gateway.url())).await;
    let failed =
        |id: u8, fault: bool, code: &str| format!("{{\"Id\":\"{id}\",\"SenderFault\":{fault},\"Code\":\"{code}\"}}");
    let failed = [
        failed(1, false, "InternalError"),
        failed(2, false, "RequestThrottled"),
        failed(3, true, "InvalidMessageContents"),
        failed(77, true, "NeverAskedFor"),
    ];
    let taken = "{\"Id\":\"0\",\"MessageId\":\"m\",\"MD5OfMessageBody\":\"x\"}";
    gateway.set(Mode::Say(200, format!("{{\"Successful\":[{taken}],\"Failed\":[{}]}}", failed.join(","))));
    let expected = [
        "delivered",
        "ambiguous aws_internal",
        "throttled aws_throttled",
        "dead body_not_text",
        "ambiguous aws_answer_unknown",
    ];
    assert_eq!(said(&deliver(&sink, &numbered(5)).await), expected);
}

#[tokio::test]
async fn a_request_refused_for_one_message_harms_that_one() {
    for topic in [false, true] {
        let broker = Broker::shared().await;
        let gateway = Gateway::in_front_of(&broker).await;
        let name = unique("events");
        let (keys, said_to) = match topic {
            true => {
                crate::support::make_topic(&broker, &name).await;
                (topic_keys(&name, &gateway.url()), crate::support::sns_refusal("InvalidParameter"))
            }
            false => (queue_keys(&broker.queue(&name).await, &gateway.url()), refusal("InvalidMessageContents")),
        };
        let sink = sink(&keys).await;
        gateway.set(Mode::SayTo("poison", 400, said_to));
        let events = (0..10).map(|n| NewEvent::json("t", if n == 4 { "poison".to_owned() } else { n.to_string() }));
        let outcomes = said(&deliver(&sink, &deliveries(events)).await);
        let expected = if topic { "ambiguous aws_refused" } else { "dead body_not_text" };
        assert_eq!(outcomes.iter().filter(|outcome| *outcome == "delivered").count(), 9, "{outcomes:?}");
        assert_eq!(outcomes[4], expected);
        assert_eq!(gateway.request_count(), 11, "all at once, then each for itself");
    }
}

#[tokio::test]
async fn whatever_concerns_everybody_is_an_outage_and_asked_once() {
    let broker = Broker::shared().await;
    let gateway = Gateway::in_front_of(&broker).await;
    let sink = sink(&queue_keys(&broker.queue(&unique("events")).await, &gateway.url())).await;
    for (n, (status, code, expected)) in [
        (403, "AccessDeniedException", "unavailable aws_not_permitted"),
        (403, "ExpiredTokenException", "unavailable aws_unauthorized"),
        (400, "QueueDoesNotExist", "unavailable sqs_queue_missing"),
        (400, "KmsDisabled", "unavailable aws_key_failed"),
        (400, "RequestThrottled", "throttled aws_throttled"),
        (503, "ServiceUnavailable", "ambiguous aws_internal"),
    ]
    .into_iter()
    .enumerate()
    {
        gateway.set(Mode::Say(status, refusal(code)));
        assert_eq!(said(&deliver(&sink, &numbered(3)).await), [expected; 3], "{code}");
        assert_eq!(gateway.request_count(), n + 1, "{code}: the engine retries");
    }
    for (status, body, expected) in [
        (502, "<html>", "ambiguous aws_internal"),
        (429, "", "throttled aws_throttled"),
        (200, "not json", "ambiguous aws_answer_unknown"),
    ] {
        gateway.set(Mode::Say(status, body.into()));
        assert_eq!(said(&deliver(&sink, &numbered(2)).await), [expected; 2], "{status}");
    }
}

#[tokio::test]
async fn large_messages_share_no_request_and_calls_share_no_connection() {
    let broker = Broker::shared().await;
    let gateway = Gateway::in_front_of(&broker).await;
    let queue = broker.queue(&unique("events")).await;
    let sink = sink(&queue_keys(&queue, &gateway.url())).await;
    let large = |n: u8| NewEvent::json("t", vec![b'a' + n; 400 * 1024]);
    let outcomes = deliver(&sink, &deliveries((0..5).map(large))).await;
    assert_eq!(said(&outcomes), ["delivered"; 5]);
    assert_eq!(gateway.request_count(), 3, "two fit, three do not");
    let calls: Vec<_> = (0..8).map(|_| numbered(10)).collect();
    let outcomes = futures::future::join_all(calls.iter().map(|call| deliver(&sink, call))).await;
    assert!(outcomes.iter().flatten().all(postbox_core::Outcome::is_delivered));
    assert_eq!(broker.remaining(&queue).await, 85);
    assert!(gateway.connections() >= 3, "{} connections", gateway.connections());
}

#[tokio::test]
async fn check_config_says_what_is_there_and_what_is_not() {
    let broker = Broker::shared().await;
    let name = unique("events");
    let there = broker.queue(&name).await;
    let connect = async |url: &str, by: &str| {
        let keys = queue_keys(url, by);
        table::<SqsSinkTable>(&keys).connect(&context(PATIENCE)).await
    };
    let found = connect(&there, &broker.url).await.expect("there");
    assert_eq!(found, format!("answers; the queue {name} exists and takes messages of up to 1048576 bytes"));
    assert_eq!(broker.remaining(&there).await, 0, "nothing is written");
    let missing = connect(&broker.url_of("missing"), &broker.url).await.expect_err("not there");
    assert_eq!(missing.code(), "sqs_queue_missing");
    assert!(missing.message().contains("aws sqs create-queue"), "{missing}");
    let nobody = connect("http://127.0.0.1:1/1/q", "http://127.0.0.1:1").await.expect_err("nobody there");
    assert_eq!(nobody.code(), "connect_refused");
    assert!(nobody.message().starts_with("http://127.0.0.1:1: "), "{nobody}");
    let keys = topic_keys("missing", &broker.url);
    let missing = table::<postbox_sqs::SnsSinkTable>(&keys).connect(&context(PATIENCE)).await;
    assert_eq!(missing.expect_err("not there").code(), "sns_topic_missing");
}
