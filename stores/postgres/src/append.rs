//! Appending: one round trip for any number of events, in the caller's transaction or one of our
//! own.

use async_trait::async_trait;
use bytes::Bytes;
use jiff::Timestamp;
use postbox_core::kit::in_context;
use postbox_core::{Append, AppendFuture, Appended, Error, EventId, LogName, Migrate, NewEvent, Result, Transaction};
use uuid::Uuid;

use crate::PostgresStore;
use crate::classify::{classify, is_undefined, log_unknown};
use crate::params::{Param, params};
use crate::schema::{SchemaName, check_log_name};
use crate::session::Session;
use crate::text::AsText as _;

/// The columns that a writer sets. Everything else of a row is the store's own.
pub(crate) const APPEND_COLUMNS: &str = "id, topic, key, aggregate, version, kind, source, tenant, payload, payload_bytes, content_type, headers, occurred_at, deliver_at, expires_at";

/// Appends an event: see `0001_append.sql`. One row if it was known, or none: every driver counts
/// rows. Index: the log's three unique ones are extended; no lock beyond the new row's.
const LOG_APPEND: &str = "
SELECT WHERE {s}.{name}_append({may_be_known}, $1::pg_catalog.uuid, $2::pg_catalog.text, $3::pg_catalog.text, $4::pg_catalog.text, $5::bigint,
  $6::pg_catalog.text, $7::pg_catalog.text, $8::pg_catalog.text, $9::pg_catalog.text, $10::pg_catalog.bytea,
  $11::pg_catalog.text, $12::pg_catalog.text, $13::pg_catalog.text, $14::pg_catalog.text, $15::pg_catalog.text)";

/// The same for several: a row for each that was known.
const LOG_APPEND_MANY: &str = "
SELECT FROM pg_catalog.generate_series(1, {s}.{name}_append_many({may_be_known}, $1::pg_catalog.uuid[], $2::pg_catalog.text[], $3::pg_catalog.text[], $4::pg_catalog.text[], $5::bigint[],
  $6::pg_catalog.text[], $7::pg_catalog.text[], $8::pg_catalog.text[], $9::pg_catalog.text[], $10::pg_catalog.bytea[],
  $11::pg_catalog.text[], $12::pg_catalog.text[], $13::pg_catalog.text[], $14::pg_catalog.text[], $15::pg_catalog.text[]))";

/// What a [`Postbox`](postbox_core::Postbox) for Postgres appends to: the tables in one schema,
/// `postbox` by default, of whatever database the transaction is in.
///
/// ```no_run
/// # async fn example(client: &mut tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error>> {
/// # use postbox_core::{NewEvent, Postbox};
/// # use postbox_postgres::Postgres;
/// let postbox = Postbox::new(Postgres::default());
/// let mut tx = client.transaction().await?;
/// tx.execute("UPDATE orders SET paid = true WHERE id = 42", &[]).await?;
/// postbox.append(&mut tx, NewEvent::json("order.paid", r#"{"id":42}"#).key("42")).await?;
/// tx.commit().await?;
/// # Ok(())
/// # }
/// ```
///
/// Transactions are those of `tokio-postgres` and `deadpool-postgres`, and of the drivers that the
/// crate `postbox` has a feature for ([`driver`](crate::driver) is for one more). Events take one
/// round trip, whatever their number. Nothing stays prepared unless asked for, so that a
/// transaction-mode pooler may sit in between.
///
/// If the server refuses an event, your transaction can only be rolled back, as after any failed
/// statement. An event that breaks a limit is refused before anything is sent, and the transaction
/// goes on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Postgres {
    /// The schema that the tables are in.
    pub schema: SchemaName,
    /// Keeps the statement of an append prepared in its connection, which spares the server to
    /// parse it each time. Only for connections that no pooler shares, or one that keeps prepared
    /// statements apart (pgbouncer from 1.21 on, with `max_prepared_statements`). Has an
    /// effect only with `deadpool-postgres` and `sqlx`, whose connections cache statements.
    pub prepared: bool,
}

/// Marks transactions of `tokio-postgres`, and of its pool.
#[derive(Debug)]
pub enum TokioPostgres {}

/// A transaction of the driver, with the pool's own if it has one: that keeps statements.
type Borrowed<'a> = (&'a tokio_postgres::Transaction<'a>, Option<&'a deadpool_postgres::Transaction<'a>>);

