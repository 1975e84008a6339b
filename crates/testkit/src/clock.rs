//! Clocks for tests: one that moves only when a test says so, one whose wall time stands still.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::Clock;
use tokio::sync::watch;

/// A clock that stands still until [`ManualClock::advance`]. Wall and monotonic time move together.
#[derive(Debug)]
pub struct ManualClock {
    began: Timestamp,
    passed: watch::Sender<Duration>,
}

impl ManualClock {
    /// Creates a clock that stands at `began`.
    pub fn new(began: Timestamp) -> Self {
        Self { began, passed: watch::Sender::new(Duration::ZERO) }
    }

    /// Advances time and wakes sleepers whose time has come.
    pub fn advance(&self, by: Duration) {
        self.passed.send_modify(|passed| *passed += by);
    }
}

impl Default for ManualClock {
    /// Creates a clock at a fixed moment of 2026, so that failures repeat.
    fn default() -> Self {
        Self::new(Timestamp::from_second(1_767_225_600).expect("a moment of 2026"))
    }
}

#[async_trait]
impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        self.began.saturating_add(self.monotonic()).expect("a span of plain seconds")
    }

    fn monotonic(&self) -> Duration {
        *self.passed.borrow()
    }

    async fn sleep(&self, duration: Duration) {
        let until = self.monotonic() + duration;
        let mut passed = self.passed.subscribe();
        passed.wait_for(|passed| *passed >= until).await.map(drop).expect("the clock outlives its sleepers");
    }
}

/// A clock whose wall time stands at the start of [`ManualClock::default`]. Its waits are real.
#[derive(Debug, Clone, Copy)]
pub struct StillClock;

#[async_trait]
impl Clock for StillClock {
    fn now(&self) -> Timestamp {
        ManualClock::default().now()
    }

    fn monotonic(&self) -> Duration {
        static ZERO: LazyLock<Instant> = LazyLock::new(Instant::now);
        ZERO.elapsed()
    }

    async fn sleep(&self, duration: Duration) {
        tokio::time::sleep(duration).await;
    }
}
