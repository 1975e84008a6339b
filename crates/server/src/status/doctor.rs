//! Why something is late: `postbox doctor`. It looks at the store, so it works while relays run
//! elsewhere, and uses what a running service says of itself.

use std::time::Duration;

use jiff::Timestamp;
use postbox_core::kit::LOOK_EVENTS_MAX;
use postbox_core::{
    Count, Criteria, Disposition, Error, Inspect, ListQuery, LogName, Record, Result, State, SubscriptionInfo,
};
use serde::Serialize;
use tokio::time::Instant;

use super::stats::{STATS_WAIT, StatsJson, stats};
use super::unrouted::{UnroutedLog, unrouted};
use super::{Fault, ServiceStatus};
use crate::text::{cut, estimated, span};

/// Most events looked at for each question; what keeps a queue waiting stands at its head.
const LOOK: usize = 20;
/// Pending for longer than this is late.
const LATE: Duration = Duration::from_secs(10);

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Fine,
    /// Worth knowing.
    Note,
    /// Somebody has to do something.
    Problem,
}

/// One thing that was found, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Whose it is; `None`: the store's.
    pub subscription: Option<String>,
    /// How bad it is.
    #[serde(rename = "gravity")]
    pub severity: Severity,
    /// What was found.
    pub what: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cure: Option<String>,
}

impl Finding {
    fn new(severity: Severity, what: impl Into<String>) -> Self {
        Self { subscription: None, severity, what: what.into(), cure: None }
    }

    pub(super) fn note(what: impl Into<String>) -> Self {
        Self::new(Severity::Note, what)
    }

    /// Something is wrong, and this would help.
    pub fn problem(what: impl Into<String>, cure: impl Into<String>) -> Self {
        Self::new(Severity::Problem, what).cure(cure)
    }

    /// Nobody reads this log, though it has events.
    pub fn unread(log: &LogName, count: Count, cure: String) -> Self {
        let count = estimated(count.events, count.is_estimate);
        Self::problem(format!("nobody reads the {log}: {count} event(s) wait there"), cure)
    }

    pub(super) fn cure(self, cure: impl Into<String>) -> Self {
        Self { cure: Some(cure.into()), ..self }
    }
}

impl From<Error> for Finding {
    /// The text of an error has its cure in it.
    fn from(error: Error) -> Self {
        Self::new(Severity::Problem, format!("the store: {} ({})", error.message(), error.code()))
    }
}

/// Everything about these subscriptions, the causes before the symptoms; then what was kept out.
pub async fn diagnose(
    store: &dyn Inspect,
    infos: &[SubscriptionInfo],
    service: Option<&ServiceStatus>,
) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for (info, stats) in infos.iter().zip(stats(store, infos, Instant::now() + STATS_WAIT).await) {
        let stats = match stats {
            Ok(stats) => stats,
            Err(error) => {
                let what = format!("its events could not be counted: {} ({})", error.message(), error.code());
                let cure = "end what keeps the database busy, or wait; `postbox stats` shows when the counts are back";
                findings.push(Finding { subscription: Some(info.name.to_string()), ..Finding::problem(what, cure) });
                continue;
            }
        };
        let fault = service.and_then(|service| {
            let fault = service.faults.iter().find(|fault| fault.subscription.as_ref() == Some(&info.name))?;
            Some(Fault { what: format!("the service at {}: {}", service.address, fault.what), ..fault.clone() })
        });
        let found = examine(store, info, &stats, fault).await?;
        findings.extend(found.into_iter().map(|it| Finding { subscription: Some(info.name.to_string()), ..it }));
    }
    findings.extend(unrouted(store, infos).await?.iter().map(UnroutedLog::finding));
    findings.extend(conflicts(store).await?);
    Ok(findings)
}

async fn examine(
    store: &dyn Inspect,
    info: &SubscriptionInfo,
    stats: &StatsJson,
    fault: Option<Fault>,
) -> Result<Vec<Finding>> {
    use Severity::{Fine, Note};
    let name = &info.name;
    let list = async |state, count| {
        let query = ListQuery {
            subscription: name.clone(),
            state,
            which: Criteria::default(),
            code: None,
            after: None,
            limit: LOOK,
        };
        if count > 0 { store.list(&query).await } else { Ok(Vec::new()) }
    };
    let rows = |count| estimated(count, count > LOOK_EVENTS_MAX);
    let mut findings = Vec::new();
    if let Some(pause) = &info.paused {
        let until = pause.until.map_or_else(String::new, |until| format!(" until {until:.0}"));
        let what = format!("paused{until} by {}: {}", pause.by, pause.why);
        findings.push(Finding::problem(what, format!("postbox resume {name}")));
    }
    findings.push(lanes(info, stats));
    let retrying = list(State::Retrying, stats.retrying).await?;
    findings.extend(outage(&retrying, fault));
    if stats.dead > 0 {
        let what = format!("{} dead: {}", rows(stats.dead), reasons(&list(State::Dead, stats.dead).await?));
        let cure = format!("look at one with `postbox show ID`, then: postbox retry --all --subscription {name}");
        findings.push(Finding::problem(what, cure));
    }
    if stats.retrying > 0 {
        let what = format!("{} retrying: {}; {}", rows(stats.retrying), reasons(&retrying), soonest(&retrying));
        findings.push(Finding::new(Note, what));
    }
    if stats.blocked > 0 {
        let keys = keys(&list(State::Blocked, stats.blocked).await?);
        let what = format!("{} blocked behind an earlier event of their key: {keys}", rows(stats.blocked));
        let cure = format!("the first one of each key decides: postbox list --state retrying --subscription {name}");
        findings.push(Finding::new(Note, what).cure(cure));
    }
    if stats.scheduled > 0 {
        let soonest = soonest(&list(State::Scheduled, stats.scheduled).await?);
        findings.push(Finding::new(Note, format!("{} wait for their time; {soonest}", rows(stats.scheduled))));
    }
    if stats.pending == 0 {
        findings.push(Finding::new(Fine, "nothing is pending"));
    } else {
        let oldest = stats.oldest_pending_seconds.map(Duration::from_secs_f64);
        let since = oldest.map_or_else(String::new, |oldest| format!(", the oldest for {}", span(oldest)));
        let deepest = stats.topics.first().map_or_else(String::new, |topic| format!(", most of them {}", topic.topic));
        let is_late = oldest.is_none_or(|oldest| oldest > LATE);
        let what = format!("{} pending{since}{deepest}", estimated(stats.pending, stats.estimated));
        findings.push(Finding::new(if is_late { Note } else { Fine }, what));
    }
    Ok(findings)
}

