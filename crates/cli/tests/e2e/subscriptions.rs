//! `postbox subscription`: list, show, rename, reset, remove, lanes.

use anyhow::{Context as _, Result, ensure};

use crate::endpoint::{Endpoint, takes_all};
use crate::env::{FILE_SINK, Kind, TestEnv, on_both, until};

/// Three events that were delivered to `out`.
async fn delivered(kind: Kind) -> Result<TestEnv> {
    let env = TestEnv::with(kind, FILE_SINK).await?;
    env.insert_three().await?;
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    Ok(env)
}

async fn subscriptions_are_listed_and_shown(kind: Kind) -> Result<()> {
    let env = delivered(kind).await?;
    env.ok(&["pause", "out", "--why", "billing is migrating"])?;
    let listed = env.ok(&["subscription", "list"])?;
    ensure!(listed.starts_with("subscription\tlog\tfilter\t"), "{listed}");
    let cells: Vec<&str> = listed.lines().nth(1).context("no row")?.split('\t').collect();
    let lanes = if kind == Kind::Sqlite { "1" } else { "2" };
    ensure!(cells == ["out", "outbox", "*", "key", lanes, "0", "0", "0", "-", "billing is migrating"], "{listed}");
    let json = env.json(&["subscription", "list", "--json"])?;
    ensure!(json[0]["subscription"] == "out" && json[0]["paused"]["why"] == "billing is migrating", "{json}");
    let shown = env.ok(&["subscription", "show", "out"])?;
    for expected in ["outbox", "billing is migrating", "lane          0: free", "dispatched    3"] {
        ensure!(shown.contains(expected), "{expected}: {shown}");
    }
    ensure!(!shown.contains("the oldest for"), "nothing is pending: {shown}");
    ensure!(env.json(&["subscription", "show", "out", "--json"])?["counts"]["dispatched"] == 3);
    let complaint = env.refuses(2, &["subscription", "show", "nobody"])?;
    ensure!(complaint.contains("known: out"), "{complaint}");
    for command in ["stats", "list", "dispatch"] {
        let complaint = env.refuses(2, &[command, "--subscription", "out", "--log", "inbox"])?;
        ensure!(complaint.contains("out reads the outbox, not the inbox; leave --log out"), "{complaint}");
    }
    Ok(())
}

async fn a_renamed_subscription_goes_on_under_its_new_name(kind: Kind) -> Result<()> {
    let env = delivered(kind).await?;
    ensure!(env.ok(&["subscription", "rename", "out", "billing"])?.contains("now called billing"));
    let complaint = env.refuses(1, &["subscription", "rename", "out", "other"])?;
    ensure!(complaint.contains("out was never run"), "{complaint}");
    env.config(&FILE_SINK.replace("out]", "billing]"))?;
    env.insert_three().await?;
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    ensure!(env.ok(&["stats"])? == "pending=0 dispatched=6 dead=0 total=6\n");
    // Under its former name, the whole log is sent to another one.
    env.config(FILE_SINK)?;
    let output = env.output(&["dispatch"])?;
    let said = String::from_utf8(output.stderr)?;
    ensure!(output.status.success() && said.lines().count() == 1, "{}: {said}", output.status);
    for part in ["WARN", "subscription created", "others=[\"billing\"]", "postbox subscription rename OLD NEW"] {
        ensure!(said.contains(part), "{part:?} is not in {said}");
    }
    Ok(())
}

async fn a_reset_says_what_it_would_do_first(kind: Kind) -> Result<()> {
    let env = delivered(kind).await?;
    let output = env.output(&["subscription", "reset", "out", "--to", "beginning"])?;
    ensure!(output.status.code() == Some(2) && output.stdout == b"again=3 skipped=0\n", "{output:?}");
    ensure!(env.dispatch(&[])? == "dispatched=0 failed=0 dead=0", "nothing was done");
    ensure!(env.ok(&["subscription", "reset", "out", "--to", "beginning", "--yes"])? == "again=3 skipped=0\n");
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    ensure!(env.lines("out.jsonl")?.len() == 6);
    env.insert_three().await?;
    ensure!(env.ok(&["subscription", "reset", "out", "--to", "now", "--yes"])? == "again=0 skipped=3\n");
    ensure!(env.dispatch(&[])? == "dispatched=0 failed=0 dead=0");
    let skipped = env.json(&["list", "--state", "skipped", "--json"])?;
    ensure!(skipped.as_array().context("no list")?.len() == 3);
    ensure!(env.ok(&["subscription", "reset", "out", "--to", "1h", "--yes"])? == "again=6 skipped=0\n");
    env.refuses(2, &["subscription", "reset", "out", "--to", "soon"])?;
    Ok(())
}

async fn a_removed_subscription_ends_its_relay(kind: Kind) -> Result<()> {
    let env = delivered(kind).await?;
    let served = env.serve().await?;
    let complaint = env.refuses(2, &["subscription", "remove", "out"])?;
    ensure!(complaint.contains("0 pending") && complaint.contains("--yes"), "{complaint}");
    served.logged("lane taken", 1).await?;
    ensure!(env.ok(&["subscription", "remove", "out", "--yes"])? == "out is removed\n");
    served.logged("relay ended", 1).await?;
    ensure!(env.ok(&["subscription", "list"])?.is_empty(), "it was not made anew");
    let log = served.terminate().await?;
    ensure!(log.iter().any(|line| line.contains("removed or renamed")), "{log:#?}");
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0", "a start makes it anew");
    Ok(())
}

async fn lanes_change_while_a_relay_runs(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, &format!("{FILE_SINK}lanes = 1\nlease = \"1s\"\n")).await?;
    let served = env.serve().await?;
    served.logged("lane taken", 1).await?;
    env.insert_three().await?;
    ensure!(env.ok(&["subscription", "lanes", "out", "3"])?.contains("3 lane(s)"));
    served.logged("lane taken", 4).await?;
    env.insert_three().await?;
    served.terminate().await?;
    ensure!(env.dispatch(&[])?.ends_with("failed=0 dead=0"));
    ensure!(env.ok(&["stats"])?.starts_with("pending=0 dispatched=6 "));
    env.refuses(2, &["subscription", "lanes", "out", "0"])?;
    Ok(())
}

/// Each relay's name begins with that of its replica: the configured one, or the host's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lanes_are_held_by_replicas_that_can_be_found() -> Result<()> {
    let endpoint = Endpoint::start(takes_all)?;
    let env = TestEnv::migrated(Kind::Postgres).await?;
    let mut replicas = Vec::new();
    for name in ["name = \"shop-1\"\n", ""] {
        let subscription = endpoint.subscription("out");
        env.config(&format!("{subscription}lease = \"1s\"\n[server]\nlisten = \"127.0.0.1:0\"\n{name}"))?;
        replicas.push(env.serve_with(&[("HOSTNAME", "eu/shop 2")]).await?);
    }
    until("both have a lane", async || {
        let shown = env.said(&["subscription", "show", "out"])?;
        Ok((shown.contains("held by shop-1-") && shown.contains("held by eu-shop-2-")).then_some(()))
    })
    .await?;
    for replica in replicas {
        replica.terminate().await?;
    }
    Ok(())
}

on_both!(
    subscriptions_are_listed_and_shown,
    a_renamed_subscription_goes_on_under_its_new_name,
    a_reset_says_what_it_would_do_first,
    a_removed_subscription_ends_its_relay,
    lanes_change_while_a_relay_runs,
);
