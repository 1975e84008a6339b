//! Every error is one line with its cure, exits with 1 or 2, and changes nothing.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Context as _, Result, ensure};

use crate::endpoint::{Endpoint, Shut, takes_all};
use crate::env::{FILE_SINK, Kind, TestEnv, http_sink};

const STDOUT_SINK: &str = "[subscriptions.out]\nsink = { type = \"stdout\" }\n";

/// Each command exits with this code and one line that contains all of `said`; the store is
/// unchanged.
async fn refused<'a>(env: &TestEnv, code: i32, commands: &[impl AsRef<[&'a str]>], said: &[&str]) -> Result<()> {
    let before = env.snapshot().await?;
    for args in commands {
        one_line(&env.refuses(code, args.as_ref())?, said)?;
    }
    ensure!(env.snapshot().await? == before, "the store was changed");
    Ok(())
}

fn one_line(complaint: &str, said: &[&str]) -> Result<()> {
    ensure!(complaint.lines().count() == 1, "more than one line: {complaint}");
    for text in said {
        ensure!(complaint.contains(text), "{text:?} is not in {complaint}");
    }
    ensure!(!complaint.contains("hunter2"), "a password: {complaint}");
    ensure!(!complaint.contains("db error"), "a cause that says nothing: {complaint}");
    Ok(())
}

/// Commands with the store on the command line.
fn on_store(url: &str) -> Vec<Vec<&str>> {
    [&["stats"][..], &["migrate", "up"], &["run"]].map(|args| [args, &["--store", url]].concat()).into()
}

#[tokio::test]
async fn wrong_usage_ends_with_2() -> Result<()> {
    let env = TestEnv::migrated(Kind::Sqlite).await?;
    for args in [
        &["frobnicate"][..],
        &[],
        &["list", "--state", "lost"],
        &["list", "--state", "dead", "--limit", "0"],
        &["show", "not-an-id"],
        &["retry"],
        &["discard"],
        &["mark-dead"],
        &["prune"],
        &["prune", "--older-than", "soon"],
        &["pause", "no name"],
        &["dispatch", "--limit", "0"],
        // Nothing is configured.
        &["dispatch"],
        &["dispatch", "--loop"],
        &["stats", "--store", "mysql://h/db"],
        &["stats", "--subscription", "nobody"],
        &["dispatch", "--subscription", "nobody"],
        &["stats", "--config", "missing.toml"],
        &["stats", "--log-level", "=="],
        &["stats", "--log-level", "blah"],
        &["run", "--subscription", "out"],
        &["run", "--log", "outbox"],
        &["list", "--state", "dead", "--since", "1h", "--until", "2h"],
        &["replay", "--after", "5", "--through", "5"],
        &["demo", "--orders", "0"],
    ] {
        env.refuses(2, args)?;
    }
    Ok(())
}

#[tokio::test]
async fn every_fault_of_a_configuration_is_listed_at_its_line() -> Result<()> {
    let env = TestEnv::migrated(Kind::Sqlite).await?;
    std::fs::write(
        env.path("postbox.toml"),
        "[subscriptions.a]\nbatsh = 1\nsink = { type = \"http\", url = \"https://h/\", secret = \"env:NOT_THERE\" }\n[server]\nlisten = \"here\"\n",
    )?;
    let before = env.snapshot().await?;
    for args in [&["check-config"][..], &["run"], &["dispatch"]] {
        let complaint = env.refuses(2, args)?;
        let places: Vec<&str> =
            complaint.lines().filter_map(|line| line.strip_prefix("postbox: ")?.split(": ").next()).collect();
        ensure!(places == ["postbox.toml:2", "postbox.toml:3", "postbox.toml:5"], "{args:?}: {complaint}");
        ensure!(complaint.contains("did you mean `batch`?") && complaint.contains("NOT_THERE"), "{complaint}");
    }
    ensure!(env.snapshot().await? == before, "the store was changed");
    Ok(())
}

