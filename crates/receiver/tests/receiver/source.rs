//! The in-memory source, and the receiver that drives it into an inbox.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    AckToken, Clock, Criteria, Delivery, Error, ErrorKind, Headers, Inbound, Inspect as _, ListQuery, LogName,
    RawMessage, Receive, Received, Result, Source, SourceCapabilities, SourceMessage, SourceName, State, Subscription,
};
use postbox_engine::{Relay, TokioClock};
use postbox_memory::{MemorySource, MemoryStore};
use postbox_receiver::{Receiver, ReceiverSettings};
use postbox_router::handler_sink;
use postbox_testkit::clock::ManualClock;
use postbox_testkit::conformance::{Poison, ReceivingFixture, ReceivingTraits, SourceFixture};
use postbox_testkit::inbox::{Inbox, Mode};
use postbox_testkit::warnings::Warnings;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const IN_FLIGHT_MAX: usize = 8;

struct Queue {
    source: Arc<MemorySource>,
    clock: Arc<ManualClock>,
}

fn queue(ordered: bool, dead_letters: bool) -> Queue {
    let clock = Arc::new(ManualClock::default());
    let source = MemorySource::new(IN_FLIGHT_MAX, clock.clone() as Arc<dyn Clock>);
    let source = source.with_capabilities(|capabilities| {
        capabilities.ordered = ordered;
        capabilities.dead_letters = dead_letters;
    });
    Queue { source: Arc::new(source), clock }
}

#[async_trait]
impl SourceFixture for Queue {
    fn source(&self) -> Arc<dyn Source> {
        self.source.clone()
    }

    async fn publish(&self, message: RawMessage) {
        self.source.publish(message);
    }

    async fn disconnect(&self) {
        self.source.disconnect();
    }

    async fn dead_letters(&self) -> Vec<RawMessage> {
        if self.source.capabilities().dead_letters { self.source.rejected() } else { Vec::new() }
    }

    async fn pass(&self, time: Duration) {
        self.clock.advance(time);
    }
}

mod in_order {
    async fn fixture() -> super::Queue {
        super::queue(true, true)
    }
    postbox_testkit::source_suite!(fixture);
}

mod in_no_order {
    async fn fixture() -> super::Queue {
        super::queue(false, false)
    }
    postbox_testkit::source_suite!(fixture);
}

/// A receiver on a queue, with its running task.
struct Way {
    source: Arc<MemorySource>,
    receiver: Arc<Receiver>,
    inbox: Arc<Inbox>,
    running: Mutex<Option<(CancellationToken, JoinHandle<()>)>>,
}

fn way(ordered: bool) -> Way {
    let source = MemorySource::new(64, Arc::new(TokioClock::new()));
    let source = Arc::new(source.with_capabilities(|capabilities| capabilities.ordered = ordered));
    let inbox = Arc::new(Inbox::default());
    let settings = ReceiverSettings {
        in_flight_max: IN_FLIGHT_MAX,
        store_timeout: Duration::from_secs(60),
        drain_timeout: Duration::from_millis(100),
    };
    let receiver = Receiver::builder(inbox.clone(), name(), LogName::inbox(), Arc::new(TokioClock::new()))
        .settings(settings)
        .pull(source.clone())
        .decode(decode)
        .build()
        .expect("good settings");
    Way { source, receiver: Arc::new(receiver), inbox, running: Mutex::default() }
}

pub(crate) fn name() -> SourceName {
    "queue".parse().expect("a name")
}

fn decode(message: &RawMessage) -> Result<Option<Inbound>> {
    match &message.payload[..] {
        b"poison" => Err(Error::invalid("decode", "body_broken", "as asked")),
        b"panic" => panic!("as asked"),
        b"ignored" => Ok(None),
        _ => message.clone().into_inbound(&name()).map(Some),
    }
}

pub(crate) fn message(id: &str, body: &str) -> RawMessage {
    let mut digest = [0; 32];
    body.bytes().enumerate().for_each(|(n, byte)| digest[n % 32] ^= byte.rotate_left(n as u32 % 8));
    RawMessage {
        id: Some(id.to_owned()),
        digest,
        topic: "order.paid".into(),
        key: None,
        headers: Default::default(),
        content_type: "application/json".into(),
        payload: body.to_owned().into(),
    }
}

#[async_trait]
impl ReceivingFixture for Way {
    fn traits(&self) -> ReceivingTraits {
        let ordered = self.source.capabilities().ordered;
        ReceivingTraits { in_flight_max: IN_FLIGHT_MAX, ordered, poison: Poison::Kept }
    }

    fn inbox(&self) -> Arc<Inbox> {
        self.inbox.clone()
    }

