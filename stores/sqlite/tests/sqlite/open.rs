//! Files that cannot be used: one line says what is wrong and how to fix it, and nothing is
//! changed.

#![allow(clippy::print_stdout, reason = "a child process talks to its parent, and a seed must be seen")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use postbox_core::{
    Append, Error, ErrorKind, Inspect as _, Log, LogName, Maintain as _, Migrate, NewEvent, Subscription,
    SubscriptionName,
};
use postbox_sqlite::{SqliteConfig, SqliteStore};

use crate::common::{self, fixture};

async fn refused(path: impl AsRef<Path>) -> Error {
    let opened = SqliteStore::open(SqliteConfig::new(path.as_ref())).await;
    let error = match opened {
        Ok(store) => store.validate().await.expect_err("no store is there"),
        Err(error) => error,
    };
    assert!(!error.to_string().contains('\n'), "one line: {error}");
    error
}

#[tokio::test]
async fn a_path_that_can_hold_no_store_is_refused_with_the_cure() {
    let folder = tempfile::tempdir().expect("a folder");
    assert_eq!(refused(folder.path().join("none/shop.db")).await.code(), "store_folder_missing");
    assert_eq!(refused(folder.path()).await.code(), "store_path_invalid");
    assert_eq!(refused(":memory:").await.code(), "store_path_invalid");
    assert_eq!(refused("").await.code(), "store_path_invalid");
    let text = folder.path().join("notes.txt");
    fs::write(
        &text,
        "this is no database, and it is long enough to have a header of one hundred bytes, or nearly that many",
    )
    .expect("written");
    let error = refused(&text).await;
    assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "store_not_a_database"));
    assert!(error.message().contains("notes.txt"), "{error}");
}

/// The last connection that closes folds the write-ahead log into the file, which can then be
/// copied or removed alone.
#[tokio::test]
async fn a_store_that_was_dropped_is_one_file() {
    let folder = tempfile::tempdir().expect("a folder");
    for n in 0..20 {
        let path = folder.path().join(format!("{n}.db"));
        let store = SqliteStore::open(SqliteConfig::new(&path)).await.expect("opened");
        store.up().await.expect("made");
        store.append(&LogName::outbox(), &[NewEvent::json("t", "1")]).await.expect("appended");
        store.validate().await.expect("read by another connection");
        drop(store);
    }
    let files = fs::read_dir(folder.path()).expect("the folder").map(|file| file.expect("a file").file_name());
    let others: Vec<_> = files.filter(|name| !name.to_string_lossy().ends_with(".db")).collect();
    assert!(others.is_empty(), "{others:?}");
}

#[tokio::test]
async fn only_up_makes_the_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("shop.db");
    let store = SqliteStore::open(SqliteConfig::new(&path)).await.expect("nothing to complain of yet");
    for result in [
        store.validate().await.map(drop),
        store.append(&LogName::outbox(), &[NewEvent::json("t", "1")]).await.map(drop),
        store
            .subscribe(&Subscription {
                lanes: Some(1),
                ..Subscription::new(SubscriptionName::new("a").expect("valid"), LogName::outbox())
            })
            .await,
        store.down(true).await.map(drop),
    ] {
        if let Err(error) = result {
            assert_eq!(error.code(), "schema_missing");
            let said = format!("there is no file {}; ", path.display());
            let cure = "postbox migrate up, with the same store";
            assert!(error.message().starts_with(&said) && error.message().ends_with(cure), "{error}");
        }
    }
    assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 0, "nothing was made");
    store.up().await.expect("made");
    store.validate().await.expect("there");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_programs_may_start_at_once_on_no_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("shop.db");
    let starts = (0..8).map(|_| {
        let config = common::config(&path);
        tokio::spawn(async move { SqliteStore::open(config).await?.up().await })
    });
    let mut applied = Vec::new();
    for start in futures::future::join_all(starts).await {
        applied.extend(start.expect("no panic").expect("each start succeeds"));
    }
    assert_eq!(applied, ["0001_postbox"]);
}

