//! The store is unreachable, locked, not readable for us, or damaged.

use anyhow::{Result, ensure};

use postbox_testkit::servers::{PrivatePostgres, Settings, Version};
use tokio::task::JoinHandle;

use super::{Planted, causes};
use crate::endpoint::{Endpoint, Shut, takes_all};
use crate::env::{FILE_SINK, Kind, TestEnv, WINDOW_PARAMETERS, until, until_waited_for};
use crate::sender::partner;

causes! {
    both no_schema "problem" "schema_missing" "postbox migrate up";
    Postgres a_database_that_is_away "problem" "store_unreachable" "is it running, and is the store's URL right?";
    Postgres a_wrong_user "problem" "login_refused" "correct the user or the password";
    Postgres a_wrong_database "problem" "database_missing" "create it first";
    Postgres a_right_that_is_missing "problem" "permission_denied" "postbox migrate grants";
    Postgres a_database_that_is_read_only "problem" "default_read_only" "SET default_transaction_read_only = off";
    Sqlite a_file_that_is_no_database "problem" "store_not_a_database" "correct the store's path";
    Postgres a_locked_table "problem" "table_locked" "SELECT pg_terminate_backend(";
    Postgres a_row_that_another_session_locks "problem" "session_blocks" "SELECT pg_terminate_backend(";
    Postgres a_row_that_a_prepared_transaction_locks "problem" "session_blocks" "ROLLBACK PREPARED 'it''s; x'";
    Postgres a_standby_that_is_away "problem" "standby_awaited" "do not end the session";
    Postgres a_dump_of_another_cluster "problem" "cursor_foreign" "postbox migrate rebase";
    Postgres a_log_that_was_moved "problem" "schema_damaged" "ALTER TABLE OTHER.outbox SET SCHEMA";
    Postgres a_schema_that_is_open_to_others "problem" "schema_open" "REVOKE CREATE ON SCHEMA \"postbox\" FROM PUBLIC";
    Sqlite an_index_that_was_dropped "problem" "schema_damaged" "CREATE INDEX postbox_delivery_key";
    Sqlite an_older_log_with_newer_cursors "problem" "cursor_from_future" "restore the newer one";
    Sqlite a_file_that_was_moved "problem" "store_replaced" "put it back";
    Sqlite a_file_that_another_program_locks "problem" "store_failing store_busy" "find its long transaction";
    Sqlite a_reader_that_nobody_ended "problem" "wal_grows" "a shell with an open BEGIN";
    Postgres a_function_that_fails "problem" "lane_failing store_error" "repair the store";
    both an_event_that_is_gone "problem" "dead event_missing" "postbox discard --code event_missing";
    both an_event_that_nobody_can_read "problem" "dead row_undecodable" "repair its row or discard it";
}

async fn no_schema(kind: Kind) -> Result<Planted> {
    let env = TestEnv::empty(kind).await?;
    env.config(FILE_SINK)?;
    Ok(Planted::of(env, FILE_SINK))
}

/// A store at another URL than the real one.
fn elsewhere(kind: Kind, url: String) -> Result<Planted> {
    let env = TestEnv::on(kind, url)?;
    env.config(FILE_SINK)?;
    Ok(Planted::of(env, FILE_SINK))
}

async fn a_database_that_is_away(kind: Kind) -> Result<Planted> {
    let shut = Shut::reserve()?;
    let url = shut.url().replace("http://", "postgres://somebody@");
    Ok(elsewhere(kind, format!("{url}postbox"))?.keeping(shut))
}

async fn a_wrong_user(kind: Kind) -> Result<Planted> {
    let env = TestEnv::migrated(kind).await?;
    let (_, place) = env.url.split_once('@').unwrap_or(("", &env.url));
    elsewhere(kind, format!("postgres://nobody_of_this_name@{place}"))
}

async fn a_wrong_database(kind: Kind) -> Result<Planted> {
    let env = TestEnv::empty(kind).await?;
    elsewhere(kind, format!("{}_missing", env.url))
}

