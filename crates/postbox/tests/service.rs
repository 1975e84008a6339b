//! A service in a user's program: the promises of its documentation.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use postbox::contract::{Admin as _, Inspect as _, Maintain as _, Store as _};
use postbox::memory::{Call, Wire};
use postbox::postgres::{PostgresConfig, PostgresStore};
use postbox::router::{Event, Router, State};
use postbox::{
    Append as _, Error, ErrorKind, LogName, MemoryStore, Migrate as _, NewEvent, Postbox, Relay, Service, Subscription,
    SubscriptionName, TypedEvent as _, test::store,
};
use postbox_testkit::warnings::Warnings;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

/// Longest wait, in simulated time like all waits here.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(postbox::Event, Serialize, Deserialize)]
#[event(topic = "order.paid", key = "order")]
struct OrderPaid {
    order: i64,
}

type Seen = mpsc::UnboundedSender<i64>;

fn pay(store: &MemoryStore, order: i64) {
    let mut tx = store.begin();
    Postbox::new(store.clone()).append(&mut tx, OrderPaid { order }).expect("appended");
    tx.commit();
}

/// Returns a router that reports the orders it sees.
fn reporting() -> (Router, mpsc::UnboundedReceiver<i64>) {
    let (seen, saw) = mpsc::unbounded_channel();
    let report = async |Event(paid): Event<OrderPaid>, State(seen): State<Seen>| seen.send(paid.order);
    (Router::new().on(report).with_state(seen), saw)
}

fn running(service: &Service) -> tokio::task::JoinHandle<postbox::Result<()>> {
    let service = service.clone();
    tokio::spawn(async move { service.run_until(std::future::pending::<()>()).await })
}

async fn soon<T>(what: impl Future<Output = T>) -> T {
    timeout(PATIENCE, what).await.expect("in time")
}

async fn next(saw: &mut mpsc::UnboundedReceiver<i64>) -> i64 {
    soon(saw.recv()).await.expect("the handler is there")
}

fn code(result: postbox::Result<impl Sized>) -> String {
    result.err().map_or_else(|| "ok".to_owned(), |error: Error| error.code().to_owned())
}

