//! The harness that cases are written with.

use std::sync::Arc;
use std::time::Duration;

pub(super) use postbox_core::Disposition::{Block, Delivered, Discarded, Schedule};
use postbox_core::{
    Acquired, Batch, BatchLimit, Change, Criteria, Delivery, Disposition, Entry, ErrorKind, EventId, Filter, Headers,
    Lease, ListQuery, LogName, NewEvent, OwnerId, Record, ResetPlan, ResetTo, Result, Selection, Seq, Settlement,
    State, Stats, Store, Subscription, SubscriptionInfo, SubscriptionName, TopicPattern,
};

use super::{OpenTransaction, StoreFixture};

/// The lanes of a relay that asks for as many as it may hold.
const LANES: [u16; 4] = [0, 1, 2, 3];
/// A lease that outlives every case.
pub(super) const LONG: Duration = Duration::from_secs(600);
/// Default length of a lease: nothing may be locked for longer.
pub(super) const LEASE: Duration = Duration::from_secs(10);
/// A lease or wait that a case lets run out. Nothing has to happen within it.
pub(super) const SHORT: Duration = Duration::from_millis(300);
/// A wait that never ends within a case.
pub(super) const HOUR: Duration = Duration::from_secs(3_600);
/// The deadline of things that must happen by themselves.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn outbox() -> LogName {
    LogName::outbox()
}

pub(super) fn owner(name: &str) -> OwnerId {
    OwnerId::new(name).expect("a valid owner")
}

pub(super) fn named(name: &str) -> SubscriptionName {
    SubscriptionName::new(name).expect("a valid name")
}

/// The subscription most cases use.
pub(super) fn reader() -> Subscription {
    Subscription { lanes: Some(1), ..Subscription::new(named("reader"), outbox()) }
}

/// The same subscription with another name.
pub(super) fn reader_named(name: &str) -> Subscription {
    Subscription { lanes: Some(1), ..Subscription::new(named(name), outbox()) }
}

/// The same subscription with a filter on the topic.
pub(super) fn reader_of(topic: &str) -> Subscription {
    let filter = Filter { topics: vec![pattern(topic)], ..Filter::default() };
    Subscription { filter, ..reader() }
}

pub(super) fn pattern(topic: &str) -> TopicPattern {
    TopicPattern::new(topic).expect("a pattern")
}

pub(super) fn nowhere() -> LogName {
    LogName::new("nowhere").expect("a name")
}

/// Selects events by their ids.
pub(super) fn these(ids: &[EventId]) -> Selection {
    Selection { ids: Some(ids.to_vec()), ..Selection::default() }
}

pub(super) fn event(payload: &str) -> NewEvent {
    NewEvent::json("order.paid", payload.to_owned())
}

pub(super) fn keyed(key: &str, payload: &str) -> NewEvent {
    event(payload).key(key)
}

/// Returns events with the payloads `1..=count`, each with a separate key.
pub(super) fn numbered(count: usize) -> Vec<NewEvent> {
    (1..=count).map(|n| keyed(&format!("key-{n}"), &n.to_string())).collect()
}

/// Creates a log and gives the store under test its rights on it.
pub(super) async fn make_log(fixture: &dyn StoreFixture, log: &LogName) {
    fixture.owner().create_log(log).await.expect("made, or there already");
    fixture.grant().await;
}

pub(super) async fn append(store: &Arc<dyn Store>, events: impl AsRef<[NewEvent]>) -> Vec<EventId> {
    store.append(&outbox(), events.as_ref()).await.expect("the append succeeds").to_vec()
}

pub(super) async fn acquire(store: &Arc<dyn Store>, subscription: &str, by: &str, ttl: Duration) -> Acquired {
    store.acquire(&named(subscription), &owner(by), &LANES, ttl).await.expect("the lane can be asked for")
}

pub(super) async fn stats(store: &Arc<dyn Store>) -> Stats {
    store.stats(&named("reader")).await.expect("the subscription has stats")
}

pub(super) async fn record(store: &Arc<dyn Store>, id: EventId) -> Record {
    store.get(&named("reader"), id).await.expect("the log can be asked").expect("the log has the event")
}

/// Returns the payloads of the records in one state.
pub(super) async fn listed(store: &Arc<dyn Store>, state: State) -> Vec<String> {
    let records = store.list(&query(state)).await.expect("the records can be listed");
    records.iter().map(|record| text(&record.event.payload)).collect()
}

