//! What the commands show about events that do not move.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::endpoint::{Endpoint, Shut, takes_all};
use crate::env::{FILE_SINK, Kind, TestEnv, cases, get, http_sink, on_both, until};

/// Events that the topics exclude are neither delivered nor in flight.
async fn an_event_that_nobody_wants_is_not_shown_as_delivered(kind: Kind) -> Result<()> {
    let other = FILE_SINK.replace(".out]", ".other]\ntopics = [\"billing.*\"]");
    let env = TestEnv::with(kind, &(FILE_SINK.to_owned() + &other)).await?;
    env.subscribe()?;
    env.insert_three().await?;
    let listed = env.json(&["list", "--state", "pending", "--subscription", "out", "--json"])?;
    let id = listed[0]["event"]["id"].as_str().context("no id")?;
    let shown = env.ok(&["show", id])?;
    ensure!(shown.contains("out: pending") && shown.contains("other: skipped"), "{shown}");
    let json = env.json(&["show", id, "--json"])?;
    let states: Vec<&str> =
        json["deliveries"].as_array().context("no list")?.iter().filter_map(|it| it["state"].as_str()).collect();
    ensure!(states.contains(&"skipped") && states.contains(&"pending"), "{json}");
    env.ok(&["dispatch"])?;
    let shown = env.ok(&["show", id])?;
    ensure!(shown.contains("out: dispatched") && shown.contains("other: skipped"), "{shown}");
    Ok(())
}

/// The reason is in the store, and the running service knows since when.
async fn the_doctor_names_an_open_breaker(kind: Kind) -> Result<()> {
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let env = TestEnv::with(
        kind,
        &format!(
            "[server]\nlisten = \"127.0.0.1:{port}\"\n[subscriptions.refused]\n{}\
         [subscriptions.lost]\nlease = \"1m\"\nsink = {{ type = \"http\", url = \"http://no-such-host.invalid/\" }}\n",
            http_sink("http://127.0.0.1:9/")
        ),
    )
    .await?;
    env.insert_three().await?;
    let served = env.serve().await?;
    served.logged("breaker open", 2).await?;
    let said = env.said(&["doctor"])?;
    for name in ["refused", "lost"] {
        let line = said.lines().find(|line| line.starts_with(&format!("PROBLEM  {name}: the service at")));
        ensure!(line.is_some_and(|line| line.contains("the breaker has been open since")), "{said}");
    }
    for code in ["connect_refused", "dns_failed"] {
        ensure!(said.contains(&format!("last reason: {code}")), "{said}");
    }
    ensure!(said.contains("is the destination up") && said.contains("the host name in the sink's url"), "{said}");
    ensure!(!said.contains("postbox pause"), "the relay tries again by itself at once: {said}");
    until("the pause", async || {
        env.sql(ages(kind)).await?;
        let said = env.said(&["doctor"])?;
        // A pause that ends between two looks of the relay would be missed.
        Ok((said.contains("pause refused --for 10s") && said.contains("pause lost --for 30s")).then_some(()))
    })
    .await?;
    served.terminate().await?;
    // No service runs any more: the store remembers the reason.
    let said = env.said(&["doctor"])?;
    for code in ["connect_refused", "dns_failed"] {
        ensure!(said.contains(&format!("ago, {code}: ")), "{said}");
    }
    let retrying = env.ok(&["list", "--state", "retrying", "--code", "connect_refused"])?;
    ensure!(retrying.lines().count() > 1 && retrying.contains("refused"), "{retrying}");
    ensure!(env.ok(&["stats"])?.contains("dead=0"));
    Ok(())
}

/// Lets the rows look as if they were written two days ago.
fn ages(kind: Kind) -> &'static str {
    match kind {
        Kind::Sqlite => "UPDATE postbox_delivery SET updated_at = updated_at - 172800000000",
        Kind::Postgres => "UPDATE postbox.delivery SET updated_at = updated_at - interval '2 days'",
    }
}

