//! Leases: which relay drives a lane, until when by the database's clock, and under which epoch.

use std::time::Duration;

use postbox_core::kit::lanes_missing;
use postbox_core::{Acquired, Disposition, Error, ErrorKind, Lease, OwnerId, Pause, Result, SubscriptionName};
use postbox_postgres_sql::{REFERENCE_MISSING, cursor_foreign, params};
use tokio_postgres::Row;

use crate::PostgresStore;
use crate::log::micros;
use crate::session::Session;

/// Counts `owner` as alive for `$3` microseconds, and deletes replicas that have been gone for an
/// hour. Indexes: primary keys. Locks the row. Matched by name too, because the subscription may
/// have been renamed meanwhile.
const REPLICA_HEARTBEAT: &str = "
WITH gone AS (DELETE FROM {s}.replica WHERE subscription = $1 AND owner <> $2 AND alive_until < clock_timestamp() - interval '1 hour')
INSERT INTO {s}.replica (subscription, owner, alive_until, alive_ttl)
SELECT s.id, $2, clock_timestamp() + $3 * interval '1 microsecond', $3 FROM {s}.subscription AS s WHERE s.id = $1 AND s.name = $4
ON CONFLICT (subscription, owner) DO UPDATE SET alive_until = excluded.alive_until, alive_ttl = excluded.alive_ttl";

/// Deletes a replica that leaves. Indexes: primary key, and the unique name. Locks the row.
const REPLICA_LEAVES: &str = "DELETE FROM {s}.replica WHERE owner = $2 AND subscription = (SELECT s.id FROM {s}.subscription AS s WHERE s.name = $1)";

/// Whether the subscription is paused, how many relays are alive, and what is wrong with its lanes:
/// how many are missing, and whether a cursor belongs to another cluster. A heartbeat is valid
/// under the same rule as a lease. Indexes: primary keys.
const SUBSCRIPTION_STATE: &str = "
SELECT s.paused_by, s.paused_why, s.paused_until, {is_paused},
  (SELECT count(*) FROM {s}.replica AS r WHERE r.subscription = s.id AND r.alive_until > clock_timestamp()
    AND r.alive_until <= clock_timestamp() + interval '1 second' + r.alive_ttl * interval '1 microsecond'),
  s.lanes - (SELECT count(*) FROM {s}.lane AS l WHERE l.subscription = s.id),
  EXISTS (SELECT FROM {s}.lane AS l WHERE l.subscription = s.id AND l.cluster <> (SELECT {s}.cluster_id())), s.lanes::int
FROM {s}.subscription AS s WHERE s.id = $1 AND s.name = $2";

/// Takes the first free lane, or one that belongs to the caller without its knowledge, because the
/// answer to its grant was lost. Index: primary key of `lane`. Locks this one row; lanes locked by
/// others are skipped.
///
/// A lease is over at its end. It is also over if its end lies further ahead than its length, by
/// more than a second: then it was written before the clock was set back. A smaller step is a time
/// server's correction, and must not cost anyone a valid lease. `clock_timestamp()` rather than
/// `now()`, because the transaction may have waited, and a lease counts from the grant. A cursor of
/// another cluster is not granted; [`SUBSCRIPTION_STATE`] reports it.
///
/// The epoch is the time in microseconds, or one more than the last. So no two grants of a lane
/// have the same one, even if a failover lost the first, and no two lanes of different databases.
///
/// If another owner's lease expired, that owner has crashed, which is counted. The count starts
/// again if it held the lane for long: it renewed after ten times the length of its lease
/// (`Lease::LONG`).
const LANE_ACQUIRE: &str = "
UPDATE {s}.lane AS n SET owner = $2, epoch = greatest(epoch + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint),
  lease_until = clock_timestamp() + $3 * interval '1 microsecond', lease_ttl = $3,
  granted_at = clock_timestamp(),
  crashes = {crashes_in_a_row} + CASE WHEN lease_until IS NULL OR coalesce(owner = $2, true) THEN 0 ELSE 1 END
