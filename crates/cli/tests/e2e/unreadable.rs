//! Unreadable events: rows with values that no event can have, and deleted rows. They harm no other
//! event.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postbox_testkit::servers::Postgres;

use crate::endpoint::{Endpoint, firsts, takes_all};
use crate::env::{DEADLINE, Kind, TestEnv, WINDOW_PARAMETERS, cases, get, on_both, until};

/// The code of every dead event.
fn dead_codes(env: &TestEnv) -> Result<Vec<String>> {
    let dead = env.json(&["list", "--state", "dead", "--json"])?;
    let records = dead.as_array().context("a list")?;
    Ok(records.iter().map(|record| record["code"].as_str().unwrap_or("none").to_owned()).collect())
}

fn refuses_bad(key: &str) -> (u16, Duration) {
    (if key == "bad" { 500 } else { 204 }, Duration::ZERO)
}

/// Rows that bypassed every CHECK, one for each column that can hold an invalid value.
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
            ("expires_at", "'infinity'"),
            ("headers", "'[1]'"),
        ],
        Kind::Sqlite => vec![
            ("created_at", "'a text'"),
            ("created_at", "9223372036854775807"),
            ("created_at", "0.5"),
            ("occurred_at", "'a text'"),
            ("deliver_at", "'a text'"),
            ("expires_at", "'a text'"),
            ("version", "'a text'"),
            ("headers", "'[1]'"),
            ("key", "CAST(x'FF' AS TEXT)"),
            ("topic", "CAST(x'FF' AS TEXT)"),
            ("tenant", "CAST(x'61FF' AS TEXT)"),
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
    let endpoint = Endpoint::start(takes_all)?;
    let env = TestEnv::with(kind, &endpoint.subscription("out")).await?;
    let (sql, odd) = plant(kind);
    env.sql(&sql).await?;
    // First they are looked at as pending events.
    env.ok(&["dispatch", "--limit", "1"])?;
    let pending = env.json(&["list", "--state", "pending", "--json"])?;
    let pending = pending.as_array().context("a list")?;
    ensure!(pending.len() == odd + 1, "{pending:?}");
    ensure!(pending.iter().filter(|record| record["code"] == "row_undecodable").count() >= odd - 1, "{pending:?}");
    ensure!(env.said(&["doctor"])?.contains("pending, the oldest for"));

    let became = env.ok(&["dispatch"])?;
    ensure!(became.trim_end().ends_with(&format!("dead={odd}")), "{became}");
    endpoint.until("the events around them", |arrivals| firsts(arrivals, "k") == [1, 2]).await?;
    ensure!(endpoint.count() == 2, "nothing else was sent: {:?}", endpoint.arrivals());
    ensure!(env.ok(&["stats"])? == format!("pending=0 dispatched=2 dead={odd} total={}\n", odd + 2));
    let codes = dead_codes(&env)?;
    ensure!(codes.iter().filter(|code| *code == "row_undecodable").count() >= odd - 1, "{codes:?}");
    let dead = env.json(&["list", "--state", "dead", "--json"])?;
    let dead = dead.as_array().context("a list")?;
    let ids: Vec<&str> = dead.iter().filter_map(|record| record["event"]["id"].as_str()).collect();
    ensure!(ids.len() == odd && ids.iter().all(|id| !id.starts_with("00000000")), "each has its id: {ids:?}");
    for id in &ids {
        env.ok(&["show", id])?;
    }
    ensure!(env.said(&["doctor"])?.contains(" dead: row_undecodable"));
    for (change, changed) in [("retry", "retried"), ("discard", "discarded"), ("mark-dead", "marked_dead")] {
        let said = env.ok(&[change, "--tenant", "acme", "--dry-run"])?;
        ensure!(said.contains(&format!("{changed}=0")), "no event is of this tenant: {said}");
    }

    // A retry does not help and does no harm; a discard removes them.
    ensure!(env.ok(&["retry", "--all"])? == format!("retried={odd}\n"));
    ensure!(env.ok(&["dispatch"])?.trim_end().ends_with(&format!("dead={odd}")));
    ensure!(env.ok(&[&["discard"], ids.as_slice()].concat())? == format!("discarded={odd}\n"));
    ensure!(env.ok(&["stats"])? == format!("pending=0 dispatched=2 dead=0 total={}\n", odd + 2));
    env.sql("INSERT INTO OUTBOX (topic, key, payload) VALUES ('t', 'k', '{\"n\":3}')").await?;
    env.ok(&["dispatch"])?;
    endpoint.until("what came later", |arrivals| firsts(arrivals, "k") == [1, 2, 3]).await?;
    Ok(())
}

