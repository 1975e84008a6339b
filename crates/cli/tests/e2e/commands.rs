//! Every command, in the order in which a user would run them.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tokio::io::AsyncReadExt as _;

use crate::endpoint::{Endpoint, refuses_all, takes_all};
use crate::env::{FILE_SINK, Kind, TestEnv, ended, on_both, signal, until, until_waited_for};

async fn inserted_by_sql_and_dispatched_to_a_file(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, FILE_SINK).await?;
    ensure!(env.ok(&["stats"])? == "pending=0 dispatched=0 dead=0 total=0\n");
    env.insert_three().await?;
    ensure!(env.ok(&["stats"])? == "pending=3 dispatched=0 dead=0 total=3\n");
    for changing in [&["retry", "--all"][..], &["pause", "out"], &["prune", "--older-than", "0s"]] {
        let complaint = env.refuses(1, changing)?;
        ensure!(complaint.contains("out was never run") && complaint.contains("postbox run"), "{complaint}");
    }
    ensure!(env.json(&["stats", "--json"])?[0]["subscription"].is_null(), "looking has subscribed");

    ensure!(env.ok(&["dispatch", "--limit", "1"])? == "fetched=1 dispatched=1 failed=0 dead=0\n");
    ensure!(env.dispatch(&[])? == "dispatched=2 failed=0 dead=0");
    ensure!(env.ok(&["dispatch"])? == "fetched=0 dispatched=0 failed=0 dead=0\n");
    let lines = env.lines("out.jsonl")?;
    let payloads: Vec<i64> = lines.iter().filter_map(|line| line["payload"]["n"].as_i64()).collect();
    let of_key_1: Vec<i64> = payloads.iter().copied().filter(|n| *n != 2).collect();
    ensure!(lines.len() == 3 && of_key_1 == [1, 3], "{payloads:?}");

    ensure!(env.ok(&["stats"])? == "pending=0 dispatched=3 dead=0 total=3\n");
    let stats = env.json(&["stats", "--json"])?;
    ensure!(stats[0]["subscription"] == "out" && stats[0]["dispatched"] == 3 && stats[0]["blocked"] == 0, "{stats}");

    let listed = env.json(&["list", "--state", "dispatched", "--json"])?;
    ensure!(listed.as_array().map(Vec::len) == Some(3) && listed[2]["event"]["payload"]["n"] == 3, "{listed}");
    let id = listed[0]["event"]["id"].as_str().context("no id")?;
    let shown = env.ok(&["show", id])?;
    ensure!(shown.contains("order.placed") && shown.contains("dispatched") && shown.contains("{\"n\":1}"), "{shown}");
    ensure!(env.ok(&["show", id, "--json"])?.contains("\"state\": \"dispatched\""));

    ensure!(env.ok(&["prune", "--older-than", "1h"])? == "pruned=0\n");
    ensure!(env.ok(&["prune", "--older-than", "0s"])? == "pruned=3\n");
    ensure!(env.json(&["list", "--state", "dispatched", "--json"])?.as_array().is_some_and(Vec::is_empty));
    ensure!(env.ok(&["stats"])? == "pending=0 dispatched=3 dead=0 total=3\n", "what was delivered stays counted");
    Ok(())
}

