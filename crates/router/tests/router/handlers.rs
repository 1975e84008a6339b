//! Handlers by topic: which ones are called, and the outcomes of their errors.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use postbox_core::{Delivery, Headers, NewEvent, Outcome, State as EventState, TypedEvent};
use postbox_engine::{Relay, RelaySettings};
use postbox_router::{Event, Failure, IntoOutcome as _, Router, State};
use postbox_testkit::memory::{TestEnv, fast};
use postbox_testkit::warnings::Warnings;

#[derive(serde::Deserialize)]
struct Paid {
    order: i64,
}

impl TypedEvent for Paid {
    const TOPIC: &'static str = "order.paid";
}

#[derive(serde::Deserialize)]
struct Placed {
    order: i64,
}

impl TypedEvent for Placed {
    const TOPIC: &'static str = "order.placed";
    const SCHEMA_VERSION: u32 = 2;
}

const S: Duration = Duration::from_secs(1);

/// What handlers saw, in order.
type Seen = Arc<Mutex<Vec<String>>>;

fn see(seen: &Seen, what: String) {
    seen.lock().expect("no panic while it is held").push(what);
}

async fn mail(Event(paid): Event<Paid>, State(seen): State<Seen>) -> anyhow::Result<()> {
    see(&seen, format!("mail {}", paid.order));
    Ok(())
}

async fn ship(Event(placed): Event<Placed>, headers: Headers, State(seen): State<Seen>) -> Result<(), Failure> {
    see(&seen, format!("ship {} {}", placed.order, headers["to"]));
    Ok(())
}

async fn rest(delivery: Delivery, State(seen): State<Seen>) -> Result<(), Failure> {
    see(&seen, format!("rest {}", delivery.event.topic));
    Ok(())
}

