//! Retention: a sweep that removes events which every subscription has passed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use postbox_core::limits::{DEAD_AGE_MIN, MESSAGE_IDS_AGE_MIN};
use postbox_core::{Change, Changed, Clock, Error, LogName, Prune, Result, Selection, Seq, Store, lock};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::last_outcome::{FailingPart, LastOutcome};
use crate::schedule::{Every, Schedule, sleep_until};
use crate::supervise::keep_up;

/// Least pause between two bounded deletes of one sweep.
const STEP_PAUSE_MIN: Duration = Duration::from_millis(4);
/// How long sweeps start where the previous one ended, before one starts from the beginning again.
/// That one looks again at events that had to stay, because dead ones may have been delivered
/// since. It must be rare, because it walks over deleted index entries that are still there.
const ANEW_EVERY: Duration = Duration::from_secs(3_600);
/// A failed sweep is repeated after this time unless the schedule names an earlier one: a schedule
/// may be nightly, and most causes are over soon.
const REPEATED_AFTER: Duration = Duration::from_secs(300);
/// Maximum steps of one sweep; the next sweep does the rest. Bounds a sweep even if events age
/// faster than it deletes.
const STEPS_MAX: usize = 500_000;

/// Returns the pause after one of many steps of a store that lasted `took`: at least as long as the
/// step. Half of the time is left to appends and deliveries, and more the busier the store is.
/// Without a pause, others would hardly get the write lock of a SQLite file: they poll for it.
pub fn step_pause(took: Duration) -> Duration {
    took.max(STEP_PAUSE_MIN)
}

/// Pauses after a step that began at a time of this clock, or until `stop`.
pub(crate) async fn pause_after(clock: &dyn Clock, began: Duration, stop: &CancellationToken) {
    let took = clock.monotonic().saturating_sub(began);
    _ = stop.run_until_cancelled(clock.sleep(step_pause(took))).await;
}

/// The result of one sweep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Swept {
    /// Events removed.
    pub events: u64,
    /// Dead events given up: discarded, and removed when they are old enough.
    pub dead: u64,
    /// Remembered ids of inbound messages that were forgotten, and records of their conflicts.
    pub message_ids: u64,
}

/// Removes delivered events older than an age ([7 days](Self::EVENTS_AGE)). On request it also
/// forgets old inbound ids ([`message_ids_older_than`](Self::message_ids_older_than)) and gives up
/// old dead events ([`dead_older_than`](Self::dead_older_than)). Otherwise dead and pending events
/// are never removed. Several replicas may sweep at once.
pub struct Sweeper {
    store: Arc<dyn Store>,
    logs: Vec<LogName>,
    events_age: Duration,
    message_ids_age: Option<Duration>,
    dead_age: Option<Duration>,
    schedule: Box<dyn Schedule>,
    clock: Arc<dyn Clock>,
    /// For each log: when its last sweep from the beginning began, and after which position the
    /// last step of all sweeps began.
    places: Mutex<HashMap<LogName, (Duration, Option<Seq>)>>,
    last: LastOutcome,
}

impl Sweeper {
    /// Default minimum age of delivered events.
    pub const EVENTS_AGE: Duration = Duration::from_hours(7 * 24);
    /// Default minimum age of inbound message ids: longer than any known sender keeps retrying, and
    /// as long as Stripe lets a person send an event again.
    pub const MESSAGE_IDS_AGE: Duration = Duration::from_hours(30 * 24);

    /// Creates a sweeper of `logs` that runs once an hour.
    pub fn new(store: Arc<dyn Store>, logs: Vec<LogName>, clock: Arc<dyn Clock>) -> Self {
        Self {
            store,
            logs,
            events_age: Self::EVENTS_AGE,
            message_ids_age: None,
            dead_age: None,
            schedule: Box::new(Every(Duration::from_secs(3_600))),
            clock,
            places: Mutex::default(),
            last: LastOutcome::default(),
        }
    }

    /// Sets how old a delivered event must be.
    #[must_use]
    pub fn events_older_than(mut self, age: Duration) -> Self {
        self.events_age = age;
        self
    }

