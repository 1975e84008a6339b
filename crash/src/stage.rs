//! Everything that runs in a round (store, relays, writers, endpoint), and the files that record
//! for the checker what happened.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use postbox_crash_checker::faults::{Fault, Order};
use postbox_crash_checker::judge::{Reader, Round};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::options::{Options, SinkKind};
use crate::process::Process;
use crate::relay::{self, Config, LEASE, Relay, WINDOW};
use crate::store::postgres::PostgresBed;
use crate::store::sqlite::SqliteBed;
use crate::store::{Bed, StoreKind};
use crate::writer::{TOPICS, now_micros};

/// Number of relays.
pub(crate) const RELAYS: usize = 3;
/// Number of writers; the last one appends through the library.
const WRITERS: usize = 4;
/// A fault's effects are over one lease after it ends, and a margin.
const AFTERMATH: Duration = Duration::from_millis(LEASE.as_millis() as u64 + 1_000);
const SECRET: &str = "whsec_c3Rvcm0tc3Rvcm0tc3Rvcm0tc3Rvcm0tc3Rvcm0=";

/// A running round. Fields are dropped in this order.
pub(crate) struct Stage {
    pub(crate) relays: Vec<Mutex<Relay>>,
    writers: Mutex<Vec<Process>>,
    endpoint: std::sync::Mutex<Option<Process>>,
    pub(crate) bed: Bed,
    pub(crate) folder: PathBuf,
    pub(crate) binary: PathBuf,
    main_sink: String,
    rate: f64,
    seed: u64,
    pub(crate) topics: Mutex<Vec<String>>,
    committed: Arc<AtomicU64>,
    incarnation: AtomicUsize,
    faults: Mutex<File>,
    orders: Mutex<File>,
    aftermaths: Mutex<JoinSet<()>>,
    /// Relays that ended by themselves, with their last log line.
    pub(crate) ended: Mutex<Vec<String>>,
}

impl Stage {
    pub(crate) async fn start(options: &Options, folder: &Path, seed: u64) -> anyhow::Result<Arc<Self>> {
        std::fs::create_dir_all(folder)?;
        let bed = match options.store {
            StoreKind::Sqlite => Bed::Sqlite(SqliteBed::launch(folder, seed)?),
            store => {
                let pooled = store == StoreKind::Pooler;
                Bed::Postgres(Box::new(PostgresBed::launch(folder, RELAYS, pooled, seed).await?))
            }
        };
        let arrivals = |name: &str| folder.join(format!("arrivals-{name}.log"));
        let file_sink = |name: &str| format!("{{ type = \"file\", path = \"{}\" }}", arrivals(name).display());
        let (endpoint, main_sink) = match options.sink {
            SinkKind::File => (None, file_sink("main")),
            SinkKind::Http => {
                let (process, port) = start_endpoint(&arrivals("main"), folder, seed)?;
                let url = format!("http://127.0.0.1:{port}/hook");
                let sink =
                    format!("{{ type = \"http\", url = \"{url}\", allow = [\"127.0.0.1\"], secret = \"{SECRET}\" }}");
                (Some(process), sink)
            }
        };
        let topics = vec![TOPICS[0].to_owned(), TOPICS[1].to_owned()];
        let reader = |name: &str, by_file, topics| Reader { name: name.to_owned(), by_file, topics };
        let all = TOPICS.map(str::to_owned).to_vec();
        let by_file = options.sink == SinkKind::File;
        let subscriptions = vec![reader("main", by_file, all), reader("part", true, topics.clone())];
        let lease = i64::try_from(LEASE.as_micros())?;
        let round = Round { seed, subscriptions, lease };
        std::fs::write(folder.join("round.json"), serde_json::to_vec_pretty(&round)?)?;
        let stage = Self {
            relays: (0..RELAYS).map(|number| Mutex::new(Relay::new(&options.binary, folder, number))).collect(),
            writers: Mutex::default(),
            endpoint: endpoint.into(),
            bed,
            folder: folder.to_owned(),
            binary: options.binary.clone(),
            main_sink,
            rate: options.rate / WRITERS as f64,
            seed,
            topics: Mutex::new(topics),
            committed: Arc::default(),
            incarnation: AtomicUsize::new(0),
            faults: Mutex::new(File::create(folder.join("faults.jsonl"))?),
            orders: Mutex::new(File::create(folder.join("operator.jsonl"))?),
            aftermaths: Mutex::default(),
            ended: Mutex::default(),
        };
        let (ok, said) = relay::command(&stage.binary, &stage.bed.operator_url(), &["migrate", "up"]).await?;
        anyhow::ensure!(ok, "migrate up: {said}");
        stage.bed.prepare().await?;
        for number in 0..RELAYS {
            stage.configure(number).await?;
            stage.relays[number].lock().await.start()?;
        }
        stage.relays[0].lock().await.serving().await?;
        for number in 0..WRITERS {
            let writer = stage.start_writer(number)?;
            stage.writers.lock().await.push(writer);
        }
        Ok(Arc::new(stage))
    }

