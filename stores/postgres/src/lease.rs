//! Leases: who drives a lane, until when by the database's clock, and with which epoch.

use std::time::Duration;

use postbox_core::kit::lanes_missing;
use postbox_core::{Acquired, Error, ErrorKind, Lease, OwnerId, Pause, Result, SubscriptionName};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};

use crate::PostgresStore;
use crate::classify::{classify, cursor_foreign};
use crate::log::micros;

/// Counts `owner` as alive for `$3` and takes out who has been gone for an hour. Index: primary key
/// of `replica`. Locks the row.
const REPLICA_HEARTBEAT: &str = "
WITH gone AS (DELETE FROM {s}.replica WHERE subscription = $1 AND owner <> $2 AND alive_until < clock_timestamp() - interval '1 hour')
INSERT INTO {s}.replica (subscription, owner, alive_until, alive_ttl) VALUES ($1, $2, clock_timestamp() + $3 * interval '1 microsecond', $3)
ON CONFLICT (subscription, owner) DO UPDATE SET alive_until = excluded.alive_until, alive_ttl = excluded.alive_ttl";

/// Whether the subscription is paused, how many relays are alive, and what is wrong with its lanes:
/// how many are not there, and whether a cursor is one of another cluster. A heartbeat counts as a
/// lease does. Indexes: primary keys.
const SUBSCRIPTION_STATE: &str = "
SELECT s.paused_by, s.paused_why, s.paused_until,
  (SELECT count(*) FROM {s}.replica AS r WHERE r.subscription = s.id AND r.alive_until > clock_timestamp()
    AND r.alive_until <= clock_timestamp() + interval '1 second' + r.alive_ttl * interval '1 microsecond'),
  {is_paused}, s.revision, s.lanes - (SELECT count(*) FROM {s}.lane AS l WHERE l.subscription = s.id),
  EXISTS (SELECT FROM {s}.lane AS l WHERE l.subscription = s.id AND l.cluster <> (SELECT {s}.cluster_id()))
FROM {s}.subscription AS s WHERE s.id = $1";

