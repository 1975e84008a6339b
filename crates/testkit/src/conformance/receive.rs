//! The inbox's write side: each message is stored once.

use std::sync::Arc;
use std::time::Duration;

use postbox_core::{
    ErrorKind, EventId, Inbound, LogName, NewEvent, RawMessage, Received, SourceName, Store, Subscription,
};

use super::StoreFixture;
use super::harness::*;

pub async fn a_message_is_stored_once_and_can_be_read(fixture: &dyn StoreFixture) {
    let id = accepted(&fixture.store(), inbound("m1", "body")).await;
    let read = drain_inbox(fixture).await;
    assert_eq!((payloads(&read), read[0].event.id), (vec!["body".to_owned()], id));
}

pub async fn the_same_message_again_is_a_duplicate(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    accepted(&store, inbound("m1", "body")).await;
    for _ in 0..3 {
        assert_eq!(receive(&store, inbound("m1", "body")).await, Received::Duplicate);
    }
    assert_eq!((drain_inbox(fixture).await.len(), fixture.conflicts().await), (1, 0));
}

pub async fn the_same_id_with_another_body_is_a_conflict(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    accepted(&store, inbound("m1", "body")).await;
    assert_eq!(receive(&store, inbound("m1", "forged")).await, Received::Conflict);
    assert_eq!(fixture.conflicts().await, 1);
    assert_eq!(receive(&store, inbound("m1", "body")).await, Received::Duplicate, "the first one stands");
    assert_eq!(payloads(&drain_inbox(fixture).await), ["body"]);
}

pub async fn conflicts_are_listed_the_latest_first(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    assert_eq!(store.conflicts(10).await.expect("listed"), []);
    accepted(&store, inbound("m1", "body")).await;
    accepted(&store, of_tenant("acme", "body")).await;
    let forged = || inbound("m1", "forged");
    for conflicting in [forged(), forged(), of_tenant("acme", "third"), forged()] {
        assert_eq!(receive(&store, conflicting).await, Received::Conflict);
        fixture.pass(SHORT).await;
    }
    let listed = store.conflicts(10).await.expect("listed");
    let seen: Vec<_> = listed.iter().map(|c| (c.message_id.as_str(), c.tenant.as_deref(), c.times)).collect();
    assert_eq!(seen, [("m1", None, 3), ("m1", Some("acme"), 1)], "a repeated body adds no record");
    assert_eq!(listed[0].source.as_str(), "hooks");
    assert_eq!(listed[0].digest_stored, inbound("m1", "body").digest);
    assert_eq!(listed[0].digest_refused, forged().digest);
    assert!(listed[0].first_at < listed[0].last_at && listed[1].first_at == listed[1].last_at, "{listed:?}");
    assert_eq!(store.conflicts(1).await.expect("listed"), listed[..1]);
    assert_eq!(store.forget(HOUR).await.expect("swept"), 0);
    assert_eq!(store.conflicts(10).await.expect("listed").len(), 2);
    let forgotten = store.forget(SHORT / 2).await.expect("swept");
    assert_eq!(forgotten, 4, "two ids and two records: a sweep goes on while only records are left");
    assert_eq!(store.conflicts(10).await.expect("listed"), [], "forgotten with the ids of their age");
}

pub async fn ids_are_unique_per_source_and_tenant(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let other_source = Inbound { source: SourceName::new("other").expect("a name"), ..inbound("m1", "2") };
    for message in [inbound("m1", "1"), other_source, of_tenant("acme", "3"), of_tenant("umbrella", "4")] {
        accepted(&store, message).await;
    }
    assert_eq!(receive(&store, of_tenant("acme", "3")).await, Received::Duplicate);
    assert_eq!(payloads(&drain_inbox(fixture).await), ["1", "2", "3", "4"]);
}

pub async fn of_concurrent_copies_exactly_one_is_accepted(fixture: &dyn StoreFixture) {
    for round in 0..5 {
        let id = format!("m{round}");
        assert_eq!(concurrently(fixture, (0..12).map(|_| inbound(&id, "body"))).await, (1, 11, 0));
    }
    assert_eq!((drain_inbox(fixture).await.len(), fixture.conflicts().await), (5, 0));
}

