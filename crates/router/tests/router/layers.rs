//! Layers around handlers, and what keeps events from handlers.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Context, Delivery, Error, NewEvent, Outcome, Result, Schemas, State as EventState, TypedEvent};
use postbox_engine::Relay;
use postbox_router::{Event, Layer, Next, Router, State};
use postbox_testkit::memory::{TestEnv, fast};

#[derive(serde::Deserialize)]
struct Paid {
    order: i64,
}

impl TypedEvent for Paid {
    const TOPIC: &'static str = "order.paid";
}

type Seen = Arc<Mutex<Vec<String>>>;

fn see(seen: &Seen, what: String) {
    seen.lock().expect("unpoisoned").push(what);
}

async fn mail(Event(paid): Event<Paid>, State(seen): State<Seen>) -> anyhow::Result<()> {
    see(&seen, format!("mail {}", paid.order));
    match paid.order {
        3 => std::future::pending().await,
        _ => Ok(()),
    }
}

fn paid(order: i64) -> NewEvent {
    NewEvent::json("order.paid", format!(r#"{{"order":{order}}}"#)).key("k")
}

fn relay(env: &TestEnv, router: Router) -> Relay {
    env.builder(env.subscription(), fast()).router(router).expect("it has a handler").build().expect("built")
}

/// Notes when it begins, and the outcome of the event.
struct Note(&'static str, Seen);

#[async_trait]
impl Layer for Note {
    async fn around(&self, delivery: &Delivery, next: Next<'_>) -> Outcome {
        let Self(name, seen) = self;
        assert_eq!(Context::current(), Context::of(&delivery.event));
        see(seen, format!("{name} begins"));
        let outcome = next.run().await;
        see(seen, format!("{name} ends, delivered: {}", outcome.is_delivered()));
        outcome
    }
}

/// Skips events of this service itself, and gives handlers one second.
struct Guard;

#[async_trait]
impl Layer for Guard {
    async fn around(&self, delivery: &Delivery, next: Next<'_>) -> Outcome {
        if delivery.event.source.as_deref() == Some("self") {
            return Outcome::DELIVERED;
        }
        let late = |_| Outcome::dead("too_late", "it took more than a second");
        tokio::time::timeout(Duration::from_secs(1), next.run()).await.unwrap_or_else(late)
    }
}

#[tokio::test(start_paused = true)]
async fn layers_are_around_the_handlers_the_first_outermost() {
    let env = TestEnv::with([paid(1), paid(2).source("self"), paid(3)]).await;
    let seen = Seen::default();
    let guarded = Router::new().layer(Guard);
    let router = Router::new().on(mail).layer(Note("note", seen.clone())).merge(guarded).expect("merged");
    let drained = relay(&env, router.with_state(seen.clone())).drain(None).await.expect("drained");
    assert_eq!((drained.delivered, drained.dead), (2, 1));
    let expected = [
        ["note begins", "mail 1", "note ends, delivered: true"].as_slice(),
        &["note begins", "note ends, delivered: true"],
        &["note begins", "mail 3", "note ends, delivered: false"],
    ];
    assert_eq!(*seen.lock().expect("unpoisoned"), expected.concat());
    let dead = env.list(EventState::Dead).await;
    assert_eq!(dead.iter().map(|it| it.code.as_deref()).collect::<Vec<_>>(), [Some("too_late")]);
}

/// Refuses order 13.
#[derive(Debug)]
struct No13;

impl Schemas for No13 {
    fn check(&self, topic: &str, schema_version: u32, payload: &[u8]) -> Result<()> {
        match payload == br#"{"order":13}"# {
            true => Err(Error::schema_violated(topic, schema_version, "/order (not)")),
            false => Ok(()),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_has_no_schema_version_that_is_a_number_is_dead_and_nobody_sees_it() {
    let env = TestEnv::with([paid(1).header("Schema-Version", "two"), paid(2)]).await;
    let seen = Seen::default();
    let count = async |_: Delivery, State(seen): State<Seen>| {
        see(&seen, "an event".to_owned());
        anyhow::Ok(())
    };
    let router = Router::new().fallback(count).schemas(Arc::new(No13)).with_state(seen.clone());
    assert_eq!(relay(&env, router).drain(None).await.expect("drained").delivered, 1);
    assert_eq!(seen.lock().expect("unpoisoned").len(), 1);
    let dead = env.list(EventState::Dead).await.remove(0);
    assert_eq!(dead.code.as_deref(), Some("schema_version_differs"));
    assert!(dead.error.is_some_and(|error| error.contains("\"two\"")));
}

#[tokio::test(start_paused = true)]
async fn what_breaks_a_schema_of_a_merged_router_is_dead_and_nobody_sees_it() {
    let env = TestEnv::with([paid(13), paid(1)]).await;
    let seen = Seen::default();
    let other = Router::new().schemas(Arc::new(No13));
    let router = Router::new().on(mail).merge(other).expect("merged").with_state(seen.clone());
    assert_eq!(relay(&env, router).drain(None).await.expect("drained").delivered, 1);
    assert_eq!(*seen.lock().expect("unpoisoned"), ["mail 1"]);
    let dead = env.list(EventState::Dead).await.remove(0);
    assert_eq!(dead.code.as_deref(), Some("schema_violated"));
    assert!(dead.error.is_some_and(|error| error.contains("/order (not)")));
}
