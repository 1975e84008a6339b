//! The settings of a relay, with the reason for each default.

use std::time::Duration;

use postbox_core::limits::BATCH_EVENTS_MAX;
use postbox_core::{BatchLimit, Error, Rate, Result, RetryPolicy};

use crate::breaker::BreakerPolicy;

/// How a relay works. Every field has a default that is right for most.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelaySettings {
    /// Limits of a batch, which is sent and settled together. Default 500 events, 8 MiB. One read
    /// brings up to four times as many events within the same bytes, unless the destination is
    /// slower than reads. At most two reads are in memory per lane.
    pub batch: BatchLimit,
    /// When a failed event is retried, and when it becomes dead.
    pub retry: RetryPolicy,
    /// When a destination that is down is tried again.
    pub breaker: BreakerPolicy,
    /// Fewer concurrent calls than the sink can take. Default: what the sink declares.
    pub concurrency: Option<usize>,
    /// Maximum rate of events, over all lanes and all replicas, including retries. Waiting for it
    /// costs no attempt. Each replica gets the share that its lanes are of all lanes. While new
    /// events wait for it, retries get at most half of it. Not for handlers that apply in a
    /// transaction. Default: as fast as the sink takes them. See
    /// [`RelayBuilder::shared_rate`](crate::RelayBuilder::shared_rate).
    pub rate: Option<Rate>,
    /// How long a lane belongs to this relay without renewal. After that, a crashed relay's work is
    /// taken over. Renewed every third of it. Default 10 s: two renewals may fail before the lane
    /// is lost.
    pub lease_ttl: Duration,
    /// Longest time for one call of the sink. After that it is dropped and counts as a failed
    /// attempt. Default 30 s.
    pub deliver_timeout: Duration,
    /// How long calls in flight may go on after a graceful stop, or in a lane that another relay is
    /// to have. Events of calls that take longer are sent again, soon after `deliver_timeout` at
    /// the latest, and hold their keys until then. Default 10 s.
    pub drain_timeout: Duration,
    /// First wait after an empty read. Default 0.5 ms.
    pub poll_min: Duration,
    /// Longest wait between reads of an idle lane. Default 100 ms: ten cheap reads a second.
    pub poll_max: Duration,
}

impl Default for RelaySettings {
    fn default() -> Self {
        Self {
            batch: BatchLimit::default(),
            retry: RetryPolicy::default(),
            breaker: BreakerPolicy::default(),
            concurrency: None,
            rate: None,
            lease_ttl: Duration::from_secs(10),
            deliver_timeout: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(10),
            poll_min: Duration::from_micros(500),
            poll_max: Duration::from_millis(100),
        }
    }
}

impl RelaySettings {
    /// Checks every limit. The error names all faults at once.
    pub fn validate(&self) -> Result<()> {
        let ms = Duration::from_millis;
        let mut faults = Vec::new();
        let mut check = |fine: bool, fault: &str| {
            if !fine {
                faults.push(fault.to_owned());
            }
        };
        check(
            (1..=BATCH_EVENTS_MAX).contains(&self.batch.events),
            &format!("batch must be 1 to {BATCH_EVENTS_MAX} events"),
        );
        check(self.batch.payload_bytes > 0, "the batch's payload bytes must be positive");
        check(self.retry.attempts_max > 0, "max attempts must be at least 1");
        check(self.concurrency != Some(0), "concurrency must be at least 1");
        check(self.lease_ttl >= ms(100), "the lease must last at least 100 ms");
        check(!self.deliver_timeout.is_zero(), "the deliver timeout must be positive");
        check(!self.poll_min.is_zero(), "the shortest poll wait must be positive");
        check(self.poll_min <= self.poll_max, "the shortest poll wait must not exceed the longest");
        check(!self.breaker.base.is_zero(), "the breaker's first wait must be positive");
        if faults.is_empty() {
            return Ok(());
        }
        Err(Error::invalid("build relay", "settings_invalid", faults.join("; ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_every_fault_is_named_at_once() {
        assert!(RelaySettings::default().validate().is_ok());
        let wrong = RelaySettings {
            batch: BatchLimit { events: 0, payload_bytes: 1 },
            lease_ttl: Duration::ZERO,
            ..RelaySettings::default()
        };
        let error = wrong.validate().expect_err("two faults");
        assert_eq!(error.code(), "settings_invalid");
        assert!(error.message().contains("batch") && error.message().contains("lease"), "{error}");
    }
}