/// Returns a subscription as it is listed.
pub(super) async fn info(store: &Arc<dyn Store>, name: &str) -> SubscriptionInfo {
    let known = store.subscriptions().await.expect("listed");
    known.into_iter().find(|info| info.name == named(name)).unwrap_or_else(|| panic!("there is no {name}"))
}

/// Returns the effect a reset would have.
pub(super) async fn plan(store: &Arc<dyn Store>, to: ResetTo) -> ResetPlan {
    store.reset(&named("reader"), to, None).await.expect("counted")
}

/// Counts and resets. Returns how many events go out again, and how many are skipped.
pub(super) async fn reset(store: &Arc<dyn Store>, to: ResetTo) -> (u64, u64) {
    let plan = plan(store, to).await;
    store.reset(&named("reader"), to, Some(&plan.stamp)).await.expect("reset");
    (plan.again, plan.skipped)
}

pub(super) fn query(state: State) -> ListQuery {
    ListQuery {
        subscription: named("reader"),
        state: Some(state),
        which: Criteria::default(),
        code: None,
        headers: Headers::new(),
        after: None,
        limit: 1_000,
        payloads: true,
    }
}

pub(super) fn payloads(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(|delivery| text(&delivery.event.payload)).collect()
}

fn text(payload: &[u8]) -> String {
    String::from_utf8_lossy(payload).into_owned()
}

pub(super) fn retry(after: Duration) -> Disposition {
    Disposition::Retry { after, counted: true, code: "http_500".into(), error: "it said no".into(), took: None }
}

pub(super) fn retry_now() -> Disposition {
    retry(Duration::ZERO)
}

/// A delivery time far in the future.
pub(super) fn scheduled() -> Disposition {
    Schedule { at: jiff::Timestamp::UNIX_EPOCH + 400 * 365 * 24 * HOUR }
}

pub(super) fn dead_of(code: &'static str) -> Disposition {
    Disposition::Dead { code: code.into(), error: "never".into(), halt: false, took: None }
}

pub(super) fn dead() -> Disposition {
    dead_of("http_422")
}

pub(super) fn halted() -> Disposition {
    Disposition::Dead { code: "http_422".into(), error: "never".into(), halt: true, took: None }
}

/// Asserts that a call was refused with this kind and code.
#[track_caller]
pub(super) fn refused<T: std::fmt::Debug>(result: Result<T>, kind: ErrorKind, code: &str) {
    let error = result.expect_err("the call is refused");
    assert_eq!((error.kind(), error.code()), (kind, code), "{error}");
}

/// Asserts that a call failed because the lease is lost.
#[track_caller]
pub(super) fn stale<T: std::fmt::Debug>(result: Result<T>) {
    let error = result.expect_err("the lease is lost");
    assert!(error.is_stale(), "{error}");
}

/// Runs the calls as concurrent tasks. Returns what each returned.
pub(super) async fn at_once<T: Send + 'static>(
    calls: impl IntoIterator<Item = impl Future<Output = T> + Send + 'static>,
) -> Vec<T> {
    let tasks: Vec<_> = calls.into_iter().map(tokio::spawn).collect();
    futures::future::join_all(tasks).await.into_iter().map(|task| task.expect("no panic")).collect()
}

/// Begins a producer's transaction that has appended these events.
pub(super) async fn begin_with(fixture: &dyn StoreFixture, events: impl AsRef<[NewEvent]>) -> Box<dyn OpenTransaction> {
    let mut transaction = fixture.begin().await;
    transaction.append(&outbox(), events.as_ref()).await.expect("appended");
    transaction
}

/// Returns a store with this subscription.
pub(super) async fn subscribed(fixture: &dyn StoreFixture, subscription: &Subscription) -> Arc<dyn Store> {
    let store = fixture.store();
    store.subscribe(subscription).await.expect("new");
    store
}

/// Begins a transaction beside others, if a store can have several open.
pub(super) async fn begin_beside_others(fixture: &dyn StoreFixture) -> Option<Box<dyn OpenTransaction>> {
    if fixture.capabilities().concurrent_transactions { Some(fixture.begin().await) } else { None }
}

/// A leased lane of the subscription `reader` in key order: a small relay for tests.
pub(super) struct Lane {
    pub(super) store: Arc<dyn Store>,
    pub(super) lease: Lease,
    pub(super) hold_keys: bool,
}

