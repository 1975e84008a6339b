//! The signals that stop the program.

use std::io::Result;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Resolves at the first SIGTERM, SIGINT, or SIGHUP of a closed terminal. The handlers are
/// installed by this call, not when the future is first polled.
pub(crate) fn stopped() -> impl Future<Output = ()> {
    let signals = signals();
    async move {
        match signals {
            Ok((mut term, mut interrupt, mut hangup)) => {
                let signal = tokio::select! {
                    _ = term.recv() => "SIGTERM",
                    _ = interrupt.recv() => "SIGINT",
                    Some(()) = async { hangup.as_mut()?.recv().await } => "SIGHUP",
                };
                // Nobody who closes a terminal expects it to end a service, with exit code 0.
                tracing::info!(signal, "asked to stop");
            }
            Err(error) => {
                tracing::error!(%error, "signals cannot be caught; only SIGKILL ends this program");
                std::future::pending().await
            }
        }
    }
}

fn signals() -> Result<(Signal, Signal, Option<Signal>)> {
    // A handler would undo `nohup`, which ignores SIGHUP. Where that cannot be seen, SIGHUP keeps
    // its default.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let hangup = heeds_hangup(&status).then(|| signal(SignalKind::hangup())).transpose()?;
    Ok((signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?, hangup))
}

/// Whether a process of this status does not ignore SIGHUP, the first bit of the mask.
fn heeds_hangup(status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 0)
}
