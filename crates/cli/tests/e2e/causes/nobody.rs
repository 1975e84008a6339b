//! Nothing delivers: no relay runs, none is configured to, or no subscription wants the events.

use std::time::Duration;

use anyhow::Result;

use super::{Planted, causes};
use crate::endpoint::{Endpoint, takes_all};
use crate::env::{FILE_SINK, Kind};

causes! {
    both never_run "problem" "never_run" "start `postbox run`";
    both a_log_that_nobody_reads "problem" "log_unread" "add [subscriptions.NAME]";
    both no_relay_runs "problem" "not_driven" "start `postbox run` with this subscription";
    both renamed_in_the_configuration "problem" "subscription_unconfigured" "postbox subscription rename out NEW";
    both removed_while_its_relay_runs "problem" "subscription_removed" "write its new name into the configuration";
    both no_sink "problem" "sink_none" "write sink = ";
    Sqlite a_sink_with_a_fault "problem" "configuration_fault" "postbox check-config";
    both a_schedule "note" "schedule_waits" "postbox dispatch --subscription out";
    both paused_by_a_person "problem" "paused" "postbox resume out";
    both an_endpoint_that_is_gone "problem" "endpoint_gone" "ask the operator of the destination";
    both a_slip_in_the_topics "problem" "topics_mistyped" "mistyped for `order.*`";
    both another_tenant "problem" "tenant_unwanted" "correct or remove its `tenant`";
    both a_topic_that_nobody_wants "note" "unrouted" "postbox prune --unrouted";
    both events_for_later "note" "scheduled" "postbox discard ID --subscription out";
    both rows_of_lanes_deleted "problem" "lanes_missing" "restart its relays";
    both another_log_in_the_configuration "problem" "log_differs" "another name for the inbox";
    both an_older_configuration_that_started_last "problem" "filter_differs" "give every replica the same";
    both relays_that_crash "problem" "relay_crashes" "postbox list --code relay_crashed";
}

async fn never_run(kind: Kind) -> Result<Planted> {
    Planted::new(kind, FILE_SINK).await?.three().await
}

async fn a_log_that_nobody_reads(kind: Kind) -> Result<Planted> {
    Planted::new(kind, "").await?.three().await
}

async fn no_relay_runs(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, FILE_SINK).await?;
    planted.env.subscribe()?;
    planted.three().await
}

async fn renamed_in_the_configuration(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, FILE_SINK.replace(".out]", ".renamed]")).await?;
    planted.env.config(FILE_SINK)?;
    planted.env.subscribe()?;
    planted.env.config(&planted.config)?;
    planted.three().await?.served().await
}

async fn removed_while_its_relay_runs(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, FILE_SINK).await?.served().await?;
    planted.served[0].logged("lane taken", 1).await?;
    planted.env.ok(&["subscription", "remove", "out", "--yes"])?;
    planted.three().await
}

async fn a_sink_with_a_fault(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, FILE_SINK).await?;
    planted.env.subscribe()?;
    planted.env.config("[subscriptions.out]\nsink = { type = \"https\" }\n")?;
    planted.three().await
}

async fn another_log_in_the_configuration(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, FILE_SINK).await?;
    planted.env.subscribe()?;
    planted.env.config(&format!("{FILE_SINK}log = \"inbox\"\n"))?;
    planted.three().await
}

async fn an_older_configuration_that_started_last(kind: Kind) -> Result<Planted> {
    let topics = |topics: &str| format!("{FILE_SINK}topics = [{topics}]\n");
    let planted = Planted::new(kind, topics("\"order.*\", \"bill.*\"")).await?;
    planted.env.config(&topics("\"order.*\""))?;
    planted.env.subscribe()?;
    planted.env.config(&planted.config)?;
    planted.three().await
}

async fn relays_that_crash(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, FILE_SINK).await?;
    planted.env.subscribe()?;
    let lane = if kind == Kind::Postgres { "postbox.lane" } else { "postbox_lane" };
    planted.env.sql(&format!("UPDATE {lane} SET crashes = 4")).await?;
    Ok(planted)
}

async fn no_sink(kind: Kind) -> Result<Planted> {
    Planted::new(kind, "[subscriptions.out]\nsink = { type = \"none\" }\n").await?.three().await?.served().await
}

async fn a_schedule(kind: Kind) -> Result<Planted> {
    Planted::new(kind, format!("{FILE_SINK}schedule = \"0 0 0 1 1 *\"\n")).await?.three().await?.served().await
}

async fn paused_by_a_person(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, FILE_SINK).await?.served().await?;
    planted.env.ok(&["pause", "out", "--why", "billing is migrating"])?;
    planted.three().await
}

async fn an_endpoint_that_is_gone(kind: Kind) -> Result<Planted> {
    let gone = Endpoint::start(|_| (410, Duration::ZERO))?;
    Ok(Planted::new(kind, gone.subscription("out")).await?.three().await?.served().await?.keeping(gone))
}

async fn a_slip_in_the_topics(kind: Kind) -> Result<Planted> {
    Planted::new(kind, format!("{FILE_SINK}topics = [\"orders.*\"]\n")).await?.three().await?.served().await
}

async fn another_tenant(kind: Kind) -> Result<Planted> {
    Planted::new(kind, format!("{FILE_SINK}tenant = \"acme\"\n")).await?.three().await?.served().await
}

async fn a_topic_that_nobody_wants(kind: Kind) -> Result<Planted> {
    Planted::new(kind, format!("{FILE_SINK}topics = [\"billing.*\"]\n")).await?.three().await?.served().await
}

async fn events_for_later(kind: Kind) -> Result<Planted> {
    let endpoint = Endpoint::start(takes_all)?;
    let planted = Planted::new(kind, endpoint.subscription("out")).await?;
    let at = if kind == Kind::Sqlite { "4070908800000000" } else { "'2099-01-01'" };
    planted.env.sql(&format!("INSERT INTO OUTBOX (topic, payload, deliver_at) VALUES ('t', '{{}}', {at})")).await?;
    Ok(planted.served().await?.keeping(endpoint))
}

async fn rows_of_lanes_deleted(kind: Kind) -> Result<Planted> {
    let planted = Planted::new(kind, FILE_SINK).await?;
    planted.env.subscribe()?;
    let table = if kind == Kind::Sqlite { "postbox_lane" } else { "postbox.lane" };
    planted.env.sql(&format!("DELETE FROM {table}")).await?;
    planted.three().await
}