macro_rules! appends {
    ($($transaction:ty, $tx:ident => $borrowed:expr;)*) => {
        $(impl<'a> Transaction<'a, Postgres, TokioPostgres> for $transaction {
            type Appended = AppendFuture<'a>;

            fn append(&'a mut self, to: &'a Postgres, log: &'a LogName, events: Result<Vec<NewEvent>>) -> AppendFuture<'a> {
                let $tx = &*self;
                Box::pin(append_in($borrowed, to, log, events))
            }
        })*
    };
}

appends! {
    tokio_postgres::Transaction<'_>, tx => (tx, None);
    &tokio_postgres::Transaction<'_>, tx => (*tx, None);
    deadpool_postgres::Transaction<'_>, tx => (&**tx, Some(tx));
}

async fn append_in(
    (tx, pooled): Borrowed<'_>,
    to: &Postgres,
    log: &LogName,
    events: Result<Vec<NewEvent>>,
) -> Result<Appended> {
    let events = events?;
    let Some(columns) = Columns::of(log, &events)? else { return Ok(Appended::default()) };
    let (sql, params) = (columns.statement(&to.schema, log), columns.params());
    let known = match pooled.filter(|_| to.prepared) {
        Some(pooled) => execute_prepared(pooled, &sql, &params).await,
        None => tx.client().execute_typed(&sql, &params).await,
    };
    let known = known.map_err(|error| refused(log, classify("append", &error)))?;
    Ok(columns.appended(known))
}

async fn execute_prepared<const N: usize>(
    tx: &deadpool_postgres::Transaction<'_>,
    sql: &str,
    params: &[Param<'_>; N],
) -> std::result::Result<u64, tokio_postgres::Error> {
    let types = params.each_ref().map(|(_, of_type)| of_type.clone());
    let statement = tx.prepare_typed_cached(sql, &types).await?;
    tx.execute(&statement, &params.each_ref().map(|(value, _)| *value)).await
}

#[async_trait]
impl Append for PostgresStore {
    async fn append(&self, log: &LogName, events: &[NewEvent]) -> Result<Appended> {
        let events = in_context(events);
        let Some(columns) = Columns::of(log, &*events)? else { return Ok(Appended::default()) };
        let append = async |session: &Session| {
            let (sql, params) = (columns.statement(session.schema(), log), columns.params());
            session
                .at_once(&self.inner.modes.write, async |session: &Session| session.execute(&sql, &params).await)
                .await
        };
        let known = match self.call("append", append).await {
            Ok(known) => known,
            Err(error) => return Err(self.why_refused(log, error).await),
        };
        self.wake();
        Ok(columns.appended(known))
    }
}

impl PostgresStore {
    /// A writer's error. A missing log and a missing schema look the same; asks which it is.
    pub(crate) async fn why_refused(&self, log: &LogName, error: Error) -> Error {
        match is_undefined(&error) {
            true => Migrate::validate(self).await.err().unwrap_or_else(|| refused(log, error)),
            false => error,
        }
    }
}

/// A writer's error; a missing function means a missing log.
pub(crate) fn refused(log: &LogName, error: Error) -> Error {
    if is_undefined(&error) { log_unknown("append", log.as_str()) } else { error }
}

/// A struct of columns, and its parameters in the same order.
macro_rules! columns {
    ($(#[$doc:meta])* $name:ident<$a:lifetime> { $($column:ident: $kind:ty,)* }) => {
        $(#[$doc])*
        pub(crate) struct $name<$a> {
            $(pub(crate) $column: Vec<$kind>,)*
            /// One of them at least has an id that its writer chose.
            may_be_known: bool,
        }

        impl $name<'_> {
            /// What [`Columns::statement`] takes: the fields of the only event, or every column.
            pub(crate) fn params(&self) -> [Param<'_>; 15] {
                match self.ids.len() {
                    1 => params![$(self.$column[0]),*],
                    _ => params![$(self.$column),*],
                }
            }

            /// The same as texts, for drivers that agree with ours about no other type.
            pub(crate) fn texts(&self) -> Vec<Option<String>> {
                match self.ids.len() {
                    1 => vec![$(self.$column[0].text()),*],
                    _ => vec![$(self.$column.text()),*],
                }
            }
        }
    };
}

columns! {
    /// Events, column by column, borrowed.
    Columns<'a> {
        ids: Uuid,
        topics: &'a str,
        keys: Option<&'a str>,
        aggregates: Option<&'a str>,
        versions: Option<i64>,
        kinds: Option<&'a str>,
        sources: Option<&'a str>,
        tenants: Option<&'a str>,
        texts: Option<&'a str>,
        bytes: Option<&'a [u8]>,
        content_types: Option<&'a str>,
        headers: Option<String>,
        occurred: Option<String>,
        deliver: Option<String>,
        expires: Option<String>,
    }
}

impl<'a> Columns<'a> {
    /// Checks every limit, then transposes the events into columns. `None`: there are none.
    pub(crate) fn of(log: &LogName, events: impl IntoIterator<Item = &'a NewEvent>) -> Result<Option<Self>> {
        let events: Vec<&NewEvent> = events.into_iter().collect();
        events.iter().try_for_each(|event| event.validate())?;
        check_log_name("append", log)?;
        if events.is_empty() {
            return Ok(None);
        }
        let events = events.as_slice();
        /// Empty if several events all lack the value: `unnest` pads with NULL, and the server
        /// parses no array.
        fn column<T>(values: impl Iterator<Item = Option<T>>) -> Vec<Option<T>> {
            let mut values: Vec<_> = values.collect();
            if values.len() > 1 && values.iter().all(Option::is_none) {
                values.clear();
            }
            values
        }
        fn texts<'a>(
            events: &[&'a NewEvent],
            field: impl Fn(&'a NewEvent) -> &'a Option<String>,
        ) -> Vec<Option<&'a str>> {
            column(events.iter().map(|event| field(event).as_deref()))
        }
        let (texts_of, bytes_of): (Vec<_>, Vec<_>) = events.iter().map(|event| split_payload(&event.payload)).unzip();
        let time = |at: Option<Timestamp>| at.map(|at| at.to_string());
        Ok(Some(Self {
            may_be_known: events.iter().any(|event| event.id.is_some()),
            ids: events.iter().map(|event| event.id.unwrap_or_else(EventId::now_v7).as_uuid()).collect(),
            topics: events.iter().map(|event| event.topic.as_str()).collect(),
            keys: texts(events, |event| &event.key),
            aggregates: texts(events, |event| &event.aggregate),
            versions: column(events.iter().map(|event| event.version)),
            kinds: texts(events, |event| &event.kind),
            sources: texts(events, |event| &event.source),
            tenants: texts(events, |event| &event.tenant),
            texts: column(texts_of.into_iter()),
            bytes: column(bytes_of.into_iter()),
            content_types: texts(events, |event| &event.content_type),
            headers: column(events.iter().map(|event| headers_json(event))),
            occurred: column(events.iter().map(|event| time(event.occurred_at))),
            deliver: column(events.iter().map(|event| time(event.deliver_at))),
            expires: column(events.iter().map(|event| time(event.expires_at))),
        }))
    }

    /// The statement that appends them. One event has a function of its own, because most come
    /// alone: without arrays it costs half.
    pub(crate) fn statement(&self, schema: &SchemaName, log: &LogName) -> String {
        let template = if self.ids.len() == 1 { LOG_APPEND } else { LOG_APPEND_MANY };
        let may_be_known = if self.may_be_known { "true" } else { "false" };
        schema.log_sql_with(template, log, &[("may_be_known", may_be_known)])
    }

    /// The result of an append whose statement returned this many rows, one for each known event.
    fn appended(&self, known: u64) -> Appended {
        Appended::new(self.event_ids(), known as usize)
    }

    /// The events' ids, in the order given: those they had, and new ones.
    pub(crate) fn event_ids(&self) -> Vec<EventId> {
        self.ids.iter().copied().map(EventId::from_uuid).collect()
    }
}

/// A payload that is text goes to the text column, where people can read it; anything else to the
/// bytes column. What looks like bytea's text output goes there too, because the text column
/// refuses it.
fn split_payload(payload: &Bytes) -> (Option<&str>, Option<&[u8]>) {
    match std::str::from_utf8(payload) {
        Ok(text) if !text.contains('\0') && !text.starts_with("\\x") => (Some(text), None),
        _ => (None, Some(payload)),
    }
}

fn headers_json(event: &NewEvent) -> Option<String> {
    let json = || serde_json::to_string(&event.headers).expect("a map of strings is always JSON");
    (!event.headers.is_empty()).then(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_text_goes_to_the_text_column() {
        for (payload, is_text) in
            [(&b"{}"[..], true), (b"", true), (b"\\x41", false), (b"a\0b", false), (b"\xff", false)]
        {
            let payload = Bytes::from_static(payload);
            let (text, bytes) = split_payload(&payload);
            assert_eq!((text.is_some(), bytes.is_some()), (is_text, !is_text), "{payload:?}");
        }
    }
}
