//! Standard error or output is closed, full, or not read: work continues, and a stop is clean.

use std::fs::File;
use std::io::Write as _;
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};

use crate::endpoint::{Endpoint, Shut, refuses_all, takes_all};
use crate::env::{DEADLINE, FILE_SINK, Kind, TestEnv, cases, ended, get, http_sink, signal, until};

/// An output that accepts nothing.
#[derive(Debug, Clone, Copy)]
enum Output {
    /// A pipe whose reader is gone.
    Closed,
    /// A full device.
    Full,
    /// A pipe that nobody reads.
    Unread,
}

impl Output {
    /// Returns the output, and the pipe end that must stay open.
    fn open(self) -> Result<(Stdio, Option<std::io::PipeReader>)> {
        if matches!(self, Self::Full) {
            return Ok((File::options().write(true).open("/dev/full")?.into(), None));
        }
        let (reader, mut writer) = std::io::pipe()?;
        if matches!(self, Self::Unread) {
            // Fills the pipe's buffer, so that it accepts nothing more.
            writer.write_all(&[b'x'; 64 * 1024])?;
        }
        Ok((writer.into(), matches!(self, Self::Unread).then_some(reader)))
    }
}

/// Delivers three events before and three after it has logged a lot, and exits with 0.
async fn goes_on(args: &[&str], stdout: Option<Output>, stderr: Output) -> Result<()> {
    let refused = "[subscriptions.refused]\nbreaker = { base = \"1ms\", max = \"1ms\" }\n".to_owned();
    let env = TestEnv::with(Kind::Sqlite, &(refused + &http_sink("http://127.0.0.1:1/") + FILE_SINK)).await?;
    let (error, _error_kept) = stderr.open()?;
    let (output, _output_kept) = match stdout {
        Some(output) => output.open()?,
        None => (Stdio::null(), None),
    };
    let mut command = tokio::process::Command::from(env.command(args));
    let mut child = command.stdout(output).stderr(error).kill_on_drop(true).spawn()?;
    let pid = child.id().context("it has ended already")?;
    // Drop the command's own copies of the pipe ends, so that a closed pipe is really closed.
    drop(command);
    for round in 1..=3 {
        env.insert_three().await?;
        until(&format!("{args:?} {stdout:?} {stderr:?}: round {round}"), async || {
            let status = child.try_wait()?;
            ensure!(status.is_none(), "{args:?} {stdout:?} {stderr:?}: it ended with {status:?} in round {round}");
            Ok(env.lines("out.jsonl").ok().filter(|lines| lines.len() >= 3 * round))
        })
        .await?;
    }
    signal(pid, "TERM")?;
    let status = tokio::time::timeout(DEADLINE, child.wait()).await.context("it does not stop")??;
    ensure!(status.success(), "{args:?} {stdout:?} {stderr:?}: it ended with {status}");
    Ok(())
}

const RUN: &[&str] = &["run", "--log-level", "trace"];

cases! {
    standard_error_without_a_reader_stops_nothing => goes_on(RUN, None, Output::Closed);
    standard_error_that_is_full_stops_nothing => goes_on(RUN, None, Output::Full);
    standard_error_that_nobody_reads_stops_nothing => goes_on(RUN, None, Output::Unread);
}

/// The event is committed: the caller must not take it for failed and send it again.
#[tokio::test]
async fn a_send_that_cannot_say_the_id_on_standard_output_says_it_in_the_error() -> Result<()> {
    for as_json in [false, true] {
        let env = TestEnv::with(Kind::Sqlite, FILE_SINK).await?;
        let args = if as_json { &["send", "order.paid", "{}", "--json"][..] } else { &["send", "order.paid", "{}"] };
        let sent = env.command(args).stdout(Output::Full.open()?.0).output()?;
        let said = String::from_utf8(sent.stderr)?;
        ensure!(sent.status.code() == Some(1), "it ended with {}: {said}", sent.status);
        env.dispatch(&[])?;
        let lines = env.lines("out.jsonl")?;
        let id = lines[0]["id"].as_str().context("an id")?;
        ensure!(said.contains(&format!("nevertheless: event {id} is in the outbox")), "{said}");
    }
    Ok(())
}

/// The same for changes of many events.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_that_cannot_say_its_count_on_standard_output_says_it_in_the_error() -> Result<()> {
    let target = Endpoint::start(refuses_all)?;
    let env = TestEnv::with(Kind::Sqlite, &target.subscription("out")).await?;
    env.insert_three().await?;
    ensure!(env.dispatch(&[])? == "dispatched=0 failed=0 dead=3");
    for (args, done) in [
        (&["retry", "--all", "--dry-run"][..], "retried=3 dry_run=true"),
        (&["retry", "--all"], "retried=3"),
        (&["mark-dead", "--all", "--json"], "marked_dead="),
        (&["discard", "--all"], "discarded="),
        (&["prune", "--older-than", "0s"], "pruned="),
        (&["replay", "--all"], "replayed="),
        (&["pause", "out"], "out is paused"),
    ] {
        let output = env.command(args).stdout(Output::Full.open()?.0).output()?;
        let said = String::from_utf8(output.stderr)?;
        ensure!(output.status.code() == Some(1), "{args:?}: {} {said}", output.status);
        ensure!(said.contains(&format!("; nevertheless: {done}")), "{args:?}: {said}");
    }
    Ok(())
}

