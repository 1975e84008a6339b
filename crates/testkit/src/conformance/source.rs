//! What every source guarantees: a message comes until it is settled, and then never again.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use postbox_core::{AckToken, ErrorKind, RawMessage, Source, SourceMessage};
use tokio::time::timeout;

use super::SourceFixture;
use super::harness::PATIENCE;

/// Longer than a source may take to deliver a message again after it was given back.
const MOMENT: Duration = Duration::from_millis(200);
/// A `nak` delay, long against a moment. A real broker really waits for it.
const DELAY: Duration = Duration::from_secs(5);
/// The SHA-256 of the bytes 0 to 255.
const DIGEST_OF_ALL_BYTES: [u8; 32] = [
    0x40, 0xaf, 0xf2, 0xe9, 0xd2, 0xd8, 0x92, 0x2e, 0x47, 0xaf, 0xd4, 0x64, 0x8e, 0x69, 0x67, 0x49, 0x71, 0x58, 0x78,
    0x5f, 0xbd, 0x1d, 0xa8, 0x70, 0xe7, 0x11, 0x02, 0x66, 0xbf, 0x94, 0x48, 0x80,
];
/// Text that is easily misread, and its SHA-256.
const TEXT: &str = "{ \"a\":1.0,\t\"b\": \"é\u{7f}\u{85}\u{202e}🦀\" } %41 \\u0000 &lt;<x/>\r\n ";
const DIGEST_OF_TEXT: [u8; 32] = [
    0xe1, 0x9c, 0x41, 0x0a, 0x74, 0xdf, 0xcf, 0x93, 0x20, 0x7b, 0x3f, 0x81, 0xd7, 0xa6, 0x17, 0x8a, 0x69, 0xce, 0xa2,
    0xd5, 0x3c, 0x93, 0x02, 0xa5, 0xd8, 0x88, 0x06, 0xf0, 0xf9, 0x2c, 0x4d, 0xef,
];

pub async fn capabilities_are_usable_and_constant(fixture: &dyn SourceFixture) {
    let source = fixture.source();
    let capabilities = source.capabilities();
    assert!(capabilities.in_flight_max >= 1, "{capabilities:?}");
    fixture.publish(message("1")).await;
    next(&source, 10).await;
    assert_eq!(source.capabilities(), capabilities);
}

pub async fn a_message_comes_as_it_was_published(fixture: &dyn SourceFixture) {
    let source = fixture.source();
    let mut sent = message("1");
    (sent.payload, sent.digest) = match fixture.text_only() {
        true => (TEXT.into(), DIGEST_OF_TEXT),
        false => ((0..=255).collect::<Vec<u8>>().into(), DIGEST_OF_ALL_BYTES),
    };
    sent.headers.insert("traceparent".into(), "00-ab".into());
    fixture.publish(sent.clone()).await;
    assert_eq!(next(&source, 10).await[0].message, sent);
}

pub async fn next_waits_for_a_message(fixture: &dyn SourceFixture) {
    let source = fixture.source();
    let waiting = tokio::spawn({
        let source = Arc::clone(&source);
        async move { source.next(10).await }
    });
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished());
    fixture.publish(message("1")).await;
    let given = timeout(PATIENCE, waiting).await.expect("woken").expect("no panic").expect("given");
    assert_eq!(ids(&given), ["1"]);
}

pub async fn next_gives_no_more_than_asked_for(fixture: &dyn SourceFixture) {
    let source = fixture.source();
    publish(fixture, 5).await;
    let mut given = Vec::new();
    while given.len() < 5 {
        let some = next(&source, 2).await;
        assert!((1..=2).contains(&some.len()), "{}", some.len());
        given.extend(some);
    }
    let mut ids = ids(&given);
    ids.sort();
    assert_eq!(ids, ["1", "2", "3", "4", "5"]);
}

