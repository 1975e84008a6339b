//! Continuing from another position.

use postbox_core::{ErrorKind, NewEvent, ResetTo, Seq, State, Subscription};

use super::StoreFixture;
use super::harness::*;

pub async fn a_reset_to_the_beginning_sends_everything_again(fixture: &dyn StoreFixture) {
    let past = [
        (keyed("a", "1"), Delivered),
        (keyed("b", "2"), dead()),
        (keyed("c", "3"), retry(HOUR)),
        (keyed("c", "4"), Block),
        (event("5"), dead()),
        (event("6"), Delivered),
    ];
    let (lane, ids) = Lane::settled(fixture, past).await;
    assert_eq!(lane.discard(these(&ids[4..5])).await, 1);
    append(&lane.store, [event("7")]).await;
    let store = lane.release().await;
    assert_eq!(reset(&store, ResetTo::Beginning).await, (5, 0), "what was taken out stays so");
    let counted = stats(&store).await;
    assert_eq!((counted.pending, counted.dead, counted.discarded), (6, 0, 1));
    let lane = Lane::take(&store, "reader", "two").await;
    let batch = lane.next(10).await;
    assert_eq!(payloads(&batch.deliveries), ["1", "2", "3", "4", "5", "6", "7"]);
    assert_eq!(batch.discarded.len(), 1);
    assert!(batch.held.is_empty(), "nothing of before holds its key");
    assert!(batch.deliveries.iter().take(6).all(|delivery| delivery.replay > 0), "each has a dedupe id of its own");
    lane.settle(&batch, vec![(4, Discarded)]).await;
    append(&lane.store, [event("8")]).await;
    let new = lane.drain().await;
    assert_eq!((payloads(&new), new[0].replay), (vec!["8".to_owned()], 0));
    assert_eq!(listed(&store, State::Dispatched).await, ["1", "2", "3", "4", "6", "7", "8"]);
    assert!(lane.drain_due().await.is_empty());
}

pub async fn a_reset_to_now_skips_what_is_unread(fixture: &dyn StoreFixture) {
    let (lane, _) =
        Lane::settled(fixture, [(event("1"), Delivered), (event("2"), dead()), (event("3"), retry_now())]).await;
    append(&lane.store, [event("4"), event("5")]).await;
    let store = lane.release().await;
    assert_eq!(plan(&store, ResetTo::Now).await.skipped, 2);
    assert_eq!(stats(&store).await.pending, 3, "a look changes nothing");
    assert_eq!(reset(&store, ResetTo::Now).await, (0, 2));
    append(&store, [event("6")]).await;
    let lane = Lane::take(&store, "reader", "two").await;
    let next = lane.drain().await;
    assert_eq!((payloads(&next), next[0].replay), (vec!["6".to_owned()], 0));
    assert_eq!(payloads(&lane.drain_due().await), ["3"], "what waits still goes");
    assert_eq!(listed(&store, State::Skipped).await, ["4", "5"]);
    assert_eq!(listed(&store, State::Dispatched).await, ["1", "3", "6"]);
    assert_eq!(listed(&store, State::Dead).await, ["2"]);
}

/// A person marked it dead before its lane passed it, and retries it after a reset skipped it.
pub async fn what_is_retried_after_a_reset_skipped_it_is_dispatched(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::unread(fixture, numbered(3)).await;
    assert_eq!(lane.mark_dead(these(&ids[..1])).await, 1);
    let store = lane.release().await;
    reset(&store, ResetTo::Now).await;
    let lane = Lane::take(&store, "reader", "two").await;
    assert_eq!(lane.replay(these(&ids[..1])).await, 1);
    assert_eq!(payloads(&lane.drain_due().await), ["1"]);
    assert_eq!(listed(&store, State::Dispatched).await, ["1"]);
    assert_eq!(listed(&store, State::Skipped).await, ["2", "3"]);
    assert_eq!(stats(&store).await.skipped, 2);
}

