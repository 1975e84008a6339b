//! The sink suite against a sink in memory, with and without the `prefix` claim.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use postbox_core::{Capabilities, Delivery, NewEvent, Outcome, Sink};
use postbox_testkit::conformance::SinkFixture;

const WORKS: u8 = 0;
const FAILS: u8 = 1;
const AWAY: u8 = 2;

#[derive(Clone)]
struct Shelf {
    capabilities: Capabilities,
    condition: Arc<AtomicU8>,
    arrived: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Shelf {
    fn new(capabilities: Capabilities) -> Self {
        Self { capabilities, condition: Arc::new(AtomicU8::new(WORKS)), arrived: Arc::default() }
    }
}

#[async_trait]
impl Sink for Shelf {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        let mut failed = HashSet::new();
        let one = |delivery: &&Delivery| {
            let event = &delivery.event;
            if event.key.as_ref().is_some_and(|key| failed.contains(key)) {
                return Outcome::retry("behind_failure", "an earlier event of its key failed in this call");
            }
            match self.condition.load(Relaxed) {
                AWAY => return Outcome::unavailable("nobody_home", ""),
                FAILS => return Outcome::retry("shelf_shaky", ""),
                _ if event.header("poison").is_some() => {
                    failed.extend(event.key.clone());
                    return Outcome::dead("poison", "");
                }
                _ => self.arrived.lock().expect("no panic while held").push(event.payload.to_vec()),
            }
            Outcome::DELIVERED
        };
        deliveries.iter().map(one).collect()
    }
}

#[async_trait]
impl SinkFixture for Shelf {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::new(self.clone())
    }

    async fn arrived(&self) -> Vec<Vec<u8>> {
        self.arrived.lock().expect("no panic while held").clone()
    }

    fn poison(&self, event: NewEvent) -> Option<NewEvent> {
        Some(event.header("poison", "yes"))
    }

    async fn fail(&self, failing: bool) -> bool {
        self.condition.store(if failing { FAILS } else { WORKS }, Relaxed);
        true
    }

    async fn take_down(&self) -> bool {
        self.condition.store(AWAY, Relaxed);
        true
    }
}

mod one_by_one {
    async fn fixture() -> super::Shelf {
        super::Shelf::new(super::Capabilities::default())
    }
    postbox_testkit::sink_suite!(fixture);
}

mod in_batches_with_prefix {
    async fn fixture() -> super::Shelf {
        super::Shelf::new(super::Capabilities { batch_max: 7, concurrency: 1, prefix: true })
    }
    postbox_testkit::sink_suite!(fixture);
}