/// An event may wait for long after an outage because the destination named a time.
async fn what_waits_since_an_outage_is_no_outage(kind: Kind) -> Result<()> {
    let target = Endpoint::start(|_| (503, Duration::ZERO))?;
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let server = format!("[server]\nlisten = \"127.0.0.1:{port}\"\n");
    let env = TestEnv::with(kind, &(server + &target.subscription("out"))).await?;
    env.insert_three().await?;
    env.said(&["dispatch"])?;
    env.sql(match kind {
        Kind::Sqlite => "UPDATE postbox_delivery SET due_at = due_at + 600000000",
        Kind::Postgres => "UPDATE postbox.delivery SET due_at = due_at + interval '10 minutes'",
    })
    .await?;
    env.sql(ages(kind)).await?;
    target.set(takes_all);
    env.insert((3..20).map(|n| ("order.placed", n.to_string(), n))).await?;
    let served = env.serve().await?;
    target.until("the others", |arrivals| arrivals.iter().any(|it| it.taken)).await?;
    // An event arrives before the service has the answer to it.
    let said = until("an answer", async || {
        Ok(Some(env.said(&["doctor"])?).filter(|said| !said.contains("the destination is unavailable")))
    })
    .await?;
    ensure!(said.contains("postbox retry --code http_503 --subscription out"), "{said}");
    served.terminate().await?;
    Ok(())
}

/// Counts that are too large to be exact are shown as estimates everywhere.
async fn an_estimate_says_that_it_is_one(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, FILE_SINK).await?;
    env.subscribe()?;
    env.sql(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 12000)
         INSERT INTO OUTBOX (topic, payload) SELECT 'order.placed', '{}' FROM n",
    )
    .await?;
    let said = env.ok(&["stats"])?;
    ensure!(said.ends_with(" estimated=true\n"), "{said}");
    let stats = env.json(&["stats", "--json"])?;
    let pending = stats[0]["pending"].as_u64().context("a number")?;
    ensure!(stats[0]["estimated"] == true && (10_000..=14_000).contains(&pending), "{stats}");
    let doctor = env.said(&["doctor"])?;
    ensure!(doctor.contains("out: ~1"), "{doctor}");
    env.ok(&["dispatch"])?;
    ensure!(env.ok(&["stats"])? == "pending=0 dispatched=12000 dead=0 total=12000\n");
    Ok(())
}

