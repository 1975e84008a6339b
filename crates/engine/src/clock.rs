//! Time and chance for programs on tokio: the real thing, and a simulated one under tokio's paused
//! time.

use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::{Clock, Random};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::time::Instant;

use crate::lock::lock;

/// The clock of a program that runs on tokio.
///
/// Waits and margins follow `tokio::time`, so that a test with paused time drives them.
#[derive(Debug, Clone)]
pub struct TokioClock {
    zero: Instant,
    simulated_from: Option<Timestamp>,
}

impl TokioClock {
    /// Wall time from the machine, waits from tokio.
    pub fn new() -> Self {
        Self { zero: Instant::now(), simulated_from: None }
    }

    /// Wall time derived from tokio's time, beginning at `start`: in a test with paused time
    /// nothing comes from the air.
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
        tokio::time::sleep(duration).await;
    }
}

/// Chance seeded by the operating system, once per process; the default.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemRandom;

static SYSTEM: LazyLock<SeededRandom> = LazyLock::new(|| SeededRandom(Mutex::new(SmallRng::from_os_rng())));

impl Random for SystemRandom {
    fn unit(&self) -> f64 {
        SYSTEM.unit()
    }
}

/// Chance that a seed repeats, for tests and simulations.
#[derive(Debug)]
pub struct SeededRandom(Mutex<SmallRng>);

impl SeededRandom {
    /// The sequence that belongs to `seed`.
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
