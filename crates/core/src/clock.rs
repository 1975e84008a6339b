//! Time and chance, passed in. Nothing here takes them from the air, so that it runs under
//! a simulated clock.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;

/// Where time comes from.
///
/// Behaviour:
/// - `now` is wall time, used only for stamps that are stored or signed; it may jump.
/// - `monotonic` never goes back and is used for waits and lease margins; its zero is arbitrary.
/// - `sleep` resolves once `monotonic` has advanced by at least the duration. Cancel-safe.
#[async_trait]
pub trait Clock: Send + Sync + 'static {
    /// Wall time.
    fn now(&self) -> Timestamp;
    /// Time since an arbitrary zero; never goes back.
    fn monotonic(&self) -> Duration;
    /// Waits.
    async fn sleep(&self, duration: Duration);
}

/// Where chance comes from.
pub trait Random: Send + Sync + 'static {
    /// A uniform draw from `0.0..1.0`.
    fn unit(&self) -> f64;
}
