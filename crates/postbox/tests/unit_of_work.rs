//! Events recorded by aggregates are appended with a commit, and not without one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use postbox::contract::Inspect as _;
use postbox::{
    Aggregate, Context, Delivery, LogName, MemoryStore, NewEvent, Postbox, Recorded, Relay, Subscription, handler_sink,
    test,
};
use serde::{Deserialize, Serialize};

#[derive(postbox::Event, Serialize, Deserialize, Debug, PartialEq)]
#[event(topic = "account.moved", key = "account")]
struct Moved {
    account: i64,
    cents: i64,
}

#[derive(Default)]
struct Account {
    id: i64,
    recorded: Recorded,
}

impl Account {
    fn new(id: i64) -> Self {
        Self { id, ..Self::default() }
    }

    fn moves(&mut self, cents: i64) {
        self.recorded.record(Moved { account: self.id, cents });
    }
}

impl Aggregate for Account {
    fn recorded(&mut self) -> &mut Recorded {
        &mut self.recorded
    }
}

fn transferred() -> Recorded {
    let (mut from, mut to) = (Account::new(1), Account::new(2));
    from.moves(-5);
    to.moves(5);
    let mut work = Recorded::new();
    work.take(&mut from).take(&mut to);
    work
}

async fn count(store: &MemoryStore) -> u64 {
    store.count(&LogName::outbox()).await.expect("counted").events
}

#[tokio::test]
async fn nothing_is_appended_but_by_a_commit_and_nothing_is_lost_without_one() {
    let store = test::store();
    let postbox = Postbox::new(store.clone());
    let work = transferred();
    // Rolled back.
    postbox.append(&mut store.begin(), &work).expect("appended");
    // A panic before the commit.
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let mut tx = store.begin();
        postbox.append(&mut tx, &work).expect("appended");
        panic!("as asked");
    }));
    assert!(panicked.is_err());
    // The append fails.
    let nowhere = Postbox::new(store.clone()).log(LogName::new("nowhere").expect("a name"));
    assert_eq!(nowhere.append(&mut store.begin(), &work).expect_err("refused").code(), "log_unknown");
    assert_eq!(count(&store).await, 0);
    let mut tx = store.begin();
    assert_eq!(postbox.append(&mut tx, &work).expect("appended").len(), 2);
    tx.commit();
    let moved = [Moved { account: 1, cents: -5 }, Moved { account: 2, cents: 5 }];
    assert_eq!(test::appended::<Moved>(&store).await.expect("read"), moved);
}

#[tokio::test]
async fn a_unit_of_work_carries_on_the_context_of_its_append() {
    let store = test::store();
    let work = transferred();
    let mut tx = store.begin();
    let append = || Postbox::new(store.clone()).append(&mut tx, &work);
    Context::new().actor("teller").scope_sync(append).expect("appended");
    tx.commit();
    assert!(
        work.events().expect("encoded").iter().all(|event: &NewEvent| event.headers.is_empty()),
        "only what is appended"
    );
    let see = async |delivery: Delivery| assert_eq!(delivery.event.actor(), Some("teller"));
    let reader = Subscription::new("reader".parse().expect("a name"), LogName::outbox());
    let sink = handler_sink(see);
    let relay = Relay::builder(Arc::new(store), reader).sink(Arc::new(sink)).build().expect("built");
    assert_eq!(relay.drain(None).await.expect("drained").delivered, 2);
}
