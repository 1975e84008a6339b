//! The suite that every sink passes, with a memory store as the destination, and tests that are
//! specific to the bus.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use postbox_bus::BusSink;
use postbox_core::limits::{HEADER_BYTES_MAX, HEADERS_MAX};
use postbox_core::{
    Admin as _, Append as _, Change, Criteria, Delivery, Error, ErrorKind, Event, Headers, Inbound, Inspect as _,
    ListQuery, Log as _, LogName, Maintain as _, NewEvent, Outcome, Receive, Received, Result, Selection, Seq, Sink,
    SourceName, State, Subscription, SubscriptionName, dead_header, header,
};
use postbox_engine::{Relay, TokioClock};
use postbox_memory::MemoryStore;
use postbox_router::handler_sink;
use postbox_testkit::conformance::{Attempt, Destination, SinkFixture, SinkTraits};
use postbox_testkit::sending::{deliver, deliveries};

fn log(name: &str) -> LogName {
    name.parse().expect("a name")
}

fn source() -> SourceName {
    "billing".parse().expect("a name")
}

async fn store() -> MemoryStore {
    let store = MemoryStore::new(Arc::new(TokioClock::default()));
    store.create_log(&log("events")).await.expect("a log");
    store
}

/// The destination store, with every fault that a destination can have.
struct Other {
    store: MemoryStore,
    state: Mutex<Destination>,
    attempts: Mutex<Vec<Attempt>>,
}

impl Other {
    fn note(&self, inbound: &[Inbound], accepted: bool) {
        let attempt = |inbound: &Inbound| Attempt {
            dedupe_id: inbound
                .message_id
                .strip_prefix("event:")
                .map(|id| id.split('>').next().unwrap_or(id).to_owned()),
            payload: inbound.event.payload.to_vec(),
            accepted,
        };
        self.attempts.lock().expect("no panic while held").extend(inbound.iter().map(attempt));
    }
}

#[async_trait]
impl Receive for Other {
    async fn receive_many(&self, log: &LogName, inbound: &[Inbound]) -> Result<Vec<Received>> {
        let state = *self.state.lock().expect("no panic while held");
        let refused = inbound.iter().any(|inbound| inbound.event.headers.contains_key("poison"));
        let failure = match state {
            Destination::Down => return Err(Error::new(ErrorKind::Unavailable, "receive", "store_down", "down")),
            Destination::Works if refused => Some(Error::invalid("receive", "event_refused", "refused")),
            Destination::Works => None,
            Destination::Fails => Some(Error::new(ErrorKind::Internal, "receive", "store_failed", "failed")),
            Destination::Throttles => Some(Error::new(ErrorKind::RateLimited, "receive", "store_busy", "busy")),
            Destination::Hangs => {
                self.note(inbound, false);
                return std::future::pending().await;
            }
        };
        self.note(inbound, failure.is_none());
        match failure {
            Some(failure) => Err(failure),
            None => self.store.receive_many(log, inbound).await,
        }
    }

    async fn forget(&self, older_than: Duration) -> Result<u64> {
        self.store.forget(older_than).await
    }
}

struct Fixture {
    sink: Arc<dyn Sink>,
    other: Arc<Other>,
}

async fn fixture() -> Fixture {
    let state = Mutex::new(Destination::Works);
    let other = Arc::new(Other { store: store().await, state, attempts: Mutex::default() });
    Fixture { sink: Arc::new(BusSink::new(other.clone(), log("events"), source())), other }
}

#[async_trait]
impl SinkFixture for Fixture {
    fn sink(&self) -> Arc<dyn Sink> {
        self.sink.clone()
    }

    fn traits(&self) -> SinkTraits {
        SinkTraits { payload_bytes_max: Some(postbox_core::limits::PAYLOAD_BYTES_MAX), ..SinkTraits::ALL }
    }

    async fn attempts(&self) -> Vec<Attempt> {
        self.other.attempts.lock().expect("no panic while held").clone()
    }

    fn poison(&self, event: NewEvent) -> NewEvent {
        event.header("poison", "1")
    }

