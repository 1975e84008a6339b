//! From an outbox through a broker into an inbox: what holds with every one of them while relays
//! are killed, and while the broker is away.
//!
//! `POSTBOX_STORM=1` makes a storm of it. `docs/storm.md` has the command and what came of it.

#![allow(clippy::print_stderr, reason = "a row for each broker")]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postbox_testkit::proxy::FaultProxy;
use serde_json::Value;
use tokio::task::JoinHandle;

use crate::env::{Kind, Served, TestEnv, get, until};
use crate::kafka::Kafka;
use crate::mqtt::Mqtt;
use crate::nats::Nats;
use crate::outages::promised;
use crate::rabbitmq::Rabbitmq;
use crate::redis::Redis;

/// Keys in a storm, each with much to say; and while the broker is away.
const KEYS: (usize, usize) = (40, 1_000);
/// What can be in flight when a relay is killed: a batch, and what another look has brought.
const WINDOW: usize = 2 * 50;
const EFFECTS: &str = "[subscriptions.apply]\nlog = \"inbox\"\nbatch = 50\nlease = \"1s\"\n\
    sink = { type = \"file\", path = \"effects.jsonl\" }\n";

/// A broker that runs, with a client beside us.
pub(crate) trait Broker: Sized {
    /// A message that was published.
    type Message;

    /// Events a second in a storm, and while the broker is away.
    const RATES: (usize, usize) = (500, 1_000);

    /// Whether messages that were out when a receiver was killed come again in their order.
    const REPEATS_IN_ORDER: bool = true;

    /// Starts it, and a proxy in front of it.
    async fn launch() -> Result<(Self, FaultProxy)>;

    /// The keys of the sink and of the source, for a server on this port.
    fn tables(port: u16) -> (String, String);

    /// What was published and not asked for yet, in its order.
    async fn published(&mut self) -> Result<Vec<Self::Message>>;

    /// The id, the key and the payload.
    fn read(message: &Self::Message) -> Result<(String, String, Value)>;

    /// Publishes these once more, as they were.
    async fn publish(&mut self, messages: Vec<&Self::Message>) -> Result<()>;

    /// Whether everything was acknowledged.
    async fn is_settled(&mut self) -> Result<bool> {
        Ok(true)
    }
}

/// A proxy in front of a server that listens on this port.
pub(crate) async fn proxied(port: u16) -> FaultProxy {
    FaultProxy::start(([127, 0, 0, 1], port).into()).await
}

macro_rules! brokers {
    ($($name:ident: $broker:ty;)*) => {
        $(mod $name {
            crate::env::cases! {
                killed_relays_on_sqlite => super::killed_relays::<$broker>(crate::env::Kind::Sqlite);
                killed_relays_on_postgres => super::killed_relays::<$broker>(crate::env::Kind::Postgres);
                an_outage_costs_nothing => super::an_outage_costs_nothing::<$broker>();
            }
        })*
    };
}

brokers! {
    kafka: super::Kafka;
    mqtt: super::Mqtt;
    nats: super::Nats;
    rabbitmq: super::Rabbitmq;
    redis: super::Redis;
}

/// How often a relay is killed, and how long a broker is away.
fn size() -> (usize, Duration) {
    match std::env::var_os("POSTBOX_STORM") {
        Some(_) => (50, Duration::from_secs(60)),
        None => (5, Duration::from_secs(5)),
    }
}

fn sends(sink: &str) -> String {
    format!(
        "[subscriptions.out]\nbatch = 50\nlease = \"1s\"\nbreaker = {{ base = \"50ms\", max = \"200ms\" }}\nsink = {{ {sink} }}\n"
    )
}

/// A producer, until it is stopped.
struct Load {
    written: Arc<AtomicUsize>,
    is_over: Arc<AtomicBool>,
    task: JoinHandle<Result<()>>,
}

impl Load {
    fn start(env: &Arc<TestEnv>, rate: usize, keys: usize) -> Self {
        let (written, is_over) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let (env, count, stop) = (Arc::clone(env), Arc::clone(&written), Arc::clone(&is_over));
        let task = tokio::spawn(async move {
            let mut pace = tokio::time::interval(Duration::from_millis(50));
            while !stop.load(Ordering::SeqCst) {
                pace.tick().await;
                let from = count.load(Ordering::SeqCst);
                let events = from..from + rate / 20;
                env.insert(events.clone().map(|n| ("order.paid", (n % keys).to_string(), n as i64))).await?;
                count.store(events.end, Ordering::SeqCst);
            }
            Ok(())
        });
        Self { written, is_over, task }
    }

