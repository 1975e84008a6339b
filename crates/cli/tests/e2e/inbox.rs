//! Webhooks in: stored by `run`, seen and steered by the same commands as the outbox, applied by an HTTP handler.

use anyhow::{Context as _, Result, ensure};

use crate::endpoint::Endpoint;
use crate::room::{Kind, Room, on_both};
use crate::sender::{Sender, partner};

/// Sends these while a service runs; it is stopped then.
async fn send(room: &Room, messages: &[(&str, &str, u16)]) -> Result<Vec<String>> {
    let served = room.serve().await?;
    let mut sender = Sender::connect(&served.address).await?;
    for (id, body, status) in messages {
        let heard = sender.send(id, body).await?;
        ensure!(heard == *status, "{id} was answered with {heard}");
    }
    served.terminate().await
}

async fn inbox_rows_work_with_the_same_commands(kind: Kind) -> Result<()> {
    let room = Room::migrated(kind).await?;
    // Nobody applies yet: messages are stored, and counted.
    room.config(&partner())?;
    ensure!(room.ok(&["stats", "--log", "inbox"])? == "pending=0 dispatched=0 dead=0 total=0\n");
    let (paid, sent) = ("{\"type\":\"invoice.paid\"}", "{\"type\":\"invoice.sent\"}");
    send(&room, &[("msg_1", paid, 202), ("msg_1", paid, 200), ("msg_2", sent, 202)]).await?;
    ensure!(room.ok(&["stats", "--log", "inbox"])? == "pending=2 dispatched=0 dead=0 total=2\n");
    ensure!(room.ok(&["stats"])? == "pending=0 dispatched=0 dead=0 total=0\n");
    let complaint = room.refuses(1, &["list", "--log", "inbox", "--state", "pending"])?;
    ensure!(complaint.contains("log = \"inbox\""), "{complaint}");
    let complaint = room.refuses(1, &["stats", "--log", "nowhere"])?;
    ensure!(complaint.contains("nowhere"), "{complaint}");

    let apply = "[subscriptions.apply]\nlog = \"inbox\"\nSINK\n[subscriptions.out]\n";
    room.config(&(apply.replace("SINK", "") + &partner()))?;
    room.insert_three().await?;
    ensure!(room.ok(&["stats"])? == "pending=5 dispatched=0 dead=0 total=5\n");
    ensure!(room.ok(&["stats", "--log", "inbox"])? == "pending=2 dispatched=0 dead=0 total=2\n");
    let listed = room.ok(&["list", "--log", "inbox", "--state", "pending"])?;
    ensure!(listed.lines().count() == 2 && listed.contains("invoice.paid"), "{listed}");
    let id = listed.split('\t').next().context("no id")?.to_owned();
    ensure!(room.ok(&["show", &id, "--log", "inbox"])?.contains("invoice.paid"));
    room.refuses(1, &["show", &id, "--log", "outbox"])?;

    let file = "sink = { type = \"file\", path = \"applied.jsonl\" }";
    room.config(&(apply.replace("SINK", file) + &partner()))?;
    ensure!(room.ok(&["dispatch", "--log", "inbox"])? == "fetched=2 dispatched=2 failed=0 dead=0\n");
    ensure!(room.lines("applied.jsonl")?.len() == 2);
    ensure!(room.ok(&["stats", "--log", "inbox"])? == "pending=0 dispatched=2 dead=0 total=2\n");
    ensure!(room.ok(&["prune", "--log", "inbox", "--older-than", "0s"])? == "pruned=2\n");
    Ok(())
}

/// The handler refused them all; it is mended, and they are brought back a few at a time.
async fn dead_messages_are_revived_oldest_first(kind: Kind) -> Result<()> {
    let room = Room::migrated(kind).await?;
    let refusing = Endpoint::start(|_| (422, std::time::Duration::ZERO))?;
    let config = |url: String| {
        format!("[subscriptions.apply]\nlog = \"inbox\"\nsink = {{ type = \"http\", url = \"{url}\" }}\n{}", partner())
    };
    // Stored first, so that the order in which they came is known.
    room.config(&partner())?;
    let bodies: Vec<(String, String)> =
        (0..6).map(|n| (format!("msg_{n}"), format!("{{\"type\":\"invoice.paid\",\"n\":{n}}}"))).collect();
    let messages: Vec<_> = bodies.iter().map(|(id, body)| (id.as_str(), body.as_str(), 202)).collect();
    send(&room, &messages).await?;
    room.config(&config(refusing.url()))?;
    ensure!(room.ok(&["dispatch"])? == "fetched=6 dispatched=0 failed=0 dead=6\n");
    ensure!(room.ok(&["stats", "--log", "inbox"])? == "pending=0 dispatched=0 dead=6 total=6\n");

    let mended = Endpoint::start(|_| (200, std::time::Duration::ZERO))?;
    room.config(&config(mended.url()))?;
    ensure!(room.refuses(1, &["retry", "--log", "outbox", "--all"])?.contains("no subscription reads outbox"));
    let numbers = || mended.arrivals().iter().map(|arrival| arrival.n).collect::<std::collections::BTreeSet<_>>();
    ensure!(room.ok(&["retry", "--log", "inbox", "--all", "--limit", "2"])? == "retried=2\n");
    ensure!(room.ok(&["dispatch"])?.contains("dispatched=2"));
    ensure!(numbers() == [0, 1].into(), "{:?}", numbers());
    let listed = room.ok(&["list", "--log", "inbox", "--state", "dead"])?;
    let id = listed.split('\t').next().context("no id")?;
    ensure!(room.ok(&["discard", "--log", "inbox", id])? == "discarded=1\n");
    ensure!(room.ok(&["retry", "--log", "inbox", "--all", "--limit", "2"])? == "retried=2\n");
    ensure!(room.ok(&["dispatch"])?.contains("dispatched=2"));
    ensure!(numbers() == [0, 1, 3, 4].into(), "{:?}", numbers());
    ensure!(room.ok(&["stats", "--log", "inbox"])? == "pending=0 dispatched=4 dead=1 total=6\n");
    Ok(())
}

on_both!(inbox_rows_work_with_the_same_commands, dead_messages_are_revived_oldest_first);
