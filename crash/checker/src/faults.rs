//! What the orchestrator did.

use serde::{Deserialize, Serialize};

/// A fault that was made.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Fault {
    /// Which.
    pub kind: String,
    /// To whom.
    #[serde(default)]
    pub detail: String,
    /// When it began, in microseconds of the machine's own clock.
    pub from: u64,
    /// When its last effect was over.
    pub until: u64,
    /// How long the sinks' files were when it began, by name of the subscription.
    pub places_from: Vec<(String, u64)>,
    /// And when its last effect was over.
    pub places_until: Vec<(String, u64)>,
    /// How many events can have been in flight at its victims: accepted, and not settled. 0: a
    /// clean stop, or no victim.
    pub window: u64,
    /// Not made, but seen: a lease ran out, be it by a fault or because the machine was slow.
    #[serde(default)]
    pub is_stall: bool,
    /// For `restore`: when the copy was made, which took everything since back.
    #[serde(default)]
    pub copied_at: Option<u64>,
    /// For `restore`: how long the files were then.
    #[serde(default)]
    pub copied_places: Vec<(String, u64)>,
    /// For `filter`: the topics before and after.
    #[serde(default)]
    pub topics: Option<(Vec<String>, Vec<String>)>,
}

/// Where a file stood, by the subscription's name.
pub(crate) fn place(places: &[(String, u64)], of: &str) -> u64 {
    places.iter().find(|(name, _)| name == of).map_or(0, |(_, place)| *place)
}

/// What an operator asked for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Order {
    /// `retry`, `discard` or `mark-dead`.
    pub op: String,
    /// The events, as `TX/N`.
    pub events: Vec<String>,
}
