//! Routers as destinations of relays, on the memory store under paused time.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod context;
mod handlers;
mod layers;
