//! Hints that there may be something to read: local commits and, if configured, NOTIFY. A lost hint
//! costs one poll interval.
//!
//! A commit with a NOTIFY takes a server-wide lock, so writers send one only while a relay has
//! declared itself asleep, and at most four at once. A declaration expires by itself, and a lane
//! with work declares nothing.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use postbox_core::{Lease, LogName, Result, lock};
use postbox_postgres_sql::params;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_postgres::AsyncMessage;

use crate::PostgresStore;
use crate::log::micros;
use crate::session::Session;
use crate::store::Inner;

/// How long a declaration is valid. Writers keep notifying for that long after a relay became busy.
/// One second bounds this cost.
const ASLEEP: Duration = Duration::from_secs(1);
/// A declaration with less time left than this is renewed before a wait: at most two small unlogged
/// writes a second.
const ASLEEP_LEFT_MIN: Duration = Duration::from_millis(500);
/// The wait before a lost LISTEN connection is opened again. Relays poll meanwhile.
const LISTEN_RETRY: Duration = Duration::from_secs(1);

/// Asks a log's writers for notifications. Only the first call locks the log's table against
/// writers, for a moment, after waiting for the transactions that are writing.
const NOTIFY_ENABLE: &str = "SELECT {s}.notify_enable($1)";

/// Declares a relay asleep, and deletes declarations that ended more than a minute ago: every start
/// of a relay makes one, and every append reads those of its log. Those that end in more than a
/// minute were made before the clock was set back. Skips locked rows: they are being declared
/// again, and two relays that waited for each other's row would be a deadlock. Index: primary key
/// of `sleeper`. Locks the rows. The table is unlogged, so that nothing waits for the disk.
const SLEEPER_DECLARE: &str = "
WITH gone AS (DELETE FROM {s}.sleeper AS o WHERE o.log {=} $1 AND o.owner {=} ANY (ARRAY(
  SELECT p.owner FROM {s}.sleeper AS p WHERE p.log {=} $1 AND p.owner {<>} $2
    AND (p.asleep_until {<} (pg_catalog.clock_timestamp() {-} interval '1 minute')
      OR p.asleep_until {>} (pg_catalog.clock_timestamp() {+} interval '1 minute')) FOR UPDATE SKIP LOCKED)))
INSERT INTO {s}.sleeper (log, owner, asleep_until) VALUES ($1, $2, pg_catalog.clock_timestamp() {+} ($3 {*} interval '1 microsecond'))
ON CONFLICT (log, owner) DO UPDATE SET asleep_until = excluded.asleep_until";

/// The logs that this store listens for. Their tasks end with the store.
#[derive(Default)]
pub(crate) struct Listener {
    logs: Mutex<HashMap<LogName, Listening>>,
}

struct Listening {
    task: JoinHandle<()>,
    declared_until: Option<Instant>,
    is_declaring: bool,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Listener {
    fn lock(&self) -> MutexGuard<'_, HashMap<LogName, Listening>> {
        lock(&self.logs)
    }

    /// Whether a wait begins with a new declaration. If so, it is under way until
    /// [`Self::declared`].
    fn begin_declaration(&self, log: &LogName) -> bool {
        let soon = Instant::now() + ASLEEP_LEFT_MIN;
        let mut logs = self.lock();
        let Some(listening) = logs.get_mut(log) else { return false };
        let begins = !listening.is_declaring && listening.declared_until.is_none_or(|until| until < soon);
        listening.is_declaring |= begins;
        begins
    }

    /// Notes the end of a declaration, and until when it is valid, if it succeeded.
    fn declared(&self, log: &LogName, until: Option<Instant>) {
        if let Some(listening) = self.lock().get_mut(log) {
            listening.is_declaring = false;
            listening.declared_until = until.or(listening.declared_until);
        }
    }
}

impl PostgresStore {
    /// Waits for a local commit or a notification since the lane's last read began.
    pub(crate) async fn wait_for_wakeup(&self, lease: &Lease) {
        let mut wakeups = self.lane(lease).wakeups();
        if self.inner.listener.begin_declaration(&lease.log) {
            // A task of its own, because a wait may be dropped before the answer comes, and the
            // connection of a statement without an answer is closed.
            let (store, lease) = (self.clone(), lease.clone());
            let declaring = tokio::spawn(async move {
                let until = store.declare_asleep(&lease).await.ok();
                store.inner.listener.declared(&lease.log, until);
                until.is_some()
            });
            // A writer that looked before we declared sends no notification: let the caller read
            // once more.
            if declaring.await.is_ok_and(|is_declared| is_declared) {
                return;
            }
        }
        // Fails only if the store is gone. Then no hint will ever come.
        if wakeups.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Listens for notifications of a log's writers, if configured. A failure only costs the hints.
    pub(crate) async fn listen_if_asked(&self, log: &LogName) {
        if !self.inner.config.notify || self.inner.listener.lock().contains_key(log) {
            return;
        }
        match self.enable_notify(log).await {
            Ok(channel) => {
                let task = tokio::spawn(listen(Arc::downgrade(&self.inner), channel));
                let listening = Listening { task, declared_until: None, is_declaring: false };
                self.inner.listener.lock().entry(log.clone()).or_insert(listening);
            }
            Err(error) => tracing::warn!(%log, %error, "notifications unavailable"),
        }
    }

    /// Waits at most a second for open transactions that write, because later writers queue behind
    /// us.
    async fn enable_notify(&self, log: &LogName) -> Result<String> {
        let enable = async |session: &Session| {
            let row = session.row(&session.sql(NOTIFY_ENABLE), &params![log.as_str()]).await?;
            Ok(row.get(0))
        };
        self.call("subscribe", async |session: &Session| session.at_once(&self.inner.modes.enable, enable).await).await
    }

    /// Returns until when it is valid.
    async fn declare_asleep(&self, lease: &Lease) -> Result<Instant> {
        let session = self.session("hint").await?;
        // Counted from before the call, as for a lease.
        let until = Instant::now() + ASLEEP;
        let (log, owner) = (lease.log.as_str(), lease.owner.as_str());
        session.execute(&session.sql(SLEEPER_DECLARE), &params![log, owner, micros(ASLEEP)]).await?;
        Ok(until)
    }
}

/// Listens until the store is gone, on its own connection, which is reopened when it is lost.
async fn listen(store: Weak<Inner>, channel: String) {
    while let Some(inner) = store.upgrade() {
        let Some(target) = inner.listen_target.clone() else { return };
        let wakeups = inner.wakeups.clone();
        // Release the store, so that it can be dropped while we wait.
        drop(inner);
        if let Ok((client, mut connection)) = target.servers.open().await {
            let sql = format!("LISTEN \"{channel}\"");
            let messages = async {
                while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
                    if matches!(message, AsyncMessage::Notification(_)) {
                        wakeups.send_modify(|wakeups| *wakeups += 1);
                    }
                }
            };
            let asked = async {
                let _ = client.batch_execute(&sql).await;
                // Keep the client: the connection ends with it.
                std::future::pending::<()>().await;
            };
            futures::future::select(std::pin::pin!(messages), std::pin::pin!(asked)).await;
        }
        tracing::debug!(channel, "listen connection lost");
        tokio::time::sleep(LISTEN_RETRY).await;
    }
}
