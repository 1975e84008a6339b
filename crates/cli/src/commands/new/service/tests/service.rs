//! Tests of the event handlers, without a database.

use postbox::Outcome;
use postbox::test::deliver;
use shop_service::{Mailer, OrderPlaced, handlers};

#[tokio::test]
async fn an_order_is_confirmed() {
    let placed = OrderPlaced { order: 1, mail: "ann@example.com".to_owned() };
    let outcome = deliver(&handlers(Mailer), placed).await.expect("a valid event");
    assert_eq!(outcome, Outcome::DELIVERED);
}

#[tokio::test]
async fn an_address_that_is_none_is_not_tried_again() {
    let placed = OrderPlaced { order: 2, mail: "nowhere".to_owned() };
    let outcome = deliver(&handlers(Mailer), placed).await.expect("a valid event");
    assert!(matches!(outcome, Outcome::Dead { .. }), "{outcome:?}");
}
