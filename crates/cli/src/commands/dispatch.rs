//! `postbox dispatch`: deliver what is there, once or again and again.

use std::sync::Arc;
use std::time::Duration;

use postbox_core::{Clock, Store};
use postbox_engine::{Drained, MetricsSnapshot, Relay, TokioClock, UnroutedFinder};
use tokio_util::sync::CancellationToken;

use crate::context::Context;
use crate::failure::Failure;
use crate::output;
use crate::signals::stopped;

/// Wait between two looks at a log that had nothing: `run` is the one that reacts at once.
const IDLE: Duration = Duration::from_millis(500);

pub(super) async fn run(context: &Context, limit: Option<u64>, forever: bool) -> Result<(), Failure> {
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
    let mut limit = limit.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX));
    let mut lanes_lost = 0;
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
        // With --forever the next round takes them again.
        lanes_lost = round.lanes_lost;
        if !forever || stop.is_cancelled() {
            break;
        }
        if round.fetched == 0 {
            tokio::select! {
                () = stop.cancelled() => break,
                () = clock.sleep(IDLE) => {}
            }
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
        let printed = output::line(&format!("fetched={fetched} dispatched={delivered} failed={failed} dead={dead}"));
        // Who lets it run for days may have gone; what was delivered was delivered.
        if !forever {
            printed?;
        }
    }
    ended?;
    if lanes_lost > 0 && !forever {
        return Err(Failure::failed(format!(
            "{lanes_lost} lane(s) were lost before they were empty: another relay took them, or somebody paused the subscription"
        )));
    }
    Ok(())
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
