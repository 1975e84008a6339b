//! Outages of the running binary: a relay is killed or frozen, the database stops, the destination
//! is down, one event is refused for ever.
//!
//! Promised times are measured and printed. They are enforced only with `POSTBOX_TEST_TIMED=1`, on
//! a quiet machine; with simulated time they are tested in `crates/engine/tests/engine/relay.rs`.

#![allow(clippy::print_stderr, reason = "the times that were measured")]

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postbox_testkit::servers::{PrivatePostgres, Settings, Version};

use crate::endpoint::{Arrival, Endpoint, Shut, firsts};
use crate::env::{Kind, Served, TestEnv, cases, get, http_sink, on_both, signal};

/// Response time of a working destination, long enough that a fault finds work in flight.
const PACE: Duration = Duration::from_millis(5);

/// Number of arrivals at which the fault comes: in the middle of a batch of 20.
const UNDER_WAY: usize = 107;

fn takes_all(_key: &str) -> (u16, Duration) {
    (204, PACE)
}

/// Prints a measured time, and checks it against the promise.
pub(crate) fn promised(what: &str, took: Duration, most: Duration) -> Result<()> {
    eprintln!("{what}: {took:?}, promised are {most:?}");
    ensure!(took <= most || std::env::var_os("POSTBOX_TEST_TIMED").is_none(), "{what}: {took:?} is more than {most:?}");
    Ok(())
}

/// Inserts `events` events round robin over `keys` keys, numbered from 0.
async fn fill(env: &TestEnv, keys: usize, events: usize) -> Result<()> {
    env.insert((0..events).map(|n| ("order.placed", format!("k{}", n % keys), n as i64))).await
}

/// Checks that everything arrived, in order per key.
fn ensure_whole(arrivals: &[Arrival], keys: usize, events: usize) -> Result<()> {
    for key in 0..keys {
        let wanted: Vec<i64> = (0..events).filter(|n| n % keys == key).map(|n| n as i64).collect();
        let found = firsts(arrivals, &format!("k{key}"));
        ensure!(found == wanted, "key k{key}: {found:?} instead of {wanted:?}");
    }
    Ok(())
}

fn distinct(arrivals: &[Arrival]) -> usize {
    arrivals.iter().filter(|arrival| arrival.taken).map(|arrival| arrival.n).collect::<HashSet<_>>().len()
}

/// How a relay disappears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leaves {
    /// SIGKILL.
    Dies,
    /// SIGSTOP; it continues once the others have delivered everything.
    Freezes,
}

/// Two relays share a subscription. One disappears while it delivers, and the other takes over its
/// lanes.
async fn a_relay_that_leaves_is_succeeded(kind: Kind, leaves: Leaves, lanes: usize) -> Result<()> {
    const LEASE: Duration = Duration::from_secs(3);
    const KEYS: usize = 40;
    const EVENTS: usize = 600;
    const BATCH: usize = 20;
    let endpoint = Endpoint::start(takes_all)?;
    let env = TestEnv::with(kind, &format!(
        "[subscriptions.out]\nlanes = {lanes}\nlease = \"3s\"\nbatch = {BATCH}\nconcurrency = 2\n\
         sink = {{ type = \"http\", url = \"{}\", allow = [\"127.0.0.1\"], headers = {{ x-relay = \"env:RELAY\" }} }}\n",
        endpoint.url()
    )).await?;
    let one = env.serve_with(&[("RELAY", "one")]).await?;
    one.logged("lane taken", lanes).await?;
    let two = env.serve_with(&[("RELAY", "two")]).await?;
    // With two lanes, the second relay gets its share before the fault.
    two.logged("lane taken", lanes - 1).await?;
    // Its last calls get no answer: it disappears during them.
    endpoint.answer_only(UNDER_WAY);
    fill(&env, KEYS, EVENTS).await?;
    let by = |arrivals: &[Arrival], relay: &str| arrivals.iter().filter(|arrival| arrival.relay == relay).count();
    let arrivals = endpoint.until("something is under way", |arrivals| arrivals.len() > UNDER_WAY).await?;

    // The relay that delivers now; on a busy machine a lane may have changed hands already.
    let doomed = arrivals.last().context("there are many")?.relay.clone();
    let (leaving, successor) = if doomed == "one" { (one, two) } else { (two, one) };
    let (left, frozen) = match leaves {
        Leaves::Dies => (leaving.kill().await?, None),
        Leaves::Freezes => {
            signal(leaving.pid()?, "STOP")?;
            (Instant::now(), Some(leaving))
        }
    };
    let before = endpoint.arrivals();
    let owner: HashMap<&str, &str> = before.iter().map(|it| (it.key.as_str(), it.relay.as_str())).collect();
    endpoint.answer_all();
    let inherited = |it: &&Arrival| it.relay != doomed && owner.get(it.key.as_str()).is_some_and(|was| *was == doomed);
    let first = |arrivals: &[Arrival]| arrivals.iter().skip(before.len()).find(inherited).map(|arrival| arrival.at);
    let arrivals = endpoint.until("the successor delivers", |arrivals| first(arrivals).is_some()).await?;
    let first = first(&arrivals).context("it was there a moment ago")?;
    let what = format!("takeover on {kind:?}, one {leaves:?}, {lanes} lane(s), lease {LEASE:?}");
    promised(&what, first.duration_since(left), LEASE + Duration::from_secs(1))?;

    let arrivals = endpoint.until("all events", |arrivals| distinct(arrivals) == EVENTS).await?;
    ensure_whole(&arrivals, KEYS, EVENTS)?;
    let sent: HashSet<i64> = before.iter().map(|arrival| arrival.n).collect();
    let repeats = arrivals.iter().skip(before.len()).filter(|arrival| sent.contains(&arrival.n)).count();
    ensure!(repeats <= 2 * BATCH * lanes, "{repeats} repeats are more than the one that left had in flight");
    if let Some(frozen) = frozen {
        // It notices that its lease has expired before it sends anything, and continues as a
        // standby.
        let sent = by(&arrivals, &doomed);
        signal(frozen.pid()?, "CONT")?;
        frozen.logged("lease lost", 1).await?;
        frozen.terminate().await?;
        let sent_since = by(&endpoint.arrivals(), &doomed) - sent;
        ensure!(sent_since == 0, "{sent_since} requests of a relay whose lease was over");
    }
    successor.terminate().await?;
    ensure!(env.ok(&["stats"])? == format!("pending=0 dispatched={EVENTS} dead=0 total={EVENTS}\n"));
    Ok(())
}