    /// Events that are committed, at least.
    fn written(&self) -> usize {
        self.written.load(Ordering::SeqCst)
    }

    /// Stops it; how many events it has written.
    async fn stop(self) -> Result<usize> {
        self.is_over.store(true, Ordering::SeqCst);
        self.task.await??;
        Ok(self.written.load(Ordering::SeqCst))
    }
}

/// What was published, in its order.
struct Published<M> {
    messages: Vec<M>,
    /// How much had been when something went down.
    breaks: Vec<usize>,
    /// How often a relay said that it lost its lease or waited for an answer in vain, as on a busy
    /// machine: what was in flight then came again, too.
    stalls: usize,
}

impl<M> Published<M> {
    fn new() -> Self {
        Self { messages: Vec::new(), breaks: Vec::new(), stalls: 0 }
    }

    /// Counts the stalls that a relay's log tells of.
    fn note_stalls(&mut self, log: &[String]) {
        self.stalls += log.iter().filter(|line| line.contains("lease lost") || line.contains("_timeout")).count();
    }

    /// All that is there by now.
    async fn hear(&mut self, broker: &mut impl Broker<Message = M>) -> Result<()> {
        loop {
            let more = broker.published().await?;
            if more.is_empty() {
                return Ok(());
            }
            self.messages.extend(more);
        }
    }

    /// Waits until each of so many events was published, and gives the number of repetitions. An
    /// event is published again with its own id, only where something went down in between, and
    /// only if it was in flight then. First arrivals have the order of their keys.
    async fn whole<B: Broker<Message = M>>(&mut self, broker: &mut B, events: usize, window: usize) -> Result<usize> {
        let (mut firsts, mut by_key) = (HashMap::new(), BTreeMap::<String, Vec<i64>>::new());
        let (mut seen, mut repeated, mut unexplained) = (0, 0, 0);
        until("all are published", async || {
            self.hear(broker).await?;
            for (place, message) in self.messages.iter().enumerate().skip(seen) {
                let (id, key, payload) = B::read(message)?;
                let n = payload["n"].as_i64().context("a number")?;
                let Some((first, same)) = firsts.get(&id) else {
                    firsts.insert(id, (place, n));
                    by_key.entry(key).or_default().push(n);
                    continue;
                };
                // Due rows are settled beside the stream, which goes on meanwhile.
                let was_in_flight = |down: &usize| down.abs_diff(*first) <= 2 * window && *down <= place;
                ensure!(*same == n, "{id} is {same} and {n}");
                unexplained += usize::from(!self.breaks.iter().any(was_in_flight));
                ensure!(
                    unexplained <= window * self.stalls,
                    "{n} at {first} and {place}, and what went down at {:?}",
                    self.breaks
                );
                repeated += 1;
            }
            seen = self.messages.len();
            Ok((firsts.len() == events).then_some(()))
        })
        .await?;
        in_order(&by_key)?;
        ensure!(
            repeated <= window * (self.breaks.len() + self.stalls),
            "{repeated} repetitions are more than was in flight"
        );
        Ok(repeated)
    }
}

fn in_order(by_key: &BTreeMap<String, Vec<i64>>) -> Result<()> {
    ensure!(by_key.values().all(|numbers| numbers.is_sorted()), "out of order: {by_key:?}");
    Ok(())
}

/// Waits until all of so many events went out.
async fn all_are_sent(env: &TestEnv, events: usize) -> Result<String> {
    let all = format!("pending=0 dispatched={events} dead=0 total={events}\n");
    until("all are sent", async || Ok((env.ok(&["stats"])? == all).then_some(()))).await?;
    Ok(all)
}

