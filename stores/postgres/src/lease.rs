//! Leases: who drives a lane, until when by the database's clock, and with which epoch.

use std::time::Duration;

use postbox_core::kit::lanes_missing;
use postbox_core::{Acquired, Disposition, Error, ErrorKind, Lease, OwnerId, Pause, Result, SubscriptionName};
use tokio_postgres::Row;

use crate::PostgresStore;
use crate::classify::{REFERENCE_MISSING, cursor_foreign};
use crate::log::micros;
use crate::params::params;
use crate::session::Session;

/// Counts `owner` as alive for `$3` and takes out who has been gone for an hour. Indexes: primary
/// keys. Locks the row. By the name too: it may be another one by now.
const REPLICA_HEARTBEAT: &str = "
WITH gone AS (DELETE FROM {s}.replica WHERE subscription = $1 AND owner <> $2 AND alive_until < clock_timestamp() - interval '1 hour')
INSERT INTO {s}.replica (subscription, owner, alive_until, alive_ttl)
SELECT s.id, $2, clock_timestamp() + $3 * interval '1 microsecond', $3 FROM {s}.subscription AS s WHERE s.id = $1 AND s.name = $4
ON CONFLICT (subscription, owner) DO UPDATE SET alive_until = excluded.alive_until, alive_ttl = excluded.alive_ttl";

/// By the primary keys; the name is unique. Locks the row.
const REPLICA_LEAVES: &str = "DELETE FROM {s}.replica WHERE owner = $2 AND subscription = (SELECT s.id FROM {s}.subscription AS s WHERE s.name = $1)";

/// Whether the subscription is paused, how many relays are alive, and what is wrong with its lanes:
/// how many are not there, and whether a cursor is one of another cluster. A heartbeat counts as a
/// lease does. Indexes: primary keys.
const SUBSCRIPTION_STATE: &str = "
SELECT s.paused_by, s.paused_why, s.paused_until, {is_paused},
  (SELECT count(*) FROM {s}.replica AS r WHERE r.subscription = s.id AND r.alive_until > clock_timestamp()
    AND r.alive_until <= clock_timestamp() + interval '1 second' + r.alive_ttl * interval '1 microsecond'),
  s.lanes - (SELECT count(*) FROM {s}.lane AS l WHERE l.subscription = s.id),
  EXISTS (SELECT FROM {s}.lane AS l WHERE l.subscription = s.id AND l.cluster <> (SELECT {s}.cluster_id())), s.lanes::int
FROM {s}.subscription AS s WHERE s.id = $1 AND s.name = $2";

/// Takes the first free lane, or one that is ours without the caller knowing it: the answer to its
/// grant was lost. Index: primary key of `lane`. Locks the one row; lanes locked by somebody else
/// are passed over.
///
/// A lease is over at its end, and where its end lies further ahead than its length: then it was
/// written before the clock went back. By more than a second: less is a time server's correction,
/// for which nobody shall lose a living lease. `clock_timestamp()`, not `now()`: the transaction
/// may have waited, and a lease counts from the grant. A cursor of another cluster is not granted;
/// [`SUBSCRIPTION_STATE`] says so.
///
/// Another owner whose lease ran out has vanished; after it held the lane for long, the crashes
/// before count no more: it renewed when ten lengths of its lease were over (`Lease::LONG`).
const LANE_ACQUIRE: &str = "
UPDATE {s}.lane SET owner = $2, epoch = epoch + 1, lease_until = clock_timestamp() + $3 * interval '1 microsecond', lease_ttl = $3,
  granted_at = clock_timestamp(), crashes = CASE WHEN lease_until IS NULL OR coalesce(owner = $2, true) THEN crashes
    WHEN lease_until > granted_at + 11 * lease_ttl * interval '1 microsecond' THEN 1 ELSE crashes + 1 END
