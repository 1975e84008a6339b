//! The relay on the memory store under paused time, and the receiver. One test program, because
//! each program links the whole engine.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../support/mod.rs"]
mod support;

mod acknowledging;
mod context;
mod crashes;
mod duplicates;
mod expiry;
mod layers;
mod lifecycle;
mod limit;
mod lost;
mod outages;
mod rate;
mod relay;
mod router;
mod settling;
mod source;
