//! The memory store: every store contract on a `std` mutex, for tests and for trying things out.
//! Nothing survives the process.
//!
//! It is the reference for the other stores, so it favours the shortest code that keeps every
//! promise. Each commit gets the next *commit number*. A snapshot is simply the highest number it
//! can see. A window is every row whose commit number lies between two snapshots, in `seq` order.
//! With [`MemoryStore::begin`], `seq` is taken at the append and the commit number at the commit.
//! This causes the same trouble as in a database: a late commit shows up with a low `seq`.
//!
//! Like a database it has two sides. The *server* holds the state and changes it in atomic
//! operations, each of which depends on what its caller had read. A *client* remembers how far it
//! has read, and nothing else. Between the two a simulation may put a [`Wire`], which loses answers
//! and executes calls late or twice.
//!
//! Leases run on the server's monotonic time, timestamps and due times on its wall time. There is
//! no I/O and, without a wire, no wait inside, so every future is ready at once and cancel-safety
//! is trivial.

mod admin;
mod append;
mod apply;
mod client;
mod dead_letters;
mod diagnose;
mod find;
mod inspect;
mod lanes;
mod lifecycle;
mod log;
mod maintain;
mod past;
mod read;
mod receive;
mod settle;
mod source;
mod state;
mod tail;
mod wire;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use jiff::Timestamp;
use postbox_core::{Clock, Error, ErrorKind, Migrate, Result, events_undelivered, lock};

use client::Client;
use state::State;

pub use append::MemoryTransaction;
pub use past::{Cursor, Snapshot, Standing};
pub use source::MemorySource;
pub use wire::{Call, Wire};

/// The one migration of a store without a schema, so that `up` and `down` have something to return.
const MIGRATION: &str = "0001_memory";

/// Events, subscriptions and the inbox in memory. Clones share one store and one client's memory.
/// It starts migrated.
#[derive(Clone)]
pub struct MemoryStore {
    server: Arc<Server>,
    client: Arc<Client>,
    wire: Option<Arc<dyn Wire>>,
}

/// The part that would be the database: state that changes in atomic operations, with its own
/// clock.
struct Server {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

impl MemoryStore {
    /// Creates an empty store with the logs `outbox` and `inbox`. Ids are made from a counter and
    /// `clock`, now and at each append, so that they are repeatable under a simulated clock.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        let state = Mutex::new(State::migrated(clock.now()));
        let server = Arc::new(Server { clock, state });
        Self { server, client: Arc::default(), wire: None }
    }

    /// Returns the same store as another process sees it: nothing is remembered, and every call
    /// goes through the wire, if there is one.
    #[must_use]
    pub fn client(&self, wire: Option<Arc<dyn Wire>>) -> Self {
        Self { server: self.server.clone(), client: Arc::default(), wire }
    }

    /// Opens a transaction. Events appended in it take their `seq` at once and become visible at
    /// its commit.
    pub fn begin(&self) -> MemoryTransaction {
        MemoryTransaction::new(self.clone())
    }
}

impl Server {
    /// Returns the state, if the schema exists.
    fn state(&self, operation: &'static str) -> Result<MutexGuard<'_, State>> {
        let state = self.lock();
        if state.data.created_at.is_some() {
            return Ok(state);
        }
        Err(Error::new(
            ErrorKind::Mismatch,
            operation,
            "schema_missing",
            "the store has no schema; run: postbox migrate up",
        ))
    }

    /// Returns the state, with or without a schema. Ignores poison: code that could panic under the
    /// lock does so only between two whole changes.
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}

#[async_trait]
impl Migrate for MemoryStore {
    async fn up(&self) -> Result<Vec<String>> {
        let now = self.server.clock.now();
        let mut state = self.server.lock();
        if state.data.created_at.is_some() {
            return Ok(Vec::new());
        }
        *state = State::migrated(now);
        Ok(vec![MIGRATION.to_owned()])
    }

    async fn down(&self, discard_events: bool) -> Result<Vec<String>> {
        let now = self.server.clock.now();
        let mut state = self.server.lock();
        if state.data.created_at.is_none() {
            return Ok(Vec::new());
        }
        if let Some(log) = state.data.undelivered(now).filter(|_| !discard_events) {
            return Err(events_undelivered(log.as_str()));
        }
        *state = State::default();
        Ok(vec![MIGRATION.to_owned()])
    }

    async fn validate(&self) -> Result<Timestamp> {
        let state = self.server.state("validate")?;
        Ok(state.data.created_at.expect("`state` refuses a store without a schema"))
    }

    fn script(&self) -> String {
        format!("-- {MIGRATION}: the memory store needs no SQL\n")
    }
}
