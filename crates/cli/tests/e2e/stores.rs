//! One process, many databases.

use std::collections::HashMap;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use postbox_testkit::proxy::{Direction, FaultProxy};
use postbox_testkit::servers::{Postgres, Version};
use tokio::net::TcpListener;

use crate::env::{FILE_SINK, Kind, Served, TestEnv, get, until};
use crate::sender::{Sender, partner};

/// Events per store.
const EVENTS: i64 = 20;

/// A folder whose configuration has these stores, and `more`.
fn stores(urls: &[(String, String)], more: &str) -> Result<TestEnv> {
    let env = TestEnv::on(Kind::Sqlite, String::new())?;
    configure(&env, urls, more)?;
    Ok(env)
}

fn configure(env: &TestEnv, urls: &[(String, String)], more: &str) -> Result<()> {
    let sections: String = urls.iter().map(|(name, url)| format!("[stores.{name}]\nurl = {url:?}\n")).collect();
    std::fs::write(env.path("postbox.toml"), format!("{sections}{more}\n[server]\nlisten = \"127.0.0.1:0\"\n"))?;
    Ok(())
}

/// This many migrated SQLite files, named s0, s1, ….
fn sqlite(count: usize, more: &str) -> Result<(TestEnv, Vec<(String, String)>)> {
    let env = TestEnv::on(Kind::Sqlite, String::new())?;
    let url = |n| (format!("s{n}"), format!("sqlite:{}", env.path(&format!("s{n}.db")).display()));
    let urls: Vec<(String, String)> = (0..count).map(url).collect();
    configure(&env, &urls, more)?;
    let made = env.ok(&["migrate", "up"])?;
    ensure!(made.lines().filter(|line| line.ends_with(": the schema is ready")).count() == count, "{made}");
    Ok((env, urls))
}

/// Inserts events with these numbers, as any program would.
async fn insert(url: &str, numbers: impl IntoIterator<Item = i64>) -> Result<()> {
    let kind = if url.starts_with("sqlite:") { Kind::Sqlite } else { Kind::Postgres };
    let event = |n: i64| ("order.placed", n.to_string(), n);
    TestEnv::on(kind, url.to_owned())?.insert(numbers.into_iter().map(event)).await
}

/// How often each number has arrived.
fn arrived(env: &TestEnv) -> Result<HashMap<i64, usize>> {
    let mut counts = HashMap::new();
    for line in env.lines("out.jsonl")? {
        *counts.entry(line["payload"]["n"].as_i64().context("a number")?).or_default() += 1;
    }
    Ok(counts)
}

/// Fills each store with different numbers, and waits until each has arrived once.
async fn each_event_arrives_once(env: &TestEnv, urls: &[(String, String)]) -> Result<Served> {
    for (at, (_, url)) in urls.iter().enumerate() {
        insert(url, (0..EVENTS).map(|n| at as i64 * EVENTS + n)).await?;
    }
    let total = urls.len() * EVENTS as usize;
    let served = env.serve().await?;
    until("every event", async || Ok((arrived(env)?.len() == total).then_some(()))).await?;
    // Events written while the service runs arrive, too.
    for (at, (_, url)) in urls.iter().enumerate() {
        insert(url, [(total + at) as i64]).await?;
    }
    until("the later ones", async || Ok((arrived(env)?.len() == total + urls.len()).then_some(()))).await?;
    Ok(served)
}

