//! A bounded drain delivers what was there, and never more than its limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{
    Acquired, Admin as _, Batch, BatchLimit, Capabilities, Change, Lease, Log, Outcome, OwnerId, Result, Selection,
    Settlement, State, Subscription, SubscriptionName,
};
use postbox_engine::RelaySettings;

use postbox_testkit::memory::{self, Recorder, TestEnv, event, fast};

#[tokio::test(start_paused = true)]
async fn drain_stops_at_its_limit() {
    let env = TestEnv::with((0..100).map(|n| event(n, n))).await;
    let (_, relay) = env.recorded(Capabilities::default(), fast());
    assert_eq!(relay.drain(Some(30)).await.expect("drained").delivered, 30);
    assert_eq!(env.stats().await.pending, 70);
    assert_eq!(relay.drain(Some(1_000)).await.expect("drained").delivered, 70);
}

/// With slow answers, calls outlive their batch and later events wait. Fewer than the limit may be
/// delivered, never more, and repeated bounded drains deliver everything in order.
#[tokio::test(start_paused = true)]
async fn a_limit_is_never_exceeded_however_slow_the_destination_is() {
    for (keys, limit, seconds) in [(1, 2, 1), (1, 5, 1), (3, 7, 1), (40, 11, 1), (3, 7, 0)] {
        for (capabilities, lanes) in memory::all_capabilities().into_iter().flat_map(|it| [(it, 1), (it, 3)]) {
            let env = TestEnv::with_lanes(lanes).await;
            env.append((0..40).map(|n| event(n % keys, n))).await;
            let (sink, relay) = env.recorded(capabilities, fast());
            sink.takes(Duration::from_secs(seconds));
            let mut done = 0;
            while done < 40 {
                let drained = relay.drain(Some(limit as usize)).await.expect("drained");
                let case = format!("{keys} keys, {seconds} s, {lanes} lanes, after {done}: {drained:?}");
                assert!((1..=limit).contains(&drained.fetched) && drained.delivered <= limit, "{case}");
                done += drained.delivered;
                if seconds == 0 {
                    assert!(drained.delivered == limit || done == 40, "nothing waits: {case}");
                }
            }
            assert_eq!(relay.drain(Some(1_000)).await.expect("drained").fetched, 0);
            sink.assert_in_order();
            assert_eq!(sink.arrivals().len(), 40);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_limit_is_kept_when_the_target_is_down() {
    for capabilities in memory::all_capabilities() {
        let env = TestEnv::with_lanes(2).await;
        env.append((0..40).map(|n| event(n, n))).await;
        let sink = Recorder::new(capabilities);
        sink.down(true);
        let drained = env.relay(sink.clone(), fast()).drain(Some(3)).await.expect("drained");
        assert!((1..=3).contains(&drained.failed) && drained.delivered == 0, "{drained:?}");
        assert!(drained.fetched <= 3, "{drained:?}");
        assert_eq!(env.stats().await.pending, 40);
    }
}

/// Events that cannot go now count: those with a later time, those behind a retry of their key, and
/// those that were discarded.
#[tokio::test(start_paused = true)]
async fn a_limit_counts_what_is_read() {
    let env = TestEnv::new().await;
    let sink = Recorder::new(Capabilities { batch_max: 1, concurrency: 16, prefix: false, system: None });
    sink.script(|delivery| match (memory::version(delivery), delivery.attempt) {
        (0, 1) => {
            let (code, error) = ("http_500".into(), "boom".into());
            Outcome::Retry { code, error, after: Some(Duration::from_secs(60)) }
        }
        _ => Outcome::DELIVERED,
    });
    let relay = env.relay(sink.clone(), fast());
    env.append([event(1, 0)]).await;
    let drained = relay.drain(Some(5)).await.expect("drained");
    assert_eq!((drained.failed, drained.fetched), (1, 1));
    let later = env.now() + Duration::from_secs(3_600);
    env.append((1..4).map(|n| event(1, n))).await;
    env.append((4..7).map(|n| event(n, n).deliver_at(later))).await;
    env.append((7..10).map(|n| event(n, n))).await;
    let taken_out =
        env.list(State::Pending).await.iter().map(|record| record.event.id).nth(6).expect("of the last three");
    let selection = Selection { ids: Some(vec![taken_out]), ..Selection::default() };
    assert_eq!(
        env.store.change(&env.subscription().name, &Change::Discard, &selection).await.expect("discarded").count,
        1
    );
    for delivered in [0, 0, 0, 0, 0, 0, 0, 1, 1] {
        let drained = relay.drain(Some(1)).await.expect("drained");
        assert_eq!((drained.fetched, drained.delivered), (1, delivered));
    }
    assert_eq!(relay.drain(Some(5)).await.expect("drained").fetched, 0);
    assert_eq!(sink.versions(), [8, 9]);
}

#[tokio::test(start_paused = true)]
async fn a_drain_ends_while_events_keep_arriving() {
    for lanes in [1, 3] {
        let env = TestEnv::with_lanes(lanes).await;
        env.append((0..100).map(|n| event(n, n))).await;
        let (sink, relay) = env.recorded(Capabilities::default(), fast());
        sink.takes(Duration::from_millis(100));
        let delivered = tokio::select! {
            drained = relay.drain(None) => drained.expect("drained").delivered,
            () = env.append_each(100..10_000, 100, Duration::from_millis(10)) => panic!("it goes on: {lanes} lanes"),
        };
        assert!((100..200).contains(&delivered), "{delivered} with {lanes} lanes");
        let versions = sink.versions();
        assert!((0..100).all(|n| versions.contains(&n)), "{versions:?}");
    }
}

/// A log in which each read first passes a long stretch without events for the lane.
struct Stretches {
    log: Arc<dyn Log>,
    passed: AtomicBool,
}

#[async_trait]
impl Log for Stretches {
    async fn subscribe(&self, subscription: &Subscription) -> Result<()> {
        self.log.subscribe(subscription).await
    }

    async fn acquire(
        &self,
        subscription: &SubscriptionName,
        owner: &OwnerId,
        held: &[u16],
        ttl: Duration,
    ) -> Result<Acquired> {
        self.log.acquire(subscription, owner, held, ttl).await
    }

    async fn renew(&self, lease: &Lease, ttl: Duration) -> Result<()> {
        self.log.renew(lease, ttl).await
    }

    async fn release(&self, lease: &Lease) -> Result<()> {
        self.log.release(lease).await
    }

    async fn leave(&self, subscription: &SubscriptionName, owner: &OwnerId) -> Result<()> {
        self.log.leave(subscription, owner).await
    }

    async fn next_batch(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        if self.passed.fetch_xor(true, Ordering::SeqCst) {
            return self.log.next_batch(lease, limit).await;
        }
        Ok(Batch { more: true, ..Batch::default() })
    }

    async fn due(&self, lease: &Lease, limit: BatchLimit) -> Result<Batch> {
        self.log.due(lease, limit).await
    }

    async fn settle(&self, lease: &Lease, settlement: Settlement<'_>) -> Result<()> {
        self.log.settle(lease, settlement).await
    }

    async fn hint(&self, lease: &Lease) {
        self.log.hint(lease).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_does_not_end_in_a_stretch_without_its_events() {
    let env = TestEnv::with((0..30).map(|n| event(n, n))).await;
    let log = Arc::new(Stretches { log: env.store.clone(), passed: AtomicBool::new(false) });
    let sink = Recorder::new(Capabilities::default());
    let batch = BatchLimit { events: 3, ..BatchLimit::default() };
    let relay = env.relay_on(log, sink.clone(), RelaySettings { batch, ..fast() });
    assert_eq!(relay.drain(None).await.expect("drained").delivered, 30);
    sink.assert_in_order();
    // Nor does a probe of a destination that was down.
    sink.down(true);
    env.append((30..60).map(|n| event(n, n))).await;
    assert_eq!(relay.drain(None).await.expect("drained").delivered, 0);
    sink.down(false);
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(relay.drain(None).await.expect("drained").delivered, 30);
}
