//! Retention of events with strange times, and of those that a lane is about to read.

use std::time::Duration;

use postbox_core::kit::PRUNE_ROWS_MAX;
use postbox_core::{BatchLimit, Log as _, LogName, Maintain as _, Prune, Settlement};
use postbox_testkit::servers::Version;

use crate::support;

/// A clock was wrong for a while: a whole step of events is from the future.
#[tokio::test]
async fn events_from_the_future_do_not_end_retention() {
    let fixture = support::on(Version::V15).await;
    let store = &fixture.store;
    let lease = support::leased(store, "s").await;
    let client = fixture.client().await;
    let fill = format!(
        "INSERT INTO postbox.outbox (topic, payload, created_at)
         SELECT 't', '{{}}', now() + CASE WHEN n <= {PRUNE_ROWS_MAX} THEN interval '12 hours' ELSE interval '-2 hours' END
         FROM generate_series(1, {PRUNE_ROWS_MAX} + 10) AS n ORDER BY n"
    );
    client.batch_execute(&fill).await.expect("filled");
    loop {
        let batch = store.next_batch(&lease, BatchLimit::default()).await.expect("read");
        if batch.is_empty() {
            break;
        }
        store.settle(&lease, Settlement { position: batch.end, ..Settlement::default() }).await.expect("settled");
    }
    let mut old = Prune { older_than: Duration::from_secs(3_600), ..Prune::default() };
    let first = store.prune(&LogName::outbox(), &old).await.expect("pruned");
    assert_eq!(first.count, 0);
    old.after = Some(first.next.expect("a further step"));
    let second = store.prune(&LogName::outbox(), &old).await.expect("pruned");
    assert_eq!((second.count, second.next), (10, None));
}

/// Whose window begins with the transaction of an event has not passed it; who begins after it has.
#[tokio::test]
async fn what_a_lane_is_about_to_read_stays() {
    let fixture = support::on(Version::V15).await;
    let (store, client) = (&fixture.store, fixture.client().await);
    support::leased(store, "s").await;
    let old = "INSERT INTO postbox.outbox (topic, payload, created_at) VALUES ('t', '{}', now() - interval '2 hours')";
    client.batch_execute(old).await.expect("appended");
    let prune = Prune { older_than: Duration::from_secs(3_600), ..Prune::default() };
    for (later, count) in [(0, 0), (1, 1)] {
        let begin = format!(
            "UPDATE postbox.lane SET from_snap = next.snap, to_snap = next.snap
             FROM (SELECT format('%1$s:%1$s:', max(xid)::text::bigint + {later})::pg_snapshot AS snap FROM postbox.outbox) AS next"
        );
        client.batch_execute(&begin).await.expect("set");
        assert_eq!(store.prune(&LogName::outbox(), &prune).await.expect("pruned").count, count, "{later}");
    }
}
