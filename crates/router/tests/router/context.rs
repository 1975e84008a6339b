//! The context that handlers run in, however they are called.

use std::sync::{Arc, Mutex};

use postbox_core::{
    Append as _, Context, Criteria, Delivery, Headers, Inspect as _, ListQuery, Log as _, LogName, NewEvent, Outcome,
    Record, Subscription, TypedEvent,
};
use postbox_engine::RelayBuilder;
use postbox_memory::MemoryStore;
use postbox_router::{Event, InProcessBus, Router, State, handler_sink};
use postbox_testkit::memory::{TestEnv, fast};

#[derive(serde::Deserialize)]
struct Paid {}

impl TypedEvent for Paid {
    const TOPIC: &'static str = "order.paid";
}

fn paid(n: u32) -> NewEvent {
    NewEvent::json(Paid::TOPIC, "{}").key(n.to_string()).correlation_id(format!("c{n}")).actor("user:17")
}

/// Pairs of the context a handler ran in and the context of its event.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<[Context; 2]>>>);

impl Seen {
    fn note(&self, delivery: &Delivery) {
        self.0.lock().expect("unpoisoned").push([Context::current(), Context::of(&delivery.event)]);
    }
}

/// Sends two events. Each handler must run in the context of its own event until it ends.
async fn runs_in_context(handles: impl FnOnce(RelayBuilder, &TestEnv, Seen) -> RelayBuilder) {
    let env = TestEnv::with([paid(1), paid(2)]).await;
    let seen = Seen::default();
    let relay = handles(env.builder(env.subscription(), fast()), &env, seen.clone()).build().expect("built");
    assert_eq!(relay.drain(None).await.expect("drained").delivered, 2);
    let seen = seen.0.lock().expect("unpoisoned");
    assert!(seen.len() >= 2);
    for [current, of_its_event] in seen.iter() {
        assert_eq!(current, of_its_event);
        assert_eq!(current.actor.as_deref(), Some("user:17"));
    }
    assert_eq!(Context::current(), Context::new(), "nothing is left of it");
}

/// Notes the context before and after another event's handler had its turn.
async fn see(seen: Seen, delivery: Arc<Delivery>) {
    seen.note(&delivery);
    tokio::task::yield_now().await;
    seen.note(&delivery);
}

#[tokio::test(start_paused = true)]
async fn a_function_runs_in_the_context_of_its_event() {
    let handles = |relay: RelayBuilder, _: &TestEnv, seen: Seen| {
        relay.sink(Arc::new(handler_sink(move |delivery| see(seen.clone(), Arc::new(delivery)))))
    };
    runs_in_context(handles).await;
}

#[tokio::test(start_paused = true)]
async fn a_handler_of_a_bus_runs_in_the_context_of_its_event() {
    let handles = |relay: RelayBuilder, _: &TestEnv, seen: Seen| {
        let bus = InProcessBus::new().on("order.*", move |delivery| see(seen.clone(), delivery));
        relay.sink(Arc::new(bus.expect("a pattern")))
    };
    runs_in_context(handles).await;
}

#[tokio::test(start_paused = true)]
async fn a_handler_of_a_router_runs_in_the_context_of_its_event() {
    let handler = async |_: Event<Paid>, delivery: Delivery, State(seen): State<Seen>, context: Context| {
        assert_eq!(context, Context::current());
        see(seen, Arc::new(delivery)).await;
        Ok::<(), std::io::Error>(())
    };
    let handles = |relay: RelayBuilder, _: &TestEnv, seen: Seen| {
        relay.router(Router::new().on(handler).with_state(seen)).expect("it has a handler")
    };
    runs_in_context(handles).await;
}

#[tokio::test(start_paused = true)]
async fn a_handler_in_a_transaction_runs_in_the_context_of_its_event() {
    let handles = |relay: RelayBuilder, env: &TestEnv, seen: Seen| {
        relay.apply(env.store.apply(move |_, delivery| {
            seen.note(delivery);
            Outcome::DELIVERED
        }))
    };
    runs_in_context(handles).await;
}

async fn follow(_: Event<Paid>, State(store): State<MemoryStore>, context: Context) -> anyhow::Result<()> {
    let follow = |topic: &str, store: MemoryStore| {
        let event = NewEvent::json(topic, "{}");
        async move { store.append(&LogName::outbox(), &[event]).await }
    };
    follow("awaited", store.clone()).await?;
    tokio::spawn(follow("alone", store.clone())).await??;
    tokio::spawn(context.scope(follow("spawned", store))).await??;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn what_is_appended_names_its_cause_unless_its_task_has_left_the_context() {
    let env = TestEnv::with([paid(1)]).await;
    let router = Router::new().on(follow).with_state((*env.store).clone());
    let relay = env.builder(env.subscription(), fast()).router(router).expect("it has a handler").build();
    assert_eq!(relay.expect("built").drain(None).await.expect("drained").delivered, 1);
    let reader = Subscription::new("reader".parse().expect("a name"), LogName::outbox());
    env.store.subscribe(&reader).await.expect("subscribed");
    let (state, which) = (postbox_core::State::Pending, Criteria::default());
    let query = ListQuery {
        subscription: reader.name,
        state: Some(state),
        which,
        code: None,
        headers: Headers::new(),
        after: None,
        limit: 10,
        payloads: true,
    };
    let records = env.store.list(&query).await.expect("listed").split_off(1);
    let said = |it: &Record| {
        let (correlation, causation) = (it.event.correlation_id(), it.event.causation_id());
        (
            it.event.topic.to_string(),
            correlation == Some("c1"),
            causation.is_some(),
            it.event.actor() == Some("user:17"),
        )
    };
    let all = |topic: &str, carried: bool| (topic.to_owned(), carried, carried, carried);
    let said: Vec<_> = records.iter().map(said).collect();
    assert_eq!(said, [all("awaited", true), all("alone", false), all("spawned", true)]);
}
