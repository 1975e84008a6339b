//! `postbox demo`: a shop, its outbox, a relay, a signed webhook, a receiver's inbox and its ledger, in one process on SQLite,
//! in bad weather, with the relay crashed in the middle; and a proof at the end.
//!
//! | file | what it is |
//! |---|---|
//! | `shop` | the producer: orders and events in one transaction, and its independent notes |
//! | `weather` | requests that fail, connections that break |
//! | `receiver` | the webhook endpoint's handler, in the inbox's transaction |
//! | `stage` | the two services and the relay that gets crashed |
//! | `proof` | SQL over what is on disk |
//! | `show` | bars and tables |

mod proof;
mod receiver;
mod shop;
mod show;
mod stage;
mod weather;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use postbox_server::text::{grouped, span};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::time::{Instant, MissedTickBehavior, interval};

use self::proof::{Proof, Tamper};
use self::shop::{Progress, Shop};
use self::show::{Counts, Paint, Show};
use self::stage::Stage;
use crate::failure::Failure;
use crate::output;

/// The shop's customers come over so long a time; what is left of the default 8 seconds is crash, recovery and proof.
const SPREAD: Duration = Duration::from_secs(5);
/// When nothing has arrived for so long, the proof is made of what did. Longer than any lease or wait of the demo.
const STANDSTILL_MAX: Duration = Duration::from_secs(30);
/// How often the display changes.
const TICK: Duration = Duration::from_millis(50);

/// What can be asked of the demo.
#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// How many orders the shop takes; each goes through three steps
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    orders: u64,
    /// The same orders, rollbacks and failures again
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,
    /// Keep the databases in this folder, to look at them afterwards
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Break a promise on purpose before the proof is made: the proof must fail
    #[arg(long, value_name = "PROMISE", hide = true)]
    tamper: Option<Tamper>,
}

/// Where the databases are; a temporary folder goes away with it.
struct Place {
    path: PathBuf,
    temporary: Option<tempfile::TempDir>,
}

impl Place {
    fn make(dir: Option<PathBuf>) -> anyhow::Result<Self> {
        let Some(path) = dir else {
            let temporary = tempfile::Builder::new().prefix("postbox-demo-").tempdir()?;
            return Ok(Self { path: temporary.path().to_owned(), temporary: Some(temporary) });
        };
        std::fs::create_dir_all(&path)?;
        for name in ["shop.db", "receiver.db", "notes.tsv"] {
            anyhow::ensure!(
                !path.join(name).exists(),
                "{} is there already; name an empty folder",
                path.join(name).display()
            );
        }
        Ok(Self { path, temporary: None })
    }
}

pub(super) async fn run(args: DemoArgs) -> Result<(), Failure> {
    let seed = args.seed.unwrap_or_else(|| u64::from(SmallRng::from_os_rng().random::<u32>()));
    let paint = Paint::new();
    let failed = |error: anyhow::Error| Failure::failed(format!("the demo cannot run: {error:#}"));
    let place = Place::make(args.dir.clone()).map_err(failed)?;
    output::print(&opening(&args, seed, paint))?;

    let stage = Stage::set(&place.path, seed).await.map_err(failed)?;
    let took = tokio::select! {
        played = play(&args, seed, &place, stage, paint) => played?,
        _ = tokio::signal::ctrl_c() => return Err(Failure::failed("stopped; nothing was proven")),
    };

    let [shop, receiver, notes] = ["shop.db", "receiver.db", "notes.tsv"].map(|name| place.path.join(name));
    if let Some(tamper) = args.tamper {
        tamper.commit(&receiver).map_err(failed)?;
    }
    let proof = proof::count(&shop, &receiver, &notes).map_err(failed)?;
    output::print(&show::proof(&proof, paint))?;
    output::print(&closing(&args, seed, &proof, took, &place, paint))?;
    if proof.holds() {
        return Ok(());
    }
    Err(Failure::failed(format!("a promise was broken; show it again with --seed {seed} --orders {}", args.orders)))
}

fn opening(args: &DemoArgs, seed: u64, paint: Paint) -> String {
    let steps = grouped(shop::steps(args.orders));
    format!(
        "\n  {}  {}\n\n    shop ─▶ outbox ─▶ relay ─▶ signed webhook ─▶ inbox ─▶ ledger\n\n  {}\n\n",
        paint.bold("postbox demo"),
        paint.dim(&format!("seed {seed}")),
        paint.dim(&format!(
            "{} orders, {steps} changes. One transaction in ten rolls back, webhooks fail, connections break,\n  and the relay is crashed in the middle.",
            grouped(args.orders)
        )),
    )
}

