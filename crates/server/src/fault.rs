//! Faults: what keeps a service from working.

use postbox_core::{Error, SourceName, StoreName, SubscriptionName};
use postbox_engine::{RelayFault, SupervisedRelay};
use serde::{Deserialize, Serialize};

/// One thing that keeps the service from working.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The store concerned, where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<StoreName>,
    /// The subscription that does not deliver. `None` without a `source`: the store fails, so none
    /// delivers.
    pub subscription: Option<SubscriptionName>,
    /// The source that receives nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<SourceName>,
    /// The lane that cannot be read or settled, if the fault is of one lane.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<u16>,
    /// The stable code of the reason.
    pub code: String,
    /// What is wrong, and since when.
    pub what: String,
}

impl Fault {
    /// A fault of the store itself.
    pub(crate) fn of_store(code: &str, what: String) -> Self {
        Self { store: None, subscription: None, source: None, lane: None, code: code.to_owned(), what }
    }

    /// Names the part that fails, in a few words.
    pub(crate) fn whose(&self) -> String {
        let what = match (&self.subscription, &self.source) {
            (Some(name), _) => name.to_string(),
            (None, Some(name)) => format!("source {name}"),
            (None, None) => "store".to_owned(),
        };
        self.store.as_ref().map_or_else(|| what.clone(), |store| format!("{store}: {what}"))
    }

    /// Returns what keeps a relay from delivering, if anything.
    pub(crate) fn of_relay(relay: &SupervisedRelay, store_is_up: bool) -> Option<Self> {
        let fault = relay.fault(store_is_up)?;
        let lane = if let RelayFault::Lane(failing) = &fault { Some(failing.lane) } else { None };
        let (code, what) = (fault.code().to_owned(), fault.to_string());
        Some(Self { store: None, subscription: Some(relay.name().clone()), source: None, lane, code, what })
    }
}

/// A failed store.
impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::of_store(error.code(), error.message().to_owned())
    }
}
