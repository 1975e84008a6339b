//! What a handler leaves behind in the transaction that it shares with others.

use std::sync::Arc;

use async_trait::async_trait;
use postbox_core::{
    Append as _, Apply, BatchLimit, Delivery, Disposition, Log as _, LogName, NewEvent, Outcome, Settlement,
};
use postbox_postgres::TxHandler;
use postbox_testkit::conformance::ApplyFixture as _;
use postbox_testkit::servers::Version;

use crate::support::{self, Fixture};

/// Applies an event for each payload, in one transaction. Returns whether each was delivered.
async fn applied(fixture: &Fixture, apply: Arc<dyn Apply>, payloads: [&'static str; 3]) -> Vec<bool> {
    let store = &fixture.store;
    let lease = support::leased(store, "s").await;
    let events = payloads.map(|payload| NewEvent::new("t", payload, "text/plain"));
    store.append(&LogName::outbox(), &events).await.expect("appended");
    let batch = store.next_batch(&lease, BatchLimit::default()).await.expect("read");
    let deliveries: Vec<&Delivery> = batch.deliveries.iter().collect();
    let decide = |_: &Delivery, outcome: &Outcome| match outcome {
        Outcome::Delivered { .. } => Disposition::Delivered,
        _ => Disposition::Dead { code: "handler".into(), error: String::new(), halt: false, took: None },
    };
    let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
    let outcomes = apply.apply(&lease, &deliveries, settlement, &decide).await.expect("committed");
    outcomes.iter().map(|it| it.as_ref().is_some_and(Outcome::is_delivered)).collect()
}

#[tokio::test]
async fn a_deferred_constraint_fails_its_own_handler_only() {
    let fixture = support::on(Version::V15).await;
    let unique = "ALTER TABLE effect ADD UNIQUE (payload) DEFERRABLE INITIALLY DEFERRED";
    fixture.client().await.batch_execute(unique).await.expect("a deferred constraint");
    assert_eq!(applied(&fixture, fixture.apply(), ["a", "a", "b"]).await, [true, false, true]);
    assert_eq!(fixture.effects().await, ["a", "b"]);
}

/// Sets a role without any rights here, and a path without its table.
struct Sets;

#[async_trait]
impl TxHandler for Sets {
    async fn handle(&self, tx: &tokio_postgres::Transaction<'_>, delivery: &Delivery) -> Outcome {
        let payload = String::from_utf8_lossy(&delivery.event.payload);
        let written = tx.execute("INSERT INTO effect (payload) VALUES ($1)", &[&payload]).await;
        let set = tx.batch_execute("SET LOCAL ROLE pg_monitor; SET LOCAL search_path = pg_catalog").await;
        if written.is_ok() && set.is_ok() {
            Outcome::DELIVERED
        } else {
            Outcome::retry("refused", "a statement failed")
        }
    }
}

/// A setting outlives the handler's savepoint, so it would apply to others and to the settlement.
#[tokio::test]
async fn the_role_and_path_that_a_handler_sets_end_with_it() {
    let fixture = support::on(Version::V15).await;
    let apply = fixture.store.apply(Sets);
    assert_eq!(applied(&fixture, apply, ["a", "b", "c"]).await, [true; 3]);
    assert_eq!(fixture.effects().await, ["a", "b", "c"]);
}
