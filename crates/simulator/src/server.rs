//! The store of a world, from outside: what writers do to it, and what the ledger reads.

use std::sync::Arc;

use postbox_core::{
    Admin, Apply, Delivery, EventId, Inspect as _, Log, LogName, Maintain, NewEvent, State, Subscription,
    SubscriptionName,
};
use postbox_memory::{Cursor, MemoryStore, MemoryTransaction, Snapshot};

use crate::flaky::FlakyLog;
use crate::gate::{Gate, ServerClock, SimTime};
use crate::ledger::Who;
use crate::plan::{End, Plan};
use crate::sink::SimApply;
use crate::sqlite::{SqliteFile, SqliteTransaction};
use crate::sqlite_client::SqliteClient;
use crate::world::{SimWire, World};

/// The store of a world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Store {
    /// The memory store.
    #[default]
    Memory,
    /// A SQLite file. Each relay opens it as a separate process would.
    Sqlite,
}

impl Store {
    /// Returns its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Sqlite => "sqlite",
        }
    }

    /// Returns the number of seeds of an ordinary run.
    pub fn seeds(self) -> u64 {
        match self {
            Self::Memory => 200_000,
            // About fifteen seconds: each call is a transaction, and goes to another thread and
            // back.
            Self::Sqlite => 2_000,
        }
    }

    /// Returns the call that a planned fault affects. The SQLite store reads and opens a window in
    /// one.
    pub(crate) fn operation(self, planned: &'static str) -> &'static str {
        match (self, planned) {
            (Self::Sqlite, "page" | "load" | "next_batch") => "open",
            _ => planned,
        }
    }
}

/// The state of one event.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) id: EventId,
    /// Its number in the ledger.
    pub(crate) version: Option<i64>,
    pub(crate) lane: u16,
    pub(crate) state: State,
    pub(crate) attempts: u32,
    pub(crate) replays: u32,
}

pub(crate) enum Server {
    Memory { store: MemoryStore, names: Vec<SubscriptionName> },
    Sqlite(Arc<SqliteFile>),
}

/// The subscription that reads the effects in a memory store. No relay drives it.
fn auditor() -> SubscriptionName {
    "auditor".parse().expect("a name")
}

/// The log where handlers write their effects.
pub(crate) fn effects() -> LogName {
    LogName::inbox()
}

impl Server {
    /// Creates a store for these subscriptions.
    pub(crate) fn new(plan: &Plan, time: &Arc<SimTime>, subscriptions: &[Subscription]) -> Self {
        let names = subscriptions.iter().map(|it| it.name.clone()).collect();
        match plan.store {
            Store::Memory => {
                let store = MemoryStore::new(Arc::new(ServerClock { time: time.clone(), gate: None }));
                if plan.goes_back() {
                    store.forget_unflushed();
                }
                Self::Memory { store, names }
            }
            Store::Sqlite => Self::Sqlite(Arc::new(SqliteFile::new(plan, time.clone(), names))),
        }
    }

    /// Creates the subscriptions, without faults.
    pub(crate) async fn set_up(&self, subscriptions: &[Subscription]) {
        for subscription in subscriptions {
            let done = match self {
                Self::Memory { store, .. } => store.subscribe(subscription).await,
                Self::Sqlite(file) => {
                    let home = file.home();
                    home.gate.run(home.store.subscribe(subscription))
                }
            };
            done.expect("the log is there");
        }
        if let Self::Memory { store, .. } = self {
            let auditor = Subscription { lanes: Some(1), ..Subscription::new(auditor(), effects()) };
            store.subscribe(&auditor).await.expect("the log is there");
        }
    }

    /// Ends a pause, whoever began it.
    pub(crate) async fn resume(&self, name: &SubscriptionName) {
        // If a pause cannot be ended now, the next try ends it.
        _ = match self {
            Self::Memory { store, .. } => store.pause(name, None).await,
            Self::Sqlite(file) => {
                let home = file.home();
                home.gate.run(home.store.pause(name, None))
            }
        };
    }

    /// Returns the cursors of a subscription, by its number.
    pub(crate) fn cursors(&self, subscription: usize) -> Vec<Cursor> {
        match self {
            Self::Memory { store, names } => store.cursors(&names[subscription]),
            Self::Sqlite(file) => file.look().cursors[subscription].clone(),
        }
    }

    /// Returns by topic whether the filter of a subscription leaves it out.
    pub(crate) fn left_out(&self, subscription: usize) -> [bool; 2] {
        let (infos, name) = match self {
            Self::Memory { store, names } => (Arc::<Gate>::default().run(store.subscriptions()), &names[subscription]),
            Self::Sqlite(file) => {
                let home = file.home();
                (home.gate.run(home.store.subscriptions()), file.name(subscription))
            }
        };
        let infos = infos.expect("the store answers");
        let filter = infos.into_iter().find(|info| info.name == *name).map(|info| info.filter).unwrap_or_default();
        ["t0", "t1"].map(|topic| !filter.wants_topic(topic))
    }

