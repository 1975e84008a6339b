//! The inbox's write side: once.

use std::time::Duration;

use postbox_core::{ErrorKind, EventId, Inbound, LogName, NewEvent, RawMessage, Received, SourceName, Subscription};

use super::StoreFixture;
use super::harness::*;

/// A first message is stored with its body, and read like any event.
pub async fn a_message_is_stored_once_and_can_be_read(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let received = store.receive(&LogName::inbox(), inbound("m1", "body")).await.expect("stored");
    let Received::Accepted(id) = received else { panic!("accepted, not {received:?}") };
    let lane = inbox_lane(fixture).await;
    let read = lane.drain().await;
    assert_eq!(payloads(&read), ["body"]);
    assert_eq!(read[0].event.id, id);
}

/// The sender did not hear our answer and sends again.
pub async fn the_same_message_again_is_a_duplicate(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    accepted(store.receive(&LogName::inbox(), inbound("m1", "body")).await);
    for _ in 0..3 {
        let again = store.receive(&LogName::inbox(), inbound("m1", "body")).await.expect("answered");
        assert_eq!(again, Received::Duplicate);
    }
    assert_eq!(inbox_lane(fixture).await.drain().await.len(), 1);
    assert_eq!(fixture.conflicts().await, 0);
}

/// The same id with another body is kept out and leaves a record.
pub async fn the_same_id_with_another_body_is_a_conflict(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    accepted(store.receive(&LogName::inbox(), inbound("m1", "body")).await);
    let other = store.receive(&LogName::inbox(), inbound("m1", "forged")).await.expect("answered");
    assert_eq!(other, Received::Conflict);
    assert_eq!(fixture.conflicts().await, 1);
    let original = store.receive(&LogName::inbox(), inbound("m1", "body")).await.expect("answered");
    assert_eq!(original, Received::Duplicate, "the first one stands");
    assert_eq!(payloads(&inbox_lane(fixture).await.drain().await), ["body"]);
}

/// A person can see them: which id, which bodies, how often, when. Repeating a body does not add a record.
pub async fn conflicts_are_listed_the_latest_first(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    assert_eq!(store.conflicts(10).await.expect("listed"), []);
    accepted(store.receive(&LogName::inbox(), inbound("m1", "body")).await);
    let mut of_tenant = inbound("m1", "body");
    of_tenant.event.tenant = Some("acme".into());
    accepted(store.receive(&LogName::inbox(), of_tenant.clone()).await);
    of_tenant.digest = inbound("m1", "third").digest;
    for conflicting in [inbound("m1", "forged"), inbound("m1", "forged"), of_tenant, inbound("m1", "forged")] {
        let answer = store.receive(&LogName::inbox(), conflicting).await.expect("answered");
        assert_eq!(answer, Received::Conflict);
        fixture.pass(SHORT).await;
    }
    let listed = store.conflicts(10).await.expect("listed");
    let told: Vec<_> = listed.iter().map(|c| (c.message_id.as_str(), c.tenant.as_deref(), c.times)).collect();
    assert_eq!(told, [("m1", None, 3), ("m1", Some("acme"), 1)]);
    assert_eq!(listed[0].source.as_str(), "hooks");
    assert_eq!(listed[0].digest_stored, inbound("m1", "body").digest);
    assert_eq!(listed[0].digest_refused, inbound("m1", "forged").digest);
    assert!(listed[0].first_at < listed[0].last_at && listed[1].first_at == listed[1].last_at, "{listed:?}");
    assert_eq!(store.conflicts(1).await.expect("listed"), listed[..1]);
    assert_eq!(store.forget(HOUR).await.expect("swept"), 0);
    assert_eq!(store.conflicts(10).await.expect("listed").len(), 2);
    store.forget(SHORT / 2).await.expect("swept");
    assert_eq!(store.conflicts(10).await.expect("listed"), [], "forgotten with the ids of their age");
}

