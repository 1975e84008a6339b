//! Calls that go wrong between the caller and the store.
//!
//! # For authors of a case
//!
//! Each writing call of a contract can end in four ways that its caller cannot tell apart: it was never done, it was done and the answer is lost
//! ([`lost`](super::lost)), it is done after the caller has asked again or after another owner has taken the lane over ([`late`](super::late)), or it
//! is done twice, which is what both come to once the caller has asked again. A new writing call gets a [`Call`], and a case in both modules.
//!
//! A case makes its request as a value ([`Asked`]), gives it to [`CallFaults::lose_answer`] or [`CallFaults::delay`], and asks again. Then it checks what
//! was promised: nothing lost, nothing phantom, each key in order, what was settled is not sent again, dead stays dead, and what a person did stays done.
//! `world.rs` does that for the calls of a lane.
//!
//! # For authors of a store
//!
//! [`CallFaults::places`] says, as data, where a call of the store can be stopped. Postgres does it with the fault proxy: before the first statement
//! that writes ([`Place::Start`], where all is sent in one flight), between what it read and what it writes ([`Place::Middle`]), before the COMMIT
//! ([`Place::End`], where locks are held). A store whose calls are jobs of a thread stops the thread at the beginning of a job; the caller's future
//! is dropped, which is all that a caller in the same process can do.

use std::sync::Arc;

use async_trait::async_trait;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use postbox_core::{Error, Result, Store};

/// A writing call of a contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// `Log::subscribe`.
    Subscribe,
    /// `Log::acquire`.
    Acquire,
    /// `Log::renew`.
    Renew,
    /// `Log::release`.
    Release,
    /// `Log::next_batch`.
    NextBatch,
    /// A settlement of a position alone.
    Position,
    /// A settlement with entries.
    Settle,
    /// `Admin::retry`.
    Retry,
    /// `Admin::discard`.
    Discard,
    /// `Admin::prune`.
    Prune,
    /// `Admin::pause`.
    Pause,
    /// `Receive::receive_many`.
    Receive,
    /// `Append::append`.
    Append,
    /// `Apply::apply`.
    Apply,
    /// `Migrate::up`.
    Up,
    /// `Migrate::down`.
    Down,
}

/// How far a call has come when it is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// It has read nothing.
    Start,
    /// It has read, and written nothing.
    Middle,
    /// It has written all, and committed nothing.
    End,
}

/// A call, ready to be made; ends with what its caller heard.
pub type Asked = BoxFuture<'static, Option<Error>>;

/// Does harm to calls.
#[async_trait]
pub trait CallFaults: Send + Sync {
    /// The store through which calls are made that shall be harmed.
    fn store(&self) -> Arc<dyn Store>;

    /// The store through which the same caller goes on meanwhile; often the same one.
    fn again(&self) -> Arc<dyn Store>;

    /// Where this call can be stopped; at least somewhere.
    fn places(&self, call: Call) -> &'static [Place];

    /// Makes a call on [`Self::store`] that the store does whole, and whose answer nobody hears. Returns once it is done.
    async fn lose_answer(&self, call: Call, asked: Asked);

    /// Makes a call on [`Self::store`] and stops it. Returns once it stands and its caller has gone.
    async fn delay(&self, call: Call, place: Place, asked: Asked) -> Box<dyn Late>;
}

/// A call that is stopped on its way.
#[async_trait]
pub trait Late: Send {
    /// Does `meanwhile`, then lets the call go on; or lets it go on as soon as `meanwhile` waits for it. Returns once both are done.
    async fn after(self: Box<Self>, meanwhile: BoxFuture<'static, ()>);
}

/// A call as a value; what it gives beside an error does not matter.
pub(super) fn asked<T: 'static>(call: impl Future<Output = Result<T>> + Send + 'static) -> Asked {
    call.map(Result::err).boxed()
}
