//! The environment of a benchmark: a migrated store with events of 300 bytes, and the server behind
//! it.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use clap::ValueEnum;
use postbox_core::{NewEvent, Postbox, Store};
use postbox_postgres::{Postgres, PostgresConfig, PostgresStore};
use postbox_sqlite::{Sqlite, SqliteConfig, SqliteStore};
use postbox_testkit::servers::{PrivatePostgres, Settings, Version};
use tokio_postgres::{Client, NoTls};

use crate::child::Job;
use crate::figure::Figure;
use crate::machine;

/// Events per INSERT: enough for full speed, and little memory.
const EVENTS_PER_INSERT: usize = 1_000;
/// Payload size, in bytes; most published figures use 300.
pub(crate) const PAYLOAD_BYTES: usize = 300;

/// Which stores to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Stores {
    Postgres,
    Sqlite,
    Both,
}

impl Stores {
    /// One bed for each store, with an empty log.
    pub(crate) async fn beds(self) -> anyhow::Result<Vec<Bed>> {
        let mut beds = Vec::new();
        if self != Self::Sqlite {
            beds.push(Bed::postgres().await?);
        }
        if self != Self::Postgres {
            let folder = tempfile::tempdir()?;
            let store = folder.path().join("bench.db").to_string_lossy().into_owned();
            open(&store).await?.up().await?;
            let file = rusqlite::Connection::open(&store)?;
            beds.push(Bed { store, place: Place::Sqlite(file), _folder: Some(folder) });
        }
        Ok(beds)
    }
}

/// A store and its server.
pub(crate) struct Bed {
    /// `postgres://…` or the path of a SQLite file.
    pub(crate) store: String,
    pub(crate) place: Place,
    _folder: Option<tempfile::TempDir>,
}

pub(crate) enum Place {
    Postgres(Client, PrivatePostgres),
    Sqlite(rusqlite::Connection),
}

/// The shape of a backlog.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    /// Number of different keys.
    pub(crate) keys: usize,
    /// Events per transaction.
    pub(crate) transaction: usize,
}

impl Bed {
    /// A durable Postgres with the memory of a production server. fsync stays on: a benchmark
    /// without flushes measures something that nobody runs.
    pub(crate) async fn postgres() -> anyhow::Result<Self> {
        let settings = Settings::durable().with("shared_buffers", "1GB").with("max_wal_size", "4GB");
        Self::on(PrivatePostgres::launch(Version::V15, settings).await).await
    }

    async fn on(server: PrivatePostgres) -> anyhow::Result<Self> {
        let store = server.fresh_database().await;
        open(&store).await?.up().await?;
        Ok(Self { place: Place::Postgres(connect(&store).await?, server), store, _folder: None })
    }

    /// Another database on the same server, with an empty log.
    pub(crate) async fn emptied(self) -> anyhow::Result<Self> {
        match self.place {
            Place::Postgres(_, server) => Self::on(server).await,
            Place::Sqlite(..) => anyhow::bail!("only a server has several databases"),
        }
    }

    /// Appends events `from..to` to the outbox.
    pub(crate) async fn fill(&mut self, from: usize, to: usize, shape: Shape) -> anyhow::Result<()> {
        for from in (from..to).step_by(shape.transaction) {
            let end = to.min(from + shape.transaction);
            let chunks = (from..end)
                .step_by(EVENTS_PER_INSERT)
                .map(|at| (at..end.min(at + EVENTS_PER_INSERT)).map(|n| event(n, shape.keys)).collect::<Vec<_>>());
            match &mut self.place {
                Place::Postgres(client, _) => {
                    let mut transaction = client.transaction().await?;
                    for events in chunks {
                        Postbox::new(Postgres::default()).append(&mut transaction, events).await?;
                    }
                    transaction.commit().await?;
                }
                Place::Sqlite(file) => {
                    let mut transaction = file.transaction()?;
                    for events in chunks {
                        Postbox::new(Sqlite).append(&mut transaction, events)?;
                    }
                    transaction.commit()?;
                }
            }
        }
        self.settle_down().await
    }

