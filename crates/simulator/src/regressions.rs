//! Plans that found defects, after all unneeded steps were removed.

use std::sync::Arc;

use postbox_core::{NewEvent, OwnerId};

use crate::plan::{Action, At, End, Fate, Fault, Mishap, OPERATOR, Plan, Run, Shape, Step};
use crate::run::run_plan;
use crate::server::{Client, Store};
use crate::world::{LEASE, World};

/// A defect, and the plans that found it.
type Regression = (&'static str, fn() -> Vec<Plan>);

const REGRESSIONS: [Regression; 10] = [
    ("an apply lane whose lease ran out does not spin", apply_lane_whose_lease_ran_out),
    ("what a late call brings is heard while the breaker probes", late_call_while_probing),
    ("a store that went back to a lower epoch is read on", lower_epoch),
    ("a filter that was taken back passes nothing over", filter_taken_back),
    ("a relay that stands still goes on as a whole when the faults end", relay_that_stood_still),
    ("an event of another lane is not blamed for a crash", beside_one_that_ends_its_relay),
    ("a destination that is gone ends the rounds of all lanes", gone_beside_another_lane),
    ("a retry sends no event beside its call that goes on", retried_while_its_call_goes_on),
    ("a world ends only when nothing that a filter hid is left", hidden_by_a_filter),
    ("no lane is granted twice under one epoch", granted_again_after_a_failover),
];

/// Runs the plans that once found a defect. Returns what they find now, with its history.
pub fn run_regressions() -> Vec<String> {
    let plans = REGRESSIONS.iter().flat_map(|(name, plans)| plans().into_iter().map(move |plan| (name, plan)));
    let found = plans.filter_map(|(name, plan)| {
        let (violation, _, history) = run_plan(plan, true);
        violation.map(|violation| format!("{name}: {violation}\n{}", history.join("\n")))
    });
    found.collect()
}

/// Returns what the ledger finds if a relay keeps its lease while the store crashes, and then sends
/// an event twice. It once judged no relay until a lane had another lease.
pub async fn repeated_after_a_crash() -> Option<String> {
    let world = Arc::new(World::new(plan(shape(1, 1, false, 300), vec![Step::Crash { at: 0 }]), false));
    world.server.set_up(&world.subscriptions).await;
    world.committed(&[]);
    let (who, owner) = ((0, 1), OwnerId::new("relay-0-1").ok()?);
    let log = Client::new(&world, who).log;
    log.acquire(&world.subscriptions[0].name, &owner, &[], LEASE).await.ok()?;
    let number = world.state().ledger(who).append(None, 0, Fate::Fine, None);
    world.server.begin(&[NewEvent::json("t0", "{}").version(number as i64)], false).end(End::Flushed);
    world.committed(&[number]);
    world.go_back(false, || world.server.crash());
    let mut state = world.state();
    let ledger = state.ledger(who);
    for _ in 0..2 {
        ledger.send(who, number, 1, 0, world.now());
        ledger.hand(number, 0);
    }
    ledger.violation.take()
}

fn plan(shape: Shape, steps: Vec<Step>) -> Plan {
    Plan { seed: 0, store: Store::Memory, shape, steps }
}

fn shape(lanes: u16, batch: usize, apply: bool, calm: At) -> Shape {
    Shape {
        subscriptions: 1,
        lanes,
        run: Run::Always,
        ordered: true,
        halt: false,
        apply,
        batch,
        sink: 0,
        attempts_max: 4,
        jitter: 0,
        clean: false,
        calm,
    }
}

fn write(at: At, events: u8, fate: Fate) -> Step {
    Step::Write { at, held: 0, key: None, events, topic: 1, wait: 0, fate, end: End::Flushed }
}

/// The lane read and rewound the same batch without end, in the last tenth of its lease.
fn apply_lane_whose_lease_ran_out() -> Vec<Plan> {
    let steps = |held| {
        vec![write(179, 4, Fate::Fine), Step::Start { at: 0, relay: 0 }, Step::Stall { at: 113, relay: 0, held }]
    };
    (1_200..2_000).step_by(20).map(|held| plan(shape(1, 2, true, 2_500), steps(held))).collect()
}

/// Nobody took its outcome, and its row was put aside as in flight each time it came due.
fn late_call_while_probing() -> Vec<Plan> {
    let steps = |nth| {
        vec![
            write(529, 4, Fate::Fails(100)),
            Step::Start { at: 0, relay: 1 },
            Step::Mishap { nth, mishap: Mishap::Slow(700) },
            Step::Outage { at: 723, held: 652 },
        ]
    };
    (0..12).map(|nth| plan(shape(3, 2, false, 800), steps(nth))).collect()
}

/// A client that remembered a higher epoch asked for its position without end.
fn lower_epoch() -> Vec<Plan> {
    let steps = vec![
        Step::Start { at: 0, relay: 0 },
        Step::Stop { at: 30, relay: 0 },
        Step::Start { at: 152, relay: 0 },
        write(300, 3, Fate::Fine),
        Step::Failover { at: 555, behind: 540 },
        write(600, 3, Fate::Fine),
    ];
    vec![plan(shape(1, 50, false, 800), steps)]
}

/// Events read by a filter that the store had lost were settled by the previous filter. That passed
/// events which only the previous filter wants.
fn filter_taken_back() -> Vec<Plan> {
    let fault = |operation, nth, fault| Step::Fault { relay: 0, operation, nth, fault };
    let write = |at, key, topic, end| {
        let fate = Fate::Fine;
        Step::Write { at, held: 0, key, events: 4, topic, wait: 0, fate, end }
    };
    let steps = vec![
        write(52, Some(1), 0, End::Commit),
        write(115, None, 1, End::Savepoint),
        Step::Start { at: 124, relay: 0 },
        Step::Operator { at: 173, operator: OPERATOR, action: Action::Filter(Some(0)) },
        fault("next_batch", 1, Fault::Lose),
        fault("page", 2, Fault::Slow(60, 900)),
        Step::Crash { at: 282 },
    ];
    let shape = shape(1, 3, true, 300);
    vec![plan(Shape { ordered: false, sink: 3, attempts_max: 1, ..shape }, steps)]
}

/// A defect of the simulator itself: some calls of a relay stood still after the faults had ended,
/// while the relay went on.
fn relay_that_stood_still() -> Vec<Plan> {
    let fault = |operation, nth, fault| Step::Fault { relay: 1, operation, nth, fault };
    let (fate, end) = (Fate::Fine, End::Savepoint);
    let steps = vec![
        Step::Write { at: 628, held: 207, key: None, events: 4, topic: 0, wait: 0, fate, end },
        Step::Start { at: 0, relay: 1 },
        fault("renew", 2, Fault::Freeze(2_648)),
        fault("acquire", 0, Fault::Late(1_786)),
        fault("acquire", 3, Fault::Twice(1_870)),
    ];
    let plan = plan(Shape { sink: 3, ..shape(3, 1, false, 1_200) }, steps);
    (0..20).map(|seed| Plan { seed, ..plan.clone() }).collect()
}

/// Both lanes of a scheduled run sent an event alone at once, so each crash counted for both.
fn beside_one_that_ends_its_relay() -> Vec<Plan> {
    let shape = Shape { subscriptions: 2, run: Run::Every(600), halt: true, sink: 2, ..shape(2, 1, false, 600) };
    let ends =
        Step::Write { at: 475, held: 79, key: None, events: 3, topic: 0, wait: 0, fate: Fate::Ends, end: End::Commit };
    let steps = vec![ends, Step::Start { at: 145, relay: 0 }];
    vec![Plan { seed: 190_816, store: Store::Memory, shape, steps }]
}

/// A handler of one lane answered that its destination is gone. The other lane read its due rows
/// again and again and never handled them, so its round did not end, and with it the run.
fn gone_beside_another_lane() -> Vec<Plan> {
    let write = |at, held, key, events, topic, wait, fate| {
        let end = End::Commit;
        Step::Write { at, held, key, events, topic, wait, fate, end }
    };
    let discard = |at, number| Step::Operator { at, operator: OPERATOR, action: Action::Discard(number) };
    let steps = vec![
        write(362, 429, None, 3, 0, 0, Fate::Fine),
        write(87, 0, Some(0), 2, 1, 0, Fate::Fails(2)),
        write(44, 0, Some(0), 4, 0, 498, Fate::Fine),
        write(453, 0, Some(1), 3, 0, 0, Fate::Fine),
        Step::Start { at: 0, relay: 0 },
        discard(534, 10),
        discard(434, 3),
        Step::Mishap { nth: 3, mishap: Mishap::Gone },
    ];
    let shape = Shape { run: Run::Every(600), ordered: false, sink: 3, jitter: 3, ..shape(2, 50, true, 600) };
    vec![Plan { seed: 216_229, ..plan(Shape { attempts_max: 2, ..shape }, steps) }]
}

/// An event was set aside while its call went on. A person retried it before the lane had the
/// answer of that settlement, and so knew of the call: it was sent twice at once.
fn retried_while_its_call_goes_on() -> Vec<Plan> {
    let write = |at, held, key, events, topic, fate| {
        let end = End::Commit;
        Step::Write { at, held, key, events, topic, wait: 0, fate, end }
    };
    let person = |at, action| Step::Operator { at, operator: OPERATOR, action };
    let steps = vec![
        write(87, 415, None, 2, 0, Fate::Fails(100)),
        write(109, 187, Some(0), 4, 1, Fate::Fine),
        Step::Start { at: 312, relay: 0 },
        Step::Start { at: 0, relay: 1 },
        person(270, Action::Retry),
        person(555, Action::Retry),
        person(890, Action::Prune),
        Step::Fault { relay: 1, operation: "settle", nth: 1, fault: Fault::Freeze(495) },
        Step::Mishap { nth: 0, mishap: Mishap::Hangs },
    ];
    let shape = Shape { run: Run::Bounded(2), sink: 1, attempts_max: 2, jitter: 2, ..shape(2, 2, false, 1_200) };
    vec![Plan { seed: 61_046, ..plan(shape, steps) }]
}

/// A defect of the simulator itself: a person's filter left an event out, so the world seemed to be
/// drained and ended, and then a relay's first run set the planned filter, which wants that event.
/// The other plan: the event was in flight, and its call had no answer.
fn hidden_by_a_filter() -> Vec<Plan> {
    let write =
        |at, held, key, events, topic, fate, end| Step::Write { at, held, key, events, topic, wait: 0, fate, end };
    let person = |at, action| Step::Operator { at, operator: OPERATOR, action };
    let steps = vec![
        write(236, 0, Some(0), 1, 1, Fate::Fails(1), End::Savepoint),
        write(118, 301, None, 3, 0, Fate::Fails(2), End::Flushed),
        write(366, 331, None, 1, 0, Fate::Fine, End::Commit),
        write(400, 301, None, 1, 1, Fate::Fails(2), End::Commit),
        Step::Start { at: 43, relay: 1 },
        person(779, Action::Filter(Some(1))),
        person(576, Action::Discard(3)),
        Step::Outage { at: 315, held: 344 },
    ];
    let scheduled = Shape { run: Run::Every(600), sink: 1, attempts_max: 2, ..shape(2, 2, false, 1_200) };
    let first_run = Plan { seed: 209_836, ..plan(Shape { jitter: 1, clean: true, ..scheduled }, steps) };
    let steps = vec![
        write(81, 36, Some(1), 3, 0, Fate::Fine, End::Flushed),
        Step::Start { at: 0, relay: 2 },
        person(155, Action::Filter(Some(0))),
        Step::Mishap { nth: 0, mishap: Mishap::Hangs },
    ];
    let in_flight = plan(Shape { sink: 2, attempts_max: 1, ..shape(1, 2, false, 300) }, steps);
    vec![first_run, in_flight]
}

/// A defect of the memory store: after a failover it gave out an epoch again. A relay whose first
/// grant was late asked again, got the same lease, and gave it back while it worked under it.
fn granted_again_after_a_failover() -> Vec<Plan> {
    let write = |at, held, key, events| {
        let (fate, end) = (Fate::Fine, End::Commit);
        Step::Write { at, held, key, events, topic: 1, wait: 0, fate, end }
    };
    let steps = vec![
        write(590, 307, Some(2), 4),
        write(813, 243, None, 1),
        Step::Start { at: 0, relay: 0 },
        Step::Start { at: 386, relay: 1 },
        Step::Fault { relay: 0, operation: "next_batch", nth: 3, fault: Fault::Refuse },
        Step::Fault { relay: 1, operation: "acquire", nth: 0, fault: Fault::Freeze(1_664) },
        Step::Failover { at: 469, behind: 131 },
    ];
    let shape = Shape { subscriptions: 2, run: Run::Every(150), ordered: false, ..shape(1, 1, false, 1_200) };
    vec![Plan { seed: 398_764, ..plan(Shape { sink: 1, jitter: 2, ..shape }, steps) }]
}
