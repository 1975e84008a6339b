//! `postbox stats`: one line for scripts, a table for people, everything as JSON.

use postbox_core::Error;
use postbox_server::status::{self, ServiceStatus, StatsJson, UnroutedLog};
use postbox_server::text::{estimated, grouped, span};
use tokio::time::{Instant, timeout_at};

use crate::context::Context;
use crate::failure::Failure;
use crate::output;
use crate::stores::{self, Note, OfStore, ask_each};

pub(super) async fn run(contexts: &[Context], json: bool) -> Result<(), Failure> {
    let service = if json { stores::fetch(contexts).await.ok().flatten() } else { None };
    let asked = ask_each(contexts, |context| count(context, service.as_ref())).await;
    let is_answered = asked.is_answered();
    let (mut all, mut served): (Vec<StatsJson>, Vec<bool>) = Default::default();
    let (mut of, mut failures, mut failures_beside) = (Vec::new(), 0, 0);
    for (context, counted) in asked.answers {
        of.extend(counted.all.iter().map(|_| context));
        served.extend(counted.all.iter().map(|_| !counted.is_of_another));
        all.extend(counted.all);
        failures += counted.failures;
        failures_beside += counted.failures_beside;
        counted.notes.iter().filter(|note| !json || note.in_json).for_each(|note| context.note(&note.text));
    }
    let is_whole = failures == 0 && asked.ended.is_ok();
    let ended = complete(failures + failures_beside).and(asked.ended);
    if json {
        if let (Some(_), [first, ..]) = (&service, contexts) {
            let served = all.iter_mut().zip(served).filter_map(|(stats, served)| served.then_some(stats));
            status::add_marks(&first.config.server, served).await;
        }
        if is_answered {
            output::json(&of.iter().zip(&all).map(|(context, stats)| OfStore::new(context, stats)).collect::<Vec<_>>());
        }
        return ended;
    }
    if output::is_terminal() {
        let rows = of.iter().zip(&all).filter_map(|(context, stats)| Some((*context, row(stats)?)));
        stores::rows(&HEAD, rows.collect());
    }
    // A sum without them would be wrong.
    if !is_whole {
        return ended;
    }
    let sum = |field: fn(&StatsJson) -> u64| all.iter().map(field).sum::<u64>();
    let (pending, total) = (sum(|stats| stats.pending), sum(|stats| stats.total));
    let (dispatched, dead) = (sum(|stats| stats.dispatched), sum(|stats| stats.dead));
    let note = if all.iter().any(|stats| stats.is_estimate) { " estimated=true" } else { "" };
    output::line(&format!("pending={pending} dispatched={dispatched} dead={dead} total={total}{note}"));
    ended
}

/// The counts of one store.
#[derive(Default)]
struct Counted {
    all: Vec<StatsJson>,
    notes: Vec<Note>,
    /// Missing parts of the sum.
    failures: usize,
    /// Missing parts that the sum does not contain.
    failures_beside: usize,
    /// Whether the service that was asked works for another store.
    is_of_another: bool,
}

impl Counted {
    /// Notes that a part of the sum is missing.
    fn missing(&mut self, part: &str, error: &Error) {
        self.notes.push(uncounted(part, error));
        self.failures += 1;
    }
}

fn uncounted(part: &str, error: &Error) -> Note {
    Note::always(format!("{part} could not be counted: {} ({})", error.message(), error.code()))
}

async fn count(context: &Context, service: Option<&ServiceStatus>) -> Result<Counted, Failure> {
    let deadline = Instant::now() + status::STATS_WAIT;
    let store = context.store().await?;
    let infos = context.registered(store.as_ref()).await?;
    let mut counted = Counted::default();
    if let Some(service) = service
        && let Ok(Ok(created_at)) = timeout_at(deadline, store.validate()).await
        && let Some(another) = service.of_another(context.name.as_ref(), created_at)
    {
        let cure = another.cure.unwrap_or_default();
        counted.notes.push(Note::always(format!("{}; {cure}", another.message)));
        counted.is_of_another = true;
    }
    for (info, stats) in infos.iter().zip(status::stats(store.as_ref(), &infos, deadline).await) {
        match stats {
            Ok(stats) => counted.all.push(stats),
            Err(error) => counted.missing(info.name.as_str(), &error),
        }
    }
    let unrouted = timeout_at(deadline, status::unrouted(store.as_ref(), &infos)).await;
    let unrouted = unrouted.unwrap_or_else(|_| Err(status::too_slow()));
    match &unrouted {
        Ok(found) => counted.all.iter_mut().for_each(|stats| {
            stats.unrouted = Some(found.iter().filter(|it| it.log == stats.log).map(|it| it.count).sum());
        }),
        Err(error) => {
            counted.notes.push(uncounted("the events that no subscription wants", error));
            counted.failures_beside += 1;
        }
    }
    let unread = context.unread(store.as_ref()).await.unwrap_or_else(|error| {
        counted.missing("the logs that nobody reads", &error);
        Vec::new()
    });
    let never_run = context.never_run(&infos).map(|name| Note::always(context.why_unread(name, &infos)));
    counted.notes.extend(never_run);
    for (log, count) in &unread {
        let text = format!(
            "nobody reads the {log}: all of its {} event(s) are pending; {}",
            estimated(count.events, count.is_estimate),
            context.reader_wanted(log)
        );
        counted.notes.push(Note::for_people(text));
        // No subscription reads this log, so all of it is pending.
        counted.all.push(StatsJson::unread(log.clone(), *count));
    }
    let note = |log: &UnroutedLog| format!("{}; {}", log.what(), context.cure_of_unrouted(log.cure()));
    counted.notes.extend(unrouted.iter().flatten().map(|log| Note::for_people(note(log))));
    Ok(counted)
}

fn complete(failures: usize) -> Result<(), Failure> {
    match failures {
        0 => Ok(()),
        _ => Err(Failure::failed(format!("{failures} part(s) could not be counted, see above"))),
    }
}

pub(crate) const HEAD: [&str; 12] = [
    "subscription",
    "log",
    "pending",
    "retrying",
    "blocked",
    "scheduled",
    "dead",
    "discarded",
    "dispatched",
    "skipped",
    "total",
    "oldest",
];

/// `None` for a log that no subscription reads: a note reports it.
pub(crate) fn row(stats: &StatsJson) -> Option<Vec<String>> {
    let name = stats.subscription.as_ref()?;
    let name = if stats.paused { format!("{name} (paused)") } else { name.to_string() };
    let mut row = vec![name, stats.log.to_string(), estimated(stats.pending, stats.is_estimate)];
    let of_rows = [stats.retrying, stats.blocked, stats.scheduled, stats.dead, stats.discarded];
    row.extend(of_rows.map(|count| stats.of_rows(count)));
    row.extend([grouped(stats.dispatched), estimated(stats.skipped, stats.skipped_is_estimate)]);
    row.push(estimated(stats.total, stats.is_estimate));
    row.push(stats.oldest().map_or_else(|| "-".to_owned(), span));
    Some(row)
}
