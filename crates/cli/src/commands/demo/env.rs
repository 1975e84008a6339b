//! The two services of the demo, and the relay between them, which can be crashed.
//!
//! Shop and receiver share nothing but the webhook: two database files, two stores. The relay has a
//! store, and so connections, of its own, which a crash takes away with it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::middleware;
use postbox_core::{
    Clock, Delivery, Inspect as _, LogName, Migrate as _, Outcome, RetryPolicy, SourceName, Subscription,
};
use postbox_engine::{BreakerPolicy, Metrics, Relay, RelaySettings, TokioClock};
use postbox_http::{HttpSink, HttpSinkConfig};
use postbox_ingress::{self as ingress, Ingress, Origin, WebhookSource};
use postbox_sqlite::{SqliteConfig, SqliteStore, TxHandler};
use postbox_webhook::standard::{SignKey, SymmetricKey};
use postbox_webhook::{Scheme, Settings, verifier};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use rusqlite::{Connection, Transaction, params};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::fault::{FaultInjector, inject};

/// The lease of the demo's relays: short, so that the takeover can be watched. The default is ten
/// seconds.
const LEASE: Duration = Duration::from_millis(1_500);

/// Without a unique constraint: if a message were applied twice, the table would show it.
const LEDGER_SCHEMA: &str = "CREATE TABLE ledger (line INTEGER PRIMARY KEY AUTOINCREMENT, event TEXT NOT NULL, name TEXT NOT NULL, \
     version INTEGER NOT NULL, cents INTEGER NOT NULL)";
/// Appends at the end of the primary key; under the database's one write lock.
const LEDGER_INSERT: &str = "INSERT INTO ledger (event, name, version, cents) VALUES (?1, ?2, ?3, ?4)";

/// The receiver's handler: writes each message into the ledger, in the transaction that moves the
/// inbox on.
struct Ledger;

#[derive(serde::Deserialize)]
struct Message<'a> {
    event: &'a str,
    order: &'a str,
    version: i64,
    cents: i64,
}

impl TxHandler for Ledger {
    fn handle(&self, tx: &Transaction<'_>, delivery: &Delivery) -> Outcome {
        let message: Message<'_> = match serde_json::from_slice(&delivery.event.payload) {
            Ok(message) => message,
            Err(error) => return Outcome::dead("payload_invalid", error.to_string()),
        };
        let row = params![message.event, message.order, message.version, message.cents];
        match tx.prepare_cached(LEDGER_INSERT).and_then(|mut insert| insert.execute(row)) {
            Ok(_) => Outcome::DELIVERED,
            Err(error) => Outcome::retry("ledger_failed", error.to_string()),
        }
    }
}

/// Everything between the shop's commit and the ledger.
pub(super) struct DemoEnv {
    pub(super) faults: Arc<FaultInjector>,
    clock: Arc<dyn Clock>,
    shop_database: PathBuf,
    shop: SqliteStore,
    receiver: SqliteStore,
    target: SocketAddr,
    secret: String,
    ingress: Arc<Ingress>,
    relay: RunningRelay,
    applier: RunningRelay,
    stop: CancellationToken,
    _server: AbortOnDropHandle<std::io::Result<()>>,
}

struct RunningRelay {
    metrics: Arc<Metrics>,
    task: AbortOnDropHandle<postbox_core::Result<()>>,
}

impl RunningRelay {
    fn start(relay: Relay, stop: &CancellationToken) -> Self {
        let (metrics, stop) = (relay.metrics(), stop.clone());
        Self { metrics, task: AbortOnDropHandle::new(tokio::spawn(async move { relay.run(stop).await })) }
    }
}

fn outgoing() -> anyhow::Result<Subscription> {
    Ok(Subscription::new("shop-to-receiver".parse()?, LogName::outbox()))
}

fn incoming() -> anyhow::Result<Subscription> {
    Ok(Subscription::new("apply-to-ledger".parse()?, LogName::inbox()))
}

async fn open(path: &Path) -> anyhow::Result<SqliteStore> {
    Ok(SqliteStore::open(SqliteConfig::new(path)).await?)
}

