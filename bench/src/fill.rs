//! Backlogs: events of 300 bytes, keys that repeat.

use postbox_core::{LogName, NewEvent};
use postbox_postgres::SchemaName;
use tokio_postgres::Client;

/// Events in one INSERT: enough for full speed, little memory.
const EVENTS_PER_INSERT: usize = 1_000;
/// The size most published figures use.
pub(crate) const PAYLOAD_BYTES: usize = 300;

/// The schema a fresh store uses.
pub(crate) fn schema() -> SchemaName {
    SchemaName::new("postbox").expect("the default name is a name")
}

/// The shape of a backlog.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    /// How many different keys the events have.
    pub(crate) keys: usize,
    /// Events per transaction.
    pub(crate) transaction: usize,
}

/// Event number `n` of a backlog with so many keys.
pub(crate) fn event(n: usize, keys: usize) -> NewEvent {
    let head = format!("{{\"order\":{n},\"status\":\"paid\",\"note\":\"");
    let filler = PAYLOAD_BYTES.saturating_sub(head.len() + 2);
    let payload = format!("{head}{}\"}}", "x".repeat(filler));
    // A large odd step spreads neighbours over the keys.
    let key = n.wrapping_mul(2_654_435_761) % keys.max(1);
    NewEvent::json("order.paid", payload.into_bytes()).key(format!("order-{key}"))
}

fn chunk(from: usize, to: usize, keys: usize) -> Vec<NewEvent> {
    (from..to).map(|n| event(n, keys)).collect()
}

/// Appends events `from..to` to the outbox of a Postgres.
pub(crate) async fn postgres(client: &mut Client, from: usize, to: usize, shape: Shape) -> anyhow::Result<()> {
    let mut at = from;
    while at < to {
        let end = to.min(at + shape.transaction);
        let transaction = client.transaction().await?;
        while at < end {
            let next = end.min(at + EVENTS_PER_INSERT);
            let events = chunk(at, next, shape.keys);
            postbox_postgres::append_in(&transaction, &schema(), &LogName::outbox(), &events).await?;
            at = next;
        }
        transaction.commit().await?;
    }
    Ok(())
}

/// Appends events `from..to` to the outbox of a SQLite database.
pub(crate) fn sqlite(
    connection: &mut rusqlite::Connection,
    from: usize,
    to: usize,
    shape: Shape,
) -> anyhow::Result<()> {
    let mut at = from;
    while at < to {
        let end = to.min(at + shape.transaction);
        let transaction = connection.transaction()?;
        while at < end {
            let next = end.min(at + EVENTS_PER_INSERT);
            postbox_sqlite::append_in(&transaction, &LogName::outbox(), &chunk(at, next, shape.keys))?;
            at = next;
        }
        transaction.commit()?;
    }
    Ok(())
}
