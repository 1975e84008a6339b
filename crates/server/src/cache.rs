//! An answer that is expensive to get, kept for a while and asked for by one at a time.

use std::sync::Arc;
use std::time::Duration;

use postbox_core::Clock;
use tokio::sync::Mutex;

/// Keeps the last answer for `ttl`. Whoever asks while it is being made waits for it, so that a crowd costs one question.
pub(crate) struct Cached<T> {
    clock: Arc<dyn Clock>,
    ttl: Duration,
    last: Mutex<Option<(Duration, Arc<T>)>>,
}

impl<T> Cached<T> {
    pub(crate) fn new(clock: Arc<dyn Clock>, ttl: Duration) -> Self {
        Self { clock, ttl, last: Mutex::new(None) }
    }

    /// The kept answer, or a fresh one. Cancel-safe: a question given up leaves the last answer as it was.
    pub(crate) async fn get(&self, ask: impl Future<Output = T>) -> Arc<T> {
        let mut last = self.last.lock().await;
        let now = self.clock.monotonic();
        if let Some((at, answer)) = last.as_ref()
            && now.saturating_sub(*at) < self.ttl
        {
            return Arc::clone(answer);
        }
        let answer = Arc::new(ask.await);
        *last = Some((now, Arc::clone(&answer)));
        answer
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use postbox_engine::TokioClock;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_crowd_costs_one_question_until_the_answer_is_old() {
        let asked = AtomicU64::new(0);
        let cached = Cached::new(Arc::new(TokioClock::new()), Duration::from_secs(5));
        let ask = || cached.get(async { asked.fetch_add(1, Ordering::Relaxed) });
        futures::future::join_all((0..100).map(|_| ask())).await;
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        tokio::time::advance(Duration::from_secs(6)).await;
        assert_eq!(*ask().await, 1);
    }
}
