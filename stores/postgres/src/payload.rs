//! Payloads that were not read with their rows, and how many rows fit into a batch.

use std::collections::HashMap;
use std::pin::pin;

use bytes::{Bytes, BytesMut};
use futures::TryStreamExt as _;
use postbox_core::kit::BatchLimiter;
use postbox_core::{BatchLimit, Error, LogName, Result, Unreadable};
use postbox_postgres_sql::params;

use crate::classify::is_damage;
use crate::decode::{Raw, Stored};
use crate::session::Session;

/// Larger payloads than this are fetched in pieces of this size. 1 MiB keeps the driver's buffers
/// small beside a payload of 16 MiB.
const SLICE_BYTES: usize = 1024 * 1024;

/// The payloads that were left out. By id, too: after a failover that lost commits, another event
/// may have this `seq` by now. Index: primary key of the log.
const PAYLOAD_READ: &str = "SELECT seq, id, payload, payload_bytes FROM {log} WHERE seq {=} ANY ($1)";

/// A piece of one payload, by id, too. Index: primary key of the log.
const PAYLOAD_SLICE: &str = "SELECT pg_catalog.substr(coalesce(payload_bytes, pg_catalog.textsend(payload)), $2, $3) FROM {log} WHERE seq {=} $1 AND id {=} $4";

/// Returns how many of the rows, in order, the caller can hold.
pub(crate) fn fitting(rows: &[Stored], limit: BatchLimit) -> usize {
    let mut limiter = BatchLimiter::new(limit);
    rows.iter().take_while(|row| limiter.take(row.size())).count()
}

/// Fetches the payloads that were left out. If one is gone by now, or the server cannot return it,
/// only its own event becomes unreadable.
pub(crate) async fn fill_payloads(session: &Session, log: &LogName, rows: &mut [Stored]) -> Result<()> {
    let whole: Vec<i64> =
        rows.iter().filter(|row| row.is_behind() && row.behind <= SLICE_BYTES).map(Stored::seq).collect();
    if !whole.is_empty() {
        match fetch_whole(session, log, rows, &whole).await {
            // Fetch each alone, to find out which of them is damaged.
            Err(error) if is_damage(&error) => {
                for seq in whole {
                    if let Err(error) = fetch_whole(session, log, rows, &[seq]).await {
                        rows.iter_mut().find(|row| row.seq() == seq).map_or(Ok(()), |row| give_up(row, error))?;
                    }
                }
            }
            fetched => fetched?,
        }
    }
    for row in rows.iter_mut().filter(|row| row.behind > SLICE_BYTES) {
        match fetch_sliced(session, log, row).await {
            Ok(Some(payload)) => row.fill(payload),
            Ok(None) => row.give_up(Unreadable::missing()),
            Err(error) => give_up(row, error)?,
        }
    }
    rows.iter_mut().filter(|row| row.is_behind()).for_each(|row| row.give_up(Unreadable::missing()));
    Ok(())
}

/// Marks the event unreadable if the error is damage; returns any other error.
fn give_up(row: &mut Stored, error: Error) -> Result<()> {
    if !is_damage(&error) {
        return Err(error);
    }
    row.give_up(Unreadable::undecodable(error.message()));
    Ok(())
}

async fn fetch_whole(session: &Session, log: &LogName, rows: &mut [Stored], seqs: &[i64]) -> Result<()> {
    let (sql, seqs) = (session.log_sql(PAYLOAD_READ, log), seqs.to_vec());
    // The rows come in the order of their caller, which need not be that of `seq`.
    let mut rows: HashMap<_, _> = rows.iter_mut().map(|row| ((row.seq(), row.id()), row)).collect();
    let fetch = async {
        let mut found = pin!(session.client().query_typed_raw(&sql, params![seqs]).await?);
        while let Some(row) = found.try_next().await? {
            let payload = row.get::<_, Option<Raw<'_>>>(2).or(row.get(3));
            if let (Some(stored), Some(payload)) = (rows.get_mut(&(row.get(0), row.get(1))), payload) {
                stored.fill(Bytes::copy_from_slice(payload.0));
            }
        }
        Ok(())
    };
    session.alone_or_within(fetch).await
}

/// `None` if the row is gone, or its payload has become shorter.
async fn fetch_sliced(session: &Session, log: &LogName, row: &Stored) -> Result<Option<Bytes>> {
    let sql = session.log_sql(PAYLOAD_SLICE, log);
    let (seq, id, slice) = (row.seq(), row.id(), SLICE_BYTES as i32);
    let mut payload = BytesMut::with_capacity(row.behind);
    while payload.len() < row.behind {
        let start = i32::try_from(payload.len()).unwrap_or(i32::MAX - 1) + 1;
        let found = session.rows(&sql, &params![seq, start, slice, id]).await?;
        let Some(piece) = found.first().map(|piece| piece.get::<_, &[u8]>(0)).filter(|it| !it.is_empty()) else {
            return Ok(None);
        };
        payload.extend_from_slice(piece);
    }
    Ok(Some(payload.freeze()))
}
