//! What happens in one simulated world: drawn from a seed, and cut down step by step if it fails.

use std::fmt;

use postbox_core::{ResetTo, Seq};

use crate::rng::Rng;
use crate::server::Store;

/// Maximum relays at once.
pub(crate) const RELAYS_MAX: u8 = 3;
/// Maximum subscriptions of the log.
pub(crate) const SUBSCRIPTIONS_MAX: u8 = 3;
/// Maximum lanes of a subscription.
pub(crate) const LANES_MAX: u16 = 3;
/// The first of the callers that a person's commands count as: one for each subscription.
pub(crate) const OPERATOR: u8 = RELAYS_MAX;
/// Number of relays and of those callers.
pub(crate) const CALLERS: usize = (RELAYS_MAX + SUBSCRIPTIONS_MAX) as usize;

/// Milliseconds since the world began.
pub(crate) type At = u64;

/// One world.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) store: Store,
    pub(crate) shape: Shape,
    pub(crate) steps: Vec<Step>,
}

/// The settings that stay the same throughout.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    /// Number of subscriptions of the one log.
    pub(crate) subscriptions: u8,
    /// Of the first subscription. The others have other numbers.
    pub(crate) lanes: u16,
    pub(crate) run: Run,
    pub(crate) ordered: bool,
    pub(crate) halt: bool,
    pub(crate) apply: bool,
    pub(crate) batch: usize,
    /// Index into [`crate::sink::CAPABILITIES`].
    pub(crate) sink: usize,
    pub(crate) attempts_max: u32,
    /// How much the scheduler delays each call; 0 is not at all.
    pub(crate) jitter: u64,
    /// Nothing abrupt happens, so no event may arrive twice.
    pub(crate) clean: bool,
    /// When the faults end.
    pub(crate) calm: At,
}

/// How a relay works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Run {
    Always,
    /// On a schedule: this long after each run ended.
    Every(At),
    /// In runs of at most this many deliveries, one after the other.
    Bounded(usize),
}

/// How the destination treats the events of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Fine,
    /// Refused for good.
    Refused,
    /// Fails this often, then is accepted.
    Fails(u32),
    /// Is answered as if the destination were down, until all others are through.
    SeemsDown,
    /// The first event ends each relay that sends it, with its process.
    Ends,
}

/// How a transaction ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Commit,
    /// Commits, and the database flushes it.
    Flushed,
    Rollback,
    /// The last event is rolled back to a savepoint, the rest is committed.
    Savepoint,
}

/// What happens to a store call on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It fails and is not executed.
    Refuse,
    /// It is executed, but the answer is an error.
    Lose,
    /// The answer is an error. It is executed this much later.
    Late(At),
    /// It is executed, and again this much later.
    Twice(At),
    /// It takes this long to get there, and this long to come back.
    Slow(At, At),
    /// It is executed, and its caller stands still this long before it gets the answer.
    Freeze(At),
}

/// What happens to a call of the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mishap {
    Fails,
    Down,
    /// Down, and names a wait.
    Later,
    Gone,
    Panics,
    /// Accepts everything and never answers.
    Hangs,
    /// Accepts everything and reports a failure.
    LosesAnswer,
    BreaksContract,
    Slow(At),
}

/// A command of a person.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Retry,
    DiscardDead,
    /// Discards the event with this number, whatever its state.
    Discard(u64),
    /// Marks the event with this number dead.
    MarkDead(u64),
    Pause,
    Resume,
    Prune,
    /// Sets another filter: the number of the topic that is left out, if any.
    Filter(Option<u8>),
    Lanes(u16),
    Replay,
    /// Pauses the subscription, moves it once its lanes are free, and resumes it.
    Reset(ResetTo),
}

/// One thing that happens. Any step can be left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// A transaction: begins, appends, and ends `held` later.
    Write {
        at: At,
        held: At,
        key: Option<u8>,
        events: u8,
        topic: u8,
        wait: At,
        fate: Fate,
        end: End,
    },
    /// A relay starts as a new process.
    Start {
        at: At,
        relay: u8,
    },
    /// A relay is stopped, and finishes.
    Stop {
        at: At,
        relay: u8,
    },
    /// A relay is killed.
    Kill {
        at: At,
        relay: u8,
    },
    /// A relay stands still.
    Stall {
        at: At,
        relay: u8,
        held: At,
    },
    /// A fault for the `nth` call of an operation.
    Fault {
        relay: u8,
        operation: &'static str,
        nth: u32,
        fault: Fault,
    },
    /// A mishap for the `nth` call of the destination.
    Mishap {
        nth: u32,
        mishap: Mishap,
    },
    /// The destination is down.
    Outage {
        at: At,
        held: At,
    },
    Operator {
        at: At,
        operator: u8,
        action: Action,
    },
    /// The store crashes: everything not flushed is gone.
    Crash {
        at: At,
    },
    /// Another store takes over, with the state from `behind` ago.
    Failover {
        at: At,
        behind: At,
    },
}

