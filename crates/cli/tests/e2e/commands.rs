//! Every command, in the order in which one would use them.

use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;

use crate::endpoint::Endpoint;
use crate::room::{DEADLINE, Kind, Room, on_both, signal};

const FILE_SINK: &str = "[subscriptions.out]\nsink = { type = \"file\", path = \"out.jsonl\" }\n";

/// A webhook target whose answer can be set.
struct Target {
    address: SocketAddr,
    status: Arc<AtomicU16>,
}

impl Target {
    async fn start(status: u16) -> Result<Self> {
        let status = Arc::new(AtomicU16::new(status));
        let answer = Arc::clone(&status);
        let handler = async move || StatusCode::from_u16(answer.load(Ordering::Relaxed)).unwrap_or_default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(axum::serve(listener, Router::new().route("/", post(handler))).into_future());
        Ok(Self { address, status })
    }

    fn answer(&self, status: u16) {
        self.status.store(status, Ordering::Relaxed);
    }

    fn config(&self) -> String {
        format!(
            "[subscriptions.out]\nsink = {{ type = \"http\", url = \"http://{}/\", allow = [\"127.0.0.1\"] }}\n",
            self.address
        )
    }
}

async fn inserted_by_sql_and_dispatched_to_a_file(kind: Kind) -> Result<()> {
    let room = Room::migrated(kind).await?;
    room.config(FILE_SINK)?;
    ensure!(room.ok(&["stats"])? == "pending=0 dispatched=0 dead=0 total=0\n");
    room.insert_three().await?;
    ensure!(room.ok(&["stats"])? == "pending=3 dispatched=0 dead=0 total=3\n");
    ensure!(room.ok(&["list", "--state", "pending"])?.lines().count() == 3);

    ensure!(room.ok(&["dispatch", "--limit", "1"])? == "fetched=1 dispatched=1 failed=0 dead=0\n");
    ensure!(room.dispatch(&[])? == "dispatched=2 failed=0 dead=0");
    ensure!(room.ok(&["dispatch"])? == "fetched=0 dispatched=0 failed=0 dead=0\n");
    let lines = room.lines("out.jsonl")?;
    let payloads: Vec<i64> = lines.iter().filter_map(|line| line["payload"]["n"].as_i64()).collect();
    let of_key_1: Vec<i64> = payloads.iter().copied().filter(|n| *n != 2).collect();
    ensure!(lines.len() == 3 && of_key_1 == [1, 3], "{payloads:?}");

    ensure!(room.ok(&["stats"])? == "pending=0 dispatched=3 dead=0 total=3\n");
    let stats: serde_json::Value = serde_json::from_str(&room.ok(&["stats", "--json"])?)?;
    ensure!(stats[0]["subscription"] == "out" && stats[0]["dispatched"] == 3 && stats[0]["blocked"] == 0, "{stats}");

    let listed: serde_json::Value = serde_json::from_str(&room.ok(&["list", "--state", "dispatched", "--json"])?)?;
    ensure!(listed.as_array().map(Vec::len) == Some(3) && listed[2]["event"]["payload"]["n"] == 3, "{listed}");
    let id = listed[0]["event"]["id"].as_str().context("no id")?;
    let shown = room.ok(&["show", id])?;
    ensure!(shown.contains("order.placed") && shown.contains("dispatched") && shown.contains("{\"n\":1}"), "{shown}");
    ensure!(room.ok(&["show", id, "--json"])?.contains("\"state\": \"dispatched\""));

    ensure!(room.ok(&["prune", "--older-than", "1h"])? == "pruned=0\n");
    ensure!(room.ok(&["prune", "--older-than", "0s"])? == "pruned=3\n");
    ensure!(room.ok(&["stats"])? == "pending=0 dispatched=0 dead=0 total=0\n");
    Ok(())
}

