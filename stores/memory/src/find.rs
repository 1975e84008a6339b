//! Finds events by the start of their id.

use async_trait::async_trait;
use postbox_core::{EventId, Find, IdPrefix, LogName, Result};

use crate::MemoryStore;

#[async_trait]
impl Find for MemoryStore {
    async fn ids(&self, log: &LogName, prefix: &IdPrefix, limit: usize) -> Result<Vec<EventId>> {
        let state = self.server.state("ids")?;
        let (first, last) = prefix.range();
        let ids = state.data.log("ids", log)?.committed().map(|(_, _, event)| event.id);
        let mut ids: Vec<EventId> = ids.filter(|id| (first..=last).contains(id)).collect();
        ids.sort();
        ids.truncate(limit);
        Ok(ids)
    }
}