    async fn set(&self, destination: Destination) {
        *self.other.state.lock().expect("no panic while held") = destination;
    }
}

postbox_testkit::sink_suite!(fixture);

/// Sends the pending events of a log to a log of another store.
async fn drain(from: (&MemoryStore, &str), to: (&MemoryStore, &str)) -> u64 {
    let subscription = Subscription::new("bus".parse().expect("a name"), log(from.1));
    let sink = BusSink::new(Arc::new(to.0.clone()), log(to.1), source());
    let relay = Relay::builder(Arc::new(from.0.clone()), subscription).sink(Arc::new(sink)).build().expect("a relay");
    relay.drain(None).await.expect("drained").fetched
}

/// Returns the events of a log, in order.
async fn events(store: &MemoryStore, name: &str) -> Vec<Event> {
    let reader = Subscription::new("reader".parse().expect("a name"), log(name));
    store.subscribe(&reader).await.expect("subscribed");
    let query = ListQuery {
        subscription: reader.name,
        state: Some(State::Pending),
        which: Criteria::default(),
        code: None,
        headers: Headers::new(),
        after: None,
        limit: 999,
        payloads: true,
    };
    store.list(&query).await.expect("listed").into_iter().map(|record| record.event).collect()
}

#[tokio::test]
async fn an_event_keeps_its_fields_and_the_order_of_its_key() {
    let (from, to) = (store().await, store().await);
    let of_key = |n: usize| NewEvent::json("order.paid", n.to_string()).key("42").aggregate("order").version(n as i64);
    let sent: Vec<NewEvent> =
        (0..100).map(|n| of_key(n).kind("integration").tenant("acme").header("traceparent", "00-1-1-01")).collect();
    from.append(&LogName::outbox(), &sent).await.expect("appended");
    assert_eq!(drain((&from, "outbox"), (&to, "events")).await, 100);
    let (origin, arrived) = (events(&from, "outbox").await, events(&to, "events").await);
    assert_eq!(arrived.len(), 100);
    for (origin, arrived) in origin.into_iter().zip(arrived) {
        let message_id = arrived.headers[header::MESSAGE_ID].clone();
        assert!(message_id.starts_with(&format!("event:{}@", origin.id)), "{message_id}");
        let expected = Event {
            id: arrived.id,
            created_at: arrived.created_at,
            source: Some("billing".to_owned()),
            headers: origin.headers.clone().into_iter().chain([(header::MESSAGE_ID.to_owned(), message_id)]).collect(),
            ..origin
        };
        assert_eq!(arrived, expected);
    }
}

/// A handler may append an event with the headers of the event that it handles.
#[tokio::test]
async fn a_copied_header_makes_no_event_another() {
    let (one, other) = (store().await, store().await);
    let copied = |topic: &str, payload: &'static str| {
        NewEvent::json(topic, payload).header(header::MESSAGE_ID, "event:x1").header(header::MESSAGE_ID, "event:x1@0")
    };
    let first = [copied("order.paid", "1"), copied("order.shipped", "1"), copied("order.closed", "2")];
    one.append(&log("events"), &first).await.expect("appended");
    assert_eq!(drain((&one, "events"), (&other, "events")).await, 3);
    let arrived = events(&other, "events").await;
    assert_eq!(arrived.len(), 3);
    let headers = arrived[0].headers.clone();
    let caused = NewEvent { headers, ..NewEvent::json("order.sent", "1") };
    other.append(&log("events"), &[caused]).await.expect("appended");
    drain((&other, "events"), (&one, "events")).await;
    let topics: Vec<String> = events(&one, "events").await.into_iter().map(|event| event.topic.to_string()).collect();
    assert!(topics.contains(&"order.sent".to_owned()), "{topics:?}");
}

/// A store remembers ids for all of its logs together.
#[tokio::test]
async fn each_log_of_a_store_gets_the_event() {
    let (one, other) = (store().await, store().await);
    other.create_log(&log("audit")).await.expect("a log");
    one.append(&log("events"), &[NewEvent::json("t", "1")]).await.expect("appended");
    drain((&one, "events"), (&other, "inbox")).await;
    drain((&other, "inbox"), (&other, "audit")).await;
    for name in ["inbox", "audit"] {
        assert_eq!(other.count(&log(name)).await.expect("counted").events, 1, "{name}");
    }
}

