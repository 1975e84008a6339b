//! Traces: one span for each step of an event, and the W3C context that joins them.
//!
//! | span | kind | when | its parent |
//! |---|---|---|---|
//! | `create TOPIC` | producer | the event is appended | the span it is appended in |
//! | `send TOPIC` | client | one call of a sink | that of the append |
//! | `receive TOPIC` | client | a source's message is stored | that of the sender |
//! | `process TOPIC` | consumer | a handler runs | that of the append, or of the receipt |
//!
//! They are `tracing` spans with the target [`TARGET`], at level info, with the attributes of
//! OpenTelemetry's messaging conventions. There are none until a [`Propagator`] is set. Until then
//! each of these places reads one flag, and events stay as they are.

use std::borrow::Cow;
use std::sync::OnceLock;

use tracing::field::Empty;
use tracing::{Level, Span, info_span, span_enabled};

use crate::batch::Delivery;
use crate::context::Context;
use crate::event::{NewEvent, header};
use crate::outcome::Outcome;
pub use crate::trace_context::TraceContext;

/// The target of every span.
pub const TARGET: &str = "postbox::trace";
/// The messaging system of an operation if none is given.
const SYSTEM: &str = "postbox";

static PROPAGATOR: OnceLock<Box<dyn Propagator>> = OnceLock::new();

/// Connects `tracing` spans to a tracer, which owns their ids.
///
/// Behaviour:
/// - It is called from anywhere, often, and neither waits nor panics.
/// - A parent passed to it has the form of W3C Trace Context. Nothing more is guaranteed.
pub trait Propagator: Send + Sync + 'static {
    /// Returns the context of the current span; `None` outside of any.
    fn current(&self) -> Option<TraceContext>;

    /// Returns the context of a span; `None` if the tracer does not know it.
    fn context_of(&self, span: &Span) -> Option<TraceContext>;

    /// Makes a new span, which nobody has entered yet, a child of this one.
    fn set_parent(&self, span: &Span, parent: &TraceContext);

    /// Links a span to another one.
    fn link(&self, span: &Span, other: &TraceContext);
}

/// Turns traces on for the rest of the program. `false` if they are on already, with the propagator
/// of another call.
pub fn set_propagator(propagator: impl Propagator) -> bool {
    PROPAGATOR.set(Box::new(propagator)).is_ok()
}

/// Returns whether there is a propagator and a subscriber that takes the spans.
#[inline]
pub fn is_on() -> bool {
    PROPAGATOR.get().is_some() && span_enabled!(target: TARGET, Level::INFO)
}

fn current() -> Option<TraceContext> {
    PROPAGATOR.get()?.current()
}

fn context_of(span: &Span) -> Option<TraceContext> {
    PROPAGATOR.get()?.context_of(span)
}

/// Creates a span with these fields, named after its kind of operation. `parent: None` ignores the
/// current span.
macro_rules! span {
    ($(parent: $parent:expr,)? $name:literal, $kind:literal, $system:expr, $topic:expr, $($field:tt)*) => {
        info_span!(
            target: TARGET,
            $(parent: $parent,)?
            $name,
            otel.name = format_args!("{} {}", $name, $topic),
            otel.kind = $kind,
            otel.status_code = Empty,
            otel.status_description = Empty,
            messaging.system = $system,
            messaging.operation.name = $name,
            messaging.operation.type = $name,
            messaging.destination.name = $topic,
            error.type = Empty,
            $($field)*
        )
    };
}

/// Creates a span for work on one event that was read. Ignores the current span.
macro_rules! span_of_delivery {
    ($name:literal, $kind:literal, $system:expr, $delivery:expr, $subscription:expr) => {
        span!(
            parent: None, $name, $kind, $system, $delivery.event.topic.as_str(),
            messaging.destination.subscription.name = $subscription,
            messaging.message.body.size = $delivery.event.payload.len(),
            messaging.message.conversation_id = $delivery.event.correlation_id(),
            messaging.message.id = %$delivery.event.id,
            postbox.attempt = $delivery.attempt,
            postbox.position = Empty,
        )
    };
}

/// Notes in an event that it was appended here. An event that already has a trace context stays as
/// it is.
pub(crate) fn created(event: &mut NewEvent, context: Option<&Context>) {
    if header::find(&event.headers, header::TRACEPARENT).is_some() {
        return;
    }
    let own = header::find(&event.headers, header::CORRELATION_ID);
    let span = span!(
        "create",
        "producer",
        SYSTEM,
        event.topic.as_str(),
        messaging.message.body.size = event.payload.len(),
        messaging.message.conversation_id = own.or_else(|| context.and_then(|it| it.correlation_id.as_deref())),
        messaging.message.id = event.id.map(tracing::field::display),
    );
    if current().is_none()
        && let Some(parent) = context.and_then(Context::trace)
    {
        follow(&span, &parent);
    }
    if let Some(made) = context_of(&span) {
        made.carry(&mut event.headers);
    }
}

