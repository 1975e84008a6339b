//! Many senders with many repetitions, and a service that is killed repeatedly: every message has
//! one effect.
//!
//! `POSTBOX_TEST_DELIVERIES=1000000` runs the long version, `POSTBOX_TEST_SEED=…` repeats one run.

#![allow(clippy::print_stderr, reason = "a test that prints its seed and its counts")]

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use axum::Router;
use axum::body::Bytes;
use axum::http::HeaderMap;
use axum::routing::post;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::env::{DEADLINE, Kind, Served, TestEnv, http_sink, on_both};
use crate::sender::{Sender, partner};

const SENDERS: usize = 16;
/// Percentage of deliveries that repeat an earlier one.
const REPEATED_PERCENT: u32 = 30;
/// A repetition within this distance is mostly sent while the first delivery is still in flight.
const CLOSE: usize = 24;

fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// What an application that deduplicates by our event id has done.
#[derive(Default)]
struct Effects {
    /// The number in the body, by event id.
    done: HashMap<String, usize>,
    /// Deliveries of an event whose effect was already there.
    repeated: usize,
}

async fn application() -> Result<(String, Arc<Mutex<Effects>>, watch::Receiver<usize>)> {
    let effects = Arc::new(Mutex::new(Effects::default()));
    let (note, done) = watch::channel(0);
    let doing = Arc::clone(&effects);
    let handler = async move |headers: HeaderMap, body: Bytes| {
        let id = headers.get("ce-id").and_then(|id| id.to_str().ok()).unwrap_or("none").to_owned();
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
        let n = body["n"].as_u64().map_or(usize::MAX, |n| n as usize);
        let mut effects = doing.lock().expect("no panic while it is held");
        if effects.done.insert(id, n).is_some() {
            effects.repeated += 1;
        }
        note.send_replace(effects.done.len());
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/", listener.local_addr()?);
    tokio::spawn(axum::serve(listener, Router::new().route("/", post(handler))).into_future());
    Ok((url, effects, done))
}

/// Which message each delivery carries; and the number of messages.
fn plan(deliveries: usize, seed: u64) -> (Vec<usize>, usize) {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut plan: Vec<usize> = Vec::with_capacity(deliveries);
    let mut messages = 0;
    for at in 0..deliveries {
        if at > 0 && random.random_range(0..100) < REPEATED_PERCENT {
            let far = if random.random_bool(0.5) { at } else { at.min(CLOSE) };
            plan.push(plan[at - 1 - random.random_range(0..far)]);
        } else {
            plan.push(messages);
            messages += 1;
        }
    }
    (plan, messages)
}

/// The answers of all senders together.
#[derive(Default)]
struct Heard {
    accepted: AtomicU64,
    known: AtomicU64,
    /// No answer, or one that asks to repeat.
    again: AtomicU64,
    /// Finished deliveries.
    ended: AtomicUsize,
}

/// Takes deliveries until none are left, and repeats each until it is answered with success.
async fn send_all(
    plan: Arc<Vec<usize>>,
    next: Arc<AtomicUsize>,
    heard: Arc<Heard>,
    address: watch::Receiver<String>,
) -> Result<()> {
    let mut sender: Option<Sender> = None;
    while let Some(message) = plan.get(next.fetch_add(1, Ordering::Relaxed)) {
        let (id, body) = (format!("msg_{message}"), format!("{{\"type\":\"invoice.paid\",\"n\":{message}}}"));
        let started = Instant::now();
        loop {
            ensure!(started.elapsed() < DEADLINE, "{id} was never taken");
            if sender.is_none() {
                let to = address.borrow().clone();
                sender = Sender::connect(&to).await.ok();
            }
            let status = match &mut sender {
                Some(sender) => sender.send(&id, &body).await.ok(),
                None => None,
            };
            match status {
                Some(202) => heard.accepted.fetch_add(1, Ordering::Relaxed),
                Some(200) => heard.known.fetch_add(1, Ordering::Relaxed),
                Some(503) | None => {
                    heard.again.fetch_add(1, Ordering::Relaxed);
                    sender = None;
                    // A sender waits when nobody answers; the service is being restarted.
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    continue;
                }
                Some(other) => anyhow::bail!("{id} was answered with {other}"),
            };
            break;
        }
        heard.ended.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

async fn every_message_has_one_effect_through_repetitions_and_kills(kind: Kind) -> Result<()> {
    let deliveries = number("POSTBOX_TEST_DELIVERIES", 2_000) as usize;
    let seed = number("POSTBOX_TEST_SEED", u64::from(SmallRng::from_os_rng().random::<u32>()));
    let kills = 3.max(deliveries / 25_000);
    eprintln!("POSTBOX_TEST_SEED={seed} POSTBOX_TEST_DELIVERIES={deliveries}");
    let (plan, messages) = plan(deliveries, seed);
    let plan = Arc::new(plan);

    let (url, effects, mut done) = application().await?;
    // A lease of one second, so that lanes of a killed relay are soon taken over.
    let apply = "[subscriptions.apply]\nlog = \"inbox\"\nlease = \"1s\"\nconcurrency = 32\n";
    let env = TestEnv::with(kind, &(apply.to_owned() + &http_sink(&url) + &partner())).await?;

    let mut served: Served = env.serve().await?;
    let (announce, address) = watch::channel(served.address.clone());
    let (heard, next) = (Arc::new(Heard::default()), Arc::new(AtomicUsize::new(0)));
    let started = Instant::now();
    let mut senders = JoinSet::new();
    for _ in 0..SENDERS {
        senders.spawn(send_all(Arc::clone(&plan), Arc::clone(&next), Arc::clone(&heard), address.clone()));
    }
    for kill in 1..=kills {
        let at = deliveries * kill / (kills + 1);
        while heard.ended.load(Ordering::Relaxed) < at {
            if let Some(Err(failed) | Ok(Err(failed))) = senders.try_join_next().map(|ended| ended.map_err(Into::into))
            {
                return Err(failed);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        served.kill().await?;
        served = env.serve().await?;
        announce.send_replace(served.address.clone());
    }
    while let Some(ended) = senders.join_next().await {
        ended??;
    }
    let sent = started.elapsed();
    // Each wait ends with the next effect; only a standstill fails.
    while *done.borrow_and_update() < messages {
        let waited = tokio::time::timeout(DEADLINE, done.changed()).await;
        waited.with_context(|| format!("{} effects of {messages}, then none for long", *done.borrow()))??;
    }
    served.terminate().await?;

    let count = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
    let (accepted, known, again) = (count(&heard.accepted), count(&heard.known), count(&heard.again));
    let effects = effects.lock().expect("no panic while it is held");
    eprintln!(
        "{kind:?}: {deliveries} deliveries of {messages} messages by {SENDERS} senders in {:.1} s ({:.0}/s), {kills} kills; accepted {accepted}, known {known}, \
         again {again}; {} effects, {} deliveries of done ones, all in {:.1} s",
        sent.as_secs_f64(),
        deliveries as f64 / sent.as_secs_f64(),
        effects.done.len(),
        effects.repeated,
        started.elapsed().as_secs_f64(),
    );
    let distinct: HashSet<usize> = effects.done.values().copied().collect();
    ensure!(distinct.len() == messages && !distinct.contains(&usize::MAX), "{} messages arrived", distinct.len());
    ensure!(effects.done.len() == messages, "{} effects of {messages} messages", effects.done.len());
    // A kill may lose an answer, so there may be fewer; but never two for one message.
    ensure!(accepted <= messages as u64 && accepted + known == deliveries as u64, "accepted {accepted}, known {known}");
    let counts = format!("pending=0 dispatched={messages} dead=0 total={messages}\n");
    let stats = env.ok(&["stats", "--log", "inbox"])?;
    ensure!(stats == counts, "{stats}");
    Ok(())
}

on_both!(every_message_has_one_effect_through_repetitions_and_kills);
