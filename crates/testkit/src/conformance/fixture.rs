//! What an implementation provides to its suite.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postbox_core::{Appended, Apply, LogName, NewEvent, RawMessage, Result, Sink, Source, SourceName, State, Store};

use super::faults::CallFaults;
use crate::inbox::Inbox;

/// Returns pairs `('dead', 'blocked'), …` of states between which no write may lead, for the
/// trigger on delivery rows in fixtures of SQL stores. A deleted row counts as `dispatched`.
pub fn forbidden_transitions() -> String {
    let pairs = State::ALL.into_iter().flat_map(|from| State::ALL.map(|to| (from, to)));
    // Retention deletes discarded events.
    let swept = (State::Discarded, State::Dispatched);
    let forbidden =
        pairs.filter(|&(from, to)| from.has_row() && from != to && !from.may_become(to) && (from, to) != swept);
    forbidden.map(|(from, to)| format!("('{from}', '{to}')")).collect::<Vec<_>>().join(", ")
}

/// What a store can do, as data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreCapabilities {
    /// Several transactions may be open at once and commit in any order.
    pub concurrent_transactions: bool,
}

/// A fresh store for one case: migrated, empty, used by nobody else. Dropping it cleans up.
#[async_trait]
pub trait StoreFixture: Send + Sync {
    /// Returns the store under test, the same one at every call.
    fn store(&self) -> Arc<dyn Store>;

    /// Returns the same store with the rights to migrate it and to create logs, if the store under
    /// test works without them.
    fn owner(&self) -> Arc<dyn Store> {
        self.store()
    }

    /// Gives the store under test its rights on what [`Self::owner`] has created.
    async fn grant(&self) {}

    /// Returns what the store can do.
    fn capabilities(&self) -> StoreCapabilities;

    /// Opens a producer's transaction on a separate connection. It takes its place at once.
    async fn begin(&self) -> Box<dyn OpenTransaction>;

    /// Returns the number of conflict records that [`postbox_core::Receive`] has left.
    async fn conflicts(&self) -> u64;

    /// Returns a way to make calls of this store fail, the same one at every call.
    async fn faults(&self) -> Arc<dyn CallFaults>;

    /// Lets time pass on the store's clock.
    async fn pass(&self, time: Duration) {
        tokio::time::sleep(time).await;
    }
}

/// A producer's open transaction. Dropping it rolls it back.
#[async_trait]
pub trait OpenTransaction: Send {
    /// Appends inside the transaction: [`postbox_core::Postbox::append`].
    async fn append(&mut self, log: &LogName, events: &[NewEvent]) -> Result<Appended>;
    /// Returns whether a message is applied for the first time: the driver's `once_in`.
    async fn once(&mut self, source: &SourceName, message_id: &str) -> Result<bool>;
    /// Sets the savepoint; there is at most one.
    async fn savepoint(&mut self);
    /// Rolls back to the savepoint and forgets it.
    async fn rollback_to_savepoint(&mut self);
    /// Commits.
    async fn commit(self: Box<Self>);
    /// Rolls back.
    async fn rollback(self: Box<Self>);
}

/// A store whose handlers share its transaction.
#[async_trait]
pub trait ApplyFixture: StoreFixture {
    /// Returns the handler under test, bound to the store. It writes the payload as an effect in
    /// its transaction. Then it fails if the payload says so (`retry`, `dead`, `panic`), or
    /// delivers.
    fn apply(&self) -> Arc<dyn Apply>;

    /// Returns the same handler, bound to [`CallFaults::store`] and to [`CallFaults::again`].
    async fn harmed(&self) -> [Arc<dyn Apply>; 2];

    /// Returns the payloads whose effect was committed, in order.
    async fn effects(&self) -> Vec<String>;
}

/// A source and the broker behind it. Fresh for each case, and empty.
#[async_trait]
pub trait SourceFixture: Send + Sync {
    /// Returns the source under test, the same one at every call.
    fn source(&self) -> Arc<dyn Source>;

    /// Puts a message at the end of the source's queue.
    async fn publish(&self, message: RawMessage);

    /// Breaks the source's connection. The next call may fail once.
    async fn disconnect(&self);

    /// Returns whether the broker only carries payloads that are [text](is_text).
    fn text_only(&self) -> bool {
        false
    }

    /// Returns whether a lost connection gives back what it had delivered. Otherwise the broker
    /// knows no connections, and a token is good until its message comes again.
    fn has_sessions(&self) -> bool {
        true
    }

    /// Returns the rejected messages that the broker keeps.
    async fn dead_letters(&self) -> Vec<RawMessage>;

    /// Lets time pass for the delays of messages that were given back.
    async fn pass(&self, time: Duration) {
        tokio::time::sleep(time).await;
    }
}

