//! From an outbox through an SQS queue into an inbox.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use aws_sdk_sqs::config::{BehaviorVersion, Credentials, Region};
use aws_sdk_sqs::types::QueueAttributeName;
use aws_sdk_sqs::{Client, Config};
use postbox_testkit::servers::PrivateSqs;

use crate::broker::duplicates;
use crate::env::{Kind, TestEnv, on_both, until};

const EVENTS: usize = 200;
const DUPLICATES: usize = 60;
/// Credentials that the AWS default chain finds first.
const ENVIRONMENT: [(&str, &str); 3] =
    [("AWS_ACCESS_KEY_ID", "AKIATEST"), ("AWS_SECRET_ACCESS_KEY", "secret"), ("AWS_REGION", "us-east-1")];

async fn queue(server: &PrivateSqs, name: &str) -> Result<(Client, String)> {
    let config = Config::builder()
        .behavior_version(BehaviorVersion::v2026_01_12())
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .region(Region::new("us-east-1"))
        .endpoint_url(server.url())
        .credentials_provider(Credentials::new("AKIATEST", "secret", None, None, "test"))
        .build();
    let client = Client::from_conf(config);
    client.create_queue().queue_name(name).send().await?;
    Ok((client, format!("{}/123456789012/{name}", server.url())))
}

async fn waiting(client: &Client, url: &str) -> Result<usize> {
    let request = client.get_queue_attributes().queue_url(url);
    let request = request.attribute_names(QueueAttributeName::ApproximateNumberOfMessages);
    let attributes = request.send().await?.attributes.context("attributes")?;
    Ok(attributes[&QueueAttributeName::ApproximateNumberOfMessages].parse()?)
}

/// Relay and receiver are killed on the way, and three of ten messages are sent twice: each event
/// is stored once. A queue knows nothing of the stores, so each side has another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_event_has_one_effect_at_the_other_end() -> Result<()> {
    let server = PrivateSqs::launch().await;
    let (client, url) = queue(&server, "orders").await?;
    let sender = TestEnv::with(
        Kind::Postgres,
        &format!(
            "[subscriptions.out]\nbatch = 100\nlease = \"2s\"\nsink = {{ type = \"sqs\", queue_url = {url:?} }}\n"
        ),
    )
    .await?;
    sender.insert((0..EVENTS).map(|n| ("order.paid", (n % 40).to_string(), n as i64))).await?;
    let relay = sender.serve_with(&ENVIRONMENT).await?;
    until("some are sent", async || Ok((waiting(&client, &url).await? > 50).then_some(()))).await?;
    relay.kill().await?;
    let relay = sender.serve_with(&ENVIRONMENT).await?;
    let all = format!("pending=0 dispatched={EVENTS} dead=0 total={EVENTS}\n");
    until("all are sent", async || Ok((sender.ok(&["stats"])? == all).then_some(()))).await?;
    relay.terminate().await?;

    // The producer's own repetitions, which the queue does not recognise any more.
    let (_, again) = queue(&server, "again").await?;
    let mut twice = 0;
    while twice < DUPLICATES {
        let request =
            client.receive_message().queue_url(&url).max_number_of_messages(10).message_attribute_names("All");
        let request = request.visibility_timeout(0);
        for message in request.send().await?.messages.unwrap_or_default() {
            let copy = client.send_message().queue_url(&again).set_message_attributes(message.message_attributes);
            copy.message_body(message.body.context("a body")?).send().await?;
            twice += 1;
        }
    }
    let source =
        |name: &str, url: &str| format!("[sources.{name}]\ntype = \"sqs\"\nqueue_url = {url:?}\nvisibility = \"2s\"\n");
    let receiver = TestEnv::with(
        Kind::Sqlite,
        &format!(
            "{}[subscriptions.apply]\nlog = \"inbox\"\nlease = \"2s\"\nsink = {{ type = \"file\", path = \"effects.jsonl\" }}\n",
            source("orders", &url)
        ),
    )
    .await?;
    let receiving = receiver.serve_with(&ENVIRONMENT).await?;
    until("some are applied", async || Ok((receiver.lines("effects.jsonl")?.len() > 20).then_some(()))).await?;
    receiving.kill().await?;
    let receiving = receiver.serve_with(&ENVIRONMENT).await?;
    until("all are applied", async || Ok((receiver.ok(&["stats", "--log", "inbox"])? == all).then_some(()))).await?;
    receiving.terminate().await?;
    // An applier that is killed repeats its batch, and a file does not deduplicate. A queue without
    // `.fifo` keeps no order.
    let lines = receiver.lines("effects.jsonl")?;
    let effects: BTreeSet<i64> = lines.iter().filter_map(|line| line["payload"]["n"].as_i64()).collect();
    ensure!(effects.into_iter().eq(0..EVENTS as i64), "each has its effect");
    ensure!(lines.iter().all(|line| line["key"].is_string()), "and its key");

    receiver.config(&source("orders", &again))?;
    let receiving = receiver.serve_with(&ENVIRONMENT).await?;
    let known = async || Ok((duplicates(&receiving).await? >= DUPLICATES).then_some(()));
    until("every repetition is known", known).await?;
    receiving.terminate().await?;
    let stats = receiver.ok(&["stats", "--log", "inbox"])?;
    ensure!(stats.contains(&format!("total={EVENTS}")), "each is stored once: {stats}");
    Ok(())
}

/// No file: only the store, the queue and the usual AWS variables.
async fn a_queue_s_url_is_enough_configuration(kind: Kind) -> Result<()> {
    let server = PrivateSqs::launch().await;
    let (client, url) = queue(&server, "orders").await?;
    let env = TestEnv::migrated(kind).await?;
    let with_queue = |args: &[&str]| {
        let mut command = env.command(args);
        command.envs(ENVIRONMENT).env("SQS_QUEUE_URL", &url).output()
    };
    env.insert_three().await?;
    let dispatched = with_queue(&["dispatch"])?;
    ensure!(dispatched.status.success(), "{dispatched:?}");
    ensure!(waiting(&client, &url).await? == 3, "{dispatched:?}");
    let wrong = env.command(&["dispatch"]).env("SQS_QUEUE_URL", "orders").output()?;
    let said = String::from_utf8(wrong.stderr)?;
    ensure!(wrong.status.code() == Some(2) && said.contains("https://sqs.REGION.amazonaws.com"), "{said}");
    Ok(())
}

on_both!(a_queue_s_url_is_enough_configuration);
