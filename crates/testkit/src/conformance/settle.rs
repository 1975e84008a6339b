//! Settling: retries, due rows, what people did meanwhile. Keys and their followers are in `hold`.

use std::collections::HashSet;
use std::time::Duration;

use postbox_core::{
    BatchLimit, Disposition, Entry, Filter, Key, NewEvent, Selection, Settlement, State, Subscription, TopicPattern,
};

use super::StoreFixture;
use super::harness::*;

/// A failed event comes again, not before its time, and counts its attempts.
pub async fn a_retry_comes_at_its_time_with_the_next_attempt(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let ids = lane.past(vec![event("1")], vec![(0, retry(HOUR))]).await;
    assert!(lane.due(10).await.deliveries.is_empty(), "not yet");
    let waiting = record(&lane.store, ids[0]).await;
    assert_eq!((waiting.state, waiting.attempts), (State::Retrying, 1));
    assert_eq!((waiting.code.as_deref(), waiting.error.as_deref()), (Some("http_500"), Some("it said no")));
    assert!(waiting.due_at.is_some() && waiting.updated_at.is_some());
    let ids = lane.past(vec![event("2")], vec![(0, retry(SHORT))]).await;
    fixture.pass(2 * SHORT).await;
    let due = lane.due(10).await;
    assert_eq!(payloads(&due.deliveries), ["2"]);
    assert_eq!(due.deliveries[0].attempt, 2);
    assert!(due.end.is_none() && due.held.is_empty());
    lane.settle_due(&due, vec![retry(Duration::ZERO)]).await;
    assert_eq!(lane.due(10).await.deliveries[0].attempt, 3);
    assert_eq!(record(&lane.store, ids[0]).await.attempts, 2);
}

/// A destination that was down is not the event's fault.
pub async fn an_uncounted_retry_does_not_raise_the_attempt(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let uncounted = || Disposition::Retry {
        after: Duration::ZERO,
        counted: false,
        code: "connect_refused".into(),
        error: "nobody home".into(),
    };
    let ids = lane.past(vec![event("1")], vec![(0, uncounted())]).await;
    for _ in 0..3 {
        let due = lane.due(10).await;
        assert_eq!(due.deliveries[0].attempt, 1);
        lane.settle_due(&due, vec![uncounted()]).await;
    }
    let waiting = record(&lane.store, ids[0]).await;
    assert_eq!((waiting.attempts, waiting.code.as_deref()), (0, Some("connect_refused")));
}

/// Delivered at last: the row goes.
pub async fn a_delivered_due_row_is_dispatched(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let ids = lane.past(vec![event("1")], vec![(0, retry(Duration::ZERO))]).await;
    assert_eq!(payloads(&lane.drain_due().await), ["1"]);
    assert_eq!(record(&lane.store, ids[0]).await.state, State::Dispatched);
    assert!(lane.due(10).await.deliveries.is_empty());
}

/// One call may pass several windows that hold nothing for the lane. Rows that are settled beside it are settled all the same.
pub async fn due_rows_settle_while_windows_without_anything_pass(fixture: &dyn StoreFixture) {
    let topics = vec![TopicPattern::new("order.*").expect("a pattern")];
    let lane = Lane::open_as(fixture, &Subscription { filter: Filter { topics, tenant: None }, ..reader() }).await;
    lane.past(vec![event("1")], vec![(0, retry(Duration::ZERO))]).await;
    let unwanted = [NewEvent::json("parcel.sent", "{}")];
    for _ in 0..100 {
        let appended = async {
            for _ in 0..4 {
                append(&lane.store, &unwanted).await;
            }
        };
        let settled = async {
            let due = lane.due(10).await;
            lane.settle_due(&due, vec![retry(Duration::ZERO)]).await;
        };
        let (batch, ()) = futures::join!(lane.next(10), async {
            futures::join!(appended, settled);
        });
        assert!(batch.deliveries.is_empty());
    }
}

/// What was due but not settled is still due for the next holder.
pub async fn an_unsettled_due_row_comes_again_after_a_takeover(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    lane.past(vec![event("1")], vec![(0, retry(Duration::ZERO))]).await;
    let lost = lane.due(10).await;
    let again = lane.taken_over().await.due(10).await;
    assert_eq!(again.deliveries, lost.deliveries);
}

