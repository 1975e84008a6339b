//! On whose behalf work is done, and what events carry on of that.

use std::borrow::Cow;
use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;

use crate::event::{Event, NewEvent, header};
use crate::names::Tenant;
use crate::trace;

thread_local! {
    /// The context of what this thread works on. Set only while that runs: a future's is put here
    /// at the start of each poll and taken away at its end.
    static CURRENT: RefCell<Option<Arc<Context>>> = const { RefCell::new(None) };
}

/// On whose behalf work is done. Every event that is appended within its [scope](Self::scope)
/// carries it.
///
/// A handler runs in the context of the event it handles, so that a conversation keeps its id, and
/// each event names the one that caused it. At the edge, where a request comes in, make one:
///
/// ```
/// # use postbox_core::{Context, MemoryStore, NewEvent, Postbox, Result};
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
/// - What an event says itself stays: a context only fills in what is missing.
/// - It reaches whatever is awaited in its scope. A task or a thread of its own begins without one:
///   `tokio::spawn(Context::current().scope(work))`, [`Self::scope_sync`] for a thread.
/// - An inner scope replaces the outer one. To add to that, begin with [`Self::current`].
/// - Headers that are carried on count towards the limits of an event.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[must_use = "a context does nothing outside of its scope"]
pub struct Context {
    /// The conversation.
    pub correlation_id: Option<String>,
    /// The event or command that causes what is appended.
    pub causation_id: Option<String>,
    /// Who acts: a user, a service, a job.
    pub actor: Option<String>,
    /// On whose data.
    pub tenant: Option<String>,
    /// W3C trace context: the parent span.
    pub traceparent: Option<String>,
    /// W3C trace context: vendor state. Goes with its `traceparent` only.
    pub tracestate: Option<String>,
}

impl Context {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// What a handler of this event works in: the event is the cause of what follows, and where it
    /// belongs to no conversation, it begins one that has its id.
    pub fn of(event: &Event) -> Self {
        let id = event.id.to_string();
        let header = |name: &str| event.header(name).map(str::to_owned);
        Self {
            correlation_id: header(header::CORRELATION_ID).or_else(|| Some(id.clone())),
            causation_id: Some(id),
            actor: header(header::ACTOR),
            tenant: event.tenant.as_ref().map(Tenant::to_string),
            traceparent: header(header::TRACEPARENT),
            tracestate: header(header::TRACESTATE),
        }
    }

    /// That of the innermost scope; an empty one outside of any.
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

    /// Sets on whose data.
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

    /// The future, in this context.
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

    /// Calls a function in this context: one that blocks, on a thread of its own say.
    pub fn scope_sync<T>(self, work: impl FnOnce() -> T) -> T {
        let _entered = Entered::new(Arc::new(self));
        work()
    }

    /// Fills in what an event does not say itself.
    fn fill(&self, event: &mut NewEvent) {
        let mut carry = |name: &str, value: &Option<String>| {
            if let (Some(value), false) = (value, event.headers.contains_key(name)) {
                event.headers.insert(name.to_owned(), value.clone());
            }
        };
        carry(header::CORRELATION_ID, &self.correlation_id);
        carry(header::CAUSATION_ID, &self.causation_id);
        carry(header::ACTOR, &self.actor);
        // The state belongs to its parent: never beside another one.
        if !event.headers.contains_key(header::TRACEPARENT) && self.traceparent.is_some() {
            event.headers.remove(header::TRACESTATE);
            for (name, value) in [(header::TRACEPARENT, &self.traceparent), (header::TRACESTATE, &self.tracestate)] {
                event.headers.extend(value.clone().map(|value| (name.to_owned(), value)));
            }
        }
        if event.tenant.is_none() {
            event.tenant.clone_from(&self.tenant);
        }
    }
}

/// Events with what they carry on of the current [`Context`]. What appends calls this, in whatever
/// it was called in.
///
/// Where traces are on, each event that has no trace context gets a span of its own and its
/// context.
pub fn in_context<'e>(events: impl Into<Cow<'e, [NewEvent]>>) -> Cow<'e, [NewEvent]> {
    let mut events = events.into();
    let (context, traced) = (current(), trace::is_on());
    if context.is_none() && !traced {
        return events;
    }
    for event in events.to_mut() {
        if traced {
            trace::created(event, context.as_deref());
        }
        if let Some(context) = &context {
            context.fill(event);
        }
    }
    events
}

/// None outside of any scope, and while the thread ends.
fn current() -> Option<Arc<Context>> {
    CURRENT.try_with(|current| current.borrow().clone()).ok().flatten()
}

/// A context is current until this is dropped, by a panic too; then what was current before is.
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
        // What was current is dropped only after the borrow ends.
        _ = CURRENT.try_with(|current| current.replace(before));
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Poll, Waker};

    use jiff::Timestamp;

    use super::*;
    use crate::event::EventId;

    fn full() -> Context {
        let context = Context::new().correlation_id("c").causation_id("e").actor("a").tenant("t");
        context.traceparent("00-1-2-01").tracestate("x=1")
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
        let expected = expected.header("traceparent", "00-1-2-01").header("tracestate", "x=1");
        assert_eq!(filled(event()), expected);
        let own = event().correlation_id("own").causation_id("own").actor("own").tenant("own");
        let own = own.header("traceparent", "own");
        assert_eq!(filled(own.clone()), own, "and no state of another trace");
        assert_eq!(filled(event().header("tracestate", "own=1")), expected);
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
