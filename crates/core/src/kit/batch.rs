//! How many events a batch takes, and to which lane an event belongs.

use crate::batch::BatchLimit;

/// The remaining room in a batch. The first event always fits, however large.
#[derive(Debug)]
pub struct BatchLimiter {
    events: usize,
    payload_bytes: usize,
    is_empty: bool,
}

impl BatchLimiter {
    /// Creates the limiter of an empty batch.
    pub fn new(limit: BatchLimit) -> Self {
        Self { events: limit.events.max(1), payload_bytes: limit.payload_bytes, is_empty: true }
    }

    /// Returns whether no further event fits, however small.
    pub fn is_full(&self) -> bool {
        self.events == 0
    }

    /// Takes an event with this many payload bytes if it fits.
    pub fn take(&mut self, payload_bytes: usize) -> bool {
        let fits = self.events > 0 && payload_bytes <= self.payload_bytes;
        if !fits && !self.is_empty {
            return false;
        }
        self.events -= 1;
        self.payload_bytes = self.payload_bytes.saturating_sub(payload_bytes);
        self.is_empty = false;
        true
    }
}

/// Returns the lane of an event by its key, or by its id if it has none. FNV-1a, 64 bits: short,
/// stable, and it spreads short keys well. For stores that compute it in Rust.
pub fn lane_of(key_or_id: &[u8], lanes: u16) -> u16 {
    let add = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = key_or_id.iter().fold(0xcbf2_9ce4_8422_2325, add);
    u16::try_from(hash % u64::from(lanes.max(1))).expect("a remainder of a u16 fits one")
}
