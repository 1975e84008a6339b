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

/// One payload in pieces, by id, too. They come in their order: a single row is joined with the
/// places at which they begin, of which an empty payload has one as well. Index: primary key of the
/// log.
///
/// `OFFSET 0` is a fence, so that a text is converted once and not for each piece: for 16 MiB that
/// takes 0.05 to 0.1 s.
const PAYLOAD_SLICES: &str = "
SELECT pg_catalog.substr(p.bytes, piece.start, $2)
FROM (SELECT coalesce(l.payload_bytes, pg_catalog.textsend(l.payload)) AS bytes FROM {log} AS l WHERE l.seq {=} $1 AND l.id {=} $3 OFFSET 0) AS p
CROSS JOIN LATERAL pg_catalog.generate_series(1, greatest(1, pg_catalog.octet_length(p.bytes)), $2) AS piece(start)";

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

/// `None` if the row is gone. Each piece is taken as it comes: the driver reads on only then.
async fn fetch_sliced(session: &Session, log: &LogName, row: &Stored) -> Result<Option<Bytes>> {
    let sql = session.log_sql(PAYLOAD_SLICES, log);
    let (seq, slice, id) = (row.seq(), SLICE_BYTES as i32, row.id());
    let fetch = async {
        let mut pieces = pin!(session.client().query_typed_raw(&sql, params![seq, slice, id]).await?);
        let mut payload: Option<BytesMut> = None;
        while let Some(piece) = pieces.try_next().await? {
            let payload = payload.get_or_insert_with(|| BytesMut::with_capacity(row.behind));
            payload.extend_from_slice(piece.try_get::<_, &[u8]>(0)?);
        }
        Ok(payload.map(BytesMut::freeze))
    };
    session.alone_or_within(fetch).await
}
