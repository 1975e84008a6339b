//! The two services of the demo and the relay between them, which can be crashed.
//!
//! Shop and receiver share nothing but the webhook: two database files, two stores. The relay has a store (and so connections) of its
//! own, which a crash takes away with it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::middleware;
use postbox_core::{
    Clock, Inspect as _, LogName, Migrate as _, RetryPolicy, SourceName, Subscription, SubscriptionName,
};
use postbox_engine::{BreakerPolicy, Metrics, Relay, RelaySettings, TokioClock};
use postbox_http::{HttpSink, HttpSinkConfig};
use postbox_ingress::{self as ingress, Ingress, Origin, WebhookSource};
use postbox_sqlite::{SqliteConfig, SqliteStore};
use postbox_webhook::standard::{SignKey, SymmetricKey};
use postbox_webhook::{Scheme, Settings, verifier};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::receiver::{Ledger, make_ledger};
use super::weather::{FragileListener, Weather, Wire, strike};

/// The lease of the demo's relays: short, so that the takeover can be watched. In production it is ten seconds.
const LEASE: Duration = Duration::from_millis(1_500);

/// Everything between the shop's commit and the ledger.
pub(super) struct Stage {
    pub(super) weather: Arc<Weather>,
    clock: Arc<dyn Clock>,
    shop_database: PathBuf,
    shop: SqliteStore,
    receiver: SqliteStore,
    target: SocketAddr,
    secret: String,
    ingress: Arc<Ingress>,
    relay: Running,
    /// Delivered by relays that are gone, by their own account; for the display only.
    delivered_before: u64,
    applier: Running,
    stop: CancellationToken,
    server: JoinHandle<std::io::Result<()>>,
}

/// A relay and its task.
struct Running {
    metrics: Arc<Metrics>,
    task: AbortOnDropHandle<postbox_core::Result<()>>,
}

impl Running {
    fn start(relay: Relay, stop: &CancellationToken) -> Self {
        let metrics = relay.metrics();
        let stop = stop.clone();
        Self { metrics, task: AbortOnDropHandle::new(tokio::spawn(async move { relay.run(stop).await })) }
    }
}

fn outgoing() -> anyhow::Result<Subscription> {
    Ok(Subscription::new(SubscriptionName::new("shop-to-receiver")?, LogName::outbox()))
}

fn incoming() -> anyhow::Result<Subscription> {
    Ok(Subscription::new(SubscriptionName::new("apply-to-ledger")?, LogName::inbox()))
}

async fn open(path: &Path) -> anyhow::Result<SqliteStore> {
    Ok(SqliteStore::open(SqliteConfig::new(path)).await?)
}

impl Stage {
    /// Makes both databases, starts the receiver and the first relay.
    pub(super) async fn set(folder: &Path, seed: u64) -> anyhow::Result<Self> {
        let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
        let [shop_database, receiver_database] = ["shop.db", "receiver.db"].map(|name| folder.join(name));
        let shop = open(&shop_database).await?;
        let receiver = open(&receiver_database).await?;
        shop.up().await?;
        receiver.up().await?;
        make_ledger(&receiver_database)?;

        let key: [u8; 32] = SmallRng::seed_from_u64(seed).random();
        let secret = SymmetricKey::from_bytes(&key)?.expose().to_string();
        let weather = Weather::new(seed);
        let stop = CancellationToken::new();

        let verifier = verifier(Scheme::StandardWebhooks, &[&secret], &Settings::default())?;
        let mut source = WebhookSource::new(SourceName::new("shop")?, LogName::inbox(), verifier);
        // Changes of one order are applied in order.
        source.mapping.key = vec![Origin::Json("/order".into())];
        let ingress = Ingress::new(vec![source], Arc::new(receiver.clone()), Arc::clone(&clock))?;
        let router = ingress::router(Arc::clone(&ingress))
            .layer(middleware::from_fn_with_state(Arc::clone(&weather), strike))
            .into_make_service_with_connect_info::<Wire>();
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let target = listener.local_addr()?;
        let serve =
            axum::serve(FragileListener(listener), router).with_graceful_shutdown(stop.clone().cancelled_owned());
        let server = tokio::spawn(serve.into_future());

        let apply = Relay::builder(Arc::new(receiver.clone()), incoming()?)
            .apply(receiver.apply(Ledger))
            .settings(RelaySettings { lease_ttl: LEASE, ..RelaySettings::default() })
            .clock(Arc::clone(&clock))
            .build()?;
        let applier = Running::start(apply, &stop);
        let relay = Running::start(make_relay(&shop_database, target, &secret, &clock).await?, &stop);
        Ok(Self {
            weather,
            clock,
            shop_database,
            shop,
            receiver,
            target,
            secret,
            ingress,
            relay,
            delivered_before: 0,
            applier,
            stop,
            server,
        })
    }

    /// Ends the relay where it stands: no settling, no giving back of its lease. Gives the number of requests on the wire.
    pub(super) fn crash_relay(&mut self) -> usize {
        let in_flight = self.weather.in_flight();
        self.relay.task.abort();
        self.delivered_before += self.relay.metrics.delivered();
        in_flight
    }

    /// Starts another relay, with another name and another connection: it knows nothing of the first.
    pub(super) async fn start_relay(&mut self) -> anyhow::Result<()> {
        let relay = make_relay(&self.shop_database, self.target, &self.secret, &self.clock).await?;
        self.relay = Running::start(relay, &self.stop);
        Ok(())
    }

    /// Whether the present relay has delivered anything.
    pub(super) fn relay_delivers(&self) -> bool {
        self.relay.metrics.delivered() > 0
    }

    pub(super) fn delivered(&self) -> u64 {
        let counts = self.ingress.counts();
        counts.iter().filter(|count| count.code == "accepted").map(|count| count.count).sum()
    }

    /// Messages that came again and were recognised by the inbox.
    pub(super) fn duplicates(&self) -> u64 {
        let counts = self.ingress.counts();
        counts.iter().filter(|count| count.code == "duplicate").map(|count| count.count).sum()
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

    /// Messages in the receiver's inbox. The counter of the endpoint misses those whose sender died before the answer.
    pub(super) async fn stored(&self) -> anyhow::Result<u64> {
        Ok(self.receiver.stats(&incoming()?.name).await?.total)
    }

    /// Stops everything gracefully.
    pub(super) async fn strike(self) -> anyhow::Result<()> {
        self.stop.cancel();
        self.relay.task.await??;
        self.applier.task.await??;
        self.server.await??;
        Ok(())
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
    let settings = RelaySettings {
        lease_ttl: LEASE,
        // Short waits, so that a demo of seconds has room for many failures. Enough attempts that bad weather alone kills nothing.
        retry: RetryPolicy {
            attempts_max: 20,
            base: Duration::from_millis(50),
            delay_max: Duration::from_millis(500),
            delays: Vec::new(),
        },
        breaker: BreakerPolicy { base: Duration::from_millis(20), max: Duration::from_millis(200) },
        ..RelaySettings::default()
    };
    let sink = HttpSink::new(config, Arc::clone(clock))?;
    let store = Arc::new(open(database).await?);
    Ok(Relay::builder(store, outgoing()?).sink(Arc::new(sink)).settings(settings).clock(Arc::clone(clock)).build()?)
}
