//! Faults: what keeps a service from working.

use postbox_core::{Error, Outage, SourceName, StoreName, SubscriptionName};
use postbox_engine::{FailingPart, RelayFault, SupervisedRelay};
use serde::{Deserialize, Serialize};

/// One thing that keeps the service from working.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The store concerned, where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<StoreName>,
    /// The subscription that does not deliver. `None` without a `source` or a `part`: the store
    /// fails, so none delivers.
    pub subscription: Option<SubscriptionName>,
    /// The source that receives nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<SourceName>,
    /// The lane that cannot be read or settled, if the fault is of one lane.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<u16>,
    /// The part that fails, where that is a part: [`RETENTION`](Self::RETENTION),
    /// [`UNROUTED`](Self::UNROUTED), or the [`STORING`](Self::STORING) of the messages of a source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// The stable code of the reason.
    pub code: String,
    /// What is wrong, and since when.
    pub what: String,
}

impl Fault {
    /// The `part` that removes what is old.
    pub const RETENTION: &'static str = "retention";
    /// The `part` that searches for unrouted events.
    pub const UNROUTED: &'static str = "unrouted";
    /// The `part` that stores the messages of a source.
    pub const STORING: &'static str = "storing";

    /// A fault of the store itself.
    pub(crate) fn of_store(code: &str, what: String) -> Self {
        Self { code: code.to_owned(), what, ..Self::default() }
    }

    /// A source whose messages cannot be stored.
    pub(crate) fn of_storing((source, Outage { since, code }): (SourceName, Outage)) -> Self {
        let what = format!("its messages cannot be stored since {since:.0}; last reason: {code}");
        Self { source: Some(source), part: Some(Self::STORING.to_owned()), ..Self::of_store(&code, what) }
    }

    /// A part beside the relays that fails at every try.
    pub(crate) fn of_part(part: &str, failing: &FailingPart) -> Self {
        let FailingPart { since, what, .. } = failing;
        let what = format!("it has failed at each try since {since:.0}: {what}");
        Self { part: Some(part.to_owned()), ..Self::of_store(&failing.code, what) }
    }

    /// Whether events or messages wait because of it. Retention and the search for unrouted events
    /// keep nobody from sending or receiving.
    pub(crate) fn stops_work(&self) -> bool {
        !matches!(self.part.as_deref(), Some(Self::RETENTION | Self::UNROUTED))
    }

    /// Names the part that fails, in a few words.
    pub(crate) fn whose(&self) -> String {
        let what = match (&self.subscription, &self.source) {
            (Some(name), _) => name.to_string(),
            (None, Some(name)) => format!("source {name}"),
            (None, None) => self.part.clone().unwrap_or_else(|| "store".to_owned()),
        };
        self.store.as_ref().map_or_else(|| what.clone(), |store| format!("{store}: {what}"))
    }

    /// Returns what keeps a relay from delivering, if anything.
    pub(crate) fn of_relay(relay: &SupervisedRelay, store_is_up: bool) -> Option<Self> {
        let fault = relay.fault(store_is_up)?;
        let lane = if let RelayFault::Lane(failing) = &fault { Some(failing.lane) } else { None };
        let (code, what) = (fault.code().to_owned(), fault.to_string());
        Some(Self { subscription: Some(relay.name().clone()), lane, code, what, ..Self::default() })
    }
}

/// A failed store.
impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::of_store(error.code(), error.message().to_owned())
    }
}
