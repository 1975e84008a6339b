//! Dead letters: dead events that have not been handed over yet.

use async_trait::async_trait;
use postbox_core::{BatchLimit, DeadLetter, DeadLetters, Error, Handover, Lease, Result};
use postbox_postgres_sql::{EVENT_COLUMNS, params};

use crate::PostgresStore;
use crate::classify::is_damage;
use crate::decode::Stored;
use crate::due::LANE_HELD;
use crate::log::micros;
use crate::payload::{fill_payloads, fitting};
use crate::session::Session;
use crate::subscription::SubscriptionRow;
use crate::window::ReadParams;

/// The first column after those of an event.
const COLUMN: usize = EVENT_COLUMNS.len();

/// Dead events that have not been handed over, longest-waiting first. Those of another tenant than
/// the subscription's have no event, as in `due`. Index: `delivery_letter`,
/// then primary keys. No lock.
const LETTERS_READ: &str = "
SELECT {columns}, d.attempts, d.replays, coalesce(d.code, ''), coalesce(d.error, ''), d.seq, d.key
FROM (SELECT * FROM {s}.delivery AS f
  WHERE f.subscription = $4 AND f.lane = $3 AND f.state = 'dead' AND f.letters <= f.replays AND f.letter_at <= statement_timestamp()
  ORDER BY f.letter_at, f.seq LIMIT $2) AS d
LEFT JOIN {log} AS l ON l.seq = d.seq AND {of_its_tenant}
ORDER BY d.letter_at, d.seq";

/// Locks the lane, as every writer of its rows does. Index: primary key. Locks the row.
const LETTERS_LOCK: &str = "
SELECT FROM {s}.lane AS l
WHERE l.subscription = $1 AND l.lane = $2 AND l.epoch = $3 AND l.lease_until > clock_timestamp() FOR UPDATE";

/// Records what became of the letters. A statement of its own after the lock, so that it sees what
/// was written before. Index: primary key of `delivery`. Locks the rows.
pub(crate) const LETTERS_WRITE: &str = "
UPDATE {s}.delivery AS d SET letters = CASE WHEN e.wait IS NULL THEN e.replays + 1 ELSE d.letters END,
  letter_at = CASE WHEN e.wait IS NULL THEN d.letter_at ELSE clock_timestamp() + e.wait * interval '1 microsecond' END
FROM unnest($3::bigint[], $4::int[], $5::bigint[]) AS e(seq, replays, wait) CROSS JOIN LATERAL {row_of_entry}
WHERE d.ctid = found.place AND d.lane = $2 AND d.state = 'dead' AND d.replays = e.replays AND d.letters <= e.replays";

#[async_trait]
impl DeadLetters for PostgresStore {
    async fn dead_letters(&self, lease: &Lease, limit: BatchLimit) -> Result<Vec<DeadLetter>> {
        let call = async |session: &Session| {
            let subscription = self.leased(session, lease).await?;
            let mut params = ReadParams::new(lease, &subscription, limit);
            match self.read_letters(session, lease, &subscription, &params).await {
                Err(error) if is_damage(&error) => {
                    params.leave_payloads_behind();
                    self.read_letters(session, lease, &subscription, &params).await
                }
                letters => letters,
            }
        };
        self.call("dead_letters", call).await
    }

    async fn hand_over(&self, lease: &Lease, handovers: &[Handover]) -> Result<()> {
        let seqs: Vec<i64> = handovers.iter().map(|it| it.seq.0).collect();
        let replays: Vec<i32> = handovers.iter().map(|it| i32::try_from(it.replay).unwrap_or(i32::MAX)).collect();
        let waits: Vec<Option<i64>> = handovers.iter().map(|it| it.again.map(micros)).collect();
        let call = async |session: &Session| {
            let subscription = self.leased(session, lease).await?;
            let [lock, write] = [LETTERS_LOCK, LETTERS_WRITE].map(|template| session.sql(template));
            let lane = i32::from(lease.lane);
            let of_lane = params![subscription.id, lane, lease.epoch];
            let of_letters = params![subscription.id, lane, seqs, replays, waits];
            let write = async |session: &Session| {
                if session.rows(&lock, &of_lane).await?.is_empty() {
                    return Err(Error::stale("hand_over"));
                }
                session.execute(&write, &of_letters).await.map(drop)
            };
            session.step_by_step(&self.inner.modes.relay, write).await
        };
        self.call("hand_over", call).await
    }
}

impl PostgresStore {
    async fn read_letters(
        &self,
        session: &Session,
        lease: &Lease,
        subscription: &SubscriptionRow,
        params: &ReadParams<'_>,
    ) -> Result<Vec<DeadLetter>> {
        let (held, letters) = (session.sql(LANE_HELD), session.log_sql(LETTERS_READ, &subscription.log));
        let of_lane = params![subscription.id, params.lane, lease.epoch];
        let of_rows = params![params.inline_bytes, params.rows, params.lane, subscription.id];
        let look = async |session: &Session| {
            let (held, rows) = futures::join!(session.rows(&held, &of_lane), session.rows(&letters, &of_rows));
            if held?.is_empty() { Err(Error::stale("dead_letters")) } else { rows }
        };
        let rows = session.at_once(&self.inner.modes.read, look).await?;
        let mut stored = Vec::with_capacity(rows.len());
        let mut reasons = Vec::with_capacity(rows.len());
        for row in &rows {
            let mut letter = Stored::of_delivery(row, COLUMN + 4);
            let count = |column: usize| row.get::<_, i32>(column).unsigned_abs();
            (letter.delivery.attempt, letter.delivery.replay) = (count(COLUMN), count(COLUMN + 1));
            stored.push(letter);
            reasons.push((row.get(COLUMN + 2), row.get(COLUMN + 3)));
        }
        stored.truncate(fitting(&stored, params.limit));
        fill_payloads(session, &subscription.log, &mut stored).await?;
        let letter = |(stored, (code, error)): (Stored, (String, String))| DeadLetter {
            delivery: stored.delivery,
            unreadable: stored.unreadable,
            code,
            error,
        };
        Ok(stored.into_iter().zip(reasons).map(letter).collect())
    }
}
