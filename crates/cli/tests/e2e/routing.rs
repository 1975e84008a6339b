//! Unrouted events, filters that change, and events that are sent again.

use anyhow::{Context as _, Result, ensure};

use crate::endpoint::{Endpoint, takes_all};
use crate::env::{FILE_SINK, Kind, TestEnv, on_both, until};

fn wanting(topics: &str) -> String {
    format!("{FILE_SINK}topics = [\"{topics}\"]\n")
}

/// Dispatches until this many events are unrouted. On Postgres that waits for transactions of other
/// tests on the server.
async fn until_unrouted(env: &TestEnv, count: u64) -> Result<()> {
    let look = async || {
        env.dispatch(&[])?;
        Ok((env.json(&["stats", "--json"])?[0]["unrouted"] == count).then_some(()))
    };
    until("it is found", look).await
}

/// The remarks on standard error.
fn noted(env: &TestEnv, args: &[&str]) -> Result<String> {
    Ok(String::from_utf8(env.output(args)?.stderr)?)
}

/// A spelling mistake in the configuration: nothing is lost, and the cure is printed.
async fn a_slip_in_the_topics_loses_nothing(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, &wanting("orders.*")).await?;
    env.insert_three().await?;
    until_unrouted(&env, 3).await?;
    let said = noted(&env, &["stats"])?;
    ensure!(said.contains("no subscription wants 3 event(s) of the outbox"), "{said}");
    let said = env.said(&["doctor"])?;
    ensure!(said.contains("PROBLEM") && said.contains("mistyped for `order.*`"), "{said}");
    let listed = env.json(&["list", "--state", "unrouted", "--json"])?;
    let id = listed[0]["event"]["id"].as_str().context("no id")?;
    ensure!(env.ok(&["show", id])?.contains("out: unrouted"));
    ensure!(env.ok(&["prune", "--older-than", "0s"])? == "pruned=0\n");
    env.config(&wanting("order.*"))?;
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0", "the run that hands them over sends them");
    ensure!(env.lines("out.jsonl")?.len() == 3);
    ensure!(env.ok(&["show", id])?.contains("out: dispatched"));
    Ok(())
}

/// By kind, aggregate and headers: excluded events are reported, and delivered once the filter is
/// corrected.
async fn contents_decide_who_gets_an_event(kind: Kind) -> Result<()> {
    let narrow = "kinds = [\"integration\"]\naggregates = [\"order\"]\nheaders = { region = \"eu\" }\n";
    let env = TestEnv::with(kind, &(FILE_SINK.to_owned() + narrow)).await?;
    env.sql(
        r#"INSERT INTO OUTBOX (topic, kind, aggregate, headers, payload) VALUES
           ('order.paid', 'integration', 'order', '{"region": "eu", "x": "y"}', '{"n":1}'),
           ('order.paid', 'integration', 'order', '{"region": "us"}', '{"n":2}'),
           ('order.paid', 'integration', 'cart', '{"region": "eu"}', '{"n":3}'),
           ('order.paid', NULL, 'order', '{"region": "eu"}', '{"n":4}'),
           ('order.paid', 'integration', 'order', NULL, '{"n":5}')"#,
    )
    .await?;
    until_unrouted(&env, 4).await?;
    let sent = || -> Result<Vec<i64>> {
        Ok(env.lines("out.jsonl")?.iter().filter_map(|line| line["payload"]["n"].as_i64()).collect())
    };
    ensure!(sent()? == [1], "{:?}", sent()?);
    let said = env.said(&["doctor"])?;
    ensure!(said.contains("out wants these topics, but its filter excludes these events"), "{said}");
    let said = env.ok(&["check-config"])?;
    ensure!(said.contains("outbox [* kind=integration aggregate=order region=eu] -> out"), "{said}");
    let shown = env.ok(&["subscription", "show", "out"])?;
    ensure!(shown.contains("integration") && shown.contains("region=eu"), "{shown}");
    let listed = env.json(&["subscription", "list", "--json"])?;
    ensure!(listed[0]["kinds"][0] == "integration" && listed[0]["headers"]["region"] == "eu", "{listed}");
    env.config(&(FILE_SINK.to_owned() + "kinds = [\"domain\", \"integration\"]\naggregates = [\"order\"]\n"))?;
    ensure!(env.dispatch(&["--loop"])? == "dispatched=3 failed=0 dead=0");
    ensure!(env.json(&["stats", "--json"])?[0]["unrouted"] == 1);
    let mut all = sent()?;
    all.sort_unstable();
    ensure!(all == [1, 2, 4, 5], "{all:?}");
    Ok(())
}