/// A migration of the application locks a table: commands and pages report it, and soon. The
/// service is not ready until it is over.
async fn a_locked_table_keeps_nobody_waiting_who_looks(table: &str) -> Result<()> {
    let env = TestEnv::with(Kind::Postgres, FILE_SINK).await?;
    env.insert_three().await?;
    let served = env.serve().await?;
    let counted = "pending=0 dispatched=3 dead=0 total=3\n";
    until("the events", async || Ok((env.ok(&["stats"])? == counted).then_some(()))).await?;
    let mut holder = env.client().await?;
    let locked = holder.transaction().await?;
    locked.batch_execute(&format!("LOCK TABLE postbox.{table} IN ACCESS EXCLUSIVE MODE")).await?;
    let start = Instant::now();
    let metrics = get(&served.address, "/metrics", "").await?;
    get(&served.address, "/readyz", "").await?;
    let http = start.elapsed();
    let asked = Instant::now();
    let doctor = env.said(&["doctor"])?;
    let diagnosed = asked.elapsed();
    let stats = env.refuses(1, &["stats"])?;
    let list = env.refuses(1, &["list", "--state", "dead"])?;
    let all = start.elapsed();
    let holds = format!("the table {table} is locked by session");
    ensure!(metrics.contains("postbox_store_up 1") && !metrics.contains("postbox_depth{"), "{table}: {metrics}");
    ensure!(metrics.contains("postbox_stats_up{subscription=\"out\"} 0"), "{table}: {metrics}");
    ensure!(metrics.contains("postbox_delivered_total{subscription=\"out\"} 3"), "{table}: {metrics}");
    ensure!(doctor.contains("PROBLEM") && doctor.contains(&holds), "{table}: {doctor}");
    ensure!(stats.contains(&holds) && stats.contains("pg_terminate_backend"), "{table}: {stats}");
    ensure!(list.contains(&holds), "{table}: {list}");
    // One second for a lock, and not one after the other for three queries.
    ensure!(diagnosed < Duration::from_secs(3), "{table}: {diagnosed:?}");
    // Two seconds each, and a margin for a busy machine.
    ensure!(http < Duration::from_secs(8) && all < Duration::from_secs(20), "{table}: {http:?}, {all:?}");
    let is_ready = async || anyhow::Ok(get(&served.address, "/readyz", "").await?.starts_with("HTTP/1.1 200"));
    until("503", async || Ok((!is_ready().await?).then_some(()))).await?;
    // Longer than a lease: also without it, and when it is taken again.
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(12) {
        ensure!(!is_ready().await?, "{table}: ready again after {:?}", since.elapsed());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    locked.rollback().await?;
    until("the counts", async || Ok((env.ok(&["stats"])? == counted).then_some(()))).await?;
    served.terminate().await?;
    Ok(())
}

cases! {
    a_locked_outbox_keeps_nobody_waiting_who_looks => a_locked_table_keeps_nobody_waiting_who_looks("outbox");
    a_locked_delivery_table_keeps_nobody_waiting_who_looks => a_locked_table_keeps_nobody_waiting_who_looks("delivery");
    a_locked_lane_table_keeps_nobody_waiting_who_looks => a_locked_table_keeps_nobody_waiting_who_looks("lane");
}

/// A log that nobody reads costs only its own count.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_log_that_nobody_reads_hides_nothing_else() -> Result<()> {
    let env = TestEnv::with(Kind::Postgres, FILE_SINK).await?;
    env.insert_three().await?;
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    let holder = env.client().await?;
    holder.batch_execute("BEGIN; LOCK TABLE postbox.inbox IN ACCESS EXCLUSIVE MODE").await?;
    for (args, shown) in [(&["stats", "--json"], "\"dispatched\": 3"), (&["list", "--json"], "\"topic\": ")] {
        let output = env.output(args)?;
        let (printed, said) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
        ensure!(output.status.code() == Some(1) && printed.contains(shown), "{args:?}: {printed}{said}");
        ensure!(said.contains("the logs that nobody reads could not be counted: "), "{args:?}: {said}");
    }
    holder.batch_execute("COMMIT").await?;
    env.ok(&["stats"])?;
    Ok(())
}

/// The sum contains no unrouted events.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unrouted_events_that_cannot_be_counted_hide_no_sum() -> Result<()> {
    let env = TestEnv::with(Kind::Postgres, FILE_SINK).await?;
    env.insert_three().await?;
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    let holder = env.client().await?;
    holder.batch_execute("BEGIN; LOCK TABLE postbox.unrouted IN ACCESS EXCLUSIVE MODE").await?;
    let counted = "pending=0 dispatched=3 dead=0 total=3\n";
    for (args, shown) in [(&["stats"][..], counted), (&["stats", "--json"][..], "\"unrouted\": null")] {
        let output = env.output(args)?;
        let (printed, said) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
        ensure!(output.status.code() == Some(1) && printed.contains(shown), "{args:?}: {printed}{said}");
        ensure!(said.contains("the events that no subscription wants could not be counted: "), "{args:?}: {said}");
    }
    holder.batch_execute("COMMIT").await?;
    env.ok(&["stats"])?;
    Ok(())
}

