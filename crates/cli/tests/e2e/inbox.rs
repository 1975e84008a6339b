//! Webhooks into the inbox: stored by `run`, changed by the same commands as the outbox, applied
//! over HTTP.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::endpoint::{Endpoint, refuses_all, takes_all};
use crate::env::{FILE_SINK, Kind, TestEnv, get, on_both, until};
use crate::sender::{Sender, partner};

/// Runs a service, sends these messages, and stops it.
async fn send(env: &TestEnv, messages: &[(&str, &str, u16)]) -> Result<Vec<String>> {
    let served = env.serve().await?;
    let mut sender = Sender::connect(&served.address).await?;
    for (id, body, status) in messages {
        let heard = sender.send(id, body).await?;
        ensure!(heard == *status, "{id} was answered with {heard}");
    }
    served.terminate().await
}

async fn inbox_rows_work_with_the_same_commands(kind: Kind) -> Result<()> {
    // No subscription yet: messages are stored and counted.
    let env = TestEnv::with(kind, &partner()).await?;
    ensure!(env.ok(&["stats", "--log", "inbox"])? == "pending=0 dispatched=0 dead=0 total=0\n");
    let (paid, sent) = ("{\"type\":\"invoice.paid\"}", "{\"type\":\"invoice.sent\"}");
    send(&env, &[("msg_1", paid, 202), ("msg_1", paid, 200), ("msg_2", sent, 202)]).await?;
    ensure!(env.ok(&["stats", "--log", "inbox"])? == "pending=2 dispatched=0 dead=0 total=2\n");
    ensure!(env.ok(&["stats"])? == "pending=2 dispatched=0 dead=0 total=2\n", "what nobody reads is counted too");
    let stats = env.json(&["stats", "--json"])?;
    ensure!(stats[0]["subscription"].is_null() && stats[0]["log"] == "inbox" && stats[0]["pending"] == 2, "{stats}");
    let listed = String::from_utf8(env.output(&["list", "--log", "inbox", "--state", "pending"])?.stderr)?;
    ensure!(listed.contains("2 event(s) are not shown") && listed.contains("log = \"inbox\""), "{listed}");
    for args in [&["doctor"][..], &["doctor", "--log", "inbox"]] {
        let output = env.output(args)?;
        let said = String::from_utf8(output.stdout)?;
        ensure!(output.status.code() == Some(1), "{said}");
        ensure!(said.contains("nobody reads the inbox: 2 event(s)") && said.contains("log = \"inbox\""), "{said}");
        ensure!(!said.contains("nobody reads the outbox"), "{said}");
    }
    // A subscription of the other log does not hide this.
    env.config(&("[subscriptions.out]\n".to_owned() + &partner()))?;
    env.subscribe()?;
    let listed = String::from_utf8(env.output(&["list", "--state", "pending"])?.stderr)?;
    ensure!(listed.contains("nobody reads the inbox") && listed.contains("log = \"inbox\""), "{listed}");
    let unknown = env.refuses(1, &["show", "00000000-0000-7000-8000-000000000000"])?;
    ensure!(unknown.contains("the inbox, which nobody reads"), "{unknown}");
    let commands: [&[&str]; 8] = [
        &["stats"],
        &["dispatch"],
        &["doctor"],
        &["list", "--state", "dead"],
        &["show", "00000000-0000-7000-8000-000000000000"],
        &["retry", "--all"],
        &["prune", "--older-than", "1h"],
        &["pause", "out"],
    ];
    for command in commands {
        let complaint = env.refuses(2, &[command, &["--log", "nowhere"]].concat())?;
        ensure!(complaint.contains("there is no log nowhere; there are: inbox, outbox"), "{command:?}: {complaint}");
    }
    let complaint = env.refuses(2, &["pause", "out", "--log", "inbox"])?;
    ensure!(complaint.contains("out reads the outbox"), "{complaint}");

    let apply =
        |sink: &str| format!("[subscriptions.apply]\nlog = \"inbox\"\n{sink}\n[subscriptions.out]\n{}", partner());
    env.config(&apply(""))?;
    env.subscribe()?;
    env.insert_three().await?;
    ensure!(env.ok(&["stats"])? == "pending=5 dispatched=0 dead=0 total=5\n");
    ensure!(env.ok(&["stats", "--log", "inbox"])? == "pending=2 dispatched=0 dead=0 total=2\n");
    let listed = env.ok(&["list", "--log", "inbox", "--state", "pending"])?;
    ensure!(listed.lines().count() == 3 && listed.contains("invoice.paid"), "{listed}");
    let id = listed.lines().nth(1).and_then(|line| line.split('\t').next()).context("no id")?.to_owned();
    ensure!(env.ok(&["show", &id, "--log", "inbox"])?.contains("invoice.paid"));
    env.refuses(1, &["show", &id, "--log", "outbox"])?;

    env.config(&apply("sink = { type = \"file\", path = \"applied.jsonl\" }"))?;
    ensure!(env.dispatch(&["--log", "inbox"])? == "dispatched=2 failed=0 dead=0");
    ensure!(env.lines("applied.jsonl")?.len() == 2);
    ensure!(env.ok(&["stats", "--log", "inbox"])? == "pending=0 dispatched=2 dead=0 total=2\n");
    ensure!(env.ok(&["prune", "--log", "inbox", "--older-than", "0s"])? == "pruned=2\n");
    Ok(())
}

