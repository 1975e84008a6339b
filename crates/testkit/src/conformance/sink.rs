//! What every sink guarantees: one outcome per delivery, the same bytes, no neighbour harmed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use postbox_core::trace::{self, Propagator, TraceContext};
use postbox_core::{Delivery, EventId, NewEvent, Outcome, Seq, Sink};
use tracing::Span;
use tracing::instrument::WithSubscriber as _;

use super::harness::{PATIENCE, event, keyed};
use super::{Attempt, Destination, SinkFixture, is_text};
use crate::hostile;
use crate::warnings::Warnings;

/// How often to check whether a delivery reached a destination that does not answer.
const LOOK: Duration = Duration::from_millis(2);

/// Maximum deliveries a case sends in one call, whatever the sink allows.
const BATCH: usize = 20;

pub async fn capabilities_are_usable_and_constant(fixture: &dyn SinkFixture) {
    let sink = fixture.sink();
    let capabilities = sink.capabilities();
    assert!(capabilities.batch_max >= 1 && capabilities.concurrency >= 1, "{capabilities:?}");
    deliver(&sink, &deliveries([event("1")])).await;
    assert_eq!(sink.capabilities(), capabilities);
}

pub async fn every_delivery_arrives_and_has_one_outcome(fixture: &dyn SinkFixture) {
    let sent = deliveries((0..BATCH).map(|n| keyed(&format!("key-{n}"), &n.to_string())));
    let outcomes = deliver(&fixture.sink(), &sent).await;
    assert!(outcomes.iter().all(Outcome::is_delivered), "{outcomes:?}");
    all_arrived(fixture, &sent).await;
    assert_eq!(fixture.attempts().await.len(), sent.len(), "each reached the destination once");
}

pub async fn delivering_nothing_gives_nothing(fixture: &dyn SinkFixture) {
    assert!(fixture.sink().deliver(&[]).await.is_empty());
    assert!(fixture.arrived().await.is_empty());
}

pub async fn payload_bytes_arrive_identical(fixture: &dyn SinkFixture) {
    let most = fixture.traits().payload_bytes_max.unwrap_or(usize::MAX);
    let payloads = hostile::payloads().into_iter().chain([b"line\nbreak\r\n\r\n".to_vec()]);
    let sink = fixture.sink();
    let carries = |payload: &[u8]| !fixture.traits().text_only || (!payload.is_empty() && is_text(payload));
    let (carried, refused): (Vec<_>, Vec<_>) =
        payloads.filter(|payload| payload.len() <= most).partition(|payload| carries(payload));
    for payload in refused {
        let outcomes = deliver(&sink, &deliveries([NewEvent::json("t", payload)])).await;
        let Outcome::Dead { code, .. } = &outcomes[0] else { panic!("dead, not {outcomes:?}") };
        assert!(is_stable(code) && fixture.attempts().await.is_empty(), "refused before it is sent: {code:?}");
    }
    for (n, payload) in carried.into_iter().enumerate() {
        let outcomes = deliver(&sink, &deliveries([NewEvent::json("t", payload.clone())])).await;
        assert!(outcomes[0].is_delivered(), "{:?}: {outcomes:?}", String::from_utf8_lossy(&payload));
        let arrived = fixture.arrived().await;
        assert_eq!(arrived.len(), n + 1);
        assert!(arrived[n] == payload, "{:?} arrived as {:?}", String::from_utf8_lossy(&payload), arrived[n]);
    }
}

pub async fn a_poison_delivery_does_not_fail_its_neighbours(fixture: &dyn SinkFixture) {
    if !fixture.traits().refuses {
        return;
    }
    let poison = fixture.poison(keyed("key-poison", "poison"));
    let mut events: Vec<NewEvent> = (0..BATCH).map(|n| keyed(&format!("key-{n}"), &n.to_string())).collect();
    events.insert(BATCH / 2, poison);
    let outcomes = deliver(&fixture.sink(), &deliveries(events)).await;
    for (index, outcome) in outcomes.iter().enumerate() {
        match (index == BATCH / 2, outcome) {
            (false, Outcome::Delivered { .. }) | (true, Outcome::Dead { .. } | Outcome::Gone { .. }) => {}
            _ => panic!("delivery {index}: {outcome:?}"),
        }
    }
    assert_eq!(fixture.arrived().await.len(), BATCH);
}

