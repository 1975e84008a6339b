//! What the commands tell of events that do not move.

use anyhow::{Context as _, Result, ensure};

use crate::room::{Kind, Room, on_both};

const FILE_SINK: &str = "[subscriptions.out]\nsink = { type = \"file\", path = \"out.jsonl\" }\n";

/// What the topics leave out is neither delivered nor on its way.
async fn an_event_that_nobody_wants_is_not_said_to_be_delivered(kind: Kind) -> Result<()> {
    let room = Room::migrated(kind).await?;
    let other = FILE_SINK.replace(".out]", ".other]\ntopics = [\"billing.*\"]");
    room.config(&(FILE_SINK.to_owned() + &other))?;
    room.insert_three().await?;
    let show = || -> Result<(String, serde_json::Value)> {
        let listed: serde_json::Value =
            serde_json::from_str(&room.ok(&["list", "--state", "pending", "--subscription", "out", "--json"])?)
                .or_else(|_| serde_json::from_str("[]"))?;
        let id = listed[0]["event"]["id"].as_str().context("no id")?.to_owned();
        Ok((room.ok(&["show", &id])?, serde_json::from_str(&room.ok(&["show", &id, "--json"])?)?))
    };
    let (shown, json) = show()?;
    ensure!(shown.contains("out: pending") && shown.contains("other: not subscribed"), "{shown}");
    let states: Vec<&str> =
        json["deliveries"].as_array().context("no list")?.iter().filter_map(|it| it["state"].as_str()).collect();
    ensure!(states.contains(&"not subscribed") && states.contains(&"pending"), "{json}");
    let id = json["event"]["id"].as_str().context("no id")?.to_owned();
    room.ok(&["dispatch"])?;
    let shown = room.ok(&["show", &id])?;
    ensure!(shown.contains("out: dispatched") && shown.contains("other: not subscribed"), "{shown}");
    Ok(())
}

/// A destination that never took anything: the reason stands in the store, and the service that runs knows since when.
async fn the_doctor_names_an_open_breaker(kind: Kind) -> Result<()> {
    let room = Room::migrated(kind).await?;
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    room.config(&format!(
        "[server]\nlisten = \"127.0.0.1:{port}\"\n[subscriptions.refused]\n\
         sink = {{ type = \"http\", url = \"http://127.0.0.1:9/\", allow = [\"127.0.0.1\"] }}\n\
         [subscriptions.lost]\nsink = {{ type = \"http\", url = \"http://no-such-host.invalid/\" }}\n"
    ))?;
    room.insert_three().await?;
    let served = room.serve().await?;
    served.logged("breaker open", 2).await?;
    let doctor = || -> Result<String> { Ok(String::from_utf8(room.output(&["doctor"])?.stdout)?) };
    let said = doctor()?;
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
    let said = doctor()?;
    for code in ["connect_refused", "dns_failed"] {
        ensure!(said.contains(&format!("ago, {code}: ")), "{said}");
    }
    let retrying = room.ok(&["list", "--state", "retrying", "--code", "connect_refused"])?;
    ensure!(retrying.starts_with(|c: char| c.is_ascii_hexdigit()) && retrying.contains("refused"), "{retrying}");
    ensure!(room.ok(&["stats"])?.contains("dead=0"));
    Ok(())
}

on_both! {
    an_event_that_nobody_wants_is_not_said_to_be_delivered,
    the_doctor_names_an_open_breaker,
}
