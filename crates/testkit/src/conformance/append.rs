//! Appending: all or nothing, ids, refusals.

use std::collections::HashSet;

use jiff::Timestamp;
use postbox_core::limits::{
    APPEND_BYTES_MAX, HEADER_BYTES_MAX, HEADERS_MAX, KEY_BYTES_MAX, PAYLOAD_BYTES_MAX, TOPIC_BYTES_MAX,
};
use postbox_core::{Context, Delivery, ErrorKind, Event, EventId, NewEvent, Tenant};

use super::StoreFixture;
use super::harness::*;

/// Each event keeps its own id, also if a store inserts many of them with one statement.
pub async fn ids_come_back_in_the_order_given(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let given = [(1, id(7)), (80, id(8)), (81, id(9))];
    let mut events = numbered(150);
    for (place, id) in given {
        events[place].id = Some(id);
    }
    let ids = append(&lane.store, events).await;
    assert_eq!(ids.len(), 150);
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 150, "distinct");
    for (place, made) in ids.iter().enumerate() {
        match given.iter().find(|(given, _)| *given == place) {
            Some((_, given)) => assert_eq!(made, given),
            None => assert_eq!(made.as_uuid().get_version_num(), 7, "a fresh id is a UUIDv7"),
        }
    }
    let read = lane.drain().await;
    assert!(read.iter().map(|delivery| delivery.event.id).eq(ids), "all, in the order given");
    assert!(payloads(&read).into_iter().eq((1..=150).map(|n| n.to_string())), "each with its own id");
}

pub async fn an_append_of_nothing_gives_nothing(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    assert!(append(&lane.store, []).await.is_empty());
    assert!(lane.drain().await.is_empty());
}

/// One call takes more events than a statement can have parameters.
pub async fn one_call_takes_many_events(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::unread(fixture, numbered(7_000)).await;
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 7_000);
    let read = lane.drain().await;
    assert!(read.iter().map(|delivery| delivery.event.id).eq(ids), "all, in the order given");
}

pub async fn every_limit_is_refused_with_its_code_and_nothing_is_written(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let time = |text: &str| text.parse::<Timestamp>().expect("a time");
    let later = time("2031-02-03T04:05:06.000002Z");
    let with_headers = |count: usize| (0..count).fold(event("x"), |event, n| event.header(format!("h{n}"), "v"));
    for (code, bad) in [
        ("topic_empty", NewEvent::json("", "x")),
        ("topic_too_long", NewEvent::json("t".repeat(TOPIC_BYTES_MAX + 1), "x")),
        ("topic_invalid", NewEvent::json("a b", "x")),
        ("topic_invalid", NewEvent::json("a\0b", "x")),
        ("topic_invalid", NewEvent::json("a\nb", "x")),
        ("key_empty", event("x").key("")),
        ("key_too_long", event("x").key("k".repeat(KEY_BYTES_MAX + 1))),
        ("key_invalid", event("x").key("a\0b")),
        ("tenant_empty", event("x").tenant("")),
        ("tenant_invalid", event("x").tenant("a\nb")),
        ("kind_invalid", event("x").kind("")),
        ("aggregate_invalid", event("x").aggregate("a\0b")),
        ("source_invalid", event("x").source("s".repeat(129))),
        ("content_type_invalid", NewEvent::new("t", "x", "text/\nplain")),
        ("payload_too_large", NewEvent::json("t", vec![b' '; PAYLOAD_BYTES_MAX + 1])),
        ("headers_too_many", with_headers(HEADERS_MAX + 1)),
        ("headers_too_large", event("x").header("h", "v".repeat(HEADER_BYTES_MAX))),
        ("header_name_invalid", event("x").header("a b", "v")),
        ("header_name_invalid", event("x").header("", "v")),
        ("header_value_invalid", event("x").header("a", "x\r\nb: y")),
        ("header_value_invalid", event("x").header("a", "x\0")),
        ("occurred_at_invalid", event("x").occurred_at(time("-004000-01-01T00:00:00Z"))),
        ("deliver_at_invalid", event("x").deliver_at(time("1969-12-31T23:59:59.999999Z"))),
        ("expires_at_invalid", event("x").expires_at(time("-004000-01-01T00:00:00Z"))),
        ("expires_too_early", event("x").deliver_at(later).expires_at(later)),
        ("expires_too_early", event("x").deliver_at(later).expires_at(time("2031-02-03T04:05:06.000001Z"))),
    ] {
        let result = lane.store.append(&outbox(), &[event("fine"), bad, event("fine")]).await;
        refused(result, ErrorKind::Invalid, code);
    }
    let large = NewEvent::json("t", vec![b' '; PAYLOAD_BYTES_MAX]);
    let too_many = vec![large; APPEND_BYTES_MAX / PAYLOAD_BYTES_MAX + 1];
    refused(lane.store.append(&outbox(), &too_many).await, ErrorKind::Invalid, "append_too_large");
    assert!(lane.drain().await.is_empty(), "nothing was written");
}

