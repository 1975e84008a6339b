//! The destination: it records what arrives, and fails as the plan says.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Apply, Capabilities, Decide, Delivery, Key, Lease, NewEvent, Outcome, Result, Settlement, Sink};

use crate::ledger::Who;
use crate::plan::{At, Fate, Mishap, SUBSCRIPTIONS_MAX};
use crate::world::{DELIVER_TIMEOUT, World, number_of};

/// The combinations of capabilities that a sink is driven with.
pub(crate) const CAPABILITIES: [Capabilities; 4] = [
    Capabilities { batch_max: 1, concurrency: 8, prefix: false, system: None },
    Capabilities { batch_max: 3, concurrency: 2, prefix: false, system: None },
    Capabilities { batch_max: 4, concurrency: 1, prefix: true, system: None },
    Capabilities { batch_max: 100, concurrency: 2, prefix: true, system: None },
];
/// Maximum replays of one event that the effects of a handler tell apart.
const REPLAYS_MAX: i64 = 64;

/// What a handler did, as the number that its effect carries.
#[derive(Debug)]
pub(crate) struct Effect {
    pub(crate) subscription: usize,
    /// The event.
    pub(crate) number: usize,
    pub(crate) replay: u32,
}

impl Effect {
    pub(crate) fn of(version: i64) -> Self {
        let (event, replay) = (version / REPLAYS_MAX, (version % REPLAYS_MAX) as u32);
        let subscriptions = i64::from(SUBSCRIPTIONS_MAX);
        Self { subscription: (event % subscriptions) as usize, number: (event / subscriptions) as usize, replay }
    }

    fn version(&self) -> i64 {
        let event = self.number as i64 * i64::from(SUBSCRIPTIONS_MAX) + self.subscription as i64;
        event * REPLAYS_MAX + i64::from(self.replay)
    }
}

/// The destination, as one relay reaches it.
pub(crate) struct SimSink {
    pub(crate) world: Arc<World>,
    pub(crate) who: Who,
}

#[async_trait]
impl Sink for SimSink {
    fn capabilities(&self) -> Capabilities {
        CAPABILITIES[self.world.plan.shape.sink]
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        let world = &self.world;
        let mishap = world.begin_call(self.who, deliveries);
        let mut call = Call::begin(world, self.who, deliveries);
        if let Some(Mishap::Slow(time)) = mishap {
            tokio::time::sleep(Duration::from_millis(time)).await;
        }
        world.jitter(self.who).await;
        if mishap == Some(Mishap::Panics) {
            panic!("{}", crate::run::PANIC);
        }
        let mut stopped: HashSet<&Key> = HashSet::new();
        let mut outcomes = Vec::with_capacity(deliveries.len());
        for delivery in deliveries {
            let key = delivery.event.key.as_ref();
            if key.is_some_and(|key| stopped.contains(key)) {
                world.charge(self.who, &[*delivery]);
                outcomes.push(Outcome::retry("behind", "an earlier event of the key failed"));
                continue;
            }
            if mishap.is_none() && world.is_to_end(self.who, delivery) {
                world.ends(self.who, number_of(&delivery.event)).await;
            }
            let outcome = world.judge(self.who, delivery, mishap);
            if !outcome.is_delivered() {
                stopped.extend(key);
            }
            outcomes.push(outcome);
        }
        if mishap == Some(Mishap::Hangs) {
            return std::future::pending().await;
        }
        if mishap == Some(Mishap::BreaksContract) {
            outcomes.pop();
        }
        world.jitter(self.who).await;
        // Nobody can tell which outcome belongs to which event.
        call.answered = mishap != Some(Mishap::BreaksContract);
        if outcomes.len() == deliveries.len() {
            let mut state = world.state();
            let ledger = state.ledger(self.who);
            for (delivery, outcome) in deliveries.iter().zip(&outcomes) {
                let number = number_of(&delivery.event);
                match outcome.is_delivered() {
                    true => ledger.answered(self.who, number, delivery.replay),
                    false => ledger.excuse(number),
                }
            }
        }
        outcomes
    }
}

/// The handler as one relay calls it. It may take long, in simulated time.
pub(crate) struct SimApply {
    pub(crate) world: Arc<World>,
    pub(crate) who: Who,
    pub(crate) inner: Arc<dyn Apply>,
}

#[async_trait]
impl Apply for SimApply {
    async fn apply(
        &self,
        lease: &Lease,
        deliveries: &[&Delivery],
        settlement: Settlement<'_>,
        decide: &Decide<'_>,
    ) -> Result<Vec<Option<Outcome>>> {
        let (world, who) = (&*self.world, self.who);
        // What was handled is rolled back unless it is settled, so only a call that overran counts.
        let charged_from = world.now() + DELIVER_TIMEOUT.as_millis() as At;
        let mut call = Call { world, who, deliveries, charged_from, answered: false };
        let wait = world.take_wait(deliveries.len());
        if wait.is_some() {
            world.note(|| format!("relay {}.{}: its transaction meets {wait:?}", who.0, who.1));
        }
        match wait {
            Some(Mishap::Slow(time)) => tokio::time::sleep(Duration::from_millis(time)).await,
            Some(_) => return std::future::pending().await,
            None => {}
        }
        let answer = self.inner.apply(lease, deliveries, settlement, decide).await;
        call.answered = answer.is_ok();
        answer
    }
}

/// A call that counts as an attempt if it is dropped or panics, provided its relay lives to count
/// it.
struct Call<'a> {
    world: &'a World,
    who: Who,
    deliveries: &'a [&'a Delivery],
    /// It does not count if it ends before.
    charged_from: At,
    answered: bool,
}

