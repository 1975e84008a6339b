//! The `postbox` binary: parses arguments, runs one command, and turns a typed error into one line
//! and an exit code.
//!
//! Exit codes: 0 done · 1 failed · 2 wrong usage or configuration.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod args;
mod commands;
mod context;
mod failure;
mod files;
#[cfg(test)]
mod golden;
mod layout;
mod logging;
mod output;
mod selectors;
mod signals;
mod stores;
mod telemetry;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use crate::args::Args;
use crate::failure::Failure;

/// Events are allocated in one thread and freed in another, where glibc's allocator waits for
/// locks. `docs/broker-figures.md` has both measured.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Longest wait at the end for system calls that block: a pipe that nobody reads, a file system or
/// a name server that does not answer.
const BLOCKED_MAX: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    // Before anything else: with no provider (or two), the first TLS handshake would panic. An
    // error means that one is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut args = Args::parse();
    if let Err(failure) = args.global.or_environment(std::env::var_os) {
        return failure.report();
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Failure::failed(format!("cannot start the runtime: {error}")).report(),
    };
    let ended = runtime.block_on(commands::run(args));
    runtime.block_on(telemetry::finish(Duration::MAX));
    logging::flush();
    let code = match output::finish(ended) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    };
    runtime.shutdown_timeout(BLOCKED_MAX);
    code
}
