//! Settling: retries, due rows, changes by people meanwhile. Keys and their followers are in
//! `hold`.

use std::collections::HashSet;
use std::time::Duration;

use postbox_core::limits::ANSWER_CHARS_MAX;
use postbox_core::{BatchLimit, Disposition, Entry, Key, NewEvent, Prune, Settlement, State, Subscription};

use super::StoreFixture;
use super::harness::*;

pub async fn a_retry_comes_at_its_time_with_the_next_attempt(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(event("1"), retry(HOUR))]).await;
    assert!(lane.due(10).await.deliveries.is_empty(), "not yet");
    let waiting = record(&lane.store, ids[0]).await;
    assert_eq!((waiting.state, waiting.attempts), (State::Retrying, 1));
    assert_eq!((waiting.code.as_deref(), waiting.error.as_deref()), (Some("http_500"), Some("it said no")));
    assert!(waiting.due_at.is_some() && waiting.updated_at.is_some());
    let ids = lane.past([(event("2"), retry(SHORT))]).await;
    fixture.pass(2 * SHORT).await;
    let due = lane.due(10).await;
    assert_eq!(payloads(&due.deliveries), ["2"]);
    assert_eq!(due.deliveries[0].attempt, 2);
    assert!(due.end.is_none() && due.held.is_empty());
    lane.settle_due(&due, vec![retry_now()]).await;
    assert_eq!(lane.due(10).await.deliveries[0].attempt, 3);
    assert_eq!(record(&lane.store, ids[0]).await.attempts, 2);
}

pub async fn an_uncounted_retry_does_not_raise_the_attempt(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let uncounted = || Disposition::Retry {
        after: Duration::ZERO,
        counted: false,
        code: "connect_refused".into(),
        error: "nobody home".into(),
        took: None,
    };
    let ids = lane.past([(event("1"), uncounted())]).await;
    for _ in 0..3 {
        let due = lane.due(10).await;
        assert_eq!(due.deliveries[0].attempt, 1);
        lane.settle_due(&due, vec![uncounted()]).await;
    }
    let waiting = record(&lane.store, ids[0]).await;
    assert_eq!((waiting.attempts, waiting.code.as_deref()), (0, Some("connect_refused")));
}

pub async fn a_delivered_due_row_is_dispatched(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(event("1"), retry_now())]).await;
    assert_eq!(payloads(&lane.drain_due().await), ["1"]);
    assert_eq!(record(&lane.store, ids[0]).await.state, State::Dispatched);
    assert!(lane.due(10).await.deliveries.is_empty());
}

/// One read may pass several windows without events for the lane, while due rows are settled.
pub async fn due_rows_settle_while_windows_without_anything_pass(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("order.*")).await;
    lane.past([(event("1"), retry_now())]).await;
    let unwanted = [NewEvent::json("parcel.sent", "{}")];
    for _ in 0..100 {
        let appended = async {
            for _ in 0..4 {
                append(&lane.store, &unwanted).await;
            }
        };
        let settled = async {
            let due = lane.due(10).await;
            lane.settle_due(&due, vec![retry_now()]).await;
        };
        let (batch, ()) = futures::join!(lane.next(10), async {
            futures::join!(appended, settled);
        });
        assert!(batch.deliveries.is_empty());
    }
}

pub async fn an_unsettled_due_row_comes_again_after_a_takeover(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(event("1"), retry_now())]).await;
    let lost = lane.due(10).await;
    let again = lane.taken_over().await.due(10).await;
    assert_eq!(again.deliveries, lost.deliveries);
}

pub async fn a_mixed_settlement_is_written_whole(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let events = (1..=6).map(|n| keyed(if n < 3 { "a" } else { "b" }, &n.to_string()));
    lane.past(events.zip([retry(HOUR), Block, Delivered, dead(), scheduled(), Delivered])).await;
    let stats = stats(&lane.store).await;
    assert_eq!((stats.total, stats.pending, stats.dispatched), (6, 3, 2));
    assert_eq!((stats.retrying, stats.blocked, stats.scheduled, stats.dead), (1, 1, 1, 1));
}

pub async fn a_partial_settlement_keeps_its_rows_and_gives_the_rest_again(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::unread(fixture, [keyed("a", "1"), keyed("b", "2"), keyed("a", "3"), keyed("c", "4")]).await;
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

pub async fn settling_a_row_that_was_discarded_meanwhile_succeeds(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(keyed("a", "1"), retry_now()), (keyed("b", "2"), retry_now())]).await;
    let due = lane.due(10).await;
    assert_eq!(lane.discard(these(&[ids[0]])).await, 1);
    lane.settle_due(&due, vec![retry(HOUR), Delivered]).await;
    assert_eq!(record(&lane.store, ids[0]).await.state, State::Discarded);
    assert_eq!(record(&lane.store, ids[1]).await.state, State::Dispatched);
}

