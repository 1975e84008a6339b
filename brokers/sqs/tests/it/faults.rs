//! A server that is killed, comes back empty, is cut off at the worst moment, or is silent.

use std::time::{Duration, Instant};

use postbox_testkit::proxy::{Direction, FaultProxy};
use postbox_testkit::sending::{PATIENCE, context, deliver, numbered, table};
use postbox_testkit::warnings::Warnings;

use crate::support::{Broker, Gateway, Mode, queue_keys, said, sink, sink_within, unique};
use postbox_config::SinkConfig as _;
use postbox_sqs::SqsSinkTable;

/// Time limit of calls to a silent server. Far shorter than any test waits.
const SHORT: Duration = Duration::from_secs(2);

#[tokio::test]
async fn a_lost_answer_is_ambiguous_and_in_a_fifo_queue_its_repetition_is_known() {
    let broker = Broker::shared().await;
    let gateway = Gateway::in_front_of(&broker).await;
    for (name, stored) in [("events.fifo", 10), ("events", 20)] {
        let queue = broker.queue(&unique(name)).await;
        let sink = sink(&queue_keys(&queue, &gateway.url())).await;
        let sent = numbered(10);
        gateway.set(Mode::Lose);
        let asked = gateway.request_count();
        assert_eq!(said(&deliver(&sink, &sent).await), ["ambiguous aws_connection_lost"; 10]);
        assert_eq!(gateway.request_count(), asked + 1, "nothing is sent twice in secret");
        assert_eq!(broker.remaining(&queue).await, 10);
        gateway.set(Mode::Pass);
        assert_eq!(said(&deliver(&sink, &sent).await), ["delivered"; 10]);
        assert_eq!(broker.remaining(&queue).await, stored, "{name}");
    }
}

#[tokio::test]
async fn a_server_that_is_killed_and_comes_back_empty_is_an_outage_until_its_queue_is_there() {
    let mut broker = Broker::launch().await;
    let queue = broker.queue("events").await;
    let sink = sink(&queue_keys(&queue, &broker.server.url())).await;
    assert_eq!(said(&deliver(&sink, &numbered(3)).await), ["delivered"; 3]);
    broker.server.kill();
    assert_eq!(said(&deliver(&sink, &numbered(3)).await), ["unavailable connect_refused"; 3]);
    broker.server.start().await;
    assert_eq!(said(&deliver(&sink, &numbered(3)).await), ["unavailable sqs_queue_missing"; 3]);
    broker.queue("events").await;
    assert_eq!(said(&deliver(&sink, &numbered(3)).await), ["delivered"; 3]);
    assert_eq!(broker.remaining(&queue).await, 3);
}

#[tokio::test]
async fn a_silent_server_costs_a_call_its_own_time() {
    let broker = Broker::launch().await;
    let queue = broker.queue("events").await;
    let proxy = FaultProxy::in_front_of(&broker.server.url()).await;
    let by = proxy.url(&broker.server.url());
    let sink = sink_within(&queue_keys(&queue, &by), SHORT).await;
    let timed_out = async |what: &str| {
        let began = Instant::now();
        assert_eq!(said(&deliver(&sink, &numbered(2)).await), ["ambiguous aws_timeout"; 2], "{what}");
        assert!(began.elapsed() < PATIENCE / 2, "{what}: {:?}", began.elapsed());
    };
    broker.server.freeze();
    timed_out("frozen").await;
    broker.server.thaw();
    proxy.swallow(&Direction::BOTH);
    timed_out("a black hole").await;
    proxy.heal();
    proxy.reset();
    assert_eq!(said(&deliver(&sink, &numbered(2)).await), ["delivered"; 2]);
}

#[tokio::test]
async fn a_wrong_key_is_an_outage_and_nobody_sees_the_key() {
    let broker = Broker::shared().await;
    let gateway = Gateway::in_front_of(&broker).await;
    let keys = queue_keys(&broker.queue(&unique("events")).await, &gateway.url());
    assert!(!format!("{:?}", table::<SqsSinkTable>(&keys)).contains("canary"));
    let sink = sink(&keys).await;
    gateway.set(Mode::Say(403, crate::support::refusal("InvalidClientTokenId")));
    let outcomes = deliver(&sink, &numbered(1)).await;
    assert_eq!(said(&outcomes), ["unavailable aws_unauthorized"]);
    assert!(!format!("{outcomes:?}").contains("canary"));
}

#[tokio::test]
async fn a_fifo_queue_that_forgets_too_soon_is_named_at_the_start() {
    let (warnings, _hearing) = Warnings::hear();
    let build = async |name: &str, repeats_within: u64| {
        let keys = queue_keys(&format!("http://127.0.0.1:1/1/{name}"), "http://127.0.0.1:1");
        let mut context = context(SHORT);
        context.repeats_within = Duration::from_secs(repeats_within);
        table::<SqsSinkTable>(&keys).build(&context).await.expect("a sink");
    };
    build("orders", 3_600).await;
    build("orders.fifo", 300).await;
    assert!(warnings.all().is_empty(), "{:?}", warnings.all());
    build("orders.fifo", 301).await;
    let warned = warnings.all();
    assert!(matches!(&warned[..], [one] if one.contains("dedupe_window_short")), "{warned:?}");
}
