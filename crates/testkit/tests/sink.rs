//! The sink suite against a sink in memory, with and without the `prefix` claim.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use postbox_core::{Capabilities, Delivery, NewEvent, Outcome, Sink};
use postbox_testkit::conformance::{Attempt, Destination, SinkFixture, SinkTraits};

/// Larger payloads are refused.
const PAYLOAD_BYTES_MAX: usize = 64 * 1024;

#[derive(Clone)]
struct Shelf {
    capabilities: Capabilities,
    state: Arc<Mutex<Destination>>,
    attempts: Arc<Mutex<Vec<Attempt>>>,
}

impl Shelf {
    fn new(capabilities: Capabilities) -> Self {
        Self { capabilities, state: Arc::new(Mutex::new(Destination::Works)), attempts: Arc::default() }
    }
}

#[async_trait]
impl Sink for Shelf {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    async fn deliver(&self, deliveries: &[&Delivery]) -> Vec<Outcome> {
        let state = *self.state.lock().expect("no panic while held");
        let mut failed = HashSet::new();
        let one = |delivery: &&Delivery| {
            let event = &delivery.event;
            if event.key.as_ref().is_some_and(|key| failed.contains(key)) {
                return Outcome::retry("behind_failure", "an earlier event of its key failed in this call");
            }
            let outcome = match state {
                Destination::Down => return Outcome::unavailable("nobody_home", ""),
                Destination::Fails => Outcome::retry("shelf_shaky", ""),
                Destination::Throttles => Outcome::retry("shelf_busy", ""),
                _ if event.header("poison").is_some() => Outcome::dead("poison", ""),
                _ if event.payload.len() > PAYLOAD_BYTES_MAX => Outcome::dead("too_large", ""),
                _ => Outcome::DELIVERED,
            };
            if !outcome.is_delivered() {
                failed.extend(event.key.clone());
            }
            let accepted = outcome.is_delivered() && state != Destination::Hangs;
            let (dedupe_id, payload) = (Some(delivery.dedupe_id()), event.payload.to_vec());
            self.attempts.lock().expect("no panic while held").push(Attempt { dedupe_id, payload, accepted });
            outcome
        };
        let outcomes = deliveries.iter().map(one).collect();
        if state == Destination::Hangs {
            std::future::pending::<()>().await;
        }
        outcomes
    }
}

#[async_trait]
impl SinkFixture for Shelf {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::new(self.clone())
    }

    fn traits(&self) -> SinkTraits {
        SinkTraits { positions: false, payload_bytes_max: Some(PAYLOAD_BYTES_MAX), ..SinkTraits::ALL }
    }

    async fn attempts(&self) -> Vec<Attempt> {
        self.attempts.lock().expect("no panic while held").clone()
    }

    fn poison(&self, event: NewEvent) -> NewEvent {
        event.header("poison", "yes")
    }

    async fn set(&self, destination: Destination) {
        *self.state.lock().expect("no panic while held") = destination;
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
        super::Shelf::new(super::Capabilities { batch_max: 7, concurrency: 1, prefix: true, system: None })
    }
    postbox_testkit::sink_suite!(fixture);
}