async fn a_right_that_is_missing(kind: Kind) -> Result<Planted> {
    let env = TestEnv::migrated(kind).await?;
    let role = format!("looks_{}", std::process::id());
    env.sql(&format!("CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA postbox TO {role}")).await?;
    let (_, place) = env.url.split_once('@').unwrap_or(("", &env.url));
    elsewhere(kind, format!("postgres://{role}@{place}"))
}

async fn a_database_that_is_read_only(kind: Kind) -> Result<Planted> {
    let config = format!(
        "[subscriptions.apply]\nlog = \"inbox\"\nsink = {{ type = \"file\", path = \"in.jsonl\" }}\n{}",
        partner()
    );
    let planted = Planted::new(kind, config).await?;
    planted.env.dispatch(&[])?;
    let database = planted.env.url.rsplit('/').next().unwrap_or_default().split('?').next().unwrap_or_default();
    planted.env.sql(&format!("ALTER DATABASE {database} SET default_transaction_read_only = on")).await?;
    Ok(planted)
}

async fn a_file_that_is_no_database(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, FILE_SINK).await?;
    for name in ["postbox.db-wal", "postbox.db-shm"] {
        _ = std::fs::remove_file(planted.env.path(name));
    }
    std::fs::write(planted.env.path("postbox.db"), "this is a text and no database. ".repeat(100))?;
    Ok(planted)
}

/// As a migration of the application does.
async fn a_locked_table(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, FILE_SINK).await?;
    planted.env.subscribe()?;
    let holder = planted.env.client().await?;
    holder.batch_execute("BEGIN; LOCK TABLE postbox.lane IN ACCESS EXCLUSIVE MODE").await?;
    Ok(planted.three().await?.keeping(holder))
}

/// A session that was left in the middle of a transaction.
async fn a_row_that_another_session_locks(kind: Kind) -> Result<Planted> {
    let endpoint = Endpoint::start(takes_all)?;
    let planted = Planted::new(kind, endpoint.subscription("out")).await?.served().await?;
    planted.served[0].logged("lane taken", 1).await?;
    let holder = planted.env.client().await?;
    holder.batch_execute("BEGIN; SELECT FROM postbox.lane FOR UPDATE").await?;
    let planted = planted.three().await?;
    until_waited_for(&holder).await?;
    Ok(planted.keeping(holder).keeping(endpoint))
}

/// A transaction in two phases whose coordinator never came back. Another one locks nothing that
/// anybody waits for, and is not to be rolled back.
async fn a_row_that_a_prepared_transaction_locks(_: Kind) -> Result<Planted> {
    let postgres = PrivatePostgres::launch(Version::V15, Settings::fast()).await;
    let env = TestEnv::on(Kind::Postgres, postgres.fresh_database().await)?;
    env.ok(&["migrate", "up"])?;
    let endpoint = Endpoint::start(takes_all)?;
    let config = endpoint.subscription("out");
    env.config(&config)?;
    let planted = Planted::of(env, config).served().await?;
    planted.served[0].logged("lane taken", 1).await?;
    let client = planted.env.client().await?;
    client.batch_execute("BEGIN; LOCK TABLE postbox.lane IN ROW SHARE MODE; PREPARE TRANSACTION 'harmless'").await?;
    client.batch_execute("BEGIN; SELECT FROM postbox.lane FOR UPDATE; PREPARE TRANSACTION 'it''s; x'").await?;
    let planted = planted.three().await?;
    let said = until("the doctor names it", async || {
        Ok(Some(planted.env.said(&["doctor"])?).filter(|said| said.contains("session(s) have waited")))
    })
    .await?;
    ensure!(said.contains("-> let it end, or end it: ROLLBACK PREPARED 'it''s; x'"), "{said}");
    ensure!(!said.contains("harmless"), "{said}");
    Ok(planted.keeping(client).keeping(endpoint).keeping(postgres))
}

