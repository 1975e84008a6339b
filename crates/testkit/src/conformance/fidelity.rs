//! Events come out as they went in, to the byte: hostile payloads, texts and times.

use jiff::{SignedDuration, Timestamp};
use postbox_core::limits::{HEADER_BYTES_MAX, HEADERS_MAX, KEY_BYTES_MAX, PAYLOAD_BYTES_MAX, TOPIC_BYTES_MAX};
use postbox_core::{EventId, NewEvent, header};

use super::StoreFixture;
use super::harness::*;
use crate::hostile;

pub async fn every_field_comes_back(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let occurred_at: Timestamp = "2001-02-03T04:05:06.789012Z".parse().expect("a time");
    let deliver_at: Timestamp = "2031-02-03T04:05:06.000001Z".parse().expect("a time");
    let full = NewEvent::new("order.paid", vec![0xff, 0x00], "application/octet-stream")
        .id(EventId::from_uuid(uuid::Uuid::from_u128(42)))
        .key("42")
        .aggregate("order")
        .version(i64::MAX)
        .kind("integration")
        .source("billing")
        .tenant("acme")
        .header("traceparent", "00-1-2-01")
        .header("correlation-id", "c")
        .occurred_at(occurred_at)
        .deliver_at(deliver_at)
        .expires_at(deliver_at + SignedDuration::from_micros(1));
    append(&lane.store, [full.clone(), event("plain")]).await;
    let read = lane.drain().await;
    let stored = &read[0].event;
    let expected = full.into_event(stored.id, stored.created_at);
    assert_eq!(*stored, expected);
    let plain = &read[1].event;
    assert_eq!((plain.kind(), plain.content_type()), ("domain", "application/json"));
    assert_eq!((&plain.key, &plain.aggregate, plain.version), (&None, &None, None));
    assert_eq!((&plain.source, &plain.tenant, plain.deliver_at), (&None, &None, None));
    assert_eq!(plain.expires_at, None);
    assert!(plain.headers.is_empty());
    let apart = plain.occurred_at.duration_since(plain.created_at).abs();
    assert!(apart < SignedDuration::from_secs(60), "it happened when it was appended");
}

pub async fn inspecting_shows_the_same_bytes(fixture: &dyn StoreFixture) {
    let (lane, ids) =
        Lane::unread(fixture, [NewEvent::new("t", vec![0, 159, 146, 150], "application/octet-stream")]).await;
    let seen = record(&lane.store, ids[0]).await;
    let read = lane.drain().await;
    assert_eq!((seen.event, seen.seq), (read[0].event.clone(), read[0].seq));
}

pub async fn payload_bytes_come_back_identical(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let payloads = hostile::payloads();
    // With the JSON content type, because that is where a store is tempted to parse.
    append(&lane.store, payloads.iter().map(|bytes| NewEvent::json("t", bytes.clone())).collect::<Vec<_>>()).await;
    let read = lane.drain().await;
    assert_eq!(read.len(), payloads.len());
    for (delivery, bytes) in read.iter().zip(&payloads) {
        assert_eq!(delivery.event.payload, *bytes, "{}", String::from_utf8_lossy(bytes));
    }
}

pub async fn a_payload_at_the_limit_comes_back(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let payload: Vec<u8> = (0..PAYLOAD_BYTES_MAX).map(|n| (n % 251) as u8).collect();
    // A store that reads a text in pieces cuts characters in two.
    let text: String = (0..300_000).map(|n| format!("{n}ż€")).collect();
    append(&lane.store, [NewEvent::json("t", payload.clone()), NewEvent::json("t", text.clone())]).await;
    let read = lane.drain().await;
    assert!(read[0].event.payload == payload, "16 MiB, the same bytes");
    assert!(read[1].event.payload == text.as_bytes(), "{} bytes, the same", text.len());
}

