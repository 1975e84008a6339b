//! `postbox run` and signals.

use std::collections::HashSet;

use anyhow::{Context as _, Result, ensure};

use crate::endpoint::{Endpoint, takes_all};
use crate::env::{FILE_SINK, Kind, TestEnv, ended, on_both, signal, until};

/// Starts and stops under load, several times; then everything has arrived exactly once.
async fn sigterm_under_load_repeats_nothing(kind: Kind) -> Result<()> {
    // `POSTBOX_TEST_STOPS=50` for the long version.
    let stops: usize = std::env::var("POSTBOX_TEST_STOPS").ok().and_then(|stops| stops.parse().ok()).unwrap_or(20);
    let events = 120 * stops;
    let target = Endpoint::start(takes_all)?;
    target.answer_only(0);
    let env = TestEnv::with(kind, &(target.subscription("out") + "batch = 50\n")).await?;
    env.insert((0..events).map(|n| ("order.placed", (n % 40).to_string(), n as i64))).await?;
    for stop in 1..=stops {
        let served = env.serve().await?;
        let share = |stop: usize| stop * events / (stops + 2);
        target.answer_only(share(stop + 1));
        target.until("its share", |arrivals| arrivals.len() >= share(stop)).await?;
        signal(served.pid()?, "TERM")?;
        // What it has begun then it may end.
        served.logged("postbox stops", 1).await?;
        target.answer_all();
        served.ended().await?;
    }
    let served = env.serve().await?;
    target.until("all events", |arrivals| arrivals.len() >= events).await?;
    served.terminate().await?;
    let distinct: HashSet<i64> = target.arrivals().iter().map(|arrival| arrival.n).collect();
    ensure!(target.count() == events && distinct.len() == events, "{} came twice", target.count() - distinct.len());
    ensure!(env.ok(&["stats"])? == format!("pending=0 dispatched={events} dead=0 total={events}\n"));
    Ok(())
}

on_both!(sigterm_under_load_repeats_nothing);

#[tokio::test]
async fn dispatch_in_a_loop_goes_on_until_sigterm_and_then_counts() -> Result<()> {
    let env = TestEnv::with(Kind::Sqlite, FILE_SINK).await?;
    let child = env.spawn(&["dispatch", "--loop", "--log-level", "error"])?;
    let pid = child.id().context("it has ended already")?;
    for round in 1..=2 {
        env.insert_three().await?;
        // A line may be half written when it is read.
        let there = |lines: &Vec<_>| lines.len() == 3 * round;
        until("three more", async || Ok(env.lines("out.jsonl").ok().filter(there))).await?;
    }
    signal(pid, "TERM")?;
    let output = ended(child).await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout)?;
    ensure!(printed.starts_with("fetched=") && printed.ends_with(" dispatched=6 failed=0 dead=0\n"), "{printed}");
    Ok(())
}

#[tokio::test]
async fn logs_are_json_lines_with_levels_and_no_secret() -> Result<()> {
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let env = TestEnv::with(Kind::Sqlite, &format!(
        "[subscriptions.out]\nsink = {{ type = \"http\", url = \"http://127.0.0.1:1/\", allow = [\"127.0.0.1\"], secret = \"{secret}\" }}\n"
    )).await?;
    env.insert_three().await?;
    let log = env.serve().await?.terminate().await?;
    ensure!(!log.is_empty());
    for line in &log {
        let value: serde_json::Value = serde_json::from_str(line).with_context(|| line.clone())?;
        ensure!(value["level"].is_string() && !line.contains(secret), "{line}");
    }
    Ok(())
}