#[tokio::test]
async fn a_database_without_our_tables_is_left_as_it_is() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("app.db");
    rusqlite::Connection::open(&path).expect("opened").execute_batch("CREATE TABLE orders (id)").expect("made");
    let before = fs::read(&path).expect("read");
    let error = refused(&path).await;
    assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "schema_missing"));
    let store = SqliteStore::open(SqliteConfig::new(&path)).await.expect("opened");
    let error = store.subscriptions().await.expect_err("no tables");
    let store = format!("sqlite:{}", path.display());
    let said = format!("{store} has no Postbox tables; run: postbox migrate up, with the same store");
    assert_eq!((error.code(), error.message()), ("schema_missing", said.as_str()));
    assert!(std::error::Error::source(&error).is_none(), "the driver's text says no more");
    assert_eq!(fs::read(&path).expect("read"), before, "nothing was changed");
}

#[tokio::test]
async fn a_file_in_another_encoding_is_refused_and_left_as_it_is() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("shop.db");
    let connection = rusqlite::Connection::open(&path).expect("opened");
    connection.execute_batch("PRAGMA encoding = 'UTF-16'; CREATE TABLE mine (n)").expect("made");
    let before = fs::read(&path).expect("read");
    let store = SqliteStore::open(SqliteConfig::new(&path)).await.expect("opened");
    let error = store.up().await.expect_err("refused");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "encoding_unsupported"));
    assert_eq!(fs::read(&path).expect("read"), before);
}

#[tokio::test]
async fn subscribing_in_a_newer_schema_is_refused() {
    let fixture = fixture().await;
    fixture.connect().execute("INSERT INTO postbox_migration VALUES (99, '0099_future', 0)", []).expect("inserted");
    let subscription = Subscription {
        lanes: Some(1),
        ..Subscription::new(SubscriptionName::new("a").expect("valid"), LogName::outbox())
    };
    let error = fixture.store.subscribe(&subscription).await.expect_err("refused");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "schema_newer"));
}

#[tokio::test]
async fn the_script_makes_the_schema_that_validate_wants() {
    let fixture = fixture().await;
    let path = fixture.path().with_file_name("other.db");
    rusqlite::Connection::open(&path).expect("opened").execute_batch(&fixture.store.script()).expect("it runs");
    let other = SqliteStore::open(SqliteConfig::new(&path)).await.expect("opened");
    other.validate().await.expect("the same schema");
    other.check_integrity().await.expect("all of it");
    assert!(other.up().await.expect("nothing to do").is_empty());
}

#[tokio::test]
async fn a_part_that_was_dropped_or_changed_is_named_with_its_cure() {
    let fixture = fixture().await;
    let store = &fixture.store;
    store.create_log(&LogName::new("audit").expect("valid")).await.expect("made");
    store.check_integrity().await.expect("nothing is missing");
    let connection = fixture.connect();
    let drops = "SELECT 'DROP ' || type || ' ' || name FROM sqlite_master
        WHERE type IN ('index', 'trigger') AND name LIKE 'postbox%'";
    let mut statement = connection.prepare(drops).expect("prepared");
    let drops = statement.query_map([], |row| row.get(0)).expect("listed").collect::<Result<Vec<String>, _>>();
    let mut drops = drops.expect("text");
    assert!(drops.len() > 12, "{drops:?}");
    drops.push("DROP INDEX postbox_once_age; CREATE INDEX postbox_once_age ON postbox_once (message_id)".to_owned());
    for drop in &drops {
        connection.execute_batch(drop).expect(drop);
        let error = store.check_integrity().await.expect_err(drop);
        assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "schema_damaged"), "{drop}: {error}");
        store.validate().await.expect("relays go on");
        let (_, cures) = error.message().split_once("run: ").expect("a cure");
        connection.execute_batch(cures).expect(cures);
        store.check_integrity().await.expect(drop);
    }
    let typed = "DROP INDEX postbox_outbox_id; create unique index postbox_outbox_id on postbox_outbox(id)";
    connection.execute_batch(typed).expect(typed);
    store.check_integrity().await.expect("the same index");
    for table in ["postbox_audit", "postbox_log", "postbox_subscription"] {
        connection.execute_batch(&format!("ALTER TABLE {table} RENAME TO attic")).expect("moved");
        let error = store.check_integrity().await.expect_err(table);
        assert_eq!(error.code(), "schema_damaged", "{error}");
        assert!(error.message().contains(&format!("ALTER TABLE OTHER RENAME TO {table}")), "{error}");
        connection.execute_batch(&format!("ALTER TABLE attic RENAME TO {table}")).expect("moved back");
        store.check_integrity().await.expect("it is back");
    }
}