pub async fn a_failure_stops_the_rest_of_its_key_where_prefix_is_claimed(fixture: &dyn SinkFixture) {
    let sink = fixture.sink();
    let capabilities = sink.capabilities();
    assert!(!capabilities.prefix || capabilities.batch_max > 1, "prefix means something only in a batch");
    if !capabilities.prefix || capabilities.batch_max < 4 || !fixture.traits().refuses {
        return;
    }
    let sent = deliveries([keyed("a", "a1"), fixture.poison(keyed("a", "a2")), keyed("a", "a3"), keyed("b", "b1")]);
    let outcomes = sink.deliver(&sent.iter().collect::<Vec<_>>()).await;
    let delivered: Vec<bool> = outcomes.iter().map(Outcome::is_delivered).collect();
    assert_eq!(delivered, [true, false, false, true], "{outcomes:?}");
    assert!(!matches!(outcomes[2], Outcome::Dead { .. }), "held back is not refused: {outcomes:?}");
    all_arrived(fixture, &[sent[0].clone(), sent[3].clone()]).await;
}

pub async fn a_key_arrives_in_order_where_prefix_is_claimed(fixture: &dyn SinkFixture) {
    let sink = fixture.sink();
    let capabilities = sink.capabilities();
    if !capabilities.prefix {
        return;
    }
    let count = capabilities.batch_max.min(BATCH);
    let sent = deliveries((0..count).map(|n| keyed("a", &format!("{n:04}"))));
    let outcomes = sink.deliver(&sent.iter().collect::<Vec<_>>()).await;
    assert!(outcomes.iter().all(Outcome::is_delivered), "{outcomes:?}");
    let arrived = fixture.arrived().await;
    assert!(arrived.len() == count && arrived.is_sorted(), "{arrived:?}");
}

/// A failure that may pass does not end an event, and the sink does not retry by itself: the
/// destination sees as many attempts as there are calls.
pub async fn a_failing_destination_is_tried_once_a_call(fixture: &dyn SinkFixture) {
    if !fixture.traits().fails {
        return;
    }
    fixture.set(Destination::Fails).await;
    let sink = fixture.sink();
    let sent = deliveries([event("1")]);
    for calls in 1..=2 {
        let outcomes = deliver(&sink, &sent).await;
        assert!(!is_final(&outcomes[0]), "to be tried again, not {outcomes:?}");
        assert_eq!(fixture.attempts().await.len(), calls, "the engine owns retry, not the sink");
    }
    assert!(fixture.arrived().await.is_empty());
    fixture.set(Destination::Works).await;
    assert!(fixture.arrived().await.is_empty(), "the engine owns retry, not the sink");
    assert!(deliver(&sink, &sent).await[0].is_delivered(), "the destination works again, and so does the sink");
    assert_eq!((fixture.arrived().await.len(), fixture.attempts().await.len()), (1, 3));
}

pub async fn a_throttled_delivery_is_not_the_end_of_an_event(fixture: &dyn SinkFixture) {
    if !fixture.traits().throttles {
        return;
    }
    fixture.set(Destination::Throttles).await;
    let sink = fixture.sink();
    let sent = deliveries([event("1")]);
    let outcomes = deliver(&sink, &sent).await;
    assert!(!is_final(&outcomes[0]), "to be tried again, not {outcomes:?}");
    assert_eq!(fixture.attempts().await.len(), 1, "it asked for less");
    fixture.set(Destination::Works).await;
    assert!(deliver(&sink, &sent).await[0].is_delivered());
}

pub async fn a_destination_that_is_down_is_unavailable_until_it_is_back(fixture: &dyn SinkFixture) {
    if !fixture.traits().goes_down {
        return;
    }
    let sink = fixture.sink();
    let sent = deliveries([event("1"), event("2")]);
    assert!(deliver(&sink, &deliveries([event("0")])).await[0].is_delivered());
    fixture.set(Destination::Down).await;
    let mut outcomes = deliver(&sink, &sent).await;
    if outcomes.iter().any(|outcome| matches!(outcome, Outcome::Ambiguous { .. })) {
        // It may have written into a connection that was already closed. Now it has noticed.
        outcomes = deliver(&sink, &sent).await;
    }
    for outcome in outcomes {
        let Outcome::Unavailable { code, .. } = &outcome else { panic!("unavailable, not {outcome:?}") };
        assert!(is_stable(code), "{code:?}");
    }
    fixture.set(Destination::Works).await;
    let outcomes = deliver(&sink, &sent).await;
    assert!(outcomes.iter().all(Outcome::is_delivered), "{outcomes:?}");
    assert_eq!(fixture.arrived().await.len(), 3);
}

