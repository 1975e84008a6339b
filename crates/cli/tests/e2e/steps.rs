//! Changes of many events: in steps, with a count that is right however they end.

use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};

use crate::room::{DEADLINE, Kind, Room, on_both, signal};

/// More than two steps.
const MANY: usize = 2_500;

/// A subscription with so many dead events. They died by SQL: a target that refuses them all would take its time.
async fn with_dead(kind: Kind, events: usize) -> Result<Room> {
    let room = Room::migrated(kind).await?;
    room.config("[subscriptions.out]\nsink = { type = \"file\", path = \"out.jsonl\" }\n")?;
    let rows = format!(
        "WITH RECURSIVE up(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM up WHERE n < {events})
         INSERT INTO OUTBOX (topic, key, payload) SELECT 'order.placed', 'k' || n, '{{}}' FROM up"
    );
    room.sql(&rows).await?;
    ensure!(room.dispatch(&[])? == format!("dispatched={events} failed=0 dead=0"));
    room.sql(match kind {
        Kind::Sqlite => {
            "INSERT INTO postbox_delivery (subscription, seq, lane, id, topic, key, created_at, state, holds, attempts, updated_at)
             SELECT 'out', seq, 0, id, topic, key, created_at, 'dead', 0, 1, created_at FROM OUTBOX"
        }
        Kind::Postgres => {
            "INSERT INTO postbox.delivery (subscription, lane, seq, key, state, ordered)
             SELECT s.id, 0, l.seq, l.key, 'dead', true FROM OUTBOX AS l, postbox.subscription AS s"
        }
    })
    .await?;
    ensure!(dead(&room)? == events);
    Ok(room)
}

fn dead(room: &Room) -> Result<usize> {
    let stats: serde_json::Value = serde_json::from_str(&room.ok(&["stats", "--json"])?)?;
    Ok(usize::try_from(stats[0]["dead"].as_u64().context("no count")?)?)
}

async fn many_events_are_retried_and_discarded(kind: Kind) -> Result<()> {
    let room = with_dead(kind, MANY).await?;
    let listed = room.ok(&["list", "--state", "dead", "--limit", "1200"])?;
    let ids: Vec<&str> = listed.lines().filter_map(|line| line.split('\t').next()).collect();
    ensure!(room.ok(&[&["discard"], &ids[..]].concat())? == "discarded=1200\n");
    ensure!(room.ok(&["retry", "--all", "--limit", "1100"])? == "retried=1100\n");
    ensure!(dead(&room)? == MANY - 1200 - 1100);
    ensure!(room.ok(&["retry", "--all"])? == "retried=200\n");
    ensure!(room.dispatch(&[])? == "dispatched=1300 failed=0 dead=0");
    Ok(())
}

/// The database refuses a row of the second step.
async fn a_retry_that_fails_midway_says_how_much_it_did(kind: Kind) -> Result<()> {
    let room = with_dead(kind, MANY).await?;
    room.sql(match kind {
        Kind::Sqlite => {
            "CREATE TRIGGER no BEFORE UPDATE ON postbox_delivery WHEN NEW.key = 'k1500' BEGIN SELECT RAISE(ABORT, 'not this one'); END"
        }
        Kind::Postgres => {
            "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$;
             CREATE TRIGGER no BEFORE UPDATE ON postbox.delivery FOR EACH ROW WHEN (NEW.key = 'k1500') EXECUTE FUNCTION no()"
        }
    })
    .await?;
    let output = room.output(&["retry", "--all"])?;
    let (said, told) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(output.status.code() == Some(1) && said == "retried=1000\n", "{}: {said}{told}", output.status);
    ensure!(told.contains("not this one") && told.contains("goes on with the rest"), "{told}");
    ensure!(dead(&room)? == MANY - 1000);
    // Refused at its first step, it has nothing to say but why.
    let complaint = room.refuses(1, &["retry", "--all"])?;
    ensure!(complaint.lines().count() == 1 && complaint.contains("not this one"), "{complaint}");
    room.sql(match kind {
        Kind::Sqlite => "DROP TRIGGER no",
        Kind::Postgres => "DROP TRIGGER no ON postbox.delivery",
    })
    .await?;
    ensure!(room.ok(&["retry", "--all"])? == "retried=1500\n");
    Ok(())
}

/// A person stops it in its second step, which waits for a lock: that step is waited for, and counted.
#[tokio::test]
async fn an_interrupted_retry_says_how_much_it_did() -> Result<()> {
    let all = 10_500;
    let room = with_dead(Kind::Postgres, all).await?;
    let (holder, connection) = tokio_postgres::connect(&room.url, tokio_postgres::NoTls).await?;
    let connection = tokio::spawn(connection);
    holder.batch_execute("BEGIN; SELECT FROM postbox.delivery WHERE key = 'k1500' FOR UPDATE").await?;
    let mut command = tokio::process::Command::from(room.command(&["retry", "--all"]));
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn()?;
    let waiting = async {
        const WAITING: &str =
            "SELECT count(*) FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))";
        while holder.query_one(WAITING, &[]).await?.get::<_, i64>(0) == 0 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(DEADLINE, waiting).await.context("it never came to the lock")??;
    signal(child.id().context("it has ended already")?, "INT")?;
    holder.batch_execute("COMMIT").await?;
    let output = tokio::time::timeout(DEADLINE, child.wait_with_output()).await.context("it does not end")??;
    let (said, told) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(output.status.code() == Some(1) && told.contains("interrupted"), "{}: {said}{told}", output.status);
    ensure!(told.lines().count() == 1 && said == format!("retried={}\n", all - dead(&room)?), "{said}{told}");
    ensure!((2_000..all).contains(&(all - dead(&room)?)), "{said}");
    drop(holder);
    connection.await??;
    Ok(())
}

on_both!(many_events_are_retried_and_discarded, a_retry_that_fails_midway_says_how_much_it_did);
