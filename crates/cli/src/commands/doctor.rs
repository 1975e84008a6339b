//! `postbox doctor`: why something is late. It looks at the store only, so it works while relays run elsewhere.

use std::time::Duration;

use jiff::Timestamp;
use postbox_core::{ListQuery, Record, State, Stats, Store, SubscriptionInfo};
use serde::Serialize;

use crate::context::Context;
use crate::failure::Failure;
use crate::output;
use crate::text::{cut, grouped, span};

/// Most events looked at for each question; what keeps a queue waiting stands at its head.
const LOOK: usize = 20;
/// Pending for longer than this with nobody at work is late.
const LATE: Duration = Duration::from_secs(10);

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum Gravity {
    Fine,
    Note,
    Problem,
}

/// One thing that was found, and what to do about it.
#[derive(Debug, Serialize)]
struct Finding {
    subscription: Option<String>,
    gravity: Gravity,
    what: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    cure: Option<String>,
}

pub(super) async fn run(context: &Context, json: bool) -> Result<(), Failure> {
    let store = context.store().await?;
    let mut findings = Vec::new();
    match store.validate().await {
        Ok(()) => {
            for info in look_at_subscriptions(context, store.as_ref(), &mut findings).await? {
                examine(store.as_ref(), &info, &mut findings).await?;
            }
            findings.extend(conflicts(store.as_ref()).await?);
        }
        Err(error) => findings.push(Finding {
            subscription: None,
            gravity: Gravity::Problem,
            what: format!("the store: {} ({})", error.message(), error.code()),
            cure: None,
        }),
    }
    if json {
        output::json(&findings)?;
    } else {
        print(&findings)?;
    }
    match findings.iter().any(|finding| finding.gravity == Gravity::Problem) {
        true => Err(Failure::failed("there are problems, listed above")),
        false => Ok(()),
    }
}

async fn look_at_subscriptions(
    context: &Context,
    store: &dyn Store,
    findings: &mut Vec<Finding>,
) -> Result<Vec<SubscriptionInfo>, Failure> {
    let infos = context.registered(store).await?;
    if infos.is_empty() {
        findings.push(Finding {
            subscription: None,
            gravity: Gravity::Problem,
            what: "there is no subscription: nobody reads the outbox".into(),
            cure: Some("add [subscriptions.NAME] to postbox.toml and start `postbox run`".into()),
        });
    }
    Ok(infos)
}

/// Messages that were kept out. The sender thinks that they arrived.
async fn conflicts(store: &dyn Store) -> Result<Option<Finding>, Failure> {
    let conflicts = store.conflicts(LOOK).await?;
    let Some(last) = conflicts.first() else { return Ok(None) };
    let most = if conflicts.len() == LOOK { "at least " } else { "" };
    Ok(Some(Finding {
        subscription: None,
        gravity: Gravity::Note,
        what: format!(
            "{most}{} message(s) came with a known id and another body and were kept out, the last from {}",
            conflicts.len(),
            last.source
        ),
        cure: Some("postbox list --state conflict".into()),
    }))
}

/// Everything about one subscription, the causes before the symptoms.
async fn examine(store: &dyn Store, info: &SubscriptionInfo, findings: &mut Vec<Finding>) -> Result<(), Failure> {
    let name = info.name.as_str();
    let stats = store.stats(&info.name).await?;
    let list = async |state| {
        let query =
            ListQuery { subscription: info.name.clone(), state, topic: None, code: None, after: None, limit: LOOK };
        store.list(&query).await
    };
    let mut find = |gravity, what: String, cure: Option<String>| {
        findings.push(Finding { subscription: Some(name.to_owned()), gravity, what, cure });
    };
    if let Some(pause) = &info.paused {
        let until = pause.until.map_or_else(String::new, |until| format!(" until {until:.0}"));
        find(
            Gravity::Problem,
            format!("paused{until} by {}: {}", pause.by, pause.why),
            Some(format!("postbox resume {name}")),
        );
    }
    lanes(info, &stats, &mut find);
    if stats.dead > 0 {
        let dead = list(State::Dead).await?;
        let cure = format!("look at one with `postbox show ID`, then: postbox retry --all --subscription {name}");
        find(Gravity::Problem, format!("{} dead: {}", grouped(stats.dead), reasons(&dead)), Some(cure));
    }
    if stats.retrying > 0 {
        let retrying = list(State::Retrying).await?;
        let what = format!("{} retrying: {}; {}", grouped(stats.retrying), reasons(&retrying), soonest(&retrying));
        find(Gravity::Note, what, None);
    }
    if stats.blocked > 0 {
        let blocked = list(State::Blocked).await?;
        let what =
            format!("{} blocked behind an earlier event of their key: {}", grouped(stats.blocked), keys(&blocked));
        find(
            Gravity::Note,
            what,
            Some(format!("the first one of each key decides: postbox list --state retrying --subscription {name}")),
        );
    }
    if stats.scheduled > 0 {
        let scheduled = list(State::Scheduled).await?;
        find(Gravity::Note, format!("{} wait for their time; {}", grouped(stats.scheduled), soonest(&scheduled)), None);
    }
    if stats.pending == 0 {
        find(Gravity::Fine, "nothing is pending".into(), None);
    } else if let Some(oldest) = stats.oldest_pending {
        let deepest = stats.topics.first().map_or_else(String::new, |topic| format!(", most of them {}", topic.topic));
        let gravity = if oldest > LATE { Gravity::Note } else { Gravity::Fine };
        find(gravity, format!("{} pending, the oldest for {}{deepest}", grouped(stats.pending), span(oldest)), None);
    }
    Ok(())
}

