//! Which deliveries may go out next, depending on the subscription's order and on what order the
//! sink can keep.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

use postbox_core::{Delivery, Disposition, Key, Random};

use super::verdicts::Verdicts;

/// The order in which one batch goes out.
pub(super) enum DispatchQueue {
    /// Key order through a sink that keeps it within a call: one large call after the other.
    Batched {
        next: usize,
        out: bool,
        /// Keys with an event in this batch that holds back later ones.
        held: HashSet<Key>,
    },
    /// No order: everything may go out at once.
    Unordered { next: usize },
    /// Key order through a sink that does not keep it: one event per key at a time.
    PerKey {
        /// Events with no unfinished earlier event of their key. Oldest first, so that a stop
        /// leaves few gaps.
        ready: BinaryHeap<Reverse<usize>>,
        /// For each event, the next one of the same key.
        behind: Vec<Option<u32>>,
    },
    /// A single event, to see whether the destination is back.
    Probe { place: Option<usize> },
}

impl DispatchQueue {
    /// Creates the queue of all deliveries that wait.
    pub(super) fn new(deliveries: &[Delivery], verdicts: &Verdicts, by_key: bool, prefix: bool) -> Self {
        if !by_key {
            return Self::Unordered { next: 0 };
        }
        if prefix {
            return Self::Batched { next: 0, out: false, held: HashSet::new() };
        }
        let mut ready = BinaryHeap::new();
        let mut behind = vec![None; deliveries.len()];
        let mut last_of_key: HashMap<&Key, usize> = HashMap::with_capacity(deliveries.len());
        for (index, delivery) in deliveries.iter().enumerate().filter(|(index, _)| verdicts.is_waiting(*index)) {
            let before = delivery.event.key.as_ref().and_then(|key| last_of_key.insert(key, index));
            match before {
                Some(before) => behind[before] = u32::try_from(index).ok(),
                None => ready.push(Reverse(index)),
            }
        }
        Self::PerKey { ready, behind }
    }

    /// Chooses a random event that has no earlier one of its key.
    pub(super) fn probe(deliveries: &[Delivery], verdicts: &Verdicts, by_key: bool, random: &dyn Random) -> Self {
        let mut keys = HashSet::new();
        let mut is_first = |delivery: &'_ Delivery| match &delivery.event.key {
            Some(key) if by_key => keys.insert(key.clone()),
            _ => true,
        };
        let waiting = deliveries.iter().enumerate().filter(|(index, _)| verdicts.is_waiting(*index));
        let heads: Vec<usize> = waiting.filter(|(_, delivery)| is_first(delivery)).map(|(index, _)| index).collect();
        Self::Probe { place: heads.get((random.unit() * heads.len() as f64) as usize).copied() }
    }

    /// Returns whether anything might go out now. `take` may still find that all of it is held.
    pub(super) fn has_more(&self, count: usize) -> bool {
        match self {
            Self::Batched { next, out, .. } => !out && *next < count,
            Self::Unordered { next } => *next < count,
            Self::PerKey { ready, .. } => !ready.is_empty(),
            Self::Probe { place } => place.is_some(),
        }
    }

    /// Returns the places of the next call, at most `max`; empty if nothing may go out now.
    pub(super) fn take(&mut self, max: usize, deliveries: &[Delivery], verdicts: &mut Verdicts) -> Vec<usize> {
        match self {
            Self::Batched { out: true, .. } => Vec::new(),
            Self::Batched { next, out, held } => {
                let mut chunk = Vec::with_capacity(max.min(deliveries.len() - *next));
                while *next < deliveries.len() && chunk.len() < max {
                    let index = *next;
                    *next += 1;
                    if !verdicts.is_waiting(index) {
                        continue;
                    }
                    // On the happy path nothing is held, so no key is hashed.
                    if !held.is_empty() && deliveries[index].event.key.as_ref().is_some_and(|key| held.contains(key)) {
                        verdicts.defer(index, Disposition::Block);
                        continue;
                    }
                    chunk.push(index);
                }
                *out = !chunk.is_empty();
                chunk
            }
            Self::Unordered { next } => {
                let mut chunk = Vec::with_capacity(max.min(deliveries.len() - *next));
                while *next < deliveries.len() && chunk.len() < max {
                    if verdicts.is_waiting(*next) {
                        chunk.push(*next);
                    }
                    *next += 1;
                }
                chunk
            }
            Self::Probe { place } => place.take().into_iter().collect(),
            Self::PerKey { ready, .. } => std::iter::from_fn(|| ready.pop()).map(|Reverse(at)| at).take(max).collect(),
        }
    }

    /// Notes that the call that took these places has ended.
    pub(super) fn returned(&mut self) {
        if let Self::Batched { out, .. } = self {
            *out = false;
        }
    }

    /// Marks an event as done (delivered, or dead without halt). The next of its key may go.
    pub(super) fn done(&mut self, index: usize) {
        if let Self::PerKey { ready, behind } = self
            && let Some(next) = behind[index].take()
        {
            ready.push(Reverse(next as usize));
        }
    }

    /// Marks an event as holding its key. Later events of the key in this batch are blocked behind
    /// it.
    pub(super) fn hold(&mut self, index: usize, deliveries: &[Delivery], verdicts: &mut Verdicts) {
        match self {
            Self::Batched { held, .. } => {
                if let Some(key) = &deliveries[index].event.key {
                    held.insert(key.clone());
                }
            }
            Self::Unordered { .. } | Self::Probe { .. } => {}
            Self::PerKey { behind, .. } => {
                let mut at = behind[index].take();
                while let Some(later) = at {
                    let later = later as usize;
                    verdicts.defer(later, Disposition::Block);
                    at = behind[later].take();
                }
            }
        }
    }
}