pub async fn of_concurrent_bodies_one_wins_and_the_other_conflicts(fixture: &dyn StoreFixture) {
    let messages = (0..10).map(|n| inbound("m1", if n % 2 == 0 { "even" } else { "odd" }));
    assert_eq!(concurrently(fixture, messages).await, (1, 4, 5));
    assert_eq!(drain_inbox(fixture).await.len(), 1);
}

/// Receives messages in concurrent calls. Counts the accepted ones, the duplicates and the
/// conflicts.
async fn concurrently(fixture: &dyn StoreFixture, messages: impl Iterator<Item = Inbound>) -> (usize, usize, usize) {
    let store = fixture.store();
    let calls = messages.map(|message| {
        let store = store.clone();
        async move { receive(&store, message).await }
    });
    let answers = at_once(calls).await;
    let count = |wanted: fn(&Received) -> bool| answers.iter().filter(|answer| wanted(answer)).count();
    let accepted = count(|answer| matches!(answer, Received::Accepted(_)));
    (accepted, count(|answer| *answer == Received::Duplicate), count(|answer| *answer == Received::Conflict))
}

pub async fn messages_of_one_call_are_judged_each(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    assert_eq!(store.receive_many(&LogName::inbox(), &[]).await.expect("answered"), []);
    accepted(&store, inbound("known", "0")).await;
    let call = [("z", "1"), ("known", "0"), ("a", "2"), ("known", "forged"), ("z", "1"), ("a", "other"), ("m", "3")]
        .map(|(id, body)| inbound(id, body));
    let answers = store.receive_many(&LogName::inbox(), &call).await.expect("answered");
    let read = drain_inbox(fixture).await;
    assert_eq!(payloads(&read), ["0", "1", "2", "3"], "in the order given");
    let accepted = |n: usize| Received::Accepted(read[n].event.id);
    let (duplicate, conflict) = (Received::Duplicate, Received::Conflict);
    let expected = [accepted(1), duplicate, accepted(2), conflict, duplicate, conflict, accepted(3)];
    assert_eq!(answers, expected);
    assert_eq!(fixture.conflicts().await, 2);
}

pub async fn a_refused_message_takes_its_call_with_it(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let clash = with_taken_id(&store, "m2").await;
    accepted(&store, inbound("known", "body")).await;
    let call = [inbound("m1", "body"), inbound("known", "forged"), clash, inbound("m3", "body")];
    refused(store.receive_many(&LogName::inbox(), &call).await, ErrorKind::Conflict, "event_id_taken");
    let mut bad = call.clone();
    bad[2].event.topic = String::new();
    refused(store.receive_many(&LogName::inbox(), &bad).await, ErrorKind::Invalid, "topic_empty");
    assert_eq!(fixture.conflicts().await, 0, "nor is a conflict noted");
    for n in [0, 3] {
        accepted(&store, call[n].clone()).await;
    }
    assert_eq!(drain_inbox(fixture).await.len(), 4);
}

/// Senders repeat everything to several replicas, in another order each time, without deadlock.
pub async fn calls_with_the_same_messages_do_not_lock_each_other_out(fixture: &dyn StoreFixture) {
    const MESSAGES: usize = 40;
    for round in 0..5 {
        let messages: Vec<_> = (0..MESSAGES).map(|n| inbound(&format!("m{round}-{n}"), "body")).collect();
        let answers = in_different_orders(fixture, &messages).await;
        let accepted = answers.iter().flatten().filter(|answer| matches!(answer, Received::Accepted(_)));
        assert_eq!(accepted.count(), MESSAGES);
    }
    assert_eq!((drain_inbox(fixture).await.len(), fixture.conflicts().await), (5 * MESSAGES, 0));
}

