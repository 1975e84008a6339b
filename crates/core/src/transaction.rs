//! Appending in your own transaction, with one verb for every driver.

use std::pin::Pin;
use std::sync::Arc;

use crate::append::Appended;
use crate::context::in_context;
use crate::error::{Error, Result};
use crate::event::{NewEvent, schema_version};
use crate::names::LogName;
use crate::schemas::Schemas;
use crate::typed::IntoEvents;

/// Appends events to one log, in your own transactions. Cheap to create; it holds no connection.
///
/// It is made of a store: a memory store itself, `postbox_postgres::Postgres` (its schema) or
/// `postbox_sqlite::Sqlite`.
///
/// ```
/// # use postbox_core::{NewEvent, Postbox};
/// # use postbox_memory::MemoryStore;
/// # fn example(store: MemoryStore) -> postbox_core::Result<()> {
/// let postbox = Postbox::new(store.clone());
/// let mut tx = store.begin();
/// postbox.append(&mut tx, NewEvent::json("order.paid", r#"{"order":42}"#).key("42"))?;
/// tx.commit(); // both, or neither: your change and its events
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Postbox<S> {
    store: S,
    log: LogName,
    schemas: Option<Arc<dyn Schemas>>,
}

impl<S> Postbox<S> {
    /// Creates one that appends to the log `outbox` of a store.
    pub fn new(store: S) -> Self {
        Self { store, log: LogName::outbox(), schemas: None }
    }

    /// Appends to this log instead.
    #[must_use]
    pub fn log(mut self, log: LogName) -> Self {
        self.log = log;
        self
    }

    /// Appends only payloads that match the schema of their topic. Others fail with
    /// [`schema_violated`](Error::schema_violated), and nothing is sent. So do events whose header
    /// [`schema-version`](crate::header::SCHEMA_VERSION) is no number (`Invalid`, code
    /// `schema_version_invalid`).
    #[must_use]
    pub fn schemas(mut self, schemas: Arc<dyn Schemas>) -> Self {
        self.schemas = Some(schemas);
        self
    }

    /// Appends one event or several, typed or not, in your transaction. Relays see them if and only
    /// if it commits. With an async driver this returns a future, with a blocking one a result.
    ///
    /// Behaves like [`Append::append`](crate::Append::append), except that no relay is woken: call
    /// the store's `wake` after your commit, or let the relay poll. Typed events that cannot be
    /// encoded as JSON fail (`Invalid`, code `payload_not_encoded`).
    ///
    /// If events break a limit or a schema, nothing was sent and your transaction can go on. After
    /// any other error, roll it back, unless the driver's crate promises more.
    ///
    /// The events inherit the current [`Context`](crate::Context).
    ///
    /// Cancel-safety: if dropped before it is done, the events may or may not be part of your
    /// transaction. Roll it back.
    pub fn append<'a, T, Via, E, Kind>(&'a self, tx: &'a mut T, events: E) -> T::Appended
    where
        T: Transaction<'a, S, Via> + ?Sized,
        E: IntoEvents<Kind>,
    {
        // Now, not when a future of it is polled, because that may be in another context.
        let events = events.into_events().and_then(|events| self.checked(events));
        tx.append(&self.store, &self.log, events.map(|events| in_context(events).into_owned()))
    }

    fn checked(&self, events: Vec<NewEvent>) -> Result<Vec<NewEvent>> {
        if let Some(schemas) = &self.schemas {
            for event in &events {
                match schema_version(&event.headers) {
                    Some(version) => schemas.check(&event.topic, version, &event.payload)?,
                    None if schemas.knows(&event.topic) => return Err(version_invalid(event)),
                    None => {}
                }
            }
        }
        Ok(events)
    }
}

fn version_invalid(event: &NewEvent) -> Error {
    let message =
        format!("the header schema-version of {} is no number; write one from 1, or leave it out", event.topic);
    Error::invalid("check", "schema_version_invalid", message)
}

/// Return type of [`Transaction::append`] with an async driver.
pub type AppendFuture<'a> = Pin<Box<dyn Future<Output = Result<Appended>> + Send + 'a>>;

/// A driver's transaction, as [`Postbox::append`] takes it.
///
/// `S` is the store, so that a transaction of another database is a type error. `Via` is a type of
/// the crate that implements this for a driver. It makes an implementation for a foreign
/// transaction and a foreign store legal there. It is inferred; callers never see it.
///
/// Behaviour:
/// - All events are appended or none, validated first, in the order given. Their ids come back in
///   that order. Known events and errors are as in [`Append`](crate::Append).
/// - If `events` is an error already, that error is returned, and nothing is sent.
/// - It neither commits nor rolls back.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a transaction that a Postbox of `{S}` can append to",
    label = "no transaction of `{S}`",
    note = "a pool or a client is no transaction: begin one, and pass `&mut tx`",
    note = "in a `transaction` of a pooled connection of `diesel` or `diesel-async`, pass `&mut **tx`",
    note = "the drivers are features of `postbox`: `sqlx` and `sqlx-sqlite` mean sqlx 0.9, `sqlx08` means 0.8"
)]
pub trait Transaction<'a, S, Via> {
    /// An [`AppendFuture`], or with a blocking driver the result itself.
    type Appended;

    /// Appends in this transaction.
    fn append(&'a mut self, store: &'a S, log: &'a LogName, events: Result<Vec<NewEvent>>) -> Self::Appended;
}
