//! `postbox run`: the service, until a signal.

use std::time::Instant;

use postbox_server::{Config, Service};
use tracing::warn;

use crate::failure::Failure;
use crate::signals::stopped;
use crate::telemetry;

pub(super) async fn run(config: Config) -> Result<(), Failure> {
    // Registered before the start: the default action of a signal during it would kill the process.
    let stopped = stopped();
    tokio::pin!(stopped);
    allow_files(config.server.connections);
    let stop_timeout = config.server.stop_timeout;
    let service = tokio::select! {
        started = Service::start(config) => started?,
        () = &mut stopped => return Ok(()),
    };
    let stop = service.stop_handle();
    let ended = service.wait();
    tokio::pin!(ended);
    tokio::select! {
        ended = &mut ended => return Ok(ended?),
        () = &mut stopped => stop.cancel(),
    }
    let stopping = Instant::now();
    let ended = ended.await;
    // Exporting spans may use the rest of the deadline.
    telemetry::finish(stop_timeout.saturating_sub(stopping.elapsed())).await;
    Ok(ended?)
}

/// Open files beside the connections of the server. A pool takes ten, a subscription's sink one for
/// each of its 16 calls, a source a few: room for ten subscriptions. Only a warning depends on it.
const OTHER_FILES: u64 = 256;

/// Allows this process as many open files as it may have, and warns if these are too few.
fn allow_files(connections: usize) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    let before = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: before.maximum, ..before };
    let now = if setrlimit(Resource::Nofile, raised).is_ok() { raised } else { before };
    let needed = OTHER_FILES.saturating_add(connections.try_into().unwrap_or(u64::MAX));
    if let Some(files) = now.current.filter(|files| *files < needed) {
        let cure = "raise the limit of open files (ulimit -n, LimitNOFILE=), or lower server.connections";
        warn!(code = "few_files", files, connections, needed, cure, "fewer open files allowed than needed");
    }
}
