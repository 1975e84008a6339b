//! `postbox run` and signals.

use std::collections::HashMap;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use axum::Router;
use axum::http::HeaderMap;
use axum::routing::post;
use tokio::sync::watch;

use crate::room::{DEADLINE, Kind, Room, signal};

/// A target that answers only as many requests as it is told to: however late a stop comes, it finds some on the wire.
struct Target {
    address: std::net::SocketAddr,
    /// Event ids as it received them, with how often.
    seen: watch::Receiver<HashMap<String, u32>>,
    answers: watch::Sender<usize>,
}

impl Target {
    async fn start() -> Result<Self> {
        let (note, seen) = watch::channel(HashMap::new());
        let (answers, may_answer) = watch::channel(0);
        let arrived = AtomicUsize::new(0);
        let arrived = Arc::new(arrived);
        let handler = async move |headers: HeaderMap| {
            let id = headers.get("ce-id").and_then(|id| id.to_str().ok()).unwrap_or("none").to_owned();
            note.send_modify(|seen| *seen.entry(id).or_default() += 1);
            let number = arrived.fetch_add(1, Ordering::Relaxed);
            // Fails only when the test is over.
            let _ = may_answer.clone().wait_for(|answers| number < *answers).await;
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(axum::serve(listener, Router::new().route("/", post(handler))).into_future());
        Ok(Self { address, seen, answers })
    }

    /// Waits until so many events have arrived.
    async fn arrived(&self, events: usize) -> Result<()> {
        let mut seen = self.seen.clone();
        let arrived = seen.wait_for(|seen| seen.len() >= events);
        tokio::time::timeout(DEADLINE, arrived).await.with_context(|| format!("not {events} have come"))??;
        Ok(())
    }
}

/// Starts, lets some through, stops under load; several times; then everything has arrived exactly once.
async fn sigterm_under_load_repeats_nothing(kind: Kind) -> Result<()> {
    // `POSTBOX_TEST_STOPS=50` for the long version.
    let stops: usize = std::env::var("POSTBOX_TEST_STOPS").ok().and_then(|stops| stops.parse().ok()).unwrap_or(20);
    let events = 120 * stops;
    let room = Room::migrated(kind).await?;
    let target = Target::start().await?;
    room.config(&format!(
        "[subscriptions.out]\nbatch = 50\nsink = {{ type = \"http\", url = \"http://{}/\", allow = [\"127.0.0.1\"] }}\n[server]\nlisten = \"127.0.0.1:0\"\n",
        target.address
    ))?;
    let rows: Vec<String> = (0..events).map(|n| format!("('order.placed', '{}', '{{\"n\":{n}}}')", n % 40)).collect();
    room.sql(&format!("INSERT INTO OUTBOX (topic, key, payload) VALUES {}", rows.join(","))).await?;
    for stop in 1..=stops {
        let served = room.serve().await?;
        let share = |stop: usize| stop * events / (stops + 2);
        target.answers.send_replace(share(stop + 1));
        target.arrived(share(stop)).await?;
        signal(served.pid()?, "TERM")?;
        // What it has begun then it may end.
        served.logged("postbox stops", 1).await?;
        target.answers.send_replace(usize::MAX);
        served.ended().await?;
    }
    let served = room.serve().await?;
    target.answers.send_replace(usize::MAX);
    target.arrived(events).await?;
    served.terminate().await?;
    let seen = target.seen.borrow();
    let repeated: Vec<_> = seen.iter().filter(|(_, times)| **times > 1).collect();
    ensure!(repeated.is_empty(), "{} came more than once", repeated.len());
    ensure!(room.ok(&["stats"])? == format!("pending=0 dispatched={events} dead=0 total={events}\n"));
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
async fn dispatch_in_a_loop_goes_on_until_sigterm_and_then_counts() -> Result<()> {
    let room = Room::migrated(Kind::Sqlite).await?;
    room.config("[subscriptions.out]\nsink = { type = \"file\", path = \"out.jsonl\" }\n")?;
    let mut command = tokio::process::Command::from(room.command(&["dispatch", "--loop", "--log-level", "error"]));
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn()?;
    let pid = child.id().context("it has ended already")?;
    for round in 1..=2 {
        room.insert_three().await?;
        until(|| room.lines("out.jsonl").is_ok_and(|lines| lines.len() == 3 * round)).await?;
    }
    signal(pid, "TERM")?;
    let output = tokio::time::timeout(DEADLINE, child.wait_with_output()).await.context("it does not stop")??;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout)?;
    ensure!(printed.starts_with("fetched=") && printed.ends_with(" dispatched=6 failed=0 dead=0\n"), "{printed}");
    Ok(())
}

#[tokio::test]
async fn logs_are_json_lines_with_levels_and_no_secret() -> Result<()> {
    let room = Room::migrated(Kind::Sqlite).await?;
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    room.config(&format!(
        "[subscriptions.out]\nsink = {{ type = \"http\", url = \"http://127.0.0.1:1/\", allow = [\"127.0.0.1\"], secret = \"{secret}\" }}\n[server]\nlisten = \"127.0.0.1:0\"\n"
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
