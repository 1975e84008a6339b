//! A payload that breaks the schema of its topic is neither appended nor handled.

use std::sync::Arc;

use postbox::router::{Event, Router, State};
use postbox::schema::JsonSchemas;
use postbox::{ErrorKind, NewEvent, Outcome, Postbox, test};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

#[derive(postbox::Event, schemars::JsonSchema, Serialize, Deserialize, Debug, PartialEq)]
#[event(topic = "order.paid", key = "order")]
struct OrderPaidV1 {
    order: i64,
}

#[derive(postbox::Event, schemars::JsonSchema, Serialize, Deserialize, Debug, PartialEq)]
#[event(topic = "order.paid", key = "order", schema_version = 2, from = "OrderPaidV1")]
struct OrderPaid {
    order: i64,
    #[schemars(range(min = 1))]
    cents: i64,
}

impl From<OrderPaidV1> for OrderPaid {
    fn from(OrderPaidV1 { order }: OrderPaidV1) -> Self {
        Self { order, cents: 100 }
    }
}

fn schemas() -> Arc<JsonSchemas> {
    let schemas = JsonSchemas::new().add_type::<OrderPaidV1>().and_then(|schemas| schemas.add_type::<OrderPaid>());
    Arc::new(schemas.expect("schemas"))
}

fn paid(version: &str, payload: &str) -> NewEvent {
    NewEvent::json("order.paid", payload.to_owned()).header("schema-version", version)
}

#[tokio::test]
async fn what_breaks_a_schema_is_not_appended_and_the_transaction_goes_on() {
    let store = test::store();
    let postbox = Postbox::new(store.clone()).schemas(schemas());
    let mut tx = store.begin();
    let unversioned = NewEvent::json("audit", "of any form").header("schema-version", "2024-01");
    postbox.append(&mut tx, unversioned).expect("no schema");
    let free = OrderPaid { order: 1, cents: 0 };
    let refused = [
        postbox.append(&mut tx, [OrderPaid { order: 1, cents: 5 }, free]),
        postbox.append(&mut tx, paid("2", r#"{"order":1}"#)),
        postbox.append(&mut tx, NewEvent::json("order.paid", "no JSON")),
    ];
    for refused in refused {
        let error = refused.expect_err("refused");
        assert_eq!((error.kind(), error.code()), (ErrorKind::Invalid, "schema_violated"), "{error}");
    }
    let error = postbox.append(&mut tx, paid("two", r#"{"order":1,"cents":5}"#)).expect_err("refused");
    assert_eq!((error.kind(), error.code()), (ErrorKind::Invalid, "schema_version_invalid"), "{error}");
    postbox.append(&mut tx, OrderPaid { order: 2, cents: 5 }).expect("as it says");
    postbox.append(&mut tx, OrderPaidV1 { order: 3 }).expect("as it says");
    tx.commit();
    let paid = [OrderPaid { order: 2, cents: 5 }, OrderPaid { order: 3, cents: 100 }];
    assert_eq!(test::appended::<OrderPaid>(&store).await.expect("read"), paid);
    test::assert_appended!(&store, NewEvent::json("audit", "of any form"));
}

#[tokio::test]
async fn what_breaks_a_schema_is_dead_and_no_handler_sees_it() {
    type Seen = mpsc::UnboundedSender<(i64, i64)>;
    let (seen, mut saw) = mpsc::unbounded_channel();
    let see = async |Event(paid): Event<OrderPaid>, State(seen): State<Seen>| seen.send((paid.order, paid.cents));
    let router = Router::new().on(see).with_state(seen).schemas(schemas());
    let deliver = |event: NewEvent| test::deliver(&router, event);
    for fine in [paid("2", r#"{"order":1,"cents":5}"#), paid("1", r#"{"order":2}"#)] {
        assert_eq!(deliver(fine).await.expect("an event"), Outcome::DELIVERED);
    }
    let dead = deliver(paid("2", r#"{"order":"secret","cents":0}"#)).await.expect("an event");
    let Outcome::Dead { code, error } = &dead else { panic!("{dead:?}") };
    assert_eq!(code, "schema_violated");
    for named in ["/order (type): ", "/cents (minimum): "] {
        assert!(error.contains(named), "{error}");
    }
    assert!(!error.contains("secret"), "{error}");
    let older = deliver(paid("1", "{}")).await.expect("an event");
    assert!(matches!(&older, Outcome::Dead { code, .. } if code == "schema_violated"), "by its own version: {older:?}");
    drop(router);
    assert_eq!((saw.recv().await, saw.recv().await, saw.recv().await), (Some((1, 5)), Some((2, 100)), None));
}