async fn dead_events_are_retried_and_discarded_by_a_person(kind: Kind) -> Result<()> {
    let room = Room::migrated(kind).await?;
    let target = Target::start(422).await?;
    room.config(&target.config())?;
    room.insert_three().await?;
    ensure!(room.dispatch(&[])? == "dispatched=0 failed=0 dead=3");
    ensure!(room.ok(&["stats"])? == "pending=0 dispatched=0 dead=3 total=3\n");

    let dead = room.ok(&["list", "--state", "dead"])?;
    ensure!(dead.lines().count() == 3 && dead.contains("http_422"), "{dead}");
    let ids: Vec<&str> = dead.lines().filter_map(|line| line.split('\t').next()).collect();
    ensure!(room.ok(&["list", "--state", "dead", "--topic", "order.paid"])?.lines().count() == 1);
    ensure!(room.ok(&["list", "--state", "dead", "--code", "http_500"])?.is_empty());

    let nobody = "00000000-0000-7000-8000-000000000000";
    for narrowed in [&["--topic", "zzz"][..], &["--code", "nope"], &["--limit", "1"]] {
        room.refuses(2, &[&["retry", ids[0]], narrowed].concat())?;
    }
    target.answer(200);
    let output = room.output(&["retry", ids[0], nobody])?;
    let said = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(output.status.code() == Some(1) && said.0 == "retried=1\n" && said.1.contains(nobody), "{said:?}");
    ensure!(room.ok(&["retry", ids[0]])?.starts_with("retried="));
    ensure!(room.ok(&["dispatch"])?.contains("dispatched=1"));
    ensure!(room.ok(&["retry", ids[0]])? == "retried=0\n");
    ensure!(room.ok(&["discard", ids[1]])? == "discarded=1\n");
    ensure!(room.ok(&["discard", ids[1]])? == "discarded=0\n");
    ensure!(room.ok(&["retry", "--all", "--code", "no_such_code"])? == "retried=0\n");
    ensure!(room.ok(&["retry", "--all", "--topic", "order.*", "--limit", "5"])? == "retried=1\n");
    ensure!(room.ok(&["dispatch"])?.contains("dispatched=1"));
    ensure!(room.ok(&["stats"])? == "pending=0 dispatched=2 dead=0 total=3\n");

    let unknown = room.refuses(1, &["retry", nobody])?;
    ensure!(unknown.contains("no log has an event"), "{unknown}");
    Ok(())
}

/// Two subscriptions and two logs, dead events of both in turn: a limit takes the oldest of all.
async fn a_limited_retry_takes_the_oldest_over_all_subscriptions(kind: Kind) -> Result<()> {
    let room = Room::migrated(kind).await?;
    let target = Target::start(422).await?;
    let subscription =
        |name: &str, topic: &str| target.config().replace(".out]", &format!(".{name}]\ntopics = [\"{topic}.*\"]"));
    room.config(&(subscription("alpha", "a") + &subscription("beta", "b") + &subscription("gamma", "none")))?;
    for n in 0..10 {
        let topic = if n % 2 == 0 { "b" } else { "a" };
        room.sql(&format!("INSERT INTO OUTBOX (topic, key, payload) VALUES ('{topic}.x', 'k{n}', '{{\"n\":{n}}}');"))
            .await?;
    }
    ensure!(room.dispatch(&[])? == "dispatched=0 failed=0 dead=10");
    let dead = || -> Result<std::collections::BTreeSet<i64>> {
        let listed: serde_json::Value = serde_json::from_str(&room.ok(&["list", "--state", "dead", "--json"])?)?;
        let records = listed.as_array().context("no list")?;
        Ok(records.iter().filter_map(|record| record["event"]["payload"]["n"].as_i64()).collect())
    };
    ensure!(room.ok(&["retry", "--all", "--limit", "3"])? == "retried=3\n");
    ensure!(dead()? == (3..10).collect(), "{:?}", dead()?);
    // Those are on their way: they are older than what is dead, and do not use up the limit again.
    ensure!(room.ok(&["retry", "--all", "--limit", "2"])? == "retried=2\n");
    ensure!(dead()? == (5..10).collect(), "{:?}", dead()?);
    ensure!(room.ok(&["retry", "--all", "--limit", "2", "--topic", "a.*"])? == "retried=2\n");
    ensure!(dead()? == [6, 8, 9].into(), "{:?}", dead()?);
    ensure!(room.ok(&["retry", "--all", "--limit", "7", "--subscription", "alpha"])? == "retried=1\n");
    ensure!(dead()? == [6, 8].into(), "{:?}", dead()?);
    ensure!(room.ok(&["retry", "--all", "--limit", "1000", "--code", "http_500"])? == "retried=0\n");
    ensure!(room.ok(&["retry", "--all", "--limit", "1000", "--code", "http_422"])? == "retried=2\n");
    ensure!(room.ok(&["retry", "--all", "--limit", "1000"])? == "retried=0\n");
    target.answer(200);
    ensure!(room.ok(&["dispatch"])?.contains("dispatched=10"));
    Ok(())
}

