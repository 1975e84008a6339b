//! From a producer into the inbox: only stored messages are settled, and none is stored twice.

use std::time::Duration;

use postbox_core::Unreadable;
use tokio::time::timeout;

use super::harness::PATIENCE;
use super::{Poison, ReceivingFixture};
use crate::inbox::{Inbox, Mode};

/// How often a condition is checked.
const LOOK: Duration = Duration::from_millis(2);

pub async fn every_message_is_stored_and_settled(fixture: &dyn ReceivingFixture) {
    fixture.start().await;
    publish(fixture, 1..=50);
    until(|| fixture.settled() == 50).await;
    assert_eq!(bodies(&fixture.inbox()), published(1..=50));
}

pub async fn nothing_is_settled_while_the_store_is_down(fixture: &dyn ReceivingFixture) {
    let inbox = fixture.inbox();
    inbox.set(Mode::Down);
    fixture.start().await;
    publish(fixture, 1..=3);
    until(|| inbox.counts().calls >= 5).await;
    assert_eq!(fixture.settled(), 0);
    inbox.set(Mode::Works);
    until(|| fixture.settled() == 3).await;
    assert_eq!(inbox.all().len(), 3);
}

pub async fn a_lost_connection_loses_nothing(fixture: &dyn ReceivingFixture) {
    let inbox = fixture.inbox();
    inbox.set(Mode::Hangs);
    fixture.start().await;
    publish(fixture, 1..=5);
    until(|| inbox.counts().in_flight > 0).await;
    fixture.disconnect().await;
    inbox.set(Mode::Works);
    until(|| fixture.settled() == 5).await;
    assert_eq!(bodies(&inbox), published(1..=5));
}

pub async fn a_lost_settlement_leads_to_a_duplicate(fixture: &dyn ReceivingFixture) {
    let inbox = fixture.inbox();
    fixture.lose_settlements(true);
    fixture.start().await;
    publish(fixture, 1..=3);
    until(|| inbox.all().len() == 3).await;
    assert_eq!(fixture.settled(), 0);
    fixture.disconnect().await;
    until(|| inbox.counts().duplicates >= 3).await;
    fixture.lose_settlements(false);
    fixture.disconnect().await;
    until(|| fixture.settled() == 3).await;
    assert_eq!(inbox.all().len(), 3);
}

pub async fn a_stop_while_nothing_comes_is_prompt(fixture: &dyn ReceivingFixture) {
    for _ in 0..3 {
        fixture.start().await;
        timeout(PATIENCE, fixture.stop()).await.expect("stopped in time");
    }
    fixture.start().await;
    publish(fixture, 1..=1);
    until(|| fixture.settled() == 1).await;
}

pub async fn a_stop_while_the_store_hangs_loses_nothing(fixture: &dyn ReceivingFixture) {
    let inbox = fixture.inbox();
    inbox.set(Mode::Hangs);
    fixture.start().await;
    publish(fixture, 1..=3);
    until(|| inbox.counts().in_flight > 0).await;
    timeout(PATIENCE, fixture.stop()).await.expect("stopped in time");
    assert_eq!(fixture.settled(), 0);
    inbox.set(Mode::Works);
    fixture.start().await;
    until(|| fixture.settled() == 3).await;
    assert_eq!(bodies(&inbox), published(1..=3));
}

pub async fn poison_harms_nothing_else(fixture: &dyn ReceivingFixture) {
    fixture.start().await;
    publish(fixture, 1..=1);
    fixture.publish_poison("p", "poison");
    publish(fixture, 2..=2);
    until(|| fixture.settled() == 3).await;
    poisoned(fixture, "poison");
}

pub async fn what_the_store_refuses_is_poison(fixture: &dyn ReceivingFixture) {
    fixture.inbox().refuse("3");
    fixture.start().await;
    publish(fixture, 1..=3);
    until(|| fixture.settled() == 3).await;
    poisoned(fixture, "body 3");
}

/// Asserts that two ordinary messages are stored, and that this one was kept or refused as poison.
fn poisoned(fixture: &dyn ReceivingFixture, body: &str) {
    let inbox = fixture.inbox();
    let (poison, plain): (Vec<_>, Vec<_>) =
        inbox.all().into_iter().partition(|stored| Unreadable::poison(&stored.event.headers).is_some());
    assert_eq!(plain.len(), 2);
    match fixture.traits().poison {
        Poison::Kept => {
            assert_eq!((poison.len(), fixture.refused()), (1, 0));
            assert_eq!(poison[0].event.payload, body, "with its bytes");
        }
        Poison::Refused => assert_eq!((poison.len(), fixture.refused()), (0, 1)),
    }
}