impl<'a> Call<'a> {
    /// Begins a call of the destination.
    fn begin(world: &'a World, who: Who, deliveries: &'a [&'a Delivery]) -> Self {
        let mut state = world.state();
        deliveries.iter().for_each(|it| state.ledger(who).hand(number_of(&it.event), it.replay));
        Self { world, who, deliveries, charged_from: 0, answered: false }
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let mut state = self.world.state();
        let ledger = state.ledger(self.who);
        for delivery in self.deliveries {
            let number = number_of(&delivery.event);
            ledger.take_back(number, delivery.replay);
            if !self.answered {
                ledger.excuse(number);
            }
        }
        drop(state);
        if !self.answered && self.world.now() >= self.charged_from {
            self.world.charge(self.who, self.deliveries);
        }
    }
}

impl World {
    fn is_to_end(&self, who: Who, delivery: &Delivery) -> bool {
        let mut state = self.state();
        let is_there = state.lives.get(&who.0) == Some(&who.1);
        is_there && !self.is_out() && state.ledger(who).facts[number_of(&delivery.event)].fate == Fate::Ends
    }

    /// Returns the destination's outcome for one event.
    fn judge(&self, who: Who, delivery: &Delivery, mishap: Option<Mishap>) -> Outcome {
        let number = number_of(&delivery.event);
        let mut state = self.state();
        let ledger = state.ledger(who);
        let outcome = match (mishap, ledger.facts[number].fate) {
            _ if self.is_out() => Outcome::unavailable("connect_refused", "down"),
            (Some(Mishap::Down), _) => Outcome::unavailable("connect_refused", "down"),
            (Some(Mishap::Later), _) => Outcome::Throttled {
                code: "http_429".into(),
                error: "later".to_owned(),
                after: Some(Duration::from_millis(200)),
            },
            (Some(Mishap::Gone), _) => Outcome::Gone { code: "http_410".into(), error: "gone".to_owned() },
            (Some(Mishap::Fails), _) => Outcome::retry("http_500", "bad luck"),
            (_, Fate::Refused) => Outcome::dead("http_422", "poison"),
            (_, Fate::SeemsDown) if number.is_multiple_of(2) => Outcome::ambiguous("http_503", "as planned"),
            (_, Fate::SeemsDown) => Outcome::server_error("http_500", "as planned"),
            (_, Fate::Fails(times)) if times > 0 => {
                ledger.facts[number].fate = Fate::Fails(times - u32::from(times < 100));
                Outcome::retry("http_500", "as planned")
            }
            _ => Outcome::DELIVERED,
        };
        match &outcome {
            Outcome::Delivered { .. } => ledger.arrive(number, delivery.replay),
            Outcome::Retry { .. } | Outcome::ServerError { .. } | Outcome::Ambiguous { .. } => ledger.failed(number),
            Outcome::Throttled { .. } | Outcome::Unavailable { .. } => ledger.found_down(number),
            Outcome::Dead { .. } | Outcome::Gone { .. } => ledger.refused(number),
        }
        state.note(self, || {
            format!("relay {}.{}: event {number} attempt {}: {outcome:?}", who.0, who.1, delivery.attempt)
        });
        if outcome.is_delivered() {
            *state.accepted.entry(who).or_default() += 1;
        }
        if outcome.is_delivered() && mishap == Some(Mishap::LosesAnswer) {
            state.ledger(who).failed(number);
            return Outcome::ambiguous("http_504", "its answer was lost");
        }
        outcome
    }

    /// Handles one event: its effect is written in the transaction that settles.
    pub(crate) fn apply(&self, who: Who, delivery: &Delivery, append: impl FnOnce(NewEvent) -> bool) -> Outcome {
        let number = number_of(&delivery.event);
        let mishap = self.begin_call(who, &[delivery]);
        let mut state = self.state();
        let ledger = state.ledger(who);
        let outcome = match (mishap, ledger.facts[number].fate) {
            (Some(Mishap::Fails | Mishap::LosesAnswer | Mishap::BreaksContract), _) => {
                Outcome::retry("failed", "bad luck")
            }
            (Some(Mishap::Down | Mishap::Later), _) => Outcome::unavailable("down", "down"),
            (Some(Mishap::Gone), _) => Outcome::Gone { code: "gone".into(), error: "gone".to_owned() },
            (Some(Mishap::Panics), _) => {
                ledger.failed(number);
                drop(state);
                panic!("{}", crate::run::PANIC);
            }
            (_, Fate::Refused) => Outcome::dead("refused", "poison"),
            (_, Fate::Fails(times)) if times > 0 => {
                ledger.facts[number].fate = Fate::Fails(times - u32::from(times < 100));
                Outcome::retry("failed", "as planned")
            }
            _ => Outcome::DELIVERED,
        };
        match &outcome {
            Outcome::Retry { .. } | Outcome::ServerError { .. } | Outcome::Ambiguous { .. } => ledger.failed(number),
            Outcome::Throttled { .. } | Outcome::Unavailable { .. } => ledger.found_down(number),
            Outcome::Dead { .. } | Outcome::Gone { .. } => ledger.refused(number),
            Outcome::Delivered { .. } => {
                let subscription = self.plan.subscription_of(who.0);
                let effect = Effect { subscription, number, replay: delivery.replay };
                if !append(NewEvent::json("effect", "{}").version(effect.version())) {
                    return Outcome::unavailable("store", "the store went back");
                }
            }
        }
        state.note(self, || format!("relay {}.{}: handler of event {number}: {outcome:?}", who.0, who.1));
        outcome
    }
}
