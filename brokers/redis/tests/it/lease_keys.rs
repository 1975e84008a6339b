//! Single calls of a lease, and the keys in Redis afterwards.

use std::sync::Arc;
use std::time::{Duration, Instant};

use postbox_config::Secret;
use postbox_core::{Acquired, Error, ErrorKind, Lease, Log, LogName, Result, Settlement, StoreName, Subscription};
use postbox_memory::MemoryStore;
use postbox_redis::{RedisLeaseConfig, RedisLeases};
use postbox_testkit::clock::ManualClock;
use postbox_testkit::proxy::Direction;

use super::SERVERS;
use super::support::Broker;

const TTL: Duration = Duration::from_secs(30);
const KEY: &str = "postbox:lease:{outbox:out:0}";

/// A store with a clock that the test sets. The clock of Redis runs as usual.
struct Bed {
    clock: Arc<ManualClock>,
    store: MemoryStore,
}

impl Bed {
    async fn new() -> Self {
        let clock = Arc::new(ManualClock::default());
        let store = MemoryStore::new(clock.clone());
        let subscription = Subscription::new("out".parse().expect("a name"), LogName::outbox());
        store.subscribe(&Subscription { lanes: Some(1), ..subscription }).await.expect("subscribed");
        Self { clock, store }
    }

    fn leased(&self, broker: &Broker, change: impl FnOnce(&mut RedisLeaseConfig)) -> Arc<dyn Log> {
        let mut config = RedisLeaseConfig { url: broker.url(), ..RedisLeaseConfig::default() };
        change(&mut config);
        Arc::new(RedisLeases::new(&config).expect("right")).on(Arc::new(self.store.clone()), None)
    }

    /// Returns whether the store would grant the lane to another owner.
    async fn is_free(&self) -> bool {
        match ask(&self.store, "passer-by", TTL).await.expect("asked").lease {
            Some(lease) => self.store.release(&lease).await.is_ok(),
            None => false,
        }
    }
}

async fn ask(log: &dyn Log, owner: &str, ttl: Duration) -> Result<Acquired> {
    let (name, owner) = ("out".parse().expect("a name"), owner.parse().expect("a name"));
    log.acquire(&name, &owner, &[0], ttl).await
}

async fn take(log: &dyn Log, owner: &str) -> Lease {
    ask(log, owner, TTL).await.expect("asked").lease.expect("free")
}

async fn holder(broker: &Broker) -> Option<String> {
    broker.ask(&format!("GET {KEY}")).await
}

