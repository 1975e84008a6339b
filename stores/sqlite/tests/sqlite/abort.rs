//! An event that aborts its process is found and marked dead. Each process is this test binary,
//! started again with a relay in it.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    Append as _, Capabilities, Criteria, Delivery, Headers, Inspect as _, ListQuery, LogName, NewEvent, Outcome, Sink,
    State, Store as _, Subscription,
};
use postbox_engine::{Relay, RelaySettings};
use postbox_sqlite::SqliteStore;
use rusqlite::Connection;

use crate::common::{self, Fixture, fixture};

const EVENTS: usize = 40;
const KEYS: usize = 5;
/// Payload of the event that aborts its process, in the middle of the log.
const POISON: &str = "17";
/// Three until the lane is careful, then three with the event alone.
const CRASHES_MAX: usize = 6;
const EFFECT: &str = "INSERT INTO effects (payload) VALUES (?1)";

fn subscription() -> Subscription {
    Subscription { lanes: Some(1), ..Subscription::new("reader".parse().expect("a name"), LogName::outbox()) }
}

fn payload(delivery: &Delivery) -> String {
    let payload = String::from_utf8_lossy(&delivery.event.payload).into_owned();
    if payload == POISON {
        std::process::abort();
    }
    payload
}

/// Stores the events that arrive in a table.
struct Writer(std::sync::Mutex<Connection>);

#[async_trait]
impl Sink for Writer {
    fn capabilities(&self) -> Capabilities {
        Capabilities { concurrency: 8, ..Capabilities::default() }
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        let connection = self.0.lock().expect("no panic while held");
        for delivery in deliveries {
            connection.execute(EFFECT, [payload(delivery)]).expect("written");
        }
        vec![Outcome::DELIVERED; deliveries.len()]
    }
}

/// The child process. It ends once nothing is pending, or is aborted by the event.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child_relay() {
    let Ok(path) = std::env::var("POSTBOX_TEST_ABORT") else { return };
    let store = SqliteStore::open(common::config(&path)).await.expect("opened");
    let settings = RelaySettings {
        lease_ttl: Duration::from_secs(1),
        deliver_timeout: Duration::from_secs(1),
        ..RelaySettings::default()
    };
    let relay = Relay::builder(Arc::new(store.clone()), subscription()).settings(settings);
    let relay = match std::env::var("POSTBOX_TEST_APPLY").is_ok() {
        true => relay.apply(store.apply(|tx: &rusqlite::Transaction<'_>, delivery: &Delivery| {
            tx.execute(EFFECT, [payload(delivery)]).expect("written");
            Outcome::DELIVERED
        })),
        false => {
            let connection = Connection::open(&path).expect("opened");
            connection.busy_timeout(common::PATIENCE).expect("set");
            relay.sink(Arc::new(Writer(connection.into())))
        }
    };
    let relay = relay.build().expect("built");
    let watching = async {
        let mut looks = tokio::time::interval(Duration::from_millis(50));
        while store.stats(&subscription().name).await.is_ok_and(|stats| stats.pending > 0) {
            looks.tick().await;
        }
    };
    tokio::select! {
        ended = relay.run(Default::default()) => panic!("ended: {ended:?}"),
        () = watching => {}
    }
}

/// Runs the child. Returns whether it ended by itself.
fn run(path: &Path, apply: bool) -> bool {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "abort::child_relay"]).env("POSTBOX_TEST_ABORT", path);
    if apply {
        command.env("POSTBOX_TEST_APPLY", "1");
    }
    command.output().expect("run").status.success()
}

async fn only_the_poison_dies(fixture: Fixture, apply: bool) {
    use postbox_core::Log as _;

    fixture.connect().execute_batch("CREATE TABLE effects (payload TEXT NOT NULL)").expect("made");
    fixture.store.subscribe(&subscription()).await.expect("subscribed");
    let event = |n: usize| NewEvent::json("t", n.to_string()).key((n % KEYS).to_string());
    let events: Vec<NewEvent> = (0..EVENTS).map(event).collect();
    fixture.store.append(&LogName::outbox(), &events).await.expect("appended");
    let path = fixture.path();
    let crashes = tokio::task::spawn_blocking(move || (0..=CRASHES_MAX).take_while(|_| !run(&path, apply)).count());
    assert_eq!(crashes.await.expect("no panic"), CRASHES_MAX);
    let query = ListQuery {
        subscription: subscription().name,
        state: Some(State::Dead),
        which: Criteria::default(),
        code: None,
        headers: Headers::new(),
        after: None,
        limit: 10,
        payloads: true,
    };
    let dead = fixture.store.list(&query).await.expect("listed");
    let said: Vec<_> = dead.iter().map(|it| (&it.event.payload[..], it.code.as_deref())).collect();
    assert_eq!(said, [(POISON.as_bytes(), Some("relay_crashed"))]);
    let stats = fixture.store.stats(&subscription().name).await.expect("counted");
    assert_eq!((stats.dispatched, stats.pending), (EVENTS as u64 - 1, 0));

    let connection = fixture.connect();
    let mut statement = connection.prepare("SELECT payload FROM effects ORDER BY rowid").expect("prepared");
    let arrived = statement.query_map([], |row| row.get::<_, String>(0)).expect("read");
    let mut arrived: Vec<usize> = arrived.map(|it| it.expect("text").parse().expect("a number")).collect();
    assert!(!apply || arrived.len() == EVENTS - 1, "each effect once: {arrived:?}");
    let mut seen = std::collections::HashSet::new();
    arrived.retain(|n| seen.insert(*n));
    arrived.sort_by_key(|n| n % KEYS);
    let in_order: Vec<usize> =
        (0..KEYS).flat_map(|key| (key..EVENTS).step_by(KEYS)).filter(|n| n.to_string() != POISON).collect();
    assert_eq!(arrived, in_order);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_whose_sink_aborts_dies_and_all_others_arrive() {
    only_the_poison_dies(fixture().await, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_whose_handler_aborts_in_its_transaction_dies_too() {
    only_the_poison_dies(fixture().await, true).await;
}
