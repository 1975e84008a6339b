//! `postbox doctor`: why something is late. It looks at the store, so it works while relays run elsewhere; and asks the service
//! at the configured address, if one is there, for what only that process knows: since when its breakers are open.

use std::time::Duration;

use jiff::Timestamp;
use postbox_core::{Disposition, ListQuery, LogName, Record, State, Stats, Store, SubscriptionInfo};
use serde::Serialize;

use super::ready;
use crate::context::{Context, reader_wanted};
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
    let store = context.any_store().await?;
    let mut findings = Vec::new();
    match store.validate().await {
        Ok(()) => {
            context.known_log().await?;
            let running = ready::faults(&context.config.server).await;
            for info in look_at_subscriptions(context, store.as_ref(), &mut findings).await? {
                let listen = context.config.server.listen;
                let fault = running.get(info.name.as_str()).map(|fault| format!("the service at {listen}: {fault}"));
                examine(store.as_ref(), &info, fault.as_deref(), &mut findings).await?;
            }
            findings.extend(conflicts(store.as_ref()).await?);
            if !context.config.sources.is_empty() {
                findings.extend(postbox_server::check_receiving(&context.config.store).await.err().map(of_the_store));
            }
        }
        Err(error) => findings.push(of_the_store(error)),
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

/// The text of an error has its cure in it.
fn of_the_store(error: postbox_core::Error) -> Finding {
    let what = format!("the store: {} ({})", error.message(), error.code());
    Finding { subscription: None, gravity: Gravity::Problem, what, cure: None }
}

async fn look_at_subscriptions(
    context: &Context,
    store: &dyn Store,
    findings: &mut Vec<Finding>,
) -> Result<Vec<SubscriptionInfo>, Failure> {
    let infos = context.registered(store).await?;
    let unread = context.unread(store).await?;
    if infos.is_empty() && unread.is_empty() {
        let log = context.log.clone().unwrap_or_else(LogName::outbox);
        findings.push(Finding {
            subscription: None,
            gravity: Gravity::Problem,
            what: format!("there is no subscription: nobody reads the {log}"),
            cure: Some(reader_wanted(&log)),
        });
    }
    findings.extend(unread.into_iter().map(|(log, count)| Finding {
        subscription: None,
        gravity: Gravity::Problem,
        what: format!("nobody reads the {log}: {} event(s) wait there", grouped(count)),
        cure: Some(reader_wanted(&log)),
    }));
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
async fn examine(
    store: &dyn Store,
    info: &SubscriptionInfo,
    fault: Option<&str>,
    findings: &mut Vec<Finding>,
) -> Result<(), Failure> {
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
    let retrying = if stats.retrying > 0 { list(State::Retrying).await? } else { Vec::new() };
    if let Some((what, cure)) = outage(&retrying, fault) {
        find(Gravity::Problem, what, cure);
    }
    if stats.dead > 0 {
        let dead = list(State::Dead).await?;
        let cure = format!("look at one with `postbox show ID`, then: postbox retry --all --subscription {name}");
        find(Gravity::Problem, format!("{} dead: {}", grouped(stats.dead), reasons(&dead)), Some(cure));
    }
    if stats.retrying > 0 {
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

/// What is known of a destination that is down: by the service that runs, and by the events that met it and were not charged.
fn outage(retrying: &[Record], fault: Option<&str>) -> Option<(String, Option<String>)> {
    let told = |record: &&Record| {
        record.attempts == 0 && record.code.as_deref().is_some_and(|code| !Disposition::is_own_code(code))
    };
    let witness = retrying.iter().filter(told).max_by_key(|record| record.updated_at);
    let code = witness.and_then(|record| record.code.as_deref());
    let said = witness.map(|record| {
        let error = record.error.as_deref().unwrap_or_default();
        let ago = record.updated_at.and_then(|at| Duration::try_from(Timestamp::now().duration_since(at)).ok());
        let ago = ago.map_or_else(String::new, |ago| format!("{} ago, ", span(ago)));
        format!("last tried {ago}{}: {}", code.unwrap_or_default(), cut(error, 200))
    });
    let what = match (fault, said) {
        (None, None) => return None,
        (Some(fault), None) => fault.to_owned(),
        (None, Some(said)) => format!("the destination takes nothing, no attempt is counted; {said}"),
        (Some(fault), Some(said)) => format!("{fault}; {said}"),
    };
    let code = code.or_else(|| fault?.rsplit(' ').next());
    Some((what, code.and_then(cure).map(str::to_owned)))
}

/// What a person can do, by the code of an outage. Where there is nothing to do here the relay goes on by itself.
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