#[tokio::test]
async fn a_ring_of_logs_ends_where_it_began() {
    let (one, other) = (store().await, store().await);
    one.append(&log("events"), &[NewEvent::json("t", "1")]).await.expect("appended");
    // To the other store, back as a received message, and to the other store again, which knows it
    // already.
    for _ in 0..4 {
        drain((&one, "events"), (&other, "events")).await;
        drain((&other, "events"), (&one, "events")).await;
    }
    assert_eq!((events(&one, "events").await.len(), events(&other, "events").await.len()), (2, 1));
}

async fn refuse(_: Delivery) -> Outcome {
    Outcome::dead("refused", "no")
}

/// Lets the pending events of the log die, and sends their letters to the same log of a store.
async fn die(store: &MemoryStore, subscription: &str, to: &MemoryStore) {
    let letters_to = BusSink::new(Arc::new(to.clone()), log("events"), source());
    let subscription = Subscription::new(subscription.parse().expect("a name"), log("events"));
    let relay = Relay::builder(Arc::new(store.clone()), subscription)
        .sink(Arc::new(handler_sink(refuse)))
        .dead_to(Arc::new(letters_to), Arc::new(store.clone()));
    relay.build().expect("a relay").drain(None).await.expect("drained");
}

/// An event that came by a bus keeps the id of its origin, but each of its deaths is another
/// message.
#[tokio::test]
async fn each_death_is_a_letter_of_its_own_and_a_ring_of_letters_ends() {
    let (one, other) = (store().await, store().await);
    other.append(&log("events"), &[NewEvent::json("t", "1")]).await.expect("appended");
    drain((&other, "events"), (&one, "events")).await;
    drain((&one, "events"), (&other, "events")).await;
    for (subscription, letters) in [("a", 1), ("b", 2), ("b", 3), ("b", 3)] {
        die(&one, subscription, &other).await;
        let known = events(&other, "events").await.len();
        assert_eq!(known, 2 + letters, "the event, itself again, and each death ({subscription})");
        if letters == 2 {
            let name: SubscriptionName = subscription.parse().expect("a name");
            _ = one.change(&name, &Change::Retry, &Selection::default()).await.expect("retried");
        }
    }
    // A log whose dead letters go into the log itself.
    for _ in 0..6 {
        die(&one, "ring", &one).await;
    }
    assert_eq!(events(&one, "events").await.len(), 2, "the event, and one letter of it");
}

/// In a letter's id, the death follows `-d`. A UUID may contain `-d` too.
#[tokio::test]
async fn letters_of_ids_with_a_d_after_a_dash_are_not_taken_for_each_other() {
    let (one, other, to) = (store().await, store().await, store().await);
    let sent = [
        "0199abcd-d111-7000-8000-000000000001",
        "0199abcd-d222-7000-8000-000000000001",
        "0199abcd-1111-7000-8000-d00000000001",
        "0199abcd-1111-7000-8000-d00000000002",
    ]
    .map(|id| NewEvent::json("t", "1").id(id.parse().expect("an id")));
    one.append(&log("events"), &sent).await.expect("appended");
    drain((&one, "events"), (&other, "events")).await;
    die(&other, "a", &to).await;
    assert_eq!(events(&to, "events").await.len(), 4);
    for _ in 0..6 {
        die(&one, "ring", &one).await;
    }
    assert_eq!(events(&one, "events").await.len(), 8, "each event, and one letter of it");
}

