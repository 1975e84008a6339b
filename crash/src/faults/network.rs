//! What happens to connections between relays, writers and the database: at a call that is chosen,
//! or at any moment.

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

/// A word of the call for a window.
pub(super) const WINDOW: &str = "outbox_window(";
/// Words that tell the calls of a relay: the window, the settlement, the grant, the renewal, rows
/// that are due, rows that leave the stream.
const CALLS: [&str; 7] = [
    WINDOW,
    WINDOW,
    "settle_lane(",
    "epoch = epoch + 1",
    "SET lease_until",
    "postbox\".delivery AS d",
    "INSERT INTO \"postbox\".delivery",
];
/// Any call; and how many of a hundred are harmed at their commit, when they hold their locks.
const ANY: (&[&str], u32) = (&CALLS, 30);
/// Those that move a cursor: what the next owner goes by.
const CUT_SHORT: (&[&str], u32) = (&[WINDOW, WINDOW, "settle_lane("], 65);
/// A call that is not made in this time will not be waited for.
pub(super) const CALL_WITHIN: Duration = Duration::from_secs(2);

/// A trap in the way of a relay: whose, which call, what harm.
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

/// Waits until a relay, whichever, makes the call.
pub(super) async fn lay_at(
    stage: &Stage,
    random: &mut SmallRng,
    fault: &mut Fault,
    harm: Harm,
    point: Point,
) -> anyhow::Result<Ambush> {
    let relay = random.random_range(0..RELAYS);
    fault.detail = format!("relay {relay}: {harm:?} at {point:?}");
    // Whatever cannot be written in time may cost the lease.
    fault.window = stage.bed.window_of_one().await;
    let trap = stage.postgres()?.proxy(relay).trap(point, harm);
    if timeout(CALL_WITHIN, trap.sprung()).await.is_err() {
        fault.detail.push_str(", not reached");
    }
    Ok(Ambush { relay, trap })
}

/// All connections of a relay break.
pub(super) async fn reset(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let relay = random.random_range(0..RELAYS);
    fault.detail = format!("relay {relay}");
    fault.window = stage.bed.window_of_one().await;
    stage.postgres()?.proxy(relay).reset();
    Ok(())
}

/// The server does what was asked, the relay never hears of it.
pub(super) async fn lose_answer(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    lay(stage, random, fault, Harm::LoseAnswer, ANY).await.map(drop)
}

/// The relay's request never gets there.
pub(super) async fn cut_request(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    lay(stage, random, fault, Harm::Cut, ANY).await.map(drop)
}

/// The relay sees its connection break and asks again; what it asked first is done after that,
/// perhaps under another owner.
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

/// As one or the other of the above, and then the relay ends before it has written down what it
/// did.
pub(super) async fn lose_answer_and_end(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let harm = *choose(&[Harm::LoseAnswer, Harm::Delay, Harm::Delay], random);
    let Ambush { relay, trap } = lay(stage, random, fault, harm, CUT_SHORT).await?;
    if trap.is_sprung() && harm == Harm::Delay {
        sleep(millis(random, 30..400)).await;
        let _ = timeout(CALL_WITHIN, trap.release()).await;
    }
    sleep(millis(random, 0..40)).await;
    let mut relay = stage.relays[relay].lock().await;
    if random.random_bool(0.6) {
        relay.kill();
    } else {
        relay.stop().await?;
    }
    relay.start()
}

/// Nothing goes through, and no connection breaks, until leases ran out.
pub(super) async fn swallow(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let relay = random.random_range(0..RELAYS);
    let direction = *choose(&Direction::BOTH, random);
    fault.detail = format!("relay {relay}: {direction:?}");
    fault.window = window_of_all();
    let proxy = stage.postgres()?.proxy(relay);
    proxy.swallow(&[direction]);
    sleep(LEASE + millis(random, 0..800)).await;
    proxy.heal();
    // What was swallowed is never said again: those connections are of no use.
    proxy.reset();
    Ok(())
}

/// A writer's commit is done, or not, and the answer is lost.
pub(super) async fn lose_commit(stage: &Stage, random: &mut SmallRng, fault: &mut Fault) -> anyhow::Result<()> {
    let harm = *choose(&[Harm::LoseAnswer, Harm::Cut, Harm::Delay], random);
    let point = match random.random_range(0..3) {
        0 => Point::Message(random.random_range(1..60)),
        _ => Point::CommitOf("crash.mark".to_owned()),
    };
    fault.detail = format!("{harm:?} at {point:?}");
    let trap = stage.postgres()?.writers.trap(point, harm);
    if timeout(CALL_WITHIN, trap.sprung()).await.is_ok() && harm == Harm::Delay {
        sleep(millis(random, 10..1_000)).await;
        let _ = timeout(CALL_WITHIN, trap.release()).await;
    }
    Ok(())
}
