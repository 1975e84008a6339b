//! One event per transaction, by Postbox and by other libraries, taking turns on one server: the
//! helper program of `cargo xtask bench append --peers`, which runs it and prints the results.
//!
//! `postbox-bench-peers URL CONNECTIONS` prints the names of the sides. Then it reads lines `SIDE
//! WRITERS MILLISECONDS` and prints for each how many events were committed. The database already
//! has the tables of Postbox.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use futures::future::try_join_all;
use outbox_core::prelude::{NoIdempotency, OutboxConfig, OutboxService};
use outbox_postgres::PostgresWriter;
use pgmq::PGMQueueExt;
use postbox_core::{NewEvent, Postbox};
use postbox_postgres::Postgres;
use postbox_sqlx as _;
use riverqueue::migrate::PostgresMigrator;
use riverqueue::{Client, JobArgs};
use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgPool, PgPoolOptions};

const KEYS: usize = 10_000;
const PAYLOAD_BYTES: usize = 300;
const TOPIC: &str = "order.paid";
const QUEUE: &str = "bench";

#[derive(Debug, Clone, Copy)]
enum Side {
    Postbox,
    /// With a statement cached in the connection, as the others do.
    PostboxPrepared,
    Pgmq,
    OutboxCore,
    Riverqueue,
}

const SIDES: [(&str, Side); 5] = [
    ("postbox", Side::Postbox),
    ("postbox-prepared", Side::PostboxPrepared),
    ("pgmq", Side::Pgmq),
    ("outbox-core", Side::OutboxCore),
    ("riverqueue", Side::Riverqueue),
];

/// The event of every side: each makes its 300 bytes of JSON from it.
#[derive(Debug, Clone, Serialize, Deserialize, JobArgs)]
#[river(kind = "order.paid")]
struct OrderPaid {
    order: usize,
    status: String,
    note: String,
}

impl OrderPaid {
    fn number(order: usize) -> Self {
        let head = format!(r#"{{"order":{order},"status":"paid","note":""}}"#);
        Self { order, status: "paid".to_owned(), note: "x".repeat(PAYLOAD_BYTES - head.len()) }
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().context("no URL")?;
    let connections = arguments.next().context("no number of connections")?.parse()?;
    let inserters = Inserters::open(&url, connections).await?;
    println!("{}", SIDES.map(|(name, _)| name).join(" "));
    for line in std::io::stdin().lines() {
        let line = line?;
        let [name, writers, milliseconds] = line.split(' ').collect::<Vec<_>>()[..] else { bail!("not {line}") };
        let (_, side) = SIDES.into_iter().find(|(known, _)| *known == name).context("no such side")?;
        let until = Instant::now() + Duration::from_millis(milliseconds.parse()?);
        let write = |number| tokio::spawn(inserters.clone().write(side, number, until));
        let mut count = 0;
        for written in try_join_all((0..writers.parse()?).map(write)).await? {
            count += written?;
        }
        println!("{count}");
    }
    Ok(())
}

/// The schema of `outbox-postgres`, which is in its package but not in its library.
fn outbox_schema() -> anyhow::Result<String> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["metadata", "--format-version", "1", "--locked", "--manifest-path"]);
    let output = cargo.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).output()?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    let package = packages.iter().find(|package| package["name"] == "outbox-postgres").context("no outbox-postgres")?;
    let manifest = Path::new(package["manifest_path"].as_str().context("no manifest")?);
    for file in manifest.with_file_name("migrations").read_dir()? {
        let path = file?.path();
        if path.to_string_lossy().ends_with("_init.sql") {
            return Ok(std::fs::read_to_string(path)?);
        }
    }
    bail!("{} has no first migration", manifest.display())
}

#[derive(Clone)]
struct Inserters {
    pool: PgPool,
    river: Client,
    /// A pool of the `sqlx` version that the two below use.
    pool08: sqlx08::PgPool,
    pgmq: PGMQueueExt,
    outbox_core: Arc<OutboxService<PostgresWriter, NoIdempotency, OrderPaid>>,
}

impl Inserters {
    /// Installs the tables of the others, as each documents.
    async fn open(url: &str, connections: u32) -> anyhow::Result<Self> {
        let pool = PgPoolOptions::new().max_connections(connections).connect(url).await?;
        let pool08 = sqlx08::postgres::PgPoolOptions::new().max_connections(connections).connect(url).await?;
        let pgmq = PGMQueueExt::new_with_pool(pool08.clone()).await;
        pgmq.install_sql_from_embedded().await?;
        pgmq.create(QUEUE).await?;
        sqlx08::Executor::execute(&pool08, outbox_schema()?.as_str()).await?;
        let config = Arc::new(OutboxConfig::<OrderPaid>::default());
        PostgresMigrator::new(pool.clone()).migrate_up().await?;
        Ok(Self {
            pgmq,
            pool08,
            outbox_core: Arc::new(OutboxService::new(Arc::new(PostgresWriter), config)),
            river: Client::builder(pool.clone()).build()?,
            pool,
        })
    }

    /// Runs one writer on its own connection; returns the number of events it committed.
    async fn write(self, side: Side, number: usize, until: Instant) -> anyhow::Result<usize> {
        let events = (number * 1_000_003..).map(OrderPaid::number).take_while(|_| Instant::now() < until);
        match side {
            Side::Postbox | Side::PostboxPrepared | Side::Riverqueue => self.write09(side, events).await,
            Side::Pgmq | Side::OutboxCore => self.write08(side, events).await,
        }
    }

    async fn write09(self, side: Side, events: impl Iterator<Item = OrderPaid>) -> anyhow::Result<usize> {
        use sqlx::Connection as _;

        let prepared = matches!(side, Side::PostboxPrepared);
        let postbox = Postbox::new(Postgres { prepared, ..Postgres::default() });
        let mut connection = self.pool.acquire().await?;
        let mut count = 0;
        for paid in events {
            let mut tx = connection.begin().await?;
            if let Side::Riverqueue = side {
                self.river.insert(paid).tx(&mut tx).await?;
            } else {
                let event = NewEvent::json(TOPIC, serde_json::to_vec(&paid)?);
                postbox.append(&mut tx, event.key(format!("order-{}", paid.order % KEYS))).await?;
            }
            tx.commit().await?;
            count += 1;
        }
        Ok(count)
    }

    async fn write08(self, side: Side, events: impl Iterator<Item = OrderPaid>) -> anyhow::Result<usize> {
        use sqlx08::Connection as _;

        let mut connection = self.pool08.acquire().await?;
        let mut count = 0;
        for paid in events {
            let mut tx = connection.begin().await?;
            if let Side::Pgmq = side {
                self.pgmq.send_with_cxn(QUEUE, &paid, &mut *tx).await?;
            } else {
                self.outbox_core.add_event(TOPIC, paid, None, &mut *tx).await?;
            }
            tx.commit().await?;
            count += 1;
        }
        Ok(count)
    }
}
