//! Writes to Postgres.

use std::time::Duration;

use anyhow::Context as _;
use postbox_core::{NewEvent, Postbox};
use postbox_crash_checker::ledger::{Event, Fate};
use postbox_postgres::Postgres;
use rand::Rng as _;
use rand::rngs::SmallRng;
use tokio::time::{sleep, timeout};
use tokio_postgres::{Client, NoTls, Transaction};

use super::{Draft, End, Job, Ledger, Pace, Part, Shape, payload};

/// Takes numbers for a key from a row that stays locked until the end of the transaction. Rows
/// locked by others are skipped, so nobody deadlocks.
const LOCK: &str = "UPDATE crash.aggregate SET version = version + $2 WHERE key =
    (SELECT key FROM crash.aggregate WHERE key = $1 FOR UPDATE SKIP LOCKED) RETURNING version";
const ENQUEUE: &str = "SELECT postbox.enqueue(topic => e.topic, payload => e.payload, key => $1::text, version => e.v)
    FROM unnest($2::text[], $3::text[], $4::bigint[]) AS e (topic, payload, v)";
const INSERT: &str = "INSERT INTO postbox.outbox (topic, key, payload, version)
    SELECT e.topic, $1::text, e.payload, e.v
    FROM unnest($2::text[], $3::text[], $4::bigint[]) WITH ORDINALITY AS e (topic, payload, v, n) ORDER BY e.n";
/// Most prepared transactions per writer; the server allows 20 in all.
const PREPARED_MAX: usize = 3;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longer than anything a writer does, unless a proxy swallowed its connection.
const PATIENCE: Duration = Duration::from_secs(20);

/// A prepared transaction that waits for its end.
struct Prepared {
    tx: String,
    after: u32,
    commit: bool,
}

pub(super) async fn write(job: Job, mut ledger: Ledger, mut random: SmallRng, mut pace: Pace) -> anyhow::Result<()> {
    let mut client = None;
    let mut prepared: Vec<Prepared> = Vec::new();
    let mut count = 0;
    while !pace.is_over() || !prepared.is_empty() {
        let Some(connected) = &mut client else {
            match connect(&job.store).await {
                Ok(connected) => client = Some(connected),
                Err(_) => sleep(Duration::from_millis(50)).await,
            }
            continue;
        };
        let over = pace.is_over();
        prepared.iter_mut().for_each(|it| it.after = it.after.saturating_sub(1));
        if let Some(due) = prepared.iter().position(|it| it.after == 0 || over) {
            if !end_prepared(connected, &prepared[due], &mut ledger).await? {
                client = None;
                continue;
            }
            prepared.remove(due);
        }
        if over {
            continue;
        }
        count += 1;
        let tx = format!("{}-{count}", job.name);
        let mut shape = Shape::draw(&mut random);
        if matches!(shape.end, End::Prepare(..)) && prepared.len() >= PREPARED_MAX {
            shape.end = End::Commit;
        }
        let mut attempt = Attempt { tx: &tx, rust: job.rust, draft: Draft::default(), noted: false };
        let fate = timeout(PATIENCE, attempt.run(connected, &shape, &mut ledger, &mut random)).await;
        let (noted, events) = (attempt.noted, attempt.draft.kept.len());
        match fate {
            Ok(Ok(Fate::Prepared)) => {
                ledger.end(&tx, Fate::Prepared)?;
                let End::Prepare(after, commit) = shape.end else { anyhow::bail!("prepared unasked") };
                prepared.push(Prepared { tx, after, commit });
            }
            Ok(Ok(fate)) => {
                ledger.end(&tx, fate)?;
                if fate != Fate::RolledBack {
                    sleep(pace.committed(events)).await;
                }
            }
            _ => {
                if noted {
                    ledger.end(&tx, Fate::Unknown)?;
                }
                client = None;
            }
        }
    }
    Ok(())
}

async fn connect(url: &str) -> anyhow::Result<Client> {
    let (client, connection) = timeout(CONNECT_TIMEOUT, tokio_postgres::connect(url, NoTls)).await??;
    tokio::spawn(connection);
    Ok(client)
}