pub async fn a_reset_to_a_place_sends_again_and_skips(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::unread(fixture, numbered(6)).await;
    let batch = lane.next(3).await;
    lane.settle(&batch, vec![(1, dead())]).await;
    let store = lane.release().await;
    let mut seqs = Vec::new();
    for id in &ids {
        seqs.push(record(&store, *id).await.seq);
    }
    assert_eq!(reset(&store, ResetTo::Seq(seqs[4])).await, (0, 1));
    let lane = Lane::take(&store, "reader", "two").await;
    assert_eq!(payloads(&lane.drain().await), ["5", "6"]);
    assert_eq!(listed(&store, State::Skipped).await, ["4"]);
    let store = lane.release().await;
    assert_eq!(reset(&store, ResetTo::Seq(seqs[2])).await, (4, 0));
    assert_eq!(listed(&store, State::Dead).await, ["2"], "what is dead before the place stays");
    let lane = Lane::take(&store, "reader", "three").await;
    let again = lane.drain().await;
    assert_eq!(payloads(&again), ["3", "4", "5", "6"]);
    assert!(again.iter().all(|delivery| delivery.replay > 0));
    assert_eq!(listed(&store, State::Dispatched).await, ["1", "3", "4", "5", "6"]);
    let store = lane.release().await;
    assert_eq!(reset(&store, ResetTo::Seq(Seq(i64::MAX))).await, (0, 0));
    append(&store, [event("7")]).await;
    assert_eq!(payloads(&Lane::take(&store, "reader", "four").await.drain().await), ["7"], "no future is skipped");
}

pub async fn a_reset_to_a_time_begins_with_the_first_since(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(event("1"), Delivered), (event("2"), Delivered)]).await;
    fixture.pass(SHORT).await;
    let id = lane.past([(event("3"), Delivered)]).await[0];
    let at = record(&lane.store, id).await.event.created_at;
    let store = lane.release().await;
    assert_eq!(reset(&store, ResetTo::Time(at)).await, (1, 0));
    let lane = Lane::take(&store, "reader", "two").await;
    assert_eq!(payloads(&lane.drain().await), ["3"]);
    let store = lane.release().await;
    append(&store, [event("4")]).await;
    assert_eq!(reset(&store, ResetTo::Time(at + HOUR)).await, (0, 1), "later than all: as of now");
    assert_eq!(listed(&store, State::Skipped).await, ["4"]);
}

/// It is refused instead, because events in flight would belong to another past. It is also refused
/// if a lane was taken since the count.
pub async fn a_reset_waits_for_no_relay(fixture: &dyn StoreFixture) {
    let (lane, _) = Lane::settled(fixture, [(event("1"), Delivered)]).await;
    let store = lane.store.clone();
    let looked = plan(&store, ResetTo::Beginning).await;
    let held = store.reset(&named("reader"), ResetTo::Beginning, Some(&looked.stamp)).await;
    refused(held, ErrorKind::Conflict, "lanes_held");
    lane.taken_over().await.release().await;
    let moved = store.reset(&named("reader"), ResetTo::Beginning, Some(&looked.stamp)).await;
    refused(moved, ErrorKind::Conflict, "subscription_changed");
    assert_eq!(reset(&store, ResetTo::Beginning).await, (1, 0));
    stale(store.renew(&lane.lease, LONG).await);
    let nobody = store.reset(&named("nobody"), ResetTo::Now, None).await;
    refused(nobody, ErrorKind::NotFound, "subscription_unknown");
}

pub async fn a_reset_moves_every_lane_at_once(fixture: &dyn StoreFixture) {
    let store = subscribed(fixture, &Subscription { lanes: Some(3), ..reader() }).await;
    append(&store, numbered(30)).await;
    let lanes = Lane::take_all(&store, "reader").await;
    lanes[0].drain().await;
    let batch = lanes[1].next(2).await;
    lanes[1].settle(&batch, Vec::new()).await;
    let delivered = stats(&store).await.dispatched;
    for lane in lanes {
        lane.release().await;
    }
    assert_eq!(reset(&store, ResetTo::Beginning).await, (delivered, 0));
    let lanes = Lane::take_all(&store, "reader").await;
    assert_eq!((lanes.len(), Lane::run_all(&lanes).await.len()), (3, 30));
}

pub async fn what_fails_after_a_reset_is_of_that_replay(fixture: &dyn StoreFixture) {
    let (lane, ids) = Lane::settled(fixture, [(event("1"), Delivered), (event("2"), Delivered)]).await;
    let store = lane.release().await;
    reset(&store, ResetTo::Beginning).await;
    let lane = Lane::take(&store, "reader", "two").await;
    let batch = lane.next(10).await;
    let replay = batch.deliveries[0].replay;
    lane.settle(&batch, vec![(0, retry_now()), (1, dead())]).await;
    let due = lane.due(10).await;
    assert_eq!((due.deliveries[0].attempt, due.deliveries[0].replay), (2, replay));
    lane.settle_due(&due, vec![Delivered]).await;
    assert_eq!(lane.replay(these(&ids)).await, 1);
    let again = lane.due(10).await;
    assert!(again.deliveries[0].replay > replay);
    lane.settle_due(&again, vec![Delivered]).await;
    let store = lane.release().await;
    reset(&store, ResetTo::Beginning).await;
    let third = Lane::take(&store, "reader", "three").await.next(10).await;
    assert!(third.deliveries.iter().all(|delivery| delivery.replay > again.deliveries[0].replay), "no number twice");
}