/// A synchronous standby that does not answer: a writer's commit waits, with its locks.
async fn a_standby_that_is_away(kind: Kind) -> Result<Planted> {
    let postgres = PrivatePostgres::launch(Version::V15, Settings::fast()).await;
    let env = TestEnv::on(kind, postgres.fresh_database().await)?;
    env.ok(&["migrate", "up"])?;
    env.config(FILE_SINK)?;
    env.subscribe()?;
    let writer = env.client().await?;
    writer.batch_execute("ALTER SYSTEM SET synchronous_standby_names = 'away'").await?;
    writer.batch_execute("SELECT pg_reload_conf()").await?;
    // The server reads its settings some time later.
    let writes: JoinHandle<Result<()>> = tokio::spawn(async move {
        loop {
            writer.batch_execute("INSERT INTO postbox.outbox (topic, payload) VALUES ('order.paid', '{}')").await?;
        }
    });
    Ok(Planted::of(env, FILE_SINK).keeping(writes).keeping(postgres))
}

/// While a service has it open: a new file would be the end of what only the open one holds.
async fn a_file_that_was_moved(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, FILE_SINK).await?.served().await?;
    planted.served[0].logged("lane taken", 1).await?;
    let planted = planted.three().await?;
    std::fs::rename(planted.env.path("postbox.db"), planted.env.path("moved.db"))?;
    Ok(planted)
}

async fn a_dump_of_another_cluster(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, FILE_SINK).await?.three().await?;
    planted.env.dispatch(&[])?;
    planted.env.sql("UPDATE postbox.lane SET cluster = cluster - 1").await?;
    let said = planted.env.refuses(1, &["stats"])?;
    ensure!(said.contains("(cursor_foreign)"), "{said}");
    let said = planted.env.said(&["doctor"])?;
    ensure!(!said.contains("nothing is pending"), "{said}");
    Ok(planted)
}

async fn an_index_that_was_dropped(kind: Kind) -> Result<Planted> {
    found_by_validate(kind, "DROP INDEX postbox_delivery_key", "CREATE INDEX postbox_delivery_key ON").await
}

async fn a_schema_that_is_open_to_others(kind: Kind) -> Result<Planted> {
    found_by_validate(kind, "GRANT CREATE ON SCHEMA postbox TO PUBLIC", "PUBLIC may create objects").await
}

/// Changes the schema of a store that is in use, and checks what `migrate validate` says of it.
async fn found_by_validate(kind: Kind, change: &str, wanted: &str) -> Result<Planted> {
    let planted = Planted::new(kind, FILE_SINK).await?.three().await?;
    planted.env.dispatch(&[])?;
    planted.env.sql(change).await?;
    let said = planted.env.refuses(1, &["migrate", "validate"])?;
    ensure!(said.contains(wanted), "{said}");
    Ok(planted)
}

/// `migrate up` creates nothing in its place, and does not call the schema up to date.
async fn a_log_that_was_moved(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, FILE_SINK).await?.three().await?;
    planted.env.dispatch(&[])?;
    planted.env.sql("CREATE SCHEMA attic; ALTER TABLE OUTBOX SET SCHEMA attic").await?;
    for command in [&["migrate", "validate"][..], &["migrate", "up"], &["migrate", "up", "--log", "outbox"]] {
        let output = planted.env.output(command)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(
            !output.status.success() && said.contains("ALTER TABLE OTHER.outbox SET SCHEMA"),
            "{command:?}: {said}"
        );
    }
    let said = planted.env.said(&["doctor"])?;
    ensure!(said.contains("SET SCHEMA") && !said.contains("migrate up"), "{said}");
    Ok(planted)
}

async fn an_older_log_with_newer_cursors(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, FILE_SINK).await?.three().await?;
    planted.env.dispatch(&[])?;
    planted.env.sql("UPDATE postbox_lane SET position = 1000, window_end = 1000").await?;
    Ok(planted)
}