impl DemoEnv {
    /// Makes both databases, starts the receiver and the first relay.
    pub(super) async fn start(folder: &Path, seed: u64) -> anyhow::Result<Self> {
        let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
        let [shop_database, receiver_database] = ["shop.db", "receiver.db"].map(|name| folder.join(name));
        let (shop, receiver) = (open(&shop_database).await?, open(&receiver_database).await?);
        shop.up().await?;
        receiver.up().await?;
        Connection::open(&receiver_database)?.execute(LEDGER_SCHEMA, [])?;

        let key: [u8; 32] = SmallRng::seed_from_u64(seed).random();
        let secret = SymmetricKey::from_bytes(&key)?.expose().to_string();
        let verifier = verifier(Scheme::StandardWebhooks, &[&secret], &Settings::default())?;
        let mut source = WebhookSource::new(SourceName::new("shop")?, LogName::inbox(), verifier);
        // Changes of one order are applied in order.
        source.mapping.key = vec![Origin::Json("/order".into())];
        let ingress = Ingress::new(vec![source], Arc::new(receiver.clone()), Arc::clone(&clock))?;
        let faults = FaultInjector::new(seed);
        let router =
            ingress::router(Arc::clone(&ingress)).layer(middleware::from_fn_with_state(Arc::clone(&faults), inject));
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let target = listener.local_addr()?;
        let server = AbortOnDropHandle::new(tokio::spawn(axum::serve(listener, router).into_future()));

        let apply = Relay::builder(Arc::new(receiver.clone()), incoming()?)
            .apply(receiver.apply(Ledger))
            .settings(RelaySettings { lease_ttl: LEASE, ..RelaySettings::default() })
            .clock(Arc::clone(&clock))
            .build()?;
        let stop = CancellationToken::new();
        let applier = RunningRelay::start(apply, &stop);
        let relay = RunningRelay::start(make_relay(&shop_database, target, &secret, &clock).await?, &stop);
        Ok(Self {
            faults,
            clock,
            shop_database,
            shop,
            receiver,
            target,
            secret,
            ingress,
            relay,
            applier,
            stop,
            _server: server,
        })
    }

    /// Ends the relay where it stands: no settling, no giving back of its lease. Gives the number
    /// of requests on the wire.
    pub(super) fn crash_relay(&mut self) -> u64 {
        let in_flight = self.faults.in_flight.load(Ordering::Relaxed);
        self.relay.task.abort();
        in_flight
    }

    /// Starts another relay, with another name and other connections: it knows nothing of the
    /// first.
    pub(super) async fn start_relay(&mut self) -> anyhow::Result<()> {
        let relay = make_relay(&self.shop_database, self.target, &self.secret, &self.clock).await?;
        self.relay = RunningRelay::start(relay, &self.stop);
        Ok(())
    }

    /// Whether the present relay has delivered anything.
    pub(super) fn relay_delivers(&self) -> bool {
        self.relay.metrics.delivered() > 0
    }

    /// How often the endpoint gave this answer.
    pub(super) fn answered(&self, code: &str) -> u64 {
        self.ingress.counts().iter().filter(|count| count.code == code).map(|count| count.count).sum()
    }

    pub(super) fn applied(&self) -> u64 {
        self.applier.metrics.delivered()
    }

    /// Whether nothing is under way any more, asked of both databases.
    pub(super) async fn is_quiet(&self) -> anyhow::Result<bool> {
        let shop = self.shop.stats(&outgoing()?.name).await?;
        let receiver = self.receiver.stats(&incoming()?.name).await?;
        Ok(shop.pending == 0 && receiver.pending == 0)
    }

    /// Messages in the inbox. The endpoint's counter misses those whose sender died before the
    /// answer.
    pub(super) async fn stored(&self) -> anyhow::Result<u64> {
        Ok(self.receiver.stats(&incoming()?.name).await?.total)
    }

    /// Stops both relays gracefully.
    pub(super) async fn stop(&mut self) -> anyhow::Result<()> {
        self.stop.cancel();
        (&mut self.relay.task).await??;
        Ok((&mut self.applier.task).await??)
    }
}

async fn make_relay(
    database: &Path,
    target: SocketAddr,
    secret: &str,
    clock: &Arc<dyn Clock>,
) -> anyhow::Result<Relay> {
    let config = HttpSinkConfig {
        keys: vec![SignKey::parse(secret)?],
        timeout: Duration::from_secs(3),
        allow: vec![target.ip().into()],
        ..HttpSinkConfig::new(format!("http://{target}/in/shop"))
    };
    let millis = Duration::from_millis;
    let settings = RelaySettings {
        lease_ttl: LEASE,
        // Short waits, so that seconds have room for many failures; so many attempts that the
        // faults alone kill nothing.
        retry: RetryPolicy { attempts_max: 20, base: millis(50), delay_max: millis(500), delays: Vec::new() },
        breaker: BreakerPolicy { base: millis(20), max: millis(200) },
        ..RelaySettings::default()
    };
    let sink = HttpSink::new(config, Arc::clone(clock))?;
    let store = Arc::new(open(database).await?);
    Ok(Relay::builder(store, outgoing()?).sink(Arc::new(sink)).settings(settings).clock(Arc::clone(clock)).build()?)
}
