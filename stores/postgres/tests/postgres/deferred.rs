//! A handler that breaks a deferred constraint fails alone; the effects of the other handlers stay.

use std::time::Duration;

use postbox_core::{
    Append as _, BatchLimit, Delivery, Disposition, Log as _, LogName, NewEvent, Outcome, OwnerId, Settlement,
    Subscription, SubscriptionName,
};
use postbox_testkit::conformance::ApplyFixture as _;
use postbox_testkit::servers::Version;

use crate::support;

#[tokio::test]
async fn a_deferred_constraint_fails_its_own_handler_only() {
    let fixture = support::on(Version::V15).await;
    let store = &fixture.store;
    let unique = "ALTER TABLE effect ADD UNIQUE (payload) DEFERRABLE INITIALLY DEFERRED";
    fixture.client().await.batch_execute(unique).await.expect("a deferred constraint");
    let name = SubscriptionName::new("s").expect("a name");
    store
        .subscribe(&Subscription { lanes: 1, ..Subscription::new(name.clone(), LogName::outbox()) })
        .await
        .expect("subscribed");
    let owner = OwnerId::new("me").expect("a name");
    let acquired = store.acquire(&name, &owner, &[], Duration::from_secs(600)).await.expect("acquired");
    let lease = acquired.lease.expect("a free lane");
    let events = ["a", "a", "b"].map(|payload| NewEvent::new("t", payload, "text/plain"));
    store.append(&LogName::outbox(), &events).await.expect("appended");
    let batch = store.next_batch(&lease, BatchLimit::default()).await.expect("read");
    let deliveries: Vec<&Delivery> = batch.deliveries.iter().collect();
    let decide = |_: &Delivery, outcome: &Outcome| match outcome {
        Outcome::Delivered { .. } => Disposition::Delivered,
        _ => Disposition::Dead { code: "handler".into(), error: String::new(), halt: false, took: None },
    };
    let settlement = Settlement { position: batch.end, hold_keys: true, ..Settlement::default() };
    let outcomes = fixture.apply().apply(&lease, &deliveries, settlement, &decide).await.expect("committed");
    let delivered: Vec<bool> = outcomes.iter().map(|it| it.as_ref().is_some_and(Outcome::is_delivered)).collect();
    assert_eq!(delivered, [true, false, true], "{outcomes:?}");
    assert_eq!(fixture.effects().await, ["a", "b"]);
}
