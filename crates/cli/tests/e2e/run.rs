//! `postbox run` and signals.

use std::collections::HashSet;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::endpoint::{Endpoint, refuses_all, takes_all};
use crate::env::{FILE_SINK, Kind, TestEnv, ended, on_both, signal};

/// Starts and stops under load, several times; at the end everything has arrived exactly once.
async fn sigterm_under_load_repeats_nothing(kind: Kind) -> Result<()> {
    // `POSTBOX_TEST_STOPS=50` runs the long version.
    let stops: usize = std::env::var("POSTBOX_TEST_STOPS").ok().and_then(|stops| stops.parse().ok()).unwrap_or(20);
    let events = 120 * stops;
    let target = Endpoint::start(takes_all)?;
    target.answer_only(0);
    let env = TestEnv::with(kind, &(target.subscription("out") + "batch = 50\n")).await?;
    env.insert((0..events).map(|n| ("order.placed", (n % 40).to_string(), n as i64))).await?;
    for stop in 1..=stops {
        let served = env.serve().await?;
        let share = |stop: usize| stop * events / (stops + 2);
        target.answer_only(share(stop + 1));
        target.until("its share", |arrivals| arrivals.len() >= share(stop)).await?;
        signal(served.pid()?, "TERM")?;
        // Calls in flight may finish.
        served.logged("postbox stops", 1).await?;
        target.answer_all();
        served.ended().await?;
    }
    let served = env.serve().await?;
    target.until("all events", |arrivals| arrivals.len() >= events).await?;
    let log = served.terminate().await?;
    ensure!(log.iter().any(|line| line.contains("asked to stop") && line.contains("SIGTERM")), "{log:#?}");
    let distinct: HashSet<i64> = target.arrivals().iter().map(|arrival| arrival.n).collect();
    ensure!(target.count() == events && distinct.len() == events, "{} came twice", target.count() - distinct.len());
    ensure!(env.ok(&["stats"])? == format!("pending=0 dispatched={events} dead=0 total={events}\n"));
    Ok(())
}

on_both!(
    sigterm_under_load_repeats_nothing,
    dispatch_in_a_loop_ends_once_nothing_is_pending,
    dispatch_in_a_loop_waits_for_no_person,
    dispatch_in_a_loop_makes_the_retries_of_others_before_it_gives_up,
    what_fails_for_one_reason_has_one_line_a_second,
);

/// It waits for retries, and then ends.
async fn dispatch_in_a_loop_ends_once_nothing_is_pending(kind: Kind) -> Result<()> {
    ensure!(TestEnv::with(kind, FILE_SINK).await?.dispatch(&["--loop"])? == "dispatched=0 failed=0 dead=0");
    let target = Endpoint::start(|_| (500, Duration::ZERO))?;
    let env = TestEnv::with(kind, &(target.subscription("out") + "retry = { delays = [\"1s\", \"1s\"] }\n")).await?;
    env.insert_three().await?;
    let child = env.spawn(&["dispatch", "--loop", "--log-level", "off"])?;
    target.until("the first failures", |arrivals| arrivals.len() >= 2).await?;
    target.set(takes_all);
    let output = ended(child).await?;
    let (printed, said) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(
        output.status.success() && printed.contains(" dispatched=3 ") && printed.ends_with(" dead=0\n"),
        "{printed}{said}"
    );
    ensure!(env.ok(&["stats"])? == "pending=0 dispatched=3 dead=0 total=3\n");
    env.insert_three().await?;
    ensure!(
        env.ok(&["dispatch", "--loop", "--limit", "2"])?.starts_with("fetched=2 "),
        "a limit is for the whole of it"
    );
    Ok(())
}

/// It does not wait for what only a person can resolve, or for a pause.
async fn dispatch_in_a_loop_waits_for_no_person(kind: Kind) -> Result<()> {
    let target = Endpoint::start(refuses_all)?;
    let env = TestEnv::with(kind, &(target.subscription("out") + "on_dead = \"halt\"\n")).await?;
    env.insert_three().await?;
    let output = env.output(&["dispatch", "--loop", "--log-level", "off"])?;
    let (printed, said) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(output.status.code() == Some(1) && printed.ends_with(" dispatched=0 failed=0 dead=2\n"), "{printed}{said}");
    ensure!(said.contains("1 event(s) of out wait behind a dead one") && said.contains("list --state dead"), "{said}");
    env.ok(&["pause", "out"])?;
    ensure!(env.dispatch(&["--loop"])? == "dispatched=0 failed=0 dead=0");
    Ok(())
}

