//! From events to a sink's outcomes: shared by tests of sinks.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use postbox_config::{ReadOptions, SinkConfig, SinkContext, Table, read};
use postbox_core::{
    Append as _, Delivery, EventId, Log as _, LogName, NewEvent, Outcome, RetryPolicy, Seq, Sink, Subscription,
};
use postbox_engine::{BreakerPolicy, Relay, RelaySettings, TokioClock};
use postbox_memory::MemoryStore;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Longest wait. Nothing here takes long; this only turns a hang into a failure.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the context for building a sink, in a subscription with this timeout.
pub fn context(deliver_timeout: Duration) -> SinkContext {
    let (clock, repeats_within) = (Arc::new(TokioClock::new()), Duration::ZERO);
    SinkContext { clock, listening: Vec::new(), deliver_timeout, repeats_within, concurrency: None }
}

/// Parses the configuration with these keys.
pub fn table<T: Table>(keys: &str) -> T {
    read::<T>(keys, ReadOptions::none()).expect("right").0
}

/// Builds a sink with these keys.
pub async fn sink<T: Table + SinkConfig>(keys: &str, context: &SinkContext) -> Arc<dyn Sink> {
    table::<T>(keys).build(context).await.expect("a sink")
}

/// Returns a first attempt of each event.
pub fn deliveries(events: impl IntoIterator<Item = NewEvent>) -> Vec<Delivery> {
    let delivery = |(event, n): (NewEvent, i64)| {
        let event = event.into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH);
        Delivery { event, seq: Seq(n), attempt: 1, replay: 0, trace: None }
    };
    events.into_iter().zip(1..).map(delivery).collect()
}

/// Returns events with different keys. The payload is the number.
pub fn numbered(count: usize) -> Vec<Delivery> {
    deliveries((0..count).map(|n| NewEvent::json("t", n.to_string()).key(format!("k{n}"))))
}

/// Makes one call.
pub async fn deliver(sink: &Arc<dyn Sink>, deliveries: &[Delivery]) -> Vec<Outcome> {
    let call: Vec<&Delivery> = deliveries.iter().collect();
    timeout(PATIENCE, sink.deliver(&call)).await.expect("an answer in time")
}

/// Makes a call with one event.
pub async fn send(sink: &Arc<dyn Sink>, event: NewEvent) -> Outcome {
    deliver(sink, &deliveries([event])).await.pop().expect("one outcome")
}

/// Returns an outcome's kind and code.
pub fn short(outcome: &Outcome) -> (&'static str, &str) {
    match outcome {
        Outcome::Delivered { duplicate: false, .. } => ("delivered", ""),
        Outcome::Delivered { duplicate: true, .. } => ("duplicate", ""),
        Outcome::Retry { code, .. } => ("retry", code),
        Outcome::ServerError { code, .. } => ("server error", code),
        Outcome::Ambiguous { code, .. } => ("ambiguous", code),
        Outcome::Throttled { code, .. } => ("throttled", code),
        Outcome::Dead { code, .. } => ("dead", code),
        Outcome::Unavailable { code, .. } => ("unavailable", code),
        Outcome::Gone { code, .. } => ("gone", code),
    }
}

/// Returns an outcome's kind and code as one text.
pub fn said(outcome: &Outcome) -> String {
    let (kind, code) = short(outcome);
    format!("{kind} {code}").trim_end().to_owned()
}

/// Returns kind and code of each outcome. Equal ones in a row appear once.
pub fn codes(outcomes: &[Outcome]) -> Vec<String> {
    let mut codes: Vec<String> = outcomes.iter().map(said).collect();
    codes.dedup();
    codes
}

/// A running relay on a log in memory.
pub struct Working {
    /// Its log.
    pub store: Arc<MemoryStore>,
    /// The relay.
    pub relay: Arc<Relay>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Working {
    /// Starts a relay that retries quickly.
    pub fn start(sink: Arc<dyn Sink>) -> Self {
        let store = Arc::new(MemoryStore::new(Arc::new(TokioClock::new())));
        let subscription = Subscription::new("out".parse().expect("a name"), LogName::outbox());
        let (quick, base) = (Duration::from_secs(1), Duration::from_millis(20));
        let settings = RelaySettings {
            retry: RetryPolicy { base, delay_max: quick, ..RetryPolicy::default() },
            breaker: BreakerPolicy { base, max: quick / 2 },
            ..RelaySettings::default()
        };
        let relay = Relay::builder(store.clone(), subscription).admin(store.clone()).settings(settings).sink(sink);
        let relay = Arc::new(relay.build().expect("good settings"));
        let stop = CancellationToken::new();
        let task = tokio::spawn({
            let (relay, stop, store) = (relay.clone(), stop.clone(), store.clone());
            async move {
                store.subscribe(relay.subscription()).await.expect("subscribed");
                relay.run(stop).await.expect("it runs");
            }
        });
        Self { store, relay, stop, task }
    }

    /// Appends events `from..to` over ten keys. The payload is the number.
    pub async fn append(&self, numbers: Range<usize>) {
        let event = |n: usize| NewEvent::json("order.paid", n.to_string()).key((n % 10).to_string());
        self.store.append(&LogName::outbox(), &numbers.map(event).collect::<Vec<_>>()).await.expect("appended");
    }

    /// Stops it.
    pub async fn stop(self) {
        self.stop.cancel();
        self.task.await.expect("it stops");
    }
}
