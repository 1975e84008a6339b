//! The suites of a store about leases, with lanes that are taken in Redis too.

use std::sync::Arc;
use std::time::Duration;

use postbox_core::*;
use postbox_memory::MemoryStore;
use postbox_redis::{RedisLeaseConfig, RedisLeases};
use postbox_testkit::conformance::faults::CallFaults;
use postbox_testkit::conformance::{MemoryFixture, OpenTransaction, StoreCapabilities, StoreFixture};
use postbox_testkit::servers::{PrivateRedis, RedisKind};

/// A store whose log is [`RedisLeases`]'.
#[derive(Clone)]
struct LeasedStore {
    store: MemoryStore,
    log: Arc<dyn Log>,
}

/// What the other fields do.
macro_rules! passes {
    ($contract:ident by $field:ident { $($name:ident($($arg:ident: $ty:ty),*) -> $answer:ty;)* }) => {
        #[async_trait]
        impl $contract for LeasedStore {
            $(async fn $name(&self, $($arg: $ty),*) -> $answer { self.$field.$name($($arg),*).await })*
        }
    };
}

passes! { Log by log {
    subscribe(subscription: &Subscription) -> Result<()>;
    acquire(subscription: &SubscriptionName, owner: &OwnerId, held: &[u16], ttl: Duration) -> Result<Acquired>;
    renew(lease: &Lease, ttl: Duration) -> Result<()>;
    release(lease: &Lease) -> Result<()>;
    leave(subscription: &SubscriptionName, owner: &OwnerId) -> Result<()>;
    next_batch(lease: &Lease, limit: BatchLimit) -> Result<Batch>;
    due(lease: &Lease, limit: BatchLimit) -> Result<Batch>;
    settle(lease: &Lease, settlement: Settlement<'_>) -> Result<()>;
    hint(lease: &Lease) -> ();
} }
passes! { Append by store { append(log: &LogName, events: &[NewEvent]) -> Result<Appended>; } }
passes! { DeadLetters by store {
    dead_letters(lease: &Lease, limit: BatchLimit) -> Result<Vec<DeadLetter>>;
    hand_over(lease: &Lease, handovers: &[Handover]) -> Result<()>;
} }
passes! { Inspect by store {
    subscriptions() -> Result<Vec<SubscriptionInfo>>;
    stats_of(subscriptions: &[SubscriptionName]) -> Vec<Result<Stats>>;
    list(query: &ListQuery) -> Result<Vec<Record>>;
    get(subscription: &SubscriptionName, id: EventId) -> Result<Option<Record>>;
    conflicts(limit: usize) -> Result<Vec<Conflict>>;
    logs() -> Result<Vec<LogName>>;
    unrouted(log: &LogName) -> Result<Unrouted>;
    count(log: &LogName) -> Result<Count>;
} }
passes! { Diagnose by store {
    arrivals(log: &LogName, limit: usize) -> Result<Vec<Arrival>>;
    blockers() -> Result<Vec<Blocker>>;
} }
passes! { Admin by store {
    change(subscription: &SubscriptionName, change: &Change, selection: &Selection) -> Result<Changed>;
    replay(subscription: &SubscriptionName, replay: &Replay) -> Result<Replayed>;
    pause(subscription: &SubscriptionName, pause: Option<&Pause>) -> Result<()>;
    rename(subscription: &SubscriptionName, generation: i64, to: &SubscriptionName) -> Result<()>;
    remove(subscription: &SubscriptionName, generation: i64) -> Result<()>;
    reset(subscription: &SubscriptionName, to: ResetTo, stamp: Option<&str>) -> Result<ResetPlan>;
    set_lanes(subscription: &SubscriptionName, lanes: u16) -> Result<()>;
} }
passes! { Maintain by store {
    create_log(log: &LogName) -> Result<()>;
    note_unrouted(log: &LogName) -> Result<Routed>;
    prune(log: &LogName, prune: &Prune) -> Result<Changed>;
    time() -> Result<jiff::Timestamp>;
    check_receiving() -> Result<()>;
    check_integrity() -> Result<()>;
    rebase() -> Result<()>;
} }
passes! { Receive by store {
    receive_many(log: &LogName, inbound: &[Inbound]) -> Result<Vec<Received>>;
    forget(older_than: Duration) -> Result<u64>;
} }
passes! { Tail by store {
    tail(log: &LogName, which: &Criteria, place: Option<&str>, limit: BatchLimit) -> Result<Tailed>;
} }
passes! { Find by store { ids(log: &LogName, prefix: &IdPrefix, limit: usize) -> Result<Vec<EventId>>; } }

#[async_trait]
impl Migrate for LeasedStore {
    async fn up(&self) -> Result<Vec<String>> {
        self.store.up().await
    }

    async fn down(&self, discard_events: bool) -> Result<Vec<String>> {
        self.store.down(discard_events).await
    }

    async fn validate(&self) -> Result<jiff::Timestamp> {
        self.store.validate().await
    }

    fn script(&self) -> String {
        self.store.script()
    }
}

struct Fixture {
    memory: MemoryFixture,
    store: Arc<LeasedStore>,
    _server: PrivateRedis,
}

impl Fixture {
    async fn start(kind: RedisKind) -> Self {
        let (memory, server) = (MemoryFixture::new(), PrivateRedis::launch(kind).await);
        let config = RedisLeaseConfig { url: server.url(), ..RedisLeaseConfig::default() };
        let leases = Arc::new(RedisLeases::new(&config).expect("right"));
        let store = memory.store.clone();
        let store = Arc::new(LeasedStore { log: leases.on(Arc::new(store.clone()), None), store });
        Self { memory, store, _server: server }
    }
}

#[async_trait]
impl StoreFixture for Fixture {
    fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    fn capabilities(&self) -> StoreCapabilities {
        self.memory.capabilities()
    }

    async fn begin(&self) -> Box<dyn OpenTransaction> {
        self.memory.begin().await
    }

    async fn conflicts(&self) -> u64 {
        self.memory.conflicts().await
    }

    async fn faults(&self) -> Arc<dyn CallFaults> {
        self.memory.faults().await
    }

    /// On the store's clock, and on Redis'.
    async fn pass(&self, time: Duration) {
        tokio::time::sleep(time).await;
        self.memory.pass(time).await;
    }
}

mod redis_7 {
    use super::*;

    async fn store() -> Fixture {
        Fixture::start(RedisKind::Redis7).await
    }

    postbox_testkit::conformance_suite!(lease, store);
    postbox_testkit::conformance_suite!(crashes, store);
    postbox_testkit::conformance_suite!(lanes, store);
}

mod valkey_9 {
    use super::*;

    async fn store() -> Fixture {
        Fixture::start(RedisKind::Valkey9).await
    }

    postbox_testkit::conformance_suite!(lease, store);
}