/// Events that wait for a person do not end it while another subscription waits for a retry.
async fn dispatch_in_a_loop_makes_the_retries_of_others_before_it_gives_up(kind: Kind) -> Result<()> {
    let refusing = Endpoint::start(refuses_all)?;
    let failing = Endpoint::start(|_| (500, Duration::ZERO))?;
    let stuck = refusing.subscription("aa") + "on_dead = \"halt\"\n";
    let retried = failing.subscription("bb") + "retry = { delays = [\"1s\", \"1s\"] }\n";
    let env = TestEnv::with(kind, &(stuck + &retried)).await?;
    env.insert_three().await?;
    let child = env.spawn(&["dispatch", "--loop", "--log-level", "off"])?;
    failing.until("the first failures", |arrivals| arrivals.len() >= 2).await?;
    failing.set(takes_all);
    let output = ended(child).await?;
    let (printed, said) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(output.status.code() == Some(1) && printed.contains(" dispatched=3 "), "{printed}{said}");
    ensure!(said.contains("1 event(s) of aa wait behind a dead one"), "{said}");
    Ok(())
}

/// The configured stop timeout is kept, and aborted deliveries are made at the next start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_takes_no_longer_than_it_may() -> Result<()> {
    // Half of the default.
    const LONG: Duration = Duration::from_secs(10);
    let silent = Endpoint::start(takes_all)?;
    silent.answer_only(0);
    let server = "[server]\nlisten = \"127.0.0.1:0\"\nstop_timeout = \"2s\"\n";
    let env = TestEnv::with(Kind::Sqlite, &(silent.subscription("out") + server)).await?;
    env.insert([("order.placed", "1".to_owned(), 1)]).await?;
    let served = env.serve().await?;
    silent.until("the call", |arrivals| arrivals.len() == 1).await?;
    let began = Instant::now();
    let log = served.terminate().await?;
    ensure!(began.elapsed() < LONG, "it took {:?}: {log:#?}", began.elapsed());
    silent.answer_all();
    ensure!(env.dispatch(&["--loop"])? == "dispatched=1 failed=0 dead=0");
    Ok(())
}

/// A call in flight may take as long as the configured stop timeout, and is not made twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_waits_for_an_answer_as_long_as_it_may() -> Result<()> {
    // Half of the default, so that a fixed time is noticed.
    const LONG: Duration = Duration::from_secs(10);
    let slow = Endpoint::start(|_| (204, LONG + Duration::from_secs(4)))?;
    let server = "[server]\nlisten = \"127.0.0.1:0\"\nstop_timeout = \"30s\"\n";
    let env = TestEnv::with(Kind::Sqlite, &(slow.subscription("out") + server)).await?;
    env.insert([("order.placed", "1".to_owned(), 1)]).await?;
    let served = env.serve().await?;
    let arrivals = slow.until("the call", |arrivals| arrivals.len() == 1).await?;
    let log = served.terminate().await?;
    let took = arrivals[0].at.elapsed();
    ensure!(took > LONG, "it took only {took:?}: {log:#?}");
    ensure!(env.ok(&["stats"])? == "pending=0 dispatched=1 dead=0 total=1\n", "{log:#?}");
    ensure!(env.dispatch(&[])? == "dispatched=0 failed=0 dead=0" && slow.count() == 1);
    Ok(())
}

/// It is stopped while an event waits for a retry.
#[tokio::test]
async fn dispatch_in_a_loop_ends_at_sigterm_too() -> Result<()> {
    let target = Endpoint::start(|_| (500, Duration::ZERO))?;
    let config = target.subscription("out") + "retry = { delays = [\"1h\"] }\n";
    let env = TestEnv::with(Kind::Sqlite, &config).await?;
    env.insert_three().await?;
    let child = env.spawn(&["dispatch", "--loop", "--log-level", "off"])?;
    let pid = child.id().context("it has ended already")?;
    target.until("the first failures", |arrivals| arrivals.len() >= 2).await?;
    signal(pid, "TERM")?;
    let output = ended(child).await?;
    let printed = String::from_utf8(output.stdout)?;
    ensure!(output.status.success() && printed.ends_with(" dispatched=0 failed=2 dead=0\n"), "{printed}");
    Ok(())
}

