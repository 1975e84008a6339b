//! Compares the writers' ledgers, the arrivals, and the database.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::arrivals::{Arrival, Body};
use crate::audit::{self, Change, event_of};
use crate::faults::{Fault, NOT_RENEWED, Order, RELAY_FAILED, RELAY_GAVE_UP, place};
use crate::ledger::{Fate, Ledger, Tx};
use crate::lines;
use crate::verdict::Verdict;

/// How long after a fault a start may still fail because of it, in microseconds: its connection and
/// its first statement have 5 s each, and the machine may be slow.
const START_MAX: u64 = 15_000_000;

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
    #[serde(default)]
    code: Option<String>,
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
    let mut charges = vec![0_u64; court.faults.len()];
    for reader in &court.round.subscriptions {
        let arrivals = Arrival::read(&folder.join(format!("arrivals-{}.log", reader.name)), reader.by_file)?;
        court.hear(reader, &arrivals, &retried, &discarded, &mut charges, &mut verdict);
    }
    let changes: Vec<Change> = lines(&folder.join("audit.jsonl"))?;
    let time = |at: u64| i64::try_from(at).unwrap_or(i64::MAX / 2);
    let steps = court.faults.iter().filter(|fault| fault.kind == "database clock step" && !fault.missed);
    let steps: Vec<_> = steps.map(|fault| (time(fault.from), time(fault.until))).collect();
    audit::judge(changes, &retried, &discarded, court.round.lease, &steps, &mut verdict);
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
        let has_cause = |what: &Fault, late: u64| {
            let is_near = |cause: &Fault| cause.from <= what.from && what.from <= cause.until + late;
            self.faults.iter().any(|cause| cause.costs_leases() && is_near(cause))
        };
        // A lost lease is logged up to a lease after its cause, and the log is read a moment later.
        let late = 2 * u64::try_from(self.round.lease).unwrap_or_default();
        for fault in self.faults.iter().filter(|fault| !fault.missed) {
            if fault.kind == RELAY_FAILED || fault.kind == RELAY_GAVE_UP {
                if fault.kind == RELAY_FAILED || !has_cause(fault, START_MAX) {
                    verdict.blame(RELAY_FAILED, || fault.detail.clone());
                }
                continue;
            }
            verdict.duplicates_bound += fault.window;
            if fault.is_stall {
                *verdict.facts.entry("leases that ran out".to_owned()).or_default() += 1;
                if has_cause(fault, late) {
                    continue;
                }
                if fault.detail == NOT_RENEWED {
                    let fact = "leases not renewed in time, without a fault";
                    *verdict.facts.entry(fact.to_owned()).or_default() += 1;
                } else {
                    verdict.blame("lease lost for no reason", || format!("{} at {}", fault.detail, fault.from));
                }
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
        charges: &mut [u64],
        verdict: &mut Verdict,
    ) {
        verdict.arrivals += arrivals.len() as u64;
        let mut stories: HashMap<(usize, u32), Story> = HashMap::new();
        let mut repeats = Vec::new();
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
            let is_late = sure && !std::mem::replace(&mut story.seen, true) && !rises(&mut latest_seen, body);
            // A person may mark an event dead that was never sent, and retry it later.
            if is_late && !self.marked.contains(&event) {
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
                Some(before) if !retried.contains_key(&event) => repeats.push((before, arrival.place, event)),
                Some(_) => {}
            }
        }
        self.charge(reader, arrivals, repeats, charges, verdict);
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

    /// Charges each repetition (the places of both arrivals, and the event) to one fault that can
    /// explain it: it came at most the fault's window ahead of the fault, or while its effects
    /// lasted, and again behind it. In the order of the first arrivals, each goes to the fault with
    /// room whose effects end first, because the others may explain a later one.
    fn charge(
        &self,
        reader: &Reader,
        arrivals: &[Arrival],
        mut repeats: Vec<(u64, u64, String)>,
        charges: &mut [u64],
        verdict: &mut Verdict,
    ) {
        let of = |places: &[(String, u64)]| place(places, &reader.name);
        let number = |place: u64| arrivals.partition_point(|arrival| arrival.place < place) as u64;
        let spans = self.faults.iter().map(|it| (number(of(&it.places_from)), number(of(&it.places_until))));
        let spans: Vec<(u64, u64)> = spans.collect();
        repeats.sort_unstable();
        for (before, now, event) in repeats {
            let restored = self.faults.iter().filter(|fault| fault.copied_at.is_some()).any(|fault| {
                (of(&fault.copied_places)..=of(&fault.places_until)).contains(&before) && now >= of(&fault.places_from)
            });
            if restored {
                *verdict.facts.entry("sent again because a restore took it back".to_owned()).or_default() += 1;
                continue;
            }
            verdict.duplicates += 1;
            let (first, again) = (number(before), number(now));
            let mut able: Vec<(u64, usize)> = Vec::new();
            for (n, (fault, (from, until))) in self.faults.iter().zip(&spans).enumerate() {
                let is_near = from.saturating_sub(first) <= fault.window && first <= *until && *from <= again;
                if fault.is_abrupt() && is_near {
                    able.push((*until, n));
                }
            }
            able.sort_unstable();
            let has_room = |n: usize| charges[n] < self.faults[n].window;
            let Some((_, n)) = able.iter().copied().find(|(_, n)| has_room(*n)).or(able.first().copied()) else {
                verdict
                    .blame("duplicates unexplained", || format!("{event} of {}, at {before} and {now}", reader.name));
                continue;
            };
            charges[n] += 1;
            let (charged, fault) = (charges[n], &self.faults[n]);
            if charged > fault.window {
                verdict.blame("duplicates beyond bound", || {
                    format!("{event} of {} is number {charged} of {} at {}", reader.name, fault.window, fault.kind)
                });
            }
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
        let mut left: HashMap<String, (&str, Option<&str>)> = HashMap::new();
        for row in of_reader {
            if row.state == "dead" {
                *verdict.facts.entry("dead".to_owned()).or_default() += 1;
            }
            match event_of(row.body.as_deref()) {
                Some(event) => _ = left.insert(event, (row.state.as_str(), row.code.as_deref())),
                None => verdict.blame("lost", || format!("a {} row of {} has no event", row.state, reader.name)),
            }
        }
        // An owner that vanished counts against events that went alone at that moment; three of
        // them make one dead.
        let mut crashed_max = self.faults.iter().filter(|fault| fault.is_abrupt()).count();
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
                let story = stories.get(&(number, event.n));
                let accepted = story.and_then(|story| story.accepted);
                let (state, code) = left.get(&name).map_or((None, None), |(state, code)| (Some(*state), *code));
                match (accepted, state) {
                    (Some(_), None) => there += 1,
                    (None, Some("dead")) => {
                        there += 1;
                        // The sink of `part` refuses nothing, and nobody marks its events.
                        let is_due = story.is_some_and(|story| story.refused) || self.marked.contains(&name);
                        let mut is_due = is_due && reader.name != "part";
                        if code == Some("relay_crashed") && crashed_max > 0 {
                            (crashed_max, is_due) = (crashed_max - 1, true);
                        }
                        if !is_due {
                            let why = code.unwrap_or("no code");
                            verdict.blame("dead for no reason", || format!("{name} of {}: {why}", reader.name));
                        }
                    }
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
}

/// Whether an event comes after every earlier one of its key.
fn rises<'a>(latest: &mut HashMap<&'a str, i64>, body: &'a Body) -> bool {
    let latest = latest.entry(&body.key).or_insert(i64::MIN);
    let rises = body.v > *latest;
    *latest = body.v.max(*latest);
    rises
}
