//! The start of a service whose store is not there yet.

use std::time::Duration;

use postbox_core::{Clock, Error, Result};
use tracing::warn;

/// First and longest wait between two tries.
const WAIT_MIN: Duration = Duration::from_millis(500);
const WAIT_MAX: Duration = Duration::from_secs(2);
/// So many tries that fail in the same way are one line in the log: two minutes.
const TRIES_PER_LINE: u32 = 60;

/// Repeats a call of the store while it fails in a way that is waited for; one line in the log says
/// so now and then. What it gives is the first other answer. Cancel-safe if the call is.
pub async fn wait_for_store<T, F: Future<Output = Result<T>>>(
    clock: &dyn Clock,
    is_waited_for: impl Fn(&Error) -> bool,
    call: impl Fn() -> F,
) -> Result<T> {
    let (mut wait, mut tries, mut last) = (WAIT_MIN, 0, String::new());
    loop {
        let error = match call().await {
            Err(error) if is_waited_for(&error) => error,
            answer => return answer,
        };
        if error.code() != last || tries % TRIES_PER_LINE == 0 {
            warn!(code = error.code(), why = error.message(), "store away");
            (tries, last) = (0, error.code().to_owned());
        }
        tries += 1;
        clock.sleep(wait).await;
        wait = (wait * 2).min(WAIT_MAX);
    }
}