#[tokio::test(start_paused = true)]
async fn every_subscription_sees_what_is_appended_until_the_signal() {
    let store = store();
    let bus = LogName::new("shop").expect("a name");
    store.create_log(&bus).await.expect("made");
    let ((mails, mut mailed), (counts, mut counted), (news, mut heard)) = (reporting(), reporting(), reporting());
    let service = Service::builder(store.clone())
        .outbox("mails", mails)
        .outbox("counts", counts)
        .subscription("shop", "listener", news)
        .build()
        .expect("built");
    let (signal, signalled) = oneshot::channel::<()>();
    let serving = tokio::spawn({
        let service = service.clone();
        async move { service.run_until(signalled).await }
    });
    soon(service.started()).await.expect("ready");
    pay(&store, 1);
    let paid = NewEvent::json(OrderPaid::TOPIC, r#"{"order":2}"#);
    store.append(&bus, &[paid]).await.expect("appended");
    assert_eq!((next(&mut mailed).await, next(&mut counted).await, next(&mut heard).await), (1, 1, 2));
    signal.send(()).expect("it waits for the signal");
    soon(serving).await.expect("no panic").expect("stopped");
    soon(service.stopping()).await;
    let delivered: Vec<_> = service.metrics().map(|(name, metrics)| (name.as_str(), metrics.delivered())).collect();
    assert_eq!(delivered, [("mails", 1), ("counts", 1), ("listener", 1)]);
}

#[tokio::test(start_paused = true)]
async fn a_stop_finishes_what_is_in_flight_and_repeats_nothing() {
    let store = store();
    let (began, mut begun) = mpsc::unbounded_channel();
    let (finish, finished) = oneshot::channel::<()>();
    let finished = Arc::new(Mutex::new(Some(finished)));
    type Wait = (mpsc::UnboundedSender<()>, Arc<Mutex<Option<oneshot::Receiver<()>>>>);
    let slow = async |_: Event<OrderPaid>, State((began, finished)): State<Wait>| {
        began.send(()).expect("somebody waits for it");
        let finished = finished.lock().expect("no panic").take().expect("called once");
        finished.await
    };
    let router = Router::new().on(slow).with_state((began, finished));
    let service = Service::builder(store.clone()).outbox("slow", router).build().expect("built");
    let serving = running(&service);
    pay(&store, 1);
    soon(begun.recv()).await.expect("called");
    service.stop();
    service.stop();
    assert_eq!(code(service.ready().await), "service_stopping");
    assert!(!serving.is_finished());
    finish.send(()).expect("the handler waits");
    soon(serving).await.expect("no panic").expect("stopped");

    let (again, mut saw) = reporting();
    let service = Service::builder(store.clone()).outbox("slow", again).build().expect("built");
    let serving = running(&service);
    soon(service.started()).await.expect("ready");
    pay(&store, 2);
    assert_eq!(next(&mut saw).await, 2);
    service.stop();
    soon(serving).await.expect("no panic").expect("stopped");
}

#[tokio::test(start_paused = true)]
async fn a_stop_before_the_start_is_one_and_a_service_runs_once() {
    let service = Service::builder(store()).build().expect("built");
    assert_eq!(code(service.ready().await), "service_starting");
    service.stop();
    soon(running(&service)).await.expect("no panic").expect("stopped");
    assert_eq!(code(soon(service.started()).await), "service_stopping");
    assert_eq!(code(soon(running(&service)).await.expect("no panic")), "service_ran");

    let service = Service::builder(store()).build().expect("built");
    let first = running(&service);
    soon(service.started()).await.expect("ready");
    assert_eq!(code(soon(running(&service)).await.expect("no panic")), "service_ran");
    service.ready().await.expect("the first run goes on");
    service.stop();
    soon(first).await.expect("no panic").expect("stopped");
}

#[tokio::test(start_paused = true)]
async fn a_run_that_is_dropped_says_so_to_who_stops_with_it() {
    let store = store();
    let (router, mut saw) = reporting();
    let service = Service::builder(store.clone()).outbox("mails", router).build().expect("built");
    let serving = running(&service);
    soon(service.started()).await.expect("ready");
    pay(&store, 1);
    assert_eq!(next(&mut saw).await, 1);
    serving.abort();
    soon(service.stopping()).await;
    drop(service);
    assert_eq!(soon(saw.recv()).await, None, "nothing of it is left at work");
}

/// A store that cannot be reached at first.
struct Away(AtomicBool);

#[async_trait]
impl Wire for Away {
    async fn carry(&self, call: Arc<Call>) -> postbox::Result<()> {
        if self.0.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unavailable, call.operation, "store_unreachable", "nobody answers"));
        }
        call.execute();
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_is_waited_for() {
    let away = Arc::new(Away(AtomicBool::new(true)));
    let store = store();
    pay(&store, 1);
    for comes in [false, true] {
        let (router, mut saw) = reporting();
        let client = store.client(Some(away.clone()));
        let service = Service::builder(client).outbox("mails", router).build().expect("built");
        let serving = running(&service);
        assert!(timeout(PATIENCE, service.started()).await.is_err(), "it waits");
        if comes {
            away.0.store(false, Ordering::SeqCst);
            soon(service.started()).await.expect("ready");
            assert_eq!(next(&mut saw).await, 1);
        }
        service.stop();
        soon(serving).await.expect("no panic").expect("stopped");
    }
}

