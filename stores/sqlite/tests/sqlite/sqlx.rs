//! Appends in an `sqlx` transaction.
#![cfg(feature = "sqlx")]

use postbox_core::{EventId, LogName, NewEvent, Postbox, SourceName};
use postbox_sqlite::Sqlite;
use sqlx::Connection as _;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool, SqlitePoolOptions};

use crate::common::{Fixture, fixture};

async fn pool(fixture: &Fixture) -> SqlitePool {
    let options = SqliteConnectOptions::new().filename(fixture.path());
    SqlitePoolOptions::new().max_connections(1).connect_with(options).await.expect("connected")
}

#[tokio::test]
async fn events_commit_or_roll_back_with_the_change() {
    let fixture = fixture().await;
    let pool = pool(&fixture).await;
    let events: Vec<NewEvent> =
        (0..1_234).map(|n| NewEvent::json("t", n.to_string()).key("k").header("n", n.to_string())).collect();
    let mut tx = pool.begin().await.expect("begun");
    Postbox::new(Sqlite).append(&mut tx, &events).await.expect("appended");
    tx.rollback().await.expect("rolled back");
    let mut tx = pool.begin().await.expect("begun");
    let ids = Postbox::new(Sqlite).append(&mut tx, &events).await.expect("appended");
    tx.commit().await.expect("committed");
    let lease = fixture.lane().await;
    let mut read: Vec<EventId> = Vec::new();
    loop {
        let batch = fixture.next(&lease).await;
        if batch.is_empty() {
            break;
        }
        for delivery in &batch.deliveries {
            assert_eq!(delivery.event.payload, events[read.len()].payload);
            assert_eq!(delivery.event.headers, events[read.len()].headers);
            read.push(delivery.event.id);
        }
        fixture.settle(&lease, &batch).await;
    }
    assert_eq!(read, *ids);
}

#[tokio::test]
async fn hostile_bytes_come_back_identical() {
    let fixture = fixture().await;
    let pool = pool(&fixture).await;
    let payloads: [&[u8]; 5] = [b"", b"\0", &[0xff, 0xfe], b"1e400", "\u{202e}".as_bytes()];
    let events = payloads.map(|payload| NewEvent::json("t", payload.to_vec()).key("a\u{fffd}'\"\\"));
    let mut tx = pool.begin().await.expect("begun");
    Postbox::new(Sqlite).append(&mut tx, &events).await.expect("appended");
    tx.commit().await.expect("committed");
    let lease = fixture.lane().await;
    let batch = fixture.next(&lease).await;
    let read: Vec<&[u8]> = batch.deliveries.iter().map(|delivery| delivery.event.payload.as_ref()).collect();
    assert_eq!(read, payloads);
    assert!(
        batch.deliveries.iter().all(|it| it.event.key.as_ref().is_some_and(|key| key.as_str() == "a\u{fffd}'\"\\"))
    );
}

#[tokio::test]
async fn refusals_have_the_same_codes() {
    let fixture = fixture().await;
    let pool = pool(&fixture).await;
    let mut tx = pool.begin().await.expect("begun");
    let id = Postbox::new(Sqlite).append(&mut *tx, NewEvent::json("t", "1")).await.expect("appended")[0];
    for events in
        [vec![NewEvent::json("t", "1").id(id)], vec![NewEvent::json("t", "2"), NewEvent::json("t", "1").id(id)]]
    {
        assert_eq!(Postbox::new(Sqlite).append(&mut tx, events).await.expect("known").known(), 1);
    }
    let another = NewEvent::json("t", "2").id(id);
    let error = Postbox::new(Sqlite).append(&mut tx, another).await.expect_err("taken");
    assert_eq!(error.code(), "event_id_taken");
    let unknown = LogName::new("nowhere").expect("valid");
    let error = Postbox::new(Sqlite).log(unknown).append(&mut tx, NewEvent::json("t", "1")).await.expect_err("unknown");
    assert_eq!(error.code(), "log_unknown");
    let source = SourceName::new("s").expect("valid");
    assert!(postbox_sqlite::sqlx::once_in(&mut tx, &source, "m").await.expect("asked"));
    assert!(!postbox_sqlite::sqlx::once_in(&mut tx, &source, "m").await.expect("asked"));
}

#[tokio::test]
async fn without_a_transaction_nothing_is_appended() {
    let fixture = fixture().await;
    let mut connection = pool(&fixture).await.acquire().await.expect("a connection");
    let error = Postbox::new(Sqlite).append(&mut *connection, NewEvent::json("t", "1")).await.expect_err("refused");
    assert_eq!(error.code(), "no_transaction");
    let source = SourceName::new("s").expect("valid");
    let error = postbox_sqlite::sqlx::once_in(&mut connection, &source, "m").await.expect_err("refused");
    assert_eq!(error.code(), "no_transaction");
    let lease = fixture.lane().await;
    assert!(fixture.next(&lease).await.is_empty());
}

