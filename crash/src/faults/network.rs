//! Faults of connections between relays, writers and the database: at a chosen call, or at any
//! time.

use std::time::Duration;

use postbox_crash_checker::faults::Fault;
use postbox_testkit::proxy::{Direction, Harm, Point, Trap};
use rand::Rng as _;
use rand::rngs::SmallRng;
use tokio::time::{sleep, timeout};

use super::{choose, millis};
use crate::relay::LEASE;
use crate::stage::{RELAYS, Stage};
use crate::store::window_of_all;

/// Text that identifies the call for a window.
pub(super) const WINDOW: &str = "outbox_window(";
/// Text that identifies the calls of a relay: window, settlement, grant, renewal, due rows, and
/// delivery rows.
const CALLS: [&str; 7] = [
    WINDOW,
    WINDOW,
    "settle_lane(",
    "epoch = epoch + 1",
    "SET lease_until",
    "postbox\".delivery AS d",
    "INSERT INTO \"postbox\".delivery",
];
/// Any call; and the percentage that is hit at its commit, while it holds its locks.
const ANY: (&[&str], u32) = (&CALLS, 30);
/// Calls that move a cursor, which the next owner relies on.
const CUT_SHORT: (&[&str], u32) = (&[WINDOW, WINDOW, "settle_lane("], 65);
/// How long to wait for the chosen call.
pub(super) const CALL_WITHIN: Duration = Duration::from_secs(2);

/// A trap set for a relay: the relay and the trap.
pub(super) struct Ambush {
    pub(super) relay: usize,
    pub(super) trap: Trap,
}

async fn lay(
    stage: &Stage,
    random: &mut SmallRng,
    fault: &mut Fault,
    harm: Harm,
    (calls, commits): (&[&str], u32),
) -> anyhow::Result<Ambush> {
    let call = *choose(calls, random);
    let point = match random.random_range(0..100) {
        drawn if drawn < commits => Point::CommitOf(call.to_owned()),
        drawn if drawn < commits + (100 - commits) / 3 => Point::Message(random.random_range(1..40)),
        _ => Point::Statement(call.to_owned()),
    };
    lay_at(stage, random, fault, harm, point).await
}

/// Sets a trap for any relay, and waits until one runs into it.
pub(super) async fn lay_at(
    stage: &Stage,
    random: &mut SmallRng,
    fault: &mut Fault,
    harm: Harm,
    point: Point,
) -> anyhow::Result<Ambush> {
    let relay = random.random_range(0..RELAYS);
    fault.detail = format!("relay {relay}: {harm:?} at {point:?}");
    // A call that is lost or delayed may cost the lease.
    fault.window = stage.bed.window_of_one().await;
    let trap = stage.postgres()?.proxy(relay).trap(point, harm);
    if timeout(CALL_WITHIN, trap.sprung()).await.is_err() && !trap.is_sprung() {
        fault.detail.push_str(", not reached");
        fault.missed = true;
    }
    Ok(Ambush { relay, trap })
}

/// Breaks all connections of a relay.
pub(super) async fn reset(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let relay = random.random_range(0..RELAYS);
    fault.detail = format!("relay {relay}");
    fault.window = stage.bed.window_of_one().await;
    stage.postgres()?.proxy(relay).reset();
    Ok(())
}

/// The server executes the request, but the relay never gets the answer.
pub(super) async fn lose_answer(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    lay(stage, random, fault, Harm::LoseAnswer, ANY).await.map(drop)
}

/// The relay's request never reaches the server.
pub(super) async fn cut_request(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    lay(stage, random, fault, Harm::Cut, ANY).await.map(drop)
}

/// The relay's connection breaks, and it sends the request again. The first request is executed
/// after that, perhaps under another owner.
pub(super) async fn delay_request(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let harm = if random.random_bool(0.8) { Harm::Delay } else { Harm::Hang };
    let Ambush { trap, .. } = lay(stage, random, fault, harm, ANY).await?;
    if trap.is_sprung() {
        sleep(match random.random_range(0..4) {
            0 => LEASE + millis(random, 0..1_000),
            _ => millis(random, 20..700),
        })
        .await;
        let _ = timeout(CALL_WITHIN, trap.release()).await;
    }
    Ok(())
}

/// One of the above, and then the relay ends before it has written what it did.
pub(super) async fn lose_answer_and_end(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let harm = *choose(&[Harm::LoseAnswer, Harm::Delay, Harm::Delay], random);
    let Ambush { relay, trap } = lay(stage, random, fault, harm, CUT_SHORT).await?;
    if trap.is_sprung() && harm == Harm::Delay {
        sleep(millis(random, 30..400)).await;
        let _ = timeout(CALL_WITHIN, trap.release()).await;
    }
    sleep(millis(random, 0..40)).await;
    fault.missed = false;
    let mut relay = stage.relays[relay].lock().await;
    if random.random_bool(0.6) {
        relay.kill();
    } else {
        relay.stop().await?;
    }
    relay.start()
}

/// No byte passes until leases ran out, but no connection breaks.
pub(super) async fn swallow(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let relay = random.random_range(0..RELAYS);
    let direction = *choose(&Direction::BOTH, random);
    fault.detail = format!("relay {relay}: {direction:?}");
    fault.window = window_of_all();
    let proxy = stage.postgres()?.proxy(relay);
    proxy.swallow(&[direction]);
    sleep(LEASE + millis(random, 0..800)).await;
    proxy.heal();
    // Swallowed bytes are never sent again, so those connections are useless.
    proxy.reset();
    Ok(())
}

/// A writer's commit is executed or not, and its answer is lost.
pub(super) async fn lose_commit(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let harm = *choose(&[Harm::LoseAnswer, Harm::Cut, Harm::Delay], random);
    let point = match random.random_range(0..3) {
        0 => Point::Message(random.random_range(1..60)),
        _ => Point::CommitOf("crash.mark".to_owned()),
    };
    fault.detail = format!("{harm:?} at {point:?}");
    let trap = stage.postgres()?.writers.trap(point, harm);
    let _ = timeout(CALL_WITHIN, trap.sprung()).await;
    fault.missed = !trap.is_sprung();
    if !fault.missed && harm == Harm::Delay {
        sleep(millis(random, 10..1_000)).await;
        let _ = timeout(CALL_WITHIN, trap.release()).await;
    }
    Ok(())
}
