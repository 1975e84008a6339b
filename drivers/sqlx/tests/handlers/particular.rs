//! What is particular to connections of `sqlx`.

use std::time::Duration;

use postbox_core::{
    Append as _, Criteria, Delivery, Event, Inspect as _, ListQuery, Log as _, LogName, NewEvent, RetryPolicy, State,
    Subscription, SubscriptionName,
};
use postbox_engine::router::Router;
use postbox_engine::{Relay, RelaySettings};
use sqlx::{Connection as _, Executor as _};

use super::*;

/// Far longer than any test takes.
const NOT_NOW: Duration = Duration::from_secs(3600);

/// What these do goes through the router once, each event under its payload as key; then the codes
/// of those that are to be retried.
async fn drained(fixture: &Fixture, payloads: &[&'static str]) -> Vec<(String, String)> {
    let name = SubscriptionName::new("s").expect("a name");
    let subscription = Subscription { lanes: 1, ..Subscription::new(name.clone(), LogName::outbox()) };
    fixture.store.store.subscribe(&subscription).await.expect("subscribed");
    let settings = RelaySettings {
        retry: RetryPolicy { delays: vec![NOT_NOW], ..RetryPolicy::default() },
        deliver_timeout: Duration::from_millis(500),
        ..RelaySettings::default()
    };
    let relay = Relay::builder(fixture.store(), subscription).settings(settings);
    let relay = relay.router(Router::in_transaction(&fixture.sqlx).fallback(odd)).expect("it has a handler");
    let events: Vec<_> =
        payloads.iter().map(|payload| NewEvent::new("t", *payload, "text/plain").key(*payload)).collect();
    fixture.store.store.append(&LogName::outbox(), &events).await.expect("appended");
    let relay = relay.build().expect("built");
    // A transaction that takes too long gives its lane back, which ends a drain.
    for _ in 0..5 {
        relay.drain(None).await.expect("drained");
    }
    let query = ListQuery {
        subscription: name,
        state: State::Retrying,
        which: Criteria::default(),
        code: None,
        after: None,
        limit: 100,
        correlation: None,
    };
    let text = |event: &Event| String::from_utf8_lossy(&event.payload).into_owned();
    let records = fixture.store.store.list(&query).await.expect("listed");
    records.into_iter().map(|it| (text(&it.event), it.code.unwrap_or_default())).collect()
}

async fn odd(delivery: Delivery, Tx(tx): Tx<'_, Sqlx>) -> Result<(), sqlx::Error> {
    let payload = String::from_utf8_lossy(&delivery.event.payload).into_owned();
    match payload.as_str() {
        "nested and left" => {
            let mut nested = tx.begin().await?;
            write(&mut nested, &payload).await;
            drop(nested);
            write(tx, "left").await;
        }
        "nested and kept" => {
            let mut nested = tx.begin().await?;
            write(&mut nested, &payload).await;
            nested.commit().await?;
        }
        "fails and hides it" => {
            write(tx, &payload).await;
            drop(tx.execute("SELECT 1 / 0").await);
        }
        "fails" => {
            write(tx, &payload).await;
            tx.execute("SELECT 1 / 0").await?;
        }
        "hangs" => {
            write(tx, &payload).await;
            std::future::pending::<()>().await;
        }
        _ => write(tx, &payload).await,
    }
    Ok(())
}

fn codes(codes: &[(&str, &str)]) -> Vec<(String, String)> {
    codes.iter().map(|(payload, code)| ((*payload).to_owned(), (*code).to_owned())).collect()
}

#[tokio::test]
async fn transactions_that_a_handler_begins_are_savepoints() {
    let fixture = direct().await;
    assert_eq!(drained(&fixture, &["nested and left", "nested and kept", "1"]).await, []);
    assert_eq!(fixture.effects().await, ["left", "nested and kept", "1"]);
}

#[tokio::test]
async fn a_failed_statement_takes_its_own_handler_back_even_if_that_hides_it() {
    let fixture = direct().await;
    let failed = drained(&fixture, &["1", "fails", "fails and hides it", "2"]).await;
    assert_eq!(failed, codes(&[("fails", "handler_error"), ("fails and hides it", "handler_sql")]));
    assert_eq!(fixture.effects().await, ["1", "2"]);
}

#[tokio::test]
async fn a_deferred_constraint_fails_its_own_handler_only() {
    let fixture = direct().await;
    let unique = "ALTER TABLE effect ADD UNIQUE (payload) DEFERRABLE INITIALLY DEFERRED;
                  INSERT INTO effect (payload) VALUES ('taken')";
    fixture.store.client().await.batch_execute(unique).await.expect("a deferred constraint");
    assert_eq!(drained(&fixture, &["1", "taken", "2"]).await, codes(&[("taken", "handler_sql")]));
    assert_eq!(fixture.effects().await, ["taken", "1", "2"]);
}

/// Its connection is closed: nobody else gets it with the transaction open.
#[tokio::test]
async fn a_handler_that_takes_too_long_is_rolled_back_and_the_others_go_on() {
    let fixture = direct().await;
    assert_eq!(drained(&fixture, &["1", "hangs", "2"]).await, codes(&[("hangs", "timeout")]));
    let mut effects = fixture.effects().await;
    effects.sort();
    assert_eq!(effects, ["1", "2"]);
    let mut tx = fixture.pool.begin().await.expect("begun");
    let ours: String = sqlx::query_scalar("SELECT current_setting('postbox.search_path', true)")
        .fetch_one(&mut *tx)
        .await
        .map(|path: Option<String>| path.unwrap_or_default())
        .expect("asked");
    assert_eq!(ours, "", "a transaction of its own");
    assert_eq!(fixture.pool.size(), 1, "those that hung are gone");
}

#[tokio::test]
async fn a_pool_without_a_free_connection_says_so() {
    let store = support::on(Version::V15).await;
    let options = PgPoolOptions::new().max_connections(1).acquire_timeout(Duration::from_millis(50));
    let pool = options.connect(&store.url).await.expect("a pool");
    let sqlx = Sqlx::new(&store.store, pool.clone());
    let taken = pool.acquire().await.expect("a connection");
    let fixture = Fixture { store, sqlx, pool };
    let name = SubscriptionName::new("s").expect("a name");
    let subscription = Subscription { lanes: 1, ..Subscription::new(name.clone(), LogName::outbox()) };
    fixture.store.store.subscribe(&subscription).await.expect("subscribed");
    let owner = "me".parse().expect("a name");
    let acquired = fixture.store.store.acquire(&name, &owner, &[], NOT_NOW).await.expect("acquired");
    let lease = acquired.lease.expect("a free lane");
    let decide = |_: &Delivery, _: &Outcome| postbox_core::Disposition::Delivered;
    let applied = fixture.apply().apply(&lease, &[], Default::default(), &decide).await;
    assert_eq!(applied.expect_err("no connection").code(), "pool_exhausted");
    drop(taken);
    fixture.apply().apply(&lease, &[], Default::default(), &decide).await.expect("applied");
}
