//! `/metrics`, and the alerts and the dashboard of `docs/monitoring`, read by a real Prometheus.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postbox_testkit::servers::{PrivatePrometheus, promtool};
use serde_json::Value;

use crate::endpoint::Endpoint;
use crate::env::{Kind, TestEnv, get, until};
use crate::sender::partner;

fn monitoring() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/monitoring")
}

#[test]
fn each_alert_fires_for_its_cause_and_for_no_other() -> Result<()> {
    promtool(&monitoring(), &["check", "rules", "alerts.yml"])?;
    promtool(&monitoring(), &["test", "rules", "alerts.test.yml"])?;
    Ok(())
}

/// Queries this server's API.
async fn asked(server: &PrivatePrometheus, path: &str) -> Result<Value> {
    let answer = get(&format!("127.0.0.1:{}", server.port()), path, "").await?;
    let body = answer.split_once("\r\n\r\n").context("an answer")?.1;
    let json = body.get(body.find('{').context("JSON")?..=body.rfind('}').context("JSON")?).context("JSON")?;
    Ok(serde_json::from_str(json)?)
}

/// The values that a query returns, by the value of a label.
async fn values(server: &PrivatePrometheus, query: &str, label: &str) -> Result<Vec<(String, String)>> {
    let answer = asked(server, &format!("/api/v1/query?query={query}")).await?;
    let series = answer["data"]["result"].as_array().with_context(|| answer.to_string())?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Ok(series.iter().map(|it| (text(&it["metric"][label]), text(&it["value"][1]))).collect())
}

/// The queries of the dashboard, for every store and subscription.
fn of_dashboard() -> Result<Vec<String>> {
    let text = std::fs::read_to_string(monitoring().join("dashboard.json"))?;
    let dashboard: Value = serde_json::from_str(&text)?;
    let panels = dashboard["panels"].as_array().context("panels")?;
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let queries: Vec<&str> = targets.filter_map(|target| target["expr"].as_str()).collect();
    ensure!(queries.len() == text.matches("\"expr\":").count(), "some are elsewhere: {queries:?}");
    let filled =
        |query: &str| query.replace("$store", ".*").replace("$subscription", ".*").replace("$__rate_interval", "1m");
    Ok(queries.into_iter().map(filled).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prometheus_reads_every_series_and_evaluates_the_alerts() -> Result<()> {
    let target = Endpoint::start(|key| (if key == "2" { 422 } else { 200 }, Duration::from_millis(30)))?;
    let env = TestEnv::with(Kind::Sqlite, &(target.subscription("out") + &partner())).await?;
    env.insert_three().await?;
    // Nobody reads it.
    env.sql("INSERT INTO postbox_inbox (topic, payload) VALUES ('invoice.paid', '{}')").await?;
    let served = env.serve().await?;
    let server = PrivatePrometheus::launch(&served.address, &monitoring().join("alerts.yml")).await;
    let has = async |query: &str, label: &str, expected: (&str, &str)| {
        until(query, async || {
            let found = values(&server, query, label).await?;
            Ok(found.iter().any(|it| (it.0.as_str(), it.1.as_str()) == expected).then_some(()))
        })
        .await
    };
    has("postbox_delivered_total", "subscription", ("out", "2")).await?;
    has("postbox_events%7Bstate=%22dead%22%7D", "subscription", ("out", "1")).await?;
    has("postbox_failures_total", "code", ("http_422", "1")).await?;
    has("postbox_delivery_delay_seconds_count", "subscription", ("out", "2")).await?;
    has("postbox_call_duration_seconds_count", "subscription", ("out", "3")).await?;
    // Each call took at least 30 ms.
    has("postbox_call_duration_seconds_bucket%7Ble=%220.025%22%7D", "subscription", ("out", "0")).await?;
    has("postbox_in_flight", "subscription", ("out", "0")).await?;
    let targets = asked(&server, "/api/v1/targets").await?;
    let target = &targets["data"]["activeTargets"][0];
    ensure!(target["health"] == "up" && target["lastError"] == "", "{target}");
    // Types and help text come from the page; without valid OpenMetrics there would be neither.
    let metadata = asked(&server, "/api/v1/metadata").await?;
    ensure!(metadata["data"]["postbox_delivery_delay_seconds"][0]["type"] == "histogram", "{metadata}");
    ensure!(metadata["data"]["postbox_delivered"][0]["type"] == "counter", "{metadata}");
    for query in of_dashboard()? {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02x}")).collect();
        until(&query, async || {
            let answer = asked(&server, &format!("/api/v1/query?query={encoded}")).await?;
            ensure!(answer["status"] == "success", "{query}: {answer}");
            Ok(answer["data"]["result"].as_array().is_some_and(|series| !series.is_empty()).then_some(()))
        })
        .await?;
    }
    until("the rules", async || {
        let rules = asked(&server, "/api/v1/rules").await?;
        let rules = rules["data"]["groups"][0]["rules"].as_array().context("rules")?.clone();
        Ok((rules.len() == 11 && rules.iter().all(|rule| rule["health"] == "ok")).then_some(()))
    })
    .await?;
    served.terminate().await?;
    Ok(())
}
