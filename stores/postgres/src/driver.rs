//! For crates that support other drivers: handlers in a transaction of theirs, which also settles
//! their events.
//!
//! Such a crate implements [`Settles`] for a driver. It binds and executes. Statements, parameters
//! and errors are made here and in `postbox-postgres-sql`, so that all drivers behave alike.

use std::error::Error as _;
use std::time::Duration;

use postbox_core::{
    Database, Decide, Delivery, Error, ErrorKind, HandledFuture, Handlers, Lease, Outcome, Result, Settlement,
};
use postbox_postgres_sql::{Bound, unreachable};
use tokio::sync::Mutex;

use crate::PostgresStore;
use crate::apply::{self, Calls, EFFECT_CHECK, SETTINGS_OURS, SETTINGS_THEIRS};
use crate::execute::{Execute, Row};
use crate::settle::settle_in;

/// The statement that begins a transaction of handlers.
pub const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";

/// The rows that a [`Statement`] returned, each with its columns.
pub type Rows = Vec<Vec<Option<String>>>;

/// A driver whose transactions run handlers and settle their events, with [`apply_in`].
///
/// Behaviour: an error is [`Refusal::of`](postbox_postgres_sql::Refusal::of) if the server refused,
/// [`unreachable()`] if it did not answer, and
/// [`transaction_lost`](Error::transaction_lost) if the driver rolled the transaction back itself.
pub trait Settles: Database {
    /// The connection that the transaction is open on.
    type Connection: Send;

    /// Executes statements without parameters, and ignores their results.
    fn run(connection: &mut Self::Connection, sql: String) -> impl Future<Output = Result<()>> + Send;

    /// Whether a transaction is open that a handler began in the one that it was lent. `false` if
    /// the driver ends such a transaction itself.
    fn is_nested(_: &mut Self::Connection) -> bool {
        false
    }

    /// Executes a statement.
    fn rows(connection: &mut Self::Connection, statement: Statement) -> impl Future<Output = Result<Rows>> + Send;
}

/// A statement of a settlement. Like an
/// [`AppendStatement`](postbox_postgres_sql::AppendStatement), do not prepare it under a name.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statement {
    /// What to execute. The columns it returns, if any, are `text`.
    pub sql: String,
    /// Its parameters `$1`, `$2`, …. Bind each as `text`.
    pub texts: Vec<Option<String>>,
}

impl Statement {
    fn of(sql: &str, bound: &[Bound<'_>]) -> Self {
        let texts: Vec<_> = bound.iter().map(Bound::text).collect();
        Self { sql: cast(sql, bound, &texts), texts }
    }
}

/// Returns the statement with each parameter cast from `text` to its type. Between double quotes is
/// a name, which may contain a dollar sign.
fn cast(sql: &str, bound: &[Bound<'_>], texts: &[Option<String>]) -> String {
    let part =
        |(nth, part): (usize, &str)| if nth % 2 == 1 { part.to_owned() } else { cast_unquoted(part, bound, texts) };
    sql.split('"').enumerate().map(part).collect::<Vec<_>>().join("\"")
}

fn cast_unquoted(sql: &str, bound: &[Bound<'_>], texts: &[Option<String>]) -> String {
    let mut parts = sql.split('$');
    let mut cast = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        let (number, rest) = part.split_at(digits);
        let of = number.parse().ok().and_then(|number: usize| bound.iter().zip(texts).nth(number.checked_sub(1)?));
        let (of, text) = of.expect("our statements have a value for each parameter, and no other dollar sign");
        cast.push_str(&of.cast(number, text.as_deref()));
        cast.push_str(rest);
    }
    cast
}

/// The work of handlers and the position of their events, written on a connection and not yet
/// committed.
#[derive(Debug)]
#[must_use = "commit the transaction, then say so: `committed`"]
pub struct Applied<'a> {
    store: &'a PostgresStore,
    lease: &'a Lease,
    settlement: Settlement<'a>,
    outcomes: Vec<Option<Outcome>>,
}

impl Applied<'_> {
    /// Call this after the commit. Returns the result for
    /// [`Apply::apply`](postbox_core::Apply::apply).
    pub fn committed(self) -> Vec<Option<Outcome>> {
        apply::committed(self.store, self.lease, &self.settlement);
        self.outcomes
    }
}

