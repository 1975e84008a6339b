//! One round: starts everything, injects faults until there are enough events and faults, drains,
//! and lets the checker judge.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use postbox_crash_checker::{Verdict, judge};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::task::{JoinError, JoinHandle};
use tokio::time::sleep;

use crate::faults::{self, Group, KINDS, Kind};
use crate::options::Options;
use crate::say;
use crate::stage::Stage;
use crate::store::{Bed, window_of_all};

/// Time without progress after which pending events are considered stuck.
const STANDSTILL_MAX: Duration = Duration::from_secs(45);
/// Several times the longest retry wait of the configuration.
const WAITING_MAX: Duration = Duration::from_secs(8);
/// Most faults in a row that did not happen, for example because no event is dead. A round of such
/// kinds alone would never end.
const MISSES_MAX: u32 = 100;
/// Most tries of a kind that a round begins with, if it does not happen: at first, no event is dead
/// or retrying.
const FIRST_TRIES: u32 = 5;
/// Pause between two looks at the relays, and for how many of them file lengths are kept: longer
/// than a lease, within which the owner of a lost lease may have sent what is sent again.
const STEP: Duration = Duration::from_millis(100);
const PLACES: usize = 25;
/// Pauses between two faults of a group, in milliseconds.
const PAUSE_AROUND: std::ops::Range<u64> = 20..500;
const PAUSE_INSIDE: std::ops::Range<u64> = 300..3_000;

/// The work of one round.
pub(crate) struct Share {
    pub(crate) events: u64,
    pub(crate) faults: u64,
    pub(crate) seed: u64,
}

/// Runs a round in its own folder and judges it.
pub(crate) async fn run(options: &Options, share: &Share, folder: &Path) -> anyhow::Result<Verdict> {
    let began = Instant::now();
    let stage = Stage::start(options, folder, share.seed).await?;
    let done = Arc::new(AtomicU64::new(0));
    let over = Arc::new(AtomicBool::new(false));
    let kinds = chosen(options);
    // A round that has enough faults goes on until each kind happened or was tried often enough.
    let meets_all = share.faults >= kinds.len() as u64;
    let unmet = Arc::new(AtomicU64::new(kinds.len() as u64));
    let loops = [Group::Around, Group::Inside].map(|group| {
        let mut random = SmallRng::seed_from_u64(share.seed ^ ((group as u64 + 1) << 32));
        let first = faults::each(&kinds, group, &mut random).into_iter().map(|kind| (kind, FIRST_TRIES)).collect();
        let (stage, kinds, done, unmet) = (Arc::clone(&stage), kinds.clone(), Arc::clone(&done), Arc::clone(&unmet));
        let harm = Harm { stage, kinds, first, group, random, done, unmet };
        tokio::spawn(harm.until(Arc::clone(&over)))
    });
    let mut reported = Instant::now();
    let mut watch = Watch { places: vec![stage.places(); PLACES], stage: Arc::clone(&stage) };
    while stage.committed() < share.events
        || done.load(Ordering::Relaxed) < share.faults
        || (meets_all && unmet.load(Ordering::Relaxed) > 0)
    {
        watch.step().await;
        if reported.elapsed() > Duration::from_secs(20) {
            reported = Instant::now();
            let (events, faults) = (stage.committed(), done.load(Ordering::Relaxed));
            say(&format!("  {:>4.0} s: {events} events committed, {faults} faults", began.elapsed().as_secs_f64()));
        }
        anyhow::ensure!(!loops.iter().all(|it| it.is_finished()), "no kind of fault is possible here");
    }
    over.store(true, Ordering::SeqCst);
    for ended in loops {
        watch.until(ended).await?;
    }
    let (drained, helped) = drain(&stage, &mut watch).await?;
    stage.stop_relays().await;
    stage.settle_records().await;
    stage.bed.dump(folder).await?;
    let mut verdict = judge(folder)?;
    let mut fact = |name: &str, count: u64| *verdict.facts.entry(name.to_owned()).or_default() += count;
    fact("rounds", 1);
    fact("seconds", began.elapsed().as_secs());
    fact("rounds that did not drain by themselves", u64::from(!drained));
    fact("retried by hand", helped);
    fact("relays that ended by themselves and were started again", stage.ended.lock().await.len() as u64);
    Ok(verdict)
}

fn chosen(options: &Options) -> Vec<&'static Kind> {
    let named = |kinds: &[String], name: &str| kinds.iter().any(|kind| kind == name);
    let fits = |kind: &&Kind| {
        kind.stores.contains(&options.store)
            && (options.only.is_empty() || named(&options.only, kind.name))
            && !named(&options.without, kind.name)
    };
    KINDS.iter().filter(fits).collect()
}

/// Looks at the relays.
struct Watch {
    stage: Arc<Stage>,
    /// File lengths at the last looks, the oldest first.
    places: Vec<Vec<(String, u64)>>,
}

impl Watch {
    async fn step(&mut self) {
        self.stage.supervise(&self.places.remove(0)).await;
        sleep(STEP).await;
        self.places.push(self.stage.places());
    }

    /// Goes on until a task ends.
    async fn until<T>(&mut self, task: JoinHandle<T>) -> Result<T, JoinError> {
        while !task.is_finished() {
            self.step().await;
        }
        task.await
    }
}

