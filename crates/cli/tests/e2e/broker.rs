//! From an outbox through a broker into an inbox: what must hold with every broker while relays are
//! killed, and while the broker is down.
//!
//! `POSTBOX_STORM=1` runs a larger version. `docs/storm.md` has the command and results.

#![allow(clippy::print_stderr, reason = "a row for each broker")]

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postbox_testkit::proxy::FaultProxy;
use postbox_testkit::servers::{PrivateServer, Program};
use serde_json::Value;
use tokio::task::JoinHandle;

use crate::env::{Kind, Served, TestEnv, get, until};
use crate::kafka::Kafka;
use crate::mqtt::Mqtt;
use crate::nats::Nats;
use crate::outages::promised;
use crate::rabbitmq::Rabbitmq;
use crate::redis::Redis;

/// Number of keys: in a storm, each with many events; and during an outage.
const KEYS: (usize, usize) = (40, 1_000);
/// Events per second: in a storm, and during an outage.
const RATES: (usize, usize) = (500, 1_000);
/// Events that may be appended per kill, so that a slow machine has no more of them to deliver.
const SHARE: usize = 200;
/// Number of lanes of a new subscription.
const LANES: usize = 2;
/// Most events in flight when a relay is killed: of each lane a batch, and the next one that was
/// read ahead.
const WINDOW: usize = LANES * 2 * 50;
const EFFECTS: &str = "[subscriptions.apply]\nlog = \"inbox\"\nbatch = 50\nlease = \"1s\"\n\
    sink = { type = \"file\", path = \"effects.jsonl\" }\n";

/// A running broker, with a client of the test.
pub(crate) trait Broker: Sized {
    /// A published message.
    type Message;

    /// Whether messages in flight when a receiver was killed are redelivered in order.
    const REPEATS_IN_ORDER: bool = true;

    /// Starts the broker, and a proxy in front of it.
    async fn launch() -> Result<(Self, FaultProxy)>;

    /// The keys of the sink and of the source, for a server on this port.
    fn tables(port: u16) -> (String, String);

    /// Messages published since the last call, in order per key.
    async fn published(&mut self) -> Result<Vec<Self::Message>>;

    /// Puts messages into the order of publishing, where `published` returns them in another.
    fn order(_messages: &mut [Self::Message]) {}

    /// Returns the id, the key and the payload.
    fn read(message: &Self::Message) -> Result<(String, String, Value)>;

    /// Publishes these messages again, unchanged.
    async fn publish(&mut self, messages: Vec<&Self::Message>) -> Result<()>;

    /// Whether every message was acknowledged.
    async fn is_settled(&mut self) -> Result<bool> {
        Ok(true)
    }
}

/// Starts a proxy in front of a server on this port.
pub(crate) async fn proxied(port: u16) -> FaultProxy {
    FaultProxy::start(([127, 0, 0, 1], port).into()).await
}

macro_rules! brokers {
    ($($name:ident: $broker:ty, $from:ident to $to:ident;)*) => {
        $(mod $name {
            use crate::env::Kind::{Postgres, Sqlite};

            crate::env::cases! {
                killed_relays => super::killed_relays::<$broker>($from, $to);
                an_outage_costs_nothing => super::an_outage_costs_nothing::<$broker>();
            }
        })*
    };
}

// A broker knows nothing of the stores. So each has one storm, and both stores are on both sides.
brokers! {
    kafka: super::Kafka, Postgres to Sqlite;
    mqtt: super::Mqtt, Sqlite to Postgres;
    nats: super::Nats, Postgres to Sqlite;
    rabbitmq: super::Rabbitmq, Postgres to Sqlite;
    redis: super::Redis, Sqlite to Postgres;
}

/// How many relays are killed, and how long a broker is down.
///
/// The fourth kill hits a relay that sends suspicious events alone. An outage lasts until a broker
/// is probed as rarely as ever, and until more events wait than are in memory.
fn size() -> (usize, Duration) {
    match std::env::var_os("POSTBOX_STORM") {
        Some(_) => (50, Duration::from_secs(60)),
        None => (4, Duration::from_secs(3)),
    }
}

/// An event that was sent alone when its relay was killed, after several others were, comes back
/// after one or two times its `timeout`.
fn sends(sink: &str) -> String {
    format!(
        "[subscriptions.out]\nbatch = 50\nlease = \"1s\"\ntimeout = \"5s\"\nbreaker = {{ base = \"50ms\", max = \"200ms\" }}\nsink = {{ {sink} }}\n"
    )
}

