//! The engine shared by outbox, inbox and bus: a subscription reads a log and delivers to a sink or
//! to handlers.
//!
//! ```
//! use std::sync::Arc;
//! use postbox_core::{Append, Delivery, LogName, NewEvent, Subscription};
//! use postbox_memory::MemoryStore;
//! use postbox_engine::{Relay, TokioClock};
//! use postbox_router::handler_sink;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), postbox_core::Error> {
//! let store = Arc::new(MemoryStore::new(Arc::new(TokioClock::new())));
//! store.append(&LogName::outbox(), &[NewEvent::json("order.paid", "{}").key("42")]).await?;
//!
//! let subscription = Subscription::new("printer".parse()?, LogName::outbox());
//! let sink = handler_sink(|delivery: Delivery| async move { println!("{}", delivery.event.topic) });
//! let relay = Relay::builder(store, subscription).sink(Arc::new(sink)).build()?;
//! assert_eq!(relay.drain(None).await?.delivered, 1); // or `run(stop)`, until stopped
//! # Ok(())
//! # }
//! ```
//!
//! | part | what it is |
//! |---|---|
//! | [`Relay`] | drives one subscription: until stopped, once (`drain`), or on a [`Schedule`] |
//! | [`JsonLines`] | a sink that needs no broker: a file, or stdout |
//! | [`SupervisedRelay`] | a relay that is restarted when it fails |
//! | [`SharedRate`] | a rate that several relays share |
//! | [`Sweeper`] | retention |
//! | [`TokioClock`], [`SystemRandom`], [`SeededRandom`] | time and random numbers on tokio, real or simulated |
//! | [`Metrics`] | the counters of a relay |
//!
//! # What this crate deliberately does not do
//!
//! It contains no SQL and no network client. Stores and brokers appear only as the contracts of
//! `postbox-core`, so all of it runs in memory under a simulated clock. It knows no cron syntax and
//! no configuration file.
//!
//! # Guarantees
//!
//! - At least once: an event is done only after the destination answered for it, or after a policy
//!   or a person decided so.
//! - Events of one key arrive in order, across retries, restarts and replicas. This holds for first
//!   arrivals; repetitions carry the same id.
//! - An outage costs at most one attempt of one event. An event that can never succeed holds up
//!   only its own key.
//! - A graceful stop repeats nothing that ends within the
//!   [`drain_timeout`](RelaySettings::drain_timeout). A crash repeats at most what was in flight.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod apply_state;
mod breaker;
mod clock;
mod context;
mod drained;
mod failures;
mod histogram;
mod json_lines;
mod lane;
mod lanes;
mod last_outcome;
mod limiter;
mod log_lines;
mod metrics;
mod pace;
mod poll;
mod relay;
mod retention;
mod schedule;
mod settings;
mod store_wait;
mod subscribed;
mod supervise;
mod supervised_relay;
mod unrouted;

pub use breaker::{BreakerPolicy, BreakerState};
pub use clock::{SeededRandom, SystemRandom, TokioClock};
pub use context::SUBSCRIPTION_REMOVED;
pub use drained::Drained;
pub use histogram::{Histogram, HistogramSnapshot};
pub use json_lines::JsonLines;
pub use lane::Turns;
pub use last_outcome::FailingPart;
pub use limiter::SharedRate;
pub use metrics::{FailingLane, Metrics, MetricsSnapshot};
pub use pace::Pace;
pub use relay::{Relay, RelayBuilder, fresh_owner};
pub use retention::{Sweeper, Swept, step_pause};
pub use schedule::{Every, Schedule};
pub use settings::RelaySettings;
pub use store_wait::wait_for_store;
pub use subscribed::note_subscribed;
pub use supervise::supervise;
pub use supervised_relay::{RelayFault, SupervisedRelay};
pub use unrouted::UnroutedFinder;
