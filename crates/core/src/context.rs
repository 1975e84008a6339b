//! On whose behalf work is done, and what events inherit from that.

use std::borrow::Cow;
use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;

use crate::event::{Event, NewEvent, header};
use crate::names::Tenant;
use crate::trace::{self, TraceContext};

thread_local! {
    /// The context of the work on this thread. Set only while that work runs: a future's context is
    /// placed here at the start of each poll and removed at its end.
    static CURRENT: RefCell<Option<Arc<Context>>> = const { RefCell::new(None) };
}

/// On whose behalf work is done. Every event that is appended within its [scope](Self::scope)
/// inherits it.
///
/// A handler runs in the context of the event it handles, so that a conversation keeps its id and
/// each event names the one that caused it. At the edge, where a request comes in, create one:
///
/// ```
/// # use postbox_core::{Context, NewEvent, Postbox, Result};
/// # use postbox_memory::MemoryStore;
/// # async fn example(store: MemoryStore) -> Result<()> {
/// let context = Context::new().correlation_id("req-7f3a").actor("user:17").tenant("acme");
/// context.scope(pay(store)).await
/// # }
///
/// async fn pay(store: MemoryStore) -> Result<()> {
///     let mut tx = store.begin();
///     Postbox::new(store).append(&mut tx, NewEvent::json("order.paid", "{}"))?; // carries all three
///     tx.commit();
///     Ok(())
/// }
/// ```
///
/// Behaviour:
/// - A context only fills in what an event leaves out. The event's own values stay; names
///   of headers are compared without case.
/// - It applies to everything that is awaited in its scope. A new task or thread starts without
///   one: use `tokio::spawn(Context::current().scope(work))`, or [`Self::scope_sync`] for a thread.
/// - An inner scope replaces the outer one. To extend the outer one, start from [`Self::current`].
/// - Inherited headers count towards the limits of an event.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[must_use = "a context does nothing outside of its scope"]
pub struct Context {
    /// The conversation.
    pub correlation_id: Option<String>,
    /// The event or command that causes the appended events.
    pub causation_id: Option<String>,
    /// Who acts: a user, a service, a job.
    pub actor: Option<String>,
    /// Whose data it is.
    pub tenant: Option<String>,
    /// W3C trace context: the parent span. Ignored if it is invalid, because it may come from a
    /// stranger.
    pub traceparent: Option<String>,
    /// W3C trace context: vendor state. Used only together with its `traceparent`.
    pub tracestate: Option<String>,
}

impl Context {
    /// Creates an empty context.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the context for a handler of this event. The event is the cause of what follows. If
    /// it belongs to no conversation, it starts one under its own id.
    pub fn of(event: &Event) -> Self {
        let id = event.id.to_string();
        let header = |name: &str| header::find(&event.headers, name).map(str::to_owned);
        let trace = TraceContext::of(&event.headers).map(|it| (it.traceparent, it.tracestate));
        let (traceparent, tracestate) = trace.unzip();
        Self {
            correlation_id: header(header::CORRELATION_ID).or_else(|| Some(id.clone())),
            causation_id: Some(id),
            actor: header(header::ACTOR),
            tenant: event.tenant.as_ref().map(Tenant::to_string),
            traceparent,
            tracestate: tracestate.flatten(),
        }
    }

    /// Returns the context of the innermost scope; an empty one outside of any scope.
    pub fn current() -> Self {
        current().map_or_else(Self::default, |context| (*context).clone())
    }

    /// Sets the conversation.
    pub fn correlation_id(mut self, id: impl Into<String>) -> Self {
        self.correlation_id = Some(id.into());
        self
    }

    /// Sets the cause.
    pub fn causation_id(mut self, id: impl Into<String>) -> Self {
        self.causation_id = Some(id.into());
        self
    }

    /// Sets who acts.
    pub fn actor(mut self, actor: impl Into<String>) -> Self {
        self.actor = Some(actor.into());
        self
    }