    pub(crate) fn postgres(&self) -> anyhow::Result<&PostgresBed> {
        let Bed::Postgres(bed) = &self.bed else { anyhow::bail!("this fault is of Postgres") };
        Ok(bed)
    }

    pub(crate) fn sqlite(&self) -> anyhow::Result<&SqliteBed> {
        let Bed::Sqlite(bed) = &self.bed else { anyhow::bail!("this fault is of SQLite") };
        Ok(bed)
    }

    /// Writes a relay's configuration, which applies from its next start.
    pub(crate) async fn configure(&self, number: usize) -> anyhow::Result<()> {
        let topics = self.topics.lock().await.clone();
        let part = self.folder.join("arrivals-part.log");
        let part_sink = format!("{{ type = \"file\", path = \"{}\" }}", part.display());
        let store = self.bed.relay_url(number);
        let config = Config { store: &store, main_sink: &self.main_sink, part_sink: &part_sink, part_topics: &topics };
        self.relays[number].lock().await.configure(&config)
    }

    /// Number of events whose commit was acknowledged.
    pub(crate) fn committed(&self) -> u64 {
        self.committed.load(Ordering::Relaxed)
    }

    /// Resets the count: a restore took back what was committed since.
    pub(crate) fn take_back_to(&self, committed: u64) {
        self.committed.store(committed, Ordering::Relaxed);
    }

    fn start_writer(&self, number: usize) -> anyhow::Result<Process> {
        let incarnation = self.incarnation.fetch_add(1, Ordering::Relaxed);
        let name = format!("w{number}.{incarnation}");
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("writer").args(["--store", &self.bed.writer_store(), "--name", &name]);
        command.args(["--seed", &self.seed.wrapping_add(incarnation as u64 * 7919).to_string()]);
        command.arg("--ledger").arg(self.folder.join(format!("ledger-{name}.jsonl")));
        command.args(["--rate", &self.rate.to_string()]);
        if number == WRITERS - 1 {
            command.arg("--rust");
        }
        let mut writer = Process::start(&mut command, Stdio::piped(), &self.folder.join("writers.log"))?;
        let stdout = writer.child_mut().stdout.take().context("it is piped")?;
        let committed = Arc::clone(&self.committed);
        std::thread::spawn(move || {
            let events =
                BufReader::new(stdout).lines().map_while(Result::ok).filter_map(|line| line.parse::<u64>().ok());
            events.for_each(|events| _ = committed.fetch_add(events, Ordering::Relaxed));
        });
        Ok(writer)
    }

    /// Kills a writer and starts another one with another name.
    pub(crate) async fn replace_writer(&self, random: &mut SmallRng) -> anyhow::Result<usize> {
        let number = random.random_range(0..WRITERS);
        let mut writers = self.writers.lock().await;
        writers[number].kill();
        writers[number] = self.start_writer(number)?;
        Ok(number)
    }

    /// Kills all writers while `work` is done, then starts new ones.
    pub(crate) async fn without_writers<T>(&self, work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
        let mut writers = self.writers.lock().await;
        writers.iter_mut().for_each(Process::kill);
        let done = work.await;
        for number in 0..WRITERS {
            writers[number] = self.start_writer(number)?;
        }
        done
    }

    /// Length of each sink's file.
    pub(crate) fn places(&self) -> Vec<(String, u64)> {
        let length =
            |name: &str| std::fs::metadata(self.folder.join(format!("arrivals-{name}.log"))).map_or(0, |it| it.len());
        ["main", "part"].map(|name| (name.to_owned(), length(name))).to_vec()
    }

    /// Begins a fault's record.
    pub(crate) fn begin(&self, kind: &str) -> Fault {
        Fault { kind: kind.to_owned(), from: now_micros(), places_from: self.places(), ..Fault::default() }
    }

    /// Completes a fault's record and writes it once its effects must be over.
    pub(crate) async fn record(self: &Arc<Self>, mut fault: Fault) {
        fault.until = now_micros();
        let stage = Arc::clone(self);
        self.aftermaths.lock().await.spawn(async move {
            if fault.window > 0 {
                sleep(AFTERMATH).await;
            }
            fault.places_until = stage.places();
            let mut line = serde_json::to_vec(&fault).unwrap_or_default();
            line.push(b'\n');
            let _ = stage.faults.lock().await.write_all(&line);
        });
    }