pub async fn what_commits_late_is_not_skipped(fixture: &dyn StoreFixture) {
    let Some(mut open) = begin_beside_others(fixture).await else { return };
    open.append(&outbox(), &[event("late")]).await.expect("appended");
    let (lane, _) = Lane::settled(fixture, [(event("1"), Delivered)]).await;
    append(&lane.store, [event("2")]).await;
    let store = lane.release().await;
    assert_eq!(reset(&store, ResetTo::Now).await, (0, 1));
    open.commit().await;
    let lane = Lane::take(&store, "reader", "two").await;
    assert_eq!(payloads(&lane.drain().await), ["late"]);
    let mut open = begin_beside_others(fixture).await.expect("as before");
    open.append(&outbox(), &[event("later")]).await.expect("appended");
    let last = lane.past([(event("3"), Delivered)]).await[0];
    let place = record(&store, last).await.seq;
    let store = lane.release().await;
    assert_eq!(reset(&store, ResetTo::Seq(place)).await, (1, 0));
    open.commit().await;
    let mut both = payloads(&Lane::take(&store, "reader", "three").await.drain().await);
    both.sort();
    assert_eq!(both, ["3", "later"]);
}

/// It was wanted, and a person decided to skip it.
pub async fn what_a_reset_skips_is_not_unrouted(fixture: &dyn StoreFixture) {
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    append(&lane.store, [NewEvent::json("a", "1"), NewEvent::json("b", "2")]).await;
    let store = lane.release().await;
    assert_eq!(reset(&store, ResetTo::Now).await, (0, 1));
    append(&store, [NewEvent::json("b", "3")]).await;
    let lane = Lane::take(&store, "reader", "two").await;
    lane.drain().await;
    let found = async {
        while listed(&store, State::Unrouted).await.is_empty() {
            _ = store.note_unrouted(&outbox()).await.expect("noted");
            tokio::time::sleep(SHORT / 60).await;
        }
    };
    tokio::time::timeout(PATIENCE, found).await.expect("found in time");
    assert_eq!(listed(&store, State::Unrouted).await, ["3"]);
    assert_eq!(listed(&store, State::Skipped).await, ["1", "2"]);
}

/// Events passed by an earlier filter no longer count as passed, so they are judged again.
pub async fn a_reset_reads_by_the_present_filter(fixture: &dyn StoreFixture) {
    let of = |topic: &str, payload: &str| NewEvent::json(topic, payload.to_owned());
    let lane = Lane::open_as(fixture, &reader_of("a")).await;
    append(&lane.store, [of("a", "1"), of("b", "2"), of("a", "3")]).await;
    assert_eq!(payloads(&lane.drain().await), ["1", "3"]);
    lane.store.subscribe(&reader_of("b")).await.expect("another filter");
    append(&lane.store, [of("b", "4")]).await;
    assert_eq!(payloads(&lane.drain().await), ["4"]);
    let store = lane.release().await;
    assert_eq!(reset(&store, ResetTo::Beginning).await, (2, 0));
    assert_eq!(listed(&store, State::Pending).await, ["2", "4"]);
    let lane = Lane::take(&store, "reader", "two").await;
    assert_eq!(payloads(&lane.drain().await), ["2", "4"]);
    assert_eq!(listed(&store, State::Dispatched).await, ["2", "4"]);
}

pub async fn what_was_sent_all_the_same_is_judged_anew(fixture: &dyn StoreFixture) {
    let store = fixture.store();
    let before = append(&store, [event("before")]).await;
    let lane = Lane::open_as(fixture, &Subscription { start: postbox_core::StartAt::Now, ..reader() }).await;
    let replay = postbox_core::Replay { ids: Some(before), ..postbox_core::Replay::default() };
    assert_eq!(store.replay(&named("reader"), &replay).await.expect("replayed").count, 1);
    assert_eq!(payloads(&lane.drain_due().await), ["before"]);
    let store = lane.release().await;
    assert_eq!(reset(&store, ResetTo::Beginning).await, (1, 0));
    assert_eq!(listed(&store, State::Pending).await, ["before"]);
    assert_eq!(payloads(&Lane::take(&store, "reader", "two").await.drain().await), ["before"]);
}
