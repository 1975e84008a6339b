//! Handlers by topic: plain functions whose arguments say what they want of an event.

mod extract;
mod failure;
mod handler;
mod layer;
mod place;

use std::sync::Arc;

use async_trait::async_trait;
use futures::future::join_all;
use postbox_core::{
    Capabilities, Database, Delivery, Error, ErrorKind, Handlers, Outcome, Result, Schemas, Sink, TopicPattern,
    Transact,
};

use crate::bus::worst;
use handler::{Bound, Call, Called, Judge, Typed};

pub use extract::{Event, Extract, State};
pub use failure::{Failure, FailureRules, IntoFailure};
pub use handler::Handler;
pub use layer::{Layer, Next};
pub use place::{Outside, Place};
pub use postbox_core::Tx;

/// Hands each event to the handlers of its topic.
///
/// A handler is an `async fn` (or an `async` closure) that returns a `Result<(), E>`. Its arguments
/// are what it wants: [`Event<T>`](Event), which also says the topic, [`State<S>`](State), the
/// [`Context`](postbox_core::Context) that it runs in, the event's
/// [`Headers`](postbox_core::Headers), the whole [`Delivery`], and in a router
/// [`in_transaction`](Self::in_transaction), as the last one, [`Tx`].
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
/// - What a handler appends carries on the event's [`Context`](postbox_core::Context).
/// - A failure's text begins with the handler's name.
/// - An event goes to those handlers of its topic that read its schema version. Where none does,
///   it is dead at once, with code `schema_version_differs`.
/// - An event that cannot be read as the handler's type is dead at once, with code
///   `payload_not_decoded`. Every other failure is retried, with code `handler_error`, unless a
///   [rule](Self::dead_on) says otherwise or it is a [`Failure`].
/// - A panic is the event's failed attempt, with code `panic`; a handler that takes longer than the
///   relay's `deliver_timeout` is dropped, with code `timeout`.
/// - In a transaction, the handlers of an event run one after the other, in the order of
///   [`on`](Self::on), up to the first that fails: then what all of them did is taken back.
/// - An event that no handler wants goes to the [fallback](Self::fallback). Without one it is
///   retried with code `not_handled`: another replica may know it.
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
    /// `None`: whatever nobody else wants.
    topic: Option<TopicPattern>,
    /// Whether it reads events of this schema version.
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
    /// Without handlers.
    pub fn new() -> Self {
        Self::of(Outside)
    }
}

impl<S: Send + Sync + 'static, D: Transact + Clone> Router<S, D> {
    /// Without handlers; those it gets run in the transactions of this store, which the relay must
    /// read from.
    pub fn in_transaction(store: &D) -> Self {
        Self::of(store.clone())
    }
}

impl<S: Send + Sync + 'static, D: Database> Router<S, D> {
    fn of(database: D) -> Self {
        let (routes, schemas, layers) = (Vec::new(), Vec::new(), Vec::new());
        Self { database, routes, fallback: None, rules: FailureRules::default(), schemas, layers }
    }

    /// Adds a handler of the topic that its [`Event<T>`](Event) has.
    ///
    /// Its name, in errors, is that of the function.
    #[must_use]
    pub fn on<H: Handler<S, D, Arguments>, Arguments: 'static>(mut self, handler: H) -> Self {
        const { assert!(H::TOPIC.is_some(), "a handler without an Event<T> has no topic: use Router::fallback") };
        let topic = H::TOPIC.map(TopicPattern::from_stored);
        self.routes.push(Route { topic, ..Route::new(handler) });
        self
    }

    /// Handles every event that no other handler wants. The router then wants every topic.
    ///
    /// Replaces an earlier one.
    #[must_use]
    pub fn fallback<H: Handler<S, D, Arguments>, Arguments: 'static>(mut self, handler: H) -> Self {
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

    /// Events whose payload is not as its topic says are dead at once, with code `schema_violated`
    /// and every issue. Handlers do not see them. For the whole router.
    #[must_use]
    pub fn schemas(mut self, schemas: Arc<dyn Schemas>) -> Self {
        self.schemas.push(schemas);
        self
    }

    /// Adds the handlers, rules, schemas and layers of another router, of another module say. A
    /// topic may be in both. If they run in transactions, then in those of this one's store.
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
    /// Does something around the handlers of each event: see [`Layer`]. Those added first are
    /// outermost. For the whole router. A router in a transaction has none: its handlers may be
    /// functions that block.
    #[must_use]
    pub fn layer(mut self, layer: impl Layer) -> Self {
        self.layers.push(Arc::new(layer));
        self
    }
}

impl<S, D> Router<S, D> {
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

impl<S: Send + Sync + 'static, D: Database> Route<S, D> {
    fn new<H: Handler<S, D, Arguments>, Arguments: 'static>(handler: H) -> Self {
        let name = std::any::type_name::<H>();
        Self { topic: None, reads: H::reads, name, handler: Arc::new(Typed::new(handler)) }
    }
}

impl<D: Database> Router<(), D> {
    /// The handlers of an event: those of its topic that read its version, or the fallback. Where
    /// none reads it, all of the topic: they say what is wrong.
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

/// What becomes of an event whose payload breaks a schema.
fn violation(schemas: &[Arc<dyn Schemas>], event: &postbox_core::Event) -> Option<Outcome> {
    let version = event.schema_version()?;
    let check = |schemas: &Arc<dyn Schemas>| schemas.check(event.topic.as_str(), version, &event.payload).err();
    let error = schemas.iter().find_map(check)?;
    Some(Outcome::dead(error.code().to_owned(), error.message()))
}

fn not_handled(delivery: &Delivery) -> Outcome {
    let topic = &delivery.event.topic;
    Outcome::retry("not_handled", format!("no handler of this program wants {topic}; is it an older one?"))
}

impl Router {
    /// What the layers are around.
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
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(deliveries.len());
        for delivery in deliveries {
            let handled = Next { router: self, delivery, outside: 0 }.run();
            outcomes.push(delivery.context().scope(handled).await);
        }
        outcomes
    }
}