pub async fn strange_topics_and_keys_come_back(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let strange = hostile::names();
    let mut events: Vec<NewEvent> =
        strange.iter().map(|name| NewEvent::json(*name, "1").key(*name).tenant(*name).aggregate(*name)).collect();
    events.push(NewEvent::json("t".repeat(TOPIC_BYTES_MAX), "1").key("k".repeat(KEY_BYTES_MAX)));
    events.push(NewEvent::json("ż".repeat(TOPIC_BYTES_MAX / 2), "1").key("ż".repeat(KEY_BYTES_MAX / 2)));
    events.push(event("1").key("a key with spaces,\ttabs\nand lines "));
    append(&lane.store, &events).await;
    let read = lane.drain().await;
    assert_eq!(read.len(), events.len());
    for (delivery, event) in read.iter().zip(&events) {
        let stored = &delivery.event;
        assert_eq!(stored.topic.as_str(), event.topic);
        assert_eq!(stored.key.as_ref().map(|key| key.as_str()), event.key.as_deref());
        assert_eq!(stored.tenant.as_ref().map(|tenant| tenant.as_str()), event.tenant.as_deref());
        assert_eq!(stored.aggregate, event.aggregate);
    }
}

pub async fn keys_that_look_alike_are_different(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let alike = ["a", "A", "a ", " a", "é", "e\u{301}", "É"];
    let events: Vec<NewEvent> = alike.iter().map(|key| keyed(key, key)).collect();
    let settled = std::iter::once(retry(HOUR)).chain(std::iter::repeat(Delivered));
    lane.past(events.clone().into_iter().zip(settled)).await;
    append(&lane.store, &events).await;
    let batch = lane.next(100).await;
    let held: Vec<&str> = batch.held.iter().map(|key| key.as_str()).collect();
    assert_eq!(held, ["a"]);
}

pub async fn headers_come_back(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let values = hostile::header_values();
    let mut full = event("1");
    for n in 0..HEADERS_MAX - 2 {
        full = full.header(format!("h-{n}"), values[n % values.len()]);
    }
    full = full.header("!#$%&'*+-.^_`|~", "odd name").header("UPPER", "v").header(header::MESSAGE_ID, "msg_1");
    let long = event("2").header("long", "x".repeat(HEADER_BYTES_MAX - 4)).header(header::MESSAGE_ID, "i".repeat(255));
    let cases = event("3").header("Case", "1").header("case", "2");
    append(&lane.store, [full.clone(), long.clone(), cases.clone()]).await;
    let read = lane.drain().await;
    for (delivery, event) in read.iter().zip([full, long, cases]) {
        assert_eq!(delivery.event.headers, event.headers);
    }
}

pub async fn times_come_back_to_the_microsecond(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let times = [
        "0001-01-01T00:00:00Z",
        "1582-10-10T12:00:00.5Z",
        "1969-12-31T23:59:59.999999Z",
        "1970-01-01T00:00:00Z",
        "2038-01-19T03:14:08.000001Z",
        "9999-12-30T22:00:00.999999Z",
    ];
    let times = times.map(|time| time.parse::<Timestamp>().expect("a time"));
    // Past times may be older than any clock, future times may not.
    let due = |time: Timestamp| Some(time).filter(|time| *time >= Timestamp::UNIX_EPOCH);
    let event_at = |time: Timestamp| event("1").occurred_at(time).version(i64::MIN);
    let due_at = |time| NewEvent { deliver_at: due(time), ..event_at(time) };
    let ends_at = |time| NewEvent { expires_at: due(time), ..event_at(time) };
    append(&lane.store, times.map(|time| [due_at(time), ends_at(time)]).concat()).await;
    let read = lane.drain().await;
    assert_eq!(read.len(), 2 * times.len());
    for (pair, time) in read.chunks(2).zip(times) {
        assert_eq!((pair[0].event.deliver_at, pair[1].event.expires_at), (due(time), due(time)));
        for delivery in pair {
            assert_eq!((delivery.event.occurred_at, delivery.event.version), (time, Some(i64::MIN)));
        }
    }
    let fine: Timestamp = "2026-01-01T00:00:00.123456789Z".parse().expect("a time");
    append(&lane.store, [event("1").occurred_at(fine)]).await;
    let apart = lane.drain().await[0].event.occurred_at.duration_since(fine).abs();
    assert!(apart < SignedDuration::from_micros(1), "off by {apart}");
}