    async fn start(&self) {
        self.source.reopen();
        let (receiver, stop) = (Arc::clone(&self.receiver), CancellationToken::new());
        let task = tokio::spawn({
            let stop = stop.clone();
            async move { receiver.run(stop).await }
        });
        *self.running.lock().expect("no panic while held") = Some((stop, task));
    }

    async fn stop(&self) {
        let running = self.running.lock().expect("no panic while held").take();
        let (stop, task) = running.expect("it runs");
        stop.cancel();
        task.await.expect("no panic");
    }

    fn publish(&self, id: &str, body: &str) {
        self.source.publish(message(id, body));
    }

    fn publish_poison(&self, id: &str, body: &str) {
        self.publish(id, body);
    }

    async fn disconnect(&self) {
        self.source.disconnect();
    }

    fn lose_settlements(&self, lost: bool) {
        self.source.fail_settling(lost);
    }

    fn settled(&self) -> usize {
        self.source.acked().len() + self.refused()
    }

    fn refused(&self) -> usize {
        self.source.rejected().len()
    }
}

mod receiving_in_order {
    async fn fixture() -> super::Way {
        super::way(true)
    }
    postbox_testkit::receiving_suite!(fixture);
}

mod receiving_in_no_order {
    async fn fixture() -> super::Way {
        super::way(false)
    }
    postbox_testkit::receiving_suite!(fixture);
}

/// Publishes a message and waits until it is settled.
async fn settle(way: &Way, id: &str, body: &str) {
    way.publish(id, body);
    let emptied = async {
        while way.source.remaining() > 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), emptied).await.expect("emptied in time");
}

#[tokio::test]
async fn each_end_of_a_message_is_counted() {
    let way = way(false);
    let (warnings, _guard) = Warnings::hear();
    way.start().await;
    let huge = "x".repeat(postbox_core::limits::PAYLOAD_BYTES_MAX + 1);
    for (id, body) in
        [("1", "a"), ("1", "a"), ("1", "b"), ("2", "poison"), ("3", "panic"), ("4", "ignored"), ("5", huge.as_str())]
    {
        settle(&way, id, body).await;
    }
    way.stop().await;
    let counted = way.receiver.metrics().snapshot();
    assert_eq!((counted.accepted, counted.duplicates, counted.conflicts), (3, 1, 1), "{counted:?}");
    assert_eq!((counted.poison, counted.ignored, counted.rejected), (2, 1, 1), "{counted:?}");
    let rejected = way.source.rejected();
    assert_eq!((rejected.len(), rejected[0].id.as_deref()), (1, Some("5")), "what nobody can keep is the broker's");
    let poison: Vec<_> = warnings.all().into_iter().filter(|line| line.contains("poison: ")).collect();
    let says_no_more = |line: &String| line.contains("message is poison: ");
    assert!(!poison.is_empty() && poison.iter().all(says_no_more), "before the store has answered: {poison:?}");
}

/// A panic drops `run`, too.
#[tokio::test(start_paused = true)]
async fn what_a_dropped_run_has_left_comes_again_from_a_new_source() {
    let way = way(true);
    way.inbox.set(Mode::Hangs);
    way.publish("1", "a");
    let dropped = tokio::time::timeout(Duration::from_secs(1), way.receiver.run(CancellationToken::new())).await;
    dropped.expect_err("the store hangs");
    way.inbox.set(Mode::Works);
    way.receiver.renew(async { Ok(way.source.clone() as Arc<dyn Source>) }).await.expect("a source");
    way.start().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    way.stop().await;
    assert_eq!(way.source.acked().len(), 1);
}

/// After the decoder is fixed, a message that was poison is stored when it is sent again.
#[tokio::test]
async fn poison_does_not_use_up_its_id() {
    let way = way(true);
    way.start().await;
    settle(&way, "1", "poison").await;
    settle(&way, "1", "mended").await;
    way.stop().await;
    let ids: Vec<String> = way.inbox.all().into_iter().map(|stored| stored.message_id).collect();
    assert!(ids.len() == 2 && ids[0].starts_with("poison:1:") && ids[1] == "1", "{ids:?}");
}

/// An inbox whose first call waits, then fails for a reason that only a person can fix.
#[derive(Default)]
pub(crate) struct Mended {
    pub(crate) inbox: Inbox,
    calls: AtomicUsize,
    pub(crate) fails: Notify,
}

#[async_trait]
impl Receive for Mended {
    async fn receive_many(&self, log: &LogName, inbound: &[Inbound]) -> Result<Vec<Received>> {
        if self.calls.fetch_add(1, Ordering::SeqCst) == 0 {
            self.fails.notified().await;
            return Err(Error::new(ErrorKind::Internal, "receive", "store_error", "it does not work"));
        }
        self.inbox.receive_many(log, inbound).await
    }

    async fn forget(&self, _older_than: Duration) -> Result<u64> {
        Ok(0)
    }
}

