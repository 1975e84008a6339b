//! The ingress, alone and behind a real connection from the sink.

#![allow(clippy::unwrap_used)]

mod ingress;
mod known;
mod together;

use std::time::Duration;

/// Deadline of every wait; nothing takes nearly as long.
const DEADLINE: Duration = Duration::from_secs(60);
/// Longer than any test runs.
const HOUR: Duration = Duration::from_secs(3_600);
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
/// The time on the test clocks.
const NOW_S: i64 = 1_767_225_600;
