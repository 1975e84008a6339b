//! Compares the writers' ledgers, the arrivals, and the database.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::arrivals::{Arrival, Body};
use crate::audit::{self, Change, event_of};
use crate::faults::{Fault, Order, place};
use crate::ledger::{Fate, Ledger, Tx};
use crate::lines;
use crate::verdict::Verdict;

/// The setup of a round: `round.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Round {
    /// The seed that everything is drawn from.
    pub seed: u64,
    /// The subscriptions.
    pub subscriptions: Vec<Reader>,
    /// Length of a lease, in microseconds.
    pub lease: i64,
}

/// A subscription.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Reader {
    /// Its name; its arrivals are in `arrivals-NAME.log`.
    pub name: String,
    /// Whether its arrivals are written by the file sink; otherwise by the endpoint.
    pub by_file: bool,
    /// Its topics at the start.
    pub topics: Vec<String>,
}

/// A row of `deliveries.jsonl`.
#[derive(Debug, Deserialize)]
struct Left {
    subscription: String,
    state: String,
    body: Option<String>,
}

/// Judges the round in a folder.
pub fn judge(folder: &Path) -> anyhow::Result<Verdict> {
    let round = std::fs::read_to_string(folder.join("round.json")).context("round.json")?;
    let orders: Vec<Order> = lines(&folder.join("operator.jsonl"))?;
    let asked = |op: &str| -> Vec<String> {
        orders.iter().filter(|order| order.op == op).flat_map(|order| order.events.clone()).collect()
    };
    let court = Court {
        round: serde_json::from_str(&round).context("round.json")?,
        ledger: Ledger::read(folder)?,
        marks: std::fs::read_to_string(folder.join("marks.txt"))?.lines().map(str::to_owned).collect(),
        faults: lines(&folder.join("faults.jsonl"))?,
        marked: asked("mark-dead").into_iter().collect(),
        left: lines(&folder.join("deliveries.jsonl"))?,
    };
    let mut verdict = Verdict::default();
    court.count(&mut verdict);
    let mut retried: HashMap<String, u64> = HashMap::new();
    asked("retry").into_iter().for_each(|event| *retried.entry(event).or_default() += 1);
    let discarded: HashSet<String> = asked("discard").into_iter().collect();
    for reader in &court.round.subscriptions {
        let arrivals = Arrival::read(&folder.join(format!("arrivals-{}.log", reader.name)), reader.by_file)?;
        court.hear(reader, &arrivals, &retried, &discarded, &mut verdict);
    }
    let changes: Vec<Change> = lines(&folder.join("audit.jsonl"))?;
    let clock_moved = court.faults.iter().any(|fault| fault.kind == "database clock step");
    let lease = (!clock_moved).then_some(court.round.lease);
    audit::judge(changes, &retried, &discarded, lease, &mut verdict);
    court.bound(&mut verdict);
    Ok(verdict)
}

struct Court {
    round: Round,
    ledger: Ledger,
    marks: HashSet<String>,
    faults: Vec<Fault>,
    /// Events that an operator marked dead, perhaps in flight.
    marked: HashSet<String>,
    left: Vec<Left>,
}

/// What is known about the arrivals of one event.
#[derive(Debug, Default)]
struct Story {
    seen: bool,
    refused: bool,
    accepted: Option<u64>,
}

impl Court {
    fn is_committed(&self, tx: &Tx) -> bool {
        self.marks.contains(&tx.name)
    }

    /// Whether a restore took it back, or may have: it ended after the copy was made, and began
    /// before the copy was put in place.
    fn is_restored_away(&self, tx: &Tx) -> bool {
        self.faults.iter().any(|fault| fault.copied_at.is_some_and(|at| tx.until >= at && tx.from <= fault.until))
    }

    fn count(&self, verdict: &mut Verdict) {
        for tx in &self.ledger.transactions {
            let fate = match (tx.fate, self.is_committed(tx)) {
                (Fate::RolledBack, false) => "transactions rolled back",
                (Fate::Unknown | Fate::Prepared, false) => "transactions unknown, and not in the database",
                (Fate::Unknown | Fate::Prepared, true) => "transactions unknown, and in the database",
                (_, true) => "transactions committed",
                (_, false) if self.is_restored_away(tx) => "transactions that a restore took back",
                (_, false) => "asynchronous commits that a crash took back",
            };
            *verdict.facts.entry(fate.to_owned()).or_default() += 1;
            if tx.prepared {
                *verdict.faults.entry("transaction prepared, ended later".to_owned()).or_default() += 1;
            }
            let back = self.is_restored_away(tx);
            if tx.fate == Fate::Committed && !self.is_committed(tx) && !back {
                verdict.blame("taken back by the database", || tx.name.clone());
            }
            if tx.fate == Fate::RolledBack && self.is_committed(tx) && !back {
                verdict.blame("phantom", || format!("{} was rolled back, and is in the database", tx.name));
            }
            if self.is_committed(tx) {
                verdict.events += tx.kept.len() as u64;
            }
        }
        for fault in &self.faults {
            if fault.is_stall {
                *verdict.facts.entry("leases that ran out".to_owned()).or_default() += 1;
                continue;
            }
            *verdict.faults.entry(fault.kind.clone()).or_default() += 1;
        }
    }

