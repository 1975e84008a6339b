//! What an operator sees and steers. Reports may walk the log; they run in a snapshot of their own and hold no lock.

mod report;
mod steer;

use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    Changed, Conflict, EventId, Inspect, ListQuery, LogName, Pause, Record, Result, Selection, Stats, SubscriptionInfo,
    SubscriptionName,
};

#[cfg(test)]
pub(crate) use self::steer::{DELIVERY_HUSH, DELIVERY_REQUEUE_CHOSEN, LOG_PRUNE};
use crate::PostgresStore;

#[async_trait]
impl Inspect for PostgresStore {
    async fn subscriptions(&self) -> Result<Vec<SubscriptionInfo>> {
        self.bounded("subscriptions", self.report_subscriptions()).await
    }

    async fn stats(&self, subscription: &SubscriptionName) -> Result<Stats> {
        self.bounded("stats", self.report_stats(subscription)).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<Record>> {
        self.bounded("list", self.report_list(query)).await
    }

    async fn get(&self, subscription: &SubscriptionName, id: EventId) -> Result<Option<Record>> {
        self.bounded("get", self.report_one(subscription, id)).await
    }

    async fn conflicts(&self, limit: usize) -> Result<Vec<Conflict>> {
        self.bounded("conflicts", self.report_conflicts(limit)).await
    }

    async fn requeue(&self, subscription: &SubscriptionName, selection: &Selection) -> Result<Changed> {
        self.bounded("requeue", self.steer_requeue(subscription, selection)).await
    }

    async fn discard(&self, subscription: &SubscriptionName, selection: &Selection) -> Result<Changed> {
        self.bounded("discard", self.steer_discard(subscription, selection)).await
    }

    async fn prune(&self, log: &LogName, older_than: Duration) -> Result<u64> {
        self.bounded("prune", self.steer_prune(log, older_than)).await
    }

    async fn pause(&self, subscription: &SubscriptionName, pause: Option<&Pause>) -> Result<()> {
        self.bounded("pause", self.steer_pause(subscription, pause)).await
    }
}

/// True where the cursor `n` of a lane has not passed the row `l`.
macro_rules! is_unread {
    () => {
        "(NOT pg_visible_in_snapshot(l.xid, n.from_snap) AND (NOT pg_visible_in_snapshot(l.xid, n.to_snap) OR l.seq > n.last_seq))"
    };
}
pub(crate) use is_unread;

/// True where subscription `s` wants row `l` of its log: topics and tenant, for statements about many subscriptions.
macro_rules! is_wanted {
    () => {
        "((s.topics = '{}' OR EXISTS (SELECT FROM unnest(s.topics) AS wanted(topic)
  WHERE l.topic LIKE replace(replace(replace(replace(wanted.topic, chr(92), chr(92) || chr(92)), '%', chr(92) || '%'), '_', chr(92) || '_'), '*', '%')))
  AND (s.tenant IS NULL OR l.tenant = s.tenant))"
    };
}
pub(crate) use is_wanted;
