//! Locking without poison.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Nothing in this crate panics while it holds a lock, so a poisoned one guards a whole state.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
