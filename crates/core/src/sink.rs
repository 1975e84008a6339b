//! The sink contract: where events go.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::batch::Delivery;
use crate::error::Result;
use crate::outcome::Outcome;

/// What a sink can do, as data. The engine drives it accordingly; conformance tests check both
/// directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Most deliveries in one call; at least 1.
    pub batch_max: usize,
    /// Most calls at once; at least 1.
    pub concurrency: usize,
    /// Within one call, a failure stops the rest of its key: no later event of the key arrives
    /// before an earlier one. Only then may one call hold several events of a key.
    pub prefix: bool,
    /// What it sends to, as OpenTelemetry names messaging systems, for traces. `None`: the events
    /// are handled here, in this program.
    pub system: Option<&'static str>,
}

impl Default for Capabilities {
    /// One event a call, 16 calls at once: right for a handler.
    fn default() -> Self {
        Self { batch_max: 1, concurrency: 16, prefix: false, system: None }
    }
}

/// A destination. Implement this, or hand the engine a plain async function.
///
/// Behaviour:
/// - `deliver` returns exactly one outcome per delivery, in the same order. One poison event never
///   fails its neighbours.
/// - It never retries by itself and never sleeps to wait for a destination: the engine owns retry
///   and breaker.
/// - It may be called again with the same event (after a crash, a lost lease, a lost
///   acknowledgement): at least once. Use [`Delivery::dedupe_id`] where the destination can
///   deduplicate.
/// - A panic is caught by the engine and counts as a retry with code `panic`; a call that exceeds
///   the subscription's timeout is dropped and counts as a retry with code `timeout`.
/// - The bytes of `payload` go out as they are.
///
/// Cancel-safety: `deliver` may be dropped at any await; the events may then arrive again, and are
/// never lost.
#[async_trait]
pub trait Sink: Send + Sync + 'static {
    /// What this sink can do. Constant over its life.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// Delivers, and says what became of each.
    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome>;

    /// Where its streams end, if the destination can say that.
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
    /// The destination's own word for the place: `1748100000000-0`, `42`.
    pub position: String,
}

/// A destination that says where its streams end, for readers who begin with a snapshot and go on
/// with the stream.
///
/// Behaviour:
/// - A mark is the destination's word at the time of the call. So it is never behind an event that
///   was delivered before, whichever relay sent it and however often that was restarted; what the
///   destination itself forgets is forgotten.
/// - An unknown stream has no mark, and is no error.
///
/// Cancel-safety: asking changes nothing.
#[async_trait]
pub trait HighWaterMarks: Send + Sync {
    /// The last position in this stream; `None`: there is no such stream.
    async fn high_water_mark(&self, stream: &str) -> Result<Option<String>>;

    /// Streams that the sink's events may be in, at most `max`. Where they cannot all be listed,
    /// some are missing, whose marks are there all the same.
    async fn streams(&self, max: usize) -> Result<Vec<String>>;
}
