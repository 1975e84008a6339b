//! An outbox in the SQLite file that your program already has. The relay writes JSON lines; one
//! note is rolled back on purpose.

use std::sync::Arc;

use anyhow::ensure;
use postbox::sqlite::{SqliteConfig, SqliteStore};
use postbox::{JsonLines, LogName, Migrate as _, NewEvent, Relay, Subscription};
use rusqlite::Connection;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("notes.db");
    let store = Arc::new(SqliteStore::open(SqliteConfig::new(&file)).await?);
    store.up().await?;

    let mut connection = Connection::open(&file)?;
    connection.execute_batch("CREATE TABLE note (id INTEGER PRIMARY KEY, text TEXT NOT NULL)")?;
    for (id, text) in [(1, "buy milk"), (2, "regretted"), (3, "call home")] {
        let mut transaction = connection.transaction()?;
        transaction.execute("INSERT INTO note VALUES (?1, ?2)", (id, text))?;
        let written = NewEvent::json("note.written", serde_json::json!({ "id": id, "text": text }).to_string());
        store.postbox().append(&mut transaction, written.key(id.to_string()))?;
        if text != "regretted" {
            transaction.commit()?;
        } // Dropped otherwise, which rolls back.
    }
    // Any language can do the same, because the outbox is a table.
    connection.execute_batch(
        r#"BEGIN; INSERT INTO note VALUES (4, 'from SQL');
           INSERT INTO postbox_outbox (topic, key, payload) VALUES ('note.written', '4', '{"id":4,"text":"from SQL"}'); COMMIT"#,
    )?;

    let lines = folder.path().join("notes.jsonl");
    let subscription = Subscription::new("export".parse()?, LogName::outbox());
    let relay = Relay::builder(store, subscription).sink(Arc::new(JsonLines::file(&lines).await?)).build()?;
    relay.drain(None).await?;

    let mut reported = Vec::new();
    for line in std::fs::read_to_string(&lines)?.lines() {
        let event: serde_json::Value = serde_json::from_str(line)?;
        reported.push(event["payload"]["text"].as_str().unwrap_or_default().to_owned());
    }
    // Order is kept within a key, and each note is a key of its own.
    reported.sort();
    ensure!(reported == ["buy milk", "call home", "from SQL"], "{reported:?}");
    println!("exported {reported:?}; what was rolled back was never reported");
    Ok(())
}