pub async fn no_more_are_unsettled_than_may_be(fixture: &dyn SourceFixture) {
    let source = fixture.source();
    let most = source.capabilities().in_flight_max;
    publish(fixture, most + 3).await;
    let mut given = Vec::new();
    while given.len() < most {
        given.extend(next(&source, most + 3).await);
    }
    assert_eq!(given.len(), most);
    nothing_comes(&source).await;
    settled(source.ack(&[given[0].token]).await);
    assert_eq!(next(&source, most + 3).await.len(), 1, "one place is free");
}

pub async fn an_acknowledged_message_never_comes_again(fixture: &dyn SourceFixture) {
    let source = fixture.source();
    publish(fixture, 2).await;
    let given = gather(&source, 2).await;
    settled(source.ack(&tokens(&given)).await);
    fixture.disconnect().await;
    nothing_comes(&source).await;
}

pub async fn a_lost_connection_loses_no_message(fixture: &dyn SourceFixture) {
    let source = fixture.source();
    publish(fixture, 3).await;
    let given = gather(&source, 3).await;
    settled(source.ack(&tokens(&given[..1])).await);
    fixture.disconnect().await;
    if !fixture.has_sessions() {
        // A source that takes this for lost settles too much or too little.
        settled(source.ack(&tokens(&given[1..2])).await);
        settled(source.nak(&tokens(&given[2..]), Duration::ZERO).await);
        assert_eq!(ids(&gather(&source, 1).await), ids(&given[2..]));
        return nothing_comes(&source).await;
    }
    settled(source.ack(&tokens(&given[1..])).await);
    let again = gather(&source, 2).await;
    assert_eq!(sorted(&again), sorted(&given[1..]));
    assert!(again.iter().all(|it| given.iter().all(|before| before.token != it.token)), "tokens are of one delivery");
}

pub async fn what_is_given_back_comes_again(fixture: &dyn SourceFixture) {
    let source = fixture.source();
    publish(fixture, 1).await;
    let given = next(&source, 10).await;
    settled(source.nak(&tokens(&given), Duration::ZERO).await);
    let again = next(&source, 10).await;
    assert_eq!(ids(&again), ids(&given));
    if !source.capabilities().nak_delay {
        return;
    }
    settled(source.nak(&tokens(&again), DELAY).await);
    nothing_comes(&source).await;
    fixture.pass(DELAY).await;
    assert_eq!(ids(&next(&source, 10).await), ids(&given));
}

pub async fn what_is_rejected_never_comes_again(fixture: &dyn SourceFixture) {
    let source = fixture.source();
    publish(fixture, 1).await;
    let given = next(&source, 10).await;
    settled(source.reject(&tokens(&given)).await);
    fixture.disconnect().await;
    nothing_comes(&source).await;
    let kept: &[RawMessage] = if source.capabilities().dead_letters { &[message("1")] } else { &[] };
    assert_eq!(fixture.dead_letters().await, kept);
}

pub async fn settling_is_idempotent(fixture: &dyn SourceFixture) {
    let source = fixture.source();
    publish(fixture, 1).await;
    let given = tokens(&next(&source, 10).await);
    for tokens in [&given[..], &given, &[], &[AckToken(u64::MAX)]] {
        settled(source.ack(tokens).await);
        settled(source.nak(tokens, Duration::ZERO).await);
        settled(source.reject(tokens).await);
    }
    nothing_comes(&source).await;
    assert_eq!(fixture.dead_letters().await, [], "the first word counts");
}

/// Whether it is dropped while it connects, while nothing is there, or while messages arrive.
pub async fn a_dropped_call_loses_no_message(fixture: &dyn SourceFixture) {
    const MESSAGES: usize = 20;
    let source = fixture.source();
    for _ in 0..20 {
        assert!(source.next(10).now_or_never().is_none());
    }
    publish(fixture, MESSAGES).await;
    let (mut seen, mut calls) = (BTreeSet::new(), 0);
    while seen.len() < MESSAGES {
        let given = match calls {
            // Each is polled once more than the one before it, so they end at different places.
            1..=200 => polled(source.next(3), calls).await.transpose().expect("given").unwrap_or_default(),
            // The first one connects. The last ones find what is left.
            _ => next(&source, 3).await,
        };
        calls += 1;
        settled(source.ack(&tokens(&given)).await);
        seen.extend(ids(&given));
    }
}

