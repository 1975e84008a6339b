//! A private Postgres server, a proxy in front of each relay and one in front of the writers, and
//! optionally a pooler.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use postbox_crash_checker::arrivals::Body;
use postbox_testkit::proxy::FaultProxy;
use postbox_testkit::servers::{PgBouncer, PrivatePostgres, Settings, Version};
use tokio::sync::Mutex;
use tokio::time::timeout;
use tokio_postgres::{Client, NoTls};

use super::{Mount, Named, write_lines};
use crate::writer::KEYS;

/// Size of the file system that is filled up: enough for a round, not much more.
const MEBIBYTES: u32 = 2_000;
/// Longest wait for an own statement; a table may be locked, or the server on its way back.
const PATIENCE: Duration = Duration::from_secs(30);

/// The writers' tables: the numbers of each key, and the mark that every transaction leaves. The
/// audit: changes of cursors and delivery rows, as the changing transaction sees them.
const PREPARE: &str = "
CREATE SCHEMA crash;
CREATE TABLE crash.mark (tx text PRIMARY KEY);
CREATE TABLE crash.aggregate (key text PRIMARY KEY, version bigint NOT NULL) WITH (fillfactor = 50);
CREATE TABLE crash.audit (
  n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, what text NOT NULL, old jsonb, new jsonb, body text, xid text NOT NULL, at bigint NOT NULL, lease_until bigint);
CREATE FUNCTION crash.note() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  old_row jsonb := CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) END;
  new_row jsonb := CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) END;
BEGIN
  INSERT INTO crash.audit (what, old, new, body, xid, at, lease_until) VALUES (TG_TABLE_NAME, old_row, new_row,
    CASE WHEN TG_TABLE_NAME = 'delivery' THEN
      (SELECT l.payload FROM postbox.outbox AS l WHERE l.seq = (coalesce(new_row, old_row) ->> 'seq')::bigint) END,
    pg_current_xact_id()::text, extract(epoch FROM clock_timestamp()) * 1000000,
    extract(epoch FROM (old_row ->> 'lease_until')::timestamptz) * 1000000);
  RETURN NULL;
END $$;
CREATE TRIGGER crash_note AFTER INSERT OR UPDATE OR DELETE ON postbox.lane FOR EACH ROW EXECUTE FUNCTION crash.note();
CREATE TRIGGER crash_note AFTER INSERT OR UPDATE OR DELETE ON postbox.delivery FOR EACH ROW EXECUTE FUNCTION crash.note();
CREATE TRIGGER crash_note AFTER UPDATE ON postbox.outbox FOR EACH ROW EXECUTE FUNCTION crash.note();";

/// A cold copy; see [`PostgresBed::copy`].
pub(crate) struct Copy {
    pub(crate) data: PathBuf,
    pub(crate) at: u64,
    pub(crate) places: Vec<(String, u64)>,
    pub(crate) topics: Vec<String>,
    /// The number of committed events at that time.
    pub(crate) committed: u64,
}

/// The servers. Fields are dropped in this order: the users of the mount first.
pub(crate) struct PostgresBed {
    relays: Vec<FaultProxy>,
    pub(crate) writers: FaultProxy,
    pub(crate) pooler: Option<Mutex<PgBouncer>>,
    pub(crate) server: Mutex<PrivatePostgres>,
    /// A copy of the data, made while the server was stopped.
    pub(crate) copy: Mutex<Option<Copy>>,
    url: String,
    /// The folder of the data, if its file system can be filled.
    pub(crate) small: Option<(Mount, PathBuf)>,
    database: String,
    upstream: String,
}