/// Each command prints a result, and then fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_is_one_also_where_nothing_can_be_printed() -> Result<()> {
    for output in [Output::Closed, Output::Full] {
        let target = Endpoint::start(refuses_all)?;
        let env = TestEnv::with(Kind::Sqlite, &(target.subscription("out") + "on_dead = \"halt\"\n")).await?;
        env.insert_three().await?;
        let fails = |args: &[&str], code: i32, why: &str, done: &str| -> Result<()> {
            let failed = env.command(args).stdout(output.open()?.0).output()?;
            let said = String::from_utf8(failed.stderr)?;
            let context = || format!("{args:?} {output:?}: {} {said}", failed.status);
            ensure!(failed.status.code() == Some(code) && said.contains(why), context());
            let unsaid = format!("postbox: cannot write the output: No space left on device (os error 28){done}");
            ensure!(said.contains(&unsaid) == matches!(output, Output::Full), context());
            Ok(())
        };
        let id_of = |state: &str, key: &str| -> Result<String> {
            let listed = env.json(&["list", "--state", state, "--key", key, "--json"])?;
            Ok(listed[0]["event"]["id"].as_str().context("an id")?.to_owned())
        };
        let dispatch = ["dispatch", "--loop", "--log-level", "off"];
        fails(&dispatch, 1, "wait behind a dead one", "; nevertheless: fetched=")?;
        let (head, other, blocked) = (id_of("dead", "1")?, id_of("dead", "2")?, id_of("blocked", "1")?);
        let unknown = "01234567-89ab-7def-8123-456789abcdef";
        let no_event = format!("no log has an event {unknown}");
        for (verb, id, word) in
            [("mark-dead", &blocked, "marked_dead"), ("retry", &head, "retried"), ("discard", &other, "discarded")]
        {
            fails(&[verb, id, unknown], 1, &no_event, &format!("; nevertheless: {word}=1"))?;
        }
        target.set(takes_all);
        ensure!(env.dispatch(&[])? == "dispatched=1 failed=0 dead=0");
        fails(&["replay", &head, unknown], 1, &no_event, "; nevertheless: replayed=1")?;
        fails(&["subscription", "reset", "out", "--to", "beginning"], 2, "to do it, add --yes", "")?;
        let nobody = Shut::reserve()?;
        let away = nobody.url().replace("http://", "postgres://u@") + "db";
        fails(&["doctor", "--store", &away], 1, "there are problems", "")?;
        fails(&["check-config", "--connect", "--store", &away], 1, "is it running", "")?;
    }
    Ok(())
}

#[tokio::test]
async fn the_work_is_done_also_where_nothing_can_be_printed() -> Result<()> {
    let env = TestEnv::with(Kind::Sqlite, FILE_SINK).await?;
    let reset = ["subscription", "reset", "out", "--to", "beginning", "--yes"];
    env.insert_three().await?;
    env.dispatch(&[])?;
    for (output, code) in [(Output::Closed, 0), (Output::Full, 1)] {
        let done = env.command(&reset).stdout(output.open()?.0).output()?;
        let said = String::from_utf8(done.stderr)?;
        ensure!(done.status.code() == Some(code), "{output:?}: {} {said}", done.status);
        ensure!(said.contains("; nevertheless: out was reset") == (code == 1), "{output:?}: {said}");
        ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0", "{output:?}: it was not reset");
    }
    let made = env.command(&["new", "service", "shop"]).stdout(Output::Closed.open()?.0).output()?;
    ensure!(made.status.success() && env.path("shop/tests/service.rs").exists(), "{made:?}");
    // Only `tail` does not end by itself.
    let mut tail = tokio::process::Command::from(env.command(&["tail"]));
    tail.stdout(Output::Closed.open()?.0).stderr(Stdio::piped()).kill_on_drop(true);
    let tailed = ended(tail.spawn()?).await?;
    ensure!(tailed.status.success(), "{tailed:?}");
    Ok(())
}

#[tokio::test]
async fn standard_output_is_of_no_account_to_a_service() -> Result<()> {
    goes_on(RUN, Some(Output::Full), Output::Closed).await
}

/// The call that writes to it blocks a thread, which nothing can end but the end of the process.
#[tokio::test]
async fn a_sink_on_standard_output_that_nobody_reads_does_not_hold_up_a_stop() -> Result<()> {
    let config = "[subscriptions.out]\nsink = { type = \"stdout\" }\n\
                  [server]\nlisten = \"127.0.0.1:0\"\nstop_timeout = \"1s\"\n";
    let env = TestEnv::with(Kind::Sqlite, config).await?;
    env.insert_three().await?;
    let (output, _output_kept) = Output::Unread.open()?;
    let served = env.serve_to(output, &[]).await?;
    until("a call", async || {
        let page = get(&served.address, "/metrics", "").await?;
        let sent = page.lines().find_map(|line| line.strip_prefix("postbox_in_flight{subscription=\"out\"} "));
        Ok(sent.is_some_and(|events| events != "0").then_some(()))
    })
    .await?;
    signal(served.pid()?, "TERM")?;
    let (status, log) = served.status().await?;
    ensure!(matches!(status.code(), Some(0 | 1)), "it ended with {status}: {log:#?}");
    ensure!(env.ok(&["stats"])? == "pending=3 dispatched=0 dead=0 total=3\n");
    Ok(())
}
