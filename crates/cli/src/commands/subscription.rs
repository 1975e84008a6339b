//! `postbox subscription list|show|rename|reset|remove|lanes`.

use std::time::Duration;

use postbox_core::{ResetTo, Store, SubscriptionInfo, SubscriptionName};
use postbox_server::status::{self, STATS_WAIT, StatsJson, SubscriptionJson};
use postbox_server::text::{estimated, span};
use tokio::time::Instant;

use crate::context::Context;
use crate::failure::Failure;
use crate::output;
use crate::stores::{self, OfStore, ask_each};

pub(super) async fn list(contexts: &[Context], json: bool) -> Result<(), Failure> {
    let registered = async |context: &Context| {
        let store = context.store().await?;
        let infos = context.registered(store.as_ref()).await?;
        let all = with_counts(context, store.as_ref(), &infos).await;
        context.never_run(&infos).for_each(|name| context.note(&context.why_unread(name, &infos)));
        Ok(all)
    };
    let asked = ask_each(contexts, registered).await;
    let is_answered = asked.is_answered();
    let all: Vec<(&Context, SubscriptionJson)> =
        asked.answers.into_iter().flat_map(|(context, all)| all.into_iter().map(move |one| (context, one))).collect();
    if json {
        if is_answered {
            output::json(&all.iter().map(|(context, one)| OfStore::new(context, one)).collect::<Vec<_>>());
        }
    } else {
        stores::rows(&HEAD, all.iter().map(|(context, one)| (*context, row(one))).collect());
    }
    asked.ended
}

pub(crate) const HEAD: [&str; 10] =
    ["subscription", "log", "filter", "ordering", "lanes", "relays", "pending", "dead", "oldest", "paused"];

pub(super) async fn show(context: &Context, name: &SubscriptionName, json: bool) -> Result<(), Failure> {
    let store = context.store().await?;
    let info = named(context, store.as_ref(), name).await?;
    let Some(shown) = with_counts(context, store.as_ref(), &[info]).await.pop() else { return Ok(()) };
    if json {
        output::json(&shown)
    } else {
        output::fields(&describe(&shown))
    }
    Ok(())
}

pub(super) async fn rename(
    context: &Context,
    name: &SubscriptionName,
    to: &SubscriptionName,
    json: bool,
) -> Result<(), Failure> {
    let store = context.store_to_change().await?;
    let info = named(context, store.as_ref(), name).await?;
    store.rename(name, info.generation, to).await?;
    let line = format!("{name} is now called {to}; rename it in the configuration too, and restart its relays");
    output::done(json, &serde_json::json!({ "subscription": to, "renamed_from": name }), &line);
    Ok(())
}

pub(super) async fn reset(
    context: &Context,
    name: &SubscriptionName,
    to: ResetTo,
    yes: bool,
    json: bool,
) -> Result<(), Failure> {
    let store = context.store_to_change().await?;
    named(context, store.as_ref(), name).await?;
    let plan = store.reset(name, to, None).await?;
    let [again, skipped] = [plan.again, plan.skipped]
        .map(|count| if plan.is_estimate { format!("at least {count}") } else { count.to_string() });
    let estimate = if plan.is_estimate { " estimated=true" } else { "" };
    let line = format!("again={} skipped={}{estimate}", plan.again, plan.skipped);
    let counts = serde_json::json!({ "again": plan.again, "skipped": plan.skipped, "estimated": plan.is_estimate });
    output::result(json, &counts, &line);
    if !yes {
        return Err(Failure::usage(format!(
            "nothing was changed yet: {again} event(s) of {name} would be delivered again, and {skipped} that were \
             not delivered would be skipped; to do it, add --yes"
        )));
    }
    store.reset(name, to, Some(&plan.stamp)).await?;
    output::note(&format!("{name} was reset"));
    output::nevertheless(&format!("{name} was reset"));
    Ok(())
}

pub(super) async fn remove(context: &Context, name: &SubscriptionName, yes: bool, json: bool) -> Result<(), Failure> {
    let store = context.store_to_change().await?;
    let info = named(context, store.as_ref(), name).await?;
    if !yes {
        let stats = store.stats(name).await?;
        let pending = estimated(stats.pending, stats.is_estimate);
        let dead = estimated(stats.dead, stats.dead > stats.share);
        return Err(Failure::usage(format!(
            "nothing was removed yet: {name} has {pending} pending and {dead} dead event(s), which it would never deliver; to do it, add --yes"
        )));
    }
    store.remove(name, info.generation).await?;
    output::done(json, &serde_json::json!({ "removed": name }), &format!("{name} is removed"));
    if context.config.subscriptions.iter().any(|config| config.subscription.name == *name) {
        output::note(&format!("[subscriptions.{name}] is still in the configuration: the next start creates it again"));
    }
    Ok(())
}