/// One of the two tasks that inject faults.
struct Harm {
    stage: Arc<Stage>,
    kinds: Vec<&'static Kind>,
    /// The kinds of the group that have not happened yet, and their tries, the next one last.
    first: Vec<(&'static Kind, u32)>,
    group: Group,
    random: SmallRng,
    done: Arc<AtomicU64>,
    /// How many kinds of `first` are left, in both groups.
    unmet: Arc<AtomicU64>,
}

impl Harm {
    async fn until(mut self, over: Arc<AtomicBool>) {
        let pause = if self.group == Group::Around { PAUSE_AROUND } else { PAUSE_INSIDE };
        let mut misses = 0;
        while !over.load(Ordering::SeqCst) && misses < MISSES_MAX {
            sleep(Duration::from_millis(self.random.random_range(pause.clone()))).await;
            let first = self.first.pop();
            let drawn = first.map(|(kind, _)| kind).or_else(|| faults::draw(&self.kinds, self.group, &mut self.random));
            let Some(kind) = drawn else { return };
            let mut fault = self.stage.begin(kind.name);
            let made = (kind.make)(&self.stage, &mut self.random, &mut fault).await;
            if let Err(error) = made {
                let text = format!("{error:#}");
                if text.contains("not installed") || text.contains("needs root") {
                    say(&format!("  SKIPPED: {}: {text}", kind.name));
                    self.kinds.retain(|other| other.name != kind.name);
                    self.unmet.fetch_sub(u64::from(first.is_some()), Ordering::Relaxed);
                    continue;
                }
                // Most often because another fault was in the way. What happened until then counts
                // if events can have been in flight at its victims, or if a filter changed.
                fault.missed |= fault.window == 0 && fault.topics.is_none();
                fault.detail = format!("{}; {text}", fault.detail);
                if fault.topics.is_some() {
                    while faults::roll(&self.stage, &mut fault).await.is_err() {
                        sleep(Duration::from_millis(200)).await;
                    }
                }
            }
            if let Some((_, tries)) = first {
                // A restore without a copy only makes one.
                let is_met = !fault.missed && fault.kind == kind.name;
                if !is_met && tries > 1 {
                    self.first.insert(0, (kind, tries - 1));
                } else {
                    if !is_met {
                        say(&format!("  DID NOT HAPPEN in {FIRST_TRIES} tries: {}", kind.name));
                    }
                    self.unmet.fetch_sub(1, Ordering::Relaxed);
                }
            }
            misses = if fault.missed { misses + 1 } else { 0 };
            self.done.fetch_add(u64::from(!fault.missed), Ordering::Relaxed);
            self.stage.record(fault).await;
        }
        self.unmet.fetch_sub(self.first.len() as u64, Ordering::Relaxed);
    }
}

/// Ends all faults and waits until nothing is pending; `false` if events stayed pending and nothing
/// moved any more. Also returns how many events were retried by hand.
async fn drain(stage: &Arc<Stage>, watch: &mut Watch) -> anyhow::Result<(bool, u64)> {
    if let Bed::Postgres(bed) = &stage.bed {
        let mut server = bed.server.lock().await;
        server.runs();
        server.try_start().await?;
    }
    let (mut is_moved, mut step) = (false, stage.begin("relay clock step"));
    for relay in &stage.relays {
        let mut relay = relay.lock().await;
        relay.signal("CONT");
        // Where the machine's clock is the store's, operator commands use it too, so it is set
        // right again at the end.
        if matches!(stage.bed, Bed::Sqlite(_)) && crate::process::faketime_library().is_some() {
            is_moved |= relay.step_clock(0)?;
        }
        relay.start()?;
    }
    if is_moved {
        "all relays: set right at the end".clone_into(&mut step.detail);
        step.window = window_of_all();
        stage.record(step).await;
    }
    let ending = Arc::clone(stage);
    watch.until(tokio::spawn(async move { ending.end_writers().await })).await??;
    let restored = std::fs::read_to_string(stage.folder.join("faults.jsonl"))?.contains("\"copied_at\":1");
    if let Bed::Postgres(bed) = &stage.bed {
        bed.end_prepared(!restored).await?;
    }
    let (mut moved, mut before) = (Instant::now(), stage.places());
    let (mut quiet, mut helped) = (0, 0);
    while moved.elapsed() < STANDSTILL_MAX {
        for _ in 0..5 {
            watch.step().await;
        }
        let now = stage.places();
        if now != before {
            (moved, before, quiet) = (Instant::now(), now, 0);
            continue;
        }
        // A retry that was scheduled by a moved clock waits for that time unless an operator
        // retries it now. Without such a fault nothing needs help.
        if moved.elapsed() > WAITING_MAX && clock_moved(stage)? {
            // No dead ones: they are judged.
            for name in ["main", "part"] {
                let waiting = stage.bed.some_events(name, "retrying", 1_000).await?;
                helped += waiting.len() as u64;
                if !waiting.is_empty() {
                    stage.order("retry", Some(name), waiting).await?;
                }
            }
        }
        let (ok, said) = stage.operate(&["stats"]).await?;
        quiet = if ok && said.starts_with("pending=0 ") { quiet + 1 } else { 0 };
        if quiet >= 3 {
            return Ok((true, helped));
        }
    }
    Ok((false, helped))
}

/// Whether a fault moved the clock that the store's times come from.
fn clock_moved(stage: &Stage) -> anyhow::Result<bool> {
    let kind = match &stage.bed {
        Bed::Postgres(_) => "\"database clock step\"",
        Bed::Sqlite(_) => "\"relay clock step\"",
    };
    let faults = std::fs::read_to_string(stage.folder.join("faults.jsonl"))?;
    Ok(faults.lines().any(|line| line.contains(kind) && !line.contains("\"missed\":true")))
}
