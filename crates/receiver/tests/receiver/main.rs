//! The receiver on the memory store under paused time.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod acknowledging;
mod partitions;
mod source;