#[tokio::test]
async fn removal_is_refused_without_the_write_lock() {
    let fixture = fixture().await;
    fixture.store.append(&LogName::outbox(), &[NewEvent::json("t", "1")]).await.expect("appended");
    let config = SqliteConfig { busy_timeout: Duration::from_millis(50), ..SqliteConfig::new(fixture.path()) };
    let store = SqliteStore::open(config).await.expect("opened");
    let other = fixture.connect();
    other.execute_batch("BEGIN IMMEDIATE").expect("locked");
    let error = store.down(false).await.expect_err("refused");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Conflict, "events_undelivered"));
}

/// A row at or below a cursor would never be sent.
#[tokio::test]
async fn a_row_with_a_seq_of_its_own_is_refused() {
    let fixture = fixture().await;
    let connection = fixture.connect();
    let insert = |seq: &str| {
        let sql = format!("INSERT INTO postbox_outbox (seq, topic, payload) VALUES ({seq}, 't', '{{}}')");
        connection.execute(&sql, [])
    };
    for seq in ["7", "0", "-1", "-5", "9223372036854775807"] {
        let refused = insert(seq).expect_err(seq).to_string();
        assert!(refused.contains("seq_given"), "{seq}: {refused}");
    }
    assert_eq!(insert("NULL").expect("as without the column"), 1);
}

#[tokio::test]
async fn a_cursor_beyond_the_log_names_the_cure() {
    let fixture = fixture().await;
    let name = SubscriptionName::new("reader").expect("valid");
    let subscription = Subscription { lanes: Some(2), ..Subscription::new(name, LogName::outbox()) };
    fixture.store.subscribe(&subscription).await.expect("subscribed");
    let events = ["1", "2", "3"].map(|payload| NewEvent::json("t", payload));
    fixture.store.append(&LogName::outbox(), &events).await.expect("appended");
    let moved = "UPDATE postbox_lane SET position = 900, window_end = 900 WHERE lane = 1";
    fixture.connect().execute(moved, []).expect("updated");
    let found = fixture.store.check_integrity().await.expect_err("no fit");
    let error = fixture.store.subscribe(&subscription).await.expect_err("refused");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Mismatch, "cursor_from_future"));
    assert_eq!((found.kind(), found.message()), (error.kind(), error.message()));
    let cure = error.message().split("with: ").nth(1).expect("a cure").to_owned();
    fixture.connect().execute_batch(&cure).expect("the cure runs");
    fixture.store.subscribe(&subscription).await.expect("cured");
    let positions = "SELECT group_concat(position) FROM (SELECT position FROM postbox_lane ORDER BY lane)";
    let positions: String = fixture.connect().query_row(positions, [], |row| row.get(0)).expect("lanes");
    assert_eq!(positions, "0,3", "the lane behind the end keeps what it has to deliver");
}

#[tokio::test]
async fn a_lock_held_elsewhere_for_too_long_is_unavailable() {
    let fixture = fixture().await;
    let config = SqliteConfig { busy_timeout: Duration::from_millis(50), ..SqliteConfig::new(fixture.path()) };
    let store = SqliteStore::open(config).await.expect("opened");
    let other = fixture.connect();
    other.execute_batch("BEGIN IMMEDIATE").expect("locked");
    let error = store.append(&LogName::outbox(), &[NewEvent::json("t", "1")]).await.expect_err("locked");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Unavailable, "store_busy"));
    store.validate().await.expect("reading needs no lock");
    other.execute_batch("ROLLBACK").expect("unlocked");
    // The store works again. On a busy machine, a call may still wait longer for its turn than this
    // short timeout allows.
    while let Err(error) = store.append(&LogName::outbox(), &[NewEvent::json("t", "1")]).await {
        assert_eq!(error.code(), "store_busy");
    }
}

