//! The counters of a receiver.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of one receiver since it was built.
        #[derive(Debug, Default)]
        pub struct ReceiverMetrics {
            $(pub(crate) $name: AtomicU64,)*
        }

        /// All counters at one moment.
        #[derive(Debug, Clone, PartialEq, Eq, Default)]
        #[non_exhaustive]
        pub struct ReceiverSnapshot {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl ReceiverMetrics {
            /// Returns all counters. Each is exact; together they are as close to one moment as
            /// relaxed loads are.
            pub fn snapshot(&self) -> ReceiverSnapshot {
                ReceiverSnapshot { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Messages stored for the first time, poison included.
    accepted,
    /// Messages that had been stored before.
    duplicates,
    /// Messages refused because their id was known with another digest.
    conflicts,
    /// Messages from which the decoder made no event.
    ignored,
    /// Messages that could not be decoded or stored as they were, and are kept as poison.
    poison,
    /// Messages that could not even be kept as poison, and were rejected.
    rejected,
    /// Messages given back to the source.
    returned,
    /// Messages refused at once because too many were being stored.
    busy,
    /// Messages that the store failed to store. Invalid ones, which it refuses, do not count.
    store_errors,
    /// Calls to the source that failed.
    source_errors,
}

impl ReceiverMetrics {
    pub(crate) fn add(&self, counter: &AtomicU64, count: usize) {
        if count > 0 {
            counter.fetch_add(count as u64, Ordering::Relaxed);
        }
    }
}