async fn dead_events_are_retried_and_discarded_by_a_person(kind: Kind) -> Result<()> {
    let target = Endpoint::start(refuses_all)?;
    let env = TestEnv::with(kind, &target.subscription("out")).await?;
    env.insert_three().await?;
    ensure!(env.dispatch(&[])? == "dispatched=0 failed=0 dead=3");
    ensure!(env.ok(&["stats"])? == "pending=0 dispatched=0 dead=3 total=3\n");

    let dead = env.ok(&["list", "--state", "dead"])?;
    ensure!(dead.lines().count() == 4 && dead.contains("http_422"), "{dead}");
    let head = "id\tsubscription\tstate\ttopic\tkey\tcreated\tattempts\tdue\tcode\terror\n";
    ensure!(dead.starts_with(head) && dead.lines().all(|line| line.split('\t').count() == 10), "{dead}");
    let ids: Vec<&str> = dead.lines().skip(1).filter_map(|line| line.split('\t').next()).collect();
    ensure!(env.ok(&["list", "--state", "dead", "--topic", "order.paid"])?.lines().count() == 2);
    ensure!(env.ok(&["list", "--state", "dead", "--code", "http_500"])?.is_empty());

    let nobody = "00000000-0000-7000-8000-000000000000";
    for narrowed in [&["--topic", "zzz"][..], &["--code", "nope"], &["--limit", "1"]] {
        env.refuses(2, &[&["retry", ids[0]], narrowed].concat())?;
    }
    target.set(takes_all);
    let output = env.output(&["retry", ids[0], nobody])?;
    let said = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(output.status.code() == Some(1) && said.0 == "retried=1\n" && said.1.contains(nobody), "{said:?}");
    ensure!(env.ok(&["retry", ids[0]])?.starts_with("retried="));
    ensure!(env.ok(&["dispatch"])?.contains("dispatched=1"));
    ensure!(env.ok(&["retry", ids[0]])? == "retried=0\n");
    ensure!(env.ok(&["discard", ids[1]])? == "discarded=1\n");
    ensure!(env.ok(&["discard", ids[1]])? == "discarded=0\n");
    ensure!(env.ok(&["retry", "--all", "--code", "no_such_code"])? == "retried=0\n");
    ensure!(env.ok(&["retry", "--all", "--topic", "order.*", "--limit", "5"])? == "retried=1\n");
    ensure!(env.ok(&["dispatch"])?.contains("dispatched=1"));
    ensure!(env.ok(&["stats"])? == "pending=0 dispatched=2 dead=0 total=3\n");

    let unknown = env.refuses(1, &["retry", nobody])?;
    ensure!(unknown.contains("no log has an event"), "{unknown}");
    Ok(())
}

/// Two subscriptions and two logs with alternating dead events: a limit takes the oldest of all.
async fn a_limited_retry_takes_the_oldest_over_all_subscriptions(kind: Kind) -> Result<()> {
    let target = Endpoint::start(refuses_all)?;
    let subscription = |name, topic| target.subscription(name) + &format!("topics = [\"{topic}.*\"]\n");
    let env = TestEnv::with(
        kind,
        &(subscription("alpha", "a") + &subscription("beta", "b") + &subscription("gamma", "none")),
    )
    .await?;
    for n in 0..10 {
        env.insert([(if n % 2 == 0 { "b.x" } else { "a.x" }, format!("k{n}"), n)]).await?;
    }
    ensure!(env.dispatch(&[])? == "dispatched=0 failed=0 dead=10");
    let dead = || -> Result<std::collections::BTreeSet<i64>> {
        let listed = env.json(&["list", "--state", "dead", "--json"])?;
        let records = listed.as_array().context("no list")?;
        Ok(records.iter().filter_map(|record| record["event"]["payload"]["n"].as_i64()).collect())
    };
    ensure!(env.ok(&["retry", "--all", "--limit", "3"])? == "retried=3\n");
    ensure!(dead()? == (3..10).collect(), "{:?}", dead()?);
    // The two retried ones are in flight. They are older than the dead ones, but must not use up
    // the limit again.
    ensure!(env.ok(&["retry", "--all", "--limit", "2"])? == "retried=2\n");
    ensure!(dead()? == (5..10).collect(), "{:?}", dead()?);
    ensure!(env.ok(&["retry", "--all", "--limit", "2", "--topic", "a.*"])? == "retried=2\n");
    ensure!(dead()? == [6, 8, 9].into(), "{:?}", dead()?);
    ensure!(env.ok(&["retry", "--all", "--limit", "7", "--subscription", "alpha"])? == "retried=1\n");
    ensure!(dead()? == [6, 8].into(), "{:?}", dead()?);
    ensure!(env.ok(&["retry", "--all", "--limit", "1000", "--code", "http_500"])? == "retried=0\n");
    ensure!(env.ok(&["retry", "--all", "--limit", "1000", "--code", "http_422"])? == "retried=2\n");
    ensure!(env.ok(&["retry", "--all", "--limit", "1000"])? == "retried=0\n");
    target.set(takes_all);
    ensure!(env.ok(&["dispatch"])?.contains("dispatched=10"));
    Ok(())
}

