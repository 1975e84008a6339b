//! What the orchestrator did.

use serde::{Deserialize, Serialize};

/// An injected fault.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Fault {
    /// Its kind.
    pub kind: String,
    /// Its victim, and details.
    #[serde(default)]
    pub detail: String,
    /// When it began, in microseconds of the machine's own clock.
    pub from: u64,
    /// When its last effect was over.
    pub until: u64,
    /// Length of each sink's file when it began, by subscription.
    pub places_from: Vec<(String, u64)>,
    /// The same when its last effect was over.
    pub places_until: Vec<(String, u64)>,
    /// Most events that can have been in flight at its victims: accepted but not settled. 0: a
    /// clean stop, or no victim.
    pub window: u64,
    /// Not injected but observed: a lease ran out, because of a fault or because the machine was
    /// slow.
    #[serde(default)]
    pub is_stall: bool,
    /// For `restore`: when the copy was made. Everything later was taken back.
    #[serde(default)]
    pub copied_at: Option<u64>,
    /// For `restore`: length of each sink's file at that time.
    #[serde(default)]
    pub copied_places: Vec<(String, u64)>,
    /// For `filter`: the topics before and after.
    #[serde(default)]
    pub topics: Option<(Vec<String>, Vec<String>)>,
}

/// The position of a file, by the subscription's name.
pub(crate) fn place(places: &[(String, u64)], of: &str) -> u64 {
    places.iter().find(|(name, _)| name == of).map_or(0, |(_, place)| *place)
}

/// An operator's command about events.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Order {
    /// `retry`, `discard` or `mark-dead`.
    pub op: String,
    /// The events, as `TX/N`.
    pub events: Vec<String>,
}
