//! Steps over many rows: each is bounded, and none takes what it passes for the end.

use std::time::Duration;

use postbox_core::kit::{PRUNE_YOUNG_MAX, ROWS_MOVED_MAX};
use postbox_core::{
    Admin as _, Append as _, Change, Disposition, Entry, ErrorKind, Log as _, LogName, Maintain as _, NewEvent, Prune,
    Selection, Seq, Settlement, SubscriptionName,
};
use rusqlite::types::FromSql;

use crate::common::{Fixture, LONG, fixture};

/// Adds discarded rows to the subscription `reader`.
fn fill(fixture: &Fixture, count: i64) {
    let rows = format!(
        "INSERT INTO postbox_delivery (subscription, seq, lane, id, topic, created_at, state, holds, attempts, updated_at) \
         WITH RECURSIVE n(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < {count}) \
         SELECT 'reader', n, 0, '', 't', 0, 'discarded', 0, 0, 0 FROM n"
    );
    fixture.connect().execute_batch(&rows).expect("filled");
}

fn ask<T: FromSql>(fixture: &Fixture, sql: &str) -> T {
    fixture.connect().query_row(sql, [], |row| row.get(0)).expect("answered")
}

/// Rows that are due and not the first of their key would be looked at again and again.
#[tokio::test]
async fn of_retried_events_of_one_key_only_the_first_is_due() {
    let fixture = fixture().await;
    let lease = fixture.lane().await;
    let events = ["1", "2", "3"].map(|payload| NewEvent::json("t", payload).key("k"));
    fixture.store.append(&LogName::outbox(), &events).await.expect("appended");
    let batch = fixture.next(&lease).await;
    let dead = || Disposition::Dead { code: "http_422".into(), error: "never".into(), halt: false, took: None };
    let entries = batch.deliveries.iter().map(|delivery| Entry { delivery, disposition: dead() }).collect();
    let settlement = Settlement { position: batch.end, entries, hold_keys: true, rewind: false };
    fixture.store.settle(&lease, settlement).await.expect("settled");
    let retried = fixture.store.change(&lease.subscription, &Change::Retry, &Selection::default()).await;
    assert_eq!(retried.expect("retried").count, 3);
    let states = "SELECT group_concat(state) FROM (SELECT state FROM postbox_delivery ORDER BY seq)";
    assert_eq!(ask::<String>(&fixture, states), "retrying,blocked,blocked");
}

/// They match no change, but the write lock is held while they are passed.
#[tokio::test]
async fn discarded_rows_count_as_looked_at() {
    let fixture = fixture().await;
    let name = fixture.lane().await.subscription;
    fill(&fixture, 25_000);
    let mut selection = Selection::default();
    for next in [Some(Seq(20_000)), None] {
        let changed = fixture.store.change(&name, &Change::Retry, &selection).await.expect("asked");
        assert_eq!((changed.count, changed.next), (0, next));
        selection.after = changed.next;
    }
    let discarded = "SELECT count(*) FROM postbox_delivery WHERE state = 'discarded'";
    assert_eq!(ask::<i64>(&fixture, discarded), 25_000);
}

#[tokio::test]
async fn more_rows_than_one_transaction_may_move_are_refused() {
    let fixture = fixture().await;
    let lease = fixture.lane().await;
    fill(&fixture, ROWS_MOVED_MAX + 1);
    let error = fixture.store.set_lanes(&lease.subscription, 2).await.expect_err("refused");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Conflict, "rows_many"));
    let to = SubscriptionName::new("writer").expect("valid");
    let error = fixture.store.rename(&lease.subscription, 0, &to).await.expect_err("refused");
    assert_eq!((error.kind(), error.code(), error.operation()), (ErrorKind::Conflict, "rows_many", "rename"));
    fixture.store.renew(&lease, LONG).await.expect("nothing was changed");
}

/// A clock was wrong for a while.
#[tokio::test]
async fn events_from_the_future_do_not_end_retention() {
    let fixture = fixture().await;
    let lease = fixture.lane().await;
    let events: Vec<NewEvent> = (0..PRUNE_YOUNG_MAX + 10).map(|n| NewEvent::json("t", n.to_string())).collect();
    fixture.store.append(&LogName::outbox(), &events).await.expect("appended");
    loop {
        let batch = fixture.next(&lease).await;
        if batch.is_empty() {
            break;
        }
        fixture.settle(&lease, &batch).await;
    }
    let times = format!(
        "UPDATE postbox_outbox SET created_at = created_at + 86400000000 * iif(seq <= {PRUNE_YOUNG_MAX}, 365, -1)"
    );
    fixture.connect().execute_batch(&times).expect("set");
    let old = Prune { older_than: Duration::from_secs(3_600), ..Prune::default() };
    let pruned = fixture.store.prune(&LogName::outbox(), &old).await.expect("pruned");
    assert_eq!((pruned.count, pruned.next), (10, None));
}
