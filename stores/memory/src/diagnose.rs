//! Explains lag. There are no other sessions that could hold a lock.

use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Arrival, Blocker, Diagnose, Event, LogName, Result};

use crate::MemoryStore;

#[async_trait]
impl Diagnose for MemoryStore {
    async fn arrivals(&self, log: &LogName, limit: usize) -> Result<Vec<Arrival>> {
        let now = self.server.clock.now();
        let state = self.server.state("arrivals")?;
        let arrival = |event: &Event| Arrival {
            topic: event.topic.to_string(),
            tenant: event.tenant.as_ref().map(ToString::to_string),
            key: event.key.as_ref().map(ToString::to_string),
            kind: event.kind.clone(),
            aggregate: event.aggregate.clone(),
            headers: event.headers.clone(),
            age: Duration::try_from(now.duration_since(event.created_at)).unwrap_or_default(),
        };
        let mut all: Vec<&Event> = state.data.log("arrivals", log)?.committed().map(|(_, _, event)| event).collect();
        all.reverse();
        Ok(all.into_iter().take(limit).map(arrival).collect())
    }

    async fn blockers(&self) -> Result<Vec<Blocker>> {
        Ok(Vec::new())
    }
}
