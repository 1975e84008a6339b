//! One call of the sink: its time limit, its panics, and the number of outcomes it returns.

use std::borrow::Cow;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use postbox_core::kit::panic_text;
use postbox_core::trace::{self, Traced};
use postbox_core::{Batch, Delivery, Outcome, Sink};
use tokio::sync::OwnedSemaphorePermit;
use tracing::{Instrument as _, Span, error, warn};

use crate::context::RelayContext;
use crate::failures::Sent;
use crate::log_lines::rounded;

/// Longest time a call may block its thread between two await points before the log says so.
const THREAD_HELD_MAX: Duration = Duration::from_secs(1);

/// A call that came back: its deliveries, their batch, and one outcome for each.
pub(super) struct Returned {
    pub(super) batch: Arc<Batch>,
    pub(super) places: Vec<usize>,
    pub(super) outcomes: Vec<Outcome>,
    pub(super) sent: Sent,
    /// How long the call took.
    pub(super) took: Duration,
}

/// A call in flight. It owns what it needs, so that a slow call can outlive its batch.
pub(super) type Call = BoxFuture<'static, Returned>;

/// Starts a call. The permit is released when it ends.
pub(super) fn call(
    context: Arc<RelayContext>,
    sink: Arc<dyn Sink>,
    batch: Arc<Batch>,
    places: Vec<usize>,
    permit: OwnedSemaphorePermit,
) -> Call {
    let sent = context.health.sent();
    let in_flight = CallMeter::begin(context.clone(), places.len());
    Box::pin(async move {
        let deliveries: Vec<&Delivery> = places.iter().map(|place| &batch.deliveries[*place]).collect();
        let outcomes = guarded(&context, &*sink, &deliveries).await;
        drop(deliveries);
        let took = context.clock.monotonic().saturating_sub(in_flight.begun);
        drop(in_flight);
        drop(permit);
        Returned { batch, places, outcomes, sent, took }
    })
}

/// Measures a call until it ends or is dropped.
struct CallMeter {
    context: Arc<RelayContext>,
    begun: Duration,
    events: usize,
}

impl CallMeter {
    fn begin(context: Arc<RelayContext>, events: usize) -> Self {
        let begun = context.clock.monotonic();
        context.metrics.pace.begin(begun);
        context.metrics.add(&context.metrics.in_flight, events);
        Self { context, begun, events }
    }
}

impl Drop for CallMeter {
    fn drop(&mut self) {
        let (now, metrics) = (self.context.clock.monotonic(), &self.context.metrics);
        metrics.pace.end(self.begun, now, self.events);
        metrics.calls.observe(now.saturating_sub(self.begun));
        metrics.in_flight.fetch_sub(self.events as u64, Ordering::Relaxed);
    }
}

/// Calls a sink within the time limit. Returns one outcome for each delivery, whatever the sink
/// does. If tracing is on, each delivery has a span, and the sink gets deliveries that carry its
/// context.
pub(super) async fn guarded(context: &RelayContext, sink: &dyn Sink, deliveries: &[&Delivery]) -> Vec<Outcome> {
    let traced = if trace::is_on() { traced(context, sink, deliveries) } else { Vec::new() };
    let carrying: Vec<&Delivery> = traced.iter().map(Traced::delivery).collect();
    let deliveries = if traced.is_empty() { deliveries } else { &carrying };
    // With several deliveries, no single span can be the one the call runs in.
    let span = match &traced[..] {
        [one] => one.span().clone(),
        _ => Span::none(),
    };
    let outcomes = within_limits(context, sink, deliveries).instrument(span).await;
    drop(carrying);
    traced.into_iter().zip(&outcomes).for_each(|(traced, outcome)| traced.end(outcome));
    outcomes
}

fn traced<'d>(context: &RelayContext, sink: &dyn Sink, deliveries: &[&'d Delivery]) -> Vec<Traced<Cow<'d, Delivery>>> {
    let system = sink.capabilities().system;
    let begin = |delivery: &&'d Delivery| match system {
        Some(system) => Traced::send(delivery, system, context.name()),
        None => Traced::process(delivery, context.name()),
    };
    deliveries.iter().map(begin).collect()
}

async fn within_limits(context: &RelayContext, sink: &dyn Sink, deliveries: &[&Delivery]) -> Vec<Outcome> {
    // The async block makes a panic before the first await look like one after it.
    let call = AssertUnwindSafe(async { sink.deliver(deliveries).await }).catch_unwind();
    let call = watched(context, call);
    tokio::select! {
        biased;
        (answer, _) = call => match answer {
            Ok(outcomes) => one_each(context, outcomes, deliveries.len()),
            Err(panic) => panicked(context, &*panic, deliveries.len()),
        },
        () = context.clock.sleep(context.settings.deliver_timeout) => overran(context, sink, deliveries.len()),
    }
}

/// Watches whether a call blocks its thread. While it does, nothing else of its lane goes on and no
/// time limit can fire, so a person has to hear of it. The outcome counts all the same. Also
/// returns how long it blocked at most.
pub(super) async fn watched<T>(context: &RelayContext, call: impl Future<Output = T>) -> (T, Duration) {
    let mut call = std::pin::pin!(call);
    let mut held_max = Duration::ZERO;
    let answer = poll_fn(|task| {
        let begun = context.clock.monotonic();
        let polled = call.as_mut().poll(task);
        let now = context.clock.monotonic();
        let held = now.saturating_sub(begun);
        held_max = held_max.max(held);
        if held >= THREAD_HELD_MAX
            && let Some(left_out) = context.log_lines.observe("thread blocked", "", now)
        {
            let cure = "a handler of your own that blocks without .await: wrap that in tokio::task::spawn_blocking, \
                give it a limit of its own below deliver_timeout, and end main with Runtime::shutdown_timeout; a file: \
                a disk that is slow";
            warn!(subscription = context.name(), held = ?rounded(held), left_out, cure, "thread blocked");
        }
        polled
    })
    .await;
    (answer, held_max)
}

fn overran(context: &RelayContext, sink: &dyn Sink, count: usize) -> Vec<Outcome> {
    context.metrics.add(&context.metrics.timeouts, 1);
    let limit = context.settings.deliver_timeout;
    let text = format!("no answer within {limit:?}");
    // A call that is made whole or not at all says nothing about single events.
    let outcome = match sink.capabilities().prefix {
        true => Outcome::ambiguous("timeout", text),
        false => Outcome::retry("timeout", text),
    };
    vec![outcome; count]
}

fn panicked(context: &RelayContext, panic: &(dyn std::any::Any + Send), count: usize) -> Vec<Outcome> {
    let text = panic_text(panic);
    if let Some(left_out) = context.log_line("sink panicked", "panic") {
        error!(subscription = context.name(), panic = text, left_out, "sink panicked");
    }
    vec![Outcome::retry("panic", text); count]
}

/// Returns the outcomes if there is one per event. A sink that returns more or fewer has failed all
/// of them, because nobody can tell which outcome belongs to which event.
fn one_each(context: &RelayContext, outcomes: Vec<Outcome>, count: usize) -> Vec<Outcome> {
    if outcomes.len() == count {
        return outcomes;
    }
    let text = format!("the sink gave {} outcomes for {count} deliveries", outcomes.len());
    if let Some(left_out) = context.log_line("sink contract broken", "sink_contract") {
        error!(subscription = context.name(), error = text, left_out, "sink contract broken");
    }
    vec![Outcome::retry("sink_contract", text); count]
}
