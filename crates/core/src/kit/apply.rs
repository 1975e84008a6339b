//! Handlers that run in the transaction that settles their events.

use std::any::Any;
use std::collections::HashSet;

use crate::apply::Decide;
use crate::batch::{Delivery, Disposition, Entry};
use crate::names::Key;
use crate::outcome::Outcome;

/// Keys whose handler failed in this call. Later deliveries of them must not run.
#[derive(Debug)]
pub struct BlockedKeys<'a> {
    hold_keys: bool,
    failed: HashSet<&'a Key>,
}

impl<'a> BlockedKeys<'a> {
    /// Creates an empty set. `hold_keys` is the settlement's.
    pub fn new(hold_keys: bool) -> Self {
        Self { hold_keys, failed: HashSet::new() }
    }

    /// Returns whether a delivery must not run.
    pub fn blocks(&self, delivery: &Delivery) -> bool {
        delivery.event.key.as_ref().is_some_and(|key| self.failed.contains(key))
    }

    /// Notes the outcome of a delivery that ran.
    pub fn note(&mut self, delivery: &'a Delivery, outcome: &Outcome) {
        if self.hold_keys && !outcome.is_delivered() {
            self.failed.extend(delivery.event.key.as_ref());
        }
    }
}

/// Returns the entries of deliveries whose handlers ran (`Some`) or were blocked (`None`).
///
/// In a stream batch, delivered ones get no entry.
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

/// Returns the text of a panic of a handler or a sink, if it has one.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("the handler panicked")
}