impl Lane {
    /// Subscribes and takes a lane.
    pub(super) async fn open(fixture: &dyn StoreFixture) -> Self {
        Self::open_as(fixture, &reader()).await
    }

    pub(super) async fn open_as(fixture: &dyn StoreFixture, subscription: &Subscription) -> Self {
        let store = fixture.store();
        store.subscribe(subscription).await.expect("the subscription fits");
        Self::take(&store, subscription.name.as_str(), "one").await
    }

    /// Opens a lane with events that were read as one batch and settled as given.
    pub(super) async fn settled(
        fixture: &dyn StoreFixture,
        events: impl IntoIterator<Item = (NewEvent, Disposition)>,
    ) -> (Self, Vec<EventId>) {
        let lane = Self::open(fixture).await;
        let ids = lane.past(events).await;
        (lane, ids)
    }

    /// Opens a lane with events that nobody has read.
    pub(super) async fn unread(fixture: &dyn StoreFixture, events: impl AsRef<[NewEvent]>) -> (Self, Vec<EventId>) {
        let lane = Self::open(fixture).await;
        let ids = append(&lane.store, events).await;
        (lane, ids)
    }

    /// Opens two lanes of one relay, with events in both that were read and settled as given.
    pub(super) async fn two_settled(fixture: &dyn StoreFixture, disposition: Disposition) -> [Self; 2] {
        let store = subscribed(fixture, &Subscription { lanes: Some(2), ..reader() }).await;
        let lanes = [Self::take(&store, "reader", "one").await, Self::take(&store, "reader", "one").await];
        append(&store, numbered(20)).await;
        for lane in &lanes {
            let batch = lane.next(100).await;
            assert!(!batch.deliveries.is_empty(), "20 keys spread over two lanes");
            lane.settle(&batch, (0..batch.deliveries.len()).map(|index| (index, disposition.clone())).collect()).await;
        }
        lanes
    }

    pub(super) fn of(store: Arc<dyn Store>, lease: Lease) -> Self {
        Self { store, lease, hold_keys: true }
    }

    /// Takes a free lane.
    pub(super) async fn take(store: &Arc<dyn Store>, subscription: &str, by: &str) -> Self {
        let lease = acquire(store, subscription, by, LONG).await.lease.expect("a lane is free");
        Self::of(store.clone(), lease)
    }

    /// Releases the lane and takes it again as another owner, as after a crash.
    pub(super) async fn taken_over(&self) -> Self {
        self.store.release(&self.lease).await.expect("the lane is given back");
        Self::take(&self.store, self.lease.subscription.as_str(), "another").await
    }

    pub(super) async fn next(&self, events: usize) -> Batch {
        let limit = BatchLimit { events, ..BatchLimit::default() };
        self.store.next_batch(&self.lease, limit).await.expect("the lane can be read")
    }

    pub(super) async fn due(&self, events: usize) -> Batch {
        let limit = BatchLimit { events, ..BatchLimit::default() };
        self.store.due(&self.lease, limit).await.expect("the due rows can be read")
    }

    /// Settles a batch of the stream: all delivered, except the exceptions given by index.
    pub(super) async fn settle(&self, batch: &Batch, exceptions: Vec<(usize, Disposition)>) {
        let entry = |(index, disposition)| Entry { delivery: &batch.deliveries[index], disposition };
        let entries = exceptions.into_iter().map(entry).collect();
        self.write(Settlement { position: batch.end, entries, rewind: false, hold_keys: self.hold_keys }).await;
    }

    /// Settles a batch of the stream as [`Self::settle`] does, and reads on in the same call.
    pub(super) async fn settle_and_next(&self, batch: &Batch, exceptions: Vec<(usize, Disposition)>) -> Batch {
        let entry = |(index, disposition)| Entry { delivery: &batch.deliveries[index], disposition };
        let entries = exceptions.into_iter().map(entry).collect();
        let settlement = Settlement { position: batch.end, entries, rewind: false, hold_keys: self.hold_keys };
        let limit = BatchLimit::default();
        let read = self.store.settle_and_read(&self.lease, settlement.clone(), limit).await.expect("settled and read");
        if !read.is_settled {
            assert!(read.batch.is_empty(), "{read:?}");
            self.write(settlement).await;
        }
        read.batch
    }

