//! A handler's effect, the position and the delivery rows commit together.

use std::sync::Arc;
use std::time::Duration;

use postbox_core::{
    Append, Decide, Delivery, Disposition, Inspect, Lease, Log, LogName, NewEvent, Outcome, Postbox, Result,
    Settlement, SourceName, State, Store as _, Subscription, SubscriptionName,
};
use postbox_engine::{Relay, RelaySettings};
use postbox_sqlite::{Sqlite, SqliteStore, TxHandler, once_in};
use rusqlite::Transaction;

use crate::common::{self, Fixture, fixture};

fn decide(_: &Delivery, outcome: &Outcome) -> Disposition {
    match outcome {
        Outcome::Delivered { .. } => Disposition::Delivered,
        Outcome::Retry { code, error, .. } => Disposition::Retry {
            after: Duration::ZERO,
            counted: true,
            code: code.clone(),
            error: error.clone(),
            took: None,
        },
        other => panic!("not used here: {other:?}"),
    }
}

/// Writes the payload into `ledger`, then fails if the payload says so.
fn ledger(tx: &Transaction<'_>, delivery: &Delivery) -> Outcome {
    let payload = String::from_utf8_lossy(&delivery.event.payload).into_owned();
    tx.execute("INSERT INTO ledger (entry) VALUES (?1)", [&payload]).expect("written");
    match payload.as_str() {
        "follow" => {
            Postbox::new(Sqlite).append(&mut &*tx, NewEvent::json("followed", "done")).expect("appended");
            Outcome::DELIVERED
        }
        "orphan" => {
            tx.execute("INSERT INTO booking (account) VALUES (42)", []).expect("accepted for now");
            Outcome::DELIVERED
        }
        "lost" => {
            tx.execute_batch("ROLLBACK").expect("rolled back");
            Outcome::retry("disk_full", "no space left")
        }
        "commit" => {
            tx.execute_batch("COMMIT").expect("committed");
            Outcome::DELIVERED
        }
        _ => Outcome::DELIVERED,
    }
}

async fn prepared(events: &[(&str, &str)]) -> (Fixture, Lease) {
    let fixture = fixture().await;
    fixture.connect().execute_batch("CREATE TABLE ledger (entry TEXT NOT NULL)").expect("made");
    let events: Vec<NewEvent> =
        events.iter().map(|(key, payload)| NewEvent::json("t", payload.to_string()).key(*key)).collect();
    fixture.store.append(&LogName::outbox(), &events).await.expect("appended");
    let lease = fixture.lane().await;
    (fixture, lease)
}

impl Fixture {
    async fn apply(&self, lease: &Lease) -> Result<Vec<Option<Outcome>>> {
        let batch = self.next(lease).await;
        let deliveries: Vec<&Delivery> = batch.deliveries.iter().collect();
        let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
        let decide: &Decide<'_> = &decide;
        self.store.apply(ledger).apply(lease, &deliveries, settlement, decide).await
    }

    /// Runs relays until this many events are dispatched.
    async fn drain(&self, handler: impl TxHandler, settings: RelaySettings, dispatched: u64) {
        let name: SubscriptionName = "drained".parse().expect("a name");
        let subscription = Subscription { lanes: Some(1), ..Subscription::new(name.clone(), LogName::outbox()) };
        let relay = Relay::builder(Arc::new(self.store.clone()), subscription).settings(settings);
        let relay = relay.apply(self.store.apply(handler)).build().expect("built");
        let all = async {
            while self.store.stats(&name).await.map_or(0, |stats| stats.dispatched) < dispatched {
                // It ends with an error when the lane is lost.
                drop(relay.drain(None).await);
            }
        };
        tokio::time::timeout(common::PATIENCE, all).await.expect("they end");
    }

    fn entries(&self) -> Vec<String> {
        let connection = self.connect();
        let mut statement = connection.prepare("SELECT entry FROM ledger ORDER BY rowid").expect("prepared");
        statement.query_map([], |row| row.get(0)).expect("read").collect::<std::result::Result<_, _>>().expect("text")
    }
}

#[tokio::test]
async fn what_a_handler_appends_comes_next() {
    let (fixture, lease) = prepared(&[("a", "1"), ("a", "follow")]).await;
    let outcomes = fixture.apply(&lease).await.expect("applied");
    assert_eq!(outcomes, vec![Some(Outcome::DELIVERED); 2]);
    let next = fixture.next(&lease).await;
    assert_eq!(next.deliveries.len(), 1);
    assert_eq!(next.deliveries[0].event.topic.as_str(), "followed");
}

