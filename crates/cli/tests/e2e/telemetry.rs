//! `[telemetry]`: spans to a collector, and to one that is down.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use postbox_testkit::collector::Collector;
use tokio::net::TcpListener;

use crate::endpoint::{Endpoint, Shut, takes_all};
use crate::env::{Kind, TestEnv, complaint};

fn telemetry(url: &str) -> String {
    format!("[telemetry]\notlp = \"{url}\"\nservice_name = \"postbox-eu\"\nheaders = {{ x-api-key = \"k\" }}\n")
}

#[tokio::test]
async fn a_stop_sends_the_last_spans() -> Result<()> {
    let (target, collector) = (Endpoint::start(takes_all)?, Collector::start().await);
    let env = TestEnv::with(Kind::Sqlite, &(target.subscription("out") + &telemetry(&collector.url()))).await?;
    env.insert_three().await?;
    let served = env.serve_with(&[("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=env,x-more=m")]).await?;
    target.until("all events", |arrivals| arrivals.len() == 3).await?;
    let log = served.terminate().await?.join("\n");
    // The process has ended: spans that are missing now are lost.
    let spans = collector.until("three spans", |spans| spans.len() >= 3).await;
    ensure!(spans.iter().all(|span| span.service == "postbox-eu" && span.name.starts_with("send ")), "{spans:?}");
    ensure!(spans.iter().all(|span| span.attributes["messaging.system"] == "http"), "{spans:?}");
    ensure!(spans.iter().all(|span| span.attributes["messaging.destination.subscription.name"] == "out"));
    // The file wins over the environment.
    let heads = collector.heads();
    ensure!(heads.iter().all(|head| head.contains("x-api-key: k\r\n") && head.contains("x-more: m\r\n")), "{heads:?}");
    ensure!(heads.iter().all(|head| head.matches("x-api-key").count() == 1), "{heads:?}");
    ensure!(!log.contains("send{") && !log.contains("spans_lost"), "spans are no log: {log}");
    Ok(())
}

#[tokio::test]
async fn a_collector_that_is_away_costs_a_line_and_nothing_else() -> Result<()> {
    let (target, away) = (Endpoint::start(takes_all)?, Shut::reserve()?);
    let url = away.url();
    let config = target.subscription("out") + &telemetry(url.trim_end_matches('/'));
    let env = TestEnv::with(Kind::Sqlite, &config).await?;
    env.insert_three().await?;
    let served = env.serve().await?;
    target.until("all events", |arrivals| arrivals.len() == 3).await?;
    served.logged("spans_lost", 1).await?;
    env.insert_three().await?;
    target.until("the next ones", |arrivals| arrivals.len() == 6).await?;
    let log = served.terminate().await?.join("\n");
    ensure!(log.matches("spans_lost").count() == 1, "one line a minute: {log}");
    Ok(())
}

/// The collector accepts connections and never answers.
#[tokio::test]
async fn a_collector_that_hangs_does_not_delay_a_stop_for_long() -> Result<()> {
    let (target, listener) = (Endpoint::start(takes_all)?, TcpListener::bind("127.0.0.1:0").await?);
    let url = format!("http://{}", listener.local_addr()?);
    let env = TestEnv::with(Kind::Sqlite, &(target.subscription("out") + &telemetry(&url))).await?;
    env.insert_three().await?;
    let served = env.serve().await?;
    target.until("all events", |arrivals| arrivals.len() == 3).await?;
    let begin = Instant::now();
    served.terminate().await?;
    // Two seconds for the spans; without that limit it would be five, and the retries.
    ensure!(begin.elapsed() < Duration::from_millis(4_500), "{:?}", begin.elapsed());
    Ok(())
}

#[tokio::test]
async fn what_is_wrong_with_it_is_said_before_anything_runs() -> Result<()> {
    for (text, cure) in [
        ("otlp = \"collector\"", "write https://host/path"),
        ("otlp = \"http://c:4318/v1/traces\"", "leave out /v1/traces"),
        ("sample_ratio = 10", "0 to 1 is allowed"),
        ("headers = { \"a b\" = \"c\" }", "is not a valid header name"),
    ] {
        let env = TestEnv::with(Kind::Sqlite, &format!("[telemetry]\n{text}\n")).await?;
        let output = env.output(&["check-config"])?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.code() == Some(2) && said.contains(cure), "{text}: {said}");
    }
    Ok(())
}

#[tokio::test]
async fn variables_of_opentelemetry_are_checked_before_anything_runs() -> Result<()> {
    let env = TestEnv::with(Kind::Sqlite, "").await?;
    for (url, ratio, cure) in [
        ("http://127.0.0.1:4318", "10", "OTEL_TRACES_SAMPLER_ARG: \"10\" is not a valid ratio"),
        ("http://u:hunter2@127.0.0.1:4318", "1", "OTEL_EXPORTER_OTLP_ENDPOINT: the url holds a user name or password"),
    ] {
        for args in [["check-config"], ["run"]] {
            let mut command = env.command(&args);
            command.env("OTEL_EXPORTER_OTLP_ENDPOINT", url).env("OTEL_TRACES_SAMPLER_ARG", ratio);
            let said = complaint(&command.output()?, 2, &args)?;
            ensure!(said.contains(cure) && !said.contains("hunter2"), "{args:?}: {said}");
        }
    }
    Ok(())
}
