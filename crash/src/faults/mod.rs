//! Every kind of fault: one small function each, in one table.

mod network;
mod operator;
mod relay;
mod server;
mod sqlite;
mod tables;

use futures::future::BoxFuture;
use postbox_crash_checker::faults::Fault;
use rand::Rng as _;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;

use crate::stage::Stage;
use crate::store::StoreKind;

pub(crate) use self::operator::roll;

/// The future that makes a fault. It fills in the record: its victim, and what can have been in
/// flight there.
pub(crate) type Made<'a> = BoxFuture<'a, anyhow::Result<()>>;

/// Groups of faults. At most one fault of each group is active at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Group {
    /// Relays, their connections, and operators.
    Around,
    /// The database itself and its tables.
    Inside,
}

const PG: &[StoreKind] = &[StoreKind::Postgres, StoreKind::Pooler];
const POOLER: &[StoreKind] = &[StoreKind::Pooler];
const SQLITE: &[StoreKind] = &[StoreKind::Sqlite];
const ALL: &[StoreKind] = &[StoreKind::Postgres, StoreKind::Pooler, StoreKind::Sqlite];

/// A kind of fault.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    /// Its relative frequency within its group.
    pub(crate) weight: u32,
    pub(crate) group: Group,
    pub(crate) stores: &'static [StoreKind],
    /// Makes the fault and fills in its record.
    pub(crate) make: for<'a> fn(&'a Stage, &'a mut SmallRng, &'a mut Fault) -> Made<'a>,
}

macro_rules! kinds {
    ($($name:literal, $weight:literal, $group:ident, $stores:ident, $make:path;)*) => {
        &[$(Kind {
            name: $name, weight: $weight, group: Group::$group, stores: $stores,
            make: |stage, random, fault| Box::pin($make(stage, random, fault)),
        }),*]
    };
}

/// All kinds. A name in several rows is the same fault, made differently.
pub(crate) const KINDS: &[Kind] = kinds! {
    "relay SIGKILL", 10, Around, ALL, relay::kill;
    "relay SIGSTOP past the lease", 4, Around, ALL, relay::freeze;
    "relay SIGTERM and restart", 6, Around, ALL, relay::stop;
    "relay clock step", 4, Around, ALL, relay::step_clock;
    "writer SIGKILL", 4, Around, ALL, relay::kill_writer;
    "connections reset", 6, Around, PG, network::reset;
    "answer lost", 10, Around, PG, network::lose_answer;
    "request cut", 5, Around, PG, network::cut_request;
    "request done late", 10, Around, PG, network::delay_request;
    "relay ends with its answer lost", 10, Around, PG, network::lose_answer_and_end;
    "relay ends with its answer lost", 10, Around, PG, tables::end_behind_lock;
    "network swallows past the lease", 2, Around, PG, network::swallow;
    "writer's commit unanswered", 5, Around, PG, network::lose_commit;
    "backend terminated", 8, Around, PG, server::terminate_backend;
    "backend SIGSTOP, connection reset", 5, Around, PG, server::freeze_backend;
    "pooler SIGKILL", 8, Around, POOLER, server::kill_pooler;
    "retry", 5, Around, ALL, operator::retry;
    "discard", 4, Around, ALL, operator::discard;
    "mark dead", 3, Around, ALL, operator::mark_dead;
    "prune", 4, Around, ALL, operator::prune;
    "pause and resume", 3, Around, ALL, operator::pause;
    "filter change", 2, Around, ALL, operator::change_filter;
    "database immediate stop", 10, Inside, PG, server::stop_immediate;
    "database SIGKILL", 6, Inside, PG, server::kill;
    "database clock step", 2, Inside, PG, server::step_clock;
    "disk full", 3, Inside, PG, server::fill_disk;
    "disk full", 4, Inside, SQLITE, sqlite::fill_disk;
    "backup copied", 2, Inside, PG, server::copy;
    "backup copied", 3, Inside, SQLITE, sqlite::copy;
    "restore", 2, Inside, PG, server::restore;
    "restore", 2, Inside, SQLITE, sqlite::restore;
    "table rewritten", 14, Inside, PG, tables::rewrite;
    "table locked by an index build", 12, Inside, PG, tables::index;
    "snapshot held", 4, Inside, PG, tables::hold_snapshot;
    "write lock held", 8, Inside, SQLITE, sqlite::hold_lock;
    "file vacuumed", 6, Inside, SQLITE, sqlite::vacuum;
    "journal checkpointed", 6, Inside, SQLITE, sqlite::checkpoint;
};

/// Returns each kind of a group once, the last one first. A restore comes after a copy.
pub(crate) fn each<'a>(kinds: &[&'a Kind], group: Group, random: &mut SmallRng) -> Vec<&'a Kind> {
    let mut each: Vec<&Kind> = kinds.iter().copied().filter(|kind| kind.group == group).collect();
    each.shuffle(random);
    let find = |name: &str| each.iter().position(|kind| kind.name == name);
    if let (Some(restore), Some(copy)) = (find("restore"), find("backup copied"))
        && copy < restore
    {
        each.swap(copy, restore);
    }
    each
}

/// Draws a kind of a group by weight; `None` if there is none.
pub(crate) fn draw<'a>(kinds: &[&'a Kind], group: Group, random: &mut SmallRng) -> Option<&'a Kind> {
    let fitting = || kinds.iter().filter(|kind| kind.group == group);
    let all: u32 = fitting().map(|kind| kind.weight).sum();
    if all == 0 {
        return None;
    }
    let mut drawn = random.random_range(0..all);
    fitting().copied().find(|kind| match drawn.checked_sub(kind.weight) {
        Some(left) => {
            drawn = left;
            false
        }
        None => true,
    })
}

/// Chooses one element.
fn choose<'a, T>(all: &'a [T], random: &mut SmallRng) -> &'a T {
    &all[random.random_range(0..all.len())]
}

/// Draws a duration.
fn millis(random: &mut SmallRng, range: std::ops::Range<u64>) -> std::time::Duration {
    std::time::Duration::from_millis(random.random_range(range))
}