/// A producer that runs until it is stopped.
struct Load {
    written: Arc<AtomicUsize>,
    /// It pauses when it has written this many.
    allowed: Arc<AtomicUsize>,
    is_over: Arc<AtomicBool>,
    task: JoinHandle<Result<()>>,
}

impl Load {
    fn start(env: &Arc<TestEnv>, rate: usize, keys: usize, allowed: usize) -> Self {
        let (written, is_over) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let allowed = Arc::new(AtomicUsize::new(allowed));
        let (env, count, stop, most) =
            (Arc::clone(env), Arc::clone(&written), Arc::clone(&is_over), Arc::clone(&allowed));
        let task = tokio::spawn(async move {
            let mut pace = tokio::time::interval(Duration::from_millis(50));
            while !stop.load(Ordering::SeqCst) {
                pace.tick().await;
                let from = count.load(Ordering::SeqCst);
                if from >= most.load(Ordering::SeqCst) {
                    continue;
                }
                let events = from..from + rate / 20;
                env.insert(events.clone().map(|n| ("order.paid", (n % keys).to_string(), n as i64))).await?;
                count.store(events.end, Ordering::SeqCst);
            }
            Ok(())
        });
        Self { written, allowed, is_over, task }
    }

    /// Number of committed events, at least.
    fn written(&self) -> usize {
        self.written.load(Ordering::SeqCst)
    }

    /// Lets it write more.
    fn allow(&self, events: usize) {
        self.allowed.fetch_add(events, Ordering::SeqCst);
    }

    /// Stops it and returns the number of events it has written.
    async fn stop(self) -> Result<usize> {
        self.is_over.store(true, Ordering::SeqCst);
        self.task.await??;
        Ok(self.written.load(Ordering::SeqCst))
    }
}

/// The published messages, in order per key, and up to the last break in the order of publishing.
struct Published<M> {
    messages: Vec<M>,
    /// How many were published at each kill or outage.
    breaks: Vec<usize>,
    /// How often a relay logged a lost lease or a timeout, as on a busy machine: what was in flight
    /// then is published again, too.
    stalls: usize,
}

impl<M> Published<M> {
    fn new() -> Self {
        Self { messages: Vec::new(), breaks: Vec::new(), stalls: 0 }
    }

    /// Reads everything published by now.
    async fn hear(&mut self, broker: &mut impl Broker<Message = M>) -> Result<()> {
        loop {
            let more = broker.published().await?;
            if more.is_empty() {
                return Ok(());
            }
            self.messages.extend(more);
        }
    }

    /// Reads until there are this many messages. Comes before a wait for the store, where each look
    /// is a process.
    async fn reach(&mut self, broker: &mut impl Broker<Message = M>, events: usize) -> Result<()> {
        until("as many are published", async || {
            self.hear(broker).await?;
            Ok((self.messages.len() >= events).then_some(()))
        })
        .await
    }

    /// Reads everything that was published when something went down.
    async fn broke<B: Broker<Message = M>>(&mut self, broker: &mut B) -> Result<()> {
        self.hear(broker).await?;
        let last = self.breaks.last().copied().unwrap_or_default();
        B::order(&mut self.messages[last..]);
        self.breaks.push(self.messages.len());
        Ok(())
    }