#[tokio::test(start_paused = true)]
async fn a_database_that_is_not_up_yet_is_waited_for() {
    let nobody = PostgresConfig::new("postgres://postgres@127.0.0.1:1/postgres");
    let store = PostgresStore::new(nobody).expect("a URL");
    let service = Service::builder(store).build().expect("built");
    let serving = running(&service);
    assert!(timeout(PATIENCE, service.started()).await.is_err(), "it waits");
    assert_eq!(code(service.ready().await), "service_starting");
    service.stop();
    soon(serving).await.expect("no panic").expect("stopped");
}

#[tokio::test(start_paused = true)]
async fn what_is_wrong_for_good_ends_the_start() {
    let (router, _) = reporting();
    let service = Service::builder(store()).subscription("nowhere", "mails", router).build().expect("built");
    assert_eq!(code(soon(running(&service)).await.expect("no panic")), "log_unknown");
    soon(service.stopping()).await;

    let store = store();
    store.down(true).await.expect("removed");
    let service = Service::builder(store).build().expect("built");
    assert_eq!(code(soon(running(&service)).await.expect("no panic")), "schema_missing");
    assert_eq!(code(soon(service.started()).await), "schema_missing");
}

/// Starts and stops a service with this subscription, and returns the warnings.
async fn warned(store: &MemoryStore, name: &str) -> Vec<String> {
    let (warnings, _hears) = Warnings::hear();
    let (router, _saw) = reporting();
    let service = Service::builder(store.clone()).outbox(name, router).build().expect("built");
    let serving = running(&service);
    soon(service.started()).await.expect("ready");
    service.stop();
    soon(serving).await.expect("no panic").expect("stopped");
    warnings.all()
}

