//! `postbox stats`: one line for scripts, a table for people, everything as JSON.

use postbox_core::{LogName, Stats, SubscriptionInfo};
use serde::Serialize;

use crate::context::{Context, reader_wanted};
use crate::failure::Failure;
use crate::output;
use crate::text::{grouped, span};

#[derive(Serialize)]
struct StatsJson<'a> {
    /// None for a log that nobody reads.
    subscription: Option<&'a str>,
    log: &'a str,
    pending: u64,
    retrying: u64,
    blocked: u64,
    scheduled: u64,
    dead: u64,
    discarded: u64,
    dispatched: u64,
    total: u64,
    oldest_pending_seconds: Option<f64>,
    paused: bool,
    topics: Vec<TopicJson<'a>>,
}

impl<'a> StatsJson<'a> {
    fn unread(log: &'a LogName, count: u64) -> Self {
        Self {
            subscription: None,
            log: log.as_str(),
            pending: count,
            retrying: 0,
            blocked: 0,
            scheduled: 0,
            dead: 0,
            discarded: 0,
            dispatched: 0,
            total: count,
            oldest_pending_seconds: None,
            paused: false,
            topics: Vec::new(),
        }
    }
}

#[derive(Serialize)]
struct TopicJson<'a> {
    topic: &'a str,
    pending: u64,
    oldest_pending_seconds: f64,
}

pub(super) async fn run(context: &Context, json: bool) -> Result<(), Failure> {
    let store = context.store().await?;
    let infos = context.registered(store.as_ref()).await?;
    let mut counted = Vec::with_capacity(infos.len());
    for info in infos {
        let stats = store.stats(&info.name).await?;
        counted.push((info, stats));
    }
    let unread = context.unread(store.as_ref()).await?;
    if json {
        let mut all: Vec<StatsJson<'_>> = counted.iter().map(|(info, stats)| to_json(info, stats)).collect();
        all.extend(unread.iter().map(|(log, count)| StatsJson::unread(log, *count)));
        return output::json(&all);
    }
    for (log, count) in &unread {
        output::note(&format!(
            "nobody reads the {log}: all of its {count} event(s) are pending; {}",
            reader_wanted(log)
        ));
    }
    if output::is_terminal() && !counted.is_empty() {
        table(&counted)?;
    }
    let sum = |field: fn(&Stats) -> u64| counted.iter().map(|(_, stats)| field(stats)).sum::<u64>();
    // Without a subscription nobody has read anything: all of such a log is pending.
    let waits: u64 = unread.iter().map(|(_, count)| count).sum();
    let (pending, total) = (sum(|stats| stats.pending) + waits, sum(|stats| stats.total) + waits);
    let (dispatched, dead) = (sum(|stats| stats.dispatched), sum(|stats| stats.dead));
    output::line(&format!("pending={pending} dispatched={dispatched} dead={dead} total={total}"))
}

fn table(counted: &[(SubscriptionInfo, Stats)]) -> Result<(), Failure> {
    let rows: Vec<Vec<String>> = counted
        .iter()
        .map(|(info, stats)| {
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
            let name = if info.paused.is_some() { format!("{} (paused)", info.name) } else { info.name.to_string() };
            let mut row = vec![name, info.log.to_string()];
            row.extend(counts.map(grouped));
            row.push(stats.oldest_pending.map_or_else(|| "-".to_owned(), span));
            row
        })
        .collect();
    let head = [
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
    output::rows(&head, &rows)
}

fn to_json<'a>(info: &'a SubscriptionInfo, stats: &'a Stats) -> StatsJson<'a> {
    let topics = stats.topics.iter().map(|topic| TopicJson {
        topic: &topic.topic,
        pending: topic.pending,
        oldest_pending_seconds: topic.oldest_pending.as_secs_f64(),
    });
    StatsJson {
        subscription: Some(info.name.as_str()),
        log: info.log.as_str(),
        pending: stats.pending,
        retrying: stats.retrying,
        blocked: stats.blocked,
        scheduled: stats.scheduled,
        dead: stats.dead,
        discarded: stats.discarded,
        dispatched: stats.dispatched,
        total: stats.total,
        oldest_pending_seconds: stats.oldest_pending.map(|age| age.as_secs_f64()),
        paused: info.paused.is_some(),
        topics: topics.collect(),
    }
}