/// Position, rows and releases in one settlement.
pub async fn a_mixed_settlement_is_written_whole(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let events = (1..=6).map(|n| keyed(if n < 3 { "a" } else { "b" }, &n.to_string())).collect();
    let far = jiff::Timestamp::UNIX_EPOCH + 400 * 365 * 24 * HOUR;
    lane.past(
        events,
        vec![(0, retry(HOUR)), (1, Disposition::Block), (3, dead()), (4, Disposition::Schedule { at: far })],
    )
    .await;
    let stats = stats(&lane.store).await;
    assert_eq!((stats.total, stats.pending, stats.dispatched), (6, 3, 2));
    assert_eq!((stats.retrying, stats.blocked, stats.scheduled, stats.dead), (1, 1, 1, 1));
}

/// A settlement may stop short and still write down what failed before it.
pub async fn a_partial_settlement_keeps_its_rows_and_gives_the_rest_again(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    append(&lane.store, [keyed("a", "1"), keyed("b", "2"), keyed("a", "3"), keyed("c", "4")]).await;
    let batch = lane.next(10).await;
    lane.write(Settlement {
        position: Some(batch.deliveries[1].seq),
        entries: vec![Entry { delivery: &batch.deliveries[0], disposition: retry(HOUR) }],
        rewind: true,
        hold_keys: true,
    })
    .await;
    let rest = lane.next(10).await;
    assert_eq!(payloads(&rest.deliveries), ["3", "4"]);
    assert_eq!(rest.held, HashSet::from([Key::new("a").expect("a key")]), "its key is held now");
}

/// A person was faster: the row is gone, the rest is written.
pub async fn settling_a_row_that_was_discarded_meanwhile_succeeds(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let now = || retry(Duration::ZERO);
    let ids = lane.past(vec![keyed("a", "1"), keyed("b", "2")], vec![(0, now()), (1, now())]).await;
    let due = lane.due(10).await;
    let selection = Selection { ids: Some(vec![ids[0]]), ..Selection::default() };
    assert_eq!(lane.store.discard(&named("reader"), &selection).await.expect("discarded").count, 1);
    lane.settle_due(&due, vec![retry(HOUR), Disposition::Delivered]).await;
    assert_eq!(record(&lane.store, ids[0]).await.state, State::Discarded);
    assert_eq!(record(&lane.store, ids[1]).await.state, State::Dispatched);
}

/// The row and its event are gone altogether: discarded and pruned.
pub async fn settling_a_row_that_was_pruned_meanwhile_succeeds(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let now = || retry(Duration::ZERO);
    let ids = lane.past(vec![keyed("a", "1"), keyed("b", "2")], vec![(0, now()), (1, now())]).await;
    let due = lane.due(10).await;
    let selection = Selection { ids: Some(vec![ids[0]]), ..Selection::default() };
    assert_eq!(lane.store.discard(&named("reader"), &selection).await.expect("discarded").count, 1);
    fixture.pass(SHORT).await;
    assert_eq!(lane.store.prune(&outbox(), Duration::ZERO).await.expect("pruned"), 1);
    lane.settle_due(&due, vec![retry(Duration::ZERO), retry(Duration::ZERO)]).await;
    assert_eq!(payloads(&lane.due(10).await.deliveries), ["2"], "nothing comes back from the dead");
    assert_eq!(stats(&lane.store).await.total, 1);
}

/// Discarded on its way: it may have arrived, but it is not sent again.
pub async fn an_event_discarded_in_flight_is_not_retried(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let ids = append(&lane.store, [keyed("a", "1"), keyed("b", "2")]).await;
    let batch = lane.next(10).await;
    let selection = Selection { ids: Some(vec![ids[0]]), ..Selection::default() };
    assert_eq!(lane.store.discard(&named("reader"), &selection).await.expect("discarded").count, 1);
    lane.settle(&batch, vec![(0, retry(Duration::ZERO)), (1, retry(Duration::ZERO))]).await;
    assert_eq!(payloads(&lane.due(10).await.deliveries), ["2"]);
    assert_eq!(record(&lane.store, ids[0]).await.state, State::Discarded);
}

/// Discarded before it was read: it comes marked, so that the cursor can pass it, and is not sent.
pub async fn an_event_discarded_before_it_was_read_is_marked(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let ids = append(&lane.store, numbered(3)).await;
    let selection = Selection { ids: Some(vec![ids[1]]), ..Selection::default() };
    assert_eq!(lane.store.discard(&named("reader"), &selection).await.expect("discarded").count, 1);
    let batch = lane.next(10).await;
    let unmarked: Vec<_> =
        batch.deliveries.iter().filter(|delivery| !batch.discarded.contains(&delivery.seq)).cloned().collect();
    assert_eq!(payloads(&unmarked), ["1", "3"]);
    let confirmed = (0..batch.deliveries.len()).filter(|index| batch.discarded.contains(&batch.deliveries[*index].seq));
    lane.settle(&batch, confirmed.map(|index| (index, Disposition::Discarded)).collect()).await;
    assert_eq!(record(&lane.store, ids[1]).await.state, State::Discarded);
    let stats = stats(&lane.store).await;
    assert_eq!((stats.dispatched, stats.discarded, stats.pending), (2, 1, 0));
}

