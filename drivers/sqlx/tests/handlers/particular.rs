//! Cases that only concern connections lent by another driver.

use std::time::Duration;

use postbox_core::{
    Append as _, Criteria, Delivery, Disposition, Event, Headers, Inspect as _, Lease, ListQuery, Log as _, LogName,
    NewEvent, Outcome, Record, RetryPolicy, Seq, Settlement, State, Subscription, SubscriptionName, Tx,
};
use postbox_engine::{Relay, RelaySettings};
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_router::Router;
use postbox_testkit::conformance::{ApplyFixture as _, StoreFixture as _};
use postbox_testkit::servers::Version;

use crate::suites::{Fixture, direct};
use crate::support;
use crate::{Driver, Failure, execute, nested, pool, size, taken_up, write};

/// Far longer than any test takes.
const NOT_NOW: Duration = Duration::from_secs(3600);

/// Sends each payload through the router once, as an event with the payload as its key. Returns the
/// codes of those that will be retried.
pub(crate) async fn drained(fixture: &Fixture, payloads: &[&'static str]) -> Vec<(String, String)> {
    let name = SubscriptionName::new("s").expect("a name");
    let subscription = Subscription { lanes: Some(1), ..Subscription::new(name.clone(), LogName::outbox()) };
    fixture.store.store.subscribe(&subscription).await.expect("subscribed");
    let settings = RelaySettings {
        retry: RetryPolicy { delays: vec![NOT_NOW], ..RetryPolicy::default() },
        deliver_timeout: Duration::from_millis(500),
        ..RelaySettings::default()
    };
    let relay = Relay::builder(fixture.store(), subscription).settings(settings);
    let relay = relay.router(Router::in_transaction(&fixture.driver).fallback(odd)).expect("it has a handler");
    let events: Vec<_> =
        payloads.iter().map(|payload| NewEvent::new("t", *payload, "text/plain").key(*payload)).collect();
    fixture.store.store.append(&LogName::outbox(), &events).await.expect("appended");
    let relay = relay.build().expect("built");
    // A transaction that takes too long gives its lane back, which ends a drain.
    for _ in 0..5 {
        relay.drain(None).await.expect("drained");
    }
    let text = |event: &Event| String::from_utf8_lossy(&event.payload).into_owned();
    retrying(fixture, name).await.into_iter().map(|it| (text(&it.event), it.code.unwrap_or_default())).collect()
}

async fn retrying(fixture: &Fixture, subscription: SubscriptionName) -> Vec<Record> {
    let query = ListQuery {
        subscription,
        state: Some(State::Retrying),
        which: Criteria::default(),
        code: None,
        after: None,
        limit: 100,
        headers: Headers::new(),
        payloads: true,
    };
    fixture.store.store.list(&query).await.expect("listed")
}

/// As a timeout of the server does, e.g. `idle_in_transaction_session_timeout`.
const ENDS_ITSELF: &str = "SELECT pg_terminate_backend(pg_backend_pid())";

/// Fails after the handler has given up on it.
const TIMES_OUT: &str = "SET LOCAL statement_timeout = 100; SELECT pg_sleep(10)";

/// A role without any rights here, and a path without its tables.
const SETS: &str = "SELECT set_config('role', 'pg_checkpoint', true), set_config('search_path', 'pg_catalog', true)";

async fn odd(delivery: Delivery, Tx(tx): Tx<'_, Driver>) -> Result<(), Failure> {
    let payload = String::from_utf8_lossy(&delivery.event.payload).into_owned();
    if payload.starts_with("nested") {
        nested(tx, &payload).await?;
        write(tx, "behind it").await;
        return Ok(());
    }
    write(tx, &payload).await;
    match payload.as_str() {
        "sets" | "sets as the last" => execute(tx, SETS).await?,
        "fails and hides it" => drop(execute(tx, "SELECT 1 / 0").await),
        "fails" => execute(tx, "SELECT 1 / 0").await?,
        "loses its connection" => execute(tx, ENDS_ITSELF).await?,
        "loses it and hides it" => drop(execute(tx, ENDS_ITSELF).await),
        "hangs" => std::future::pending::<()>().await,
        "gives up" => {
            drop(tokio::time::timeout(Duration::from_millis(20), execute(tx, TIMES_OUT)).await);
            panic!("as asked");
        }
        _ => {}
    }
    Ok(())
}

pub(crate) fn codes(codes: &[(&str, &str)]) -> Vec<(String, String)> {
    codes.iter().map(|(payload, code)| ((*payload).to_owned(), (*code).to_owned())).collect()
}

#[tokio::test]
async fn transactions_that_a_handler_begins_are_savepoints() {
    let fixture = direct().await;
    let panicked = drained(&fixture, &["nested and left", "nested and panics", "nested and kept", "1"]).await;
    assert_eq!(panicked, codes(&[("nested and panics", "panic")]));
    assert_eq!(fixture.effects().await, ["behind it", "nested and kept", "behind it", "1"]);
}

/// A setting outlives the handler's savepoint, so it would apply to others and to the settlement.
#[tokio::test]
async fn the_role_and_path_that_a_handler_sets_end_with_it() {
    let fixture = direct().await;
    assert_eq!(drained(&fixture, &["sets", "1", "sets as the last"]).await, []);
    assert_eq!(fixture.effects().await, ["sets", "1", "sets as the last"]);
}

#[tokio::test]
async fn a_failed_statement_takes_its_own_handler_back_even_if_that_hides_it() {
    let fixture = direct().await;
    let failed = drained(&fixture, &["1", "fails", "fails and hides it", "2"]).await;
    assert_eq!(failed, codes(&[("fails", "handler_error"), ("fails and hides it", "handler_sql")]));
    assert_eq!(fixture.effects().await, ["1", "2"]);
}

/// Handled again without end, it would hold up its whole lane.
#[tokio::test]
async fn a_handler_that_loses_its_connection_is_retried_alone() {
    let fixture = direct().await;
    let lost = drained(&fixture, &["1", "loses its connection", "loses it and hides it", "2"]).await;
    let code = "handler_lost_transaction";
    assert_eq!(lost, codes(&[("loses its connection", code), ("loses it and hides it", code)]));
    let mut effects = fixture.effects().await;
    effects.sort();
    assert_eq!(effects, ["1", "2"]);
}

/// `sqlx` returns the error of that statement in place of the next answer, as if the store had
/// failed.
#[tokio::test]
async fn a_handler_that_gives_up_on_a_statement_that_then_fails_is_retried_alone() {
    let fixture = direct().await;
    assert_eq!(drained(&fixture, &["1", "gives up", "2"]).await, codes(&[("gives up", "panic")]));
    assert_eq!(fixture.effects().await, ["1", "2"]);
}

#[tokio::test]
async fn a_deferred_constraint_fails_its_own_handler_only() {
    let fixture = direct().await;
    // Its name ends like that of a constraint of ours.
    let unique = "ALTER TABLE effect ADD CONSTRAINT account_user_id_key UNIQUE (payload) DEFERRABLE INITIALLY DEFERRED;
                  INSERT INTO effect (payload) VALUES ('taken')";
    fixture.store.client().await.batch_execute(unique).await.expect("a deferred constraint");
    assert_eq!(drained(&fixture, &["1", "taken", "2"]).await, codes(&[("taken", "handler_sql")]));
    assert_eq!(fixture.effects().await, ["taken", "1", "2"]);
    let records = retrying(&fixture, SubscriptionName::new("s").expect("a name")).await;
    let error = records[0].error.as_deref().unwrap_or_default();
    let said = r#"duplicate key value violates unique constraint "account_user_id_key""#;
    assert!(error.ends_with(said), "{error}");
}

#[tokio::test]
async fn a_handler_that_takes_too_long_is_rolled_back_and_the_others_go_on() {
    let fixture = direct().await;
    assert_eq!(drained(&fixture, &["1", "hangs", "2"]).await, codes(&[("hangs", "timeout")]));
    let mut effects = fixture.effects().await;
    effects.sort();
    assert_eq!(effects, ["1", "2"]);
    assert_eq!(size(&fixture.pool), 1, "those that hung are gone");
}

/// Its connection is closed, although nobody asks the pool for one again.
#[tokio::test]
async fn a_transaction_that_takes_too_long_keeps_no_lock() {
    let fixture = direct().await;
    assert_eq!(drained(&fixture, &["hangs"]).await, codes(&[("hangs", "timeout")]));
    let open = "SELECT count(*) FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL";
    let client = fixture.store.client().await;
    let ended = async { while client.query_one(open, &[]).await.expect("asked").get::<_, i64>(0) > 0 {} };
    tokio::time::timeout(Duration::from_secs(10), ended).await.expect("it stays open");
}

/// Returns a store, and the lease of its only lane.
async fn leased() -> (support::Fixture, Lease) {
    let store = support::on(Version::V15).await;
    let lease = support::leased(&store.store, "s").await;
    (store, lease)
}

const DELIVERED: fn(&Delivery, &Outcome) -> Disposition = |_, _| Disposition::Delivered;

/// Its lane is not there, which would look like a lost lease.
#[tokio::test]
async fn handlers_of_another_store_are_named() {
    let ((_store, lease), other) = (leased().await, direct().await);
    let applied = other.apply().apply(&lease, &[], Default::default(), &DELIVERED).await;
    assert_eq!(applied.expect_err("it is elsewhere").code(), "handlers_of_another_store");
}

/// Its lane is there, but another handle read it.
#[tokio::test]
async fn handlers_of_a_second_handle_are_named() {
    let (mut store, lease) = leased().await;
    store.store = PostgresStore::connect(PostgresConfig::new(&store.front)).await.expect("a store");
    let pool = pool(&store.front);
    let settlement = Settlement { position: Some(Seq(1)), ..Settlement::default() };
    let applied = Fixture::of(store, pool).apply().apply(&lease, &[], settlement, &DELIVERED).await;
    assert_eq!(applied.expect_err("it read nothing").code(), "handlers_of_another_store");
}

/// The same.
#[tokio::test]
async fn a_pool_of_another_database_is_named() {
    let ((store, lease), other) = (leased().await, support::on(Version::V15).await);
    let (pool, taken) = taken_up(&other.front).await;
    drop(taken);
    let applied = Fixture::of(store, pool).apply().apply(&lease, &[], Default::default(), &DELIVERED).await;
    assert_eq!(applied.expect_err("it is elsewhere").code(), "pool_of_another_database");
}

#[tokio::test]
async fn a_pool_without_a_free_connection_says_so() {
    let (store, lease) = leased().await;
    let (pool, taken) = taken_up(&store.front).await;
    let fixture = Fixture::of(store, pool);
    let begun = tokio::time::Instant::now();
    let applied = fixture.apply().apply(&lease, &[], Default::default(), &DELIVERED).await;
    assert_eq!(applied.expect_err("no connection").code(), "pool_exhausted");
    let limit = RelaySettings::default().deliver_timeout;
    assert!(begun.elapsed() < limit, "the event would have to answer for it");
    drop(taken);
    fixture.apply().apply(&lease, &[], Default::default(), &DELIVERED).await.expect("applied");
}

/// The pool may go on trying, and time out like one that is too small.
#[tokio::test]
async fn a_pool_that_cannot_reach_its_database_says_so() {
    let (store, lease) = leased().await;
    let fixture = Fixture::of(store, pool("postgres://postgres@127.0.0.1:1/postgres"));
    tokio::time::pause();
    let applied = fixture.apply().apply(&lease, &[], Default::default(), &DELIVERED).await;
    tokio::time::resume();
    assert_eq!(applied.expect_err("nobody listens").code(), "store_unreachable");
}