    pub(crate) fn each_place(&self, subscription: usize, mut see: impl FnMut(Place)) {
        match self {
            Self::Memory { store, names } => store.each_standing(&names[subscription], |it| {
                let (id, version) = (it.event.id, it.event.version);
                see(Place { id, version, lane: it.lane, state: it.state, attempts: it.attempts, replays: it.replays });
            }),
            Self::Sqlite(file) => file.look().places[subscription].iter().copied().for_each(see),
        }
    }

    /// Shows what handlers wrote: the position and the number of each effect.
    pub(crate) fn each_effect(&self, mut see: impl FnMut(i64, i64)) {
        match self {
            Self::Memory { store, .. } => {
                store.each_standing(&auditor(), |it| see(it.seq.0, it.event.version.unwrap_or_default()));
            }
            Self::Sqlite(file) => file.effects().into_iter().for_each(|(seq, version)| see(seq, version)),
        }
    }

    /// Begins a transaction that appends these events. If `locks`, it writes at once, and in a
    /// store with a single writer nobody else can until it ends.
    pub(crate) fn begin(&self, events: &[NewEvent], locks: bool) -> Transaction {
        match self {
            Self::Memory { store, .. } => {
                let (mut transaction, mut savepoint) = (store.begin(), 0);
                for event in events {
                    savepoint = transaction.savepoint();
                    transaction.append(&LogName::outbox(), std::slice::from_ref(event)).expect("within the limits");
                }
                Transaction::Memory { store: store.clone(), transaction, savepoint }
            }
            Self::Sqlite(file) => Transaction::Sqlite(SqliteTransaction::begin(file, events, locks)),
        }
    }

    /// Returns whether anything was committed since the last look. A memory store is looked at
    /// after each call instead.
    pub(crate) fn has_changed(&self) -> bool {
        matches!(self, Self::Sqlite(file) if file.has_changed())
    }

    /// Returns what it holds now, if it can go back to that.
    pub(crate) fn snapshot(&self) -> Option<Snapshot> {
        match self {
            Self::Memory { store, .. } => Some(store.snapshot()),
            Self::Sqlite(_) => None,
        }
    }

    pub(crate) fn restore(&self, snapshot: &Snapshot) {
        if let Self::Memory { store, .. } = self {
            store.restore(snapshot);
        }
    }

    pub(crate) fn crash(&self) {
        match self {
            Self::Memory { store, .. } => store.crash(),
            Self::Sqlite(file) => file.crash(),
        }
    }
}

/// A writer's open transaction. Dropping it rolls it back.
pub(crate) enum Transaction {
    Memory { store: MemoryStore, transaction: MemoryTransaction, savepoint: usize },
    Sqlite(SqliteTransaction),
}

impl Transaction {
    /// Returns whether another transaction must end first.
    pub(crate) fn waits(&self) -> bool {
        matches!(self, Self::Sqlite(transaction) if transaction.waits())
    }

    pub(crate) fn end(self, end: End) {
        match self {
            Self::Sqlite(transaction) => transaction.end(end),
            Self::Memory { transaction, .. } if end == End::Rollback => transaction.rollback(),
            Self::Memory { store, mut transaction, savepoint } => {
                if end == End::Savepoint {
                    transaction.rollback_to(savepoint);
                }
                transaction.commit();
                if end == End::Flushed {
                    store.flush();
                }
            }
        }
    }
}

/// The store as a relay or a person uses it.
#[derive(Clone)]
pub(crate) struct Client {
    pub(crate) log: Arc<dyn Log>,
    pub(crate) admin: Arc<dyn Admin>,
    pub(crate) maintain: Arc<dyn Maintain>,
    pub(crate) apply: Arc<dyn Apply>,
}

impl Client {
    /// Opens the store as a new process does.
    pub(crate) fn new(world: &Arc<World>, who: Who) -> Self {
        let wire = Arc::new(SimWire { world: world.clone(), who });
        let client = match &world.server {
            Server::Memory { store, .. } => {
                let store = store.client(Some(wire.clone()));
                let applying = world.clone();
                let handler = move |transaction: &mut MemoryTransaction, delivery: &Delivery| {
                    applying.apply(who, delivery, |effect| transaction.append(&effects(), &[effect]).is_ok())
                };
                Self {
                    log: Arc::new(FlakyLog { wire, store: store.clone() }),
                    apply: store.apply(handler),
                    maintain: Arc::new(store.clone()),
                    admin: Arc::new(store),
                }
            }
            Server::Sqlite(file) => {
                let client = Arc::new(SqliteClient::new(wire, file));
                Self { log: client.clone(), admin: client.clone(), maintain: client.clone(), apply: client }
            }
        };
        Self { apply: Arc::new(SimApply { world: world.clone(), who, inner: client.apply }), ..client }
    }
}
