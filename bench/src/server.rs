//! The Postgres that is measured: durable, with the memory a production server would have.

use postbox_testkit::servers::{PrivatePostgres, Settings, Version};
use tokio_postgres::{Client, NoTls};

/// Starts it. fsync stays on: a benchmark that does not flush measures something nobody runs.
pub(crate) async fn start() -> PrivatePostgres {
    let settings = Settings::durable().with("shared_buffers", "1GB").with("max_wal_size", "4GB");
    PrivatePostgres::launch(Version::V15, settings).await
}

/// A connection whose other half runs in the background.
pub(crate) async fn connect(url: &str) -> anyhow::Result<Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// Bytes of write-ahead log so far.
pub(crate) async fn wal_bytes(client: &Client) -> anyhow::Result<i64> {
    let row = client.query_one("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint", &[]).await?;
    Ok(row.get(0))
}