/// Only the receiving transaction does not declare that it writes, so `run` with a source must be
/// refused.
#[tokio::test]
async fn a_database_that_is_read_only_by_default_is_refused_with_the_cure() -> Result<()> {
    let env = TestEnv::empty(Kind::Postgres).await?;
    let set = "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = on', current_database()); END $$";
    env.sql(set).await?;
    env.ok(&["migrate", "up"])?;
    let three = "INSERT INTO OUTBOX (topic, payload) SELECT 't', '{}' FROM generate_series(1, 3)";
    env.sql(&format!("BEGIN READ WRITE; {three}; COMMIT")).await?;
    env.config(FILE_SINK)?;
    env.serve().await?.terminate().await?;
    env.ok(&["dispatch"])?;
    ensure!(env.lines("out.jsonl")?.len() == 3);
    ensure!(env.ok(&["doctor", "--json"]).is_ok_and(|printed| !printed.contains("read-only")));

    env.config(&(partner() + FILE_SINK))?;
    let complaint = env.refuses(1, &["run", "--log-level", "error"])?;
    ensure!(complaint.lines().count() == 1 && complaint.contains("default_read_only"), "{complaint}");
    let printed = env.said(&["doctor"])?;
    ensure!(printed.contains("read-only by default") && printed.contains("ALTER ROLE"), "{printed}");
    let cure = complaint.split("run: ").nth(1).and_then(|rest| rest.split(" (default").next()).context("a cure")?;
    env.sql(cure).await?;
    send(&env, &[("msg_1", "{\"type\":\"invoice.paid\"}", 202)]).await?;
    Ok(())
}

/// The handler refused all messages. It is fixed, and they are retried a few at a time.
async fn dead_messages_are_revived_oldest_first(kind: Kind) -> Result<()> {
    let refusing = Endpoint::start(refuses_all)?;
    let config = |handler: &Endpoint| handler.subscription("apply") + "log = \"inbox\"\n" + &partner();
    // Stored before the handler runs, so that their order is known.
    let env = TestEnv::with(kind, &partner()).await?;
    let bodies: Vec<(String, String)> =
        (0..6).map(|n| (format!("msg_{n}"), format!("{{\"type\":\"invoice.paid\",\"n\":{n}}}"))).collect();
    let messages: Vec<_> = bodies.iter().map(|(id, body)| (id.as_str(), body.as_str(), 202)).collect();
    send(&env, &messages).await?;
    env.config(&config(&refusing))?;
    ensure!(env.dispatch(&[])? == "dispatched=0 failed=0 dead=6");
    ensure!(env.ok(&["stats", "--log", "inbox"])? == "pending=0 dispatched=0 dead=6 total=6\n");

    let mended = Endpoint::start(takes_all)?;
    env.config(&config(&mended))?;
    ensure!(env.refuses(1, &["retry", "--log", "outbox", "--all"])?.contains("no subscription reads outbox"));
    let numbers = || mended.arrivals().iter().map(|arrival| arrival.n).collect::<std::collections::BTreeSet<_>>();
    ensure!(env.ok(&["retry", "--log", "inbox", "--all", "--limit", "2"])? == "retried=2\n");
    ensure!(env.ok(&["dispatch"])?.contains("dispatched=2"));
    ensure!(numbers() == [0, 1].into(), "{:?}", numbers());
    let listed = env.ok(&["list", "--log", "inbox", "--state", "dead"])?;
    let id = listed.lines().nth(1).and_then(|line| line.split('\t').next()).context("no id")?;
    ensure!(env.ok(&["discard", "--log", "inbox", id])? == "discarded=1\n");
    ensure!(env.ok(&["retry", "--log", "inbox", "--all", "--limit", "2"])? == "retried=2\n");
    ensure!(env.ok(&["dispatch"])?.contains("dispatched=2"));
    ensure!(numbers() == [0, 1, 3, 4].into(), "{:?}", numbers());
    ensure!(env.ok(&["stats", "--log", "inbox"])? == "pending=0 dispatched=4 dead=1 total=6\n");
    Ok(())
}

