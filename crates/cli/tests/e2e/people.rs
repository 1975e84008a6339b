//! What a person sees of one event, and what a script reads.

use anyhow::{Context as _, Result, ensure};
use postbox_testkit::proxy::{FaultProxy, Harm, Point};
use serde_json::Value;

use crate::endpoint::{Endpoint, refuses_all};
use crate::env::{FILE_SINK, Kind, TestEnv, on_both};

async fn an_expired_event_is_dead_and_never_sent(kind: Kind) -> Result<()> {
    let dead_to = "dead_to = { type = \"file\", path = \"dead.jsonl\" }\n";
    let env = TestEnv::with(kind, &(FILE_SINK.to_owned() + dead_to)).await?;
    let past = match kind {
        Kind::Postgres => "now() - interval '1 second'",
        Kind::Sqlite => "datetime('now', '-1 second')",
    };
    env.sql(&format!("INSERT INTO OUTBOX (topic, payload, expires_at) VALUES ('code.sent', '{{}}', {past})")).await?;
    let id = env.ok(&["send", "code.sent", r#"{"n":1}"#, "--expires-in", "1h"])?;
    ensure!(env.dispatch(&[])? == "dispatched=1 failed=0 dead=1");
    let dead = env.json(&["list", "--state", "dead", "--code", "expired", "--json"])?;
    ensure!(dead[0]["attempts"] == 0 && dead[0]["event"]["expires_at"].is_string(), "{dead}");
    // The error says when.
    let end = dead[0]["event"]["expires_at"].as_str().context("an end")?;
    ensure!(dead[0]["error"].as_str().is_some_and(|why| why.contains(end)), "{dead}");
    let letters = env.lines("dead.jsonl")?;
    ensure!(letters[0]["headers"]["postbox-dead-reason"].as_str().is_some_and(|why| why.contains(end)), "{letters:?}");
    let shown = env.ok(&["show", id.trim()])?;
    ensure!(shown.contains("expires at") && shown.contains("dispatched"), "{shown}");
    // A retry gives the same result.
    ensure!(env.ok(&["retry", "--all"])? == "retried=1\n");
    ensure!(env.dispatch(&[])? == "dispatched=0 failed=0 dead=1");
    let complaint = env.refuses(2, &["send", "t", "{}", "--expires-in", "9999999d"])?;
    ensure!(complaint.contains("9999"), "{complaint}");
    Ok(())
}

async fn show_has_the_last_attempts(kind: Kind) -> Result<()> {
    let endpoint = Endpoint::start(refuses_all)?;
    let env = TestEnv::with(kind, &endpoint.subscription("hooks")).await?;
    let id = env.ok(&["send", "order.paid", r#"{"n":1}"#])?;
    let id = id.trim();
    env.dispatch(&[])?;
    env.ok(&["retry", id])?;
    env.dispatch(&[])?;
    let shown = env.json(&["show", id, "--json"])?;
    let attempts = shown["deliveries"][0]["last_attempts"].as_array().context("attempts")?;
    ensure!(attempts.len() == 2, "{shown}");
    for attempt in attempts {
        let answer = attempt["answer"].as_str().context("an answer")?;
        ensure!(attempt["code"] == "http_422" && answer.contains("422") && attempt["next_at"].is_null(), "{shown}");
        ensure!(attempt["took_seconds"].as_f64().is_some_and(|took| took > 0.0), "{shown}");
        ensure!(attempt["at"].is_string(), "{shown}");
    }
    let text = env.ok(&["show", id])?;
    ensure!(text.lines().filter(|line| line.trim().starts_with("attempt")).count() == 2, "{text}");
    Ok(())
}

async fn every_command_with_a_result_speaks_json(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, FILE_SINK).await?;
    let sent = env.json(&["send", "order.paid", r#"{"n":1}"#, "--json"])?;
    let id = sent["id"].as_str().context("an id")?;
    ensure!(sent["appended"] == true && sent["log"] == "outbox", "{sent}");
    let again = env.json(&["send", "order.paid", r#"{"n":1}"#, "--id", id, "--json"])?;
    ensure!(again["appended"] == false && again["id"] == *id, "{again}");
    let expected: [(&[&str], &str, Value); 15] = [
        (&["--json", "dispatch"], "/dispatched", 1.into()),
        (&["replay", id, "--json"], "/replayed", 1.into()),
        (&["retry", id, "--dry-run", "--json"], "/dry_run", true.into()),
        (&["mark-dead", id, "--json"], "/marked_dead", 1.into()),
        (&["discard", id, "--json"], "/discarded", 1.into()),
        (&["prune", "--older-than", "0s", "--json"], "/dry_run", false.into()),
        (&["pause", "out", "--for", "1h", "--json"], "/paused", true.into()),
        (&["resume", "out", "--json"], "/paused", false.into()),
        (&["subscription", "lanes", "out", "1", "--json"], "/lanes", 1.into()),
        (&["subscription", "reset", "out", "--to", "now", "--yes", "--json"], "/again", 0.into()),
        (&["subscription", "rename", "out", "other", "--json"], "/subscription", "other".into()),
        (&["check-config", "--json"], "/subscriptions/0/subscription", "out".into()),
        (&["migrate", "validate", "--json"], "/0/right", true.into()),
        (&["migrate", "up", "--json"], "/0/applied", Value::Array(Vec::new())),
        (&["subscription", "remove", "other", "--yes", "--json"], "/removed", "other".into()),
    ];
    for (command, at, value) in expected {
        let said = env.json(command)?;
        ensure!(said.pointer(at) == Some(&value), "{command:?}: {said}");
    }
    ensure!(env.refuses(2, &["init", "--json"])?.contains("--json"));
    Ok(())
}

async fn a_list_is_narrowed_to_a_conversation(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, FILE_SINK).await?;
    for (topic, correlation, causation) in [("a", "9f8a", "x"), ("b", "other", "y"), ("c", "9f8a", "y")] {
        let headers = [format!("correlation-id={correlation}"), format!("causation-id={causation}")];
        env.ok(&["send", topic, "{}", "--header", &headers[0], "--header", &headers[1]])?;
    }
    env.dispatch(&[])?;
    for (narrowed, expected) in [
        (&["--correlation", "9f8a"][..], &["a", "c"][..]),
        (&["--causation", "y"], &["b", "c"]),
        (&["--correlation", "9f8a", "--causation", "y"], &["c"]),
    ] {
        let found = env.json(&[&["list", "--state", "dispatched", "--json"], narrowed].concat())?;
        let found_topics = found.as_array().context("a list")?.iter().map(|it| it["event"]["topic"].as_str());
        ensure!(found_topics.eq(expected.iter().copied().map(Some)), "{narrowed:?}: {found}");
        env.refuses(2, &[&["list", "--state", "conflict"], narrowed].concat())?;
    }
    Ok(())
}

async fn the_beginning_of_an_id_is_enough(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, FILE_SINK).await?;
    let [one, two] = ["01890000-0000-7000-8000-000000000001", "01890000-0000-7000-8000-000000000002"];
    let other = "01990000-0000-7000-8000-000000000003";
    for id in [one, two, other] {
        env.ok(&["send", "order.paid", "{}", "--id", id])?;
    }
    env.dispatch(&[])?;
    ensure!(env.ok(&["show", "01990000"])?.contains(other));
    let complaint = env.refuses(2, &["show", "01890000-0000"])?;
    ensure!(complaint.contains(one) && complaint.contains(two), "{complaint}");
    ensure!(env.refuses(2, &["show", "0199000"])?.contains("8 digits"));
    ensure!(env.refuses(1, &["show", "01aa0000"])?.contains("begins with 01aa0000"));
    ensure!(env.ok(&["replay", "01990000", two])? == "replayed=2\n");
    ensure!(env.ok(&["discard", "01990000-0000-7000-8"])? == "discarded=1\n");
    Ok(())
}

/// Why nothing was done to a named event, and which command would do it. If several are named,
/// nothing is said about the others.
async fn an_event_that_cannot_be_changed_so_is_explained(kind: Kind) -> Result<()> {
    let endpoint = Endpoint::start(refuses_all)?;
    let config = endpoint.subscription("hooks") + "topics = [\"dead\"]\n";
    let more = FILE_SINK.to_owned() + "topics = [\"out\", \"gone\"]\nlog = \"inbox\"\n";
    let env = TestEnv::with(kind, &(config + &more)).await?;
    let [dead, taken, unknown] = [1, 2, 3].map(|n| format!("01890000-0000-7000-8000-00000000000{n}"));
    for id in [&dead, &taken] {
        env.ok(&["send", "dead", "{}", "--id", id])?;
    }
    ensure!(env.dispatch(&[])? == "dispatched=0 failed=0 dead=2");
    ensure!(env.ok(&["discard", &taken, "--subscription", "hooks"])? == "discarded=1\n");
    let noted = |args: &[&str], count: &str| {
        let output = env.output(&[args, &["--subscription", "hooks"]].concat())?;
        let (said, why) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
        ensure!(output.status.success() && said.trim() == count, "{args:?}: {} {said} {why}", output.status);
        Ok(why)
    };
    let why = noted(&["replay", &dead], "replayed=0")?;
    ensure!(why.contains(&format!("{dead} is dead in hooks")) && why.contains("`postbox retry` sends it"), "{why}");
    for verb in ["replay", "retry", "discard"] {
        let why = noted(&[verb, &taken], &format!("{verb}ed=0").replace("retryed", "retried"))?;
        let reason = match verb {
            "discard" => "it was discarded already",
            _ => "discarded events are not sent again",
        };
        ensure!(why.contains(&format!("{taken} is discarded in hooks: {reason}")), "{why}");
    }
    // An event that does not exist is a failure, and the error says where it was looked for.
    for verb in ["replay", "retry", "discard"] {
        let complaint = env.refuses(1, &[verb, &unknown, "--subscription", "hooks"])?;
        ensure!(complaint.contains(&format!("the outbox has no event {unknown}")), "{complaint}");
        ensure!(complaint.contains("leave --subscription out"), "{complaint}");
    }
    let complaint = env.refuses(1, &["show", &dead, "--log", "inbox"])?;
    ensure!(complaint.contains(&format!("the inbox has no event {dead}")), "{complaint}");
    ensure!(complaint.contains("leave --log out"), "{complaint}");
    let complaint = env.refuses(1, &["show", "01890000", "--log", "inbox"])?;
    ensure!(complaint.contains("the inbox has no event whose id begins with 01890000"), "{complaint}");
    Ok(())
}

/// Two subscriptions with events of their own: the newest of all come first, in their states.
async fn a_list_without_a_state_has_the_newest_events(kind: Kind) -> Result<()> {
    let file = |name: &str, topic: &str| {
        format!(
            "[subscriptions.{name}]\ntopics = [\"{topic}\"]\nsink = {{ type = \"file\", path = \"{name}.jsonl\" }}\n"
        )
    };
    let env = TestEnv::with(kind, &(file("orders", "order.*") + &file("bills", "bill.*"))).await?;
    env.insert([("order.placed", "1".into(), 1), ("bill.sent", "1".into(), 2)]).await?;
    env.dispatch(&[])?;
    env.insert([("order.paid", "1".into(), 3)]).await?;
    let listed = |args: &[&str]| -> Result<Vec<String>> {
        let all = env.json(&[&["list", "--json"], args].concat())?;
        let line = |it: &Value| format!("{} {} {}", it["event"]["topic"], it["state"], it["subscription"]);
        Ok(all.as_array().context("a list")?.iter().map(|it| line(it).replace('"', "")).collect())
    };
    let (mut both, of_one) = (listed(&[])?, listed(&["--subscription", "orders"])?);
    ensure!(
        of_one == ["order.paid pending orders", "bill.sent skipped orders", "order.placed dispatched orders"],
        "{of_one:?}"
    );
    ensure!(listed(&["--subscription", "orders", "--limit", "2"])? == of_one[..2]);
    both[..2].sort();
    ensure!(both.len() == 6 && both[..2] == ["order.paid pending orders", "order.paid skipped bills"], "{both:?}");
    ensure!(listed(&["--limit", "1"])?.len() == 1);
    Ok(())
}

/// The server has committed, and its answer is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_send_without_an_answer_names_the_id_to_repeat_it_with() -> Result<()> {
    let direct = TestEnv::migrated(Kind::Postgres).await?;
    let proxy = FaultProxy::in_front_of(&direct.url).await;
    let env = TestEnv::on(Kind::Postgres, proxy.url(&direct.url))?;
    let lost = proxy.trap(Point::CommitOf("READ WRITE".to_owned()), Harm::LoseAnswer);
    let complaint = env.refuses(1, &["send", "order.paid", "{}"])?;
    ensure!(lost.is_sprung() && lost.answer().await.last().is_some_and(|tag| tag == "COMMIT"), "{lost:?}");
    let id = complaint.trim_end().rsplit_once("repeat with --id ").with_context(|| complaint.clone())?.1;
    let again = env.output(&["send", "order.paid", "{}", "--id", id])?;
    let said = String::from_utf8(again.stderr)?;
    ensure!(again.status.success() && said.contains("it was not appended again"), "{}: {said}", again.status);
    ensure!(again.stdout == format!("{id}\n").into_bytes());
    Ok(())
}

on_both! {
    an_expired_event_is_dead_and_never_sent,
    show_has_the_last_attempts,
    every_command_with_a_result_speaks_json,
    a_list_is_narrowed_to_a_conversation,
    a_list_without_a_state_has_the_newest_events,
    the_beginning_of_an_id_is_enough,
    an_event_that_cannot_be_changed_so_is_explained,
}
