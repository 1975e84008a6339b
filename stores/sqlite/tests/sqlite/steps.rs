//! Steps over many rows: each is bounded, and none takes what it passes for the end.

use std::time::Duration;

use postbox_core::kit::{PRUNE_YOUNG_MAX, ROWS_MOVED_MAX};
use postbox_core::{
    Admin as _, Append as _, Change, Criteria, Disposition, Entry, ErrorKind, Filter, Headers, Inspect as _, ListQuery,
    Log as _, LogName, Maintain as _, NewEvent, Ordering, Prune, Replay, ResetTo, Selection, Seq, Settlement, State,
    Subscription, SubscriptionName,
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

/// Adds events to the outbox.
fn fill_log(fixture: &Fixture, count: i64) {
    let rows = format!(
        "INSERT INTO postbox_outbox (topic, payload) \
         WITH RECURSIVE n(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < {count}) SELECT 't', '' FROM n"
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

/// They are not sent again, but the write lock is held while they are passed.
#[tokio::test]
async fn a_step_of_a_replay_passes_a_bounded_part_of_the_log() {
    let fixture = fixture().await;
    let name = fixture.lane().await.subscription;
    fill_log(&fixture, 25_000);
    fill(&fixture, 25_000);
    let mut replay = Replay::default();
    for next in [Some(Seq(20_000)), None] {
        let replayed = fixture.store.replay(&name, &replay).await.expect("asked");
        assert_eq!((replayed.count, replayed.next), (0, next));
        (replay.after, replay.through) = (replayed.next, Some(replayed.through));
    }
}

/// A test next to the list checks how long a step is.
#[tokio::test]
async fn a_list_finds_what_is_steps_away() {
    let fixture = fixture().await;
    let subscription = fixture.lane().await.subscription;
    fill_log(&fixture, 21_000);
    fixture.store.append(&LogName::outbox(), &[NewEvent::json("rare", "1")]).await.expect("appended");
    fill_log(&fixture, 21_000);
    let which = Criteria { topic: Some("rare".parse().expect("a pattern")), ..Criteria::default() };
    let (state, code, headers, after) = (None, None, Headers::new(), None);
    let mut query = ListQuery { subscription, state, which, code, headers, after, limit: 10, payloads: true };
    for state in [None, Some(State::Pending), Some(State::Discarded)] {
        if state == Some(State::Discarded) {
            fill(&fixture, 42_001);
        }
        query.state = state;
        let found = fixture.store.list(&query).await.expect("listed");
        let places: Vec<i64> = found.iter().map(|record| record.seq.0).collect();
        assert_eq!(places, [21_001], "{state:?}");
    }
}

#[tokio::test]
async fn the_plan_of_a_reset_looks_at_a_bounded_part_of_the_log() {
    let fixture = fixture().await;
    let name = SubscriptionName::new("reader").expect("valid");
    let filter = Filter { topics: vec!["rare".parse().expect("a pattern")], ..Filter::default() };
    let rare = Subscription { filter, ..Subscription::new(name.clone(), LogName::outbox()) };
    fixture.store.subscribe(&rare).await.expect("subscribed");
    for (count, is_estimate) in [(100_000, false), (1, true)] {
        fill_log(&fixture, count);
        let plan = fixture.store.reset(&name, ResetTo::Now, None).await.expect("planned");
        assert_eq!((plan.again, plan.skipped, plan.is_estimate), (0, 0, is_estimate));
    }
}

#[tokio::test]
async fn more_rows_than_one_transaction_may_move_are_refused() {
    let fixture = fixture().await;
    let lease = fixture.lane().await;
    fill(&fixture, ROWS_MOVED_MAX + 1);
    let error = fixture.store.set_lanes(&lease.subscription, 2).await.expect_err("refused");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Conflict, "rows_many"));
    assert!(!error.message().contains("skipped"), "those that were sent later do not count: {error}");
    let to = SubscriptionName::new("writer").expect("valid");
    let error = fixture.store.rename(&lease.subscription, 0, &to).await.expect_err("refused");
    assert_eq!((error.kind(), error.code(), error.operation()), (ErrorKind::Conflict, "rows_many", "rename"));
    fixture.store.renew(&lease, LONG).await.expect("nothing was changed");
}

/// A replay of what was skipped leaves rows of another table, which have the name too.
#[tokio::test]
async fn what_was_sent_later_counts_for_a_rename() {
    let fixture = fixture().await;
    let name = fixture.lane().await.subscription;
    let sent = format!(
        "INSERT INTO postbox_sent (subscription, seq) \
         WITH RECURSIVE n(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n <= {ROWS_MOVED_MAX}) SELECT 'reader', n FROM n"
    );
    fixture.connect().execute_batch(&sent).expect("filled");
    let to = SubscriptionName::new("writer").expect("valid");
    let error = fixture.store.rename(&name, 0, &to).await.expect_err("refused");
    assert_eq!((error.kind(), error.code(), error.operation()), (ErrorKind::Conflict, "rows_many", "rename"));
    assert!(error.message().contains("let the others go out, prune the log"), "{error}");
    fixture.store.set_lanes(&name, 2).await.expect("these rows stay as they are");
}

/// However many rows wait for a turn, no transaction takes long.
#[tokio::test]
async fn once_there_is_no_order_rows_are_unblocked_in_steps() {
    let fixture = fixture().await;
    let name = fixture.lane().await.subscription;
    fill(&fixture, 12_000);
    let block = "UPDATE postbox_delivery SET key = 'k' || (seq % 7), state = 'blocked', holds = 1";
    fixture.connect().execute_batch(&format!("DROP TRIGGER check_update; {block}")).expect("blocked");
    let unordered = Subscription { ordering: Ordering::None, ..Subscription::new(name, LogName::outbox()) };
    fixture.store.subscribe(&unordered).await.expect("subscribed");
    let left = "SELECT count(*) FROM postbox_delivery WHERE holds OR state <> 'retrying' OR due_at IS NULL";
    assert_eq!(ask::<i64>(&fixture, left), 0, "rows that wait");
    let steps = "SELECT count(DISTINCT updated_at) FROM postbox_delivery";
    assert_eq!(ask::<i64>(&fixture, steps), 3, "transactions");
    // From now on, each UPDATE of these rows is an error, even one that finds none.
    let guard = "CREATE TRIGGER guard BEFORE UPDATE ON postbox_delivery BEGIN SELECT * FROM missing; END";
    fixture.connect().execute_batch(guard).expect("guarded");
    fixture.store.subscribe(&unordered).await.expect("no row holds, so none is looked for with the write lock");
}

/// SQLite refuses the two with different codes.
#[tokio::test]
async fn retention_names_a_foreign_key_that_refers_to_the_log() {
    for action in ["NO ACTION", "RESTRICT"] {
        let fixture = fixture().await;
        let lease = fixture.lane().await;
        fixture.store.append(&LogName::outbox(), &[NewEvent::json("t", "1")]).await.expect("appended");
        let batch = fixture.next(&lease).await;
        fixture.settle(&lease, &batch).await;
        let refer = format!(
            "CREATE TABLE mine (event INTEGER REFERENCES postbox_outbox (seq) ON DELETE {action}); \
             INSERT INTO mine SELECT seq FROM postbox_outbox; \
             UPDATE postbox_outbox SET created_at = created_at - 86400000000"
        );
        fixture.connect().execute_batch(&refer).expect("referred");
        let old = Prune { older_than: Duration::from_secs(3_600), ..Prune::default() };
        let error = fixture.store.prune(&LogName::outbox(), &old).await.expect_err(action);
        assert_eq!((error.kind(), error.code()), (ErrorKind::Conflict, "reference_held"), "{action}: {error}");
    }
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