pub(super) async fn lanes(context: &Context, name: &SubscriptionName, lanes: u16, json: bool) -> Result<(), Failure> {
    let store = context.store_to_change().await?;
    named(context, store.as_ref(), name).await?;
    store.set_lanes(name, lanes).await?;
    let line = format!("{name} has {lanes} lane(s); up to {lanes} replica(s) work on it at once");
    output::done(json, &serde_json::json!({ "subscription": name, "lanes": lanes }), &line);
    Ok(())
}

/// Returns a subscription of the store, if `--log` and `--subscription` do not exclude it.
async fn named(context: &Context, store: &dyn Store, name: &SubscriptionName) -> Result<SubscriptionInfo, Failure> {
    super::pause::check_known(context, store, name).await?;
    let known = store.subscriptions().await?;
    if let Some(info) = known.iter().find(|info| info.name == *name) {
        return Ok(info.clone());
    }
    let known: Vec<String> = known.iter().map(|info| info.name.to_string()).collect();
    Err(postbox_core::kit::subscription_unknown("subscription", name, &known).into())
}

async fn with_counts(context: &Context, store: &dyn Store, infos: &[SubscriptionInfo]) -> Vec<SubscriptionJson> {
    let counted = status::stats(store, infos, Instant::now() + STATS_WAIT).await;
    let counts = counted.into_iter().zip(infos).map(|(counts, info)| {
        counts
            .inspect_err(|error| {
                context.note(&format!("{} could not be counted: {} ({})", info.name, error.message(), error.code()));
            })
            .ok()
    });
    infos.iter().zip(counts).map(|(info, counts)| SubscriptionJson::new(info, counts)).collect()
}

pub(crate) fn row(of: &SubscriptionJson) -> Vec<String> {
    let count = |text: fn(&StatsJson) -> String| of.counts.as_ref().map_or_else(|| "-".to_owned(), text);
    vec![
        of.subscription.to_string(),
        of.log.to_string(),
        of.filter.to_string(),
        ordering(of).to_owned(),
        of.lanes.len().to_string(),
        of.relays().to_string(),
        count(|counts| estimated(counts.pending, counts.is_estimate)),
        count(|counts| counts.of_rows(counts.dead)),
        oldest(of),
        of.paused.as_ref().map_or_else(|| "-".to_owned(), |pause| pause.why.clone()),
    ]
}

fn topics(of: &SubscriptionJson) -> String {
    let topics: Vec<&str> = of.filter.topics.iter().map(|topic| topic.as_str()).collect();
    if topics.is_empty() { "*".to_owned() } else { topics.join(" ") }
}

fn ordering(of: &SubscriptionJson) -> &'static str {
    match of.ordering {
        postbox_core::Ordering::Key => "key",
        postbox_core::Ordering::None => "none",
    }
}

fn oldest(of: &SubscriptionJson) -> String {
    of.counts.as_ref().and_then(StatsJson::oldest).map_or_else(|| "-".to_owned(), span)
}

fn describe(of: &SubscriptionJson) -> Vec<(&'static str, String)> {
    let mut fields = vec![
        ("subscription", of.subscription.to_string()),
        ("log", of.log.to_string()),
        ("topics", topics(of)),
        ("tenant", of.filter.tenant.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string)),
        ("ordering", ordering(of).to_owned()),
    ];
    let headers: Vec<String> = of.filter.headers.iter().map(|(name, value)| format!("{name}={value}")).collect();
    for (what, wanted) in [("kinds", &of.filter.kinds), ("aggregates", &of.filter.aggregates), ("headers", &headers)] {
        fields.extend((!wanted.is_empty()).then(|| (what, wanted.join(" "))));
    }
    fields.extend(of.paused.as_ref().map(|pause| {
        let until = pause.until.as_ref().map_or_else(String::new, |until| format!(" until {until}"));
        ("paused", format!("by {}{until}: {}", pause.by, pause.why))
    }));
    fields.extend(of.lanes.iter().map(|lane| {
        let left = lane.lease_seconds.map(|left| span(Duration::from_secs_f64(left)));
        let held = match (&lane.relay, left) {
            (Some(relay), Some(left)) => format!("held by {relay} for {left}"),
            (None, Some(left)) => format!("free in {left}"),
            _ => "free".to_owned(),
        };
        ("lane", format!("{}: {held}", lane.lane))
    }));
    if let Some(counts) = &of.counts {
        let pending = estimated(counts.pending, counts.is_estimate);
        let since = counts.oldest().map_or_else(String::new, |oldest| format!(", the oldest for {}", span(oldest)));
        fields.push(("pending", format!("{pending}{since}")));
        fields.push(("dead", counts.of_rows(counts.dead)));
        fields.push(("dispatched", counts.dispatched.to_string()));
    }
    fields
}
