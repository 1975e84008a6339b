//! A small relay with lost and late answers, which checks at its end what arrived.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use futures::FutureExt as _;
use futures::future::BoxFuture;
use postbox_core::{
    Batch, BatchLimit, Change, Delivery, Entry, Error, EventId, Lease, Result, Settlement, StartAt, State, Store,
    Subscription, SubscriptionName,
};

use super::StoreFixture;
use super::faults::{Asked, Call, CallFaults};
use super::harness::*;

/// A request of a relay for a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Acquire,
    Renew,
    Release,
    /// Reads, and ends before settling.
    Next,
    /// Reads, and settles what came.
    NextSettled,
    Position,
    Settle,
    /// Settles the end of a window, and reads on. Settles what came.
    SettleAndRead,
    Due,
    Rewind,
}

impl Step {
    pub(super) fn call(self) -> Call {
        match self {
            Self::Acquire => Call::Acquire,
            Self::Renew => Call::Renew,
            Self::Release => Call::Release,
            Self::Next | Self::NextSettled => Call::NextBatch,
            Self::Position | Self::Rewind => Call::Position,
            Self::Settle | Self::Due => Call::Settle,
            Self::SettleAndRead => Call::SettleAndRead,
        }
    }

    /// Returns whether it reads new events.
    pub(super) fn reads(self) -> bool {
        matches!(self, Self::Next | Self::NextSettled | Self::SettleAndRead)
    }
}

/// A relay's request that can be repeated in the same words, whatever happened in between.
#[derive(Clone)]
pub(super) struct Request {
    step: Step,
    lease: Lease,
    /// The batch it settles.
    batch: Option<Batch>,
    is_asked: Arc<AtomicBool>,
    /// The content of its latest answer.
    heard: Arc<Mutex<Heard>>,
}

#[derive(Default)]
struct Heard {
    error: Option<Error>,
    batch: Option<Batch>,
    lease: Option<Lease>,
}

impl Request {
    /// Makes the request.
    pub(super) fn ask(&self, store: Arc<dyn Store>) -> Asked {
        let request = self.clone();
        async move {
            let heard =
                request.make(&store).await.unwrap_or_else(|error| Heard { error: Some(error), ..Heard::default() });
            let error = heard.error.as_ref().map(|error| Error::new(error.kind(), "asked", "asked", error.to_string()));
            *request.heard.lock().expect("no panic while held") = heard;
            error
        }
        .boxed()
    }

    async fn make(&self, store: &Arc<dyn Store>) -> Result<Heard> {
        let Lease { subscription, owner, .. } = &self.lease;
        let mut heard = Heard::default();
        match self.step {
            Step::Acquire => heard.lease = store.acquire(subscription, owner, &[], SHORT).await?.lease,
            Step::Renew => store.renew(&self.lease, LONG).await?,
            Step::Release => store.release(&self.lease).await?,
            Step::Next | Step::NextSettled => {
                heard.batch = Some(store.next_batch(&self.lease, BatchLimit::default()).await?);
            }
            // As the engine repeats it.
            Step::SettleAndRead if self.is_asked.swap(true, Ordering::SeqCst) => {
                store.settle(&self.lease, self.settlement()).await?;
                let rewind = Settlement { rewind: true, hold_keys: true, ..Settlement::default() };
                store.settle(&self.lease, rewind).await?;
                heard.batch = Some(store.next_batch(&self.lease, BatchLimit::default()).await?);
            }
            Step::SettleAndRead => {
                let read = store.settle_and_read(&self.lease, self.settlement(), BatchLimit::default()).await?;
                assert!(read.is_settled || read.batch.is_empty(), "{read:?}");
                heard.batch = Some(read.batch);
            }
            Step::Position | Step::Settle | Step::Due | Step::Rewind => {
                store.settle(&self.lease, self.settlement()).await?;
            }
        }
        Ok(heard)
    }

    fn settlement(&self) -> Settlement<'_> {
        let batch = self.batch.as_ref().expect("read before");
        let entry = |index: usize, disposition| Entry { delivery: &batch.deliveries[index], disposition };
        let (position, entries) = match self.step {
            Step::Settle => (batch.end, vec![entry(1, retry_now()), entry(2, Block)]),
            Step::Due => (None, vec![entry(0, Delivered), entry(1, dead())]),
            Step::Rewind => (batch.deliveries.first().map(|delivery| delivery.seq), Vec::new()),
            _ => (batch.end, Vec::new()),
        };
        Settlement { position, entries, rewind: self.step == Step::Rewind, hold_keys: true }
    }

    /// Returns the events it sends and that are acknowledged before the request is made.
    fn sent(&self) -> Vec<String> {
        let all = self.batch.as_ref().map(|batch| payloads(&batch.deliveries)).unwrap_or_default();
        let sent = match self.step {
            Step::Position | Step::SettleAndRead => all.len(),
            Step::Settle | Step::Due | Step::Rewind => 1,
            _ => 0,
        };
        all.into_iter().take(sent).collect()
    }
}

