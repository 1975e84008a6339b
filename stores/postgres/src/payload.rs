//! Payloads that did not come with their rows, and how many rows fit into a batch.

use std::pin::pin;

use bytes::{Bytes, BytesMut};
use futures::TryStreamExt as _;
use postbox_core::kit::BatchLimiter;
use postbox_core::{BatchLimit, LogName, Result, Unreadable};
use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

use crate::PostgresStore;
use crate::classify::{classify, is_damage};
use crate::decode::{Raw, Stored};

/// Larger payloads than this are fetched piece by piece, so that the driver's buffers stay small
/// beside a payload of 16 MiB.
const SLICE_BYTES: usize = 1024 * 1024;

/// The payloads that stayed behind. Index: primary key of the log.
const PAYLOAD_READ: &str = "SELECT seq, payload, payload_bytes FROM {log} WHERE seq {=} ANY ($1)";

/// A piece of one payload. Index: primary key of the log.
const PAYLOAD_SLICE: &str = "SELECT pg_catalog.substr(coalesce(payload_bytes, pg_catalog.textsend(payload)), $2, $3) FROM {log} WHERE seq {=} $1";

/// How many rows, in their order, a caller can hold.
pub(crate) fn fitting(rows: &[Stored], limit: BatchLimit) -> usize {
    let mut limiter = BatchLimiter::new(limit);
    rows.iter().take_while(|row| limiter.take(row.size())).count()
}

impl PostgresStore {
    /// Fetches the payloads that stayed behind. One that is gone by now, or that the server cannot
    /// give, makes its own event unreadable.
    pub(crate) async fn fill_payloads(&self, client: &Client, log: &LogName, rows: &mut [Stored]) -> Result<()> {
        let behind: Vec<usize> = (0..rows.len()).filter(|index| rows[*index].is_behind()).collect();
        if behind.is_empty() {
            return Ok(());
        }
        let whole: Vec<i64> =
            behind.iter().filter(|index| rows[**index].behind <= SLICE_BYTES).map(|index| rows[*index].seq()).collect();
        if !whole.is_empty() {
            match self.fetch_whole(client, log, rows, &whole).await {
                // Which of them it is, only each alone can tell.
                Err(error) if is_damage(&error) => {
                    for seq in whole {
                        self.fetch_one(client, log, rows, seq).await?;
                    }
                }
                fetched => fetched.map_err(|error| classify("next_batch", &error))?,
            }
        }
        for row in rows.iter_mut().filter(|row| row.behind > SLICE_BYTES) {
            match self.fetch_sliced(client, log, row).await {
                Ok(Some(payload)) => row.fill(payload),
                Ok(None) => row.give_up(Unreadable::missing()),
                Err(error) if is_damage(&error) => row.give_up(damaged(&error)),
                Err(error) => return Err(classify("next_batch", &error)),
            }
        }
        rows.iter_mut().filter(|row| row.is_behind()).for_each(|row| row.give_up(Unreadable::missing()));
        Ok(())
    }

    async fn fetch_whole(
        &self,
        client: &Client,
        log: &LogName,
        rows: &mut [Stored],
        seqs: &[i64],
    ) -> Result<(), tokio_postgres::Error> {
        let sql = self.schema().log_sql(PAYLOAD_READ, log);
        let params: [(&(dyn ToSql + Sync), Type); 1] = [(&seqs, Type::INT8_ARRAY)];
        let mut found = pin!(client.query_typed_raw(&sql, params).await?);
        while let Some(row) = found.try_next().await? {
            let seq: i64 = row.get(0);
            let payload = row.get::<_, Option<Raw<'_>>>(1).or(row.get(2));
            if let (Ok(index), Some(payload)) = (rows.binary_search_by_key(&seq, Stored::seq), payload) {
                rows[index].fill(Bytes::copy_from_slice(payload.0));
            }
        }
        Ok(())
    }

    async fn fetch_one(&self, client: &Client, log: &LogName, rows: &mut [Stored], seq: i64) -> Result<()> {
        match self.fetch_whole(client, log, rows, &[seq]).await {
            Err(error) if is_damage(&error) => {
                if let Ok(index) = rows.binary_search_by_key(&seq, Stored::seq) {
                    rows[index].give_up(damaged(&error));
                }
                Ok(())
            }
            fetched => fetched.map_err(|error| classify("next_batch", &error)),
        }
    }

    /// `None`: the row is gone, or holds less than it did.
    async fn fetch_sliced(
        &self,
        client: &Client,
        log: &LogName,
        row: &Stored,
    ) -> Result<Option<Bytes>, tokio_postgres::Error> {
        let sql = self.schema().log_sql(PAYLOAD_SLICE, log);
        let (seq, slice) = (row.seq(), SLICE_BYTES as i32);
        let mut payload = BytesMut::with_capacity(row.behind);
        while payload.len() < row.behind {
            let start = i32::try_from(payload.len()).unwrap_or(i32::MAX - 1) + 1;
            let params: [(&(dyn ToSql + Sync), Type); 3] =
                [(&seq, Type::INT8), (&start, Type::INT4), (&slice, Type::INT4)];
            let piece = client.query_typed_opt(&sql, &params).await?;
            let Some(piece) = piece.as_ref().map(|piece| piece.get::<_, &[u8]>(0)).filter(|it| !it.is_empty()) else {
                return Ok(None);
            };
            payload.extend_from_slice(piece);
        }
        Ok(Some(payload.freeze()))
    }
}

fn damaged(error: &tokio_postgres::Error) -> Unreadable {
    Unreadable::undecodable(error.as_db_error().map_or_else(String::new, |said| said.message().to_owned()))
}