/// Somebody deletes events from a log while the relay runs.
async fn deleted_behind_the_relay(kind: Kind, delete: &str) -> Result<()> {
    let endpoint = Endpoint::start(refuses_bad)?;
    let retry = "retry = { base = \"200ms\", max = \"200ms\", max_attempts = 1000 }\n";
    let env = TestEnv::with(kind, &(endpoint.subscription("out") + retry)).await?;
    let relay = env.serve().await?;
    env.insert((1..4).map(|n| ("t", "bad".to_owned(), n))).await?;
    endpoint.until("the first attempt", |arrivals| !arrivals.is_empty()).await?;
    let stats = async |wanted: &str| anyhow::Ok(Some(env.ok(&["stats"])?).filter(|stats| stats.starts_with(wanted)));
    until("one retries, two wait behind it", async || stats("pending=3 ").await).await?;
    env.sql(delete).await?;
    let closed = until("all three are closed", async || stats("pending=0 ").await).await?;
    ensure!(closed == "pending=0 dispatched=0 dead=3 total=3\n", "{closed}");
    ensure!(dead_codes(&env)? == ["event_missing"; 3]);
    if kind == Kind::Postgres {
        ensure_no_spin(&env).await?;
    }
    // Their key continues.
    let seen = endpoint.count();
    env.sql("INSERT INTO OUTBOX (topic, key, payload) VALUES ('t', 'bad', '{\"n\":9}')").await?;
    endpoint.until("the next of the key", |arrivals| arrivals[seen..].iter().any(|arrival| arrival.n == 9)).await?;
    relay.terminate().await?;
    // A retry finds nothing to send; then they are pruned.
    ensure!(env.ok(&["retry", "--all", "--code", "event_missing"])? == "retried=3\n");
    env.ok(&["dispatch"])?;
    ensure!(dead_codes(&env)? == ["event_missing"; 3]);
    env.ok(&["prune", "--older-than", "0s"])?;
    ensure!(dead_codes(&env)?.is_empty());
    Ok(())
}

