//! A payment notice that arrives three times, and once while its transaction fails, pays once.

use std::sync::Arc;

use anyhow::ensure;
use postbox::sqlite::{SqliteConfig, SqliteStore, once_in};
use postbox::{Migrate as _, SourceName};
use rusqlite::Connection;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("bank.db");
    let store = Arc::new(SqliteStore::open(SqliteConfig::new(&file)).await?);
    store.up().await?;
    let mut connection = Connection::open(&file)?;
    connection.execute_batch(
        "CREATE TABLE account (id TEXT PRIMARY KEY, cents INTEGER NOT NULL); INSERT INTO account VALUES ('ann', 0)",
    )?;

    // The first attempt fails after the effect. The mark is rolled back as well, so the next
    // attempt counts as the first.
    let failed = pay(&mut connection, "notice-1", 500, true)?;
    ensure!(failed == Paid::Failed && balance(&connection)? == 0);

    let answers: Vec<Paid> =
        (0..3).map(|_| pay(&mut connection, "notice-1", 500, false)).collect::<anyhow::Result<_>>()?;
    ensure!(answers == [Paid::Now, Paid::Before, Paid::Before], "{answers:?}");
    ensure!(pay(&mut connection, "notice-2", 70, false)? == Paid::Now);

    let cents = balance(&connection)?;
    ensure!(cents == 570, "ann has {cents}");
    println!("five deliveries of two notices: ann has {cents} cents");
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
enum Paid {
    Now,
    Before,
    Failed,
}

/// Commits the effect, and the mark that it happened, in one transaction.
fn pay(connection: &mut Connection, message_id: &str, cents: i64, crash: bool) -> anyhow::Result<Paid> {
    let source = SourceName::new("bank")?;
    let transaction = connection.transaction()?;
    if !once_in(&transaction, &source, message_id)? {
        return Ok(Paid::Before);
    }
    transaction.execute("UPDATE account SET cents = cents + ?1 WHERE id = 'ann'", [cents])?;
    if crash {
        return Ok(Paid::Failed); // Dropping the transaction rolls it back.
    }
    transaction.commit()?;
    Ok(Paid::Now)
}

fn balance(connection: &Connection) -> anyhow::Result<i64> {
    Ok(connection.query_row("SELECT cents FROM account WHERE id = 'ann'", [], |row| row.get(0))?)
}
