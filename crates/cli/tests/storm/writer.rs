//! The writers: everything a program may do with a transaction, in plain SQL, written down in the ledger.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use postbox_core::EventId;
use postbox_testkit::ledger::{Fate, Ledger, Transaction};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use tokio_postgres::{Client, Error, NoTls};
use uuid::Uuid;

use crate::UNFLUSHED;

const KEYS: u32 = 400;
const EVENTS_MAX: i64 = 40;
/// How long the database may be away before a writer gives up and the test fails.
const CONNECT_TRIES: u32 = 1_200;

/// What all writers share.
pub(crate) struct Storm {
    pub(crate) url: String,
    pub(crate) ledger: Arc<Ledger>,
    /// Committed events still wanted.
    pub(crate) enough: AtomicUsize,
}

/// The aggregates: each append takes its versions from a row it has locked.
pub(crate) async fn prepare(url: &str) {
    let client = connect_patiently(url).await;
    client
        .batch_execute("CREATE TABLE aggregate (key text PRIMARY KEY, version bigint NOT NULL)")
        .await
        .expect("a fresh database");
    let fill = "INSERT INTO aggregate SELECT 'key-' || n, 0 FROM generate_series(0, $1::int - 1) n";
    client.execute(fill, &[&i32::try_from(KEYS).expect("small")]).await.expect("a fresh table");
}

/// Connects, waiting for a database that is just coming back.
pub(crate) async fn connect_patiently(url: &str) -> Client {
    for _ in 0..CONNECT_TRIES {
        if let Ok((client, connection)) = tokio_postgres::connect(url, NoTls).await {
            tokio::spawn(connection);
            return client;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the database did not come back");
}

/// One writer: transaction after transaction until enough is committed.
pub(crate) async fn write_until_enough(storm: Arc<Storm>, seed: u64) {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut client = connect_patiently(&storm.url).await;
    let mut committed = 0;
    while storm.want_more(std::mem::take(&mut committed)) {
        let transaction = storm.ledger.begin();
        let mut attempt = Attempt { ledger: &storm.ledger, transaction, committing: false, events: 0 };
        match attempt.run(&mut client, &mut random).await {
            Ok(fate) => {
                storm.ledger.end(transaction, fate);
                committed = if fate == Fate::Committed { attempt.events } else { 0 };
            }
            Err(_) if attempt.committing => {
                storm.ledger.end(transaction, Fate::Unknown);
                client = connect_patiently(&storm.url).await;
            }
            Err(_) => {
                storm.ledger.end(transaction, Fate::Aborted);
                client = connect_patiently(&storm.url).await;
            }
        }
    }
}

struct Attempt<'a> {
    ledger: &'a Ledger,
    transaction: Transaction,
    /// COMMIT was sent: from here on an error says nothing about the outcome.
    committing: bool,
    events: usize,
}

impl Attempt<'_> {
    async fn run(&mut self, client: &mut Client, random: &mut SmallRng) -> Result<Fate, Error> {
        let mut tx = client.transaction().await?;
        let unflushed = random.random_bool(0.2);
        if unflushed {
            tx.batch_execute("SET LOCAL synchronous_commit = off").await?;
        }
        if random.random_bool(0.3) {
            // An early transaction id and a late write: the order of ids is not the order of commits.
            tx.batch_execute("SELECT pg_current_xact_id()").await?;
            tx.execute("SELECT pg_sleep($1)", &[&random.random_range(0.0..0.03)]).await?;
        }
        self.append(&tx, random).await?;
        if random.random_bool(0.3) {
            let savepoint = tx.savepoint("s").await?;
            let ids = self.append(&savepoint, random).await?;
            if random.random_bool(0.5) {
                self.ledger.take_back(self.transaction, &ids);
                self.events -= ids.len();
                savepoint.rollback().await?;
            } else {
                savepoint.commit().await?;
            }
        }
        if random.random_bool(0.1) {
            tx.rollback().await?;
            return Ok(Fate::Aborted);
        }
        self.committing = true;
        tx.commit().await?;
        Ok(if unflushed { UNFLUSHED } else { Fate::Committed })
    }

    /// Locks an aggregate, takes versions, appends events with those versions.
    async fn append(
        &mut self,
        tx: &tokio_postgres::Transaction<'_>,
        random: &mut SmallRng,
    ) -> Result<Vec<EventId>, Error> {
        // One aggregate per transaction and savepoint would deadlock if two transactions took two in opposite order:
        // the second lock is only tried, and left alone when taken.
        let key = format!("key-{}", random.random_range(0..KEYS));
        let count = random.random_range(1..=EVENTS_MAX);
        let lock = "UPDATE aggregate SET version = version + $2 WHERE key =
                    (SELECT key FROM aggregate WHERE key = $1 FOR UPDATE SKIP LOCKED) RETURNING version";
        let Some(row) = tx.query_opt(lock, &[&key, &count]).await? else { return Ok(Vec::new()) };
        let last: i64 = row.get(0);
        let ids: Vec<Uuid> = (0..count).map(|_| Uuid::now_v7()).collect();
        let versions: Vec<i64> = (last - count + 1..=last).collect();
        for (id, version) in ids.iter().zip(&versions) {
            self.ledger.append(self.transaction, EventId::from_uuid(*id), Some(&key), *version);
        }
        let insert = "INSERT INTO postbox.outbox (id, topic, key, version, payload)
                      SELECT id, $4, $3, version, '{\"version\":' || version || '}'
                      FROM unnest($1::uuid[], $2::bigint[]) WITH ORDINALITY AS e (id, version, n) ORDER BY n";
        let topic = ["storm.rain", "storm.hail"].choose(random).expect("not empty");
        tx.execute(insert, &[&ids, &versions, &key, topic]).await?;
        self.events += ids.len();
        Ok(ids.into_iter().map(EventId::from_uuid).collect())
    }
}