/// Ids are the sender's: another source may use the same one, and so may another tenant.
pub async fn ids_are_unique_per_source_and_tenant(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let plain = inbound("m1", "1");
    let other_source = Inbound { source: SourceName::new("other").expect("a name"), ..inbound("m1", "2") };
    let of_tenant = |tenant: &str, payload: &str| {
        let mut message = inbound("m1", payload);
        message.event.tenant = Some(tenant.to_owned());
        message
    };
    for message in [plain, other_source, of_tenant("acme", "3"), of_tenant("umbrella", "4")] {
        accepted(store.receive(&LogName::inbox(), message).await);
    }
    let again = store.receive(&LogName::inbox(), of_tenant("acme", "3")).await.expect("answered");
    assert_eq!(again, Received::Duplicate);
    assert_eq!(payloads(&inbox_lane(fixture).await.drain().await), ["1", "2", "3", "4"]);
}

/// However many arrive at once.
pub async fn of_concurrent_copies_exactly_one_is_accepted(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    for round in 0..5 {
        let message = format!("m{round}");
        let calls = (0..12).map(|_| {
            let (store, message) = (store.clone(), inbound(&message, "body"));
            tokio::spawn(async move { store.receive(&LogName::inbox(), message).await })
        });
        let mut answers = Vec::new();
        for answer in futures::future::join_all(calls).await {
            answers.push(answer.expect("no panic").expect("answered"));
        }
        let won = answers.iter().filter(|answer| matches!(answer, Received::Accepted(_))).count();
        let duplicates = answers.iter().filter(|answer| **answer == Received::Duplicate).count();
        assert_eq!((won, duplicates), (1, 11), "{answers:?}");
    }
    assert_eq!(inbox_lane(fixture).await.drain().await.len(), 5);
    assert_eq!(fixture.conflicts().await, 0);
}

/// Two bodies race for one id: one wins, every copy of the other is a conflict.
pub async fn of_concurrent_bodies_one_wins_and_the_other_conflicts(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let calls = (0..10).map(|n| {
        let (store, message) = (store.clone(), inbound("m1", if n % 2 == 0 { "even" } else { "odd" }));
        tokio::spawn(async move { store.receive(&LogName::inbox(), message).await })
    });
    let mut answers = Vec::new();
    for answer in futures::future::join_all(calls).await {
        answers.push(answer.expect("no panic").expect("answered"));
    }
    let count = |wanted: fn(&Received) -> bool| answers.iter().filter(|answer| wanted(answer)).count();
    assert_eq!(count(|answer| matches!(answer, Received::Accepted(_))), 1);
    assert_eq!(count(|answer| *answer == Received::Duplicate), 4);
    assert_eq!(count(|answer| *answer == Received::Conflict), 5);
    assert_eq!(inbox_lane(fixture).await.drain().await.len(), 1);
}

/// What comes together is one commit: each has its own verdict, and the events stand in the order given.
pub async fn messages_of_one_call_are_judged_each(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    assert_eq!(store.receive_many(&LogName::inbox(), &[]).await.expect("answered"), []);
    accepted(store.receive(&LogName::inbox(), inbound("known", "0")).await);
    let call = ["z 1", "known 0", "a 2", "known forged", "z 1", "a other", "m 3"];
    let call = call.map(|message| message.split_once(' ').expect("two words")).map(|(id, body)| inbound(id, body));
    let answers = store.receive_many(&LogName::inbox(), &call).await.expect("answered");
    let words = answers.iter().map(|answer| match answer {
        Received::Accepted(_) => "accepted",
        Received::Duplicate => "duplicate",
        Received::Conflict => "conflict",
    });
    let words: Vec<&str> = words.collect();
    assert_eq!(words, ["accepted", "duplicate", "accepted", "conflict", "duplicate", "conflict", "accepted"]);
    let read = inbox_lane(fixture).await.drain().await;
    assert_eq!(payloads(&read), ["0", "1", "2", "3"]);
    let ids = |n: usize| read[n].event.id;
    assert_eq!([answers[0], answers[2], answers[6]], [1, 2, 3].map(|n| Received::Accepted(ids(n))));
    assert_eq!(fixture.conflicts().await, 2);
}

