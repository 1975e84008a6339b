//! The other side of HTTP, in a separate process: the measured server, those it is compared with,
//! and targets that answer or hang.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context as _;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use clap::{Args, ValueEnum};
use postbox_core::{Clock, LogName};
use postbox_engine::TokioClock;
use postbox_ingress::{self as ingress, Ingress, WebhookSource};
use postbox_listen::{ServeLimits, serve};
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_webhook::{Scheme, Settings, verifier};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::TcpListener;
use tokio::process::{Child, Command};
use tokio::sync::Mutex;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Statement};

use crate::bed::connect;
use crate::child::word;

/// The secret of the published examples.
pub(crate) const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
/// Database connections, on both sides.
pub(crate) const POOL: usize = 8;

/// The row that the ingress stores, inserted by hand: without verification and without remembered
/// ids.
const ROW_INSERT: &str = "INSERT INTO postbox.inbox (topic, source, payload, content_type, headers) VALUES ('bench', 'bench', $1, $2, $3::text::jsonb)";

/// The least that a receiver would store: an id, a body, a time, and one index.
pub(crate) const BARE: &str = "CREATE TABLE bare_message (id text PRIMARY KEY, body bytea NOT NULL, received_at timestamptz NOT NULL DEFAULT clock_timestamp())";
const BARE_INSERT: &str = "INSERT INTO bare_message (id, body) VALUES ($1, $2)";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Role {
    /// Our ingress: verifies, and stores durably.
    Ingress,
    /// An axum server that inserts the same row.
    Row,
    /// An axum server that inserts the least.
    Bare,
    /// A target that answers at once.
    Target,
    /// A target that never answers.
    Hangs,
}

impl Role {
    /// Starts it; returns its address. It ends when the handle is dropped.
    pub(crate) async fn start(self, store: &str) -> anyhow::Result<(Child, String)> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["peer", &word(self), "--store", store]).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn()?;
        let mut lines = BufReader::new(child.stdout.take().context("no output")?).lines();
        let address = lines.next_line().await?.with_context(|| format!("the {self:?} process failed"))?;
        Ok((child, address))
    }
}

#[derive(Debug, Args)]
pub(crate) struct Job {
    #[arg(value_enum)]
    role: Role,
    #[arg(long, default_value = "")]
    store: String,
}

impl Job {
    pub(crate) async fn run(&self) -> anyhow::Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let router = match self.role {
            Role::Ingress => ingress_router(&self.store).await?,
            Role::Row => {
                Router::new().fallback(post(insert_row)).with_state(Inserter::open(&self.store, ROW_INSERT).await?)
            }
            Role::Bare => {
                Router::new().fallback(post(insert_bare)).with_state(Inserter::open(&self.store, BARE_INSERT).await?)
            }
            Role::Target => Router::new().fallback(post(async |_body: Bytes| StatusCode::NO_CONTENT)),
            Role::Hangs => Router::new().fallback(post(async || std::future::pending::<()>().await)),
        };
        println!("{address}");
        // The same server for the measured side and for the one it is compared with.
        let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
        serve(listener, router, ServeLimits::default(), clock, std::future::pending()).await;
        Ok(())
    }
}

async fn ingress_router(store: &str) -> anyhow::Result<Router> {
    let store =
        Arc::new(PostgresStore::connect(PostgresConfig { pool_size: POOL, ..PostgresConfig::new(store) }).await?);
    let verifier = verifier(Scheme::StandardWebhooks, &[SECRET], &Settings::default())?;
    let source = WebhookSource::new("bench".parse()?, LogName::inbox(), verifier);
    Ok(ingress::router(Ingress::new(vec![source], store, Arc::new(TokioClock::new()))?))
}

/// As many connections as ours, each used by one request at a time.
struct Inserter {
    connections: Vec<Mutex<(Client, Statement)>>,
    next: AtomicUsize,
}

impl Inserter {
    async fn open(store: &str, insert: &str) -> anyhow::Result<Arc<Self>> {
        let mut connections = Vec::with_capacity(POOL);
        for _ in 0..POOL {
            let client = connect(store).await?;
            let insert = client.prepare(insert).await?;
            connections.push(Mutex::new((client, insert)));
        }
        Ok(Arc::new(Self { connections, next: AtomicUsize::new(0) }))
    }

    async fn insert(&self, values: &[&(dyn ToSql + Sync)]) -> StatusCode {
        let at = self.next.fetch_add(1, Ordering::Relaxed) % self.connections.len();
        let connection = self.connections[at].lock().await;
        match connection.0.execute(&connection.1, values).await {
            Ok(_) => StatusCode::ACCEPTED,
            Err(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

fn text_of<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

async fn insert_row(State(inserter): State<Arc<Inserter>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    let (Some(id), Ok(body)) = (text_of(&headers, "webhook-id"), std::str::from_utf8(&body)) else {
        return StatusCode::BAD_REQUEST;
    };
    let content_type = text_of(&headers, "content-type");
    let kept = format!(r#"{{"postbox-message-id":"{id}","webhook-id":"{id}"}}"#);
    inserter.insert(&[&body, &content_type, &kept]).await
}

async fn insert_bare(State(inserter): State<Arc<Inserter>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    let Some(id) = text_of(&headers, "webhook-id") else { return StatusCode::BAD_REQUEST };
    inserter.insert(&[&id, &body.as_ref()]).await
}
