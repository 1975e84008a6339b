//! Leases of lanes in Redis, beside those of the store.
//!
//! A relay holds a lane while it has the lease in both. So Redis can only make fewer relays send,
//! never more. Every write is fenced by the store's epoch. So if Redis loses its keys (`FLUSHALL`,
//! a failover, an eviction), lanes move to other relays and nothing is harmed.
//!
//! The store is asked first, because it chooses the lane. A lane that it grants is free there, and
//! its former holder can write nothing any more. If Redis then refuses, the lane is given back to
//! the store at once. If a script runs late or twice, it finds a token that is not its own, or its
//! key expires by itself.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_config::Leases;
use postbox_core::{
    Acquired, Batch, BatchLimit, Error, ErrorKind, Lease, Log, OwnerId, ReadOn, Result, Settlement, StoreName,
    Subscription, SubscriptionName,
};
use redis::{Cmd, Value};
use tokio::sync::Mutex;
use tokio::time::timeout;
use tracing::info;

use crate::connection::{Connection, Server};
use crate::{RedisLeaseConfig, classify};

/// The longest wait for Redis, connecting included. A renewal begins after a third of a lease. If
/// it is not answered, there must be time for another.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Takes a lane. Keys: the lease, its counter. Arguments: owner, epoch, milliseconds.
///
/// The token of a lease is `OWNER EPOCH`, and no lane has an epoch twice. An earlier token of the
/// same owner is replaced, because the store has dropped that grant. A later one is not, because
/// then this script runs late. Returns the counter, or else the token of the holder and its
/// remaining milliseconds.
const TAKE: &str = r"
local held = redis.call('GET', KEYS[1])
if held then
  local owner, epoch = held:match('^(%S+) (%d+)$')
  if owner ~= ARGV[1] or tonumber(epoch) > tonumber(ARGV[2]) then
    return {held, redis.call('PTTL', KEYS[1])}
  end
  redis.call('DEL', KEYS[1])
end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[2], 'NX', 'PX', ARGV[3])
return redis.call('INCR', KEYS[2])";

/// Extends a lease, if it has our token. Key: the lease. Arguments: the token, milliseconds.
const HOLD: &str = r"
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])";

/// Releases a lease, if it has our token. Key: the lease. Argument: the token.
const FREE: &str = r"
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])";

/// A Redis server in which lanes are leased. All relays of a process share one connection.
#[derive(Debug)]
pub struct RedisLeases {
    server: Server,
    prefix: String,
    connection: Mutex<Option<Connection>>,
}

impl RedisLeases {
    /// Connects when the first lane is requested.
    pub fn new(config: &RedisLeaseConfig) -> Result<Self> {
        Ok(Self { server: config.server(WAIT_MAX)?, prefix: config.prefix.clone(), connection: Mutex::default() })
    }

    /// Returns the same log, with lanes that are leased in Redis too. `store` names the store if a
    /// program has several.
    pub fn on(self: Arc<Self>, log: Arc<dyn Log>, store: Option<&StoreName>) -> Arc<dyn Log> {
        let of = store.map_or_else(String::new, |store| format!("{store}:"));
        Arc::new(Leased { leases: self, log, of })
    }

    /// Checks for an operator whether lanes can be leased. Writes nothing.
    pub(crate) async fn look(&self) -> Result<String> {
        let key = format!("{}:lease:{{look}}", self.prefix);
        self.ask("connect", &script("return redis.call('GET', KEYS[1])", &[&key], &[]), WAIT_MAX).await?;
        Ok("answers".to_owned())
    }

    /// Returns the connection that all calls share. Opens one if there is none or it is lost.
    async fn connection(&self) -> Result<Connection> {
        let mut shared = self.connection.lock().await;
        match &*shared {
            Some(connection) if connection.is_open() => Ok(connection.clone()),
            _ => {
                *shared = None;
                Ok(shared.insert(self.server.connect().await?).clone())
            }
        }
    }

    /// Runs a script. Returns its answer, or an error if there is none in time.
    async fn ask(&self, operation: &'static str, script: &Cmd, wait: Duration) -> Result<Value> {
        let asked = async {
            let answer = self.connection().await?.ask(script).await;
            answer.map_err(|error| classify::failure(operation, error))
        };
        self.in_time(operation, asked, wait).await
    }

    /// Limits a call to `wait`. After any failure the next call reconnects, because the server may
    /// no longer be the primary, and its name may lead to another by now. If the lock is taken, its
    /// holder is about to do so.
    async fn in_time<T>(
        &self,
        operation: &'static str,
        asked: impl Future<Output = Result<T>>,
        wait: Duration,
    ) -> Result<T> {
        let late = || Err(Error::new(ErrorKind::Unavailable, operation, "redis_timeout", classify::SILENT));
        let answer = timeout(wait, asked).await.unwrap_or_else(|_| late());
        answer.map_err(|error| {
            if let Ok(mut shared) = self.connection.try_lock() {
                *shared = None;
            }
            Error::new(
                error.kind(),
                operation,
                error.code().to_owned(),
                format!("the lease in Redis: {}", error.message()),
            )
        })
    }
}

impl Leases for RedisLeases {
    fn on(self: Arc<Self>, log: Arc<dyn Log>, store: Option<&StoreName>) -> Arc<dyn Log> {
        Self::on(self, log, store)
    }
}

/// Returns how long one call may take, which is well below the lease that it is for.
fn wait(ttl: Duration) -> Duration {
    (ttl / 3).min(WAIT_MAX)
}

fn millis(ttl: Duration) -> String {
    ttl.as_millis().to_string()
}

