//! The statement of an append: one round trip for any number of events.

use bytes::Bytes;
use jiff::Timestamp;
use postbox_core::{Appended, Error, EventId, LogName, NewEvent, Result};
use uuid::Uuid;

use crate::params::{Param, params};
use crate::schema::{SchemaName, check_log_name};
use crate::text::{AsText as _, elements};

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
/// Transactions are those of `tokio-postgres` and `deadpool-postgres`, and of the drivers that the
/// crate `postbox` has a feature for. Events take one round trip, whatever their number (with
/// `sea-orm` two). Nothing stays prepared unless asked for, so that a transaction-mode pooler may
/// sit in between.
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

/// A statement that appends events. Do not prepare it under a name: nothing may stay in the
/// session, so that a pooler in transaction mode works.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AppendStatement {
    /// What to execute. It returns an empty row for each event that the log already had. The number
    /// of rows is what [`Appended::new`](postbox_core::Appended::new) takes beside `ids`.
    pub sql: String,
    /// Its parameters `$1`, `$2`, …. Bind each as `text`, the only type that every driver treats
    /// alike; the statement casts.
    pub texts: Vec<Option<String>>,
    /// The ids of all events, once the statement has been executed.
    pub ids: Vec<EventId>,
}

impl AppendStatement {
    /// Checks every limit and makes the statement. `None` if there are no events.
    pub fn of(to: &Postgres, log: &LogName, events: Result<Vec<NewEvent>>) -> Result<Option<Self>> {
        let events = events?;
        let Some(columns) = Columns::of(log, &events)? else { return Ok(None) };
        let (mut template, texts) = (columns.template().to_owned(), columns.texts());
        if columns.ids.len() > 1 {
            for (n, text) in (1..).zip(&texts) {
                let parameter = format!("${n}");
                let given = elements(&parameter, text.as_deref().unwrap_or_default());
                template = template.replace(&format!("{parameter}::"), &format!("{given}::"));
            }
        }
        Ok(Some(Self { sql: columns.fill(&template, &to.schema, log), texts, ids: columns.event_ids() }))
    }
}

/// The statement that remembers a message for `once_in`: `$1` is the source, `$2` the message's id,
/// both as `text`. Returns one row with one column, which is `true` the first time.
pub fn once_statement(schema: &SchemaName) -> String {
    schema.sql("SELECT {s}.once($1, $2)")
}

/// The error of an append in autocommit mode, where one transaction for change and events cannot be
/// guaranteed.
pub fn no_transaction(operation: &'static str) -> Error {
    let message = "the driver has no transaction open; begin one with it (not with the SQL command), \
                   and commit your change together with its events";
    Error::invalid(operation, "no_transaction", message)
}

/// A struct of columns, and its parameters in the same order.
macro_rules! columns {
    ($(#[$doc:meta])* $name:ident<$a:lifetime> { $($column:ident: $kind:ty,)* }) => {
        $(#[$doc])*
        pub struct $name<$a> {
            $($column: Vec<$kind>,)*
            /// One of them at least has an id that its writer chose.
            may_be_known: bool,
        }

        impl $name<'_> {
            /// What [`Columns::statement`] takes: the fields of the only event, or every column.
            pub fn params(&self) -> [Param<'_>; 15] {
                match self.ids.len() {
                    1 => params![$(self.$column[0]),*],
                    _ => params![$(self.$column),*],
                }
            }

            /// The same as texts, for drivers that agree with ours about no other type.
            pub fn texts(&self) -> Vec<Option<String>> {
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
    pub fn of(log: &LogName, events: impl IntoIterator<Item = &'a NewEvent>) -> Result<Option<Self>> {
        let events: Vec<&NewEvent> = events.into_iter().collect();
        NewEvent::validate_all(events.iter().copied())?;
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
    pub fn statement(&self, schema: &SchemaName, log: &LogName) -> String {
        self.fill(self.template(), schema, log)
    }

    fn template(&self) -> &'static str {
        if self.ids.len() == 1 { LOG_APPEND } else { LOG_APPEND_MANY }
    }

    fn fill(&self, template: &str, schema: &SchemaName, log: &LogName) -> String {
        let may_be_known = if self.may_be_known { "true" } else { "false" };
        schema.log_sql_with(template, log, &[("may_be_known", may_be_known)])
    }

    /// The result of an append whose statement returned this many rows, one for each known event.
    pub fn appended(&self, known: u64) -> Appended {
        Appended::new(self.event_ids(), known as usize)
    }

    /// The events' ids, in the order given: those they had, and new ones.
    pub fn event_ids(&self) -> Vec<EventId> {
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

    #[test]
    fn one_event_and_several_have_the_same_number_of_parameters() {
        let of = |count| {
            let events = vec![NewEvent::json("t", "{}"); count];
            AppendStatement::of(&Postgres::default(), &LogName::outbox(), Ok(events)).expect("fine")
        };
        assert_eq!(of(0), None);
        let (one, two) = (of(1).expect("one"), of(2).expect("two"));
        assert_eq!((one.ids.len(), two.ids.len()), (1, 2));
        let parameters = |statement: &AppendStatement| statement.sql.matches('$').count();
        assert_eq!(parameters(&one), one.texts.len());
        assert_eq!(parameters(&two), two.texts.len());
    }
}
