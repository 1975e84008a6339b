//! A rate limit, and the bucket that enforces it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::error::{Error, Result};

/// Maximum events per period. Beyond it the spacing is shorter than any timer's resolution.
const COUNT_MAX: u32 = 1_000_000;
/// The periods a rate may be written in.
const PERIODS: [(&str, Duration); 3] =
    [("s", Duration::from_secs(1)), ("m", Duration::from_secs(60)), ("h", Duration::from_secs(3_600))];

/// A maximum count per period, e.g. `50/s`, `600/m`, `1000/h`.
///
/// ```
/// use postbox_core::Rate;
///
/// let rate: Rate = "600/m".parse()?;
/// assert_eq!(rate.interval().as_millis(), 100);
/// # Ok::<(), postbox_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    count: u32,
    period: &'static (&'static str, Duration),
}

impl Rate {
    /// Creates a rate per second. `None` for zero, or for more than a million.
    pub fn per_second(count: u32) -> Option<Self> {
        (1..=COUNT_MAX).contains(&count).then_some(Self { count, period: &PERIODS[0] })
    }

    /// Returns the time from one event to the next.
    pub fn interval(self) -> Duration {
        self.period.1 / self.count
    }

    /// Returns how many events it allows within a time, rounded down, at least one.
    pub fn within(self, time: Duration) -> usize {
        let count = time.as_nanos() / self.interval().as_nanos().max(1);
        usize::try_from(count).unwrap_or(usize::MAX).max(1)
    }

    /// Returns the count per minute, rounded down, at least one.
    pub fn per_minute(self) -> u64 {
        let micros = self.period.1.as_micros().max(1);
        let count = u128::from(self.count) * 60_000_000 / micros;
        u64::try_from(count).unwrap_or(u64::MAX).max(1)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.count, self.period.0)
    }
}

impl FromStr for Rate {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let rate = || {
            let (count, period) = text.split_once('/')?;
            let period = PERIODS.iter().find(|(unit, _)| *unit == period.trim())?;
            let count = count.trim();
            let plain = count.bytes().all(|byte| byte.is_ascii_digit());
            let count = count.parse().ok().filter(|count| plain && (1..=COUNT_MAX).contains(count))?;
            Some(Self { count, period })
        };
        rate().ok_or_else(|| {
            let text = format!(
                "{text:?} is not a valid rate; write how many in a second, minute or hour, e.g. \"50/s\", \"600/m\" or \"1000/h\""
            );
            Error::invalid("read rate", "rate_invalid", text)
        })
    }
}

/// Enforces a [`Rate`]. Reads no clock: the time is passed in, and must not go back.
///
/// What was not used is kept for later, but at most `burst` worth of it. After a pause, that much
/// may happen at once.
#[derive(Debug, Clone)]
pub struct Bucket {
    interval: Duration,
    burst: Duration,
    /// When everything spent so far is paid for.
    paid_at: Duration,
}

impl Bucket {
    /// Creates a full bucket.
    pub fn new(rate: Rate, burst: Duration) -> Self {
        Self { interval: rate.interval(), burst, paid_at: Duration::ZERO }
    }

    /// Changes the interval between events from now on.
    pub fn set_interval(&mut self, interval: Duration) {
        self.interval = interval;
    }

    /// Returns how long until one more may happen; `None`: now.
    pub fn wait(&self, now: Duration) -> Option<Duration> {
        let wait = self.paid_at.saturating_sub(now.saturating_add(self.burst));
        (!wait.is_zero()).then_some(wait)
    }

    /// Notes that `count` happened. If that exceeds the room, the next ones wait longer.
    pub fn spend(&mut self, count: u32, now: Duration) {
        self.paid_at = self.paid_at.max(now).saturating_add(self.interval.saturating_mul(count));
    }

    /// Takes one now, or returns the wait until it may happen.
    pub fn take(&mut self, now: Duration) -> std::result::Result<(), Duration> {
        if let Some(wait) = self.wait(now) {
            return Err(wait);
        }
        self.spend(1, now);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn rate(text: &str) -> Rate {
        text.parse().expect("a rate")
    }

    #[test]
    fn rates_as_people_write_them() {
        for (text, interval_ms, per_minute) in
            [("50/s", 20, 3_000), ("600/m", 100, 600), ("1/s", 1_000, 60), ("3600/h", 1_000, 60), ("1/h", 3_600_000, 1)]
        {
            assert_eq!(rate(text).interval(), interval_ms * MS, "{text}");
            assert_eq!(rate(text).per_minute(), per_minute, "{text}");
            assert_eq!(rate(text).to_string(), text);
        }
        assert_eq!(Rate::per_second(50), Some(rate(" 50 / s ")));
        assert_eq!(Rate::per_second(0), None);
        for text in ["", "50", "/s", "50/", "0/s", "-1/s", "+1/s", "1.5/s", "50/d", "50/s/s", "9999999/s", "x/s"] {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
    }

    #[test]
    fn never_more_than_the_rate_and_its_burst_in_any_span() {
        for burst in [Duration::ZERO, 100 * MS, 1_000 * MS] {
            let mut bucket = Bucket::new(rate("50/s"), burst);
            let mut taken = Vec::new();
            // A pause in the middle saves up no more than the burst.
            for now in (0..5_000).chain(60_000..65_000).map(|ms| ms * MS) {
                while bucket.take(now).is_ok() {
                    taken.push(now);
                }
            }
            for (index, from) in taken.iter().enumerate() {
                let within = taken[index..].iter().take_while(|at| **at < *from + 1_000 * MS).count();
                assert!(within as u128 <= 51 + burst.as_millis() / 20, "{within} within a second, burst {burst:?}");
            }
            assert!(taken.len() >= 500, "{} in ten seconds", taken.len());
        }
    }

    #[test]
    fn what_is_owed_is_waited_for() {
        let mut bucket = Bucket::new(rate("10/s"), Duration::ZERO);
        assert_eq!(bucket.wait(Duration::ZERO), None);
        bucket.spend(5, Duration::ZERO);
        assert_eq!(bucket.wait(100 * MS), Some(400 * MS));
        assert_eq!(bucket.take(400 * MS), Err(100 * MS));
        assert_eq!(bucket.take(500 * MS), Ok(()));
        assert_eq!(bucket.take(500 * MS), Err(100 * MS));
    }
}