/// What happens to a message that cannot be decoded or stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Poison {
    /// It is kept in the inbox, as an event that is dead on arrival.
    Kept,
    /// It is refused to its producer, who keeps it.
    Refused,
}

/// How ways of receiving differ, as data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceivingTraits {
    /// Maximum messages being stored at once.
    pub in_flight_max: usize,
    /// Messages are stored in the order of publishing.
    pub ordered: bool,
    /// What happens to poison.
    pub poison: Poison,
}

/// The whole way from producers into an inbox: a receiver and its feed. Fresh for each case, and
/// not started.
#[async_trait]
pub trait ReceivingFixture: Send + Sync {
    /// Returns what it can do.
    fn traits(&self) -> ReceivingTraits;

    /// Returns the inbox where messages are stored.
    fn inbox(&self) -> Arc<Inbox>;

    /// Starts receiving.
    async fn start(&self);

    /// Stops receiving, and returns once it has ended. It waits only briefly for messages being
    /// stored by a store that does not answer.
    async fn stop(&self);

    /// A producer sends a message until it is settled. Its digest is a function of the body.
    fn publish(&self, id: &str, body: &str);

    /// Does the same with a message that cannot be decoded.
    fn publish_poison(&self, id: &str, body: &str);

    /// Breaks the connections of senders or of the source. Unsettled messages are sent again.
    async fn disconnect(&self);

    /// From now on settlements get lost on their way to the producer's side, or arrive again.
    fn lose_settlements(&self, lost: bool);

    /// Returns the number of settled messages.
    fn settled(&self) -> usize;

    /// Returns how many of the settled ones were refused to their producer.
    fn refused(&self) -> usize;
}

/// How a destination treats deliveries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destination {
    /// Accepts everything but poison.
    Works,
    /// Fails every delivery in a way that may pass.
    Fails,
    /// Asks for fewer requests.
    Throttles,
    /// Accepts a delivery and never answers.
    Hangs,
    /// Does not exist.
    Down,
}

/// Which cases a destination can be put through, as data. Each claim runs a case. What is not
/// claimed is visible in the fixture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SinkTraits {
    /// It can refuse single events for good.
    pub refuses: bool,
    /// It can be [`Destination::Fails`].
    pub fails: bool,
    /// It can be [`Destination::Throttles`].
    pub throttles: bool,
    /// It can be [`Destination::Hangs`].
    pub hangs: bool,
    /// It can be [`Destination::Down`], and work again.
    pub goes_down: bool,
    /// It receives the id by which it may deduplicate.
    pub dedupe_ids: bool,
    /// Its answer says where it has an event.
    pub positions: bool,
    /// Larger payloads are refused for good.
    pub payload_bytes_max: Option<usize>,
    /// Payloads that are empty or not [text](is_text) are refused for good.
    pub text_only: bool,
}

/// Returns whether a transport for text only can carry the payload: UTF-8 without ASCII control
/// characters (except tab, line ends and DEL) and without noncharacters.
pub fn is_text(payload: &[u8]) -> bool {
    let allowed = |c: char| (!c.is_ascii_control() || "\t\r\n\u{7f}".contains(c)) && c != '\u{fffe}' && c != '\u{ffff}';
    str::from_utf8(payload).is_ok_and(|text| text.chars().all(allowed))
}

impl SinkTraits {
    /// Every case, with payloads of any size.
    pub const ALL: Self = Self {
        refuses: true,
        fails: true,
        throttles: true,
        hangs: true,
        goes_down: true,
        dedupe_ids: true,
        positions: true,
        payload_bytes_max: None,
        text_only: false,
    };
}

/// A delivery as the destination saw it, accepted or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The id by which it may deduplicate, if it received one.
    pub dedupe_id: Option<String>,
    /// The payload.
    pub payload: Vec<u8>,
    /// Whether it was accepted.
    pub accepted: bool,
}

/// A sink and a destination that records deliveries. Fresh for each case.
#[async_trait]
pub trait SinkFixture: Send + Sync {
    /// Returns the sink under test, the same one at every call.
    fn sink(&self) -> Arc<dyn Sink>;

    /// Returns what the destination can do.
    fn traits(&self) -> SinkTraits;

    /// Returns deliveries that reached the destination, in order of arrival, including refused
    /// ones.
    async fn attempts(&self) -> Vec<Attempt>;

    /// Changes an event so that the destination refuses this one (and only this one) for good.
    /// Called only if [`SinkTraits::refuses`] is claimed.
    fn poison(&self, event: NewEvent) -> NewEvent;

    /// Changes the destination from now on. Called only for what is claimed.
    async fn set(&self, destination: Destination);

    /// Returns accepted payloads, in order of arrival.
    async fn arrived(&self) -> Vec<Vec<u8>> {
        let attempts = self.attempts().await.into_iter();
        attempts.filter(|attempt| attempt.accepted).map(|attempt| attempt.payload).collect()
    }
}