/// Only the handle that reads knows how far: every other one would be refused for ever.
#[tokio::test]
async fn handlers_of_a_second_handle_are_named() {
    let (fixture, lease) = prepared(&[("a", "1")]).await;
    let batch = fixture.next(&lease).await;
    let deliveries: Vec<&Delivery> = batch.deliveries.iter().collect();
    let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
    let other = SqliteStore::open(common::config(fixture.path())).await.expect("opened");
    let applied = other.apply(ledger).apply(&lease, &deliveries, settlement, &decide).await;
    assert_eq!(applied.expect_err("it read nothing").code(), "handlers_of_another_store");
    assert!(fixture.entries().is_empty());
}

#[tokio::test]
async fn a_handler_that_ends_the_transaction_is_refused() {
    let (fixture, lease) = prepared(&[("a", "commit")]).await;
    let error = fixture.apply(&lease).await.expect_err("refused");
    assert_eq!(error.code(), "handler_ended_transaction");
    let stats = fixture.store.stats(&lease.subscription).await.expect("counted");
    assert_eq!(stats.pending, 1, "nothing was settled");
}

/// As SQLite does by itself if the disk is full.
#[tokio::test]
async fn a_transaction_that_a_failed_handler_lost_is_no_end_of_its_event() {
    let (fixture, lease) = prepared(&[("a", "1"), ("b", "lost")]).await;
    let error = fixture.apply(&lease).await.expect_err("lost");
    assert!(error.is_transaction_lost(), "{error}");
    assert!(fixture.entries().is_empty(), "nothing is kept");
}

/// The renewal of the lease waits for the thread that runs them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handlers_that_together_outlast_the_lease_are_called_fewer_at_a_time() {
    let fixture = fixture().await;
    fixture.connect().execute_batch("CREATE TABLE ledger (entry TEXT NOT NULL)").expect("made");
    let events = (0..12).map(|n| NewEvent::json("t", n.to_string()).key(n.to_string())).collect::<Vec<_>>();
    fixture.store.append(&LogName::outbox(), &events).await.expect("appended");
    let slow = |tx: &Transaction<'_>, delivery: &Delivery| {
        std::thread::sleep(Duration::from_millis(200));
        ledger(tx, delivery)
    };
    let settings = RelaySettings { lease_ttl: Duration::from_secs(1), ..RelaySettings::default() };
    fixture.drain(slow, settings, 12).await;
    assert_eq!(fixture.entries().len(), 12, "each once");
}

#[tokio::test]
async fn a_constraint_checked_at_the_commit_fails_its_handler_only() {
    let (fixture, lease) = prepared(&[("a", "1"), ("b", "orphan"), ("c", "3")]).await;
    fixture
        .connect()
        .execute_batch(
            "CREATE TABLE account (id INTEGER PRIMARY KEY); \
             CREATE TABLE booking (account INTEGER REFERENCES account (id) DEFERRABLE INITIALLY DEFERRED);
             CREATE TABLE plan (n); CREATE TABLE mismatched (n REFERENCES plan (n))",
        )
        .expect("made");
    assert_eq!(fixture.apply(&lease).await.expect_err("refused at the commit").code(), "foreign_key");
    assert!(fixture.entries().is_empty(), "nothing is kept");
    fixture.drain(ledger, RelaySettings::default(), 2).await;
    assert_eq!(fixture.entries(), ["1", "3"]);
    let left = "SELECT group_concat(state || ' ' || code) FROM postbox_delivery";
    let left: String = fixture.connect().query_row(left, [], |row| row.get(0)).expect("read");
    assert_eq!(left, "retrying foreign_key");
}

#[tokio::test]
async fn a_dropped_call_leaves_the_store_usable_and_all_or_nothing() {
    let (fixture, lease) = prepared(&[("a", "1"), ("b", "2")]).await;
    let batch = fixture.next(&lease).await;
    let deliveries: Vec<&Delivery> = batch.deliveries.iter().collect();
    let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
    let applier = fixture.store.apply(ledger);
    // Polled once and dropped: the job is queued, and most of the time finds that its caller is
    // gone.
    let call = applier.apply(&lease, &deliveries, settlement, &decide);
    drop(futures::FutureExt::now_or_never(call));
    // When another job of the same thread is done, the dropped one is over. Another thread does the
    // counting, so count after that.
    fixture.store.renew(&lease, common::LONG).await.expect("still ours");
    let stats = fixture.store.stats(&lease.subscription).await.expect("counted");
    // If the writing thread was quicker than the one poll, that poll answered both of its
    // questions, and everything was committed.
    let pending = stats.pending as usize;
    assert!(pending == 0 || pending == 2, "{pending} of 2 are pending");
    assert_eq!(fixture.entries().len(), 2 - pending, "effects and position are one fact");
}

