//! A server that is killed, comes back empty, accepts nothing, or is cut off at the worst moment.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use lapin::message::Delivery as Message;
use postbox_core::NewEvent;
use postbox_testkit::proxy::{Direction, FaultProxy};
use postbox_testkit::sending::{PATIENCE, Working, context, deliver, deliveries, said, send};
use postbox_testkit::servers::{PrivateRabbitmq, Rabbitmq};
use tokio::time::timeout;

use crate::broker::{Broker, header, message_id, quorum, unique};
use crate::stand::{SHORT, sink, sink_with};

const KEYS: &str = "exchange = \"amq.topic\"";

fn event(payload: &str) -> NewEvent {
    NewEvent::json("t", payload.to_owned())
}

/// Checks that every number is there, and that those of a key are in order. A message that is there
/// twice has the same id.
fn whole_and_in_order(messages: &[Message], count: usize) {
    let (mut ids, mut by_key) = (BTreeSet::new(), BTreeMap::<String, Vec<usize>>::new());
    for message in messages.iter().filter(|message| ids.insert(message_id(message))) {
        let number = String::from_utf8_lossy(&message.data).parse().expect("a number");
        by_key.entry(header(message, "cloudEvents_subject").expect("a key")).or_default().push(number);
    }
    for (key, numbers) in &by_key {
        assert!(numbers.is_sorted(), "key {key} in order: {numbers:?}");
    }
    let mut all: Vec<usize> = by_key.into_values().flatten().collect();
    all.sort_unstable();
    assert_eq!(all, (0..count).collect::<Vec<_>>(), "each, none lost");
}

