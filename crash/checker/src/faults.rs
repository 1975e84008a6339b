//! What the orchestrator did.

use serde::{Deserialize, Serialize};

/// The kind of a record that is no fault, but a defect of the product: a relay panicked, crashed,
/// ended unasked, or did not stop in time.
pub const RELAY_FAILED: &str = "relay failed";

/// The kind of a record that is no fault: a relay ended with code 1, as it does where its store is
/// away. Elsewhere it has failed.
pub const RELAY_GAVE_UP: &str = "relay ended with code 1";

/// The code of a lease that its owner could not renew in time. The others mean that somebody else
/// may have the lane.
pub(crate) const NOT_RENEWED: &str = "lease_not_renewed";

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
    /// It did not happen: its victim was not there, its call was not made, its statement failed.
    /// Then it neither counts nor explains anything.
    #[serde(default)]
    pub missed: bool,
    /// Not injected but observed: a relay lost a lease, with the code in `detail`. It may be
    /// `lease_not_renewed` because the machine was slow; anything else needs a fault.
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

impl Fault {
    /// Whether events in flight at its victims may be sent again. Where a lease ran out, the store
    /// also counts a crash of the lane's owner.
    pub(crate) fn is_abrupt(&self) -> bool {
        self.window > 0 && !self.missed
    }

    /// Whether it may cost a relay its lease, or its start: it stops a relay, its calls, a clock or
    /// the store. A killed relay logs nothing.
    pub(crate) fn costs_leases(&self) -> bool {
        (self.is_abrupt() && !self.is_stall && self.kind != "relay SIGKILL") || self.kind == "pause and resume"
    }
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
