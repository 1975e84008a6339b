//! Plans that found defects, after all unneeded steps were removed.

use crate::plan::{Action, At, End, Fate, Fault, Mishap, Plan, Shape, Step};
use crate::run::run_plan;
use crate::server::Store;

fn shape(lanes: u16, batch: usize, apply: bool, calm: At) -> Shape {
    Shape { lanes, ordered: true, halt: false, apply, batch, sink: 0, attempts_max: 4, jitter: 0, clean: false, calm }
}

fn write(at: At, events: u8, fate: Fate) -> Step {
    Step::Write { at, held: 0, key: None, events, topic: 1, wait: 0, fate, end: End::Flushed }
}

#[track_caller]
fn holds(shape: Shape, steps: &[Step]) {
    let (violation, _, history) = run_plan(Plan { seed: 0, store: Store::Memory, shape, steps: steps.to_vec() }, true);
    assert_eq!(violation, None, "{}", history.join("\n"));
}

/// The lane read and rewound the same batch without end, in the last tenth of its lease.
#[test]
fn an_apply_lane_whose_lease_ran_out_does_not_spin() {
    for held in (1_200..2_000).step_by(20) {
        let stall = Step::Stall { at: 113, relay: 0, held };
        holds(shape(1, 2, true, 2_500), &[write(179, 4, Fate::Fine), Step::Start { at: 0, relay: 0 }, stall]);
    }
}

/// Nobody took its outcome, and its row was put aside as in flight each time it came due.
#[test]
fn what_a_late_call_brings_is_heard_while_the_breaker_probes() {
    for nth in 0..12 {
        let slow = Step::Mishap { nth, mishap: Mishap::Slow(700) };
        let steps = [
            write(529, 4, Fate::Fails(100)),
            Step::Start { at: 0, relay: 1 },
            slow,
            Step::Outage { at: 723, held: 652 },
        ];
        holds(shape(3, 2, false, 800), &steps);
    }
}

/// A client that remembered a higher epoch asked for its position without end.
#[test]
fn a_store_that_went_back_to_a_lower_epoch_is_read_on() {
    let steps = [
        Step::Start { at: 0, relay: 0 },
        Step::Stop { at: 30, relay: 0 },
        Step::Start { at: 152, relay: 0 },
        write(300, 3, Fate::Fine),
        Step::Failover { at: 555, behind: 540 },
        write(600, 3, Fate::Fine),
    ];
    holds(shape(1, 50, false, 800), &steps);
}

/// Events read by a filter that the store had lost were settled by the previous filter. That passed
/// events which only the previous filter wants.
#[test]
fn a_filter_that_was_taken_back_passes_nothing_over() {
    let fault = |operation, nth, fault| Step::Fault { relay: 0, operation, nth, fault };
    let steps = [
        Step::Write { at: 52, held: 0, key: Some(1), events: 4, topic: 0, wait: 0, fate: Fate::Fine, end: End::Commit },
        Step::Write {
            at: 115,
            held: 0,
            key: None,
            events: 4,
            topic: 1,
            wait: 0,
            fate: Fate::Fine,
            end: End::Savepoint,
        },
        Step::Start { at: 124, relay: 0 },
        Step::Operator { at: 173, action: Action::Filter(Some(0)) },
        fault("next_batch", 1, Fault::Lose),
        fault("page", 2, Fault::Slow(60, 900)),
        Step::Crash { at: 282 },
    ];
    let of = shape(1, 3, true, 300);
    holds(Shape { ordered: false, sink: 3, attempts_max: 1, ..of }, &steps);
}

/// A defect of the simulator itself: some calls of a relay stood still after the faults had ended,
/// while the relay went on.
#[test]
fn a_relay_that_stands_still_goes_on_as_a_whole_when_the_faults_end() {
    let fault = |operation, nth, fault| Step::Fault { relay: 1, operation, nth, fault };
    for seed in 0..20 {
        let shape = Shape { sink: 3, ..shape(3, 1, false, 1_200) };
        let steps = vec![
            Step::Write {
                at: 628,
                held: 207,
                key: None,
                events: 4,
                topic: 0,
                wait: 0,
                fate: Fate::Fine,
                end: End::Savepoint,
            },
            Step::Start { at: 0, relay: 1 },
            fault("renew", 2, Fault::Freeze(2_648)),
            fault("acquire", 0, Fault::Late(1_786)),
            fault("acquire", 3, Fault::Twice(1_870)),
        ];
        let (violation, _, history) = run_plan(Plan { seed, store: Store::Memory, shape, steps }, true);
        assert_eq!(violation, None, "{}", history.join("\n"));
    }
}
