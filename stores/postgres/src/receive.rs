//! The inbox's write side: a message from outside is stored once.

use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Error, ErrorKind, EventId, Inbound, LogName, Receive, Received, Result};
use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

use crate::PostgresStore;
use crate::append::Columns;
use crate::classify::{classify, is_undefined};
use crate::log::micros;

/// Remembers a message and stores its event, or says what is known of it: see `0001_receive.sql`.
/// Index: primary key of `receipt`. Locks its row.
const LOG_RECEIVE: &str =
    "SELECT {s}.{name}_receive($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)";

/// The same for several messages.
const LOG_RECEIVE_MANY: &str =
    "SELECT {s}.{name}_receive_many($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)";

/// Forgets old records of conflicts, a thousand at a time. Index: `conflict_last`. Locks the rows;
/// those of a running receiver are passed over.
const CONFLICT_FORGET: &str = "
DELETE FROM {s}.conflict AS c
USING (SELECT source, tenant, message_id, digest_refused FROM {s}.conflict
  WHERE last_at <= statement_timestamp() - $1 * interval '1 microsecond' ORDER BY last_at LIMIT 1000 FOR UPDATE SKIP LOCKED) AS old
WHERE c.source = old.source AND c.tenant = old.tenant AND c.message_id = old.message_id AND c.digest_refused = old.digest_refused";

/// Forgets old ids of `once`, a thousand at a time. Index: `once_seen`. Locks the rows; those of a
/// running consumer are passed over.
const ONCE_FORGET: &str = "
DELETE FROM {s}.once AS o
USING (SELECT source, message_id FROM {s}.once
  WHERE seen_at <= statement_timestamp() - $1 * interval '1 microsecond' ORDER BY seen_at LIMIT 1000 FOR UPDATE SKIP LOCKED) AS old
WHERE o.source = old.source AND o.message_id = old.message_id";

/// Forgets old ids, a thousand at a time. Index: `receipt_received`. Locks the rows; those of a
/// running receiver are passed over.
const RECEIPT_FORGET: &str = "
DELETE FROM {s}.receipt AS r
USING (SELECT source, tenant, message_id FROM {s}.receipt
  WHERE received_at <= statement_timestamp() - $1 * interval '1 microsecond' ORDER BY received_at LIMIT 1000 FOR UPDATE SKIP LOCKED) AS old
WHERE r.source = old.source AND r.tenant = old.tenant AND r.message_id = old.message_id";

#[async_trait]
impl Receive for PostgresStore {
    async fn receive_many(&self, log: &LogName, inbound: &[Inbound]) -> Result<Vec<Received>> {
        inbound.iter().try_for_each(Inbound::validate)?;
        let Some(events) = Columns::of(log, inbound.iter().map(|inbound| &inbound.event))? else {
            return Ok(Vec::new());
        };
        let received = self.bounded("receive", self.receive_at_once(log, inbound, &events)).await?;
        if received.iter().any(|received| matches!(received, Received::Accepted(_))) {
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
        let [receipts, onces, conflicts] =
            [RECEIPT_FORGET, ONCE_FORGET, CONFLICT_FORGET].map(|template| self.schema().sql(template));
        let age_micros = micros(older_than);
        let params: [(&(dyn ToSql + Sync), Type); 1] = [(&age_micros, Type::INT8)];
        let forget = async |client: &Client| {
            // Records of conflicts age like the ids they are about; they are no ids and do not
            // count.
            let (receipts, onces, conflicts) = futures::join!(
                client.execute_typed(&receipts, &params),
                client.execute_typed(&onces, &params),
                client.execute_typed(&conflicts, &params)
            );
            let forgotten = receipts? + onces?;
            conflicts.map(|_| forgotten)
        };
        let forgotten = session.transact(&self.inner.modes.write, forget).await;
        forgotten.map_err(|error| classify("forget", &error))
    }

    /// One statement, which is its own transaction: a webhook waits for one answer, not for those
    /// of BEGIN and COMMIT too.
    async fn receive_at_once(&self, log: &LogName, inbound: &[Inbound], events: &Columns<'_>) -> Result<Vec<Received>> {
        let session = self.session("receive").await?;
        let received = match inbound {
            [only] => self.receive_one(session.client(), log, only, events).await,
            several => self.receive_several(session.client(), log, several, events).await,
        };
        // It was awaited to its end: no transaction is open.
        session.finish();
        match received {
            Ok(verdicts) => verdicts.iter().zip(events.event_ids()).map(|(verdict, id)| judge(verdict, id)).collect(),
            Err(error) if is_undefined(&error) => Err(self.why_refused(log, &error).await),
            Err(error) => Err(classify("receive", &error)),
        }
    }

    async fn receive_one(
        &self,
        client: &Client,
        log: &LogName,
        inbound: &Inbound,
        event: &Columns<'_>,
    ) -> Result<Vec<String>, tokio_postgres::Error> {
        let receive = self.schema().log_sql(LOG_RECEIVE, log);
        let (source, digest) = (inbound.source.as_str(), inbound.digest.as_slice());
        let mut params: Vec<(&(dyn ToSql + Sync), Type)> =
            vec![(&source, Type::TEXT), (&inbound.message_id, Type::TEXT), (&digest, Type::BYTEA)];
        params.extend(event.first());
        Ok(vec![client.query_typed_one(&receive, &params).await?.get(0)])
    }

    async fn receive_several(
        &self,
        client: &Client,
        log: &LogName,
        inbound: &[Inbound],
        events: &Columns<'_>,
    ) -> Result<Vec<String>, tokio_postgres::Error> {
        let receive = self.schema().log_sql(LOG_RECEIVE_MANY, log);
        let sources: Vec<&str> = inbound.iter().map(|message| message.source.as_str()).collect();
        let message_ids: Vec<&str> = inbound.iter().map(|message| message.message_id.as_str()).collect();
        let digests: Vec<&[u8]> = inbound.iter().map(|message| message.digest.as_slice()).collect();
        let by_identity = by_identity(inbound);
        let mut params: Vec<(&(dyn ToSql + Sync), Type)> = vec![
            (&by_identity, Type::INT4_ARRAY),
            (&sources, Type::TEXT_ARRAY),
            (&message_ids, Type::TEXT_ARRAY),
            (&digests, Type::BYTEA_ARRAY),
        ];
        params.extend(events.params());
        Ok(client.query_typed_one(&receive, &params).await?.get(0))
    }
}

/// The places of the messages, counted from one, in the order of their identities. In this order
/// every call locks them: two calls that bring the same messages wait for each other, and never
/// each for the other.
fn by_identity(inbound: &[Inbound]) -> Vec<i32> {
    let mut places: Vec<i32> = (1..=inbound.len() as i32).collect();
    places.sort_by_key(|place| {
        let message = &inbound[*place as usize - 1];
        (message.source.as_str(), message.event.tenant.as_deref(), message.message_id.as_str())
    });
    places
}

fn judge(verdict: &str, id: EventId) -> Result<Received> {
    match verdict {
        "accepted" => Ok(Received::Accepted(id)),
        "duplicate" => Ok(Received::Duplicate),
        "conflict" => Ok(Received::Conflict),
        _ => Err(Error::new(ErrorKind::Internal, "receive", "store_protocol", "the database gave no verdict")),
    }
}