/// Scripts read the last line and the exit code: 0 with the counts when it is drained, 1 with the counts when it was interrupted, 1 without
/// when it could not begin.
async fn dispatch_says_how_it_ended(kind: Kind) -> Result<()> {
    let room = Room::migrated(kind).await?;
    room.config(FILE_SINK)?;
    room.insert_three().await?;
    let drained = room.output(&["dispatch"])?;
    ensure!(drained.status.code() == Some(0) && drained.stderr.is_empty());
    let said = String::from_utf8(drained.stdout)?;
    ensure!(said.starts_with("fetched=") && said.ends_with(" dispatched=3 failed=0 dead=0\n"), "{said}");

    // What failed is in the counts, not in the exit code: it will be tried again, or waits for a person.
    let target = Target::start(500).await?;
    // Without chance: a retry that is due at once would be fetched again.
    room.config(&target.config().replace("sink", "retry = { delays = [\"1h\"] }\nsink"))?;
    room.insert_three().await?;
    let failed = room.output(&["dispatch", "--subscription", "out"])?;
    let said = String::from_utf8(failed.stdout)?;
    ensure!(failed.status.code() == Some(0) && said.ends_with(" dispatched=0 failed=2 dead=0\n"), "{said}");

    // It could not begin: it fetched nothing, and says only why.
    room.config("[subscriptions.other]\nsink = { type = \"file\", path = \"no/such/folder/out.jsonl\" }\n")?;
    let complaint = room.refuses(1, &["dispatch"])?;
    ensure!(complaint.lines().count() == 1 && complaint.contains("no/such/folder"), "{complaint}");
    Ok(())
}

/// The first call outlives its batch, and what waits behind it counts; two subscriptions share the limit.
async fn a_limit_is_kept_though_the_target_is_slow(kind: Kind) -> Result<()> {
    let room = Room::migrated(kind).await?;
    let slow = Endpoint::start(|_| (200, Duration::from_millis(400)))?;
    let subscription = |name: &str| {
        format!(
            "[subscriptions.{name}]\nsink = {{ type = \"http\", url = \"{}\", allow = [\"127.0.0.1\"] }}\n",
            slow.url()
        )
    };
    room.config(&(subscription("a") + &subscription("b")))?;
    for n in 0..3 {
        room.sql(&format!("INSERT INTO OUTBOX (topic, key, payload) VALUES ('t', 'k', '{{\"n\":{n}}}');")).await?;
    }
    // Two events are read; the second waits behind the first, whose call outlives the batch.
    ensure!(room.ok(&["dispatch", "--limit", "2"])? == "fetched=2 dispatched=1 failed=0 dead=0\n");
    // The one released, then one a read: `a` is served before `b`.
    for _ in 0..5 {
        let counts = room.ok(&["dispatch", "--limit", "1"])?;
        ensure!(counts == "fetched=1 dispatched=1 failed=0 dead=0\n", "{counts}");
    }
    ensure!(room.dispatch(&["--limit", "3"])? == "dispatched=0 failed=0 dead=0");
    let numbers: Vec<i64> = slow.arrivals().iter().map(|arrival| arrival.n).collect();
    ensure!(numbers == [0, 1, 2, 0, 1, 2], "{numbers:?}");
    Ok(())
}

