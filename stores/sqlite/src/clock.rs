//! The machine's clock: the only place where this crate reads the time.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::Clock;

/// The wall clock of the machine.
///
/// Lease deadlines are written in wall time, because several processes share the file and a
/// monotonic clock has no meaning outside its process and boot. A jump costs liveness for at most
/// one lease, never state: epochs fence every write.
#[derive(Debug)]
pub(crate) struct MachineClock {
    started: Instant,
}

impl MachineClock {
    pub(crate) fn new() -> Self {
        Self { started: Instant::now() }
    }
}

#[async_trait]
impl Clock for MachineClock {
    fn now(&self) -> Timestamp {
        Timestamp::now()
    }

    fn monotonic(&self) -> Duration {
        self.started.elapsed()
    }

    async fn sleep(&self, duration: Duration) {
        tokio::time::sleep(duration).await;
    }
}

/// A duration in whole microseconds, at most `i64::MAX` (292,000 years).
pub(crate) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// The time from one stamp to another, both in microseconds; zero if it would be negative.
pub(crate) fn until(from: i64, to: i64) -> Duration {
    Duration::from_micros(u64::try_from(to.saturating_sub(from)).unwrap_or(0))
}

/// A stored stamp. CHECK constraints keep stamps in range; one outside becomes the nearest bound.
pub(crate) fn timestamp(micros: i64) -> Timestamp {
    // Not `from_microsecond`, which refuses the last second of the range.
    let nanos = i32::try_from(micros.rem_euclid(1_000_000) * 1_000).expect("less than a second fits");
    Timestamp::new(micros.div_euclid(1_000_000), nanos).unwrap_or(if micros < 0 {
        Timestamp::MIN
    } else {
        Timestamp::MAX
    })
}