/// Whether anybody drives the lanes.
fn lanes(info: &SubscriptionInfo, stats: &Stats, find: &mut impl FnMut(Gravity, String, Option<String>)) {
    let idle: Vec<String> =
        info.lanes.iter().filter(|lane| lane.lease_left.is_none()).map(|lane| lane.lane.to_string()).collect();
    if idle.is_empty() {
        let owners: Vec<&str> = info.lanes.iter().filter_map(|lane| Some(lane.owner.as_ref()?.as_str())).collect();
        find(Gravity::Fine, format!("{} lane(s), driven by {}", info.lanes.len(), owners.join(", ")), None);
        return;
    }
    let gravity = if stats.pending > 0 && info.paused.is_none() { Gravity::Problem } else { Gravity::Note };
    let what = format!("no relay drives lane {} of {}", idle.join(", "), info.lanes.len());
    find(gravity, what, Some("start `postbox run` with this subscription in its configuration".into()));
}

/// The reason codes by how often they stand among the records, with one text each.
fn reasons(records: &[Record]) -> String {
    let mut reasons: Vec<(&str, usize, &str)> = Vec::new();
    for record in records {
        let code = record.code.as_deref().unwrap_or("unknown");
        match reasons.iter_mut().find(|(known, ..)| *known == code) {
            Some((_, count, _)) => *count += 1,
            None => reasons.push((code, 1, record.error.as_deref().unwrap_or_default())),
        }
    }
    reasons.sort_by_key(|(_, count, _)| std::cmp::Reverse(*count));
    let texts = reasons.iter().map(|(code, count, error)| match error.is_empty() {
        true => format!("{code} ({count})"),
        false => format!("{code} ({count}, {:?})", cut(error, 100)),
    });
    texts.collect::<Vec<_>>().join(", ")
}

fn keys(records: &[Record]) -> String {
    let mut keys: Vec<&str> = records.iter().filter_map(|record| Some(record.event.key.as_ref()?.as_str())).collect();
    keys.sort_unstable();
    keys.dedup();
    let shown: Vec<String> = keys.iter().take(5).map(|key| format!("key {}", cut(key, 60))).collect();
    if keys.len() > 5 { format!("{} and more", shown.join(", ")) } else { shown.join(", ") }
}

fn soonest(records: &[Record]) -> String {
    let Some(at) = records.iter().filter_map(|record| record.due_at).min() else { return "none has a time".into() };
    match Duration::try_from(at.duration_since(Timestamp::now())) {
        Ok(left) => format!("the next in {}", span(left)),
        Err(_) => "the next is due now".into(),
    }
}

fn print(findings: &[Finding]) -> Result<(), Failure> {
    for finding in findings {
        let mark = match finding.gravity {
            Gravity::Fine => "ok",
            Gravity::Note => "note",
            Gravity::Problem => "PROBLEM",
        };
        let whose = finding.subscription.as_deref().unwrap_or("store");
        output::line(&format!("{mark:<8} {whose}: {}", finding.what))?;
        if let Some(cure) = &finding.cure {
            output::line(&format!("         -> {cure}"))?;
        }
    }
    Ok(())
}