/// A call is all or nothing, whichever of its messages is the bad one.
pub async fn a_refused_message_takes_its_call_with_it(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let taken = EventId::from_uuid(uuid::Uuid::from_u128(1));
    store.append(&LogName::inbox(), &[event("first").id(taken)]).await.expect("appended");
    accepted(store.receive(&LogName::inbox(), inbound("known", "body")).await);
    let mut clash = inbound("m2", "body");
    clash.event.id = Some(taken);
    let call = [inbound("m1", "body"), inbound("known", "forged"), clash, inbound("m3", "body")];
    refused(store.receive_many(&LogName::inbox(), &call).await, ErrorKind::Conflict, "event_id_taken");
    let mut bad = call.clone();
    bad[2].event.topic = String::new();
    refused(store.receive_many(&LogName::inbox(), &bad).await, ErrorKind::Invalid, "topic_empty");
    assert_eq!(fixture.conflicts().await, 0, "nor is a conflict noted");
    for n in [0, 3] {
        accepted(store.receive(&LogName::inbox(), call[n].clone()).await);
    }
    assert_eq!(inbox_lane(fixture).await.drain().await.len(), 4);
}

/// A sender that repeats everything to two replicas, in another order each time: they wait for each other, and never each for the other.
pub async fn calls_with_the_same_messages_do_not_lock_each_other_out(fixture: &dyn StoreFixture) {
    const MESSAGES: usize = 40;
    let store = fixture.store();
    for round in 0..5 {
        let calls = (0..4).map(|caller| {
            let mut call: Vec<Inbound> = (0..MESSAGES).map(|n| inbound(&format!("m{round}-{n}"), "body")).collect();
            call.rotate_left(caller * 11);
            if caller % 2 == 0 {
                call.reverse();
            }
            let store = store.clone();
            tokio::spawn(async move { store.receive_many(&LogName::inbox(), &call).await })
        });
        let mut won = 0;
        for answer in futures::future::join_all(calls).await {
            let answers = answer.expect("no panic").expect("answered, at once");
            won += answers.iter().filter(|answer| matches!(answer, Received::Accepted(_))).count();
        }
        assert_eq!(won, MESSAGES);
    }
    assert_eq!(inbox_lane(fixture).await.drain().await.len(), 5 * MESSAGES);
    assert_eq!(fixture.conflicts().await, 0);
}

/// Nor do calls with the same other bodies of one message, which come in either order.
pub async fn calls_with_the_same_conflicts_do_not_lock_each_other_out(fixture: &dyn StoreFixture) {
    const BODIES: usize = 40;
    let store = fixture.store();
    accepted(store.receive(&LogName::inbox(), inbound("m1", "body")).await);
    for _ in 0..5 {
        let calls = (0..4).map(|caller| {
            let mut call: Vec<Inbound> = (0..BODIES).map(|n| inbound("m1", &format!("other {n:02}"))).collect();
            call.rotate_left(caller * 11);
            if caller % 2 == 0 {
                call.reverse();
            }
            let store = store.clone();
            tokio::spawn(async move { store.receive_many(&LogName::inbox(), &call).await })
        });
        for answer in futures::future::join_all(calls).await {
            let answers = answer.expect("no panic").expect("answered, at once");
            assert_eq!(answers, [Received::Conflict; BODIES]);
        }
    }
    let records = store.conflicts(2 * BODIES).await.expect("listed");
    assert_eq!(records.len(), BODIES);
    assert!(records.iter().all(|record| record.times == 5 * 4), "{records:?}");
}

/// Ids are bytes to us, within reason.
pub async fn message_ids_are_checked_and_kept_exactly(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    for bad in ["".to_owned(), "m".repeat(256), "a\0b".to_owned()] {
        refused(store.receive(&LogName::inbox(), inbound(&bad, "x")).await, ErrorKind::Invalid, "message_id_invalid");
    }
    for good in ["m".repeat(255), "M".into(), "m".into(), "m ".into(), "é".into(), "e\u{301}".into(), "';--%_".into()]
    {
        accepted(store.receive(&LogName::inbox(), inbound(&good, "x")).await);
    }
    assert_eq!(inbox_lane(fixture).await.drain().await.len(), 7);
}

