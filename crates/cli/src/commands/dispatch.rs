//! `postbox dispatch`: delivers what is pending, once, or in a loop until nothing is pending.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use postbox_core::{Clock, LogName, Store, SubscriptionName};
use postbox_engine::{Drained, MetricsSnapshot, Relay, TokioClock, UnroutedFinder, note_subscribed};
use postbox_server::{LaneLeases, ServerConfig, Sinks, SubscriptionConfig};
use tokio_util::sync::CancellationToken;
use tracing::{Span, error_span};

use crate::context::Context;
use crate::failure::Failure;
use crate::output;
use crate::signals::stopped;
use crate::stores::{ask_each, together};

/// Wait after a round that found nothing. `postbox run` is the command that reacts at once.
const IDLE: Duration = Duration::from_millis(500);

/// How long a stop waits for stores that do not answer: the drain time of a relay (10 s), and its
/// time for a settlement and for what it gives back.
const STOP_MAX: Duration = Duration::from_secs(19);

pub(super) async fn run(
    contexts: &[Context],
    limit: Option<usize>,
    until_empty: bool,
    json: bool,
) -> Result<(), Failure> {
    if limit.is_some() && contexts.len() > 1 {
        return Err(Failure::usage("--limit is for one store, and there are several; name one: --store NAME"));
    }
    // Before anything is waited for.
    let stopped = stopped();
    let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
    let sinks = sinks(contexts, &clock).await?;
    // It is the same in all of them.
    let leases = contexts.first().map_or_else(|| Ok(LaneLeases::default()), |first| first.config.lease.build())?;
    let (stop, give_up) = (CancellationToken::new(), CancellationToken::new());
    let (stopping, giving_up, timer) = (stop.clone(), give_up.clone(), Arc::clone(&clock));
    let signal = tokio::spawn(async move {
        stopped.await;
        stopping.cancel();
        timer.sleep(STOP_MAX).await;
        giving_up.cancel();
    });
    let mut is_configured = false;
    for context in contexts {
        is_configured |= !context.configured()?.is_empty();
    }
    let (sinks, leases) = (&sinks, &leases);
    let drain =
        Drain { sinks, leases, clock: &clock, stop: &stop, give_up: &give_up, limit, until_empty, is_configured };
    let asked = ask_each(contexts, |context| drain.store(context)).await;
    signal.abort();
    let mut done = Drained::default();
    let mut failures = Vec::new();
    for (context, (drained, ended)) in asked.answers {
        done += drained;
        failures.extend(ended.err().map(|failure| (context, failure)));
    }
    let ended = together(failures).and(asked.ended);
    // A run that failed before it read anything prints only its error.
    if ended.is_ok() || done.fetched > 0 {
        let Drained { fetched, delivered, failed, dead, .. } = done;
        let line = format!("fetched={fetched} dispatched={delivered} failed={failed} dead={dead}");
        let counts = serde_json::json!({ "fetched": fetched, "dispatched": delivered, "failed": failed, "dead": dead });
        output::done(json, &counts, &line);
    }
    ended
}

/// Builds the sinks of the selected subscriptions.
async fn sinks(contexts: &[Context], clock: &Arc<dyn Clock>) -> Result<Sinks, Failure> {
    let mut configs: BTreeMap<SubscriptionName, SubscriptionConfig> = BTreeMap::new();
    for context in contexts {
        configs.extend(context.configured()?.into_iter().map(|config| (config.subscription.name.clone(), config)));
    }
    let listening = contexts.first().map_or_else(|| ServerConfig::default().listen, |first| first.config.server.listen);
    Ok(Sinks::build(configs.values(), contexts.len(), listening, clock).await?)
}

/// What is needed to drain each store.
struct Drain<'a> {
    sinks: &'a Sinks,
    leases: &'a LaneLeases,
    clock: &'a Arc<dyn Clock>,
    stop: &'a CancellationToken,
    /// The stop has waited long enough for the stores.
    give_up: &'a CancellationToken,
    limit: Option<usize>,
    until_empty: bool,
    /// Whether any of the stores has a subscription.
    is_configured: bool,
}