    /// Waits until each of `events` events was published, and returns the number of repetitions. A
    /// repetition has the event's own id, and is allowed only for events in flight when something
    /// went down. First arrivals are in order per key.
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
                // Due rows are settled independently of the stream, which continues meanwhile.
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

/// How often a relay logged a lost lease or a timeout.
fn stalls(log: &[String]) -> usize {
    log.iter().filter(|line| line.contains("lease lost") || line.contains("_timeout")).count()
}

fn in_order(by_key: &BTreeMap<String, Vec<i64>>) -> Result<()> {
    ensure!(by_key.values().all(|numbers| numbers.is_sorted()), "out of order: {by_key:?}");
    Ok(())
}

/// Waits until all `events` events are delivered.
async fn all_are_sent(env: &TestEnv, events: usize) -> Result<String> {
    let all = format!("pending=0 dispatched={events} dead=0 total={events}\n");
    until("all are sent", async || Ok((env.ok(&["stats"])? == all).then_some(()))).await?;
    Ok(all)
}

/// Two services with a store each. The relay is killed repeatedly under load, the receiver once.
/// Three of ten published messages are published again. Each event has one effect, in order per
/// key.
async fn killed_relays<B: Broker>(from: Kind, to: Kind) -> Result<()> {
    let (kills, began) = (size().0, Instant::now());
    let (mut broker, proxy) = B::launch().await?;
    let (sink, source) = B::tables(proxy.address().port());
    let sender = Arc::new(TestEnv::with(from, &sends(&sink)).await?);
    let receiver = TestEnv::with(to, &format!("[sources.orders]\n{source}\n{EFFECTS}")).await?;
    let mut receiving = receiver.serve().await?;
    let load = Load::start(&sender, RATES.0, KEYS.0, SHARE);
    let (mut published, mut stalled) = (Published::new(), 0);
    for kill in 1..=kills {
        let relay = sender.serve().await?;
        // Kills it at varying points of the backlog that grew while nobody held the lease.
        let share = published.messages.len() + 1 + kill * 37 % SHARE;
        until("its share", async || {
            published.messages.extend(broker.published().await?);
            Ok((published.messages.len() >= share).then_some(()))
        })
        .await?;
        relay.kill().await?;
        load.allow(SHARE);
        published.broke(&mut broker).await?;
        if kill == kills.div_ceil(2) {
            let some = async || Ok((receiver.lines("effects.jsonl")?.len() > 20).then_some(()));
            until("some are applied", some).await?;
            stalled += stalls(&receiving.log());
            receiving.kill().await?;
            receiving = receiver.serve().await?;
        }
    }
    let events = load.stop().await?;
    let relay = sender.serve().await?;
    published.reach(&mut broker, events).await?;
    let all = all_are_sent(&sender, events).await?;
    published.stalls += stalls(&relay.terminate().await?);
    let repeated = published.whole(&mut broker, events, WINDOW).await?;
    ensure!(repeated > 0, "no kill came while events were under way");

    // Each id once: a broker may leave out the second of two that come at the same moment.
    let mut ids = HashSet::new();
    let mut again = Vec::new();
    for message in published.messages.iter().step_by(3) {
        if ids.insert(B::read(message)?.0) {
            again.push(message);
        }
    }
    let injected = again.len();
    broker.publish(again).await?;
    until("all of them, and three of ten again", async || {
        // The counter first: the store and some brokers are asked with a process.
        let known = duplicates(&receiving).await? >= injected;
        let applied = known && receiver.ok(&["stats", "--log", "inbox"])? == all;
        Ok((applied && broker.is_settled().await?).then_some(()))
    })
    .await?;
    stalled += stalls(&receiving.terminate().await?);
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
    // An applier that is killed, or loses its lease on a busy machine, repeats what was in flight,
    // and a file does not deduplicate.
    let most = events + WINDOW * (1 + stalled);
    ensure!(lines.len() <= most, "{} effects of {events} events, {stalled} stalls", lines.len());
    if B::REPEATS_IN_ORDER {
        in_order(&by_key)?;
    }
    let name = sink.split('"').nth(1).context("its type")?;
    eprintln!(
        "| {name}, {from:?} to {to:?} | {kills} | {events} | {repeated} | {injected} | {events} | {:.0?} |",
        began.elapsed()
    );
    Ok(())
}

/// Number of duplicates from the source `orders`.
pub(crate) async fn duplicates(receiving: &Served) -> Result<usize> {
    counter(receiving, "received_total{source=\"orders\",result=\"duplicate\"}").await
}

/// The value of a metric; 0 if it is missing.
async fn counter(served: &Served, name: &str) -> Result<usize> {
    let (page, name) = (get(&served.address, "/metrics", "").await?, format!("postbox_{name} "));
    Ok(page.lines().find_map(|line| line.strip_prefix(&name)).unwrap_or("0").parse()?)
}

/// Memory of a process now, and its peak, in MiB.
fn memory(served: &Served) -> Result<(usize, usize)> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", served.pid()?))?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).context("Linux tells it")?;
        let kib: usize = line.trim_end_matches("kB").trim().parse()?;
        anyhow::Ok(kib / 1024)
    };
    Ok((field("VmRSS:")?, field("VmHWM:")?))
}

