//! Time and random numbers, passed in. No code here reads them from the environment, so that all of
//! it runs under a simulated clock.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;

/// The source of time.
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

/// The source of random numbers.
pub trait Random: Send + Sync + 'static {
    /// Returns a uniform number from `0.0..1.0`.
    fn unit(&self) -> f64;
}