pub async fn settling_a_row_that_was_pruned_meanwhile_succeeds(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(keyed("a", "1"), retry_now()), (keyed("b", "2"), retry_now())]).await;
    let due = lane.due(10).await;
    assert_eq!(lane.discard(these(&[ids[0]])).await, 1);
    fixture.pass(SHORT).await;
    assert_eq!(lane.store.prune(&outbox(), &Prune::default()).await.expect("pruned").count, 1);
    lane.settle_due(&due, vec![retry_now(), retry_now()]).await;
    assert_eq!(payloads(&lane.due(10).await.deliveries), ["2"], "nothing comes back from the dead");
    assert_eq!(stats(&lane.store).await.total, 1);
}

pub async fn an_event_discarded_in_flight_is_not_retried(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::unread(fixture, [keyed("a", "1"), keyed("b", "2")]).await;
    let batch = lane.next(10).await;
    assert_eq!(lane.discard(these(&[ids[0]])).await, 1);
    lane.settle(&batch, vec![(0, retry_now()), (1, retry_now())]).await;
    assert_eq!(payloads(&lane.due(10).await.deliveries), ["2"]);
    assert_eq!(record(&lane.store, ids[0]).await.state, State::Discarded);
}

/// An event discarded before it was read is returned with a mark, so that the cursor passes it
/// unsent.
pub async fn an_event_discarded_before_it_was_read_is_marked(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::unread(fixture, numbered(3)).await;
    assert_eq!(lane.discard(these(&[ids[1]])).await, 1);
    let batch = lane.next(10).await;
    let unmarked: Vec<_> =
        batch.deliveries.iter().filter(|delivery| !batch.discarded.contains(&delivery.seq)).cloned().collect();
    assert_eq!(payloads(&unmarked), ["1", "3"]);
    let confirmed = (0..batch.deliveries.len()).filter(|index| batch.discarded.contains(&batch.deliveries[*index].seq));
    lane.settle(&batch, confirmed.map(|index| (index, Discarded)).collect()).await;
    assert_eq!(record(&lane.store, ids[1]).await.state, State::Discarded);
    let stats = stats(&lane.store).await;
    assert_eq!((stats.dispatched, stats.discarded, stats.pending), (2, 1, 0));
}

pub async fn due_rows_stay_in_their_lane(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &Subscription { lanes: Some(2), ..reader() }).await;
    let lanes = [Lane::take(&store, "reader", "one").await, Lane::take(&store, "reader", "two").await];
    append(&store, numbered(20)).await;
    let mut failed = Vec::new();
    for lane in &lanes {
        let batch = lane.next(100).await;
        assert!(!batch.deliveries.is_empty(), "20 keys spread over two lanes");
        lane.settle(&batch, (0..batch.deliveries.len()).map(|index| (index, retry_now())).collect()).await;
        failed.push(payloads(&batch.deliveries));
    }
    for (lane, failed) in lanes.iter().zip(failed) {
        assert_eq!(payloads(&lane.due(100).await.deliveries), failed);
    }
}

pub async fn the_earliest_wait_is_reported(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(keyed("a", "1"), retry(HOUR)), (keyed("b", "2"), retry(2 * HOUR))]).await;
    for batch in [lane.next(10).await, lane.due(10).await] {
        if let Some(due_in) = batch.due_in {
            assert!(due_in <= HOUR && due_in > HOUR / 2, "{due_in:?}");
        }
    }
    lane.past([(keyed("c", "3"), retry_now())]).await;
    for batch in [lane.next(10).await, lane.due(10).await] {
        assert!(batch.due_in.is_none_or(|due_in| due_in.is_zero()), "{:?}", batch.due_in);
    }
}

pub async fn a_hostile_error_text_is_cut_not_refused(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let said = |error: String| Disposition::Retry {
        after: Duration::ZERO,
        counted: true,
        code: "http_500".into(),
        error,
        took: None,
    };
    let long = "é".repeat(5_000);
    let ids = lane
        .past([
            (event("1"), said(long.clone())),
            (event("2"), said("a\0b\u{1b}[31m'; drop table x".into())),
            (event("3"), said(String::new())),
        ])
        .await;
    let kept = record(&lane.store, ids[0]).await.error.expect("an error text");
    assert!(kept.len() <= postbox_core::limits::ERROR_BYTES_MAX && kept.len() > 2_000, "{} bytes", kept.len());
    assert!(long.starts_with(kept.trim_end_matches('…')), "cut between characters");
    let strange = record(&lane.store, ids[1]).await.error.expect("an error text");
    assert!(strange.starts_with('a') && strange.ends_with("'; drop table x"), "{strange:?}");
    assert_eq!(lane.drain_due().await.len(), 3);
}