/// Does the work of [`Apply::apply`](postbox_core::Apply::apply) between the begin and the commit
/// of a transaction. Both of these belong to the driver.
///
/// Begin with [`BEGIN`], on a connection that is [`Borrowed`]. If anything fails before
/// [`committed`](Applied::committed), or the future is dropped, roll back. Do not give the
/// connection back to the pool before the server has answered.
pub async fn apply_in<'a, D>(
    store: &'a PostgresStore,
    connection: &mut D::Connection,
    handlers: &dyn Handlers<D>,
    lease: &'a Lease,
    deliveries: &[&'a Delivery],
    mut settlement: Settlement<'a>,
    decide: &Decide<'_>,
) -> Result<Applied<'a>>
where
    D: Settles + for<'t> Database<Lent<'t> = &'t mut <D as Settles>::Connection, Handled<'t> = HandledFuture<'t>>,
{
    let subscription = store.leased_for_handlers(&store.session_for_handlers().await?, lease, &settlement).await?;
    let mut lent = Lent::<D> { connection, handlers };
    let outcomes = apply::call_each(store, &mut lent, lease, deliveries, &mut settlement, decide).await?;
    let soon_over = &store.inner.modes.soon_over;
    D::run(connection, format!("{soon_over}; {}", *SETTINGS_OURS)).await?;
    let settled = {
        let on = On::<D>(Mutex::new(&mut *connection));
        settle_in(store, &on, lease, &subscription, deliveries, &settlement).await
    };
    if settled.as_ref().is_err_and(Error::is_stale) {
        same_database::<D>(store, connection).await?;
    }
    settled?;
    D::run(connection, SETTINGS_THEIRS.clone()).await?;
    Ok(Applied { store, lease, settlement, outcomes })
}

/// The error of a commit. If a handler left a transaction of its own open, e.g. by forgetting one
/// that it began, the driver ends that one instead, which the server refuses.
pub fn commit_failed(error: Error) -> Error {
    if !error.is_transaction_ended() {
        return error;
    }
    left_open()
}

fn left_open() -> Error {
    Error::transaction_lost("apply", "a handler began a transaction in it, and neither committed nor rolled it back")
}

/// The database of a connection: its id, and that of its cluster.
const DATABASE: &str = "SELECT pg_catalog.concat(d.oid, ' of ', c.system_identifier)
FROM pg_catalog.pg_database AS d, pg_catalog.pg_control_system() AS c WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()";

/// Checks that the handlers' connection and the store use the same database. In another one the
/// lane looks as if another relay held it.
async fn same_database<D: Settles>(store: &PostgresStore, connection: &mut D::Connection) -> Result<()> {
    let theirs = D::rows(connection, Statement::of(DATABASE, &[])).await?.into_iter().flatten().flatten().next();
    let ours: String = store.session_for_handlers().await?.row(DATABASE, &[]).await?.get(0);
    if theirs.is_none_or(|theirs| theirs == ours) {
        return Ok(());
    }
    let message = "the pool of the handlers leads to another database than the store; make both from one URL";
    Err(Error::new(ErrorKind::Mismatch, "apply", "pool_of_another_database", message))
}

/// A connection of a pool. If it is dropped instead of given back, it is closed: a transaction may
/// be open on it, or an answer outstanding.
#[derive(Debug)]
pub struct Borrowed<C> {
    connection: Option<C>,
    close: fn(C),
}

impl<C> Borrowed<C> {
    /// Wraps a connection. `close` takes it out of its pool and closes it.
    pub fn new(connection: C, close: fn(C)) -> Self {
        Self { connection: Some(connection), close }
    }

    /// The connection, while it is borrowed.
    pub fn connection(&mut self) -> &mut C {
        self.connection.as_mut().expect("only drop and its end take the connection")
    }

    /// Gives the connection back to its pool. No transaction may be open on it any more.
    pub fn give_back(mut self) {
        drop(self.connection.take());
    }
}

impl<C> Drop for Borrowed<C> {
    fn drop(&mut self) {
        self.connection.take().into_iter().for_each(self.close);
    }
}

/// Longest wait for a connection for handlers. Long enough to open one, and far shorter than the 30
/// seconds after which a waiting event counts as failed.
const WAIT: Duration = Duration::from_secs(10);

/// Waits for a connection for handlers, for 10 seconds at most: the pool may wait longer than an
/// event may take, or for ever.
pub async fn in_time<T>(connection: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout(WAIT, connection).await.ok()
}

/// The error if the handlers' pool had no connection in time. Unless it is full, it could not open
/// one. `setting` is the pool's name for its size.
pub fn no_connection(is_full: bool, setting: &str) -> Error {
    if !is_full {
        return unreachable("apply", "the handlers' pool could not open a connection in time");
    }
    let message = format!(
        "no free connection of the handlers' pool in time; raise its {setting}, or look for long calls and a database that does not answer"
    );
    Error::new(ErrorKind::Unavailable, "apply", "pool_exhausted", message)
}

/// How often a handler's work is taken back. Instead of executing a statement, `sqlx` returns the
/// error of an earlier one whose future the handler dropped. It leaves at most one such statement,
/// and the rollback of a nested transaction.
const TAKE_BACKS_MAX: usize = 3;

