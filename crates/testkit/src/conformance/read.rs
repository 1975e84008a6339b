//! Reading the stream: batches, positions, prefetch, lanes, filters.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use postbox_core::{BatchLimit, Filter, LogName, NewEvent, Settlement, StartAt, Subscription, Tenant};

use super::StoreFixture;
use super::harness::*;

pub async fn an_empty_log_gives_an_empty_batch_at_once(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    for _ in 0..2 {
        let batch = tokio::time::timeout(PATIENCE, lane.next(10)).await.expect("at once");
        assert!(batch.is_empty() && !batch.more && batch.due_in.is_none(), "{batch:?}");
        assert!(lane.due(10).await.deliveries.is_empty());
    }
}

pub async fn events_come_in_the_order_appended(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::unread(fixture, numbered(3)).await;
    append(&lane.store, [event("4"), event("5")]).await;
    let batch = lane.next(10).await;
    assert_eq!(payloads(&batch.deliveries), ["1", "2", "3", "4", "5"]);
    assert!(batch.deliveries.windows(2).all(|pair| pair[0].seq < pair[1].seq));
    assert!(batch.deliveries.iter().all(|delivery| (delivery.attempt, delivery.replay) == (1, 0)));
    assert!(batch.end >= batch.deliveries.last().map(|last| last.seq));
    assert!(batch.held.is_empty() && batch.discarded.is_empty() && !batch.more);
}

pub async fn settled_events_never_come_again(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::unread(fixture, numbered(25)).await;
    let mut seen = Vec::new();
    loop {
        let batch = lane.next(7).await;
        if batch.is_empty() {
            break;
        }
        assert!((1..=7).contains(&batch.deliveries.len()));
        lane.settle(&batch, vec![]).await;
        seen.extend(payloads(&batch.deliveries));
    }
    let expected: Vec<String> = (1..=25).map(|n| n.to_string()).collect();
    assert_eq!(seen, expected);
    assert!(lane.taken_over().await.drain().await.is_empty(), "the position is stored");
}

pub async fn the_byte_limit_holds_and_a_larger_event_comes_alone(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let sized = |bytes: usize| event(&"x".repeat(bytes));
    append(&lane.store, [sized(40), sized(40), sized(40), sized(500), sized(10)]).await;
    let limit = BatchLimit { events: 100, payload_bytes: 100 };
    let mut sizes = Vec::new();
    loop {
        let batch = lane.store.next_batch(&lane.lease, limit).await.expect("the lane can be read");
        if batch.is_empty() {
            break;
        }
        lane.settle(&batch, vec![]).await;
        sizes.push(batch.deliveries.iter().map(|delivery| delivery.event.payload.len()).collect::<Vec<_>>());
    }
    assert_eq!(sizes, [vec![40, 40], vec![40], vec![500], vec![10]]);
}

pub async fn what_was_not_settled_is_given_to_the_next_holder(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::unread(fixture, numbered(6)).await;
    let first = lane.next(2).await;
    lane.settle(&first, vec![]).await;
    let lost = lane.next(2).await;
    let again = lane.taken_over().await.next(2).await;
    assert_eq!(again.deliveries, lost.deliveries, "the same events, still at their first attempt");
}

pub async fn batches_can_be_prefetched_and_settled_in_order(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::unread(fixture, numbered(5)).await;
    let first = lane.next(2).await;
    assert!(first.more);
    let second = lane.next(2).await;
    assert!(second.more);
    let third = lane.next(2).await;
    assert!(!third.more);
    for (batch, expected) in [(&first, vec!["1", "2"]), (&second, vec!["3", "4"]), (&third, vec!["5"])] {
        assert_eq!(payloads(&batch.deliveries), expected);
        lane.settle(batch, vec![]).await;
    }
    append(&lane.store, [event("6")]).await;
    assert_eq!(payloads(&lane.drain().await), ["6"]);
}

pub async fn prefetched_batches_come_again_after_a_crash(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::unread(fixture, numbered(5)).await;
    let first = lane.next(2).await;
    let _prefetched = lane.next(2).await;
    lane.settle(&first, vec![]).await;
    assert_eq!(payloads(&lane.taken_over().await.drain().await), ["3", "4", "5"]);
}

/// Events keep arriving, and a former holder has opened the window.
pub async fn a_lease_knows_when_it_has_read_what_was_there(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::unread(fixture, numbered(5)).await;
    lane.settle(&lane.next(2).await, vec![]).await;
    append(&lane.store, [event("6")]).await;
    let lane = lane.taken_over().await;
    let mut seen = Vec::new();
    loop {
        let batch = lane.next(1).await;
        append(&lane.store, [event("later")]).await;
        lane.settle(&batch, vec![]).await;
        seen.extend(payloads(&batch.deliveries));
        if batch.caught_up {
            break;
        }
        assert!(seen.len() < 10, "it never knows: {seen:?}");
    }
    assert_eq!(seen.get(..4).unwrap_or(&seen), ["3", "4", "5", "6"]);
}

