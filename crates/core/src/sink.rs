//! The sink contract: where events go.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::batch::Delivery;
use crate::error::Result;
use crate::outcome::Outcome;

/// What a sink can do, as data. The engine drives it accordingly. Conformance tests check each
/// claim in both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Maximum deliveries in one call; at least 1.
    pub batch_max: usize,
    /// Maximum concurrent calls; at least 1.
    pub concurrency: usize,
    /// Within one call, a failure stops the rest of its key, so that no later event of the key
    /// arrives before an earlier one. Only then may one call hold several events of a key.
    pub prefix: bool,
    /// The messaging system it sends to, by its OpenTelemetry name, for traces. `None`: events are
    /// handled in this program.
    pub system: Option<&'static str>,
}

impl Default for Capabilities {
    /// One event per call and 16 concurrent calls: right for a handler.
    fn default() -> Self {
        Self { batch_max: 1, concurrency: 16, prefix: false, system: None }
    }
}

/// A destination. Implement this, or give the engine a plain async function.
///
/// Behaviour:
/// - `deliver` returns exactly one outcome per delivery, in the same order. One poison event never
///   fails its neighbours.
/// - It never retries by itself and never sleeps to wait for a destination. The engine owns retry
///   and breaker.
/// - It may be called again with the same event (after a crash, a lost lease, a lost
///   acknowledgement): at least once. Use [`Delivery::dedupe_id`] if the destination can
///   deduplicate.
/// - A panic is caught by the engine and counts as a retry with code `panic`. A call that exceeds
///   the subscription's timeout is dropped and counts as a retry with code `timeout`.
/// - The bytes of `payload` go out as they are.
///
/// Cancel-safety: `deliver` may be dropped at any await. The events may then arrive again, and are
/// never lost.
#[async_trait]
pub trait Sink: Send + Sync + 'static {
    /// Returns what this sink can do. Constant over its life.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// Delivers, and returns one outcome each.
    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome>;

    /// Returns how to ask for the ends of its streams, if the destination can tell.
    fn high_water_marks(&self) -> Option<&dyn HighWaterMarks> {
        None
    }

    /// Flushes and closes. Idempotent.
    async fn close(&self) {}
}

/// The last position in a stream of a destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HighWaterMark {
    /// The stream's name there.
    pub stream: String,
    /// The position in the destination's own format: `1748100000000-0`, `42`.
    pub position: String,
}

/// A destination that can tell where its streams end, for readers that begin with a snapshot and
/// continue with the stream.
///
/// Behaviour:
/// - A mark is what the destination says at the time of the call. So it is never behind an event
///   that was delivered before, whichever relay sent it and however often that was restarted. It
///   does not cover what the destination itself has lost.
/// - An unknown stream has no mark, and is no error.
///
/// Cancel-safety: these calls change nothing.
#[async_trait]
pub trait HighWaterMarks: Send + Sync {
    /// Returns the last position in this stream; `None` if there is no such stream.
    async fn high_water_mark(&self, stream: &str) -> Result<Option<String>>;

    /// Returns streams that the sink's events may be in, at most `max`. If they cannot all be
    /// listed, some are missing, but their marks can still be asked for.
    async fn streams(&self, max: usize) -> Result<Vec<String>>;
}