/// Two services with a store each. The relay is killed again and again under load, the receiver
/// once. Of what is published, three of ten come again. Each event has one effect, those of a key
/// in their order.
async fn killed_relays<B: Broker>(kind: Kind) -> Result<()> {
    let (kills, began) = (size().0, Instant::now());
    let (mut broker, proxy) = B::launch().await?;
    let (sink, source) = B::tables(proxy.address().port());
    let sender = Arc::new(TestEnv::with(kind, &sends(&sink)).await?);
    let receiver = TestEnv::with(kind, &format!("[sources.orders]\n{source}\n{EFFECTS}")).await?;
    let mut receiving = receiver.serve().await?;
    let load = Load::start(&sender, B::RATES.0, KEYS.0);
    let mut published = Published::new();
    for kill in 1..=kills {
        let relay = sender.serve().await?;
        // Somewhere in what gathered while nobody had the lease.
        let share = published.messages.len() + 1 + kill * 37 % (B::RATES.0 / 2);
        until("its share", async || {
            published.messages.extend(broker.published().await?);
            Ok((published.messages.len() >= share).then_some(()))
        })
        .await?;
        relay.kill().await?;
        published.hear(&mut broker).await?;
        published.breaks.push(published.messages.len());
        if kill == kills.div_ceil(2) {
            let some = async || Ok((receiver.lines("effects.jsonl")?.len() > 20).then_some(()));
            until("some are applied", some).await?;
            receiving.kill().await?;
            receiving = receiver.serve().await?;
        }
    }
    let events = load.stop().await?;
    let relay = sender.serve().await?;
    let all = all_are_sent(&sender, events).await?;
    published.note_stalls(&relay.terminate().await?);
    let repeated = published.whole(&mut broker, events, WINDOW).await?;

    let again: Vec<&B::Message> = published.messages.iter().step_by(3).collect();
    let injected = again.len();
    broker.publish(again).await?;
    until("all of them, and three of ten again", async || {
        let applied = receiver.ok(&["stats", "--log", "inbox"])? == all;
        Ok((applied && duplicates(&receiving).await? >= injected && broker.is_settled().await?).then_some(()))
    })
    .await?;
    receiving.terminate().await?;
    ensure!(receiver.ok(&["stats", "--log", "inbox"])? == all, "each is stored once");
    let (lines, mut applied) = (receiver.lines("effects.jsonl")?, BTreeSet::new());
    let mut by_key = BTreeMap::<String, Vec<i64>>::new();
    for line in &lines {
        let n = line["payload"]["n"].as_i64().context("a number")?;
        if applied.insert(n) {
            by_key.entry(line["key"].to_string()).or_default().push(n);
        }
    }
    ensure!(applied.len() == events, "{} of {events} are applied", applied.len());
    // What was killed behind the inbox begins its batch again, and a file knows no ids.
    ensure!(lines.len() <= events + WINDOW, "{} effects of {events} events", lines.len());
    if B::REPEATS_IN_ORDER {
        in_order(&by_key)?;
    }
    let name = sink.split('"').nth(1).context("its type")?;
    eprintln!(
        "| {name}, {kind:?} | {kills} | {events} | {repeated} | {injected} | {events} | {:.0?} |",
        began.elapsed()
    );
    Ok(())
}

/// How many messages of the source `orders` were known.
pub(crate) async fn duplicates(receiving: &Served) -> Result<usize> {
    counter(receiving, "received_total{source=\"orders\",result=\"duplicate\"}").await
}

/// A number of `/metrics`; one that is not there is 0.
async fn counter(served: &Served, name: &str) -> Result<usize> {
    let (page, name) = (get(&served.address, "/metrics", "").await?, format!("postbox_{name} "));
    Ok(page.lines().find_map(|line| line.strip_prefix(&name)).unwrap_or("0").parse()?)
}

/// What a process holds in memory now, and the most it ever held, in MiB.
fn memory(served: &Served) -> Result<(usize, usize)> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", served.pid()?))?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).context("Linux tells it")?;
        let kib: usize = line.trim_end_matches("kB").trim().parse()?;
        anyhow::Ok(kib / 1024)
    };
    Ok((field("VmRSS:")?, field("VmHWM:")?))
}

