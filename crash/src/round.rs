//! One round: starts everything, injects faults until there are enough events and faults, drains,
//! and lets the checker judge.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use postbox_crash_checker::{Verdict, judge};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::time::sleep;

use crate::faults::{self, Group, KINDS, Kind};
use crate::options::Options;
use crate::say;
use crate::stage::Stage;
use crate::store::Bed;

/// Time without progress after which pending events are considered stuck.
const STANDSTILL_MAX: Duration = Duration::from_secs(45);
/// Several times the longest retry wait of the configuration.
const WAITING_MAX: Duration = Duration::from_secs(8);
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
    let loops = [Group::Around, Group::Inside].map(|group| {
        let random = SmallRng::seed_from_u64(share.seed ^ ((group as u64 + 1) << 32));
        let harm = Harm { stage: Arc::clone(&stage), kinds: kinds.clone(), group, random, done: Arc::clone(&done) };
        tokio::spawn(harm.until(Arc::clone(&over)))
    });
    let mut reported = Instant::now();
    let mut places = vec![stage.places(); 10];
    while stage.committed() < share.events || done.load(Ordering::Relaxed) < share.faults {
        stage.supervise(&places.remove(0)).await;
        sleep(Duration::from_millis(100)).await;
        places.push(stage.places());
        if reported.elapsed() > Duration::from_secs(20) {
            reported = Instant::now();
            let (events, faults) = (stage.committed(), done.load(Ordering::Relaxed));
            say(&format!("  {:>4.0} s: {events} events committed, {faults} faults", began.elapsed().as_secs_f64()));
        }
        anyhow::ensure!(!loops.iter().all(|it| it.is_finished()), "no kind of fault is possible here");
    }
    over.store(true, Ordering::SeqCst);
    for ended in loops {
        ended.await?;
    }
    let drained = drain(&stage).await?;
    stage.settle_records().await;
    stage.stop_relays().await;
    stage.bed.dump(folder).await?;
    let mut verdict = judge(folder)?;
    let mut fact = |name: &str, count: u64| *verdict.facts.entry(name.to_owned()).or_default() += count;
    fact("rounds", 1);
    fact("seconds", began.elapsed().as_secs());
    fact("rounds that did not drain by themselves", u64::from(!drained));
    let ended = stage.ended.lock().await;
    fact("relays that ended by themselves and were started again", ended.len() as u64);
    let reasons: BTreeSet<&String> = ended.iter().filter(|ended| ended.contains("101")).collect();
    reasons.into_iter().for_each(|reason| verdict.named.push(format!("a relay panicked: {reason}")));
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

/// One of the two tasks that inject faults.
struct Harm {
    stage: Arc<Stage>,
    kinds: Vec<&'static Kind>,
    group: Group,
    random: SmallRng,
    done: Arc<AtomicU64>,
}

impl Harm {
    async fn until(mut self, over: Arc<AtomicBool>) {
        let pause = if self.group == Group::Around { PAUSE_AROUND } else { PAUSE_INSIDE };
        while !over.load(Ordering::SeqCst) {
            sleep(Duration::from_millis(self.random.random_range(pause.clone()))).await;
            let Some(kind) = faults::draw(&self.kinds, self.group, &mut self.random) else { return };
            let mut fault = self.stage.begin(kind.name);
            let made = (kind.make)(&self.stage, &mut self.random, &mut fault).await;
            if let Err(error) = made {
                let text = format!("{error:#}");
                if text.contains("not installed") || text.contains("needs root") {
                    say(&format!("  SKIPPED: {}: {text}", kind.name));
                    self.kinds.retain(|other| other.name != kind.name);
                    continue;
                }
                // Most often because another fault was in the way.
                fault.detail = format!("{}; {text}", fault.detail);
                if fault.topics.is_some() {
                    while faults::roll(&self.stage, &mut fault).await.is_err() {
                        sleep(Duration::from_millis(200)).await;
                    }
                }
            }
            self.stage.record(fault).await;
            self.done.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Ends all faults and waits until nothing is pending; `false` if events stayed pending and nothing
/// moved any more.
async fn drain(stage: &Arc<Stage>) -> anyhow::Result<bool> {
    if let Bed::Postgres(bed) = &stage.bed {
        let mut server = bed.server.lock().await;
        server.runs();
        server.try_start().await?;
    }
    for relay in &stage.relays {
        let mut relay = relay.lock().await;
        relay.signal("CONT");
        // Where the machine's clock is the store's, operator commands use it too, so it is set
        // right again at the end.
        if matches!(stage.bed, Bed::Sqlite(_)) && crate::process::faketime_library().is_some() {
            relay.step_clock(0)?;
        }
        relay.start()?;
    }
    stage.end_writers().await?;
    let restored = std::fs::read_to_string(stage.folder.join("faults.jsonl"))?.contains("\"copied_at\":1");
    if let Bed::Postgres(bed) = &stage.bed {
        bed.end_prepared(!restored).await?;
    }
    let (mut moved, mut before) = (Instant::now(), stage.places());
    let mut quiet = 0;
    while moved.elapsed() < STANDSTILL_MAX {
        stage.supervise(&before).await;
        sleep(Duration::from_millis(500)).await;
        let now = stage.places();
        if now != before {
            (moved, before, quiet) = (Instant::now(), now, 0);
            continue;
        }
        // A retry that was scheduled by a moved clock waits for that time unless an operator
        // retries it now.
        if moved.elapsed() > WAITING_MAX {
            let waiting = stage.bed.some_events("retrying", 1_000).await?;
            if !waiting.is_empty() {
                stage.order("retry", waiting).await?;
            }
            // The other subscription's sink accepts everything, so none of its events is dead.
            // Events that a relay set aside after crashes wait as well.
            stage.operate(&["retry", "--all", "--subscription", "part"]).await?;
        }
        let (ok, said) = stage.operate(&["stats"]).await?;
        quiet = if ok && said.starts_with("pending=0 ") { quiet + 1 } else { 0 };
        if quiet >= 3 {
            return Ok(true);
        }
    }
    Ok(false)
}