#[tokio::test]
async fn a_missing_secret_stops_who_delivers_and_not_who_looks() -> Result<()> {
    let http = "type = \"http\", url = \"https://h/\", secret = \"env:NOT_THERE\"";
    let url = "type = \"http\", url = \"env:NOT_THERE\"";
    for sink in [http, url, "type = \"bus\", url = \"env:NOT_THERE\""] {
        let env = TestEnv::with(Kind::Sqlite, &format!("[subscriptions.a]\nsink = {{ {sink} }}\n")).await?;
        let said = ["postbox.toml:", "export NOT_THERE="];
        refused(&env, 2, &[["run"], ["dispatch"], ["check-config"]], &said).await?;
        env.ok(&["stats"])?;
    }
    let env =
        TestEnv::with(Kind::Sqlite, "[subscriptions.a]\nsink = { type = \"http\", url = \"ftp://h/\" }\n").await?;
    refused(&env, 2, &[["run"], ["dispatch"], ["check-config"]], &["postbox.toml:4: "]).await?;
    for look in [&["stats"][..], &["list"], &["doctor"], &["subscription", "list"], &["migrate", "validate"]] {
        let note = String::from_utf8(env.output(look)?.stderr)?;
        ensure!(
            note.contains("postbox.toml:4: ") && note.contains("`postbox check-config` names all"),
            "{look:?}: {note}"
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_url_of_the_environment_is_called_and_not_logged() -> Result<()> {
    let env = TestEnv::with(Kind::Sqlite, FILE_SINK).await?;
    env.subscribe()?;
    env.insert_three().await?;
    env.config(&format!("[subscriptions.out]\n{}", http_sink("env:HOOK_URL")))?;
    let endpoint = Endpoint::start(takes_all)?;
    let mut dispatch = env.command(&["dispatch", "--log-level", "debug"]);
    let output = dispatch.env("HOOK_URL", format!("{}hunter2", endpoint.url())).output()?;
    let said = String::from_utf8([output.stdout, output.stderr].concat())?;
    // The endpoint has no such path.
    ensure!(said.contains("http_404") && !said.contains("hunter2"), "{said}");
    Ok(())
}

/// A sink with a fault is read as none.
#[tokio::test]
async fn the_doctor_names_the_faults_of_the_file_and_concludes_nothing_from_them() -> Result<()> {
    let env = TestEnv::with(Kind::Sqlite, FILE_SINK).await?;
    env.subscribe()?;
    env.insert_three().await?;
    env.config("[log]\nlevel = 3\n[subscriptions.out]\nsink = { type = \"https\" }\n")?;
    let output = env.output(&["doctor", "--json"])?;
    let (said, note) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(said.matches("\"configuration_fault\"").count() == 2 && !said.contains("sink_none"), "{said}");
    ensure!(said.contains("postbox.toml:4: ") && said.contains("postbox.toml:6: "), "{said}");
    ensure!(note.contains("the first at postbox.toml:4: "), "{note}");
    let env = TestEnv::migrated(Kind::Sqlite).await?;
    let looked = env.command(&["stats"]).env("DISPATCHER_URL", "ftp://h/").output()?;
    let note = String::from_utf8(looked.stderr)?;
    ensure!(looked.status.success() && note.contains("the first at environment:2: "), "{note}");
    Ok(())
}

#[tokio::test]
async fn a_log_level_is_checked_before_anything_runs() -> Result<()> {
    let env = TestEnv::with(Kind::Sqlite, "[log]\nlevel = \"info,postbox_engine\"\n").await?;
    let said = ["postbox.toml:4: ", "\"postbox_engine\" is not a log level"];
    refused(&env, 2, &[["check-config"], ["run"]], &said).await?;
    env.ok(&["stats"])?;
    let env = TestEnv::with(Kind::Sqlite, "[log]\nlevel = \"[[bad=info\"\n").await?;
    refused(&env, 2, &[["check-config"], ["run"], ["stats"]], &["\"[[bad=info\" is not a valid filter"]).await
}

#[tokio::test]
async fn a_store_without_schema_is_refused_and_not_changed() -> Result<()> {
    for kind in [Kind::Sqlite, Kind::Postgres] {
        let env = TestEnv::empty(kind).await?;
        env.config(STDOUT_SINK)?;
        let commands: [&[&str]; 6] = [
            &["run"],
            &["dispatch"],
            &["stats"],
            &["list", "--state", "dead"],
            &["tail"],
            &["prune", "--older-than", "1d"],
        ];
        refused(&env, 1, &commands, &["migrate up"]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_newer_schema_is_refused_and_not_changed() -> Result<()> {
    for kind in [Kind::Sqlite, Kind::Postgres] {
        let env = TestEnv::migrated(kind).await?;
        let migration = if kind == Kind::Sqlite { "postbox_migration" } else { "postbox.migration" };
        env.sql(&format!("INSERT INTO {migration} SELECT 9999, 'from_the_future', applied_at FROM {migration}"))
            .await?;
        env.config(STDOUT_SINK)?;
        let commands: [&[&str]; 17] = [
            &["run"],
            &["dispatch"],
            &["migrate", "up"],
            &["migrate", "down", "--yes"],
            &["migrate", "validate"],
            &["send", "order.paid", "{}"],
            &["retry", "--all"],
            &["discard", "--all"],
            &["mark-dead", "--all"],
            &["replay", "--all"],
            &["prune", "--older-than", "0s"],
            &["pause", "out"],
            &["resume", "out"],
            &["subscription", "rename", "out", "other"],
            &["subscription", "reset", "out", "--to", "beginning", "--yes"],
            &["subscription", "remove", "out", "--yes"],
            &["subscription", "lanes", "out", "2"],
        ];
        refused(&env, 1, &commands, &["use a newer postbox", "(schema_newer)"]).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_store_out_of_reach_is_reported_without_its_password() -> Result<()> {
    let env = TestEnv::empty(Kind::Sqlite).await?;
    let nobody = Shut::reserve()?;
    let url = nobody.url().replace("http://", "postgres://u:hunter2@") + "db";
    let commands: [&[&str]; 2] = [&["stats", "--store", &url], &["migrate", "up", "--store", &url]];
    let address = url.split_once('@').context("an address")?.1.trim_end_matches("/db").to_owned();
    let named = format!("(the database db at {address} as u)");
    refused(&env, 1, &commands, &["is it running, and is the store's URL right?", &named]).await
}

#[tokio::test]
async fn a_missing_database_or_user_is_reported() -> Result<()> {
    let env = TestEnv::empty(Kind::Postgres).await?;
    let (server, database) = env.url.rsplit_once('/').context("a URL with a database")?;
    let host = server.rsplit_once('@').context("a URL with a user")?.1;
    for (url, cure) in [
        (format!("{server}/no_such_database"), "create it first"),
        (format!("postgres://no_such_user:hunter2@{host}/{database}"), "correct the user or the password"),
    ] {
        refused(&env, 1, &on_store(&url), &[cure]).await?;
    }
    Ok(())
}

/// The procedure of `stores/sqlite/README.md`. Log and cursors are from one moment, so what was
/// pending then is delivered again. The files beside the database belong to the replaced one.
#[tokio::test]
async fn an_older_copy_of_a_sqlite_file_goes_on_from_its_moment() -> Result<()> {
    let env = TestEnv::with(Kind::Sqlite, FILE_SINK).await?;
    let insert = async |n| env.insert([("t", "k".to_owned(), n)]).await;
    insert(1).await?;
    ensure!(env.dispatch(&[])? == "dispatched=1 failed=0 dead=0");
    insert(2).await?;
    env.sql(&format!("VACUUM INTO '{}'", env.path("copy.db").display())).await?;
    insert(3).await?;
    // A killed process leaves the file without a checkpoint; an open reader has the same effect.
    let reader = rusqlite::Connection::open(env.path("postbox.db"))?;
    reader.query_row("SELECT count(*) FROM postbox_outbox", [], |row| row.get::<_, i64>(0))?;
    ensure!(env.dispatch(&[])? == "dispatched=2 failed=0 dead=0");
    ensure!(!std::fs::read(env.path("postbox.db-wal"))?.is_empty(), "nothing was left beside it");

    let [database, left, shared] = ["postbox.db", "postbox.db-wal", "postbox.db-shm"].map(|name| env.path(name));
    let crashed = [&database, &left, &shared].map(|path| std::fs::read(path).unwrap_or_default());
    drop(reader);
    for (path, content) in [&database, &left, &shared].into_iter().zip(crashed) {
        std::fs::write(path, content)?;
    }
    std::fs::remove_file(left)?;
    std::fs::remove_file(shared)?;
    std::fs::copy(env.path("copy.db"), database)?;

    env.ok(&["migrate", "validate"])?;
    ensure!(env.ok(&["stats"])? == "pending=1 dispatched=1 dead=0 total=2\n");
    insert(4).await?;
    ensure!(env.dispatch(&[])? == "dispatched=2 failed=0 dead=0");
    let lines = env.lines("out.jsonl")?;
    let numbers: Vec<i64> = lines.iter().filter_map(|line| line["payload"]["n"].as_i64()).collect();
    ensure!(numbers == [1, 2, 3, 2, 4], "{numbers:?}");
    ensure!(lines[1]["id"] == lines[3]["id"], "what goes out again has its id");
    Ok(())
}

#[tokio::test]
async fn a_port_in_use_is_reported_before_anything_is_sent() -> Result<()> {
    let env = TestEnv::migrated(Kind::Sqlite).await?;
    env.insert_three().await?;
    let holder = TcpListener::bind("127.0.0.1:0")?;
    env.config(&format!("{FILE_SINK}[server]\nlisten = \"{}\"\n", holder.local_addr()?))?;
    refused(&env, 1, &[["run", "--log-level", "error"]], &["is in use", "[server] listen"]).await?;
    ensure!(!env.path("out.jsonl").exists(), "the sink was opened");
    Ok(())
}

#[tokio::test]
async fn a_read_only_file_is_reported() -> Result<()> {
    let env = TestEnv::migrated(Kind::Sqlite).await?;
    env.insert_three().await?;
    env.config(FILE_SINK)?;
    let path = env.path("postbox.db");
    // Root may write to any file, but a database of a future format is read-only for everybody.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o444))?;
    let mut bytes_now = std::fs::read(&path)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644))?;
    bytes_now[18] = 3;
    std::fs::write(&path, &bytes_now)?;
    refused(&env, 1, &[["dispatch"], ["run"]], &["read-only", "writable"]).await
}

#[tokio::test]
async fn what_is_no_database_is_refused_and_not_changed() -> Result<()> {
    let env = TestEnv::empty(Kind::Sqlite).await?;
    let path = env.path("postbox.db");
    std::fs::write(&path, "this is a letter, not a database\n".repeat(100))?;
    refused(&env, 1, &[&["stats"][..], &["migrate", "up"], &["run"]], &[]).await
}
