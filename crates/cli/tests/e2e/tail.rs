//! `postbox send` and `postbox tail`: append an event by hand, and watch a log grow.

use std::io::Write as _;
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout};

use crate::env::{DEADLINE, FILE_SINK, Kind, TestEnv, complaint, on_both, signal};

/// A running tail.
struct Tail {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Tail {
    async fn start(env: &TestEnv, args: &[&str]) -> Result<Self> {
        let mut child = env.spawn(&[&["tail"], args].concat())?;
        let mut said = BufReader::new(child.stderr.take().context("no stderr")?).lines();
        let begun = tokio::time::timeout(DEADLINE, said.next_line()).await.context("it never began")??;
        ensure!(begun.as_deref().is_some_and(|line| line.contains("from now on")), "{begun:?}");
        let lines = BufReader::new(child.stdout.take().context("no stdout")?).lines();
        Ok(Self { child, lines })
    }

    async fn line(&mut self) -> Result<String> {
        let line = tokio::time::timeout(DEADLINE, self.lines.next_line()).await.context("it shows nothing")??;
        line.context("it ended")
    }

    async fn n(&mut self) -> Result<i64> {
        let line: Value = serde_json::from_str(&self.line().await?)?;
        line["event"]["payload"]["n"].as_i64().with_context(|| line.to_string())
    }

