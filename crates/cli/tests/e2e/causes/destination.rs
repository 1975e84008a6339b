//! The destination is down, cannot be found, or refuses events.

use std::time::Duration;

use anyhow::Result;
use tokio::net::TcpListener;

use super::{Planted, causes};
use crate::endpoint::{Answer, Endpoint, Shut, takes_all};
use crate::env::{Kind, http_sink};

causes! {
    both nobody_listens "problem" "destination_down connect_refused" "is the destination up";
    both no_such_host "problem" "destination_down dns_failed" "correct the name, or the resolver";
    both https_to_a_plain_port "problem" "destination_down tls_failed" "does not speak TLS";
    both connections_are_closed "problem" "destination_down connection_lost" "closes connections without an answer";
    both a_gateway_without_its_service "problem" "destination_down http_503" "the service behind it does not";
    both too_many_requests "problem" "destination_down http_429" "set the subscription's `rate`";
    both a_broker_that_is_down "problem" "destination_down redis_connect_failed" "is the broker up";
    Sqlite a_full_disk "problem" "destination_down write_failed" "is its disk full?";
    both no_answer_in_time "problem" "destination_down timeout" "raise the subscription's `timeout`";
    both errors_for_everything "problem" "destination_down http_500" "fix the destination";
    both a_wrong_secret "problem" "dead http_401" "correct its secret";
    both a_wrong_path "problem" "dead http_404" "correct the path in the sink's url";
    both a_moved_endpoint "problem" "dead http_redirect" "write its final address into the sink's url";
    both one_event_too_large "problem" "dead http_413" "raise its limit, or send less";
    both one_event_refused "problem" "dead http_422" "fix the program that appends it";
    both one_event_that_fails "note" "retrying http_500" "";
    both a_key_that_waits_for_a_person "problem" "halted http_422" "once its cause is fixed: postbox retry ";
    both dead_letters_go_nowhere "problem" "dead_to_down connect_refused" "fix that sink";
}

/// An endpoint with this answer, and a service that sends it three events.
async fn answering(kind: Kind, answer: Answer, settings: &str) -> Result<Planted> {
    let endpoint = Endpoint::start(answer)?;
    let planted = Planted::new(kind, endpoint.subscription("out") + settings).await?;
    Ok(planted.three().await?.served().await?.keeping(endpoint))
}

async fn sending_to(kind: Kind, sink: String) -> Result<Planted> {
    Planted::new(kind, format!("[subscriptions.out]\n{sink}\n")).await?.three().await?.served().await
}

async fn nobody_listens(kind: Kind) -> Result<Planted> {
    let shut = Shut::reserve()?;
    Ok(sending_to(kind, http_sink(&shut.url())).await?.keeping(shut))
}

async fn no_such_host(kind: Kind) -> Result<Planted> {
    sending_to(kind, http_sink("http://no-such-host.invalid/")).await
}

async fn https_to_a_plain_port(kind: Kind) -> Result<Planted> {
    let endpoint = Endpoint::start(takes_all)?;
    let sink = http_sink(&endpoint.url().replace("http://", "https://"));
    Ok(sending_to(kind, sink).await?.keeping(endpoint))
}

async fn connections_are_closed(kind: Kind) -> Result<Planted> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/", listener.local_addr()?);
    tokio::spawn(async move { while listener.accept().await.is_ok() {} });
    sending_to(kind, http_sink(&url)).await
}

async fn a_gateway_without_its_service(kind: Kind) -> Result<Planted> {
    answering(kind, |_| (503, Duration::ZERO), "").await
}

async fn too_many_requests(kind: Kind) -> Result<Planted> {
    answering(kind, |_| (429, Duration::ZERO), "").await
}

async fn a_broker_that_is_down(kind: Kind) -> Result<Planted> {
    let shut = Shut::reserve()?;
    let url = shut.url().replace("http://", "redis://");
    Ok(sending_to(kind, format!("sink = {{ type = \"redis\", url = \"{}\" }}", url.trim_end_matches('/')))
        .await?
        .keeping(shut))
}

async fn a_full_disk(kind: Kind) -> Result<Planted> {
    sending_to(kind, "sink = { type = \"file\", path = \"/dev/full\" }".into()).await
}

/// The destination accepts the request and never answers.
async fn no_answer_in_time(kind: Kind) -> Result<Planted> {
    let endpoint = Endpoint::start(takes_all)?;
    endpoint.answer_only(0);
    let planted = Planted::new(kind, endpoint.subscription("out") + "timeout = \"200ms\"\n").await?;
    let keys = planted.arrived(5, |n| n.to_string()).await?;
    Ok(keys.served().await?.keeping(endpoint))
}

async fn errors_for_everything(kind: Kind) -> Result<Planted> {
    let endpoint = Endpoint::start(|_| (500, Duration::ZERO))?;
    let planted = Planted::new(kind, endpoint.subscription("out")).await?;
    Ok(planted.arrived(5, |n| n.to_string()).await?.served().await?.keeping(endpoint))
}

async fn a_wrong_secret(kind: Kind) -> Result<Planted> {
    answering(kind, |_| (401, Duration::ZERO), "").await
}

async fn a_wrong_path(kind: Kind) -> Result<Planted> {
    answering(kind, |_| (404, Duration::ZERO), "").await
}

async fn a_moved_endpoint(kind: Kind) -> Result<Planted> {
    answering(kind, |_| (308, Duration::ZERO), "").await
}

fn status_of_key_2(key: &str, status: u16) -> (u16, Duration) {
    (if key == "2" { status } else { 204 }, Duration::ZERO)
}

async fn one_event_too_large(kind: Kind) -> Result<Planted> {
    answering(kind, |key| status_of_key_2(key, 413), "").await
}

async fn one_event_refused(kind: Kind) -> Result<Planted> {
    answering(kind, |key| status_of_key_2(key, 422), "").await
}

async fn one_event_that_fails(kind: Kind) -> Result<Planted> {
    answering(kind, |key| status_of_key_2(key, 500), "").await
}

async fn a_key_that_waits_for_a_person(kind: Kind) -> Result<Planted> {
    let answer = |key: &str| (if key == "1" { 422 } else { 204 }, Duration::ZERO);
    answering(kind, answer, "on_dead = \"halt\"\n").await
}

async fn dead_letters_go_nowhere(kind: Kind) -> Result<Planted> {
    let shut = Shut::reserve()?;
    let dead_to = http_sink(&shut.url()).replace("sink =", "dead_to =");
    Ok(answering(kind, |_| (422, Duration::ZERO), &dead_to).await?.keeping(shut))
}