WHERE subscription = $1 AND lane = (
  SELECT l.lane FROM {s}.lane AS l
  WHERE l.subscription = $1 AND l.cluster = (SELECT {s}.cluster_id())
    AND (l.lease_until IS NULL OR l.lease_until <= clock_timestamp()
      OR l.lease_until > clock_timestamp() + interval '1 second' + l.lease_ttl * interval '1 microsecond'
      OR (l.owner = $2 AND l.lane <> ALL ($5::smallint[])))
    AND EXISTS (SELECT FROM {s}.subscription AS s WHERE s.id = $1 AND s.name = $4 AND NOT {is_paused})
  ORDER BY l.lane LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING lane::int, epoch, crashes";

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

/// What the former holder sent alone and did not write of again, it ended with
/// (`Disposition::ALONE`, `RELAY_CRASHED`). Index: `delivery_in_flight`. Locks the rows. After the
/// grant as [`DELIVERY_MAKE_DUE`] is, and for the same lane.
const DELIVERY_COUNT_CRASH: &str = "
UPDATE {s}.delivery AS d SET crashes = d.crashes + 1, code = 'relay_crashed', error = $3, updated_at = clock_timestamp()
FROM {s}.lane AS l
WHERE l.subscription = $1 AND l.owner = $2 AND l.xmin = pg_current_xact_id()::xid
  AND d.subscription = l.subscription AND d.lane = l.lane AND d.code = 'alone' AND d.state = 'retrying'";

/// Holds the lane, unless it was lost or the subscription is paused. Index: primary key. Locks the
/// row.
const LANE_RENEW: &str = "
UPDATE {s}.lane SET lease_until = clock_timestamp() + $4 * interval '1 microsecond', lease_ttl = $4
WHERE subscription = $1 AND lane = $2 AND epoch = $3 AND lease_until > clock_timestamp()
  AND NOT EXISTS (SELECT FROM {s}.subscription AS s WHERE s.id = $1 AND {is_paused})";

/// Gives the lane back. Index: primary key. Locks the row.
const LANE_RELEASE: &str = "
UPDATE {s}.lane SET lease_until = NULL, crashes = $4 WHERE subscription = $1 AND lane = $2 AND epoch = $3";

pub(crate) async fn acquire(
    store: &PostgresStore,
    session: &Session,
    name: &SubscriptionName,
    owner: &OwnerId,
    held: &[u16],
    ttl: Duration,
) -> Result<Acquired> {
    let subscription = store.subscription(session, name).await?;
    let [heartbeat, acquire, make_due, count_crash, state] =
        [REPLICA_HEARTBEAT, LANE_ACQUIRE, DELIVERY_MAKE_DUE, DELIVERY_COUNT_CRASH, SUBSCRIPTION_STATE]
            .map(|template| session.sql(template));
    let held: Vec<i16> = held.iter().map(|lane| lane.cast_signed()).collect();
    let (owner_name, ttl_micros) = (owner.as_str(), micros(ttl));
    let name_text = name.as_str();
    let params = params![subscription.id, owner_name, ttl_micros, name_text, held];
    let crashed = params![subscription.id, owner_name, Disposition::RELAY_CRASHED_ERROR];
    let named = params![subscription.id, name_text];
    let take = async |session: &Session| {
        let (noted, lane, made_due, counted, state) = futures::join!(
            session.execute(&heartbeat, &params[..4]),
            session.rows(&acquire, &params),
            session.execute(&make_due, &params[..2]),
            session.execute(&count_crash, &crashed),
            session.rows(&state, &named),
        );
        noted?;
        let lane = lane?;
        made_due?;
        counted?;
        Ok((lane, state?))
    };
    let (lane, state) = match session.at_once(&store.inner.modes.write, take).await {
        // The subscription went while the heartbeat was written.
        Err(error) if error.code() == REFERENCE_MISSING => (Vec::new(), Vec::new()),
        taken => taken?,
    };
    let Some(state) = state.first() else {
        store.reload(session, name).await?;
        let message = format!("subscription {name} was made anew; its lanes are asked for again");
        return Err(Error::new(ErrorKind::Unavailable, "acquire", "subscription_changed", message));
    };
    if state.get(6) {
        return Err(cursor_foreign("acquire"));
    }
    if state.get::<_, i64>(5) > 0 {
        return Err(lanes_missing(name));
    }
    let lease = lane.first().map(|row| Lease {
        subscription: name.clone(),
        log: subscription.log.clone(),
        lane: u16::try_from(row.get::<_, i32>(0)).unwrap_or_default(),
        epoch: row.get(1),
        owner: owner.clone(),
        crashes: row.get::<_, i32>(2).unsigned_abs(),
    });
    if let Some(lease) = &lease {
        store.lane(lease).begin(lease.epoch);
    }
    Ok(Acquired {
        // One set between the two statements says nothing beside a lease.
        paused: pause_of(state, 0).filter(|_| lease.is_none()),
        lease,
        replicas: u16::try_from(state.get::<_, i64>(4).max(1)).unwrap_or(u16::MAX),
        lanes: u16::try_from(state.get::<_, i32>(7)).unwrap_or(1),
    })
}

/// The pause in force, from the columns who, why, until and whether it is.
pub(crate) fn pause_of(row: &Row, at: usize) -> Option<Pause> {
    let by = row.get::<_, Option<String>>(at).filter(|_| row.get(at + 3))?;
    Some(Pause { by, why: row.get::<_, Option<String>>(at + 1).unwrap_or_default(), until: row.get(at + 2) })
}

pub(crate) async fn renew(store: &PostgresStore, session: &Session, lease: &Lease, ttl: Duration) -> Result<()> {
    let subscription = store.leased(session, lease).await?;
    let (heartbeat, renew) = (session.sql(REPLICA_HEARTBEAT), session.sql(LANE_RENEW));
    let (lane, owner, ttl_micros) = (lease.lane.cast_signed(), lease.owner.as_str(), micros(ttl));
    let held = params![subscription.id, lane, lease.epoch, ttl_micros];
    let name = lease.subscription.as_str();
    let owned = params![subscription.id, owner, ttl_micros, name];
    let hold = async |session: &Session| {
        let (renewed, noted) = futures::join!(session.execute(&renew, &held), session.execute(&heartbeat, &owned));
        let renewed = renewed?;
        noted.map(|_| renewed)
    };
    match session.at_once(&store.inner.modes.write, hold).await? {
        0 => Err(Error::stale("renew")),
        _ => Ok(()),
    }
}

pub(crate) async fn release(store: &PostgresStore, session: &Session, lease: &Lease) -> Result<()> {
    let subscription = match store.leased(session, lease).await {
        Err(error) if error.is_stale() => return Ok(()),
        subscription => subscription?,
    };
    store.lane(lease).forget(lease.epoch);
    let (release, lane) = (session.sql(LANE_RELEASE), lease.lane.cast_signed());
    let crashes = i32::try_from(lease.crashes).unwrap_or(i32::MAX);
    let held = params![subscription.id, lane, lease.epoch, crashes];
    let give_back = async |session: &Session| session.execute(&release, &held).await;
    session.at_once(&store.inner.modes.write, give_back).await?;
    // Whoever waits for a free lane in this process need not wait for its next poll.
    store.wake();
    Ok(())
}

pub(crate) async fn leave(
    store: &PostgresStore,
    session: &Session,
    subscription: &SubscriptionName,
    owner: &OwnerId,
) -> Result<()> {
    let (leaves, name, owner) = (session.sql(REPLICA_LEAVES), subscription.as_str(), owner.as_str());
    let of = params![name, owner];
    let leave = async |session: &Session| session.execute(&leaves, &of).await;
    session.at_once(&store.inner.modes.write, leave).await?;
    // Relays in this process need not wait for their next poll to take their larger share.
    store.wake();
    Ok(())
}