/// An event has one id in all databases that it came to. What becomes of it there differs.
#[tokio::test]
async fn deaths_and_replays_in_two_databases_are_messages_of_their_own() {
    let (one, other, to) = (store().await, store().await, store().await);
    let first = store().await;
    first.append(&log("events"), &[NewEvent::json("t", "1")]).await.expect("appended");
    drain((&first, "events"), (&one, "events")).await;
    drain((&one, "events"), (&other, "events")).await;
    for store in [&one, &other] {
        die(store, "apply", &to).await;
    }
    assert_eq!(events(&to, "events").await.len(), 2, "a letter from each");
    let sink = BusSink::new(Arc::new(to.clone()), log("events"), source());
    for store in [&one, &other] {
        let event = events(store, "events").await.remove(0);
        let delivery = Delivery { event, seq: Seq(1), attempt: 1, replay: 1, trace: None };
        assert!(sink.deliver(&[&delivery]).await[0].is_delivered());
    }
    assert_eq!(events(&to, "events").await.len(), 4, "and a replay from each");
}

#[tokio::test]
async fn a_letter_of_an_event_with_as_many_headers_as_possible_arrives() {
    let (one, to) = (store().await, store().await);
    let many = (0..HEADERS_MAX).fold(NewEvent::json("t", "1"), |event, n| event.header(format!("h{n:02}"), "v"));
    let large = NewEvent::json("t", "2").header("a", "v").header("z", "v".repeat(HEADER_BYTES_MAX - 3));
    one.append(&log("events"), &[many, large]).await.expect("appended");
    die(&one, "a", &to).await;
    let letters = events(&to, "events").await;
    assert_eq!(letters.len(), 2);
    for letter in letters {
        assert!(letter.headers.contains_key(dead_header::ID) && letter.headers.contains_key(dead_header::LEFT_OUT));
    }
}

#[tokio::test]
async fn a_replay_is_an_event_more_and_a_repetition_is_not() {
    let to = store().await;
    let sink = BusSink::new(Arc::new(to.clone()), log("events"), source());
    let event = NewEvent::json("t", "1")
        .into_event("0190163d-8694-739b-aea5-966c26f8ad90".parse().expect("an id"), jiff::Timestamp::UNIX_EPOCH);
    for (replay, expected) in [(0, Outcome::DELIVERED), (0, Outcome::DUPLICATE), (1, Outcome::DELIVERED)] {
        let delivery = Delivery { event: event.clone(), seq: Seq(1), attempt: 1, replay, trace: None };
        assert_eq!(sink.deliver(&[&delivery]).await, [expected]);
    }
    let other_topic = Event { topic: "other".parse().expect("a topic"), ..event.clone() };
    for event in [Event { payload: "2".into(), ..event }, other_topic] {
        let forged = Delivery { event, seq: Seq(2), attempt: 1, replay: 0, trace: None };
        let outcomes = sink.deliver(&[&forged]).await;
        assert!(matches!(&outcomes[..], [Outcome::Dead { code, .. }] if code == "bus_conflict"), "{outcomes:?}");
    }
    assert_eq!(events(&to, "events").await.len(), 2);
}

#[tokio::test]
async fn a_log_that_is_missing_is_an_outage_with_its_cure() {
    let to = MemoryStore::new(Arc::new(TokioClock::default()));
    let sink = BusSink::new(Arc::new(to), log("missing"), source());
    let event = NewEvent::json("t", "1")
        .into_event("0190163d-8694-739b-aea5-966c26f8ad90".parse().expect("an id"), jiff::Timestamp::UNIX_EPOCH);
    let outcomes = sink.deliver(&[&Delivery { event, seq: Seq(1), attempt: 1, replay: 0, trace: None }]).await;
    assert!(matches!(&outcomes[..], [Outcome::Unavailable { error, .. }] if error.contains("missing")), "{outcomes:?}");
}

/// A store whose trigger, index or policy refuses keys that begin with `bad`.
struct Picky {
    store: MemoryStore,
    kind: ErrorKind,
    code: &'static str,
    calls: AtomicUsize,
}

impl Picky {
    async fn of(kind: ErrorKind, code: &'static str) -> Arc<Self> {
        Arc::new(Self { store: store().await, kind, code, calls: AtomicUsize::new(0) })
    }
}

