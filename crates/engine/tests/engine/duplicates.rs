//! Answers that say "I already had this one" are counted by the source of the event, on every path
//! by which such an answer can come.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Capabilities, Delivery, NewEvent, Outcome, Sink, State};
use postbox_engine::{Relay, RelayBuilder};

use postbox_testkit::memory::{self, TestEnv, event, fast};

const S: Duration = Duration::from_secs(1);
const HAD: Outcome = Outcome::DUPLICATE;

/// Already has all events. Takes this long to say so for the first event.
struct Had(Duration);

#[async_trait]
impl Sink for Had {
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        if deliveries.iter().any(|delivery| memory::version(delivery) == 0) {
            tokio::time::sleep(self.0).await;
        }
        vec![HAD; deliveries.len()]
    }
}

/// Builds a relay that counts one of the sources by name.
fn built(builder: RelayBuilder) -> Relay {
    let relay = builder.build().expect("built");
    relay.metrics().name_sources(["stripe".to_owned()]);
    relay
}

/// Two events of one source, one of another, and one without a source.
fn events() -> [NewEvent; 4] {
    [event(1, 0).source("stripe"), event(2, 1).source("stripe"), event(3, 2).source("github"), event(4, 3)]
}

fn assert_counted(relay: &Relay) {
    let expected = [(None, 1), (Some("other".to_owned()), 1), (Some("stripe".to_owned()), 2)];
    assert_eq!(relay.metrics().duplicates_by_source(), BTreeMap::from(expected));
    assert_eq!((relay.metrics().duplicates(), relay.metrics().delivered()), (4, 4));
}

#[tokio::test(start_paused = true)]
async fn of_a_sink() {
    let env = TestEnv::with(events()).await;
    let relay = built(env.builder(env.subscription(), fast()).sink(Arc::new(Had(Duration::ZERO))));
    assert_eq!(relay.drain(None).await.expect("drained").delivered, 4);
    assert_counted(&relay);
}

#[tokio::test(start_paused = true)]
async fn of_a_sink_whose_answer_outlives_its_batch() {
    let env = TestEnv::with(events()).await;
    let relay = built(env.builder(env.subscription(), fast()).sink(Arc::new(Had(8 * S))));
    let watching = async {
        tokio::time::sleep(4 * S).await;
        let waiting = env.list(State::Retrying).await;
        assert_eq!(waiting[0].code.as_deref(), Some("in_flight"), "its call outlived its batch");
    };
    tokio::join!(env.run_for(&relay, 12 * S), watching);
    assert_counted(&relay);
}

#[tokio::test(start_paused = true)]
async fn of_a_handler_in_the_transaction() {
    let env = TestEnv::with(events()).await;
    let apply = env.store.apply(|_, _| HAD);
    let relay = built(env.builder(env.subscription(), fast()).apply(apply));
    assert_eq!(relay.drain(None).await.expect("drained").delivered, 4);
    assert_counted(&relay);
}
