//! Runs seeds, and shortens a failing history.

use postbox_core::lock;
use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use crate::director::direct;
use crate::plan::Plan;
use crate::server::Store;
use crate::world::World;

/// The message of panics that are part of the plan. Any other panic is a defect.
pub(crate) const PANIC: &str = "as the plan says";
/// Maximum runs spent on shortening one history.
const SHRINK_RUNS_MAX: usize = 3_000;

/// The result of one world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// The violation, if any: a word, a colon and the rest.
    pub violation: Option<String>,
    /// A hash of everything that happened, in order. The same seed gives the same hash.
    pub hash: u64,
}

/// A failing seed, shortened.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The store it ran on.
    pub store: Store,
    /// The violation.
    pub violation: String,
    /// The plan, without all steps that the violation does not need.
    pub plan: String,
    /// What happened in it.
    pub history: Vec<String>,
}

impl Failure {
    /// Returns the command that shows it again.
    pub fn replay(&self) -> String {
        let store = if self.store == Store::Memory { String::new() } else { format!(" --store {}", self.store.name()) };
        format!("cargo xtask simulate --seed {}{store}", self.seed)
    }
}

/// The result of many seeds.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    /// Number of seeds run.
    pub seeds: u64,
    /// How long they took.
    pub took: Duration,
    /// The first failure.
    pub failure: Option<Failure>,
    /// A hash of all histories.
    pub hash: u64,
    /// Number of store calls.
    pub calls: u64,
}

static CALLS: AtomicU64 = AtomicU64::new(0);
static PANICS: Mutex<Option<String>> = Mutex::new(None);

/// Installs a panic hook. Panics of the plan are not printed; others are recorded.
fn listen_to_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::panic::set_hook(Box::new(|panic| {
            let said = |payload: &dyn Any| {
                let text = payload.downcast_ref::<String>().cloned();
                text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
            };
            let text = said(panic.payload());
            if text != PANIC {
                *lock(&PANICS) = Some(format!("{panic}"));
            }
        }));
    });
}

/// Runs the world of a seed.
pub fn run_seed(store: Store, seed: u64) -> Verdict {
    let (violation, hash, _) = run_plan(Plan::of(store, seed), false);
    Verdict { violation, hash }
}

/// Returns the history of a seed, as it happened.
pub fn trace_seed(store: Store, seed: u64) -> Vec<String> {
    run_plan(Plan::of(store, seed), true).2
}

pub(crate) fn run_plan(plan: Plan, tracing: bool) -> (Option<String>, u64, Vec<String>) {
    listen_to_panics();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let world = runtime.expect("a runtime needs nothing").block_on(async {
        let world = Arc::new(World::new(plan, tracing));
        direct(world.clone()).await;
        world
    });
    CALLS.fetch_add(world.calls(), Ordering::Relaxed);
    let (violation, hash, trace) = world.end();
    let panic = lock(&PANICS).take();
    (panic.map(|panic| format!("panic: {panic}")).or(violation), hash, trace)
}

/// Runs seeds from `first` on, on this many threads, until one fails or the time is over.
pub fn run_seeds(store: Store, first: u64, count: u64, threads: usize, limit: Option<Duration>) -> Summary {
    let begun = Instant::now();
    let (next, done, hash) = (AtomicU64::new(first), AtomicU64::new(0), AtomicU64::new(0));
    let failed: Mutex<Option<u64>> = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let over = limit.is_some_and(|limit| begun.elapsed() > limit);
                    if seed >= first + count || over || failed.lock().is_ok_and(|failed| failed.is_some()) {
                        return;
                    }
                    let verdict = run_seed(store, seed);
                    done.fetch_add(1, Ordering::Relaxed);
                    hash.fetch_xor(verdict.hash.rotate_left(seed as u32 % 64), Ordering::Relaxed);
                    if verdict.violation.is_some() {
                        let mut failed = lock(&failed);
                        *failed = Some(failed.map_or(seed, |other| other.min(seed)));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    let (took, calls) = (begun.elapsed(), CALLS.swap(0, Ordering::Relaxed));
    Summary {
        seeds: done.into_inner(),
        took,
        failure: failed.and_then(|seed| shrink_seed(store, seed)),
        hash: hash.into_inner(),
        calls,
    }
}

/// Returns the shortest failing history of a seed; `None` if it passes.
pub fn shrink_seed(store: Store, seed: u64) -> Option<Failure> {
    let plan = Plan::of(store, seed);
    let kind = run_seed(store, seed).violation.as_deref().map(kind_of)?;
    let plan = shrink(plan, &kind);
    let text = plan.to_string();
    let (violation, _, history) = run_plan(plan, true);
    Some(Failure { seed, store, violation: violation.unwrap_or_default(), plan: text, history })
}

fn kind_of(violation: &str) -> String {
    violation.split(':').next().unwrap_or_default().to_owned()
}

/// Leaves out steps as long as the same violation remains.
fn shrink(mut plan: Plan, kind: &str) -> Plan {
    let mut runs = 0;
    let mut fails = |plan: &Plan| {
        runs += 1;
        runs < SHRINK_RUNS_MAX && run_plan(plan.clone(), false).0.is_some_and(|it| kind_of(&it) == kind)
    };
    let calmer = |plan: &Plan| Plan { shape: crate::plan::Shape { jitter: 0, ..plan.shape.clone() }, ..plan.clone() };
    loop {
        let before = plan.steps.len();
        let mut size = plan.steps.len().div_ceil(2).max(1);
        loop {
            let mut from = 0;
            while from < plan.steps.len() {
                let mut shorter = plan.clone();
                shorter.steps.drain(from..(from + size).min(plan.steps.len()));
                if fails(&shorter) {
                    plan = shorter;
                } else {
                    from += size;
                }
            }
            if size == 1 {
                break;
            }
            size = size.div_ceil(2);
        }
        if plan.shape.jitter > 0 && fails(&calmer(&plan)) {
            plan = calmer(&plan);
            continue;
        }
        if plan.steps.len() == before {
            return plan;
        }
    }
}
