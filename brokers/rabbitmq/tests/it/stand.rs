//! Sinks, sources, events and outcomes of tests.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use postbox_config::{ReadOptions, SinkConfig as _, SinkContext, SourceContext, read};
use postbox_core::{
    Append as _, Delivery, EventId, Log as _, LogName, MemoryStore, NewEvent, Outcome, RetryPolicy, Seq, Sink,
    Subscription,
};
use postbox_engine::{BreakerPolicy, Relay, RelaySettings, TokioClock};
use postbox_rabbitmq::{RabbitmqSinkTable, RabbitmqSourceTable};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Long enough for everything.
pub(crate) const PATIENT: Duration = Duration::from_secs(30);
/// Longest wait for confirms where a test lets the server be silent.
pub(crate) const SHORT: Duration = Duration::from_secs(1);

pub(crate) fn context(deliver_timeout: Duration) -> SinkContext {
    let (clock, repeats_within) = (Arc::new(TokioClock::new()), Duration::ZERO);
    SinkContext { clock, listening: Vec::new(), deliver_timeout, repeats_within, concurrency: None }
}

/// A sink of these keys beside the address.
pub(crate) async fn sink(url: &str, keys: &str) -> Arc<dyn Sink> {
    sink_with(url, keys, &context(PATIENT)).await
}

pub(crate) async fn sink_with(url: &str, keys: &str, context: &SinkContext) -> Arc<dyn Sink> {
    let text = format!("url = {url:?}\n{keys}");
    let (table, _) = read::<RabbitmqSinkTable>(&text, ReadOptions::none()).expect("right");
    table.build(context).await.expect("a sink")
}

pub(crate) fn table(url: &str, keys: &str) -> RabbitmqSourceTable {
    read::<RabbitmqSourceTable>(&format!("url = {url:?}\n{keys}"), ReadOptions::none()).expect("right").0
}

pub(crate) fn source_context() -> SourceContext {
    SourceContext { name: "orders".parse().expect("a name"), clock: Arc::new(TokioClock::new()) }
}

pub(crate) fn deliveries(events: impl IntoIterator<Item = NewEvent>) -> Vec<Delivery> {
    let delivery = |(event, n): (NewEvent, i64)| {
        let event = event.into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH);
        Delivery { event, seq: Seq(n), attempt: 1, replay: 0 }
    };
    events.into_iter().zip(1..).map(delivery).collect()
}

pub(crate) async fn deliver(sink: &Arc<dyn Sink>, deliveries: &[Delivery]) -> Vec<Outcome> {
    sink.deliver(&deliveries.iter().collect::<Vec<_>>()).await
}

/// One event alone.
pub(crate) async fn send(sink: &Arc<dyn Sink>, event: NewEvent) -> Outcome {
    deliver(sink, &deliveries([event])).await.pop().expect("one outcome")
}

/// Kind and code.
pub(crate) fn said(outcome: &Outcome) -> (&'static str, String) {
    match outcome {
        Outcome::Delivered { duplicate: false } => ("delivered", String::new()),
        Outcome::Delivered { duplicate: true } => ("duplicate", String::new()),
        Outcome::Retry { code, .. } => ("retry", code.to_string()),
        Outcome::Ambiguous { code, .. } => ("ambiguous", code.to_string()),
        Outcome::Throttled { code, .. } => ("throttled", code.to_string()),
        Outcome::Dead { code, .. } => ("dead", code.to_string()),
        Outcome::Unavailable { code, .. } => ("unavailable", code.to_string()),
        Outcome::Gone { code, .. } => ("gone", code.to_string()),
    }
}

/// A relay at work on a log in memory.
pub(crate) struct Working {
    pub(crate) store: Arc<MemoryStore>,
    pub(crate) relay: Arc<Relay>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Working {
    pub(crate) fn start(sink: Arc<dyn Sink>) -> Self {
        let store = Arc::new(MemoryStore::new(Arc::new(TokioClock::new())));
        let subscription = Subscription::new("out".parse().expect("a name"), LogName::outbox());
        let settings = RelaySettings {
            retry: RetryPolicy { base: Duration::from_millis(20), delay_max: SHORT, ..RetryPolicy::default() },
            breaker: BreakerPolicy { base: Duration::from_millis(20), max: Duration::from_millis(500) },
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

    /// Events `from..to` over ten keys; the payload is the number.
    pub(crate) async fn append(&self, numbers: std::ops::Range<usize>) {
        let event = |n: usize| NewEvent::json("order.paid", n.to_string()).key((n % 10).to_string());
        self.store.append(&LogName::outbox(), &numbers.map(event).collect::<Vec<_>>()).await.expect("appended");
    }

    pub(crate) async fn stop(self) {
        self.stop.cancel();
        self.task.await.expect("it stops");
    }
}
