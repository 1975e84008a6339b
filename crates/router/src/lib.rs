//! Functions as destinations of events.
//!
//! | part | what it is |
//! |---|---|
//! | [`Router`] | async functions by topic, whose arguments are parts of the event |
//! | [`handler_sink`] | one function for every event |
//! | [`InProcessBus`] | functions by topic pattern, which take the whole event |
//!
//! # What this crate deliberately does not do
//!
//! It reads no log and retries nothing: a relay of `postbox-engine` calls the handlers and acts on
//! their outcome.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod bus;
mod extract;
mod failure;
mod handler;
mod handler_sink;
mod layer;
mod place;

use std::sync::Arc;

use async_trait::async_trait;
use futures::future::join_all;
use postbox_core::{
    Database, Delivery, Error, ErrorKind, Handlers, Outcome, Result, Schemas, Sink, TopicPattern, Transact, header,
};

use bus::worst;
use handler::{Bound, Call, Called, Judge, Typed};

pub use bus::InProcessBus;
pub use extract::{Event, Extract, State};
pub use failure::{Failure, FailureRules, IntoFailure};
pub use handler::Handler;
pub use handler_sink::{HandlerSink, IntoOutcome, handler_sink};
pub use layer::{Layer, Next};
pub use place::{Outside, Place};
pub use postbox_core::Tx;

/// Hands each event to the handlers of its topic.
///
/// A handler is an `async fn` (or an `async` closure) that returns a `Result<(), E>`. Its arguments
/// declare what it needs: [`Event<T>`](Event), which also sets the topic, [`State<S>`](State), the
/// [`Context`](postbox_core::Context) it runs in, the event's [`Headers`](postbox_core::Headers) or
/// the whole [`Delivery`]. In a router [`in_transaction`](Self::in_transaction), the last argument
/// is [`Tx`].
///
/// ```
/// use postbox_core::TypedEvent;
/// use postbox_router::{Event, Router, State};
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
/// - All handlers of a topic run concurrently, once per delivery. The event is delivered when all
///   of them have succeeded. If one fails, the event is retried and *every* handler sees it again.
///   Handlers must be idempotent (use the event's id as the key), or have one subscription each.
/// - Events that a handler appends inherit the event's [`Context`](postbox_core::Context).
/// - A failure's text begins with the handler's name.
/// - An event goes to those handlers of its topic that read its schema version. If none does, it is
///   dead at once, with code `schema_version_differs`.
/// - An event that cannot be decoded as the handler's type is dead at once, with code
///   `payload_not_decoded`. Every other failure is retried with code `handler_error`, unless a
///   [rule](Self::dead_on) says otherwise or it is a [`Failure`].
/// - A panic is a failed attempt of the event, with code `panic`. A handler that takes longer than
///   the relay's `deliver_timeout` is dropped, with code `timeout`.
/// - In a transaction, the handlers of an event run one after the other, in the order of
///   [`on`](Self::on). If one fails, the rest do not run, and the work of all of them is rolled
///   back.
/// - An event that no handler wants goes to the [fallback](Self::fallback). Without one it is
///   retried with code `not_handled`, because another replica may have a handler for it.
pub struct Router<S = (), D = Outside> {
    /// The store in whose transactions the handlers run.
    database: D,
    routes: Vec<Route<S, D>>,
    fallback: Option<Route<S, D>>,
    rules: FailureRules,
    schemas: Vec<Arc<dyn Schemas>>,
    layers: Vec<Arc<dyn Layer>>,
}

struct Route<S, D> {
    /// `None`: every event that no other handler wants.
    topic: Option<TopicPattern>,
    /// Returns whether the handler reads events of this schema version.
    reads: fn(u32) -> bool,
    name: &'static str,
    handler: Arc<dyn Call<S, D>>,
}

impl<S: Send + Sync + 'static> Default for Router<S> {
    fn default() -> Self {
        Self::new()
    }
}

impl<S: Send + Sync + 'static> Router<S> {
    /// Creates a router without handlers.
    pub fn new() -> Self {
        Self::of(Outside)
    }
}

impl<S: Send + Sync + 'static, D: Transact + Clone> Router<S, D> {
    /// Creates a router without handlers, for handlers that run in the transactions of this store.
    /// The relay must read from the same store.
    pub fn in_transaction(store: &D) -> Self {
        Self::of(store.clone())
    }
}

