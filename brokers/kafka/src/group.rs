//! The consumer group: how a member joins it, and how it learns which partitions are its own.

use std::sync::Arc;
use std::time::Duration;

/// The operation that errors of receiving name.
pub(crate) const OPERATION: &str = "receive";

/// A topic and the number of a partition.
pub(crate) type Partition = (Arc<str>, i32);

/// Where a group starts in a partition if it has no committed offset, or the offset no longer
/// exists.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OffsetReset {
    /// With the first message that exists.
    #[default]
    Earliest,
    /// With messages that are published from then on.
    Latest,
}

/// The topics that a source reads, and how it joins the consumer group.
#[derive(Debug, Clone)]
pub(crate) struct Membership {
    pub(crate) topics: Vec<String>,
    pub(crate) group: String,
    pub(crate) offset_reset: OffsetReset,
    pub(crate) id_header: String,
    pub(crate) session_timeout: Duration,
    pub(crate) in_flight_max: usize,
    pub(crate) content_type: String,
}

/// Learns of rebalances.
pub(crate) trait Rebalances: Send + Sync + 'static {
    /// Partitions are ours from now on.
    fn assigned(&self, partitions: &[Partition]);

    /// Partitions are ours no longer. Their next owners start when this has ended.
    fn revoked(&self, partitions: &[Partition]) -> impl Future<Output = ()> + Send;
}