/// Events that are handed over must not wait for another run.
async fn what_is_handed_over_goes_out_in_the_same_run(kind: Kind) -> Result<()> {
    for args in [&[][..], &["--loop"]] {
        let env = TestEnv::with(kind, &wanting("order.paid")).await?;
        env.insert_three().await?;
        until_unrouted(&env, 2).await?;
        // Reads another window, so that the cursor has passed them.
        env.insert([("order.paid", "3".to_owned(), 4)]).await?;
        ensure!(env.dispatch(&[])? == "dispatched=1 failed=0 dead=0");
        env.config(&wanting("order.*"))?;
        ensure!(env.dispatch(args)? == "dispatched=2 failed=0 dead=0", "{args:?}");
        ensure!(env.json(&["stats", "--json"])?[0]["pending"] == 0);
    }
    Ok(())
}

/// Nobody may have looked at the log yet, which takes minutes if it holds millions of events.
async fn a_dispatch_sends_before_it_looks_at_the_whole_log(kind: Kind) -> Result<()> {
    let target = Endpoint::start(takes_all)?;
    target.answer_only(0);
    let env = TestEnv::with(kind, &(target.subscription("out") + "topics = [\"order.*\"]\n")).await?;
    // As many as one step looks at, and some behind them that nobody wants.
    let events = (0..10_010).map(|n| (if n < 10_000 { "order.placed" } else { "other" }, n.to_string(), n));
    env.insert(events).await?;
    let mut child = env.spawn(&["dispatch", "--log-level", "off"])?;
    target.until("the first delivery", |arrivals| !arrivals.is_empty()).await?;
    ensure!(env.json(&["stats", "--json"])?[0]["unrouted"] == 0);
    Ok(child.kill().await?)
}

async fn what_nobody_wants_can_be_given_up(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, &wanting("billing.*")).await?;
    env.insert_three().await?;
    until_unrouted(&env, 3).await?;
    let said = env.said(&["doctor"])?;
    ensure!(said.contains("note") && said.contains("prune --unrouted"), "{said}");
    // Until one more window is read, the cursor is before the last of them.
    env.sql("INSERT INTO OUTBOX (topic, payload) VALUES ('billing.sent', '{}')").await?;
    ensure!(env.dispatch(&[])? == "dispatched=1 failed=0 dead=0");
    ensure!(env.ok(&["prune", "--older-than", "0s", "--unrouted"])?.starts_with("pruned="));
    ensure!(env.json(&["list", "--state", "unrouted", "--json"])?.as_array().is_some_and(Vec::is_empty));
    Ok(())
}

/// It belongs to the log, however many subscriptions read that.
async fn what_nobody_wants_is_listed_once(kind: Kind) -> Result<()> {
    let other = wanting("billing.*").replace("out", "other");
    let env = TestEnv::with(kind, &(wanting("billing.*") + &other)).await?;
    env.insert_three().await?;
    until_unrouted(&env, 3).await?;
    let listed = env.json(&["list", "--state", "unrouted", "--json"])?;
    let all = listed.as_array().context("a list")?;
    ensure!(all.len() == 3 && all.iter().all(|it| it["subscription"].is_null()), "{listed}");
    let rows = env.ok(&["list", "--state", "unrouted", "--limit", "2"])?;
    let whose: Vec<_> = rows.lines().skip(1).filter_map(|row| row.split('\t').nth(1)).collect();
    ensure!(whose == ["-", "-"], "{rows}");
    Ok(())
}

