//! `postbox stats`: one line for scripts, a table for people, everything as JSON.

use std::time::Duration;

use postbox_server::status::{self, StatsJson};
use postbox_server::text::{grouped, span};

use crate::context::{Context, never_run};
use crate::failure::Failure;
use crate::output;

pub(super) async fn run(context: &Context, json: bool) -> Result<(), Failure> {
    let store = context.store().await?;
    let infos = context.registered(store.as_ref()).await?;
    let mut all = status::stats(store.as_ref(), &infos).await?;
    let unrouted = status::unrouted(store.as_ref(), &infos).await?;
    for stats in &mut all {
        stats.unrouted = unrouted.iter().filter(|it| it.log == stats.log).map(|it| it.count).sum();
    }
    let unread = context.unread(store.as_ref()).await?;
    // Without a subscription nobody has read anything: all of such a log is pending.
    all.extend(unread.iter().map(|(log, count)| StatsJson::unread(log.clone(), *count)));
    context.never_run(&infos).for_each(|name| output::note(&never_run(name)));
    if json {
        return output::json(&all);
    }
    for (log, count) in &unread {
        output::note(&format!(
            "nobody reads the {log}: all of its {count} event(s) are pending; {}",
            context.reader_wanted(log)
        ));
    }
    for log in &unrouted {
        output::note(&format!("{}; {}", log.what(), log.cure()));
    }
    if output::is_terminal() && !infos.is_empty() {
        table(&all)?;
    }
    let sum = |field: fn(&StatsJson) -> u64| all.iter().map(field).sum::<u64>();
    let (pending, total) = (sum(|stats| stats.pending), sum(|stats| stats.total));
    let (dispatched, dead) = (sum(|stats| stats.dispatched), sum(|stats| stats.dead));
    output::line(&format!("pending={pending} dispatched={dispatched} dead={dead} total={total}"))
}

fn table(all: &[StatsJson]) -> Result<(), Failure> {
    let head = "subscription log pending retrying blocked scheduled dead discarded dispatched total oldest";
    let rows = all.iter().filter_map(|stats| {
        let name = stats.subscription.as_ref()?;
        let counts = [
            stats.pending,
            stats.retrying,
            stats.blocked,
            stats.scheduled,
            stats.dead,
            stats.discarded,
            stats.dispatched,
            stats.total,
        ];
        let name = if stats.paused { format!("{name} (paused)") } else { name.to_string() };
        let mut row = vec![name, stats.log.to_string()];
        row.extend(counts.map(grouped));
        let oldest = stats.oldest_pending_seconds.map(Duration::from_secs_f64);
        row.push(oldest.map_or_else(|| "-".to_owned(), span));
        Some(row)
    });
    output::rows(&head.split(' ').collect::<Vec<_>>(), &rows.collect::<Vec<_>>())
}