    /// Runs the server's background work now, so that it is not measured later.
    pub(crate) async fn settle_down(&self) -> anyhow::Result<()> {
        if let Place::Postgres(client, _) = &self.place {
            client.batch_execute("VACUUM ANALYZE postbox.outbox").await?;
            client.batch_execute("CHECKPOINT").await?;
        }
        Ok(())
    }

    /// Measures work done by this process or by one it starts: time, bytes, and the server's
    /// processor time.
    pub(crate) async fn measure(&self, work: impl Future<Output = anyhow::Result<Figure>>) -> anyhow::Result<Figure> {
        let (written, used) = (self.written().await?, self.server_seconds()?);
        let start = Instant::now();
        let figure = work.await?;
        let seconds = if figure.seconds > 0.0 { figure.seconds } else { start.elapsed().as_secs_f64() };
        let bytes = if figure.bytes > 0.0 { figure.bytes } else { self.written().await? - written };
        let processor_seconds = figure.processor_seconds + self.server_seconds()? - used;
        Ok(Figure { seconds, bytes, processor_seconds, ..figure })
    }

    /// The figure of a child process, with the server's part.
    pub(crate) async fn in_child(&self, job: &Job) -> anyhow::Result<Figure> {
        let is_file = matches!(self.place, Place::Sqlite(..));
        self.measure(async {
            let figure = job.in_child().await?;
            Ok(Figure { bytes: if is_file { figure.bytes } else { 0.0 }, ..figure })
        })
        .await
    }

    /// Bytes of write-ahead log so far; on SQLite all bytes written.
    pub(crate) async fn written(&self) -> anyhow::Result<f64> {
        match &self.place {
            Place::Postgres(client, _) => {
                let sql = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint";
                Ok(client.query_one(sql, &[]).await?.get::<_, i64>(0) as f64)
            }
            Place::Sqlite(..) => machine::written_bytes(),
        }
    }

    /// Processor time of the store's server, in seconds.
    pub(crate) fn server_seconds(&self) -> anyhow::Result<f64> {
        match &self.place {
            Place::Postgres(_, server) => {
                machine::processor_seconds_of_family(server.pid().context("the server runs")?)
            }
            Place::Sqlite(..) => Ok(0.0),
        }
    }
}

/// A connection, driven by a background task.
pub(crate) async fn connect(url: &str) -> anyhow::Result<Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// Opens the store at a URL or path.
pub(crate) async fn open(store: &str) -> anyhow::Result<Arc<dyn Store>> {
    Ok(match store.contains("://") {
        true => Arc::new(PostgresStore::connect(PostgresConfig::new(store)).await?),
        false => Arc::new(SqliteStore::open(SqliteConfig::new(store)).await?),
    })
}

/// Event number `n` of a backlog with `keys` keys.
pub(crate) fn event(n: usize, keys: usize) -> NewEvent {
    let head = format!("{{\"order\":{n},\"status\":\"paid\",\"note\":\"");
    let filler = PAYLOAD_BYTES.saturating_sub(head.len() + 2);
    let payload = format!("{head}{}\"}}", "x".repeat(filler));
    // A large odd step spreads consecutive events over the keys.
    let key = n.wrapping_mul(2_654_435_761) % keys.max(1);
    NewEvent::json("order.paid", payload.into_bytes()).key(format!("order-{key}"))
}

/// Runs `count` tasks concurrently and adds up their figures.
pub(crate) async fn at_once<F>(count: usize, task: impl Fn(usize) -> F) -> anyhow::Result<Figure>
where
    F: Future<Output = anyhow::Result<usize>> + Send + 'static,
{
    let mut done = 0;
    for task in futures::future::join_all((0..count).map(|number| tokio::spawn(task(number)))).await {
        done += task??;
    }
    Ok(Figure { count: done, ..Figure::default() })
}
