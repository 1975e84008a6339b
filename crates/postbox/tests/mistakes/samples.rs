//! Usual mistakes, each with a comment that says what the compiler has to say about its line.

use postbox::postgres::{Postgres, PostgresStore};
use postbox::router::{Event, Router, State, Tx};
use postbox::sqlite::SqliteStore;
use postbox::{MemoryStore, NewEvent, Postbox, Service};

#[derive(postbox::Event, serde::Serialize, serde::Deserialize)]
#[event(topic = "order.paid", key = "order")]
struct OrderPaid {
    order: i64,
}

/// Not an event: nobody derived it.
struct Refund {}

/// Can be written, but not read.
#[derive(postbox::Event, serde::Serialize)]
#[event(topic = "order.lost")]
struct OrderLost {}

#[derive(Clone)]
struct Mailer {}

type Done = Result<(), std::io::Error>;

fn a_store_is_no_transaction(mut store: PostgresStore) {
    let postbox = Postbox::new(Postgres::default());
    let _ = postbox.append(&mut store, OrderPaid { order: 42 }); //~ begin one, and pass `&mut tx`
}

fn a_transaction_of_another_database(Tx(mut tx): Tx<'_, SqliteStore>) {
    let postbox = Postbox::new(Postgres::default());
    let _ = postbox.append(&mut tx, NewEvent::json("t", "{}")); //~ not a transaction that a Postbox of `Postgres` can append to
}

fn a_value_that_is_no_event(store: MemoryStore) {
    let mut tx = store.begin();
    let _ = Postbox::new(store.clone()).append(&mut tx, Refund {}); //~ #[derive(postbox::Event
}

fn a_result_of_an_event(store: MemoryStore, placed: Result<NewEvent, std::io::Error>) {
    let mut tx = store.begin();
    let _ = Postbox::new(store.clone()).append(&mut tx, &placed); //~ type annotations needed
    let _ = Postbox::new(store.clone()).append(&mut tx, placed); //~ type annotations needed
}

fn a_result_of_events(store: MemoryStore, placed: Result<Vec<NewEvent>, std::io::Error>) {
    let mut tx = store.begin();
    let _ = Postbox::new(store.clone()).append(&mut tx, &placed); //~ is no event
    let _ = Postbox::new(store.clone()).append(&mut tx, placed); //~ is no event
}

async fn returns_nothing(_: Event<OrderPaid>) {}

async fn returns_text(_: Event<OrderPaid>) -> Result<(), String> {
    Ok(())
}

async fn wants_what_cannot_be_read(_: Event<OrderLost>) -> Done {
    Ok(())
}

async fn wants_a_plain_value(_: OrderPaid) -> Done {
    Ok(())
}

async fn wants_a_mailer(_: Event<OrderPaid>, _: State<Mailer>) -> Done {
    Ok(())
}

async fn in_postgres(_: Event<OrderPaid>, _: Tx<'_, PostgresStore>) -> Done {
    Ok(())
}

async fn transaction_first(_: Tx<'_, PostgresStore>, _: Event<OrderPaid>) -> Done {
    Ok(())
}

async fn async_in_sqlite(_: Event<OrderPaid>, _: Tx<'_, SqliteStore>) -> Done {
    Ok(())
}

async fn outside(_: Event<OrderPaid>) -> Done {
    Ok(())
}

async fn wants_another_state(_: Event<OrderPaid>, _: State<i64>) -> Done {
    Ok(())
}

fn handlers(postgres: &PostgresStore, sqlite: &SqliteStore) {
    Router::<Mailer>::new().on(wants_another_state); //~ `State<Mailer>`
    Router::<()>::new().on(returns_nothing); //~ returns `Result<(), E>`
    Router::<()>::new().on(returns_text); //~ `E` is any `std::error::Error`
    Router::<()>::new().on(wants_what_cannot_be_read); //~ derives `postbox::Event` and `serde::Deserialize`
    Router::<()>::new().on(wants_a_plain_value); //~ its arguments, eight at most, are `Event<T>`
    Router::<()>::new().on(in_postgres); //~ belongs into a `Router::in_transaction(&store)`
    Router::<(), _>::in_transaction(postgres).on(outside); //~ without into a `Router::new()`
    Router::<(), _>::in_transaction(postgres).on(transaction_first); //~ `Tx<'_, Store>` as its last argument
    Router::<(), _>::in_transaction(sqlite).on(async_in_sqlite); //~ on SQLite, the one with a `Tx` is a plain `fn`
}

fn a_router_without_its_state(store: PostgresStore) {
    let router = Router::<Mailer>::new().on(wants_a_mailer);
    Service::builder(store).outbox("mails", router); //~ expected `Router<(), _>`, found `Router<Mailer>`
}

fn main() {}