#[async_trait]
impl Receive for Picky {
    async fn receive_many(&self, log: &LogName, inbound: &[Inbound]) -> Result<Vec<Received>> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if inbound.iter().any(|inbound| inbound.event.key.as_deref().is_some_and(|key| key.starts_with("bad"))) {
            return Err(Error::new(self.kind, "receive", self.code, "refused"));
        }
        self.store.receive_many(log, inbound).await
    }

    async fn forget(&self, older_than: Duration) -> Result<u64> {
        self.store.forget(older_than).await
    }
}

#[tokio::test]
async fn one_refused_event_fails_none_of_its_neighbours() {
    for (kind, code) in [
        (ErrorKind::Internal, "store_error"),
        (ErrorKind::Conflict, "unique_violated"),
        (ErrorKind::NotFound, "reference_missing"),
        (ErrorKind::Unauthorized, "tenant_denied"),
    ] {
        let other = Picky::of(kind, code).await;
        let sink: Arc<dyn Sink> = Arc::new(BusSink::new(other, log("events"), source()));
        let events = ["a", "bad", "b", "bad", "c"].map(|key| NewEvent::json("t", "1").key(key));
        let outcomes = deliver(&sink, &deliveries(events)).await;
        let delivered: Vec<bool> = outcomes.iter().map(Outcome::is_delivered).collect();
        assert_eq!(delivered, [true, false, true, false, true], "{code}: {outcomes:?}");
        assert!(matches!(&outcomes[1], Outcome::Ambiguous { .. }), "it may be an outage: {outcomes:?}");
    }
}

/// Over a slow link, a commit for each event takes longer than a call may.
#[tokio::test]
async fn one_refused_event_of_many_costs_few_commits() {
    let other = Picky::of(ErrorKind::Conflict, "unique_violated").await;
    let sink: Arc<dyn Sink> = Arc::new(BusSink::new(other.clone(), log("events"), source()));
    let key = |n: usize| if n == 100 || n == 255 { "bad".to_owned() } else { n.to_string() };
    let sent = (0..256).map(|n| NewEvent::json("t", n.to_string()).key(key(n)));
    let outcomes = deliver(&sink, &deliveries(sent)).await;
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_delivered()).count(), 254);
    assert!(matches!(&outcomes[100], Outcome::Ambiguous { .. }), "{:?}", outcomes[100]);
    assert!(matches!(&outcomes[255], Outcome::Retry { .. }), "it waits for the first of its key: {:?}", outcomes[255]);
    // All, seven refused and seven stored parts of the first half, the event, and the second half.
    assert_eq!(other.calls.load(Ordering::Relaxed), 17);
    let arrived = events(&other.store, "events").await;
    assert_eq!(arrived.len(), 254);
}

#[tokio::test]
async fn many_refused_events_cost_few_commits_and_the_others_no_attempt() {
    let other = Picky::of(ErrorKind::Conflict, "unique_violated").await;
    let sink: Arc<dyn Sink> = Arc::new(BusSink::new(other.clone(), log("events"), source()));
    let key = |n: usize| if n < 128 { format!("bad{n}") } else { n.to_string() };
    let event = |n: usize| NewEvent::json("t", n.to_string()).key(key(n));
    let outcomes = deliver(&sink, &deliveries((0..256).map(event))).await;
    let is_ambiguous = |outcome: &Outcome| matches!(outcome, Outcome::Ambiguous { .. });
    assert!(outcomes[..8].iter().all(is_ambiguous), "{:?}", &outcomes[..8]);
    let left = |outcome: &Outcome| matches!(outcome, Outcome::Throttled { code, .. } if code == "bus_left");
    assert!(outcomes[8..128].iter().all(left), "{:?}", &outcomes[8..128]);
    assert!(outcomes[128..].iter().all(Outcome::is_delivered), "what is stored in one part");
    // Six refused parts down to the first eight, seven calls for each four of them, four parts of
    // the first half that wait, and the second half.
    assert_eq!(other.calls.load(Ordering::Relaxed), 25);
    let outcomes = deliver(&sink, &deliveries((8..128).map(event))).await;
    assert!(outcomes[..8].iter().all(is_ambiguous), "the next call goes on: {:?}", &outcomes[..8]);
}
