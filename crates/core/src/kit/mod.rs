//! For authors of a store: what every store does in the same way.
//!
//! A store implements the contracts in its own terms, usually SQL. Everything that does not depend
//! on those terms is here, so that it exists once: the delivery row after a disposition
//! ([`RowAfter`]), how many rows fit into a batch ([`BatchLimiter`]), what a failed handler blocks
//! ([`BlockedKeys`]), what an event inherits ([`in_context`]), counts ([`StatsCounter`]), and the
//! errors that callers know by code.

mod apply;
mod attempt;
mod batch;
mod error;
mod row;
mod stats;

pub use crate::context::in_context;
pub use crate::event::is_word;
pub use apply::{BlockedKeys, entries_of, panic_text};
pub use attempt::{attempts_from_json, attempts_to_json, note_attempt};
pub use batch::{BatchLimiter, lane_of};
pub use error::{
    ROWS_MOVED_MAX, check_lanes, check_log, check_logs, check_message_id, handlers_of_another_store, lanes_apart,
    lanes_held, lanes_missing, log_unknown, rebase_not_needed, rows_many, settled_already, subscription_changed,
    subscription_exists, subscription_unknown, window_undone,
};
pub use row::{Due, RowAfter};
pub use stats::{LOOK_EVENTS_MAX, LOOK_EVENTS_MIN, Share, StatsCounter, unrouted};

/// Maximum rows that one bounded step of `forget` deletes.
pub const STEP_ROWS_MAX: usize = 1_000;
/// Number of events that one step of `prune` looks at: a few milliseconds of the database. Smaller
/// steps cost more per event, larger ones delay appends (measured, see
/// `docs/decisions/retention-by-range.md`).
pub const PRUNE_ROWS_MAX: usize = 1_500;
/// Number of events too young to delete in one step that end a run of `prune`.
pub const PRUNE_YOUNG_MAX: usize = 1_000;