pub async fn a_large_due_row_comes_in_spite_of_the_byte_limit(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(event(&"x".repeat(500)), retry_now()), (event("y"), retry_now())]).await;
    let limit = BatchLimit { events: 10, payload_bytes: 100 };
    let due = lane.store.due(&lane.lease, limit).await.expect("the due rows");
    assert_eq!(due.deliveries.len(), 1);
    assert_eq!(due.deliveries[0].event.payload.len(), 500);
}

/// Otherwise an event could be passed over for ever: a relay that looks whether its destination is
/// back reads one.
pub async fn what_is_due_for_longest_comes_first(fixture: &dyn StoreFixture) {
    let due_at = |second| Schedule { at: jiff::Timestamp::UNIX_EPOCH + Duration::from_secs(second) };
    let events = [(event("1"), due_at(3)), (keyed("a", "2"), due_at(2)), (event("3"), due_at(1))];
    let (lane, _) = Lane::settled(fixture, events).await;
    for (events, payload_bytes, expected) in
        [(1, 100, vec!["3"]), (2, 100, vec!["2", "3"]), (10, 1, vec!["3"]), (10, 2, vec!["2", "3"])]
    {
        let limit = BatchLimit { events, payload_bytes };
        let due = lane.store.due(&lane.lease, limit).await.expect("the due rows");
        assert_eq!(payloads(&due.deliveries), expected, "{limit:?}, in the order of the log");
    }
}

/// A disposition of a call that failed and took this many milliseconds.
fn failed(code: &'static str, took_ms: u64) -> Disposition {
    let error = format!("{code}: {}", "é".repeat(1_000));
    let took = Some(Duration::from_millis(took_ms));
    Disposition::Retry { after: Duration::ZERO, counted: true, code: code.into(), error, took }
}

pub async fn the_last_attempts_of_an_event_are_kept(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(event("1"), failed("http_500", 1))]).await;
    let first = record(&lane.store, ids[0]).await;
    let [attempt] = first.last_attempts.as_slice() else { panic!("one: {first:?}") };
    assert_eq!((attempt.code.as_str(), attempt.took), ("http_500", Duration::from_millis(1)));
    assert_eq!(attempt.answer.chars().count(), ANSWER_CHARS_MAX);
    assert!(attempt.answer.starts_with("http_500: é"), "{}", attempt.answer);
    assert!(attempt.next_at.is_some() && attempt.next_at == first.due_at, "{first:?}");
    assert!(attempt.at >= first.event.created_at, "{first:?}");
    for took in 2..=9 {
        let due = lane.due(10).await;
        lane.settle_due(&due, vec![failed("http_503", took)]).await;
    }
    let due = lane.due(10).await;
    let (code, error, took) = ("http_422".into(), "no".to_owned(), Some(Duration::from_millis(10)));
    lane.settle_due(&due, vec![Disposition::Dead { code, error, halt: false, took }]).await;
    let kept = record(&lane.store, ids[0]).await;
    let took: Vec<u128> = kept.last_attempts.iter().map(|attempt| attempt.took.as_millis()).collect();
    assert_eq!(took, (3..=10).collect::<Vec<_>>());
    assert!(kept.last_attempts.is_sorted_by_key(|attempt| attempt.at), "{kept:?}");
    let last = kept.last_attempts.last().expect("eight");
    assert_eq!((last.code.as_str(), last.answer.as_str(), last.next_at), ("http_422", "no", None));
    let listed = lane.store.list(&query(State::Dead)).await.expect("listed");
    assert_eq!(listed[0].last_attempts, kept.last_attempts);
}

pub async fn what_was_not_called_is_no_attempt(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(
        fixture,
        [(keyed("a", "1"), Disposition::NotSent), (keyed("a", "2"), Block), (keyed("b", "3"), failed("http_500", 1))],
    )
    .await;
    let due = lane.due(10).await;
    lane.settle_due(&due, vec![Disposition::Expired { at: jiff::Timestamp::UNIX_EPOCH }, Block, Disposition::NotSent])
        .await;
    let mut kept = Vec::new();
    for id in ids {
        kept.push(record(&lane.store, id).await.last_attempts.len());
    }
    assert_eq!(kept, [0, 0, 1]);
}

/// A person who sends it again wants to know why it had died.
pub async fn a_replay_keeps_the_attempts_before_it(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(event("1"), failed("http_500", 1))]).await;
    let due = lane.due(10).await;
    lane.settle_due(&due, vec![dead()]).await;
    assert_eq!(lane.replay(these(&ids)).await, 1);
    let again = record(&lane.store, ids[0]).await;
    assert_eq!((again.attempts, again.last_attempts.len()), (0, 1));
}
