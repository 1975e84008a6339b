//! Which traces are exported.

use opentelemetry::trace::{Link, SpanKind, TraceId};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::{IdGenerator as _, RandomIdGenerator, Sampler, SamplingResult, ShouldSample};

/// Samples a share of the traces that begin here, and follows that decision within them. When a
/// message is received, the sender's sampling flag and its choice of a trace id are ignored:
/// otherwise anybody who can send a message could flood the collector, or hide from it.
#[derive(Debug, Clone)]
pub(crate) struct OwnRatio {
    ratio: Sampler,
    follows: Sampler,
}

impl OwnRatio {
    pub(crate) fn new(ratio: f64) -> Self {
        let ratio = Sampler::TraceIdRatioBased(ratio);
        Self { follows: Sampler::ParentBased(Box::new(ratio.clone())), ratio }
    }
}

impl ShouldSample for OwnRatio {
    fn should_sample(
        &self,
        parent: Option<&Context>,
        trace: TraceId,
        name: &str,
        kind: &SpanKind,
        attributes: &[KeyValue],
        links: &[Link],
    ) -> SamplingResult {
        let receives =
            attributes.iter().any(|it| it.key.as_str() == "messaging.operation.type" && it.value.as_str() == "receive");
        // The ratio decides by the trace id, which the sender may have chosen.
        let (sampler, trace) =
            if receives { (&self.ratio, RandomIdGenerator::default().new_trace_id()) } else { (&self.follows, trace) };
        sampler.should_sample(parent, trace, name, kind, attributes, links)
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceState};
    use opentelemetry_sdk::trace::SamplingDecision;

    use super::*;

    #[test]
    fn a_sender_does_not_decide_what_we_export() {
        let trace = TraceId::from_hex("0af7651916cd43dd8448eb211c80319c").unwrap();
        let decided = |ratio: f64, flags: TraceFlags, operation: &'static str| {
            let span = SpanContext::new(trace, SpanId::from(7), flags, true, TraceState::NONE);
            let parent = Context::new().with_remote_span_context(span);
            let attributes = [KeyValue::new("messaging.operation.type", operation)];
            let sampler = OwnRatio::new(ratio);
            let result = sampler.should_sample(Some(&parent), trace, "x", &SpanKind::Client, &attributes, &[]);
            result.decision == SamplingDecision::RecordAndSample
        };
        let (yes, no) = (TraceFlags::SAMPLED, TraceFlags::NOT_SAMPLED);
        assert!(!decided(0.0, yes, "receive"), "nobody fills our collector");
        assert!(decided(1.0, no, "receive"), "nobody hides");
        let exported = (0..1000).filter(|_| decided(0.5, yes, "receive")).count();
        assert!((300..700).contains(&exported), "one id is no decision: {exported} of 1000");
        assert!(decided(0.0, yes, "send"), "what began elsewhere in our own programs goes on");
        assert!(!decided(1.0, no, "process"));
    }
}