    /// Runs an operator's command about events of a subscription, or of all; recorded before it is
    /// run.
    pub(crate) async fn order(
        &self,
        op: &str,
        of: Option<&str>,
        events: Vec<crate::store::Named>,
    ) -> anyhow::Result<String> {
        let order = Order { op: op.to_owned(), events: events.iter().map(|it| it.event.clone()).collect() };
        let mut line = serde_json::to_vec(&order)?;
        line.push(b'\n');
        self.orders.lock().await.write_all(&line)?;
        let ids = events.iter().map(|it| it.id.as_str());
        let of = of.map(|name| ["--subscription", name]);
        let arguments: Vec<&str> = [op].into_iter().chain(of.iter().flatten().copied()).chain(ids).collect();
        Ok(self.operate(&arguments).await?.1)
    }

    /// Runs an operator's command.
    pub(crate) async fn operate(&self, arguments: &[&str]) -> anyhow::Result<(bool, String)> {
        relay::command(&self.binary, &self.bed.operator_url(), arguments).await
    }

    /// Restarts relays that ended by themselves, as any supervisor does, and records their last log
    /// line. Also records lost leases with their codes: the checker decides which of them need a
    /// fault. `before` are the file lengths of a lease ago.
    pub(crate) async fn supervise(self: &Arc<Self>, before: &[(String, u64)]) {
        for relay in &self.relays {
            // A relay that a fault is busy with is left to that fault.
            let Ok(mut relay) = relay.try_lock() else { continue };
            let seen = std::mem::replace(&mut relay.places_seen, before.to_vec());
            let places = if seen.is_empty() { before.to_vec() } else { seen };
            for detail in relay.leases_lost() {
                let fault = Fault {
                    is_stall: true,
                    detail,
                    window: WINDOW,
                    places_from: places.clone(),
                    ..self.begin("lease ran out")
                };
                self.record(fault).await;
            }
            let ended = relay.has_ended();
            self.record_failures(&mut relay).await;
            let Some(code) = ended else { continue };
            // After a pause, because a store that is down stays down for a moment.
            sleep(Duration::from_millis(200)).await;
            let log = relay.log();
            let last = log.lines().rev().find(|line| !line.is_empty()).unwrap_or_default().to_owned();
            self.ended.lock().await.push(format!("{code:?}: {last}"));
            let _ = relay.start();
        }
    }

    /// Records what a relay did that no fault excuses, or only some.
    async fn record_failures(self: &Arc<Self>, relay: &mut Relay) {
        for (kind, detail) in relay.take_failures() {
            self.record(Fault { detail, ..self.begin(kind) }).await;
        }
    }

    /// Asks the writers to end; they end their prepared transactions, too.
    pub(crate) async fn end_writers(&self) -> anyhow::Result<()> {
        let mut writers = self.writers.lock().await;
        writers.iter_mut().for_each(Process::ask_to_end);
        for writer in writers.iter_mut() {
            let mut waited = 0;
            while writer.ended().is_none() {
                anyhow::ensure!(waited < 60_000, "a writer does not end");
                sleep(Duration::from_millis(20)).await;
                waited += 20;
            }
        }
        Ok(())
    }

    /// Waits for the records of the last faults.
    pub(crate) async fn settle_records(&self) {
        let mut aftermaths = std::mem::take(&mut *self.aftermaths.lock().await);
        while aftermaths.join_next().await.is_some() {}
    }

    pub(crate) async fn stop_relays(self: &Arc<Self>) {
        for relay in &self.relays {
            let mut relay = relay.lock().await;
            let stopped = relay.stop().await;
            relay.leases_lost();
            self.record_failures(&mut relay).await;
            if let Err(error) = stopped {
                self.ended.lock().await.push(format!("{error:#}"));
            }
        }
        if let Ok(mut endpoint) = self.endpoint.lock() {
            *endpoint = None;
        }
    }
}

fn start_endpoint(log: &Path, folder: &Path, seed: u64) -> anyhow::Result<(Process, u16)> {
    let mut command = Command::new(std::env::current_exe()?);
    let seed = SmallRng::seed_from_u64(seed).random::<u64>();
    command.arg("endpoint").arg("--log").arg(log).args(["--seed", &seed.to_string()]);
    let mut process = Process::start(&mut command, Stdio::piped(), &folder.join("endpoint.log"))?;
    let stdout = process.child_mut().stdout.take().context("it is piped")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    Ok((process, line.trim().parse().context("the endpoint's port")?))
}
