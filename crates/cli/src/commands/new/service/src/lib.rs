//! Takes orders over HTTP and confirms each by mail.

use std::pin::pin;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use postbox::listen::{ServeLimits, serve};
use postbox::postgres::{Postgres, PostgresConfig, PostgresStore};
use postbox::router::{self, Event, Router};
use postbox::{Context, Migrate as _, Postbox, Service, TokioClock};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tokio::net::TcpListener;
use tracing::{Instrument as _, warn};

/// An event: its topic, and the field whose value is the ordering key.
#[derive(postbox::Event, Serialize, Deserialize)]
#[event(topic = "order.placed", key = "order")]
pub struct OrderPlaced {
    pub order: i64,
    pub mail: String,
}

#[derive(Deserialize)]
struct NewOrder {
    mail: String,
}

/// State of the pages.
#[derive(Clone)]
struct Shop {
    pool: PgPool,
    postbox: Postbox<Postgres>,
    service: Service,
}

/// State of the event handlers. It prints where yours would send a mail.
#[derive(Clone)]
pub struct Mailer;

impl Mailer {
    async fn send(&self, to: &str, text: &str) -> Result<(), NoSuchAddress> {
        if !to.contains('@') {
            return Err(NoSuchAddress);
        }
        println!("mail to {to}: {text}");
        Ok(())
    }
}

#[derive(Debug)]
struct NoSuchAddress;

impl std::fmt::Display for NoSuchAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("there is no such address")
    }
}

impl std::error::Error for NoSuchAddress {}

/// `POST /orders`: the order and its event commit together, or neither does.
async fn place(State(shop): State<Shop>, Json(new): Json<NewOrder>) -> Result<Json<i64>, StatusCode> {
    // A task, because a client that leaves ends this future, and sqlx must finish its BEGIN.
    let placing = Context::current().scope(async move {
        let mut tx = shop.pool.begin().await?;
        let insert = sqlx::query_scalar("INSERT INTO orders (mail) VALUES ($1) RETURNING id");
        let order: i64 = insert.bind(&new.mail).fetch_one(&mut *tx).await?;
        shop.postbox.append(&mut tx, OrderPlaced { order, mail: new.mail }).await?;
        tx.commit().await?;
        anyhow::Ok(order)
    });
    let placed = tokio::spawn(placing.in_current_span());
    placed.await.map_err(anyhow::Error::from).flatten().map(Json).map_err(|error| {
        eprintln!("an order failed: {error:#}");
        StatusCode::INTERNAL_SERVER_ERROR
    })
}

/// `GET /ready`: whether events flow. The log says why not, and not the answer, which anyone gets.
async fn ready(State(shop): State<Shop>) -> StatusCode {
    match shop.service.ready().await {
        Ok(()) => StatusCode::OK,
        Err(error) => {
            warn!(%error, "not ready");
            StatusCode::SERVICE_UNAVAILABLE
        }
    }
}

/// Called at least once for each order, and again after an error.
async fn confirm(
    Event(placed): Event<OrderPlaced>,
    router::State(mailer): router::State<Mailer>,
) -> Result<(), NoSuchAddress> {
    mailer.send(&placed.mail, &format!("order {} is placed", placed.order)).await
}

/// The event handlers. An invalid address stays invalid, so its event is not retried.
pub fn handlers(mailer: Mailer) -> Router {
    Router::new().on(confirm).dead_on(|_: &NoSuchAddress| true).with_state(mailer)
}

/// Serves until it is asked to stop, then finishes the work in flight.
pub async fn run(url: &str, listener: TcpListener, asked_to_stop: impl Future) -> anyhow::Result<()> {
    let mut asked_to_stop = pin!(asked_to_stop);
    let (pages, service) = tokio::select! {
        started = start(url) => started?,
        _ = &mut asked_to_stop => return Ok(()),
    };
    let serving = serve(listener, pages, ServeLimits::default(), Arc::new(TokioClock::new()), service.stopping());
    let ((), ran) = tokio::join!(serving, service.run_until(asked_to_stop));
    Ok(ran?)
}

/// Waits for the database, and sets up its tables.
async fn start(url: &str) -> anyhow::Result<(axum::Router, Service)> {
    let pool = PgPool::connect(url).await?;
    sqlx::raw_sql(include_str!("schema.sql")).execute(&pool).await?;
    let store = PostgresStore::connect(PostgresConfig::new(url)).await?;
    store.up().await?; // or from your deployment: postbox migrate up
    let postbox = store.postbox();
    let service = Service::builder(store).outbox("mails", handlers(Mailer)).build()?;
    let shop = Shop { pool, postbox, service: service.clone() };
    let pages = axum::Router::new().route("/orders", post(place)).route("/ready", get(ready));
    let pages = pages.route("/health", get(|| async { StatusCode::OK }));
    Ok((pages.with_state(shop), service))
}
