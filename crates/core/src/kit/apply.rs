//! Handlers that run in the transaction that settles their events.

use std::any::Any;
use std::collections::HashSet;

use crate::apply::Decide;
use crate::batch::{Delivery, Disposition, Entry};
use crate::names::Key;
use crate::outcome::Outcome;

/// Keys of which a handler failed in this call: later deliveries of them are not run.
#[derive(Debug)]
pub struct BlockedKeys<'a> {
    hold_keys: bool,
    failed: HashSet<&'a Key>,
}

impl<'a> BlockedKeys<'a> {
    /// None yet. `hold_keys` is the settlement's.
    pub fn new(hold_keys: bool) -> Self {
        Self { hold_keys, failed: HashSet::new() }
    }

    /// Whether a delivery must not be run.
    pub fn blocks(&self, delivery: &Delivery) -> bool {
        delivery.event.key.as_ref().is_some_and(|key| self.failed.contains(key))
    }

    /// Notes what became of a delivery that was run.
    pub fn note(&mut self, delivery: &'a Delivery, outcome: &Outcome) {
        if self.hold_keys && !outcome.is_delivered() {
            self.failed.extend(delivery.event.key.as_ref());
        }
    }
}

/// The entries of deliveries whose handlers were run (`Some`) or blocked (`None`).
///
/// In a stream, what has no entry is delivered.
pub fn entries_of<'a>(
    deliveries: &[&'a Delivery],
    outcomes: &[Option<Outcome>],
    is_stream: bool,
    decide: &Decide<'_>,
) -> Vec<Entry<'a>> {
    let entry = |(delivery, outcome): (&&'a Delivery, &Option<Outcome>)| {
        let disposition = outcome.as_ref().map_or(Disposition::Block, |outcome| decide(delivery, outcome));
        Entry { delivery, disposition }
    };
    let entries = deliveries.iter().zip(outcomes).map(entry);
    entries.filter(|entry| !is_stream || entry.disposition != Disposition::Delivered).collect()
}

/// What a panic of a handler or a sink said, if it said it in text.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("the handler panicked")
}