pub async fn calls_with_the_same_conflicts_do_not_lock_each_other_out(fixture: &dyn StoreFixture) {
    const BODIES: usize = 40;
    let store = fixture.store();
    accepted(&store, inbound("m1", "body")).await;
    let messages: Vec<_> = (0..BODIES).map(|n| inbound("m1", &format!("other {n:02}"))).collect();
    for _ in 0..5 {
        for answers in in_different_orders(fixture, &messages).await {
            assert_eq!(answers, [Received::Conflict; BODIES]);
        }
    }
    let records = store.conflicts(2 * BODIES).await.expect("listed");
    assert_eq!(records.len(), BODIES);
    assert!(records.iter().all(|record| record.times == 5 * 4), "{records:?}");
}

/// Makes four concurrent calls with the same messages, each in another order.
async fn in_different_orders(fixture: &dyn StoreFixture, messages: &[Inbound]) -> Vec<Vec<Received>> {
    let calls = (0..4).map(|caller| {
        let (store, mut call) = (fixture.store(), messages.to_vec());
        call.rotate_left(caller * 11);
        if caller % 2 == 0 {
            call.reverse();
        }
        async move { store.receive_many(&LogName::inbox(), &call).await.expect("answered, at once") }
    });
    at_once(calls).await
}

pub async fn message_ids_are_checked_and_kept_exactly(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    for bad in ["".to_owned(), "m".repeat(256), "a\0b".to_owned()] {
        refused(store.receive(&LogName::inbox(), inbound(&bad, "x")).await, ErrorKind::Invalid, "message_id_invalid");
    }
    let longest = "m".repeat(255);
    for good in [&longest, "M", "m", "m ", "é", "e\u{301}", "';--%_"] {
        accepted(&store, inbound(good, "x")).await;
    }
    assert_eq!(drain_inbox(fixture).await.len(), 7);
}

/// Otherwise a stranger could block a genuine message by sending its id first.
pub async fn a_refused_message_does_not_use_up_its_id(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let mut bad = inbound("m1", "body");
    bad.event.topic = String::new();
    refused(store.receive(&LogName::inbox(), bad).await, ErrorKind::Invalid, "topic_empty");
    refused(store.receive(&nowhere(), inbound("m1", "body")).await, ErrorKind::NotFound, "log_unknown");
    let clash = with_taken_id(&store, "m1").await;
    refused(store.receive(&LogName::inbox(), clash).await, ErrorKind::Conflict, "event_id_taken");
    accepted(&store, inbound("m1", "body")).await;
}

pub async fn forgetting_takes_old_ids_only(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    accepted(&store, inbound("old", "body")).await;
    fixture.pass(2 * SHORT).await;
    for (age, forgotten) in [(HOUR, 0), (SHORT, 1), (SHORT, 0)] {
        assert_eq!(store.forget(age).await.expect("swept"), forgotten);
    }
    accepted(&store, inbound("old", "body")).await;
    assert_eq!(drain_inbox(fixture).await.len(), 2, "forgetting is about ids; events stay");
}

pub async fn poison_is_kept_and_is_not_to_be_sent(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let message = RawMessage {
        id: Some("m1".into()),
        digest: [1; 32],
        topic: "no topic".into(),
        key: None,
        headers: Default::default(),
        content_type: "text/plain".into(),
        payload: vec![0xff, 0].into(),
    };
    accepted(&store, message.into_poison(&source(), "body_broken", "line 1")).await;
    accepted(&store, inbound("m1", "body")).await;
    let batch = inbox_lane(fixture).await.next(10).await;
    let [poison, plain] = &batch.deliveries[..] else { panic!("two events: {batch:?}") };
    let why = batch.unreadable.get(&poison.seq).expect("it is not to be sent");
    assert_eq!((why.code.as_ref(), why.error.as_str()), ("body_broken", "line 1"));
    assert_eq!((&poison.event.payload[..], poison.event.topic.as_str()), (&[0xff, 0][..], "hooks"));
    assert!(!batch.unreadable.contains_key(&plain.seq));
}

pub async fn a_message_wakes_a_waiting_relay(fixture: &dyn StoreFixture) {
    let lane = inbox_lane(fixture).await;
    assert!(lane.next(10).await.is_empty());
    let (store, lease) = (lane.store.clone(), lane.lease.clone());
    let waiting = tokio::spawn(async move { store.hint(&lease).await });
    tokio::task::yield_now().await;
    accepted(&lane.store, inbound("m1", "body")).await;
    tokio::time::timeout(PATIENCE, waiting).await.expect("woken").expect("no panic");
}