/// The transaction that stays open for the whole run. It must not survive a database crash, so it is made anew each time.
pub(crate) struct OpenTransaction {
    storm: Arc<Storm>,
    stop: tokio::sync::oneshot::Sender<()>,
    task: tokio::task::JoinHandle<()>,
}

/// Opens it: it has appended, and commits only at the very end.
pub(crate) async fn stay_open(storm: Arc<Storm>) -> OpenTransaction {
    let (stop, mut stopped) = tokio::sync::oneshot::channel();
    let (ready, appended) = tokio::sync::oneshot::channel();
    let shared = storm.clone();
    let task = tokio::spawn(async move {
        let mut ready = Some(ready);
        loop {
            let client = connect_patiently(&shared.url).await;
            let transaction = shared.ledger.begin();
            let ids: Vec<Uuid> = (0..50).map(|_| Uuid::now_v7()).collect();
            for (n, id) in ids.iter().enumerate() {
                shared.ledger.append(
                    transaction,
                    EventId::from_uuid(*id),
                    Some("open"),
                    i64::try_from(n).expect("small"),
                );
            }
            let insert = "INSERT INTO postbox.outbox (id, topic, key, payload)
                          SELECT id, 'storm.open', 'open', '{}' FROM unnest($1::uuid[]) WITH ORDINALITY AS e (id, n) ORDER BY n";
            let begun = async {
                client.batch_execute("BEGIN").await?;
                client.execute(insert, &[&ids]).await
            };
            if begun.await.is_err() {
                shared.ledger.end(transaction, Fate::Aborted);
                continue;
            }
            if let Some(ready) = ready.take() {
                let _ = ready.send(());
            }
            // Touch it now and then, to learn of a crash.
            let alive = loop {
                tokio::select! {
                    _ = &mut stopped => break true,
                    () = tokio::time::sleep(Duration::from_millis(100)) => {
                        if client.batch_execute("SELECT 1").await.is_err() { break false }
                    }
                }
            };
            if !alive {
                shared.ledger.end(transaction, Fate::Aborted);
                continue;
            }
            let fate = if client.batch_execute("COMMIT").await.is_ok() { Fate::Committed } else { Fate::Unknown };
            shared.ledger.end(transaction, fate);
            return;
        }
    });
    appended.await.expect("the open transaction appends");
    OpenTransaction { storm, stop, task }
}

impl OpenTransaction {
    /// Commits it at last.
    pub(crate) async fn commit(self) {
        let _ = self.stop.send(());
        self.task.await.expect("the open transaction ends");
        drop(self.storm);
    }
}

/// How many of these events are not in the log.
pub(crate) async fn missing_in_database(url: &str, arrived: &HashSet<EventId>) -> usize {
    let client = connect_patiently(url).await;
    let ids: Vec<Uuid> = arrived.iter().map(EventId::as_uuid).collect();
    let count = "SELECT count(*) FROM postbox.outbox WHERE id = ANY($1)";
    let found: i64 = client.query_one(count, &[&ids]).await.expect("the log can be read").get(0);
    ids.len() - usize::try_from(found).expect("a count")
}