/// A lane with a past: `1` retries and `3` waits behind it, `2` is delivered, `4` is dead. `5`, `6`
/// and `7` (behind `3`) are unread.
pub(super) struct World<'a> {
    fixture: &'a dyn StoreFixture,
    pub(super) faults: Arc<dyn CallFaults>,
    name: SubscriptionName,
    lease: Lease,
    ids: Vec<EventId>,
    /// Events sent and settled, in this order.
    sent: Arc<Mutex<Vec<String>>>,
}

impl<'a> World<'a> {
    /// Creates a subscription that starts after all earlier events.
    pub(super) async fn new(fixture: &'a dyn StoreFixture, name: &str) -> Self {
        let faults = fixture.faults().await;
        let name = named(name);
        let subscription =
            Subscription { lanes: Some(1), start: StartAt::Now, ..Subscription::new(name.clone(), outbox()) };
        faults.store().subscribe(&subscription).await.expect("subscribed");
        let lane = Lane::take(&faults.store(), name.as_str(), "one").await;
        let of = [("a", "1"), ("b", "2"), ("a", "3"), ("c", "4")].map(|(key, payload)| keyed(key, payload));
        let mut ids = lane.past(of.into_iter().zip([retry_now(), Delivered, Block, dead()])).await;
        let unread = [("b", "5"), ("d", "6"), ("a", "7")].map(|(key, payload)| keyed(key, payload));
        ids.extend(append(&fixture.store(), unread).await);
        let sent = Arc::new(Mutex::new(vec!["2".to_owned()]));
        Self { fixture, faults, name, lease: lane.lease, ids, sent }
    }

    /// Does what comes before the request of a step. With `settled`, the request will be granted,
    /// so what is sent before it counts.
    pub(super) async fn prepare(&mut self, step: Step, settled: bool) -> Request {
        let lane = Lane::of(self.faults.store(), self.lease.clone());
        let batch = match step {
            Step::Acquire => {
                lane.store.release(&self.lease).await.expect("given back");
                None
            }
            // The two events that nothing holds back.
            Step::Position => Some(lane.next(2).await),
            Step::Settle | Step::Rewind => Some(lane.next(10).await),
            Step::SettleAndRead => {
                self.one_more().await;
                let first = lane.next(3).await;
                lane.settle(&first, vec![(2, Block)]).await;
                self.sent.lock().expect("no panic while held").extend(["5", "6"].map(str::to_owned));
                let last = lane.next(10).await;
                assert!(payloads(&last.deliveries) == ["8"] && !last.more, "the window ends: {last:?}");
                self.one_more().await;
                Some(last)
            }
            Step::Due => Some(lane.due(10).await),
            _ => None,
        };
        let (is_asked, heard) = (Arc::default(), Arc::default());
        let request = Request { step, lease: self.lease.clone(), batch, is_asked, heard };
        if settled {
            self.sent.lock().expect("no panic while held").extend(request.sent());
        }
        request
    }

    /// Commits another event.
    pub(super) async fn one_more(&mut self) {
        let payload = (self.ids.len() + 1).to_string();
        self.ids.extend(append(&self.fixture.store(), [keyed("b", &payload)]).await);
    }