WHERE subscription = $1 AND lane = (
  SELECT l.lane FROM {s}.lane AS l
  WHERE l.subscription = $1 AND l.cluster = (SELECT {s}.cluster_id())
    AND (l.lease_until IS NULL OR l.lease_until <= clock_timestamp()
      OR l.lease_until > clock_timestamp() + interval '1 second' + l.lease_ttl * interval '1 microsecond'
      OR (l.owner = $2 AND l.lane <> ALL ($5::smallint[])))
    AND EXISTS (SELECT FROM {s}.subscription AS s WHERE s.id = $1 AND s.name = $4 AND NOT {is_paused})
  ORDER BY l.lane LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING lane::int, epoch, crashes";

/// Makes events due that wait for a call of the former holder (`Disposition::IN_FLIGHT`). Index:
/// `delivery_in_flight`. Locks the rows.
///
/// This is a separate statement after the grant, so that it sees a settlement that committed just
/// before. The lane just granted is the one whose row this transaction wrote (`xmin`): `$2` may
/// hold other lanes, with calls in flight.
const DELIVERY_MAKE_DUE: &str = "
UPDATE {s}.delivery AS d SET due_at = clock_timestamp(), updated_at = clock_timestamp()
FROM {s}.lane AS l
WHERE l.subscription = $1 AND l.owner = $2 AND l.xmin = pg_current_xact_id()::xid
  AND d.subscription = l.subscription AND d.lane = l.lane AND d.code = 'in_flight' AND d.state = 'retrying' AND d.due_at > clock_timestamp()";

/// Counts a crash against events that the former holder sent alone and recorded no outcome for: it
/// crashed while sending them (`Disposition::ALONE`, `RELAY_CRASHED`). Index: `delivery_in_flight`.
/// Locks the rows. Runs after the grant and for the same lane, as [`DELIVERY_MAKE_DUE`] does.
const DELIVERY_COUNT_CRASH: &str = "
UPDATE {s}.delivery AS d SET crashes = least(d.crashes, 1000000) + 1, code = 'relay_crashed', error = $3, updated_at = clock_timestamp()
FROM {s}.lane AS l
WHERE l.subscription = $1 AND l.owner = $2 AND l.xmin = pg_current_xact_id()::xid
  AND d.subscription = l.subscription AND d.lane = l.lane AND d.code = 'alone' AND d.state = 'retrying'";

/// Extends the lease, unless it was lost or the subscription is paused. Index: primary key. Locks
/// the row.
const LANE_RENEW: &str = "
UPDATE {s}.lane SET lease_until = clock_timestamp() + $4 * interval '1 microsecond', lease_ttl = $4
WHERE subscription = $1 AND lane = $2 AND epoch = $3 AND lease_until > clock_timestamp()
  AND NOT EXISTS (SELECT FROM {s}.subscription AS s WHERE s.id = $1 AND {is_paused})";

/// Gives the lane back, and stores its count of crashes. Index: primary key. Locks the row.
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
    let (lane, state) = match session.at_once(&store.inner.modes.relay, take).await {
        // The subscription was removed while the heartbeat was written.
        Err(error) if error.code() == REFERENCE_MISSING => (Vec::new(), Vec::new()),
        taken => taken?,
    };
    let Some(state) = state.first() else {
        store.reload(session, name).await?;
        let message = format!("subscription {name} was created again; its lanes are requested again");
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
        // A pause that began between the two statements is not reported together with a lease.
        paused: pause_of(state, 0).filter(|_| lease.is_none()),
        lease,
        replicas: u16::try_from(state.get::<_, i64>(4).max(1)).unwrap_or(u16::MAX),
        lanes: u16::try_from(state.get::<_, i32>(7)).unwrap_or(1),
    })
}

/// Returns the pause in force from four columns: by whom, why, until when, and whether it is in
/// force.
pub(crate) fn pause_of(row: &Row, at: usize) -> Option<Pause> {
    let by = row.get::<_, Option<String>>(at).filter(|_| row.get(at + 3))?;
    Some(Pause { by, why: row.get::<_, Option<String>>(at + 1).unwrap_or_default(), until: row.get(at + 2) })
}

/// `mode` comes with the session: [`PostgresStore::renewal_session`].
pub(crate) async fn renew(
    store: &PostgresStore,
    session: &Session,
    mode: &str,
    lease: &Lease,
    ttl: Duration,
) -> Result<()> {
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
    match session.at_once(mode, hold).await? {
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
    // It holds no lock while it waits, and a lease that runs out instead counts as a crash.
    session.at_once(&store.inner.modes.write, give_back).await?;
    // Relays in this process that wait for a free lane need not wait for their next poll.
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
    session.at_once(&store.inner.modes.relay, leave).await?;
    // Relays in this process take their larger share without waiting for their next poll.
    store.wake();
    Ok(())
}
