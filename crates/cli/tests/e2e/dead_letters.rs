//! `dead_to`: dead events go to a second sink, whenever they died and whenever it is reachable.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};

use crate::endpoint::{Endpoint, Shut, refuses_all, takes_all};
use crate::env::{Kind, TestEnv, http_sink, on_both};

const DEAD_FILE: &str = "dead_to = { type = \"file\", path = \"dead.jsonl\" }\n";

async fn each_dead_event_goes_to_the_second_sink_with_its_reason(kind: Kind) -> Result<()> {
    let endpoint = Endpoint::start(refuses_all)?;
    // They die before a second sink is configured.
    let env = TestEnv::with(kind, &endpoint.subscription("hooks")).await?;
    env.insert_three().await?;
    env.dispatch(&[])?;
    let with_dead_to = format!("{}{DEAD_FILE}", endpoint.subscription("hooks"));
    env.config(&with_dead_to)?;
    env.dispatch(&[])?;
    let letters = env.lines("dead.jsonl")?;
    ensure!(letters.len() == 3, "{letters:?}");
    let dead = env.json(&["list", "--state", "dead", "--json"])?;
    let dead: BTreeSet<&str> =
        dead.as_array().context("a list")?.iter().filter_map(|it| it["event"]["id"].as_str()).collect();
    for letter in &letters {
        let headers = &letter["headers"];
        ensure!(dead.contains(headers["postbox-dead-id"].as_str().context("an id")?), "{letter}");
        ensure!(!dead.contains(letter["id"].as_str().context("an id")?), "a letter has an id of its own: {letter}");
        ensure!(headers["postbox-dead-code"] == "http_422" && headers["postbox-dead-attempts"] == "1", "{letter}");
        ensure!(headers["postbox-dead-subscription"] == "hooks" && headers["postbox-dead-log"] == "outbox", "{letter}");
        ensure!(headers["postbox-dead-reason"].as_str().is_some_and(|why| why.contains("422")), "{letter}");
        ensure!(letter["payload"]["n"].is_i64() && letter["topic"].is_string(), "{letter}");
    }
    env.dispatch(&[])?;
    ensure!(env.lines("dead.jsonl")?.len() == 3, "each death once");
    // A retried event that dies again is another death.
    env.ok(&["retry", "--all", "--limit", "1"])?;
    env.dispatch(&[])?;
    let letters = env.lines("dead.jsonl")?;
    let ids: BTreeSet<&str> = letters.iter().filter_map(|letter| letter["id"].as_str()).collect();
    ensure!((letters.len(), ids.len()) == (4, 4), "{letters:?}");
    Ok(())
}

async fn a_second_sink_that_is_down_gets_all_of_it_later(kind: Kind) -> Result<()> {
    let (endpoint, letters) = (Endpoint::start(refuses_all)?, Shut::reserve()?);
    let dead_to = http_sink(&letters.url()).replacen("sink", "dead_to", 1);
    let env = TestEnv::with(kind, &format!("{}{dead_to}", endpoint.subscription("hooks"))).await?;
    env.insert_three().await?;
    ensure!(env.dispatch(&[])?.contains("dead=3"));
    // The process has ended, and what it remembered is gone.
    let dead = env.json(&["list", "--state", "dead", "--json"])?;
    env.ok(&["discard", dead[0]["event"]["id"].as_str().context("an id")?])?;
    let letters = letters.open(takes_all)?;
    env.dispatch(&[])?;
    ensure!(letters.count() == 2, "one was discarded before it was sent: {:?}", letters.arrivals());
    env.dispatch(&[])?;
    ensure!(letters.count() == 2, "each death once");
    Ok(())
}

on_both!(each_dead_event_goes_to_the_second_sink_with_its_reason, a_second_sink_that_is_down_gets_all_of_it_later);