/// The same store far away: each answer comes this much later.
async fn far_away(url: &str, delay: Duration) -> Result<String> {
    let near = url.split(['@', '/']).find(|part| part.starts_with("127.0.0.1:")).context("an address")?.to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let far = url.replacen(&near, &listener.local_addr()?.to_string(), 1);
    tokio::spawn(async move {
        while let (Ok((client, _)), Ok(server)) = (listener.accept().await, TcpStream::connect(&near).await) {
            let ((mut asks, mut answered), (mut answers, mut asked)) = (client.into_split(), server.into_split());
            tokio::spawn(async move { tokio::io::copy(&mut asks, &mut asked).await });
            tokio::spawn(async move {
                let mut chunk = vec![0; 65_536];
                while let Ok(n @ 1..) = answers.read(&mut chunk).await {
                    tokio::time::sleep(delay).await;
                    answered.write_all(&chunk[..n]).await?;
                }
                std::io::Result::Ok(())
            });
        }
    });
    Ok(far)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_reads_every_subscription_of_a_distant_database() -> Result<()> {
    let config: String = (0..12).map(|n| FILE_SINK.replace(".out]", &format!(".out{n}]"))).collect();
    let env = TestEnv::with(Kind::Postgres, &config).await?;
    env.subscribe()?;
    env.insert_three().await?;
    let far = far_away(&env.url, Duration::from_millis(80)).await?;
    let said = String::from_utf8(env.command(&["doctor"]).env("POSTBOX_STORE", &far).output()?.stdout)?;
    ensure!(said.matches("3 pending").count() == 12 && !said.contains("could not be read"), "{said}");
    Ok(())
}

/// Two projects on one machine have the same port unless they set one.
#[tokio::test]
async fn a_service_of_another_store_is_not_believed() -> Result<()> {
    let (theirs, mine) = (TestEnv::migrated(Kind::Sqlite).await?, TestEnv::migrated(Kind::Sqlite).await?);
    let shut = Shut::reserve()?;
    theirs.config(&format!("[subscriptions.out]\n{}", http_sink(&shut.url())))?;
    theirs.insert_three().await?;
    let served = theirs.serve().await?;
    let listen = format!("[server]\nlisten = \"{}\"\n", served.address);
    theirs.config(&format!("[subscriptions.out]\n{}{listen}", http_sink(&shut.url())))?;
    mine.config(&format!("{FILE_SINK}{listen}"))?;
    mine.subscribe()?;
    until("the open breaker", async || {
        Ok(Some(theirs.said(&["doctor"])?).filter(|said| said.contains("breaker has been open")))
    })
    .await?;
    ensure!(!theirs.said(&["doctor", "--json"])?.contains("service_of_another_store"));
    let said = mine.said(&["doctor", "--json"])?;
    ensure!(said.matches("service_of_another_store").count() == 1 && !said.contains("breaker has"), "{said}");
    let noted = |env: &TestEnv| anyhow::Ok(String::from_utf8(env.output(&["stats", "--json"])?.stderr)?);
    let expected = format!("the service at {} works for another store; set another [server] listen", served.address);
    ensure!(noted(&mine)?.contains(&expected) && !noted(&theirs)?.contains("another store"), "{}", noted(&mine)?);
    // Nor if the own store has a name, or no schema.
    std::fs::write(mine.path("postbox.toml"), format!("{listen}[stores.own]\nurl = {:?}\n{FILE_SINK}", mine.url))?;
    let asked = mine.command(&["doctor", "--json"]).env_remove("POSTBOX_STORE").output()?;
    let said = String::from_utf8(asked.stdout)?;
    ensure!(said.matches("service_of_another_store").count() == 1 && !said.contains("breaker has"), "{said}");
    let empty = TestEnv::empty(Kind::Sqlite).await?;
    empty.config(&format!("{FILE_SINK}{listen}"))?;
    let said = empty.said(&["doctor"])?;
    ensure!(said.contains("postbox migrate up") && !said.contains("the service at"), "{said}");
    let broken = TestEnv::empty(Kind::Sqlite).await?;
    std::fs::write(broken.path("postbox.db"), "no database".repeat(200))?;
    broken.config(&format!("{}{listen}", FILE_SINK.replace(".out]", ".mine]")))?;
    let said = broken.said(&["doctor"])?;
    ensure!(said.contains("PROBLEM") && !said.contains("breaker has"), "{said}");
    served.terminate().await?;
    Ok(())
}

on_both! {
    an_event_that_nobody_wants_is_not_shown_as_delivered,
    the_doctor_names_an_open_breaker,
    what_waits_since_an_outage_is_no_outage,
    an_estimate_says_that_it_is_one,
}
