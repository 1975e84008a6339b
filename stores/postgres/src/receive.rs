//! The inbox's write side: stores each message from outside once.

use std::time::Duration;

use async_trait::async_trait;
use futures::future::try_join_all;
use jiff::Timestamp;
use postbox_core::{Error, ErrorKind, EventId, Inbound, LogName, Receive, Received, Result, lock};
use postbox_postgres_sql::{Columns, Param, params};

use crate::PostgresStore;
use crate::log::micros;
use crate::session::Session;

/// Stores the event of a message with its receipt, or returns what is known of the message: see
/// `0001_receive.sql`. Index: primary key of `receipt`. Locks its row.
const LOG_RECEIVE: &str =
    "SELECT {s}.{name}_receive($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)";

/// The same for several messages.
const LOG_RECEIVE_MANY: &str = "SELECT {s}.{name}_receive_many($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20)";

/// Deletes the oldest rows of a table, a thousand at a time, from the place where the last step
/// ended: while a snapshot is held, the index keeps what earlier steps deleted. Returns how many
/// and how far. Index: that of the time. Locks the rows, and skips those that others have locked.
macro_rules! forget {
    ($table:literal, $time:literal, $($key:literal),+) => {
        concat!(
            "WITH gone AS (DELETE FROM {s}.", $table, " AS t
USING (SELECT ", $($key, ", ",)+ $time, " FROM {s}.", $table, "
  WHERE ", $time, " <= statement_timestamp() - $1 * interval '1 microsecond' AND ", $time, " >= coalesce($2, '-infinity')
  ORDER BY ", $time, " LIMIT 1000 FOR UPDATE SKIP LOCKED) AS old
WHERE true", $(" AND t.", $key, " = old.", $key,)+ " RETURNING t.", $time, " AS at)
SELECT count(*), max(at) FROM gone"
        )
    };
}

/// Forgets receipts, ids of `once`, and records of conflicts, which expire like the ids they belong
/// to. Indexes: `receipt_received`, `once_seen`, `conflict_last`.
const FORGET: [&str; 3] = [
    forget!("receipt", "received_at", "source", "tenant", "message_id"),
    forget!("once", "seen_at", "source", "tenant", "message_id"),
    forget!("conflict", "last_at", "source", "tenant", "message_id", "digest_refused"),
];

/// How far the present sweep is in each table of [`FORGET`]; `None`: it begins with the oldest.
pub(crate) type Forgotten = [Option<Timestamp>; FORGET.len()];

#[async_trait]
impl Receive for PostgresStore {
    async fn receive_many(&self, log: &LogName, inbound: &[Inbound]) -> Result<Vec<Received>> {
        inbound.iter().try_for_each(Inbound::validate)?;
        let Some(events) = Columns::of(log, inbound.iter().map(|inbound| &inbound.event))? else {
            return Ok(Vec::new());
        };
        // A single statement is its own transaction: a webhook waits for one answer, not also for
        // those of BEGIN and COMMIT.
        let receive = async |session: &Session| match inbound {
            [only] => receive_one(session, log, only, &events).await,
            several => receive_several(session, log, several, &events).await,
        };
        let verdicts = match self.call("receive", receive).await {
            Err(error) => return Err(self.why_refused(log, error).await),
            Ok(verdicts) => verdicts,
        };
        let received: Result<Vec<Received>> =
            verdicts.iter().zip(events.event_ids()).map(|(verdict, id)| judge(verdict, id)).collect();
        if verdicts.iter().any(|verdict| verdict == "accepted") {
            self.wake();
        }
        received
    }

    async fn forget(&self, older_than: Duration) -> Result<u64> {
        let (age, after) = (micros(older_than), *lock(&self.inner.forgotten));
        let forgotten = self
            .call("forget", async |session: &Session| {
                let sqls = FORGET.map(|template| session.sql(template));
                let forget = async |session: &Session| {
                    let steps = sqls.iter().zip(after).map(async |(sql, after)| {
                        let row = session.row(sql, &params![age, after]).await?;
                        Ok((row.get::<_, i64>(0).unsigned_abs(), row.get::<_, Option<Timestamp>>(1)))
                    });
                    try_join_all(steps).await
                };
                session.at_once(&self.inner.modes.write, forget).await
            })
            .await?;
        let count = forgotten.iter().map(|(count, _)| count).sum();
        let far = |nth: usize| forgotten[nth].1.or(after[nth]);
        // Nothing was found: the sweep is over.
        *lock(&self.inner.forgotten) = if count == 0 { Forgotten::default() } else { std::array::from_fn(far) };
        Ok(count)
    }
}

async fn receive_one(session: &Session, log: &LogName, inbound: &Inbound, event: &Columns<'_>) -> Result<Vec<String>> {
    let (source, digest) = (inbound.source.as_str(), inbound.digest.as_slice());
    let mut params: Vec<Param<'_>> = params![source, inbound.message_id, digest].into();
    params.extend(event.params());
    Ok(vec![session.row(&session.log_sql(LOG_RECEIVE, log), &params).await?.get(0)])
}

async fn receive_several(
    session: &Session,
    log: &LogName,
    inbound: &[Inbound],
    events: &Columns<'_>,
) -> Result<Vec<String>> {
    let sources: Vec<&str> = inbound.iter().map(|message| message.source.as_str()).collect();
    let message_ids: Vec<&str> = inbound.iter().map(|message| message.message_id.as_str()).collect();
    let digests: Vec<&[u8]> = inbound.iter().map(|message| message.digest.as_slice()).collect();
    let (ranks, repeats) = by_identity(inbound);
    let mut params: Vec<Param<'_>> = params![ranks, repeats, sources, message_ids, digests].into();
    params.extend(events.params());
    Ok(session.row(&session.log_sql(LOG_RECEIVE_MANY, log), &params).await?.get(0))
}

/// Returns the rank of each message by its identity, and whether the same identity occurs earlier
/// in `inbound`. Every call locks in the order of ranks. Two calls with the same messages then wait
/// one for the other, and never deadlock.
fn by_identity(inbound: &[Inbound]) -> (Vec<i32>, Vec<bool>) {
    let identity = |place: usize| {
        let message = &inbound[place];
        (message.source.as_str(), message.event.tenant.as_deref().unwrap_or_default(), message.message_id.as_str())
    };
    let mut places: Vec<usize> = (0..inbound.len()).collect();
    places.sort_by_key(|place| identity(*place));
    let (mut ranks, mut repeats) = (vec![0; places.len()], vec![false; places.len()]);
    for (rank, place) in (0..).zip(&places) {
        ranks[*place] = rank;
    }
    for pair in places.windows(2) {
        repeats[pair[1]] = identity(pair[0]) == identity(pair[1]);
    }
    (ranks, repeats)
}

fn judge(verdict: &str, id: EventId) -> Result<Received> {
    match verdict {
        "accepted" => Ok(Received::Accepted(id)),
        "duplicate" => Ok(Received::Duplicate),
        "conflict" => Ok(Received::Conflict),
        _ => Err(Error::new(ErrorKind::Internal, "receive", "store_protocol", "the database gave no verdict")),
    }
}
