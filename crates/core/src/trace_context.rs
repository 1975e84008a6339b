//! The W3C context of a span, in headers.

use crate::event::{Headers, header};
use crate::limits::{HEADER_BYTES_MAX, HEADERS_MAX};

/// Longest `tracestate` that is carried. W3C requires 512 characters, not more.
const TRACESTATE_BYTES_MAX: usize = 512;
/// Version 00: `00-`, 32 digits, `-`, 16 digits, `-`, 2 digits.
const TRACEPARENT_BYTES: usize = 55;

/// A W3C trace context: the span that something belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceContext {
    /// The header `traceparent`.
    pub traceparent: String,
    /// The header `tracestate`.
    pub tracestate: Option<String>,
}

impl TraceContext {
    /// Returns the trace context of these headers. `None` if there is none, or an invalid one: it
    /// may come from a stranger, so it is checked against W3C Trace Context.
    pub fn of(headers: &Headers) -> Option<Self> {
        let state = header::find(headers, header::TRACESTATE);
        header::find(headers, header::TRACEPARENT).and_then(|parent| Self::checked(parent, state))
    }

    pub(crate) fn checked(traceparent: &str, tracestate: Option<&str>) -> Option<Self> {
        let fits = |state: &&str| state.len() <= TRACESTATE_BYTES_MAX && !state.is_empty();
        let tracestate = tracestate.filter(fits).map(str::to_owned);
        is_traceparent(traceparent).then(|| Self { traceparent: traceparent.to_owned(), tracestate })
    }

    /// Replaces the trace context in these headers, if there is room: it must not make an event too
    /// large.
    pub fn carry(&self, headers: &mut Headers) {
        if self.fits(headers) {
            headers.retain(|name, _| !is_trace(name));
            let state = self.tracestate.clone().map(|state| (header::TRACESTATE.to_owned(), state));
            headers.extend([(header::TRACEPARENT.to_owned(), self.traceparent.clone())].into_iter().chain(state));
        }
    }

    pub(crate) fn fits(&self, headers: &Headers) -> bool {
        let state = self.tracestate.as_deref().map(|state| (header::TRACESTATE, state));
        let ours = [(header::TRACEPARENT, self.traceparent.as_str())].into_iter().chain(state);
        let others = headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let others = others.filter(|(name, _)| !is_trace(name) && *name != header::MESSAGE_ID);
        let (mut count, mut bytes) = (0, 0);
        for (name, value) in others.chain(ours) {
            count += 1;
            bytes += name.len() + value.len();
        }
        count <= HEADERS_MAX && bytes <= HEADER_BYTES_MAX
    }
}

/// Returns whether a header is one of the two.
pub(crate) fn is_trace(name: &str) -> bool {
    [header::TRACEPARENT, header::TRACESTATE].iter().any(|its| name.eq_ignore_ascii_case(its))
}