/// Ends a prepared transaction; `false` if the connection is no longer usable.
async fn end_prepared(client: &Client, prepared: &Prepared, ledger: &mut Ledger) -> anyhow::Result<bool> {
    let verb = if prepared.commit { "COMMIT" } else { "ROLLBACK" };
    let statement = format!("{verb} PREPARED '{}'", prepared.tx);
    match timeout(PATIENCE, client.batch_execute(&statement)).await {
        Ok(Ok(())) => {
            ledger.end(&prepared.tx, if prepared.commit { Fate::Committed } else { Fate::RolledBack })?;
            Ok(true)
        }
        // It does not exist: an answer was lost earlier, or a restore removed it. The mark in the
        // database decides.
        Ok(Err(error)) if error.as_db_error().is_some_and(|error| error.code().code() == "42704") => {
            ledger.end(&prepared.tx, Fate::Unknown)?;
            Ok(true)
        }
        _ => Ok(false),
    }
}

struct Attempt<'a> {
    tx: &'a str,
    rust: bool,
    draft: Draft,
    /// Its events are in the ledger, and the end was requested.
    noted: bool,
}

impl Attempt<'_> {
    async fn run(
        &mut self,
        client: &mut Client,
        shape: &Shape,
        ledger: &mut Ledger,
        random: &mut SmallRng,
    ) -> anyhow::Result<Fate> {
        let tx = client.transaction().await?;
        if shape.asynchronous {
            tx.batch_execute("SET LOCAL synchronous_commit = off").await?;
        }
        // The first write: from here on the transaction has its id.
        tx.execute("INSERT INTO crash.mark (tx) VALUES ($1)", &[&self.tx]).await?;
        if let Some(wait) = shape.early {
            sleep(wait).await;
        }
        for part in &shape.appends {
            self.append(&tx, part, random).await?;
        }
        if let Some(wait) = shape.held {
            sleep(wait).await;
        }
        ledger.events(self.tx, &self.draft)?;
        self.noted = true;
        match shape.end {
            End::Commit => {
                tx.commit().await?;
                Ok(if shape.asynchronous { Fate::CommittedAsync } else { Fate::Committed })
            }
            End::Rollback => {
                tx.rollback().await?;
                Ok(Fate::RolledBack)
            }
            End::Prepare(..) => {
                tx.batch_execute(&format!("PREPARE TRANSACTION '{}'", self.tx)).await?;
                Ok(Fate::Prepared)
            }
        }
    }

    async fn append(&mut self, tx: &Transaction<'_>, part: &Part, random: &mut SmallRng) -> anyhow::Result<()> {
        if part.savepoint.is_some() {
            tx.batch_execute("SAVEPOINT s").await?;
        }
        let key = super::key_name(part.key);
        // A key that this transaction has already locked gives it further numbers.
        if let Some(row) = tx.query_opt(LOCK, &[&key, &i64::from(part.count)]).await? {
            let events = self.draft.next(part, row.get(0), random);
            self.insert(tx, &key, &events, random).await?;
            match part.savepoint {
                Some(true) => self.draft.back.extend(events),
                _ => self.draft.kept.extend(events),
            }
        }
        match part.savepoint {
            Some(true) => tx.batch_execute("ROLLBACK TO s; RELEASE s").await?,
            Some(false) => tx.batch_execute("RELEASE s").await?,
            None => {}
        }
        Ok(())
    }

    async fn insert(
        &self,
        tx: &Transaction<'_>,
        key: &str,
        events: &[Event],
        random: &mut SmallRng,
    ) -> anyhow::Result<()> {
        let payloads: Vec<String> = events.iter().map(|event| payload(self.tx, event)).collect();
        if self.rust {
            let new = |(event, payload): (&Event, String)| {
                NewEvent::json(event.topic.as_str(), payload).key(key).version(event.v)
            };
            let appended =
                Postbox::new(Postgres::default()).append(&mut &*tx, events.iter().zip(payloads).map(new)).await;
            appended.context("append")?;
            return Ok(());
        }
        let topics: Vec<&str> = events.iter().map(|event| event.topic.as_str()).collect();
        let versions: Vec<i64> = events.iter().map(|event| event.v).collect();
        let sql = if random.random_bool(0.5) { ENQUEUE } else { INSERT };
        tx.query(sql, &[&key, &topics, &payloads, &versions]).await?;
        Ok(())
    }
}
