//! The relay on the memory store under paused time. One test program, because each program links
//! the whole engine.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod crashes;
mod dead_letters;
mod duplicates;
mod expiry;
mod lifecycle;
mod limit;
mod lost;
mod outages;
mod rate;
mod relay;
mod scheduled;
mod settling;
