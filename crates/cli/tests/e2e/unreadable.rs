//! Events that nobody can read: rows with values no event can have, and rows that somebody deleted. Each concerns itself only.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postbox_testkit::servers::Postgres;

use crate::endpoint::{Endpoint, firsts};
use crate::room::{Kind, Room, on_both};

/// Long enough for any command here, and far shorter than a test may take: one that never ends is a failure, not a wait.
const PATIENCE: Duration = Duration::from_secs(30);

/// A command that must end with 0, in time; gives what it printed.
async fn done(room: &Room, args: &[&str]) -> Result<String> {
    let mut command = tokio::process::Command::from(room.command(args));
    let output = tokio::time::timeout(PATIENCE, command.kill_on_drop(true).output()).await;
    let output = output.with_context(|| format!("postbox {args:?} does not end"))??;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "postbox {args:?} ended with {}: {stderr}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}

/// What `doctor` says, whatever it finds.
async fn doctor(room: &Room) -> Result<String> {
    let mut command = tokio::process::Command::from(room.command(&["doctor"]));
    let output = tokio::time::timeout(PATIENCE, command.kill_on_drop(true).output()).await;
    Ok(String::from_utf8(output.context("doctor does not end")??.stdout)?)
}

/// The code of every dead event.
async fn dead_codes(room: &Room) -> Result<Vec<String>> {
    let dead: Vec<serde_json::Value> =
        serde_json::from_str(&done(room, &["list", "--state", "dead", "--json"]).await?)?;
    Ok(dead.iter().map(|record| record["code"].as_str().unwrap_or("none").to_owned()).collect())
}

fn takes_all(_key: &str) -> (u16, Duration) {
    (204, Duration::ZERO)
}

fn refuses_bad(key: &str) -> (u16, Duration) {
    (if key == "bad" { 500 } else { 204 }, Duration::ZERO)
}

fn to(endpoint: &Endpoint) -> String {
    format!(
        "[subscriptions.out]\nsink = {{ type = \"http\", url = \"{}\", allow = [\"127.0.0.1\"] }}\n",
        endpoint.url()
    )
}

/// Rows that came past every CHECK, one for each column that can hold what no event can have.
fn plant(kind: Kind) -> (String, usize) {
    let good = |n: u32| format!("INSERT INTO OUTBOX (topic, key, payload) VALUES ('t', 'k', '{{\"n\":{n}}}');\n");
    let odd: Vec<(&str, &str)> = match kind {
        Kind::Postgres => vec![
            ("created_at", "'infinity'"),
            ("created_at", "'-infinity'"),
            ("created_at", "'290000-01-01'"),
            ("occurred_at", "'infinity'"),
            ("deliver_at", "'infinity'"),
            ("deliver_at", "'290000-01-01'"),
            ("headers", "'[1]'"),
        ],
        Kind::Sqlite => vec![
            ("created_at", "'a text'"),
            ("created_at", "9223372036854775807"),
            ("created_at", "0.5"),
            ("occurred_at", "'a text'"),
            ("deliver_at", "'a text'"),
            ("version", "'a text'"),
            ("headers", "'[1]'"),
            ("key", "CAST(x'FF' AS TEXT)"),
            ("topic", "CAST(x'FF' AS TEXT)"),
        ],
    };
    let mut sql = match kind {
        Kind::Postgres => "ALTER TABLE OUTBOX DROP CONSTRAINT event_invalid;\n".to_owned(),
        Kind::Sqlite => "PRAGMA ignore_check_constraints = ON;\n".to_owned(),
    };
    sql += &good(1);
    for (column, value) in &odd {
        let columns = ["topic", "key", "payload"].map(|name| if name == *column { "NULL" } else { name });
        let values: Vec<String> = columns
            .iter()
            .map(|name| match *name {
                "topic" => "'t'".to_owned(),
                "key" => "'k'".to_owned(),
                "payload" => "'{\"n\":-1}'".to_owned(),
                _ => (*value).to_owned(),
            })
            .collect();
        let values = values.join(", ");
        sql += &match columns.contains(&"NULL") {
            true => format!("INSERT INTO OUTBOX (topic, key, payload) VALUES ({values});\n"),
            false => format!("INSERT INTO OUTBOX (topic, key, payload, {column}) VALUES ({values}, {value});\n"),
        };
    }
    (sql + &good(2), odd.len())
}

async fn a_row_nobody_can_read_is_one_dead_event(kind: Kind) -> Result<()> {
    let room = Room::migrated(kind).await?;
    let endpoint = Endpoint::start(takes_all)?;
    room.config(&to(&endpoint))?;
    let (sql, odd) = plant(kind);
    room.sql(&sql).await?;
    // They are looked at as pending ones first.
    done(&room, &["dispatch", "--limit", "1"]).await?;
    let pending: Vec<serde_json::Value> =
        serde_json::from_str(&done(&room, &["list", "--state", "pending", "--json"]).await?)?;
    ensure!(pending.len() == odd + 1, "{pending:?}");
    ensure!(pending.iter().filter(|record| record["code"] == "row_undecodable").count() >= odd - 1, "{pending:?}");
    ensure!(doctor(&room).await?.contains("pending, the oldest for"));

    let became = done(&room, &["dispatch"]).await?;
    ensure!(became.trim_end().ends_with(&format!("dead={odd}")), "{became}");
    endpoint.until("the events around them", |arrivals| firsts(arrivals, "k") == [1, 2]).await?;
    ensure!(endpoint.count() == 2, "nothing else was sent: {:?}", endpoint.arrivals());
    ensure!(done(&room, &["stats"]).await? == format!("pending=0 dispatched=2 dead={odd} total={}\n", odd + 2));
    let codes = dead_codes(&room).await?;
    ensure!(codes.iter().filter(|code| *code == "row_undecodable").count() >= odd - 1, "{codes:?}");
    let dead: Vec<serde_json::Value> =
        serde_json::from_str(&done(&room, &["list", "--state", "dead", "--json"]).await?)?;
    let ids: Vec<&str> = dead.iter().filter_map(|record| record["event"]["id"].as_str()).collect();
    ensure!(ids.len() == odd && ids.iter().all(|id| !id.starts_with("00000000")), "each has its id: {ids:?}");
    for id in &ids {
        done(&room, &["show", id]).await?;
    }
    ensure!(doctor(&room).await?.contains(&format!("{odd} dead: row_undecodable")));

    // A replay does not help, and does no harm; a discard takes them out.
    ensure!(done(&room, &["retry", "--all"]).await? == format!("retried={odd}\n"));
    ensure!(done(&room, &["dispatch"]).await?.trim_end().ends_with(&format!("dead={odd}")));
    ensure!(done(&room, &[&["discard"], ids.as_slice()].concat()).await? == format!("discarded={odd}\n"));
    ensure!(done(&room, &["stats"]).await? == format!("pending=0 dispatched=2 dead=0 total={}\n", odd + 2));
    room.sql("INSERT INTO OUTBOX (topic, key, payload) VALUES ('t', 'k', '{\"n\":3}')").await?;
    done(&room, &["dispatch"]).await?;
    endpoint.until("what came later", |arrivals| firsts(arrivals, "k") == [1, 2, 3]).await?;
    Ok(())
}

/// How somebody empties a log behind the relay's back.
async fn deleted_behind_the_relay(kind: Kind, delete: &str) -> Result<()> {
    let room = Room::migrated(kind).await?;
    let endpoint = Endpoint::start(refuses_bad)?;
    room.config(&format!(
        "[subscriptions.out]\nsink = {{ type = \"http\", url = \"{}\", allow = [\"127.0.0.1\"] }}\nretry = {{ base = \"200ms\", max = \"200ms\", max_attempts = 1000 }}\n",
        endpoint.url()
    ))?;
    let relay = room.serve().await?;
    let fill = |from: u32| -> String {
        (from..from + 3)
            .map(|n| format!("INSERT INTO OUTBOX (topic, key, payload) VALUES ('t', 'bad', '{{\"n\":{n}}}');\n"))
            .collect()
    };
    room.sql(&fill(1)).await?;
    endpoint.until("the first attempt", |arrivals| !arrivals.is_empty()).await?;
    until(&room, "one retries, two wait behind it", "pending=3 ").await?;
    room.sql(delete).await?;
    let stats = until(&room, "all three are closed", "pending=0 ").await?;
    ensure!(stats == "pending=0 dispatched=0 dead=3 total=3\n", "{stats}");
    ensure!(dead_codes(&room).await? == ["event_missing"; 3]);
    if kind == Kind::Postgres {
        ensure_no_spin(&room).await?;
    }
    // Its key goes on.
    let seen = endpoint.count();
    room.sql("INSERT INTO OUTBOX (topic, key, payload) VALUES ('t', 'bad', '{\"n\":9}')").await?;
    endpoint.until("the next of the key", |arrivals| arrivals[seen..].iter().any(|arrival| arrival.n == 9)).await?;
    relay.terminate().await?;
    // A replay finds nothing to send; then they are pruned.
    ensure!(done(&room, &["retry", "--all", "--code", "event_missing"]).await? == "retried=3\n");
    done(&room, &["dispatch"]).await?;
    ensure!(dead_codes(&room).await? == ["event_missing"; 3]);
    done(&room, &["prune", "--older-than", "0s"]).await?;
    ensure!(dead_codes(&room).await?.is_empty());
    Ok(())
}

async fn until(room: &Room, what: &str, wanted: &str) -> Result<String> {
    let stats = async {
        loop {
            let stats = done(room, &["stats"]).await?;
            if stats.starts_with(wanted) {
                return Ok::<_, anyhow::Error>(stats);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let waited = tokio::time::timeout(PATIENCE, stats).await;
    match waited {
        Ok(stats) => stats,
        Err(_) => anyhow::bail!("{what}: never; {}", done(room, &["stats"]).await?),
    }
}

/// An idle relay looks a few times a second; one that spins, more than a thousand times.
async fn ensure_no_spin(room: &Room) -> Result<()> {
    let commits = || -> Result<u64> {
        let sql = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()";
        Ok(Postgres::psql(&room.url, sql).trim().parse()?)
    };
    // The server's counts are late by a second or so.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let before = commits()?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let per_second = (commits()? - before) / 3;
    ensure!(per_second < 300, "{per_second} transactions a second by an idle relay");
    Ok(())
}

async fn events_deleted_from_the_log_free_their_key(kind: Kind) -> Result<()> {
    deleted_behind_the_relay(kind, "DELETE FROM OUTBOX").await
}

on_both!(a_row_nobody_can_read_is_one_dead_event, events_deleted_from_the_log_free_their_key);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_truncated_log_frees_its_keys() -> Result<()> {
    deleted_behind_the_relay(Kind::Postgres, "TRUNCATE OUTBOX").await
}

/// A database that was made with no encoding and is called UTF8 now holds bytes that are no text; and the storage of a large payload is damaged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_are_no_text_and_damaged_storage_are_dead_events() -> Result<()> {
    let room = Room::migrated(Kind::Postgres).await?;
    let endpoint = Endpoint::start(takes_all)?;
    room.config(&to(&endpoint))?;
    room.sql(
        "ALTER TABLE OUTBOX DROP CONSTRAINT event_invalid;
         INSERT INTO OUTBOX (topic, key, payload) VALUES ('t', 'k', '{\"n\":1}');
         -- A cast without a function takes the bytes as they are.
         CREATE CAST (bytea AS text) WITHOUT FUNCTION;
         INSERT INTO OUTBOX (topic, key, payload, aggregate) VALUES ('t', 'k', '{\"n\":-1}', ('\\x61ff62'::bytea)::text);
         INSERT INTO OUTBOX (topic, key, payload) VALUES ('t', ('\\xff'::bytea)::text, '{\"n\":-2}');
         DROP CAST (bytea AS text);
         -- One payload that comes with its row if it is whole, one that is fetched apart, one in pieces.
         ALTER TABLE OUTBOX ALTER COLUMN payload SET STORAGE EXTERNAL;
         INSERT INTO OUTBOX (topic, key, payload) SELECT 't', 'k', repeat('x', n) FROM unnest(ARRAY[3000, 100000, 3000000]) AS n;
         CREATE EXTENSION pg_surgery;
         DO $$
         DECLARE
           toast regclass := (SELECT reltoastrelid FROM pg_class WHERE oid = 'OUTBOX'::regclass);
           places tid[];
         BEGIN
           EXECUTE 'SELECT array_agg(ctid) FROM ' || toast INTO places;
           PERFORM heap_force_kill(toast, places);
         END $$;
         INSERT INTO OUTBOX (topic, key, payload) VALUES ('t', 'k', '{\"n\":2}');",
    )
    .await?;
    let became = done(&room, &["dispatch"]).await?;
    ensure!(became.trim_end().ends_with("dispatched=2 failed=0 dead=5"), "{became}");
    ensure!(dead_codes(&room).await? == ["row_undecodable"; 5]);
    ensure!(firsts(&endpoint.arrivals(), "k") == [1, 2]);
    ensure!(done(&room, &["stats"]).await? == "pending=0 dispatched=2 dead=5 total=7\n");
    ensure!(doctor(&room).await?.contains("5 dead: row_undecodable"));
    Ok(())
}

/// The store is there and refuses every read: for everybody who asks, the lane is named, with its code and since when.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lane_that_keeps_failing_is_named_everywhere() -> Result<()> {
    let room = Room::migrated(Kind::Postgres).await?;
    let endpoint = Endpoint::start(takes_all)?;
    room.config(&to(&endpoint))?;
    let relay = room.serve().await?;
    let body = "(inline_max int, rows_max bigint, of_lane int, lane_count int, topic_likes text[], of_tenant text, of_subscription int,
      under_epoch bigint, under_revision int, last_place text, last_snap text, last_settled bigint, read_after bigint)";
    room.sql(&format!(
        "ALTER FUNCTION postbox.outbox_window RENAME TO kept;
         CREATE FUNCTION postbox.outbox_window{body} RETURNS SETOF record LANGUAGE plpgsql AS
         $$ BEGIN RAISE EXCEPTION 'broken' USING ERRCODE = 'XX000'; END $$;"
    ))
    .await?;
    let why = "out: lane 0 cannot be read or settled since";
    let ready = until_ready(&relay.address, |page| page.contains(why)).await?;
    ensure!(ready.contains("last reason: store_error") && ready.starts_with("HTTP/1.1 503"), "{ready}");
    let metrics = get(&relay.address, "/metrics").await?;
    let gauge = "postbox_lane_failing_since_seconds{subscription=\"out\",lane=\"0\",code=\"store_error\"}";
    ensure!(metrics.contains(gauge), "{metrics}");
    room.config(&format!("{}[server]\nlisten = {:?}\n", to(&endpoint), relay.address))?;
    ensure!(doctor(&room).await?.contains("lane 0 cannot be read or settled"));
    room.sql(
        "DROP FUNCTION postbox.outbox_window; ALTER FUNCTION postbox.kept RENAME TO outbox_window;
         INSERT INTO OUTBOX (topic, key, payload) VALUES ('t', 'k', '{\"n\":1}')",
    )
    .await?;
    endpoint.until("what came meanwhile", |arrivals| firsts(arrivals, "k") == [1]).await?;
    until_ready(&relay.address, |page| page.starts_with("HTTP/1.1 200")).await?;
    ensure!(!get(&relay.address, "/metrics").await?.contains(gauge));
    relay.terminate().await?;
    Ok(())
}

/// A count that waits costs its own figures and no others, however many ask.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_are_there_while_the_database_is_not() -> Result<()> {
    let room = Room::migrated(Kind::Postgres).await?;
    let endpoint = Endpoint::start(takes_all)?;
    room.config(&to(&endpoint))?;
    room.insert_three().await?;
    let relay = room.serve().await?;
    endpoint.until("the three", |arrivals| arrivals.len() == 3).await?;
    let (holder, connection) = tokio_postgres::connect(&room.url, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    holder.batch_execute("BEGIN; LOCK TABLE postbox.outbox IN ACCESS EXCLUSIVE MODE").await?;
    let scrapes = (0..4).map(|_| tokio::time::timeout(PATIENCE, get(&relay.address, "/metrics")));
    for page in futures::future::join_all(scrapes).await {
        let page = page.context("a scrape hangs")??;
        ensure!(page.contains("\npostbox_store_up 0\n") && !page.contains("\npostbox_depth{"), "{page}");
        ensure!(
            page.contains("\npostbox_delivered_total{subscription=\"out\"} ") && page.ends_with("# EOF\n"),
            "{page}"
        );
    }
    holder.batch_execute("COMMIT").await?;
    let counted = async {
        while !get(&relay.address, "/metrics")
            .await?
            .contains("\npostbox_events{subscription=\"out\",state=\"dispatched\"} 3\n")
        {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(PATIENCE, counted).await.context("it was never counted again")??;
    relay.terminate().await?;
    Ok(())
}

async fn get(address: &str, path: &str) -> Result<String> {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = tokio::net::TcpStream::connect(address).await?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

async fn until_ready(address: &str, wanted: impl Fn(&str) -> bool) -> Result<String> {
    let asked = async {
        loop {
            let page = get(address, "/readyz").await?;
            if wanted(&page) {
                return Ok::<_, anyhow::Error>(page);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(PATIENCE, asked).await.context("/readyz never said so")?
}
