//! `postbox demo`: a shop, its outbox, a relay, a signed webhook, a receiver's inbox and its
//! ledger, in one process on SQLite, under faults, with the relay crashed in the middle; and a
//! proof at the end.
//!
//! | file | what it is |
//! |---|---|
//! | `shop` | the producer: orders and events in one transaction, and its independent notes |
//! | `fault` | requests that fail, connections that break |
//! | `env` | the two services and the relay that gets crashed |
//! | `proof` | SQL over what is on disk |
//! | `show` | bars and lines |

mod env;
mod fault;
mod proof;
mod shop;
mod show;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use postbox_server::text::{grouped, span};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::task::JoinHandle;

use self::env::DemoEnv;
use self::proof::{Proof, Tamper};
use self::shop::Progress;
use self::show::{Counts, Paint, Show};
use crate::failure::Failure;
use crate::output;

/// When nothing has arrived for so long, the proof is made of what did. Longer than any lease or
/// wait of the demo.
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

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::failed(format!("the demo cannot run: {error:#}"))
    }
}

pub(super) async fn run(args: DemoArgs) -> Result<(), Failure> {
    let seed = args.seed.unwrap_or_else(|| u64::from(SmallRng::from_os_rng().random::<u32>()));
    let orders = args.orders;
    let temporary;
    let folder = match &args.dir {
        Some(folder) => folder.as_path(),
        None => {
            temporary = tempfile::Builder::new().prefix("postbox-demo-").tempdir().map_err(anyhow::Error::from)?;
            temporary.path()
        }
    };
    prepare(folder)?;
    let paint = Paint::new();
    output::print(&format!(
        "\n  {}  {}\n\n    shop ─▶ outbox ─▶ relay ─▶ signed webhook ─▶ inbox ─▶ ledger\n\n  {}\n\n",
        paint.bold("postbox demo"),
        paint.dim(&format!("seed {seed}")),
        paint.dim(&format!(
            "{} orders, {} changes. One transaction in ten rolls back, webhooks fail, connections break,\n  and the relay is crashed in the middle.",
            grouped(orders),
            grouped(shop::steps(orders))
        )),
    ))?;
    let took = tokio::select! {
        played = play(folder, seed, orders, paint) => played?,
        _ = tokio::signal::ctrl_c() => return Err(Failure::failed("stopped; nothing was proven")),
    };
    if let Some(tamper) = args.tamper {
        tamper.commit(folder)?;
    }
    let proof = Proof::count(folder)?;
    output::print(&proof.table(paint))?;
    let again = format!("--seed {seed} --orders {orders}");
    let verdict = match proof.holds() {
        true => paint.good(&format!("Every promise kept: {} events in {}.", grouped(proof.committed()), span(took))),
        false => paint.bad("A promise was broken."),
    };
    output::print(&format!(
        "\n  {}\n  {}\n",
        paint.bold(&verdict),
        paint.dim(&format!("again: postbox demo {again}"))
    ))?;
    output::print(&what_next(args.dir.as_deref(), paint))?;
    match proof.holds() {
        true => Ok(()),
        false => Err(Failure::failed(format!("a promise was broken; show it again with {again}"))),
    }
}

/// The folder is made, and nothing in it is written over.
fn prepare(folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)?;
    for path in ["shop.db", "receiver.db", "notes.tsv"].map(|name| folder.join(name)) {
        anyhow::ensure!(!path.exists(), "{} is there already; name an empty folder", path.display());
    }
    Ok(())
}

fn what_next(kept: Option<&Path>, paint: Paint) -> String {
    let look = match kept.map(Path::display) {
        Some(dir) => format!(
            "postbox stats --store sqlite:{dir}/shop.db\n                  postbox list --state dispatched --limit 5 --store sqlite:{dir}/shop.db"
        ),
        None => "postbox demo --dir demo && postbox stats --store sqlite:demo/shop.db".into(),
    };
    format!(
        "\n  {}\n    look inside   {look}\n    your own      postbox init && postbox migrate up && postbox run\n    from SQL      {}\n\n",
        paint.bold("What next"),
        "INSERT INTO postbox_outbox (topic, key, payload) VALUES ('order.paid', '42', '{\"id\":42}')"
    )
}

/// A demo under way.
struct Demo {
    env: DemoEnv,
    show: Show,
    progress: Arc<Progress>,
    shop: JoinHandle<anyhow::Result<()>>,
    /// When a change was applied last, and how many there were.
    moved: (Instant, u64),
}

