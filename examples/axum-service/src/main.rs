//! A shop with axum and sqlx. Customers order until it is sold out, and try beyond that. A stranger
//! claims that orders are paid, and Stripe reports each payment twice. Then the shop is asked to
//! stop, and the database is compared with what the handlers did.

mod shop;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, ensure};
use postbox::webhook::{UnixSeconds, stripe};
use sqlx::PgPool;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};

const PIECES: i64 = 20;
const CUSTOMERS: i64 = 30;
const PATIENCE: Duration = Duration::from_secs(60);
/// The secret shared by Stripe and the shop. A real service takes it from the environment.
const SECRET: &str = "whsec_the_shop_and_stripe_know_this";
const GUESSED: &str = "whsec_somebody_else_guesses_this_one";

/// What the handlers did.
#[derive(Clone)]
pub struct Parcels(Arc<watch::Sender<Vec<String>>>);

impl Parcels {
    fn note(&self, what: String) {
        self.0.send_modify(|done| done.push(what));
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::var("DATABASE_URL").context("set DATABASE_URL to an empty Postgres database")?;
    let pool = PgPool::connect(&url).await?;
    let orders = "CREATE TABLE orders (id bigserial PRIMARY KEY, cents bigint NOT NULL, paid bigint DEFAULT 0)";
    sqlx::query(orders).execute(&pool).await?;
    sqlx::query("CREATE TABLE stock (pieces bigint CHECK (pieces >= 0))").execute(&pool).await?;
    sqlx::query("INSERT INTO stock VALUES ($1)").bind(PIECES).execute(&pool).await?;

    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let parcels = Parcels(Arc::new(watch::Sender::new(Vec::new())));
    let (signal, signalled) = oneshot::channel::<()>(); // a real service: `tokio::signal::ctrl_c()`
    let running = tokio::spawn({
        let (url, parcels) = (url.clone(), parcels.clone());
        async move { shop::run(&url, SECRET, listener, parcels, signalled).await }
    });

    let mut placed = Vec::new();
    for cents in 1..=CUSTOMERS {
        let (status, answer) = request(address, "/orders", "", &format!(r#"{{"cents":{cents}}}"#)).await?;
        match status {
            200 => placed.push((answer.trim().parse::<i64>()?, cents)),
            status => ensure!(status == 409 && cents > PIECES, "{status}: {answer}"),
        }
    }
    for (secret, accepted) in [(GUESSED, 401), (SECRET, 202), (SECRET, 200)] {
        for (order, cents) in &placed {
            let session = format!(r#"{{"client_reference_id":"{order}","amount_total":{cents}}}"#);
            let event = r#"{"id":"evt_ID","type":"checkout.session.completed","data":{"object":SESSION}}"#;
            let event = event.replace("ID", &order.to_string()).replace("SESSION", &session);
            let (status, answer) = request(address, "/in/stripe", &signature(secret, &event)?, &event).await?;
            ensure!(status == accepted, "{status}: {answer}");
        }
    }

    let shipped = |done: &Vec<String>| done.len() >= 2 * placed.len();
    tokio::time::timeout(PATIENCE, parcels.0.subscribe().wait_for(shipped)).await??;
    signal.send(()).expect("the shop waits for it");
    tokio::time::timeout(PATIENCE, running).await???;
    ensure!(TcpStream::connect(address).await.is_err(), "it still listens");

    let (orders, paid): (i64, i64) =
        sqlx::query_as("SELECT count(*), count(*) FILTER (WHERE paid = cents) FROM orders").fetch_one(&pool).await?;
    ensure!([orders, paid] == [PIECES; 2], "{orders} orders, {paid} paid once");
    let mut done = parcels.0.borrow().clone();
    let both = |order: i64| ["confirmed", "shipped"].map(|is| format!("order {order} is {is}"));
    let mut expected: Vec<_> = placed.iter().flat_map(|(order, _)| both(*order)).collect();
    done.sort();
    expected.sort();
    ensure!(done == expected, "{done:?}");
    println!(
        "{orders} orders placed, confirmed, paid once and shipped; {} refused without a trace",
        CUSTOMERS - PIECES
    );
    Ok(())
}

fn signature(secret: &str, body: &str) -> anyhow::Result<String> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs();
    let signed = stripe::Secret::new(secret)?.sign(UnixSeconds(now.try_into()?), body.as_bytes());
    Ok(signed.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect())
}

/// Posts JSON; returns the status and the body of the answer.
async fn request(address: SocketAddr, path: &str, header: &str, body: &str) -> anyhow::Result<(u16, String)> {
    let mut connection = TcpStream::connect(address).await?;
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: shop\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n{header}\r\n"
    );
    connection.write_all((head + body).as_bytes()).await?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await?;
    let status = answer.split(' ').nth(1).context("no answer")?.parse()?;
    Ok((status, answer.split_once("\r\n\r\n").context("no body")?.1.to_owned()))
}
