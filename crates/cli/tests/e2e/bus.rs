//! The event bus over two databases: from an outbox into another store's inbox.

use anyhow::{Result, ensure};

use crate::env::{Kind, TestEnv, cases};

/// The configuration of a service that sends its outbox to another store.
fn to(other: &str) -> String {
    format!("[subscriptions.bus]\nsink = {{ type = \"bus\", url = {other:?}, source = \"orders\" }}\n")
}

const READER: &str = "[subscriptions.out]\nlog = \"inbox\"\nsink = { type = \"file\", path = \"out.jsonl\" }\n";

async fn arrives_once_and_in_order(here: Kind, there: Kind) -> Result<()> {
    let other = TestEnv::with(there, READER).await?;
    let env = TestEnv::with(here, &to(&other.url)).await?;
    env.insert_three().await?;
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    ensure!(other.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    // Another subscription with the same sender name sends everything again.
    env.config(&to(&other.url).replace("subscriptions.bus", "subscriptions.again"))?;
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    ensure!(other.dispatch(&[])? == "dispatched=0 failed=0 dead=0", "it is known there");
    let lines = other.lines("out.jsonl")?;
    let arrived: Vec<_> = lines.iter().map(|line| (&line["key"], &line["payload"]["n"])).collect();
    ensure!(arrived.len() == 3 && lines.iter().all(|line| line["source"] == "orders"), "{lines:?}");
    let of_key_1: Vec<_> = arrived.iter().filter(|(key, _)| **key == "1").map(|(_, n)| n.as_i64()).collect();
    ensure!(of_key_1 == [Some(1), Some(3)], "{arrived:?}");
    Ok(())
}

async fn a_store_without_a_schema_costs_nothing(here: Kind, there: Kind) -> Result<()> {
    let other = TestEnv::empty(there).await?;
    let env = TestEnv::with(here, &to(&other.url)).await?;
    env.insert_three().await?;
    let said = env.dispatch(&[])?;
    ensure!(said.starts_with("dispatched=0 ") && said.ends_with(" dead=0"), "{said}");
    ensure!(env.ok(&["stats"])?.contains("pending=3 "));
    other.ok(&["migrate", "up"])?;
    ensure!(env.dispatch(&[])? == "dispatched=3 failed=0 dead=0");
    Ok(())
}

cases! {
    postgres_to_postgres => arrives_once_and_in_order(Kind::Postgres, Kind::Postgres);
    postgres_to_sqlite => arrives_once_and_in_order(Kind::Postgres, Kind::Sqlite);
    sqlite_to_postgres => arrives_once_and_in_order(Kind::Sqlite, Kind::Postgres);
    a_postgres_without_a_schema => a_store_without_a_schema_costs_nothing(Kind::Sqlite, Kind::Postgres);
    an_sqlite_without_a_schema => a_store_without_a_schema_costs_nothing(Kind::Postgres, Kind::Sqlite);
}
