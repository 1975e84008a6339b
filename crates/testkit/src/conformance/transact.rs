//! Handlers of a router, in the transaction that settles their event.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use postbox_core::{
    Change, Error, Event, ListQuery, NewEvent, Record, Replay, Result, RetryPolicy, Schemas, Selection, State, Store,
    Subscription, Tenant, TypedEvent,
};
use postbox_engine::{Relay, RelayBuilder, RelaySettings};

use super::ApplyFixture;
use super::harness::*;

/// The event of these tests, with a text that handlers write.
#[derive(Debug, serde::Deserialize)]
pub struct Entry {
    /// The text. It also says how handlers fail.
    pub entry: String,
}

impl TypedEvent for Entry {
    const TOPIC: &'static str = "entry";
}

/// The topic of events that the first handler appends, with the entry unchanged.
pub const WRITTEN: &str = "written";

/// A handler's error.
#[derive(Debug)]
pub enum Fault {
    /// The event is retried.
    Later,
    /// The event is dead, by a rule of the router.
    Never,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}, as asked")
    }
}

impl std::error::Error for Fault {}

/// The state of the router: whether handlers still fail when the entry asks for it.
#[derive(Debug, Clone, Default)]
pub struct Healed(Arc<AtomicBool>);

impl Healed {
    /// Returns how a handler ends after its work.
    pub fn end(&self, handler: &str, entry: &str) -> std::result::Result<(), Fault> {
        match entry.strip_prefix(handler) {
            Some(" dead") => Err(Fault::Never),
            Some(" retry") if !self.0.load(Ordering::SeqCst) => Err(Fault::Later),
            Some(" panic") if !self.0.load(Ordering::SeqCst) => panic!("as asked"),
            _ => Ok(()),
        }
    }
}

/// The router's schema: an entry may not be `"broken"`.
#[derive(Debug)]
pub struct NotBroken;

impl Schemas for NotBroken {
    fn check(&self, topic: &str, schema_version: u32, payload: &[u8]) -> Result<()> {
        match payload == br#"{"entry":"broken"}"# {
            true => Err(Error::schema_violated(topic, schema_version, "/entry (not)")),
            false => Ok(()),
        }
    }
}

/// How handlers end their transaction themselves, in the words of every store.
const ENDS: [&str; 3] = ["COMMIT", "ROLLBACK", "COMMIT; BEGIN"];

/// The same in words that SQLite does not know.
const ENDS_ON_A_SERVER: [&str; 2] = ["COMMIT AND CHAIN", "COMMIT; SELECT pg_terminate_backend(pg_backend_pid())"];

/// Returns the SQL of a handler that ends its transaction itself, if the entry asks for it.
pub fn sql_of(entry: &str) -> Option<&str> {
    ENDS.iter().chain(&ENDS_ON_A_SERVER).copied().find(|end| *end == entry)
}

/// A store with transactions in which handlers of a router work.
pub trait RouterFixture: ApplyFixture {
    /// Gives the relay a router with two handlers of [`Entry`], a rule that [`Fault::Never`] is
    /// dead, and the schema [`NotBroken`]. `first` writes the entry as an effect and appends it as
    /// an event [`WRITTEN`]; `second` writes it again with a `+` after it. Each ends as
    /// [`Healed::end`] says. Before that, `second` executes the result of [`sql_of`].
    fn route(&self, relay: RelayBuilder, healed: Healed) -> Result<RelayBuilder>;

    /// Returns whether a handler's commit rolls its work back, like a rollback.
    fn refuses_commit(&self) -> bool {
        false
    }
}

struct Case<'f> {
    fixture: &'f dyn RouterFixture,
    store: Arc<dyn Store>,
    relay: Relay,
    healed: Healed,
}

impl<'f> Case<'f> {
    /// Sends payloads of the topic `entry` through the router once.
    async fn drained(fixture: &'f dyn RouterFixture, payloads: &[String]) -> Self {
        let (store, healed) = (fixture.store(), Healed::default());
        let written = Subscription { filter: reader_of(WRITTEN).filter, ..reader_named(WRITTEN) };
        store.subscribe(&written).await.expect("subscribed");
        let relay = Self::relay(fixture, &store, &healed);
        let event = |payload: &String| NewEvent::json(Entry::TOPIC, payload.clone()).key(payload.clone());
        append(&store, payloads.iter().map(event).collect::<Vec<_>>()).await;
        let case = Self { fixture, store, relay, healed };
        case.drain().await;
        case
    }

