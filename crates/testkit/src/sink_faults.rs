//! What a broker's sink says when the server or the network fails, and what becomes of its events.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use postbox_core::{Delivery, NewEvent, Sink};
use tokio::time::{sleep, timeout};

use crate::proxy::{Direction, FaultProxy};
use crate::sending::{PATIENCE, Working, codes, deliver, deliveries, numbered, said};
use crate::servers::{PrivateServer, Program};

/// The id and the payload of a stored message.
pub type Stored = (String, String);

/// The server stores `count` events, and its answers are lost with the connection: the call says
/// `lost`. The next one sends them again and says `again`; only a "duplicate" is not stored.
/// `stored` returns all messages in order of arrival.
pub async fn an_answer_is_lost(
    sink: &Arc<dyn Sink>,
    proxy: &FaultProxy,
    count: usize,
    [lost, again]: [&str; 2],
    stored: impl AsyncFn() -> Vec<Stored>,
) {
    says(sink, &numbered(1), "delivered").await;
    let sent = numbered(count);
    proxy.swallow(&[Direction::ToClient]);
    let lose = async {
        proxy.swallowed(Direction::ToClient).await;
        until_stored(&stored, 1 + count).await;
        cut(proxy).await;
        // What the client repeats arrives.
        proxy.heal();
    };
    let (outcomes, ()) = tokio::join!(deliver(sink, &sent), lose);
    assert_eq!(codes(&outcomes), [lost]);
    let first = stored().await;
    assert_eq!(first.len(), 1 + count, "the client repeats nothing");
    says(sink, &sent, again).await;
    let repeated = &first[if again == "duplicate" { first.len() } else { 1 }..];
    let all = until_stored(&stored, first.len() + repeated.len()).await;
    assert_eq!(all.len(), first.len() + repeated.len());
    let ids = |stored: &[Stored]| stored.iter().map(|(id, _)| id.clone()).collect::<BTreeSet<_>>();
    assert_eq!(ids(&all[first.len()..]), ids(repeated), "the same ids");
}

/// Bytes go out, and nothing comes back. `silent` is what a call says that gets no answer within
/// `limit`, and `hung` the next one, which gets no connection.
pub async fn a_black_hole(
    sink: &Arc<dyn Sink>,
    proxy: &FaultProxy,
    limit: Duration,
    [silent, hung]: [&str; 2],
    stored: impl AsyncFn() -> Vec<Stored>,
) {
    says(sink, &one("first"), "delivered").await;
    proxy.swallow(&Direction::BOTH);
    let began = Instant::now();
    says(sink, &numbered(2), silent).await;
    assert!(began.elapsed() < limit * 5, "its own deadline: {:?}", began.elapsed());
    // Nothing came back, so the connection was given up, and no new one can be opened.
    says(sink, &one("no"), hung).await;
    proxy.reset();
    proxy.heal();
    says(sink, &one("last"), "delivered").await;
    let payloads: Vec<String> = until_stored(&stored, 2).await.into_iter().map(|(_, payload)| payload).collect();
    assert_eq!(payloads, ["first", "last"]);
}

/// A connection that was lost meanwhile is made again by the next call, in far less time than a
/// call may wait for its answer. `lost` is the code of a call that had begun on it.
pub async fn connections_are_lost(sink: &Arc<dyn Sink>, proxy: &FaultProxy, lost: &str) {
    for n in 0..20 {
        cut(proxy).await;
        let outcome = said(&deliver(sink, &one(&n.to_string())).await[0]);
        // Whether anything was sent depends on which side notices first that the connection is
        // lost.
        assert!(outcome == "delivered" || outcome.ends_with(&format!(" {lost}")), "{outcome}");
        let again = one("again");
        let delivered = async { while said(&deliver(sink, &again).await[0]) != "delivered" {} };
        timeout(PATIENCE / 12, delivered).await.expect("connected again at once");
    }
}

/// Kills the server under load, this often. Returns how many events were delivered.
pub async fn kill_under_load(sink: Arc<dyn Sink>, server: &mut PrivateServer<impl Program>, times: usize) -> usize {
    let working = Working::start(sink);
    let metrics = working.relay.metrics();
    let until = async |count: usize| {
        let delivered = async {
            while metrics.delivered() < count as u64 {
                sleep(Duration::from_millis(1)).await;
            }
        };
        let done = timeout(PATIENCE * 2, delivered).await;
        assert!(done.is_ok(), "in time: {:?} {:?}", metrics.snapshot(), metrics.failures_by_cause());
    };
    let mut appended = 0;
    for _ in 0..times {
        working.append(appended..appended + 1_000).await;
        appended += 1_000;
        // In the middle of the work.
        until(appended - 950).await;
        server.kill();
        working.append(appended..appended + 50).await;
        appended += 50;
        server.start().await;
    }
    until(appended).await;
    assert_eq!((metrics.dead(), metrics.delivered()), (0, appended as u64));
    working.stop().await;
    appended
}

/// Checks that all numbers of a [`Working`] are there, and that those of a key are in order. A
/// message that is there twice has the same id.
pub fn whole_and_in_order(stored: &[Stored], count: usize) {
    let (mut ids, mut by_key) = (BTreeSet::new(), BTreeMap::<usize, Vec<usize>>::new());
    for (_, payload) in stored.iter().filter(|(id, _)| ids.insert(id)) {
        let number: usize = payload.parse().expect("a number");
        // As `Working` chooses the key.
        by_key.entry(number % 10).or_default().push(number);
    }
    for (key, numbers) in &by_key {
        assert!(numbers.is_sorted(), "key {key} in order: {numbers:?}");
    }
    let mut all: Vec<usize> = by_key.into_values().flatten().collect();
    all.sort_unstable();
    assert_eq!(all, (0..count).collect::<Vec<_>>(), "each, none lost");
}

/// Waits until `count` messages are stored, and returns all.
pub async fn until_stored(stored: impl AsyncFn() -> Vec<Stored>, count: usize) -> Vec<Stored> {
    let there = async {
        loop {
            let stored = stored().await;
            if stored.len() >= count {
                return stored;
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE * 2, there).await.expect("all of them, in time")
}

fn one(payload: &str) -> Vec<Delivery> {
    deliveries([NewEvent::json("t", payload.to_owned())])
}

async fn says(sink: &Arc<dyn Sink>, sent: &[Delivery], expected: &str) {
    assert_eq!(codes(&deliver(sink, sent).await), [expected]);
}

/// Resets every connection, and waits until they are gone.
async fn cut(proxy: &FaultProxy) {
    proxy.reset();
    while proxy.connections() > 0 {
        tokio::task::yield_now().await;
    }
}