/// `sqlx` still counts such a transaction.
#[tokio::test]
async fn after_sqlite_has_rolled_back_by_itself_nothing_is_appended() {
    let fixture = fixture().await;
    fixture.connect().execute_batch("CREATE TABLE mine (id INTEGER PRIMARY KEY)").expect("made");
    let source = SourceName::new("s").expect("valid");
    let pool = pool(&fixture).await;
    let mut tx = pool.begin().await.expect("begun");
    sqlx::query("INSERT INTO mine VALUES (1)").execute(&mut *tx).await.expect("inserted");
    sqlx::query("INSERT OR ROLLBACK INTO mine VALUES (1)").execute(&mut *tx).await.expect_err("taken");
    for count in [1, 2] {
        let events = vec![NewEvent::json("t", "1"); count];
        let error = Postbox::new(Sqlite).append(&mut tx, events).await.expect_err("refused");
        assert_eq!(error.code(), "no_transaction");
    }
    let error = postbox_sqlite::sqlx::once_in(&mut tx, &source, "m").await.expect_err("refused");
    assert_eq!(error.code(), "no_transaction");
    drop(tx);
    let lease = fixture.lane().await;
    assert!(fixture.next(&lease).await.is_empty());
    let noted = "SELECT count(*) FROM postbox_once";
    let noted: i64 = fixture.connect().query_row(noted, [], |row| row.get(0)).expect("counted");
    assert_eq!(noted, 0);

    // The pool lends the same connection again. It holds no lock, and commits what it should.
    fixture.connect().execute_batch("INSERT INTO mine VALUES (7)").expect("nobody holds the write lock");
    let mut tx = pool.begin().await.expect("begun");
    Postbox::new(Sqlite).append(&mut tx, NewEvent::json("t", "1")).await.expect("appended");
    tx.commit().await.expect("committed");
    assert_eq!(fixture.next(&lease).await.deliveries.len(), 1);
}

#[tokio::test]
async fn an_append_that_made_sqlite_roll_back_says_so() {
    let fixture = fixture().await;
    let refuse = "CREATE TRIGGER refuse BEFORE INSERT ON postbox_outbox BEGIN SELECT RAISE(ROLLBACK, 'refused'); END";
    fixture.connect().execute_batch(refuse).expect("made");
    let pool = pool(&fixture).await;
    // Several events go out in a savepoint, within one of the caller's.
    for count in [1, 700] {
        let mut tx = pool.begin().await.expect("begun");
        let mut nested = tx.begin().await.expect("begun");
        let events = vec![NewEvent::json("t", "1"); count];
        let error = Postbox::new(Sqlite).append(&mut nested, events).await.expect_err("refused");
        assert!(error.message().contains("refused; SQLite has rolled back your whole transaction"), "{error}");
        drop(nested);
        drop(tx);
        fixture.connect().execute_batch("DELETE FROM postbox_once").expect("nobody holds the write lock");
    }
    fixture.connect().execute_batch("DROP TRIGGER refuse").expect("dropped");
    let mut tx = pool.begin().await.expect("begun");
    Postbox::new(Sqlite).append(&mut tx, NewEvent::json("t", "1")).await.expect("appended");
    tx.commit().await.expect("committed");
    let lease = fixture.lane().await;
    assert_eq!(fixture.next(&lease).await.deliveries.len(), 1);
}

#[tokio::test]
async fn an_append_that_fails_leaves_the_transaction_as_it_was() {
    let fixture = fixture().await;
    let pool = pool(&fixture).await;
    let mut tx = pool.begin().await.expect("begun");
    let id = Postbox::new(Sqlite).append(&mut tx, NewEvent::json("t", "first")).await.expect("appended")[0];
    let mut events: Vec<NewEvent> = (0..700).map(|n| NewEvent::json("t", n.to_string())).collect();
    events.push(NewEvent::json("t", "another").id(id));
    let error = Postbox::new(Sqlite).append(&mut tx, events).await.expect_err("taken");
    assert_eq!(error.code(), "event_id_taken");
    tx.commit().await.expect("committed");
    let lease = fixture.lane().await;
    let batch = fixture.next(&lease).await;
    assert_eq!(batch.deliveries.iter().map(|it| it.event.id).collect::<Vec<_>>(), [id]);
}

/// Each number of events is a statement of its own.
#[tokio::test]
async fn appends_of_many_sizes_leave_the_statement_cache_to_the_caller() {
    let fixture = fixture().await;
    let mut connection = pool(&fixture).await.acquire().await.expect("a connection");
    let mut tx = connection.begin().await.expect("begun");
    for count in 1..=120 {
        let events: Vec<NewEvent> = (0..count).map(|n| NewEvent::json("t", n.to_string())).collect();
        Postbox::new(Sqlite).append(&mut tx, &events).await.expect("appended");
    }
    tx.commit().await.expect("committed");
    let kept = connection.cached_statements_size();
    assert!(kept <= 2, "{kept} statements");
}
