//! The connection between a client of the memory store and its server. For simulations and tests.

use std::fmt;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use postbox_core::{Error, ErrorKind, Lease, Result, lock};

use crate::{MemoryStore, Server};

/// Carries each call of a client to the server: at once, late, twice, without its answer, or not at
/// all.
///
/// A call may be kept and executed after its caller is gone, as a database does with a call whose
/// connection broke.
#[async_trait]
pub trait Wire: Send + Sync + 'static {
    /// Executes the call, as often and whenever it likes. `Ok` gives the caller the answer of the
    /// last execution. An error is the caller's answer, whatever was executed.
    async fn carry(&self, call: Arc<Call>) -> Result<()>;
}

/// One call on its way: an atomic operation of the server.
pub struct Call {
    /// What it does, e.g. `settle`.
    pub operation: &'static str,
    /// The lease it is made under, if any.
    pub lease: Option<Lease>,
    execute: Box<dyn Fn() + Send + Sync>,
}

impl Call {
    /// Executes it on the server.
    pub fn execute(&self) {
        (self.execute)();
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").field("operation", &self.operation).field("lease", &self.lease).finish_non_exhaustive()
    }
}

impl MemoryStore {
    /// Executes an operation on the server, through the wire if there is one.
    pub(crate) async fn call<T: Send + 'static>(
        &self,
        operation: &'static str,
        lease: Option<&Lease>,
        run: impl Fn(&Server) -> Result<T> + Send + Sync + 'static,
    ) -> Result<T> {
        let Some(wire) = &self.wire else { return run(&self.server) };
        let answer: Arc<Mutex<Option<Result<T>>>> = Arc::default();
        let (server, slot) = (self.server.clone(), answer.clone());
        let execute = move || {
            let answer = run(&server);
            *lock(&slot) = Some(answer);
        };
        wire.carry(Arc::new(Call { operation, lease: lease.cloned(), execute: Box::new(execute) })).await?;
        let answer = lock(&answer).take();
        answer.unwrap_or_else(|| {
            Err(Error::new(ErrorKind::Internal, operation, "wire_silent", "the wire says done and executed nothing"))
        })
    }
}