const OPERATIONS: [&str; 21] = [
    "open",
    "open",
    "open",
    "settle",
    "settle",
    "settle",
    "settle",
    "acquire",
    "acquire",
    "renew",
    "page",
    "page",
    "load",
    "due",
    "due",
    "next_batch",
    "release",
    "apply",
    "subscribe",
    "leave",
    "leave",
];
const OPERATOR_OPERATIONS: [&str; 10] =
    ["retry", "discard", "mark_dead", "pause", "prune", "set_lanes", "replay", "reset", "subscribe", "note_unrouted"];

impl Plan {
    /// Draws the world of a seed.
    pub(crate) fn of(store: Store, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let rng = &mut rng;
        let shape = Shape {
            subscriptions: rng.pick(&[1, 1, 1, 2, 2, SUBSCRIPTIONS_MAX]),
            lanes: rng.pick(&[1, 1, 2, LANES_MAX]),
            run: match rng.below(6) {
                0 | 1 => Run::Every(rng.pick(&[150, 600])),
                2 | 3 => Run::Bounded(rng.pick(&[2, 7])),
                _ => Run::Always,
            },
            ordered: rng.percent(85),
            halt: rng.percent(15),
            apply: rng.percent(20),
            batch: rng.pick(&[1, 2, 3, 8, 50]),
            sink: rng.below(crate::sink::CAPABILITIES.len() as u64) as usize,
            attempts_max: rng.pick(&[1, 2, 4]),
            jitter: rng.below(4),
            clean: rng.percent(15),
            calm: rng.pick(&[300, 600, 1_200]),
        };
        let mut plan = Self { seed, store, shape, steps: Vec::new() };
        plan.draw_writes(rng);
        plan.draw_relays(rng);
        plan.draw_commands(rng);
        if !plan.shape.clean {
            plan.draw_faults(rng);
            return plan;
        }
        if rng.percent(30) {
            let at = rng.below(plan.shape.calm);
            plan.steps.push(Step::Outage { at, held: rng.within(50, 600) });
        }
        for _ in 0..rng.below(3) {
            let mishap = rng.pick(&[Mishap::Slow(300), Mishap::Slow(600), Mishap::Fails, Mishap::Down]);
            plan.steps.push(Step::Mishap { nth: rng.below(10) as u32, mishap });
        }
        plan
    }

    fn draw_writes(&mut self, rng: &mut Rng) {
        let keys = rng.within(1, 3);
        // At most one per world, and in few worlds: each ends six relays and costs a lease each.
        let mut may_end = !self.shape.clean && !self.shape.apply && self.seed.is_multiple_of(8);
        for _ in 0..rng.within(2, 8) {
            let fate = match rng.below(20) {
                0 => Fate::Refused,
                1 | 2 => Fate::Fails(rng.within(1, 3) as u32),
                3 => Fate::Fails(100),
                // More of these than a batch may stop a lane, and a limit may be less than their
                // number.
                4 if !self.shape.apply && self.shape.batch == 50 && !matches!(self.shape.run, Run::Bounded(_)) => {
                    Fate::SeemsDown
                }
                5 if std::mem::take(&mut may_end) => Fate::Ends,
                _ => Fate::Fine,
            };
            self.steps.push(Step::Write {
                at: rng.below(self.shape.calm * 4 / 5),
                held: if rng.percent(50) { 0 } else { rng.within(1, 500) },
                key: Some(rng.below(keys + 1) as u8).filter(|key| u64::from(*key) < keys),
                events: rng.within(1, 4) as u8,
                topic: rng.below(2) as u8,
                wait: if rng.percent(6) { rng.within(50, 900) } else { 0 },
                fate,
                end: rng.pick(&[End::Commit, End::Commit, End::Commit, End::Flushed, End::Rollback, End::Savepoint]),
            });
        }
    }

    fn draw_relays(&mut self, rng: &mut Rng) {
        let calm = self.shape.calm;
        for relay in 0..rng.pick(&[1, 1, 2, 2, RELAYS_MAX]).max(self.shape.subscriptions) {
            let mut at = if rng.percent(50) { 0 } else { rng.below(calm / 2) };
            self.steps.push(Step::Start { at, relay });
            while rng.percent(40) {
                at += rng.within(20, 900);
                if at >= calm {
                    break;
                }
                let kill = !self.shape.clean && rng.percent(60);
                self.steps.push(if kill { Step::Kill { at, relay } } else { Step::Stop { at, relay } });
                at += rng.within(0, 300);
                self.steps.push(Step::Start { at, relay });
            }
        }
    }