/// A person pauses the subscription while it is being drained: its lane is lost at the next renewal.
async fn a_dispatch_that_loses_its_lane_ends_with_1_and_its_counts(kind: Kind) -> Result<()> {
    let room = Room::migrated(kind).await?;
    let slow = Endpoint::start(|_| (200, Duration::ZERO))?;
    // It cannot come to its end before it is paused, however long that takes.
    slow.answer_only(5);
    room.config(&format!(
        "[subscriptions.out]\nlease = \"6s\"\nconcurrency = 1\nordering = \"none\"\nbatch = 1\nsink = {{ type = \"http\", url = \"{}\", allow = [\"127.0.0.1\"] }}\n",
        slow.url()
    ))?;
    for _ in 0..100 {
        room.insert_three().await?;
    }
    let mut command = tokio::process::Command::from(room.command(&["dispatch", "--log-level", "off"]));
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn()?;
    slow.until("some, and one that waits", |arrivals| arrivals.len() > 5).await?;
    room.ok(&["pause", "out", "--why", "a test"])?;
    let output = tokio::time::timeout(DEADLINE, child.wait_with_output()).await.context("it does not end")??;
    let (said, told) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(output.status.code() == Some(1), "{}: {said}{told}", output.status);
    let counts: Vec<u64> = said.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect();
    let [fetched, dispatched, 0, 0] = counts[..] else { anyhow::bail!("{said}") };
    ensure!(said.lines().count() == 1 && (1..300).contains(&fetched) && (1..=fetched).contains(&dispatched), "{said}");
    ensure!(told.lines().count() == 1 && told.contains("1 lane(s) were lost") && told.contains("paused"), "{told}");
    // Nothing is lost: the rest goes out when it is resumed.
    room.ok(&["resume", "out"])?;
    ensure!(room.ok(&["stats"])?.contains("total=300\n"));
    Ok(())
}

