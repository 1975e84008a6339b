//! Converts the context of a span to text and back.

use std::collections::HashMap;

use opentelemetry::Context;
use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry::trace::TraceContextExt as _;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use postbox_core::header::{TRACEPARENT, TRACESTATE};
use postbox_core::trace::{Propagator, TraceContext, set_propagator};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// Turns tracing on for the rest of the program: events carry the context of the span they are
/// appended in, and requests that of the span they are sent in.
///
/// Spans go to the `tracing-opentelemetry` layer of the program's subscriber; without one, nothing
/// changes. Returns `false` if it was on already.
pub fn propagate() -> bool {
    set_propagator(W3c(TraceContextPropagator::new()))
}

struct W3c(TraceContextPropagator);

impl W3c {
    fn written(&self, context: &Context) -> Option<TraceContext> {
        let mut headers = HashMap::new();
        self.0.inject_context(context, &mut headers);
        // The propagator writes an empty state if there is none.
        let tracestate = headers.remove(TRACESTATE).filter(|state| !state.is_empty());
        Some(TraceContext { traceparent: headers.remove(TRACEPARENT)?, tracestate })
    }

    fn read(&self, context: &TraceContext) -> Context {
        let mut headers = HashMap::from([(TRACEPARENT.to_owned(), context.traceparent.clone())]);
        headers.extend(context.tracestate.clone().map(|state| (TRACESTATE.to_owned(), state)));
        self.0.extract_with_context(&Context::new(), &headers)
    }
}

impl Propagator for W3c {
    fn current(&self) -> Option<TraceContext> {
        self.written(&Context::current())
    }

    fn context_of(&self, span: &Span) -> Option<TraceContext> {
        self.written(&span.context())
    }

    fn set_parent(&self, span: &Span, parent: &TraceContext) {
        // An error means that no layer takes the span, or that it was entered before, which is a
        // defect that the tests of parents would show.
        _ = span.set_parent(self.read(parent));
    }

    fn link(&self, span: &Span, other: &TraceContext) {
        span.add_link(self.read(other).span().span_context().clone());
    }
}