    /// Settles a due batch, with one disposition for each delivery.
    pub(super) async fn settle_due(&self, batch: &Batch, dispositions: Vec<Disposition>) {
        assert_eq!(dispositions.len(), batch.deliveries.len(), "a due batch settles every delivery");
        let entry = |(delivery, disposition)| Entry { delivery, disposition };
        let entries = batch.deliveries.iter().zip(dispositions).map(entry).collect();
        self.write(Settlement { position: None, entries, rewind: false, hold_keys: self.hold_keys }).await;
    }

    /// Moves the position short of what was read, and reads on from there.
    pub(super) async fn rewind(&self, position: Option<Seq>) {
        self.write(Settlement { position, entries: Vec::new(), rewind: true, hold_keys: self.hold_keys }).await;
    }

    pub(super) async fn write(&self, settlement: Settlement<'_>) {
        self.store.settle(&self.lease, settlement).await.expect("the settlement is written");
    }

    /// Appends events, reads them all and settles each as given.
    pub(super) async fn past(&self, events: impl IntoIterator<Item = (NewEvent, Disposition)>) -> Vec<EventId> {
        let (events, dispositions): (Vec<_>, Vec<_>) = events.into_iter().unzip();
        let ids = append(&self.store, &events).await;
        let mut dispositions = dispositions.into_iter();
        while dispositions.len() > 0 {
            // A store may return fewer at once than it is asked for.
            let batch = self.next(dispositions.len()).await;
            assert!(!batch.deliveries.is_empty(), "all of them are read");
            let of_batch = dispositions.by_ref().take(batch.deliveries.len()).enumerate();
            self.settle(&batch, of_batch.filter(|(_, disposition)| *disposition != Delivered).collect()).await;
        }
        ids
    }

    pub(super) async fn replay(&self, selection: Selection) -> u64 {
        self.store.change(&named("reader"), &Change::Retry, &selection).await.expect("replayed").count
    }

    pub(super) async fn discard(&self, selection: Selection) -> u64 {
        self.store.change(&named("reader"), &Change::Discard, &selection).await.expect("discarded").count
    }

    /// Takes every free lane.
    pub(super) async fn take_all(store: &Arc<dyn Store>, subscription: &str) -> Vec<Self> {
        let (name, mut lanes, mut held) = (named(subscription), Vec::new(), Vec::new());
        loop {
            let acquired = store.acquire(&name, &owner("all"), &held, LONG).await.expect("asked");
            let Some(lease) = acquired.lease else { return lanes };
            held.push(lease.lane);
            lanes.push(Self::of(store.clone(), lease));
        }
    }

    /// Releases the lane.
    pub(super) async fn release(self) -> Arc<dyn Store> {
        self.store.release(&self.lease).await.expect("given back");
        self.store
    }

    /// Reads and delivers from the stream and from due rows, a few at a time, until nothing is
    /// left. Events whose key is held are blocked.
    pub(super) async fn run_all(lanes: &[Self]) -> Vec<Delivery> {
        let mut all: Vec<Delivery> = Vec::new();
        loop {
            let before = all.len();
            let mut read = false;
            for lane in lanes {
                let batch = lane.next(3).await;
                let is_held =
                    |delivery: &Delivery| delivery.event.key.as_ref().is_some_and(|key| batch.held.contains(key));
                let held = batch.deliveries.iter().enumerate().filter(|(_, delivery)| is_held(delivery));
                let blocked = held.map(|(index, _)| (index, Block)).collect();
                if !batch.is_empty() {
                    read = true;
                    lane.settle(&batch, blocked).await;
                    all.extend(batch.deliveries.iter().filter(|delivery| !is_held(delivery)).cloned());
                }
                all.extend(lane.drain_due().await);
            }
            if !read && all.len() == before {
                return all;
            }
        }
    }

    /// Reads and settles until the stream is empty. Everything is delivered.
    pub(super) async fn drain(&self) -> Vec<Delivery> {
        let mut all = Vec::new();
        loop {
            let batch = self.next(100).await;
            if batch.is_empty() {
                return all;
            }
            self.settle(&batch, Vec::new()).await;
            all.extend(batch.deliveries);
        }
    }

    /// Reads and delivers due rows until there are none.
    pub(super) async fn drain_due(&self) -> Vec<Delivery> {
        let mut all = Vec::new();
        loop {
            let batch = self.due(100).await;
            if batch.deliveries.is_empty() {
                return all;
            }
            self.settle_due(&batch, vec![Delivered; batch.deliveries.len()]).await;
            all.extend(batch.deliveries);
        }
    }
}