    /// Also forgets ids of inbound messages older than `age`. Fails if `age` is less than 7 days
    /// ([`MESSAGE_IDS_AGE_MIN`]). Choose it at least as long as your senders keep repeating a
    /// message: a message that comes again after its id was forgotten is applied again.
    pub fn message_ids_older_than(mut self, age: Duration) -> Result<Self> {
        if age < MESSAGE_IDS_AGE_MIN {
            let (age, least) = (age.as_secs(), MESSAGE_IDS_AGE_MIN.as_secs());
            let text = format!(
                "message ids must be remembered for {least} s (7 days) or longer, not {age} s: a message repeated after that would be applied twice"
            );
            return Err(Error::invalid("configure", "message_ids_age_too_short", text));
        }
        self.message_ids_age = Some(age);
        Ok(self)
    }

    /// Also gives up events that have been dead for longer than `age`. They are discarded, and
    /// removed when they are old enough. Fails if `age` is less than a day ([`DEAD_AGE_MIN`]).
    /// Events that hold their key (`on_dead = "halt"`) stay, because the others of the key wait for
    /// a person. `None`: all dead events wait, as by default.
    pub fn dead_older_than(mut self, age: Option<Duration>) -> Result<Self> {
        if let Some(age) = age.filter(|age| *age < DEAD_AGE_MIN) {
            let (age, least) = (age.as_secs(), DEAD_AGE_MIN.as_secs());
            let text =
                format!("dead events must be kept for {least} s (a day) or longer, not {age} s: nobody would see them");
            return Err(Error::invalid("configure", "dead_age_too_short", text));
        }
        self.dead_age = age;
        Ok(self)
    }

    /// Sets when to sweep.
    #[must_use]
    pub fn schedule(mut self, schedule: impl Schedule) -> Self {
        self.schedule = Box::new(schedule);
        self
    }

    /// Sweeps whenever the schedule says so, until `stop`. A sweep that fails is repeated after
    /// five minutes, or at the next time if that is sooner.
    ///
    /// Cancel-safe: each step is a transaction of the store.
    pub async fn run(&self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            let Some(next) = self.schedule.next_after(self.clock.now()) else { return };
            let repeats = self.failing().is_some();
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = sleep_until(next, &*self.clock) => {}
                () = self.clock.sleep(REPEATED_AFTER), if repeats => {}
            }
            let swept = self.sweep(&stop).await;
            self.last.note(&swept, self.clock.now());
            match swept {
                Ok(swept) if swept == Swept::default() => debug!("retention sweep: nothing to remove"),
                Ok(Swept { events, dead, message_ids }) => info!(events, dead, message_ids, "retention sweep"),
                Err(error) => warn!(code = error.code(), error = %error, "retention sweep failed"),
            }
        }
    }

    /// As [`Self::run`], and starts again after a panic, which counts as a failed sweep.
    pub async fn supervise(self: Arc<Self>, stop: CancellationToken) {
        let run = || {
            let (sweeper, stop) = (Arc::clone(&self), stop.clone());
            async move { sweeper.run(stop).await }
        };
        keep_up("sweeper", run, &self.last, &*self.clock, &stop).await;
    }

    /// Returns since when each sweep of [`Self::run`] fails, if the last one did.
    pub fn failing(&self) -> Option<FailingPart> {
        self.last.failing()
    }

    /// Sweeps once, in bounded steps, until nothing is left to remove or until `stop`. A part that
    /// fails does not stop the others: the first error is returned after all of them.
    pub async fn sweep(&self, stop: &CancellationToken) -> Result<Swept> {
        let (mut swept, mut first) = (Swept::default(), None);
        if let Some(age) = self.dead_age {
            swept.dead = self.give_up(age, stop, &mut first).await;
        }
        for log in &self.logs {
            swept.events += or_note(self.sweep_log(log, stop).await, &mut first);
        }
        if let Some(age) = self.message_ids_age {
            let forget = |_| async move {
                let count = self.store.forget(age).await?;
                Ok(Changed { count, next: (count > 0).then_some(Seq(0)) })
            };
            swept.message_ids = or_note(self.steps(stop, &mut None, forget).await, &mut first);
        }
        first.map_or(Ok(swept), Err)
    }

    async fn give_up(&self, age: Duration, stop: &CancellationToken, first: &mut Option<Error>) -> u64 {
        let mut given_up = 0;
        let infos = or_note(self.store.subscriptions().await, first);
        for info in infos.iter().filter(|info| self.logs.contains(&info.log)) {
            let discard = |after| async move {
                let selection = Selection { dead_for: Some(age), after, ..Selection::default() };
                self.store.change(&info.name, &Change::Discard, &selection).await
            };
            given_up += or_note(self.steps(stop, &mut None, discard).await, first);
        }
        given_up
    }

    async fn sweep_log(&self, log: &LogName, stop: &CancellationToken) -> Result<u64> {
        let places = || lock(&self.places);
        let now = self.clock.monotonic();
        let known = places().get(log).copied().filter(|(began, _)| now.saturating_sub(*began) < ANEW_EVERY);
        let (began, mut after) = known.unwrap_or((now, None));
        let prune = |after| async move {
            self.store.prune(log, &Prune { older_than: self.events_age, after, ..Prune::default() }).await
        };
        let removed = self.steps(stop, &mut after, prune).await;
        places().insert(log.clone(), (began, after));
        removed
    }

    /// Takes steps from `after` on until nothing is left. Sets `after` to where the last step
    /// began.
    async fn steps<F: Future<Output = Result<Changed>>>(
        &self,
        stop: &CancellationToken,
        after: &mut Option<Seq>,
        step: impl Fn(Option<Seq>) -> F,
    ) -> Result<u64> {
        let mut removed = 0;
        for _ in 0..STEPS_MAX {
            if stop.is_cancelled() {
                break;
            }
            let began = self.clock.monotonic();
            let changed = step(*after).await?;
            removed += changed.count;
            if changed.next.is_none() {
                break;
            }
            *after = changed.next;
            pause_after(&*self.clock, began, stop).await;
        }
        Ok(removed)
    }
}