/// The broker is unreachable for a while, and events keep arriving. None dies of it, and at most
/// one attempt of one event is counted. When the broker is back, all are delivered, in order per
/// key.
async fn an_outage_costs_nothing<B: Broker>() -> Result<()> {
    const FIRST_MAX: Duration = Duration::from_secs(1);
    const BACKLOG_MAX: Duration = Duration::from_secs(60);
    const MEMORY_MIB: usize = 32;
    /// Most events in flight with the default settings.
    const WINDOW: usize = LANES * 2 * 500;
    let (mut broker, proxy) = B::launch().await?;
    let (sink, _) = B::tables(proxy.address().port());
    let name = sink.split('"').nth(1).context("its type")?;
    let env = Arc::new(TestEnv::with(Kind::Postgres, &format!("[subscriptions.out]\nsink = {{ {sink} }}\n")).await?);
    let relay = env.serve().await?;
    let load = Load::start(&env, RATES.1, KEYS.1, usize::MAX);
    let count = async |name: &str| counter(&relay, &format!("{name}_total{{subscription=\"out\"}}")).await;
    let mut published = Published::new();
    until("it flows", async || {
        published.messages.extend(broker.published().await?);
        Ok((count("delivered").await? >= RATES.1).then_some(()))
    })
    .await?;

    let before = memory(&relay)?.0;
    proxy.refuse(true);
    published.broke(&mut broker).await?;
    relay.logged("breaker opened", 1).await?;
    // What the broker took before is counted when its confirmation was read.
    let out = until("calls in flight have ended", async || {
        let before = count("delivered").await?;
        tokio::time::sleep(Duration::from_millis(500)).await;
        Ok((count("delivered").await? == before).then_some(before))
    })
    .await?;
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
    published.reach(&mut broker, events).await?;
    all_are_sent(&env, events).await?;
    let (grown, most) = (memory(&relay)?.1.saturating_sub(before), memory(&relay)?.1);
    // A failure while the broker goes down may be the event's own for all the relay knows, so one
    // attempt may be counted.
    let counted = count("retries").await?;
    ensure!(counted <= 1 && count("dead").await? == 0, "{counted} attempts were counted");
    published.stalls += stalls(&relay.terminate().await?);
    let repeated = published.whole(&mut broker, events, WINDOW).await?;
    let gone = waiting - out;
    eprintln!(
        "| {name} | {} | {gone} | {first:.2?} | {backlog:.1?} | {counted} | {repeated} | {before} + {grown} |",
        RATES.1
    );
    ensure!(grown <= MEMORY_MIB, "it grew from {before} to {most} MiB");
    promised(&format!("{name}: the first after an outage"), first, FIRST_MAX)?;
    promised(&format!("{name}: the backlog of an outage"), backlog, BACKLOG_MAX)
}

/// A server that is missing when the service starts does not keep it from starting. `prepare` makes
/// what must be there; the server's `client` writes nothing to our log.
pub(crate) async fn a_server_may_come_later<B: Broker, P: Program>(
    kind: Kind,
    server: &mut PrivateServer<P>,
    client: &str,
    prepare: impl AsyncFnOnce(&PrivateServer<P>) -> Result<()>,
) -> Result<TestEnv> {
    server.kill();
    let (sink, source) = B::tables(server.port());
    let env = TestEnv::with(kind, &format!("{}[sources.orders]\n{source}\n", sends(&sink))).await?;
    let name = sink.split('"').nth(1).context("its type")?;
    ensure!(env.ok(&["check-config"])?.contains(&format!("  {name} orders -> inbox\n")));
    env.insert_three().await?;
    let served = env.serve().await?;
    served.logged("breaker opened", 1).await?;
    served.logged("source failed", 1).await?;
    let ready = async || get(&served.address, "/readyz", "").await;
    until("unready", async || Ok(ready().await?.contains("\nsource orders: it has failed since ").then_some(())))
        .await?;
    server.start().await;
    prepare(server).await?;
    until("all three", async || Ok(env.ok(&["stats", "--log", "inbox"])?.contains("total=3").then_some(()))).await?;
    until("ready", async || Ok(ready().await?.starts_with("HTTP/1.1 200").then_some(()))).await?;
    let log = served.terminate().await?;
    ensure!(log.iter().all(|line| !line.contains(client)), "its client says nothing of its own: {log:#?}");
    ensure!(env.ok(&["stats", "--log", "outbox"])? == "pending=0 dispatched=3 dead=0 total=3\n");
    Ok(env)
}
