//! The relay, its store and its destination in a simulated world: scheduler, clock and faults come
//! from a seed.
//!
//! It runs the real engine with the memory store or the SQLite store, under simulated time. A world
//! is drawn from its seed as a list of steps: transactions that commit late or roll back; relays
//! that start, stop, are killed and stand still; store calls that are refused, lost, executed late
//! or twice; destinations that fail; commands of a person; a store that goes back to an earlier
//! state. Each subscription of the log has an independent ledger, which checks the store after each
//! operation. A failing seed is replayed by its number, and shortened by leaving out steps.
//!
//! # What this crate deliberately does not do
//!
//! Nothing here runs in production. It knows no database server and no network.

#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "numbers of a small world")]

mod director;
mod flaky;
mod gate;
mod ledger;
mod plan;
mod regressions;
mod rng;
mod run;
mod server;
mod sink;
mod sqlite;
mod sqlite_client;
mod world;

pub use regressions::{repeated_after_a_crash, run_regressions};
pub use run::{Failure, Summary, Verdict, run_seed, run_seeds, shrink_seed, trace_seed};
pub use server::Store;