/// Reading on before the end of a window is settled is not required, but must not lose an event.
pub async fn reading_on_before_settling_loses_nothing(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::unread(fixture, numbered(2)).await;
    assert!(!lane.next(10).await.more);
    append(&lane.store, [event("3")]).await;
    let limit = BatchLimit::default();
    let _whatever_it_gives = lane.store.next_batch(&lane.lease, limit).await;
    let _again = lane.store.next_batch(&lane.lease, limit).await;
    assert_eq!(payloads(&lane.taken_over().await.drain().await), ["1", "2", "3"]);
}

/// In the middle of a window, at its end, beside an exception, and with a filter that has changed.
pub async fn settling_and_reading_on_in_one_call_is_the_same_as_in_two(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::unread(fixture, numbered(3)).await;
    let mut batch = lane.next(2).await;
    batch = lane.settle_and_next(&batch, vec![]).await;
    assert_eq!(payloads(&batch.deliveries), ["3"]);
    append(&lane.store, [keyed("a", "4")]).await;
    batch = lane.settle_and_next(&batch, vec![]).await;
    assert_eq!(payloads(&batch.deliveries), ["4"]);
    append(&lane.store, [keyed("a", "5")]).await;
    batch = lane.settle_and_next(&batch, vec![(0, retry_now())]).await;
    assert_eq!((payloads(&batch.deliveries), batch.held.len()), (vec!["5".to_owned()], 1));
    batch = lane.settle_and_next(&batch, vec![(0, Block)]).await;
    assert!(batch.is_empty());
    assert_eq!(payloads(&lane.drain_due().await), ["4", "5"]);
    append(&lane.store, [event("6")]).await;
    batch = lane.next(10).await;
    lane.store.subscribe(&reader_of("rare")).await.expect("another filter");
    append(&lane.store, [event("7"), NewEvent::json("rare", "8")]).await;
    let mut seen = Vec::new();
    while !batch.is_empty() {
        seen.extend(payloads(&batch.deliveries));
        batch = lane.settle_and_next(&batch, vec![]).await;
    }
    seen.extend(payloads(&lane.drain().await));
    assert_eq!(seen, ["6", "8"]);
    let stats = stats(&lane.store).await;
    assert_eq!((stats.dispatched, stats.pending, stats.skipped), (7, 0, 1));
    append(&lane.store, [NewEvent::json("rare", "9")]).await;
    batch = lane.next(10).await;
    let other = lane.taken_over().await;
    let settlement = Settlement { position: batch.end, entries: Vec::new(), rewind: false, hold_keys: true };
    stale(lane.store.settle_and_read(&lane.lease, settlement, BatchLimit::default()).await);
    assert_eq!(payloads(&other.drain().await), ["9"], "the position is stored, and no more than that");
}

pub async fn a_rewind_reads_on_right_after_the_position(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::unread(fixture, numbered(6)).await;
    let batch = lane.next(4).await;
    assert!(batch.more);
    let _prefetched = lane.next(4).await;
    lane.rewind(Some(batch.deliveries[1].seq)).await;
    assert_eq!(payloads(&lane.next(3).await.deliveries), ["3", "4", "5"]);
    assert_eq!(payloads(&lane.taken_over().await.drain().await), ["3", "4", "5", "6"]);
}

pub async fn a_rewind_without_a_position_reads_on_after_the_last_settled(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::unread(fixture, numbered(4)).await;
    lane.rewind(None).await;
    let first = lane.next(1).await;
    lane.settle(&first, vec![]).await;
    let _unsent = lane.next(2).await;
    lane.rewind(None).await;
    assert_eq!(payloads(&lane.drain().await), ["2", "3", "4"]);
}

pub async fn subscriptions_read_independently(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let other = Lane::open_as(fixture, &reader_named("other")).await;
    append(&lane.store, numbered(3)).await;
    assert_eq!(lane.drain().await.len(), 3);
    assert_eq!(other.drain().await.len(), 3);
    let late = Lane::open_as(fixture, &reader_named("late")).await;
    assert_eq!(late.drain().await.len(), 3, "from the beginning");
}

pub async fn logs_are_separate(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    let inbox = Lane::open_as(fixture, &Subscription { name: named("in"), log: LogName::inbox(), ..reader() }).await;
    append(&lane.store, [event("out")]).await;
    lane.store.append(&LogName::inbox(), &[event("in")]).await.expect("appended");
    assert_eq!(payloads(&lane.drain().await), ["out"]);
    assert_eq!(payloads(&inbox.drain().await), ["in"]);
}

pub async fn starting_now_skips_what_was_committed_before(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    append(&store, [event("old")]).await;
    let lane = Lane::open_as(fixture, &Subscription { start: StartAt::Now, ..reader() }).await;
    assert!(lane.drain().await.is_empty());
    append(&store, [event("new")]).await;
    assert_eq!(payloads(&lane.drain().await), ["new"]);
}