impl PostgresBed {
    pub(crate) async fn launch(folder: &Path, relays: usize, pooled: bool, seed: u64) -> anyhow::Result<Self> {
        // Asynchronous commits stay in memory for up to 10 s, so that an immediate stop takes them
        // back.
        let mut settings = Settings::durable()
            .with("wal_writer_delay", "10s")
            .with("max_wal_size", "256MB")
            .with("track_activity_query_size", "4096");
        // Everybody may pass this folder, because the server runs as another user.
        let data = std::env::temp_dir().join(format!("postbox-crash-{}-{seed:x}", std::process::id()));
        std::fs::create_dir_all(&data)?;
        std::fs::set_permissions(&data, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        let small = Mount::make(&data, MEBIBYTES).map(|mount| (mount, data.clone()));
        settings = settings.under(&data);
        std::fs::write(folder.join("data-folder"), data.display().to_string())?;
        let server = PrivatePostgres::launch(Version::V15, settings).await;
        let url = server.fresh_database().await;
        let database = url.rsplit('/').next().unwrap_or_default().to_owned();
        let pooler = if pooled { Some(PgBouncer::start(server.postgres()).await) } else { None };
        let upstream = pooler.as_ref().map_or_else(|| url.clone(), |pooler| pooler.url(&database));
        let mut proxies = Vec::new();
        for _ in 0..relays {
            proxies.push(FaultProxy::in_front_of(&upstream).await);
        }
        let writers = FaultProxy::in_front_of(&url).await;
        let (server, pooler, copy) = (Mutex::new(server), pooler.map(Mutex::new), Mutex::default());
        Ok(Self { relays: proxies, writers, pooler, server, copy, url, small, database, upstream })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn relay_url(&self, number: usize) -> String {
        self.relays[number].url(&self.upstream)
    }

    pub(crate) fn writer_url(&self) -> String {
        self.writers.url(&self.url)
    }

    pub(crate) fn proxy(&self, relay: usize) -> &FaultProxy {
        &self.relays[relay]
    }

    /// An own connection, which bypasses all proxies.
    pub(crate) async fn client(&self) -> anyhow::Result<Client> {
        let connecting = tokio_postgres::connect(&self.url, NoTls);
        let (client, connection) = timeout(PATIENCE, connecting).await.context("connecting")??;
        tokio::spawn(connection);
        client
            .batch_execute("SET application_name = 'crash'; SET lock_timeout = '2s'; SET statement_timeout = '60s'")
            .await?;
        Ok(client)
    }

    /// Runs statements on a new connection.
    pub(crate) async fn execute(&self, statements: &str) -> anyhow::Result<()> {
        Ok(self.client().await?.batch_execute(statements).await?)
    }

    pub(crate) async fn prepare(&self) -> anyhow::Result<()> {
        self.execute(PREPARE).await?;
        let fill = format!("INSERT INTO crash.aggregate SELECT 'k' || n, 0 FROM generate_series(0, {KEYS} - 1) AS n");
        self.execute(&fill).await
    }

    pub(crate) async fn some_events(&self, of: &str, state: &str, limit: i64) -> anyhow::Result<Vec<Named>> {
        let sql = "SELECT l.id::text, l.payload FROM postbox.delivery AS d JOIN postbox.outbox AS l ON l.seq = d.seq
                   JOIN postbox.subscription AS s ON s.id = d.subscription AND s.name = $3
                   WHERE d.state = $1 ORDER BY d.seq LIMIT $2";
        let rows = self.client().await?.query(sql, &[&state, &limit, &of]).await?;
        let named = |row: &tokio_postgres::Row| {
            let body: Body = serde_json::from_str(row.get(1)).context("a payload of ours")?;
            anyhow::Ok(Named { id: row.get(0), event: format!("{}/{}", body.tx, body.n) })
        };
        rows.iter().map(named).collect()
    }

    pub(crate) async fn lanes_of_one(&self) -> anyhow::Result<i64> {
        let sql = "SELECT coalesce(sum(most), 0)::bigint FROM (SELECT max(lanes) AS most FROM
                   (SELECT subscription, count(*) AS lanes FROM postbox.lane GROUP BY subscription, owner) AS held GROUP BY subscription) AS each";
        let client = timeout(Duration::from_secs(1), self.client()).await??;
        Ok(timeout(Duration::from_secs(1), client.query_one(sql, &[])).await??.get(0))
    }

    /// Backends of relays (or of the pooler on their behalf) and of writers.
    pub(crate) async fn backends(&self, only_active: bool) -> anyhow::Result<Vec<i32>> {
        let sql = "SELECT pid FROM pg_stat_activity WHERE datname = $1 AND application_name <> 'crash' AND backend_type = 'client backend'
                   AND (NOT $2 OR state = 'active') ORDER BY pid";
        let rows = self.client().await?.query(sql, &[&self.database, &only_active]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// Ends transactions that killed writers left prepared. After a restore some of them had been
    /// ended before; then nothing may be committed.
    pub(crate) async fn end_prepared(&self, commit: bool) -> anyhow::Result<usize> {
        let client = self.client().await?;
        let rows = client.query("SELECT gid FROM pg_prepared_xacts ORDER BY prepared, gid", &[]).await?;
        for (n, row) in rows.iter().enumerate() {
            let verb = if commit && n % 2 == 0 { "COMMIT" } else { "ROLLBACK" };
            client.batch_execute(&format!("{verb} PREPARED '{}'", row.get::<_, String>(0))).await?;
        }
        Ok(rows.len())
    }

    pub(crate) async fn dump(&self, folder: &Path) -> anyhow::Result<()> {
        let client = self.client().await?;
        let dumps = [
            ("marks.txt", "SELECT tx FROM crash.mark"),
            (
                "deliveries.jsonl",
                "SELECT json_build_object('subscription', s.name, 'state', d.state, 'code', d.code, 'body', l.payload)::text
                 FROM postbox.delivery AS d JOIN postbox.subscription AS s ON s.id = d.subscription LEFT JOIN postbox.outbox AS l ON l.seq = d.seq",
            ),
            ("audit.jsonl", "SELECT row_to_json(a)::text FROM crash.audit AS a ORDER BY n"),
        ];
        for (file, sql) in dumps {
            let rows = client.query(sql, &[]).await.context(file)?;
            write_lines(&folder.join(file), rows.iter().map(|row| row.get(0)))?;
        }
        Ok(())
    }
}

impl Drop for PostgresBed {
    fn drop(&mut self) {
        if let Ok(mut copy) = self.copy.try_lock()
            && let Some(copy) = copy.take()
        {
            let _ = std::fs::remove_dir_all(copy.data);
        }
    }
}