cases! {
    a_killed_relay_is_succeeded_by_its_standby => a_relay_that_leaves_is_succeeded(Kind::Postgres, Leaves::Dies, 1);
    on_sqlite_a_killed_relay_is_succeeded_by_its_standby => a_relay_that_leaves_is_succeeded(Kind::Sqlite, Leaves::Dies, 1);
    a_killed_relay_is_succeeded_by_its_neighbour => a_relay_that_leaves_is_succeeded(Kind::Postgres, Leaves::Dies, 2);
    a_frozen_relay_is_succeeded_and_sends_nothing_when_it_thaws => a_relay_that_leaves_is_succeeded(Kind::Postgres, Leaves::Freezes, 1);
}

/// A slow rate spreads a batch over seconds; a relay that is killed meanwhile repeats no more than
/// the rate allows in one, and the call in flight.
async fn a_killed_relay_with_a_slow_rate_repeats_little(kind: Kind) -> Result<()> {
    const KEYS: usize = 10;
    const EVENTS: usize = 60;
    const RATE: usize = 5;
    let endpoint = Endpoint::start(takes_all)?;
    let settings = format!("rate = \"{RATE}/s\"\nconcurrency = 1\nlease = \"1s\"\n");
    let env = TestEnv::with(kind, &(endpoint.subscription("out") + &settings)).await?;
    fill(&env, KEYS, EVENTS).await?;
    let relay = env.serve().await?;
    endpoint.until("something is under way", |arrivals| arrivals.len() >= 20).await?;
    relay.kill().await?;
    // This one must not lose its lease on a busy machine: then it would repeat as well.
    env.config(&(endpoint.subscription("out") + &settings.replace("\"1s\"", "\"10s\"")))?;
    let relay = env.serve().await?;
    let arrivals = endpoint.until("all events", |arrivals| distinct(arrivals) == EVENTS).await?;
    ensure_whole(&arrivals, KEYS, EVENTS)?;
    endpoint.quiet_for(Duration::from_secs(1)).await?;
    relay.terminate().await?;
    let repeats = endpoint.count() - EVENTS;
    ensure!(arrivals.len() == endpoint.count(), "something came after the last event");
    ensure!(repeats <= 2 * RATE, "{repeats} repeats at {RATE} events a second");
    ensure!(env.ok(&["stats"])? == format!("pending=0 dispatched={EVENTS} dead=0 total={EVENTS}\n"));
    Ok(())
}