fn follow(span: &Span, parent: &TraceContext) {
    if let Some(propagator) = PROPAGATOR.get() {
        propagator.set_parent(span, parent);
    }
}

/// Work on one event, under its own span. If it is dropped before it has [ended](Self::end), the
/// span says that it was broken off.
#[must_use = "a span that is dropped was broken off"]
pub struct Traced<T> {
    /// The object of the work, which carries the context of the span.
    with: T,
    span: Span,
    ended: bool,
}

impl<'d> Traced<Cow<'d, Delivery>> {
    /// Starts a span for one event that is passed to a sink of this system.
    pub fn send(delivery: &'d Delivery, system: &'static str, subscription: &str) -> Self {
        Self::of(delivery, || span_of_delivery!("send", "client", system, delivery, subscription))
    }

    /// Starts a span for one event that is handled.
    pub fn process(delivery: &'d Delivery, subscription: &str) -> Self {
        Self::of(delivery, || span_of_delivery!("process", "consumer", SYSTEM, delivery, subscription))
    }

    fn of(delivery: &'d Delivery, span: impl FnOnce() -> Span) -> Self {
        if !is_on() {
            return Self { with: Cow::Borrowed(delivery), span: Span::none(), ended: false };
        }
        let span = span();
        if let Some(parent) = TraceContext::of(&delivery.event.headers) {
            follow(&span, &parent);
        }
        let made = context_of(&span).filter(|made| made.fits(&delivery.event.headers));
        let with = match made {
            Some(made) => Cow::Owned(Delivery { trace: Some(Box::new(made)), ..delivery.clone() }),
            None => Cow::Borrowed(delivery),
        };
        Self { with, span, ended: false }
    }

    /// Returns the delivery, which carries the context of this span.
    pub fn delivery(&self) -> &Delivery {
        &self.with
    }

    /// Ends the span with the outcome.
    pub fn end(mut self, outcome: &Outcome) {
        if let Some((code, error)) = outcome.failure() {
            self.failed(code, error);
        } else if let Outcome::Delivered { position: Some(position), .. } = outcome {
            self.span.record("postbox.position", position.as_str());
        }
        self.ended = true;
    }
}

impl Traced<()> {
    /// Starts a span for one message of a source that is stored. Its event then carries the span's
    /// context.
    pub fn receive(event: &mut NewEvent, source: &str, message_id: &str) -> Self {
        if !is_on() {
            return Self { with: (), span: Span::none(), ended: false };
        }
        let span = span!(
            "receive",
            "client",
            SYSTEM,
            event.topic.as_str(),
            messaging.message.body.size = event.payload.len(),
            messaging.message.conversation_id = header::find(&event.headers, header::CORRELATION_ID),
            messaging.message.id = message_id,
            postbox.source = source,
        );
        if let (Some(sender), Some(propagator)) = (TraceContext::of(&event.headers), PROPAGATOR.get()) {
            // Inside a request that has its own trace, the sender's trace is linked instead.
            match propagator.current() {
                Some(_) => propagator.link(&span, &sender),
                None => propagator.set_parent(&span, &sender),
            }
        }
        if let Some(made) = context_of(&span) {
            made.carry(&mut event.headers);
        }
        Self { with: (), span, ended: false }
    }

    /// Ends the span: the message is stored, or was stored before.
    pub fn well(mut self) {
        self.ended = true;
    }

    /// Ends the span: the message is not stored, and why.
    pub fn failed_as(mut self, code: &str, error: &str) {
        self.failed(code, error);
        self.ended = true;
    }
}

impl<T> Traced<T> {
    /// Returns the span, which the work must run in.
    pub fn span(&self) -> &Span {
        &self.span
    }

    fn failed(&self, code: &str, error: &str) {
        self.span.record("error.type", code);
        self.span.record("otel.status_code", "ERROR");
        self.span.record("otel.status_description", error);
    }
}

impl<T> Drop for Traced<T> {
    fn drop(&mut self) {
        if !self.ended && !self.span.is_disabled() {
            self.failed("broken_off", "it was broken off: a time limit, a stop, or a lost lease");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use jiff::Timestamp;

    use super::*;
    use crate::context::in_context;
    use crate::event::{EventId, Seq};

    /// No propagator is set in these tests.
    #[test]
    fn nothing_changes_and_nothing_is_copied_while_traces_are_off() {
        assert!(!is_on());
        let event = NewEvent::json("t", "{}");
        assert!(matches!(in_context(slice::from_ref(&event)), Cow::Borrowed(_)));
        let made = event.clone().into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH);
        let delivery = Delivery { event: made, seq: Seq(1), attempt: 1, replay: 0, trace: None };
        for traced in [Traced::send(&delivery, "http", "s"), Traced::process(&delivery, "s")] {
            assert!(matches!(traced.with, Cow::Borrowed(same) if std::ptr::eq(same, &raw const delivery)));
            assert!(traced.span().is_disabled());
        }
        let mut received = event.clone();
        Traced::receive(&mut received, "s", "m").well();
        assert_eq!(received, event);
    }
}
