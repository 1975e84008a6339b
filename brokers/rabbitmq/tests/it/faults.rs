//! A server that is killed, comes back empty, accepts nothing, or is cut off at the worst moment.

use std::time::{Duration, Instant};

use lapin::message::Delivery as Message;
use postbox_core::NewEvent;
use postbox_testkit::proxy::FaultProxy;
use postbox_testkit::sending::{PATIENCE, context, deliver, deliveries, said, send};
use postbox_testkit::servers::{PrivateRabbitmq, Rabbitmq};
use postbox_testkit::sink_faults::{self, Stored, whole_and_in_order};
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::broker::{Broker, message_id, quorum, unique};
use crate::stand::{SHORT, sink, sink_with};

const KEYS: &str = "exchange = \"amq.topic\"";

fn event(payload: &str) -> NewEvent {
    NewEvent::json("t", payload.to_owned())
}

fn read(messages: Vec<Message>) -> impl Iterator<Item = Stored> {
    messages.into_iter().map(|message| (message_id(&message), String::from_utf8(message.data).expect("text")))
}

#[tokio::test]
async fn a_server_that_is_killed_under_load_loses_nothing() {
    let mut server = PrivateRabbitmq::launch().await;
    Broker::connect(&server.url()).await.queue("q", quorum(&[]), "amq.topic", "#").await;
    server.sync();
    let sink = sink(&server.url(), KEYS).await;
    let appended = sink_faults::kill_under_load(sink, &mut server, 1).await;
    let messages = Broker::connect(&server.url()).await.until_ids("q", appended).await;
    whole_and_in_order(&read(messages).collect::<Vec<_>>(), appended);
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
    taken: Mutex<Vec<Stored>>,
}

impl Stand {
    /// Returns all messages that have arrived.
    async fn arrived(&self) -> Vec<Stored> {
        let mut taken = self.taken.lock().await;
        taken.extend(read(self.broker.drain(&self.queue).await));
        taken.clone()
    }
}

/// A queue on the shared server, and the keys of a sink that publishes to it.
async fn stand() -> Stand {
    let url = Rabbitmq::shared().await.url();
    let (broker, queue) = (Broker::connect(&url).await, unique("q"));
    broker.exchange(&queue).await;
    broker.queue(&queue, quorum(&[]), &queue, "#").await;
    Stand { url, broker, keys: format!("exchange = {queue:?}"), queue, taken: Mutex::default() }
}

#[tokio::test]
async fn a_lost_confirm_is_ambiguous_and_its_repetition_has_the_same_id() {
    let stand = stand().await;
    let proxy = FaultProxy::in_front_of(&stand.url).await;
    let sink = sink(&proxy.url(&stand.url), &stand.keys).await;
    let said = ["ambiguous rabbitmq_connection_lost", "delivered"];
    sink_faults::an_answer_is_lost(&sink, &proxy, 100, said, async || stand.arrived().await).await;
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

#[tokio::test]
async fn a_black_hole_is_ambiguous_and_then_an_outage() {
    let stand = stand().await;
    let proxy = FaultProxy::in_front_of(&stand.url).await;
    let sink = sink_with(&proxy.url(&stand.url), &stand.keys, &context(SHORT)).await;
    let said = ["ambiguous rabbitmq_confirm_timeout", "unavailable rabbitmq_connection_lost"];
    sink_faults::a_black_hole(&sink, &proxy, SHORT, said, async || stand.arrived().await).await;
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
    let Stand { url, broker, queue, keys, .. } = stand().await;
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
    sink_faults::connections_are_lost(&sink, &proxy, "rabbitmq_connection_lost").await;
}