/// A server that accepts connections and says nothing does not delay the stop.
#[tokio::test]
async fn dispatch_is_stopped_before_its_store_answers() -> Result<()> {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("postgres://nobody@{}/shop", silent.local_addr()?);
    let env = TestEnv::with(Kind::Sqlite, &Endpoint::start(takes_all)?.subscription("out")).await?;
    let child = env.spawn(&["dispatch", "--store", &url, "--log-level", "off"])?;
    let _connection = silent.accept().await?;
    signal(child.id().context("it has ended already")?, "TERM")?;
    let output = ended(child).await?;
    let said = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(1) && said.contains("stopped before the store answered"), "{said}");
    Ok(())
}

/// A closed terminal stops it as SIGTERM does; one that was started with `nohup` goes on.
#[tokio::test]
async fn a_closed_terminal_is_a_stop_unless_it_is_ignored() -> Result<()> {
    for (hangup, goes_on) in [("--default-signal=HUP", false), ("--ignore-signal=HUP", true)] {
        let target = Endpoint::start(|_| (500, Duration::ZERO))?;
        let kept = "retry = { delays = [\"1h\"] }\nbreaker = { base = \"1ms\", max = \"1ms\" }\n";
        let env = TestEnv::with(Kind::Sqlite, &(target.subscription("out") + kept)).await?;
        env.insert_three().await?;
        let dispatch = env.command(&["dispatch", "--loop", "--log-level", "off"]);
        let mut command = tokio::process::Command::new("env");
        command.arg(hangup).arg(dispatch.get_program()).args(dispatch.get_args()).current_dir(env.path(""));
        for (name, value) in dispatch.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.kill_on_drop(true).spawn()?;
        let pid = child.id().context("it has ended already")?;
        target.until("the first failures", |arrivals| arrivals.len() >= 2).await?;
        signal(pid, "HUP")?;
        if goes_on {
            env.insert([("order.placed", "3".to_owned(), 4)]).await?;
            target.until("one more", |arrivals| arrivals.len() >= 3).await?;
            signal(pid, "TERM")?;
        }
        let output = ended(child).await?;
        ensure!(output.status.success(), "{hangup}: it ended with {}", output.status);
    }
    Ok(())
}

#[tokio::test]
async fn logs_are_json_lines_with_levels_and_no_secret() -> Result<()> {
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let env = TestEnv::with(Kind::Sqlite, &format!(
        "[subscriptions.out]\nsink = {{ type = \"http\", url = \"http://127.0.0.1:1/\", allow = [\"127.0.0.1\"], secret = \"{secret}\" }}\n"
    )).await?;
    env.insert_three().await?;
    let log = env.serve().await?.terminate().await?;
    ensure!(!log.is_empty());
    for line in &log {
        let value: serde_json::Value = serde_json::from_str(line).with_context(|| line.clone())?;
        ensure!(value["level"].is_string() && !line.contains(secret), "{line}");
    }
    Ok(())
}

/// Every event dies of the same reason: the metrics count each, the log has one line a second.
async fn what_fails_for_one_reason_has_one_line_a_second(kind: Kind) -> Result<()> {
    let events = 400;
    let target = Endpoint::start(refuses_all)?;
    let env = TestEnv::with(kind, &target.subscription("out")).await?;
    env.insert((0..events).map(|n| ("t", n.to_string(), n))).await?;
    let began = Instant::now();
    let output = env.output(&["dispatch", "--log-json"])?;
    let seconds = began.elapsed().as_secs() + 1;
    let lines: Vec<serde_json::Value> =
        String::from_utf8(output.stderr)?.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let dead = lines.iter().filter(|line| line["message"] == "event dead").count() as u64;
    let left_out: u64 = lines.iter().filter_map(|line| line["left_out"].as_u64()).sum();
    ensure!((1..=seconds).contains(&dead), "{dead} lines in {seconds} s");
    ensure!(dead + left_out == events.unsigned_abs(), "{dead} lines, {left_out} left out: {lines:#?}");
    Ok(())
}
