//! Making subscriptions and knowing them.

use std::sync::{Arc, PoisonError};

use postbox_core::kit::{check_shape, subscription_unknown};
use postbox_core::{
    Error, ErrorKind, Filter, LogName, Migrate as _, Ordering, Result, StartAt, Subscription, SubscriptionName, Tenant,
    TopicPattern,
};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};

use crate::PostgresStore;
use crate::classify::{classify, cursor_foreign, log_unknown};
use crate::schema::check_log_name;
use crate::session::COMMIT;

/// Whether the log exists. Index: primary key of `log`. No lock.
const LOG_EXISTS: &str = "
SELECT EXISTS (SELECT FROM {s}.log WHERE name = $1)";

/// Whether the newest row of a log is from a transaction that this cluster has not reached. Index:
/// `(xid, seq)` of the log, read from its end. No lock. Every visible row's transaction is over, so
/// it is below the current snapshot's `xmax`, unless the row came with a dump.
const LOG_IS_FROM_FUTURE: &str = "
SELECT EXISTS (
  SELECT FROM (SELECT l.xid FROM {log} AS l ORDER BY l.xid DESC LIMIT 1) AS newest
  WHERE newest.xid >= pg_snapshot_xmax(pg_current_snapshot()))";

/// Makes the subscription, or takes over its new filter and ordering. Index: the unique name. Locks
/// the row.
///
/// The revision tells replicas that read with the former filter: they read on by this one, whatever
/// their own configuration says.
const SUBSCRIPTION_UPSERT: &str = "
INSERT INTO {s}.subscription AS s (name, log, topics, tenant, ordering, lanes) VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (name) DO UPDATE SET topics = $3, tenant = $4, ordering = $5,
  revision = s.revision + ((s.topics, s.tenant) IS DISTINCT FROM ($3::text[], $4::text))::int
WHERE s.log = $2 AND s.lanes = $6
RETURNING id, revision, xmax = 0 AS is_new";

/// Makes the lanes that are not there. Their cursor is before everything, or (of a new
/// subscription) at this moment. `last_seq` and the window do not matter for `now`: an empty window
/// lies between equal snapshots.
const LANE_CREATE: &str = "
INSERT INTO {s}.lane (subscription, lane, from_snap, to_snap, low, high, last_seq)
SELECT $1, n, snap, snap, 0, 0, 0
FROM generate_series(0, $2 - 1) AS n, (SELECT CASE WHEN $3 THEN pg_current_snapshot() ELSE '1:1:'::pg_snapshot END AS snap) AS start
ON CONFLICT DO NOTHING";

/// Whether a lane's cursor is beyond this cluster. Index: primary key of `lane`.
const LANE_IS_FROM_FUTURE: &str = "
SELECT EXISTS (SELECT FROM {s}.lane WHERE subscription = $1 AND pg_snapshot_xmax(to_snap) > pg_snapshot_xmax(pg_current_snapshot()))";

/// Whether a lane's cursor was made in another cluster, where the same ids are of other
/// transactions. Index: primary key of `lane`.
const LANE_IS_FOREIGN: &str = "
SELECT EXISTS (SELECT FROM {s}.lane WHERE subscription = $1 AND cluster <> (SELECT {s}.cluster_id()))";

/// One subscription. Index: the unique name.
const SUBSCRIPTION_GET: &str =
    "SELECT id, name, log, topics, tenant, lanes::int, revision FROM {s}.subscription WHERE name {=} $1";

/// The names, for an error text. Reads the whole (small) table.
const SUBSCRIPTION_NAMES: &str = "SELECT name FROM {s}.subscription ORDER BY name LIMIT 50";

/// What reading a subscription needs to know.
#[derive(Debug)]
pub(crate) struct SubscriptionRow {
    pub(crate) id: i32,
    pub(crate) log: LogName,
    pub(crate) lanes: u16,
    pub(crate) filter: Filter,
    /// Rises with every change of the filter.
    pub(crate) revision: i32,
    /// The topics as SQL patterns; `None`: all.
    pub(crate) likes: Option<Vec<String>>,
}

impl SubscriptionRow {
    fn new(id: i32, revision: i32, subscription: &Subscription) -> Self {
        Self {
            id,
            revision,
            log: subscription.log.clone(),
            lanes: subscription.lanes,
            likes: likes(&subscription.filter.topics),
            filter: subscription.filter.clone(),
        }
    }

    fn from_row(row: &Row) -> Self {
        let topics: Vec<String> = row.get(3);
        // Checked when they were written.
        let topics: Vec<TopicPattern> = topics.into_iter().filter_map(|topic| TopicPattern::new(topic).ok()).collect();
        let filter = Filter { topics, tenant: row.get::<_, Option<String>>(4).map(Tenant::from_stored) };
        Self {
            id: row.get(0),
            log: LogName::from_stored(row.get::<_, String>(2)),
            lanes: u16::try_from(row.get::<_, i32>(5)).unwrap_or(1),
            revision: row.get(6),
            likes: likes(&filter.topics),
            filter,
        }
    }

    pub(crate) fn tenant(&self) -> Option<&str> {
        self.filter.tenant.as_ref().map(Tenant::as_str)
    }
}

fn likes(topics: &[TopicPattern]) -> Option<Vec<String>> {
    (!topics.is_empty()).then(|| topics.iter().map(TopicPattern::to_like).collect())
}