/// Runs a receiver of this source until `watch` has ended.
pub(crate) async fn receive_while(
    store: Arc<dyn Receive>,
    source: Arc<dyn Source>,
    watch: impl Future<Output = ()>,
) -> Receiver {
    let clock = Arc::new(TokioClock::new());
    let receiver =
        Receiver::builder(store, name(), LogName::inbox(), clock).pull(source).build().expect("good settings");
    let stop = CancellationToken::new();
    let watching = async {
        watch.await;
        stop.cancel();
    };
    tokio::join!(receiver.run(stop.clone()), watching);
    receiver
}

/// In order, messages that were read meanwhile wait together with those that are given back.
#[tokio::test(start_paused = true)]
async fn nothing_is_stored_past_what_was_given_back() {
    let (source, store) = (MemorySource::new(8, Arc::new(TokioClock::new())), Arc::new(Mended::default()));
    let source = Arc::new(source.with_capabilities(|capabilities| capabilities.ordered = true));
    let watch = async {
        source.publish(message("1", "a"));
        tokio::time::sleep(Duration::from_secs(1)).await;
        source.publish(message("2", "b"));
        tokio::time::sleep(Duration::from_secs(1)).await;
        store.fails.notify_one();
        tokio::time::sleep(Duration::from_secs(60)).await;
    };
    let receiver = receive_while(store.clone(), source.clone(), watch).await;
    let ids: Vec<String> = store.inbox.all().into_iter().map(|stored| stored.message_id).collect();
    assert_eq!(ids, ["1", "2"]);
    assert_eq!(receiver.metrics().snapshot().returned, 2, "both");
}

/// A store that answers no call before somebody corrected its settings.
#[derive(Default)]
struct Misconfigured {
    inbox: Inbox,
    is_corrected: AtomicBool,
}

#[async_trait]
impl Receive for Misconfigured {
    async fn receive_many(&self, log: &LogName, inbound: &[Inbound]) -> Result<Vec<Received>> {
        if !self.is_corrected.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unauthorized, "receive", "login_refused", "another password"));
        }
        self.inbox.receive_many(log, inbound).await
    }

    async fn forget(&self, _older_than: Duration) -> Result<u64> {
        Ok(0)
    }
}

/// A broker that counts deliveries would give up every message of its queue.
#[tokio::test(start_paused = true)]
async fn a_store_that_refuses_everything_gives_nothing_back() {
    let (source, store) = (MemorySource::new(8, Arc::new(TokioClock::new())), Arc::new(Misconfigured::default()));
    let source = Arc::new(source);
    let watch = async {
        for n in 0..100 {
            source.publish(message(&n.to_string(), "a"));
        }
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert!(store.inbox.all().is_empty());
        store.is_corrected.store(true, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_secs(1)).await;
    };
    let receiver = receive_while(store.clone(), source.clone(), watch).await;
    assert_eq!(store.inbox.all().len(), 100, "half a second after the correction");
    assert_eq!(receiver.metrics().snapshot().returned, 0);
}

/// A store that refuses every message for this reason, or none.
#[derive(Default)]
struct Refusing {
    inbox: Inbox,
    reason: Mutex<Option<(ErrorKind, &'static str)>>,
}

#[async_trait]
impl Receive for Refusing {
    async fn receive_many(&self, log: &LogName, inbound: &[Inbound]) -> Result<Vec<Received>> {
        let reason = *self.reason.lock().expect("no panic while held");
        match reason {
            Some((kind, code)) => Err(Error::new(kind, "receive", code, "as asked")),
            None => self.inbox.receive_many(log, inbound).await,
        }
    }

    async fn forget(&self, _older_than: Duration) -> Result<u64> {
        Ok(0)
    }
}

#[tokio::test(start_paused = true)]
async fn messages_that_cannot_be_stored_are_an_outage_and_a_single_refused_one_is_none() {
    let store = Arc::new(Refusing::default());
    let builder = Receiver::builder(store.clone(), name(), LogName::inbox(), Arc::new(TokioClock::new()));
    let receiver = builder.build().expect("good settings");
    let refuse = |reason| *store.reason.lock().expect("no panic while held") = reason;
    // Its outcome after a message, one second later.
    let outage = async |id: &str| {
        _ = receiver.receive(message(id, "a").into_inbound(&name()).expect("valid")).await;
        let outage = receiver.store_outage().map(|outage| outage.code);
        tokio::time::sleep(Duration::from_secs(1)).await;
        outage
    };
    refuse(Some((ErrorKind::Invalid, "event_refused")));
    assert_eq!(outage("0").await, None, "it says nothing about the store");
    assert_eq!(receiver.metrics().snapshot().store_errors, 0, "no alert for one message that is refused");
    refuse(Some((ErrorKind::Internal, "store_error")));
    let (warnings, guard) = Warnings::hear();
    for _ in 0..10 {
        assert_eq!(outage("1").await, None, "a trigger may refuse one message");
    }
    drop(guard);
    let named = |line: &String| line.contains("store failed") && line.contains("message_id=\"1\"");
    assert!(warnings.all().iter().any(named), "{:?}", warnings.all());
    assert_eq!(outage("2").await.as_deref(), Some("store_error"));
    refuse(None);
    assert_eq!(outage("3").await, None, "one is stored");
    refuse(Some((ErrorKind::Unauthorized, "permission_denied")));
    assert_eq!(outage("4").await, None, "it may be over soon");
    assert_eq!(outage("4").await, None);
    assert_eq!(outage("4").await.as_deref(), Some("permission_denied"), "a store that refuses everything");
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(receiver.store_outage(), None, "nobody sends any more");
}

/// A queue that counts the messages it has handed out.
struct Counted {
    queue: MemorySource,
    out: AtomicUsize,
}

#[async_trait]
impl Source for Counted {
    fn capabilities(&self) -> SourceCapabilities {
        self.queue.capabilities()
    }

