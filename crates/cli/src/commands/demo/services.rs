//! Everything between the shop's commit and the ledger: the relay, which can be crashed, faults on
//! the wire, and the receiver.
//!
//! Shop and receiver share only the webhook: they have two database files and two stores. The relay
//! has its own store, so a crash takes its connections with it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use postbox_core::{
    Clock, Delivery, LogName, Migrate as _, Outcome, RetryPolicy, SourceName, Store as _, Subscription,
};
use postbox_engine::{BreakerPolicy, Metrics, Relay, RelaySettings, TokioClock};
use postbox_http::{HttpSink, HttpSinkConfig};
use postbox_ingress::{self as ingress, Ingress, Origin, WebhookSource};
use postbox_sqlite::{SqliteConfig, SqliteStore, TxHandler};
use postbox_webhook::standard::{SignKey, SymmetricKey};
use postbox_webhook::{Scheme, Settings, verifier};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use rusqlite::{Connection, Transaction};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// The lease of the demo's relays: short, so that the takeover can be watched. The default is ten
/// seconds.
const LEASE: Duration = Duration::from_millis(1_500);

/// No unique constraint, so that the table would show a message that was applied twice.
const LEDGER_SCHEMA: &str = "CREATE TABLE ledger (line INTEGER PRIMARY KEY AUTOINCREMENT, event TEXT NOT NULL, name TEXT NOT NULL, \
     version INTEGER NOT NULL, cents INTEGER NOT NULL)";
/// Appends at the end of the primary key, under the database's one write lock.
const LEDGER_INSERT: &str = "INSERT INTO ledger (event, name, version, cents) \
     VALUES (?1 ->> 'event', ?1 ->> 'order', ?1 ->> 'version', ?1 ->> 'cents')";

/// The receiver's handler: writes each message into the ledger, in the transaction that settles the
/// inbox.
struct Ledger;

impl TxHandler for Ledger {
    fn handle(&self, tx: &Transaction<'_>, delivery: &Delivery) -> Outcome {
        let message = String::from_utf8_lossy(&delivery.event.payload);
        match tx.prepare_cached(LEDGER_INSERT).and_then(|mut insert| insert.execute([&*message])) {
            Ok(_) => Outcome::DELIVERED,
            Err(error) => Outcome::retry("ledger_failed", error.to_string()),
        }
    }
}

/// Injects faults and counts them.
#[derive(Debug, Default)]
pub(super) struct Faults {
    seed: u64,
    pub(super) requests: AtomicU64,
    pub(super) in_flight: AtomicU64,
    /// Requests answered with 500 or 503.
    pub(super) failed: AtomicU64,
    /// Broken connections.
    pub(super) cut: AtomicU64,
}

impl Faults {
    /// Draws a number below 1,000. It depends only on the seed and the request's number.
    fn draw(&self) -> u32 {
        let number = self.requests.fetch_add(1, Relaxed);
        SmallRng::seed_from_u64(self.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)).random_range(0..1_000)
    }
}