pub async fn duplicates_are_settled_and_stored_once(fixture: &dyn ReceivingFixture) {
    fixture.start().await;
    for n in 1..=10 {
        publish(fixture, 1..=1);
        until(|| fixture.settled() == n).await;
    }
    assert_eq!((fixture.inbox().all().len(), fixture.inbox().counts().duplicates), (1, 9));
}

pub async fn a_conflict_is_kept_out_and_settled(fixture: &dyn ReceivingFixture) {
    fixture.start().await;
    publish(fixture, 1..=1);
    until(|| fixture.settled() == 1).await;
    fixture.publish("1", "another body");
    until(|| fixture.settled() == 2).await;
    assert_eq!(bodies(&fixture.inbox()), ["body 1"]);
    assert_eq!(fixture.inbox().counts().conflicts, 1);
}

pub async fn no_more_are_on_their_way_than_may_be(fixture: &dyn ReceivingFixture) {
    let (inbox, most) = (fixture.inbox(), fixture.traits().in_flight_max);
    inbox.set(Mode::Hangs);
    fixture.start().await;
    publish(fixture, 1..=5 * most);
    until(|| inbox.counts().in_flight > 0).await;
    // Time for more to arrive, if there is no limit.
    tokio::time::sleep(100 * LOOK).await;
    inbox.set(Mode::Works);
    until(|| fixture.settled() == 5 * most).await;
    let peak = inbox.counts().in_flight_peak;
    assert!((1..=most).contains(&peak), "{peak} at once, at most {most}");
}

pub async fn troubles_of_all_kinds_lose_nothing(fixture: &dyn ReceivingFixture) {
    let inbox = fixture.inbox();
    fixture.start().await;
    for round in 0..10 {
        publish(fixture, 20 * round + 1..=20 * (round + 1));
        inbox.set([Mode::Down, Mode::Hangs, Mode::Works][round % 3]);
        fixture.lose_settlements(round % 4 == 0);
        tokio::time::sleep(LOOK).await;
        fixture.disconnect().await;
    }
    inbox.set(Mode::Works);
    fixture.lose_settlements(false);
    fixture.disconnect().await;
    until(|| fixture.settled() == 200).await;
    assert_eq!(inbox.all().len(), 200);
    assert_eq!(inbox.counts().conflicts, 0);
}

pub async fn messages_are_stored_in_order_where_that_is_claimed(fixture: &dyn ReceivingFixture) {
    if !fixture.traits().ordered {
        return;
    }
    let inbox = fixture.inbox();
    fixture.start().await;
    for round in 0..10 {
        inbox.set(if round % 2 == 0 { Mode::Down } else { Mode::Works });
        publish(fixture, 20 * round + 1..=20 * (round + 1));
        tokio::time::sleep(LOOK).await;
    }
    until(|| fixture.settled() == 200).await;
    let stored: Vec<String> = inbox.all().into_iter().map(|it| it.message_id).collect();
    assert_eq!(stored, (1..=200).map(|n| n.to_string()).collect::<Vec<_>>());
}

fn publish(fixture: &dyn ReceivingFixture, numbers: std::ops::RangeInclusive<usize>) {
    numbers.for_each(|n| fixture.publish(&n.to_string(), &format!("body {n}")));
}

/// Returns the bodies that [`publish`] sent.
fn published(numbers: std::ops::RangeInclusive<usize>) -> Vec<String> {
    numbers.map(|n| format!("body {n}")).collect()
}

/// Returns every stored body, sorted by the number in it.
fn bodies(inbox: &Inbox) -> Vec<String> {
    let mut bodies: Vec<String> =
        inbox.all().into_iter().map(|it| String::from_utf8_lossy(&it.event.payload).into_owned()).collect();
    bodies.sort_by_key(|body| (body.len(), body.clone()));
    bodies
}

async fn until(condition: impl Fn() -> bool) {
    let met = async {
        while !condition() {
            tokio::time::sleep(LOOK).await;
        }
    };
    timeout(PATIENCE, met).await.expect("it happens in time");
}