    fn draw_commands(&mut self, rng: &mut Rng) {
        let calm = self.shape.calm;
        for _ in 0..rng.below(5) {
            let action = match rng.below(18) {
                0..=3 => Action::Retry,
                4 => Action::DiscardDead,
                5 | 6 => Action::Discard(rng.below(20)),
                7 if !self.shape.clean => Action::Pause,
                8 => Action::Resume,
                9 | 10 => Action::Prune,
                11 | 12 => Action::MarkDead(rng.below(20)),
                13 => Action::Replay,
                // These take lanes away from relays, so what is in flight arrives again.
                14 | 15 if !self.shape.clean => Action::Lanes(rng.within(1, LANES_MAX.into()) as u16),
                16 if !self.shape.clean => {
                    let seq = ResetTo::Seq(Seq(rng.within(1, 12) as i64));
                    Action::Reset(rng.pick(&[ResetTo::Beginning, ResetTo::Now, seq]))
                }
                _ if rng.percent(50) => Action::Filter(Some(rng.below(2) as u8)),
                _ => Action::Filter(None),
            };
            let operator = self.draw_operator(rng);
            self.steps.push(Step::Operator { at: rng.below(calm), operator, action });
        }
    }

    fn draw_operator(&self, rng: &mut Rng) -> u8 {
        OPERATOR + rng.below(self.shape.subscriptions.into()) as u8
    }

    fn draw_faults(&mut self, rng: &mut Rng) {
        let calm = self.shape.calm;
        for _ in 0..rng.below(10) {
            let fault = match rng.below(10) {
                0 | 1 => Fault::Refuse,
                2 | 3 => Fault::Lose,
                4 | 5 => Fault::Late(if rng.percent(60) { rng.within(1, 120) } else { rng.within(100, 2_500) }),
                6 | 7 => Fault::Twice(if rng.percent(30) { 0 } else { rng.within(1, 2_000) }),
                8 => Fault::Freeze(rng.within(200, 3_000)),
                _ => Fault::Slow(rng.pick(&[0, 5, 60, 900]), rng.pick(&[0, 5, 60, 900])),
            };
            let (relay, operation) = match rng.below(12) {
                0 | 1 => (self.draw_operator(rng), rng.pick(&OPERATOR_OPERATIONS)),
                _ => (rng.below(RELAYS_MAX.into()) as u8, rng.pick(&OPERATIONS)),
            };
            let nth = if rng.percent(70) { rng.below(4) } else { rng.below(16) } as u32;
            self.steps.push(Step::Fault { relay, operation, nth, fault });
        }
        for _ in 0..rng.below(3) {
            let mishap = match rng.below(20) {
                0..=3 => Mishap::Fails,
                4 | 5 => Mishap::Down,
                6 => Mishap::Later,
                7 => Mishap::Gone,
                8 => Mishap::Panics,
                9 | 10 => Mishap::Hangs,
                11..=13 => Mishap::LosesAnswer,
                14 => Mishap::BreaksContract,
                _ => Mishap::Slow(rng.pick(&[100, 300, 700])),
            };
            self.steps.push(Step::Mishap { nth: rng.below(10) as u32, mishap });
        }
        if rng.percent(15) {
            self.steps.push(Step::Outage { at: rng.below(calm), held: rng.within(50, 900) });
        }
        if rng.percent(20) {
            let relay = rng.below(RELAYS_MAX.into()) as u8;
            self.steps.push(Step::Stall { at: rng.below(calm), relay, held: rng.within(200, 2_500) });
        }
        match rng.below(16) {
            0 => self.steps.push(Step::Crash { at: rng.below(calm) }),
            1 => {
                let behind = if rng.percent(60) { rng.within(1, 40) } else { rng.within(1, 800) };
                self.steps.push(Step::Failover { at: rng.below(calm), behind });
            }
            _ => {}
        }
    }

    /// Returns the subscription that a relay drives, or that a person's commands are for.
    pub(crate) fn subscription_of(&self, caller: u8) -> usize {
        usize::from(caller % self.shape.subscriptions)
    }

    /// Returns how a relay works.
    pub(crate) fn run_of(&self, relay: u8) -> Run {
        if relay == 1 { Run::Always } else { self.shape.run }
    }

    /// Returns whether a writer holds the store's single write lock until its transaction ends. All
    /// others then find the store busy.
    pub(crate) fn locks_while(&self, step: &Step) -> bool {
        matches!(step, Step::Write { at, held, .. } if *held > 0 && at % 4 == 0 && self.locks())
    }

    /// Returns whether any writer may do that.
    pub(crate) fn locks(&self) -> bool {
        self.store == Store::Sqlite && !self.shape.clean && !self.shape.apply
    }

    /// Returns whether the store goes back to an earlier state.
    pub(crate) fn goes_back(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Crash { .. } | Step::Failover { .. }))
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {} of {}: {:?}", self.seed, self.store.name(), self.shape)?;
        self.steps.iter().try_for_each(|step| writeln!(f, "  {step:?}"))
    }
}