/// The same id with another body: rejected, and listed.
async fn conflicts_are_listed_for_a_person(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, &partner()).await?;
    ensure!(env.ok(&["list", "--state", "conflict"])?.is_empty());
    let (first, other) = ("{\"type\":\"invoice.paid\",\"n\":1}", "{\"type\":\"invoice.paid\",\"n\":2}");
    let log = send(&env, &[("msg_1", first, 202), ("msg_1", other, 200), ("msg_1", other, 200)]).await?;
    ensure!(log.iter().any(|line| line.contains("WARN") && line.contains("another body")), "{log:#?}");
    let listed = env.ok(&["list", "--state", "conflict"])?;
    let cells: Vec<&str> = listed.lines().nth(1).context("no row")?.split('\t').collect();
    ensure!(listed.lines().count() == 2 && cells.len() == 8, "{listed}");
    ensure!(cells[..4] == ["msg_1", "partner", "-", "2"], "{listed}");
    let json = env.json(&["list", "--state", "conflict", "--json"])?;
    let (stored, refused) = (json[0]["digest_stored"].as_str(), json[0]["digest_refused"].as_str());
    ensure!(json[0]["times"] == 2 && stored != refused && stored.is_some_and(|hex| hex.len() == 64), "{json}");
    let printed = env.said(&["doctor"])?;
    ensure!(printed.contains("1 message(s)") && printed.contains("postbox list --state conflict"), "{printed}");
    env.refuses(2, &["list", "--state", "conflict", "--topic", "invoice.*"])?;
    for narrowed in [["--log", "inbox"], ["--subscription", "out"]] {
        let complaint = env.refuses(2, &[&["list", "--state", "conflict"], &narrowed[..]].concat())?;
        ensure!(complaint.contains("its column `source` says where"), "{complaint}");
    }
    ensure!(env.ok(&["stats", "--log", "inbox"])? == "pending=1 dispatched=0 dead=0 total=1\n");
    Ok(())
}

/// A proxy adds more headers than an event can keep.
#[tokio::test]
async fn headers_that_are_not_kept_are_counted_and_logged() -> Result<()> {
    let env = TestEnv::with(Kind::Sqlite, &(partner() + "[subscriptions.apply]\nlog = \"inbox\"\n")).await?;
    let served = env.serve().await?;
    let mut sender = Sender::connect(&served.address).await?;
    ensure!(sender.send("msg_0", "{}").await? == 202);
    sender.more = (0..70).map(|n| format!("x-noise-{n:02}: {n}\r\n")).collect();
    for n in 1..=3 {
        ensure!(sender.send(&format!("msg_{n}"), "{}").await? == 202);
    }
    let page = get(&served.address, "/metrics", "").await?;
    // Six of the added headers and `webhook-id`, three times.
    ensure!(page.contains("postbox_headers_dropped_total{source=\"partner\"} 21\n"), "{page}");
    let log = served.terminate().await?;
    let printed: Vec<&String> = log.iter().filter(|line| line.contains("headers_dropped")).collect();
    ensure!(
        printed.len() == 2 && printed.iter().all(|line| line.contains("WARN") && line.contains("partner")),
        "{log:#?}"
    );
    let listed = env.json(&["list", "--state", "pending", "--json"])?;
    ensure!(listed[1]["event"]["headers"].as_object().map(serde_json::Map::len) == Some(65), "{listed}");
    ensure!(listed[1]["event"]["headers"]["postbox-message-id"] == "msg_1", "{listed}");
    Ok(())
}

/// Repetitions are counted where they were recognised; a replay storm is logged once.
async fn a_replay_storm_is_counted_by_layer_and_logged_once(kind: Kind) -> Result<()> {
    let applied_before = Endpoint::start(|_| (409, Duration::ZERO))?;
    let env = TestEnv::with(kind, &(applied_before.subscription("apply") + "log = \"inbox\"\n" + &partner())).await?;
    let served = env.serve().await?;
    let mut sender = Sender::connect(&served.address).await?;
    let body = "{\"type\":\"invoice.paid\"}";
    ensure!(sender.send("msg_1", body).await? == 202);
    let long_ago = jiff::Timestamp::now().as_second() - 3_600;
    for _ in 0..99 {
        ensure!(sender.send("msg_1", body).await? == 200);
    }
    for _ in 0..200 {
        ensure!(sender.send_at(long_ago, "msg_1", body).await? == 401);
    }
    applied_before.until("applied", |arrivals| !arrivals.is_empty()).await?;
    let expected = [
        "postbox_duplicates_total{layer=\"timestamp\",source=\"partner\"} 200\n",
        "postbox_duplicates_total{layer=\"inbox\",source=\"partner\"} 99\n",
        "postbox_duplicates_total{layer=\"destination\",source=\"partner\",subscription=\"apply\"} 1\n",
    ];
    // An answer is counted when it has been read, a moment after it was given.
    until("the count of a duplicate at the destination", async || {
        let page = get(&served.address, "/metrics", "").await?;
        let missing = expected.iter().find(|line| !page.contains(**line));
        ensure!(missing.is_none_or(|line| line.contains("destination")), "no {missing:?} in\n{page}");
        Ok(missing.is_none().then_some(()))
    })
    .await?;
    let log = served.terminate().await?;
    let printed = |text: &str| log.iter().filter(|line| line.contains(text)).count();
    ensure!(printed("replay storm") == 1 && printed("timestamp_too_old") == 1, "{log:#?}");
    let storm = log.iter().find(|line| line.contains("replay storm")).context("no storm")?;
    ensure!(storm.contains("WARN") && storm.contains("partner"), "{storm}");
    Ok(())
}

on_both!(
    inbox_rows_work_with_the_same_commands,
    dead_messages_are_revived_oldest_first,
    conflicts_are_listed_for_a_person,
    a_replay_storm_is_counted_by_layer_and_logged_once,
);
