//! Leases of lanes in Redis, beside those of the store.
//!
//! A relay holds a lane while it holds it in both. So Redis can only make fewer relays send, never
//! more; and as every write is fenced by the store's epoch, a Redis that forgets its keys
//! (`FLUSHALL`, a failover, memory that is short) hands lanes over and harms nothing.
//!
//! The store is asked first, because it chooses the lane: a lane that it grants is free there, and
//! its former holder writes nothing any more. What Redis then refuses is given back to the store at
//! once. A script that is done late, or twice, finds a token that is not its own, or a key that
//! runs out by itself.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_config::Leases;
use postbox_core::{
    Acquired, Batch, BatchLimit, Error, ErrorKind, Lease, Log, OwnerId, Result, Settlement, StoreName, Subscription,
    SubscriptionName,
};
use redis::{Cmd, Value};
use tokio::sync::Mutex;
use tokio::time::timeout;
use tracing::info;

use crate::connection::{Connection, Server};
use crate::{RedisLeaseConfig, classify};

/// Longest wait for Redis, connecting included. A renewal begins at a third of a lease, and one
/// that is not answered must leave time for another.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Takes a lane. Keys: the lease, its counter. Arguments: owner, epoch, milliseconds.
///
/// A token is `OWNER EPOCH`; no lane has an epoch twice. The owner's own earlier token gives way:
/// the store knows nothing of that grant any more. A later one does not: then this script is late.
/// The answer is the counter, or who holds the lane and for how many milliseconds.
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

/// Holds a lane for longer, if it is ours. Key: the lease. Arguments: the token, milliseconds.
const HOLD: &str = r"
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])";

/// Gives a lane back, if it is ours. Key: the lease. Argument: the token.
const FREE: &str = r"
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])";

/// A Redis in which lanes are taken, by every relay of a process on one connection.
#[derive(Debug)]
pub struct RedisLeases {
    server: Server,
    prefix: String,
    connection: Mutex<Option<Connection>>,
}

impl RedisLeases {
    /// Connects when the first lane is asked for.
    pub fn new(config: &RedisLeaseConfig) -> Result<Self> {
        Ok(Self { server: config.server(WAIT_MAX)?, prefix: config.prefix.clone(), connection: Mutex::default() })
    }

    /// The same log, whose lanes are taken in Redis too. `store` names it where a program has
    /// several.
    pub fn on(self: Arc<Self>, log: Arc<dyn Log>, store: Option<&StoreName>) -> Arc<dyn Log> {
        let of = store.map_or_else(String::new, |store| format!("{store}:"));
        Arc::new(Leased { leases: self, log, of })
    }

    /// Whether lanes could be taken, for a person who asks. Writes nothing.
    pub(crate) async fn look(&self) -> Result<String> {
        let key = format!("{}:lease:{{look}}", self.prefix);
        self.ask("connect", &script("return redis.call('GET', KEYS[1])", &[&key], &[]), WAIT_MAX).await?;
        Ok("answers".to_owned())
    }

    /// The connection of all calls; a new one if there is none, or it is lost.
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

    /// What a script answers, in time.
    async fn ask(&self, operation: &'static str, script: &Cmd, wait: Duration) -> Result<Value> {
        let asked = async {
            let answer = self.connection().await?.ask(script).await;
            answer.map_err(|error| classify::failure(operation, error))
        };
        self.in_time(operation, asked, wait).await
    }

    /// Whatever fails, the next call connects anew: perhaps it was the primary, and the name leads
    /// to another by now. Whoever has the lock is about to.
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

/// How long one call may take, far below the lease it is for.
fn wait(ttl: Duration) -> Duration {
    (ttl / 3).min(WAIT_MAX)
}

fn millis(ttl: Duration) -> String {
    ttl.as_millis().to_string()
}

/// Whose a lane is: of one grant, and of no other.
fn token(lease: &Lease) -> String {
    format!("{} {}", lease.owner, lease.epoch)
}

/// A server knows a script by its text; the longest has 500 bytes.
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

/// The lane is free in the store, and taken in Redis. It is soon over where a relay crashed; else
/// two databases share their keys.
fn held(lease: &Lease, key: &str, holder: &str, left_ms: i64) -> Error {
    let Lease { subscription, lane, .. } = lease;
    let text = format!(
        "lane {lane} of {subscription} is held in Redis by {holder:?} for another {left_ms} ms, although the store says \
         it is free; if that goes on, another database uses the same keys: set another prefix in [lease], or DEL {key}"
    );
    Error::new(ErrorKind::Unavailable, "acquire", "redis_lease_held", text)
}

/// A log whose lanes are taken in Redis too.
struct Leased {
    leases: Arc<RedisLeases>,
    log: Arc<dyn Log>,
    /// What tells this store from others of the program.
    of: String,
}

impl Leased {
    /// The key of a lane. The braces keep it and its counter on one node of a cluster.
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

    /// Without Redis nobody asks the store: a relay that can take no lane is no replica, and leaves
    /// its share to those that can.
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
            // If this fails too, it is granted again to us, or runs out.
            let _ = self.log.release(lease).await;
            return Err(error);
        }
        Ok(acquired)
    }

    /// First in Redis: what fails there must not prolong the store's lease, for which others wait.
    async fn renew(&self, lease: &Lease, ttl: Duration) -> Result<()> {
        let hold = script(HOLD, &[&self.key(lease)], &[&token(lease), &millis(ttl)]);
        if self.leases.ask("renew", &hold, wait(ttl)).await? != Value::Int(1) {
            return Err(lost());
        }
        let renewed = self.log.renew(lease, ttl).await;
        if renewed.as_ref().is_err_and(Error::is_stale) {
            // Paused, or taken over. If it fails, the key runs out.
            let _ = self.free(lease).await;
        }
        renewed
    }

    /// First in Redis: who takes the lane of the store must find it free.
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

    async fn hint(&self, lease: &Lease) {
        self.log.hint(lease).await;
    }
}