/// Counts a request as in flight while it lives, even if its connection breaks.
struct InFlight(Arc<Faults>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

/// Middleware in front of the receiver: fails requests, and breaks connections before or after the
/// message was stored.
async fn inject(State(faults): State<Arc<Faults>>, request: Request, next: Next) -> Response {
    faults.in_flight.fetch_add(1, Relaxed);
    let _in_flight = InFlight(Arc::clone(&faults));
    let status = match faults.draw() {
        0..10 => StatusCode::SERVICE_UNAVAILABLE,
        10..50 => StatusCode::INTERNAL_SERVER_ERROR,
        cut @ 50..68 => {
            if cut >= 56 {
                // The message is stored, and the sender cannot know.
                drop(next.run(request).await);
            }
            faults.cut.fetch_add(1, Relaxed);
            // Ends this connection's task, and so the connection, without an answer.
            // `resume_unwind` prints no panic message.
            std::panic::resume_unwind(Box::new("a connection breaks"))
        }
        _ => return next.run(request).await,
    };
    faults.failed.fetch_add(1, Relaxed);
    status.into_response()
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

/// How a relay reaches shop and receiver.
struct Route {
    clock: Arc<dyn Clock>,
    database: PathBuf,
    target: SocketAddr,
    secret: String,
}

impl Route {
    async fn relay(&self) -> anyhow::Result<Relay> {
        let config = HttpSinkConfig {
            keys: vec![SignKey::parse(&self.secret)?],
            timeout: Duration::from_secs(3),
            allow: vec![self.target.ip().into()],
            ..HttpSinkConfig::new(format!("http://{}/in/shop", self.target))
        };
        let millis = Duration::from_millis;
        let settings = RelaySettings {
            lease_ttl: LEASE,
            // Short waits, so that many failures fit into a few seconds; and enough attempts that
            // the faults alone make no event dead.
            retry: RetryPolicy { attempts_max: 20, base: millis(50), delay_max: millis(500), delays: Vec::new() },
            breaker: BreakerPolicy { base: millis(20), max: millis(200) },
            ..RelaySettings::default()
        };
        let sink = Arc::new(HttpSink::new(config, Arc::clone(&self.clock))?);
        let store = Arc::new(SqliteStore::open(SqliteConfig::new(&self.database)).await?);
        let clock = Arc::clone(&self.clock);
        Ok(Relay::builder(store, outgoing()?).sink(sink).settings(settings).clock(clock).build()?)
    }
}

/// Everything between the shop's commit and the ledger.
pub(super) struct Services {
    pub(super) faults: Arc<Faults>,
    route: Route,
    shop: SqliteStore,
    receiver: SqliteStore,
    ingress: Arc<Ingress>,
    relay: RunningRelay,
    applier: RunningRelay,
    stop: CancellationToken,
    _server: AbortOnDropHandle<std::io::Result<()>>,
}

impl Services {
    /// Creates both databases and starts the receiver and the first relay.
    pub(super) async fn start(folder: &Path, seed: u64) -> anyhow::Result<Self> {
        let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
        let [database, receiver_database] = ["shop.db", "receiver.db"].map(|name| folder.join(name));
        let shop = SqliteStore::open(SqliteConfig::new(&database)).await?;
        let receiver = SqliteStore::open(SqliteConfig::new(&receiver_database)).await?;
        shop.up().await?;
        receiver.up().await?;
        Connection::open(&receiver_database)?.execute(LEDGER_SCHEMA, [])?;

        let key: [u8; 32] = SmallRng::seed_from_u64(seed).random();
        let secret = SymmetricKey::from_bytes(&key)?.expose().to_string();
        let verifier = verifier(Scheme::StandardWebhooks, &[&secret], &Settings::default())?;
        let mut source = WebhookSource::new(SourceName::new("shop")?, LogName::inbox(), verifier);
        // The key keeps the changes of one order in order.
        source.mapping.key = vec![Origin::Json("/order".into())];
        let ingress = Ingress::new(vec![source], Arc::new(receiver.clone()), Arc::clone(&clock))?;
        let faults = Arc::new(Faults { seed, ..Faults::default() });
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
        let route = Route { clock, database, target, secret };
        let relay = RunningRelay::start(route.relay().await?, &stop);
        Ok(Self { faults, route, shop, receiver, ingress, relay, applier, stop, _server: server })
    }

    /// Aborts the relay without settling or releasing its lease. Returns the number of requests in
    /// flight.
    pub(super) fn crash_relay(&mut self) -> u64 {
        let in_flight = self.faults.in_flight.load(Relaxed);
        self.relay.task.abort();
        in_flight
    }

    /// Starts another relay with another owner id and its own connections. It knows nothing of the
    /// first.
    pub(super) async fn start_relay(&mut self) -> anyhow::Result<()> {
        self.relay = RunningRelay::start(self.route.relay().await?, &self.stop);
        Ok(())
    }

    /// Whether the current relay has delivered anything.
    pub(super) fn relay_delivers(&self) -> bool {
        self.relay.metrics.delivered() > 0
    }

    /// Number of times the endpoint gave this answer.
    pub(super) fn answered(&self, code: &str) -> u64 {
        self.ingress.counts().iter().filter(|count| count.code == code).map(|count| count.count).sum()
    }

    pub(super) fn applied(&self) -> u64 {
        self.applier.metrics.delivered()
    }

    /// Whether nothing is pending in either database.
    pub(super) async fn is_quiet(&self) -> anyhow::Result<bool> {
        let shop = self.shop.stats(&outgoing()?.name).await?;
        let receiver = self.receiver.stats(&incoming()?.name).await?;
        Ok(shop.pending == 0 && receiver.pending == 0)
    }

    /// Stops both relays gracefully.
    pub(super) async fn stop(&mut self) -> anyhow::Result<()> {
        self.stop.cancel();
        (&mut self.relay.task).await??;
        Ok((&mut self.applier.task).await??)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_the_same_for_the_same_seed_and_the_exception() {
        let draws = |seed| {
            let faults = Faults { seed, ..Faults::default() };
            (0..10_000).map(|_| faults.draw()).collect::<Vec<_>>()
        };
        assert_eq!(draws(7), draws(7));
        assert_ne!(draws(7), draws(8));
        let count = draws(7).iter().filter(|draw| **draw < 68).count();
        assert!((500..900).contains(&count), "{count} of 10,000");
    }
}
