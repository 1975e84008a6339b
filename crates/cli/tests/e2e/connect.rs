//! `check-config --connect`: reports what can be reached, and writes nothing anywhere.

use anyhow::{Context as _, Result, ensure};

use crate::endpoint::{Endpoint, Shut, takes_all};
use crate::env::{FILE_SINK, Kind, TestEnv, http_sink, on_both};
use crate::sender::partner;

/// A subscription with this sink.
fn subscription(name: &str, sink: &str) -> String {
    format!("[subscriptions.{name}]\n{sink}\n")
}

async fn everything_is_reached_and_nothing_written(kind: Kind) -> Result<()> {
    let endpoint = Endpoint::start(takes_all)?;
    let env = TestEnv::migrated(kind).await?;
    std::fs::write(env.path("there.jsonl"), "a line\n")?;
    let dead_to = "dead_to = { type = \"file\", path = \"there.jsonl\" }";
    env.config(
        &[
            subscription("hooks", &format!("{}{dead_to}", http_sink(&endpoint.url()))),
            subscription("lines", "sink = { type = \"file\", path = \"out.jsonl\" }"),
            subscription("idle", ""),
            "[sources.partner]\ntype = \"webhook\"\nscheme = \"standard-webhooks\"\n\
             secret = \"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\"\n"
                .into(),
        ]
        .concat(),
    )?;
    env.insert_three().await?;
    let before = env.snapshot().await?;
    ensure!(!env.ok(&["check-config"])?.contains("reached"), "nothing is tried unless it is asked for");
    let said = env.ok(&["check-config", "--connect"])?;
    let store = match kind {
        Kind::Sqlite => format!("store: {} is reached, its schema is valid\n", env.path("postbox.db").display()),
        Kind::Postgres => "store: the database ".to_owned(),
    };
    for line in [
        store.as_str(),
        "subscriptions.hooks.sink: 127.0.0.1 is reached at",
        "subscriptions.hooks.dead_to: there.jsonl can be written",
        "subscriptions.lines.sink: out.jsonl does not exist yet; it is created at the start",
        "subscriptions.idle.sink: has no sink yet",
        "sources.partner: waits for senders at POST /in/partner",
    ] {
        ensure!(said.contains(line), "{line:?} is not in {said}");
    }
    ensure!(endpoint.count() == 0, "a request was sent");
    ensure!(env.snapshot().await? == before, "the store was changed");
    ensure!(!env.path("out.jsonl").exists(), "a file was made");
    ensure!(std::fs::read_to_string(env.path("there.jsonl"))? == "a line\n");
    Ok(())
}

/// Senders post to the path of a store.
#[tokio::test]
async fn a_webhook_of_two_stores_is_named_with_both_paths() -> Result<()> {
    let (env, other) = (TestEnv::migrated(Kind::Sqlite).await?, TestEnv::migrated(Kind::Sqlite).await?);
    let stores = format!("[stores.acme]\nurl = {:?}\n[stores.globex]\nurl = {:?}\n", env.url, other.url);
    std::fs::write(env.path("postbox.toml"), stores + &partner())?;
    let output = env.command(&["check-config", "--connect"]).env_remove("POSTBOX_STORE").output()?;
    let said = String::from_utf8([output.stdout, output.stderr].concat())?;
    ensure!(said.matches("sources.partner: ").count() == 2, "{said}");
    for store in ["acme", "globex"] {
        let line = format!("sources.partner: waits for senders at POST /in/{store}/partner\n");
        ensure!(said.contains(&line), "{line:?} is not in {said}");
    }
    Ok(())
}

async fn a_log_of_one_s_own_is_created_as_the_cure_says(kind: Kind) -> Result<()> {
    let env = TestEnv::migrated(kind).await?;
    env.config("[subscriptions.apply]\nlog = \"stripe\"\nsink = { type = \"file\", path = \"out.jsonl\" }\n")?;
    for command in [&["check-config", "--connect"][..], &["dispatch"]] {
        let refused = env.output(command)?;
        let said = String::from_utf8([refused.stdout, refused.stderr].concat())?;
        ensure!(!refused.status.success() && said.contains("create it: postbox migrate up --log stripe"), "{said}");
    }
    ensure!(env.ok(&["migrate", "up", "--log", "stripe"])?.contains("applied log stripe"));
    ensure!(env.ok(&["migrate", "up", "--log", "stripe"])?.contains("the schema is up to date"));
    env.ok(&["check-config", "--connect"])?;
    env.ok(&["send", "invoice.paid", "{}", "--log", "stripe"])?;
    ensure!(env.dispatch(&[])?.contains("dispatched=1"));
    Ok(())
}