#[tokio::test]
async fn a_server_that_is_killed_under_load_loses_nothing() {
    let mut server = PrivateRabbitmq::launch().await;
    Broker::connect(&server.url()).await.queue("q", quorum(&[]), "amq.topic", "#").await;
    server.sync();
    let working = Working::start(sink(&server.url(), KEYS).await);
    let until = async |count: usize| {
        let delivered = async {
            while working.relay.metrics().snapshot().delivered < count as u64 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let done = timeout(PATIENCE * 2, delivered).await;
        let metrics = working.relay.metrics();
        assert!(done.is_ok(), "in time: {:?} {:?}", metrics.snapshot(), metrics.failures_by_cause());
    };
    let mut appended = 0;
    for _ in 0..2 {
        working.append(appended..appended + 1_000).await;
        appended += 1_000;
        // In the middle of the work.
        until(appended - 950).await;
        server.kill();
        working.append(appended..appended + 50).await;
        appended += 50;
        server.start().await;
    }
    until(appended).await;
    assert_eq!(working.relay.metrics().snapshot().dead, 0);
    working.stop().await;
    whole_and_in_order(&Broker::connect(&server.url()).await.until_ids("q", appended).await, appended);
}

#[tokio::test]
async fn a_server_that_comes_back_empty_is_an_outage_until_its_queues_are_there() {
    let mut server = PrivateRabbitmq::launch().await;
    let broker = Broker::connect(&server.url()).await;
    broker.exchange("events").await;
    broker.queue("q", quorum(&[]), "events", "#").await;
    let sink = sink(&server.url(), "exchange = \"events\"").await;
    assert_eq!(said(&send(&sink, event("1")).await), "delivered");
    server.kill();
    let outcome = said(&send(&sink, event("2")).await);
    assert!(outcome.starts_with("unavailable ") || outcome.starts_with("ambiguous "), "{outcome}");
    server.empty();
    server.start().await;
    let found = async {
        loop {
            let outcome = said(&send(&sink, event("2")).await);
            if !outcome.ends_with(" connect_failed") && !outcome.ends_with(" rabbitmq_connection_lost") {
                return outcome;
            }
        }
    };
    let found = timeout(PATIENCE, found).await.expect("connected again");
    assert_eq!(found, "ambiguous rabbitmq_no_exchange");
    let broker = Broker::connect(&server.url()).await;
    broker.exchange("events").await;
    assert_eq!(said(&send(&sink, event("2")).await), "ambiguous rabbitmq_unroutable");
    broker.queue("q", quorum(&[]), "events", "#").await;
    assert_eq!(said(&send(&sink, event("2")).await), "delivered");
    assert_eq!(broker.take("q", 1).await.len(), 1);
}

struct Stand {
    url: String,
    broker: Broker,
    queue: String,
    keys: String,
}

/// A queue on the shared server, and the keys of a sink that publishes to it.
async fn stand() -> Stand {
    let url = Rabbitmq::shared().await.url();
    let (broker, queue) = (Broker::connect(&url).await, unique("q"));
    broker.exchange(&queue).await;
    broker.queue(&queue, quorum(&[]), &queue, "#").await;
    Stand { url, broker, keys: format!("exchange = {queue:?}"), queue }
}

#[tokio::test]
async fn a_lost_confirm_is_ambiguous_and_its_repetition_has_the_same_id() {
    let Stand { url, broker, queue, keys } = stand().await;
    let proxy = FaultProxy::in_front_of(&url).await;
    let sink = sink(&proxy.url(&url), &keys).await;
    assert_eq!(said(&send(&sink, event("0")).await), "delivered");
    proxy.swallow(&[Direction::ToClient]);
    let sent = deliveries((1..=100).map(|n| event(&n.to_string())));
    let cut = async {
        let stored = broker.take(&queue, 101).await;
        proxy.reset();
        proxy.heal();
        stored
    };
    let (outcomes, mut stored) = tokio::join!(deliver(&sink, &sent), cut);
    for outcome in &outcomes {
        assert_eq!(said(outcome), "ambiguous rabbitmq_connection_lost");
    }
    for outcome in deliver(&sink, &sent).await {
        assert_eq!(said(&outcome), "delivered");
    }
    stored.extend(broker.take(&queue, 100).await);
    let ids: BTreeSet<String> = stored.iter().map(message_id).collect();
    assert_eq!((stored.len(), ids.len()), (201, 101));
}

/// Messages queued on a lost connection are not sent on the next one.
#[tokio::test]
async fn nothing_is_sent_in_secret_once_a_call_has_ended() {
    let server = PrivateRabbitmq::launch().await;
    let broker = Broker::connect(&server.url()).await;
    broker.queue("q", quorum(&[]), "amq.topic", "#").await;
    let sink = sink_with(&server.url(), KEYS, &context(SHORT * 3)).await;
    assert_eq!(said(&send(&sink, event("first")).await), "delivered");
    server.freeze();
    // Far more than the system buffers for a server that reads nothing.
    let large = || NewEvent::json("t", vec![b' '; 500_000]);
    let sent = deliveries(std::iter::repeat_with(large).take(100));
    let began = Instant::now();
    for outcome in deliver(&sink, &sent).await {
        assert_eq!(said(&outcome), "ambiguous rabbitmq_confirm_timeout");
    }
    assert!(began.elapsed() < SHORT * 10, "its own deadline: {:?}", began.elapsed());
    // The connection was given up, and no new one can be opened.
    let outcome = said(&send(&sink, event("no")).await);
    assert!(outcome.starts_with("unavailable "), "{outcome}");
    server.thaw();
    let delivered = async { while said(&send(&sink, event("last")).await) != "delivered" {} };
    timeout(PATIENCE, delivered).await.expect("connected again");
    let stored = Broker::connect(&server.url()).await.drain("q").await;
    let large = stored.iter().filter(|message| message.data.len() == 500_000).count();
    assert!(large < sent.len(), "the queue was not sent: {large}");
    assert_eq!(stored.iter().filter(|message| message.data == b"last").count(), 1);
    assert!(!stored.iter().any(|message| message.data == b"no"));
}

/// Bytes go out, and nothing comes back.
#[tokio::test]
async fn a_black_hole_is_ambiguous_and_then_an_outage() {
    let Stand { url, broker, queue, keys } = stand().await;
    let proxy = FaultProxy::in_front_of(&url).await;
    let sink = sink_with(&proxy.url(&url), &keys, &context(SHORT)).await;
    assert_eq!(said(&send(&sink, event("first")).await), "delivered");
    proxy.swallow(&[Direction::ToServer, Direction::ToClient]);
    let began = Instant::now();
    for outcome in deliver(&sink, &deliveries([event("1"), event("2")])).await {
        assert_eq!(said(&outcome), "ambiguous rabbitmq_confirm_timeout");
    }
    assert!(began.elapsed() < SHORT * 5, "its own deadline: {:?}", began.elapsed());
    // Nothing came back, so the connection was given up, and no new one can be opened.
    assert_eq!(said(&send(&sink, event("no")).await), "unavailable rabbitmq_connection_lost");
    proxy.reset();
    proxy.heal();
    assert_eq!(said(&send(&sink, event("last")).await), "delivered");
    let payloads: Vec<Vec<u8>> = broker.take(&queue, 2).await.into_iter().map(|message| message.data).collect();
    assert_eq!(payloads, [&b"first"[..], b"last"]);
}

/// The server says why it accepts nothing, and when it accepts messages again.
#[tokio::test]
async fn a_blocked_connection_is_an_outage_with_its_cause_until_it_is_unblocked() {
    let server = PrivateRabbitmq::launch().await;
    let broker = Broker::connect(&server.url()).await;
    broker.queue("q", quorum(&[]), "amq.topic", "#").await;
    let sink = sink_with(&server.url(), KEYS, &context(SHORT * 3)).await;
    assert_eq!(said(&send(&sink, event("first")).await), "delivered");
    server.ctl(&["set_vm_memory_high_watermark", "0.00001"]);
    let sent = deliveries((0..100).map(|n| event(&n.to_string())));
    for (call, longest) in [(1, SHORT * 10), (2, SHORT), (3, SHORT)] {
        let began = Instant::now();
        for outcome in deliver(&sink, &sent).await {
            assert_eq!(said(&outcome), "unavailable rabbitmq_blocked", "call {call}");
            assert!(format!("{outcome:?}").contains("blocked: low on memory"), "{outcome:?}");
        }
        assert!(began.elapsed() < longest, "call {call}: {:?}", began.elapsed());
    }
    server.ctl(&["set_vm_memory_high_watermark", "0.4"]);
    let unblocked = async {
        while said(&deliver(&sink, &sent).await[0]) != "delivered" {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, unblocked).await.expect("unblocked");
    // Events of the first call may be in the queue as well.
    broker.until_ids("q", 101).await;
    // Stopping does not wait for it either.
    timeout(PATIENCE, sink.close()).await.expect("closes in time");
}

/// A confirm that arrives late but in time counts.
#[tokio::test]
async fn a_slow_queue_is_waited_for() {
    let Stand { url, broker, queue, keys } = stand().await;
    let sink = sink(&url, &keys).await;
    assert_eq!(said(&send(&sink, event("first")).await), "delivered");
    let server = Rabbitmq::shared().await;
    let process = |verb: &str| {
        let lookup = format!("rabbit_amqqueue:lookup(rabbit_misc:r(<<\"/\">>, queue, <<\"{queue}\">>))");
        let (server, code) = (server.clone(), format!("{{ok, Q}} = {lookup}, sys:{verb}(amqqueue:get_pid(Q))."));
        tokio::task::spawn_blocking(move || server.ctl(&["eval", &code]))
    };
    process("suspend").await.expect("suspended");
    let sent = deliveries((0..10).map(|n| event(&n.to_string())));
    let (outcomes, _) = tokio::join!(deliver(&sink, &sent), process("resume"));
    assert!(outcomes.iter().all(|outcome| said(outcome) == "delivered"), "{outcomes:?}");
    assert_eq!(broker.take(&queue, 11).await.len(), 11);
}

#[tokio::test]
async fn a_connection_that_was_lost_meanwhile_is_made_again_by_the_next_call() {
    let Stand { url, keys, .. } = stand().await;
    let proxy = FaultProxy::in_front_of(&url).await;
    let sink = sink(&proxy.url(&url), &keys).await;
    for n in 0..20 {
        proxy.reset();
        while proxy.connections() > 0 {
            tokio::task::yield_now().await;
        }
        let outcome = said(&send(&sink, event(&n.to_string())).await);
        // Whether anything was sent depends on which side notices first that the connection is
        // lost.
        assert!(outcome == "delivered" || outcome.ends_with(" rabbitmq_connection_lost"), "{outcome}");
        let delivered = async { while said(&send(&sink, event("again")).await) != "delivered" {} };
        // Far less than a call may wait for a confirm.
        timeout(SHORT * 5, delivered).await.expect("connected again at once");
    }
}
