//! The service, as you would write it: axum, sqlx and Postbox.

use std::sync::Arc;

use anyhow::ensure;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use postbox::drivers::sqlx::Sqlx;
use postbox::ingress::{self, WebhookSource};
use postbox::listen::{ServeLimits, serve};
use postbox::postgres::{Postgres, PostgresConfig, PostgresStore};
use postbox::router::{self, Event, Router, Tx};
use postbox::webhook::{Scheme, Settings, verifier};
use postbox::{Context, LogName, Migrate as _, Postbox, Service, TokioClock};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tokio::net::TcpListener;
use tracing::Instrument as _;

use crate::Parcels;

#[derive(postbox::Event, Serialize, Deserialize)]
#[event(topic = "order.placed", key = "order")]
pub struct OrderPlaced {
    order: i64,
}

#[derive(postbox::Event, Serialize, Deserialize)]
#[event(topic = "order.paid", key = "order")]
pub struct OrderPaid {
    order: i64,
}

/// The part of Stripe's event that the shop needs.
#[derive(postbox::Event, Deserialize)]
#[event(topic = "checkout.session.completed")]
pub struct CheckoutCompleted {
    data: Data,
}

#[derive(Deserialize)]
struct Data {
    object: Session,
}

#[derive(Deserialize)]
struct Session {
    client_reference_id: String,
    amount_total: i64,
}

#[derive(Deserialize)]
pub struct NewOrder {
    cents: i64,
}

#[derive(Clone)]
pub struct Shop {
    pool: PgPool,
    postbox: Postbox<Postgres>,
}

/// `POST /orders`: the order and its event commit together, or neither does.
async fn place(State(shop): State<Shop>, Json(new): Json<NewOrder>) -> Result<Json<i64>, Refused> {
    // A task, because a client that leaves ends this future, and sqlx must finish its BEGIN.
    let placing = Context::current().scope(async move {
        let mut tx = shop.pool.begin().await?;
        let insert = sqlx::query_scalar("INSERT INTO orders (cents) VALUES ($1) RETURNING id");
        let order = insert.bind(new.cents).fetch_one(&mut *tx).await?;
        shop.postbox.append(&mut tx, OrderPlaced { order }).await?;
        // Its CHECK fails when nothing is left; then the order and its event are rolled back, too.
        sqlx::query("UPDATE stock SET pieces = pieces - 1").execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(Json(order))
    });
    tokio::spawn(placing.in_current_span()).await?
}

async fn confirm(
    Event(placed): Event<OrderPlaced>,
    router::State(parcels): router::State<Parcels>,
) -> anyhow::Result<()> {
    parcels.note(format!("order {} is confirmed", placed.order));
    Ok(())
}

async fn ship(Event(paid): Event<OrderPaid>, router::State(parcels): router::State<Parcels>) -> anyhow::Result<()> {
    parcels.note(format!("order {} is shipped", paid.order));
    Ok(())
}

/// A payment is applied once, however often Stripe sends it: the update, the next event and the
/// position of the subscription commit together, in a transaction of the shop's pool.
async fn receive_payment(
    Event(completed): Event<CheckoutCompleted>,
    router::State(postbox): router::State<Postbox<Postgres>>,
    Tx(tx): Tx<'_, Sqlx>,
) -> anyhow::Result<()> {
    let Session { client_reference_id, amount_total } = completed.data.object;
    let order: i64 = client_reference_id.parse()?;
    let update = sqlx::query("UPDATE orders SET paid = paid + $2 WHERE id = $1").bind(order).bind(amount_total);
    ensure!(update.execute(&mut *tx).await?.rows_affected() == 1, "there is no order {order}");
    postbox.append(tx, OrderPaid { order }).await?;
    Ok(())
}

/// Serves until the signal.
pub async fn run(
    url: &str,
    stripe_secret: &str,
    listener: TcpListener,
    parcels: Parcels,
    signal: impl Future,
) -> anyhow::Result<()> {
    let pool = PgPool::connect(url).await?;
    let store = PostgresStore::connect(PostgresConfig::new(url)).await?;
    store.up().await?; // Once, or from your deployment: `postbox migrate up --store URL`.
    let (postbox, sqlx) = (store.postbox(), Sqlx::new(&store, pool.clone()));
    let stripe = verifier(Scheme::Stripe, &[stripe_secret], &Settings::default())?;
    let service = Service::builder(store)
        .outbox("parcels", Router::new().on(confirm).on(ship).with_state(parcels))
        .source(WebhookSource::new("stripe".parse()?, LogName::inbox(), stripe))
        .inbox("payments", Router::in_transaction(&sqlx).on(receive_payment).with_state(postbox.clone()))
        .build()?;
    let pages = axum::Router::new().route("/orders", post(place)).with_state(Shop { pool, postbox });
    let pages = pages.merge(ingress::router(service.ingress()));
    let serving = serve(listener, pages, ServeLimits::default(), Arc::new(TokioClock::new()), service.stopping());
    let ((), ran) = tokio::join!(serving, service.run_until(signal));
    Ok(ran?)
}

/// Why an order was refused.
pub struct Refused(anyhow::Error);

impl<E: Into<anyhow::Error>> From<E> for Refused {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let database = self.0.downcast_ref().and_then(sqlx::Error::as_database_error);
        if database.is_some_and(|error| error.is_check_violation()) {
            return (StatusCode::CONFLICT, "sold out\n").into_response();
        }
        eprintln!("an order failed: {:#}", self.0);
        (StatusCode::INTERNAL_SERVER_ERROR, "please try again\n").into_response()
    }
}