async fn a_subscription_of_another_log_is_not_valid(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, FILE_SINK).await?;
    env.subscribe()?;
    env.config(&format!("{FILE_SINK}log = \"inbox\"\n"))?;
    let output = env.output(&["check-config", "--connect"])?;
    let said = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(1) && said.contains("(log_differs)"), "{said}");
    Ok(())
}

async fn what_cannot_be_reached_is_named_with_its_cure(kind: Kind) -> Result<()> {
    let env = TestEnv::empty(kind).await?;
    let (shut, endpoint) = (Shut::reserve()?, Endpoint::start(takes_all)?);
    env.config(
        &[
            subscription("shut", &http_sink(&shut.url())),
            subscription("nobody", &http_sink("env:HOOK_URL")),
            subscription("lines", "sink = { type = \"file\", path = \"no/folder/out.jsonl\" }"),
            subscription("hooks", &http_sink(&endpoint.url())),
        ]
        .concat(),
    )?;
    let mut check = env.command(&["check-config", "--connect"]);
    let output = check.env("HOOK_URL", "http://nobody.invalid/hunter2?token=hunter2").output()?;
    ensure!(output.status.code() == Some(1), "{}", output.status);
    let (said, complaint) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(said.contains("subscriptions.hooks.sink: 127.0.0.1 is reached"), "the others are tried too: {said}");
    let lines: Vec<&str> = complaint.lines().collect();
    ensure!(lines.len() == 4, "{complaint}");
    for [name, cure, code] in [
        ["store: ", "postbox migrate up", "(schema_missing)"],
        ["subscriptions.shut.sink: ", "nobody listens there; start it", "(connect_refused)"],
        ["subscriptions.nobody.sink: ", "nobody.invalid has no address", "(dns_failed)"],
        ["subscriptions.lines.sink: ", "correct the path", "(file_not_writable)"],
    ] {
        let said = |line: &&&str| line.strip_prefix("postbox: ").is_some_and(|line| line.starts_with(name));
        let line = lines.iter().find(said).with_context(|| format!("{name} is not in {complaint}"))?;
        ensure!(line.contains(cure) && line.ends_with(code), "{line}");
    }
    ensure!(!complaint.contains("hunter2"), "a token: {complaint}");
    ensure!(endpoint.count() == 0, "a request was sent");
    let mut check = env.command(&["check-config", "--connect", "--json"]);
    let output = check.env("HOOK_URL", "http://nobody.invalid/hunter2?token=hunter2").output()?;
    ensure!(output.status.code() == Some(1), "{}", output.status);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    ensure!(
        json["reached"][0]["name"] == "subscriptions.hooks.sink" && json["faults"] == serde_json::json!([]),
        "{json}"
    );
    let failed = json["failed"].as_array().context("a list")?;
    let shut = failed.iter().find(|it| it["name"] == "subscriptions.shut.sink").context("not in the JSON")?;
    ensure!(failed.len() == 4 && shut["code"] == "connect_refused", "{json}");
    ensure!(shut["error"].as_str().is_some_and(|text| text.contains("nobody listens there")), "{json}");
    Ok(())
}

#[tokio::test]
async fn a_broker_that_is_down_is_named_with_its_cure() -> Result<()> {
    let env = TestEnv::migrated(Kind::Sqlite).await?;
    let shut = Shut::reserve()?;
    let url = shut.url();
    let at = url.trim_start_matches("http://").trim_end_matches('/');
    let sink = |name: &str, keys: &str| subscription(name, &format!("sink = {{ type = {name:?}, {keys} }}"));
    let aws = "aws = { region = \"us-east-1\", access_key_id = \"someone\", secret_access_key = \"hunter2\" }";
    env.config(
        &[
            sink("redis", &format!("url = \"redis://{at}\", user = \"someone\", password = \"hunter2\"")),
            sink("sqs", &format!("queue_url = \"http://{at}/1/q\", {aws}")),
            sink("nats", &format!("url = \"nats://{at}\", subject = \"a.{{topic}}\"")),
            sink("kafka", &format!("brokers = \"{at}\", topic = \"orders\"")),
            format!("[sources.orders]\ntype = \"nats\"\nurl = \"nats://{at}\"\nstream = \"ORDERS\"\n"),
        ]
        .concat(),
    )?;
    let output = env.output(&["check-config", "--connect"])?;
    ensure!(output.status.code() == Some(1), "{}", output.status);
    let complaint = String::from_utf8(output.stderr)?;
    for [name, code] in [
        ["subscriptions.redis.sink: ", "(redis_connect_failed)"],
        ["subscriptions.sqs.sink: ", "(connect_refused)"],
        ["subscriptions.nats.sink: ", "(connect_refused)"],
        ["subscriptions.kafka.sink: ", "(kafka_connect_failed)"],
        ["sources.orders: ", "(connect_refused)"],
    ] {
        let line = complaint.lines().find(|line| line.contains(name)).with_context(|| complaint.clone())?;
        let cure = "is the server up, and can this machine reach its host and port?";
        ensure!(line.contains(at) && line.matches(cure).count() == 1 && line.ends_with(code), "{line}");
    }
    ensure!(!complaint.contains("hunter2") && !complaint.contains("someone"), "{complaint}");
    Ok(())
}