/// Scripts read the last line and the exit code: 0 with counts when drained, 1 with counts when
/// interrupted, 1 without counts when it could not begin.
async fn dispatch_says_how_it_ended(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, FILE_SINK).await?;
    env.insert_three().await?;
    let drained = env.output(&["dispatch"])?;
    ensure!(drained.status.code() == Some(0) && drained.stderr.is_empty());
    let said = String::from_utf8(drained.stdout)?;
    ensure!(said.starts_with("fetched=") && said.ends_with(" dispatched=3 failed=0 dead=0\n"), "{said}");

    // Failed events are in the counts, not in the exit code.
    let target = Endpoint::start(|_| (500, Duration::ZERO))?;
    // A fixed delay: a retry that is due at once would be read again.
    env.config(&(target.subscription("out") + "retry = { delays = [\"1h\"] }\n"))?;
    env.insert_three().await?;
    let failed = env.output(&["dispatch", "--subscription", "out"])?;
    let said = String::from_utf8(failed.stdout)?;
    ensure!(failed.status.code() == Some(0) && said.ends_with(" dispatched=0 failed=2 dead=0\n"), "{said}");

    // It could not begin: it read nothing and prints only the reason.
    env.config("[subscriptions.other]\nsink = { type = \"file\", path = \"no/such/folder/out.jsonl\" }\n")?;
    let complaint = env.refuses(1, &["dispatch"])?;
    ensure!(complaint.lines().count() == 1, "{complaint}");
    for part in ["subscriptions.other.sink: cannot append to no/such/folder/out.jsonl: ", "; correct the path"] {
        ensure!(complaint.contains(part), "{part:?} is not in {complaint}");
    }
    Ok(())
}

/// The first call outlives its batch, and the event behind it counts; the limit covers both.
async fn a_limit_is_kept_though_the_target_is_slow(kind: Kind) -> Result<()> {
    let slow = Endpoint::start(|_| (200, Duration::from_millis(400)))?;
    let env = TestEnv::with(kind, &(slow.subscription("a") + &slow.subscription("b"))).await?;
    env.insert((0..3).map(|n| ("t", "k".to_owned(), n))).await?;
    // Two events are read. The second waits behind the first, whose call outlives the batch.
    ensure!(env.ok(&["dispatch", "--limit", "2"])? == "fetched=2 dispatched=1 failed=0 dead=0\n");
    // First the released event, then one per read: `a` comes before `b`.
    for _ in 0..5 {
        let counts = env.ok(&["dispatch", "--limit", "1"])?;
        ensure!(counts == "fetched=1 dispatched=1 failed=0 dead=0\n", "{counts}");
    }
    ensure!(env.dispatch(&["--limit", "3"])? == "dispatched=0 failed=0 dead=0");
    let numbers: Vec<i64> = slow.arrivals().iter().map(|arrival| arrival.n).collect();
    ensure!(numbers == [0, 1, 2, 0, 1, 2], "{numbers:?}");
    Ok(())
}

/// A configured subscription that never ran starts at the first event.
async fn what_a_new_subscription_has_still_to_read_is_neither_pruned_nor_discarded(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, FILE_SINK).await?;
    env.insert_three().await?;
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    env.config(&(FILE_SINK.to_owned() + &FILE_SINK.replace(".out]", ".late]")))?;
    for narrowed in [&[][..], &["--log", "outbox"]] {
        let complaint = env.refuses(1, &[&["prune", "--older-than", "0s"], narrowed].concat())?;
        ensure!(complaint.contains("late was never run"), "{complaint}");
    }
    // What would be deleted beyond the one that is named is not deleted.
    let complaint = env.refuses(2, &["prune", "--older-than", "0s", "--subscription", "out"])?;
    ensure!(complaint.contains("events belong to a log"), "{complaint}");
    let complaint = env.refuses(2, &["migrate", "down", "--yes", "--log", "outbox"])?;
    ensure!(complaint.contains("everything in the store"), "{complaint}");
    let complaint = env.refuses(2, &["prune", "--since", "1h", "--until", "2h"])?;
    ensure!(complaint.contains("no time is after --since"), "{complaint}");
    let listed = env.json(&["list", "--state", "dispatched", "--json"])?;
    let id = listed[0]["event"]["id"].as_str().context("no id")?;
    let complaint = env.refuses(2, &["discard", id])?;
    ensure!(complaint.contains("--subscription out|late"), "{complaint}");
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    ensure!(env.ok(&["prune", "--older-than", "0s"])? == "pruned=3\n");
    Ok(())
}