/// Takes the first free lane, or one that is ours without the caller knowing it: the answer to its
/// grant was lost. Index: primary key of `lane`. Locks the one row; lanes locked by somebody else
/// are passed over.
///
/// A lease is over at its end, and where its end lies further ahead than its length: then it was
/// written before the clock went back. By more than a second: less is a time server's correction,
/// for which nobody shall lose a living lease. `clock_timestamp()`, not `now()`: the transaction
/// may have waited, and a lease counts from the grant. A cursor of another cluster is not granted;
/// [`SUBSCRIPTION_STATE`] says so.
const LANE_ACQUIRE: &str = "
UPDATE {s}.lane SET owner = $2, epoch = epoch + 1, lease_until = clock_timestamp() + $3 * interval '1 microsecond', lease_ttl = $3
WHERE subscription = $1 AND lane = (
  SELECT l.lane FROM {s}.lane AS l
  WHERE l.subscription = $1 AND l.cluster = (SELECT {s}.cluster_id())
    AND (l.lease_until IS NULL OR l.lease_until <= clock_timestamp()
      OR l.lease_until > clock_timestamp() + interval '1 second' + l.lease_ttl * interval '1 microsecond'
      OR (l.owner = $2 AND l.lane <> ALL ($4::smallint[])))
    AND NOT EXISTS (SELECT FROM {s}.subscription AS s WHERE s.id = $1 AND {is_paused})
  ORDER BY l.lane LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING lane::int, epoch";

/// What waits for a call of the former holder is due now (`Disposition::IN_FLIGHT`). Index:
/// `delivery_in_flight`. Locks the rows.
///
/// A statement after the grant and not a part of it, so that it sees a settlement that committed
/// just before. The lane just granted is the one whose row this transaction wrote: `$2` may hold
/// others, with calls in flight.
const DELIVERY_MAKE_DUE: &str = "
UPDATE {s}.delivery AS d SET due_at = clock_timestamp(), updated_at = clock_timestamp()
FROM {s}.lane AS l
WHERE l.subscription = $1 AND l.owner = $2 AND l.xmin = pg_current_xact_id()::xid
  AND d.subscription = l.subscription AND d.lane = l.lane AND d.code = 'in_flight' AND d.state = 'retrying' AND d.due_at > clock_timestamp()";

/// Holds the lane, unless it was lost or the subscription is paused. Index: primary key. Locks the
/// row.
const LANE_RENEW: &str = "
UPDATE {s}.lane SET lease_until = clock_timestamp() + $4 * interval '1 microsecond', lease_ttl = $4
WHERE subscription = $1 AND lane = $2 AND epoch = $3 AND lease_until > clock_timestamp()
  AND NOT EXISTS (SELECT FROM {s}.subscription AS s WHERE s.id = $1 AND {is_paused})";

/// Gives the lane back. Index: primary key. Locks the row.
const LANE_RELEASE: &str = "
UPDATE {s}.lane SET lease_until = NULL WHERE subscription = $1 AND lane = $2 AND epoch = $3";

pub(crate) async fn acquire(
    store: &PostgresStore,
    name: &SubscriptionName,
    owner: &OwnerId,
    held: &[u16],
    ttl: Duration,
) -> Result<Acquired> {
    let subscription = store.subscription("acquire", name).await?;
    let session = store.session("acquire").await?;
    let schema = store.schema();
    let (id, ttl_micros) = (subscription.id, micros(ttl));
    let (heartbeat, acquire, make_due, state) = (
        schema.sql(REPLICA_HEARTBEAT),
        schema.sql(LANE_ACQUIRE),
        schema.sql(DELIVERY_MAKE_DUE),
        schema.sql(SUBSCRIPTION_STATE),
    );
    let owner_name = owner.as_str();
    let held: Vec<i16> = held.iter().map(|lane| lane.cast_signed()).collect();
    let owned: [(&(dyn ToSql + Sync), Type); 4] =
        [(&id, Type::INT4), (&owner_name, Type::TEXT), (&ttl_micros, Type::INT8), (&held, Type::INT2_ARRAY)];
    let take = async |client: &Client| {
        let (noted, lane, made_due, state) = futures::join!(
            client.execute_typed(&heartbeat, &owned[..3]),
            client.query_typed(&acquire, &owned),
            client.execute_typed(&make_due, &owned[..2]),
            client.query_typed_opt(&state, &owned[..1]),
        );
        noted?;
        let lane = lane?;
        made_due?;
        Ok((lane, state?))
    };
    let taken = session.transact(&store.inner.modes.write, take).await;
    let gone = |error: &tokio_postgres::Error| error.code() == Some(&SqlState::FOREIGN_KEY_VIOLATION);
    let (lane, state) = match taken {
        Ok(taken) => taken,
        // The heartbeat refers to a subscription that is not there any more.
        Err(error) if gone(&error) => (Vec::new(), None),
        Err(error) => return Err(classify("acquire", &error)),
    };
    let Some(state) = state else {
        let session = store.session("acquire").await?;
        let reloaded = store.reload("acquire", session.client(), name).await;
        session.end_after(reloaded.is_ok());
        reloaded?;
        let message = format!("subscription {name} was made anew; its lanes are asked for again");
        return Err(Error::new(ErrorKind::Unavailable, "acquire", "subscription_changed", message));
    };
    if state.get(7) {
        return Err(cursor_foreign("acquire"));
    }
    if state.get::<_, i64>(6) > 0 {
        return Err(lanes_missing(name));
    }
    let lease = lane.first().map(|row| Lease {
        subscription: name.clone(),
        log: subscription.log.clone(),
        lane: u16::try_from(row.get::<_, i32>(0)).unwrap_or_default(),
        epoch: row.get(1),
        owner: owner.clone(),
    });
    if let Some(lease) = &lease {
        store.lane(lease).begin(lease.epoch);
    }
    let replicas: i64 = state.get(3);
    let paused = Some(&state).filter(|row| row.get(4)).and_then(|row| {
        let by: Option<String> = row.get(0);
        let (why, until) = (row.get::<_, Option<String>>(1), row.get(2));
        by.map(|by| Pause { until, by, why: why.unwrap_or_default() })
    });
    Ok(Acquired {
        // One set between the two statements says nothing beside a lease.
        paused: paused.filter(|_| lease.is_none()),
        lease,
        replicas: u16::try_from(replicas.max(1)).unwrap_or(u16::MAX),
        lanes: subscription.lanes,
    })
}

pub(crate) async fn renew(store: &PostgresStore, lease: &Lease, ttl: Duration) -> Result<()> {
    let subscription = store.subscription("renew", &lease.subscription).await?;
    let session = store.session("renew").await?;
    let (heartbeat, renew) = (store.schema().sql(REPLICA_HEARTBEAT), store.schema().sql(LANE_RENEW));
    let (id, lane, ttl_micros) = (subscription.id, lease.lane.cast_signed(), micros(ttl));
    let owner = lease.owner.as_str();
    let held: [(&(dyn ToSql + Sync), Type); 4] =
        [(&id, Type::INT4), (&lane, Type::INT2), (&lease.epoch, Type::INT8), (&ttl_micros, Type::INT8)];
    let owned: [(&(dyn ToSql + Sync), Type); 3] = [(&id, Type::INT4), (&owner, Type::TEXT), (&ttl_micros, Type::INT8)];
    let hold = async |client: &Client| {
        let (renewed, noted) =
            futures::join!(client.execute_typed(&renew, &held), client.execute_typed(&heartbeat, &owned));
        let renewed = renewed?;
        noted.map(|_| renewed)
    };
    let renewed = session.transact(&store.inner.modes.write, hold).await;
    match renewed.map_err(|error| classify("renew", &error))? {
        0 => Err(Error::stale("renew")),
        _ => Ok(()),
    }
}

pub(crate) async fn release(store: &PostgresStore, lease: &Lease) -> Result<()> {
    let subscription = store.subscription("release", &lease.subscription).await?;
    store.lane(lease).forget(lease.epoch);
    let session = store.session("release").await?;
    let release = store.schema().sql(LANE_RELEASE);
    let lane = lease.lane.cast_signed();
    let held: [(&(dyn ToSql + Sync), Type); 3] =
        [(&subscription.id, Type::INT4), (&lane, Type::INT2), (&lease.epoch, Type::INT8)];
    let give_back = async |client: &Client| client.execute_typed(&release, &held).await;
    let released = session.transact(&store.inner.modes.write, give_back).await;
    released.map_err(|error| classify("release", &error))?;
    // Whoever waits for a free lane in this process need not wait for its next poll.
    store.wake();
    Ok(())
}