pub async fn a_dropped_call_harms_no_other(fixture: &dyn SinkFixture) {
    if !fixture.traits().hangs {
        return;
    }
    let sink = fixture.sink();
    fixture.set(Destination::Hangs).await;
    for n in 1..=sink.capabilities().concurrency.min(3) {
        let sent = deliveries([event("given up")]);
        let call: Vec<&Delivery> = sent.iter().collect();
        let seen = async {
            while fixture.attempts().await.len() < n {
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::select! {
            outcomes = sink.deliver(&call) => panic!("no answer was given: {outcomes:?}"),
            seen = tokio::time::timeout(PATIENCE, seen) => seen.expect("it reached the destination"),
        }
    }
    fixture.set(Destination::Works).await;
    assert!(deliver(&sink, &deliveries([event("next")])).await[0].is_delivered());
    let arrived = fixture.arrived().await;
    assert_eq!(arrived.iter().filter(|payload| *payload == b"next").count(), 1, "{arrived:?}");
}

pub async fn what_is_too_large_dies_alone(fixture: &dyn SinkFixture) {
    let Some(most) = fixture.traits().payload_bytes_max else { return };
    let payload = |bytes| NewEvent::new("t", vec![b'x'; bytes], "application/octet-stream");
    let outcomes = deliver(&fixture.sink(), &deliveries([payload(most), payload(most + 1), event("plain")])).await;
    assert!(outcomes[0].is_delivered() && outcomes[2].is_delivered(), "{outcomes:?}");
    let Outcome::Dead { code, .. } = &outcomes[1] else { panic!("dead, not {:?}", outcomes[1]) };
    assert!(is_stable(code), "{code:?}");
}

pub async fn calls_at_once_do_not_meet(fixture: &dyn SinkFixture) {
    let sink = fixture.sink();
    let calls = sink.capabilities().concurrency.min(BATCH);
    let sent: Vec<Vec<Delivery>> = (0..calls)
        .map(|call| deliveries((0..3).map(|n| keyed(&format!("{call}-{n}"), &format!("{call}-{n}")))))
        .collect();
    let outcomes = futures::future::join_all(sent.iter().map(|sent| deliver(&sink, sent))).await;
    assert!(outcomes.iter().flatten().all(Outcome::is_delivered), "{outcomes:?}");
    all_arrived(fixture, &sent.concat()).await;
}

pub async fn attempts_of_an_event_share_their_dedupe_id(fixture: &dyn SinkFixture) {
    if !fixture.traits().dedupe_ids {
        return;
    }
    let sink = fixture.sink();
    let mut sent = deliveries([event("1")]);
    for replay in [0, 0, 1] {
        sent[0].replay = replay;
        assert!(deliver(&sink, &sent).await[0].is_delivered());
        let Some(Attempt { dedupe_id, .. }) = fixture.attempts().await.pop() else { panic!("it reached nobody") };
        assert_eq!(dedupe_id, Some(sent[0].dedupe_id()));
    }
}

pub async fn a_repeated_delivery_is_delivered(fixture: &dyn SinkFixture) {
    let sink = fixture.sink();
    let sent = deliveries([event("1")]);
    for _ in 0..2 {
        assert!(deliver(&sink, &sent).await[0].is_delivered());
    }
    assert!((1..=2).contains(&fixture.arrived().await.len()));
}

pub async fn strange_names_arrive_or_are_refused_with_a_code(fixture: &dyn SinkFixture) {
    let sink = fixture.sink();
    let strange = "* > a..b .a. $JS.API.STREAM.PURGE.x _INBOX.x {a} # zażółć \
        \u{202e} ';-- __consumer_offsets";
    for name in strange.split(' ') {
        let odd = NewEvent::json(name, "odd").key(name).tenant(name).aggregate(name).header("odd", name);
        let outcomes = deliver(&sink, &deliveries([odd, event("plain")])).await;
        match &outcomes[0] {
            Outcome::Delivered { .. } => {}
            Outcome::Dead { code, .. } => assert!(is_stable(code), "{name:?}: {code:?}"),
            other => panic!("{name:?}: {other:?}"),
        }
        assert!(outcomes[1].is_delivered(), "after {name:?}: {outcomes:?}");
    }
}

pub async fn reserved_headers_do_no_harm(fixture: &dyn SinkFixture) {
    let names = "host content-length Transfer-Encoding connection webhook-id webhook-signature \
        ce-id Nats-Msg-Id authorization";
    let sink = fixture.sink();
    for name in names.split(' ') {
        let outcomes = deliver(&sink, &deliveries([event(name).header(name, "0"), event("plain")])).await;
        assert!(is_final(&outcomes[0]), "{name}: {outcomes:?}");
        assert!(outcomes[1].is_delivered(), "after {name}: {outcomes:?}");
    }
}

pub async fn closing_twice_is_fine(fixture: &dyn SinkFixture) {
    let sink = fixture.sink();
    deliver(&sink, &deliveries([event("1")])).await;
    for _ in 0..2 {
        tokio::time::timeout(PATIENCE, sink.close()).await.expect("closes in time");
    }
    assert_eq!(fixture.arrived().await.len(), 1, "what was delivered is there");
}

/// For destinations with marks. The marks belong to the destination, so they move with each event
/// it has, and outlive the sink.
pub async fn the_high_water_mark_is_never_behind_what_was_delivered(fixture: &dyn SinkFixture) {
    let sink = fixture.sink();
    let Some(marks) = sink.high_water_marks() else { return };
    let all = async || {
        let mut positions = BTreeMap::new();
        for stream in marks.streams(BATCH).await.expect("an answer") {
            let mark = marks.high_water_mark(&stream).await.expect("an answer");
            positions.extend(mark.map(|position| (stream, position)));
        }
        positions
    };
    let mut seen = vec![all().await];
    for n in 0..3 {
        let outcomes = deliver(&sink, &deliveries([event(&n.to_string())])).await;
        assert!(outcomes[0].is_delivered(), "{outcomes:?}");
        let now = all().await;
        assert!(!seen.contains(&now), "event {n} is behind {now:?}, which was there before");
        assert_eq!(all().await, now, "asking changes nothing");
        seen.push(now);
    }
    assert!(marks.streams(1).await.expect("an answer").len() <= 1);
    assert_eq!(marks.high_water_mark("no-such-stream").await.expect("an answer"), None);
    assert_eq!(fixture.arrived().await.len(), 3, "asking sends nothing");
    if fixture.traits().goes_down {
        fixture.set(Destination::Down).await;
        assert!(marks.high_water_mark("no-such-stream").await.is_err(), "nobody knows");
        fixture.set(Destination::Works).await;
        assert_eq!(Some(&all().await), seen.last(), "kept over a restart");
    }
}

/// A tracer that keeps nothing.
struct NoTracer;

impl Propagator for NoTracer {
    fn current(&self) -> Option<TraceContext> {
        None
    }

    fn context_of(&self, _: &Span) -> Option<TraceContext> {
        None
    }

    fn set_parent(&self, _: &Span, _: &TraceContext) {}
    fn link(&self, _: &Span, _: &TraceContext) {}
}

pub async fn a_trace_has_the_position_where_one_is_claimed(fixture: &dyn SinkFixture) {
    trace::set_propagator(NoTracer);
    let (sink, sent) = (fixture.sink(), deliveries([event("1"), event("2")]));
    let outcomes = deliver(&sink, &sent).with_subscriber(Warnings::default()).await;
    let position = |outcome: &Outcome| match outcome {
        Outcome::Delivered { position, .. } => position.clone(),
        _ => panic!("delivered, not {outcome:?}"),
    };
    let positions: Vec<Option<String>> = outcomes.iter().map(position).collect();
    let claims = fixture.traits().positions;
    assert!(positions.iter().all(|it| it.as_ref().is_some_and(|it| !it.is_empty()) == claims), "{outcomes:?}");
    assert!(!claims || positions[0] != positions[1], "{outcomes:?}");
}

fn is_final(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Delivered { .. } | Outcome::Dead { .. } | Outcome::Gone { .. })
}

/// Asserts that these arrived, in any order, and nothing else.
async fn all_arrived(fixture: &dyn SinkFixture, sent: &[Delivery]) {
    let mut arrived = fixture.arrived().await;
    let mut expected: Vec<Vec<u8>> = sent.iter().map(|delivery| delivery.event.payload.to_vec()).collect();
    arrived.sort();
    expected.sort();
    assert_eq!(arrived, expected);
}

/// Delivers in calls the sink allows, and asserts that each returns one outcome per delivery.
async fn deliver(sink: &Arc<dyn Sink>, deliveries: &[Delivery]) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    for call in deliveries.chunks(sink.capabilities().batch_max) {
        let call: Vec<&Delivery> = call.iter().collect();
        let answer =
            tokio::time::timeout(PATIENCE, sink.deliver(&call)).await.expect("a sink never waits for better times");
        assert_eq!(answer.len(), call.len(), "one outcome per delivery");
        outcomes.extend(answer);
    }
    outcomes
}

/// Returns deliveries with ids that are unique across all calls, so that a destination that
/// deduplicates takes them for different ones.
fn deliveries(events: impl IntoIterator<Item = NewEvent>) -> Vec<Delivery> {
    static IDS: AtomicU64 = AtomicU64::new(1);
    let delivery = |(event, n): (NewEvent, i64)| {
        let id = u128::from(IDS.fetch_add(1, Ordering::Relaxed));
        let id = EventId::from_uuid(uuid::Uuid::from_u128(0x0190_0000_0000_7000_8000_0000_0000_0000 + id));
        let event = event.into_event(id, Timestamp::UNIX_EPOCH);
        Delivery { event, seq: Seq(n), attempt: 1, replay: 0, trace: None }
    };
    events.into_iter().zip(1..).map(delivery).collect()
}

/// Returns whether a code is a word an operator can filter by.
fn is_stable(code: &str) -> bool {
    !code.is_empty() && code.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}
