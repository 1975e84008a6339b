//! Handlers by topic: plain async functions whose arguments say what they want of an event.

mod extract;
mod failure;
mod handler;

use std::sync::Arc;

use async_trait::async_trait;
use futures::future::join_all;
use postbox_core::{Capabilities, Delivery, Error, ErrorKind, Outcome, Result, Sink, TopicPattern};

use crate::bus::worst;
use handler::{Bound, Call, Called, Typed};

pub use extract::{Event, Extract, State};
pub use failure::{Failure, FailureRules, IntoFailure};
pub use handler::Handler;

/// A sink that hands each event to the handlers of its topic.
///
/// A handler is an `async fn` (or an `async` closure) that returns a `Result<(), E>`. Its arguments
/// are what it wants: [`Event<T>`](Event), which also says the topic, [`State<S>`](State), the
/// event's [`Headers`](postbox_core::Headers), the whole [`Delivery`].
///
/// ```
/// use postbox_core::TypedEvent;
/// use postbox_engine::router::{Event, Router, State};
/// # #[derive(serde::Deserialize)]
/// # struct OrderPaid { order: i64 }
/// # impl TypedEvent for OrderPaid { const TOPIC: &'static str = "order.paid"; }
/// # #[derive(Clone)]
/// # struct App;
/// # impl App { async fn mail(&self, order: i64) -> Result<(), std::io::Error> { Ok(()) } }
///
/// async fn mail(Event(paid): Event<OrderPaid>, State(app): State<App>) -> Result<(), std::io::Error> {
///     app.mail(paid.order).await
/// }
///
/// let router = Router::new().on(mail).with_state(App);
/// assert_eq!(router.topics().collect::<Vec<_>>(), ["order.paid"]);
/// ```
///
/// Behaviour:
/// - All handlers of a topic run, at the same time, each event once. It is delivered when all of
///   them have succeeded. If one fails, it is retried, and *every* handler sees it again: handlers
///   must be idempotent (the event's id is the key), or have a subscription each.
/// - A failure's text begins with the handler's name.
/// - An event that cannot be read as the handler's type is dead at once, with code
///   `payload_not_decoded` or `schema_version_differs`. Every other failure is retried, with code
///   `handler_error`, unless a [rule](Self::dead_on) says otherwise or it is a [`Failure`].
/// - A panic is the event's failed attempt, with code `panic`; a handler that takes longer than the
///   relay's `deliver_timeout` is dropped, with code `timeout`.
/// - An event that no handler wants goes to the [fallback](Self::fallback). Without one it is
///   retried with code `not_handled`: another replica may know it.
pub struct Router<S = ()> {
    routes: Vec<Route<S>>,
    fallback: Option<Route<S>>,
    rules: FailureRules,
}

struct Route<S> {
    /// `None`: whatever nobody else wants.
    topic: Option<TopicPattern>,
    name: &'static str,
    handler: Arc<dyn Call<S>>,
}

impl<S> Default for Router<S> {
    fn default() -> Self {
        Self { routes: Vec::new(), fallback: None, rules: FailureRules::default() }
    }
}