    /// The filters in force for a reader at any time since `at`: the one made by the last change
    /// before it, and all later ones. Of overlapping changes, either may be the last.
    fn filters(&self, reader: &Reader, at: u64) -> Vec<Vec<String>> {
        let changes: Vec<_> = self
            .faults
            .iter()
            .filter(|_| reader.name == "part")
            .filter_map(|fault| fault.topics.as_ref().map(|(_, after)| (fault.from, fault.until, after)))
            .collect();
        let last = changes.iter().filter(|(_, until, _)| *until < at).max_by_key(|(_, until, _)| *until);
        let since = last.map_or(0, |(from, ..)| *from);
        let mut filters: Vec<_> =
            changes.iter().filter(|(_, until, _)| *until >= since).map(|(.., after)| (*after).clone()).collect();
        if last.is_none() {
            filters.push(reader.topics.clone());
        }
        filters
    }

    fn hear(
        &self,
        reader: &Reader,
        arrivals: &[Arrival],
        retried: &HashMap<String, u64>,
        discarded: &HashSet<String>,
        verdict: &mut Verdict,
    ) {
        verdict.arrivals += arrivals.len() as u64;
        let mut stories: HashMap<(usize, u32), Story> = HashMap::new();
        let mut latest_seen: HashMap<&str, i64> = HashMap::new();
        let mut latest_accepted: HashMap<&str, i64> = HashMap::new();
        for arrival in arrivals {
            let Some(body) = &arrival.body else {
                verdict.blame("phantom", || format!("at {} of {}: no body of ours", arrival.place, reader.name));
                continue;
            };
            let event = format!("{}/{}", body.tx, body.n);
            let (number, sure) = match self.identify(reader, body) {
                Ok(known) => known,
                Err(why) => {
                    verdict.blame("phantom", || format!("{event} of {}: {why}", reader.name));
                    continue;
                }
            };
            let story = stories.entry((number, body.n)).or_default();
            if sure && !std::mem::replace(&mut story.seen, true) && !rises(&mut latest_seen, body) {
                verdict
                    .blame("misordered", || format!("{event} of {}, key {} number {}", reader.name, body.key, body.v));
            }
            story.refused |= arrival.is_refused();
            if !arrival.is_accepted() {
                continue;
            }
            // Order is not checked for events that were wanted only at times, or that left the
            // stream: a restore may have made the relay pass them and read them again.
            let by_order = !sure || story.refused || retried.contains_key(&event) || discarded.contains(&event);
            let by_order = by_order || self.marked.contains(&event);
            match story.accepted.replace(arrival.place) {
                None if !by_order && !rises(&mut latest_accepted, body) => {
                    verdict.blame("misordered", || {
                        format!("{event} of {} was accepted late: key {}", reader.name, body.key)
                    });
                }
                None => {}
                Some(before) if !retried.contains_key(&event) => {
                    self.duplicate(reader, before, arrival.place, &event, verdict);
                }
                Some(_) => {}
            }
        }
        self.miss(reader, &stories, discarded, retried, verdict);
    }

