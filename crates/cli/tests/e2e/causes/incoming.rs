//! Incoming messages: senders that repeat themselves, rejected messages, sources that fail.

use anyhow::{Result, ensure};

use super::{Planted, causes};
use crate::endpoint::Shut;
use crate::env::Kind;
use crate::sender::{Sender, partner};

causes! {
    both a_sender_that_repeats_itself "problem" "replay_storm";
    both a_known_id_with_another_body "note" "message_conflict";
    both a_broker_without_messages "problem" "source_failing";
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