fn is_traceparent(text: &str) -> bool {
    let bytes = text.as_bytes();
    let hex = |from: usize, to: usize| {
        let digits = bytes.get(from..to)?;
        digits.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')).then_some(digits)
    };
    let is_some = |digits: &[u8]| digits.iter().any(|digit| *digit != b'0');
    let dashes = [2, 35, 52].iter().all(|place| bytes.get(*place) == Some(&b'-'));
    let version = hex(0, 2).filter(|version| *version != b"ff");
    let ends = match (version, bytes.len()) {
        (Some(b"00"), length) => length == TRACEPARENT_BYTES,
        // A later version may append more after a dash.
        (Some(_), length) => length == TRACEPARENT_BYTES || bytes.get(TRACEPARENT_BYTES) == Some(&b'-'),
        (None, _) => false,
    };
    dashes && ends && hex(3, 35).is_some_and(is_some) && hex(36, 52).is_some_and(is_some) && hex(53, 55).is_some()
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;
    use crate::batch::Delivery;
    use crate::context::Context;
    use crate::event::{EventId, NewEvent, Seq};

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn of(traceparent: &str, tracestate: &str) -> Option<TraceContext> {
        let headers = [(header::TRACEPARENT, traceparent), (header::TRACESTATE, tracestate)];
        TraceContext::of(&headers.map(|(name, value)| (name.to_owned(), value.to_owned())).into())
    }

    fn delivery(event: NewEvent) -> Delivery {
        let event = event.into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH);
        Delivery { event, seq: Seq(1), attempt: 1, replay: 0, trace: None }
    }

    #[test]
    fn only_what_w3c_says_is_a_context() {
        let parent = |text: &str| of(text, "").map(|it| it.traceparent);
        for right in
            [PARENT, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", &PARENT.replacen("00", "cc", 1)]
        {
            assert_eq!(parent(right).as_deref(), Some(right));
        }
        assert!(parent(&(PARENT.replacen("00", "cc", 1) + "-more")).is_some(), "a later version says more");
        let wrong = [
            "",
            "00",
            "00-ab-cd-01",
            &PARENT[..54],
            &format!("{PARENT}0"),
            &format!("{PARENT}-more"),
            &format!(" {PARENT}"),
            &PARENT.replacen("00", "ff", 1),
            &PARENT.replacen("00", "0g", 1),
            &PARENT.to_uppercase(),
            &PARENT.replace('-', "_"),
            &PARENT.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            &PARENT.replace("b7ad6b7169203331", &"0".repeat(16)),
            // The right number of bytes, but a character crosses one of our boundaries.
            &PARENT.replace("31-0", "3é0"),
            &"é".repeat(28),
            &"0".repeat(1_000_000),
        ];
        for wrong in wrong {
            assert_eq!(parent(wrong), None, "{}", wrong.chars().take(70).collect::<String>());
        }
        let state = |text: &str| of(PARENT, text).expect("a context").tracestate;
        assert_eq!(state("a=1,b=2").as_deref(), Some("a=1,b=2"));
        assert_eq!((state(""), state(&"x".repeat(513))), (None, None), "the parent is good without it");
        let cased = [("TraceParent", PARENT), ("TraceState", "a=1")];
        let cased = cased.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(TraceContext::of(&cased.into()), of(PARENT, "a=1"));
    }

    #[test]
    fn an_event_never_becomes_too_large_by_a_context() {
        let context = of(PARENT, "a=1").expect("a context");
        let headers = |count: usize, bytes: usize| -> Headers {
            (0..count).map(|n| (format!("{n:04}"), "v".repeat(bytes / count - 4))).collect()
        };
        let carried = |mut headers: Headers| {
            context.carry(&mut headers);
            headers.get(header::TRACEPARENT).map(String::as_str) == Some(PARENT)
        };
        assert!(carried(headers(HEADERS_MAX - 2, 1_000)) && !carried(headers(HEADERS_MAX - 1, 1_000)));
        assert!(carried(headers(16, HEADER_BYTES_MAX - 80)) && !carried(headers(16, HEADER_BYTES_MAX - 64)));
        // The headers it replaces make room, whatever their case.
        let mut full = headers(HEADERS_MAX - 2, 1_000);
        full.extend([("Traceparent".to_owned(), "old".to_owned()), ("tracestate".to_owned(), "old=1".to_owned())]);
        context.carry(&mut full);
        assert_eq!((full.len(), &*full["traceparent"], &*full["tracestate"]), (HEADERS_MAX, PARENT, "a=1"));
    }

    #[test]
    fn a_delivery_says_the_span_it_is_sent_in_and_its_event_where_it_was_made() {
        let mut delivery = delivery(
            NewEvent::json("t", "{}").header("TraceParent", "old").header("tracestate", "x=1").header("a", "1"),
        );
        let headers = |delivery: &Delivery| -> Vec<(String, String)> {
            delivery.headers().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
        };
        let own: Vec<(String, String)> = delivery.event.headers.clone().into_iter().collect();
        assert_eq!(headers(&delivery), own, "nothing is traced");
        assert_eq!(delivery.context(), Context::of(&delivery.event));
        delivery.trace = of(PARENT, "").map(Box::new);
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(headers(&delivery), [pair("a", "1"), pair("traceparent", PARENT)], "and no state of another trace");
        let context = delivery.context();
        assert_eq!((context.traceparent.as_deref(), context.tracestate), (Some(PARENT), None));
        assert_eq!(delivery.event.header("TraceParent"), Some("old"));
    }
}