    /// Returns the transaction of an arrival and whether it was wanted all the time; or the reason
    /// that it should not have arrived.
    fn identify(&self, reader: &Reader, body: &Body) -> Result<(usize, bool), &'static str> {
        let number =
            *self.ledger.by_name.get(&body.tx).ok_or("no ledger has this transaction, so it did not commit")?;
        let tx = &self.ledger.transactions[number];
        if tx.back.iter().any(|event| event.n == body.n) {
            return Err("its savepoint was rolled back");
        }
        let event = tx.kept.iter().find(|event| event.n == body.n).ok_or("the transaction has no such event")?;
        if event.key != body.key || event.v != body.v || body.pad != Body::pad(body.n) {
            return Err("its bytes are not those of the ledger");
        }
        let was_there_once = tx.fate != Fate::RolledBack && self.is_restored_away(tx);
        if !self.is_committed(tx) && !was_there_once {
            return Err("its transaction is not in the database");
        }
        let filters = self.filters(reader, tx.from);
        if filters.iter().all(|topics| !topics.contains(&event.topic)) {
            return Err("its topic was not wanted");
        }
        Ok((number, filters.iter().all(|topics| topics.contains(&event.topic))))
    }

    fn duplicate(&self, reader: &Reader, before: u64, now: u64, event: &str, verdict: &mut Verdict) {
        let places =
            |fault: &Fault| (place(&fault.places_from, &reader.name), place(&fault.places_until, &reader.name));
        let restored = self.faults.iter().filter(|fault| fault.copied_at.is_some()).any(|fault| {
            let (from, until) = places(fault);
            (place(&fault.copied_places, &reader.name)..=until).contains(&before) && now >= from
        });
        if restored {
            *verdict.facts.entry("sent again because a restore took it back".to_owned()).or_default() += 1;
            return;
        }
        verdict.duplicates += 1;
        let explained = self.faults.iter().filter(|fault| fault.window > 0).any(|fault| {
            let (from, until) = places(fault);
            before <= until && from <= now
        });
        if !explained {
            verdict.blame("duplicates unexplained", || format!("{event} of {}, at {before} and {now}", reader.name));
        }
    }

    /// Reports what should have arrived and did not.
    fn miss(
        &self,
        reader: &Reader,
        stories: &HashMap<(usize, u32), Story>,
        discarded: &HashSet<String>,
        retried: &HashMap<String, u64>,
        verdict: &mut Verdict,
    ) {
        let of_reader = self.left.iter().filter(|left| left.subscription == reader.name);
        let mut left: HashMap<String, &str> = HashMap::new();
        for row in of_reader {
            match event_of(row.body.as_deref()) {
                Some(event) => _ = left.insert(event, &row.state),
                None => verdict.blame("lost", || format!("a {} row of {} has no event", row.state, reader.name)),
            }
        }
        for (number, tx) in self.ledger.transactions.iter().enumerate().filter(|(_, tx)| self.is_committed(tx)) {
            let filters = self.filters(reader, tx.from);
            let wanted = tx.kept.iter().filter(|event| filters.iter().all(|topics| topics.contains(&event.topic)));
            let (mut there, mut all) = (0, 0);
            for event in wanted {
                let name = format!("{}/{}", tx.name, event.n);
                if discarded.contains(&name) {
                    continue;
                }
                all += 1;
                let accepted = stories.get(&(number, event.n)).and_then(|story| story.accepted);
                let state = left.get(&name).copied();
                match (accepted, state) {
                    (Some(_), None) | (None, Some("dead")) => there += 1,
                    // Retried by an operator and rejected again; or a restore brought back a copy
                    // from before it was accepted.
                    (Some(_), Some("dead")) if retried.contains_key(&name) || self.has_restore() => there += 1,
                    // It was in flight when it was marked dead.
                    (Some(_), Some("dead")) if self.marked.contains(&name) => there += 1,
                    (accepted, Some(state)) => {
                        there += usize::from(accepted.is_some());
                        let kind = if accepted.is_some() && state == "dead" { "stale" } else { "stuck" };
                        verdict.blame(kind, || format!("{name} of {} is {state}, accepted: {accepted:?}", reader.name));
                    }
                    (None, None) => verdict.blame("lost", || {
                        format!(
                            "{name} of {}: topic {}, key {} number {}",
                            reader.name, event.topic, event.key, event.v
                        )
                    }),
                }
            }
            if there > 0 && there < all {
                verdict.blame("torn", || format!("{there} of {all} of {} came to {}", tx.name, reader.name));
            }
        }
    }

    fn has_restore(&self) -> bool {
        self.faults.iter().any(|fault| fault.copied_at.is_some())
    }

    fn bound(&self, verdict: &mut Verdict) {
        verdict.duplicates_bound = self.faults.iter().map(|fault| fault.window).sum();
        let beyond = verdict.duplicates.saturating_sub(verdict.duplicates_bound);
        if beyond > 0 {
            verdict.blame("duplicates beyond bound", || format!("{beyond} too many"));
        }
    }
}

/// Whether an event comes after every earlier one of its key.
fn rises<'a>(latest: &mut HashMap<&'a str, i64>, body: &'a Body) -> bool {
    let latest = latest.entry(&body.key).or_insert(i64::MIN);
    let rises = body.v > *latest;
    *latest = body.v.max(*latest);
    rises
}
