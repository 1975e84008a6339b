//! What keeps a service from its work.

use postbox_core::{SourceName, SubscriptionName};
use postbox_engine::{RelayFault, SupervisedRelay};
use serde::{Deserialize, Serialize};

/// One thing that keeps the service from its work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
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
    /// What keeps the events of a relay from flowing, if something does.
    pub(crate) fn of_relay(relay: &SupervisedRelay, store_is_up: bool) -> Option<Self> {
        let fault = relay.fault(store_is_up)?;
        let lane = if let RelayFault::Lane(failing) = &fault { Some(failing.lane) } else { None };
        let (code, what) = (fault.code().to_owned(), fault.to_string());
        Some(Self { subscription: Some(relay.name().clone()), source: None, lane, code, what })
    }
}
