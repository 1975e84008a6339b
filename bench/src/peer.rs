//! The other side of HTTP, in a process of its own: what is measured, what it is compared with, and targets of all tempers.

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
use postbox_http::ingress::{self, Ingress, WebhookSource};
use postbox_http::serve::{ServeLimits, serve};
use postbox_postgres::{PostgresConfig, PostgresStore};
use postbox_webhook::{Scheme, Settings, verifier};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::TcpListener;
use tokio::process::{Child, Command};
use tokio::sync::Mutex;
use tokio_postgres::{Client, Statement};

use crate::server::connect;

/// The secret of the published examples.
pub(crate) const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
/// Connections to the database, on both sides.
pub(crate) const POOL: usize = 8;

/// The row and nothing else: no verification, no digest, no second table.
pub(crate) const BARE: &str = "CREATE TABLE bare_message (id text PRIMARY KEY, body bytea NOT NULL, received_at timestamptz NOT NULL DEFAULT clock_timestamp())";
const BARE_INSERT: &str = "INSERT INTO bare_message (id, body) VALUES ($1, $2)";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Role {
    /// Our ingress: verifies, and stores durably.
    Ingress,
    /// An axum server that inserts the row.
    Bare,
    /// A target that answers at once.
    Target,
    /// A target that never answers.
    Hangs,
}

impl Role {
    fn word(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Bare => "bare",
            Self::Target => "target",
            Self::Hangs => "hangs",
        }
    }

    /// Starts it; gives its address. It ends when the handle is dropped.
    pub(crate) async fn start(self, store: &str) -> anyhow::Result<(Child, String)> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["peer", self.word(), "--store", store]).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn()?;
        let mut lines = BufReader::new(child.stdout.take().context("no output")?).lines();
        let address = lines.next_line().await?.with_context(|| format!("the {} process failed", self.word()))?;
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
            Role::Bare => bare_router(&self.store).await?,
            Role::Target => Router::new().fallback(post(async |_body: Bytes| StatusCode::NO_CONTENT)),
            Role::Hangs => Router::new().fallback(post(async || std::future::pending::<()>().await)),
        };
        println!("{address}");
        if self.role == Role::Ingress {
            let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
            serve(listener, router, ServeLimits::default(), clock, std::future::pending()).await;
            return Ok(());
        }
        Ok(axum::serve(listener, router).await?)
    }
}

async fn ingress_router(store: &str) -> anyhow::Result<Router> {
    let store = Arc::new(PostgresStore::connect(PostgresConfig::new(store).pool_size(POOL)).await?);
    let verifier = verifier(Scheme::StandardWebhooks, &[SECRET], &Settings::default())?;
    let source = WebhookSource::new("bench".parse()?, LogName::inbox(), verifier);
    Ok(ingress::router(Ingress::new(vec![source], store, Arc::new(TokioClock::new()))?))
}

/// As many connections as ours has, each used by one at a time.
struct Bare {
    connections: Vec<Mutex<(Client, Statement)>>,
    next: AtomicUsize,
}

async fn bare_router(store: &str) -> anyhow::Result<Router> {
    let mut connections = Vec::with_capacity(POOL);
    for _ in 0..POOL {
        let client = connect(store).await?;
        let insert = client.prepare(BARE_INSERT).await?;
        connections.push(Mutex::new((client, insert)));
    }
    let bare = Arc::new(Bare { connections, next: AtomicUsize::new(0) });
    Ok(Router::new().fallback(post(insert)).with_state(bare))
}

async fn insert(State(bare): State<Arc<Bare>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    let Some(id) = headers.get("webhook-id").and_then(|id| id.to_str().ok()) else { return StatusCode::BAD_REQUEST };
    let at = bare.next.fetch_add(1, Ordering::Relaxed) % bare.connections.len();
    let connection = bare.connections[at].lock().await;
    match connection.0.execute(&connection.1, &[&id, &body.as_ref()]).await {
        Ok(_) => StatusCode::ACCEPTED,
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