impl<S: Send + Sync + 'static> Router<S> {
    /// Without handlers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a handler of the topic that its [`Event<T>`](Event) has.
    ///
    /// Its name, in errors, is that of the function.
    #[must_use]
    pub fn on<H: Handler<S, Arguments>, Arguments: 'static>(mut self, handler: H) -> Self {
        const { assert!(H::TOPIC.is_some(), "a handler without an Event<T> has no topic: use Router::fallback") };
        let topic = H::TOPIC.map(TopicPattern::from_stored);
        self.routes.push(Route { topic, ..Route::new(handler) });
        self
    }

    /// Handles every event that no other handler wants. The router then wants every topic.
    ///
    /// Replaces an earlier one.
    #[must_use]
    pub fn fallback<H: Handler<S, Arguments>, Arguments: 'static>(mut self, handler: H) -> Self {
        self.fallback = Some(Route::new(handler));
        self
    }

    /// Errors of this type that the predicate picks make the event dead at once, with code
    /// `handler_refused`, wherever they are in the chain of causes. For the whole router.
    #[must_use]
    pub fn dead_on<E: std::error::Error + 'static>(
        mut self,
        picks: impl Fn(&E) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.rules.dead_on(picks);
        self
    }

    /// Adds the handlers and rules of another router, of another module say. A topic may be in
    /// both.
    ///
    /// The error (`Conflict`, code `fallback_twice`): both have a fallback.
    pub fn merge(mut self, other: Self) -> Result<Self> {
        if let (Some(one), Some(two)) = (&self.fallback, &other.fallback) {
            let message = format!("{} and {} are both the fallback; keep one", one.name, two.name);
            return Err(Error::new(ErrorKind::Conflict, "merge", "fallback_twice", message));
        }
        self.routes.extend(other.routes);
        self.fallback = self.fallback.or(other.fallback);
        self.rules.extend(other.rules);
        Ok(self)
    }

    /// Gives the handlers their state.
    #[must_use]
    pub fn with_state(self, state: S) -> Router {
        let state = Arc::new(state);
        let bind = |route: Route<S>| Route {
            topic: route.topic,
            name: route.name,
            handler: Arc::new(Bound { handler: route.handler, state: state.clone() }) as Arc<dyn Call<()>>,
        };
        Router {
            routes: self.routes.into_iter().map(&bind).collect(),
            fallback: self.fallback.map(&bind),
            rules: self.rules,
        }
    }
}

impl<S> Router<S> {
    /// The topics of its handlers, each once, in the order of [`Self::on`].
    pub fn topics(&self) -> impl Iterator<Item = &str> {
        let topics = || self.routes.iter().filter_map(|route| route.topic.as_ref());
        let first = move |(n, topic): &(usize, &TopicPattern)| !topics().take(*n).any(|earlier| earlier == *topic);
        topics().enumerate().filter(first).map(|(_, topic)| topic.as_str())
    }

    /// The topics of its subscription: these, or none, which means all, if there is a fallback.
    pub(crate) fn wanted(&self) -> Result<Vec<TopicPattern>> {
        if self.fallback.is_some() {
            return Ok(Vec::new());
        }
        if self.routes.is_empty() {
            let message = "the router has no handler, so no event would ever be delivered; add one with `on`";
            return Err(Error::invalid("build relay", "router_empty", message));
        }
        Ok(self.topics().map(TopicPattern::from_stored).collect())
    }
}

impl<S: Send + Sync + 'static> Route<S> {
    fn new<H: Handler<S, Arguments>, Arguments: 'static>(handler: H) -> Self {
        Self { topic: None, name: std::any::type_name::<H>(), handler: Arc::new(Typed::new(handler)) }
    }
}

impl Router {
    async fn handle(&self, delivery: &Delivery) -> Outcome {
        let topic = delivery.event.topic.as_str();
        let mut routes: Vec<&Route<()>> =
            self.routes.iter().filter(|route| route.topic.as_ref().is_some_and(|its| its.matches(topic))).collect();
        if routes.is_empty() {
            routes.extend(&self.fallback);
        }
        if routes.is_empty() {
            let text = format!("no handler of this program wants {topic}; is it an older one?");
            return Outcome::retry("not_handled", text);
        }
        let called = Called { delivery, state: &(), rules: &self.rules };
        let calls = join_all(routes.iter().map(|route| route.handler.call(called))).await;
        worst(routes.iter().zip(calls).map(|(route, outcome)| named(route.name, outcome)).collect())
    }
}

/// The outcome, with the handler's name in a failure's text.
fn named(name: &str, mut outcome: Outcome) -> Outcome {
    match &mut outcome {
        Outcome::Delivered { .. } => {}
        Outcome::Retry { error, .. }
        | Outcome::Ambiguous { error, .. }
        | Outcome::Throttled { error, .. }
        | Outcome::Dead { error, .. }
        | Outcome::Unavailable { error, .. }
        | Outcome::Gone { error, .. } => error.insert_str(0, &format!("{name}: ")),
    }
    outcome
}

#[async_trait]
impl Sink for Router {
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(deliveries.len());
        for delivery in deliveries {
            outcomes.push(self.handle(delivery).await);
        }
        outcomes
    }
}
