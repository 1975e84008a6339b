//! The one place that judges failures: what an outcome costs its event, and what it says about the
//! destination. Stream deliveries, due rows, detached calls and handlers in a transaction are all
//! judged here.

use std::borrow::Cow;
use std::time::Duration;

use jiff::Timestamp;
use postbox_core::limits::{CODE_BYTES_MAX, ERROR_BYTES_MAX};
use postbox_core::{Delivery, Disposition, Outcome};
use tracing::{debug, error, info, warn};

use crate::context::{Health, RelayContext};
use crate::failures::{Failure, Sent};
use crate::log_lines::rounded;

/// The judgement of one delivery.
#[derive(Debug, Clone)]
pub(super) enum Verdict {
    /// The event was delivered.
    Delivered { duplicate: bool },
    /// It failed, or became dead with its last attempt. It holds its key until that is written:
    /// after a crash the attempt is made again, and no later event of the key may have gone before
    /// it.
    Failed(Disposition),
    /// It was refused for good. It does not hold its key, because after a crash the destination
    /// would refuse it again.
    Refused(Disposition),
    /// Refused for good, and the destination must not be called again.
    Gone { disposition: Disposition, why: String },
    /// It found the destination down. This is no attempt.
    Outage { disposition: Disposition, after: Option<Duration> },
}

impl Verdict {
    /// Returns what is written for the event.
    pub(super) fn into_disposition(self) -> Disposition {
        match self {
            Self::Delivered { .. } => Disposition::Delivered,
            Self::Failed(disposition)
            | Self::Refused(disposition)
            | Self::Gone { disposition, .. }
            | Self::Outage { disposition, .. } => disposition,
        }
    }
}

impl RelayContext {
    /// Judges the outcome of a call made at `sent` that lasted `took`. It only updates the
    /// evidence, so that a handler can be judged in a transaction that may not commit; see
    /// [`Self::record`].
    pub(super) fn judge(&self, delivery: &Delivery, outcome: Outcome, sent: Sent, took: Duration) -> Verdict {
        let (seq, failures, took) = (delivery.seq, &self.health.failures, Some(took));
        let (failure, code, error, after) = match outcome {
            Outcome::Delivered { duplicate, .. } => {
                failures.accepted(seq, sent);
                return Verdict::Delivered { duplicate };
            }
            Outcome::Dead { code, error } => {
                failures.refused(seq);
                return Verdict::Refused(self.dead(delivery, code, &error, took));
            }
            Outcome::Gone { code, error } => {
                let code = clean(code);
                // No store takes NUL in the reason of a pause.
                let why = format!("{code}: {}", clip(&error)).replace('\0', "\u{fffd}");
                return Verdict::Gone { disposition: self.dead(delivery, code, &error, took), why };
            }
            Outcome::Retry { code, error, after } => (Failure::OfEvent, code, error, after),
            Outcome::ServerError { code, error, after } => {
                let failure = failures.server_error(seq);
                // The named wait is for this event only, so it applies unless this is an outage.
                let after = after.filter(|_| failure != Failure::Outage);
                (failure, code, error, after)
            }
            Outcome::Ambiguous { code, error, after } => (failures.ambiguous(seq, after), code, error, after),
            Outcome::Throttled { code, error, after } => (failures.throttled(seq, after), code, error, after),
            Outcome::Unavailable { code, error } => (failures.unavailable(seq), code, error, None),
        };
        let retry =
            |after, counted, code| Disposition::Retry { after, counted, code: clean(code), error: clip(&error), took };
        match failure {
            Failure::OfEvent => {
                let delay = self.settings.retry.next_delay(delivery.attempt, after, &*self.random);
                Verdict::Failed(match delay {
                    Some(delay) => retry(delay, true, code),
                    None => self.dead(delivery, code, &error, took),
                })
            }
            Failure::Throttled(wait) => Verdict::Failed(retry(wait, false, code)),
            Failure::Outage => Verdict::Outage { disposition: retry(Duration::ZERO, false, code), after },
        }
    }

    pub(super) fn dead(
        &self,
        delivery: &Delivery,
        code: Cow<'static, str>,
        error: &str,
        took: Option<Duration>,
    ) -> Disposition {
        let halt = self.subscription.halts() && delivery.event.key.is_some();
        Disposition::Dead { code: clean(code), error: clip(error), halt, took }
    }

