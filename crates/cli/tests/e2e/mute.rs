//! Nobody listens: standard error or standard output is closed, full, or not read. Work goes on, and a stop is a clean one.

use std::fs::File;
use std::io::Write as _;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::room::{DEADLINE, Kind, Room, signal};

/// An end that swallows nothing.
#[derive(Debug, Clone, Copy)]
enum Deaf {
    /// A pipe whose reader has gone.
    Closed,
    /// A device on which nothing fits.
    Full,
    /// A pipe that nobody reads.
    Unread,
}

impl Deaf {
    /// What to write to, and what has to be kept meanwhile.
    fn open(self) -> Result<(Stdio, Option<std::io::PipeReader>)> {
        if matches!(self, Self::Full) {
            return Ok((File::options().write(true).open("/dev/full")?.into(), None));
        }
        let (reader, mut writer) = std::io::pipe()?;
        if matches!(self, Self::Unread) {
            // What a pipe holds: there is room for nothing more.
            writer.write_all(&[b'x'; 64 * 1024])?;
        }
        Ok((writer.into(), matches!(self, Self::Unread).then_some(reader)))
    }
}

/// Delivers three events before and three after it has had much to say, and ends with 0.
async fn goes_on(args: &[&str], stdout: Option<Deaf>, stderr: Deaf) -> Result<()> {
    let room = Room::migrated(Kind::Sqlite).await?;
    room.config(
        "[subscriptions.out]\nsink = { type = \"file\", path = \"out.jsonl\" }\n\
         [subscriptions.refused]\nbreaker = { base = \"1ms\", max = \"1ms\" }\n\
         sink = { type = \"http\", url = \"http://127.0.0.1:1/\", allow = [\"127.0.0.1\"] }\n",
    )?;
    let (error, _error_kept) = stderr.open()?;
    let (output, _output_kept) = match stdout {
        Some(deaf) => deaf.open()?,
        None => (Stdio::null(), None),
    };
    let mut command = tokio::process::Command::from(room.command(args));
    let mut child = command.stdout(output).stderr(error).kill_on_drop(true).spawn()?;
    let pid = child.id().context("it has ended already")?;
    // The command's own copies of the ends, else nothing would be closed.
    drop(command);
    for round in 1..=3 {
        room.insert_three().await?;
        let delivered = async {
            while room.lines("out.jsonl").map_or(0, |lines| lines.len()) < 3 * round {
                if let Some(status) = child.try_wait()? {
                    anyhow::bail!("{args:?} {stdout:?} {stderr:?}: it ended with {status} in round {round}");
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            anyhow::Ok(())
        };
        let wait = Duration::from_secs(30);
        tokio::time::timeout(wait, delivered)
            .await
            .with_context(|| format!("{args:?} {stdout:?} {stderr:?}: not delivered in round {round}"))??;
    }
    signal(pid, "TERM")?;
    let status = tokio::time::timeout(DEADLINE, child.wait()).await.context("it does not stop")??;
    ensure!(status.success(), "{args:?} {stdout:?} {stderr:?}: it ended with {status}");
    Ok(())
}

const RUN: &[&str] = &["run", "--log-level", "trace"];

#[tokio::test]
async fn standard_error_without_a_reader_stops_nothing() -> Result<()> {
    goes_on(RUN, None, Deaf::Closed).await
}

#[tokio::test]
async fn standard_error_that_is_full_stops_nothing() -> Result<()> {
    goes_on(RUN, None, Deaf::Full).await
}

#[tokio::test]
async fn standard_error_that_nobody_reads_stops_nothing() -> Result<()> {
    goes_on(RUN, None, Deaf::Unread).await
}

#[tokio::test]
async fn dispatch_in_a_loop_needs_no_listener_either() -> Result<()> {
    for (stdout, stderr) in [(Deaf::Closed, Deaf::Closed), (Deaf::Full, Deaf::Full)] {
        goes_on(&["dispatch", "--loop", "--subscription", "out"], Some(stdout), stderr).await?;
    }
    goes_on(RUN, Some(Deaf::Full), Deaf::Closed).await
}