fn paid(order: i64) -> NewEvent {
    NewEvent::json("order.paid", format!(r#"{{"order":{order}}}"#)).key(order.to_string())
}

fn placed(order: i64) -> NewEvent {
    let event = NewEvent::json("order.placed", format!(r#"{{"order":{order}}}"#)).key(order.to_string());
    event.header("schema-version", "2").header("to", "Rome")
}

fn relay(env: &TestEnv, router: Router) -> Relay {
    env.builder(env.subscription(), fast()).router(router).expect("it has a handler").build().expect("built")
}

/// Returns the code and error of the only event in `state`.
async fn left(env: &TestEnv, state: EventState) -> (String, String) {
    let mut records = env.list(state).await;
    assert_eq!(records.len(), 1, "one is {state}");
    let record = records.remove(0);
    (record.code.unwrap_or_default(), record.error.unwrap_or_default())
}

#[tokio::test(start_paused = true)]
async fn each_topic_has_its_handlers_and_nothing_else_is_read() {
    let env = TestEnv::with([paid(1), NewEvent::json("order.lost", "{}"), placed(2)]).await;
    let seen = Seen::default();
    let audit = async |Event(paid): Event<Paid>, State(seen): State<Seen>| {
        see(&seen, format!("audit {}", paid.order));
        Ok::<(), std::io::Error>(())
    };
    let shipping = Router::new().on(ship);
    let router = Router::new().on(mail).on(audit).merge(shipping).expect("merged").with_state(seen.clone());
    assert_eq!(router.topics().collect::<Vec<_>>(), ["order.paid", "order.placed"]);
    let drained = relay(&env, router).drain(None).await.expect("drained");
    assert_eq!((drained.fetched, drained.delivered), (2, 2), "the filter is the router's");
    let mut seen = seen.lock().expect("unpoisoned").clone();
    seen.sort();
    assert_eq!(seen, ["audit 1", "mail 1", "ship 2 Rome"]);
}

#[tokio::test(start_paused = true)]
async fn the_fallback_gets_what_nobody_wants_and_there_is_one() {
    let env = TestEnv::with([paid(1), NewEvent::json("order.lost", "{}")]).await;
    let seen = Seen::default();
    let router = || Router::new().on(mail).fallback(rest);
    let twice = router().merge(router()).err().expect("refused");
    assert_eq!(twice.code(), "fallback_twice");
    assert!(twice.message().contains("::rest"), "{twice}");
    let router = router().with_state(seen.clone());
    assert_eq!(relay(&env, router).drain(None).await.expect("drained").delivered, 2);
    let mut seen = seen.lock().expect("unpoisoned").clone();
    seen.sort();
    assert_eq!(seen, ["mail 1", "rest order.lost"]);
}

#[tokio::test(start_paused = true)]
async fn an_event_that_no_handler_wants_is_not_delivered() {
    // As with a sink, the subscription's filter stays as it was.
    let env = TestEnv::with([NewEvent::json("order.lost", "{}")]).await;
    let router = Router::new().on(mail).with_state(Seen::default());
    let relay = env.builder(env.subscription(), fast()).sink(Arc::new(router)).build().expect("built");
    assert_eq!(relay.drain(None).await.expect("drained").delivered, 0);
    let (code, error) = left(&env, EventState::Retrying).await;
    assert_eq!(code, "not_handled");
    assert!(error.contains("order.lost"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_read_is_dead_at_once_and_the_handler_is_not_called() {
    for (event, code) in [
        (NewEvent::json("order.paid", r#"{"order":"x"}"#), "payload_not_decoded"),
        (NewEvent::json("order.paid", "{}"), "payload_not_decoded"),
        (paid(1).header("schema-version", "2"), "schema_version_differs"),
        (NewEvent::json("order.placed", r#"{"order":1}"#), "schema_version_differs"),
    ] {
        let env = TestEnv::with([event, paid(7)]).await;
        let seen = Seen::default();
        let router = Router::new().on(mail).on(ship).with_state(seen.clone());
        assert_eq!(relay(&env, router).drain(None).await.expect("drained").delivered, 1);
        let (found, error) = left(&env, EventState::Dead).await;
        assert_eq!(found, code);
        assert!(error.contains("::mail: ") || error.contains("::ship: "), "{error}");
        assert_eq!(*seen.lock().expect("unpoisoned"), ["mail 7"]);
    }
}

/// Version 2 of [`Paid`].
#[derive(serde::Deserialize)]
struct PaidInCents {
    cents: i64,
}

impl TypedEvent for PaidInCents {
    const TOPIC: &'static str = Paid::TOPIC;
    const SCHEMA_VERSION: u32 = 2;
}

#[tokio::test(start_paused = true)]
async fn each_version_of_a_topic_has_its_handlers() {
    let cents = |cents: i64, version: &str| {
        NewEvent::json("order.paid", format!(r#"{{"cents":{cents}}}"#)).header("schema-version", version)
    };
    let env = TestEnv::with([paid(1), cents(5, "2"), cents(6, "3")]).await;
    let seen = Seen::default();
    let book = async |Event(paid): Event<PaidInCents>, State(seen): State<Seen>| {
        see(&seen, format!("book {}", paid.cents));
        Ok::<(), std::io::Error>(())
    };
    let router = Router::new().on(mail).on(book).with_state(seen.clone());
    assert_eq!(router.topics().collect::<Vec<_>>(), ["order.paid"]);
    assert_eq!(relay(&env, router).drain(None).await.expect("drained").delivered, 2);
    let (code, error) = left(&env, EventState::Dead).await;
    assert_eq!(code, "schema_version_differs");
    assert!(error.contains("\"3\""), "{error}");
    let mut seen = seen.lock().expect("unpoisoned").clone();
    seen.sort();
    assert_eq!(seen, ["book 5", "mail 1"]);
}

#[derive(Debug)]
enum MailError {
    Refused,
    Busy,
}

impl fmt::Display for MailError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the mail server says {self:?}")
    }
}

impl std::error::Error for MailError {}

/// An error caused by another error.
#[derive(Debug)]
struct Wrapped(MailError);

impl fmt::Display for Wrapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no mail was sent")
    }
}

impl std::error::Error for Wrapped {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

fn fail<E>(error: E) -> Result<(), E> {
    Err(error)
}

#[tokio::test(start_paused = true)]
async fn errors_are_retried_or_dead_by_their_type_wherever_it_is_in_the_chain() {
    use EventState::{Dead, Retrying};
    let refused = (Dead, "handler_refused", "the mail server says Refused");
    let busy = (Retrying, "handler_error", "the mail server says Busy");
    let cases = [
        (Router::new().on(async |_: Event<Paid>| fail(MailError::Refused)), refused),
        (Router::new().on(async |_: Event<Paid>| fail(MailError::Busy)), busy),
        (Router::new().on(async |_: Event<Paid>| fail(Wrapped(MailError::Refused))), refused),
        (Router::new().on(async |_: Event<Paid>| fail(anyhow::Error::new(MailError::Refused))), refused),
        (Router::new().on(async |_: Event<Paid>| fail(anyhow::Error::new(MailError::Busy).context("at noon"))), busy),
        (Router::new().on(async |_: Event<Paid>| fail(anyhow::Error::new(Wrapped(MailError::Refused)))), refused),
        (
            Router::new().on(async |_: Event<Paid>| fail(Failure::dead("address_unknown", "no such customer"))),
            (Dead, "address_unknown", "no such customer"),
        ),
        (
            Router::new().on(async |_: Event<Paid>| {
                fail(anyhow::anyhow!("no row").context(Failure::dead("address_unknown", "no such customer")))
            }),
            (Dead, "address_unknown", "no such customer"),
        ),
        (
            Router::new()
                .on(async |_: Event<Paid>| fail(anyhow::anyhow!("x").context(MailError::Refused).context("y"))),
            (Dead, "handler_refused", "the mail server says Refused: x"),
        ),
        (
            Router::new().on(async |_: Event<Paid>| fail(Failure::retry("printer", "on fire").after(S))),
            (Retrying, "printer", "on fire"),
        ),
    ];
    for (n, (router, (state, code, text))) in cases.into_iter().enumerate() {
        let env = TestEnv::with([paid(1)]).await;
        let router = router.dead_on(|error: &MailError| matches!(error, MailError::Refused));
        relay(&env, router).drain(None).await.expect("drained");
        let (found, error) = left(&env, state).await;
        assert_eq!(found, code, "case {n}");
        assert!(error.ends_with(text), "case {n}: {error}");
    }
}

#[test]
fn the_errors_of_a_function_without_a_router_are_judged_like_those_of_a_handler() {
    let unknown = || Failure::dead("address_unknown", "no such customer");
    let dead = || Outcome::dead("address_unknown", "no such customer");
    let retry = |text: &str| Outcome::retry("handler_error", text);
    let cases = [
        (fail(unknown()).into_outcome(), dead()),
        (fail(anyhow::Error::new(unknown()).context("at noon")).into_outcome(), dead()),
        (fail(anyhow::anyhow!("no row").context(unknown())).into_outcome(), dead()),
        (fail(Box::<dyn std::error::Error + Send + Sync>::from(unknown())).into_outcome(), dead()),
        (fail(anyhow::anyhow!("no row").context("at noon")).into_outcome(), retry("at noon: no row")),
        (fail(Wrapped(MailError::Busy)).into_outcome(), retry("no mail was sent: the mail server says Busy")),
        (fail("not yet").into_outcome(), retry("not yet")),
    ];
    for (n, (outcome, expected)) in cases.into_iter().enumerate() {
        assert_eq!(outcome, expected, "case {n}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_finds_its_service_down_costs_no_attempt() {
    let env = TestEnv::with([paid(1)]).await;
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let mail = move |_: Event<Paid>| {
        let is_down = counted.fetch_add(1, Ordering::SeqCst) < 6;
        async move { if is_down { fail(Failure::unavailable("mail_server_down", "nobody answers")) } else { Ok(()) } }
    };
    env.run_for(&relay(&env, Router::new().on(mail)), 60 * S).await;
    assert_eq!(calls.load(Ordering::SeqCst), 7, "more than the attempts it has");
    assert_eq!(env.stats().await.dispatched, 1);
}

#[tokio::test(start_paused = true)]
async fn the_rules_of_a_merged_router_hold_for_all() {
    let env = TestEnv::with([paid(1)]).await;
    let rules = Router::new().dead_on(|_: &MailError| true);
    let router = Router::new().on(async |_: Event<Paid>| fail(MailError::Refused)).merge(rules).expect("merged");
    relay(&env, router).drain(None).await.expect("drained");
    assert_eq!(left(&env, EventState::Dead).await.0, "handler_refused");
}

#[tokio::test(start_paused = true)]
async fn of_several_handlers_that_fail_one_that_may_still_succeed_counts() {
    let env = TestEnv::with([paid(1)]).await;
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let print = move |_: Event<Paid>| {
        counted.fetch_add(1, Ordering::SeqCst);
        async { fail(Failure::retry("printer", "on fire").after(60 * S)) }
    };
    let router = Router::new()
        .on(async |_: Event<Paid>| fail(Failure::dead("address_unknown", "no such customer")))
        .on(print)
        .on(async |_: Event<Paid>| fail(Failure::retry("mailbox", "full")))
        .on(async |_: Event<Paid>| Ok::<(), Failure>(()));
    let relay = relay(&env, router);
    // It waits as long as the one that asked for a wait.
    for calls_by_now in [1, 1, 2] {
        relay.drain(None).await.expect("drained");
        assert_eq!(calls.load(Ordering::SeqCst), calls_by_now);
        assert_eq!(left(&env, EventState::Retrying).await.0, "printer");
        tokio::time::sleep(35 * S).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_and_a_handler_that_hangs_cost_an_attempt_and_other_events_flow() {
    for (hangs, code) in [(false, "panic"), (true, "timeout")] {
        let env = TestEnv::with([paid(13), paid(14)]).await;
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let unlucky = move |Event(paid): Event<Paid>| {
            let first = counted.fetch_add(1, Ordering::SeqCst) < 2 && paid.order == 13;
            async move {
                match (first, hangs) {
                    (true, true) => std::future::pending().await,
                    (true, false) => panic!("order 13"),
                    (false, _) => Ok::<(), Failure>(()),
                }
            }
        };
        let relay = relay(&env, Router::new().on(unlucky));
        assert_eq!(relay.drain(None).await.expect("drained").delivered, 1);
        assert_eq!(left(&env, EventState::Retrying).await.0, code);
        tokio::time::sleep(5 * S).await;
        assert_eq!(relay.drain(None).await.expect("drained").delivered, 1);
        assert_eq!(calls.load(Ordering::SeqCst), 3);
    }
}

/// No time limit can end it. Its work is done, so it counts, once.
#[tokio::test]
async fn a_handler_that_blocks_its_thread_is_named_and_other_events_flow() {
    let (warnings, _hears) = Warnings::hear();
    let env = TestEnv::with([paid(13), paid(14)]).await;
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let blocking = move |Event(paid): Event<Paid>| {
        counted.fetch_add(1, Ordering::SeqCst);
        if paid.order == 13 {
            std::thread::sleep(Duration::from_millis(1_100));
        }
        async { Ok::<(), Failure>(()) }
    };
    let settings = RelaySettings { deliver_timeout: Duration::from_millis(500), ..fast() };
    let relay = env.builder(env.subscription(), settings).router(Router::new().on(blocking)).expect("it has a handler");
    assert_eq!(relay.build().expect("built").drain(None).await.expect("drained").delivered, 2);
    assert_eq!(calls.load(Ordering::SeqCst), 2);
    let warnings = warnings.all();
    assert!(warnings.iter().any(|it| it.contains("thread blocked") && it.contains("spawn_blocking")), "{warnings:?}");
}

#[tokio::test(start_paused = true)]
async fn a_router_without_handlers_is_refused() {
    let env = TestEnv::new().await;
    let error = env.builder(env.subscription(), fast()).router(Router::new()).err().expect("refused");
    assert_eq!(error.code(), "router_empty");
}