/// The database stops while the relay delivers, and returns.
async fn the_database_returns(stop: fn(&mut PrivatePostgres), lease: &str) -> Result<()> {
    const AGAIN_MAX: Duration = Duration::from_secs(2);
    const KEYS: usize = 40;
    const EVENTS: usize = 1_000;
    let mut postgres = PrivatePostgres::launch(Version::V15, Settings::durable()).await;
    let env = TestEnv::on(Kind::Postgres, postgres.fresh_database().await)?;
    env.ok(&["migrate", "up"])?;
    let endpoint = Endpoint::start(takes_all)?;
    let settings = format!("lease = \"{lease}\"\nbatch = 20\nconcurrency = 4\n");
    env.config(&(endpoint.subscription("out") + &settings))?;
    endpoint.answer_only(UNDER_WAY);
    fill(&env, KEYS, EVENTS).await?;
    let relay = env.serve().await?;
    endpoint.until("the relay delivers", |arrivals| arrivals.len() > UNDER_WAY).await?;

    stop(&mut postgres);
    endpoint.answer_all();
    // By then what it had in memory is sent, its backoff is at the maximum, and a short lease is
    // lost.
    endpoint.quiet_for(Duration::from_millis(1_500)).await?;
    let before = endpoint.count();
    postgres.start().await;
    let accepts = Instant::now();
    let arrivals = endpoint.until("delivering again", |arrivals| arrivals.len() > before).await?;
    let again = arrivals[before].at.saturating_duration_since(accepts);
    ensure!(before < EVENTS, "everything was delivered before");
    promised(&format!("delivering again after a database restart, lease {lease}"), again, AGAIN_MAX)?;

    let arrivals = endpoint.until("all events", |arrivals| distinct(arrivals) == EVENTS).await?;
    ensure_whole(&arrivals, KEYS, EVENTS)?;
    relay.terminate().await?;
    ensure!(env.ok(&["stats"])? == format!("pending=0 dispatched={EVENTS} dead=0 total={EVENTS}\n"));
    Ok(())
}

cases! {
    after_a_fast_stop_of_the_database_it_delivers_again => the_database_returns(PrivatePostgres::stop_fast, "10s");
    after_a_crash_of_the_database_longer_than_the_lease_it_delivers_again => the_database_returns(PrivatePostgres::stop_immediate, "1s");
}

/// What a service answers that waits for its store.
async fn ensure_waits(relay: &Served, code: &str) -> Result<()> {
    relay.logged("store away", 1).await?;
    ensure!(relay.log().iter().any(|line| line.contains("store away") && line.contains(code)), "{:#?}", relay.log());
    let page = async |path: &str| get(&relay.address, path, "").await;
    let (health, ready) = (page("/healthz").await?, page("/readyz").await?);
    ensure!(health.starts_with("HTTP/1.1 200"), "{health}");
    ensure!(ready.starts_with("HTTP/1.1 503") && ready.contains("store: "), "{ready}");
    let (status, metrics) = (page("/status").await?, page("/metrics").await?);
    ensure!(status.contains(&format!("\"code\":\"{code}\"")), "{status}");
    ensure!(metrics.contains("\npostbox_store_up 0\n"), "{metrics}");
    Ok(())
}

/// A relay that starts on a standby waits for the promotion, and then delivers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_is_waited_for_until_it_is_promoted() -> Result<()> {
    let mut postgres = PrivatePostgres::launch(Version::V15, Settings::fast()).await;
    let env = TestEnv::on(Kind::Postgres, postgres.fresh_database().await)?;
    env.ok(&["migrate", "up"])?;
    let endpoint = Endpoint::start(takes_all)?;
    env.config(&endpoint.subscription("out"))?;
    fill(&env, 2, 10).await?;
    let bare = TestEnv::on(Kind::Postgres, postgres.fresh_database().await)?;
    bare.config(&endpoint.subscription("out"))?;
    postgres.restart_as_standby().await;
    // Each command says it, although there is no source; and also where the schema is missing.
    let [connect, doctor] = [&["check-config", "--connect"][..], &["doctor"]];
    let wanted = [(&env, 0, &["migrate", "up"][..]), (&env, 1, connect), (&env, 1, doctor)];
    for (env, code, command) in wanted.into_iter().chain([(&bare, 1, connect), (&bare, 1, doctor)]) {
        let output = env.output(command)?;
        let said = String::from_utf8([output.stdout, output.stderr].concat())?;
        ensure!(output.status.code() == Some(code) && said.contains("the database is a standby"), "{said}");
        ensure!(said.contains("it may be down or restarting: wait for it"), "{said}");
    }
    let complaint = env.refuses(1, &["send", "t", "{}"])?;
    ensure!(complaint.trim_end().ends_with("(store_read_only)"), "nothing was appended: {complaint}");
    let relay = env.serve().await?;
    ensure_waits(&relay, "store_read_only").await?;
    ensure!(endpoint.count() == 0, "nothing is sent from a standby");
    TestEnv::on(Kind::Postgres, postgres.url())?.client().await?.batch_execute("SELECT pg_promote()").await?;
    endpoint.until("all events", |arrivals| distinct(arrivals) == 10).await?;
    relay.terminate().await?;
    Ok(())
}