/// This is how a producer finds out whether an append whose answer was lost has happened.
pub async fn an_event_that_is_in_the_log_already_is_known(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let full = || NewEvent::new("t", vec![0, 0xff], "a/b").key("k").tenant("acme").id(id(3));
    let first = || [event("1").id(id(1)), keyed("k", "2").id(id(2)), full()];
    assert!(lane.store.append(&outbox(), &first()).await.expect("appended").is_new());
    let again = lane.store.append(&outbox(), &first()).await.expect("known");
    assert_eq!((again.ids(), again.known(), again.is_new()), (&[id(1), id(2), id(3)][..], 3, false));
    for event in first() {
        // Other fields may differ. The stored event stays as it was.
        let alone = event.clone().header("traceparent", "another").version(7);
        let again = lane.store.append(&outbox(), &[alone]).await.expect("known");
        assert_eq!((Some(again.id()), again.known()), (event.id, 1));
    }
    let mixed = [event("4"), event("1").id(id(1)), event("5").id(id(5)), event("5").id(id(5)), event("6")];
    let mixed = lane.store.append(&outbox(), &mixed).await.expect("appended");
    assert_eq!((mixed.len(), mixed.known()), (5, 2));
    let read = lane.drain().await;
    assert_eq!(payloads(&read)[3..], ["4", "5", "6"]);
    assert_eq!((read.len(), read[0].event.version, read[0].event.header("traceparent")), (6, None, None));
}

/// Two events under one id are a mistake of the producer, which must not be lost silently.
pub async fn another_event_under_a_taken_id_is_a_conflict_and_nothing_is_written(fixture: &dyn StoreFixture) {
    let first = || keyed("k", "first").tenant("acme").id(id(1));
    let (lane, _) = Lane::unread(fixture, [first()]).await;
    let topic = NewEvent { topic: "other".into(), ..first() };
    let no_key = NewEvent { key: None, ..first() };
    let no_tenant = NewEvent { tenant: None, ..first() };
    let bytes = NewEvent { payload: vec![0xff].into(), ..first() };
    let payload = NewEvent { payload: "second".into(), ..first() };
    for other in [topic, first().key("l"), no_key, first().tenant("other"), no_tenant, payload, bytes] {
        let alone = lane.store.append(&outbox(), std::slice::from_ref(&other)).await;
        refused(alone, ErrorKind::Conflict, "event_id_taken");
        let several = lane.store.append(&outbox(), &[event("new"), event("own").id(id(2)), other, first()]).await;
        refused(several, ErrorKind::Conflict, "event_id_taken");
    }
    let twice = lane.store.append(&outbox(), &[event("one").id(id(3)), event("two").id(id(3))]).await;
    refused(twice, ErrorKind::Conflict, "event_id_taken");
    assert_eq!(payloads(&lane.drain().await), ["first"]);
}

pub async fn an_unknown_log_is_not_found(fixture: &dyn StoreFixture) {
    refused(fixture.store().append(&nowhere(), &[event("x")]).await, ErrorKind::NotFound, "log_unknown");
}