    /// Changes the same events in other ways before the request is repeated or executed.
    pub(super) fn goes_on(&self, step: Step) -> BoxFuture<'static, ()> {
        let (store, lease, sent) = (self.faults.again(), self.lease.clone(), self.sent.clone());
        let (name, third) = (self.name.clone(), self.ids[2]);
        async move {
            let lane = Lane::of(store, lease);
            match step {
                // The failed event arrives now, and its row is deleted.
                Step::Settle => run_due(&lane, &sent).await.expect("still ours"),
                // A person sends the dead event again.
                Step::Due => drop(lane.store.change(&name, &Change::Retry, &these(&[third])).await.expect("replayed")),
                _ => {}
            }
        }
        .boxed()
    }

    /// Repeats the request, takes the answer, and goes on.
    pub(super) fn asks_again(&self, store: Arc<dyn Store>, request: &Request) -> BoxFuture<'static, ()> {
        let (step, asked, goes_on) = (request.step, request.ask(store), self.goes_on(request.step));
        async move {
            let error = asked.await;
            assert!(error.as_ref().is_none_or(Error::is_stale), "{step:?} repeated: {error:?}");
            goes_on.await;
        }
        .boxed()
    }

    /// Acts on the latest answer as the relay does. A stale lease ends it.
    pub(super) async fn uses_the_answer(&self, request: &Request) {
        let heard = std::mem::take(&mut *request.heard.lock().expect("no panic while held"));
        if let Some(lease) = heard.lease {
            self.faults.again().release(&lease).await.expect("given back");
        }
        if let (Some(batch), Step::NextSettled | Step::SettleAndRead) = (heard.batch, request.step) {
            let lane = Lane::of(self.faults.again(), self.lease.clone());
            assert!(settle_stream(&lane, &batch, &self.sent).await.is_none_or(|error| error.is_stale()));
        }
    }

    /// Renews as the same owner, on another connection.
    pub(super) async fn renews(&self) -> Result<()> {
        self.faults.again().renew(&self.lease, LONG).await
    }

    /// Lets another owner take the lane and read, while the old owner's call is still on its way.
    pub(super) async fn taken_over(&self) -> (Lane, Batch) {
        self.faults.again().release(&self.lease).await.expect("given back");
        let lane = Lane::take(&self.fixture.store(), self.name.as_str(), "another").await;
        let batch = lane.next(2).await;
        (lane, batch)
    }

    /// Lets the new owner settle what it has read, and go on to the end.
    pub(super) async fn goes_on_as(self, lane: Lane, batch: Batch) {
        lane.store.renew(&lane.lease, LONG).await.expect("the late call took nothing");
        assert!(settle_stream(&lane, &batch, &self.sent).await.is_none(), "still ours");
        self.ends_as(lane).await;
    }

    /// Ends the relay. Another one gets the lane, after a lease at the latest, and goes on.
    pub(super) async fn ends(self) {
        self.faults.again().release(&self.lease).await.expect("given back, or lost long ago");
        for _ in 0..20 {
            if let Some(lease) = acquire(&self.fixture.store(), self.name.as_str(), "last", LONG).await.lease {
                let lane = Lane::of(self.fixture.store(), lease);
                return self.ends_as(lane).await;
            }
            self.fixture.pass(SHORT).await;
        }
        panic!("the lane is locked for longer than any lease");
    }

    async fn ends_as(self, lane: Lane) {
        let store = lane.store.clone();
        loop {
            let batch = lane.next(100).await;
            if !batch.is_empty() {
                assert!(settle_stream(&lane, &batch, &self.sent).await.is_none(), "still ours");
            } else if lane.due(100).await.deliveries.is_empty() {
                break;
            }
            run_due(&lane, &self.sent).await.expect("still ours");
        }
        // No relay ended between sending and settling, so nothing may be sent twice.
        let sent = self.sent.lock().expect("no panic while held").clone();
        let name = &self.name;
        let mut all: Vec<String> =
            (1..=self.ids.len()).map(|n| n.to_string()).filter(|payload| payload != "4").collect();
        let mut sorted = sent.clone();
        sorted.sort();
        all.sort();
        assert_eq!(sorted, all, "{name}: each once, of all that was sent: {sent:?}");
        for key in [&["1", "3", "7"][..], &["2", "5", "8", "9", "10"]] {
            let of_key: Vec<&str> = sent.iter().map(String::as_str).filter(|payload| key.contains(payload)).collect();
            assert!(key.starts_with(&of_key), "{name}: out of order: {sent:?}");
        }
        for (n, id) in (1..).zip(&self.ids) {
            let record = store.get(&self.name, *id).await.expect("asked").expect("in the log");
            assert_eq!(record.state, if n == 4 { State::Dead } else { State::Dispatched }, "{n}");
        }
        let stats = store.stats(&self.name).await.expect("counted");
        assert_eq!((stats.pending, stats.dead), (0, 1));
        store.release(&lane.lease).await.expect("given back");
    }
}

/// Sends what may be sent of a stream batch and settles it. Events whose key is held are blocked.
async fn settle_stream(lane: &Lane, batch: &Batch, sent: &Mutex<Vec<String>>) -> Option<Error> {
    let is_held = |delivery: &&Delivery| delivery.event.key.as_ref().is_some_and(|key| batch.held.contains(key));
    let block = |delivery| Entry { delivery, disposition: Block };
    let entries = batch.deliveries.iter().filter(is_held).map(block).collect();
    let settlement = Settlement { position: batch.end, entries, rewind: false, hold_keys: true };
    let refused = lane.store.settle(&lane.lease, settlement).await.err();
    if refused.is_none() {
        let free: Vec<Delivery> = batch.deliveries.iter().filter(|delivery| !is_held(delivery)).cloned().collect();
        sent.lock().expect("no panic while held").extend(payloads(&free));
    }
    refused
}

/// Sends and settles due rows until none is due.
async fn run_due(lane: &Lane, sent: &Mutex<Vec<String>>) -> Result<()> {
    loop {
        let batch = lane.store.due(&lane.lease, BatchLimit::default()).await?;
        if batch.deliveries.is_empty() {
            return Ok(());
        }
        let entry = |delivery| Entry { delivery, disposition: Delivered };
        let entries = batch.deliveries.iter().map(entry).collect();
        lane.store.settle(&lane.lease, Settlement { position: None, entries, rewind: false, hold_keys: true }).await?;
        sent.lock().expect("no panic while held").extend(payloads(&batch.deliveries));
    }
}