pub(crate) async fn subscribe(store: &PostgresStore, subscription: &Subscription) -> Result<()> {
    store.validate().await?;
    check_log_name("subscribe", &subscription.log)?;
    let session = store.session("subscribe").await?;
    let client = session.client();
    let begun = client.batch_execute(&store.inner.modes.write).await;
    begun.map_err(|error| classify("subscribe", &error))?;
    let made = write(store, client, subscription).await;
    let ended = client.batch_execute(if made.is_ok() { COMMIT } else { "ROLLBACK" }).await;
    session.end_after(ended.is_ok());
    let (id, revision) = made?;
    ended.map_err(|error| classify("subscribe", &error))?;
    store.remember(&subscription.name, Arc::new(SubscriptionRow::new(id, revision, subscription)));
    store.listen_if_asked(&subscription.log).await;
    Ok(())
}

async fn write(store: &PostgresStore, client: &Client, subscription: &Subscription) -> Result<(i32, i32)> {
    let Subscription { name, log, filter, ordering, lanes, start } = subscription;
    let schema = store.schema();
    let ask = async |sql: &str, params: &[(&(dyn ToSql + Sync), Type)]| {
        client.query_typed(sql, params).await.map_err(|error| classify("subscribe", &error))
    };
    let is_true = |rows: Vec<Row>| rows.first().is_some_and(|row| row.get(0));
    if !is_true(ask(&schema.sql(LOG_EXISTS), &[(&log.as_str(), Type::TEXT)]).await?) {
        return Err(log_unknown("subscribe", log.as_str()));
    }
    if is_true(ask(&schema.log_sql(LOG_IS_FROM_FUTURE, log), &[]).await?) {
        return Err(from_future(&format!("log {log}")));
    }
    let topics: Vec<&str> = filter.topics.iter().map(TopicPattern::as_str).collect();
    let tenant = filter.tenant.as_ref().map(Tenant::as_str);
    let ordering = match ordering {
        Ordering::Key => "key",
        Ordering::None => "none",
    };
    let lanes_wanted = lanes.cast_signed();
    let made = ask(
        &schema.sql(SUBSCRIPTION_UPSERT),
        &[
            (&name.as_str(), Type::TEXT),
            (&log.as_str(), Type::TEXT),
            (&topics, Type::TEXT_ARRAY),
            (&tenant, Type::TEXT),
            (&ordering, Type::TEXT),
            (&lanes_wanted, Type::INT2),
        ],
    )
    .await?;
    let Some(row) = made.first() else {
        let known = ask(&schema.sql(SUBSCRIPTION_GET), &[(&name.as_str(), Type::TEXT)]).await?;
        let known = known.first().map(SubscriptionRow::from_row);
        known.map_or(Ok(()), |known| check_shape(subscription, &known.log, known.lanes))?;
        let message = format!("subscription {name} was changed at the same moment; try again");
        return Err(Error::new(ErrorKind::Conflict, "subscribe", "subscription_changed", message));
    };
    let (id, revision): (i32, i32) = (row.get(0), row.get(1));
    // Lanes of a known subscription are there, unless somebody deleted them: then nobody knows what
    // they had passed.
    let now = *start == StartAt::Now && row.get::<_, bool>(2);
    ask(&schema.sql(LANE_CREATE), &[(&id, Type::INT4), (&i32::from(*lanes), Type::INT4), (&now, Type::BOOL)]).await?;
    if is_true(ask(&schema.sql(LANE_IS_FROM_FUTURE), &[(&id, Type::INT4)]).await?) {
        return Err(from_future(&format!("the cursor of subscription {name}")));
    }
    if is_true(ask(&schema.sql(LANE_IS_FOREIGN), &[(&id, Type::INT4)]).await?) {
        return Err(cursor_foreign("subscribe"));
    }
    Ok((id, revision))
}

impl PostgresStore {
    /// What this process knows of a subscription, from `subscribe` or else from the database.
    pub(crate) async fn subscription(
        &self,
        operation: &'static str,
        name: &SubscriptionName,
    ) -> Result<Arc<SubscriptionRow>> {
        let known = self.inner.subscriptions.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned();
        if let Some(row) = known {
            return Ok(row);
        }
        let session = self.session(operation).await?;
        let row = self.reload(operation, session.client(), name).await;
        session.end_after(row.is_ok());
        row
    }

    /// What is in the database now, remembered from here on. A subscription that is gone is
    /// forgotten.
    pub(crate) async fn reload(
        &self,
        operation: &'static str,
        client: &Client,
        name: &SubscriptionName,
    ) -> Result<Arc<SubscriptionRow>> {
        match self.look_up(operation, client, name).await {
            Ok(row) => {
                let row = Arc::new(row);
                self.remember(name, row.clone());
                Ok(row)
            }
            Err(error) => {
                self.inner.subscriptions.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
                Err(error)
            }
        }
    }

    fn remember(&self, name: &SubscriptionName, row: Arc<SubscriptionRow>) {
        self.inner.subscriptions.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), row);
    }

    /// A subscription as the database has it now: what an operator means.
    pub(crate) async fn look_up(
        &self,
        operation: &'static str,
        client: &Client,
        name: &SubscriptionName,
    ) -> Result<SubscriptionRow> {
        let failed = |error: tokio_postgres::Error| classify(operation, &error);
        let sql = self.schema().sql(SUBSCRIPTION_GET);
        let rows = client.query_typed(&sql, &[(&name.as_str(), Type::TEXT)]).await.map_err(failed)?;
        if let Some(row) = rows.first() {
            return Ok(SubscriptionRow::from_row(row));
        }
        let names = client.query_typed(&self.schema().sql(SUBSCRIPTION_NAMES), &[]).await.map_err(failed)?;
        let names: Vec<String> = names.iter().map(|row| row.get(0)).collect();
        Err(subscription_unknown(operation, name, &names))
    }
}

fn from_future(what: &str) -> Error {
    let message = format!(
        "{what} is ahead of this database cluster (a restored dump?); stop all relays and run: postbox migrate rebase"
    );
    Error::new(ErrorKind::Mismatch, "subscribe", "cursor_from_future", message)
}
