//! `postbox dispatch`: deliver what is there, once, or again until nothing is pending.

use std::sync::Arc;
use std::time::Duration;

use postbox_core::{Clock, Store};
use postbox_engine::{Drained, MetricsSnapshot, Relay, TokioClock, UnroutedFinder};
use postbox_server::SubscriptionConfig;
use tokio_util::sync::CancellationToken;

use crate::context::Context;
use crate::failure::Failure;
use crate::output;
use crate::signals::stopped;

/// Wait between two looks at a log that had nothing to give: `run` is the one that reacts at once.
const IDLE: Duration = Duration::from_millis(500);

pub(super) async fn run(context: &Context, limit: Option<usize>, until_empty: bool) -> Result<(), Failure> {
    let store = context.store().await?;
    store.validate().await?;
    let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
    let relays = relays(context, &store, &clock).await?;
    let stop = CancellationToken::new();
    let stopping = stop.clone();
    let signal = tokio::spawn(async move {
        stopped().await;
        stopping.cancel();
    });
    let (mut limit, mut lanes_lost, mut stuck) = (limit, 0, None);
    let mut ended = Ok(());
    'rounds: loop {
        let mut round = Drained::default();
        for relay in &relays {
            if limit == Some(0) || stop.is_cancelled() {
                break;
            }
            match relay.drain_until(limit, stop.clone()).await {
                Ok(drained) => {
                    limit = limit.map(|limit| limit.saturating_sub(drained.fetched as usize));
                    round += drained;
                }
                Err(error) => {
                    ended = Err(error);
                    break 'rounds;
                }
            }
        }
        // In a loop the next round takes them again.
        lanes_lost = round.lanes_lost;
        if !until_empty || limit == Some(0) || stop.is_cancelled() {
            break;
        }
        if round.fetched > 0 {
            continue;
        }
        match left(context, store.as_ref()).await {
            Ok(Left::Nothing) => break,
            Ok(Left::Stuck(why)) => {
                stuck = Some(why);
                break;
            }
            Ok(Left::Pending) => {}
            Err(error) => {
                ended = Err(error);
                break;
            }
        }
        tokio::select! {
            () = stop.cancelled() => break,
            () = clock.sleep(IDLE) => {}
        }
    }
    // What a relay that runs finds every second. It says nothing of what was delivered.
    let logs = context.configured()?.iter().map(|config| config.subscription.log.clone()).collect();
    if ended.is_ok() {
        ended = UnroutedFinder::new(Arc::clone(&store) as _, logs, Arc::clone(&clock)).find(&stop).await.map(drop);
    }
    signal.abort();
    // Of the metrics, not of the rounds: what was done by a run that failed midway is in there,
    // too.
    let mut done = Drained::default();
    for relay in &relays {
        done += Drained::between(&MetricsSnapshot::default(), &relay.metrics().snapshot());
    }
    // A run that could not even begin has done nothing to speak of: its error is all it says.
    if ended.is_ok() || done.fetched > 0 {
        let Drained { fetched, delivered, failed, dead, .. } = done;
        output::line(&format!("fetched={fetched} dispatched={delivered} failed={failed} dead={dead}"))?;
    }
    ended?;
    if let Some(stuck) = stuck {
        return Err(Failure::failed(stuck));
    }
    if lanes_lost > 0 && !until_empty {
        return Err(Failure::failed(format!(
            "{lanes_lost} lane(s) were lost before they were empty: another relay took them, or somebody paused the subscription"
        )));
    }
    Ok(())
}

/// What there is still to do where a round found nothing.
enum Left {
    Nothing,
    /// Something waits for its time, or is on its way with another relay.
    Pending,
    /// Only a person can go on.
    Stuck(String),
}

/// Asks of every subscription that delivers and is not paused.
async fn left(context: &Context, store: &dyn Store) -> postbox_core::Result<Left> {
    let mut left = Left::Nothing;
    for info in store.subscriptions().await? {
        let of_it = |config: &&SubscriptionConfig| config.subscription.name == info.name && !config.sink.is_none();
        let is_meant = context.config.subscriptions.iter().find(of_it).is_some_and(|config| context.means(config));
        if !is_meant || info.paused.is_some() {
            continue;
        }
        let stats = store.stats(&info.name).await?;
        let is_held = info.lanes.iter().any(|lane| lane.lease_left.is_some());
        match stats.pending {
            0 => {}
            pending if pending == stats.blocked && stats.dead > 0 && !is_held => {
                let name = &info.name;
                return Ok(Left::Stuck(format!(
                    "{pending} event(s) of {name} wait behind a dead one of their key; retry or discard it: postbox list --state dead --subscription {name}"
                )));
            }
            _ => left = Left::Pending,
        }
    }
    Ok(left)
}

async fn relays(context: &Context, store: &Arc<dyn Store>, clock: &Arc<dyn Clock>) -> Result<Vec<Relay>, Failure> {
    let configs = context.configured()?;
    let mut relays = Vec::with_capacity(configs.len());
    for config in &configs {
        if config.sink.is_none() {
            store.subscribe(&config.subscription).await?;
            output::note(&format!("{} has no sink; its events stay pending", config.subscription.name));
            continue;
        }
        relays.push(postbox_server::relay(store, config, context.config.server.listen, clock).await?);
    }
    if configs.is_empty() {
        output::note(
            "no subscription is configured; add [subscriptions.NAME] to postbox.toml, or name the file with --config",
        );
    }
    Ok(relays)
}