/// Nobody is behind the broker's address for a while, and events keep coming. None dies of it, and
/// at most one attempt of one is counted; once somebody answers, all of them go out, those of a key
/// in their order.
async fn an_outage_costs_nothing<B: Broker>() -> Result<()> {
    const FIRST_MAX: Duration = Duration::from_secs(1);
    const BACKLOG_MAX: Duration = Duration::from_secs(60);
    const MEMORY_MIB: usize = 32;
    /// What the usual settings have in flight.
    const WINDOW: usize = 2 * 500;
    let (mut broker, proxy) = B::launch().await?;
    let (sink, _) = B::tables(proxy.address().port());
    let name = sink.split('"').nth(1).context("its type")?;
    let env = Arc::new(TestEnv::with(Kind::Postgres, &format!("[subscriptions.out]\nsink = {{ {sink} }}\n")).await?);
    let relay = env.serve().await?;
    let load = Load::start(&env, B::RATES.1, KEYS.1);
    let count = async |name: &str| counter(&relay, &format!("{name}_total{{subscription=\"out\"}}")).await;
    let mut published = Published::new();
    until("it flows", async || {
        published.messages.extend(broker.published().await?);
        Ok((count("delivered").await? >= B::RATES.1).then_some(()))
    })
    .await?;

    let before = memory(&relay)?.0;
    proxy.refuse(true);
    published.hear(&mut broker).await?;
    published.breaks.push(published.messages.len());
    relay.logged("breaker opened", 1).await?;
    let out = count("delivered").await?;
    tokio::time::sleep(size().1).await;
    ensure!(count("delivered").await? == out, "nothing can be delivered");

    let waiting = load.written();
    proxy.refuse(false);
    let listens = Instant::now();
    relay.logged("breaker closed", 1).await?;
    let first = listens.elapsed();
    until("the backlog", async || {
        published.messages.extend(broker.published().await?);
        Ok((count("delivered").await? >= waiting).then_some(()))
    })
    .await?;
    let backlog = listens.elapsed();
    let events = load.stop().await?;
    all_are_sent(&env, events).await?;
    let (grown, most) = (memory(&relay)?.1.saturating_sub(before), memory(&relay)?.1);
    // What was on its way when the broker went may be one event's own failure, for all we know.
    let counted = count("retries").await?;
    ensure!(counted <= 1 && count("dead").await? == 0, "{counted} attempts were counted");
    published.note_stalls(&relay.terminate().await?);
    let repeated = published.whole(&mut broker, events, WINDOW).await?;
    let gone = waiting - out;
    eprintln!(
        "| {name} | {} | {gone} | {first:.2?} | {backlog:.1?} | {counted} | {repeated} | {before} + {grown} |",
        B::RATES.1
    );
    ensure!(grown <= MEMORY_MIB, "it grew from {before} to {most} MiB");
    promised(&format!("{name}: the first after an outage"), first, FIRST_MAX)?;
    promised(&format!("{name}: the backlog of an outage"), backlog, BACKLOG_MAX)
}

/// A server that is not there when the service starts is no reason not to start. `start` starts it;
/// its `client` says nothing of its own in our log.
pub(crate) async fn a_server_may_come_later(
    kind: Kind,
    (sink, source): (String, String),
    client: &str,
    start: impl AsyncFnOnce() -> Result<()>,
) -> Result<TestEnv> {
    let env = TestEnv::with(kind, &format!("{}[sources.orders]\n{source}\n", sends(&sink))).await?;
    let name = sink.split('"').nth(1).context("its type")?;
    ensure!(env.ok(&["check-config"])?.contains(&format!("  {name} orders -> inbox\n")));
    env.insert_three().await?;
    let served = env.serve().await?;
    served.logged("breaker opened", 1).await?;
    served.logged("source failed", 1).await?;
    let ready = async || get(&served.address, "/readyz", "").await;
    until("unready", async || Ok(ready().await?.contains("\nsource orders: it fails since ").then_some(()))).await?;
    start().await?;
    until("all three", async || Ok(env.ok(&["stats", "--log", "inbox"])?.contains("total=3").then_some(()))).await?;
    until("ready", async || Ok(ready().await?.starts_with("HTTP/1.1 200").then_some(()))).await?;
    let log = served.terminate().await?;
    ensure!(log.iter().all(|line| !line.contains(client)), "its client says nothing of its own: {log:#?}");
    ensure!(env.ok(&["stats", "--log", "outbox"])? == "pending=0 dispatched=3 dead=0 total=3\n");
    Ok(env)
}