/// The subscription is paused while it is drained: its lane is lost at the next renewal.
async fn a_dispatch_that_loses_its_lane_ends_with_1_and_its_counts(kind: Kind) -> Result<()> {
    let slow = Endpoint::start(takes_all)?;
    // It cannot finish before the pause, however long that takes.
    slow.answer_only(5);
    let settings = "lease = \"6s\"\nconcurrency = 1\nordering = \"none\"\nbatch = 1\n";
    let env = TestEnv::with(kind, &(slow.subscription("out") + settings)).await?;
    env.insert((0..300).map(|n| ("order.placed", (n % 2).to_string(), n))).await?;
    let child = env.spawn(&["dispatch", "--log-level", "off"])?;
    slow.until("some, and one that waits", |arrivals| arrivals.len() > 5).await?;
    env.ok(&["pause", "out", "--why", "a test"])?;
    let output = ended(child).await?;
    let (stdout, stderr) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(output.status.code() == Some(1), "{}: {stdout}{stderr}", output.status);
    let counts: Vec<u64> =
        stdout.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect();
    let [fetched, dispatched, 0, 0] = counts[..] else { anyhow::bail!("{stdout}") };
    ensure!(
        stdout.lines().count() == 1 && (1..300).contains(&fetched) && (1..=fetched).contains(&dispatched),
        "{stdout}"
    );
    ensure!(
        stderr.lines().count() == 1 && stderr.contains("lane(s) were lost") && stderr.contains("run it again"),
        "{stderr}"
    );
    // Nothing is lost: the rest is delivered after the resume.
    env.ok(&["resume", "out"])?;
    ensure!(env.ok(&["stats"])?.contains("total=300\n"));
    Ok(())
}

/// A private address must be allowed explicitly, and the service's own address never is.
async fn a_private_target_must_be_allowed(kind: Kind) -> Result<()> {
    let env = TestEnv::migrated(kind).await?;
    let target = Endpoint::start(takes_all)?;
    let port: u16 = target.url().trim_end_matches('/').rsplit(':').next().context("no port")?.parse()?;
    let config = |host: &str, allow: &str, listen: u16| {
        format!(
            "[subscriptions.out]\nsink = {{ type = \"http\", url = \"http://{host}:{port}/\", allow = [{allow}] }}\n[server]\nlisten = \"127.0.0.1:{listen}\"\n"
        )
    };
    env.insert_three().await?;
    let elsewhere = port.wrapping_add(1).max(1);
    for (host, allow, listen, cure) in [
        ("127.0.0.1", "", elsewhere, "allow = [\"127.0.0.1\"]"),
        ("localhost", "", elsewhere, "allow = [\"127.0.0.1\", \"::1\"]"),
        ("127.0.0.1", "\"127.0.0.0/8\"", port, "Postbox's own [server] listen"),
    ] {
        env.config(&config(host, allow, listen))?;
        for command in ["check-config", "dispatch"] {
            let stderr = env.refuses(2, &[command])?;
            ensure!(stderr.contains(cure), "{command}: {stderr}");
        }
    }
    ensure!(target.count() == 0, "it was called");
    env.config(&config("localhost", "\"127.0.0.1\", \"::1\"", elsewhere))?;
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    Ok(())
}

async fn a_paused_subscription_delivers_nothing_until_resumed(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, FILE_SINK).await?;
    env.subscribe()?;
    env.insert_three().await?;
    env.ok(&["pause", "out", "--why", "a test"])?;
    ensure!(env.ok(&["dispatch"])? == "fetched=0 dispatched=0 failed=0 dead=0\n");
    let output = env.output(&["doctor"])?;
    let said = String::from_utf8(output.stdout)?;
    ensure!(output.status.code() == Some(1) && said.contains("a test"), "{said}");
    ensure!(said.contains("postbox resume out"), "{said}");
    env.ok(&["resume", "out"])?;
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    env.ok(&["pause", "out", "--for", "1s"])?;
    let said = env.refuses(1, &["pause", "out", "--for", "0s"])?;
    ensure!(said.contains("use resume") && said.contains("(until_past)"), "{said}");
    Ok(())
}

