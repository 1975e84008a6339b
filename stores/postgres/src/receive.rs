//! The inbox's write side: a message from outside is stored once.

use std::slice;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Error, ErrorKind, EventId, Inbound, LogName, Receive, Received, Result};
use tokio_postgres::types::{ToSql, Type};

use crate::PostgresStore;
use crate::append::{Columns, refused};
use crate::classify::{classify, is_undefined};
use crate::log::micros;
use crate::session::COMMIT;

/// Remembers the message and stores its event, or says what is known of it: see `0001_receive.sql`.
const LOG_RECEIVE: &str = "SELECT verdict, event
FROM {s}.{name}_receive($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)";

/// Forgets old records of conflicts, a thousand at a time. Index: `conflict_last`. Locks the rows; those of a running receiver are passed over.
const CONFLICT_FORGET: &str = "
DELETE FROM {s}.conflict AS c
USING (SELECT source, tenant, message_id, digest_refused FROM {s}.conflict
  WHERE last_at <= statement_timestamp() - $1 * interval '1 microsecond' ORDER BY last_at LIMIT 1000 FOR UPDATE SKIP LOCKED) AS old
WHERE c.source = old.source AND c.tenant = old.tenant AND c.message_id = old.message_id AND c.digest_refused = old.digest_refused";

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
        let conflicts = self.schema().sql(CONFLICT_FORGET);
        // Records of conflicts age like the ids they are about; they are no ids and do not count.
        let (begun, forgotten, passed, committed) = futures::join!(
            client.batch_execute(&self.inner.preambles.write),
            client.execute_typed(&sql, &params),
            client.execute_typed(&conflicts, &params),
            client.batch_execute(COMMIT),
        );
        session.end_after(begun.is_ok() && committed.is_ok());
        let failed = |error: tokio_postgres::Error| classify("forget", &error);
        begun.and(committed).map_err(failed)?;
        passed.map_err(failed)?;
        forgotten.map_err(failed)
    }

    async fn receive_once(&self, log: &LogName, inbound: &Inbound) -> Result<Received> {
        let events = slice::from_ref(&inbound.event);
        let Some(event) = Columns::of(log, events)? else { unreachable!("one event is not none") };
        let session = self.session("receive").await?;
        let client = session.client();
        let receive = self.schema().sql(&LOG_RECEIVE.replace("{name}", log.as_str()));
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
        let (begun, received, committed) = futures::join!(
            client.batch_execute(&self.inner.preambles.call),
            client.query_typed_one(&receive, &params),
            client.batch_execute(COMMIT),
        );
        // Every statement was awaited to its end: no transaction is open.
        session.finish();
        let failed = |error: tokio_postgres::Error| classify("receive", &error);
        let row = match received {
            Err(error) if is_undefined(&error) => {
                postbox_core::Migrate::validate(self).await?;
                return Err(refused(log, &error));
            }
            received => received.map_err(failed),
        };
        begun.map_err(failed)?;
        let row = row?;
        committed.map_err(failed)?;
        match row.get(0) {
            "accepted" => Ok(Received::Accepted(EventId::from_uuid(row.get(1)))),
            "duplicate" => Ok(Received::Duplicate),
            "conflict" => Ok(Received::Conflict),
            // Forgotten between two statements: the sender comes again and is accepted.
            _ => Err(Error::new(
                ErrorKind::Unavailable,
                "receive",
                "store_contention",
                "the message's record was just forgotten; send it again",
            )),
        }
    }
}