/// Returns the token of a lease. It belongs to a single grant.
fn token(lease: &Lease) -> String {
    format!("{} {}", lease.owner, lease.epoch)
}

/// Makes the command that runs a script. The text is sent each time, because the server finds the
/// compiled script by it, and the longest has 500 bytes.
fn script(text: &str, keys: &[&str], arguments: &[&str]) -> Cmd {
    let mut command = redis::cmd("EVAL");
    command.arg(text).arg(keys.len()).arg(keys).arg(arguments);
    command
}

fn lost() -> Error {
    let text = "the lease in Redis is gone or another relay's (FLUSHALL, a failover, an eviction, a lease that ran out); \
                the lane is asked for again";
    Error::new(ErrorKind::Stale, "renew", "redis_lease_lost", text)
}

/// The lane is free in the store but held in Redis. After a crash of a relay this ends soon.
/// Otherwise two databases use the same keys.
fn held(lease: &Lease, key: &str, holder: &str, left_ms: i64) -> Error {
    let Lease { subscription, lane, .. } = lease;
    let text = format!(
        "lane {lane} of {subscription} is held in Redis by {holder:?} for another {left_ms} ms, although the store says \
         it is free; if that goes on, another database uses the same keys: set another prefix in [lease], or DEL {key}"
    );
    Error::new(ErrorKind::Unavailable, "acquire", "redis_lease_held", text)
}

/// A log with lanes that are leased in Redis too.
struct Leased {
    leases: Arc<RedisLeases>,
    log: Arc<dyn Log>,
    /// The part of the keys that distinguishes this store from others of the program.
    of: String,
}

impl Leased {
    /// Returns the key of a lane. The braces keep it and its counter on one node of a cluster.
    fn key(&self, lease: &Lease) -> String {
        let Lease { log, subscription, lane, .. } = lease;
        format!("{}:lease:{{{}{log}:{subscription}:{lane}}}", self.leases.prefix, self.of)
    }

    async fn take(&self, lease: &Lease, ttl: Duration) -> Result<()> {
        let key = self.key(lease);
        let (counter, epoch) = (format!("{key}:fence"), lease.epoch.to_string());
        let take = script(TAKE, &[&key, &counter], &[lease.owner.as_str(), &epoch, &millis(ttl)]);
        match self.leases.ask("acquire", &take, wait(ttl)).await? {
            Value::Int(fence) => {
                let Lease { subscription, lane, epoch, .. } = lease;
                info!(%subscription, lane, epoch, fence, "lane taken in Redis");
                Ok(())
            }
            other => {
                let (holder, left_ms): (String, i64) = redis::from_redis_value(other).unwrap_or_default();
                Err(held(lease, &key, &holder, left_ms))
            }
        }
    }

    async fn free(&self, lease: &Lease) -> Result<()> {
        let free = script(FREE, &[&self.key(lease)], &[&token(lease)]);
        self.leases.ask("release", &free, WAIT_MAX).await.map(|_| ())
    }
}

#[async_trait]
impl Log for Leased {
    async fn subscribe(&self, subscription: &Subscription) -> Result<()> {
        self.log.subscribe(subscription).await
    }

    /// Does not ask the store while Redis cannot be reached. The store would count this relay as a
    /// replica, and leave a share of the lanes to it that it cannot take.
    async fn acquire(
        &self,
        subscription: &SubscriptionName,
        owner: &OwnerId,
        held: &[u16],
        ttl: Duration,
    ) -> Result<Acquired> {
        self.leases.in_time("acquire", self.leases.connection(), wait(ttl)).await?;
        let acquired = self.log.acquire(subscription, owner, held, ttl).await?;
        let Some(lease) = &acquired.lease else { return Ok(acquired) };
        if let Err(error) = self.take(lease, ttl).await {
            // If this fails too, the lane is granted to us again, or its lease expires.
            let _ = self.log.release(lease).await;
            return Err(error);
        }
        Ok(acquired)
    }

    /// Renews in Redis first. If that fails, the store's lease must not be extended, because other
    /// relays wait for it.
    async fn renew(&self, lease: &Lease, ttl: Duration) -> Result<()> {
        let hold = script(HOLD, &[&self.key(lease)], &[&token(lease), &millis(ttl)]);
        if self.leases.ask("renew", &hold, wait(ttl)).await? != Value::Int(1) {
            return Err(lost());
        }
        let renewed = self.log.renew(lease, ttl).await;
        if renewed.as_ref().is_err_and(Error::is_stale) {
            // The subscription is paused, or the lane was taken over. If this fails, the key
            // expires.
            let _ = self.free(lease).await;
        }
        renewed
    }

    /// Releases in Redis first, so that the relay which then gets the lane from the store finds it
    /// free in Redis.
    async fn release(&self, lease: &Lease) -> Result<()> {
        let freed = self.free(lease).await;
        self.log.release(lease).await.and(freed)
    }

    async fn leave(&self, subscription: &SubscriptionName, owner: &OwnerId) -> Result<()> {
        self.log.leave(subscription, owner).await
    }

    async fn next_batch(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        self.log.next_batch(lease, limit).await
    }

    async fn due(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        self.log.due(lease, limit).await
    }

    async fn settle(&self, lease: &Lease, settlement: Settlement<'_>) -> Result<()> {
        self.log.settle(lease, settlement).await
    }

    async fn settle_and_read(&self, lease: &Lease, settlement: Settlement<'_>, limit: BatchLimit) -> Result<ReadOn> {
        self.log.settle_and_read(lease, settlement, limit).await
    }

    async fn hint(&self, lease: &Lease) {
        self.log.hint(lease).await;
    }
}