    /// Sets whose data it is.
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.tenant = Some(tenant.into());
        self
    }

    /// Sets the parent span.
    pub fn traceparent(mut self, traceparent: impl Into<String>) -> Self {
        self.traceparent = Some(traceparent.into());
        self
    }

    /// Sets the vendor state of the trace.
    pub fn tracestate(mut self, tracestate: impl Into<String>) -> Self {
        self.tracestate = Some(tracestate.into());
        self
    }

    /// Runs the future in this context.
    pub fn scope<F: Future>(self, future: F) -> impl Future<Output = F::Output> + use<F> {
        let context = Arc::new(self);
        async move {
            let mut future = pin!(future);
            poll_fn(|polled| {
                let _entered = Entered::new(context.clone());
                future.as_mut().poll(polled)
            })
            .await
        }
    }

    /// Calls a function in this context, e.g. a blocking one in a separate thread.
    pub fn scope_sync<T>(self, work: impl FnOnce() -> T) -> T {
        let _entered = Entered::new(Arc::new(self));
        work()
    }

    /// Fills in what an event leaves out.
    fn fill_ids(&self, event: &mut NewEvent) {
        let mut carry = |name: &str, value: &Option<String>| {
            if let (Some(value), None) = (value, header::find(&event.headers, name)) {
                event.headers.insert(name.to_owned(), value.clone());
            }
        };
        carry(header::CORRELATION_ID, &self.correlation_id);
        carry(header::CAUSATION_ID, &self.causation_id);
        carry(header::ACTOR, &self.actor);
        if event.tenant.is_none() {
            event.tenant.clone_from(&self.tenant);
        }
    }

    fn fill_trace(&self, event: &mut NewEvent) {
        // Vendor state belongs to its parent span and never goes with another one.
        if header::find(&event.headers, header::TRACEPARENT).is_none()
            && let Some(trace) = self.trace()
        {
            trace.carry(&mut event.headers);
        }
    }

    /// The parent span, if it is valid.
    pub(crate) fn trace(&self) -> Option<TraceContext> {
        TraceContext::checked(self.traceparent.as_deref()?, self.tracestate.as_deref())
    }
}

/// Fills in what events inherit from the current [`Context`]. Everything that appends calls this,
/// in the context of its caller.
///
/// With tracing on, each event without a trace context gets its own span and that span's context.
pub fn in_context<'e>(events: impl Into<Cow<'e, [NewEvent]>>) -> Cow<'e, [NewEvent]> {
    let mut events = events.into();
    let (context, traced) = (current(), trace::is_on());
    if context.is_none() && !traced {
        return events;
    }
    for event in events.to_mut() {
        if let Some(context) = &context {
            context.fill_ids(event);
        }
        // A new trace context takes only the room that is left.
        if traced {
            trace::created(event, context.as_deref());
        }
        if let Some(context) = &context {
            context.fill_trace(event);
        }
    }
    events
}

/// `None` outside of any scope, and while the thread is ending.
fn current() -> Option<Arc<Context>> {
    CURRENT.try_with(|current| current.borrow().clone()).ok().flatten()
}

/// Makes a context current until it is dropped, even by a panic. Then the previous one is current
/// again.
struct Entered {
    before: Option<Arc<Context>>,
}

impl Entered {
    fn new(context: Arc<Context>) -> Self {
        Self { before: CURRENT.try_with(|current| current.replace(Some(context))).ok().flatten() }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let before = self.before.take();
        // The replaced value is dropped only after the borrow ends.
        _ = CURRENT.try_with(|current| current.replace(before));
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Poll, Waker};

    use jiff::Timestamp;

    use super::*;
    use crate::event::EventId;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn full() -> Context {
        let context = Context::new().correlation_id("c").causation_id("e").actor("a").tenant("t");
        context.traceparent(PARENT).tracestate("x=1")
    }

    fn filled(event: NewEvent) -> NewEvent {
        full().scope_sync(|| in_context(vec![event]).into_owned().remove(0))
    }

    fn actor() -> Option<String> {
        Context::current().actor
    }

