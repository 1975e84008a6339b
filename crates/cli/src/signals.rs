//! The signals that stop the program.

use tokio::signal::unix::{SignalKind, signal};

/// Resolves at the first SIGTERM or SIGINT. The handlers are installed by this call, not when the
/// future is first polled.
pub(crate) fn stopped() -> impl Future<Output = ()> {
    let signals = signal(SignalKind::terminate()).and_then(|term| Ok((term, signal(SignalKind::interrupt())?)));
    async move {
        match signals {
            Ok((mut term, mut interrupt)) => {
                tokio::select! {
                    _ = term.recv() => {}
                    _ = interrupt.recv() => {}
                }
            }
            Err(error) => {
                tracing::error!(%error, "signals cannot be caught; only SIGKILL ends this program");
                std::future::pending().await
            }
        }
    }
}