pub async fn closing_ends_a_waiting_call(fixture: &dyn SourceFixture) {
    let source = fixture.source();
    let waiting = tokio::spawn({
        let source = Arc::clone(&source);
        async move { source.next(10).await }
    });
    tokio::task::yield_now().await;
    for _ in 0..2 {
        timeout(PATIENCE, source.close()).await.expect("closed in time");
    }
    let given = timeout(PATIENCE, waiting).await.expect("woken").expect("no panic").expect("no error");
    assert!(given.is_empty(), "{given:?}");
    assert!(next(&source, 10).await.is_empty());
}

pub async fn messages_come_in_order_where_that_is_claimed(fixture: &dyn SourceFixture) {
    let source = fixture.source();
    if !source.capabilities().ordered {
        return;
    }
    publish(fixture, 4).await;
    let given = gather(&source, 3).await;
    assert_eq!(ids(&given), ["1", "2", "3"]);
    settled(source.ack(&tokens(&given[..1])).await);
    settled(source.nak(&tokens(&given[1..]), Duration::ZERO).await);
    assert_eq!(ids(&gather(&source, 3).await), ["2", "3", "4"]);
}

fn message(id: &str) -> RawMessage {
    RawMessage {
        id: Some(id.to_owned()),
        digest: [id.len() as u8; 32],
        topic: "order.paid".into(),
        key: None,
        headers: Default::default(),
        content_type: "application/json".into(),
        payload: format!("{{\"id\":\"{id}\"}}").into(),
    }
}

async fn publish(fixture: &dyn SourceFixture, count: usize) {
    for n in 1..=count {
        fixture.publish(message(&n.to_string())).await;
    }
}

async fn next(source: &Arc<dyn Source>, max: usize) -> Vec<SourceMessage> {
    timeout(PATIENCE, connected(source, max)).await.expect("an answer in time")
}

/// Returns the next messages, after the one call that fails because the connection was lost.
async fn connected(source: &Arc<dyn Source>, max: usize) -> Vec<SourceMessage> {
    match source.next(max).await {
        Ok(given) => given,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            source.next(max).await.expect("connected again")
        }
    }
}

/// Polls a call this many times, then drops it unless it is done.
async fn polled<T>(call: impl Future<Output = T>, times: usize) -> Option<T> {
    let mut call = pin!(call);
    for _ in 0..times {
        if let Some(done) = call.as_mut().now_or_never() {
            return Some(done);
        }
        tokio::task::yield_now().await;
    }
    None
}

/// Returns at least `count` messages, in as many calls as needed.
async fn gather(source: &Arc<dyn Source>, count: usize) -> Vec<SourceMessage> {
    let mut given = Vec::new();
    while given.len() < count {
        given.extend(next(source, count - given.len()).await);
    }
    given
}

async fn nothing_comes(source: &Arc<dyn Source>) {
    let given = timeout(MOMENT, connected(source, 10)).await;
    assert!(given.is_err(), "nothing is to be given, not {given:?}");
}

fn settled(result: postbox_core::Result<()>) {
    result.expect("settled");
}

fn tokens(given: &[SourceMessage]) -> Vec<AckToken> {
    given.iter().map(|it| it.token).collect()
}

fn ids(given: &[SourceMessage]) -> Vec<String> {
    given.iter().map(|it| it.message.message_id()).collect()
}

fn sorted(given: &[SourceMessage]) -> Vec<String> {
    let mut ids = ids(given);
    ids.sort();
    ids
}