/// A relay that starts while the database is down waits, says so to whoever asks, and then
/// delivers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_is_down_at_the_start_is_waited_for() -> Result<()> {
    let mut postgres = PrivatePostgres::launch(Version::V15, Settings::fast()).await;
    let env = TestEnv::on(Kind::Postgres, postgres.fresh_database().await)?;
    env.ok(&["migrate", "up"])?;
    let endpoint = Endpoint::start(takes_all)?;
    env.config(&endpoint.subscription("out"))?;
    fill(&env, 2, 10).await?;
    postgres.stop_fast();
    let relay = env.serve().await?;
    ensure_waits(&relay, "store_unreachable").await?;
    postgres.start().await;
    endpoint.until("all events", |arrivals| distinct(arrivals) == 10).await?;
    relay.terminate().await?;
    Ok(())
}

/// The destination is closed at first, and opens later.
async fn a_dead_destination_counts_no_attempt_and_drains_when_it_returns(kind: Kind) -> Result<()> {
    const KEYS: usize = 10;
    const EVENTS: usize = 30;
    let shut = Shut::reserve()?;
    // With one attempt, an event that is charged for the outage would be dead.
    let env = TestEnv::with(
        kind,
        &format!(
            "[subscriptions.out]\nretry = {{ max_attempts = 1 }}\nbreaker = {{ base = \"20ms\", max = \"100ms\" }}\n{}",
            http_sink(&shut.url())
        ),
    )
    .await?;
    fill(&env, KEYS, EVENTS).await?;
    let relay = env.serve().await?;
    relay.logged("breaker opened", 5).await?;
    ensure!(env.ok(&["stats"])? == format!("pending={EVENTS} dispatched=0 dead=0 total={EVENTS}\n"));
    // Counted by id: an event in a slow call may be in another state when the next list is made.
    let mut listed = HashSet::new();
    for state in ["pending", "retrying", "blocked"] {
        let records = env.json(&["list", "--state", state, "--json"])?;
        for record in records.as_array().context("a list")? {
            ensure!(record["attempts"] == 0, "an attempt was counted: {record}");
            listed.insert(record["event"]["id"].to_string());
        }
        if let Some(id) = records[0]["event"]["id"].as_str() {
            let shown = env.ok(&["show", id])?;
            ensure!(!shown.contains("attempt(s)"), "{shown}");
        }
    }
    ensure!(listed.len() == EVENTS, "{} of {EVENTS} are waiting", listed.len());

    let endpoint = shut.open(takes_all)?;
    let arrivals = endpoint.until("all events", |arrivals| arrivals.len() >= EVENTS).await?;
    ensure!(arrivals.len() == EVENTS, "something came twice");
    ensure_whole(&arrivals, KEYS, EVENTS)?;
    relay.terminate().await?;
    ensure!(env.ok(&["stats"])? == format!("pending=0 dispatched={EVENTS} dead=0 total={EVENTS}\n"));
    Ok(())
}

/// No other event succeeded when they failed, so the destination looks down. Later events are
/// delivered all the same.
async fn events_that_look_like_an_outage_hold_up_no_others(kind: Kind) -> Result<()> {
    let fails_at_some: fn(&str) -> (u16, Duration) = |key| match key.split_once('-') {
        Some(("away", _)) => (503, Duration::ZERO),
        Some(("crash", _)) => (500, Duration::ZERO),
        _ => (204, Duration::ZERO),
    };
    for (key, failing) in [("away", 2), ("crash", 12)] {
        let target = Endpoint::start(fails_at_some)?;
        let settings = "lanes = 1\nbreaker = { base = \"5ms\", max = \"20ms\" }\n";
        let env = TestEnv::with(kind, &(target.subscription("out") + settings)).await?;
        env.insert((0..failing).map(|n| ("order.placed", format!("{key}-{n}"), n))).await?;
        let relay = env.serve().await?;
        relay.logged("breaker opened", 7).await?;
        env.insert((0..20).map(|n| ("order.placed", format!("k{n}"), n))).await?;
        let taken = |arrivals: &[Arrival]| arrivals.iter().filter(|arrival| arrival.taken).count();
        let arrived = target.until("the others", |arrivals| taken(arrivals) >= 20).await;
        let log = relay.terminate().await?;
        let arrived = arrived.with_context(|| format!("{key}: {}", log[log.len().saturating_sub(200)..].join("\n")))?;
        let mut keys: Vec<&str> = arrived.iter().filter(|it| it.taken).map(|it| it.key.as_str()).collect();
        keys.sort_unstable();
        keys.dedup();
        ensure!(keys.len() == 20, "{key}: {} of {} arrived once\n{}", keys.len(), taken(&arrived), log.join("\n"));
    }
    Ok(())
}

on_both!(
    a_killed_relay_with_a_slow_rate_repeats_little,
    events_that_look_like_an_outage_hold_up_no_others,
    a_dead_destination_counts_no_attempt_and_drains_when_it_returns,
);