/// While nothing is in flight: the relay can only fail to renew its lanes.
async fn a_file_that_another_program_locks(kind: Kind) -> Result<Planted> {
    let endpoint = Endpoint::start(takes_all)?;
    let planted = Planted::new(kind, endpoint.subscription("out")).await?.served().await?;
    planted.served[0].logged("lane taken", 1).await?;
    let holder = rusqlite::Connection::open(planted.env.path("postbox.db"))?;
    holder.execute_batch("BEGIN IMMEDIATE")?;
    Ok(planted.keeping(holder).keeping(endpoint))
}

/// What was written since it began stays in the write-ahead log. Without it, the file is as large
/// after a large commit, and nothing is wrong.
async fn a_reader_that_nobody_ended(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, FILE_SINK).await?.three().await?;
    planted.env.dispatch(&[])?;
    let open = || rusqlite::Connection::open(planted.env.path("postbox.db"));
    let (reader, writer) = (open()?, open()?);
    let fill = "INSERT INTO mine WITH RECURSIVE n(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < 260)
         SELECT zeroblob(1048576) FROM n";
    writer.execute_batch(&format!("CREATE TABLE mine (b); {fill}"))?;
    let bytes = std::fs::metadata(planted.env.path("postbox.db-wal"))?.len();
    let said = planted.env.output(&["doctor", "--json"])?.stdout;
    let said = String::from_utf8_lossy(&said);
    ensure!(bytes > 256 << 20 && said.contains("code") && !said.contains("wal_grows"), "{bytes}: {said}");
    reader.execute_batch("BEGIN")?;
    reader.query_row("SELECT count(*) FROM postbox_outbox", [], |row| row.get::<_, i64>(0))?;
    writer.execute_batch(fill)?;
    Ok(planted.keeping(reader).keeping(writer))
}

async fn a_function_that_fails(kind: Kind) -> Result<Planted> {
    let endpoint = Endpoint::start(takes_all)?;
    let planted = Planted::new(kind, endpoint.subscription("out")).await?.served().await?;
    planted.served[0].logged("lane taken", 1).await?;
    let body = WINDOW_PARAMETERS;
    let sql = format!(
        "ALTER FUNCTION postbox.outbox_window RENAME TO kept;
         CREATE FUNCTION postbox.outbox_window{body} RETURNS SETOF record LANGUAGE plpgsql AS
         $$ BEGIN RAISE EXCEPTION 'broken' USING ERRCODE = 'XX000'; END $$;"
    );
    planted.env.sql(&sql).await?;
    Ok(planted.three().await?.keeping(endpoint))
}

/// Somebody deletes a pending event from the log.
async fn an_event_that_is_gone(kind: Kind) -> Result<Planted> {
    let refusing = Endpoint::start(|_| (500, std::time::Duration::ZERO))?;
    let planted =
        Planted::new(kind, refusing.subscription("out") + "retry = { base = \"1h\", max = \"1h\" }\n").await?;
    let planted = planted.three().await?;
    ensure!(planted.env.dispatch(&[])?.contains("failed="));
    let trigger = if kind == Kind::Postgres { "ALTER TABLE OUTBOX DISABLE TRIGGER USER; " } else { "" };
    planted.env.sql(&format!("{trigger}DELETE FROM OUTBOX")).await?;
    planted.env.ok(&["retry", "--all"])?;
    Ok(planted.served().await?.keeping(refusing))
}

async fn an_event_that_nobody_can_read(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, FILE_SINK).await?;
    let (lift, time, back) = match kind {
        Kind::Postgres => {
            ("ALTER TABLE OUTBOX DROP CONSTRAINT event_invalid;", "'infinity'", "SELECT postbox.guard_log('outbox')")
        }
        Kind::Sqlite => ("PRAGMA ignore_check_constraints = ON;", "'a text'", ""),
    };
    planted
        .env
        .sql(&format!("{lift} INSERT INTO OUTBOX (topic, payload, occurred_at) VALUES ('t', '{{}}', {time}); {back}"))
        .await?;
    planted.served().await
}
