//! Clock and random number generators for programs on tokio. Tests can simulate time with tokio's
//! paused clock.

use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::{Clock, Random, lock};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

/// Below this, a thread sleeps beside tokio, which rounds twice to whole milliseconds: of a wait of
/// 1 ms it makes 2.1 ms, and of 1.5 ms as much (measured). The first waits of a poll are that
/// short.
const FINE_BELOW: Duration = Duration::from_millis(5);

/// The clock of a program that runs on tokio.
///
/// Waits and margins follow `tokio::time`, so that a test with paused time drives them. Waits
/// of a few milliseconds take real time too, unless the clock is [simulated](Self::simulated).
#[derive(Debug, Clone)]
pub struct TokioClock {
    zero: Instant,
    simulated_from: Option<Timestamp>,
}

impl TokioClock {
    /// Takes wall time from the machine and waits from tokio.
    pub fn new() -> Self {
        Self { zero: Instant::now(), simulated_from: None }
    }

    /// Derives wall time from tokio's time, beginning at `start`. In a test with paused time, no
    /// time comes from the machine.
    pub fn simulated(start: Timestamp) -> Self {
        Self { zero: Instant::now(), simulated_from: Some(start) }
    }
}

impl Default for TokioClock {
    fn default() -> Self {
        Self::new()
    }
}

#[async_trait]
impl Clock for TokioClock {
    fn now(&self) -> Timestamp {
        match self.simulated_from {
            Some(start) => start + self.zero.elapsed(),
            None => Timestamp::now(),
        }
    }

    fn monotonic(&self) -> Duration {
        self.zero.elapsed()
    }

    async fn sleep(&self, duration: Duration) {
        if self.simulated_from.is_some() || duration.is_zero() || duration >= FINE_BELOW {
            return tokio::time::sleep(duration).await;
        }
        let until = Instant::now() + duration;
        let fine = AbortOnDropHandle::new(tokio::task::spawn_blocking(move || std::thread::sleep(duration)));
        tokio::select! {
            _ = fine => {}
            // If the runtime's threads for blocking work are all taken.
            () = tokio::time::sleep_until(until) => return,
        }
        // In a test with paused time, none has passed yet.
        if Instant::now() < until {
            tokio::time::sleep_until(until).await;
        }
    }
}

/// A generator seeded by the operating system once per process. The default.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemRandom;

static SYSTEM: LazyLock<SeededRandom> = LazyLock::new(|| SeededRandom(Mutex::new(SmallRng::from_os_rng())));

impl Random for SystemRandom {
    fn unit(&self) -> f64 {
        SYSTEM.unit()
    }
}

/// A generator whose sequence a seed repeats, for tests and simulations.
#[derive(Debug)]
pub struct SeededRandom(Mutex<SmallRng>);

impl SeededRandom {
    /// Creates the generator for `seed`.
    pub fn new(seed: u64) -> Self {
        Self(Mutex::new(SmallRng::seed_from_u64(seed)))
    }
}

impl Random for SeededRandom {
    fn unit(&self) -> f64 {
        lock(&self.0).random()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn simulated_wall_time_follows_the_paused_clock() {
        let clock = TokioClock::simulated(Timestamp::UNIX_EPOCH);
        clock.sleep(Duration::from_secs(90)).await;
        assert_eq!(clock.now().as_second(), 90);
        assert_eq!(clock.monotonic().as_secs(), 90);
    }

    /// Whoever asks again until the time has come would otherwise ask for ever.
    #[tokio::test(start_paused = true)]
    async fn a_short_wait_passes_in_paused_time_too() {
        let clock = TokioClock::new();
        let until = clock.monotonic() + Duration::from_millis(3);
        let waiting = async {
            while let Some(left) = until.checked_sub(clock.monotonic()).filter(|left| !left.is_zero()) {
                clock.sleep(left).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), waiting).await.expect("it passes");
    }

    #[test]
    fn a_seed_repeats_its_sequence() {
        let draw = |seed| {
            let random = SeededRandom::new(seed);
            [random.unit(), random.unit(), random.unit()]
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }
}