/// A consumer's transaction asks whether it applies a message first. Receiving does not count.
pub async fn what_is_received_is_not_applied(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    accepted(&store, inbound("m1", "body")).await;
    for (message_id, is_first) in [("m1", true), ("m1", false), ("m2", true)] {
        let mut transaction = fixture.begin().await;
        assert_eq!(transaction.once(&source(), message_id).await.expect("asked"), is_first, "{message_id}");
        transaction.commit().await;
    }
    accepted(&store, inbound("m2", "body")).await;
    assert_eq!(receive(&store, inbound("m1", "body")).await, Received::Duplicate);
    assert_eq!(store.forget(Duration::ZERO).await.expect("forgotten"), 4, "two messages, received and applied");
    let mut transaction = fixture.begin().await;
    assert!(transaction.once(&source(), "m1").await.expect("asked"), "it was forgotten");
    transaction.rollback().await;
}

pub async fn a_rollback_takes_back_that_a_message_was_applied(fixture: &dyn StoreFixture) {
    let mut transaction = fixture.begin().await;
    transaction.savepoint().await;
    assert!(transaction.once(&source(), "m1").await.expect("asked"));
    transaction.rollback_to_savepoint().await;
    assert!(transaction.once(&source(), "m1").await.expect("asked"));
    refused(transaction.once(&source(), "").await, ErrorKind::Invalid, "message_id_invalid");
    transaction.rollback().await;
    for is_first in [true, false] {
        let mut transaction = fixture.begin().await;
        assert_eq!(transaction.once(&source(), "m1").await.expect("asked"), is_first);
        transaction.commit().await;
    }
}

pub async fn a_binary_body_is_kept_exactly(fixture: &dyn StoreFixture) {
    let body: Vec<u8> = (0..=255).collect();
    let event = NewEvent::new("hook", body.clone(), "application/octet-stream");
    accepted(&fixture.store(), Inbound { event, ..inbound("m1", "") }).await;
    assert_eq!(drain_inbox(fixture).await[0].event.payload, body);
}

fn source() -> SourceName {
    SourceName::new("hooks").expect("a name")
}

/// A message whose digest is a function of its body; stores only compare digests.
pub(super) fn inbound(message_id: &str, body: &str) -> Inbound {
    let mut digest = [0; 32];
    for (n, byte) in body.bytes().enumerate() {
        digest[n % 32] ^= byte.rotate_left(n as u32 % 8);
    }
    let event = NewEvent::json("hook.received", body.to_owned());
    Inbound { source: source(), message_id: message_id.to_owned(), digest, event }
}

fn of_tenant(tenant: &str, body: &str) -> Inbound {
    let mut message = inbound("m1", body);
    message.event.tenant = Some(tenant.to_owned());
    message
}

/// Returns a message whose event has the id of another event in the log.
async fn with_taken_id(store: &Arc<dyn Store>, message_id: &str) -> Inbound {
    let taken = EventId::from_uuid(uuid::Uuid::from_u128(1));
    store.append(&LogName::inbox(), &[event("first").id(taken)]).await.expect("appended");
    let mut message = inbound(message_id, "body");
    message.event.id = Some(taken);
    message
}

async fn receive(store: &Arc<dyn Store>, message: Inbound) -> Received {
    store.receive(&LogName::inbox(), message).await.expect("answered")
}

async fn accepted(store: &Arc<dyn Store>, message: Inbound) -> EventId {
    match receive(store, message).await {
        Received::Accepted(id) => id,
        other => panic!("accepted, not {other:?}"),
    }
}

async fn inbox_lane(fixture: &dyn StoreFixture) -> Lane {
    Lane::open_as(fixture, &Subscription { log: LogName::inbox(), ..reader() }).await
}

async fn drain_inbox(fixture: &dyn StoreFixture) -> Vec<postbox_core::Delivery> {
    inbox_lane(fixture).await.drain().await
}