#[tokio::test]
async fn a_log_of_your_own_has_no_reserved_name_and_goes_with_the_others() {
    let fixture = fixture().await;
    let log = LogName::new("audit").expect("valid");
    let error = fixture.store.append(&log, &[NewEvent::json("t", "1")]).await.expect_err("unknown");
    assert!(error.message().contains("inbox, outbox"), "{error}");
    fixture.store.create_log(&log).await.expect("made");
    let reserved = LogName::new("lane").expect("valid");
    assert_eq!(fixture.store.create_log(&reserved).await.expect_err("reserved").code(), "log_unknown");
    assert_eq!(
        fixture.store.append(&reserved, &[NewEvent::json("t", "1")]).await.expect_err("no log").code(),
        "log_unknown"
    );
    fixture.store.down(true).await.expect("removed");
    let left: i64 = fixture
        .connect()
        .query_row("SELECT count(*) FROM sqlite_master WHERE name LIKE 'postbox%'", [], |row| row.get(0))
        .expect("counted");
    assert_eq!(left, 0);
}

/// SQLite would refuse its table, because tables and indexes share their names.
#[tokio::test]
async fn a_log_cannot_have_the_name_of_an_index() {
    let fixture = fixture().await;
    fixture.store.create_log(&LogName::new("audit_id").expect("valid")).await.expect("made");
    // The name of an index, and a log whose index would have the name of a table.
    for taken in ["outbox_id", "audit"] {
        let error = fixture.store.create_log(&LogName::new(taken).expect("valid")).await.expect_err(taken);
        assert_eq!((error.kind(), error.code()), (ErrorKind::NotFound, "log_unknown"));
    }
}

/// Runs in a child process without privileges: CI runs in a container as root, which ignores file
/// permissions.
#[tokio::test]
async fn child_without_rights() {
    let Ok(path) = std::env::var("POSTBOX_TEST_READONLY") else { return };
    let error = refused(path).await;
    println!("child: {:?} {} {}", error.kind(), error.code(), error.message());
}

#[tokio::test]
async fn a_file_that_cannot_be_written_is_refused() {
    let folder = tempfile::tempdir_in("/tmp").expect("a folder");
    let path = folder.path().join("shop.db");
    let store = SqliteStore::open(SqliteConfig::new(&path)).await.expect("opened");
    store.up().await.expect("migrated");
    let program = folder.path().join("child");
    fs::copy(std::env::current_exe().expect("this program"), &program).expect("copied");
    for (file, mode) in [(folder.path(), 0o755), (&path, 0o444), (&program, 0o755)] {
        fs::set_permissions(file, fs::Permissions::from_mode(mode)).expect("set");
    }
    let mut child = Command::new(&program);
    child
        .args(["--exact", "open::child_without_rights", "--nocapture"])
        .env("POSTBOX_TEST_READONLY", &path)
        .current_dir("/");
    // Root can write anywhere, so the child runs as nobody. Another user cannot change its id, and
    // need not.
    if fs::metadata(&path).expect("there").permissions().mode() != 0 && is_root() {
        child.uid(65_534).gid(65_534);
    }
    let output = child.output().expect("ran");
    let text = String::from_utf8_lossy(&output.stdout);
    let answer = text.lines().find_map(|line| line.split("child: ").nth(1)).unwrap_or_else(|| panic!("{text}"));
    assert!(answer.starts_with("Mismatch store_readonly "), "{answer}");
    assert!(answer.contains("shop.db") && answer.contains("writable"), "{answer}");
}

fn is_root() -> bool {
    fs::read_to_string("/proc/self/status").is_ok_and(|status| status.contains("Uid:\t0\t"))
}