/// A connection that is lent to one handler after another.
struct Lent<'c, D: Settles> {
    connection: &'c mut D::Connection,
    handlers: &'c dyn Handlers<D>,
}

impl<D> Calls for Lent<'_, D>
where
    D: Settles + for<'t> Database<Lent<'t> = &'t mut <D as Settles>::Connection, Handled<'t> = HandledFuture<'t>>,
{
    async fn rows(&mut self, sql: String) -> Result<Vec<Row>> {
        D::rows(self.connection, Statement::of(&sql, &[])).await
    }

    async fn call(&mut self, delivery: &Delivery, after: &str) -> Result<Outcome> {
        let Self { connection, handlers } = self;
        D::run(connection, "SAVEPOINT postbox_handler".to_owned()).await?;
        let mut outcome = apply::handled(delivery, in_turn(*handlers, &mut **connection, delivery)).await;
        if outcome.is_delivered() && D::is_nested(connection) {
            let lost = left_open();
            outcome = Outcome::retry(lost.code().to_owned(), lost.message());
        }
        if outcome.is_delivered() {
            match D::run(connection, format!("{EFFECT_CHECK}; {after}; RELEASE SAVEPOINT postbox_handler")).await {
                Ok(()) => return Ok(outcome),
                Err(error) => match apply::after_handler(error) {
                    lost if lost.is_transaction_lost() => return Err(lost),
                    // The source is the server's text. The message may name a cure of the store.
                    refused => {
                        let said = refused.source().map_or_else(|| refused.message().to_owned(), ToString::to_string);
                        outcome = apply::effect_refused(&said);
                    }
                },
            }
        }
        let take_back = "ROLLBACK TO SAVEPOINT postbox_handler; RELEASE SAVEPOINT postbox_handler";
        let mut taken_back = Ok(());
        for _ in 0..TAKE_BACKS_MAX {
            taken_back = D::run(connection, take_back.to_owned()).await.map_err(apply::after_handler);
            if taken_back.as_ref().err().is_none_or(Error::is_transaction_lost) {
                break;
            }
        }
        match taken_back {
            // The event has to answer for it. As an error of the store, it would stop the lane.
            Err(error) if !error.is_transaction_lost() && !error.is_transaction_ended() => {
                Err(Error::transaction_lost("apply", error.message()))
            }
            taken_back => taken_back.map(|()| outcome),
        }
    }
}

/// Calls the handlers of an event one after another, up to the first that fails.
async fn in_turn<D>(handlers: &dyn Handlers<D>, connection: &mut D::Connection, delivery: &Delivery) -> Outcome
where
    D: Settles + for<'t> Database<Lent<'t> = &'t mut <D as Settles>::Connection, Handled<'t> = HandledFuture<'t>>,
{
    let mut nth = 0;
    while let Some(handled) = handlers.call(nth, delivery, &mut *connection) {
        let outcome = handled.await;
        if !outcome.is_delivered() {
            return outcome;
        }
        nth += 1;
    }
    Outcome::DELIVERED
}

/// A connection that a settlement is written on. The lock is fair, so statements run in the order
/// of the calls.
struct On<'c, D: Settles>(Mutex<&'c mut D::Connection>);

impl<D: Settles> Execute for On<'_, D> {
    async fn rows(&self, sql: &str, bound: &[Bound<'_>]) -> Result<Vec<Row>> {
        let statement = Statement::of(sql, bound);
        D::rows(&mut **self.0.lock().await, statement).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postbox_postgres_sql::{SchemaName, bound};

    #[test]
    fn every_parameter_is_cast_from_text() {
        let (one, many) = (7_i32, vec![Some("a,b"), None]);
        let statement = Statement::of("SELECT f($1, $2::text[], $1)", &bound![one, many]);
        let json = "(ARRAY(SELECT pg_catalog.json_array_elements_text($2::text::pg_catalog.json)))";
        let sql =
            format!("SELECT f($1::text::pg_catalog.int4, {json}::pg_catalog._text::text[], $1::text::pg_catalog.int4)");
        assert_eq!(statement.sql, sql);
        assert_eq!(statement.texts, [Some("7".to_owned()), Some(r#"["a,b",null]"#.to_owned())]);
    }

    #[test]
    fn a_dollar_sign_in_a_name_is_no_parameter() {
        let schema = SchemaName::new("a$1\"b").expect("a name");
        let statement = Statement::of(&schema.sql("SELECT {s}.f($1)"), &bound![7_i32]);
        assert_eq!(statement.sql, r#"SELECT "a$1""b".f($1::text::pg_catalog.int4)"#);
    }
}