/// `start = "now"`: earlier events do not count as delivered, and can be replayed.
async fn what_was_skipped_is_named_and_sent_on_demand(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, &(FILE_SINK.to_owned() + "start = \"now\"\n")).await?;
    env.insert_three().await?;
    env.subscribe()?;
    ensure!(env.dispatch(&[])? == "dispatched=0 failed=0 dead=0");
    ensure!(env.ok(&["stats"])? == "pending=0 dispatched=0 dead=0 total=0\n", "{}", env.ok(&["stats"])?);
    let listed = env.json(&["list", "--state", "skipped", "--json"])?;
    let id = listed[0]["event"]["id"].as_str().context("no id")?;
    let said = noted(&env, &["retry", id])?;
    ensure!(said.contains("the subscription did not want it") && said.contains("postbox replay"), "{said}");
    ensure!(env.ok(&["replay", id])? == "replayed=1\n");
    ensure!(env.dispatch(&[])? == "dispatched=1 failed=0 dead=0");
    ensure!(env.ok(&["show", id])?.contains("out: dispatched"));
    Ok(())
}

async fn what_was_delivered_is_sent_again(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, FILE_SINK).await?;
    env.insert_three().await?;
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    ensure!(env.ok(&["replay", "--since", "1h", "--limit", "2"])? == "replayed=2\n");
    let listed = env.json(&["list", "--state", "retrying", "--json"])?;
    let shown = env.ok(&["show", listed[0]["event"]["id"].as_str().context("no id")?])?;
    ensure!(shown.contains(", sent again as -r"), "{shown}");
    let said = env.said(&["doctor"])?;
    ensure!(said.contains("2 retrying: to be sent again, not tried yet") && !said.contains("unknown"), "{said}");
    ensure!(env.dispatch(&[])? == "dispatched=2 failed=0 dead=0");
    ensure!(env.ok(&["replay", "--all", "--rate", "100/s"])? == "replayed=3\n");
    ensure!(env.ok(&["replay", "--all"])? == "replayed=0\n", "they are on their way");
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    ensure!(env.lines("out.jsonl")?.len() == 8);
    ensure!(env.ok(&["replay", "--topic", "nothing.*"])? == "replayed=0\n");
    ensure!(env.ok(&["replay", "--until", "1h"])? == "replayed=0\n");
    let never = "01890a5d-ac96-774b-bcce-b302099a8057";
    let complaint = env.refuses(1, &["replay", never])?;
    ensure!(complaint.contains(&format!("no log has an event {never}")), "{complaint}");
    Ok(())
}

async fn a_replay_is_for_one_subscription(kind: Kind) -> Result<()> {
    let env = TestEnv::with(kind, &(FILE_SINK.to_owned() + &FILE_SINK.replace("out", "other"))).await?;
    env.insert_three().await?;
    env.dispatch(&[])?;
    let complaint = env.refuses(2, &["replay", "--all"])?;
    ensure!(complaint.contains("--subscription") && complaint.contains("other, out"), "{complaint}");
    ensure!(env.ok(&["replay", "--all", "--subscription", "other"])? == "replayed=3\n");
    for wrong in [&["replay"][..], &["replay", "--since", "soon"], &["replay", "--all", "--rate", "fast"]] {
        env.refuses(2, wrong)?;
    }
    Ok(())
}

on_both!(
    a_slip_in_the_topics_loses_nothing,
    contents_decide_who_gets_an_event,
    what_is_handed_over_goes_out_in_the_same_run,
    a_dispatch_sends_before_it_looks_at_the_whole_log,
    what_nobody_wants_can_be_given_up,
    what_nobody_wants_is_listed_once,
    what_was_skipped_is_named_and_sent_on_demand,
    what_was_delivered_is_sent_again,
    a_replay_is_for_one_subscription,
);