#[tokio::test]
async fn a_store_that_a_variable_chose_is_named_with_it() -> Result<()> {
    let (env, other) = (TestEnv::migrated(Kind::Sqlite).await?, TestEnv::migrated(Kind::Sqlite).await?);
    env.config("")?;
    let path = other.path("postbox.db");
    for (args, variable, said) in [
        (Vec::new(), &other.url, format!("store: {} (from POSTBOX_STORE) is reached", path.display())),
        (vec!["--store", other.url.as_str()], &env.url, format!("store: {} is reached", path.display())),
        (Vec::new(), &env.url, format!("store: {} is reached", env.path("postbox.db").display())),
    ] {
        let args = [vec!["check-config", "--connect"], args].concat();
        let output = env.command(&args).env("POSTBOX_STORE", variable).output()?;
        let printed = String::from_utf8(output.stdout)?;
        ensure!(output.status.success() && printed.contains(&said), "{said} is not in {printed}");
    }
    Ok(())
}

/// `--store` replaces the URL, so the variable that the file names may be missing.
#[tokio::test]
async fn a_chosen_store_needs_no_url_of_the_file_and_is_checked_first() -> Result<()> {
    let env = TestEnv::migrated(Kind::Sqlite).await?;
    std::fs::write(env.path("postbox.toml"), format!("[store]\nurl = \"env:NOT_THERE\"\n{FILE_SINK}"))?;
    for args in [&["stats"][..], &["check-config"], &["check-config", "--connect", "--store", &env.url]] {
        env.ok(args)?;
    }
    let unnamed = env.command(&["stats"]).env_remove("POSTBOX_STORE").output()?;
    let said = String::from_utf8(unnamed.stderr)?;
    ensure!(unnamed.status.code() == Some(2) && said.contains("needs the environment variable NOT_THERE"), "{said}");
    env.config("")?;
    for args in [&["check-config"][..], &["check-config", "--json"], &["run"]] {
        let junk = env.command(args).env("POSTBOX_STORE", "shop.db").output()?;
        let said = String::from_utf8(junk.stderr)?;
        ensure!(junk.status.code() == Some(2) && junk.stdout.is_empty(), "{args:?}: {said}");
        ensure!(said.contains("--store, or POSTBOX_STORE: no such kind of store"), "{args:?}: {said}");
    }
    // It is no fault of a line that names the variable.
    std::fs::write(env.path("postbox.toml"), "[store]\nurl = \"env:POSTBOX_STORE\"\n")?;
    for (args, variable) in [
        (&["stats"][..], "postgres://u@h/d?foo=bar"),
        (&["check-config"], "shop.db"),
        (&["stats", "--store", "shop.db"], env.url.as_str()),
    ] {
        let junk = env.command(args).env("POSTBOX_STORE", variable).output()?;
        let said = String::from_utf8(junk.stderr)?;
        ensure!(junk.status.code() == Some(2) && said.lines().count() == 1, "{args:?}: {said}");
        ensure!(said.starts_with("postbox: --store, or POSTBOX_STORE: "), "{args:?}: {said}");
    }
    Ok(())
}

#[tokio::test]
async fn a_file_that_is_wrong_is_not_tried() -> Result<()> {
    let env = TestEnv::migrated(Kind::Sqlite).await?;
    env.config("[subscriptions.a]\nbatsh = 1\n")?;
    ensure!(env.refuses(2, &["check-config", "--connect"])?.contains("batsh"));
    let output = env.output(&["check-config", "--connect", "--json"])?;
    ensure!(output.status.code() == Some(2), "{}", output.status);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let text = json["faults"][0]["text"].as_str().context("a text")?;
    ensure!(json["faults"][0]["line"] == 4 && text.contains("did you mean `batch`?"), "{json}");
    Ok(())
}

on_both!(
    everything_is_reached_and_nothing_written,
    a_log_of_one_s_own_is_created_as_the_cure_says,
    a_subscription_of_another_log_is_not_valid,
    what_cannot_be_reached_is_named_with_its_cure
);
