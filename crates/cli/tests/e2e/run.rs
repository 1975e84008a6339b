//! `postbox run` and signals.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use axum::Router;
use axum::http::HeaderMap;
use axum::routing::post;

use crate::room::{DEADLINE, Kind, Room};

/// Event ids as the target received them, with how often.
type Seen = Arc<Mutex<HashMap<String, u32>>>;

async fn target() -> Result<(std::net::SocketAddr, Seen)> {
    let seen = Seen::default();
    let record = Arc::clone(&seen);
    let handler = async move |headers: HeaderMap| {
        let id = headers.get("ce-id").and_then(|id| id.to_str().ok()).unwrap_or("none").to_owned();
        *record.lock().expect("no panic while it is held").entry(id).or_default() += 1;
        // Long enough that a stop finds requests on the wire.
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(axum::serve(listener, Router::new().route("/", post(handler))).into_future());
    Ok((address, seen))
}

fn count(seen: &Seen) -> usize {
    seen.lock().expect("no panic while it is held").len()
}

/// Starts, lets some through, stops under load; several times; then everything arrives exactly once.
async fn sigterm_under_load_repeats_nothing(kind: Kind) -> Result<()> {
    const EVENTS: usize = 600;
    const STOPS: usize = 5;
    let room = Room::migrated(kind).await?;
    let (address, seen) = target().await?;
    room.config(&format!(
        "[subscriptions.out]\nbatch = 50\nsink = {{ type = \"http\", url = \"http://{address}/\" }}\n[server]\nlisten = \"127.0.0.1:0\"\n"
    ))?;
    let rows: Vec<String> = (0..EVENTS).map(|n| format!("('order.placed', '{}', '{{\"n\":{n}}}')", n % 40)).collect();
    room.sql(&format!("INSERT INTO OUTBOX (topic, key, payload) VALUES {}", rows.join(","))).await?;
    for stop in 1..=STOPS {
        let served = room.serve().await?;
        let enough = stop * EVENTS / (STOPS + 2);
        until(|| count(&seen) >= enough).await?;
        served.terminate().await?;
    }
    ensure!(count(&seen) < EVENTS, "everything was through before the last stop; nothing was stopped under load");
    let served = room.serve().await?;
    until(|| count(&seen) == EVENTS).await?;
    served.terminate().await?;
    let seen = seen.lock().expect("no panic while it is held");
    let repeated: Vec<_> = seen.iter().filter(|(_, times)| **times > 1).collect();
    ensure!(repeated.is_empty(), "{} came more than once", repeated.len());
    ensure!(room.ok(&["stats"])? == format!("pending=0 dispatched={EVENTS} dead=0 total={EVENTS}\n"));
    Ok(())
}

async fn until(mut wanted: impl FnMut() -> bool) -> Result<()> {
    let waiting = async {
        while !wanted() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(DEADLINE, waiting).await.context("it never came")
}

#[tokio::test]
async fn on_sqlite_sigterm_under_load_repeats_nothing() -> Result<()> {
    sigterm_under_load_repeats_nothing(Kind::Sqlite).await
}

#[tokio::test]
async fn on_postgres_sigterm_under_load_repeats_nothing() -> Result<()> {
    sigterm_under_load_repeats_nothing(Kind::Postgres).await
}

#[tokio::test]
async fn logs_are_json_lines_with_levels_and_no_secret() -> Result<()> {
    let room = Room::migrated(Kind::Sqlite).await?;
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    room.config(&format!(
        "[subscriptions.out]\nsink = {{ type = \"http\", url = \"http://127.0.0.1:1/\", secret = \"{secret}\" }}\n[server]\nlisten = \"127.0.0.1:0\"\n"
    ))?;
    room.insert_three().await?;
    let log = room.serve().await?.terminate().await?;
    ensure!(!log.is_empty());
    for line in &log {
        let value: serde_json::Value = serde_json::from_str(line).with_context(|| line.clone())?;
        ensure!(value["level"].is_string() && !line.contains(secret), "{line}");
    }
    Ok(())
}