    #[test]
    fn an_event_gets_what_it_does_not_say_itself() {
        let event = || NewEvent::json("t", "{}");
        let expected = event().correlation_id("c").causation_id("e").actor("a").tenant("t");
        let expected = expected.header("traceparent", PARENT).header("tracestate", "x=1");
        assert_eq!(filled(event()), expected);
        let own = event().correlation_id("own").causation_id("own").actor("own").tenant("own");
        let own = own.header("traceparent", "own");
        assert_eq!(filled(own.clone()), own, "and no state of another trace");
        assert_eq!(filled(event().header("tracestate", "own=1")), expected);
        let cased = event().header("Correlation-Id", "own").header("Causation-ID", "own").tenant("own");
        let cased = cased.header("Postbox-Actor", "own").header("TraceParent", "own");
        assert_eq!(filled(cased.clone()), cased, "in another case");
        assert_eq!(filled(event().header("TraceState", "own=1")), expected);
        assert_eq!(*in_context(vec![event()]), [event()], "outside of any scope");
        assert!(matches!(in_context(&[event()][..]), Cow::Borrowed(_)), "where nothing is copied");
    }

    #[test]
    fn an_event_is_the_cause_and_the_first_begins_the_conversation() {
        let id = EventId::now_v7();
        let of = |event: NewEvent| Context::of(&event.into_event(id, Timestamp::UNIX_EPOCH));
        let first = of(NewEvent::json("t", "{}"));
        let ids = Context::new().correlation_id(id.to_string()).causation_id(id.to_string());
        assert_eq!(first, ids);
        let later = of(filled(NewEvent::json("t", "{}")));
        assert_eq!(later, full().causation_id(id.to_string()));
        let cased = of(NewEvent::json("t", "{}").header("Correlation-Id", "c"));
        assert_eq!(cased, Context::new().correlation_id("c").causation_id(id.to_string()));
        let cased = NewEvent::json("t", "{}").header("Correlation-Id", "c").header("CAUSATION-ID", "d");
        let cased = cased.header("Postbox-Actor", "a").into_event(id, Timestamp::UNIX_EPOCH);
        assert_eq!((cased.correlation_id(), cased.causation_id(), cased.actor()), (Some("c"), Some("d"), Some("a")));
    }

    #[test]
    fn a_trace_that_is_none_or_too_long_is_not_carried_on() {
        let long = "0".repeat(9_000);
        for (parent, state) in [("00-1-2-01", "x=1"), (&*long, ""), (PARENT, &*long)] {
            let event = NewEvent::json("t", "{}").header("traceparent", parent).header("tracestate", state);
            let context = Context::of(&event.into_event(EventId::now_v7(), Timestamp::UNIX_EPOCH));
            let trace = (context.traceparent.as_deref(), context.tracestate.as_deref());
            assert_eq!(trace, ((parent == PARENT).then_some(PARENT), None));
        }
        let own = Context::new().traceparent("00-1-2-01").tracestate("x=1");
        let event = own.scope_sync(|| in_context(vec![NewEvent::json("t", "{}")]).into_owned().remove(0));
        assert_eq!(event, NewEvent::json("t", "{}"));
    }

    #[test]
    fn a_scope_ends_where_it_began() {
        let named = |name: &str| Context::new().actor(name);
        assert_eq!(actor(), None);
        named("outer").scope_sync(|| {
            assert_eq!(named("inner").scope_sync(actor).as_deref(), Some("inner"));
            assert_eq!(actor().as_deref(), Some("outer"));
            let panicked = std::panic::catch_unwind(|| named("lost").scope_sync(|| panic!("as asked")));
            assert!(panicked.is_err());
            assert_eq!(actor().as_deref(), Some("outer"));
        });
        assert_eq!(actor(), None);
    }

    #[test]
    fn futures_that_take_turns_keep_apart() {
        let worker = |name: &'static str| {
            Box::pin(Context::new().actor(name).scope(async move {
                for _ in 0..3 {
                    assert_eq!(actor().as_deref(), Some(name));
                    let mut yielded = false;
                    poll_fn(|_| if std::mem::replace(&mut yielded, true) { Poll::Ready(()) } else { Poll::Pending })
                        .await;
                }
            }))
        };
        let mut workers = [worker("one"), worker("two")];
        let mut polled = std::task::Context::from_waker(Waker::noop());
        for turn in 0..4 {
            for worker in &mut workers {
                assert_eq!(worker.as_mut().poll(&mut polled).is_ready(), turn == 3);
                assert_eq!(actor(), None, "between two polls");
            }
        }
    }
}
