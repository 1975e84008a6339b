//! Bulk changes: made in steps, with a count that is right however they end.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::endpoint::{Endpoint, refuses_all, takes_all};
use crate::env::{FILE_SINK, Kind, TestEnv, ended, on_both, signal, until, until_waited_for};

/// More events than two steps.
const MANY: usize = 2_500;

/// A subscription with this many delivered events, inserted by SQL for speed.
async fn with_delivered(kind: Kind, events: usize) -> Result<TestEnv> {
    let env = TestEnv::with(kind, FILE_SINK).await?;
    let rows = format!(
        "WITH RECURSIVE up(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM up WHERE n < {events})
         INSERT INTO OUTBOX (topic, key, payload) SELECT 'order.placed', 'k' || n, '{{}}' FROM up"
    );
    env.sql(&rows).await?;
    ensure!(env.dispatch(&[])? == format!("dispatched={events} failed=0 dead=0"));
    Ok(env)
}

/// The same with all of them dead.
async fn with_dead(kind: Kind, events: usize) -> Result<TestEnv> {
    let env = with_delivered(kind, events).await?;
    env.sql(match kind {
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
    ensure!(dead(&env)? == events);
    Ok(env)
}

fn dead(env: &TestEnv) -> Result<usize> {
    let dead = env.json(&["stats", "--json"])?[0]["dead"].as_u64();
    Ok(usize::try_from(dead.context("no count")?)?)
}

async fn many_events_are_retried_and_discarded(kind: Kind) -> Result<()> {
    let env = with_dead(kind, MANY).await?;
    let listed = env.ok(&["list", "--state", "dead", "--limit", "1200"])?;
    let ids: Vec<&str> = listed.lines().skip(1).filter_map(|line| line.split('\t').next()).collect();
    ensure!(env.ok(&[&["discard"], &ids[..]].concat())? == "discarded=1200\n");
    ensure!(env.ok(&["retry", "--all", "--limit", "1100"])? == "retried=1100\n");
    ensure!(dead(&env)? == MANY - 1200 - 1100);
    ensure!(env.ok(&["retry", "--all"])? == "retried=200\n");
    ensure!(env.dispatch(&[])? == "dispatched=1300 failed=0 dead=0");
    Ok(())
}

/// The database rejects a row of the second step.
async fn a_retry_that_fails_midway_says_how_much_it_did(kind: Kind) -> Result<()> {
    let env = with_dead(kind, MANY).await?;
    env.sql(match kind {
        Kind::Sqlite => {
            "CREATE TRIGGER no BEFORE UPDATE ON postbox_delivery WHEN NEW.key = 'k1100' BEGIN SELECT RAISE(ABORT, 'not this one'); END"
        }
        Kind::Postgres => {
            "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$;
             CREATE TRIGGER no BEFORE UPDATE ON postbox.delivery FOR EACH ROW WHEN (NEW.key = 'k1100') EXECUTE FUNCTION no()"
        }
    })
    .await?;
    let output = env.output(&["retry", "--all", "--limit", "1200"])?;
    let (stdout, stderr) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(output.status.code() == Some(1) && stdout == "retried=1000\n", "{}: {stdout}{stderr}", output.status);
    ensure!(stderr.contains("not this one") && stderr.contains("with the rest, with --limit 200"), "{stderr}");
    ensure!(dead(&env)? == MANY - 1000);
    // A change that fails at its first step prints only the reason.
    let complaint = env.refuses(1, &["retry", "--all"])?;
    ensure!(complaint.lines().count() == 1 && complaint.contains("not this one"), "{complaint}");
    env.sql(match kind {
        Kind::Sqlite => "DROP TRIGGER no",
        Kind::Postgres => "DROP TRIGGER no ON postbox.delivery",
    })
    .await?;
    ensure!(env.ok(&["retry", "--all", "--limit", "200"])? == "retried=200\n");
    ensure!(dead(&env)? == MANY - 1200);
    ensure!(env.ok(&["retry", "--all"])? == "retried=1300\n");
    Ok(())
}

/// It is interrupted during its second step, which waits for a lock: that step is finished and
/// counted.
#[tokio::test]
async fn an_interrupted_retry_says_how_much_it_did() -> Result<()> {
    // As many as are counted one by one.
    let all = 10_000;
    let env = with_dead(Kind::Postgres, all).await?;
    let holder = env.client().await?;
    holder.batch_execute("BEGIN; SELECT FROM postbox.delivery WHERE key = 'k1500' FOR UPDATE").await?;
    let child = env.spawn(&["retry", "--all"])?;
    until_waited_for(&holder).await?;
    signal(child.id().context("it has ended already")?, "INT")?;
    holder.batch_execute("COMMIT").await?;
    let output = ended(child).await?;
    let (stdout, stderr) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(output.status.code() == Some(1) && stderr.contains("interrupted"), "{}: {stdout}{stderr}", output.status);
    ensure!(stderr.lines().count() == 1 && stdout == format!("retried={}\n", all - dead(&env)?), "{stdout}{stderr}");
    ensure!((2_000..all).contains(&(all - dead(&env)?)), "{stdout}");
    Ok(())
}

/// What it prints continues with the rest: not from the beginning, and not with newer events.
async fn an_interrupted_replay_says_where_to_continue(kind: Kind) -> Result<()> {
    let env = with_delivered(kind, MANY).await?;
    let child = env.spawn(&["replay", "--all", "--rate", "100/s", "--limit", "3000"])?;
    let pending = || anyhow::Ok(env.json(&["stats", "--json"])?[0]["pending"].as_u64());
    until("its first step", async || Ok((pending()? > Some(0)).then_some(()))).await?;
    signal(child.id().context("it has ended already")?, "INT")?;
    let output = ended(child).await?;
    let (stdout, stderr) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(output.status.code() == Some(1), "{}: {stdout}{stderr}", output.status);
    let count: usize = stdout.trim_end().strip_prefix("replayed=").context("no count")?.parse()?;
    ensure!((1..MANY).contains(&count), "{stdout}{stderr}");
    let (_, rest) = stderr.split_once("give --after").context("no way to continue")?;
    let (rest, limited) = rest.split_once(" instead").context("no end of it")?;
    ensure!(limited.ends_with(&format!(", with --limit {}\n", 3_000 - count)), "{stdout}{stderr}");
    let rest: Vec<&str> = rest.split_whitespace().collect();
    env.insert([("order.placed", "new".to_owned(), 1)]).await?;
    // The new event is delivered by then, too.
    ensure!(env.dispatch(&["--loop"])? == format!("dispatched={} failed=0 dead=0", count + 1));
    let continued = env.ok(&[&["replay", "--all", "--after"], &rest[..]].concat())?;
    ensure!(continued == format!("replayed={}\n", MANY - count), "{count}, {rest:?}: {continued}");
    ensure!(env.dispatch(&["--loop"])? == format!("dispatched={} failed=0 dead=0", MANY - count));
    let mut sent: HashMap<(String, String), usize> = HashMap::new();
    for line in env.lines("out.jsonl")? {
        *sent.entry((line["key"].to_string(), line["id"].to_string())).or_default() += 1;
    }
    let wrong = sent.iter().find(|((key, _), times)| **times != if key == "\"new\"" { 1 } else { 2 });
    ensure!(wrong.is_none() && sent.len() == MANY + 1, "{wrong:?} of {}", sent.len());
    Ok(())
}

/// For every bulk change: a dry run counts what the run right after it changes.
async fn a_dry_run_says_what_the_run_does(kind: Kind) -> Result<()> {
    let target = Endpoint::start(refuses_all)?;
    let env = TestEnv::with(kind, &target.subscription("out")).await?;
    let rows =
        (0..12).map(|n| (["order.placed", "order.paid", "invoice.sent"][n as usize % 3], (n % 4).to_string(), n));
    env.insert(rows).await?;
    ensure!(env.dispatch(&[])? == "dispatched=0 failed=0 dead=12");
    let both = async |word: &str, count: u64, args: &[&str]| -> Result<()> {
        let before = env.snapshot().await?;
        for _ in 0..2 {
            let counted = env.ok(&[args, &["--dry-run"]].concat())?;
            ensure!(counted == format!("{word}={count} dry_run=true\n"), "{args:?}: {counted}");
        }
        ensure!(env.snapshot().await? == before, "{args:?}: a dry run has changed something");
        let changed = env.ok(args)?;
        ensure!(changed == format!("{word}={count}\n"), "{args:?}: {changed}");
        Ok(())
    };
    let listed = env.json(&["list", "--state", "dead", "--key", "3", "--until", "0s", "--json"])?;
    let listed = listed.as_array().context("no list")?;
    ensure!(listed.len() == 3 && listed.iter().all(|record| record["event"]["key"] == "3"), "{listed:?}");
    let id = listed[0]["event"]["id"].as_str().context("no id")?;
    ensure!(env.ok(&["list", "--state", "dead", "--since", "1h", "--older-than", "30m"])?.is_empty());
    both("discarded", 1, &["discard", id]).await?;
    both("discarded", 0, &["discard", "--older-than", "1h"]).await?;
    both("discarded", 2, &["discard", "--topic", "order.*", "--key", "0", "--code", "http_422"]).await?;
    target.set(takes_all);
    both("retried", 4, &["retry", "--topic", "invoice.sent"]).await?;
    ensure!(env.dispatch(&[])? == "dispatched=4 failed=0 dead=0");
    both("retried", 2, &["retry", "--key", "1", "--since", "1h"]).await?;
    ensure!(env.dispatch(&[])? == "dispatched=2 failed=0 dead=0");
    both("discarded", 3, &["discard", "--all"]).await?;
    ensure!(env.ok(&["stats"])? == "pending=0 dispatched=6 dead=0 total=12\n");
    both("replayed", 4, &["replay", "--topic", "invoice.*"]).await?;
    ensure!(env.dispatch(&[])? == "dispatched=4 failed=0 dead=0");
    both("pruned", 2, &["prune", "--older-than", "0s", "--topic", "order.*", "--key", "1"]).await?;
    both("pruned", 4, &["prune", "--older-than", "0s", "--code", "http_422", "--limit", "4"]).await?;
    both("pruned", 2, &["prune", "--older-than", "0s", "--code", "http_422"]).await?;
    ensure!(env.ok(&["list", "--state", "discarded"])?.is_empty());
    both("pruned", 4, &["prune", "--older-than", "0s"]).await?;
    Ok(())
}

/// With `retention.dead`, old dead events are discarded by themselves.
async fn retention_gives_up_what_has_been_dead_for_long(kind: Kind) -> Result<()> {
    let target = Endpoint::start(refuses_all)?;
    let config = target.subscription("out") + "[retention]\ndead = \"1d\"\nschedule = \"* * * * * *\"\n";
    let env = TestEnv::with(kind, &config).await?;
    env.insert_three().await?;
    ensure!(env.dispatch(&[])? == "dispatched=0 failed=0 dead=3");
    let served = env.serve().await?;
    env.sql(match kind {
        Kind::Sqlite => {
            "UPDATE postbox_delivery SET updated_at = updated_at - 172800000000 WHERE seq < (SELECT max(seq) FROM postbox_delivery)"
        }
        Kind::Postgres => {
            "UPDATE postbox.delivery SET updated_at = updated_at - interval '2 days' WHERE seq < (SELECT max(seq) FROM postbox.delivery)"
        }
    })
    .await?;
    until("two were given up", async || Ok((dead(&env)? == 1).then_some(()))).await?;
    served.logged("\"dead\":2", 1).await?;
    served.terminate().await?;
    let given_up = env.json(&["list", "--state", "discarded", "--code", "http_422", "--json"])?;
    let given_up = given_up.as_array().context("no list")?;
    let says_so = |error: &serde_json::Value| error.as_str().is_some_and(|text| text.contains("retention after 1 d"));
    ensure!(given_up.len() == 2 && given_up.iter().all(|record| says_so(&record["error"])), "{given_up:?}");
    Ok(())
}

fn fails_all(_key: &str) -> (u16, Duration) {
    (500, Duration::ZERO)
}

/// An event that will never succeed is marked dead, with a reason, and its key continues.
async fn an_event_is_marked_dead_and_its_key_goes_on(kind: Kind) -> Result<()> {
    let target = Endpoint::start(fails_all)?;
    let env = TestEnv::with(kind, &target.subscription("out")).await?;
    env.insert([("order.placed", "1".to_owned(), 1), ("order.placed", "1".to_owned(), 2)]).await?;
    env.dispatch(&[])?;
    let listed = env.json(&["list", "--json"])?;
    let id = |at: usize| listed[at]["event"]["id"].as_str().context("no id");
    // The newest is first.
    let (later, head) = (id(0)?, id(1)?);
    target.set(takes_all);
    let both = |args: &[&str]| -> Result<(String, String)> {
        let output = env.output(args)?;
        Ok((String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?))
    };
    ensure!(env.ok(&["mark-dead", "--all", "--limit", "1", "--dry-run"])? == "marked_dead=1 dry_run=true\n");
    ensure!(env.ok(&["mark-dead", head, "--why", "no such customer"])? == "marked_dead=1\n");
    let (said, why) = both(&["mark-dead", head])?;
    ensure!(said == "marked_dead=0\n" && why.contains("it is dead already"), "{said}{why}");
    ensure!(env.dispatch(&[])? == "dispatched=1 failed=0 dead=0");
    let dead = env.json(&["list", "--state", "dead", "--code", "marked_dead", "--json"])?;
    let error = dead[0]["error"].as_str().context("no error")?;
    ensure!(error.starts_with("marked dead by a person: no such customer; before: "), "{error}");
    let (findings, _) = both(&["doctor"])?;
    ensure!(findings.contains("postbox retry --code marked_dead"), "{findings}");
    let (said, why) = both(&["mark-dead", later])?;
    ensure!(said == "marked_dead=0\n" && why.contains("it was delivered already"), "{said}{why}");
    ensure!(env.ok(&["retry", head])? == "retried=1\n" && env.dispatch(&[])? == "dispatched=1 failed=0 dead=0");
    Ok(())
}

on_both!(
    an_event_is_marked_dead_and_its_key_goes_on,
    many_events_are_retried_and_discarded,
    a_retry_that_fails_midway_says_how_much_it_did,
    an_interrupted_replay_says_where_to_continue,
    a_dry_run_says_what_the_run_does,
    retention_gives_up_what_has_been_dead_for_long,
);