    fn relay(fixture: &'f dyn RouterFixture, store: &Arc<dyn Store>, healed: &Healed) -> Relay {
        let retry = RetryPolicy { delays: vec![HOUR], ..RetryPolicy::default() };
        let relay =
            Relay::builder(store.clone(), reader()).settings(RelaySettings { retry, ..RelaySettings::default() });
        fixture.route(relay, healed.clone()).expect("it has handlers").build().expect("built")
    }

    async fn of(fixture: &'f dyn RouterFixture, entries: &[&str]) -> Self {
        let payloads: Vec<String> = entries.iter().map(|entry| format!(r#"{{"entry":"{entry}"}}"#)).collect();
        Self::drained(fixture, &payloads).await
    }

    async fn drain(&self) {
        self.relay.drain(None).await.expect("drained");
    }

    /// A transaction that fails as a whole gives its lane back, which ends a drain.
    async fn drain_on(&self) {
        for _ in 0..5 {
            self.drain().await;
        }
    }

    async fn effects(&self) -> Vec<String> {
        self.fixture.effects().await
    }

    async fn records(&self, subscription: &str, state: State) -> Vec<Record> {
        let query = ListQuery { subscription: named(subscription), ..query(state) };
        self.store.list(&query).await.expect("listed")
    }

    /// Returns the payloads that handlers appended.
    async fn written(&self) -> Vec<String> {
        let text = |it: Record| String::from_utf8_lossy(&it.event.payload).into_owned();
        self.records(WRITTEN, State::Pending).await.into_iter().map(text).collect()
    }

    /// Returns the codes of events in this state, each with the name of the handler, if it is
    /// given.
    async fn codes(&self, state: State) -> Vec<String> {
        let said = |it: Record| {
            let error = it.error.unwrap_or_default();
            let handler = ["first", "second"].into_iter().find(|name| error.contains(&format!("::{name}: ")));
            format!("{} {}", it.code.unwrap_or_default(), handler.unwrap_or_default()).trim_end().to_owned()
        };
        self.records(reader().name.as_str(), state).await.into_iter().map(said).collect()
    }
}

pub async fn handlers_and_what_they_append_commit_with_the_position(fixture: &dyn RouterFixture) {
    let case = Case::of(fixture, &["1", "2"]).await;
    assert_eq!(case.effects().await, ["1", "1+", "2", "2+"], "in the order of `on`");
    assert_eq!(case.written().await, ["1", "2"]);
    assert_eq!(stats(&case.store).await.dispatched, 2);
    case.drain().await;
    assert_eq!(case.effects().await.len(), 4, "never again");
}

pub async fn what_is_appended_carries_on_the_event_s_context(fixture: &dyn RouterFixture) {
    let case = Case::of(fixture, &[]).await;
    let entry = |entry: &str| NewEvent::json(Entry::TOPIC, format!(r#"{{"entry":"{entry}"}}"#)).key("k");
    let given = entry("2").correlation_id("c").causation_id("earlier").actor("a").tenant("acme");
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let given = given.header("traceparent", parent).header("tracestate", "x=1");
    let ids = append(&case.store, [entry("1"), given.clone()]).await;
    case.drain().await;
    let written: Vec<Event> = case.records(WRITTEN, State::Pending).await.into_iter().map(|it| it.event).collect();
    assert_eq!(written.len(), 2);
    let begun = NewEvent::json(WRITTEN, "1").correlation_id(ids[0].to_string());
    let expected =
        [begun.causation_id(ids[0].to_string()), NewEvent { key: None, ..given }.causation_id(ids[1].to_string())];
    for (written, expected) in written.iter().zip(expected) {
        assert_eq!(
            (&written.headers, written.tenant.as_ref().map(Tenant::as_str)),
            (&expected.headers, expected.tenant.as_deref())
        );
    }
}

pub async fn a_failure_takes_back_what_every_handler_did_until_it_is_retried(fixture: &dyn RouterFixture) {
    let failing = ["first retry", "second retry", "first panic", "second panic"];
    let case = Case::of(fixture, &[&failing[..], &["1"]].concat()).await;
    assert_eq!(case.effects().await, ["1", "1+"]);
    assert_eq!(case.written().await, ["1"]);
    let codes = case.codes(State::Retrying).await;
    assert_eq!(codes, ["handler_error first", "handler_error second", "panic", "panic"]);
    case.healed.0.store(true, Ordering::SeqCst);
    let changed = case.store.change(&reader().name, &Change::Retry, &Selection::default()).await.expect("due now");
    assert_eq!(changed.count, 4);
    case.drain().await;
    let (mut effects, mut written) = (case.effects().await, case.written().await);
    effects.sort();
    written.sort();
    let twice = failing.into_iter().flat_map(|entry| [entry.to_owned(), format!("{entry}+")]);
    let mut expected: Vec<String> = twice.chain(["1".to_owned(), "1+".to_owned()]).collect();
    expected.sort();
    assert_eq!(effects, expected);
    assert_eq!(written, ["1", "first panic", "first retry", "second panic", "second retry"]);
    assert_eq!(stats(&case.store).await.dispatched, 5);
}

pub async fn what_is_refused_or_cannot_be_read_is_dead(fixture: &dyn RouterFixture) {
    let entry = |entry: &str| format!(r#"{{"entry":"{entry}"}}"#);
    let payloads = [entry("first dead"), entry("second dead"), "{}".to_owned(), entry("broken"), entry("1")];
    let case = Case::drained(fixture, &payloads).await;
    assert_eq!(case.effects().await, ["1", "1+"]);
    assert_eq!(case.written().await, ["1"]);
    let codes = case.codes(State::Dead).await;
    let expected = ["handler_refused first", "handler_refused second", "payload_not_decoded first", "schema_violated"];
    assert_eq!(codes, expected);
}

/// Whoever commits makes all that ran before it durable, so none of that may run again.
pub async fn several_who_commit_the_transaction_repeat_nobody(fixture: &dyn RouterFixture) {
    let mut case = Case::of(fixture, &["1", "COMMIT", "2", "COMMIT"]).await;
    case.drain_on().await;
    let of_commit: &[&str] = if fixture.refuses_commit() { &[] } else { &["COMMIT", "COMMIT+"] };
    let once = [&["1", "1+"], of_commit].concat();
    let expected = [&once, &["2", "2+"][..], of_commit].concat();
    assert_eq!(case.effects().await, expected);
    assert_eq!(case.codes(State::Dead).await, ["handler_ended_transaction"; 2]);
    // The same among due rows, by a relay whose transactions take several again.
    case.relay = Case::relay(fixture, &case.store, &case.healed);
    let oldest = async |state| Some(vec![case.records(reader().name.as_str(), state).await[0].event.id]);
    let replay = Replay { ids: oldest(State::Dispatched).await, ..Replay::default() };
    assert_eq!(case.store.replay(&reader().name, &replay).await.expect("replayed").count, 1);
    let again = Selection { ids: oldest(State::Dead).await, ..Selection::default() };
    assert_eq!(case.store.change(&reader().name, &Change::Retry, &again).await.expect("due now").count, 1);
    case.drain_on().await;
    assert_eq!(case.effects().await, [&expected[..], &once].concat());
}

pub async fn who_ends_the_transaction_is_dead_and_the_others_are_handled(fixture: &dyn RouterFixture) {
    let case = Case::of(fixture, &["1", "ROLLBACK", "2"]).await;
    case.drain_on().await;
    assert_eq!(case.effects().await, ["1", "1+", "2", "2+"]);
    assert_eq!(case.written().await, ["1", "2"]);
    assert_eq!(case.codes(State::Dead).await, ["handler_ended_transaction"]);
    assert_eq!(stats(&case.store).await.dispatched, 2);
}

/// Committed work stays, but nothing is executed again after that, neither this handler's work nor
/// that of others in its transaction.
pub async fn who_commits_the_transaction_is_dead_too(fixture: &dyn RouterFixture) {
    let case = Case::of(fixture, &["1", "second dead", "COMMIT", "2"]).await;
    case.drain_on().await;
    let of_commit: &[&str] = if fixture.refuses_commit() { &[] } else { &["COMMIT", "COMMIT+"] };
    let expected = [&["1", "1+"], of_commit, &["2", "2+"]].concat();
    assert_eq!(case.effects().await, expected);
    assert_eq!(case.codes(State::Dead).await, ["handler_refused second", "handler_ended_transaction"]);
    assert_eq!(stats(&case.store).await.dispatched, 2);
}

/// The connection does not show the commit: another transaction is open on it, or it has ended.
pub async fn who_commits_and_hides_it_is_dead_too(fixture: &dyn RouterFixture) {
    let on_a_server: &[&str] = if fixture.refuses_commit() { &[] } else { &ENDS_ON_A_SERVER };
    let (mut expected, mut dead): (Vec<String>, Vec<&str>) = (Vec::new(), Vec::new());
    for &commit in ["COMMIT; BEGIN"].iter().chain(on_a_server) {
        let case = Case::of(fixture, &["1", commit, "2"]).await;
        case.drain_on().await;
        let kept = if fixture.refuses_commit() { Vec::new() } else { vec![commit.to_owned(), format!("{commit}+")] };
        expected.extend(["1", "1+"].map(str::to_owned).into_iter().chain(kept).chain(["2", "2+"].map(str::to_owned)));
        dead.push("handler_ended_transaction");
        assert_eq!(case.effects().await, expected);
        assert_eq!(case.codes(State::Dead).await, dead);
    }
}