/// Everything from the first order to the last applied message; gives the time it took.
async fn play(args: &DemoArgs, seed: u64, place: &Place, mut stage: Stage, paint: Paint) -> Result<Duration, Failure> {
    let failed = |error: anyhow::Error| Failure::failed(format!("the demo cannot run: {error:#}"));
    let total = shop::steps(args.orders);
    let progress = Arc::new(Progress::default());
    let stop = Arc::new(AtomicBool::new(false));
    let _stop = StopOnDrop(Arc::clone(&stop));
    let [database, notes] = ["shop.db", "notes.tsv"].map(|name| place.path.join(name));
    let shop = Shop::open(&database, &notes, seed, args.orders, SPREAD).map_err(failed)?;
    let mut shop = tokio::task::spawn_blocking({
        let (progress, stop) = (Arc::clone(&progress), Arc::clone(&stop));
        move || shop.work(&progress, &stop)
    });

    let mut show = Show::new(total, paint);
    show.say(&paint.good("the shop opens"))?;
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut crashed = false;
    let mut recovered = false;
    let mut closed = false;
    let mut moved = (Instant::now(), 0);
    loop {
        ticks.tick().await;
        let counts = counts(&progress, &stage);
        show.update(counts)?;
        if moved.1 != counts.applied {
            moved = (Instant::now(), counts.applied);
        }
        // Only with requests under way: these are the ones whose answer nobody will hear.
        if !crashed && counts.committed >= total / 2 && (stage.weather.in_flight() > 0 || closed) {
            crashed = true;
            let in_flight = stage.crash_relay();
            show.say(&paint.bad(&format!("the relay is killed with {in_flight} request(s) on the wire")))?;
            stage.start_relay().await.map_err(failed)?;
            show.say(&paint.warm("a new relay starts and waits for the dead one's lease to run out"))?;
        }
        if crashed && !recovered && stage.relay_delivers() {
            recovered = true;
            show.say(&paint.good("it takes over where the books stand, not where the dead one believed to be"))?;
        }
        if !closed && shop.is_finished() {
            (&mut shop).await.map_err(anyhow::Error::from).and_then(|worked| worked).map_err(failed)?;
            closed = true;
            show.say("the shop closes; what is under way arrives")?;
        }
        if closed && crashed && stage.is_quiet().await.map_err(failed)? {
            break;
        }
        if moved.0.elapsed() > STANDSTILL_MAX {
            show.say(&paint.bad(&format!("nothing has arrived for {}", span(STANDSTILL_MAX))))?;
            break;
        }
    }
    if !closed {
        // The notes must be whole before anything is proven by them.
        stop.store(true, Ordering::Relaxed);
        shop.await.map_err(anyhow::Error::from).and_then(|worked| worked).map_err(failed)?;
    }
    let stored = stage.stored().await.map_err(failed)?;
    show.update(Counts { delivered: stored, ..counts(&progress, &stage) })?;
    let (requests, failures, cut) = (stage.weather.requests(), stage.weather.failed(), stage.weather.cut());
    let duplicates = stage.duplicates();
    stage.strike().await.map_err(failed)?;
    show.say(&format!(
        "{} requests: {} answered 500 or 503, {} cut off, {} came twice and were recognised",
        grouped(requests),
        grouped(failures),
        grouped(cut),
        grouped(duplicates)
    ))?;
    Ok(show.finish())
}

fn counts(progress: &Progress, stage: &Stage) -> Counts {
    Counts {
        committed: progress.committed.load(Ordering::Relaxed),
        rolled_back: progress.rolled_back.load(Ordering::Relaxed),
        delivered: stage.delivered(),
        applied: stage.applied(),
        failed: stage.weather.failed() + stage.weather.cut(),
    }
}

/// Tells the shop's thread to end when the demo is given up: a blocking thread cannot be dropped.
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn closing(args: &DemoArgs, seed: u64, proof: &Proof, took: Duration, place: &Place, paint: Paint) -> String {
    let mut text = String::from("\n");
    let verdict = match proof.holds() {
        true => paint.good(&format!("Every promise kept: {} events in {}.", grouped(proof.committed), span(took))),
        false => paint.bad("A promise was broken."),
    };
    text += &format!("  {}\n", paint.bold(&verdict));
    text += &format!("  {}\n", paint.dim(&format!("again: postbox demo --seed {seed} --orders {}", args.orders)));
    text += &format!("\n  {}\n", paint.bold("What next"));
    match &place.temporary {
        None => {
            let dir = place.path.display();
            text += &format!("    look inside   postbox stats --store sqlite:{dir}/shop.db\n");
            text +=
                &format!("                  postbox list --state dispatched --limit 5 --store sqlite:{dir}/shop.db\n");
        }
        Some(_) => text += "    look inside   postbox demo --dir demo && postbox stats --store sqlite:demo/shop.db\n",
    }
    text += "    your own      postbox init && postbox migrate up && postbox run\n";
    text += "    from SQL      INSERT INTO postbox_outbox (topic, key, payload) VALUES ('order.paid', '42', '{\"id\":42}')\n\n";
    text
}
