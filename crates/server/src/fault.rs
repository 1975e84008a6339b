//! What keeps a service from its work.

use postbox_core::{Error, SourceName, StoreName, SubscriptionName};
use postbox_engine::{RelayFault, SupervisedRelay};
use serde::{Deserialize, Serialize};

/// One thing that keeps the service from its work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The store it is in, where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<StoreName>,
    /// The subscription that does not flow; `None` without a `source`: the store fails, so none
    /// does.
    pub subscription: Option<SubscriptionName>,
    /// The source that brings nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<SourceName>,
    /// The lane of the subscription that cannot be read or settled, where that is it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<u16>,
    /// The stable code of the reason.
    pub code: String,
    /// What is wrong, since when.
    pub what: String,
}

impl Fault {
    /// The store itself fails.
    pub(crate) fn of_store(code: &str, what: String) -> Self {
        Self { store: None, subscription: None, source: None, lane: None, code: code.to_owned(), what }
    }

    /// What does not work, in a few words.
    pub(crate) fn whose(&self) -> String {
        let what = match (&self.subscription, &self.source) {
            (Some(name), _) => name.to_string(),
            (None, Some(name)) => format!("source {name}"),
            (None, None) => "store".to_owned(),
        };
        self.store.as_ref().map_or_else(|| what.clone(), |store| format!("{store}: {what}"))
    }

    /// What keeps the events of a relay from flowing, if something does.
    pub(crate) fn of_relay(relay: &SupervisedRelay, store_is_up: bool) -> Option<Self> {
        let fault = relay.fault(store_is_up)?;
        let lane = if let RelayFault::Lane(failing) = &fault { Some(failing.lane) } else { None };
        let (code, what) = (fault.code().to_owned(), fault.to_string());
        Some(Self { store: None, subscription: Some(relay.name().clone()), source: None, lane, code, what })
    }
}

/// Of a store.
impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::of_store(error.code(), error.message().to_owned())
    }
}
