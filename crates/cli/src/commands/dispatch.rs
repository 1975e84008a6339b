//! `postbox dispatch`: deliver what is there, once or again and again.

use std::sync::Arc;
use std::time::Duration;

use postbox_core::{Clock, Store};
use postbox_engine::{Drained, Relay, TokioClock};
use postbox_server::SinkConfig;
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
    let mut total = Drained::default();
    loop {
        let mut round = Drained::default();
        for relay in &relays {
            if limit == Some(0) || stop.is_cancelled() {
                break;
            }
            let drained = relay.drain_until(limit, stop.clone()).await?;
            limit = limit.map(|limit| limit.saturating_sub(drained.fetched as usize));
            add(&mut round, drained);
        }
        add(&mut total, round);
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
    signal.abort();
    let Drained { fetched, dispatched, failed, dead } = total;
    output::line(&format!("fetched={fetched} dispatched={dispatched} failed={failed} dead={dead}"))
}

async fn relays(context: &Context, store: &Arc<dyn Store>, clock: &Arc<dyn Clock>) -> Result<Vec<Relay>, Failure> {
    let configs = context.configured()?;
    let mut relays = Vec::with_capacity(configs.len());
    for config in &configs {
        if config.sink == SinkConfig::None {
            output::note(&format!("{} has no sink; its events stay pending", config.subscription.name));
            continue;
        }
        relays.push(postbox_server::relay(store, config, clock).await?);
    }
    if configs.is_empty() {
        output::note(
            "no subscription is configured; add [subscriptions.NAME] to postbox.toml, or name the file with --config",
        );
    }
    Ok(relays)
}

fn add(sum: &mut Drained, more: Drained) {
    sum.fetched += more.fetched;
    sum.dispatched += more.dispatched;
    sum.failed += more.failed;
    sum.dead += more.dead;
}
