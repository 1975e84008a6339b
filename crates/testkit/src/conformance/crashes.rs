//! Holders of a lane that vanish, and the events they vanish with.

use std::time::Duration;

use futures::FutureExt as _;
use postbox_core::{Batch, Disposition, Lease, State};

use super::StoreFixture;
use super::faults::{Call, call};
use super::harness::*;

fn alone() -> Disposition {
    Disposition::Alone { after: Duration::ZERO }
}

/// Returns how many relays ended with each event of a batch.
fn crashes(batch: &Batch) -> Vec<u32> {
    let of = |delivery: &postbox_core::Delivery| batch.crashes.get(&delivery.seq).copied().unwrap_or_default();
    batch.deliveries.iter().map(of).collect()
}

impl Lane {
    /// Lets the holder vanish and another one take the lane.
    async fn vanishes(&self, fixture: &dyn StoreFixture, next: &str) -> Self {
        self.store.renew(&self.lease, SHORT).await.expect("still ours");
        fixture.pass(2 * SHORT).await;
        Self::take(&self.store, self.lease.subscription.as_str(), next).await
    }
}

pub async fn holders_who_vanish_are_counted_until_one_gives_the_lane_back(fixture: &dyn StoreFixture) {
    let one = Lane::open(fixture).await;
    let two = one.vanishes(fixture, "two").await;
    let three = two.vanishes(fixture, "three").await;
    assert_eq!([&one, &two, &three].map(|lane| lane.lease.crashes), [0, 1, 2]);
    let four = Lane::take(&three.release().await, "reader", "four").await;
    assert_eq!(four.lease.crashes, 2, "as it was given back");
    four.store.release(&Lease { crashes: 0, ..four.lease.clone() }).await.expect("given back");
    let five = Lane::take(&four.store, "reader", "five").await;
    assert_eq!(five.lease.crashes, 0);
    assert_eq!(five.vanishes(fixture, "six").await.lease.crashes, 1);
}

pub async fn events_that_arrive_make_no_difference(fixture: &dyn StoreFixture) {
    let (one, _) = Lane::settled(fixture, [(event("1"), Delivered)]).await;
    let two = one.vanishes(fixture, "two").await;
    two.past([(event("2"), Delivered), (event("3"), retry_now())]).await;
    assert_eq!(payloads(&two.drain_due().await), ["3"]);
    assert_eq!(two.vanishes(fixture, "three").await.lease.crashes, 2);
}

pub async fn who_held_a_lane_for_long_begins_the_count_anew(fixture: &dyn StoreFixture) {
    let one = Lane::open(fixture).await;
    let two = one.vanishes(fixture, "two").await;
    let short = 2 * SHORT / (Lease::LONG + 1);
    fixture.pass(2 * SHORT).await;
    let shown = async || two.store.subscriptions().await.expect("listed")[0].lanes[0].crashes;
    assert_eq!(shown().await, 1);
    two.store.renew(&two.lease, short).await.expect("still ours");
    assert_eq!(shown().await, 0, "it is held for long");
    fixture.pass(SHORT).await;
    let three = Lane::take(&two.store, "reader", "three").await;
    assert_eq!((two.lease.crashes, three.lease.crashes), (1, 1));
}

/// The relay lost its lease, or the answer that granted it, but is alive.
pub async fn who_takes_its_own_lane_again_has_not_vanished(fixture: &dyn StoreFixture) {
    let one = Lane::open(fixture).await;
    let two = one.vanishes(fixture, "two").await;
    let again = two.vanishes(fixture, "two").await;
    assert_eq!((two.lease.crashes, again.lease.crashes), (1, 1));
    assert!(again.lease.epoch > two.lease.epoch);
    fixture.pass(2 * SHORT).await;
    again.store.renew(&again.lease, 2 * SHORT / (Lease::LONG + 1)).await.expect("still ours");
    fixture.pass(SHORT).await;
    assert_eq!(Lane::take(&again.store, "reader", "two").await.lease.crashes, 0, "it held it for long");
}

pub async fn a_grant_with_a_lost_answer_counts_once(fixture: &dyn StoreFixture) {
    let one = Lane::open(fixture).await;
    one.past([(event("1"), alone())]).await;
    one.store.renew(&one.lease, SHORT).await.expect("still ours");
    fixture.pass(2 * SHORT).await;
    let faults = fixture.faults().await;
    let ask = call!(store, [], store.acquire(&named("reader"), &owner("two"), &[], LONG));
    faults.lose_answer(Call::Acquire, ask(faults.store())).await;
    let again = faults.again().acquire(&named("reader"), &owner("two"), &[], LONG).await.expect("asked");
    let two = Lane::of(faults.again(), again.lease.expect("granted to it already"));
    assert_eq!((two.lease.crashes, crashes(&two.due(10).await)), (1, vec![1]));
}

