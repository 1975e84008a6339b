//! Accounts are aggregates: they enforce their rules and record what happens to them. A transfer is
//! a unit of work: it saves both accounts and appends what they recorded, or neither. Several
//! tellers work concurrently, each with a copy of the accounts; the second of two conflicting
//! transfers loads them again.

use std::path::Path;
use std::time::Duration;

use anyhow::ensure;
use postbox::sqlite::{SqliteConfig, SqliteStore};
use postbox::{Aggregate, Error, Migrate as _, Recorded, test};
use rusqlite::{Connection, Transaction, TransactionBehavior};
use serde::{Deserialize, Serialize};

const ACCOUNTS: i64 = 4;
const BEGIN_CENTS: i64 = 100;
const TELLERS: i64 = 4;
const TRANSFERS: i64 = 25;
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(postbox::Event, Serialize, Deserialize)]
#[event(topic = "account.moved", key = "account", aggregate = "account")]
struct AccountMoved {
    account: i64,
    cents: i64,
}

struct Account {
    id: i64,
    cents: i64,
    /// The version that was loaded.
    version: i64,
    recorded: Recorded,
}

impl Aggregate for Account {
    fn recorded(&mut self) -> &mut Recorded {
        &mut self.recorded
    }
}

impl Account {
    fn moves(&mut self, cents: i64) -> anyhow::Result<()> {
        ensure!(self.cents + cents >= 0, "account {} has only {}", self.id, self.cents);
        self.cents += cents;
        self.recorded.record(AccountMoved { account: self.id, cents });
        Ok(())
    }

    fn load(connection: &Connection, id: i64) -> rusqlite::Result<Self> {
        connection.query_row("SELECT cents, version FROM account WHERE id = ?1", [id], |row| {
            Ok(Self { id, cents: row.get(0)?, version: row.get(1)?, recorded: Recorded::new() })
        })
    }

    fn save(&mut self, tx: &Transaction<'_>, work: &mut Recorded) -> anyhow::Result<()> {
        let update = "UPDATE account SET cents = ?3, version = version + 1 WHERE id = ?1 AND version = ?2";
        if tx.execute(update, (self.id, self.version, self.cents))? == 0 {
            return Err(Error::version_conflict("account", self.id, self.version).into());
        }
        work.take(self);
        Ok(())
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("bank.db");
    let store = SqliteStore::open(SqliteConfig::new(&file)).await?;
    store.up().await?;
    let connection = Connection::open(&file)?;
    connection.execute_batch("CREATE TABLE account (id PRIMARY KEY, cents, version)")?;
    for id in 0..ACCOUNTS {
        connection.execute("INSERT INTO account VALUES (?1, ?2, 0)", (id, BEGIN_CENTS))?;
    }

    let tellers: Vec<_> = (0..TELLERS)
        .map(|teller| {
            let (store, file) = (store.clone(), file.clone());
            tokio::task::spawn_blocking(move || work(&store, &file, teller))
        })
        .collect();
    let (mut done, mut refused, mut conflicts) = (0, 0, 0);
    for teller in tellers {
        let [its_done, its_refused, its_conflicts] = teller.await??;
        (done, refused, conflicts) = (done + its_done, refused + its_refused, conflicts + its_conflicts);
    }

    // Each account equals the sum of its events, and has as many versions.
    let moved = test::appended::<AccountMoved>(&store).await?;
    for id in 0..ACCOUNTS {
        let account = Account::load(&connection, id)?;
        let its: Vec<i64> = moved.iter().filter(|it| it.account == id).map(|it| it.cents).collect();
        ensure!(account.cents == BEGIN_CENTS + its.iter().sum::<i64>(), "account {id}: {} by {its:?}", account.cents);
        ensure!(account.version == its.len() as i64, "account {id}: version {} by {its:?}", account.version);
    }
    ensure!(
        [done + refused, moved.len() as i64] == [TELLERS * TRANSFERS, 2 * done],
        "{done} {refused} {}",
        moved.len()
    );
    println!("{done} transfers, {} events; {refused} refused, {conflicts} repeated because of others", moved.len());
    Ok(())
}

/// Makes transfers; returns how many were done, refused and repeated.
fn work(store: &SqliteStore, file: &Path, teller: i64) -> anyhow::Result<[i64; 3]> {
    let mut connection = Connection::open(file)?;
    connection.busy_timeout(PATIENCE)?;
    let mut counts = [0; 3];
    for n in 0..TRANSFERS {
        let (from, to) = ((teller + n) % ACCOUNTS, (teller + 2 * n + 1) % ACCOUNTS);
        let to = if from == to { (to + 1) % ACCOUNTS } else { to };
        let outcome = loop {
            match transfer(store, &mut connection, [from, to], 10 + 7 * n) {
                Ok(()) => break 0,
                Err(error) if code(&error) == Some("version_conflict") => counts[2] += 1,
                Err(error) if error.is::<Error>() || error.is::<rusqlite::Error>() => return Err(error),
                Err(_) => break 1, // The rule of the account.
            }
        };
        counts[outcome] += 1;
    }
    Ok(counts)
}

fn transfer(store: &SqliteStore, connection: &mut Connection, ids: [i64; 2], cents: i64) -> anyhow::Result<()> {
    let mut accounts = [Account::load(connection, ids[0])?, Account::load(connection, ids[1])?];
    accounts[0].moves(-cents)?;
    accounts[1].moves(cents)?;
    let mut tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut work = Recorded::new();
    for account in &mut accounts {
        account.save(&tx, &mut work)?;
    }
    store.postbox().append(&mut tx, &work)?;
    Ok(tx.commit()?)
}

fn code(error: &anyhow::Error) -> Option<&str> {
    error.downcast_ref::<Error>().map(Error::code)
}
