//! The audit written by triggers on the product's own tables: every change of a cursor and of a
//! delivery row, and any change of a log row, which is only ever read.
//!
//! The rules are those of `docs/state-machine.md` and of the cursor, written independently.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use serde::Deserialize;
use serde_json::Value;

use crate::arrivals::Body;
use crate::verdict::Verdict;

/// One change.
#[derive(Debug, Deserialize)]
pub struct Change {
    /// `lane`, `delivery` or `outbox`.
    pub what: String,
    /// The row before; null for an insert.
    pub old: Value,
    /// The row after; null for a delete.
    pub new: Value,
    /// The event's payload, if `what` is `delivery`.
    #[serde(default)]
    pub body: Option<String>,
    /// The transaction, if the database reports it.
    #[serde(default)]
    pub xid: Option<String>,
    /// Time of the database's clock, in microseconds.
    pub at: i64,
    /// The end of the lease before the change, in the same unit.
    #[serde(default)]
    pub lease_until: Option<i64>,
}

/// The event's name in orders: `TX/N`.
pub(crate) fn event_of(body: Option<&str>) -> Option<String> {
    let body: Body = serde_json::from_str(body?).ok()?;
    Some(format!("{}/{}", body.tx, body.n))
}

impl Change {
    /// Identifies the changed row.
    fn row(&self) -> String {
        let row = if self.new.is_null() { &self.old } else { &self.new };
        format!("{} {}:{}/{}", self.what, row["subscription"], row["lane"], row["seq"])
    }
}

/// Merges the changes of each transaction to each row, because nobody can see the states in
/// between.
fn by_transaction(changes: Vec<Change>) -> Vec<Change> {
    let mut whole: Vec<Change> = Vec::new();
    let mut places: HashMap<(String, String), usize> = HashMap::new();
    for change in changes {
        let Some(xid) = change.xid.clone() else {
            whole.push(change);
            continue;
        };
        match places.entry((xid, change.row())) {
            Entry::Occupied(place) => whole[*place.get()].new = change.new,
            Entry::Vacant(place) => {
                place.insert(whole.len());
                whole.push(change);
            }
        }
    }
    whole.retain(|change| !(change.old.is_null() && change.new.is_null()));
    whole
}

/// Judges all changes, in the order of their numbers.
///
/// `retried`: how often an operator retried each event. `lease`: its length in microseconds.
/// `steps`: when the database's clock was moved, so that it says nothing about who holds a lease.
pub(crate) fn judge(
    changes: Vec<Change>,
    retried: &HashMap<String, u64>,
    discarded: &HashSet<String>,
    lease: i64,
    steps: &[(i64, i64)],
    verdict: &mut Verdict,
) {
    let mut replays: HashMap<String, u64> = HashMap::new();
    let mut over: HashSet<String> = HashSet::new();
    for change in &by_transaction(changes) {
        let (old, new) = (&change.old, &change.new);
        let fault = match change.what.as_str() {
            "lane" => {
                let in_step = steps.iter().any(|(from, until)| (from - lease..=until + lease).contains(&change.at));
                if is_taken(old, new) && !old["lease_until"].is_null() && (in_step || change.lease_until.is_none()) {
                    *verdict.facts.entry("take-overs not judged".to_owned()).or_default() += 1;
                }
                lane_fault(change, (!in_step).then_some(lease))
            }
            "outbox" => Some("a row of the log was updated".to_owned()),
            _ => {
                let event = event_of(change.body.as_deref()).unwrap_or_default();
                let row = if new.is_null() { old } else { new };
                let place = format!("{}:{}", row["subscription"], row["seq"]);
                let (from, to) = (text(old, "state"), text(new, "state"));
                let mut fault = delivery_fault(from, to, old, new);
                if from == "dead" && to == "retrying" {
                    let count = replays.entry(event.clone()).or_default();
                    *count += 1;
                    if *count > retried.get(&event).copied().unwrap_or(0) {
                        fault = Some("a dead event was revived, and nobody asked for it".to_owned());
                    }
                }
                if to == "discarded" && !discarded.contains(&event) {
                    fault = Some("an event was taken out, and nobody asked for it".to_owned());
                }
                if old.is_null() && over.contains(&place) {
                    fault = Some("an event that was dealt with has a row again".to_owned());
                }
                if new.is_null() && from != "discarded" {
                    over.insert(place);
                }
                fault.map(|fault| format!("{fault}: {event}"))
            }
        };
        if let Some(fault) = fault {
            verdict.blame("stale", || format!("{fault}; before {old}, after {new}"));
        }
    }
}

/// Whether a lane went to another owner.
fn is_taken(old: &Value, new: &Value) -> bool {
    // An owner that never received its grant may ask for it again.
    new["epoch"].as_i64() > old["epoch"].as_i64() && old["owner"] != new["owner"]
}

fn lane_fault(change: &Change, lease: Option<i64>) -> Option<String> {
    let (old, new) = (&change.old, &change.new);
    if old.is_null() {
        return None;
    }
    if new.is_null() {
        return Some("a cursor vanished".to_owned());
    }
    let number = |row: &Value, name: &str| row[name].as_i64().unwrap_or_default();
    let (before, after) = (number(old, "epoch"), number(new, "epoch"));
    if after < before {
        return Some("an epoch went back".to_owned());
    }
    if let (Some(lease), Some(until)) = (lease, change.lease_until)
        && is_taken(old, new)
        && (1..=lease).contains(&(until - change.at))
    {
        return Some(format!("a lane was taken {} µs before its lease ran out", until - change.at));
    }
    if old.get("to_snap").is_some() {
        if old["to_snap"] != new["to_snap"] {
            if new["from_snap"] != old["to_snap"] {
                return Some("a window does not begin where the one before ended".to_owned());
            }
            let (old_end, new_end) = (snapshot_end(&old["to_snap"]), snapshot_end(&new["to_snap"]));
            return (new_end < old_end).then(|| "a cursor went back".to_owned());
        }
        let back = number(new, "last_seq") < number(old, "last_seq");
        return back.then(|| "a position went back within its window".to_owned());
    }
    let back = number(new, "position") < number(old, "position");
    back.then(|| "a position went back".to_owned())
}

/// The end of a snapshot: its `xmax`.
fn snapshot_end(snapshot: &Value) -> u64 {
    snapshot.as_str().and_then(|text| text.split(':').nth(1)?.parse().ok()).unwrap_or_default()
}

fn delivery_fault(from: &str, to: &str, old: &Value, new: &Value) -> Option<String> {
    let allowed: &[&str] = match from {
        "" => &["retrying", "blocked", "scheduled", "dead", "discarded"],
        "retrying" => &["retrying", "dead", "discarded", ""],
        "blocked" => &["blocked", "retrying", "dead", "discarded", ""],
        "scheduled" => &["scheduled", "retrying", "dead", "discarded", ""],
        "dead" => &["dead", "retrying", "discarded"],
        "discarded" => &["discarded", ""],
        _ => &[],
    };
    if !allowed.contains(&to) {
        return Some(format!("{from:?} became {to:?}"));
    }
    let number = |row: &Value, name: &str| row[name].as_i64().unwrap_or_default();
    let same_replay = number(old, "replays") == number(new, "replays");
    let fewer = number(new, "attempts") < number(old, "attempts");
    let waiting = |state| matches!(state, "retrying" | "blocked");
    (waiting(from) && waiting(to) && same_replay && fewer).then(|| "attempts were taken back".to_owned())
}

fn text<'a>(row: &'a Value, name: &str) -> &'a str {
    row[name].as_str().unwrap_or_default()
}