impl<S: Send + Sync + 'static, D: Database> Router<S, D> {
    fn of(database: D) -> Self {
        let (routes, schemas, layers) = (Vec::new(), Vec::new(), Vec::new());
        Self { database, routes, fallback: None, rules: FailureRules::default(), schemas, layers }
    }

    /// Adds a handler for the topic of its [`Event<T>`](Event) argument. In errors it has the name
    /// of the function.
    ///
    /// Two such arguments do not compile:
    ///
    /// ```compile_fail,E0080
    /// # use postbox_core::TypedEvent;
    /// # use postbox_router::{Event, Router};
    /// # #[derive(serde::Deserialize)]
    /// # struct Paid {}
    /// # impl TypedEvent for Paid { const TOPIC: &'static str = "order.paid"; }
    /// # #[derive(serde::Deserialize)]
    /// # struct Placed {}
    /// # impl TypedEvent for Placed { const TOPIC: &'static str = "order.placed"; }
    /// async fn mail(_: Event<Paid>, _: Event<Placed>) -> Result<(), std::io::Error> { Ok(()) }
    /// let router: Router = Router::new().on(mail);
    /// ```
    #[must_use]
    pub fn on<H: Handler<S, D, Arguments>, Arguments: 'static>(mut self, handler: H) -> Self {
        const { assert!(H::TOPIC.is_some(), "a handler without an Event<T> has no topic: use Router::fallback") };
        let topic = H::TOPIC.map(TopicPattern::from_stored);
        self.routes.push(Route { topic, ..Route::new(handler) });
        self
    }

    /// Sets the handler of every event that no other handler wants. The router then wants every
    /// topic, so the handler cannot take an [`Event<T>`](Event).
    ///
    /// Replaces an earlier one.
    #[must_use]
    pub fn fallback<H: Handler<S, D, Arguments>, Arguments: 'static>(mut self, handler: H) -> Self {
        const { assert!(H::TOPIC.is_none(), "a handler with an Event<T> is for its topic only: use Router::on") };
        self.fallback = Some(Route::new(handler));
        self
    }

    /// Makes an event dead at once, with code `handler_refused`, if a handler fails with an error
    /// of this type that the predicate selects. The error may be anywhere in the chain of causes.
    /// Applies to the whole router.
    #[must_use]
    pub fn dead_on<E: std::error::Error + Send + Sync + 'static>(
        mut self,
        picks: impl Fn(&E) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.rules.dead_on(picks);
        self
    }

    /// Makes an event dead at once, with code `schema_violated` and the issues, if its payload
    /// breaks the schema of its topic, or with code `schema_version_differs` if its schema version
    /// is no number. Handlers do not see it. Applies to the whole router.
    #[must_use]
    pub fn schemas(mut self, schemas: Arc<dyn Schemas>) -> Self {
        self.schemas.push(schemas);
        self
    }

    /// Adds the handlers, rules, schemas and layers of another router, e.g. of another module. A
    /// topic may be in both. Transactional handlers run in the transactions of this router's store.
    ///
    /// Fails (`Conflict`, code `fallback_twice`) if both have a fallback.
    pub fn merge(mut self, other: Self) -> Result<Self> {
        if let (Some(one), Some(two)) = (&self.fallback, &other.fallback) {
            let message = format!("{} and {} are both the fallback; keep one", one.name, two.name);
            return Err(Error::new(ErrorKind::Conflict, "merge", "fallback_twice", message));
        }
        self.routes.extend(other.routes);
        self.fallback = self.fallback.or(other.fallback);
        self.rules.extend(other.rules);
        self.schemas.extend(other.schemas);
        self.layers.extend(other.layers);
        Ok(self)
    }

    /// Gives the handlers their state.
    #[must_use]
    pub fn with_state(self, state: S) -> Router<(), D> {
        let state = Arc::new(state);
        let bind = |route: Route<S, D>| Route {
            topic: route.topic,
            reads: route.reads,
            name: route.name,
            handler: Arc::new(Bound { handler: route.handler, state: state.clone() }) as Arc<dyn Call<(), D>>,
        };
        Router {
            database: self.database,
            routes: self.routes.into_iter().map(&bind).collect(),
            fallback: self.fallback.map(&bind),
            rules: self.rules,
            schemas: self.schemas,
            layers: self.layers,
        }
    }
}

impl<S> Router<S> {
    /// Adds a [`Layer`] around the handlers of each event. The first one added is outermost.
    /// Applies to the whole router. A transactional router has no layers, because its handlers may
    /// be blocking functions.
    #[must_use]
    pub fn layer(mut self, layer: impl Layer) -> Self {
        self.layers.push(Arc::new(layer));
        self
    }
}

