//! A database commit and the messages about it are one fact, in both directions: a transactional
//! outbox, a verified inbox and an event bus.
//!
//! ```
//! use std::sync::Arc;
//! use postbox::router::{Event, Router};
//! use postbox::{LogName, MemoryStore, Postbox, Relay, Service, Subscription, TokioClock};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(postbox::Event, Serialize, Deserialize)]
//! #[event(topic = "order.paid", key = "order")]
//! struct OrderPaid {
//!     order: i64,
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> postbox::Result<()> {
//! let store = MemoryStore::new(Arc::new(TokioClock::new()));
//! let postbox = Postbox::new(store.clone()); // or `store.postbox()` of a database
//! let mut tx = store.begin(); // your own transaction, of the driver you use
//! postbox.append(&mut tx, OrderPaid { order: 42 })?; // `.await` where the driver is async
//! tx.commit();
//!
//! let mail = async |Event(paid): Event<OrderPaid>| std::io::Result::Ok(println!("mail about {}", paid.order));
//! let mails = Subscription::new("mails".parse()?, LogName::outbox());
//! let relay = Relay::builder(Arc::new(store.clone()), mails).router(Router::new().on(mail))?.build()?;
//! assert_eq!(relay.drain(None).await?.delivered, 1); // what is there, and no more
//!
//! // Until a signal, with retention: see `Service`.
//! let service = Service::builder(store).outbox("mails", Router::new().on(mail)).build()?;
//! service.run_until(std::future::ready(())).await?; // tokio::signal::ctrl_c()
//! # Ok(())
//! # }
//! ```
//!
//! # In your transaction
//!
//! [`Postbox::append`] takes one event or several, [typed](derive@Event) or [not](NewEvent), in the
//! transaction of your driver. A transaction of another database is a compile error (with
//! `sea-orm`, which has one type for all, an error of the append), and so is a client or a pool,
//! which would commit the event by itself:
//!
//! ```compile_fail,E0277
//! # async fn example(mut client: tokio_postgres::Client) -> postbox::Result<()> {
//! # use postbox::{NewEvent, Postbox, postgres::Postgres};
//! Postbox::new(Postgres::default()).append(&mut client, NewEvent::json("t", "{}")).await?;
//! # Ok(())
//! # }
//! ```
//!
//! A router lends handlers the transaction that settles their event: see
//! [`Router::in_transaction`](router::Router::in_transaction). A handler that asks for the
//! transaction of another store does not compile, nor does a handler without a transaction in such
//! a router:
//!
//! ```compile_fail,E0277
//! # use postbox::router::{Event, Router, Tx};
//! # #[derive(postbox::Event, serde::Deserialize)]
//! # #[event(topic = "order.paid")]
//! # struct OrderPaid {}
//! # use postbox::{postgres::PostgresStore, sqlite::SqliteStore};
//! # type Returned = Result<(), std::io::Error>;
//! fn ledger(_: Event<OrderPaid>, _: Tx<'_, SqliteStore>) -> Returned { Ok(()) }
//! # fn example(store: PostgresStore) {
//! let router: Router<(), PostgresStore> = Router::in_transaction(&store).on(ledger);
//! # }
//! ```
//!
//! ```compile_fail,E0277
//! # use postbox::router::{Event, Router, Tx};
//! # #[derive(postbox::Event, serde::Deserialize)]
//! # #[event(topic = "order.paid")]
//! # struct OrderPaid {}
//! # use postbox::{postgres::PostgresStore, sqlite::SqliteStore};
//! # type Returned = Result<(), std::io::Error>;
//! async fn mail(_: Event<OrderPaid>) -> Returned { Ok(()) }
//! # fn example(store: PostgresStore) {
//! let router: Router<(), PostgresStore> = Router::in_transaction(&store).on(mail);
//! # }
//! ```
//!
//! | feature | brings | default |
//! |---|---|---|
//! | `postgres` | the `postgres` module: `PostgresStore`; append in transactions of `tokio-postgres` and `deadpool-postgres` | yes |
//! | `sqlite` | the `sqlite` module: `SqliteStore`; append in transactions of `rusqlite` | no |
//! | `diesel` | append in transactions of `diesel` 2 on libpq | no |
//! | `diesel-async` | append in Postgres transactions of `diesel-async`, and handlers in those of your pool | no |
//! | `sea-orm` | append in Postgres transactions of `sea-orm` 2 | no |
//! | `sqlx` | append in Postgres transactions of `sqlx` 0.9, and handlers in those of your pool | no |
//! | `sqlx08` | append in Postgres transactions of `sqlx` 0.8 | no |
//! | `sqlx-sqlite` | append in SQLite transactions of `sqlx` 0.9 | no |
//! | `schema` | the `schema` module: JSON Schemas of events, checked at the append and before handlers | no |
//! | `schemars` | schemas from types that derive `schemars::JsonSchema` 1 | no |
//! | `opentelemetry` | the `otel` module: traces that go with the events | no |
//! | `http` | the `http` module: the signed webhook sink; `ingress`: webhooks in; `listen`: serving them to strangers; `webhook`: sign and verify | no |
//!
//! # The guarantee
//!
//! An event appended in a transaction that commits reaches every subscription at least once, in
//! commit order per key. An event of a transaction that rolls back reaches none. If handler and
//! store share a database, the handler's *effect* happens exactly once.
//!
//! # What this crate deliberately does not do
//!
//! It decides nothing about events. It re-exports the other crates, so that one line in a manifest
//! is enough, and its [`Service`] starts and stops their parts together.

/// Checks that the README's sample compiles.
#[cfg(all(doctest, feature = "postgres"))]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// Checks that the guide's samples compile.
#[cfg(all(doctest, feature = "postgres"))]
#[doc = include_str!("../../../docs/guide/rust.md")]
struct Guide;

mod service;
pub mod test;

/// A point in time, as in [`NewEvent::deliver_at`].
pub use jiff::Timestamp;
/// The macro for implementations of a layer, a sink or a source.
pub use postbox_core::async_trait;
pub use postbox_core::{
    Aggregate, Append, Appended, Clock, Context, Delivery, Error, ErrorKind, EventId, Headers, IntoEvents, LogName,
    Migrate, NewEvent, OnDead, Ordering, Outcome, Postbox, Recorded, Result, RetryPolicy, SourceName, Subscription,
    SubscriptionName, TypedEvent,
};
/// Implements [`TypedEvent`] for a type.
///
/// ```
/// use serde::{Deserialize, Serialize};
///
/// #[derive(postbox::Event, Serialize, Deserialize)]
/// #[event(topic = "order.paid", key = "order", aggregate = "order", schema_version = 2)]
/// struct OrderPaid {
///     order: i64,
///     cents: i64,
/// }
///
/// # fn main() -> postbox::Result<()> {
/// # use postbox::{IntoEvents, NewEvent};
/// let paid = OrderPaid { order: 42, cents: 1990 };
/// let event = NewEvent::json("order.paid", r#"{"order":42,"cents":1990}"#).key("42").aggregate("order");
/// assert_eq!(paid.into_events()?, [event.header("schema-version", "2")]);
/// # Ok(())
/// # }
/// ```
///
/// | in `#[event(…)]` | value | meaning |
/// |---|---|---|
/// | `topic` | text, required | what happened |
/// | `key` | a field's name | events of one key are delivered in commit order; the field is written with `Display` |
/// | `schema_version` | a number from 1, the default | the schema version of the payload |
/// | `from` | a type | the type of an older version, from which this one is converted by `From` |
/// | `aggregate` | text | the kind of thing that the key names |
/// | `kind` | text | `domain`, the default, `integration`, … |
///
/// Events of an older version are read as the newer type, across any number of versions:
///
/// ```
/// # use serde::{Deserialize, Serialize};
/// #[derive(postbox::Event, Serialize, Deserialize)]
/// #[event(topic = "order.paid")]
/// struct OrderPaidV1 {
///     order: i64,
/// }
///
/// #[derive(postbox::Event, Serialize, Deserialize)]
/// #[event(topic = "order.paid", schema_version = 2, from = "OrderPaidV1")]
/// struct OrderPaid {
///     order: i64,
///     cents: Option<i64>,
/// }
///
/// impl From<OrderPaidV1> for OrderPaid {
///     fn from(OrderPaidV1 { order }: OrderPaidV1) -> Self {
///         Self { order, cents: None }
///     }
/// }
/// ```
///
/// The topic is required:
///
/// ```compile_fail
/// #[derive(postbox::Event)]
/// struct OrderPaid {
///     order: i64,
/// }
/// ```
///
/// The key must be one of the fields:
///
/// ```compile_fail
/// #[derive(postbox::Event)]
/// #[event(topic = "order.paid", key = "ordr")]
/// struct OrderPaid {
///     order: i64,
/// }
/// ```
pub use postbox_derive::Event;
pub use postbox_engine::{JsonLines, Relay, RelayBuilder, RelaySettings, SharedRate, TokioClock};
pub use postbox_memory::MemoryStore;
pub use postbox_router::{InProcessBus, handler_sink};
pub use service::{Service, ServiceBuilder};
/// The token that stops [`Relay::run`].
pub use tokio_util::sync::CancellationToken;

/// The names a service uses most, for `use postbox::prelude::*`.
///
/// `Event` is both the derive and the argument of a handler.
pub mod prelude {
    pub use postbox_core::{Delivery, Headers, LogName, Migrate, NewEvent, Outcome, Postbox};
    pub use postbox_derive::Event;
    pub use postbox_router::{Event, Router, State, Tx};

    pub use crate::Service;
}

/// The contracts and all their types, for authors of stores, sinks and sources, and for programs
/// that inspect or administer a store.
pub use postbox_core as contract;
/// The relay and its parts, with their settings and counters.
pub use postbox_engine as engine;
/// The store in memory, and a source in memory.
pub use postbox_memory as memory;
/// The receiver: stores the messages of a source, each once.
pub use postbox_receiver as receiver;
/// Handlers by topic.
pub use postbox_router as router;

/// Drivers besides `tokio-postgres` whose Postgres transactions [`Postbox::append`] takes. Handlers
/// can work in transactions of `sqlx` 0.9 and `diesel-async`.
#[cfg(feature = "postgres")]
pub mod drivers {
    #[cfg(feature = "diesel")]
    pub use postbox_diesel as diesel;
    #[cfg(feature = "diesel-async")]
    pub use postbox_diesel_async as diesel_async;
    #[cfg(feature = "sea-orm")]
    pub use postbox_sea_orm as sea_orm;
    #[cfg(feature = "sqlx")]
    pub use postbox_sqlx as sqlx;
    #[cfg(feature = "sqlx08")]
    pub use postbox_sqlx08 as sqlx08;
}

/// The signed webhook sink.
#[cfg(feature = "http")]
pub use postbox_http as http;
/// Receiving webhooks: a router that verifies, stores and answers.
#[cfg(feature = "http")]
pub use postbox_ingress as ingress;
/// Serving a router to the public: deadlines, and a limit on connections.
#[cfg(feature = "http")]
pub use postbox_listen as listen;
/// Traces: events carry the context of the span they are appended in.
#[cfg(feature = "opentelemetry")]
pub use postbox_otel as otel;
/// The Postgres store.
#[cfg(feature = "postgres")]
pub use postbox_postgres as postgres;
/// JSON Schemas of events.
#[cfg(feature = "schema")]
pub use postbox_schema as schema;
/// The SQLite store.
#[cfg(feature = "sqlite")]
pub use postbox_sqlite as sqlite;
/// Signing and verifying webhooks: keys for the sink, verifiers for the ingress.
#[cfg(feature = "http")]
pub use postbox_webhook as webhook;