/// A refused message leaves no trace: not even its id, or a stranger could block real ones.
pub async fn a_refused_message_does_not_use_up_its_id(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let mut bad = inbound("m1", "body");
    bad.event.topic = String::new();
    refused(store.receive(&LogName::inbox(), bad).await, ErrorKind::Invalid, "topic_empty");
    let nowhere = LogName::new("nowhere").expect("a name");
    refused(store.receive(&nowhere, inbound("m1", "body")).await, ErrorKind::NotFound, "log_unknown");
    let taken = EventId::from_uuid(uuid::Uuid::from_u128(1));
    store.append(&LogName::inbox(), &[event("first").id(taken)]).await.expect("appended");
    let mut clash = inbound("m1", "body");
    clash.event.id = Some(taken);
    refused(store.receive(&LogName::inbox(), clash).await, ErrorKind::Conflict, "event_id_taken");
    accepted(store.receive(&LogName::inbox(), inbound("m1", "body")).await);
}

/// The dedupe memory ends by age, not before.
pub async fn forgetting_takes_old_ids_only(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    accepted(store.receive(&LogName::inbox(), inbound("old", "body")).await);
    fixture.pass(2 * SHORT).await;
    assert_eq!(store.forget(HOUR).await.expect("swept"), 0);
    assert_eq!(store.forget(SHORT).await.expect("swept"), 1);
    assert_eq!(store.forget(SHORT).await.expect("swept"), 0);
    accepted(store.receive(&LogName::inbox(), inbound("old", "body")).await);
    assert_eq!(inbox_lane(fixture).await.drain().await.len(), 2, "forgetting is about ids; events stay");
}

/// What could not be decoded is kept with its bytes, and is never to be sent.
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
    let source = SourceName::new("hooks").expect("a name");
    let poison = message.into_poison(&source, "body_broken", "line 1");
    accepted(store.receive(&LogName::inbox(), poison).await);
    accepted(store.receive(&LogName::inbox(), inbound("m1", "body")).await);
    let batch = inbox_lane(fixture).await.next(10).await;
    let [poison, plain] = &batch.deliveries[..] else { panic!("two events: {batch:?}") };
    let why = batch.unreadable.get(&poison.seq).expect("it is not to be sent");
    assert_eq!((why.code.as_ref(), why.error.as_str()), ("body_broken", "line 1"));
    assert_eq!((&poison.event.payload[..], poison.event.topic.as_str()), (&[0xff, 0][..], "hooks"));
    assert!(!batch.unreadable.contains_key(&plain.seq));
}

/// A waiting applier hears of it.
pub async fn a_message_wakes_a_waiting_relay(fixture: &dyn StoreFixture) {
    let lane = inbox_lane(fixture).await;
    assert!(lane.next(10).await.is_empty());
    let (store, lease) = (lane.store.clone(), lane.lease.clone());
    let waiting = tokio::spawn(async move { store.hint(&lease).await });
    tokio::task::yield_now().await;
    accepted(lane.store.receive(&LogName::inbox(), inbound("m1", "body")).await);
    tokio::time::timeout(PATIENCE, waiting).await.expect("woken").expect("no panic");
}

/// A message that was received is not applied: a consumer's own transaction is told so once, whatever was received before
/// or after.
pub async fn what_is_received_is_not_applied(fixture: &dyn StoreFixture) {
    let (store, source) = (fixture.store(), source());
    accepted(store.receive(&LogName::inbox(), inbound("m1", "body")).await);
    for (message_id, is_first) in [("m1", true), ("m1", false), ("m2", true)] {
        let mut transaction = fixture.begin().await;
        assert_eq!(transaction.once(&source, message_id).await.expect("asked"), is_first, "{message_id}");
        transaction.commit().await;
    }
    accepted(store.receive(&LogName::inbox(), inbound("m2", "body")).await);
    let again = store.receive(&LogName::inbox(), inbound("m1", "body")).await.expect("answered");
    assert_eq!(again, Received::Duplicate);
    assert_eq!(store.forget(Duration::ZERO).await.expect("forgotten"), 4, "two messages, received and applied");
    let mut transaction = fixture.begin().await;
    assert!(transaction.once(&source, "m1").await.expect("asked"), "it was forgotten");
    transaction.rollback().await;
}