async fn page(served: &Served, path: &str) -> Result<String> {
    get(&served.address, path, "").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_sqlite_stores_are_served_by_one_process() -> Result<()> {
    let (env, urls) = sqlite(50, FILE_SINK)?;
    let served = each_event_arrives_once(&env, &urls).await?;
    ensure!(page(&served, "/readyz").await?.ends_with("\r\n\r\nready\n"));
    let metrics = page(&served, "/metrics").await?;
    for (name, _) in &urls {
        for series in [
            format!("postbox_store_up{{store=\"{name}\"}} 1\n"),
            format!("postbox_delivered_total{{store=\"{name}\",subscription=\"out\"}} {}\n", EVENTS + 1),
            format!("postbox_lanes_held{{store=\"{name}\",subscription=\"out\"}} "),
        ] {
            ensure!(metrics.contains(&series), "{series} is not in\n{metrics}");
        }
    }
    let log = served.terminate().await?;
    ensure!(log.iter().all(|line| !line.contains("ERROR")), "{log:#?}");
    let taken = log.iter().filter(|line| line.contains("relay stopped") && line.contains("\"store\":\"s49\"")).count();
    ensure!(taken == 1, "a line says which store it is about: {log:#?}");
    ensure!(arrived(&env)?.values().all(|times| *times == 1), "each once");
    ensure!(env.ok(&["stats"])? == "pending=0 dispatched=1050 dead=0 total=1050\n");
    ensure!(env.ok(&["stats", "--store", "s7"])? == "pending=0 dispatched=21 dead=0 total=21\n");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_postgres_databases_are_served_by_one_process_with_few_connections() -> Result<()> {
    let server = Postgres::shared(Version::V15).await;
    let mut urls = Vec::new();
    for n in 0..10 {
        urls.push((format!("p{n}"), server.fresh_database().await));
    }
    let env = stores(&urls, FILE_SINK)?;
    env.ok(&["migrate", "up"])?;
    let served = each_event_arrives_once(&env, &urls).await?;
    page(&served, "/metrics").await?;
    page(&served, "/readyz").await?;
    // The guide promises at most 3 connections for work and 2 for reads.
    const CONNECTED: &str =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    for (name, url) in &urls {
        let client = TestEnv::on(Kind::Postgres, url.clone())?.client().await?;
        let connected: i64 = client.query_one(CONNECTED, &[]).await?.get(0);
        ensure!((1..=5).contains(&connected), "{name} has {connected} connections");
    }
    served.terminate().await?;
    ensure!(arrived(&env)?.values().all(|times| *times == 1), "each once");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stores_that_are_away_delay_no_other_and_are_taken_up_when_they_come_back() -> Result<()> {
    let well = TestEnv::migrated(Kind::Sqlite).await?;
    let postgres = TestEnv::migrated(Kind::Postgres).await?;
    let proxy = FaultProxy::in_front_of(&postgres.url).await;
    proxy.refuse(true);
    let late = TestEnv::empty(Kind::Sqlite).await?;
    // It accepts connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").await?;
    let black_hole = format!("postgres://u:hunter2@{}/db", silent.local_addr()?);
    let refused = "postgres://u:hunter2@127.0.0.1:1/db";
    let proxied = proxy.url(&postgres.url);
    let urls = [
        ("well", &well.url),
        ("back", &proxied),
        ("late", &late.url),
        ("silent", &black_hole),
        ("refused", &refused.to_owned()),
    ];
    let env = stores(&urls.map(|(name, url)| (name.to_owned(), url.clone())), FILE_SINK)?;
    insert(&well.url, 0..10).await?;
    insert(&postgres.url, 10..20).await?;

    let served = env.serve().await?;
    until("the well one's", async || Ok((arrived(&env)?.len() == 10).then_some(()))).await?;
    for store in ["back", "late", "silent", "refused"] {
        served.logged(&format!("\"store\":\"{store}\""), 1).await?;
    }
    let asked = Instant::now();
    let ready = page(&served, "/readyz").await?;
    // Probes give up after a second.
    ensure!(asked.elapsed().as_secs() < 1, "{:?}", asked.elapsed());
    ensure!(ready.starts_with("HTTP/1.1 200") && ready.contains("ready, but not everything works:"), "{ready}");
    for store in ["back", "late", "silent", "refused"] {
        ensure!(ready.contains(&format!("\n{store}: store: ")), "{store} is not in\n{ready}");
    }
    ensure!(!ready.contains("well"), "{ready}");
    let metrics = page(&served, "/metrics").await?;
    ensure!(metrics.contains("postbox_store_up{store=\"well\"} 1\n"), "{metrics}");
    ensure!(metrics.contains("postbox_store_up{store=\"silent\"} 0\n"), "{metrics}");

    // They return, one of them because it is migrated.
    proxy.refuse(false);
    until("those of the one that is back", async || Ok((arrived(&env)?.len() == 20).then_some(()))).await?;
    env.ok(&["migrate", "up", "--store", "late"])?;
    insert(&late.url, 20..30).await?;
    until("those of the late one", async || Ok((arrived(&env)?.len() == 30).then_some(()))).await?;
    // One goes down while the service runs.
    proxy.refuse(true);
    proxy.reset();
    insert(&well.url, 30..40).await?;
    insert(&postgres.url, 40..50).await?;
    until("the well one's again", async || Ok((arrived(&env)?.len() == 40).then_some(()))).await?;
    proxy.refuse(false);
    until("all", async || Ok((arrived(&env)?.len() == 50).then_some(()))).await?;
    ensure!(arrived(&env)?.values().all(|times| *times == 1), "each once");

    // One stops answering while the service runs. No page waits for it.
    proxy.swallow(&Direction::BOTH);
    until("the silence", async || {
        let asked = Instant::now();
        let ready = page(&served, "/readyz").await?;
        ensure!(asked.elapsed().as_secs() < 1, "{:?}", asked.elapsed());
        Ok((ready.starts_with("HTTP/1.1 200") && ready.contains("\nback: store: no answer")).then_some(()))
    })
    .await?;
    proxy.heal();
    proxy.reset();

    // With two stores away, the stop is as quick as with none away.
    let log = served.terminate().await?;
    // No output contains a password.
    let shown = log.concat()
        + &ready
        + &metrics
        + &String::from_utf8(env.output(&["doctor"])?.stdout)?
        + &env.refuses(1, &["stats"])?
        + &String::from_utf8(env.output(&["check-config", "--connect"])?.stderr)?;
    ensure!(shown.contains("silent") && shown.contains("refused") && !shown.contains("hunter2"), "{shown}");
    Ok(())
}

#[tokio::test]
async fn commands_go_over_all_stores_or_ask_for_one() -> Result<()> {
    let (env, urls) = sqlite(2, &format!("{FILE_SINK}[subscriptions.other]\nstores = [\"s1\"]\n"))?;
    for (at, (_, url)) in urls.iter().enumerate() {
        insert(url, [at as i64]).await?;
    }
    ensure!(env.dispatch(&[])? == "dispatched=2 failed=0 dead=0");
    ensure!(arrived(&env)?.len() == 2);
    // JSON and tables name the store.
    let stats = env.json(&["stats", "--json"])?;
    let of: Vec<_> = stats.as_array().context("a list")?.iter().map(|it| (&it["store"], &it["subscription"])).collect();
    let expected = [("s0", "out"), ("s1", "other"), ("s1", "out")];
    ensure!(of.len() == 3 && expected.iter().all(|it| of.iter().any(|of| *of.0 == it.0 && *of.1 == it.1)), "{of:?}");
    ensure!(env.ok(&["stats", "--subscription", "other"])? == "pending=1 dispatched=0 dead=0 total=1\n");
    let listed = env.ok(&["list", "--state", "dispatched"])?;
    let cells: Vec<Vec<&str>> = listed.lines().map(|line| line.split('\t').collect()).collect();
    ensure!(cells[0][..2] == ["store", "id"] && cells[1][0] == "s0" && cells[2][0] == "s1", "{listed}");
    let id = cells[2][1];
    ensure!(env.ok(&["list", "--state", "dispatched", "--store", "s1"])?.lines().count() == 2);
    let subscriptions = env.ok(&["subscription", "list"])?;
    ensure!(
        subscriptions.starts_with("store\tsubscription\t") && subscriptions.lines().count() == 4,
        "{subscriptions}"
    );
    let doctor = String::from_utf8(env.output(&["doctor"])?.stdout)?;
    ensure!(doctor.contains("s0: ") && doctor.contains("s1: other: "), "{doctor}");
    env.ok(&["pause", "out", "--store", "s1"])?;
    let doctor = String::from_utf8(env.output(&["doctor"])?.stdout)?;
    ensure!(doctor.contains("-> postbox resume out --store s1"), "{doctor}");
    env.ok(&["resume", "out", "--store", "s1"])?;
    ensure!(env.ok(&["migrate", "validate"])? == "s0: the schema is valid\ns1: the schema is valid\n");
    let connected = env.ok(&["check-config", "--connect"])?;
    for line in ["2 store(s), 2 subscription(s)", "-> other -> none (only s1)", "/s1.db is reached"] {
        ensure!(connected.contains(line), "{line} is not in {connected}");
    }
    // Commands about one event or one store require `--store`.
    for args in [
        &["show", id][..],
        &["retry", id],
        &["discard", id],
        &["replay", id],
        &["send", "order.placed", "{}"],
        &["pause", "out"],
        &["migrate", "down", "--yes"],
        &["prune", "--older-than", "7d"],
    ] {
        let said = env.refuses(2, args)?;
        ensure!(said.contains("one of several stores; name it: --store s0|s1"), "{args:?}: {said}");
    }
    ensure!(env.ok(&["show", id, "--store", "s1"])?.contains("order.placed"));
    let said = env.refuses(2, &["dispatch", "--limit", "1"])?;
    ensure!(said.contains("name one: --store NAME"), "{said}");
    let said = env.refuses(2, &["stats", "--store", "nowhere"])?;
    ensure!(said.contains("\"nowhere\" is none of their names; known are s0|s1"), "{said}");
    let said = env.refuses(2, &["stats", "--store", "postgres://u:hunter2@h/db"])?;
    ensure!(said.contains("known are s0|s1") && !said.contains("hunter2"), "{said}");
    // Only the figures of a missing store are missing, and no sum is printed without them.
    std::fs::remove_file(urls[0].1.trim_start_matches("sqlite:"))?;
    let output = env.output(&["list", "--state", "dispatched"])?;
    let (shown, said) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(output.status.code() == Some(1) && shown.contains(id) && said.contains("postbox: s0: "), "{shown}{said}");
    let said = env.refuses(1, &["stats"])?;
    ensure!(said.contains("postbox: s0: ") && !said.contains("s1: "), "{said}");
    Ok(())
}

#[tokio::test]
async fn a_webhook_comes_into_the_store_of_its_path() -> Result<()> {
    let inbox = "[subscriptions.out]\nlog = \"inbox\"\nsink = { type = \"file\", path = \"out.jsonl\" }\n";
    let (env, urls) = sqlite(2, &format!("{inbox}{}", partner()))?;
    std::fs::remove_file(urls[1].1.trim_start_matches("sqlite:"))?;
    let served = env.serve().await?;
    let mut sender = Sender::connect(&served.address).await?;
    let body = r#"{"type":"invoice.paid","n":7}"#;
    // Each store is taken up when it is reachable, independently of the start.
    until("the first store", async || Ok((sender.send_to("s0/partner", "msg_1", body).await? == 202).then_some(())))
        .await?;
    ensure!(sender.send_to("s0/partner", "msg_1", body).await? == 200, "a repetition");
    // The store is away: the sender is asked to repeat.
    ensure!(sender.send_to("s1/partner", "msg_1", body).await? == 503);
    ensure!(sender.send_to("partner", "msg_1", body).await? == 404, "no store is named");
    for path in ["/in/partner", "/in/nowhere/partner"] {
        let answer = page(&served, path).await?;
        ensure!(answer.starts_with("HTTP/1.1 404") && answer.ends_with("\r\n\r\nsource_unknown"), "{answer}");
    }
    env.ok(&["migrate", "up", "--store", "s1"])?;
    until("the second store", async || Ok((sender.send_to("s1/partner", "msg_1", body).await? == 202).then_some(())))
        .await?;
    until("both", async || Ok((env.lines("out.jsonl")?.len() == 2).then_some(()))).await?;
    let metrics = page(&served, "/metrics").await?;
    let series = "postbox_received_total{store=\"s1\",source=\"partner\",result=\"accepted\"} 1\n";
    ensure!(metrics.contains(series), "{metrics}");
    served.terminate().await?;
    Ok(())
}

/// Requests that wait for a store without an answer hold connections. More of them arrive than
/// there are connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_hangs_leaves_connections_to_the_others_and_to_probes() -> Result<()> {
    let server = Postgres::shared(Version::V15).await;
    let url = server.fresh_database().await;
    let proxy = FaultProxy::in_front_of(&url).await;
    let well = TestEnv::migrated(Kind::Sqlite).await?;
    let urls = [("hung".to_owned(), proxy.url(&url)), ("well".to_owned(), well.url.clone())];
    let env = stores(&urls, &format!("{}{}", partner(), partner().replace("sources.partner", "sources.second")))?;
    let file = env.path("postbox.toml");
    std::fs::write(&file, std::fs::read_to_string(&file)?.replace("listen =", "connections = 12\nlisten ="))?;
    env.ok(&["migrate", "up"])?;
    let served = env.serve().await?;
    let body = r#"{"type":"invoice.paid"}"#;
    for store in ["hung", "well"] {
        let mut sender = Sender::connect(&served.address).await?;
        let taken =
            async || Ok((sender.send_to(&format!("{store}/partner"), "msg_0", body).await? == 202).then_some(()));
        until("it is taken up", taken).await?;
    }
    proxy.swallow(&Direction::BOTH);
    let mut waiting = tokio::task::JoinSet::new();
    for n in 0..30 {
        let (address, source) = (served.address.clone(), if n % 2 == 0 { "hung/partner" } else { "hung/second" });
        waiting.spawn(async move {
            let mut sender = Sender::connect(&address).await?;
            sender.send_to(source, &format!("msg_{n}"), body).await
        });
    }
    // Most are refused at once; the others wait for the store.
    for _ in 0..20 {
        if let Some(Ok(Ok(status))) = waiting.join_next().await {
            ensure!(status == 503, "{status}");
        }
    }
    let begun = Instant::now();
    let mut sender = Sender::connect(&served.address).await?;
    ensure!(sender.send_to("well/partner", "msg_1", body).await? == 202);
    ensure!(page(&served, "/healthz").await?.starts_with("HTTP/1.1 200"));
    ensure!(begun.elapsed().as_secs() < 3, "{:?}", begun.elapsed());
    ensure!(!waiting.is_empty(), "some still wait");
    proxy.heal();
    served.kill().await?;
    Ok(())
}
