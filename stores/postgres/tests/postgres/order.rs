//! Order in the hardest case: an early transaction id, a late write, and a window with more rows
//! than are counted exactly. And what no longer waits once there is no order.

use postbox_core::{BatchLimit, Log as _, LogName, Ordering, Settlement, Subscription, SubscriptionName};
use postbox_testkit::servers::Version;

use crate::support;

/// More rows than a window counts together with its first page. Their ids lie between the early one
/// and the one that it follows.
const BACKLOG: i64 = 120_000;

#[tokio::test]
async fn an_early_id_keeps_its_keys_order_in_a_window_of_any_size() {
    let fixture = support::on(Version::V15).await;
    let store = &fixture.store;
    let lease = support::leased(store, "s").await;
    let (first, early) = (fixture.client().await, fixture.client().await);
    let fill =
        format!("INSERT INTO postbox.outbox (topic, payload) SELECT 'fill', '{{}}' FROM generate_series(1, {BACKLOG})");

    // The first window of a lane is empty and needs no bounds, so the window under test must not be
    // the first.
    first.execute("SELECT postbox.enqueue('warm', '{}')", &[]).await.expect("appended");
    let warm = store.next_batch(&lease, BatchLimit::default()).await.expect("read");
    store.settle(&lease, Settlement { position: warm.end, ..Settlement::default() }).await.expect("settled");

    early.batch_execute("BEGIN; SELECT pg_current_xact_id()").await.expect("an early id");
    first.batch_execute(&fill).await.expect("filled");
    first
        .execute("SELECT postbox.enqueue('order', '1', key => 'k')", &[])
        .await
        .expect("the earlier commit, a later id");
    early.batch_execute("SELECT postbox.enqueue('order', '2', key => 'k'); COMMIT").await.expect("the later commit");

    let (mut order, mut read) = (Vec::new(), 0);
    loop {
        let limit = BatchLimit { events: 10_000, ..BatchLimit::default() };
        let batch = store.next_batch(&lease, limit).await.expect("read");
        if batch.is_empty() {
            break;
        }
        read += i64::try_from(batch.deliveries.len()).expect("small");
        let ordered = batch.deliveries.iter().filter(|it| it.event.topic.as_str() == "order");
        order.extend(ordered.map(|it| it.event.payload.clone()));
        store.settle(&lease, Settlement { position: batch.end, ..Settlement::default() }).await.expect("settled");
    }
    assert_eq!(read, BACKLOG + 2);
    assert_eq!(order, ["1", "2"], "commit order of the key");
}

/// However many rows wait for a turn, no transaction takes long, and an interrupted start goes on.
#[tokio::test]
async fn once_there_is_no_order_rows_are_unblocked_in_steps() {
    let fixture = support::on(Version::V15).await;
    let (store, client) = (&fixture.store, fixture.client().await);
    support::leased(store, "s").await;
    let blocked = "INSERT INTO postbox.delivery (subscription, lane, seq, key, state, ordered)
        SELECT s.id, 0, n, 'k' || n % 7, 'blocked', true FROM postbox.subscription AS s, generate_series(1, 12000) AS n";
    client.batch_execute(blocked).await.expect("blocked");
    let name = SubscriptionName::new("s").expect("a name");
    let subscription = Subscription { ordering: Ordering::None, ..Subscription::new(name, LogName::outbox()) };
    store.subscribe(&subscription).await.expect("subscribed");
    let left =
        "SELECT count(*) FILTER (WHERE holds OR due_at IS NULL), count(DISTINCT xmin::text) FROM postbox.delivery";
    let row = client.query_one(left, &[]).await.expect("counted");
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (0, 3), "rows that wait, and transactions");
}