/// The effect and its note commit together or neither does.
pub async fn a_rollback_takes_back_that_a_message_was_applied(fixture: &dyn StoreFixture) {
    let source = source();
    let mut transaction = fixture.begin().await;
    transaction.savepoint().await;
    assert!(transaction.once(&source, "m1").await.expect("asked"));
    transaction.rollback_to_savepoint().await;
    assert!(transaction.once(&source, "m1").await.expect("asked"));
    let refused = transaction.once(&source, "").await.expect_err("refused");
    assert_eq!((refused.kind(), refused.code()), (ErrorKind::Invalid, "message_id_invalid"));
    transaction.rollback().await;
    let mut transaction = fixture.begin().await;
    assert!(transaction.once(&source, "m1").await.expect("asked"));
    transaction.commit().await;
    let mut transaction = fixture.begin().await;
    assert!(!transaction.once(&source, "m1").await.expect("asked"));
    transaction.rollback().await;
}

/// Bodies are bytes.
pub async fn a_binary_body_is_kept_exactly(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let body: Vec<u8> = (0..=255).collect();
    let message =
        Inbound { event: NewEvent::new("hook", body.clone(), "application/octet-stream"), ..inbound("m1", "") };
    accepted(store.receive(&LogName::inbox(), message).await);
    assert_eq!(inbox_lane(fixture).await.drain().await[0].event.payload, body);
}

fn source() -> SourceName {
    SourceName::new("hooks").expect("a name")
}

fn inbound(message_id: &str, body: &str) -> Inbound {
    // Any function of the body does; stores compare digests, they do not compute them.
    let mut digest = [0; 32];
    for (n, byte) in body.bytes().enumerate() {
        digest[n % 32] ^= byte.rotate_left(n as u32 % 8);
    }
    Inbound {
        source: source(),
        message_id: message_id.to_owned(),
        digest,
        event: NewEvent::json("hook.received", body.to_owned()),
    }
}

#[track_caller]
fn accepted(result: postbox_core::Result<Received>) {
    assert!(matches!(result, Ok(Received::Accepted(_))), "{result:?}");
}

async fn inbox_lane(fixture: &dyn StoreFixture) -> Lane {
    Lane::open_as(fixture, &Subscription { log: LogName::inbox(), ..reader() }).await
}

/// The cases of this suite.
#[doc(hidden)]
#[macro_export]
macro_rules! receive_cases {
    ($fixture:expr) => {
        $crate::conformance_cases!(
            receive,
            $fixture,
            [
                a_message_is_stored_once_and_can_be_read,
                the_same_message_again_is_a_duplicate,
                the_same_id_with_another_body_is_a_conflict,
                conflicts_are_listed_the_latest_first,
                ids_are_unique_per_source_and_tenant,
                of_concurrent_copies_exactly_one_is_accepted,
                of_concurrent_bodies_one_wins_and_the_other_conflicts,
                messages_of_one_call_are_judged_each,
                a_refused_message_takes_its_call_with_it,
                calls_with_the_same_messages_do_not_lock_each_other_out,
                calls_with_the_same_conflicts_do_not_lock_each_other_out,
                message_ids_are_checked_and_kept_exactly,
                a_refused_message_does_not_use_up_its_id,
                forgetting_takes_old_ids_only,
                poison_is_kept_and_is_not_to_be_sent,
                a_message_wakes_a_waiting_relay,
                a_binary_body_is_kept_exactly,
                what_is_received_is_not_applied,
                a_rollback_takes_back_that_a_message_was_applied,
            ]
        );
    };
}