pub async fn lanes_partition_the_events_and_keep_keys_together(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &Subscription { lanes: Some(4), ..reader() }).await;
    let mut lanes = Vec::new();
    for _ in 0..4 {
        lanes.push(Lane::take(&store, "reader", "one").await);
    }
    let mut home: BTreeMap<String, u16> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for round in 0..2 {
        let mut events = Vec::new();
        for n in 0..40 {
            events.push(keyed(&format!("key-{n}"), &format!("{round}-k{n}")));
            events.push(event(&format!("{round}-n{n}")));
        }
        append(&store, events).await;
        for lane in &lanes {
            for delivery in lane.drain().await {
                if let Some(key) = &delivery.event.key {
                    let home = home.entry(key.to_string()).or_insert(lane.lease.lane);
                    assert_eq!(*home, lane.lease.lane, "key {key} changed lanes");
                }
                assert!(seen.insert(delivery.event.id), "given by two lanes");
            }
        }
    }
    assert_eq!(seen.len(), 160, "every event has a lane");
    assert_eq!(home.values().collect::<BTreeSet<_>>().len(), 4, "40 keys spread over all lanes");
}

pub async fn only_wanted_topics_come_and_like_wildcards_are_literal(fixture: &dyn StoreFixture) {
    let topics =
        ["order.paid", "order.item.added", "order", "orderXpaid", "a_b", "aXb", "100%", "100x", r"c\d", "C\\D", "[x]"];
    let store = fixture.store();
    append(&store, topics.map(|topic| NewEvent::json(topic, topic.to_owned()))).await;
    for (n, (patterns, expected)) in [
        (vec!["order.*"], vec!["order.paid", "order.item.added"]),
        (vec!["order"], vec!["order"]),
        (vec!["a_b"], vec!["a_b"]),
        (vec!["a_*"], vec!["a_b"]),
        (vec!["100%"], vec!["100%"]),
        (vec!["%"], vec![]),
        (vec![r"c\d"], vec![r"c\d"]),
        (vec![r"c\*"], vec![r"c\d"]),
        (vec!["[x]"], vec!["[x]"]),
        (vec!["*.paid", "a_b"], vec!["order.paid", "a_b"]),
        (vec!["*"], topics.to_vec()),
        (vec![], topics.to_vec()),
    ]
    .into_iter()
    .enumerate()
    {
        let filter = Filter { topics: patterns.iter().map(|topic| pattern(topic)).collect(), ..Filter::default() };
        let wanting = Subscription { filter, ..reader_named(&format!("reader-{n}")) };
        let lane = Lane::open_as(fixture, &wanting).await;
        assert_eq!(payloads(&lane.drain().await), expected, "wanted {patterns:?}");
    }
}

pub async fn only_the_wanted_tenant_comes(fixture: &dyn StoreFixture) {
    let tenant = |name: &str| Some(Tenant::new(name).expect("a tenant"));
    let filter = Filter { tenant: tenant("acme"), ..Filter::default() };
    let lane = Lane::open_as(fixture, &Subscription { filter, ..reader() }).await;
    let events = [event("1").tenant("acme"), event("2").tenant("Acme"), event("3"), event("4").tenant("acme")];
    append(&lane.store, events).await;
    assert_eq!(payloads(&lane.drain().await), ["1", "4"]);
}

pub async fn unwanted_events_are_passed_over(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("wanted")).await;
    let wanted = |payload: &str| NewEvent::json("wanted", payload.to_owned());
    for n in 0..3 {
        append(&lane.store, vec![event("noise"); 50]).await;
        append(&lane.store, [wanted(&n.to_string())]).await;
        append(&lane.store, vec![event("noise"); 50]).await;
        let batch = lane.next(1).await;
        assert_eq!(payloads(&batch.deliveries), [n.to_string()]);
        lane.settle(&batch, vec![]).await;
        assert!(lane.drain().await.is_empty());
    }
    assert_eq!(stats(&lane.store).await.total, 3);
}

pub async fn an_append_wakes_a_waiting_relay(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    assert!(lane.next(10).await.is_empty());
    let (store, lease) = (lane.store.clone(), lane.lease.clone());
    let waiting = tokio::spawn(async move { store.hint(&lease).await });
    tokio::task::yield_now().await;
    append(&lane.store, [event("1")]).await;
    tokio::time::timeout(PATIENCE, waiting).await.expect("woken").expect("no panic");
    assert_eq!(payloads(&lane.drain().await), ["1"]);
}

pub async fn an_append_before_the_wait_is_read_without_a_hint(fixture: &dyn StoreFixture) {
    let lane = Lane::open(fixture).await;
    assert!(lane.next(10).await.is_empty());
    append(&lane.store, [event("1")]).await;
    let _may_resolve_or_not = tokio::time::timeout(Duration::from_millis(50), lane.store.hint(&lane.lease)).await;
    assert_eq!(payloads(&lane.drain().await), ["1"], "a hint is only a hint");
}
