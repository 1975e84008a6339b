//! Incoming messages: senders that repeat themselves, rejected messages, sources that fail.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::{Planted, causes};
use crate::endpoint::Shut;
use crate::env::{Kind, until};
use crate::sender::{Sender, partner};

causes! {
    both a_sender_that_repeats_itself "problem" "replay_storm" "ask the sender why";
    both a_known_id_with_another_body "note" "message_conflict" "postbox list --state conflict";
    both a_broker_without_messages "problem" "source_failing" "postbox check-config --connect";
    both webhooks_that_cannot_be_stored "problem" "source_failing store_error" "log says at `store failed`";
}

/// With a reader of the inbox, so that nothing else is wrong.
fn config() -> String {
    format!("[subscriptions.apply]\nlog = \"inbox\"\nsink = {{ type = \"file\", path = \"in.jsonl\" }}\n{}", partner())
}

async fn a_sender_that_repeats_itself(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, config()).await?.served().await?;
    let mut sender = Sender::connect(&planted.served[0].address).await?;
    for n in 0..120 {
        let status = sender.send("msg_1", "{\"type\":\"invoice.paid\"}").await?;
        ensure!(status == if n == 0 { 202 } else { 200 }, "{status}");
    }
    Ok(planted)
}

async fn a_known_id_with_another_body(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, config()).await?.served().await?;
    let mut sender = Sender::connect(&planted.served[0].address).await?;
    for n in 0..2 {
        sender.send("msg_1", &format!("{{\"type\":\"invoice.paid\",\"n\":{n}}}")).await?;
    }
    Ok(planted)
}

async fn a_broker_without_messages(kind: Kind) -> Result<Planted> {
    let shut = Shut::reserve()?;
    let url = shut.url().replace("http://", "redis://");
    let source =
        format!("[sources.orders]\ntype = \"redis\"\nurl = \"{}\"\nstream = \"orders\"\n", url.trim_end_matches('/'));
    Ok(Planted::new(kind, config() + &source).await?.served().await?.keeping(shut))
}

async fn webhooks_that_cannot_be_stored(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, config()).await?.served().await?;
    let sql = match kind {
        Kind::Sqlite => "CREATE TRIGGER refuse BEFORE INSERT ON postbox_inbox BEGIN SELECT RAISE(ABORT, 'broken'); END",
        Kind::Postgres => {
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'broken'; END $$;
             CREATE TRIGGER refuse BEFORE INSERT ON postbox.inbox FOR EACH ROW EXECUTE FUNCTION refuse()"
        }
    };
    planted.env.sql(sql).await?;
    let (began, mut sent) = (Instant::now(), 0);
    until("it lasts", async || {
        sent += 1;
        let mut sender = Sender::connect(&planted.served[0].address).await?;
        let status = sender.send(&format!("msg_{sent}"), "{\"type\":\"invoice.paid\"}").await?;
        ensure!(status == 503, "{status}");
        Ok((began.elapsed() > Duration::from_secs(3)).then_some(()))
    })
    .await?;
    Ok(planted)
}