pub async fn a_late_grant_counts_once(fixture: &dyn StoreFixture) {
    let faults = fixture.faults().await;
    for (n, place) in faults.places(Call::Acquire).iter().enumerate() {
        let name = format!("reader-{n}");
        let one = Lane::open_as(fixture, &reader_named(&name)).await;
        one.store.renew(&one.lease, SHORT).await.expect("still ours");
        fixture.pass(2 * SHORT).await;
        let name = named(&name);
        let ask = call!(store, [name], store.acquire(&name, &owner("two"), &[], LONG));
        let late = faults.delay(Call::Acquire, *place, ask(faults.store())).await;
        late.after(ask(faults.again()).map(drop).boxed()).await;
        let again = faults.again().acquire(&name, &owner("two"), &[], LONG).await.expect("asked");
        assert_eq!(again.lease.expect("granted to it already").crashes, 1, "{place:?}");
        one.store.remove(&name, info(&one.store, name.as_str()).await.generation).await.expect("removed");
    }
}

pub async fn an_event_whose_relay_vanished_with_it_counts_a_crash(fixture: &dyn StoreFixture) {
    let one = Lane::open(fixture).await;
    let events = [keyed("a", "1"), keyed("a", "2"), keyed("b", "3"), event("4")];
    let settled = [alone(), Block, retry_now(), Disposition::Alone { after: HOUR }];
    let ids = one.past(events.into_iter().zip(settled)).await;
    assert!(one.due(10).await.crashes.is_empty(), "its relay is there");
    let two = one.vanishes(fixture, "two").await;
    let due = two.due(10).await;
    assert_eq!((payloads(&due.deliveries), crashes(&due)), (["1", "2", "3"].map(str::to_owned).into(), vec![1, 0, 0]));
    assert!(due.deliveries.iter().all(|it| it.attempt == if it.event.id == ids[2] { 2 } else { 1 }), "no attempt");
    for id in [ids[0], ids[3]] {
        let record = record(&two.store, id).await;
        let (code, error) = (Disposition::RELAY_CRASHED, Disposition::RELAY_CRASHED_ERROR);
        assert_eq!((record.state, record.attempts), (State::Retrying, 0));
        assert_eq!((record.code.as_deref(), record.error.as_deref()), (Some(code), Some(error)));
    }
    two.settle_due(&due, vec![Delivered; 3]).await;
    assert!(two.due(10).await.deliveries.is_empty(), "the fourth is due when it was to be");
}

pub async fn an_event_that_came_back_counts_no_crash(fixture: &dyn StoreFixture) {
    let one = Lane::open(fixture).await;
    one.past([(event("1"), alone()), (event("2"), alone())]).await;
    let due = one.due(10).await;
    one.settle_due(&due, vec![retry_now(), Disposition::NotSent]).await;
    let due = one.vanishes(fixture, "two").await.due(10).await;
    assert_eq!(due.deliveries.iter().map(|it| it.attempt).collect::<Vec<_>>(), [2, 1]);
    assert!(due.crashes.is_empty());
}

pub async fn crashes_add_up_and_a_replay_leaves_one(fixture: &dyn StoreFixture) {
    let mut lane = Lane::open(fixture).await;
    let id = lane.past([(event("1"), alone())]).await[0];
    for (count, owner) in [(1, "two"), (2, "three"), (3, "four")] {
        lane = lane.vanishes(fixture, owner).await;
        let due = lane.due(10).await;
        assert_eq!(crashes(&due), [count]);
        lane.settle_due(&due, vec![if count == 3 { dead_of(Disposition::RELAY_CRASHED) } else { alone() }]).await;
    }
    assert_eq!(record(&lane.store, id).await.state, State::Dead);
    assert_eq!(lane.replay(these(&[id])).await, 1);
    let due = lane.due(10).await;
    assert_eq!((crashes(&due), due.deliveries[0].attempt), (vec![1], 1), "it goes alone");
}

pub async fn a_takeover_counts_no_crash_of_other_lanes(fixture: &dyn StoreFixture) {
    let [one, two] = Lane::two_settled(fixture, alone()).await;
    let two = two.vanishes(fixture, "two").await;
    assert!(crashes(&two.due(100).await).iter().all(|count| *count == 1));
    assert!(one.due(100).await.crashes.is_empty());
}
