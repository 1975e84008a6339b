//! Nothing is down, and events are late all the same: arrival and delivery rates.

use std::time::Duration;

use anyhow::Result;

use super::{Planted, causes};
use crate::endpoint::Endpoint;
use crate::env::Kind;

causes! {
    both a_slow_destination "problem" "destination_slow" "set concurrency = ";
    both a_low_rate "problem" "rate_limited" "raise the subscription's `rate` to ";
    both one_key_for_everything "problem" "few_keys" "give the events finer keys";
    both a_backlog_that_ends_by_itself "note" "destination_slow" "wait, or raise the subscription's `concurrency`";
}

/// Events of half a minute go to a destination that takes 150 ms for each.
async fn late(kind: Kind, events: usize, settings: &str, key: fn(usize) -> String) -> Result<Planted> {
    let slow = Endpoint::start(|_| (204, Duration::from_millis(150)))?;
    let planted = Planted::new(kind, slow.subscription("out") + settings).await?;
    Ok(planted.arrived(events, key).await?.served().await?.keeping(slow))
}

/// Two calls at once of 150 ms are 13/s; 2,000 events arrived within 30 s.
async fn a_slow_destination(kind: Kind) -> Result<Planted> {
    late(kind, 2_000, "concurrency = 2\n", |n| n.to_string()).await
}

async fn a_low_rate(kind: Kind) -> Result<Planted> {
    late(kind, 2_000, "rate = \"5/s\"\n", |n| n.to_string()).await
}

async fn one_key_for_everything(kind: Kind) -> Result<Planted> {
    late(kind, 2_000, "", |n| if n % 4 == 0 { n.to_string() } else { "hot".into() }).await
}

/// 107/s go out, and some 10/s arrive.
async fn a_backlog_that_ends_by_itself(kind: Kind) -> Result<Planted> {
    late(kind, 600, "concurrency = 8\nbatch = 8\n", |n| n.to_string()).await
}