#[tokio::test]
async fn once_outside_of_a_transaction_is_refused() {
    let fixture = fixture().await;
    let source = SourceName::new("billing").expect("valid");
    assert_eq!(once_in(&fixture.connect(), &source, "m2").expect_err("no transaction").code(), "no_transaction");
}

#[tokio::test]
async fn an_append_that_fails_leaves_your_transaction_as_it_was() {
    let fixture = fixture().await;
    let mut connection = fixture.connect();
    connection.execute_batch("CREATE TABLE mine (id)").expect("made");
    let mut tx = connection.transaction().expect("begun");
    tx.execute("INSERT INTO mine VALUES (1)", []).expect("inserted");
    let postbox = fixture.store.postbox();
    let first = postbox.append(&mut tx, NewEvent::json("t", "1")).expect("appended")[0];
    let taken = [NewEvent::json("t", "2"), NewEvent::json("t", "3").id(first)];
    assert_eq!(postbox.append(&mut tx, taken).expect_err("taken").code(), "event_id_taken");
    let nowhere = Postbox::new(Sqlite).log(LogName::new("nowhere").expect("valid"));
    assert_eq!(nowhere.append(&mut tx, NewEvent::json("t", "2")).expect_err("unknown").code(), "log_unknown");
    tx.commit().expect("still good");
    let lease = fixture.lane().await;
    let batch = fixture.next(&lease).await;
    assert_eq!(batch.deliveries.iter().map(|it| it.event.id).collect::<Vec<_>>(), [first]);
    let record = fixture.store.get(&lease.subscription, first).await.expect("asked").expect("there");
    assert_eq!(record.state, State::Pending);
}

#[tokio::test]
async fn an_append_that_ended_your_transaction_says_so() {
    let fixture = fixture().await;
    let mut connection = fixture.connect();
    let full = "CREATE TRIGGER no_room BEFORE INSERT ON postbox_outbox WHEN NEW.topic = 'full' \
                BEGIN SELECT RAISE(ROLLBACK, 'no room'); END";
    connection.execute_batch(full).expect("made");
    let (good, bad) = (NewEvent::json("t", "1"), NewEvent::json("full", "1"));
    for events in [vec![bad.clone()], vec![good.clone(), bad]] {
        let mut tx = connection.transaction().expect("begun");
        let error = Postbox::new(Sqlite).append(&mut tx, events).expect_err("refused");
        assert_eq!(error.code(), "store_error");
        let said = ["no room", "rolled back your whole transaction"].map(|part| error.message().contains(part));
        assert_eq!(said, [true; 2], "{error}");
        let error = Postbox::new(Sqlite).append(&mut tx, &good).expect_err("no transaction");
        assert_eq!(error.code(), "no_transaction");
    }
}

#[tokio::test]
async fn an_append_takes_savepoints_and_what_a_connection_has_open() {
    let fixture = fixture().await;
    let mut connection = fixture.connect();
    let postbox = Postbox::new(Sqlite);
    let event = || NewEvent::json("t", "1");
    let error = postbox.append(&mut connection, event()).expect_err("no transaction");
    assert_eq!(error.code(), "no_transaction");
    let mut tx = connection.transaction().expect("begun");
    let mut savepoint = tx.savepoint().expect("set");
    postbox.append(&mut savepoint, event()).expect("appended");
    savepoint.rollback().expect("rolled back");
    drop(savepoint);
    let mut savepoint = tx.savepoint().expect("set");
    let kept = postbox.append(&mut savepoint, event()).expect("appended");
    savepoint.commit().expect("released");
    tx.commit().expect("committed");
    connection.execute_batch("BEGIN").expect("begun");
    let open = postbox.append(&mut connection, [event(), event()]).expect("appended");
    connection.execute_batch("COMMIT").expect("committed");
    let lease = fixture.lane().await;
    let read: Vec<_> = fixture.next(&lease).await.deliveries.iter().map(|it| it.event.id).collect();
    assert_eq!(read, [kept.ids(), open.ids()].concat());
}