/// A lane's failures are retried by that lane.
pub async fn due_rows_stay_in_their_lane(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    store.subscribe(&Subscription { lanes: 2, ..reader() }).await.expect("new");
    let lanes = [Lane::take(&store, "reader", "one").await, Lane::take(&store, "reader", "two").await];
    append(&store, numbered(20)).await;
    let mut failed = Vec::new();
    for lane in &lanes {
        let batch = lane.next(100).await;
        assert!(!batch.deliveries.is_empty(), "20 keys spread over two lanes");
        lane.settle(&batch, (0..batch.deliveries.len()).map(|index| (index, retry(Duration::ZERO))).collect()).await;
        failed.push(payloads(&batch.deliveries));
    }
    for (lane, failed) in lanes.iter().zip(failed) {
        assert_eq!(payloads(&lane.due(100).await.deliveries), failed);
    }
}

/// The relay knows when to come back.
pub async fn the_earliest_wait_is_told(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    lane.past(vec![keyed("a", "1"), keyed("b", "2")], vec![(0, retry(HOUR)), (1, retry(2 * HOUR))]).await;
    for batch in [lane.next(10).await, lane.due(10).await] {
        if let Some(due_in) = batch.due_in {
            assert!(due_in <= HOUR && due_in > HOUR / 2, "{due_in:?}");
        }
    }
    lane.past(vec![keyed("c", "3")], vec![(0, retry(Duration::ZERO))]).await;
    for batch in [lane.next(10).await, lane.due(10).await] {
        assert!(batch.due_in.is_none_or(|due_in| due_in.is_zero()), "{:?}", batch.due_in);
    }
}

/// Error texts come from strangers: any length, any character.
pub async fn a_hostile_error_text_is_cut_not_refused(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let said =
        |error: String| Disposition::Retry { after: Duration::ZERO, counted: true, code: "http_500".into(), error };
    let long = "é".repeat(5_000);
    let ids = lane
        .past(
            vec![event("1"), event("2"), event("3")],
            vec![(0, said(long.clone())), (1, said("a\0b\u{1b}[31m'; drop table x".into())), (2, said(String::new()))],
        )
        .await;
    let kept = record(&lane.store, ids[0]).await.error.expect("an error text");
    assert!(kept.len() <= postbox_core::limits::ERROR_BYTES_MAX && kept.len() > 2_000, "{} bytes", kept.len());
    assert!(long.starts_with(kept.trim_end_matches('…')), "cut between characters");
    let strange = record(&lane.store, ids[1]).await.error.expect("an error text");
    assert!(strange.starts_with('a') && strange.ends_with("'; drop table x"), "{strange:?}");
    assert_eq!(lane.drain_due().await.len(), 3);
}

/// Byte limits hold for due rows as for the stream, and one larger row still comes.
pub async fn a_large_due_row_comes_in_spite_of_the_byte_limit(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let now = || retry(Duration::ZERO);
    lane.past(vec![event(&"x".repeat(500)), event("y")], vec![(0, now()), (1, now())]).await;
    let limit = BatchLimit { events: 10, payload_bytes: 100 };
    let due = lane.store.due(&lane.lease, limit).await.expect("the due rows");
    assert_eq!(due.deliveries.len(), 1);
    assert_eq!(due.deliveries[0].event.payload.len(), 500);
}

/// The cases of this suite.
#[doc(hidden)]
#[macro_export]
macro_rules! settle_cases {
    ($fixture:expr) => {
        $crate::conformance_cases!(
            settle,
            $fixture,
            [
                due_rows_settle_while_windows_without_anything_pass,
                a_retry_comes_at_its_time_with_the_next_attempt,
                an_uncounted_retry_does_not_raise_the_attempt,
                a_delivered_due_row_is_dispatched,
                an_unsettled_due_row_comes_again_after_a_takeover,
                a_mixed_settlement_is_written_whole,
                a_partial_settlement_keeps_its_rows_and_gives_the_rest_again,
                settling_a_row_that_was_discarded_meanwhile_succeeds,
                settling_a_row_that_was_pruned_meanwhile_succeeds,
                an_event_discarded_in_flight_is_not_retried,
                an_event_discarded_before_it_was_read_is_marked,
                due_rows_stay_in_their_lane,
                the_earliest_wait_is_told,
                a_hostile_error_text_is_cut_not_refused,
                a_large_due_row_comes_in_spite_of_the_byte_limit,
            ]
        );
    };
}
