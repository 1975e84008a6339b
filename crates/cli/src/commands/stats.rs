//! `postbox stats`: one line for scripts, a table for people, everything as JSON.

use std::time::Duration;

use postbox_core::kit::LOOK_EVENTS_MAX;
use postbox_server::status::{self, StatsJson};
use postbox_server::text::{estimated, grouped, span};
use tokio::time::{Instant, timeout_at};

use crate::context::Context;
use crate::failure::Failure;
use crate::output;

pub(super) async fn run(context: &Context, json: bool) -> Result<(), Failure> {
    let deadline = Instant::now() + status::STATS_WAIT;
    let store = context.store().await?;
    let infos = context.registered(store.as_ref()).await?;
    let (mut all, mut failures) = (Vec::new(), 0);
    for (info, counted) in infos.iter().zip(status::stats(store.as_ref(), &infos, deadline).await) {
        match counted {
            Ok(stats) => all.push(stats),
            Err(error) => {
                output::note(&format!("{} could not be counted: {} ({})", info.name, error.message(), error.code()));
                failures += 1;
            }
        }
    }
    let unrouted = match timeout_at(deadline, status::unrouted(store.as_ref(), &infos)).await {
        Ok(found) => found?,
        Err(_) => Vec::new(),
    };
    for stats in &mut all {
        stats.unrouted = unrouted.iter().filter(|it| it.log == stats.log).map(|it| it.count).sum();
    }
    let unread = context.unread(store.as_ref()).await?;
    // Without a subscription nobody has read anything: all of such a log is pending.
    all.extend(unread.iter().map(|(log, count)| StatsJson::unread(log.clone(), *count)));
    context.never_run(&infos).for_each(|name| output::note(&context.why_unread(name, &infos)));
    if json {
        status::add_marks(&context.config.server, &mut all).await;
        output::json(&all)?;
        return complete(failures);
    }
    for (log, count) in &unread {
        output::note(&format!(
            "nobody reads the {log}: all of its {} event(s) are pending; {}",
            estimated(count.events, count.is_estimate),
            context.reader_wanted(log)
        ));
    }
    for log in &unrouted {
        output::note(&format!("{}; {}", log.what(), log.cure()));
    }
    if output::is_terminal() && !infos.is_empty() {
        output::rows(&HEAD, &all.iter().filter_map(row).collect::<Vec<_>>())?;
    }
    // A sum without them would be untrue.
    complete(failures)?;
    let sum = |field: fn(&StatsJson) -> u64| all.iter().map(field).sum::<u64>();
    let (pending, total) = (sum(|stats| stats.pending), sum(|stats| stats.total));
    let (dispatched, dead) = (sum(|stats| stats.dispatched), sum(|stats| stats.dead));
    let note = if all.iter().any(|stats| stats.estimated) { " estimated=true" } else { "" };
    output::line(&format!("pending={pending} dispatched={dispatched} dead={dead} total={total}{note}"))
}

fn complete(failures: usize) -> Result<(), Failure> {
    match failures {
        0 => Ok(()),
        _ => Err(Failure::failed(format!("{failures} subscription(s) could not be counted, see above"))),
    }
}

pub(crate) const HEAD: [&str; 11] = [
    "subscription",
    "log",
    "pending",
    "retrying",
    "blocked",
    "scheduled",
    "dead",
    "discarded",
    "dispatched",
    "total",
    "oldest",
];

/// `None` for a log that nobody reads: a note says so.
pub(crate) fn row(stats: &StatsJson) -> Option<Vec<String>> {
    let name = stats.subscription.as_ref()?;
    let name = if stats.paused { format!("{name} (paused)") } else { name.to_string() };
    let mut row = vec![name, stats.log.to_string(), estimated(stats.pending, stats.estimated)];
    let of_rows = [stats.retrying, stats.blocked, stats.scheduled, stats.dead, stats.discarded];
    row.extend(of_rows.map(|count| estimated(count, count > LOOK_EVENTS_MAX)));
    row.extend([grouped(stats.dispatched), estimated(stats.total, stats.estimated)]);
    let oldest = stats.oldest_pending_seconds.map(Duration::from_secs_f64);
    row.push(oldest.map_or_else(|| "-".to_owned(), span));
    Some(row)
}
