//! The ingress: who gets in, what is stored, what everybody hears; and the sink over a real
//! connection into it.

#![allow(clippy::unwrap_used)]

mod ingress;
mod known;
mod together;

use std::time::Duration;

/// No test waits longer than this for anything; nothing takes nearly as long.
const DEADLINE: Duration = Duration::from_secs(60);
/// A wait that no test sees the end of.
const HOUR: Duration = Duration::from_secs(3_600);
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
/// Where the clocks of these tests stand.
const NOW_S: i64 = 1_767_225_600;