    async fn next(&self, max: usize) -> Result<Vec<SourceMessage>> {
        let messages = self.queue.next(max).await?;
        self.out.fetch_add(messages.len(), Ordering::SeqCst);
        Ok(messages)
    }

    async fn ack(&self, tokens: &[AckToken]) -> Result<()> {
        self.queue.ack(tokens).await
    }

    async fn nak(&self, tokens: &[AckToken], delay: Duration) -> Result<()> {
        self.queue.nak(tokens, delay).await
    }

    async fn reject(&self, tokens: &[AckToken]) -> Result<()> {
        self.queue.reject(tokens).await
    }

    async fn close(&self) {
        self.queue.close().await;
    }
}

/// Whoever may publish must not be able to fill the memory while the store is away.
#[tokio::test(start_paused = true)]
async fn large_messages_are_pulled_up_to_a_size() {
    let queue = MemorySource::new(256, Arc::new(TokioClock::new()));
    let (source, store) = (Counted { queue, out: AtomicUsize::default() }, Arc::new(Misconfigured::default()));
    let source = Arc::new(source);
    let large = message("0", &"x".repeat(1024 * 1024));
    let watch = async {
        for n in 0..256 {
            source.queue.publish(RawMessage { id: Some(n.to_string()), ..large.clone() });
        }
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(source.out.load(Ordering::SeqCst), 85, "a third of them, with more than 64 MiB");
        store.is_corrected.store(true, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_secs(10)).await;
    };
    receive_while(store.clone(), source.clone(), watch).await;
    assert_eq!(store.inbox.all().len(), 256);
}

/// The store is away for a minute of a stepped clock. The receiver retries, but not in a busy loop.
#[tokio::test(start_paused = true)]
async fn an_outage_is_no_busy_loop() {
    let way = way(true);
    way.inbox.set(Mode::Down);
    way.publish("1", "a");
    way.start().await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let calls = way.inbox.counts().calls;
    assert!((100..=130).contains(&calls), "{calls} calls in a minute");
    way.inbox.set(Mode::Works);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(way.source.acked().len(), 1);
}

#[tokio::test]
async fn a_relay_never_sends_poison_and_an_operator_sees_its_bytes() {
    let store = Arc::new(MemoryStore::new(Arc::new(TokioClock::new())));
    let poison = message("1", "poison").into_poison(&name(), "body_broken", "as asked");
    let plain = message("2", "plain").into_inbound(&name()).expect("an event");
    store.receive_many(&LogName::inbox(), &[poison, plain]).await.expect("stored");
    let sent = Arc::new(Mutex::new(Vec::new()));
    let sink = handler_sink({
        let sent = Arc::clone(&sent);
        move |delivery: Delivery| {
            sent.lock().expect("no panic while held").push(delivery.event.payload);
            std::future::ready(())
        }
    });
    let subscription = Subscription::new("apply".parse().expect("a name"), LogName::inbox());
    let relay = Relay::builder(store.clone(), subscription.clone()).sink(Arc::new(sink)).build().expect("a relay");
    let drained = relay.drain(None).await.expect("drained");
    assert_eq!((drained.delivered, drained.dead), (1, 1), "{drained:?}");
    assert_eq!(*sent.lock().expect("no panic while held"), ["plain"]);
    let query = ListQuery {
        subscription: subscription.name,
        state: Some(State::Dead),
        which: Criteria::default(),
        code: Some("body_broken".into()),
        headers: Headers::new(),
        after: None,
        limit: 10,
        payloads: true,
    };
    let dead = store.list(&query).await.expect("listed");
    assert_eq!((dead.len(), dead[0].error.as_deref()), (1, Some("as asked")));
    assert_eq!(dead[0].event.payload, b"poison"[..]);
}