    /// Acts at `now` on a verdict that stands, of a call made at `sent`: counts, logs, opens or
    /// closes the breaker.
    pub(super) fn record(&self, delivery: &Delivery, verdict: &Verdict, sent: Sent, now: Timestamp) {
        match verdict {
            Verdict::Delivered { duplicate } => {
                self.metrics.delivered_at(now, delivery);
                if *duplicate {
                    self.metrics.duplicate(&delivery.event);
                }
                self.close_breaker(sent);
            }
            // Proves nothing: the destination may still be down.
            Verdict::Failed(disposition) => self.record_failure(delivery, disposition),
            Verdict::Refused(disposition) => {
                self.close_breaker(sent);
                self.record_failure(delivery, disposition);
            }
            Verdict::Gone { disposition, why } => {
                self.health.set_gone(Some(why.clone()));
                self.close_breaker(sent);
                self.record_failure(delivery, disposition);
            }
            Verdict::Outage { disposition, after } => {
                if let Disposition::Retry { code, error, .. } = disposition {
                    self.metrics.failure(&delivery.event.topic, code);
                    self.metrics.add(&self.metrics.unavailable, 1);
                    self.open_breaker(code, error, *after);
                }
            }
        }
    }

    /// Counts and logs a failed delivery.
    pub(super) fn record_failure(&self, delivery: &Delivery, disposition: &Disposition) {
        let (metrics, event) = (&self.metrics, &delivery.event);
        match disposition {
            Disposition::Retry { counted, code, error, after, .. } => {
                metrics.failure(&event.topic, code);
                metrics.add(if *counted { &metrics.retries } else { &metrics.unavailable }, 1);
                if *counted {
                    metrics.attempt_failed(delivery.attempt);
                }
                if let Some(left_out) = self.log_line("delivery failed", code) {
                    warn!(
                        subscription = self.name(), id = %event.id, topic = %event.topic, attempt = delivery.attempt,
                        code = %code, error = %error, counted, after = ?rounded(*after), left_out, "delivery failed"
                    );
                }
            }
            Disposition::Expired { at } => {
                metrics.failure(&event.topic, Disposition::EXPIRED);
                metrics.add(&metrics.dead, 1);
                if let Some(left_out) = self.log_line("event expired", Disposition::EXPIRED) {
                    warn!(
                        subscription = self.name(), id = %event.id, seq = %delivery.seq, topic = %event.topic,
                        expires_at = %at, left_out, "event expired"
                    );
                }
            }
            Disposition::Dead { code, error, halt, took } => {
                metrics.failure(&event.topic, code);
                metrics.add(&metrics.dead, 1);
                // Without a call there was no attempt.
                if took.is_some() {
                    metrics.attempt_failed(delivery.attempt);
                }
                if let Some(left_out) = self.log_line("event dead", code) {
                    error!(
                        subscription = self.name(), id = %event.id, seq = %delivery.seq, topic = %event.topic,
                        attempt = delivery.attempt, code = %code, error = %error, halt, left_out, "event dead"
                    );
                }
            }
            _ => {}
        }
    }

    fn open_breaker(&self, code: &str, error: &str, after: Option<Duration>) {
        let breaker = &self.health.breaker;
        let Some(wait) = breaker.unavailable(self.clock.monotonic(), after, &*self.random) else { return };
        self.metrics.add(&self.metrics.breaker_opened, 1);
        self.metrics.destination_down(self.clock.now(), code);
        self.metrics.set_breaker(breaker.state());
        let failures = breaker.failures();
        // An outage may last for days, so the lines become ever rarer.
        if failures.is_power_of_two() {
            warn!(subscription = self.name(), code, error, wait = ?rounded(wait), failures, "breaker opened");
        } else {
            debug!(subscription = self.name(), code, error, wait = ?rounded(wait), failures, "breaker opened");
        }
    }

    /// Closes the breaker if nothing is left that could find the destination up.
    pub(super) fn found_nothing(&self, lane: u16) {
        let breaker = &self.health.breaker;
        if breaker.found_nothing(lane, self.metrics.lanes_held()) {
            self.metrics.destination_up();
            self.metrics.set_breaker(breaker.state());
            info!(subscription = self.name(), "breaker closed, nothing to send");
        }
    }

    fn close_breaker(&self, sent: Sent) {
        let Health { breaker, failures, .. } = &self.health;
        if breaker.answered(sent.openings) {
            failures.breaker_closed();
            self.metrics.destination_up();
            self.metrics.set_breaker(breaker.state());
            info!(subscription = self.name(), "breaker closed");
        }
    }
}

/// Cuts a code that a handler took from elsewhere, and replaces what a column, a label or a log
/// line does not take.
fn clean(code: Cow<'static, str>) -> Cow<'static, str> {
    match code.len() <= CODE_BYTES_MAX && !code.contains(char::is_control) {
        true => code,
        false => {
            let cut = &code[..code.floor_char_boundary(CODE_BYTES_MAX)];
            Cow::Owned(cut.replace(char::is_control, "\u{fffd}"))
        }
    }
}

/// Cuts an error text to the size that is stored with a delivery, at a character boundary.
fn clip(text: &str) -> String {
    text[..text.floor_char_boundary(ERROR_BYTES_MAX)].to_owned()
}
