//! `postbox demo`: a shop, its outbox, a relay, a signed webhook, a receiver's inbox and its
//! ledger, in one process on SQLite. It injects faults, crashes the relay halfway, and ends with a
//! proof.
//!
//! | file | what it is |
//! |---|---|
//! | `shop` | the producer: orders and events in one transaction, and its independent notes |
//! | `services` | receiver and relay, the faults between them, and the crash |
//! | `proof` | SQL over what is on disk |

mod proof;
mod services;
mod shop;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use postbox_server::text::{grouped, span};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::task::JoinHandle;

use self::proof::{Proof, Tamper};
use self::services::Services;
use self::shop::Progress;
use crate::failure::Failure;
use crate::output;

/// Longest time without progress; then the proof is made of what arrived. Longer than any lease or
/// wait of the demo.
const STANDSTILL_MAX: Duration = Duration::from_secs(30);
/// How often progress is checked.
const TICK: Duration = Duration::from_millis(50);
/// How often progress is printed.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// What can be asked of the demo.
#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// How many orders the shop takes; each goes through three steps
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    orders: u64,
    /// Repeat a run with the same orders, rollbacks and failures
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

/// Colours text on a terminal.
fn paint(code: &str, text: &str) -> String {
    if !output::is_terminal() || output::is_colorless() {
        text.to_owned()
    } else {
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

const BOLD: &str = "1";
const DIM: &str = "2";
const GOOD: &str = "32";
const BAD: &str = "1;31";

pub(super) async fn run(args: DemoArgs) -> Result<(), Failure> {
    let seed = args.seed.unwrap_or_else(|| u64::from(SmallRng::from_os_rng().random::<u32>()));
    let orders = args.orders;
    let temporary = tempfile::Builder::new().prefix("postbox-demo-").tempdir().map_err(anyhow::Error::from)?;
    let folder = args.dir.as_deref().unwrap_or(temporary.path());
    prepare(folder)?;
    let about = format!(
        "{} orders, {} changes. One transaction in ten rolls back,\n  webhooks fail, connections break, and the relay is crashed in the middle.",
        grouped(orders),
        grouped(shop::steps(orders))
    );
    output::print(&format!(
        "\n  {}  {}\n\n    shop ─▶ outbox ─▶ relay ─▶ signed webhook ─▶ inbox ─▶ ledger\n\n  {}\n\n",
        paint(BOLD, "postbox demo"),
        paint(DIM, &format!("seed {seed}")),
        paint(DIM, &about)
    ));
    let took = tokio::select! {
        played = Demo::play(folder, seed, orders) => played?,
        _ = tokio::signal::ctrl_c() => return Err(Failure::failed("stopped; nothing was proven")),
    };
    if let Some(tamper) = args.tamper {
        tamper.commit(folder)?;
    }
    let proof = Proof::count(folder)?;
    let verdict = match proof.holds() {
        true => paint(GOOD, &format!("Every promise kept: {} events in {}.", grouped(proof.committed()), span(took))),
        false => paint(BAD, "A promise was broken."),
    };
    let again = format!("--seed {seed} --orders {orders}");
    let look = match args.dir.as_deref().map(Path::display) {
        Some(dir) => format!(
            "postbox stats --store sqlite:{dir}/shop.db\n                  postbox list --state dispatched --store sqlite:{dir}/shop.db"
        ),
        None => "postbox demo --dir demo\n                  postbox stats --store sqlite:demo/shop.db".into(),
    };
    output::print(&format!(
        "{}\n  {verdict}\n  {}\n\n  {}\n    look inside   {look}\n    your own      postbox init && postbox migrate up && postbox run\n    \
         from SQL      INSERT INTO postbox_outbox (topic, key, payload)\n                  \
         VALUES ('order.paid', '42', '{{\"id\":42}}')\n\n",
        proof.table(),
        paint(DIM, &format!("again: postbox demo {again}")),
        paint(BOLD, "What next"),
    ));
    match proof.holds() {
        true => Ok(()),
        false => Err(Failure::failed(format!("a promise was broken; show it again with {again}"))),
    }
}

/// Creates the folder. Nothing in it is overwritten.
fn prepare(folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)?;
    for path in ["shop.db", "receiver.db", "notes.tsv"].map(|name| folder.join(name)) {
        anyhow::ensure!(!path.exists(), "{} exists already; name an empty folder", path.display());
    }
    Ok(())
}

/// A running demo.
struct Demo {
    services: Services,
    progress: Arc<Progress>,
    shop: JoinHandle<anyhow::Result<()>>,
    began: Instant,
    /// When a change was last applied, and how many there were then.
    moved: (Instant, u64),
    said: Option<Instant>,
}

impl Drop for Demo {
    fn drop(&mut self) {
        // A blocking thread cannot be aborted; it checks this flag.
        self.progress.stop.store(true, Relaxed);
    }
}

impl Demo {
    /// Runs everything from the first order to the last applied message, and returns the time it
    /// took.
    async fn play(folder: &Path, seed: u64, orders: u64) -> Result<Duration, Failure> {
        let services = Services::start(folder, seed).await?;
        let progress = Arc::new(Progress::default());
        let shop = {
            let (folder, progress) = (folder.to_owned(), Arc::clone(&progress));
            tokio::task::spawn_blocking(move || shop::work(&folder, seed, orders, &progress))
        };
        let now = Instant::now();
        let mut demo = Self { services, progress, shop, began: now, moved: (now, 0), said: None };
        demo.say(&paint(GOOD, "the shop opens"));
        if !(demo.crash_and_recover(shop::steps(orders) / 2).await? && demo.arrive().await?) {
            demo.say(&paint(BAD, &format!("nothing has arrived for {}", span(STANDSTILL_MAX))));
        }
        // The notes must be complete before they prove anything.
        demo.progress.stop.store(true, Relaxed);
        (&mut demo.shop).await.map_err(anyhow::Error::from)??;
        demo.services.stop().await?;
        let faults = &demo.services.faults;
        let [requests, failed, cut] =
            [&faults.requests, &faults.failed, &faults.cut].map(|it| grouped(it.load(Relaxed)));
        let duplicates = grouped(demo.services.answered("duplicate"));
        demo.say(&format!("{requests} requests: {failed} answered 500 or 503, {cut} cut off"));
        demo.say(&format!("{duplicates} messages came twice and were recognised"));
        Ok(demo.began.elapsed())
    }

    fn say(&self, text: &str) {
        let seconds = format!("{:5.1}s", self.began.elapsed().as_secs_f64());
        output::print(&format!("  {} {text}\n", paint(DIM, &seconds)));
    }

    /// Prints progress until `done`. `false`: nothing moves any more.
    async fn until(&mut self, done: impl AsyncFn(&Self) -> anyhow::Result<bool>) -> Result<bool, Failure> {
        while !done(self).await? {
            let applied = self.services.applied();
            if self.moved.1 != applied {
                self.moved = (Instant::now(), applied);
            }
            if self.moved.0.elapsed() > STANDSTILL_MAX {
                return Ok(false);
            }
            if self.said.is_none_or(|said| said.elapsed() > LINE_EVERY) {
                self.said = Some(Instant::now());
                let [committed, rolled_back] =
                    [&self.progress.committed, &self.progress.rolled_back].map(|it| grouped(it.load(Relaxed)));
                let [delivered, applied] = [self.services.answered("accepted"), applied].map(grouped);
                self.say(&format!(
                    "committed {committed:>6}  rolled back {rolled_back:>5}  delivered {delivered:>6}  applied {applied:>6}"
                ));
            }
            tokio::time::sleep(TICK).await;
        }
        Ok(true)
    }

    /// Crashes the relay once `committed` changes are committed. `false`: nothing moves any more.
    async fn crash_and_recover(&mut self, committed: u64) -> Result<bool, Failure> {
        // Crash only with requests in flight: their answers are then lost.
        let half = self.until(async |demo| {
            let may_crash = demo.services.faults.in_flight.load(Relaxed) > 0 || demo.shop.is_finished();
            Ok(may_crash && demo.progress.committed.load(Relaxed) >= committed)
        });
        if !half.await? {
            return Ok(false);
        }
        let in_flight = self.services.crash_relay();
        self.say(&paint(BAD, &format!("the relay is killed with {in_flight} request(s) on the wire")));
        self.services.start_relay().await?;
        self.say("a new relay starts and waits for the dead one's lease to run out");
        let recovered = self.until(async |demo| {
            Ok(demo.services.relay_delivers() || (demo.shop.is_finished() && demo.services.is_quiet().await?))
        });
        if !recovered.await? {
            return Ok(false);
        }
        self.say(&paint(GOOD, "it continues from what is recorded, not from what the dead one believed"));
        Ok(true)
    }

    /// Waits for everything in flight. `false`: nothing moves any more.
    async fn arrive(&mut self) -> Result<bool, Failure> {
        if !self.until(async |demo| Ok(demo.shop.is_finished())).await? {
            return Ok(false);
        }
        self.say("the shop closes; what is under way arrives");
        self.until(async |demo| demo.services.is_quiet().await).await
    }
}
