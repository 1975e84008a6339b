//! What the commands show of events that do not move.

use anyhow::{Context as _, Result, ensure};

use crate::env::{FILE_SINK, Kind, TestEnv, http_sink, on_both};

/// What the topics leave out is neither delivered nor on its way.
async fn an_event_that_nobody_wants_is_not_shown_as_delivered(kind: Kind) -> Result<()> {
    let other = FILE_SINK.replace(".out]", ".other]\ntopics = [\"billing.*\"]");
    let env = TestEnv::with(kind, &(FILE_SINK.to_owned() + &other)).await?;
    env.subscribe()?;
    env.insert_three().await?;
    let listed = env.json(&["list", "--state", "pending", "--subscription", "out", "--json"])?;
    let id = listed[0]["event"]["id"].as_str().context("no id")?;
    let shown = env.ok(&["show", id])?;
    ensure!(shown.contains("out: pending") && shown.contains("other: skipped"), "{shown}");
    let json = env.json(&["show", id, "--json"])?;
    let states: Vec<&str> =
        json["deliveries"].as_array().context("no list")?.iter().filter_map(|it| it["state"].as_str()).collect();
    ensure!(states.contains(&"skipped") && states.contains(&"pending"), "{json}");
    env.ok(&["dispatch"])?;
    let shown = env.ok(&["show", id])?;
    ensure!(shown.contains("out: dispatched") && shown.contains("other: skipped"), "{shown}");
    Ok(())
}

/// The reason stands in the store, and the running service knows since when.
async fn the_doctor_names_an_open_breaker(kind: Kind) -> Result<()> {
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let env = TestEnv::with(
        kind,
        &format!(
            "[server]\nlisten = \"127.0.0.1:{port}\"\n[subscriptions.refused]\n{}\
         [subscriptions.lost]\nsink = {{ type = \"http\", url = \"http://no-such-host.invalid/\" }}\n",
            http_sink("http://127.0.0.1:9/")
        ),
    )
    .await?;
    env.insert_three().await?;
    let served = env.serve().await?;
    served.logged("breaker open", 2).await?;
    let said = env.said(&["doctor"])?;
    for name in ["refused", "lost"] {
        let line = said.lines().find(|line| line.starts_with(&format!("PROBLEM  {name}: the service at")));
        ensure!(line.is_some_and(|line| line.contains("the breaker is open since")), "{said}");
    }
    for code in ["connect_refused", "dns_failed"] {
        ensure!(said.contains(&format!("last reason: {code}")), "{said}");
    }
    ensure!(said.contains("is the destination up") && said.contains("the name in the sink's url"), "{said}");
    served.terminate().await?;
    // Nobody runs any more: the store remembers.
    let said = env.said(&["doctor"])?;
    for code in ["connect_refused", "dns_failed"] {
        ensure!(said.contains(&format!("ago, {code}: ")), "{said}");
    }
    let retrying = env.ok(&["list", "--state", "retrying", "--code", "connect_refused"])?;
    ensure!(retrying.starts_with(|c: char| c.is_ascii_hexdigit()) && retrying.contains("refused"), "{retrying}");
    ensure!(env.ok(&["stats"])?.contains("dead=0"));
    Ok(())
}

on_both! {
    an_event_that_nobody_wants_is_not_shown_as_delivered,
    the_doctor_names_an_open_breaker,
}
