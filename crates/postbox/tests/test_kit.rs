//! The promises of the module for users' tests, on an in-memory store and on a real one.

use std::sync::Arc;
use std::time::Duration;

use postbox::contract::{Inspect as _, Store};
use postbox::router::{Event, Router};
use postbox::sqlite::{SqliteConfig, SqliteStore};
use postbox::{Append as _, Error, ErrorKind, LogName, Migrate as _, NewEvent, Outcome, Service, test};
use postbox_testkit::memory::FailsAt;
use serde::{Deserialize, Serialize};

#[derive(postbox::Event, Serialize, Deserialize, Debug, PartialEq)]
#[event(topic = "order.paid", key = "order")]
struct OrderPaid {
    order: i64,
}

/// The key is an argument of the macro that has the derive.
macro_rules! shipped {
    ($key:literal) => {
        #[derive(postbox::Event, Serialize)]
        #[event(topic = "order.shipped", key = $key)]
        struct OrderShipped {
            order: i64,
        }
    };
}

shipped!("order");

#[tokio::test]
async fn a_macro_can_be_given_the_key_of_an_event() {
    let store = test::store();
    let mut tx = store.begin();
    postbox::Postbox::new(store.clone()).append(&mut tx, OrderShipped { order: 7 }).expect("appended");
    tx.commit();
    test::assert_appended!(&store, NewEvent::json("order.shipped", r#"{"order":7}"#).key("7"));
}

async fn appends_and_is_asked(store: impl Store + Clone) {
    let outbox = LogName::outbox();
    let paid = |order: i64| NewEvent::json("order.paid", format!(r#"{{"order":{order}}}"#)).key(order.to_string());
    let (other, late) = (NewEvent::json("audit", "{}"), paid(9).deliver_at(jiff::Timestamp::MAX));
    store.append(&outbox, &[paid(3), other, late, paid(1)]).await.expect("appended");
    store.append(&outbox, &[paid(2)]).await.expect("appended");
    for _ in 0..2 {
        let appended = test::appended::<OrderPaid>(&store).await.expect("read");
        assert_eq!(appended, [3, 1, 2].map(|order| OrderPaid { order }));
    }
    assert_eq!(store.subscriptions().await.expect("listed"), [], "it leaves no subscription");
    store.append(&outbox, &[NewEvent::json("order.paid", "[]")]).await.expect("appended");
    let error = test::appended::<OrderPaid>(&store).await.expect_err("not of the type");
    assert_eq!(error.code(), "payload_not_decoded");
    assert_eq!(store.subscriptions().await.expect("listed"), [], "it leaves no subscription");
}

#[tokio::test]
async fn what_was_appended_can_be_asked_for_again_and_again() {
    appends_and_is_asked(test::store()).await;
    let folder = tempfile::tempdir().expect("a folder");
    let store = SqliteStore::open(SqliteConfig::new(folder.path().join("test.db"))).await.expect("opened");
    store.up().await.expect("migrated");
    appends_and_is_asked(store).await;
}

#[tokio::test]
async fn a_read_that_fails_leaves_no_subscription() {
    let down = || Some(Error::new(ErrorKind::Unavailable, "acquire", "store_down", "the cable is cut"));
    let store = test::store().client(Some(Arc::new(FailsAt("acquire", down))));
    let error = test::appended::<OrderPaid>(&store).await.expect_err("no lease");
    assert_eq!(error.code(), "store_down");
    assert_eq!(store.subscriptions().await.expect("listed"), []);
}

#[tokio::test]
async fn what_is_not_committed_was_not_appended() {
    let store = test::store();
    let mut tx = store.begin();
    postbox::Postbox::new(store.clone()).append(&mut tx, OrderPaid { order: 1 }).expect("appended");
    assert_eq!(test::appended::<OrderPaid>(&store).await.expect("read"), []);
    tx.commit();
    assert_eq!(test::appended::<OrderPaid>(&store).await.expect("read"), [OrderPaid { order: 1 }]);
}

#[tokio::test]
async fn what_was_not_appended_is_named_beside_what_was() {
    let store = test::store();
    let expected = |events| test::check_appended(&store, events);
    let event = |topic: &str, payload: &str| NewEvent::json(topic, payload.to_owned());
    let nothing = expected(vec![event("audit", "{}")]).await.expect_err("not there");
    assert!(nothing.ends_with("appended:\n  nothing"), "{nothing}");
    test::assert_appended!(&store, Vec::<NewEvent>::new());

    let paid = event("order.paid", r#"{"order":1}"#).key("1").actor("user:17");
    let events = [event("audit", "{}"), paid, event("mail.due", "no JSON").tenant("acme")];
    store.append(&LogName::outbox(), &events).await.expect("appended");
    test::assert_appended!(&store, OrderPaid { order: 1 });
    test::assert_appended!(&store, &events);
    test::assert_appended!(&store, [event("audit", "{ }"), event("mail.due", "no JSON")]);
    let text = expected(vec![event("order.paid", r#"{"order":2}"#).key("2")]).await.expect_err("another");
    let lines = [
        "not appended, or not in this order:",
        r#"  order.paid key=2 {"order":2}"#,
        "expected:",
        r#"  order.paid key=2 {"order":2}"#,
        "appended:",
        "  audit {}",
        r#"  order.paid key=1 postbox-actor=user:17 {"order":1}"#,
        "  mail.due tenant=acme no JSON",
    ];
    assert_eq!(text, lines.join("\n"));
    for other in [
        vec![events[1].clone(), events[0].clone()],
        vec![events[0].clone(), events[0].clone()],
        vec![event("audit", "[]")],
        vec![event("mail.due", "no json")],
        vec![event("audit", "{}").key("1")],
        vec![event("audit", "{}").tenant("acme")],
        vec![event("audit", "{}").kind("integration")],
        vec![event("audit", "{}").source("billing")],
        vec![event("audit", "{}").aggregate("order")],
        vec![event("audit", "{}").version(1)],
        vec![event("audit", "{}").header("a", "b")],
        vec![NewEvent::new("audit", "{}", "text/plain")],
    ] {
        expected(other).await.expect_err("another");
    }
}

#[tokio::test]
async fn a_handler_says_what_becomes_of_one_event() {
    let even = async |Event(paid): Event<OrderPaid>| {
        if paid.order % 2 == 0 { Ok(()) } else { Err(std::io::Error::other("odd")) }
    };
    let router = Router::new().on(even);
    assert_eq!(test::deliver(&router, OrderPaid { order: 2 }).await.expect("an event"), Outcome::DELIVERED);
    let odd = test::deliver(&router, &OrderPaid { order: 1 }).await.expect("an event");
    assert!(matches!(odd, Outcome::Retry { ref code, .. } if code == "handler_error"), "{odd:?}");
    let unknown = test::deliver(&router, NewEvent::json("order.lost", "{}")).await.expect("an event");
    assert!(matches!(unknown, Outcome::Retry { ref code, .. } if code == "not_handled"), "{unknown:?}");
    let error = test::deliver(&router, NewEvent::json("no topic", "{}")).await.expect_err("no event");
    assert_eq!(error.code(), "topic_invalid");
}

#[tokio::test(start_paused = true)]
async fn a_paused_clock_steps_to_the_time_of_an_event() {
    let store = test::store();
    let hour = Duration::from_secs(3_600);
    let late = NewEvent::json("order.paid", r#"{"order":1}"#).deliver_at(jiff::Timestamp::UNIX_EPOCH + hour);
    store.append(&LogName::outbox(), &[late]).await.expect("appended");
    let (seen, mut saw) = tokio::sync::mpsc::unbounded_channel();
    let see = async |Event(paid): Event<OrderPaid>, postbox::router::State(seen): postbox::router::State<Seen>| {
        seen.send(paid.order)
    };
    type Seen = tokio::sync::mpsc::UnboundedSender<i64>;
    let router = Router::new().on(see).with_state(seen);
    let service = Service::builder(store).outbox("mails", router).build().expect("built");
    let began = tokio::time::Instant::now();
    service.run_until(async { assert_eq!(saw.recv().await, Some(1)) }).await.expect("stopped");
    assert!((hour..hour * 2).contains(&began.elapsed()), "{:?}", began.elapsed());
}

fn moment<'de, D: serde::Deserializer<'de>>(value: D) -> Result<postbox::Timestamp, D::Error> {
    String::deserialize(value)?.parse().map_err(serde::de::Error::custom)
}

#[derive(postbox::Event, Deserialize)]
#[event(topic = "door.opened")]
struct DoorOpened {
    #[serde(deserialize_with = "moment")]
    at: postbox::Timestamp,
}

/// Outcomes go into logs. The parser of a field quotes what it cannot read.
#[tokio::test]
async fn an_outcome_says_nothing_of_the_payload() {
    let open = async |Event(opened): Event<DoorOpened>| {
        assert_eq!(opened.at, postbox::Timestamp::UNIX_EPOCH);
        Ok::<(), std::io::Error>(())
    };
    let router = Router::new().on(open);
    let outcome = async |payload: &'static str| {
        test::deliver(&router, NewEvent::json("door.opened", payload)).await.expect("one event")
    };
    assert_eq!(outcome(r#"{"at":"1970-01-01T00:00:00Z"}"#).await, Outcome::DELIVERED);
    for (payload, said) in
        [(r#"{"at":"1970-01-01T00:00:00Z secret"}"#, "line 1, column "), ("{}", "missing field `at`")]
    {
        let Outcome::Dead { error, .. } = outcome(payload).await else { panic!("it cannot be read") };
        assert!(error.contains(said) && !error.contains("secret") && !error.contains("1970"), "{error}");
    }
}