impl Drain<'_> {
    /// Returns what was done and how it ended; an error if it could not begin.
    async fn store(&self, context: &Context) -> Result<(Drained, Result<(), Failure>), Failure> {
        let beginning = async {
            let store = context.store_to_change().await?;
            let relays = self.relays_of(context, &store)?;
            Ok::<_, Failure>((store, relays))
        };
        let begun = self.stop.run_until_cancelled(beginning).await;
        let stopped = || Failure::failed("stopped before the store answered, so nothing was sent; run it again");
        let (store, relays) = begun.ok_or_else(stopped)??;
        let ended = self.give_up.run_until_cancelled(self.rounds(context, &store, &relays)).await;
        let ended = ended.unwrap_or_else(|| {
            Err(Failure::failed(format!(
                "stopped, but the store did not answer for {} s; events that were sent may be sent again: run it again when the store answers",
                STOP_MAX.as_secs()
            )))
        });
        // Taken from the metrics, not the rounds, so that the work of a run that failed midway is
        // included.
        let mut done = Drained::default();
        for relay in &relays {
            done += Drained::between(&MetricsSnapshot::default(), &relay.metrics().snapshot());
        }
        Ok((done, ended))
    }

    async fn rounds(&self, context: &Context, store: &Arc<dyn Store>, relays: &[Relay]) -> Result<(), Failure> {
        let Self { stop, until_empty, .. } = *self;
        let configs = context.configured()?;
        let known = store.subscriptions().await?;
        // With several stores, each line names its store, as those of `run` do.
        let span = context.name.as_ref().map_or_else(Span::none, |name| error_span!("postbox", store = %name));
        // Stores the filters as configured now: unrouted events are handed over by them.
        for SubscriptionConfig { subscription, .. } in &configs {
            store.subscribe(subscription).await?;
            let is_ours =
                |name: &SubscriptionName| context.config.subscriptions.iter().any(|it| it.subscription.name == *name);
            span.in_scope(|| note_subscribed(subscription, &known, is_ours));
        }
        let logs: BTreeSet<LogName> = configs.into_iter().map(|config| config.subscription.log).collect();
        let all = logs.iter().cloned().collect();
        let finder = UnroutedFinder::new(Arc::clone(store) as _, all, Arc::clone(self.clock));
        let (mut limit, mut stuck) = (self.limit, None);
        let lanes_lost = loop {
            // One step, which hands over what a changed filter wants, so that this round sends it.
            for log in &logs {
                _ = store.note_unrouted(log).await?;
            }
            let mut round = Drained::default();
            for relay in relays {
                if limit == Some(0) || stop.is_cancelled() {
                    break;
                }
                let drained = relay.drain_until(limit, stop.clone()).await?;
                limit = limit.map(|limit| limit.saturating_sub(drained.fetched as usize));
                round += drained;
            }
            // Only now: a log that nobody has looked at yet may take minutes.
            finder.find(stop).await?;
            // In a loop, the next round takes lost lanes again.
            if !until_empty || limit == Some(0) || stop.is_cancelled() {
                break round.lanes_lost;
            }
            if round.fetched > 0 {
                continue;
            }
            match left(context, store.as_ref()).await? {
                Left::Nothing => break 0,
                Left::Stuck(why) => {
                    stuck = Some(why);
                    break 0;
                }
                Left::Pending => {}
            }
            tokio::select! {
                () = stop.cancelled() => break 0,
                () = self.clock.sleep(IDLE) => {}
            }
        };
        if let Some(stuck) = stuck {
            return Err(Failure::failed(stuck));
        }
        if lanes_lost > 0 && (!until_empty || stop.is_cancelled()) {
            return Err(Failure::failed(format!(
                "{lanes_lost} lane(s) were lost before they were empty: another relay took them, somebody paused the subscription, the store did not answer or went back to an earlier state, or this process stood still; run it again"
            )));
        }
        Ok(())
    }

    fn relays_of(&self, context: &Context, store: &Arc<dyn Store>) -> Result<Vec<Relay>, Failure> {
        let configs = context.configured()?;
        let mut relays = Vec::with_capacity(configs.len());
        for config in &configs {
            if config.sink.is_none() {
                context.note(&format!("{} has no sink; its events stay pending", config.subscription.name));
                continue;
            }
            let log = self.leases.log(store, context.name.as_ref());
            let of = (&context.config.server, config);
            relays.push(postbox_server::relay(store, log, of, self.sinks, self.clock)?);
        }
        if configs.is_empty() {
            let of = context.log.as_ref().map_or_else(String::new, |log| format!(" of {log}"));
            let text = format!(
                "no subscription{of} is configured, so nothing is delivered; add [subscriptions.NAME] to postbox.toml, or name the file with --config"
            );
            if !self.is_configured {
                return Err(Failure::usage(text));
            }
            context.note(&text);
        }
        Ok(relays)
    }
}

/// What is left to do after a round that found nothing.
enum Left {
    Nothing,
    /// Something waits for its time, or another relay has it in flight.
    Pending,
    /// Only a person can resolve what is left. Names the first subscription.
    Stuck(String),
}

/// Checks every subscription that has a sink and is not paused.
async fn left(context: &Context, store: &dyn Store) -> postbox_core::Result<Left> {
    let mut stuck = None;
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
                stuck.get_or_insert_with(|| {
                    format!(
                        "{pending} event(s) of {name} wait behind a dead one of their key; retry or discard it: postbox list --state dead --subscription {name}"
                    )
                });
            }
            // It goes on by itself, whatever waits for a person elsewhere.
            _ => return Ok(Left::Pending),
        }
    }
    Ok(stuck.map_or(Left::Nothing, Left::Stuck))
}
