//! More events in one state than the doctor looks at: the first cause must not stand for all.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use jiff::Timestamp;

use crate::endpoint::{Endpoint, refuses_all, takes_all};
use crate::env::{Kind, TestEnv, on_both};

async fn a_later_cause_is_named_beside_the_first(kind: Kind) -> Result<()> {
    let endpoint = Endpoint::start(|key| (if key.starts_with("late") { 401 } else { 422 }, Duration::ZERO))?;
    let env = TestEnv::with(kind, &endpoint.subscription("out")).await?;
    let keys = (0..30).map(|n| format!("early-{n}")).chain((0..60).map(|n| format!("late-{n}")));
    env.insert(keys.map(|key| ("order.placed", key, 1))).await?;
    env.dispatch(&[])?;
    let said = env.said(&["doctor"])?;
    ensure!(said.contains("90 dead, 20 of the ") && said.contains(" looked at: http_422"), "{said}");
    ensure!(said.contains(" looked at: http_401") && said.contains("postbox retry --code http_401"), "{said}");
    Ok(())
}

/// It is neither among the first dead events nor among the last.
async fn the_dead_event_that_holds_a_key_is_found_among_many(kind: Kind) -> Result<()> {
    let endpoint = Endpoint::start(refuses_all)?;
    let config = endpoint.subscription("out") + "on_dead = \"halt\"\n";
    let env = TestEnv::with(kind, &config).await?;
    let keys = (0..53).map(|n| if (25..28).contains(&n) { "order-7".to_owned() } else { format!("k{n}") });
    env.insert(keys.map(|key| ("order.placed", key, 1))).await?;
    env.dispatch(&[])?;
    let said: serde_json::Value = serde_json::from_str(&env.said(&["doctor", "--json"])?)?;
    let halted = said.as_array().into_iter().flatten().find(|it| it["code"] == "halted");
    let halted = halted.with_context(|| format!("{said:#}"))?;
    let what = halted["message"].as_str().unwrap_or_default();
    ensure!(what.starts_with("2 blocked behind a dead event") && what.contains("key order-7 behind "), "{halted}");
    Ok(())
}

async fn the_next_of_many_scheduled_events_may_be_the_last(kind: Kind) -> Result<()> {
    let endpoint = Endpoint::start(takes_all)?;
    let env = TestEnv::with(kind, &endpoint.subscription("out")).await?;
    let row = |minutes: u64| {
        let at = Timestamp::now() + Duration::from_secs(60 * minutes);
        match kind {
            Kind::Sqlite => format!("('t', '{{}}', {})", at.as_microsecond()),
            Kind::Postgres => format!("('t', '{{}}', '{at}')"),
        }
    };
    let rows: Vec<String> = std::iter::repeat_n(120, 24).chain([30]).map(row).collect();
    env.sql(&format!("INSERT INTO OUTBOX (topic, payload, deliver_at) VALUES {}", rows.join(","))).await?;
    env.dispatch(&[])?;
    let said = env.said(&["doctor"])?;
    ensure!(said.contains("25 wait for their time; the next of the ") && !said.contains("in 1h"), "{said}");
    Ok(())
}

on_both!(
    a_later_cause_is_named_beside_the_first,
    the_dead_event_that_holds_a_key_is_found_among_many,
    the_next_of_many_scheduled_events_may_be_the_last,
);
