//! Plans that found defects, after all unneeded steps were removed.

use crate::plan::{Action, At, End, Fate, Fault, Mishap, OPERATOR, Plan, Run, Shape, Step};
use crate::run::run_plan;
use crate::server::Store;

/// A defect, and the plans that found it.
type Regression = (&'static str, fn() -> Vec<Plan>);

const REGRESSIONS: [Regression; 6] = [
    ("an apply lane whose lease ran out does not spin", apply_lane_whose_lease_ran_out),
    ("what a late call brings is heard while the breaker probes", late_call_while_probing),
    ("a store that went back to a lower epoch is read on", lower_epoch),
    ("a filter that was taken back passes nothing over", filter_taken_back),
    ("a relay that stands still goes on as a whole when the faults end", relay_that_stood_still),
    ("an event of another lane is not blamed for a crash", beside_one_that_ends_its_relay),
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