fn said(error: &Error) -> (ErrorKind, &str) {
    (error.kind(), error.code())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_former_owner_touches_nothing_of_the_next() {
    for kind in SERVERS {
        let (broker, bed) = (Broker::start(kind).await, Bed::new().await);
        let log = bed.leased(&broker, |_| ());
        let former = take(&*log, "one").await;
        let held_by_one = format!("one {}", former.epoch);
        assert_eq!(holder(&broker).await.as_ref(), Some(&held_by_one));
        bed.clock.advance(2 * TTL);
        // The store grants the lane to another owner, but Redis refuses. Then the lane is free in
        // the store again.
        let error = ask(&*log, "two", TTL).await.expect_err("held in Redis");
        assert_eq!(said(&error), (ErrorKind::Unavailable, "redis_lease_held"));
        assert!(error.message().contains(&held_by_one) && error.message().contains(KEY), "{error}");
        assert!(bed.is_free().await, "a lane that Redis refused");
        // An operator deletes the key.
        let _: i64 = broker.ask(&format!("DEL {KEY}")).await;
        let lease = take(&*log, "two").await;
        let held = holder(&broker).await;
        assert!(held.as_deref().is_some_and(|held| held.starts_with("two ")), "{held:?}");
        log.release(&former).await.expect("it does nothing");
        let error = log.renew(&former, TTL).await.expect_err("another's");
        assert_eq!(said(&error), (ErrorKind::Stale, "redis_lease_lost"));
        assert_eq!(holder(&broker).await, held);
        // The store's epoch fences the former owner, whatever Redis holds.
        let () = broker.ask("FLUSHALL").await;
        let error = log.settle(&former, Settlement::default()).await.expect_err("fenced");
        assert_eq!(error.kind(), ErrorKind::Stale);
        let error = log.renew(&lease, TTL).await.expect_err("gone");
        assert_eq!(said(&error), (ErrorKind::Stale, "redis_lease_lost"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_takes_its_own_lane_again_and_never_back() {
    for kind in SERVERS {
        let (broker, bed) = (Broker::start(kind).await, Bed::new().await);
        let log = bed.leased(&broker, |_| ());
        let first = take(&*log, "one").await;
        bed.clock.advance(2 * TTL);
        // As if the answer to the first grant had been lost.
        let second = take(&*log, "one").await;
        let held = Some(format!("one {}", second.epoch));
        assert!(second.epoch > first.epoch && holder(&broker).await == held, "{first:?}, {second:?}");
        let fence: i64 = broker.ask(&format!("GET {KEY}:fence")).await;
        assert_eq!(fence, 2);
        log.release(&first).await.expect("it does nothing");
        log.renew(&second, TTL).await.expect("still ours");
        // An earlier grant that arrives late. Here it is one of another store, whose epochs begin
        // anew.
        let earlier = Bed::new().await;
        let error = ask(&*earlier.leased(&broker, |_| ()), "one", TTL).await.expect_err("late");
        assert_eq!(said(&error), (ErrorKind::Unavailable, "redis_lease_held"));
        assert_eq!(holder(&broker).await, held);
        // Stores with different names or prefixes use different keys.
        let config = RedisLeaseConfig { url: broker.url(), ..RedisLeaseConfig::default() };
        let leases = Arc::new(RedisLeases::new(&config).expect("right"));
        let acme: StoreName = "acme".parse().expect("a name");
        take(&*leases.on(Arc::new(earlier.store.clone()), Some(&acme)), "one").await;
        take(&*bed_with_prefix(&broker).await, "one").await;
    }
}

async fn bed_with_prefix(broker: &Broker) -> Arc<dyn Log> {
    Bed::new().await.leased(broker, |config| config.prefix = "other".into())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pause_frees_the_lane_in_both() {
    for kind in SERVERS {
        let (broker, bed) = (Broker::start(kind).await, Bed::new().await);
        let log = bed.leased(&broker, |_| ());
        let lease = take(&*log, "one").await;
        let pause = postbox_core::Pause { until: None, by: "ada".into(), why: "lunch".into() };
        postbox_core::Admin::pause(&bed.store, &lease.subscription, Some(&pause)).await.expect("paused");
        assert!(log.renew(&lease, TTL).await.is_err_and(|error| error.is_stale()));
        assert_eq!(holder(&broker).await, None);
        assert_eq!(ask(&*log, "two", TTL).await.expect("asked").paused, Some(pause));
    }
}

/// A call takes at most a third of the lease. If it fails, the lane is free in the store again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_says_nothing_costs_a_part_of_the_lease() {
    for kind in SERVERS {
        let (broker, bed) = (Broker::start(kind).await, Bed::new().await);
        let log = bed.leased(&broker, |_| ());
        let lease = take(&*log, "one").await;
        log.release(&lease).await.expect("given back");
        broker.proxy.swallow(&[Direction::ToClient]);
        let asked = Instant::now();
        let error = ask(&*log, "one", TTL).await.expect_err("no answer");
        assert_eq!(said(&error), (ErrorKind::Unavailable, "redis_timeout"));
        assert!(asked.elapsed() < TTL / 3, "{:?}", asked.elapsed());
        assert!(bed.is_free().await, "the store has it back");
        // From here on the store is not asked, so a relay without Redis does not count as a
        // replica.
        let error = ask(&*log, "one", TTL).await.expect_err("no answer to the greeting");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        bed.clock.advance(2 * TTL);
        ask(&*log, "one", TTL).await.expect_err("no answer to the greeting");
        assert_eq!(ask(&bed.store, "two", TTL).await.expect("asked").replicas, 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_person_must_mend_is_said_and_nothing_secret() {
    for kind in SERVERS {
        let (broker, bed) = (Broker::start(kind).await, Bed::new().await);
        // The rights that the guide lists.
        let rights = "+eval +get +set +del +incr +pttl +pexpire +hello +client +select";
        let () = broker.ask(&format!("ACL SETUSER relay on >secret ~postbox:lease:* {rights}")).await;
        let with = |password: &'static str, prefix: &'static str| {
            bed.leased(&broker, |config| {
                config.user = Some("relay".into());
                config.password = Some(Secret::new(password));
                config.prefix = prefix.into();
            })
        };
        let error = ask(&*with("canary", "postbox"), "one", TTL).await.expect_err("another password");
        assert_eq!(said(&error), (ErrorKind::Unauthorized, "redis_unauthorized"));
        assert!(!format!("{error} {error:?}").contains("canary"), "{error:?}");
        let error = ask(&*with("secret", "other"), "one", TTL).await.expect_err("other keys");
        assert_eq!(said(&error), (ErrorKind::Unauthorized, "redis_not_permitted"));
        assert!(bed.is_free().await);
        let log = with("secret", "postbox");
        let lease = take(&*log, "one").await;
        log.renew(&lease, TTL).await.expect("ours");
        log.release(&lease).await.expect("ours");
        let _: i64 = broker.ask(&format!("RPUSH {KEY} another-s")).await;
        let error = ask(&*log, "one", TTL).await.expect_err("a list");
        assert_eq!(said(&error), (ErrorKind::Mismatch, "redis_wrong_type"));
        assert!(bed.is_free().await);
        let _: i64 = broker.ask(&format!("DEL {KEY}")).await;
        let () = broker.ask(&format!("SET {KEY} something")).await;
        let error = ask(&*log, "one", TTL).await.expect_err("nobody's");
        assert_eq!(said(&error), (ErrorKind::Unavailable, "redis_lease_held"));
        assert_eq!(holder(&broker).await.as_deref(), Some("something"));
        let password = Some(Secret::new("canary"));
        let config = RedisLeaseConfig { url: broker.url(), password, ..RedisLeaseConfig::default() };
        assert!(!format!("{:?}", RedisLeases::new(&config)).contains("canary"));
    }
}