/// Its handlers would get the whole log, and the former name would hold retention back.
#[tokio::test(start_paused = true)]
async fn a_new_name_beside_others_is_named_at_the_start() {
    let store = store();
    for (name, is_new) in [("mails", false), ("letters", true), ("letters", false)] {
        let lines = warned(&store, name).await;
        assert_eq!(lines.len(), usize::from(is_new), "{lines:?}");
        for line in lines {
            assert!(line.contains("subscription created") && line.contains("subscription=letters "), "{line}");
            assert!(line.contains("mails"), "{line}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_subscription_that_was_removed_is_not_ready_and_the_others_go_on() {
    let store = store();
    let ((mails, _mailed), (counts, mut counted)) = (reporting(), reporting());
    let service =
        Service::builder(store.clone()).outbox("mails", mails).outbox("counts", counts).build().expect("built");
    let serving = running(&service);
    soon(service.started()).await.expect("ready");
    let mails: SubscriptionName = "mails".parse().expect("a name");
    let infos = store.subscriptions().await.expect("listed");
    let generation = infos.iter().find(|info| info.name == mails).expect("it is there").generation;
    store.remove(&mails, generation).await.expect("removed");
    let unready = soon(async {
        loop {
            match service.ready().await {
                Ok(()) => tokio::time::sleep(Duration::from_millis(10)).await,
                Err(error) => return error,
            }
        }
    });
    let unready = unready.await;
    assert_eq!((unready.kind(), unready.code()), (ErrorKind::Unavailable, "subscription_removed"), "{unready}");
    assert!(unready.message().starts_with("mails: "), "{unready}");
    pay(&store, 1);
    assert_eq!(next(&mut counted).await, 1);
    service.stop();
    soon(serving).await.expect("no panic").expect("stopped");
}

#[tokio::test(start_paused = true)]
async fn delivered_events_go_after_their_time_without_being_asked_to() {
    for (age, kept) in [(Duration::from_secs(60), 0), (Duration::from_secs(86_400), 1)] {
        let store = store();
        let (router, mut saw) = reporting();
        let service = Service::builder(store.clone()).outbox("mails", router).keep_events(age).build().expect("built");
        let serving = running(&service);
        pay(&store, 1);
        assert_eq!(next(&mut saw).await, 1);
        // Two sweeps, an hour apart.
        tokio::time::sleep(Duration::from_secs(7_300)).await;
        assert_eq!(store.count(&LogName::outbox()).await.expect("counted").events, kept);
        service.stop();
        soon(serving).await.expect("no panic").expect("stopped");
    }
}

/// Its first sweep and its first search for unrouted events panic.
#[derive(Default)]
struct PanicsOnce(Mutex<Vec<&'static str>>);

#[async_trait]
impl Wire for PanicsOnce {
    async fn carry(&self, call: Arc<Call>) -> postbox::Result<()> {
        if ["prune", "note_unrouted"].contains(&call.operation) {
            let mut seen = self.0.lock().expect("no panic while held");
            let is_first = !seen.contains(&call.operation);
            seen.push(call.operation);
            drop(seen);
            assert!(!is_first, "planted");
        }
        call.execute();
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_retention_or_of_the_search_ends_neither_it_nor_the_service() {
    let wire = Arc::new(PanicsOnce::default());
    let (router, mut saw) = reporting();
    let store = store();
    let client = store.client(Some(wire.clone()));
    let service = Service::builder(client).outbox("mails", router).build().expect("built");
    let serving = running(&service);
    // Two sweeps, an hour apart.
    tokio::time::sleep(Duration::from_secs(7_300)).await;
    for operation in ["prune", "note_unrouted"] {
        let calls = wire.0.lock().expect("no panic").iter().filter(|it| **it == operation).count();
        assert!(calls > 1, "{operation}: {calls}");
    }
    pay(&store, 1);
    assert_eq!(next(&mut saw).await, 1);
    service.stop();
    soon(serving).await.expect("no panic").expect("stopped");
}

#[tokio::test(start_paused = true)]
async fn dead_events_are_given_up_only_where_that_was_asked_for() {
    const DAY: Duration = Duration::from_secs(86_400);
    let runs_for = async |builder: postbox::ServiceBuilder, time: Duration| {
        let service = builder.outbox("mails", reporting().0).build().expect("built");
        let serving = running(&service);
        tokio::time::sleep(time).await;
        service.stop();
        soon(serving).await.expect("no panic").expect("stopped");
    };
    let (store, name): (_, SubscriptionName) = (store(), "mails".parse().expect("a name"));
    let builder = || Service::builder(store.clone());
    let counts = async || {
        let stats = store.stats(&name).await.expect("counted");
        (stats.dead, stats.discarded)
    };
    store.append(&LogName::outbox(), &[NewEvent::json("order.paid", "{}")]).await.expect("appended");
    runs_for(builder(), PATIENCE).await;
    tokio::time::sleep(DAY).await;
    // Each run makes one sweep.
    let hour = Duration::from_secs(3_700);
    runs_for(builder(), hour).await;
    runs_for(builder().keep_dead(2 * DAY), hour).await;
    assert_eq!(counts().await, (1, 0));
    runs_for(builder().keep_dead(DAY), hour).await;
    assert_eq!(counts().await, (0, 1));
}

#[tokio::test(start_paused = true)]
async fn a_builder_refuses_what_cannot_work() {
    let built = |builder: postbox::ServiceBuilder| code(builder.build());
    let builder = || Service::builder(store());
    assert_eq!(built(builder().outbox("", reporting().0)), "name_empty");
    assert_eq!(built(builder().outbox("mails", Router::new())), "router_empty");
    assert_eq!(built(builder().outbox("mails", reporting().0).inbox("mails", reporting().0)), "subscription_twice");
    assert_eq!(built(builder().remember_ids(Duration::from_secs(60))), "message_ids_age_too_short");
    assert_eq!(built(builder().keep_dead(Duration::from_secs(3_600))), "dead_age_too_short");
    let name = "own".parse().expect("a name");
    let idle = Relay::builder(Arc::new(store()), Subscription::new(name, LogName::outbox())).build().expect("built");
    assert_eq!(built(builder().relay(idle)), "ok");
}
