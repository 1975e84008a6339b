//! `postbox run`: the service, until a signal.

use std::time::Instant;

use postbox_server::{Config, Service};

use crate::failure::Failure;
use crate::signals::stopped;
use crate::telemetry;

pub(super) async fn run(config: Config) -> Result<(), Failure> {
    // Registered before the start: the default action of a signal during it would kill the process.
    let stopped = stopped();
    tokio::pin!(stopped);
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