    /// Sends SIGINT; it must exit with 0.
    async fn stop(mut self) -> Result<()> {
        signal(self.child.id().context("it has ended already")?, "INT")?;
        let status = tokio::time::timeout(DEADLINE, self.child.wait()).await.context("it does not end")??;
        ensure!(status.success(), "it ended with {status}");
        Ok(())
    }
}

async fn a_tail_shows_what_is_appended_and_leaves_no_trace(kind: Kind) -> Result<()> {
    let env = TestEnv::migrated(kind).await?;
    env.insert_three().await?;
    let mut all = Tail::start(&env, &["--json"]).await?;
    let mut some = Tail::start(&env, &["--topic", "order.*", "--key", "1"]).await?;
    let events = [("order.placed", "1", 4), ("invoice.sent", "1", 5), ("order.placed", "2", 6), ("order.paid", "1", 7)];
    env.insert(events.map(|(topic, key, n)| (topic, key.to_owned(), n))).await?;
    for n in 4..=7 {
        ensure!(all.n().await? == n);
    }
    ensure!(some.line().await? == "appended\tseq\tid\ttopic\tkey\tpayload");
    for n in [4, 7] {
        let line = some.line().await?;
        let cells: Vec<&str> = line.split('\t').collect();
        ensure!(cells.len() == 6 && cells[4] == "1" && cells[5] == format!("{{\"n\":{n}}}"), "{line}");
    }
    env.ok(&["send", "order.paid", "{\"n\":8}"])?;
    ensure!(all.n().await? == 8);
    all.stop().await?;
    some.stop().await?;
    ensure!(env.json(&["subscription", "list", "--json"])?.as_array().is_some_and(Vec::is_empty), "it has subscribed");
    Ok(())
}

/// A transaction takes its place in the log before others, and commits after them.
#[tokio::test]
async fn a_tail_misses_nothing_that_commits_late() -> Result<()> {
    let env = TestEnv::migrated(Kind::Postgres).await?;
    let late = env.client().await?;
    const APPEND: &str = "INSERT INTO postbox.outbox (topic, payload) VALUES ('t', '{\"n\":1}')";
    late.batch_execute(&format!("BEGIN; {APPEND}")).await?;
    let mut tail = Tail::start(&env, &["--json"]).await?;
    env.insert([("t", "k".to_owned(), 2)]).await?;
    ensure!(tail.n().await? == 2);
    late.batch_execute("COMMIT").await?;
    ensure!(tail.n().await? == 1);
    env.insert([("t", "k".to_owned(), 3)]).await?;
    ensure!(tail.n().await? == 3);
    tail.stop().await
}

async fn an_event_is_sent_from_an_argument_a_file_or_standard_input(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, FILE_SINK).await?;
    env.subscribe()?;
    let id = env.ok(&["send", "order.paid", "{\"n\":1}", "--key", "42", "--header", "a=b=c"])?;
    std::fs::write(env.path("payload.json"), "{\"n\":2}")?;
    env.ok(&["send", "order.paid", "@payload.json"])?;
    let mut child = env.command(&["send", "order.paid"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    child.stdin.take().context("no stdin")?.write_all(b"{\"n\":3}")?;
    ensure!(child.wait_with_output()?.status.success());
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    let mut lines = env.lines("out.jsonl")?;
    lines.sort_by_key(|line| line["payload"]["n"].as_i64());
    ensure!(lines.iter().map(|line| line["payload"]["n"].as_i64()).eq([Some(1), Some(2), Some(3)]), "{lines:?}");
    let first = &lines[0];
    ensure!(first["id"] == id.trim() && first["key"] == "42" && first["headers"]["a"] == "b=c", "{first}");
    Ok(())
}

/// Sent again with its id, the event is there already, and the command says so.
async fn an_event_with_its_id_is_sent_once(kind: Kind) -> Result<()> {
    let env = TestEnv::migrated(kind).await?;
    let id = "01234567-89ab-7def-8123-456789abcdef";
    let of_key = postbox_core::EventId::from_key("order-42-paid").expect("a key").to_string();
    for (option, value, id) in [("--id", id, id), ("--idempotency-key", "order-42-paid", &of_key)] {
        let send = ["send", "order.paid", "{}", option, value];
        ensure!(env.ok(&send)?.trim() == id);
        let again = env.output(&send)?;
        let said = String::from_utf8(again.stderr)?;
        ensure!(
            again.status.success() && String::from_utf8(again.stdout)?.trim() == id && said.contains("already"),
            "{said}"
        );
        let complaint = env.refuses(1, &["send", "order.paid", "[]", option, value])?;
        ensure!(complaint.contains("another event"), "{complaint}");
    }
    ensure!(env.ok(&["stats"])?.starts_with("pending=2 "));
    env.refuses(2, &["send", "order.paid", "{}", "--id", id, "--idempotency-key", "k"])?;
    Ok(())
}

async fn what_cannot_be_sent_is_refused_with_its_cure(kind: Kind) -> Result<()> {
    let env = TestEnv::migrated(kind).await?;
    for (args, cure) in [
        (&["send", "order.paid", "no JSON"][..], "--content-type"),
        (&["send", "order paid", "{}"], "topic_invalid"),
        (&["send", "order.paid", "{}", "--idempotency-key", ""], "order-42-paid"),
        (&["send", "order.paid", "{}", "--header", "a"], "NAME=VALUE"),
        (&["send", "order.paid", "{}", "--header", "a=1", "--header", "a=2"], "--header a is there twice"),
        (&["send", "order.paid", "@nowhere.json"], "cannot read nowhere.json"),
        (&["send", "order.paid", "{}", "--log", "nowhere"], "there are: inbox, outbox"),
        (&["send", "order.paid", "{}", "--subscription", "out"], "leave --subscription out"),
        (&["tail", "--subscription", "out"], "leave --subscription out"),
    ] {
        let said = complaint(&env.output(args)?, 2, args)?;
        ensure!(said.contains(cure), "{args:?}: {said}");
    }
    env.ok(&["send", "order.paid", "no JSON", "--content-type", "text/plain"])?;
    ensure!(env.ok(&["stats"])?.starts_with("pending=1 "));
    Ok(())
}

on_both!(
    a_tail_shows_what_is_appended_and_leaves_no_trace,
    an_event_is_sent_from_an_argument_a_file_or_standard_input,
    an_event_with_its_id_is_sent_once,
    what_cannot_be_sent_is_refused_with_its_cure,
);
