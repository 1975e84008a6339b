//! An expensive answer, cached for a while and computed once at a time.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use postbox_core::{Clock, lock};
use tokio::task::AbortHandle;
use tokio_util::task::AbortOnDropHandle;

/// Keeps the last answer for `ttl`, counted from the start of its computation. Callers that arrive
/// during a computation share it, so any number of them costs one. No lock is held while computing.
pub(crate) struct Cached<T> {
    clock: Arc<dyn Clock>,
    ttl: Duration,
    last: Mutex<Option<Last<T>>>,
}

/// An answer, when its computation began, and the task of that.
type Last<T> = (Duration, AbortHandle, Answer<T>);

type Answer<T> = Shared<BoxFuture<'static, Option<Arc<T>>>>;

impl<T: Send + Sync + 'static> Cached<T> {
    pub(crate) fn new(clock: Arc<dyn Clock>, ttl: Duration) -> Self {
        Self { clock, ttl, last: Mutex::new(None) }
    }

    /// Returns the cached answer, or computes a new one with `ask`. `None` is cached as well.
    ///
    /// Cancel-safe: `ask` runs to its end in its own task, even if every caller has gone.
    pub(crate) fn get(&self, ask: impl Future<Output = Option<T>> + Send + 'static) -> Answer<T> {
        let now = self.clock.monotonic();
        let mut last = lock(&self.last);
        // An answer without callers stays pending, although its task has ended.
        if let Some((at, task, answer)) = &*last
            && (!task.is_finished() || now.saturating_sub(*at) < self.ttl)
        {
            return answer.clone();
        }
        // Aborted when the cache is dropped. A panic counts as no answer.
        let task = AbortOnDropHandle::new(tokio::spawn(ask));
        let handle = task.abort_handle();
        let answer = async { task.await.ok().flatten().map(Arc::new) }.boxed().shared();
        *last = Some((now, handle, answer.clone()));
        answer
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use postbox_engine::TokioClock;
    use tokio::sync::oneshot;

    use super::*;

    fn cached<T: Send + Sync + 'static>() -> Cached<T> {
        Cached::new(Arc::new(TokioClock::new()), Duration::from_secs(5))
    }

    #[tokio::test(start_paused = true)]
    async fn a_crowd_costs_one_question_until_the_answer_is_old() {
        let asked = Arc::new(AtomicU64::new(0));
        let cached = cached();
        let ask = || {
            let asked = Arc::clone(&asked);
            cached.get(async move { Some(asked.fetch_add(1, Ordering::Relaxed)) })
        };
        futures::future::join_all((0..100).map(|_| ask())).await;
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        tokio::time::advance(Duration::from_secs(6)).await;
        assert_eq!(ask().await.as_deref(), Some(&1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_question_outlives_whoever_asked_it() {
        let cached = cached();
        let (answer, slow) = oneshot::channel();
        let first = cached.get(async { slow.await.ok() });
        assert!(first.clone().now_or_never().is_none());
        drop(first);
        // The caller is gone, and the computation still counts as under way after a minute.
        tokio::time::advance(Duration::from_secs(60)).await;
        let second = cached.get(async { unreachable!("one is on its way") });
        answer.send(7).expect("it is still wanted");
        assert_eq!(second.await.as_deref(), Some(&7));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_nobody_fetched_grows_old() {
        let cached = cached();
        drop(cached.get(async { Some(1) }));
        tokio::task::yield_now().await;
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(cached.get(async { Some(2) }).await.as_deref(), Some(&2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_is_no_answer_and_the_next_question_is_asked() {
        let cached = cached();
        assert_eq!(cached.get(async { panic!("on purpose") }).await, None);
        tokio::time::advance(Duration::from_secs(6)).await;
        assert_eq!(cached.get(async { Some(1) }).await.as_deref(), Some(&1));
    }
}
