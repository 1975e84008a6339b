//! Calls that go wrong between the caller and the store.
//!
//! A writing call can end in four ways that its caller cannot tell apart. It was never executed. It
//! was executed and the answer was lost ([`lost`](super::lost)). It is executed after another owner
//! has taken the lane over. Or it is executed twice, because the caller repeated it
//! ([`late`](super::late)). A new writing call gets a [`Call`] and a case in `late`, and one in
//! `lost` if that shows more. Three have none, because their effect is the same whenever and
//! however often they run: `Receive::forget` goes by age, `Maintain::create_log` only adds what is
//! missing, and `Maintain::rebase` is refused while a lane is held and keeps what is delivered and
//! what is pending.
//!
//! A case makes its request as a value ([`Asked`]), passes it to [`CallFaults::lose_answer`] or
//! [`CallFaults::delay`], and repeats it. Then it checks that no event is lost, phantom, out of
//! order or sent again, and that a person's changes stay. `world.rs` does that for calls of a lane.
//!
//! A store declares where its calls can be stopped: [`CallFaults::places`]. Postgres uses the fault
//! proxy. A store whose calls are jobs of a thread stops the thread at the start of a job.

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
    /// `Log::leave`.
    Leave,
    /// `Log::next_batch`.
    NextBatch,
    /// A settlement of a position alone.
    Position,
    /// A settlement with entries.
    Settle,
    /// `Log::settle_and_read` at the end of a window.
    SettleAndRead,
    /// `Admin::change` to retry.
    Retry,
    /// `Admin::change` to discard.
    Discard,
    /// `Admin::change` to mark dead.
    MarkDead,
    /// `Admin::replay`.
    Replay,
    /// `Admin::pause`.
    Pause,
    /// `Admin::pause` without a pause.
    Resume,
    /// `Admin::rename`.
    Rename,
    /// `Admin::remove`.
    Remove,
    /// `Admin::reset` with a stamp.
    Reset,
    /// `Admin::set_lanes`.
    SetLanes,
    /// `Maintain::note_unrouted`.
    NoteUnrouted,
    /// `Maintain::prune`.
    Prune,
    /// `DeadLetters::hand_over`.
    HandOver,
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

/// How far a call has got when it is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// It has read nothing yet.
    Start,
    /// It has read, but written nothing.
    Middle,
    /// It has written everything, but committed nothing.
    End,
}

/// A call, ready to be made. Resolves to the error its caller got, if any.
pub type Asked = BoxFuture<'static, Option<Error>>;

/// Makes calls fail.
#[async_trait]
pub trait CallFaults: Send + Sync {
    /// The store whose calls can be made to fail.
    fn store(&self) -> Arc<dyn Store>;

    /// The store through which the same caller goes on meanwhile; often the same one.
    fn again(&self) -> Arc<dyn Store>;

    /// Returns the two for this call. With the rights of the owner for [`Call::Up`] and
    /// [`Call::Down`], if the store under test works without them.
    fn stores(&self, _call: Call) -> [Arc<dyn Store>; 2] {
        [self.store(), self.again()]
    }

    /// Returns where this call can be stopped; at least one place.
    fn places(&self, call: Call) -> &'static [Place];

    /// Makes a call on the first of [`Self::stores`] whose answer is lost. Returns once it is
    /// executed.
    async fn lose_answer(&self, call: Call, asked: Asked);

    /// Makes a call on the first of [`Self::stores`] and stops it. Returns once it is stopped and
    /// nobody waits for it.
    async fn delay(&self, call: Call, place: Place, asked: Asked) -> Box<dyn Late>;
}

/// A call that was stopped.
#[async_trait]
pub trait Late: Send {
    /// Runs `meanwhile`, then lets the call go on; earlier if `meanwhile` waits for it. Returns
    /// once both are done.
    async fn after(self: Box<Self>, meanwhile: BoxFuture<'static, ()>);
}

/// Makes a value of a call. Results other than an error do not matter.
pub(super) fn asked<T: 'static>(call: impl Future<Output = Result<T>> + Send + 'static) -> Asked {
    call.map(Result::err).boxed()
}

/// Makes a function of a call, to be run on any store. Borrowed values are cloned for each call.
macro_rules! call {
    ($store:ident, [$($own:ident),*], $call:expr) => {{
        $(let $own = $own.clone();)*
        move |$store: std::sync::Arc<dyn postbox_core::Store>| {
            $(let $own = $own.clone();)*
            $crate::conformance::faults::asked(async move { $call.await })
        }
    }};
}
pub(super) use call;