/// Messages that were kept out. The sender thinks that they arrived.
async fn conflicts(store: &dyn Inspect) -> Result<Option<Finding>> {
    let conflicts = store.conflicts(LOOK).await?;
    let Some(last) = conflicts.first() else { return Ok(None) };
    let most = if conflicts.len() == LOOK { "at least " } else { "" };
    let count = conflicts.len();
    let what = format!(
        "{most}{count} message(s) came with a known id and another body and were kept out, the last from {}",
        last.source
    );
    Ok(Some(Finding::new(Severity::Note, what).cure("postbox list --state conflict")))
}

/// Whether anybody drives the lanes.
fn lanes(info: &SubscriptionInfo, stats: &StatsJson) -> Finding {
    let count = info.lanes.len();
    let idle: Vec<String> =
        info.lanes.iter().filter(|lane| lane.lease_left.is_none()).map(|lane| lane.lane.to_string()).collect();
    if idle.is_empty() {
        let owners: Vec<&str> = info.lanes.iter().filter_map(|lane| Some(lane.owner.as_ref()?.as_str())).collect();
        return Finding::new(Severity::Fine, format!("{count} lane(s), driven by {}", owners.join(", ")));
    }
    let waits = stats.pending > 0 && info.paused.is_none();
    let severity = if waits { Severity::Problem } else { Severity::Note };
    Finding::new(severity, format!("no relay drives lane {} of {count}", idle.join(", "))).cure(format!(
        "start `postbox run` with this subscription in its configuration; one that is wanted no more keeps its events: \
             postbox subscription remove {}",
        info.name
    ))
}

/// What is known of a destination that is down: by the service that runs, and by the events that
/// met it and were not charged.
fn outage(retrying: &[Record], fault: Option<Fault>) -> Option<Finding> {
    let uncharged = retrying.iter().filter_map(|record| Some((record, record.code.as_deref()?)));
    let last = uncharged
        .filter(|(record, code)| record.attempts == 0 && !Disposition::is_own_code(code))
        .max_by_key(|(record, _)| record.updated_at);
    let said = last.map(|(record, code)| {
        let ago = record.updated_at.and_then(|at| Duration::try_from(Timestamp::now().duration_since(at)).ok());
        let ago = ago.map_or_else(String::new, |ago| format!("{} ago, ", span(ago)));
        format!("last tried {ago}{code}: {}", cut(record.error.as_deref().unwrap_or_default(), 200))
    });
    let what = match (&fault, said) {
        (None, None) => return None,
        (Some(fault), None) => fault.what.clone(),
        (None, Some(said)) => format!("the destination takes nothing, no attempt is counted; {said}"),
        (Some(fault), Some(said)) => format!("{}; {said}", fault.what),
    };
    let code = last.map(|(_, code)| code).or(fault.as_ref().map(|fault| fault.code.as_str()));
    Some(Finding { cure: code.and_then(cure).map(str::to_owned), ..Finding::new(Severity::Problem, what) })
}

/// What a person can do, by the code of an outage. Where there is nothing to do here the relay goes
/// on by itself.
fn cure(code: &str) -> Option<&'static str> {
    Some(match code {
        "address_forbidden" => {
            "our own guard refused the address: correct the sink's url, or name the network in its allow = [\"…\"] if it may be called"
        }
        "dns_failed" => {
            "the name in the sink's url is not found from where the relay runs: correct it, or the resolver there"
        }
        "connect_refused" | "connect_failed" | "connect_timeout" => {
            "is the destination up, and can the relay's machine reach the host and port of the sink's url?"
        }
        "tls_failed" => {
            "is the destination's certificate for this name and still valid? A private authority goes into the sink's ca_file"
        }
        "client_cert_required" => "set the sink's client_cert and client_key",
        "client_cert_refused" => {
            "the destination must trust the authority of the sink's client_cert; is it still valid?"
        }
        _ => return None,
    })
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
        // What a destination said was made harmless when it was stored.
        false => format!("{code} ({count}, \"{}\")", cut(error, 100)),
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