impl Drop for Demo {
    fn drop(&mut self) {
        // A blocking thread cannot be dropped; it looks at this.
        self.progress.stop.store(true, Relaxed);
    }
}

/// Everything from the first order to the last applied message; gives the time it took.
async fn play(folder: &Path, seed: u64, orders: u64, paint: Paint) -> Result<Duration, Failure> {
    let env = DemoEnv::start(folder, seed).await?;
    let progress = Arc::new(Progress::default());
    let shop = {
        let (folder, progress) = (folder.to_owned(), Arc::clone(&progress));
        tokio::task::spawn_blocking(move || shop::work(&folder, seed, orders, &progress))
    };
    let total = shop::steps(orders);
    let mut demo = Demo { env, show: Show::new(total, paint), progress, shop, moved: (Instant::now(), 0) };
    demo.show.say(&paint.good("the shop opens"))?;
    if !(demo.crash_and_recover(total / 2).await? && demo.arrive().await?) {
        demo.show.say(&paint.bad(&format!("nothing has arrived for {}", span(STANDSTILL_MAX))))?;
    }
    demo.finish().await
}

impl Demo {
    fn counts(&self) -> Counts {
        let faults = &self.env.faults;
        Counts {
            committed: self.progress.committed.load(Relaxed),
            rolled_back: self.progress.rolled_back.load(Relaxed),
            delivered: self.env.answered("accepted"),
            applied: self.env.applied(),
            failed: faults.failed.load(Relaxed) + faults.cut.load(Relaxed),
        }
    }

    /// Shows how far it is, once in a tick, until `done`. False: nothing moves any more.
    async fn until(&mut self, done: impl AsyncFn(&Self) -> anyhow::Result<bool>) -> Result<bool, Failure> {
        while !done(self).await? {
            let counts = self.counts();
            self.show.update(counts)?;
            if self.moved.1 != counts.applied {
                self.moved = (Instant::now(), counts.applied);
            }
            if self.moved.0.elapsed() > STANDSTILL_MAX {
                return Ok(false);
            }
            tokio::time::sleep(TICK).await;
        }
        Ok(true)
    }

    /// Crashes the relay once so many changes are committed. False: nothing moves any more.
    async fn crash_and_recover(&mut self, committed: u64) -> Result<bool, Failure> {
        let paint = self.show.paint;
        // Only with requests under way: these are the ones whose answer nobody will hear.
        let half = self.until(async |demo| {
            let may_crash = demo.env.faults.in_flight.load(Relaxed) > 0 || demo.shop.is_finished();
            Ok(may_crash && demo.progress.committed.load(Relaxed) >= committed)
        });
        if !half.await? {
            return Ok(false);
        }
        let in_flight = self.env.crash_relay();
        self.show.say(&paint.bad(&format!("the relay is killed with {in_flight} request(s) on the wire")))?;
        self.env.start_relay().await?;
        self.show.say(&paint.warm("a new relay starts and waits for the dead one's lease to run out"))?;
        let recovered = self.until(async |demo| {
            Ok(demo.env.relay_delivers() || (demo.shop.is_finished() && demo.env.is_quiet().await?))
        });
        if !recovered.await? {
            return Ok(false);
        }
        self.show.say(&paint.good("it goes on from what is recorded, not from what the dead one believed"))?;
        Ok(true)
    }

    /// Waits for what is under way. False: nothing moves any more.
    async fn arrive(&mut self) -> Result<bool, Failure> {
        if !self.until(async |demo| Ok(demo.shop.is_finished())).await? {
            return Ok(false);
        }
        self.show.say("the shop closes; what is under way arrives")?;
        self.until(async |demo| demo.env.is_quiet().await).await
    }

    async fn finish(mut self) -> Result<Duration, Failure> {
        // The notes must be whole before anything is proven by them.
        self.progress.stop.store(true, Relaxed);
        (&mut self.shop).await.map_err(anyhow::Error::from)??;
        let counts = Counts { delivered: self.env.stored().await?, ..self.counts() };
        self.show.update(counts)?;
        let faults = &self.env.faults;
        let [requests, failed, cut] =
            [&faults.requests, &faults.failed, &faults.cut].map(|it| grouped(it.load(Relaxed)));
        let duplicates = grouped(self.env.answered("duplicate"));
        self.env.stop().await?;
        self.show.say(&format!(
            "{requests} requests: {failed} answered 500 or 503, {cut} cut off, {duplicates} came twice and were recognised"
        ))?;
        Ok(self.show.finish())
    }
}