/// A URL of our own network is called only if that is allowed, and our own address never: told before anything is sent, with the cure.
async fn a_private_target_must_be_allowed(kind: Kind) -> Result<()> {
    let room = Room::migrated(kind).await?;
    let target = Endpoint::start(|_| (200, Duration::ZERO))?;
    let port: u16 = target.url().trim_end_matches('/').rsplit(':').next().context("no port")?.parse()?;
    let config = |host: &str, allow: &str, listen: u16| {
        format!(
            "[subscriptions.out]\nsink = {{ type = \"http\", url = \"http://{host}:{port}/\", allow = [{allow}] }}\n[server]\nlisten = \"127.0.0.1:{listen}\"\n"
        )
    };
    room.insert_three().await?;
    let elsewhere = port.wrapping_add(1).max(1);
    for (host, allow, listen, cure) in [
        ("127.0.0.1", "", elsewhere, "allow = [\"127.0.0.1\"]"),
        ("localhost", "", elsewhere, "allow = [\"127.0.0.1\", \"::1\"]"),
        ("127.0.0.1", "\"127.0.0.0/8\"", port, "where we listen ourselves"),
    ] {
        room.config(&config(host, allow, listen))?;
        for command in ["check-config", "dispatch"] {
            let told = room.refuses(2, &[command])?;
            ensure!(told.contains(cure), "{command}: {told}");
        }
    }
    ensure!(target.count() == 0, "it was called");
    room.config(&config("localhost", "\"127.0.0.1\", \"::1\"", elsewhere))?;
    ensure!(room.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    Ok(())
}

async fn a_paused_subscription_delivers_nothing_until_resumed(kind: Kind) -> Result<()> {
    let room = Room::migrated(kind).await?;
    room.config(FILE_SINK)?;
    room.insert_three().await?;
    room.ok(&["pause", "out", "--why", "a test"])?;
    ensure!(room.ok(&["dispatch"])? == "fetched=0 dispatched=0 failed=0 dead=0\n");
    let output = room.output(&["doctor"])?;
    let said = String::from_utf8(output.stdout)?;
    ensure!(
        output.status.code() == Some(1) && said.contains("a test") && said.contains("postbox resume out"),
        "{said}"
    );
    room.ok(&["resume", "out"])?;
    ensure!(room.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    room.ok(&["pause", "out", "--for", "1s"])?;
    Ok(())
}

async fn the_doctor_names_the_cause(kind: Kind) -> Result<()> {
    let room = Room::migrated(kind).await?;
    let target = Target::start(500).await?;
    room.config(&target.config().replace("sink", "retry = { max_attempts = 5, base = \"1h\", max = \"1h\" }\nsink"))?;
    room.insert_three().await?;
    room.ok(&["dispatch"])?;
    let said = String::from_utf8(room.output(&["doctor"])?.stdout)?;
    for expected in ["retrying", "http_500", "blocked", "key 1", "no relay drives lane 0", "postbox run"] {
        ensure!(said.contains(expected), "{expected:?} is not in\n{said}");
    }
    let json: serde_json::Value = serde_json::from_slice(&room.output(&["doctor", "--json"])?.stdout)?;
    ensure!(json.as_array().is_some_and(|findings| findings.len() > 2), "{json}");
    Ok(())
}

async fn hostile_text_cannot_steer_the_terminal(kind: Kind) -> Result<()> {
    let room = Room::migrated(kind).await?;
    room.config(FILE_SINK)?;
    let escape = match kind {
        Kind::Sqlite => "char(27)",
        Kind::Postgres => "chr(27)",
    };
    room.sql(&format!(
        "INSERT INTO OUTBOX (topic, key, payload) VALUES ('a', {escape} || ']0;owned', '{{\"x\":\"plain\"}}')"
    ))
    .await?;
    for args in [&["list", "--state", "pending"][..], &["list", "--state", "pending", "--json"]] {
        let printed = room.ok(args)?;
        ensure!(!printed.contains('\u{1b}') && printed.contains("owned"), "{printed:?}");
    }
    Ok(())
}

async fn the_schema_comes_and_goes(kind: Kind) -> Result<()> {
    let room = Room::empty(kind).await?;
    let complaint = room.refuses(1, &["migrate", "validate"])?;
    ensure!(complaint.lines().count() == 1 && complaint.contains("postbox migrate up"), "{complaint}");
    ensure!(room.ok(&["migrate", "up"])?.contains("the schema is ready"));
    ensure!(room.ok(&["migrate", "up"])? == "the schema is up to date\n");
    ensure!(room.ok(&["migrate", "validate"])? == "the schema is right\n");
    ensure!(room.ok(&["migrate", "print"])?.contains("CREATE TABLE"));
    match kind {
        Kind::Postgres => ensure!(room.ok(&["migrate", "rebase"])?.contains("start the relays again")),
        Kind::Sqlite => ensure!(room.refuses(1, &["migrate", "rebase"])?.contains("only a Postgres store")),
    }
    let complaint = room.refuses(2, &["migrate", "down"])?;
    ensure!(complaint.contains("--yes"), "{complaint}");
    ensure!(room.ok(&["migrate", "down", "--yes"])?.contains("the schema is gone"));
    room.refuses(1, &["migrate", "validate"])?;
    Ok(())
}

async fn what_is_not_delivered_is_not_removed_by_the_way(kind: Kind) -> Result<()> {
    let room = Room::migrated(kind).await?;
    room.config(FILE_SINK)?;
    room.insert_three().await?;
    let complaint = room.refuses(1, &["migrate", "down", "--yes"])?;
    ensure!(complaint.contains("log outbox") && complaint.contains("--discard-events"), "{complaint}");
    ensure!(room.dispatch(&["--limit", "1"])?.starts_with("dispatched=1"));
    room.refuses(1, &["migrate", "down", "--yes"])?;
    ensure!(room.dispatch(&[])?.starts_with("dispatched=2"));
    ensure!(room.ok(&["migrate", "down", "--yes"])?.contains("the schema is gone"));
    room.ok(&["migrate", "up"])?;
    room.insert_three().await?;
    ensure!(room.ok(&["migrate", "down", "--yes", "--discard-events"])?.contains("the schema is gone"));
    Ok(())
}

/// A schema that somebody holds, and the command that waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removal_that_was_stopped_removes_nothing() -> Result<()> {
    let room = Room::migrated(Kind::Postgres).await?;
    room.config(FILE_SINK)?;
    room.insert_three().await?;
    ensure!(room.dispatch(&[])?.starts_with("dispatched=3"));
    let (holder, connection) = tokio_postgres::connect(&room.url, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    for stopped in [true, false] {
        holder.batch_execute("BEGIN; LOCK TABLE postbox.outbox IN ROW EXCLUSIVE MODE").await?;
        let mut command = tokio::process::Command::from(room.command(&["migrate", "down", "--yes"]));
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn()?;
        let waits =
            "SELECT count(*) FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))";
        let waiting = async {
            while holder.query_one(waits, &[]).await?.get::<_, i64>(0) == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(DEADLINE, waiting).await.context("it never waited")??;
        if stopped {
            signal(child.id().context("it runs")?, "INT")?;
        }
        let output = tokio::time::timeout(DEADLINE, child.wait_with_output()).await.context("it does not end")??;
        let complaint = String::from_utf8(output.stderr)?;
        ensure!(!output.status.success(), "{complaint}");
        ensure!(stopped || complaint.contains("nothing was removed"), "{complaint}");
        holder.batch_execute("COMMIT").await?;
        // What the server was still to do for it is done.
        let others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'";
        let alone = async {
            while holder.query_one(others, &[]).await?.get::<_, i64>(0) > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(DEADLINE, alone).await.context("its connection stays")??;
        ensure!(room.ok(&["stats"])? == "pending=0 dispatched=3 dead=0 total=3\n", "stopped: {stopped}");
    }
    ensure!(room.ok(&["migrate", "down", "--yes"])?.contains("the schema is gone"));
    Ok(())
}

#[tokio::test]
async fn without_a_subscription_the_outbox_is_pending() -> Result<()> {
    for kind in [Kind::Sqlite, Kind::Postgres] {
        let room = Room::migrated(kind).await?;
        room.insert_three().await?;
        ensure!(room.ok(&["stats"])? == "pending=3 dispatched=0 dead=0 total=3\n", "{kind:?}");
        ensure!(room.ok(&["dispatch"])? == "fetched=0 dispatched=0 failed=0 dead=0\n");
    }
    Ok(())
}

#[test]
fn init_writes_a_file_that_is_right_and_overwrites_nothing() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let room = runtime.block_on(Room::empty(Kind::Sqlite))?;
    ensure!(room.ok(&["init"])?.contains("postbox.toml"));
    ensure!(room.ok(&["check-config"])?.contains("right"));
    ensure!(room.refuses(1, &["init"])?.contains("--force"));
    room.ok(&["init", "--force"])?;
    Ok(())
}

#[test]
fn the_schema_of_the_configuration_is_printed_as_json() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let room = runtime.block_on(Room::empty(Kind::Sqlite))?;
    let schema: serde_json::Value = serde_json::from_str(&room.ok(&["config", "schema"])?)?;
    ensure!(schema["properties"]["store"]["properties"]["url"]["default"] == "sqlite:postbox.db", "{schema}");
    Ok(())
}

#[test]
fn completions_name_every_command() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let room = runtime.block_on(Room::empty(Kind::Sqlite))?;
    for shell in ["bash", "zsh", "fish"] {
        let script = room.ok(&["completions", shell])?;
        ensure!(script.contains("check-config") && script.contains("dispatch"), "{shell}");
    }
    Ok(())
}

on_both!(
    inserted_by_sql_and_dispatched_to_a_file,
    dead_events_are_retried_and_discarded_by_a_person,
    a_limited_retry_takes_the_oldest_over_all_subscriptions,
    dispatch_says_how_it_ended,
    a_limit_is_kept_though_the_target_is_slow,
    a_private_target_must_be_allowed,
    a_dispatch_that_loses_its_lane_ends_with_1_and_its_counts,
    a_paused_subscription_delivers_nothing_until_resumed,
    the_doctor_names_the_cause,
    hostile_text_cannot_steer_the_terminal,
    the_schema_comes_and_goes,
    what_is_not_delivered_is_not_removed_by_the_way,
);
