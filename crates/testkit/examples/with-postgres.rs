//! Runs a command with the URL of an empty database on a real Postgres in `DATABASE_URL`:
//! `cargo run -p postbox-testkit --example with-postgres -- psql "$DATABASE_URL"`.

use std::process::{Command, ExitCode};

use anyhow::Context as _;
use postbox_testkit::servers::{Postgres, Version};

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    let program = arguments.next().context("which command? with-postgres COMMAND [ARGUMENT...]")?;
    let url = Postgres::shared(Version::V15).await.fresh_database().await;
    // The server stays as long as this process does, so it waits here.
    let status = Command::new(&program)
        .args(arguments)
        .env("DATABASE_URL", url)
        .status()
        .with_context(|| format!("{program:?}"))?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