async fn the_doctor_names_the_cause(kind: Kind) -> Result<()> {
    let target = Endpoint::start(|_| (500, Duration::ZERO))?;
    let env = TestEnv::with(
        kind,
        &(target.subscription("out") + "retry = { max_attempts = 5, base = \"1h\", max = \"1h\" }\n"),
    )
    .await?;
    env.insert_three().await?;
    env.ok(&["dispatch"])?;
    let said = env.said(&["doctor"])?;
    for expected in ["retrying", "http_500", "blocked", "key 1", "no relay drives lane 0", "postbox run"] {
        ensure!(said.contains(expected), "{expected:?} is not in\n{said}");
    }
    let json: serde_json::Value = serde_json::from_slice(&env.output(&["doctor", "--json"])?.stdout)?;
    ensure!(json.as_array().is_some_and(|findings| findings.len() > 2), "{json}");
    Ok(())
}

async fn hostile_text_cannot_steer_the_terminal(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, FILE_SINK).await?;
    env.subscribe()?;
    let escape = if kind == Kind::Sqlite { "char(27)" } else { "chr(27)" };
    env.sql(&format!(
        "INSERT INTO OUTBOX (topic, key, payload) VALUES ('a', {escape} || ']0;owned', '{{\"x\":\"plain\"}}')"
    ))
    .await?;
    for args in [&["list", "--state", "pending"][..], &["list", "--state", "pending", "--json"]] {
        let printed = env.ok(args)?;
        ensure!(!printed.contains('\u{1b}') && printed.contains("owned"), "{printed:?}");
    }
    Ok(())
}

async fn the_schema_comes_and_goes(kind: Kind) -> Result<()> {
    let env = TestEnv::empty(kind).await?;
    let complaint = env.refuses(1, &["migrate", "validate"])?;
    ensure!(complaint.lines().count() == 1 && complaint.contains("postbox migrate up"), "{complaint}");
    ensure!(env.ok(&["migrate", "up"])?.contains("the schema is ready"));
    ensure!(env.ok(&["migrate", "up"])? == "the schema is up to date\n");
    ensure!(env.ok(&["migrate", "validate"])? == "the schema is valid\n");
    ensure!(env.ok(&["migrate", "print"])?.contains("CREATE TABLE"));
    match kind {
        Kind::Postgres => ensure!(env.ok(&["migrate", "rebase"])?.contains("start the relays again")),
        Kind::Sqlite => ensure!(env.refuses(1, &["migrate", "rebase"])?.contains("only a Postgres store")),
    }
    let complaint = env.refuses(2, &["migrate", "down"])?;
    ensure!(complaint.contains("--yes"), "{complaint}");
    ensure!(env.ok(&["migrate", "down", "--yes"])?.contains("the schema is gone"));
    env.refuses(1, &["migrate", "validate"])?;
    Ok(())
}

async fn what_is_not_delivered_is_not_removed_by_the_way(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, FILE_SINK).await?;
    env.insert_three().await?;
    let complaint = env.refuses(1, &["migrate", "down", "--yes"])?;
    ensure!(complaint.contains("log outbox") && complaint.contains("--discard-events"), "{complaint}");
    ensure!(env.dispatch(&["--limit", "1"])?.starts_with("dispatched=1"));
    env.refuses(1, &["migrate", "down", "--yes"])?;
    ensure!(env.dispatch(&[])?.starts_with("dispatched=2"));
    ensure!(env.ok(&["migrate", "down", "--yes"])?.contains("the schema is gone"));
    env.ok(&["migrate", "up"])?;
    env.insert_three().await?;
    ensure!(env.ok(&["migrate", "down", "--yes", "--discard-events"])?.contains("the schema is gone"));
    Ok(())
}