/// Returns what was done, or nothing; notes the first error.
fn or_note<T: Default>(done: Result<T>, first: &mut Option<Error>) -> T {
    done.unwrap_or_else(|error| {
        first.get_or_insert(error);
        T::default()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use postbox_core::{ErrorKind, Inbound, Log as _, NewEvent, Receive as _, Received, Subscription};
    use postbox_memory::MemoryStore;
    use postbox_testkit::memory::FailsAt;

    use super::*;
    use crate::clock::TokioClock;

    const S: Duration = Duration::from_secs(1);

    fn inbound() -> Inbound {
        Inbound {
            source: "partner".parse().expect("a name"),
            message_id: "msg_1".into(),
            digest: [0; 32],
            event: NewEvent::json("t", "{}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_part_that_fails_stops_no_other() {
        for operation in ["discard", "prune"] {
            let clock: Arc<dyn Clock> = Arc::new(TokioClock::simulated(jiff::Timestamp::UNIX_EPOCH));
            let server = MemoryStore::new(Arc::clone(&clock));
            let logs = vec![LogName::outbox(), LogName::inbox()];
            for log in &logs {
                let name = format!("of-{log}").parse().expect("a name");
                server.subscribe(&Subscription::new(name, log.clone())).await.expect("subscribed");
            }
            server.receive(&LogName::inbox(), inbound()).await.expect("received");
            tokio::time::sleep(MESSAGE_IDS_AGE_MIN + S).await;
            let calls = Arc::new(AtomicU32::new(0));
            let counted = Arc::clone(&calls);
            let once = move || {
                let is_first = counted.fetch_add(1, Ordering::SeqCst) == 0;
                is_first.then(|| Error::new(ErrorKind::Unavailable, "simulate", "store_down", "the first call fails"))
            };
            let store = Arc::new(server.client(Some(Arc::new(FailsAt(operation, once)))));
            let sweeper = Sweeper::new(Arc::clone(&store) as _, logs, clock)
                .message_ids_older_than(MESSAGE_IDS_AGE_MIN)
                .and_then(|sweeper| sweeper.dead_older_than(Some(DEAD_AGE_MIN)))
                .expect("long enough");
            let error = sweeper.sweep(&CancellationToken::new()).await.expect_err("the first call fails");
            assert_eq!((error.code(), calls.load(Ordering::SeqCst)), ("store_down", 2), "{operation}");
            let again = store.receive(&LogName::inbox(), inbound()).await.expect("received");
            assert!(matches!(again, Received::Accepted(_)), "its id is forgotten");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_sweep_is_repeated_soon_and_known_until_one_succeeds() {
        for (every, repeated) in [(86_400, 300), (60, 60)] {
            sweep_that_fails_twice(every, repeated).await;
        }
    }

    async fn sweep_that_fails_twice(every: u32, repeated: u32) {
        let clock: Arc<dyn Clock> = Arc::new(TokioClock::simulated(jiff::Timestamp::UNIX_EPOCH));
        let server = MemoryStore::new(Arc::clone(&clock));
        let calls = AtomicU32::new(0);
        let twice = move || match calls.fetch_add(1, Ordering::SeqCst) {
            0 => panic!("a defect"),
            1 => Some(Error::new(ErrorKind::Conflict, "simulate", "reference_held", "it is held; drop it")),
            _ => None,
        };
        let store = Arc::new(server.client(Some(Arc::new(FailsAt("prune", twice)))));
        let sweeper = Sweeper::new(store, vec![LogName::outbox()], clock);
        let sweeper = Arc::new(sweeper.schedule(Every(every * S)));
        let stop = CancellationToken::new();
        let running = tokio::spawn(Arc::clone(&sweeper).supervise(stop.clone()));
        assert_eq!(sweeper.failing(), None);
        tokio::time::sleep((every + 1) * S).await;
        let failing = sweeper.failing().expect("a sweep panicked");
        assert_eq!((failing.code.as_str(), failing.tries), ("sweeper_panicked", 1));
        tokio::time::sleep(repeated * S).await;
        let failing = sweeper.failing().expect("two sweeps failed");
        assert_eq!((failing.code.as_str(), failing.tries), ("reference_held", 2));
        assert_eq!(failing.since.as_second(), i64::from(every), "of the first one");
        tokio::time::sleep(repeated * S).await;
        assert_eq!(sweeper.failing(), None);
        stop.cancel();
        running.await.expect("no panic");
    }

    /// A message whose id is forgotten is applied again when it comes again.
    #[tokio::test(start_paused = true)]
    async fn no_message_id_is_forgotten_within_a_week() {
        let clock: Arc<dyn Clock> = Arc::new(TokioClock::simulated(jiff::Timestamp::UNIX_EPOCH));
        let store = Arc::new(MemoryStore::new(Arc::clone(&clock)));
        let sweeper = |age: Duration| {
            let sweeper = Sweeper::new(Arc::clone(&store) as _, vec![LogName::inbox()], Arc::clone(&clock));
            sweeper.message_ids_older_than(age)
        };
        for short in [Duration::ZERO, S, MESSAGE_IDS_AGE_MIN - Duration::from_millis(1)] {
            let error = sweeper(short).err().expect("refused");
            assert_eq!((error.kind(), error.code()), (ErrorKind::Invalid, "message_ids_age_too_short"));
            assert!(error.message().contains("7 days"), "{error}");
        }
        let receive = async || store.receive(&LogName::inbox(), inbound()).await.expect("received");
        let sweep = async |age: Duration| {
            let sweeper = sweeper(age).expect("long enough");
            sweeper.sweep(&CancellationToken::new()).await.expect("swept").message_ids
        };
        assert!(matches!(receive().await, Received::Accepted(_)));
        tokio::time::sleep(MESSAGE_IDS_AGE_MIN - S).await;
        assert_eq!(sweep(MESSAGE_IDS_AGE_MIN).await, 0);
        assert_eq!(receive().await, Received::Duplicate);
        tokio::time::sleep(2 * S).await;
        assert_eq!(sweep(2 * MESSAGE_IDS_AGE_MIN).await, 0);
        assert_eq!(sweep(MESSAGE_IDS_AGE_MIN).await, 1);
        assert!(matches!(receive().await, Received::Accepted(_)));
    }
}