/// An idle relay reads a few times a second; one that spins, more than a thousand times.
async fn ensure_no_spin(env: &TestEnv) -> Result<()> {
    let commits = || -> Result<u64> {
        let sql = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()";
        Ok(Postgres::psql(&env.url, sql).trim().parse()?)
    };
    // The server's statistics lag by about a second.
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

cases! {
    a_truncated_log_frees_its_keys => deleted_behind_the_relay(Kind::Postgres, "TRUNCATE OUTBOX");
}

/// Bytes that are not text, as in a database that once had no encoding, and damaged large payloads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_are_no_text_and_damaged_storage_are_dead_events() -> Result<()> {
    let endpoint = Endpoint::start(takes_all)?;
    let env = TestEnv::with(Kind::Postgres, &endpoint.subscription("out")).await?;
    env.sql(
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
    let became = env.ok(&["dispatch"])?;
    ensure!(became.trim_end().ends_with("dispatched=2 failed=0 dead=5"), "{became}");
    ensure!(dead_codes(&env)? == ["row_undecodable"; 5]);
    ensure!(firsts(&endpoint.arrivals(), "k") == [1, 2]);
    ensure!(env.ok(&["stats"])? == "pending=0 dispatched=2 dead=5 total=7\n");
    ensure!(env.said(&["doctor"])?.contains("5 dead: row_undecodable"));
    Ok(())
}

/// The store rejects every read: `/readyz`, metrics and doctor name the lane and its code.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lane_that_keeps_failing_is_named_everywhere() -> Result<()> {
    let endpoint = Endpoint::start(takes_all)?;
    let env = TestEnv::with(Kind::Postgres, &endpoint.subscription("out")).await?;
    let relay = env.serve().await?;
    let body = WINDOW_PARAMETERS;
    env.sql(&format!(
        "ALTER FUNCTION postbox.outbox_window RENAME TO kept;
         CREATE FUNCTION postbox.outbox_window{body} RETURNS SETOF record LANGUAGE plpgsql AS
         $$ BEGIN RAISE EXCEPTION 'broken' USING ERRCODE = 'XX000'; END $$;"
    ))
    .await?;
    let why = "out: lane 0 has failed to read or settle since";
    let ready = async |wanted: &str| {
        let page = get(&relay.address, "/readyz", "").await?;
        anyhow::Ok(Some(page).filter(|page| page.contains(wanted)))
    };
    let ready_page = until("/readyz names the lane", async || ready(why).await).await?;
    ensure!(ready_page.contains("last reason: store_error"), "{ready_page}");
    ensure!(ready_page.starts_with("HTTP/1.1 503"), "{ready_page}");
    let metrics = get(&relay.address, "/metrics", "").await?;
    let gauge = "postbox_lane_failing_since_seconds{subscription=\"out\",lane=\"0\",code=\"store_error\"}";
    ensure!(metrics.contains(gauge), "{metrics}");
    env.config(&format!("{}[server]\nlisten = {:?}\n", endpoint.subscription("out"), relay.address))?;
    ensure!(env.said(&["doctor"])?.contains("lane 0 has failed to read or settle"));
    // A full database answers reads of its state, and accepts no work.
    env.sql(&format!(
        "DROP FUNCTION postbox.outbox_window;
         CREATE FUNCTION postbox.outbox_window{body} RETURNS SETOF postbox.outbox LANGUAGE plpgsql AS
         $$ BEGIN RAISE EXCEPTION 'no space left on device' USING ERRCODE = '53100'; END $$;"
    ))
    .await?;
    let full = until("/readyz names the reason", async || ready("last reason: store_full").await).await?;
    ensure!(full.starts_with("HTTP/1.1 503") && full.contains(why), "{full}");
    env.sql(
        "DROP FUNCTION postbox.outbox_window; ALTER FUNCTION postbox.kept RENAME TO outbox_window;
         INSERT INTO OUTBOX (topic, key, payload) VALUES ('t', 'k', '{\"n\":1}')",
    )
    .await?;
    endpoint.until("what came meanwhile", |arrivals| firsts(arrivals, "k") == [1]).await?;
    until("/readyz is well again", async || ready("HTTP/1.1 200").await).await?;
    ensure!(!get(&relay.address, "/metrics", "").await?.contains(gauge));
    relay.terminate().await?;
    Ok(())
}

/// A count that waits for a lock costs only its own figures, however many requests there are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_are_there_while_a_count_waits() -> Result<()> {
    let endpoint = Endpoint::start(takes_all)?;
    let env = TestEnv::with(Kind::Postgres, &endpoint.subscription("out")).await?;
    env.insert_three().await?;
    let relay = env.serve().await?;
    endpoint.until("the three", |arrivals| arrivals.len() == 3).await?;
    let holder = env.client().await?;
    holder.batch_execute("BEGIN; LOCK TABLE postbox.outbox IN ACCESS EXCLUSIVE MODE").await?;
    let scrapes = (0..4).map(|_| tokio::time::timeout(DEADLINE, get(&relay.address, "/metrics", "")));
    for page in futures::future::join_all(scrapes).await {
        let page = page.context("a scrape hangs")??;
        ensure!(page.contains("\npostbox_store_up 1\n") && !page.contains("\npostbox_depth{"), "{page}");
        ensure!(page.contains("\npostbox_stats_up{subscription=\"out\"} 0\n"), "{page}");
        ensure!(
            page.contains("\npostbox_delivered_total{subscription=\"out\"} ") && page.ends_with("# EOF\n"),
            "{page}"
        );
    }
    holder.batch_execute("COMMIT").await?;
    let counted = "\npostbox_events{subscription=\"out\",state=\"dispatched\"} 3\n";
    until("they are counted again", async || {
        let page = get(&relay.address, "/metrics", "").await?;
        anyhow::Ok(page.contains(counted).then_some(()))
    })
    .await?;
    relay.terminate().await?;
    Ok(())
}