pub async fn appending_in_a_transaction_is_the_same(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let mut open = fixture.begin().await;
    let ids = open.append(&outbox(), &[event("1").id(id(1)), event("2")]).await.expect("appended");
    assert_eq!(ids[0], id(1));
    assert_eq!(ids[1].as_uuid().get_version_num(), 7);
    assert!(open.append(&outbox(), &[]).await.expect("nothing is fine").is_empty());
    refused(open.append(&outbox(), &[NewEvent::json("", "x")]).await, ErrorKind::Invalid, "topic_empty");
    open.commit().await;
    let mut open = fixture.begin().await;
    for (again, known) in [(event("1").id(id(1)), 1), (event("3").id(id(3)), 0), (event("3").id(id(3)), 1)] {
        assert_eq!(open.append(&outbox(), &[again]).await.expect("it goes on").known(), known);
    }
    open.commit().await;
    let mut open = fixture.begin().await;
    let taken = open.append(&outbox(), &[event("another").id(id(1))]).await;
    refused(taken, ErrorKind::Conflict, "event_id_taken");
    open.rollback().await;
    let mut open = fixture.begin().await;
    refused(open.append(&nowhere(), &[event("x")]).await, ErrorKind::NotFound, "log_unknown");
    open.rollback().await;
    assert_eq!(payloads(&lane.drain().await), ["1", "2", "3"]);
}

/// A transaction that failed is tried again with the same ids.
pub async fn a_rolled_back_id_is_free_again(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let open = begin_with(fixture, [event("first try").id(id(1))]).await;
    open.rollback().await;
    let mut open = fixture.begin().await;
    open.append(&outbox(), &[event("second try").id(id(1))]).await.expect("the id is free");
    open.savepoint().await;
    open.append(&outbox(), &[event("phantom").id(id(2))]).await.expect("appended");
    open.rollback_to_savepoint().await;
    open.append(&outbox(), &[event("third try").id(id(2))]).await.expect("the id is free");
    open.commit().await;
    assert_eq!(payloads(&lane.drain().await), ["second try", "third try"]);
}

pub async fn concurrent_appends_of_one_id_leave_one_event(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let calls = |of: u128, payload: fn(u32) -> u32| {
        let store = lane.store.clone();
        (0..8).map(move |n| {
            let (store, event) = (store.clone(), event(&payload(n).to_string()).id(id(of)));
            async move { store.append(&outbox(), &[event]).await }
        })
    };
    let same = at_once(calls(1, |_| 1)).await.into_iter().map(|answer| answer.expect("appended or known").known());
    assert_eq!(same.sum::<usize>(), 7);
    let (won, lost): (Vec<_>, Vec<_>) = at_once(calls(2, |n| n)).await.into_iter().partition(Result::is_ok);
    assert_eq!(won.len(), 1);
    for answer in lost {
        refused(answer, ErrorKind::Conflict, "event_id_taken");
    }
    assert_eq!(lane.drain().await.len(), 2);
}

pub async fn events_carry_on_the_context_they_are_appended_in(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let context = || Context::new().correlation_id("c").actor("a").tenant("acme");
    let appending = async {
        append(&lane.store, [event("1"), event("2").correlation_id("own")]).await;
        let open = begin_with(fixture, [event("3")]).await;
        open.commit().await;
    };
    context().scope(appending).await;
    append(&lane.store, [event("4")]).await;
    let read = lane.drain().await;
    let said = |delivery: &Delivery| {
        let Event { tenant, .. } = &delivery.event;
        let [correlation, actor] = [delivery.event.correlation_id(), delivery.event.actor()];
        [correlation, actor, tenant.as_ref().map(Tenant::as_str)].map(Option::unwrap_or_default).join(" ")
    };
    assert_eq!(payloads(&read), ["1", "2", "3", "4"]);
    assert_eq!(read.iter().map(said).collect::<Vec<_>>(), ["c a acme", "own a acme", "c a acme", "  "]);
}

fn id(n: u128) -> EventId {
    EventId::from_uuid(uuid::Uuid::from_u128(n))
}