/// Another session locks the schema, and the command waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removal_that_was_stopped_removes_nothing() -> Result<()> {
    let env = TestEnv::with(Kind::Postgres, FILE_SINK).await?;
    env.insert_three().await?;
    ensure!(env.dispatch(&[])?.starts_with("dispatched=3"));
    let holder = env.client().await?;
    for stopped in [true, false] {
        holder.batch_execute("BEGIN; LOCK TABLE postbox.outbox IN ROW EXCLUSIVE MODE").await?;
        let child = env.spawn(&["migrate", "down", "--yes"])?;
        until_waited_for(&holder).await?;
        if stopped {
            signal(child.id().context("it runs")?, "INT")?;
        }
        let output = ended(child).await?;
        let complaint = String::from_utf8(output.stderr)?;
        ensure!(!output.status.success(), "{complaint}");
        ensure!(stopped || complaint.contains("nothing was changed"), "{complaint}");
        holder.batch_execute("COMMIT").await?;
        // The server has ended the command's session.
        const OTHERS: &str = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
            AND pid <> pg_backend_pid() AND backend_type = 'client backend'";
        let alone = async || anyhow::Ok((holder.query_one(OTHERS, &[]).await?.get::<_, i64>(0) == 0).then_some(()));
        until("the end of its connection", alone).await?;
        ensure!(env.ok(&["stats"])? == "pending=0 dispatched=3 dead=0 total=3\n", "stopped: {stopped}");
    }
    ensure!(env.ok(&["migrate", "down", "--yes"])?.contains("the schema is gone"));
    Ok(())
}

#[tokio::test]
async fn without_a_subscription_the_outbox_is_pending() -> Result<()> {
    for kind in [Kind::Sqlite, Kind::Postgres] {
        let env = TestEnv::migrated(kind).await?;
        env.insert_three().await?;
        ensure!(env.ok(&["stats"])? == "pending=3 dispatched=0 dead=0 total=3\n", "{kind:?}");
        ensure!(env.refuses(2, &["dispatch"])?.contains("no subscription is configured"));
    }
    Ok(())
}

#[tokio::test]
async fn init_writes_a_file_that_is_right_and_overwrites_nothing() -> Result<()> {
    let env = TestEnv::empty(Kind::Sqlite).await?;
    ensure!(env.ok(&["init"])?.contains("postbox.toml"));
    ensure!(env.ok(&["check-config"])?.contains("valid"));
    ensure!(env.refuses(1, &["init"])?.contains("--force"));
    env.ok(&["init", "--force"])?;
    std::fs::rename(env.path("postbox.toml"), env.path("linked.toml"))?;
    std::os::unix::fs::symlink("linked.toml", env.path("postbox.toml"))?;
    env.ok(&["init", "--force"])?;
    ensure!(env.path("postbox.toml").is_symlink());
    Ok(())
}

/// A shell's limit on file sizes stands for a full disk.
#[tokio::test]
async fn on_a_full_disk_no_part_of_a_file_is_written() -> Result<()> {
    let env = TestEnv::empty(Kind::Sqlite).await?;
    let refused = |args: &[&str]| -> Result<()> {
        let command = env.command(args);
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", "trap '' XFSZ; ulimit -f 0; exec \"$0\" \"$@\""]).arg(command.get_program());
        let output = shell.args(command.get_args()).current_dir(env.path("")).env_remove("POSTBOX_CONFIG").output()?;
        let said = String::from_utf8(output.stderr)?;
        ensure!(output.status.code() == Some(1) && said.contains(" cannot be written: "), "{args:?}: {said}");
        Ok(())
    };
    refused(&["init"])?;
    ensure!(std::fs::read_dir(env.path(""))?.next().is_none(), "something was left");
    std::fs::write(env.path("postbox.toml"), "# mine\n")?;
    refused(&["init", "--force"])?;
    ensure!(std::fs::read_to_string(env.path("postbox.toml"))? == "# mine\n");
    refused(&["new", "service", "shop"])?;
    env.ok(&["new", "service", "shop"])?;
    Ok(())
}

/// A store that is named by the environment only must not become another one in a new terminal.
#[tokio::test]
async fn no_store_is_made_that_nobody_named() -> Result<()> {
    let env = TestEnv::empty(Kind::Sqlite).await?;
    let output = env.command(&["migrate", "up"]).env_remove("POSTBOX_STORE").output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(2) && said.contains("no store is named"), "{said}");
    ensure!(said.contains("or set POSTBOX_STORE"), "{said}");
    ensure!(!env.path("postbox.db").exists());
    env.ok(&["init"])?;
    let written = std::fs::read_to_string(env.path("postbox.toml"))?;
    ensure!(written.contains("\nurl = \"env:POSTBOX_STORE\"\n"), "{written}");
    let given = env.command(&["migrate", "up", "--store", "sqlite:given.db"]).env_remove("POSTBOX_STORE").output()?;
    ensure!(given.status.success() && env.path("given.db").exists(), "{}", String::from_utf8_lossy(&given.stderr));
    Ok(())
}

