//! `postbox demo`: it proves what it claims, and would notice if that were false.

use anyhow::{Result, ensure};

use crate::env::{Kind, TestEnv, cases};

const ARGS: [&str; 5] = ["demo", "--orders", "100", "--seed", "7"];

#[tokio::test]
async fn every_promise_is_kept_through_the_crash() -> Result<()> {
    let env = TestEnv::empty(Kind::Sqlite).await?;
    let printed = env.ok(&[&ARGS[..], &["--dir", "kept"]].concat())?;
    for expected in [
        "the relay is killed with",
        "Every promise kept: 300 events",
        "postbox demo --seed 7 --orders 100",
        "What next",
    ] {
        ensure!(printed.contains(expected), "{expected:?} is not in\n{printed}");
    }
    ensure!(!printed.contains('\u{1b}'), "colours in a pipe");
    fits_a_terminal(&printed)?;
    // The databases it keeps are stores like any other.
    let stats = env.ok(&["stats", "--store", "sqlite:kept/shop.db"])?;
    ensure!(stats == "pending=0 dispatched=300 dead=0 total=300\n", "{stats}");
    // It does not overwrite existing files.
    env.refuses(1, &[&ARGS[..], &["--dir", "kept"]].concat())?;
    Ok(())
}

/// A terminal of the usual size breaks no line.
fn fits_a_terminal(printed: &str) -> Result<()> {
    let long: Vec<&str> = printed.lines().filter(|line| line.chars().count() > 80).collect();
    ensure!(long.is_empty(), "{long:#?}");
    Ok(())
}

async fn is_noticed(tamper: &str, row: &str) -> Result<()> {
    let env = TestEnv::empty(Kind::Sqlite).await?;
    let output = env.output(&[&ARGS[..], &["--tamper", tamper]].concat())?;
    let printed = String::from_utf8(output.stdout)?;
    fits_a_terminal(&printed)?;
    ensure!(output.status.code() == Some(1), "it ended with {}: {printed}", output.status);
    let broken: Vec<&str> = printed.lines().filter(|line| line.trim_start().starts_with('✗')).collect();
    ensure!(broken.iter().any(|line| line.contains(row)), "{row} is not among {broken:#?} in\n{printed}");
    Ok(())
}

cases! {
    a_lost_event_is_noticed => is_noticed("lose", "lost");
    a_phantom_is_noticed => is_noticed("phantom", "phantom");
    an_event_applied_twice_is_noticed => is_noticed("twice", "applied twice");
    a_change_out_of_order_is_noticed => is_noticed("reorder", "out of order");
    missing_money_is_noticed => is_noticed("money", "money missing");
}