impl<S, D> Router<S, D> {
    /// Returns the topics of its handlers, each once, in the order of [`Self::on`].
    pub fn topics(&self) -> impl Iterator<Item = &str> {
        let topics = || self.routes.iter().filter_map(|route| route.topic.as_ref());
        let first = move |(n, topic): &(usize, &TopicPattern)| !topics().take(*n).any(|earlier| earlier == *topic);
        topics().enumerate().filter(first).map(|(_, topic)| topic.as_str())
    }

    /// Returns the topics its subscription filters by; empty, which means all, if there is a
    /// fallback.
    ///
    /// Fails (`Invalid`, code `router_empty`) if it has no handler.
    pub fn wanted(&self) -> Result<Vec<TopicPattern>> {
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

impl<S: Send + Sync + 'static, D: Database> Route<S, D> {
    fn new<H: Handler<S, D, Arguments>, Arguments: 'static>(handler: H) -> Self {
        let name = std::any::type_name::<H>();
        Self { topic: None, reads: H::reads, name, handler: Arc::new(Typed::new(handler)) }
    }
}

impl<D: Database> Router<(), D> {
    /// Returns the handlers of an event: those of its topic that read its version, or the fallback.
    /// If none reads the version, returns all of the topic, because they report what is wrong.
    fn routes<'t>(&'t self, delivery: &'t Delivery) -> impl Iterator<Item = &'t Route<(), D>> {
        let topic = delivery.event.topic.as_str();
        let wants = |route: &&Route<(), D>| route.topic.as_ref().is_some_and(|its| its.matches(topic));
        let version = delivery.event.schema_version();
        let reads = move |route: &Route<(), D>| version.is_some_and(route.reads);
        let any_reads = self.routes.iter().filter(wants).any(reads);
        let fallback = self.fallback.as_ref().filter(|_| !self.routes.iter().any(|route| wants(&route)));
        self.routes.iter().filter(wants).filter(move |route| !any_reads || reads(route)).chain(fallback)
    }

    fn call<'t>(&'t self, route: &'t Route<(), D>, delivery: &'t Delivery, lent: D::Lent<'t>) -> D::Handled<'t> {
        let judge = Judge { rules: &self.rules, name: route.name };
        route.handler.call(Called { delivery, state: &(), judge }, lent)
    }
}

/// Returns the dead outcome of an event whose payload breaks a schema, or whose schema version is
/// no number: no schema could be chosen.
fn violation(schemas: &[Arc<dyn Schemas>], event: &postbox_core::Event) -> Option<Outcome> {
    let Some(version) = event.schema_version() else {
        if !schemas.iter().any(|schemas| schemas.knows(event.topic.as_str())) {
            return None;
        }
        let version = header::find(&event.headers, header::SCHEMA_VERSION).unwrap_or_default();
        let message =
            format!("the event has schema version {version:?}, which is no number; its sender has to mend it");
        return Some(Outcome::dead("schema_version_differs", message));
    };
    let check = |schemas: &Arc<dyn Schemas>| schemas.check(event.topic.as_str(), version, &event.payload).err();
    let error = schemas.iter().find_map(check)?;
    Some(Outcome::dead(error.code().to_owned(), error.message()))
}

fn not_handled(delivery: &Delivery) -> Outcome {
    let topic = &delivery.event.topic;
    Outcome::retry("not_handled", format!("this program has no handler for {topic}; is it an older version?"))
}

impl Router {
    /// Runs the handlers, inside all layers.
    async fn handle(&self, delivery: &Delivery) -> Outcome {
        if let Some(violation) = violation(&self.schemas, &delivery.event) {
            return violation;
        }
        let calls: Vec<_> = self.routes(delivery).map(|route| self.call(route, delivery, ())).collect();
        if calls.is_empty() {
            return not_handled(delivery);
        }
        worst(join_all(calls).await)
    }
}

impl<D: Transact> Handlers<D> for Router<(), D> {
    fn call<'t>(&'t self, nth: usize, delivery: &'t Delivery, lent: D::Lent<'t>) -> Option<D::Handled<'t>> {
        if nth == 0
            && let Some(violation) = violation(&self.schemas, &delivery.event)
        {
            return Some(D::handled(violation));
        }
        match self.routes(delivery).nth(nth) {
            Some(route) => Some(Router::call(self, route, delivery, lent)),
            None if nth == 0 => Some(D::handled(not_handled(delivery))),
            None => None,
        }
    }
}

#[async_trait]
impl Sink for Router {
    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(deliveries.len());
        for delivery in deliveries {
            let handled = Next { router: self, delivery, outside: 0 }.run();
            outcomes.push(delivery.context().scope(handled).await);
        }
        outcomes
    }
}