/// Twelve subscriptions have 40 MiB each. The command has all its rows once it prints the first,
/// and then waits, because they are more than a pipe holds.
#[tokio::test]
async fn a_list_does_not_keep_payloads_that_it_does_not_show() -> Result<()> {
    let subscriptions: String = (0..12).map(|n| FILE_SINK.replace(".out]", &format!(".out{n}]"))).collect();
    let env = TestEnv::with(Kind::Sqlite, &subscriptions).await?;
    env.subscribe()?;
    env.sql(
        "INSERT INTO OUTBOX (topic, key, payload)
         WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 320)
         SELECT 'order.placed', printf('%0250d', i), '\"' || printf('%.*c', 131072, 'x') || '\"' FROM n",
    )
    .await?;
    let mut child = env.spawn(&["list", "--limit", "320"])?;
    child.stdout.as_mut().context("no stdout")?.read_u8().await?;
    let pid = child.id().context("it has ended already")?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("Linux tells it")?;
    let mib = peak.trim_end_matches("kB").trim().parse::<usize>()? / 1024;
    ensure!(mib < 300, "{mib} MiB");
    child.kill().await?;
    Ok(())
}

/// It would be gone when the command ends.
#[tokio::test]
async fn no_event_is_sent_into_a_store_in_memory() -> Result<()> {
    let env = TestEnv::empty(Kind::Sqlite).await?;
    for args in [&["send", "order.paid", "{}"][..], &["stats"], &["dispatch"]] {
        let said = env.refuses(2, &[args, &["--store", "memory:"]].concat())?;
        ensure!(said.contains("in memory") && said.contains("postbox run"), "{args:?}: {said}");
    }
    Ok(())
}

#[tokio::test]
async fn without_a_file_the_environment_is_checked() -> Result<()> {
    let env = TestEnv::empty(Kind::Sqlite).await?;
    let checked = env.command(&["check-config"]).env("DISPATCHER_URL", "http://127.0.0.1:1/in").output()?;
    let said = String::from_utf8(checked.stdout)?;
    ensure!(checked.status.success() && said.starts_with("environment: valid. 1 subscription(s)"), "{said}");
    ensure!(said.contains("-> dispatcher -> http"), "{said}");
    let unnamed = env.command(&["check-config"]).env("POSTBOX_STORE", "").output()?;
    let said = String::from_utf8(unnamed.stderr)?;
    ensure!(unnamed.status.code() == Some(2) && said.contains("no store is named"), "{said}");
    // A variable is no part of the command line.
    let usage = String::from_utf8(env.output(&["show"])?.stderr)?;
    ensure!(usage.contains("Usage: ") && !usage.contains("--store"), "{usage}");
    Ok(())
}

#[tokio::test]
async fn the_schema_of_the_configuration_is_printed_as_json() -> Result<()> {
    let env = TestEnv::empty(Kind::Sqlite).await?;
    let schema = env.json(&["config", "schema"])?;
    ensure!(schema["properties"]["store"]["properties"]["url"]["default"] == "sqlite:postbox.db", "{schema}");
    Ok(())
}

#[tokio::test]
async fn completions_name_every_command() -> Result<()> {
    let env = TestEnv::empty(Kind::Sqlite).await?;
    for shell in ["bash", "zsh", "fish"] {
        let script = env.ok(&["completions", shell])?;
        ensure!(script.contains("check-config") && script.contains("dispatch"), "{shell}");
    }
    Ok(())
}

on_both!(
    inserted_by_sql_and_dispatched_to_a_file,
    dead_events_are_retried_and_discarded_by_a_person,
    a_limited_retry_takes_the_oldest_over_all_subscriptions,
    what_a_new_subscription_has_still_to_read_is_neither_pruned_nor_discarded,
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
