//! What operators do while everything runs.

use postbox_crash_checker::faults::Fault;
use rand::Rng as _;
use rand::rngs::SmallRng;
use tokio::time::sleep;

use super::{choose, millis};
use crate::stage::{RELAYS, Stage};
use crate::writer::{TOPICS, now_micros};

const EVENTS_MAX: i64 = 30;

async fn order(stage: &Stage, op: &str, state: &str, most: i64, fault: &mut Fault) -> anyhow::Result<()> {
    let events = stage.bed.some_events("main", state, most).await?;
    fault.detail = format!("{} {state} events", events.len());
    fault.missed = events.is_empty();
    if !events.is_empty() {
        // Commands in between may have changed these events: the output says so, and it is not an
        // error. Commands that remove events require a subscription.
        stage.order(op, (op != "retry").then_some("main"), events).await?;
    }
    Ok(())
}

/// Retries dead events, and retrying ones at once.
pub(super) async fn retry(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let state = *choose(&["dead", "dead", "retrying"], random);
    order(stage, "retry", state, random.random_range(1..EVENTS_MAX), fault).await
}

/// Discards events, whatever their state.
pub(super) async fn discard(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let state = *choose(&["dead", "blocked", "retrying"], random);
    order(stage, "discard", state, random.random_range(1..6), fault).await
}

/// Marks events dead, whatever their next attempt would bring.
pub(super) async fn mark_dead(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let state = *choose(&["blocked", "retrying"], random);
    order(stage, "mark-dead", state, random.random_range(1..6), fault).await
}

/// Prunes events that every subscription has passed.
pub(super) async fn prune(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let age = *choose(&["1s", "2s", "5s"], random);
    let (ok, said) = stage.operate(&["prune", "--older-than", age]).await?;
    fault.detail = format!("{age}, {ok}: {}", said.lines().last().unwrap_or_default());
    fault.missed = !ok;
    Ok(())
}

/// Pauses a subscription for a while. A pause takes lanes away as cleanly as a stop.
pub(super) async fn pause(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let name = *choose(&["main", "part"], random);
    fault.detail = name.to_owned();
    stage.operate(&["pause", name, "--for", "20s"]).await?;
    sleep(millis(random, 100..1_500)).await;
    while !stage.operate(&["resume", name]).await?.0 {
        sleep(millis(random, 50..100)).await;
    }
    Ok(())
}

/// Adds a topic to one subscription, or removes it, one relay after the other.
pub(super) async fn change_filter(stage: &Stage, _random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let before = stage.topics.lock().await.clone();
    let most = TOPICS.map(str::to_owned).to_vec();
    let after = if before.len() == most.len() { most[..2].to_vec() } else { most };
    fault.detail = after.join(" ");
    *stage.topics.lock().await = after.clone();
    // Recorded now: any relay started from here on has the new filter, even if this function fails.
    fault.topics = Some((before, after));
    roll(stage, fault).await
}

/// Restarts all relays with the current configuration. The record ends when the last of them
/// serves.
pub(crate) async fn roll(stage: &Stage, fault: &mut Fault) -> anyhow::Result<()> {
    for number in 0..RELAYS {
        stage.configure(number).await?;
        let mut relay = stage.relays[number].lock().await;
        relay.stop().await?;
        relay.start()?;
        relay.serving().await?;
    }
    fault.until = now_micros();
    Ok(())
}
