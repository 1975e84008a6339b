//! The inbox's write side: a message from outside is stored once.

use std::slice;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Error, ErrorKind, EventId, Inbound, LogName, Receive, Received, Result};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};

use crate::PostgresStore;
use crate::append::{Columns, refused};
use crate::classify::{classify, is_undefined_table};
use crate::log::micros;
use crate::session::COMMIT;

/// Remembers the message and stores its event, in one statement; neither if it is known. Indexes: primary key of `receipt`, on which a
/// second receiver of the id waits for the first, and the log's. Locks the new rows only.
const RECEIPT_ACCEPT: &str = "
WITH claim AS (
  INSERT INTO {s}.receipt (source, tenant, message_id, digest) VALUES ($1, coalesce($2, ''), $3, $4) ON CONFLICT DO NOTHING RETURNING 1),
event AS (
  INSERT INTO {log} (id, topic, key, aggregate, version, kind, source, tenant, payload, payload_bytes, content_type, headers, occurred_at, deliver_at)
  SELECT coalesce($5::uuid, {s}.uuid_v7()), $6, $7, $8, $9::bigint, $10, $11, $2, $12, $13::bytea, $14, $15::jsonb,
    coalesce($16::timestamptz, clock_timestamp()), $17::timestamptz
  FROM claim
  RETURNING id)
SELECT id FROM event";

/// The digest a known message came with first. Index: primary key of `receipt`.
const RECEIPT_DIGEST: &str =
    "SELECT digest FROM {s}.receipt WHERE source = $1 AND tenant = coalesce($2, '') AND message_id = $3";

/// Writes down that a known id came with another body. No index.
const CONFLICT_NOTE: &str = "
INSERT INTO {s}.conflict (source, tenant, message_id, digest_stored, digest_refused)
SELECT $1, coalesce($2, ''), $3, $4, $5";

/// Forgets old ids, a thousand at a time. Index: `receipt_received`. Locks the rows; those of a running receiver are passed over.
const RECEIPT_FORGET: &str = "
DELETE FROM {s}.receipt AS r
USING (SELECT source, tenant, message_id FROM {s}.receipt
  WHERE received_at <= statement_timestamp() - $1 * interval '1 microsecond' ORDER BY received_at LIMIT 1000 FOR UPDATE SKIP LOCKED) AS old
WHERE r.source = old.source AND r.tenant = old.tenant AND r.message_id = old.message_id";

#[async_trait]
impl Receive for PostgresStore {
    async fn receive(&self, log: &LogName, inbound: Inbound) -> Result<Received> {
        inbound.validate()?;
        let received = self.bounded("receive", self.receive_once(log, &inbound)).await?;
        if matches!(received, Received::Accepted(_)) {
            self.wake();
        }
        Ok(received)
    }

    async fn forget(&self, older_than: Duration) -> Result<u64> {
        self.bounded("forget", self.forget_some(older_than)).await
    }
}

impl PostgresStore {
    async fn forget_some(&self, older_than: Duration) -> Result<u64> {
        let session = self.session("forget").await?;
        let client = session.client();
        let sql = self.schema().sql(RECEIPT_FORGET);
        let age_micros = micros(older_than);
        let params: [(&(dyn ToSql + Sync), Type); 1] = [(&age_micros, Type::INT8)];
        let (begun, forgotten, committed) = futures::join!(
            client.batch_execute(&self.inner.preambles.write),
            client.execute_typed(&sql, &params),
            client.batch_execute(COMMIT),
        );
        session.end_after(begun.is_ok() && committed.is_ok());
        let failed = |error: tokio_postgres::Error| classify("forget", &error);
        begun.and(committed).map_err(failed)?;
        forgotten.map_err(failed)
    }

    async fn receive_once(&self, log: &LogName, inbound: &Inbound) -> Result<Received> {
        let events = slice::from_ref(&inbound.event);
        let Some(event) = Columns::of(log, events)? else { unreachable!("one event is not none") };
        let session = self.session("receive").await?;
        let client = session.client();
        let accept = self.schema().log_sql(RECEIPT_ACCEPT, log);
        let digest = inbound.digest.as_slice();
        let (source, message_id) = (inbound.source.as_str(), inbound.message_id.as_str());
        let text = Type::TEXT;
        let params: [(&(dyn ToSql + Sync), Type); 17] = [
            (&source, text.clone()),
            (&event.tenants[0], text.clone()),
            (&message_id, text.clone()),
            (&digest, Type::BYTEA),
            (&event.ids[0], Type::UUID),
            (&event.topics[0], text.clone()),
            (&event.keys[0], text.clone()),
            (&event.aggregates[0], text.clone()),
            (&event.versions[0], Type::INT8),
            (&event.kinds[0], text.clone()),
            (&event.sources[0], text.clone()),
            (&event.texts[0], text.clone()),
            (&event.bytes[0], Type::BYTEA),
            (&event.content_types[0], text.clone()),
            (&event.headers[0], text.clone()),
            (&event.occurred[0], text.clone()),
            (&event.deliver[0], text),
        ];
        let (begun, accepted, committed) = futures::join!(
            client.batch_execute(&self.inner.preambles.write),
            client.query_typed(&accept, &params),
            client.batch_execute(COMMIT),
        );
        let accepted = match accepted {
            Err(error) if is_undefined_table(&error) => {
                session.finish();
                postbox_core::Migrate::validate(self).await?;
                return Err(refused(log, &error));
            }
            accepted => accepted.map_err(|error| classify("receive", &error)),
        };
        let failed = |error: tokio_postgres::Error| classify("receive", &error);
        let outcome = async {
            begun.map_err(failed)?;
            let accepted: Vec<Row> = accepted?;
            committed.map_err(failed)?;
            match accepted.first() {
                Some(row) => Ok(Received::Accepted(EventId::from_uuid(row.get(0)))),
                None => self.compare(client, inbound).await,
            }
        }
        .await;
        session.finish();
        outcome
    }

    /// The id is known: the same message again, or another one under its id?
    async fn compare(&self, client: &Client, inbound: &Inbound) -> Result<Received> {
        let failed = |error: tokio_postgres::Error| classify("receive", &error);
        let (source, message_id) = (inbound.source.as_str(), inbound.message_id.as_str());
        let tenant = inbound.event.tenant.as_deref();
        let identity: [(&(dyn ToSql + Sync), Type); 3] =
            [(&source, Type::TEXT), (&tenant, Type::TEXT), (&message_id, Type::TEXT)];
        let stored = client.query_typed_opt(&self.schema().sql(RECEIPT_DIGEST), &identity).await.map_err(failed)?;
        let Some(stored) = stored else {
            // Forgotten between two statements: the sender comes again and is accepted.
            return Err(Error::new(
                ErrorKind::Unavailable,
                "receive",
                "store_contention",
                "the message's record was just forgotten; send it again",
            ));
        };
        let stored: Option<&[u8]> = stored.get(0);
        let digest = inbound.digest.as_slice();
        if stored.is_none_or(|stored| stored == digest) {
            return Ok(Received::Duplicate);
        }
        let params: [(&(dyn ToSql + Sync), Type); 5] = [
            (&source, Type::TEXT),
            (&tenant, Type::TEXT),
            (&message_id, Type::TEXT),
            (&stored, Type::BYTEA),
            (&digest, Type::BYTEA),
        ];
        client.execute_typed(&self.schema().sql(CONFLICT_NOTE), &params).await.map_err(failed)?;
        Ok(Received::Conflict)
    }
}
